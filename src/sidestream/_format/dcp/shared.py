"""``.metadata`` of a checkpoint that several ranks wrote: each rank emits the places of its items, rank 0 the rest.

A million items cost one process half a minute; here they cost each of a thousand ranks some milliseconds, and rank 0
the joining of what they send. What tensors are is emitted once for each plan: lists of chunks that several tensors have
in common stand in the file once, and are referred to.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from ..._runtime.steps import Steps, collected
from ..marker import Marker, marker_attribute
from ..pickles import write as p
from ..records import Chunk, written_dtype
from ..shared import Shared
from .write import NAMES, chunk_at, index_of, info_of, path_item, prelude, tensor_of

__all__ = ["described", "places_of_chunks", "places_of_values", "shared_metadata"]

_MEMOIZE = b"\x94"


def described(shared: Shared) -> Steps[bytes]:
    """The beginning of the file, up to the places: the same for every save of one plan."""
    names = sorted({written_dtype(row.dtype) for row in shared.rows if row.kind == "tensor"})
    dtypes = {name: b"h%c" % (NAMES.first_dtype + index) for index, name in enumerate(names)}
    first = NAMES.first_dtype + len(names)  # of what is memoized from here on
    known: dict[int, int] = {}
    out = [b"\x80\x04", prelude(names), NAMES.metadata, b")\x81}(", p.text("state_dict_metadata"), b"}("]
    for row in shared.rows:
        yield
        if row.kind == "tensor":
            if row.pattern in known:
                chunks = b"j" + struct.pack("<I", known[row.pattern])
            else:
                known[row.pattern] = first + len(known)
                boxes = (chunk_at(one.offsets, one.sizes) for one in shared.patterns[row.pattern])
                chunks = p.list_of((yield from collected(boxes))) + _MEMOIZE
            out.append(p.text(row.fqn) + tensor_of(dtypes[written_dtype(row.dtype)], row.shape, chunks))
        elif row.kind == "value":
            out.append(p.text(row.fqn) + NAMES.value + b")\x81")
    out += [b"u", p.text("planner_data"), b"}("]
    for row in shared.rows:
        yield
        if row.kind in ("tensor", "value"):  # DCP knows no others
            out.append(p.text(row.fqn) + p.tuple_of(*map(path_item, row.path)))
    out += [b"u", p.text("storage_data"), b"}("]
    return b"".join(out)


def places_of_chunks(chunks: Iterable[tuple[str, Chunk]]) -> Steps[bytes]:
    """By FQN: a rank's own."""
    places = (
        index_of(p.text(fqn), chunk.offsets, None) + info_of(chunk.file, chunk.item_offset, chunk.item_bytes)
        for fqn, chunk in chunks
    )
    return b"".join((yield from collected(places)))


def places_of_values(values: Iterable[tuple[str, str, int, int]]) -> bytes:
    """FQN, file, offset and length: a rank's own."""
    return b"".join(
        index_of(p.text(fqn), None, None) + info_of(file, offset, nbytes) for fqn, file, offset, nbytes in values
    )


def shared_metadata(head: bytes, places: Sequence[bytes], marker: Marker) -> Iterator[bytes]:
    """The file, in pieces. ``head`` is what ``described`` gave."""
    yield head
    yield from places
    yield b"u" + p.text("storage_meta") + p.NONE + p.text("version") + p.text("1.0.0")
    yield marker_attribute(marker)
