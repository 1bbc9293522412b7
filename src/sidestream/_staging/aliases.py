"""Aliases of tensors that are used again by the next stage.

Torch releases the GIL when it destroys a tensor. Beside a thread that computes, each of these moments may hand the GIL
to that thread for a switch interval (5 ms): dropping 10,000 aliases took 1 to 2 s. To bind an alias to other memory
releases nothing.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection
from functools import cache
from itertools import repeat
from operator import attrgetter

import torch

from .._runtime.steps import Steps
from .._runtime.torch_probes import attributes_of

__all__ = ["aliases_of", "give_back_aliases"]

_MOST = 1 << 14
_FEWEST = 256  # fewer are dropped in a millisecond or two
_SOME = 256
_ALIAS = attrgetter("data")
_TAKE: Callable[[deque[torch.Tensor]], torch.Tensor] = deque.pop
_BIND: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_references: Callable[[object], int] = sys.getrefcount
_ALONE = next(map(_references, [object()]))  # what it counts for an object that one list refers to
_counts_references: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
_unused: deque[torch.Tensor] = deque()
"""Aliases without memory, to which nothing else refers."""


def aliases_of(tensors: Collection[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Return an alias of each of ``tensors``, which are plain: a tensor on the same memory, without a gradient. Memory
    that the original is bound to later does not change the alias. Also returns True if all are known to be dense."""
    if len(_unused) >= len(tensors):
        try:
            found = list(map(_TAKE, repeat(_unused, len(tensors))))
            deque(map(_BIND, found, tensors), maxlen=0)
            return found, True
        except (IndexError, RuntimeError):
            """Another thread has taken them, or one of the tensors is sparse, or of another kind that they cannot refer
            to."""
    return list(map(_ALIAS, tensors)), False


def give_back_aliases(aliases: list[torch.Tensor]) -> Steps[None]:
    """Release the memory of ``aliases``, which are plain tensors in host memory, and empty the list. Those to which
    nothing else refers are kept for later stages."""
    if len(aliases) < _FEWEST or not _counts_references:
        return
    while aliases and len(_unused) < _MOST:
        some = [aliases.pop() for _ in range(min(_SOME, len(aliases)))]
        if set(map(type, some)) == {torch.Tensor} and set(map(_references, some)) == {_ALONE}:
            _keep(some)
        yield


def _keep(aliases: list[torch.Tensor]) -> None:
    """Keep ``aliases`` without their memory."""
    if any(map(attributes_of, aliases)):
        return
    try:
        deque(map(_BIND, aliases, repeat(_nothing())), maxlen=0)
    except RuntimeError:  # of another kind, sparse for example
        return
    _unused.extend(aliases)


@cache
def _nothing() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu")
