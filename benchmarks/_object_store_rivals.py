"""Who uploads and downloads in ``object_store.py``: each in a process of its own, on the same bytes."""

from __future__ import annotations

import asyncio
import ctypes
import functools
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint as dcp

import sidestream

State = dict[str, torch.Tensor]
Options = dict[str, Any]

PART_BYTES = 16 << 20
IN_FLIGHT = 4
CACHED_BYTES = 256 << 10

memmove = ctypes.PyDLL(None).memmove  # holds the GIL: to take it again would cost more than these copies
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Rival:
    """Uploads ``state`` under a new prefix and downloads it from there into its tensors again."""

    name: ClassVar[str]

    def __init__(self, state: State, protocol: str, options: Options) -> None:
        self.state = state
        self.protocol = protocol
        self.options = options

    async def open(self) -> None: ...

    async def upload(self, url: str) -> None:
        raise NotImplementedError

    async def download(self, url: str) -> None:
        raise NotImplementedError

    async def aclose(self) -> None: ...


class Sidestream(Rival):
    """A save as a training loop makes it: staged, framed, checksummed, written, committed."""

    engine: ClassVar[str] = "obstore"
    saved: ClassVar[sidestream.SaveOptions] = sidestream.SaveOptions()

    async def open(self) -> None:
        backing = "shared" if self.saved.writer == "process" else "private"
        self._stager = None if self.saved.streaming else sidestream.AsyncStager(backing=backing)
        self._policy = sidestream.StorePolicy(engine=self.engine, part_bytes=PART_BYTES, concurrency=IN_FLIGHT)
        self._how: Options = {"storage": sidestream.Storage(self.options, policy=self._policy)}

    async def upload(self, url: str) -> None:
        await sidestream.save(self.state, url, stager=self._stager, options=self.saved, **self._how)

    async def download(self, url: str) -> None:
        await sidestream.load(self.state, url, **self._how)

    async def aclose(self) -> None:
        if self._stager is not None:
            self._stager.close()


class SidestreamThreads(Sidestream):
    name = "sidestream, threads"


class SidestreamProcess(Sidestream):
    name = "sidestream, process"
    saved = sidestream.SaveOptions(writer="process")


class SidestreamStreaming(Sidestream):
    name = "sidestream, streaming"
    saved = sidestream.SaveOptions(streaming=True)


class SidestreamFsspec(Sidestream):
    name = "sidestream, fsspec"
    engine = "fsspec"


class Stock(Rival):
    """``dcp.save`` and ``dcp.load`` over fsspec, in a thread: they have no asynchronous form that returns when all is
    written, and would hold the loop."""

    name = "stock DCP, fsspec"

    async def upload(self, url: str) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

        writer = FsspecWriter(url, **self.options)
        await asyncio.to_thread(dcp.save, self.state, storage_writer=writer, no_dist=True)

    async def download(self, url: str) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        reader = FsspecReader(url, **self.options)
        await asyncio.to_thread(dcp.load, self.state, storage_reader=reader, no_dist=True)


class _Plain(Rival):
    """One object with the bytes of all tensors, and nothing else: no staging, no framing, no checksums of ours."""

    def __init__(self, state: State, protocol: str, options: Options) -> None:
        super().__init__(state, protocol, options)
        nbytes = sum(tensor.nbytes for tensor in state.values())
        self._bytes = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
        self._view = memoryview(self._bytes.numpy())
        self.state = {}

    def _ranges(self) -> list[tuple[int, int]]:
        return [(at, min(at + PART_BYTES, len(self._view))) for at in range(0, len(self._view), PART_BYTES)]

    def _put_in(self, at: int, content: Any) -> None:
        self._bytes[at : at + len(content)].copy_(torch.frombuffer(content, dtype=torch.uint8))

    async def _several(self, one: Any) -> None:
        left = iter(self._ranges())

        async def worker() -> None:
            for start, end in left:
                await one(start, end)

        await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


class PlainObstore(_Plain):
    name = "plain obstore"
    checksum: ClassVar[str | None] = "crc64nvme"

    async def open(self) -> None:
        import obstore.store

        if self.protocol == "az":
            account = {"account_name": self.options["account_name"], "account_key": self.options["account_key"]}
            endpoint = dict(one.split("=", 1) for one in self.options["connection_string"].split(";") if one)
            self._store: Any = obstore.store.AzureStore(
                "bucket", config={**account, "endpoint": endpoint["BlobEndpoint"]}, client_options={"allow_http": True}
            )
            return
        config: Options = {
            "access_key_id": self.options["key"],
            "secret_access_key": self.options["secret"],
            "endpoint": self.options["endpoint_url"],
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
            "unsigned_payload": True,
        }
        if self.checksum:
            config["checksum_algorithm"] = self.checksum
        self._store = obstore.store.S3Store("bucket", config=config, client_options={"allow_http": True})

    async def upload(self, url: str) -> None:
        import obstore

        key = url.partition("://bucket/")[2]
        await obstore.put_async(self._store, key, self._view, chunk_size=PART_BYTES, max_concurrency=IN_FLIGHT)

    async def download(self, url: str) -> None:
        import obstore

        key = url.partition("://bucket/")[2]

        async def one(start: int, end: int) -> None:
            content = await obstore.get_range_async(self._store, key, start=start, end=end)
            await asyncio.to_thread(self._put_in, start, memoryview(content))

        await self._several(one)


class PlainObstoreNoChecksum(PlainObstore):
    name = "plain obstore, no checksum"
    checksum = None


class CopyAndSum(PlainObstore):
    """Plain obstore behind the least that a save does with each byte: one thread copies it, computes the CRC-32 of the
    files while the bytes are in the cache, and hands over window by window."""

    name = "copy + CRC, obstore"

    async def open(self) -> None:
        await super().open()
        self._copy = torch.ones_like(self._bytes)
        self._copied = memoryview(self._copy.numpy())

    async def upload(self, url: str) -> None:
        import obstore

        windows: asyncio.Queue[memoryview | None] = asyncio.Queue()
        working = asyncio.create_task(asyncio.to_thread(self._work, asyncio.get_running_loop(), windows))

        async def taken() -> AsyncIterator[memoryview]:
            while (window := await windows.get()) is not None:
                yield window

        key = url.partition("://bucket/")[2]
        await obstore.put_async(self._store, key, taken(), chunk_size=PART_BYTES, max_concurrency=IN_FLIGHT)
        await working

    def _work(self, loop: asyncio.AbstractEventLoop, windows: asyncio.Queue[memoryview | None]) -> None:
        from isal.isal_zlib import crc32

        target, source = self._copy.data_ptr(), self._bytes.data_ptr()
        crc = 0
        for begin, end in self._ranges():
            for start in range(begin, end, CACHED_BYTES):
                size = min(CACHED_BYTES, end - start)
                memmove(target + start, source + start, size)
                crc = crc32(self._copied[start : start + size], crc)
            loop.call_soon_threadsafe(windows.put_nowait, self._copied[begin:end])
        loop.call_soon_threadsafe(windows.put_nowait, None)


class PlainFsspec(_Plain):
    """As the documentation of s3fs and gcsfs has it: ``open("wb")``, in a thread."""

    name = "plain fsspec"

    async def open(self) -> None:
        import fsspec

        self._fs = fsspec.filesystem(self.protocol, **self.options, skip_instance_cache=True, use_listings_cache=False)

    async def upload(self, url: str) -> None:
        def write() -> None:
            with self._fs.open(url, "wb", block_size=PART_BYTES) as file:
                for start, end in self._ranges():
                    file.write(self._view[start:end])

        await asyncio.to_thread(write)

    async def download(self, url: str) -> None:
        async def one(start: int, end: int) -> None:
            content = await asyncio.to_thread(functools.partial(self._fs.cat_file, url, start=start, end=end))
            await asyncio.to_thread(self._put_in, start, bytearray(content))

        await self._several(one)


RIVALS: dict[str, type[Rival]] = {
    rival.name: rival
    for rival in (
        SidestreamThreads, SidestreamProcess, SidestreamStreaming, PlainObstore, PlainObstoreNoChecksum, CopyAndSum,
        SidestreamFsspec, PlainFsspec, Stock,
    )
}  # fmt: skip
