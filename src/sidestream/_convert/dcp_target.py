"""A checkpoint of ours as a target: shards, and the entries of its manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .._format.frame import frame_tensor, frame_value
from .._format.records import Chunk, EmptyEntry, Entry, TensorEntry, ValueEntry
from .._format.shard import BlockSums, Sealer, ShardLayout, Window, lay_out
from .._format.values import pickle_node
from .._runtime.threads import Deadline, Stop, politely
from .targets import OutTensor, OutValue, Slice, TargetFile, Written

__all__ = ["DcpTarget"]


class _Shard:
    """A shard of ours."""

    aligned = True

    def __init__(self, name: str, layout: ShardLayout, tensors: Sequence[OutTensor]) -> None:
        self.name, self.nbytes = name, layout.nbytes
        self.windows = [(window.start, window.end) for window in layout.windows]
        self.layout = layout
        self.sealer = Sealer(layout)
        self._tensors = tensors

    def slices(self, index: int) -> Iterator[Slice]:
        window: Window = self.layout.windows[index]
        for number in range(window.first, window.last):
            item = self.layout.items[number]
            start, end = max(item.payload_offset, window.start), min(item.trailer_offset, window.end)
            if start < end:
                yield Slice(self._tensors[number], start - item.payload_offset, end - start, start - window.start)

    def seal(self, index: int, view: memoryview, stop: Stop, deadline: Deadline) -> None:
        for _ in politely(self.sealer.seal(view, self.layout.windows[index], stop=stop, deadline=deadline)):
            stop.check()


class DcpTarget:
    """A checkpoint of ours: its shards, and its entries when they have been written."""

    def __init__(
        self, tensors: Sequence[OutTensor], values: Sequence[OutValue], shard_bytes: int, window_bytes: int
    ) -> None:
        self._tensors, self._values = tensors, values
        distinct: dict[object, OutTensor] = {}
        for one in tensors:
            distinct.setdefault(one.identity, one)
        items = list(distinct.values())
        layouts = list(lay_out((frame_tensor(one.dtype, one.shape) for one in items), shard_bytes, window_bytes))
        self.shards: list[_Shard] = []
        self._places: dict[object, tuple[int, int]] = {}
        for layout in layouts:
            first, items = items[: len(layout.items)], items[len(layout.items) :]
            for number, one in enumerate(first):
                self._places[one.identity] = (len(self.shards), number)
            self.shards.append(_Shard(f"__0_{len(self.shards) + 1}.distcp", layout, first))
        self._entries: dict[str, ValueEntry | EmptyEntry] = {}
        content = bytearray()
        for value in values:
            if value.empty:
                self._entries[value.fqn] = EmptyEntry(value.path)
                continue
            item = frame_value(*pickle_node(value.node))
            self._entries[value.fqn] = ValueEntry(value.path, "__0_0.distcp", len(content), len(item), value.node)
            content += item
        self.values = bytes(content)

    @property
    def data_files(self) -> list[TargetFile]:
        files: list[TargetFile] = []
        if self.values:
            files.append(Written("__0_0.distcp", [(0, len(self.values), self.values)], max(len(self.values), 1)))
        return [*files, *self.shards]

    def entries(self, order: Sequence[str], names: Mapping[str, str]) -> dict[str, Entry]:
        """By FQN, in this order; complete when everything has been sealed. ``names``: what the files are called."""
        found: dict[str, Entry] = {
            fqn: replace(one, file=names[one.file]) if isinstance(one, ValueEntry) else one
            for fqn, one in self._entries.items()
        }
        for one in self._tensors:
            shard, number = self._places[one.identity]
            placed = self.shards[shard].layout.items[number]
            sums: BlockSums = self.shards[shard].sealer.sums
            chunk = Chunk(
                (0,) * len(one.shape),
                one.shape,
                names[self.shards[shard].name],
                placed.item_offset,
                placed.frame.item_bytes,
                placed.payload_offset,
                sums.crcs[number],
            )
            found[one.fqn] = TensorEntry(one.path, one.dtype, one.shape, (chunk,))
        return {fqn: found[fqn] for fqn in order}
