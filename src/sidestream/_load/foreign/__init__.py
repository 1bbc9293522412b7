"""Checkpoints and files of other writers."""
