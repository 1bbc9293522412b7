"""The engine of S3, Google Cloud Storage and Azure through obstore. Parts are sent from staging memory without a
copy."""

from __future__ import annotations

import asyncio
import atexit
import errno
import json
import os
import threading
import time
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import obstore
import obstore.store

from ..._runtime.imports import collecting_later
from ..._runtime.threads import Deadline, Stop, current_deadline, time_limit
from ...errors import AccessDeniedError, ClosedError, ForkedProcessError, SidestreamError, StorageError
from ...events import SlowPart, emit
from ...options import BlobInfo, Capabilities, Listing, PutMode, StorePolicy
from ..bodies import Body, FilePart, ShowingPart
from .credentials import Client
from .engine import Engine, LateEngine, part_bytes_for
from .feed import Feed
from .requests import LoopCall, Requests, failure_kind, translated

__all__ = ["ObstoreEngine"]

T = TypeVar("T")

_ABORT_S = 1.5  # three times this is less than the time that callers wait for a thread after its deadline
_ABORT_ALONE_S = 10.0  # without a helper, which could find an upload that is left open
_WATCH_S = 10.0
_used_in: int | None = None
_used_lock = threading.Lock()


def _mark_used() -> None:
    """Record that this process uses obstore. Raises ``ForkedProcessError`` in a forked child, which does not have the
    threads of obstore.

    Threads of obstore that still work when the interpreter ends abort the process (pyo3-async-runtimes #40). So the
    end of the interpreter waits a moment for them."""
    global _used_in
    with _used_lock:
        if _used_in is None:
            atexit.register(time.sleep, 0.05)
            _used_in = os.getpid()
        if _used_in != os.getpid():
            raise ForkedProcessError(
                "obstore was used before os.fork(), and its threads are not in the child: start processes with "
                '"spawn", or take StorePolicy(engine="fsspec")'
            )


class Checksum:
    """The CRC-64/NVME of a sequence of bytes. S3 has this checksum of a whole object also after an upload in parts. It
    is computed by awscrt, at some 30 GB/s; ``known`` says whether awscrt is installed."""

    known = find_spec("awscrt") is not None

    def __init__(self) -> None:
        self._crc64 = import_module("awscrt.checksums").crc64nvme
        self._crc = 0

    def update(self, view: memoryview) -> None:
        self._crc = self._crc64(view, self._crc)

    @property
    def value(self) -> str:
        """The checksum in base64, as S3 writes it."""
        return b64encode(self._crc.to_bytes(8, "big")).decode()


class ObstoreEngine(Engine):
    """The engine of one bucket. ``helper`` is the fsspec client of the same bucket, or None. It is needed because
    obstore cannot list uploads or return the checksum of an object."""

    capabilities = Capabilities(create_only=True, listing=True, versions=True)

    def __init__(self, client: Client, policy: StorePolicy, helper: LateEngine | None) -> None:
        _mark_used()
        self.name = f"obstore:{client.kind}"
        self._bucket = client.bucket
        self._kind = client.kind
        self._policy = policy
        self._helper = helper
        self._client = _open(client, policy, retries=0)  # Requests retries, with events
        self._uploads = _open(client, policy, retries=policy.retries)  # only obstore can send one part again

    @property
    def _store(self) -> Any:
        """The client. Raises ``ForkedProcessError`` in a forked child."""
        self._check_process()
        return self._client

    def __repr__(self) -> str:
        return f"<ObstoreEngine {self._kind} {self._bucket}>"

    async def connect(self, prefix: str) -> None:
        await super().connect(prefix)
        if self._helper is not None:
            await self._open_helper()
            await (await self._helper.get()).connect(prefix)

    async def put(self, key: str, content: memoryview, *, mode: PutMode) -> None:
        await obstore.put_async(self._store, self._name(key), content, mode=mode, use_multipart=False)

    async def version(self, key: str) -> str:
        """Return the ETag, which S3 and Azure compare, and the version, which is Google's generation, as JSON."""
        found = await obstore.head_async(self._store, self._name(key))
        told = {"e_tag": found["e_tag"], "version": found["version"]}
        return json.dumps({name: one for name, one in told.items() if one is not None})

    async def replace(self, key: str, content: memoryview, version: str) -> None:
        known = json.loads(version)
        await obstore.put_async(self._store, self._name(key), content, mode=known, use_multipart=False)

    def upload(self, key: str, body: Body, requests: Requests, stop: Stop) -> None:
        self._check_process()
        if self._helper is not None:  # made before the upload: an abort has no time for the imports
            LoopCall(self._open_helper).result("connecting", stop)
        feed = Feed()
        checksum = Checksum() if Checksum.known and self._helper is not None and self._kind == "s3" else None
        part_bytes = part_bytes_for(body.nbytes, self._policy.part_bytes)
        call = LoopCall(lambda: self._send(key, feed, body.nbytes, part_bytes))
        call.future.add_done_callback(lambda _: feed.close())
        try:
            for part in body.parts:
                try:
                    view = _taken(part, checksum, stop)
                    feed.put(view, stop)
                    del view
                finally:
                    part.release()  # the memory is freed when obstore has released its reference too
            feed.end()
        except BaseException as error:
            feed.fail()
            with suppress(Exception):
                _result(call, f"aborting {key}")
            if call.future.done() and (failure := call.future.exception()) is not None and feed.closed_early(error):
                raise failure from None
            raise
        self._wait(call, feed, key, stop)
        if checksum is not None:
            self._compare(key, checksum.value, requests, stop)

    async def _open_helper(self) -> None:
        if self._helper is not None:
            with collecting_later():
                await (await self._helper.get()).open_session()

    def _compare(self, key: str, expected: str, requests: Requests, stop: Stop) -> None:
        """Compare the checksum of the staged content with the one that the storage has. Raises ``StorageError`` if they
        differ. No content is read back."""
        asked = LoopCall(lambda: requests.run("looking at", key, lambda: self.checksum(key)))
        try:
            found = asked.result(f"looking at {key}", stop)
        except AccessDeniedError:  # credentials for writing need not allow this request
            return
        if found is not None and len(found) == len(expected) and found != expected:
            raise StorageError(errno.EIO, f"the storage has CRC-64/NVME {found}, {expected} was sent: save again", key)

    def _wait(self, call: LoopCall[None], feed: Feed, key: str, stop: Stop) -> None:
        """Wait for the end of the upload, after all buffers were passed on. If ``stop`` is set, the feed fails, which
        aborts the upload."""
        with stop.waking(feed.fail):
            if stop.is_set():
                feed.fail()
            _result(call, f"uploading {key}")
        stop.check()

    async def _send(self, key: str, feed: Feed, nbytes: int, part_bytes: int) -> None:
        """Upload the object. The put runs in a task of its own. That task is cancelled only if an abort does not end
        it, because a cancel leaves the upload open."""
        put = asyncio.ensure_future(
            obstore.put_async(
                self._uploads,
                self._name(key),
                feed,
                chunk_size=part_bytes,
                max_concurrency=self._policy.concurrency,
                use_multipart=True,
            )
        )
        try:
            await self._watched(put, feed, key)
        except BaseException as error:
            await self._abort(put, feed, key)
            if isinstance(error, Exception) and feed.ended and await self._is_complete(key, nbytes):
                return  # only the acknowledgement was lost: no other save uses this name
            raise

    async def _watched(self, put: asyncio.Future[Any], feed: Feed, key: str) -> None:
        since, sent, deadline = time.monotonic(), -1, current_deadline()
        while True:
            patience = min(_WATCH_S, deadline.remaining_s())
            done, _ = await asyncio.wait([put, feed.failing], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if put in done:
                try:
                    await put
                except SidestreamError:
                    raise
                except Exception as error:
                    raise translated(error, f"uploading {key}", key) from error
                return
            deadline.check(f"uploading {key}")
            if feed.failed:
                raise ClosedError("the upload was stopped")
            if feed.taken_bytes != sent or feed.starving:
                since, sent = time.monotonic(), feed.taken_bytes
            else:
                emit(SlowPart(key, time.monotonic() - since, sent))

    async def _abort(self, put: asyncio.Future[Any], feed: Feed, key: str) -> None:
        """Abort the upload. obstore does that when the parts in flight have ended. If it takes too long, cancel the
        put. Then abort the uploads that ``open_uploads`` lists."""
        feed.fail()
        patience = (
            _ABORT_S
            if self._helper is not None
            else max(_ABORT_S, min(_ABORT_ALONE_S, current_deadline().remaining_s()))
        )
        with suppress(asyncio.CancelledError):
            await asyncio.wait([put], timeout=patience)
        if not put.done():  # the peer stalls
            put.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([put], timeout=_ABORT_S / 10)
        if put.done() and not put.cancelled():
            put.exception()
        if self._helper is not None:
            with suppress(Exception):
                async with asyncio.timeout(_ABORT_S):
                    await self.abort_uploads(await self.open_uploads(key))

    async def _is_complete(self, key: str, nbytes: int) -> bool:
        try:
            async with asyncio.timeout(self._policy.request_timeout_s):
                return await self.size(key) == nbytes
        except Exception:
            return False

    async def read(self, key: str, start: int, end: int) -> memoryview:
        return memoryview(await obstore.get_range_async(self._store, self._name(key), start=start, end=end))

    async def tail(self, key: str, nbytes: int) -> bytes:
        if self._kind == "azure":  # Azure has no suffix ranges
            return await super().tail(key, nbytes)
        try:
            found = await obstore.get_async(self._store, self._name(key), options={"range": {"suffix": nbytes}})
            return bytes(await found.bytes_async())
        except Exception as error:
            if "416" not in str(error) or failure_kind(error) != "final":
                raise
        if await self.size(key) == 0:  # outside of the except clause, so that an error of this counts for what it is
            return b""
        raise ConnectionError("the object was replaced while its end was read")

    async def listing(self, prefix: str) -> Listing:
        found = await obstore.list_with_delimiter_async(self._store, self._name(prefix) or None)
        files = {
            one["path"].rpartition("/")[2]: BlobInfo(one["size"], one["last_modified"])
            for one in found["objects"]
            if one["path"].strip("/") != self._name(prefix).strip("/")  # an object that stands for the directory
        }
        return Listing(files, [one.rstrip("/").rpartition("/")[2] for one in found["common_prefixes"]])

    async def size(self, key: str) -> int:
        return int((await obstore.head_async(self._store, self._name(key)))["size"])

    async def delete(self, key: str) -> None:
        try:
            await obstore.delete_async(self._store, self._name(key))
        except Exception as error:
            if failure_kind(error) != "absent":
                raise

    deletes_at_once = 1000  # what one request to S3 takes

    async def delete_all(self, keys: Sequence[str]) -> None:
        try:
            await obstore.delete_async(self._store, [self._name(key) for key in keys])
        except Exception as error:
            if failure_kind(error) != "absent":
                raise
            await super().delete_all(keys)  # storage without such a request ends at the first that does not exist

    async def open_uploads(self, prefix: str) -> Mapping[str, datetime | None]:
        return {} if self._helper is None else await (await self._helper.get()).open_uploads(prefix)

    async def checksum(self, key: str) -> str | None:
        return None if self._helper is None else await (await self._helper.get()).checksum(key)

    async def abort_uploads(self, uploads: Collection[str]) -> None:
        if self._helper is not None:
            await (await self._helper.get()).abort_uploads(uploads)

    def _name(self, key: str) -> str:
        """Return the key within the bucket."""
        return key.partition("/")[2]

    def _check_process(self) -> None:
        if _used_in != os.getpid():
            _mark_used()


def _taken(part: FilePart, checksum: Checksum | None, stop: Stop) -> memoryview:
    if checksum is None:
        return part.take(stop)
    if isinstance(part, ShowingPart):  # both checksums are computed while the bytes are in the processor's cache
        return part.take_showing(stop, checksum.update)
    view = part.take(stop)
    checksum.update(view)
    return view


def _result(call: LoopCall[T], name: str) -> T:
    """Wait for a call that aborts by itself when the deadline has passed, and give it time to do so."""
    with time_limit(Deadline.after(current_deadline().remaining_s() + 3 * _ABORT_S)):
        return call.result(name)


def _open(client: Client, policy: StorePolicy, *, retries: int) -> Any:
    timeout = timedelta(seconds=policy.request_timeout_s)
    options = {**client.client_options, "timeout": timeout, "connect_timeout": min(timeout, timedelta(seconds=15))}
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=15), "base": 2}
    retry = {"max_retries": retries, "retry_timeout": timedelta(days=1), "backoff": backoff}
    made = {"s3": obstore.store.S3Store, "gcs": obstore.store.GCSStore, "azure": obstore.store.AzureStore}[client.kind]
    extra: dict[str, Any] = {} if client.provider is None else {"credential_provider": client.provider}
    return made(client.bucket, config=dict(client.config), client_options=options, retry_config=retry, **extra)
