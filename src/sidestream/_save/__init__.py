"""Saves: a state dict is planned, staged, written and committed."""
