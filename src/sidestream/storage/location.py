"""From what users write (paths, URLs) to a store and a name in it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fsspec.core import strip_protocol
from fsspec.utils import get_protocol

from ..errors import InvalidOption
from .local import LocalStore
from .store import Store

__all__ = ["Location", "locate_directory", "locate_run"]


@dataclass(frozen=True, slots=True)
class Location:
    """A checkpoint directory ``name`` in ``store``; ``url`` is for messages."""

    store: Store
    name: str
    url: str


def locate_directory(url: str | os.PathLike[str]) -> Location:
    """Where the checkpoint at ``url`` is. Raises ``InvalidOption`` for a URL that is not a local directory."""
    path = _local_path(url)
    if not path.name:
        raise InvalidOption(f"{path} is the root of the file system; a checkpoint needs a directory of its own")
    return Location(LocalStore(path.parent), path.name, str(path))


def locate_run(url: str | os.PathLike[str]) -> tuple[Store, str]:
    """The store whose directories are the steps of a run, and the run's URL for messages."""
    path = _local_path(url)
    return LocalStore(path), str(path)


def _local_path(url: str | os.PathLike[str]) -> Path:
    try:
        text = os.fspath(url)
    except TypeError:
        text = ""
    if type(text) is not str or not text or "\0" in text:
        raise InvalidOption(f"{url!r} is not a path or URL")
    protocol = get_protocol(text)
    if protocol not in ("file", "local"):
        raise InvalidOption(f"{protocol}:// is not supported by this version; it saves to local directories")
    return Path(strip_protocol(text) if "://" in text else text).absolute()
