"""The plan of a save. It has the file and offset of every item before a byte is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch

from .._format.dcp import Described, Template
from .._format.records import (
    BLOCK_BYTES,
    CompositeEntry,
    EmptyEntry,
    Entry,
    Key,
    Node,
    TensorEntry,
    ValueEntry,
    all_parts,
    name_problem,
)
from .._format.shard import BlockSums, ShardLayout
from .._format.values import ValueItems
from .._runtime.pauses import chunked, collected, pause_point
from .._runtime.torch_probes import check_tensor, dtype_from_name, dtype_name, storage_key, view_key
from .._staging import (
    Captured,
    Columns,
    Composite,
    Copies,
    Copy,
    ImageLayout,
    PlanCache,
    columns_of,
    raw_start,
)
from ..errors import InvalidOptionError, UnsupportedTensorError
from .composites.entry import composite_entry
from .flatten import CompositeLeaf, Leaf, LeafKind, check_saved, leaves_of
from .structure import outline_of
from .values import encode_value

SHARD_BYTES = 2 << 30
"""The most that a shard file holds, unless it holds one larger tensor."""

_WINDOW_BYTES = (32 << 20, 512 << 20)
_WINDOWS = 128  # of a large state: their copies and gaps fit into the queue of a device's stream
_BUDGET_WINDOWS = 4  # in a small budget, so that some are staged while others are written

_RANK = 0
_VALUES_FILE = f"__{_RANK}_0.distcp"
_EVERY = 128  # items of less than a microsecond, between two points for pauses


class _Tensors(NamedTuple):
    """The tensors in the order of the state dict, as columns. ``items`` are numbered over all shards.

    With a record for each tensor, the garbage collector would have more objects to traverse, with the GIL held. For
    10,000 tensors that took as long as the plan itself.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    items: tuple[int, ...]


class _Window(NamedTuple):
    """The copies that fill a window. ``sources`` are indices of tensors."""

    nbytes: int
    sources: tuple[int, ...]
    columns: Columns

    def over(self, tensors: Sequence[torch.Tensor]) -> ImageLayout:
        sources: Sequence[torch.Tensor] = tensors
        if self.sources != tuple(range(len(tensors))):
            sources = collected(map(tensors.__getitem__, self.sources), _EVERY)
        return ImageLayout(self.nbytes, Copies(self.columns, sources))


@dataclass(slots=True)
class _Layout:
    """The places of the tensors of a state dict. It is cached for tensors with the same look, and refers to no tensors
    or values.

    Its description is kept for the newest outline only, because values may have other names in every save."""

    shards: tuple[ShardLayout, ...]
    windows: tuple[_Window, ...]
    tensors: _Tensors
    newest: tuple[tuple[Any, ...], _Description] | None = None

    def describe(self, outline: tuple[Any, ...], leaves: Callable[[], Sequence[Leaf]]) -> _Description:
        """Describe a state dict with these tensors. Raises ``UnsafeObjectError``, ``KeyCollisionError`` and
        ``InvalidOptionError``."""
        newest = self.newest  # read once, because another save may replace it meanwhile
        # Two saves may be planned at once with the same layout. Both are right with their own description: the
        # attribute is replaced as a whole, and neither reads it twice.
        if newest is None or newest[0] != outline:
            fqns: list[str] = []
            paths: list[tuple[Key, ...]] = []
            kinds: list[LeafKind] = []
            for some in chunked(leaves(), _EVERY):
                for leaf in some:
                    if problem := name_problem(leaf.fqn, leaf.path):
                        raise InvalidOptionError(problem)
                fqns += [leaf.fqn for leaf in some]
                paths += [leaf.path for leaf in some]
                kinds += [leaf.kind for leaf in some]
                pause_point()
            description = _Description(self.shards, self.tensors, tuple(fqns), tuple(paths), tuple(kinds))
            newest = self.newest = (outline, description)
        return newest[1]


@dataclass(frozen=True, slots=True)
class _Description:
    """The leaves of a state dict with one outline, as columns, for the manifest and ``.metadata``."""

    shards: tuple[ShardLayout, ...]
    tensors: _Tensors
    fqns: tuple[str, ...]
    paths: tuple[tuple[Key, ...], ...]
    kinds: tuple[LeafKind, ...]
    templates: dict[tuple[str, ...], Template] = field(default_factory=dict)

    def named_values(self) -> Iterator[tuple[str, tuple[Key, ...]]]:
        """Yield FQN and path of each value and each composite tensor."""
        kinds = zip(self.fqns, self.paths, self.kinds, strict=True)
        return ((fqn, path) for fqn, path, kind in kinds if kind in ("value", "composite"))

    def template(self, files: tuple[str, ...]) -> Template:
        """Return the template for shards in these files."""
        found = self.templates.get(files)
        if found is None:
            # On local directories the names are the same in every save, and the template is made once. On object
            # storage they contain the id of the save.
            self.templates.clear()  # names with the id of a save are not used again
            found = Template.of(self._blank(files), set(self.tensors.dtypes), self.tensors.items)
            self.templates[files] = found
        return found

    def _blank(self, files: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
        """Yield the entries without checksums and values."""
        placed = [(item, file) for shard, file in zip(self.shards, files, strict=True) for item in shard.items]
        tensors = zip(*self.tensors, strict=True)
        for fqn, path, kind in zip(self.fqns, self.paths, self.kinds, strict=True):
            if kind == "tensor":
                dtype, shape, item = next(tensors)
                place, file = placed[item]
                chunk = place.chunk((0,) * len(shape), shape, file)  # without checksums
                yield fqn, TensorEntry(path, dtype, shape, (chunk,))
            elif kind == "composite":
                yield fqn, CompositeEntry(path, "", "", (), None, ())
            else:
                yield fqn, EmptyEntry(path) if kind == "empty" else ValueEntry(path, "", 0, 0)


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """The data files of one rank. ``shards[i]`` is the layout of the file ``shard_file(i)``. ``images`` have the
    copies, one image for each window of each shard, in this order. ``values`` is the content of the file of plain
    values (empty: no such file). ``nbytes`` is the size of all data files."""

    rank: int
    shards: tuple[ShardLayout, ...]
    images: tuple[ImageLayout, ...]
    values: bytes

    def without_sources(self) -> Self:
        """Return the plan without the copies, which refer to the sources."""
        return replace(self, images=())

    @property
    def nbytes(self) -> int:
        return len(self.values) + sum(shard.nbytes for shard in self.shards)

    @property
    def files(self) -> dict[str, int]:
        files = {self.values_file: len(self.values)} if self.values else {}
        files.update((self.shard_file(index), shard.nbytes) for index, shard in enumerate(self.shards))
        return files

    @property
    def values_file(self) -> str:
        return f"__{self.rank}_0.distcp"

    def shard_file(self, index: int) -> str:
        return f"__{self.rank}_{index + 1}.distcp"


@dataclass(frozen=True, slots=True)
class SavePlan(PlannedFiles):
    """The plan of a save of one process. ``value_entries`` also has the composite tensors."""

    description: _Description
    value_entries: Mapping[str, ValueEntry | CompositeEntry]
    containers: Mapping[str, str]

    def named_tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        """Yield FQN, dtype, shape and item of each plain tensor that is not part of another one. Items are numbered
        over all shards."""
        columns, parts = self.description, all_parts(self._composites())
        fqns = (fqn for fqn, kind in zip(columns.fqns, columns.kinds, strict=True) if kind == "tensor")
        return (one for one in zip(fqns, *columns.tensors, strict=True) if one[0] not in parts)

    def named_composites(self) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
        """Yield FQN, dtype, shape and type of each composite tensor that is not part of another one."""
        found = self._composites()
        parts = all_parts(found)
        return ((fqn, one.dtype, one.shape, one.type) for fqn, one in found.items() if fqn not in parts)

    def _composites(self) -> dict[str, CompositeEntry]:
        return {fqn: one for fqn, one in self.value_entries.items() if isinstance(one, CompositeEntry)}

    def describe(self, sums: Sequence[BlockSums], names: Mapping[str, str]) -> Described:
        """Render the entries. ``sums`` has the checksums of each shard, and ``names`` the name of each of the ``files``
        in the committed checkpoint."""
        file = names.get(self.values_file, "")
        values = collected(
            (fqn, replace(entry, file=file) if isinstance(entry, ValueEntry) else entry)
            for fqn, entry in self.value_entries.items()
        )
        files = tuple(names[self.shard_file(index)] for index in range(len(self.shards)))
        return self.description.template(files).fill(dict(values), sums)

    @classmethod
    def of(cls, plans: PlanCache, budget_bytes: int, captured: Captured) -> SavePlan:
        """Plan the save of a captured state dict. Uses a cached layout if ``plans`` has one for tensors with the same
        look.

        The state is staged and written in windows. Several windows fit into ``budget_bytes``. The plan takes some 10 us
        per tensor, or 1 us if the layout is cached. Tensors that are the same view of the same storage (tied weights)
        share one item. Raises ``UnsafeObjectError``, ``UnsupportedTensorError``, ``KeyCollisionError`` or
        ``InvalidOptionError`` with the FQN.
        """
        outline = outline_of(captured.root)
        tensors = outline.tensors
        leaves = cache(lambda: collected(leaves_of(captured.root)))
        # The same tensors may have other names, and be converted to other dtypes under these.
        converted = (tuple(captured.dtypes.items()), outline.key) if captured.dtypes else ()
        key = ("save", budget_bytes, converted)
        # Two parts with two keys. Where the tensors lie in files depends on the tensors alone, and is kept by their
        # look. How they are called is kept beside it for the newest names. Values are encoded in every save, because
        # they change.
        layout = plans.get_for(tensors, key, lambda: _lay_out(leaves, captured, budget_bytes))
        description = layout.describe(outline.key, leaves)
        items = ValueItems()
        entries: dict[str, ValueEntry | CompositeEntry] = {}
        if outline.values:
            for (fqn, path), value in zip(description.named_values(), outline.values, strict=True):
                if isinstance(value, CompositeLeaf):
                    entries[fqn] = composite_entry(fqn, path, value.form)
                else:
                    node = _encode(fqn, value)
                    entries[fqn] = ValueEntry(path, _VALUES_FILE, *items.add(fqn, node), node)
                pause_point()
            items.check()
        images = tuple(window.over(tensors) for window in layout.windows)
        content = items.content()
        return cls(_RANK, description.shards, images, content, description, entries, captured.containers)


def window_bytes_for(total: int, budget_bytes: int) -> int:
    """Return the bytes of a window for a state of ``total`` bytes within a budget."""
    low, high = _WINDOW_BYTES
    # Windows of a fixed fraction of the state, so that writing can begin early, but neither so small that system calls
    # count nor so large that the budget holds too few of them to overlap copies and writes.
    wanted = min(max(total // _WINDOWS, low), high, budget_bytes // _BUDGET_WINDOWS)
    return max(wanted // BLOCK_BYTES, 1) * BLOCK_BYTES


def _lay_out(find: Callable[[], Sequence[Leaf]], captured: Captured, budget_bytes: int) -> _Layout:
    leaves = find()
    copied = captured.held
    tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    window_bytes = window_bytes_for(sum(map(attrgetter("nbytes"), tensors)), budget_bytes)
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    numbers: list[int] = []  # the item of each tensor
    items: list[int] = []  # the tensor whose bytes each item holds, over all shards
    looks: list[tuple[str, tuple[int, ...]]] = []
    known: dict[tuple[object, ...], int] = {}
    for leaf in leaves:
        pause_point()
        tensor = leaf.value
        if not isinstance(tensor, torch.Tensor):
            continue
        check_tensor(tensor, leaf.fqn, held=bool(copied) and storage_key(tensor) in copied)
        dtype, shape = captured.dtypes.get(leaf.fqn) or dtype_name(tensor.dtype), tuple(tensor.shape)
        check_saved(leaf.fqn, dtype, shape)
        identity = (*view_key(tensor), dtype)
        # Tied tensors share one item. Empty ones never do: all of them have address 0 and no bytes.
        number = known.get(identity) if tensor.numel() else None
        if number is None:
            number = known[identity] = len(items)
            items.append(len(numbers))
            looks.append((dtype, shape))
        dtypes.append(dtype)
        shapes.append(shape)
        numbers.append(number)
    shards = tuple(ShardLayout.lay_out(looks, SHARD_BYTES, window_bytes))
    placed = _Tensors(tuple(dtypes), tuple(shapes), tuple(numbers))
    windows = _windows(shards, items, tensors, dtypes)
    return _Layout(shards, tuple(windows), placed)


def _windows(
    shards: Sequence[ShardLayout], items: Sequence[int], tensors: Sequence[torch.Tensor], dtypes: Sequence[str]
) -> list[_Window]:
    windows: list[_Window] = []
    before = 0  # items in the shards before
    for shard in shards:
        for window in shard.windows:
            pieces = collected(shard.payloads_in(window))
            numbers, offsets, sizes, skips = zip(*pieces, strict=True) if pieces else ((),) * 4
            sources = tuple(items[before + number] for number in numbers)
            into = tuple(collected((converted_to(tensors[one], dtypes[one]) for one in sources), _EVERY))
            copies = map(Copy, map(tensors.__getitem__, sources), offsets, sizes, repeat(None), skips, into)
            # Computed once, when the plan is made: a known plan then copies small tensors in C, from addresses that are
            # read at the time of the copy. Starts in the storages are the same for tensors with the same look.
            starts = collected(raw_start(copy) if copy.source.is_cpu else None for copy in copies)
            columns = columns_of(offsets, sizes, starts, skips, into)
            windows.append(_Window(window.end - window.start, sources, columns))
        before += len(shard.items)
    return windows


def _encode(fqn: str, value: Any) -> Node:
    if isinstance(value, Composite):
        raise UnsupportedTensorError(
            f"{fqn}: cannot save {value.kind}: this version saves plain tensors of one process; save the "
            "tensors that it is made of (to_local(), indices and values) or a dense, full one"
        )
    return encode_value(value, fqn)


def converted_to(tensor: torch.Tensor, dtype: str) -> torch.dtype | None:
    """Return the dtype to which a copy converts ``tensor``. None if ``dtype`` is its own dtype."""
    wanted = dtype_from_name(dtype)
    return None if wanted == tensor.dtype else wanted


def images_of(
    shards: Sequence[ShardLayout], tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype | None]
) -> tuple[ImageLayout, ...]:
    """Return the copies that fill each window of each shard. ``tensors`` are those of the items, numbered over all
    shards, and ``dtypes`` has the dtype to which each is converted."""
    images: list[ImageLayout] = []
    before = 0  # items in the shards before
    for shard in shards:
        for window in shard.windows:
            copies = collected(
                Copy(tensors[before + number], offset, nbytes, None, skip, dtypes[before + number])
                for number, offset, nbytes, skip in shard.payloads_in(window)
            )
            images.append(ImageLayout(window.end - window.start, tuple(copies)))
        before += len(shard.items)
    return tuple(images)
