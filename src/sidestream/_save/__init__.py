"""Saves: planning, staging, writing and committing a state dict."""
