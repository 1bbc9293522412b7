"""Weights of servers: ``Live``, which is swapped while it is read, and what follows a run."""
