"""Tensors that consist of others: their entries, the comparison with a target, and their construction from parts."""
