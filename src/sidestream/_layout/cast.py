"""The conversions between dtypes that torch makes and that keep the kind of number."""

from __future__ import annotations

from functools import lru_cache

import torch

from .._runtime.torch_probes import dtype_from_name

__all__ = ["castable"]


@lru_cache(maxsize=1024)
def castable(saved: str, wanted: str) -> bool:
    """Return whether elements of dtype ``saved`` can be converted to ``wanted``. A complex number is not converted to a
    real one, nor a float to an integer."""
    source, target = dtype_from_name(saved), dtype_from_name(wanted)
    if not torch.can_cast(source, target):
        return False
    try:
        torch.empty(1, dtype=target).copy_(
            torch.empty(1, dtype=source)
        )  # can_cast is also true for conversions without a kernel
    except (RuntimeError, TypeError):
        return False
    return True
