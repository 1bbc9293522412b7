"""The entries of a checkpoint as they stand in its two files of metadata, and a template of them.

From save to save only checksums and plain values differ. What is around them is rendered once for each plan: of 10,000
tensors it would cost the trainer's interpreter 0.15 s in every save.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from ..._runtime.threads import politely
from ..manifest import entry_line, head_line, line_around_checksums, metadata_line
from ..marker import Marker
from ..records import Entry, Manifest, TensorEntry, ValueEntry
from ..shard import BlockSums
from .write import MetadataHead, dtypes_of, metadata_end, places_of

__all__ = ["Described", "Template", "describe"]

_EVERY = 128
_MANY = 1024  # of what takes 0.1 us


@dataclass(frozen=True, slots=True)
class Described:
    """``count`` entries: their lines in the manifest, and ``.metadata`` up to where the places end."""

    count: int
    lines: bytes
    places: bytes

    def manifest(self, manifest: Manifest, torch_version: str) -> bytes:
        """The whole file. ``manifest`` has the rest; its own entries are not looked at."""
        head = head_line(manifest, torch_version, self.count)
        return b"".join([head, self.lines, metadata_line(manifest)])

    def metadata(self, marker: Marker) -> bytes:
        """The whole ``.metadata``."""
        return b"".join([self.places, *metadata_end(marker)])


def describe(entries: Mapping[str, Entry]) -> Described:
    """In a worker thread."""
    head = MetadataHead(dtypes_of(entries.values()))
    lines: list[bytes] = []
    places: list[bytes] = []
    for fqn, entry in politely(entries.items()):
        head.add(fqn, entry)
        lines.append(entry_line(fqn, entry))
        places.append(places_of(fqn, entry))
    return Described(len(entries), b"".join(lines), b"".join(chain(head.pieces(), places)))


class Template:
    """What ``describe`` gives for ``entries``, with holes: for the values, which are written anew each time, and for
    the checksums of the tensors, each of which has one chunk without any."""

    def __init__(self, entries: Iterable[tuple[str, Entry]], dtypes: Iterable[str], items: Sequence[int]) -> None:
        """``dtypes``: those of the tensors. ``items``: for each tensor among the entries, in order, whose checksums are
        its own. In a worker thread. Of ``entries`` nothing is kept: 10,000 of them would be walked by the garbage
        collector again and again."""
        self._items = items
        head = MetadataHead(dtypes)
        self._lines: list[bytes] = []  # what stands before each hole, and after the last
        self._tensors: list[int] = []  # which of the holes are theirs
        self._values: list[int] = []
        self._places: list[bytes] = []  # what stands before the place of each value, and after the last
        line = b""
        places: list[bytes] = []
        self._count = 0
        for fqn, entry in politely(entries, _EVERY):
            self._count += 1
            head.add(fqn, entry)
            if isinstance(entry, ValueEntry):
                self._values.append(len(self._lines))
                self._lines.append(line)
                self._places.append(b"".join(places))
                line, places = b"", []
            elif isinstance(entry, TensorEntry):
                before, after = line_around_checksums(fqn, entry)
                self._tensors.append(len(self._lines))
                self._lines.append(line + before)
                places.append(places_of(fqn, entry))
                line = after
            else:
                line += entry_line(fqn, entry)
        self._lines.append(line)
        self._places.append(b"".join(places))
        self._head = b"".join(head.pieces())

    def fill(self, values: Mapping[str, ValueEntry], sums: Sequence[BlockSums]) -> Described:
        """``values`` in their order among the entries. For a worker thread: some 0.5 us for each tensor."""
        checksums = list(_encoded(sums))
        holes = [b""] * (len(self._lines) - 1)
        for hole, item in politely(zip(self._tensors, self._items, strict=True), _MANY):
            holes[hole] = checksums[item]
        for hole, (fqn, value) in politely(zip(self._values, values.items(), strict=True), _EVERY):
            holes[hole] = entry_line(fqn, value)
        places = [places_of(fqn, value) for fqn, value in politely(values.items(), _EVERY)]
        return Described(self._count, _woven(self._lines, holes), self._head + _woven(self._places, places))


def _woven(pieces: Sequence[bytes], holes: Sequence[bytes]) -> bytes:
    woven = [b""] * (2 * len(holes) + 1)
    woven[::2], woven[1::2] = pieces, holes
    return b"".join(woven)


def _encoded(sums: Iterable[BlockSums]) -> Iterator[bytes]:
    """As between the quotation marks of a line."""
    for one in sums:
        if one.digests:
            for crcs, digests in politely(zip(one.crcs, one.digests, strict=True), _EVERY):
                yield _base64(crcs) + b'","' + _base64(digests)
        else:
            yield from map(_base64, politely(one.crcs, _MANY))


def _base64(raw: bytes) -> bytes:
    return b2a_base64(raw, newline=False)
