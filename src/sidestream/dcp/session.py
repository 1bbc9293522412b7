"""The address and the state of one DCP call, for the writer and the reader."""

from __future__ import annotations

import os
import threading
from dataclasses import fields
from typing import Any

from .._storage import LocalStore, Location, locate_directory
from ..errors import SidestreamError
from ..options import Storage

__all__ = ["Address", "Session", "is_located"]


class Address:
    """A URL, and the options and credentials to access it, which also apply to a ``checkpoint_id`` that replaces it.

    It can be pickled, with its credentials, for the process that DCP starts for asynchronous saves. Its ``repr`` does
    not show them.
    """

    def __init__(self, url: str | os.PathLike[str], storage: Storage) -> None:
        self._storage = {one.name: getattr(storage, one.name) for one in fields(storage)}  # which can be pickled
        location = locate_directory(url, storage)
        # An absolute path, because that process may have been started in another directory.
        self._url = location.url if isinstance(location.store, LocalStore) else os.fspath(url)

    def located(self, instead: str | os.PathLike[str] | None = None) -> Location:
        """Return the location of ``instead``, the ``checkpoint_id`` of a call, or of the URL."""
        return locate_directory(instead or self._url, Storage(**self._storage))


class Session(threading.local):
    """The state of a DCP call, of which each thread has its own. DCP has no handle for a call: it calls the methods of
    one writer in their order, in one thread. Calls in several threads may share one writer: a second ``async_save``
    begins before the first has ended. Pickling leaves the state out."""

    def __reduce__(self) -> Any:
        return type(self), ()


def is_located(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether a store of sidestream supports this URL."""
    try:
        locate_directory(checkpoint_id)
    except SidestreamError:
        return False
    return True
