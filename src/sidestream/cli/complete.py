"""Shell completion: the checkpoints on this machine, and the names in them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import typer

__all__ = ["checkpoints", "names"]

_METADATA = ".metadata"
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
    from .._format.manifest import parse_manifest
    from .._format.marker import TAIL_BYTES, find_marker, manifest_name
    from .._format.records import Manifest
    from .._runtime.steps import at_once

    with (directory / _METADATA).open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        marker = find_marker(file.read(TAIL_BYTES))
    path = directory / manifest_name(marker.save_id) if marker is not None else None
    if path is None or path.stat().st_size > _MOST_MANIFEST_BYTES:
        return []
    manifest = at_once(parse_manifest(path.read_bytes()))
    return list(manifest.entries) if isinstance(manifest, Manifest) else []
