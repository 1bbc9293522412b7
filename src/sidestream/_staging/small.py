"""Small copies within host memory, made some hundred at a time without Python code for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add, ge

import torch

from .._runtime.gil import move_small
from .image import Columns, Copies

_SMALL_BYTES = 64 << 10
_RUN_COPIES = 128
_RUN_BYTES = 1 << 20  # 0.1 ms, during which the GIL is held
_LEAST_COPIES = 4
_STORAGE, _BYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_ADDRESS = torch.UntypedStorage.data_ptr


def columns_of(
    offsets: Sequence[int],
    sizes: Sequence[int],
    starts: Sequence[int | None],
    skips: Sequence[int],
    dtypes: Sequence[torch.dtype | None],
) -> Columns:
    """Return copies as columns, with the runs that ``copy_run`` can make."""
    runs: list[tuple[int, int]] = []
    first = held = 0
    for index, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        small = start is not None and size <= _SMALL_BYTES
        if not small or index - first == _RUN_COPIES or held + size > _RUN_BYTES:
            runs.append((first, index))
            first, held = index + (not small), 0
        held += size if small else 0
    runs.append((first, len(sizes)))
    worth = tuple((first, last) for first, last in runs if last - first >= _LEAST_COPIES)
    return Columns(tuple(offsets), tuple(sizes), tuple(starts), tuple(skips), tuple(dtypes), worth)


def copy_run(copies: Copies, first: int, last: int, base: int) -> bool:
    """Make the copies of a run into the memory at address ``base``. Returns False, without any copy, if a storage has
    become too small."""
    columns, storages = copies.columns, list(map(_STORAGE, copies.sources[first:last]))
    sizes: Sequence[int] = columns.sizes[first:last]
    starts: Sequence[int] = columns.starts[first:last]  # type: ignore[assignment]  # no None in a run
    if not all(map(ge, map(_BYTES, storages), map(add, starts, sizes))):
        return False
    # The addresses are read now: a resize moves a storage and frees its former memory.
    sources = map(add, map(_ADDRESS, storages), starts)
    targets = map(base.__add__, columns.offsets[first:last])
    move_small(sources, targets, sizes)
    return True
