"""Stores that break the contract in one point each, and the test of ``StoreTests`` that has to find it. As a test file
of its own, this runs ``StoreTests`` over all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from _own_stores import DictStore, VersionedStore

from sidestream.options import Listing
from sidestream.testing import StoreTests

Upload: Any = type(asyncio.run(DictStore().upload("x", 1)))


class Sound(VersionedStore):
    found_by = ""


class CreatesOverOthers(VersionedStore):
    found_by = "test_a_put_that_creates"

    async def put(self, name: str, content: bytes, *, mode: str) -> None:
        await super().put(name, content, mode="overwrite")


class LooksBeforeItCreates(VersionedStore):
    found_by = "test_creations_at_once"

    async def put(self, name: str, content: bytes, *, mode: str) -> None:
        if mode == "create" and name in self.blobs:
            raise FileExistsError(name)
        await asyncio.sleep(0)
        await super().put(name, content, mode="overwrite")


class ListsLate(VersionedStore):
    found_by = "test_a_listing_is_current"

    async def listing(self, prefix: str) -> Listing:
        now = await super().listing(prefix)
        before, self.last = getattr(self, "last", now), now
        return before


class ListsNeighbours(VersionedStore):
    found_by = "test_a_listing"

    async def listing(self, prefix: str) -> Listing:
        found = await super().listing(prefix)
        more = [name.removeprefix(prefix) for name in self.blobs if name.startswith(prefix) and prefix]
        return Listing(found.files, {*found.directories, *(name.partition("/")[0] for name in more)} - {""})


class ListsOnePage(VersionedStore):
    found_by = "test_a_long_listing"

    async def listing(self, prefix: str) -> Listing:
        found = await super().listing(prefix)
        return Listing(dict(list(found.files.items())[:1000]), found.directories)


class ReadsOneMore(VersionedStore):
    found_by = "test_ranges"

    async def read(self, name: str, start: int, end: int) -> bytes:
        return bytes(await super().read(name, start, end + 1))


class ShowsParts(VersionedStore):
    found_by = "test_a_put_is_seen_whole"

    async def put(self, name: str, content: bytes, *, mode: str) -> None:
        await super().put(name, content[: len(content) // 2], mode=mode)
        await asyncio.sleep(0)
        await super().put(name, content, mode="overwrite")


class PutsAfterACancel(VersionedStore):
    found_by = "test_a_cancelled_put"

    async def put(self, name: str, content: bytes, *, mode: str) -> None:
        async def later() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            await super(PutsAfterACancel, self).put(name, content, mode=mode)

        await asyncio.shield(later())


class KnowsNoAbsence(VersionedStore):
    found_by = "test_what_does_not_exist"

    async def size(self, name: str) -> int:
        return len(self.blobs.get(name, (b"",))[0])


class DeletesOnce(VersionedStore):
    found_by = "test_a_delete"

    async def delete(self, name: str) -> None:
        if name not in self.blobs:
            raise KeyError(name)
        await super().delete(name)


class ComparesNoVersions(VersionedStore):
    found_by = "test_versions"

    async def replace(self, name: str, content: bytes, version: str) -> None:
        await self.put(name, content, mode="overwrite")


class WithUpload(VersionedStore):
    made: Any

    async def upload(self, name: str, part_bytes: int) -> Any:
        return self.made(self, name)


class JoinsPartsAsTheyCome(WithUpload):
    found_by = "test_an_upload"

    class made(Upload):
        async def part(self, number: int, offset: int, content: bytes) -> None:
            self.parts[len(self.parts)] = content


class AbortsTheBlob(WithUpload):
    found_by = "test_an_upload_replaces"

    class made(Upload):
        async def abort(self) -> None:
            await self.store.delete(self.name)


def stores() -> dict[str, Any]:
    return {name: one for name, one in globals().items() if hasattr(one, "found_by")}


def tests_of(store: Any) -> type[StoreTests]:
    def make(self: StoreTests) -> Any:
        return store()

    return type(f"Test{store.__name__}", (StoreTests,), {"store": pytest.fixture(make, name="store")})


globals().update({f"Test{name}": tests_of(one) for name, one in stores().items()})
