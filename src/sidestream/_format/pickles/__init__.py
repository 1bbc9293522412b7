"""Pickles as data: opcodes written and read without importing what they name."""
