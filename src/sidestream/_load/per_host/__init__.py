"""Reads that the ranks of one host share."""
