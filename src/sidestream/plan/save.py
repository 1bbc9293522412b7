"""The plan of a save: file and offset of every item, fixed before a byte is copied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .._threads import politely
from .._torch import check_tensor, dtype_name, storage_key
from ..errors import UnsupportedTensor
from ..format.dtypes import DTYPES
from ..format.frame import Frame, frame_tensor, frame_value
from ..format.records import BLOCK_BYTES, Chunk, EmptyEntry, Entry, Key, TensorEntry, ValueEntry
from ..format.shard import BlockSums, ShardLayout, Window, lay_out
from ..format.values import pickle_node
from ..staging import Captured, Composite, Copy, ImageLayout, PlanCache, fingerprint
from .flatten import Leaf, leaves_of
from .values import encode_value

__all__ = ["SHARD_BYTES", "SavePlan", "plan_save", "shard_name", "window_bytes_for", "window_copies"]

SHARD_BYTES = 2 << 30
"""A shard file is closed before it grows beyond this; a larger tensor has one of its own."""

_WINDOW_BYTES = (32 << 20, 512 << 20)
_WINDOWS = 350  # of a large state: so many copies, and gaps between them, fit into the queue of a device's stream
_BUDGET_WINDOWS = 4  # in a small budget: some are staged while others are written

_RANK = 0
_VALUES_FILE = f"__{_RANK}_0.distcp"
_EVERY = 128  # items between two moments without the GIL: some 0.5 ms


def shard_name(index: int) -> str:
    """DCP's pattern, ``__<rank>_<number>.distcp``; number 0 holds the plain values."""
    return f"__{_RANK}_{index + 1}.distcp"


class _Tensor(NamedTuple):
    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    shard: int
    item: int


@dataclass(frozen=True, slots=True)
class _TensorLayout:
    """Where the tensors of a state dict go: used again as long as it looks the same. Holds no tensors.

    ``items[i]`` is the index, among the tensors, of the one whose bytes the i-th item (over all shards) holds.
    """

    shards: tuple[ShardLayout, ...]
    items: tuple[int, ...]
    outline: Mapping[str, _Tensor]

    def images(self, tensors: Sequence[torch.Tensor]) -> tuple[ImageLayout, ...]:
        images = []
        before = 0  # items in the shards before
        for shard in self.shards:
            for window in politely(shard.windows, _EVERY):
                copies = tuple(window_copies(shard, window, self.items, before, tensors))
                images.append(ImageLayout(window.end - window.start, copies))
            before += len(shard.items)
        return tuple(images)


@dataclass(frozen=True, slots=True)
class SavePlan:
    """``shards[i]`` lays out the file ``shard_name(i)``; ``images`` say which tensors to copy where, one for each
    window of each shard, in this order.

    ``values`` is the finished content of the file of plain values (empty: no such file). ``nbytes`` is the size of all
    data files.
    """

    shards: tuple[ShardLayout, ...]
    images: tuple[ImageLayout, ...]
    values: bytes
    outline: Mapping[str, _Tensor | ValueEntry | EmptyEntry]

    def without_sources(self) -> SavePlan:
        """The plan without the copies, which refer to the tensors that it was made from."""
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

    def shard_file(self, index: int) -> str:
        return shard_name(index)

    def entries(self, sums: Sequence[BlockSums], names: Mapping[str, str]) -> Iterator[tuple[str, Entry]]:
        """The manifest's entries by FQN, given the checksums of each shard's blocks, and what each of the ``files`` is
        called in the published checkpoint."""
        for fqn, planned in self.outline.items():
            if isinstance(planned, _Tensor):
                yield fqn, self._tensor_entry(planned, sums[planned.shard], names)
            elif isinstance(planned, ValueEntry):
                yield fqn, replace(planned, file=names[planned.file])
            else:
                yield fqn, planned

    def _tensor_entry(self, planned: _Tensor, sums: BlockSums, names: Mapping[str, str]) -> TensorEntry:
        placed = self.shards[planned.shard].items[planned.item]
        chunk = Chunk(
            offsets=(0,) * len(planned.shape),
            sizes=planned.shape,
            file=names[shard_name(planned.shard)],
            item_offset=placed.item_offset,
            item_bytes=placed.frame.item_bytes,
            payload_offset=placed.payload_offset,
            crcs=sums.crcs[planned.item],
            digests=sums.digests[planned.item] if sums.digests else None,
        )
        return TensorEntry(planned.path, planned.dtype, planned.shape, (chunk,))


def plan_save(plans: PlanCache, budget_bytes: int, captured: Captured, *, shard_bytes: int = SHARD_BYTES) -> SavePlan:
    """Name and encode what was captured, and place its tensors as before if ``plans`` knows a state dict like this one.

    It is staged and written in windows, of which several fit into ``budget_bytes``.

    For a worker thread: it takes some 10 us per tensor. Tensors that are the same view of the same storage (tied
    weights) share one item. Raises ``UnsafeObject``, ``UnsupportedTensor`` or ``KeyCollision``, naming the FQN.
    """
    leaves = list(politely(leaves_of(captured.root), _EVERY))
    named = [leaf for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    tensors = [leaf.value for leaf in named]
    window_bytes = window_bytes_for(sum(tensor.nbytes for tensor in tensors), budget_bytes)
    key = (
        "save",
        shard_bytes,
        window_bytes,
        tuple([leaf.path for leaf in named]),
        fingerprint(politely(tensors, _EVERY)),
    )
    layout = plans.get(key, lambda: _lay_out(named, captured.held, shard_bytes, window_bytes))
    values = bytearray()
    outline: dict[str, _Tensor | ValueEntry | EmptyEntry] = {}
    for leaf in politely(leaves, _EVERY):
        if isinstance(leaf.value, torch.Tensor):
            outline[leaf.fqn] = layout.outline[leaf.fqn]
        elif type(leaf.value) is dict and not leaf.value:
            outline[leaf.fqn] = EmptyEntry(leaf.path)
        else:
            outline[leaf.fqn] = _place_value(leaf, values)
    return SavePlan(layout.shards, layout.images(tensors), bytes(values), outline)


def window_bytes_for(total: int, budget_bytes: int) -> int:
    """How much of ``total`` bytes is staged at a time in a budget."""
    low, high = _WINDOW_BYTES
    wanted = min(max(total // _WINDOWS, low), high, budget_bytes // _BUDGET_WINDOWS)
    return max(wanted // BLOCK_BYTES, 1) * BLOCK_BYTES


def _lay_out(named: Sequence[Leaf], held: set[int], shard_bytes: int, window_bytes: int) -> _TensorLayout:
    numbers: list[int] = []  # the item of each tensor
    items: list[int] = []
    frames: list[Frame] = []
    known: dict[tuple[object, ...], int] = {}
    for index, leaf in enumerate(politely(named, _EVERY)):
        tensor = leaf.value
        check_tensor(tensor, leaf.fqn, held=bool(held) and storage_key(tensor) in held)
        dtype = dtype_name(tensor.dtype)
        if dtype not in DTYPES:
            raise UnsupportedTensor(f"{leaf.fqn}: torch cannot serialize a tensor of dtype {dtype}; save a view of it")
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), dtype, tensor.is_conj(), tensor.is_neg())
        number = known.get(identity) if tensor.numel() else None
        if number is None:
            number = known[identity] = len(items)
            items.append(index)
            frames.append(frame_tensor(dtype, tuple(tensor.shape)))
        numbers.append(number)
    shards = tuple(lay_out(politely(frames, _EVERY), shard_bytes, window_bytes))
    places = [(shard, item) for shard, layout in enumerate(shards) for item in range(len(layout.items))]
    outline = {
        leaf.fqn: _Tensor(leaf.path, dtype_name(leaf.value.dtype), tuple(leaf.value.shape), *places[number])
        for leaf, number in zip(politely(named, _EVERY), numbers, strict=True)
    }
    return _TensorLayout(shards, tuple(items), outline)


def _place_value(leaf: Leaf, values: bytearray) -> ValueEntry:
    if isinstance(leaf.value, Composite):
        raise UnsupportedTensor(
            f"{leaf.fqn}: cannot save {leaf.value.kind}: this version saves plain tensors of one process; save the "
            "tensors that it is made of (to_local(), indices and values) or a dense, full one"
        )
    node = encode_value(leaf.value, leaf.fqn)
    item = frame_value(*pickle_node(node))
    entry = ValueEntry(leaf.path, _VALUES_FILE, len(values), len(item), node)
    values += item
    return entry


def window_copies(
    shard: ShardLayout, window: Window, sources: Sequence[int], before: int, tensors: Sequence[torch.Tensor]
) -> Iterator[Copy]:
    """What fills ``window``: ``sources[before + i]`` is the tensor of the shard's item ``i``."""
    for index in politely(range(window.first, window.last), _EVERY):
        frame, item_offset = shard.items[index]
        payload = item_offset + len(frame.header)
        start, end = max(payload, window.start), min(payload + frame.payload_bytes, window.end)
        if start < end:
            yield Copy(tensors[sources[before + index]], start - window.start, end - start, None, start - payload)
