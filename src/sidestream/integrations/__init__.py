"""Frameworks whose programs save and load with sidestream, one module for each: ``sidestream.integrations.lightning``.

This package imports no framework. A module imports its own, raises ``MissingExtraError`` without it, and
``UnsupportedError`` if the names that it relies on are not those of the releases that were tested.
"""
