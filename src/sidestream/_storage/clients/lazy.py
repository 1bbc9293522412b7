"""Clients that are made when they are first needed, in a thread: that reads files of credentials, imports packages, and
may ask the network. They are kept, because a new one has to open its connections again."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future
from datetime import datetime
from typing import Any

from ..._runtime.gil import awaited
from ..._runtime.threads import Deadline, Stop, io_threads
from ..bodies import Body
from .engine import Creation, Engine, Listing
from .io_loop import Call
from .requests import Requests

__all__ = ["Kept", "LateEngine", "frozen"]

_FILES = {  # where credentials are, by the variable that says so
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
    "GOOGLE_APPLICATION_CREDENTIALS": "~/.config/gcloud/application_default_credentials.json",
}
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "BOTO", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT")


class LateEngine:
    """The engine that ``make`` returns, made in a thread at the first request. Where that fails, the next one tries
    again. It has conditional puts and listings."""

    creation: Creation = "conditional"
    lists = True

    def __init__(self, name: str, make: Callable[[], Engine]) -> None:
        self.name = name
        self._make = make
        self._lock = threading.Lock()
        self._made: Future[Engine] | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<LateEngine {self.name}>"

    def __reduce__(self) -> Any:
        raise TypeError("a client holds credentials: it is not pickled")

    async def _engine(self) -> Engine:
        """Whoever waits may give up: the others wait on."""
        return await asyncio.shield(awaited(self._making()))

    def _making(self) -> Future[Engine]:
        with self._lock:
            made = self._made
            failed = made is not None and made.done() and (made.cancelled() or made.exception() is not None)
            if made is None or failed or self._pid != os.getpid():
                made = self._made = io_threads().submit(self._make)
                self._pid = os.getpid()
            return made

    def upload(self, key: str, body: Body, requests: Requests, *, stop: Stop, deadline: Deadline) -> None:
        made = self._making()
        engine = made.result() if made.done() else Call(self._engine).result("connecting", stop=stop, deadline=deadline)
        engine.upload(key, body, requests, stop=stop, deadline=deadline)

    async def put(self, key: str, content: memoryview, *, create: bool) -> None:
        await (await self._engine()).put(key, content, create=create)

    async def read(self, key: str, start: int, end: int) -> memoryview:
        return await (await self._engine()).read(key, start, end)

    async def tail(self, key: str, nbytes: int) -> bytes:
        return await (await self._engine()).tail(key, nbytes)

    async def listing(self, prefix: str) -> Listing:
        return await (await self._engine()).listing(prefix)

    async def size(self, key: str) -> int:
        return await (await self._engine()).size(key)

    async def delete(self, keys: Collection[str]) -> None:
        await (await self._engine()).delete(keys)

    async def forget(self, prefix: str) -> None:
        await (await self._engine()).forget(prefix)

    async def open_uploads(self, prefix: str) -> Mapping[str, datetime | None]:
        return await (await self._engine()).open_uploads(prefix)

    async def checksum(self, key: str) -> str | None:
        return await (await self._engine()).checksum(key)

    async def abort_uploads(self, uploads: Collection[str]) -> None:
        await (await self._engine()).abort_uploads(uploads)


class Kept:
    """The engines that were used last, by what they were made from: options, environment, files of credentials."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._engines: OrderedDict[Hashable, Engine] = OrderedDict()
        os.register_at_fork(after_in_child=self._forget_lock)

    def __reduce__(self) -> Any:
        raise TypeError("clients hold credentials: they are not pickled")

    def __len__(self) -> int:
        return len(self._engines)

    def get(self, key: Hashable, make: Callable[[], Engine]) -> Engine:
        """In a thread. Nobody waits for another one's ``make``; of two that were made at once the first is kept."""
        key = (key, os.getpid(), *_surroundings())
        with self._lock:
            if key in self._engines:
                self._engines.move_to_end(key)
                return self._engines[key]
        made = make()
        with self._lock:
            made = self._engines.setdefault(key, made)
            if len(self._engines) > self._most:
                self._engines.popitem(last=False)
        return made

    def _forget_lock(self) -> None:
        """Somebody may have held it. What was made before the fork stays where it is: its threads are gone."""
        self._lock = threading.Lock()


def frozen(value: Any) -> Hashable:
    """``value`` as a key. Raises ``TypeError`` for what cannot be compared by its content."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), frozen(one)) for name, one in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *map(frozen, value))
    if value is None or type(value) in (str, int, float, bool, bytes):
        return (type(value).__name__, repr(value))
    raise TypeError(f"a {type(value).__name__} is no plain option")


def _surroundings() -> tuple[Hashable, ...]:
    names = sorted(name for name in list(os.environ) if name.upper().startswith(_VARIABLES))
    variables = tuple((name, os.environ.get(name)) for name in names)  # another thread may remove some meanwhile
    files = (os.environ.get(variable) or os.path.expanduser(default) for variable, default in _FILES.items())
    return variables, *map(_stamp, files)


def _stamp(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size
