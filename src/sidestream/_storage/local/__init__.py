"""Directories of the local file system."""
