"""What each of several ranks saves."""
