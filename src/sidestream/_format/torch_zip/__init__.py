"""Files of ``torch.save``, and DCP's items, which are such files."""
