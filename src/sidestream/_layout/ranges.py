"""Boxes of tensors, and tensors that are read directly into their memory.

Nearly all tensors of a load have plain memory of the same dtype and shape, and are read directly into it. The work for
one of them is described by a tuple of numbers, strings and bytes, and not by records that refer to each other. 10,000
tensors of 1 KiB are loaded in a fifth of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, lt
from typing import TypeAlias

import torch

from .._format.records import Row
from .._runtime.pauses import chunked, pause_point
from .._runtime.torch_probes import PLAIN_TENSORS, dtype_name, has_shards, on_host_as_is


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a tensor. Offsets and sizes count elements in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Return all of a tensor."""
        return Box((0,) * len(shape), shape)

    def overlap(self, other: Box) -> Box | None:
        """Return the box of the elements that are in both. None if there are none."""
        low = tuple(map(max, self.offsets, other.offsets))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        high = tuple(min(start + size, begin + nearby) for start, size, begin, nearby in ends)
        sizes = tuple(map(operator.sub, high, low))
        return None if any(size <= 0 for size in sizes) else Box(low, sizes)


def narrowed(tensor: torch.Tensor, start: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the box of ``tensor`` that begins at ``start``."""
    for dim, (first, size) in enumerate(zip(start, sizes, strict=True)):
        tensor = tensor if size == tensor.shape[dim] else tensor.narrow(dim, first, size)
    return tensor


Payload: TypeAlias = tuple[int, int, int, bytes, bytes | None, str]
"""Offset in the file, number of bytes, offset in the tensor, CRCs, digests, FQN."""

Candidate: TypeAlias = tuple[str, torch.Tensor, Row]
"""FQN, tensor of the target, row of the manifest."""

_FACTS = attrgetter("shape", "dtype", "itemsize")
_MANY = 64


@dataclass(frozen=True, slots=True)
class DirectReads:
    """Tensors by FQN, and the payloads that are read into them, by file. ``starts`` and ``ends`` are the addresses of
    the tensors."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    payloads: dict[str, list[Payload]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def add(self, found: Sequence[Candidate]) -> set[str]:
        """Add those tensors of ``found`` into whose memory the bytes of their rows can be read as they are. Returns
        their FQNs. Facts of tensors are taken of all of them at once, without a call from Python for each."""
        plain = [one for one in found if type(one[1]) in PLAIN_TENSORS]
        plain = list(compress(plain, on_host_as_is([tensor for _, tensor, _ in plain])))
        tensors = [tensor for _, tensor, _ in plain]
        facts = zip(
            plain,
            map(_FACTS, tensors),
            map(torch.Tensor.is_contiguous, tensors),
            map(torch.Tensor.data_ptr, tensors),
            map(torch.Tensor.storage_offset, tensors),
            map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)),
            strict=True,
        )
        added: set[str] = set()
        for (fqn, tensor, row), (shape, dtype, element_bytes), contiguous, start, skipped, held in facts:
            saved_dtype, saved_shape, nbytes, file, _, _, offset, crcs, digests, _ = row
            # Whatever is not ordinary is left to the general code. It finds out whether that is an error, and words it.
            if not (contiguous and start and nbytes) or shape != saved_shape or dtype_name(dtype) != saved_dtype:
                continue
            # A tensor may claim more than its storage holds, for example after ``resize_`` of the storage. Reading into
            # it would write behind the allocation.
            if skipped * element_bytes + nbytes > held or has_shards(tensor):
                continue
            added.add(fqn)
            self.tensors[fqn] = tensor
            self.starts.append(start)
            self.ends.append(start + nbytes)
            self.payloads.setdefault(file, []).append((offset, nbytes, 0, crcs, digests, fqn))
        return added

    def shared(self, others: Collection[tuple[int, int]]) -> set[str]:
        """Return the FQNs of tensors that share memory with each other, or with one of ``others``, which are start and
        end addresses."""
        starts = sorted([*self.starts, *(start for start, _ in others)])
        ends = sorted([*self.ends, *(end for _, end in others)])
        # Starts and ends are sorted separately. If no two extents overlap, they are in the same order, and the (n+1)-th
        # smallest start is never less than the n-th smallest end. If two overlap, this fails for some n. So the usual
        # case, without any sharing, costs two sorts of integers and no loop.
        if not any(map(lt, starts[1:], ends)):  # the (n+1)-th smallest start is never less than the n-th smallest end
            return set()
        extents = sorted([*zip(self.starts, self.ends, self.tensors, strict=True), *((*one, "") for one in others)])
        found: set[str] = set()
        reached, holder = 0, ""
        for some in chunked(extents, _MANY):
            for start, end, name in some:
                if start < reached:
                    found.update((name, holder))
                if end > reached:
                    reached, holder = end, name
            pause_point()
        return found - {""}

    def remove(self, fqns: set[str]) -> None:
        for payloads in self.payloads.values():
            payloads[:] = [payload for payload in payloads if payload[-1] not in fqns]
        for fqn in fqns:
            self.tensors.pop(fqn, None)
