"""The format of a checkpoint: frames, metadata, manifest, checksums. The room has no I/O and imports no torch."""
