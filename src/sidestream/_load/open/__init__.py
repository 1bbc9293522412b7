"""Opening checkpoints: their markers, their manifests, and memory maps of their files."""
