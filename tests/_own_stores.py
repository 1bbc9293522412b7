"""Stores that a user could have written: one over a directory, that of the documentation, and a wrapper that delays and
fails."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import threading
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from test_docs import ROOT, blocks

from sidestream.options import BlobInfo, BlobStore, BlobUpload, Capabilities, Listing, PutMode

__all__ = ["DictStore", "DirectoryStore", "Fault", "VersionedStore", "Wrapped", "without"]


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    work = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


class DirectoryStore:
    capabilities = Capabilities(create_only=True, listing=True, mapping=True)

    def __init__(self, root: Path) -> None:
        self.blobs, self.parts = root / "blobs", root / "parts"
        self.parts.mkdir(parents=True, exist_ok=True)

    async def read(self, name: str, start: int, end: int) -> bytes:
        with (self.blobs / name).open("rb") as file:
            file.seek(start)
            return bytes(await in_thread(file.read, end - start))

    async def size(self, name: str) -> int:
        if not (self.blobs / name).is_file():
            raise FileNotFoundError(name)
        return (self.blobs / name).stat().st_size

    async def put(self, name: str, content: bytes, *, mode: PutMode) -> None:
        upload = await self.upload(name, len(content))
        try:
            await upload.part(0, 0, content)
            await upload.show(os.link if mode == "create" else os.replace)
        finally:
            await upload.abort()

    async def upload(self, name: str, part_bytes: int) -> DirectoryUpload:
        return DirectoryUpload(self.parts / uuid.uuid4().hex, self.blobs / name)

    async def listing(self, prefix: str) -> Listing:
        found = list((self.blobs / prefix).iterdir()) if (self.blobs / prefix).is_dir() else []
        files = {one.name: one.stat() for one in found if one.is_file()}
        infos = {name: BlobInfo(one.st_size, datetime.fromtimestamp(one.st_mtime, UTC)) for name, one in files.items()}
        return Listing(infos, [one.name for one in found if any(below.is_file() for below in one.rglob("*"))])

    async def delete(self, name: str) -> None:
        (self.blobs / name).unlink()

    async def map(self, name: str, nbytes: int) -> mmap.mmap:
        with (self.blobs / name).open("rb") as file:
            return mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_COPY)


class DirectoryUpload:
    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.target = path, target
        self.path.touch()

    async def part(self, number: int, offset: int, content: bytes) -> None:
        with self.path.open("r+b") as file:
            await in_thread(os.pwrite, file.fileno(), content, offset)
            await in_thread(os.fsync, file.fileno())

    async def show(self, move: Callable[[Path, Path], None]) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        move(self.path, self.target)

    async def complete(self) -> None:
        await self.show(os.replace)

    async def abort(self) -> None:
        self.path.unlink(missing_ok=True)


_page: dict[str, Any] = {}
exec(blocks((ROOT / "docs" / "stores" / "own.md").read_text())[0].code, _page)
DictStore: Any = _page["DictStore"]
"""The store that the documentation shows."""


class VersionedStore(DictStore):
    """With versions, which are those of the writes."""

    capabilities = replace(DictStore.capabilities, versions=True)

    def __init__(self) -> None:
        super().__init__()
        self.writes: Counter[str] = Counter()

    async def put(self, name: str, content: bytes, *, mode: PutMode) -> None:
        await super().put(name, content, mode=mode)
        self.writes[name] += 1

    async def version(self, name: str) -> str:
        self.content(name)
        return str(self.writes[name])

    async def replace(self, name: str, content: bytes, version: str) -> None:
        if await self.version(name) != version:
            raise FileExistsError(name)
        await self.put(name, content, mode="overwrite")


@dataclass
class Fault:
    """What happens to the operation number ``nth`` of a ``kind``, counted from 1: ``error`` is raised before it is
    carried out or after; without an error it never ends. ``reached`` is set when it begins."""

    kind: str
    nth: int = 1
    error: type[OSError] | None = None
    when: Literal["before", "after"] = "before"
    reached: threading.Event = field(default_factory=threading.Event)

    async def strike(self) -> None:
        self.reached.set()
        if self.error is None:
            await asyncio.get_running_loop().create_future()
        else:
            raise self.error(5, f"{self.kind} {self.nth} fails {self.when} it is carried out")


class Wrapped:
    """A store over another one. Operations are delayed by random turns of the loop, so that those that are in progress
    at once overtake each other; ``faults`` strike; with ``flaky`` the operations 1, 4, 7 ... of each kind fail.

    The kinds are the names of the methods, ``put`` with ``mode="create"`` apart as ``create``."""

    def __init__(self, store: BlobStore, *faults: Fault, seed: int = 0, flaky: bool = False) -> None:
        self.capabilities = replace(store.capabilities, mapping=False)
        self.counts: Counter[str] = Counter()
        self._store = store
        self._faults = faults
        self._turns = random.Random(seed)
        self._flaky = flaky

    async def operate(self, kind: str, work: Callable[[], Awaitable[Any]]) -> Any:
        self.counts[kind] += 1
        strikes = [one for one in self._faults if (one.kind, one.nth) == (kind, self.counts[kind])]
        if self._flaky and self.counts[kind] % 3 == 1:
            raise ConnectionResetError(104, "try again")
        await self._delay()
        for fault in strikes:
            if fault.when == "before":
                await fault.strike()
        result = await work()
        await self._delay()
        for fault in strikes:
            await fault.strike()
        return result

    async def _delay(self) -> None:
        for _ in range(self._turns.randrange(6)):
            await asyncio.sleep(0)

    async def read(self, name: str, start: int, end: int) -> bytes | bytearray | memoryview:
        content: bytes = await self.operate("read", lambda: self._store.read(name, start, end))
        return content

    async def size(self, name: str) -> int:
        return int(await self.operate("size", lambda: self._store.size(name)))

    async def put(self, name: str, content: bytes, *, mode: PutMode) -> None:
        kind = "create" if mode == "create" else "put"
        await self.operate(kind, lambda: self._store.put(name, content, mode=mode))

    async def upload(self, name: str, part_bytes: int) -> BlobUpload:
        upload = await self.operate("upload", lambda: self._store.upload(name, part_bytes))
        return WrappedUpload(self, upload)

    async def listing(self, prefix: str) -> Listing:
        listing: Listing = await self.operate("listing", lambda: self._store.listing(prefix))
        return listing

    async def delete(self, name: str) -> None:
        await self.operate("delete", lambda: self._store.delete(name))


@dataclass
class WrappedUpload:
    store: Wrapped
    upload: BlobUpload

    async def part(self, number: int, offset: int, content: bytes) -> None:
        await self.store.operate("part", lambda: self.upload.part(number, offset, content))

    async def complete(self) -> None:
        await self.store.operate("complete", self.upload.complete)

    async def abort(self) -> None:
        await self.store.operate("abort", self.upload.abort)


def without(store: BlobStore, **flags: bool) -> Wrapped:
    """The store with other flags."""
    wrapped = Wrapped(store)
    wrapped.capabilities = replace(wrapped.capabilities, **flags)
    return wrapped
