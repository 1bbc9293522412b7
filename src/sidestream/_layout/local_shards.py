"""The memory of this process for a tensor of a target, and the box of the whole tensor in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from .._runtime.torch_probes import has_shards, shard_runs, shards_held, tensor_class
from ..errors import UnsupportedTensorError
from .ranges import Box, narrowed


class Local(NamedTuple):
    """The memory of a box. ``tensor`` holds ``box`` of the tensor ``fqn``, or all of it if that is None."""

    fqn: str
    tensor: torch.Tensor
    box: Box | None


def is_distributed(tensor: torch.Tensor) -> bool:
    return _is_dtensor(tensor) or _is_sharded(tensor) or has_shards(tensor)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    kind = tensor_class("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def _is_sharded(tensor: torch.Tensor) -> bool:
    kind = tensor_class("torch.distributed._shard.sharded_tensor", "ShardedTensor")
    return kind is not None and isinstance(tensor, kind)


def global_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    if has_shards(tensor) and not _is_dtensor(tensor):
        return shards_held(tensor, "the target")[0]
    return tuple(tensor.size())


def locals_of(fqn: str, tensor: torch.Tensor) -> Iterator[tuple[str, Local]]:
    """Yield the pieces of ``tensor`` in this process, each with a name. The name of the first one is the FQN."""
    if not is_distributed(tensor):
        yield fqn, Local(fqn, tensor, None)
        return
    if _is_sharded(tensor):
        pieces = _sharded_pieces(tensor)
    else:
        pieces = _dtensor_pieces(fqn, tensor) if _is_dtensor(tensor) else _held_pieces(fqn, tensor)
    for number, (piece, box) in enumerate(pieces):
        yield (fqn if not number else f"{fqn} (part {number})"), Local(fqn, piece, box)


def _sharded_pieces(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Box]]:
    for shard in tensor.local_shards():  # type: ignore[attr-defined]
        offsets, sizes = tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)
        if 0 not in sizes:
            yield shard.tensor.detach(), Box(offsets, sizes)


def _held_pieces(fqn: str, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Box]]:
    for offsets, sizes, begins in shards_held(tensor, fqn)[1]:
        if 0 not in sizes:
            yield narrowed(tensor.detach(), begins, sizes), Box(offsets, sizes)


def _dtensor_pieces(fqn: str, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, Box]]:
    if any(placement.is_partial() for placement in tensor.placements):  # type: ignore[attr-defined]
        raise UnsupportedTensorError(
            f"{fqn}: cannot load into a DTensor with a Partial placement; redistribute() it first"
        )
    shape = tuple(tensor.shape)
    runs = shard_runs(shape, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    # This rank is not in the mesh, so it has no part of the tensor to fill.
    if runs is None:
        return
    with torch.no_grad():
        local = tensor.to_local()  # type: ignore[attr-defined]
    if 0 in shape:
        yield local, Box.whole(shape)
        return
    # A rectangular part for each combination of runs. There is one in nearly all cases: only a strided placement leaves
    # several runs in a dimension.
    for box in product(*runs):
        offsets, sizes, begins = (tuple(run[at] for run in box) for at in range(3))
        if 0 not in sizes:
            yield narrowed(local, begins, sizes), Box(offsets, sizes)
