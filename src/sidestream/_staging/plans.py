"""Cached plans, which are used again for a state dict with the same layout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch

from .._runtime.pauses import pause_point
from .._runtime.torch_probes import guard_of, lazy_bits

T = TypeVar("T")
_KEPT = 4
_SOME = 64  # tensors: some 100 us of work, and they stay in the processor's cache from one column to the next
_STORAGE, _ADDRESS = torch.Tensor.untyped_storage, torch.Tensor.data_ptr
_OFFSET: Callable[[torch.Tensor], Any] = torch.Tensor.storage_offset
_NESTED = attrgetter("is_nested")
_BYTES, _BEGIN, _KEY = torch.UntypedStorage.nbytes, torch.UntypedStorage.data_ptr, attrgetter("_cdata")


def fingerprint(tensors: Iterable[torch.Tensor]) -> tuple[Hashable, ...]:
    """Return what a layout depends on: dtype, shape, strides, storage, and place in it of every tensor.

    A tensor that was replaced, resized or moved changes the fingerprint, so a plan is applied only to the tensors that
    it was made for. (Other libraries keyed their buffers by name or by object, and wrote stale values.) Storages are
    numbered, because the address of a storage that was freed after it was copied is always 0.
    """
    seen: list[Hashable] = []  # flat, because a tuple per tensor would be one more object for the garbage collector
    storages: dict[int, int] = {}
    for tensor in tensors:
        pause_point()
        if tensor.layout is not torch.strided or tensor.is_nested:
            seen.append(tensor.layout)
            continue
        storage = tensor.untyped_storage()
        seen += (tensor.dtype, tensor.data_ptr(), tensor.storage_offset(), storage.nbytes(), tensor.device)
        seen += (storages.setdefault(storage._cdata, len(storages)), lazy_bits(tensor), None)
        seen += tensor.shape
        seen += tensor.stride()
    return tuple(seen)


@dataclass(slots=True, eq=False)
class _QuickFingerprint:
    """The contents of a ``fingerprint`` in a form that takes 0.5 us per tensor to compare. Refers to no tensor.

    The tensor objects cannot be compared, because ``state_dict()`` makes new ones each time. Addresses alone are not
    enough: a tensor, its transpose, and its bytes under another dtype have the same address.
    """

    guards: list[Callable[[Sequence[torch.Tensor]], bool]] = field(default_factory=list)
    columns: list[tuple[list[int], ...]] = field(default_factory=list)
    count: int = 0
    numbered: bool = True
    """Whether storages are numbered. They need not be if each tensor has elements and a storage that begins where no
    other one does: no two tensors at the same addresses can then share a storage."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _QuickFingerprint | None:
        """Return the fingerprint of ``tensors``. None if they cannot be compared in this way."""
        quick, storages, begins = cls(count=len(tensors)), dict[int, int](), set[int]()
        for start in range(0, len(tensors), _SOME):
            some = tensors[start : start + _SOME]
            if any(tensor.layout is not torch.strided or tensor.is_nested for tensor in some):
                return None
            guard = guard_of(some)
            if guard is None:
                return None
            quick.guards.append(guard)
            quick.columns.append(_columns(some, start, storages))
            begins.update(map(_BEGIN, map(_STORAGE, some)))
            pause_point()
        if len(begins) == len(tensors) and all(0 not in addresses for addresses, *_ in quick.columns):
            quick.numbered, quick.columns = False, [(*columns, []) for *columns, _ in quick.columns]
        return quick

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether ``tensors`` have the same fingerprint as those of ``of``."""
        if len(tensors) != self.count:
            return False
        storages: dict[int, int] | None = {} if self.numbered else None
        for number, (guard, columns) in enumerate(zip(self.guards, self.columns, strict=True)):
            start = number * _SOME
            some = tensors[start : start + _SOME]
            # A comparison with a nested tensor would end the process: an exception of C++ leaves the guard.
            if any(map(_NESTED, some)) or not guard(some) or _columns(some, start, storages) != columns:
                return False
            pause_point()
        return True


def _columns(tensors: Sequence[torch.Tensor], start: int, storages: dict[int, int] | None) -> tuple[list[int], ...]:
    """Return four columns for ``tensors``: address, offset in the storage, bytes of the storage, and the number of the
    first tensor with this storage. ``start`` is the number of the first one of ``tensors``. Without ``storages``, the
    last column is empty."""
    held = list(map(_STORAGE, tensors))
    firsts: list[int] = []
    if storages is not None:
        firsts += map(storages.setdefault, map(_KEY, held), range(start, start + len(held)))
    return list(map(_ADDRESS, tensors)), list(map(_OFFSET, tensors)), list(map(_BYTES, held)), firsts


@dataclass(frozen=True, slots=True, eq=False)
class _CachedPlan(Generic[T]):
    key: Hashable
    quick: _QuickFingerprint | None
    plan: T


class PlanCache:
    """The last few plans, by key and by the fingerprint of the tensors. They refer to no tensor. May be used from any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_CachedPlan[Any]] = []  # the newest first
        self.made: int = 0
        """How many plans had to be made."""

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the plan for ``key``. If it is not cached, ``make`` makes it."""
        # A copy, and without the lock: ``make`` may take long, and must not hold up other plans. Two threads that miss
        # at once both make the plan.
        for kept in list(self._kept):
            if kept.quick is None and kept.key == key:
                known: T = self._used(kept)
                return known
        return self._added(_CachedPlan(key, None, make()))

    def get_for(self, tensors: Sequence[torch.Tensor], key: Hashable, make: Callable[[], T]) -> T:
        """Return the plan for ``key`` and tensors with the fingerprint of ``tensors``. If it is not cached, ``make``
        makes it."""
        for kept in list(self._kept):
            if kept.quick is not None and kept.key == key and kept.quick.matches(tensors):
                known: T = self._used(kept)
                return known
        quick = _QuickFingerprint.of(tensors)
        if quick is None:
            return self.get((key, fingerprint(tensors)), make)
        made = make()
        return self._added(_CachedPlan(key, quick, made))

    def _used(self, kept: _CachedPlan[T]) -> T:
        with self._lock:
            if kept in self._kept:
                self._kept.remove(kept)
                self._kept.insert(0, kept)
        return kept.plan

    def _added(self, kept: _CachedPlan[T]) -> T:
        with self._lock:
            self.made += 1
            self._kept = [kept, *self._kept[: _KEPT - 1]]
        return kept.plan
