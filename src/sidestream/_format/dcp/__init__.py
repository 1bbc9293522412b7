"""DCP's own metadata: ``.metadata`` written and read."""
