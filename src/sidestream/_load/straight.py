"""Reading tensors straight to their places: large ones one by one, neighbours that are small together."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from functools import partial

import torch

from .._format.checksum import crc32
from .._layout.checks import altered, check_digests
from .._layout.ranges import Direct, Range
from .._layout.straight import Payload, StraightBatch
from .._runtime.threads import politely
from .._staging.host import move
from .._storage import ReadRange
from ..options import Verify
from .buffers import Check, Memory, Scratch, memory_of

__all__ = ["straight_reads"]

_SMALL_BYTES = 64 << 10
"""To copy as many bytes from the cache of the processor costs less than what one more read takes."""
_SPAN_BYTES = 1 << 20
_GAP_BYTES = 16 << 10  # between two payloads, read and not used


def straight_reads(
    batch: StraightBatch,
    tensors: Mapping[str, torch.Tensor],
    verify: Verify,
    touched: set[str],
    scratch: Scratch,
) -> tuple[list[ReadRange], Memory | None]:
    """What to read for a batch, and the scratch memory that this takes. ``touched`` gets the FQNs of tensors that may
    have been written to."""
    spans = _spans(batch.payloads)
    nbytes = sum(_aligned(_extent(span)) for span in spans if len(span) > 1)
    memory = scratch.take(nbytes) if nbytes else None
    position = 0
    reads: list[ReadRange] = []
    for span in spans:
        if len(span) == 1:
            reads.append(_read_one(batch.file, span[0], tensors, verify, touched))
            continue
        assert memory is not None
        view = memoryview(memory)[position : position + _extent(span)]
        position += _aligned(_extent(span))
        spread = partial(_spread, batch.file, span, view, tensors, verify, touched)
        reads.append(ReadRange(span[0][0], view, spread))
    return reads, memory


def _spans(payloads: Iterable[Payload]) -> list[list[Payload]]:
    """Neighbours that are small, as far as they are read at once; anything else by itself."""
    spans: list[list[Payload]] = []
    start = end = 0
    for payload in payloads:
        offset, nbytes, *_ = payload
        small = nbytes <= _SMALL_BYTES
        if small and spans and 0 <= offset - end <= _GAP_BYTES and offset + nbytes - start <= _SPAN_BYTES:
            spans[-1].append(payload)
        else:
            spans.append([payload])
            start = offset
        end = offset + nbytes if small else -_SPAN_BYTES
    return spans


def _extent(span: list[Payload]) -> int:
    return span[-1][0] + span[-1][1] - span[0][0]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _read_one(
    file: str, payload: Payload, tensors: Mapping[str, torch.Tensor], verify: Verify, touched: set[str]
) -> ReadRange:
    offset, nbytes, start, crcs, digests, fqn = payload
    into = memory_of(tensors[fqn], start, nbytes)
    touched.add(fqn)
    if verify != "always":
        return ReadRange(offset, into)
    check = Check(Range(fqn, file, offset, nbytes, Direct(start), crcs))
    return ReadRange(offset, into, partial(check_digests, fqn, file, offset, into, digests) if digests else None, check)


def _spread(
    file: str,
    span: list[Payload],
    view: memoryview,
    tensors: Mapping[str, torch.Tensor],
    verify: Verify,
    touched: set[str],
) -> None:
    """In the thread that has read them: check payloads that lie side by side, and copy them to their places."""
    source, first = ctypes.addressof(ctypes.c_char.from_buffer(view)), span[0][0]
    for offset, nbytes, start, crcs, digests, fqn in politely(span):
        if verify == "always":
            piece = view[offset - first : offset - first + nbytes]
            if crc32(piece) != int.from_bytes(crcs, "little"):
                raise altered(fqn, file, offset)
            check_digests(fqn, file, offset, piece, digests)
        touched.add(fqn)
        move(source + offset - first, tensors[fqn].data_ptr() + start, nbytes)
