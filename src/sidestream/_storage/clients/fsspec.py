"""The engine of any fsspec file system: the portable client of object storage."""

from __future__ import annotations

import errno
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from fsspec.implementations.dirfs import DirFileSystem

from ..._runtime.threads import Deadline, Stop, current_deadline, io_threads, time_limit
from ...errors import InvalidOptionError, StorageError
from ...options import BlobInfo, Capabilities, Listing, PutMode, StorePolicy
from ..bodies import Body
from .bounded import Bounded, is_asynchronous
from .engine import Engine, part_bytes_for
from .requests import Requests

T = TypeVar("T")

_CREATE_ONLY = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory"})
_READ_ONLY = frozenset({"http", "https"})
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")

_ABORT_S = 3.0
_one_creation = threading.Lock()  # makes creations in memory:// atomic: only this process can see it


class FsspecEngine(Engine):
    """An engine that uses ``filesystem`` with its credentials and, if it is asynchronous, through its event loop."""

    def __init__(self, filesystem: Any, policy: StorePolicy) -> None:
        self.filesystem = _synchronous(filesystem)
        self._policy = policy
        self._asynchronous = is_asynchronous(self.filesystem)
        protocol = _innermost(self.filesystem).protocol
        self._protocols = frozenset((protocol,) if isinstance(protocol, str) else protocol)
        self.name = f"fsspec:{sorted(self._protocols)[0]}"
        self.capabilities = Capabilities(
            create_only=bool(self._protocols & _CREATE_ONLY), listing=not self._protocols & _READ_ONLY
        )

    async def put(self, key: str, content: memoryview, *, mode: PutMode) -> None:
        data = bytes(content)  # botocore and the client of Azure accept bytes only
        if self._asynchronous:
            await self.filesystem._pipe_file(key, data, mode=mode)
        else:
            await self._in_thread(self._put_here, key, data, mode)

    def _put_here(self, key: str, data: bytes, mode: PutMode) -> None:
        self._make_parents(key)
        if mode == "overwrite":
            self.filesystem.pipe_file(key, data)
            return
        # On other storage the lock would not exclude other processes, and one stalled peer would block all writers.
        with _one_creation if "memory" in self._protocols else nullcontext():
            if self.filesystem.exists(key):
                raise FileExistsError(key)
            self.filesystem.pipe_file(key, data)

    def upload(self, key: str, body: Body, requests: Requests, stop: Stop) -> None:
        """Send the object in the calling thread, one part after the other: file objects of fsspec do not send several
        parts at once. The content is copied once."""
        if not self._asynchronous:
            self._upload(None, key, body, stop)
            return

        async def retrying(send: Callable[[], Awaitable[Any]]) -> Any:
            return await requests.run("uploading", requests.name_of(key), send)

        bounded = Bounded(self.filesystem, self._policy.request_timeout_s, retrying)
        with stop.waking(bounded.stop):  # ``stop`` is also set when the deadline of the waiting caller passes
            self._upload(bounded, key, body, stop)

    def _upload(self, bounded: Bounded | None, key: str, body: Body, stop: Stop) -> None:
        """Send the object through a file. An error of ``check`` takes precedence over the errors of the file that
        result from the same cause."""
        filesystem = self.filesystem if bounded is None else bounded.filesystem
        part_bytes, check = part_bytes_for(body.nbytes, self._policy.part_bytes), partial(_check, bounded, key, stop)
        self._make_parents(key)
        file = None
        written = 0
        handed_over = False
        try:
            file = filesystem.open(key, "wb", block_size=part_bytes, autocommit=False)
            _leave_transaction(filesystem, file)
            for part in body.parts:
                try:
                    view = part.take(stop)
                    while view:
                        # Between every two calls of the file. A request that was ended returns None to the file object,
                        # which then fails with an unrelated error; the check raises the true cause first.
                        check()
                        # A piece ends where a part ends. The file would keep the rest and copy it again and again.
                        piece = view[: part_bytes - written % part_bytes]
                        file.write(piece)
                        written += len(piece)
                        view = view[len(piece) :]
                finally:
                    part.release()
            check()
            file.close()
            check()
            # From here on the object may be visible although an error arrives.
            handed_over = True
            file.commit()
            check()
        except BaseException as error:
            self._discard(file, key)
            if isinstance(error, Exception):
                check()
                if handed_over and self.is_complete(key, body.nbytes, self._policy.request_timeout_s):
                    return  # only the acknowledgement was lost: no other save uses this name
            raise

    def _discard(self, file: Any, key: str) -> None:
        """Discard the file, so that neither an object nor an open upload is left. The file is not closed, because that
        would publish it."""
        if file is None:
            return
        file.fs = self.filesystem  # the file system of the upload may have been stopped
        abort = threading.Thread(target=_quietly, args=(file.discard,), name="sidestream-abort", daemon=True)
        abort.start()
        abort.join(_ABORT_S)
        with suppress(AttributeError):  # ``closed`` of a file in memory is read-only; it needs none
            file.closed = True

    def _make_parents(self, key: str) -> None:
        if not self._asynchronous and "/" in key:
            with suppress(FileExistsError, NotImplementedError):
                self.filesystem.makedirs(key.rpartition("/")[0], exist_ok=True)

    async def read(self, key: str, start: int, end: int) -> memoryview:
        return memoryview(await self._call("cat_file", key, start=start, end=end))

    async def listing(self, prefix: str) -> Listing:
        # A listing decides about commits and deletions, and must never come from a cache. Not every file system knows
        # the option that turns its cache off.
        self.filesystem.invalidate_cache(prefix)
        try:
            entries = await self._call("ls", prefix, detail=True)
        except FileNotFoundError:
            return Listing({}, ())
        files, directories = {}, []
        for entry in entries:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if entry["name"].strip("/") == prefix.strip("/"):
                continue  # an object that stands for the directory, or a file with the name of the directory
            if entry["type"] == "directory":
                directories.append(name)
            else:
                files[name] = BlobInfo(int(entry["size"]), _modified(entry))
        return Listing(files, directories)

    async def size(self, key: str) -> int:
        if self._asynchronous:
            self.filesystem.invalidate_cache(key.rpartition("/")[0])
        info = await self._call("info", key)
        if info["type"] == "directory":
            raise FileNotFoundError(key)
        return int(info["size"])

    async def delete(self, key: str) -> None:
        with suppress(FileNotFoundError):
            await self._call("rm_file", key)

    async def forget(self, prefix: str) -> None:
        if not self._asynchronous:
            with suppress(Exception):  # not empty, or gone
                await self._in_thread(self.filesystem.rmdir, prefix)

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the file system: its coroutine if it has one, else the method itself, in a thread."""
        coroutine = getattr(self.filesystem, f"_{method}", None)
        if self._asynchronous and callable(coroutine):
            return await coroutine(*arguments, **keywords)

        def call() -> Any:
            return getattr(self.filesystem, method)(*arguments, **keywords)

        call.__name__ = method  # for messages
        return await self._in_thread(call)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        with time_limit(Deadline.after(self._policy.request_timeout_s)):
            return await io_threads().run(function, *arguments)


def _check(bounded: Bounded | None, key: str, stop: Stop) -> None:
    stop.check()
    current_deadline().check(f"uploading {key}")
    if bounded is not None and bounded.ended is not None:
        raise StorageError(errno.ETIMEDOUT, f"a request of the upload was ended: {bounded.ended}", key)


def _quietly(work: Callable[[], object]) -> None:
    """Call ``work`` and ignore its errors: the error that led to the abort is raised."""
    with suppress(Exception):
        work()


def _leave_transaction(filesystem: Any, file: Any) -> None:
    """Remove the file from the transactions of fsspec, to which ``open(autocommit=False)`` adds it. It would be kept
    there, with its content, as long as the file system, and a transaction of the user would publish it."""
    while filesystem is not None:
        try:
            filesystem.transaction.files.remove(file)
        except IndexError:  # another thread has changed the list meanwhile
            continue
        except ValueError:
            filesystem = vars(filesystem).get("fs")


def _innermost(filesystem: Any) -> Any:
    """Return the file system below those that only change names. Its protocol decides about the capabilities."""
    while isinstance(filesystem, DirFileSystem):
        filesystem = filesystem.fs
    return filesystem


def _synchronous(filesystem: Any) -> Any:
    """Return ``filesystem``, or an equal one that runs on the loop of fsspec if it was made for another loop."""
    if not getattr(filesystem, "asynchronous", False):
        return filesystem
    options = {**filesystem.storage_options, "asynchronous": False, "loop": None, "skip_instance_cache": True}
    if "fs" in options or any(hasattr(argument, "async_impl") for argument in filesystem.storage_args):
        raise InvalidOptionError(
            f"filesystem= is an asynchronous {type(filesystem).__name__} around another one: hand in a synchronous one "
            "(asynchronous=False), which sidestream runs on a loop of its own"
        )
    return type(filesystem)(*filesystem.storage_args, **options)


def _modified(entry: Mapping[str, Any]) -> datetime | None:
    for name in _MODIFIED:
        value = entry.get(name)
        if isinstance(value, datetime):
            return value if value.tzinfo else value.replace(tzinfo=UTC)
        if isinstance(value, (int, float)):
            return datetime.fromtimestamp(value, UTC)
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value)
    return None
