"""The manifest: JSON lines, one for the checkpoint, one for each entry, and perhaps one for the user's own metadata.
``docs/format.md`` has the fields."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, TypeVar, get_args

from .._threads import politely
from ..errors import Corrupt, UnsupportedCheckpoint
from ..options import Digest
from .records import BLOCK_BYTES, Chunk, DictKey, EmptyEntry, Entry, Key, Manifest, Node, TensorEntry, ValueEntry

__all__ = ["metadata_line", "parse_manifest", "parse_metadata_line", "write_manifest"]

T = TypeVar("T")
_VERSION = 1


def write_manifest(manifest: Manifest, torch_version: str) -> Iterator[bytes]:
    """The file, line by line."""
    yield _line(
        {
            "sidestream": _VERSION,
            "save_id": manifest.save_id,
            "step": manifest.step,
            "generation": manifest.generation,
            "torch": torch_version,
            "block_bytes": BLOCK_BYTES,
            "files": manifest.files,
            "entries": len(manifest.entries),
            "metadata": manifest.metadata is not None,
            **({} if manifest.digest is None else {"digest": manifest.digest}),
            **({} if manifest.planner == "sidestream" else {"planner": manifest.planner}),
            **({} if manifest.planner_data is None else {"planner_data": manifest.planner_data}),
        }
    )
    for fqn, entry in manifest.entries.items():
        path = [{"key": key.value} if isinstance(key, DictKey) else key for key in entry.path]
        yield _line([*_entry(entry), fqn, path])
    yield metadata_line(manifest)


def metadata_line(manifest: Manifest) -> bytes:
    """The last line, which can be read without the others; empty where there is no metadata."""
    return b"" if manifest.metadata is None else _line({"metadata": manifest.metadata})


def parse_metadata_line(line: bytes) -> Node:
    """The metadata in the last line. Raises ``Corrupt``."""
    try:
        return _metadata(json.loads(line))
    except (ValueError, TypeError, RecursionError):
        raise Corrupt("the metadata line of the manifest is damaged") from None


def _metadata(line: Any) -> Node:
    if type(line) is not dict or list(line) != ["metadata"] or type(line["metadata"]) is not dict:
        raise Corrupt("the manifest has a last line that is not what it announces")
    node: Node = line["metadata"]
    return node


def _line(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _entry(entry: Entry) -> tuple[object, ...]:
    match entry:
        case TensorEntry():
            return "tensor", [entry.dtype, entry.shape, [_chunk(chunk) for chunk in entry.chunks]]
        case ValueEntry():
            return "value", [entry.file, entry.item_offset, entry.item_bytes, entry.node]
        case EmptyEntry():
            return "empty", entry.kind


def _chunk(chunk: Chunk) -> list[object]:
    crcs = base64.b64encode(chunk.crcs or b"").decode()
    digests = [] if chunk.digests is None else [base64.b64encode(chunk.digests).decode()]
    place = (chunk.file, chunk.item_offset, chunk.item_bytes, chunk.payload_offset)
    return [chunk.offsets, chunk.sizes, *place, crcs, *digests]


def parse_manifest(raw: bytes) -> Manifest:
    """Raises ``Corrupt`` where the text is not what ``write_manifest`` writes, ``UnsupportedCheckpoint`` for a later
    version. The content is not validated here (``validate.py``). In a worker thread."""
    lines = raw.split(b"\n")
    if lines.pop() != b"":
        raise Corrupt("the manifest is cut off")
    try:
        head = json.loads(lines[0].decode())  # bytes that look like UTF-16 would make it import a codec
        if head["sidestream"] != _VERSION or head["block_bytes"] != BLOCK_BYTES:
            raise UnsupportedCheckpoint(
                f"the manifest has version {head['sidestream']}, this sidestream reads {_VERSION}: upgrade it"
            )
        metadata = _metadata(json.loads(lines.pop().decode())) if _is(bool, head.get("metadata", False)) else None
        digest = head.get("digest")
        if digest not in (None, *get_args(Digest)):
            raise UnsupportedCheckpoint(
                f"the manifest has digests of the unknown kind {digest!a:.40}: upgrade sidestream"
            )
        entries = dict(_parse_entry(json.loads(line.decode())) for line in politely(lines[1:]))
        if len(entries) != head["entries"] or len(lines) - 1 != head["entries"]:
            raise Corrupt(f"the manifest announces {head['entries']} entries and has {len(entries)}")
        files = {_is(str, name): _is(int, nbytes) for name, nbytes in head["files"].items()}
        step = head["step"] if head["step"] is None else _is(int, head["step"])
        planner = head.get("planner", "sidestream")
        if planner not in ("sidestream", "dcp"):
            raise UnsupportedCheckpoint(f"the manifest was planned by {planner!a:.40}, which is unknown: upgrade it")
        generation, noted = _is(int, head["generation"]), head.get("planner_data")
        return Manifest(_is(str, head["save_id"]), entries, files, step, generation, digest, metadata, planner, noted)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        if isinstance(error, (Corrupt, UnsupportedCheckpoint)):
            raise
        raise Corrupt(f"the manifest is damaged: {type(error).__name__}") from None


def _parse_entry(line: list[Any]) -> tuple[str, Entry]:
    kind, content, fqn, raw_path = line
    path = tuple(_parse_key(key) for key in raw_path)
    entry: Entry
    match kind:
        case "tensor":
            dtype, shape, chunks = content
            entry = TensorEntry(path, _is(str, dtype), _ints(shape), tuple(_parse_chunk(chunk) for chunk in chunks))
        case "value":
            file, offset, nbytes, node = content
            entry = ValueEntry(path, _is(str, file), _is(int, offset), _is(int, nbytes), node)
        case "empty":
            if content != "dict":
                raise Corrupt(f"the manifest has an empty container of the unknown kind {content!r}")
            entry = EmptyEntry(path, content)
        case _:
            raise Corrupt(f"the manifest has an entry of the unknown kind {kind!r}")
    return _is(str, fqn), entry


def _parse_key(key: Any) -> Key:
    if isinstance(key, dict):
        (value,) = key.values()
        if value is not None and type(value) not in (bool, int, float):
            raise Corrupt("the manifest has a dict key of an unknown kind")
        return DictKey(value)
    if type(key) is int or type(key) is str:
        return key
    raise Corrupt("the manifest has a path that is not one")


def _parse_chunk(chunk: list[Any]) -> Chunk:
    offsets, sizes, file, item_offset, item_bytes, payload_offset, crcs, *digests = chunk
    (digest,) = digests or (None,)
    return Chunk(
        _ints(offsets),
        _ints(sizes),
        _is(str, file),
        _is(int, item_offset),
        _is(int, item_bytes),
        _is(int, payload_offset),
        base64.b64decode(_is(str, crcs), validate=True),
        digests=None if digest is None else base64.b64decode(_is(str, digest), validate=True),
    )


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_is(int, value) for value in _is(list, values))


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise Corrupt(f"the manifest has a {type(value).__name__} where a {kind.__name__} belongs")
    return value
