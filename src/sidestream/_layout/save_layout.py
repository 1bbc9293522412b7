"""The plan of a save: file and offset of every item, fixed before a byte is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from .._format.dcp.described import Described, Template
from .._format.frame import Frame, frame_tensor, frame_value
from .._format.records import (
    BLOCK_BYTES,
    SAVED_DTYPES,
    Chunk,
    CompositeEntry,
    EmptyEntry,
    Entry,
    Key,
    TensorEntry,
    ValueEntry,
    all_parts,
)
from .._format.shard import BlockSums, Placed, ShardLayout, Window, lay_out
from .._format.values import pickle_node
from .._runtime.steps import Steps, chunked, collected, in_turn
from .._runtime.torch_probes import check_tensor, dtype_from_name, dtype_name, storage_key, view_key
from .._staging import Captured, Columns, Composite, Copies, Copy, ImageLayout, PlanCache, columns_of, raw_start
from ..errors import UnsupportedTensorError
from .composites.entry import composite_entry
from .flatten import CompositeLeaf, Leaf, LeafKind, leaves_of
from .structure import outline_of
from .values import encode_value

__all__ = ["SHARD_BYTES", "SavePlan", "converted_to", "plan_save", "shard_name", "window_bytes_for", "window_copies"]

SHARD_BYTES = 2 << 30
"""A shard file is closed before it grows beyond this; a larger tensor has one of its own."""

_WINDOW_BYTES = (32 << 20, 512 << 20)
_WINDOWS = 350  # of a large state: so many copies, and gaps between them, fit into the queue of a device's stream
_BUDGET_WINDOWS = 4  # in a small budget: some are staged while others are written

_RANK = 0
_VALUES_FILE = f"__{_RANK}_0.distcp"
_EVERY = 128  # items of less than a microsecond in a step


def shard_name(index: int) -> str:
    """DCP's pattern, ``__<rank>_<number>.distcp``; number 0 holds the plain values."""
    return f"__{_RANK}_{index + 1}.distcp"


class _Tensors(NamedTuple):
    """In the order of the state dict, column by column; ``items`` are numbered over all shards.

    A record for each of them would be one more object for the garbage collector to walk, while it holds the GIL: beside
    10,000 tensors that took as long as the plan itself.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    items: tuple[int, ...]


class _Window(NamedTuple):
    """The copies that fill a window; ``sources`` are indices of tensors."""

    nbytes: int
    sources: tuple[int, ...]
    columns: Columns

    def over(self, tensors: Sequence[torch.Tensor]) -> Steps[ImageLayout]:
        sources = yield from collected(map(tensors.__getitem__, self.sources), _EVERY)
        return ImageLayout(self.nbytes, Copies(self.columns, sources))


@dataclass(slots=True)
class _Layout:
    """Where the tensors of a state dict go: used again as long as they look the same. Holds no tensors and no values.

    What is said about them is kept for the newest outline only: values may get other names with every save."""

    shards: tuple[ShardLayout, ...]
    windows: tuple[_Window, ...]
    tensors: _Tensors
    newest: tuple[tuple[Any, ...], _Said] | None = None

    def said(self, outline: tuple[Any, ...], leaves: Callable[[], Steps[Sequence[Leaf]]]) -> Steps[_Said]:
        """Of a state dict with these tensors. Raises ``UnsafeObjectError`` and ``KeyCollisionError``."""
        newest = self.newest  # another save may put its own there meanwhile
        if newest is None or newest[0] != outline:
            fqns: list[str] = []
            paths: list[tuple[Key, ...]] = []
            kinds: list[LeafKind] = []
            for some in chunked((yield from leaves()), _EVERY):
                fqns += [leaf.fqn for leaf in some]
                paths += [leaf.path for leaf in some]
                kinds += [leaf.kind for leaf in some]
                yield
            said = _Said(self.shards, self.tensors, tuple(fqns), tuple(paths), tuple(kinds))
            newest = self.newest = (outline, said)
        return newest[1]


@dataclass(frozen=True, slots=True)
class _Said:
    """What manifest and ``.metadata`` say of a state dict with this outline: of its leaves, column by column."""

    shards: tuple[ShardLayout, ...]
    tensors: _Tensors
    fqns: tuple[str, ...]
    paths: tuple[tuple[Key, ...], ...]
    kinds: tuple[LeafKind, ...]
    templates: dict[tuple[str, ...], Template] = field(default_factory=dict)

    def named_values(self) -> Iterator[tuple[str, tuple[Key, ...]]]:
        """FQN and path of each, and of each composite tensor."""
        kinds = zip(self.fqns, self.paths, self.kinds, strict=True)
        return ((fqn, path) for fqn, path, kind in kinds if kind in ("value", "composite"))

    def template(self, names: Mapping[str, str]) -> Steps[Template]:
        """For shards that are called as in ``names``."""
        key = tuple(names.values())
        found = self.templates.get(key)
        if found is None:
            self.templates.clear()  # where names have the id of the save in them, they do not come again
            found = yield from Template.of(self._blank(names), set(self.tensors.dtypes), self.tensors.items)
            self.templates[key] = found
        return found

    def _blank(self, names: Mapping[str, str]) -> Iterator[tuple[str, Entry]]:
        """The entries without checksums and values."""
        files = [names[shard_name(number)] for number, shard in enumerate(self.shards) for _ in shard.items]
        placed = [item for shard in self.shards for item in shard.items]
        tensors = zip(*self.tensors, strict=True)
        for fqn, path, kind in zip(self.fqns, self.paths, self.kinds, strict=True):
            if kind == "tensor":
                dtype, shape, item = next(tensors)
                yield fqn, TensorEntry(path, dtype, shape, (_chunk(shape, placed[item], files[item]),))
            elif kind == "composite":
                yield fqn, CompositeEntry(path, "", "", (), None, ())
            else:
                yield fqn, EmptyEntry(path) if kind == "empty" else ValueEntry(path, "", 0, 0)


def _chunk(shape: tuple[int, ...], placed: Placed, file: str) -> Chunk:
    """All of a tensor, without checksums."""
    return Chunk(
        offsets=(0,) * len(shape),
        sizes=shape,
        file=file,
        item_offset=placed.item_offset,
        item_bytes=placed.frame.item_bytes,
        payload_offset=placed.payload_offset,
    )


@dataclass(frozen=True, slots=True)
class SavePlan:
    """``shards[i]`` lays out the file ``shard_name(i)``; ``images`` say which tensors to copy where, one for each
    window of each shard, in this order.

    ``values`` is the finished content of the file of plain values (empty: no such file). ``value_entries`` has the
    composite tensors too. ``nbytes`` is the size of all data files.
    """

    said: _Said
    images: tuple[ImageLayout, ...]
    values: bytes
    value_entries: Mapping[str, ValueEntry | CompositeEntry]

    def without_sources(self) -> SavePlan:
        """The plan without the copies, which refer to the tensors that it was made from."""
        return replace(self, images=())

    @property
    def shards(self) -> tuple[ShardLayout, ...]:
        return self.said.shards

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

    def named_tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """FQN, dtype, shape and item of each plain tensor that is no part of another one; items are numbered over all
        shards."""
        said, parts = self.said, all_parts(self._composites())
        fqns = (fqn for fqn, kind in zip(said.fqns, said.kinds, strict=True) if kind == "tensor")
        return (one for one in zip(fqns, *said.tensors, strict=True) if one[0] not in parts)

    def named_composites(self) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
        """FQN, dtype, shape and type of each composite tensor that is no part of another one."""
        found = self._composites()
        parts = all_parts(found)
        return ((fqn, one.dtype, one.shape, one.type) for fqn, one in found.items() if fqn not in parts)

    def _composites(self) -> dict[str, CompositeEntry]:
        return {fqn: one for fqn, one in self.value_entries.items() if isinstance(one, CompositeEntry)}

    def describe(self, sums: Sequence[BlockSums], names: Mapping[str, str]) -> Steps[Described]:
        """The entries, given the checksums of each shard's blocks, and what each of the ``files`` is called in the
        published checkpoint."""
        shards = {name: names[name] for name in map(shard_name, range(len(self.shards)))}
        file = names.get(_VALUES_FILE, "")
        values = yield from collected(
            (fqn, replace(entry, file=file) if isinstance(entry, ValueEntry) else entry)
            for fqn, entry in self.value_entries.items()
        )
        template = yield from self.said.template(shards)
        return (yield from template.fill(dict(values), sums))


def plan_save(
    plans: PlanCache, budget_bytes: int, captured: Captured, *, shard_bytes: int = SHARD_BYTES
) -> Steps[SavePlan]:
    """Name and encode what was captured, and place its tensors as before if ``plans`` knows a state dict like this one.

    It is staged and written in windows, of which several fit into ``budget_bytes``.

    Takes some 10 us per tensor, 1 us if the plan is known. Tensors that are the same view of the same storage (tied
    weights) share one item. Raises ``UnsafeObjectError``, ``UnsupportedTensorError`` or ``KeyCollisionError``, naming
    the FQN.
    """
    outline = yield from outline_of(captured.root)
    tensors = outline.tensors
    leaves = partial(_leaves, captured.root, [])
    # The same tensors may have other names, and other dtypes under these.
    converted = (tuple(captured.dtypes.items()), outline.key) if captured.dtypes else ()
    key = ("save", shard_bytes, budget_bytes, converted)
    layout = yield from plans.get_for(tensors, key, lambda: _lay_out(leaves, captured, shard_bytes, budget_bytes))
    said = yield from layout.said(outline.key, leaves)
    content = bytearray()
    entries: dict[str, ValueEntry | CompositeEntry] = {}
    if outline.values:
        for (fqn, path), value in zip(said.named_values(), outline.values, strict=True):
            if isinstance(value, CompositeLeaf):
                entries[fqn] = composite_entry(fqn, path, value.form)
            else:
                entries[fqn] = _place_value(fqn, path, value, content)
            yield
    images = yield from in_turn(window.over(tensors) for window in layout.windows)
    return SavePlan(said, tuple(images), bytes(content), entries)


def _leaves(root: dict[Any, Any], found: list[Leaf]) -> Steps[Sequence[Leaf]]:
    """Return ``found``, filled by the first call."""
    if not found:
        found += yield from collected(leaves_of(root))
    return found


def window_bytes_for(total: int, budget_bytes: int) -> int:
    """How much of ``total`` bytes is staged at a time in a budget."""
    low, high = _WINDOW_BYTES
    wanted = min(max(total // _WINDOWS, low), high, budget_bytes // _BUDGET_WINDOWS)
    return max(wanted // BLOCK_BYTES, 1) * BLOCK_BYTES


def _lay_out(
    find: Callable[[], Steps[Sequence[Leaf]]], captured: Captured, shard_bytes: int, budget_bytes: int
) -> Steps[_Layout]:
    leaves = yield from find()
    copied = captured.held
    tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    window_bytes = window_bytes_for(sum(map(attrgetter("nbytes"), tensors)), budget_bytes)
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    numbers: list[int] = []  # the item of each tensor
    items: list[int] = []  # the tensor whose bytes each item holds, over all shards
    frames: list[Frame] = []
    known: dict[tuple[object, ...], int] = {}
    for leaf in leaves:
        yield
        tensor = leaf.value
        if not isinstance(tensor, torch.Tensor):
            continue
        check_tensor(tensor, leaf.fqn, held=bool(copied) and storage_key(tensor) in copied)
        dtype, shape = captured.dtypes.get(leaf.fqn) or dtype_name(tensor.dtype), tuple(tensor.shape)
        if dtype not in SAVED_DTYPES:
            raise UnsupportedTensorError(
                f"{leaf.fqn}: torch cannot serialize a tensor of dtype {dtype}; save a view of it"
            )
        identity = (*view_key(tensor), dtype)
        number = known.get(identity) if tensor.numel() else None
        if number is None:
            number = known[identity] = len(items)
            items.append(len(numbers))
            frames.append(frame_tensor(dtype, shape))
        dtypes.append(dtype)
        shapes.append(shape)
        numbers.append(number)
    shards = tuple((yield from lay_out(frames, shard_bytes, window_bytes)))
    placed = _Tensors(tuple(dtypes), tuple(shapes), tuple(numbers))
    windows = yield from _windows(shards, items, tensors, dtypes)
    return _Layout(shards, tuple(windows), placed)


def _windows(
    shards: Sequence[ShardLayout], items: Sequence[int], tensors: Sequence[torch.Tensor], dtypes: Sequence[str]
) -> Steps[list[_Window]]:
    windows: list[_Window] = []
    before = 0  # items in the shards before
    for shard in shards:
        for window in shard.windows:
            pieces = yield from collected(_pieces(shard, window))
            numbers, offsets, sizes, skips = zip(*pieces, strict=True) if pieces else ((),) * 4
            sources = tuple(items[before + number] for number in numbers)
            into = tuple((yield from collected((converted_to(tensors[one], dtypes[one]) for one in sources), _EVERY)))
            copies = zip(map(tensors.__getitem__, sources), offsets, sizes, repeat(None), skips, into)
            starts = yield from collected(_start(Copy(*copy)) for copy in copies)
            columns = columns_of(offsets, sizes, starts, skips, into)
            windows.append(_Window(window.end - window.start, sources, columns))
        before += len(shard.items)
    return windows


def _start(copy: Copy) -> int | None:
    """Where the bytes begin in memory of the host, which does not change while the state dict looks the same."""
    return raw_start(copy) if copy.source.is_cpu else None


def _place_value(fqn: str, path: tuple[Key, ...], value: Any, content: bytearray) -> ValueEntry:
    if isinstance(value, Composite):
        raise UnsupportedTensorError(
            f"{fqn}: cannot save {value.kind}: this version saves plain tensors of one process; save the "
            "tensors that it is made of (to_local(), indices and values) or a dense, full one"
        )
    node = encode_value(value, fqn)
    item = frame_value(*pickle_node(node))
    entry = ValueEntry(path, _VALUES_FILE, len(content), len(item), node)
    content += item
    return entry


def converted_to(tensor: torch.Tensor, dtype: str) -> torch.dtype | None:
    """Return what a copy converts ``tensor`` to; None if ``dtype`` is the one that it has."""
    wanted = dtype_from_name(dtype)
    return None if wanted == tensor.dtype else wanted


def window_copies(
    shard: ShardLayout,
    window: Window,
    before: int,
    tensors: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype | None],
) -> Iterator[Copy]:
    """What fills ``window``: ``tensors[before + i]`` is the tensor of the shard's item ``i``, and ``dtypes`` what it is
    converted to."""
    for index, offset, nbytes, skip in _pieces(shard, window):
        yield Copy(tensors[before + index], offset, nbytes, None, skip, dtypes[before + index])


def _pieces(shard: ShardLayout, window: Window) -> Iterator[tuple[int, int, int, int]]:
    """Of each item with payload in ``window``: its number, where the bytes go, how many, and how many came before."""
    for index in range(window.first, window.last):
        frame, item_offset = shard.items[index]
        payload = item_offset + len(frame.header)
        start, end = max(payload, window.start), min(payload + frame.payload_bytes, window.end)
        if start < end:
            yield index, start - window.start, end - start, start - payload
