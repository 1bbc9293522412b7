"""Conversions between DCP, ``torch.save`` and safetensors, and copies, in pieces within a memory budget."""
