"""Headers of safetensors files."""
