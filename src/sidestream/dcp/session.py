"""What is common to writer and reader: where to, and the state of one call of DCP."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Generic, TypeVar

from .._storage import LocalStore, Location, locate_directory
from ..errors import SidestreamError
from ..options import Storage

__all__ = ["Address", "Sessions", "is_located"]

S = TypeVar("S")


class Address:
    """A URL and everything that it takes to get there, which stays when another URL takes its place.

    It travels to the process that DCP starts for asynchronous saves, with its credentials, and shows them to nobody.
    """

    def __init__(self, url: str | os.PathLike[str], storage: Storage) -> None:
        self._storage = {one.name: getattr(storage, one.name) for one in fields(storage)}  # which can be pickled
        location = self.located(url)
        # That process may have been started in another directory.
        self._url = location.url if isinstance(location.store, LocalStore) else os.fspath(url)

    def located(self, instead: str | os.PathLike[str] | None = None) -> Location:
        """``instead``: the ``checkpoint_id`` of a call."""
        return locate_directory(instead or self._url, Storage(**self._storage))


class Sessions(Generic[S]):
    """The state of the call that the current thread is in. DCP runs each call in one thread from beginning to end, and
    calls of several threads may share one writer: the second ``async_save`` before the first has ended."""

    def __init__(self, make: Callable[[], S]) -> None:
        self._make = make
        self._local = threading.local()

    def current(self) -> S:
        session: S | None = getattr(self._local, "session", None)
        if session is None:
            self._local.session = session = self._make()
        return session

    def __reduce__(self) -> Any:
        return type(self), (self._make,)


def is_located(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether some store of ours takes it."""
    try:
        locate_directory(checkpoint_id)
    except SidestreamError:
        return False
    return True
