"""The manifest: lines of JSON, one for the checkpoint, one for each entry, and one for the user's metadata if there is
any. ``docs/format.md`` has the fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar, cast, get_args

from .._runtime.pauses import chunked, collected, pause_point
from ..errors import CorruptCheckpointError, UnsupportedCheckpointError
from ..options import Digest
from .checksum import crc32
from .marker import Marker
from .records import (
    BLOCK_BYTES,
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Entries,
    Entry,
    Key,
    Manifest,
    Node,
    OpaqueEntry,
    Row,
    TensorEntry,
    ValueEntry,
)
from .rows import Rows
from .shared import (
    PartName,
    Root,
    Shared,
    SharedRow,
    chunk_fields,
    line_of,
    parse_chunk,
    parse_patterns,
    path_fields,
    row_lines,
    value_line_of,
)

T = TypeVar("T")
_VERSION = 1
_SHARED_VERSION = 2
_COMPOSITE_VERSION = 3  # so that readers of the first versions refuse it
_SHARED_COMPOSITE_VERSION = 4
_VERSIONS = range(_VERSION, _SHARED_COMPOSITE_VERSION + 1)


def write_manifest(manifest: Manifest, torch_version: str) -> Iterator[bytes]:
    """Yield the lines of the file."""
    # The lowest version that can express the content: readers of the first version then refuse only what they cannot
    # read.
    composite = any(isinstance(entry, CompositeEntry) for entry in manifest.entries.values())
    yield head_line(manifest, torch_version, len(manifest.entries), composite=composite)
    for fqn, entry in manifest.entries.items():
        yield entry_line(fqn, entry)
    yield metadata_line(manifest)


def head_line(manifest: Manifest, torch_version: str, entries: int, *, composite: bool) -> bytes:
    """Return the first line. ``entries`` is the number of entries, and ``composite`` whether composite tensors are
    among them."""
    version = _COMPOSITE_VERSION if composite else _VERSION
    return line_of(
        {
            **_head(manifest, version, torch_version, entries),
            **({} if manifest.planner == "sidestream" else {"planner": manifest.planner}),
            **({} if manifest.planner_data is None else {"planner_data": manifest.planner_data}),
        }
    )


def entry_line(fqn: str, entry: Entry) -> bytes:
    fields = [*_entry(entry), fqn, path_fields(entry.path)]
    return value_line_of(fields, entry.item_bytes) if isinstance(entry, ValueEntry) else line_of(fields)


def line_around_checksums(fqn: str, entry: TensorEntry) -> tuple[bytes, bytes]:
    """Return the line of a tensor whose only chunk has no checksums, as the parts before and after their place."""
    # The line is rendered once, when the plan is made, and split where the checksums belong. A save fills them in
    # without rendering JSON.
    before, quotes, after = entry_line(fqn, entry).partition(b'""]]],')  # no other text ends a chunk
    assert quotes
    return before + quotes[:1], quotes[1:] + after


def write_root(root: Root, torch_version: str, body: bytes) -> Iterator[bytes]:
    """Yield the root of a manifest in parts. ``body`` has its patterns and rows, which are the same in every save."""
    version = _SHARED_COMPOSITE_VERSION if root.shared.composite else _SHARED_VERSION
    head = _head(root.manifest, version, torch_version, len(root.shared.rows))
    yield line_of({**head, "patterns": len(root.shared.patterns), "parts": root.parts})
    yield body
    yield metadata_line(root.manifest)


def root_body(shared: Shared) -> bytes:
    """Return the lines of the patterns, and after them those of the rows."""
    patterns = collected(map(line_of, shared.patterns), 1)
    rows = collected(row_lines(shared))
    return b"".join(patterns + rows)


def _head(manifest: Manifest, version: int, torch_version: str, entries: int) -> dict[str, object]:
    return {
        "sidestream": version,
        "save_id": manifest.save_id,
        "step": manifest.step,
        "generation": manifest.generation,
        "torch": torch_version,
        "block_bytes": BLOCK_BYTES,
        "files": manifest.files,
        **({} if not manifest.file_crcs else {"file_crcs": manifest.file_crcs}),
        **({} if not manifest.containers else {"containers": manifest.containers}),
        "entries": entries,
        "metadata": manifest.metadata is not None,
        **({} if manifest.digest is None else {"digest": manifest.digest}),
        **({} if not manifest.sidecars else {"sidecars": [_sidecar(*one) for one in manifest.sidecars.items()]}),
    }


def _sidecar(name: str, entry: TensorEntry) -> list[object]:
    (chunk,) = entry.chunks
    _, _, file, _, nbytes, _, *checksums = chunk_fields(chunk)
    return [name, file, nbytes, *checksums]


def metadata_line(manifest: Manifest) -> bytes:
    """Return the last line, which can be read without the others. It is empty without metadata."""
    return b"" if manifest.metadata is None else line_of({"metadata": manifest.metadata})


def parse_metadata_line(line: bytes) -> Node:
    """Return the metadata in the last line. Raises ``CorruptCheckpointError``."""
    try:
        return _metadata(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise CorruptCheckpointError("the metadata line of the manifest is damaged") from None


def _metadata(line: Any) -> Node:
    if type(line) is not dict or list(line) != ["metadata"] or type(line["metadata"]) is not dict:
        raise CorruptCheckpointError("the last line of the manifest is not the metadata that its first line announces")
    node: Node = line["metadata"]
    return node


def _entry(entry: Entry) -> tuple[object, ...]:
    match entry:
        case TensorEntry():
            return "tensor", [entry.dtype, entry.shape, [chunk_fields(chunk) for chunk in entry.chunks]]
        case ValueEntry():
            return "value", [entry.file, entry.item_offset, entry.item_bytes, entry.node]
        case EmptyEntry():
            return "empty", "dict"
        case CompositeEntry():
            return "composite", entry.content
        case OpaqueEntry():
            raise TypeError("an entry that cannot be read cannot be written")


def parse_manifest(raw: bytes | bytearray) -> Manifest | Root:
    """Parse a manifest. The content is not validated (``validate.py``). A ``Root`` has its entries in the parts of the
    ranks (``shared.py``).

    Raises ``CorruptCheckpointError`` if ``write_manifest`` cannot have written the text, and
    ``UnsupportedCheckpointError`` for a later version."""
    lines = cast(list[bytes], raw.split(b"\n"))
    # Every line ends with a newline, so a file that was cut off shows it here in most cases. The checksum in the marker
    # finds the rest.
    if lines.pop() != b"":
        raise CorruptCheckpointError("the manifest is cut off")
    try:
        head = json.loads(lines[0].decode())  # for bytes that look like UTF-16, loads() would import a codec
        # Before anything else is read of it: a later version may mean something else by every other field.
        if head["sidestream"] not in _VERSIONS or head["block_bytes"] != BLOCK_BYTES:
            raise UnsupportedCheckpointError(
                f"the manifest has version {head['sidestream']}, this sidestream reads {_VERSIONS[-1]}: upgrade it"
            )
        metadata = _metadata(json.loads(lines.pop().decode())) if _is(bool, head.get("metadata", False)) else None
        digest = head.get("digest")
        if digest not in (None, *get_args(Digest)):
            raise UnsupportedCheckpointError(
                f"the manifest has digests of the unknown kind {digest!a:.40}: upgrade sidestream"
            )
        if head["sidestream"] in (_SHARED_VERSION, _SHARED_COMPOSITE_VERSION):
            return _parse_root(head, lines[1:], digest, metadata)
        files = _files(head)
        rows = Rows(files, digests=digest is not None, key_of=_parse_key)
        entries: dict[str, Entry | Row] = {}
        composite = head["sidestream"] == _COMPOSITE_VERSION
        # A few lines between two pauses: a line of a large tensor has kilobytes of checksums.
        for some in chunked(lines[1:], 16):
            entries.update([_parse_line(line.decode(), rows, composite) for line in some])
            pause_point()
        # Two comparisons: the number of lines finds a lost line, and the number of entries a name that stands twice.
        if len(entries) != head["entries"] or len(lines) - 1 != head["entries"]:
            raise CorruptCheckpointError(f"the manifest announces {head['entries']} entries and has {len(entries)}")
        planner = head.get("planner", "sidestream")
        if planner not in ("sidestream", "dcp"):
            raise UnsupportedCheckpointError(
                f"the manifest has the unknown planner {planner!a:.40}: upgrade sidestream"
            )
        made = _manifest(head, files, digest, metadata)
        return replace(made, entries=Entries(entries), planner=planner, planner_data=head.get("planner_data"))
    # Parsing is written without checks for the shape of each part: whatever a damaged file makes fail is one of these.
    # What only has wrong values is found by ``validate``.
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, (CorruptCheckpointError, UnsupportedCheckpointError)):
            raise
        raise CorruptCheckpointError(f"the manifest is damaged: {type(error).__name__}") from None


def _files(head: dict[str, Any]) -> dict[str, int]:
    return {_is(str, name): _is(int, nbytes) for name, nbytes in head["files"].items()}


def _file_crcs(head: dict[str, Any]) -> dict[str, int]:
    found = {_is(str, name): _is(int, crc) for name, crc in head.get("file_crcs", {}).items()}
    for name, crc in found.items():
        if name not in head["files"] or not 0 <= crc < 1 << 32:
            raise CorruptCheckpointError(
                "the manifest has the checksum of a file that it does not list, or one out of range", file=name
            )
    return found


def _sidecars(head: dict[str, Any]) -> dict[str, TensorEntry]:
    found: dict[str, TensorEntry] = {}
    for name, file, nbytes, *checksums in _is(list, head.get("sidecars", [])):
        if _is(str, name) in found:
            raise CorruptCheckpointError("the manifest has a sidecar file twice", file=name)
        chunk = parse_chunk([[0], [nbytes], file, 0, nbytes, 0, *checksums])
        found[name] = TensorEntry((name,), "uint8", chunk.sizes, (chunk,))
    return found


def _manifest(head: dict[str, Any], files: dict[str, int], digest: str | None, metadata: Node) -> Manifest:
    """Return the manifest that the first line describes, without entries."""
    step = None if head["step"] is None else _is(int, head["step"])
    save_id, generation = _is(str, head["save_id"]), _is(int, head["generation"])
    containers = {_is(str, fqn): _is(str, kind) for fqn, kind in head.get("containers", {}).items()}
    made = Manifest(save_id, {}, files, step, generation, digest, metadata, containers=containers)
    return replace(made, sidecars=_sidecars(head), file_crcs=_file_crcs(head))


def _parse_root(head: dict[str, Any], lines: list[bytes], digest: str | None, metadata: Node) -> Root:
    patterns, entries = _is(int, head["patterns"]), _is(int, head["entries"])
    if len(lines) != patterns + entries:
        raise CorruptCheckpointError(f"the manifest announces {patterns + entries} lines and has {len(lines)}")
    parts = tuple(PartName(_is(int, nbytes), _is(int, crc)) for nbytes, crc in head["parts"])
    composite = head["sidestream"] == _SHARED_COMPOSITE_VERSION
    rows = (_parse_row(json.loads(line.decode()), patterns, len(parts), composite) for line in lines[patterns:])
    parsed = collected(rows)
    shared = Shared(tuple(parsed), parse_patterns(lines[:patterns], len(parts)))
    for row in shared.rows:
        boxes = shared.patterns[row.pattern] if row.kind == "tensor" else ()
        if any(len(one.offsets) != len(row.shape) for one in boxes[:1]):
            raise CorruptCheckpointError(
                f"{row.fqn}: the manifest has boxes with another number of dimensions for it", fqn=row.fqn
            )
    return Root(replace(_manifest(head, _files(head), digest, metadata), ranks=len(parts)), shared, parts)


def _parse_row(line: list[Any], patterns: int, ranks: int, composite: bool) -> SharedRow:
    kind, content, fqn, raw_path = line
    path = tuple(_parse_key(key) for key in raw_path)
    if kind == "tensor":
        dtype, shape, pattern = content
        if not 0 <= _is(int, pattern) < patterns:
            raise CorruptCheckpointError("the manifest names a pattern that it does not have")
        return SharedRow(kind, _is(str, fqn), path, _is(str, dtype), _ints(shape), pattern)
    if kind == "composite" and composite:
        entry = parse_composite(path, content)
        return SharedRow(kind, _is(str, fqn), path, entry.dtype, entry.shape, -1, entry)
    if kind == "value" and not 0 <= _is(int, content) < ranks:
        raise CorruptCheckpointError("the manifest names a rank that it does not have")
    if kind not in ("value", "empty"):
        raise CorruptCheckpointError(f"the manifest has an entry of the unknown kind {kind!r}")
    return SharedRow(kind, _is(str, fqn), path, "", (), content if kind == "value" else -1)


def _parse_line(text: str, rows: Rows, composite: bool) -> tuple[str, Entry | Row]:
    # Two parsers for a line. Most lines are ordinary tensors, which one regular pass turns into a tuple. Any other
    # line, and any line with a fault, is parsed by the general code, which words the error.
    return rows.read(text) or _parse_entry(json.loads(text), composite)


def _parse_entry(line: list[Any], composite: bool) -> tuple[str, Entry]:
    kind, content, fqn, raw_path = line
    path = tuple(_parse_key(key) for key in raw_path)
    entry: Entry
    match kind:
        case "tensor":
            dtype, shape, chunks = content
            entry = TensorEntry(path, _is(str, dtype), _ints(shape), tuple(parse_chunk(chunk) for chunk in chunks))
        case "value":
            file, offset, nbytes, node = content
            entry = ValueEntry(path, _is(str, file), _is(int, offset), _is(int, nbytes), node)
        case "empty":
            if content != "dict":
                raise CorruptCheckpointError(f"the manifest has an empty container of the unknown kind {content!r}")
            entry = EmptyEntry(path)
        case "composite" if composite:
            entry = parse_composite(path, content)
        case _:
            raise CorruptCheckpointError(f"the manifest has an entry of the unknown kind {kind!r}")
    return _is(str, fqn), entry


def parse_composite(path: tuple[Key, ...], content: list[Any]) -> CompositeEntry:
    """Return the entry with this ``content``. Raises ``CorruptCheckpointError``, ``ValueError``, ``TypeError``."""
    type_, dtype, shape, strides, parts, context = content
    return CompositeEntry(
        path,
        _is(str, type_),
        _is(str, dtype),
        _ints(shape),
        None if strides is None else _ints(strides),
        tuple(_is(str, part) for part in _is(list, parts)),
        context,
    )


def _parse_key(key: Any) -> Key:
    if isinstance(key, dict):
        (value,) = key.values()
        if value is not None and type(value) not in (bool, int, float):
            raise CorruptCheckpointError("the manifest has a dict key of an unknown kind")
        return DictKey(value)
    if type(key) is int or type(key) is str:
        return key
    raise CorruptCheckpointError("the manifest has a path with a step that is not a key or an index")


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_is(int, value) for value in _is(list, values))


def _is(kind: type[T], value: Any) -> T:
    # The exact type: ``isinstance`` would take ``True`` for the integer 1.
    if type(value) is not kind:
        raise CorruptCheckpointError(f"the manifest has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def marker_of(manifest: Manifest, raw: bytes, saved_at: int) -> Marker:
    """Return the marker of the save of ``manifest``, which is ``raw`` as a file."""
    last = metadata_line(manifest)
    place = (len(raw), crc32(raw), manifest.step, manifest.generation, saved_at, len(last), crc32(last))
    return Marker(manifest.save_id, *place)
