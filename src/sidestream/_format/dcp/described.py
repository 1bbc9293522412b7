"""The entries of a checkpoint as bytes of its two files of metadata, and a template of these bytes.

Two saves of one plan differ only in checksums and plain values. All other bytes are rendered once for each plan. For
10,000 tensors that would take 0.15 s of the trainer's interpreter in every save.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct

from ..._runtime.steps import Steps, chunked, collected
from ..manifest import entry_line, head_line, line_around_checksums, metadata_line
from ..marker import Marker
from ..records import CompositeEntry, Entry, Manifest, TensorEntry, ValueEntry
from ..shard import BlockSums
from .write import MetadataHead, dtypes_of, metadata_end, places_of

__all__ = ["Described", "Template", "describe"]

_MANY = 1024  # of steps that take 0.1 us
_CRC_BYTES = 4


@dataclass(frozen=True, slots=True)
class Described:
    """The rendered form of ``count`` entries: their lines in the manifest, and ``.metadata`` up to the end of the
    places, each in pieces, which are joined once. ``composite``: whether composite tensors are among them."""

    count: int
    lines: Sequence[bytes]
    places: Sequence[bytes]
    composite: bool

    def manifest(self, manifest: Manifest, torch_version: str) -> bytes:
        """Return the whole file. ``manifest`` has everything except the entries; its own entries are ignored."""
        head = head_line(manifest, torch_version, self.count, composite=self.composite)
        return b"".join([head, *self.lines, metadata_line(manifest)])

    def metadata(self, marker: Marker) -> bytes:
        """Return the whole ``.metadata``."""
        return b"".join([*self.places, *metadata_end(marker)])


def describe(entries: Mapping[str, Entry]) -> Steps[Described]:
    """Render the entries for both files."""
    head = MetadataHead(dtypes_of(entries.values()))
    lines: list[bytes] = []
    places: list[bytes] = []
    for fqn, entry in entries.items():
        yield
        head.add(fqn, entry)
        lines.append(entry_line(fqn, entry))
        places.append(places_of(fqn, entry))
    composite = any(isinstance(entry, CompositeEntry) for entry in entries.values())
    return Described(len(entries), lines, [*head.pieces(), *places], composite)


class Template:
    """The result of ``describe`` with holes: for values and composite tensors, which are rendered for each save, and
    for the checksums of tensors. Each tensor has one chunk without checksums."""

    def __init__(self, items: Sequence[int]) -> None:
        self._items = items
        self._in_order = list(items) == list(range(len(items)))  # each tensor has an item of its own
        self._lines: list[bytes] = []  # the bytes before each hole, and after the last one; tensors have one each
        self._values: list[int] = []  # the holes for values and composite tensors
        self._places: list[bytes] = []  # the bytes before the place of each value, and after the last one
        self._count = 0
        self._composite = False
        self._head = b""

    @classmethod
    def of(cls, entries: Iterable[tuple[str, Entry]], dtypes: Iterable[str], items: Sequence[int]) -> Steps[Template]:
        """Render ``entries``, whose tensors have these ``dtypes``. ``items`` has, for each tensor in order, the index
        of the item with its checksums. The template does not refer to ``entries``, because the garbage collector would
        traverse 10,000 of them repeatedly."""
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
        """Fill the holes. ``values`` has the values and composite tensors in the order of the entries. Takes some 0.2
        us for each tensor."""
        checksums = yield from _encoded(sums)
        if not self._in_order:
            checksums = yield from collected(map(checksums.__getitem__, self._items), _MANY)
        holes: list[bytes] = []
        done = 0  # tensors
        for hole, (fqn, value) in zip(self._values, values.items(), strict=True):
            before = hole - len(holes)
            holes += checksums[done : done + before]
            holes.append(entry_line(fqn, value))
            done += before
            yield
        holes += checksums[done:]
        places = yield from collected(map(places_of, values.keys(), values.values()))
        written = [self._head, *_woven(self._places, places)]
        return Described(self._count, _woven(self._lines, holes), written, self._composite)


def _woven(pieces: Sequence[bytes], holes: Sequence[bytes]) -> list[bytes]:
    woven = [b""] * (2 * len(holes) + 1)
    woven[::2], woven[1::2] = pieces, holes
    return woven


def _encoded(sums: Iterable[BlockSums]) -> Steps[list[bytes]]:
    """Return the checksums of each item as they are between the quotation marks of a line."""
    found: list[bytes] = []
    for one in sums:
        if one.digests:
            both = zip(map(_base64, one.crcs), map(_base64, one.digests), strict=True)
            found += yield from collected((crcs + b'","' + digests for crcs, digests in both), _MANY // 4)
        else:
            for some in chunked(one.crcs, _MANY):
                found += _encoded_crcs(some)
                yield
    return found


def _encoded_crcs(crcs: list[bytes]) -> Iterable[bytes]:
    """Return ``crcs`` in base64. Those of items with one block, as small ones are, are encoded together."""
    if set(map(len, crcs)) != {_CRC_BYTES}:
        return map(_base64, crcs)
    raw = b"".join(crcs)
    padded = bytearray(6 * len(crcs))  # whole groups of three bytes
    for byte in range(_CRC_BYTES):
        padded[byte::6] = raw[byte::_CRC_BYTES]
    encoded = bytearray(_base64(padded))
    encoded[6::8] = encoded[7::8] = b"=" * len(crcs)  # in place of the last byte of padding
    return _cut(len(crcs)).unpack(encoded)


@lru_cache(maxsize=16)
def _cut(count: int) -> Struct:
    return Struct("8s" * count)


def _base64(raw: bytes | bytearray) -> bytes:
    return b2a_base64(raw, newline=False)
