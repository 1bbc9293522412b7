"""The engine of S3, Google Cloud Storage and Azure through obstore. Parts are sent from staging memory without a
copy."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import obstore
import obstore.store

from ..._runtime.tasks import wait_out
from ..._runtime.threads import Deadline, Stop, current_deadline, time_limit
from ...errors import ClosedError, ForkedProcessError, SidestreamError
from ...events import SlowPart, emit
from ...options import BlobInfo, Capabilities, Listing, PutMode, StorePolicy
from ..bodies import Body
from .credentials import Client
from .engine import Engine, part_bytes_for
from .feed import Feed
from .requests import LoopCall, Requests, failure_kind, translated

T = TypeVar("T")

_ABORT_S = 1.5  # three times this is less than the time that callers wait for a thread after its deadline
_LONGEST_ABORT_S = 10.0
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


class ObstoreEngine(Engine):
    """The engine of one bucket."""

    capabilities = Capabilities(create_only=True, listing=True, versions=True)

    def __init__(self, client: Client, policy: StorePolicy) -> None:
        _mark_used()
        self.name = f"obstore:{client.kind}"
        self._bucket = client.bucket
        self._kind = client.kind
        self._policy = policy
        self._client = _open(client, policy, retries=0)  # Requests retries, with events
        self._uploads = _open(client, policy, retries=policy.retries)  # only obstore can send one part again

    @property
    def _store(self) -> Any:
        """The client. Raises ``ForkedProcessError`` in a forked child."""
        self._check_process()
        return self._client

    def __repr__(self) -> str:
        return f"<ObstoreEngine {self._kind} {self._bucket}>"

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
        feed = Feed()
        part_bytes = part_bytes_for(body.nbytes, self._policy.part_bytes)
        call = LoopCall(lambda: self._send(key, feed, part_bytes))
        try:
            for part in body.parts:
                try:
                    view = part.take(stop)
                    feed.put(view, stop)
                    del view
                finally:
                    part.release()  # the memory is freed when obstore has released its reference too
        except BaseException as error:
            call.cancel()
            with suppress(Exception):
                _result(call, f"aborting {key}")
            failure = call.future.exception() if call.future.done() else None
            if isinstance(error, ClosedError) and failure is not None:  # the client had ended before
                raise failure from None
            raise
        call.loop.call_soon_threadsafe(feed.end)
        try:
            _result(call, f"uploading {key}", stop)
        except Exception:
            patience_s = min(self._policy.request_timeout_s, max(_ABORT_S, current_deadline().remaining_s()))
            if stop.is_set() or not self.is_complete(key, body.nbytes, patience_s):
                raise  # otherwise only the acknowledgement was lost: no other save uses this name
        stop.check()

    async def _send(self, key: str, feed: Feed, part_bytes: int) -> None:
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
        except BaseException:
            await self._abort(put, feed)
            raise
        finally:
            feed.close()

    async def _watched(self, put: asyncio.Future[Any], feed: Feed, key: str) -> None:
        since, sent, deadline = time.monotonic(), -1, current_deadline()
        while True:
            patience = min(_WATCH_S, deadline.remaining_s())
            await asyncio.wait([put], timeout=patience)
            if put.done():
                try:
                    await put
                except SidestreamError:
                    raise
                except Exception as error:
                    raise translated(error, f"uploading {key}", key) from error
                return
            deadline.check(f"uploading {key}")
            if feed.taken_bytes != sent or feed.starving:
                since, sent = time.monotonic(), feed.taken_bytes
            else:
                emit(SlowPart(key, time.monotonic() - since, sent))

    async def _abort(self, put: asyncio.Future[Any], feed: Feed) -> None:
        """Abort the upload. obstore does that when the parts in flight have ended. If that takes too long, because the
        peer stalls, cancel the put. Then the upload stays open until a lifecycle rule of the bucket removes it: obstore
        lists no uploads, so no later call can find it."""
        feed.fail()
        patience = max(_ABORT_S, min(_LONGEST_ABORT_S, current_deadline().remaining_s()))
        await wait_out(asyncio.ensure_future(asyncio.wait([put], timeout=patience)))
        if not put.done():
            put.cancel()
            await wait_out(asyncio.ensure_future(asyncio.wait([put], timeout=_ABORT_S / 10)))
        if put.done() and not put.cancelled():
            put.exception()

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

    def _name(self, key: str) -> str:
        """Return the key within the bucket."""
        return key.partition("/")[2]

    def _check_process(self) -> None:
        if _used_in != os.getpid():
            _mark_used()


def _result(call: LoopCall[T], name: str, stop: Stop | None = None) -> T:
    """Wait for a call that aborts by itself when the deadline has passed, and give it time to do so."""
    with time_limit(Deadline.after(current_deadline().remaining_s() + 3 * _ABORT_S)):
        return call.result(name, stop)


def _open(client: Client, policy: StorePolicy, *, retries: int) -> Any:
    timeout = timedelta(seconds=policy.request_timeout_s)
    options = {**client.client_options, "timeout": timeout, "connect_timeout": min(timeout, timedelta(seconds=15))}
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=15), "base": 2}
    retry = {"max_retries": retries, "retry_timeout": timedelta(days=1), "backoff": backoff}
    made = {"s3": obstore.store.S3Store, "gcs": obstore.store.GCSStore, "azure": obstore.store.AzureStore}[client.kind]
    extra: dict[str, Any] = {} if client.provider is None else {"credential_provider": client.provider}
    return made(client.bucket, config=dict(client.config), client_options=options, retry_config=retry, **extra)
