"""Which dtypes torch converts into which, without losing a kind of number."""

from __future__ import annotations

from functools import lru_cache

import torch

from .._runtime.torch_probes import dtype_from_name

__all__ = ["castable"]


@lru_cache(maxsize=1024)
def castable(saved: str, wanted: str) -> bool:
    """Whether elements of dtype ``saved`` become ``wanted``: never a complex number a real one, a float an integer."""
    source, target = dtype_from_name(saved), dtype_from_name(wanted)
    if not torch.can_cast(source, target):
        return False
    try:
        torch.empty(1, dtype=target).copy_(torch.empty(1, dtype=source))  # can_cast also promises what has no kernel
    except (RuntimeError, TypeError):
        return False
    return True
