"""Tensors that are read straight to their places: rows of a manifest, into plain tensors of the same kind.

Nearly all tensors of a load are of this kind. What there is to do for one of them is a tuple of numbers, strings and
bytes, and not a chain of records: 10,000 tensors of 1 KiB are loaded in a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from .._format.digest import DIGEST_BYTES
from .._format.records import BLOCK_BYTES, Row
from .._runtime.steps import Steps, chunked
from .._runtime.torch_probes import dtype_name, has_shards, lazy_bits
from .ranges import PIECE_BYTES

__all__ = ["Payload", "Straight", "StraightBatch", "fits", "overlapping", "straight_batches"]

Payload: TypeAlias = tuple[int, int, int, bytes, bytes | None, str]
"""Offset in the file, bytes, at which byte of the tensor they begin, CRCs, digests, FQN."""

_MOST_PAYLOADS = 256  # of one batch
_MANY = 64

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Straight:
    """Tensors by FQN, and what is read into them, by file."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    payloads: dict[str, list[Payload]] = field(default_factory=dict)

    def add(self, fqn: str, tensor: torch.Tensor, row: Row) -> None:
        _, _, nbytes, file, _, _, offset, crcs, digests, _ = row
        self.tensors[fqn] = tensor
        self.payloads.setdefault(file, []).append((offset, nbytes, 0, crcs, digests, fqn))

    def remove(self, fqns: set[str]) -> None:
        for payloads in self.payloads.values():
            payloads[:] = [payload for payload in payloads if payload[-1] not in fqns]
        for fqn in fqns:
            self.tensors.pop(fqn, None)


def fits(tensor: torch.Tensor, row: Row) -> bool:
    """Whether the bytes of ``row`` can be read into the memory of ``tensor`` as they are."""
    dtype, shape, nbytes, *_ = row
    if type(tensor) not in _PLAIN or tensor.is_nested or tensor.shape != shape or not nbytes:
        return False
    if not tensor.is_cpu or tensor.layout is not torch.strided or dtype_name(tensor.dtype) != dtype:
        return False
    if not tensor.is_contiguous() or lazy_bits(tensor) or has_shards(tensor):
        return False
    extent = tensor.storage_offset() * tensor.itemsize + nbytes
    return bool(tensor.data_ptr()) and extent <= tensor.untyped_storage().nbytes()


def overlapping(extents: list[tuple[int, int, str]]) -> Steps[set[str]]:
    """The names of all that share memory with another one, given where each begins and ends."""
    extents.sort()
    found: set[str] = set()
    reached, holder = 0, ""
    for some in chunked(extents, _MANY):
        for start, end, name in some:
            if start < reached:
                found.update((name, holder))
            if end > reached:
                reached, holder = end, name
        yield
    return found


@dataclass(frozen=True, slots=True)
class StraightBatch:
    """Payloads of one file, by offset, that one thread reads."""

    file: str
    payloads: list[Payload]
    nbytes: int


def straight_batches(payloads: Mapping[str, list[Payload]]) -> Steps[list[StraightBatch]]:
    """Group the payloads of each file by offset, at most 16 MiB of them in a batch; larger ones are cut at blocks."""
    found: list[StraightBatch] = []
    for file, of_file in payloads.items():
        of_file.sort()
        batch: list[Payload] = []
        nbytes = 0
        for some in chunked(_cut(of_file), _MANY):
            for payload in some:
                if batch and (nbytes + payload[1] > PIECE_BYTES or len(batch) == _MOST_PAYLOADS):
                    found.append(StraightBatch(file, batch, nbytes))
                    batch, nbytes = [], 0
                batch.append(payload)
                nbytes += payload[1]
            yield
        if batch:
            found.append(StraightBatch(file, batch, nbytes))
    return found


def _cut(payloads: Iterable[Payload]) -> Iterable[Payload]:
    for payload in payloads:
        offset, nbytes, _, crcs, digests, fqn = payload
        if nbytes <= PIECE_BYTES:
            yield payload
            continue
        for start in range(0, nbytes, PIECE_BYTES):
            first, end = start // BLOCK_BYTES, (start + PIECE_BYTES) // BLOCK_BYTES
            some = None if digests is None else digests[DIGEST_BYTES * first : DIGEST_BYTES * end]
            size = min(PIECE_BYTES, nbytes - start)
            yield offset + start, size, start, crcs[4 * first : 4 * end], some, fqn
