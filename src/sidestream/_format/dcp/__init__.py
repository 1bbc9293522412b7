"""The ``.metadata`` file of DCP: writers and readers."""
