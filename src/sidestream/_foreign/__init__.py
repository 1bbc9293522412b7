"""Checkpoints and files of writers other than sidestream."""
