"""Object stores for the units: memory, and a small S3 server, each through the clients that speak to it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from _own_stores import DirectoryStore, Wrapped
from _places import Place, s3_place
from _s3_server import S3Server, serving

import sidestream


@pytest.fixture(scope="session")
def _serving() -> Iterator[S3Server]:
    with serving() as server:
        yield server


@pytest.fixture
def s3(_serving: S3Server) -> S3Server:
    """An empty bucket. The server is shared: clients take long to make, and are kept by its address."""
    _serving.reset()
    return _serving


@pytest.fixture(params=["obstore", "fsspec"])
def place_on_s3(request: pytest.FixtureRequest, s3: S3Server) -> Place:
    return s3_place(s3, request.param)


@pytest.fixture(params=["memory", "handed in", "a store of the user", "s3 by obstore", "s3 by fsspec"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """Every client, with every kind of URL."""
    if request.param == "memory":
        yield Place(f"memory://{uuid.uuid4().hex}/run")
    elif request.param == "handed in":
        yield Place(f"{uuid.uuid4().hex}/run", {"storage": sidestream.Storage(filesystem=fsspec.filesystem("memory"))})
    elif request.param == "a store of the user":
        yield Place("run", {"storage": sidestream.Storage(filesystem=Wrapped(DirectoryStore(tmp_path)))})
    else:
        yield s3_place(request.getfixturevalue("s3"), request.param.rpartition(" ")[2])
