"""The plans of several ranks that save together."""
