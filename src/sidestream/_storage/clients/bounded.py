"""An asynchronous fsspec file system whose blocking calls can be ended.

The file objects of fsspec wait for their requests in ``fsspec.asyn.sync``, without a deadline. A peer that stalls
blocks their thread for minutes, and with s3fs for ever. No option limits that: ``read_timeout`` of botocore
(``config_kwargs`` of s3fs) ends a whole put, but not a part of a file object. File objects are needed, because a whole
put would hold a file of any size in memory. They make their requests as tasks of the file system's loop. So a loop that
keeps the tasks in a set can end them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from fsspec.asyn import mirror_sync_methods, sync_wrapper

Retrying = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


class Bounded:
    """A copy of ``filesystem`` with the same session. ``stop()`` ends its requests, and each request ends after
    ``timeout_s``.

    A request that was ended returns None to the file object, which usually fails with an unrelated error. So callers
    check ``ended`` after every call. ``retrying`` runs the requests that may be sent again.
    """

    def __init__(self, filesystem: Any, timeout_s: float, retrying: Retrying) -> None:
        self.ended: str | None = None
        self._stopped = False
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop = filesystem.loop
        self._tasks: set[asyncio.Task[Any]] = set()
        # A twin and not the user's object: its loop is replaced, and the user's calls must not run on a loop that ends
        # their requests. Both share the session, so the connections are used by both.
        self.filesystem = _twin(filesystem, self)
        innermost = self.filesystem
        while "fs" in vars(innermost):
            innermost = innermost.fs
        if hasattr(innermost, "_call_s3"):
            self._retry_s3(innermost, retrying)

    def stop(self) -> None:
        """End the requests in flight, and every later request at its start. From any thread; does not block."""
        self._stopped = True
        self._loop.call_soon_threadsafe(self._end, "it was stopped")

    def _retry_s3(self, filesystem: Any, retrying: Retrying) -> None:
        call = filesystem._call_s3

        async def call_s3(method: str, *arguments: Any, **keywords: Any) -> Any:
            return await retrying(partial(call, method, *arguments, **keywords))

        self._timeout_s = 0.0  # each attempt has a time limit in ``retrying``
        filesystem.call_s3 = sync_wrapper(call_s3, obj=filesystem)

    # --- the methods of a loop that asyncio.run_coroutine_threadsafe and fsspec.asyn.sync call ---

    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def call_soon_threadsafe(self, callback: Callable[..., Any], *arguments: Any) -> asyncio.Handle:
        return self._loop.call_soon_threadsafe(callback, *arguments)

    def create_task(self, work: Coroutine[Any, Any, Any], **keywords: Any) -> asyncio.Task[Any]:
        task = self._loop.create_task(work, **keywords)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if self._stopped:
            self._end("it was stopped")
        elif self._timeout_s:
            timer = self._loop.call_later(self._timeout_s, self._end, f"no answer within {self._timeout_s:g} s")
            task.add_done_callback(lambda _: timer.cancel())
        return task

    def get_debug(self) -> bool:
        return False

    def _end(self, why: str) -> None:
        for task in list(self._tasks):
            self.ended = self.ended or why
            # With call_soon, because fsspec waits for ever for a task that is cancelled before its first step.
            self._loop.call_soon(task.cancel)


def is_asynchronous(filesystem: Any) -> bool:
    """Return whether the coroutines of ``filesystem`` work. Those of a file system around another one work only if
    those of the other one do."""
    below = getattr(filesystem, "fs", None)
    return bool(filesystem.async_impl) and (below is None or is_asynchronous(below))


def _twin(filesystem: Any, loop: Bounded) -> Any:
    """Return a copy of ``filesystem`` that runs its coroutines on ``loop``. ``copy.copy`` would call ``__reduce__``,
    for which fsspec returns the same instance."""
    twin = object.__new__(type(filesystem))
    own = {name: value for name, value in vars(filesystem).items() if not hasattr(value, "__wrapped__")}
    twin.__dict__.update(own, _loop=loop)
    if "fs" in own:
        twin.fs = _twin(own["fs"], loop)
    mirror_sync_methods(twin)
    return twin
