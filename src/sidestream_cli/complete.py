"""Shell completion: the checkpoints on this machine, and the names in them. Imports no torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import typer

__all__ = ["checkpoints", "names"]

_METADATA = ".metadata"
_MANIFEST = re.compile("manifest-[0-9a-f]{32}")
_MOST_MANIFEST_BYTES = 16 << 20
_MOST_SHOWN = 200


def checkpoints(incomplete: str) -> list[str]:
    """Return the paths that begin with ``incomplete``: checkpoints, files, and other directories with a slash."""
    with suppress(OSError):
        return sorted(_paths(incomplete))[:_MOST_SHOWN]
    return []


def _paths(incomplete: str) -> Iterator[str]:
    head, _, tail = incomplete.rpartition("/")
    parent = f"{head}/" if "/" in incomplete else ""
    with os.scandir(parent or ".") as found:
        for one in found:
            if not one.name.startswith(tail) or not one.name.isprintable() or (one.name[0] == "." and not tail):
                continue
            is_checkpoint = not one.is_dir() or Path(one.path, _METADATA).exists()
            yield parent + one.name + ("" if is_checkpoint else "/")


def names(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names in a checkpoint of sidestream that begin with ``incomplete``, up to the next dot."""
    url = context.params.get("url")
    if not isinstance(url, str) or "://" in url:
        return []
    shown: dict[str, None] = {}
    with suppress(Exception):  # a shell cannot show errors; the command itself reports them
        for fqn in _names_in(Path(url)):
            if fqn.startswith(incomplete) and fqn.isprintable():
                end = fqn.find(".", len(incomplete))
                shown[fqn if end < 0 else f"{fqn[:end]}.*"] = None
    return list(shown)[:_MOST_SHOWN]


def _names_in(directory: Path) -> list[str]:
    """Return the names in the newest manifest, as ``docs/format.md`` describes it; none if several ranks wrote it."""
    if not (directory / _METADATA).exists():
        return []
    path = max(
        (one for one in directory.glob("manifest-*") if _MANIFEST.fullmatch(one.name)),
        key=lambda one: one.stat().st_mtime_ns,
    )
    if path.stat().st_size > _MOST_MANIFEST_BYTES:
        return []
    head, *lines = path.read_text(encoding="utf-8").splitlines()
    if json.loads(head)["sidestream"] not in (1, 3):
        return []
    return [entry[2] for entry in map(json.loads, lines) if isinstance(entry, list)]  # the last line may be metadata
