"""Servers for the tests here, which ``nox -s stores`` runs; a run of all other tests does not look in here."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from _proxy import Lane, Proxy, proxy
from _servers import LOCAL, Bucket, Endpoint, Missing, azurite, fake_gcs, seaweedfs

FULL = os.environ.get("SIDESTREAM_CI_FULL") == "1"


def started(server: Callable[[Path], AbstractContextManager[Endpoint]]) -> Any:
    """A fixture for a server: a missing one is a reason to skip, and a failure where everything has to run."""

    def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
        try:
            running = server(tmp_path_factory.mktemp(server.__name__))
            endpoint = running.__enter__()
        except Missing as missing:
            if FULL:
                pytest.fail(f"{missing} (SIDESTREAM_CI_FULL=1 takes no excuse)", pytrace=False)
            pytest.skip(str(missing))
        try:
            yield endpoint
        finally:
            running.__exit__(None, None, None)

    fixture.__name__ = server.__name__
    return pytest.fixture(scope="session")(fixture)


seaweed = started(seaweedfs)
azure = started(azurite)
gcs = started(fake_gcs)


@pytest.fixture(scope="session")
def faults(seaweed: Endpoint) -> Iterator[Proxy]:
    """The fault proxy in front of SeaweedFS."""
    with proxy(LOCAL, seaweed.port) as running:
        yield running


@pytest.fixture
def lane(faults: Proxy) -> Iterator[Lane]:
    with faults.lane() as opened:
        yield opened


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """A path in the bucket that no other test uses."""
    return f"{request.node.originalname}/{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def bucket(seaweed: Endpoint) -> Iterator[Bucket]:
    opened = Bucket(seaweed)
    yield opened
    opened.close()
