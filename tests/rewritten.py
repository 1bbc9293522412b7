"""Manifests that do not say what was saved."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def rewritten(path: Path, change: Callable[[list[Any]], None]) -> None:
    """Change the lines of the manifest, and what the marker says of it."""
    (manifest,) = (one for one in path.glob("manifest-*") if "." not in one.name)
    old = manifest.read_bytes()
    lines = [json.loads(line) for line in old.splitlines()]
    change(lines)
    lines[0]["entries"] = len(lines) - 1 - lines[0].get("patterns", 0)
    raw = b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines)
    manifest.write_bytes(raw)
    marker = path / ".metadata"
    content = marker.read_bytes()
    start = content.index(b'{"save_id"')
    told = json.loads(content[start : content.index(b"}", start) + 1])
    told["manifest_bytes"], told["manifest_crc"] = len(raw), zlib.crc32(raw)
    text = json.dumps(told, separators=(",", ":")).encode()
    text = f"{zlib.crc32(text):08x}".encode() + text
    before, end = content[: start - 8], content[content.index(b"}", start) + 1 :]
    length = int.from_bytes(before[-4:], "little")
    assert length == len(content) - len(before) - len(end)
    marker.write_bytes(before[:-4] + len(text).to_bytes(4, "little") + text + end)
