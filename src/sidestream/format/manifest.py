"""The manifest: JSON lines, one for the checkpoint and one for each entry. ``docs/format.md`` has the fields."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any, TypeVar

from .._threads import politely
from ..errors import Corrupt, UnsupportedCheckpoint
from .records import BLOCK_BYTES, Chunk, DictKey, EmptyEntry, Entry, Key, Manifest, TensorEntry, ValueEntry

__all__ = ["parse_manifest", "write_manifest"]

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
        }
    )
    for fqn, entry in manifest.entries.items():
        path = [{"key": key.value} if isinstance(key, DictKey) else key for key in entry.path]
        yield _line([*_entry(entry), fqn, path])


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
    return [chunk.offsets, chunk.sizes, chunk.file, chunk.item_offset, chunk.item_bytes, chunk.payload_offset, crcs]


def parse_manifest(raw: bytes) -> Manifest:
    """Raises ``Corrupt`` where the text is not what ``write_manifest`` writes, ``UnsupportedCheckpoint`` for a later
    version. The content is not validated here (``validate.py``). In a worker thread."""
    lines = raw.split(b"\n")
    if lines.pop() != b"":
        raise Corrupt("the manifest is cut off")
    try:
        head = json.loads(lines[0])
        if head["sidestream"] != _VERSION or head["block_bytes"] != BLOCK_BYTES:
            raise UnsupportedCheckpoint(
                f"the manifest has version {head['sidestream']}, this sidestream reads {_VERSION}: upgrade it"
            )
        entries = dict(_parse_entry(json.loads(line)) for line in politely(lines[1:]))
        if len(entries) != head["entries"] or len(lines) - 1 != head["entries"]:
            raise Corrupt(f"the manifest announces {head['entries']} entries and has {len(entries)}")
        files = {_is(str, name): _is(int, nbytes) for name, nbytes in head["files"].items()}
        step = head["step"] if head["step"] is None else _is(int, head["step"])
        return Manifest(_is(str, head["save_id"]), entries, files, step, _is(int, head["generation"]))
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
    offsets, sizes, file, item_offset, item_bytes, payload_offset, crcs = chunk
    return Chunk(
        _ints(offsets),
        _ints(sizes),
        _is(str, file),
        _is(int, item_offset),
        _is(int, item_bytes),
        _is(int, payload_offset),
        base64.b64decode(_is(str, crcs), validate=True),
    )


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(_is(int, value) for value in _is(list, values))


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise Corrupt(f"the manifest has a {type(value).__name__} where a {kind.__name__} belongs")
    return value
