"""Markers: facts about the save in the tail of ``.metadata``.

A marker is the last attribute of DCP's ``Metadata`` object, a string: a CRC-32 in hexadecimal, and JSON. Its place is
fixed, so a reader needs only the last ``TAIL_BYTES`` of the file and does not decode the pickle before them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

from ..errors import CorruptCheckpointError
from . import pickles as p
from .records import manifest_name

METADATA_NAME = ".metadata"
ATTRIBUTE = "sidestream"
TAIL_BYTES = 4096
MAX_METADATA_BYTES = 256 << 10
END = b"ub."  # SETITEMS into the state, BUILD the Metadata, STOP
"""What a save that creates ``.metadata`` in place writes last, when all other bytes are durable."""
_SAVE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Marker:
    """The marker of a save: its id, and length and CRC-32 of ``manifest-<save_id>``. ``step`` is set for a save of a
    run.

    ``saved_at`` is the time when the save began, in seconds since 1970 by the writer's clock, or 0 if it is unknown.
    The last ``metadata_bytes`` of the manifest are the user's metadata, with a CRC-32 of their own."""

    save_id: str
    manifest_bytes: int
    manifest_crc: int
    step: int | None = None
    generation: int = 1
    saved_at: int = 0
    metadata_bytes: int = 0
    metadata_crc: int = 0

    @property
    def manifest_name(self) -> str:
        return manifest_name(self.save_id)


def marker_attribute(marker: Marker) -> bytes:
    """Return the attribute of ``Metadata`` with a marker and its checksum, and the end of the pickle."""
    return attribute_of(ATTRIBUTE, asdict(marker))


def attribute_of(name: str, fields: Mapping[str, Any]) -> bytes:
    """Return an attribute with these fields and their checksum, and the end of the pickle."""
    content = json.dumps(fields, separators=(",", ":"))
    return attribute_end(name, f"{crc32(content.encode()):08x}{content}")


def attribute_end(name: str, value: str) -> bytes:
    """Return the end of a pickle whose last attribute is ``name`` with the text ``value``."""
    return p.text(name) + p.text(value) + END


def with_marker(pickled: bytes, marker: Marker) -> bytes:
    """Return ``pickled``, a ``Metadata`` object of DCP, with a marker as its last attribute."""
    assert pickled.endswith(END)
    return pickled[: -len(END)] + marker_attribute(marker)


def find_marker(tail: bytes) -> Marker | None:
    """Return the marker in the last ``TAIL_BYTES`` (or all) of a ``.metadata``. None if another writer made the file.

    Raises ``CorruptCheckpointError`` if the marker is damaged, or if the file is cut off.
    """
    fields = find_attribute(tail, ATTRIBUTE, METADATA_NAME)
    if fields is None:
        return None
    try:
        marker = Marker(**fields)
        numbers = [marker.manifest_bytes, marker.manifest_crc, marker.generation, marker.saved_at]
        numbers += [marker.metadata_bytes, marker.metadata_crc]
        numbers += [] if marker.step is None else [marker.step]
        valid = all(type(number) is int and number >= 0 for number in numbers)
        valid = valid and marker.metadata_bytes <= min(marker.manifest_bytes, MAX_METADATA_BYTES)
        if not valid or _SAVE_ID.fullmatch(marker.save_id) is None:
            raise ValueError
    except (TypeError, ValueError):
        raise damaged(METADATA_NAME) from None
    return marker


def is_complete(tail: bytes) -> bool:
    """Return whether ``tail``, the last ``TAIL_BYTES`` (or all) of a ``.metadata``, has a marker up to its end."""
    return tail.endswith(END) and p.text(ATTRIBUTE) in tail


def find_attribute(tail: bytes, attribute: str, file: str) -> dict[str, Any] | None:
    """Return the fields that ``attribute_of`` has put at the end of ``file``. None without an attribute of that
    name. Raises ``CorruptCheckpointError``."""
    if not tail.endswith(b"."):
        raise CorruptCheckpointError(f"{file} is cut off: it does not end as a pickle does", file=file)
    name = p.text(attribute)
    # The last one. A value of the user earlier in the pickle may contain the same bytes, but the attribute stands at
    # the very end: the length that follows has to lead exactly to the end of the file.
    at = tail.rfind(name + b"X")
    if at < 0:
        return None
    start = at + len(name) + 5
    length = int.from_bytes(tail[start - 4 : start], "little")
    raw = tail[start : start + length]
    try:
        if start + length + len(END) != len(tail) or not tail.endswith(END):
            raise ValueError
        if int(raw[:8], 16) != crc32(raw[8:]):
            raise ValueError
        fields = json.loads(raw[8:].decode())
        if type(fields) is not dict:
            raise ValueError
    except (ValueError, RecursionError):
        raise damaged(file) from None
    return fields


def damaged(file: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the commit marker in {file} is damaged", file=file)
