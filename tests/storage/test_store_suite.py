"""The tests for authors of stores, over every store of the project, and over stores with faults, which they have to
find."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import _broken_stores
import fsspec
import pytest
from _own_stores import DictStore, DirectoryStore, VersionedStore, Wrapped, without
from _places import s3_place
from _s3_server import S3Server
from test_docs import anchors

import sidestream
from sidestream import testing
from sidestream._runtime.threads import Stop
from sidestream._storage import BytesBody, locate_run
from sidestream._storage.clients.requests import failure_kind
from sidestream.options import BlobStore, Capabilities
from sidestream.testing import OperationTests, StorePlace, StoreTests

DOCS = Path(__file__).parents[2] / "docs"


class TestLocal(OperationTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StorePlace:
        can = Capabilities(create_only=True, listing=True, versions=True, mapping=True)
        return StorePlace(url=str(tmp_path / "run"), storage=sidestream.Storage(), capabilities=can)


class TestMarked(OperationTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StorePlace:
        can = Capabilities(create_only=True, listing=True, mapping=True)
        return StorePlace(url=str(tmp_path / "run"), storage=sidestream.Storage(commit="marker"), capabilities=can)


class TestMemory(OperationTests):
    @pytest.fixture(params=["memory://", ""])
    def place(self, request: pytest.FixtureRequest) -> StorePlace:
        """By the URL, and by a file system that is handed in."""
        storage = sidestream.Storage(filesystem=None if request.param else fsspec.filesystem("memory"))
        can = Capabilities(create_only=True, listing=True)
        return StorePlace(url=f"{request.param}{uuid.uuid4().hex}/run", storage=storage, capabilities=can)


class TestS3(OperationTests):
    @pytest.fixture(params=["obstore", "fsspec"])
    def place(self, request: pytest.FixtureRequest, s3: S3Server) -> StorePlace:
        place = s3_place(s3, request.param)
        can = Capabilities(create_only=True, listing=True, versions=request.param == "obstore")
        return StorePlace(url=place.base, storage=place.keywords["storage"], capabilities=can)


class Client:
    """A client of the library as a ``BlobStore``: it raises errors of its own, and takes an upload as a whole."""

    def __init__(self, url: str, storage: sidestream.Storage) -> None:
        self.bucket = locate_run(url, storage)[0]._bucket
        self.capabilities = self.bucket.capabilities

    async def call(self, method: str, name: str, *arguments: Any, **keywords: Any) -> Any:
        engine = await self.bucket.made()
        while True:
            try:
                return await getattr(engine, method)(self.bucket.key(name), *arguments, **keywords)
            except Exception as error:
                errors = {"absent": FileNotFoundError, "taken": FileExistsError, "transient": None}
                if (wanted := errors.get(failure_kind(error), OSError)) is not None:
                    raise wanted(str(error)) from error

    async def put(self, name: str, content: bytes, *, mode: str) -> None:
        await self.call("put", name, memoryview(content), mode=mode)

    async def replace(self, name: str, content: bytes, version: str) -> None:
        await self.call("replace", name, memoryview(content), version)

    async def upload(self, name: str, part_bytes: int) -> Any:
        return ClientUpload(self.bucket, name, {})

    async def delete(self, name: str) -> None:
        await self.call("delete", name)
        await self.bucket.forget(name.rpartition("/")[0])

    read, size = partialmethod(call, "read"), partialmethod(call, "size")
    listing, version = partialmethod(call, "listing"), partialmethod(call, "version")


@dataclass
class ClientUpload:
    bucket: Any
    name: str
    parts: dict[int, bytes]

    async def part(self, number: int, offset: int, content: bytes) -> None:
        self.parts[number] = content

    async def complete(self) -> None:
        body = BytesBody(b"".join(self.parts[number] for number in sorted(self.parts)))
        await asyncio.to_thread(self.bucket.upload, self.name, body, Stop())

    async def abort(self) -> None:
        self.parts.clear()


class TestClients(StoreTests):
    many_blobs = 50
    cancel_is_final = False

    @pytest.fixture(params=["memory", "obstore", "fsspec"])
    def store(self, request: pytest.FixtureRequest, s3: S3Server) -> Any:
        if request.param == "memory":
            return Client(f"memory://{uuid.uuid4().hex}", sidestream.Storage())
        place = s3_place(s3, request.param)
        return Client(place.base, place.keywords["storage"])


for _name in [name for name in vars(OperationTests) if name.startswith("test_")]:
    setattr(TestClients, _name, None)  # TestMemory and TestS3 run them on the same storage


class TestStoreOfThePage(StoreTests):
    @pytest.fixture(params=[DictStore, VersionedStore])
    def store(self, request: pytest.FixtureRequest) -> Any:
        return request.param()


class TestDirectoryStore(StoreTests):
    many_blobs = 50

    @pytest.fixture
    def store(self, tmp_path: Path) -> BlobStore:
        return DirectoryStore(tmp_path)


class TestDelays(TestDirectoryStore):
    """Calls overtake each other."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> BlobStore:
        return Wrapped(DirectoryStore(tmp_path))


class TestWithoutCreateOnly(TestDirectoryStore):
    @pytest.fixture
    def store(self, tmp_path: Path) -> BlobStore:
        return without(DirectoryStore(tmp_path), create_only=False)


class TestWithoutListing(TestDirectoryStore):
    @pytest.fixture
    def store(self, tmp_path: Path) -> BlobStore:
        return without(DirectoryStore(tmp_path), listing=False)

    async def fill(self, store: Any, blobs: Mapping[str, bytes]) -> None:
        await super().fill(store._store, blobs)


# --- what it finds, and how it says it ------------------------------------------------------------------------------


def test_faults_of_stores_are_found(tmp_path: Path) -> None:
    """By pytest alone, as a user's tests of a store may run."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=short", "--noconftest", "-p", "no:cacheprovider"]
    plugins = [f"-pno:{name}" for name in ("asyncio", "anyio", "xdist", "hypothesispytest")]
    files = ["-c", tmp_path / "pytest.ini", "--rootdir", tmp_path, _broken_stores.__file__]
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    wanted = " or ".join(["TestSound", *{one.found_by for one in _broken_stores.stores().values()} - {""}])
    done = subprocess.run(
        [*command, *plugins, "-k", wanted, *files],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "400"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    failed = re.findall(r"^FAILED .*::Test(\w+)::(\w+)", done.stdout, re.MULTILINE)
    for name, store in _broken_stores.stores().items():
        found = {test for failing, test in failed if failing == name}
        assert store.found_by in found if store.found_by else not found, (name, found)
    assert "the contract: " in done.stdout


def test_failures_lead_to_sections_of_pages() -> None:
    contract = " ".join(text for text in vars(testing).values() if isinstance(text, str))
    links = set(re.findall(r"docs/([\w/]+\.md)(?:#([\w-]+))?", contract))
    assert len(links) > 4
    assert [link for link in links if link[1] and link[1] not in anchors((DOCS / link[0]).read_text())] == []
