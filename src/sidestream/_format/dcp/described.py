"""The entries of a checkpoint as they stand in its two files of metadata, and a template of them.

From save to save only checksums and plain values differ. What is around them is rendered once for each plan: of 10,000
tensors it would cost the trainer's interpreter 0.15 s in every save.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..._runtime.steps import Steps, chunked, collected
from ..manifest import entry_line, head_line, line_around_checksums, metadata_line
from ..marker import Marker
from ..records import CompositeEntry, Entry, Manifest, TensorEntry, ValueEntry
from ..shard import BlockSums
from .write import MetadataHead, dtypes_of, metadata_end, places_of

__all__ = ["Described", "Template", "describe"]

_MANY = 1024  # of what takes 0.1 us


@dataclass(frozen=True, slots=True)
class Described:
    """``count`` entries: their lines in the manifest, and ``.metadata`` up to where the places end. ``composite``:
    whether there are composite tensors among them."""

    count: int
    lines: bytes
    places: bytes
    composite: bool

    def manifest(self, manifest: Manifest, torch_version: str) -> bytes:
        """The whole file. ``manifest`` has the rest; its own entries are not looked at."""
        head = head_line(manifest, torch_version, self.count, composite=self.composite)
        return b"".join([head, self.lines, metadata_line(manifest)])

    def metadata(self, marker: Marker) -> bytes:
        """The whole ``.metadata``."""
        return b"".join([self.places, *metadata_end(marker)])


def describe(entries: Mapping[str, Entry]) -> Steps[Described]:
    """The entries as they stand in both files."""
    head = MetadataHead(dtypes_of(entries.values()))
    lines: list[bytes] = []
    places: list[bytes] = []
    for fqn, entry in entries.items():
        yield
        head.add(fqn, entry)
        lines.append(entry_line(fqn, entry))
        places.append(places_of(fqn, entry))
    composite = any(isinstance(entry, CompositeEntry) for entry in entries.values())
    return Described(len(entries), b"".join(lines), b"".join(chain(head.pieces(), places)), composite)


class Template:
    """What ``describe`` gives for ``entries``, with holes: for the values and the composite tensors, which are written
    anew each time, and for the checksums of the tensors, each of which has one chunk without any."""

    def __init__(self, items: Sequence[int]) -> None:
        self._items = items
        self._lines: list[bytes] = []  # what stands before each hole, and after the last
        self._tensors: list[int] = []  # which of the holes are theirs
        self._values: list[int] = []
        self._places: list[bytes] = []  # what stands before the place of each value, and after the last
        self._count = 0
        self._composite = False
        self._head = b""

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Entry]], dtypes: Iterable[str], items: Sequence[int]) -> Steps[Template]:
        """``dtypes``: those of the tensors. ``items``: for each tensor among the entries, in order, whose checksums are
        its own. Of ``entries`` nothing is kept: 10,000 of them would be walked by the garbage collector again and
        again."""
        made = cls(items)
        head = MetadataHead(dtypes)
        line = b""
        places: list[bytes] = []
        for fqn, entry in entries:
            yield
            made._count += 1
            head.add(fqn, entry)
            if isinstance(entry, ValueEntry | CompositeEntry):
                made._composite |= isinstance(entry, CompositeEntry)
                made._values.append(len(made._lines))
                made._lines.append(line)
                made._places.append(b"".join(places))
                line, places = b"", []
            elif isinstance(entry, TensorEntry):
                before, after = line_around_checksums(fqn, entry)
                made._tensors.append(len(made._lines))
                made._lines.append(line + before)
                places.append(places_of(fqn, entry))
                line = after
            else:
                line += entry_line(fqn, entry)
        made._lines.append(line)
        made._places.append(b"".join(places))
        made._head = b"".join(head.pieces())
        return made

    def fill(self, values: Mapping[str, ValueEntry | CompositeEntry], sums: Sequence[BlockSums]) -> Steps[Described]:
        """``values``, and composite tensors among them, in their order among the entries. Takes some 0.5 us for each
        tensor."""
        checksums = yield from collected(_encoded(sums), _MANY // 4)
        holes = [b""] * (len(self._lines) - 1)
        for pairs in chunked(zip(self._tensors, self._items, strict=True), _MANY):
            for hole, item in pairs:
                holes[hole] = checksums[item]
            yield
        for hole, (fqn, value) in zip(self._values, values.items(), strict=True):
            holes[hole] = entry_line(fqn, value)
            yield
        places = yield from collected(map(places_of, values.keys(), values.values()))
        lines, written = _woven(self._lines, holes), self._head + _woven(self._places, places)
        return Described(self._count, lines, written, self._composite)


def _woven(pieces: Sequence[bytes], holes: Sequence[bytes]) -> bytes:
    woven = [b""] * (2 * len(holes) + 1)
    woven[::2], woven[1::2] = pieces, holes
    return b"".join(woven)


def _encoded(sums: Iterable[BlockSums]) -> Iterator[bytes]:
    """As between the quotation marks of a line."""
    for one in sums:
        if one.digests:
            for crcs, digests in zip(one.crcs, one.digests, strict=True):
                yield _base64(crcs) + b'","' + _base64(digests)
        else:
            yield from map(_base64, one.crcs)


def _base64(raw: bytes) -> bytes:
    return b2a_base64(raw, newline=False)
