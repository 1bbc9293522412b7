"""Manifests of checkpoints, and their files as memory maps."""
