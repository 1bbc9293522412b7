"""Saves with torch's ``SavePlanner``."""
