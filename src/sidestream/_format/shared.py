"""The manifest of a checkpoint that several ranks wrote: a small root, and one part for each rank.

The root has the entries, as rows, and the ranks that have the boxes of each. A part has the places of the boxes of its
rank, with their checksums. Rows that are divided among the ranks in the same way share a *pattern*, so that the root
stays small. A reader fetches only the parts of the ranks whose boxes it needs.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, cast

from .._runtime.pauses import collected, pause_point
from ..errors import CorruptCheckpointError
from .records import (
    Chunk,
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Entry,
    Key,
    Manifest,
    Node,
    TensorEntry,
    ValueEntry,
    name_of,
)

_MOST_ROWS = 1 << 32


class PlacedBox(NamedTuple):
    """A box of a tensor that ``rank`` has written."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SharedRow(NamedTuple):
    """A row. ``kind`` is ``"tensor"``, ``"value"``, ``"empty"`` or ``"composite"``. ``pattern`` is the number of a
    tensor's pattern, the rank that has written a value, or -1. ``composite`` is the entry of a composite tensor, whose
    parts have rows of their own."""

    kind: str
    fqn: str
    path: tuple[Key, ...]
    dtype: str
    shape: tuple[int, ...]
    pattern: int
    composite: CompositeEntry | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """The rows of a save of several ranks, and the patterns that divide them among the ranks."""

    rows: tuple[SharedRow, ...]
    patterns: tuple[tuple[PlacedBox, ...], ...]

    @property
    def composite(self) -> bool:
        """Whether there are composite tensors among the rows."""
        return any(row.composite is not None for row in self.rows)


class PartName(NamedTuple):
    """The length and CRC-32 of a rank's part of the manifest. A rank that has written nothing has no part (0 bytes)."""

    nbytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Root:
    """The root of a shared manifest: ``manifest`` without entries, ``shared``, and the ``parts`` by rank."""

    manifest: Manifest
    shared: Shared
    parts: tuple[PartName, ...]

    def join(self, parts: Mapping[int, RankPart], wanted: Collection[int] | None = None) -> Manifest:
        """Join the root and the parts of all ranks to a manifest.

        With ``wanted``, only these rows have chunks, and only for the boxes of ranks in ``parts``. Raises
        ``CorruptCheckpointError`` if a part lacks a box or a value that it has according to the root.
        """
        entries: dict[str, Entry] = {}
        for number, row in enumerate(self.shared.rows):
            pause_point()
            if row.fqn in entries:
                raise CorruptCheckpointError(f"the manifest has {row.fqn!r} twice", fqn=row.fqn)
            if row.kind == "tensor":
                # A load reads the parts of those ranks that have what it needs. The other rows are known by name and
                # shape only, which is enough for the comparison with the target.
                here = wanted is None or number in wanted
                chunks = tuple(self._chunks(parts, number, row, wanted is None)) if here else ()
                entries[row.fqn] = TensorEntry(row.path, row.dtype, row.shape, chunks)
            elif row.kind == "value":
                part = parts.get(row.pattern)
                found = None if part is None else part.values.get(number)
                if found is not None:
                    entries[row.fqn] = ValueEntry(row.path, *found)
                elif wanted is None or part is not None:
                    raise CorruptCheckpointError(f"{row.fqn}: its value is in no part of the manifest", fqn=row.fqn)
                else:
                    entries[row.fqn] = ValueEntry(row.path, "", 0, 0)
            else:
                entries[row.fqn] = row.composite or EmptyEntry(row.path)
        return replace(self.manifest, entries=entries, ranks=len(self.parts))

    def _chunks(self, parts: Mapping[int, RankPart], number: int, row: SharedRow, whole: bool) -> Iterator[Chunk]:
        for placed in self.shared.patterns[row.pattern]:
            part = parts.get(placed.rank)
            if part is None and not whole:
                continue
            chunk = None if part is None else part.chunks.get((number, name_of(placed.offsets)))
            if chunk is None or chunk.sizes != placed.sizes:
                raise CorruptCheckpointError(
                    f"{row.fqn}: its box at {placed.offsets} is in no part of the manifest", fqn=row.fqn
                )
            yield chunk


@dataclass(frozen=True, slots=True)
class RankPart:
    """The part of a rank: chunks by row and the name of their offsets (``name_of``), values by row."""

    chunks: Mapping[tuple[int, str], Chunk]
    values: Mapping[int, tuple[str, int, int, Node]]

    @staticmethod
    def parse(raw: bytes | bytearray) -> RankPart:
        """Parse the part of a rank. Raises ``CorruptCheckpointError``."""
        chunks: dict[tuple[int, str], Chunk] = {}
        values: dict[int, tuple[str, int, int, Node]] = {}
        lines = cast(list[bytes], raw.split(b"\n"))
        if lines.pop() != b"":
            raise CorruptCheckpointError("a part of the manifest is cut off")
        try:
            for line in lines:
                pause_point()
                row, offsets, *rest = json.loads(line.decode())
                if offsets is None:
                    # ``None`` in the place of the offsets tells a value from a chunk.
                    file, offset, nbytes, node = rest
                    _check(offset, nbytes)
                    _check_row(row)
                    values[row] = (_text(file), offset, nbytes, node)
                    continue
                _check_row(row)
                chunk = parse_chunk([offsets, *rest])
                chunks[row, name_of(chunk.offsets)] = chunk
        except (ValueError, TypeError, RecursionError, AttributeError) as error:
            if isinstance(error, CorruptCheckpointError):
                raise
            raise CorruptCheckpointError(f"a part of the manifest is damaged: {type(error).__name__}") from None
        return RankPart(chunks, values)


# --- parts ----------------------------------------------------------------------------------------------------------


def write_part(
    chunks: Sequence[tuple[int, Chunk]], values: Sequence[tuple[int, str, int, int, Node]]
) -> Iterator[bytes]:
    """Yield the lines of a part: the number of the row, and then the fields of an entry in a manifest."""
    for row, chunk in chunks:
        yield line_of([row, *chunk_fields(chunk)])
    for row, file, offset, nbytes, node in values:
        yield value_line_of([row, None, file, offset, nbytes, node], nbytes)


def chunk_fields(chunk: Chunk) -> list[object]:
    crcs = base64.b64encode(chunk.crcs).decode() if chunk.crcs else ""
    digests = [] if chunk.digests is None else [base64.b64encode(chunk.digests).decode()]
    place = (chunk.file, chunk.item_offset, chunk.item_bytes, chunk.payload_offset)
    return [chunk.offsets, chunk.sizes, *place, crcs, *digests]


def parse_chunk(fields: Sequence[Any]) -> Chunk:
    """Return the chunk with these fields. Raises ``CorruptCheckpointError``, ``ValueError`` and ``TypeError``."""
    offsets, sizes, file, item_offset, item_bytes, payload_offset, crcs, *digests = fields
    _check(item_offset, item_bytes, payload_offset, *offsets, *sizes)
    (digest,) = digests or (None,)
    return Chunk(
        tuple(offsets), tuple(sizes), _text(file), item_offset, item_bytes, payload_offset,
        base64.b64decode(crcs, validate=True),
        digests=None if digest is None else base64.b64decode(digest, validate=True),
    )  # fmt: skip


def path_fields(path: Sequence[Key]) -> list[object]:
    return [{"key": key.value} if isinstance(key, DictKey) else key for key in path]


def line_of(content: object) -> bytes:
    return _encode(content).encode() + b"\n"


_SLICE = 1 << 20


def value_line_of(content: object, item_bytes: int) -> bytes:
    """Return what ``line_of`` returns, for the fields of a value whose item has ``item_bytes``. Long strings in it are
    encoded in slices, because each call of the encoder holds the GIL."""
    # The encoder of ``json`` holds the GIL for a whole string, and the bytes of a value are one string in base64. So a
    # long string is replaced by a mark that no content has, and its slices are put in the place of the mark.
    if item_bytes <= _SLICE or not _has_long_string(content):
        return line_of(content)
    long: list[str] = []
    mark = uuid.uuid4().hex

    def shortened(one: object) -> object:
        if isinstance(one, str) and len(one) > _SLICE:
            long.append(one)
            return mark
        if isinstance(one, dict):
            return {key: shortened(inner) for key, inner in one.items()}
        if not isinstance(one, list | tuple) or _NUMBERS.issuperset(map(type, one)):
            return one
        return [shortened(inner) for inner in one]

    first, *rest = line_of(shortened(content)).split(f'"{mark}"'.encode())
    pieces = [first]
    for text, after in zip(long, rest, strict=True):
        slices = (text[at : at + _SLICE] for at in range(0, len(text), _SLICE))
        pieces += [b'"', *[_encode(one).encode()[1:-1] for one in slices], b'"', after]
    return b"".join(pieces)


_NUMBERS = frozenset({int, float, bool, type(None)})
_CONTAINERS = frozenset({list, tuple, dict})


def _has_long_string(content: object) -> bool:
    """Return whether a string in ``content`` is longer than a slice. All parts at one depth are looked at together,
    because a value may have millions of them."""
    level = [content]
    while level:
        kinds = set(map(type, level))
        if str in kinds and max(map(len, [one for one in level if type(one) is str])) > _SLICE:
            return True
        if kinds.isdisjoint(_CONTAINERS):
            return False
        inner: list[Any] = level if kinds == {list} else [one for one in level if type(one) in _CONTAINERS]
        if dict in kinds:
            inner = [one.values() if type(one) is dict else one for one in inner]
        level = list(chain.from_iterable(inner))
    return False


# Made once, and without the check for cycles, a line takes half of the time.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def _check(*numbers: Any) -> None:
    if any(type(number) is not int for number in numbers):
        raise CorruptCheckpointError("the manifest has another type in place of a number")


def _check_row(number: Any) -> None:
    """Check a row. Rows are keys of dicts, and unbounded integers could all have the same hash."""
    if type(number) is not int or not 0 <= number < _MOST_ROWS:
        raise CorruptCheckpointError("a part of the manifest has a row number that is not a valid integer")


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CorruptCheckpointError("the manifest has another type in place of a name")
    return value


# --- root -----------------------------------------------------------------------------------------------------------


def row_lines(shared: Shared) -> Iterator[bytes]:
    for row in shared.rows:
        content: object = "dict"
        if row.kind == "tensor":
            content = [row.dtype, row.shape, row.pattern]
        elif row.kind == "value":
            content = row.pattern
        elif row.composite is not None:
            content = row.composite.content
        yield line_of([row.kind, content, row.fqn, path_fields(row.path)])


def parse_patterns(lines: Sequence[bytes], ranks: int) -> tuple[tuple[PlacedBox, ...], ...]:
    """Parse the lines of patterns. Raises ``CorruptCheckpointError`` and what ``json`` raises."""
    patterns = (tuple(_placed(one, ranks) for one in json.loads(line.decode())) for line in lines)
    return tuple(collected(patterns, 1))


def _placed(one: Any, ranks: int) -> PlacedBox:
    rank, offsets, sizes = one
    _check(rank, *offsets, *sizes)
    if not 0 <= rank < ranks or len(offsets) != len(sizes):
        raise CorruptCheckpointError("the manifest has an invalid box")
    return PlacedBox(rank, tuple(offsets), tuple(sizes))
