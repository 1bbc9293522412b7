"""A checkpoint as data: framing, metadata, manifest, checksums. Pure: no I/O, no torch."""
