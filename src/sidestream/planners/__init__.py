"""Planners of torch (``SavePlanner``, ``LoadPlanner``): what they plan is written and read here."""
