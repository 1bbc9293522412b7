"""Files of ``torch.save``, and the items of DCP, which are such files."""
