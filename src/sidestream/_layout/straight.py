"""Tensors that are read directly into their memory: rows of a manifest, for plain tensors of the same dtype and shape.

Nearly all tensors of a load are of this kind. The work for one of them is described by a tuple of numbers, strings and
bytes, and not by records that refer to each other. 10,000 tensors of 1 KiB are loaded in a fifth of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter, lt
from typing import TypeAlias

import torch

from .._format.digest import DIGEST_BYTES
from .._format.records import BLOCK_BYTES, Row
from .._runtime.steps import Steps, chunked
from .._runtime.torch_probes import dtype_name, has_shards, on_host_as_is
from .ranges import PIECE_BYTES

__all__ = ["Candidate", "Payload", "Straight", "StraightBatch", "straight_batches"]

Payload: TypeAlias = tuple[int, int, int, bytes, bytes | None, str]
"""Offset in the file, number of bytes, offset in the tensor, CRCs, digests, FQN."""

Candidate: TypeAlias = tuple[str, torch.Tensor, Row]
"""FQN, tensor of the target, row of the manifest."""

_FACTS = attrgetter("shape", "dtype", "itemsize")
_MOST_PAYLOADS = 256  # of one batch
_MANY = 64

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(frozen=True, slots=True)
class Straight:
    """Tensors by FQN, and the payloads that are read into them, by file. ``starts`` and ``ends`` are the addresses of
    the tensors."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    payloads: dict[str, list[Payload]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def take(self, found: Sequence[Candidate]) -> set[str]:
        """Add those tensors of ``found`` into whose memory the bytes of their rows can be read as they are. Returns
        their FQNs. Facts of tensors are taken of all of them at once, without a call from Python for each."""
        plain = [one for one in found if type(one[1]) in _PLAIN]
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
        taken: set[str] = set()
        for (fqn, tensor, row), (shape, dtype, itemsize), contiguous, start, skipped, held in facts:
            saved_dtype, saved_shape, nbytes, file, _, _, offset, crcs, digests, _ = row
            if not (contiguous and start and nbytes) or shape != saved_shape or dtype_name(dtype) != saved_dtype:
                continue
            if skipped * itemsize + nbytes > held or has_shards(tensor):
                continue
            taken.add(fqn)
            self.tensors[fqn] = tensor
            self.starts.append(start)
            self.ends.append(start + nbytes)
            self.payloads.setdefault(file, []).append((offset, nbytes, 0, crcs, digests, fqn))
        return taken

    def shared(self, others: list[tuple[int, int, str]]) -> Steps[set[str]]:
        """Return the FQNs of tensors that share memory with each other, or with one of ``others``. Each of ``others``
        is a start address, an end address and an empty name."""
        starts = sorted([*self.starts, *(start for start, _, _ in others)])
        ends = sorted([*self.ends, *(end for _, end, _ in others)])
        if not any(map(lt, starts[1:], ends)):  # the (n+1)-th smallest start is never less than the n-th smallest end
            return set()
        extents = sorted([*zip(self.starts, self.ends, self.tensors, strict=True), *others])
        found: set[str] = set()
        reached, holder = 0, ""
        for some in chunked(extents, _MANY):
            for start, end, name in some:
                if start < reached:
                    found.update((name, holder))
                if end > reached:
                    reached, holder = end, name
            yield
        return found - {""}

    def remove(self, fqns: set[str]) -> None:
        for payloads in self.payloads.values():
            payloads[:] = [payload for payload in payloads if payload[-1] not in fqns]
        for fqn in fqns:
            self.tensors.pop(fqn, None)


@dataclass(frozen=True, slots=True)
class StraightBatch:
    """Payloads of one file, by offset, that one thread reads."""

    file: str
    payloads: list[Payload]
    nbytes: int


def straight_batches(payloads: Mapping[str, list[Payload]]) -> Steps[list[StraightBatch]]:
    """Group the payloads of each file by offset, with at most 16 MiB in a batch. Larger payloads are cut at blocks."""
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
