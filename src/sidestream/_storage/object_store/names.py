"""Names of the objects that a save writes. They contain the id of the save, because all attempts at a target write
below the same prefix."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["MARKER", "NOTE", "id_of", "is_plain_shard", "is_unfinished", "name_with_id", "sidecar_with_id"]

MARKER = ".metadata"
NOTE = "retired"
"""The object beside the files of a checkpoint that is being deleted."""

_OURS = re.compile(r"(?:__[0-9]+_[0-9]+|manifest)-([0-9a-f]{32})(?:\.distcp|\.[0-9]+)?|file-([0-9a-f]{32})\..+")
_PLAIN = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def name_with_id(name: str, save_id: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{save_id}{dot}{suffix}" if dot else f"{name}-{save_id}"


def sidecar_with_id(name: str, save_id: str) -> str:
    return f"file-{save_id}.{name}"


def id_of(file: str) -> str | None:
    """Return the id of the save that wrote this object; None if its name contains no id."""
    match = _OURS.fullmatch(file)
    return None if match is None else match[1] or match[2]


def is_plain_shard(file: str) -> bool:
    """Return whether this is the name of a shard file without an id, as in a checkpoint that was copied."""
    return _PLAIN.fullmatch(file) is not None


def is_unfinished(files: Iterable[str]) -> bool:
    """Return whether a directory without a complete marker, which contains these files, is an attempt of saves that
    commit with a marker, or a checkpoint that is being deleted. Otherwise, if it has a manifest, it is a checkpoint
    whose marker was lost."""
    names = frozenset(files) - {MARKER}
    return NOTE in names or all(id_of(name) is not None for name in names)
