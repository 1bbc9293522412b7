"""Tensors of other writers that this version cannot read, found before memory is allocated for them."""

from __future__ import annotations

import math
from dataclasses import replace

from ..._runtime.steps import Steps, collected
from ..records import Chunk, Entry, Manifest, OpaqueEntry, TensorEntry, itemsize

__all__ = ["with_opaque_entries"]


def with_opaque_entries(manifest: Manifest) -> Steps[Manifest]:
    """Return a foreign manifest in which each tensor whose item is too small for its elements is an ``OpaqueEntry``.

    Stock DCP writes such an item for a tensor subclass (of torchao, for instance): ``.metadata`` has the dtype that the
    subclass reports, and the item holds the tensors that it wraps. A damaged ``.metadata`` may look the same. The item
    distinguishes the two cases when the tensor is read.
    """
    entries = yield from collected((fqn, _opaque_if_small(entry)) for fqn, entry in manifest.entries.items())
    return replace(manifest, entries=dict(entries))


def _opaque_if_small(entry: Entry) -> Entry:
    if isinstance(entry, TensorEntry) and any(_too_small(entry.dtype, chunk) for chunk in entry.chunks):
        return OpaqueEntry(entry.path, entry.dtype, entry.shape, entry.chunks)
    return entry


def _too_small(dtype: str, chunk: Chunk) -> bool:
    """Return whether the item is too small for the elements. False for compressed items and for items with a known
    payload, which ``validate`` checks."""
    if chunk.payload_offset is not None or chunk.transform or any(size < 0 for size in chunk.sizes):
        return False
    return math.prod(chunk.sizes) * itemsize(dtype) > chunk.item_bytes
