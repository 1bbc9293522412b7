"""The plan of a save: file and offset of every item, fixed before a byte is copied."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._torch import check_tensor, dtype_name
from ..errors import UnsupportedTensor
from ..format.dtypes import DTYPES
from ..format.frame import Frame, frame_tensor, frame_value
from ..format.records import Chunk, EmptyEntry, Entry, Key, TensorEntry, ValueEntry
from ..format.shard import ShardLayout, lay_out
from ..format.values import pickle_node
from ..staging import Copy, ImageLayout
from .flatten import Leaf, StatefulRoot, flatten
from .values import encode_value

__all__ = ["SHARD_BYTES", "SavePlan", "plan_save", "shard_name"]

SHARD_BYTES = 2 << 30
"""A shard file is closed before it grows beyond this; a larger tensor has one of its own."""

_RANK = 0
_VALUES_FILE = f"__{_RANK}_0.distcp"


def shard_name(index: int) -> str:
    """DCP's pattern, ``__<rank>_<number>.distcp``; number 0 holds the plain values."""
    return f"__{_RANK}_{index + 1}.distcp"


@dataclass(frozen=True, slots=True)
class _Tensor:
    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    shard: int
    item: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """``shards[i]`` lays out the file ``shard_name(i)``; ``images[i]`` says which tensors to copy where for it.

    ``values`` is the finished content of the file of plain values (empty: no such file). ``nbytes`` is the size of all
    data files.
    """

    save_id: str
    shards: tuple[ShardLayout, ...]
    images: tuple[ImageLayout, ...]
    values: bytes
    outline: Mapping[str, _Tensor | ValueEntry | EmptyEntry]

    def without_sources(self) -> SavePlan:
        """The plan without the tensors that it was made from."""
        return replace(self, images=())

    @property
    def nbytes(self) -> int:
        return len(self.values) + sum(shard.nbytes for shard in self.shards)

    @property
    def files(self) -> dict[str, int]:
        files = {_VALUES_FILE: len(self.values)} if self.values else {}
        files.update((shard_name(index), shard.nbytes) for index, shard in enumerate(self.shards))
        return files

    @property
    def values_file(self) -> str:
        return _VALUES_FILE

    def entries(self, crcs: Sequence[Sequence[bytes]]) -> Iterator[tuple[str, Entry]]:
        """The manifest's entries by FQN, given for each shard the packed block CRCs of its items."""
        for fqn, planned in self.outline.items():
            yield fqn, self._tensor_entry(planned, crcs) if isinstance(planned, _Tensor) else planned

    def _tensor_entry(self, planned: _Tensor, crcs: Sequence[Sequence[bytes]]) -> TensorEntry:
        placed = self.shards[planned.shard].items[planned.item]
        chunk = Chunk(
            offsets=(0,) * len(planned.shape),
            sizes=planned.shape,
            file=shard_name(planned.shard),
            item_offset=placed.item_offset,
            item_bytes=placed.frame.item_bytes,
            payload_offset=placed.payload_offset,
            crcs=crcs[planned.shard][planned.item],
        )
        return TensorEntry(planned.path, planned.dtype, planned.shape, (chunk,))


def plan_save(state: Mapping[str, Any], *, shard_bytes: int = SHARD_BYTES) -> SavePlan:
    """Flatten ``state``, copy its plain values, and place its tensors; their bytes are not touched.

    Tensors that are the same view of the same storage (tied weights) share one item. Raises ``UnsafeObject``,
    ``UnsupportedTensor``, ``KeyCollision`` or ``InvalidOption``, naming the FQN.
    """
    leaves = [leaf for leaf in flatten(state) if not isinstance(leaf.value, StatefulRoot)]
    numbers, sources, frames = _distinct_tensors(leaves)
    shards = tuple(lay_out(frames, shard_bytes))
    places = [(shard, item) for shard, layout in enumerate(shards) for item in range(len(layout.items))]
    values = bytearray()
    outline: dict[str, _Tensor | ValueEntry | EmptyEntry] = {}
    for leaf in leaves:
        if leaf.fqn in numbers:
            shard, item = places[numbers[leaf.fqn]]
            tensor = leaf.value
            outline[leaf.fqn] = _Tensor(leaf.path, dtype_name(tensor.dtype), tuple(tensor.shape), shard, item)
        elif type(leaf.value) is dict and not leaf.value:
            outline[leaf.fqn] = EmptyEntry(leaf.path)
        else:
            outline[leaf.fqn] = _place_value(leaf, values)
    images = _images(shards, sources)
    return SavePlan(uuid.uuid4().hex, shards, images, bytes(values), outline)


def _distinct_tensors(leaves: Sequence[Leaf]) -> tuple[dict[str, int], list[torch.Tensor], list[Frame]]:
    """The number of each tensor leaf's item, and source and frame of every item."""
    numbers: dict[str, int] = {}
    sources: list[torch.Tensor] = []
    frames: list[Frame] = []
    known: dict[tuple[object, ...], int] = {}
    for leaf in leaves:
        tensor = leaf.value
        if not isinstance(tensor, torch.Tensor):
            continue
        check_tensor(tensor, leaf.fqn)
        dtype = dtype_name(tensor.dtype)
        if dtype not in DTYPES:
            raise UnsupportedTensor(f"{leaf.fqn}: torch cannot serialize a tensor of dtype {dtype}; save a view of it")
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), dtype, tensor.is_conj(), tensor.is_neg())
        number = known.get(identity) if tensor.numel() else None
        if number is None:
            number = known[identity] = len(sources)
            sources.append(tensor.detach())  # of the call: param.data may be bound to other memory while it is copied
            frames.append(frame_tensor(dtype, tuple(tensor.shape)))
        numbers[leaf.fqn] = number
    return numbers, sources, frames


def _place_value(leaf: Leaf, values: bytearray) -> ValueEntry:
    node = encode_value(leaf.value, leaf.fqn)
    item = frame_value(*pickle_node(node))
    entry = ValueEntry(leaf.path, _VALUES_FILE, len(values), len(item), node)
    values += item
    return entry


def _images(shards: Sequence[ShardLayout], sources: Sequence[torch.Tensor]) -> tuple[ImageLayout, ...]:
    remaining = iter(sources)
    images = []
    for shard in shards:
        pairs = zip(shard.items, remaining, strict=False)  # the items come first: no source is taken for nothing
        copies = (Copy(source, placed.payload_offset, placed.frame.payload_bytes) for placed, source in pairs)
        images.append(ImageLayout(shard.nbytes, tuple(copy for copy in copies if copy.nbytes)))
    return tuple(images)
