"""Plans that are used again as long as a state dict looks the same."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable
from typing import Any, TypeVar

import torch

from .._runtime.torch_probes import lazy_bits

__all__ = ["PlanCache", "fingerprint"]

T = TypeVar("T")
_KEPT = 4


def fingerprint(tensors: Iterable[torch.Tensor]) -> Generator[None, None, tuple[Hashable, ...]]:
    """What a layout depends on: dtype, shape, strides, storage and place in it of every tensor.

    A tensor that was replaced, resized or moved has another one, so a plan is never applied to what it was not made
    for (peers keyed their buffers by the name or the object, and wrote stale values). Which of them share a storage is
    told by number: storages that were freed since they were copied have one address, 0.
    """
    seen: list[Hashable] = []  # flat: a tuple per tensor would be one more object for the garbage collector to walk
    storages: dict[int, int] = {}
    for tensor in tensors:
        yield
        if tensor.layout is not torch.strided:
            seen.append(tensor.layout)
            continue
        storage = tensor.untyped_storage()
        seen += (tensor.dtype, tensor.data_ptr(), tensor.storage_offset(), storage.nbytes(), tensor.device)
        seen += (storages.setdefault(storage._cdata, len(storages)), lazy_bits(tensor), None)
        seen += tensor.shape
        seen += tensor.stride()
    return tuple(seen)


class PlanCache:
    """The last few plans, by fingerprint. They hold no tensors. Safe for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self.made = 0
        """How many plans had to be made."""

    def get(self, key: Hashable, make: Callable[[], Generator[None, None, T]]) -> Generator[None, None, T]:
        """The plan for ``key``, made in steps by ``make`` unless it is known."""
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                kept: T = self._plans[key]
                return kept
        plan = yield from make()
        with self._lock:
            self.made += 1
            self._plans[key] = plan
            while len(self._plans) > _KEPT:
                self._plans.popitem(last=False)
        return plan
