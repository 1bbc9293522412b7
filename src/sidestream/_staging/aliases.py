"""Aliases of small tensors that are used again by the next stage.

Torch releases the GIL when it destroys a tensor. Beside a thread that computes, each release may hand the GIL to that
thread for a switch interval (5 ms): dropping 10,000 aliases took 1 to 2 s. Binding an alias to other memory does not
release the GIL.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
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
_SMALL_BYTES = 64 << 10
"""The largest storage whose alias is kept. An alias may be the last owner of its memory, which is then freed while the
GIL is held: 16 MiB for ``_SOME`` aliases at most."""
_ALIAS = attrgetter("data")
_TAKE: Callable[[deque[torch.Tensor]], torch.Tensor] = deque.pop
_BIND: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_STORAGE, _BYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_has_names: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "has_names", lambda _: False)
_references: Callable[[object], int] = sys.getrefcount
_ALONE = next(map(_references, [object()]))  # the count of an object to which only one list refers
_counts_references: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
_unused: deque[torch.Tensor] = deque()
"""Aliases without memory, to which nothing else refers."""


def aliases_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Return an alias of each of ``tensors``, which are plain: a tensor on the same memory, without a gradient. Memory
    that the original is bound to later does not change the alias. Also returns True if all are known to be dense."""
    if not _unused:
        return list(map(_ALIAS, tensors)), False
    count = min(len(_unused), len(tensors))
    try:
        found = list(map(_TAKE, repeat(_unused, count)))
        deque(map(_BIND, found, tensors), maxlen=0)
    except (IndexError, RuntimeError):
        # Another thread has taken them, or one of the tensors is sparse, or of another kind to which they cannot be
        # bound.
        return list(map(_ALIAS, tensors)), False
    found += map(_ALIAS, tensors[count:])
    return found, count == len(tensors)


def give_back_aliases(aliases: list[torch.Tensor]) -> Steps[None]:
    """Release the memory of ``aliases``, which are plain tensors in host memory, and keep the small ones to which
    nothing else refers for later stages. The list is empty then, unless its aliases are few or no more are kept."""
    if len(aliases) < _FEWEST or not _counts_references:
        return
    while aliases and len(_unused) < _MOST:
        some = [aliases.pop() for _ in range(min(_SOME, len(aliases)))]
        if set(map(type, some)) == {torch.Tensor} and set(map(_references, some)) == {_ALONE}:
            _keep(some)
        yield


def _keep(aliases: list[torch.Tensor]) -> None:
    """Keep ``aliases`` without their memory."""
    if any(map(attributes_of, aliases)) or any(map(_has_names, aliases)):
        return
    try:
        if max(map(_BYTES, map(_STORAGE, aliases))) > _SMALL_BYTES:
            return
        deque(map(_BIND, aliases, repeat(_nothing())), maxlen=0)
    except (NotImplementedError, RuntimeError):  # of another kind, sparse for example
        return
    _unused.extend(aliases)


@cache
def _nothing() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, device="cpu")
