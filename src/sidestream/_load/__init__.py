"""Loads: a checkpoint is opened, matched with the target, read, verified and applied."""
