"""Loads: opening a checkpoint, matching it with the target, reading, verifying and applying it."""
