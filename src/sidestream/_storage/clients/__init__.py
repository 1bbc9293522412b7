"""Clients of object stores and fsspec file systems."""
