"""Pickles as data: opcodes are written and read without an import of what they name."""
