"""Tensors that consist of others: described, compared with those of a target, and made of parts that were read."""
