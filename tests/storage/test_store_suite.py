"""The tests for authors of stores, over every store of the project, and over stores with faults, which they have to
find."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from _own_stores import DirectoryStore, Wrapped, without
from _places import s3_place
from _s3_server import S3Server
from test_docs import blocks

import sidestream
from sidestream import testing
from sidestream.options import BlobStore, Capabilities
from sidestream.testing import OperationTests, StorePlace, StoreTests

DOCS = Path(__file__).parents[2] / "docs"
FULL = Capabilities(create_only=True, listing=True, versions=True)


def store_of_the_page() -> Any:
    """The store that the documentation shows."""
    page: dict[str, Any] = {}
    exec(blocks((DOCS / "stores" / "own.md").read_text())[0].code, page)
    return page["DictStore"]()


class TestLocal(OperationTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StorePlace:
        can = Capabilities(create_only=True, listing=True, versions=True, mapping=True)
        return StorePlace(url=str(tmp_path / "run"), storage=sidestream.Storage(), capabilities=can)


class TestMarked(OperationTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StorePlace:
        can = Capabilities(create_only=True, listing=True, versions=True, mapping=True)
        return StorePlace(url=str(tmp_path / "run"), storage=sidestream.Storage(commit="marker"), capabilities=can)


class TestMemory(OperationTests):
    @pytest.fixture
    def place(self) -> StorePlace:
        can = Capabilities(create_only=True, listing=True)
        return StorePlace(url=f"memory://{uuid.uuid4().hex}", storage=sidestream.Storage(), capabilities=can)


class TestS3(OperationTests):
    @pytest.fixture(params=["obstore", "fsspec"])
    def place(self, request: pytest.FixtureRequest, s3: S3Server) -> StorePlace:
        place = s3_place(s3, request.param)
        can = Capabilities(create_only=True, listing=True, versions=request.param == "obstore")
        return StorePlace(url=place.base, storage=place.keywords["storage"], capabilities=can)


class TestStoreOfThePage(StoreTests):
    @pytest.fixture
    def store(self) -> BlobStore:
        store: BlobStore = store_of_the_page()
        return store


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
