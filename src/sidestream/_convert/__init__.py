"""From one format to another: DCP, ``torch.save`` and safetensors, piece by piece under a memory budget."""
