"""Loads with torch's ``LoadPlanner``."""
