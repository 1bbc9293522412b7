"""The interface through which ``ObjectStore`` uses clients of object storage, and the engine of a user's
``BlobStore``."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial
from typing import Any

from ..._runtime.imports import collecting_later
from ..._runtime.threads import Deadline, Stop, current_deadline, io_threads, time_limit
from ...options import BlobStore, BlobUpload, Capabilities, Listing, PutMode, StorePolicy
from ..bodies import Body
from .requests import LoopCall, Requests

_ABORT_S = 3.0
_MOST_PARTS = 9_000  # S3 takes 10,000
_MIB = 1 << 20


def part_bytes_for(nbytes: int, part_bytes: int) -> int:
    """Return ``part_bytes``, or as many whole MiB as an object of ``nbytes`` needs to have at most 9,000 parts."""
    needed = -(-nbytes // _MOST_PARTS)
    return max(part_bytes, -(-needed // _MIB) * _MIB)


class Engine(ABC):
    """The operations of a ``BlobStore``, and others that a client may have.

    Keys are whole keys (or paths), without the protocol. The coroutines run on the loop of the storage clients and
    raise what the client raises. They may be called again after a failure. They may be cancelled, and then no work
    of theirs continues.
    """

    name: str
    capabilities: Capabilities
    filesystem: Any = None
    """The fsspec file system, from which a ``FileCache`` gets whole files. None: the engine uses another client."""
    compares_versions: bool | None = None
    """Whether ``replace`` refuses to replace an object with another version; None until that was tried."""

    @abstractmethod
    async def put(self, key: str, content: memoryview, *, mode: PutMode) -> None: ...

    @abstractmethod
    def upload(self, key: str, body: Body, requests: Requests, stop: Stop) -> None:
        """Send a large object in parts, in the calling thread, while its content is still being staged. Each part is
        released when the client has accepted it. When this raises, no part of the object is visible, and the upload has
        been aborted. It stays open only if the storage did not answer."""

    @abstractmethod
    async def read(self, key: str, start: int, end: int) -> memoryview: ...

    @abstractmethod
    async def size(self, key: str) -> int: ...

    @abstractmethod
    async def listing(self, prefix: str) -> Listing:
        """Return the objects and directories directly below ``prefix/``, never from a cache."""

    @abstractmethod
    async def delete(self, key: str) -> None: ...

    deletes_at_once = 1
    """The most keys that ``delete_all`` takes."""

    async def delete_all(self, keys: Sequence[str]) -> None:
        """Delete these objects, in any order. Those that do not exist are skipped."""
        for key in keys:
            await self.delete(key)

    async def version(self, key: str) -> str:
        """Return a string that identifies the content of the object. Needs ``capabilities.versions``."""
        raise NotImplementedError

    async def replace(self, key: str, content: memoryview, version: str) -> None:
        """Put the object if it still has this version. Needs ``capabilities.versions``."""
        raise NotImplementedError

    async def map(self, key: str, nbytes: int) -> mmap.mmap:
        """Map the object into memory. Needs ``capabilities.mapping``."""
        raise NotImplementedError

    async def tail(self, key: str, nbytes: int) -> bytes:
        size = await self.size(key)
        return bytes(await self.read(key, max(0, size - nbytes), size)) if size else b""

    async def connect(self, prefix: str) -> None:
        """Use the client now, for a listing of ``prefix``."""
        if self.capabilities.listing:
            await self.listing(prefix)

    async def forget(self, prefix: str) -> None:
        """Remove the empty directory of a storage that has directories."""
        return

    def is_complete(self, key: str, nbytes: int, patience_s: float) -> bool:
        """Return whether the object is there with ``nbytes``: then only the acknowledgement of the upload was lost.
        Called in a thread."""
        try:
            with time_limit(Deadline.after(patience_s)):
                return LoopCall(lambda: self.size(key)).result("looking") == nbytes
        except Exception:
            return False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __reduce__(self) -> Any:
        raise TypeError("a client holds credentials: it is not pickled")


class LateEngine:
    """The engine that ``make`` returns. The first request calls ``make`` in a thread, because it reads files of
    credentials, imports packages, and may use the network. If it fails, the next request calls it again."""

    def __init__(self, name: str, make: Callable[[], Engine], *, versions: bool = False) -> None:
        self.name = name
        self.capabilities = Capabilities(create_only=True, listing=True, versions=versions)
        self._make = make
        self._lock = threading.Lock()
        self._made: Future[Engine] | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<LateEngine {self.name}>"

    def __reduce__(self) -> Any:
        raise TypeError("a client holds credentials: it is not pickled")

    async def get(self) -> Engine:
        """Return the engine. Cancelling one request does not interrupt ``make``, for which others may wait."""
        return await asyncio.shield(asyncio.wrap_future(self._making()))

    def _making(self) -> Future[Engine]:
        with self._lock:
            made = self._made
            failed = made is not None and made.done() and (made.cancelled() or made.exception() is not None)
            # Also after a fork: clients have threads and connections, which the child does not have.
            if made is None or failed or self._pid != os.getpid():
                made = self._made = io_threads().submit(self._made_here)
                self._pid = os.getpid()
            return made

    def _made_here(self) -> Engine:
        with collecting_later():
            return self._make()


class StoreEngine(Engine):
    """The engine of a ``BlobStore``. Content is copied once, so that the store may keep the buffers that it is given.
    The ``concurrency`` of the policy limits how many parts of an upload are sent at once."""

    def __init__(self, store: BlobStore, policy: StorePolicy) -> None:
        self.name = type(store).__name__
        self.capabilities = store.capabilities
        self._store = store
        self._policy = policy

    async def put(self, key: str, content: memoryview, *, mode: PutMode) -> None:
        if mode == "create" and not self.capabilities.create_only:
            # A store that cannot create has no protection against a race. Looking first finds an object that has been
            # there for some time, which is the usual mistake.
            await self._check_absent(key)
            mode = "overwrite"
        # A copy: the store of a user may keep the buffer, for a retry for example, and the memory is used again.
        await self._store.put(key, bytes(content), mode=mode)

    async def _check_absent(self, key: str) -> None:
        with suppress(FileNotFoundError):
            await self._store.size(key)
            raise FileExistsError(key)

    async def read(self, key: str, start: int, end: int) -> memoryview:
        return memoryview(await self._store.read(key, start, end))

    async def size(self, key: str) -> int:
        return await self._store.size(key)

    async def listing(self, prefix: str) -> Listing:
        if not self.capabilities.listing:
            raise NotImplementedError(f"{self.name} has no listings: give the URL of a checkpoint, not of a run")
        return await self._store.listing(prefix)

    async def delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            await self._store.delete(key)

    async def version(self, key: str) -> str:
        found: str = await self._store.version(key)  # type: ignore[attr-defined]  # a capability
        return found

    async def replace(self, key: str, content: memoryview, version: str) -> None:
        await self._store.replace(key, bytes(content), version)  # type: ignore[attr-defined]  # a capability

    async def map(self, key: str, nbytes: int) -> mmap.mmap:
        mapped: mmap.mmap = await self._store.map(key, nbytes)  # type: ignore[attr-defined]  # a capability
        return mapped

    def upload(self, key: str, body: Body, requests: Requests, stop: Stop) -> None:
        name = requests.name_of(key)
        part_bytes = part_bytes_for(body.nbytes, self._policy.part_bytes)

        def send(work: Callable[[], Awaitable[Any]]) -> LoopCall[Any]:
            return LoopCall(lambda: requests.run("uploading", name, work))

        def result(call: LoopCall[Any]) -> Any:
            return call.result(f"uploading {name}", stop)

        upload: BlobUpload = result(send(lambda: self._store.upload(key, part_bytes)))
        parts: deque[LoopCall[None]] = deque()
        completing = False
        try:
            with closing(_pieces(body, part_bytes, stop)) as pieces:
                for number, piece in enumerate(pieces):
                    if len(parts) == self._policy.concurrency:
                        # The oldest part first. This is the only brake: the parts in flight are copies, so the memory
                        # of a stage is free as soon as a part has been copied, and a slow store must not collect all of
                        # it.
                        result(parts.popleft())
                    parts.append(send(partial(upload.part, number, number * part_bytes, piece)))
            while parts:
                result(parts.popleft())
            # From here on the object may be visible although an error arrives: the answer to ``complete`` may be lost.
            # Then its size decides. No other save uses this name.
            completing = True
            result(send(upload.complete))
        except BaseException as error:
            self._abort(upload, parts)
            if not (completing and isinstance(error, Exception)):
                raise
            patience_s = min(self._policy.request_timeout_s, max(_ABORT_S, current_deadline().remaining_s()))
            if stop.is_set() or not self.is_complete(key, body.nbytes, patience_s):
                raise

    def _abort(self, upload: BlobUpload, parts: Collection[LoopCall[None]]) -> None:
        """Cancel the parts, wait for them, and abort the upload. No part may be stored after the abort."""
        for part in parts:
            part.cancel()
        with time_limit(Deadline.after(_ABORT_S)):
            for part in parts:
                with suppress(Exception):
                    part.result("aborting")
            with suppress(Exception):
                LoopCall(upload.abort).result("aborting")


def _pieces(body: Body, part_bytes: int, stop: Stop) -> Generator[bytes]:
    """Yield copies of ``part_bytes`` bytes each. A part of ``body`` is released when all of it has been copied."""
    gathered: list[bytes] = []
    missing = part_bytes
    for part in body.parts:
        try:
            view = part.take(stop)
            while view:
                gathered.append(bytes(view[:missing]))
                view = view[missing:]
                missing -= len(gathered[-1])
                if not missing:
                    yield b"".join(gathered)
                    gathered, missing = [], part_bytes
        finally:
            part.release()
    if gathered:
        yield b"".join(gathered)
