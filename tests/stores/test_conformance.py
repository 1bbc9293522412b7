"""The contract of a store, and a run, on the real servers: each through every client that speaks to it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from _servers import Endpoint
from _states import PART_BYTES

import sidestream
from sidestream._storage import Store, locate_run
from sidestream.options import Capabilities
from sidestream.testing import OperationTests, StorePlace

sys.path.append(str(Path(__file__).parents[1] / "storage"))
import test_store_conformance as suite

globals().update({name: test for name, test in vars(suite).items() if name.startswith("test_")})
limited = suite.limited  # a fixture

# aiohttp's word to the clients of Azure and Google, which hand it bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")

CLIENTS = {
    "SeaweedFS by obstore": ("seaweed", "obstore"),
    "SeaweedFS by s3fs": ("seaweed", "fsspec"),
    "azurite by obstore": ("azure", "obstore"),
    "azurite by adlfs": ("azure", "fsspec"),
    "fake-gcs-server by gcsfs": ("gcs", "fsspec"),
}


@pytest.fixture(params=CLIENTS)
def run(request: pytest.FixtureRequest, prefix: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """URL and keywords of a run that is empty yet."""
    server, engine = CLIENTS[request.param]
    if server == "gcs":  # or it asks Google what kind of bucket this is
        monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    endpoint: Endpoint = request.getfixturevalue(server)
    policy = sidestream.StorePolicy(engine=engine, part_bytes=PART_BYTES, request_timeout_s=60)
    return endpoint.url(prefix), {"storage": sidestream.Storage(endpoint.options, policy=policy)}


@pytest.fixture
def store(run: tuple[str, dict[str, Any]]) -> Store:
    url, how = run
    return locate_run(url, how["storage"])[0]


class TestOperations(OperationTests):
    @pytest.fixture
    def place(self, run: tuple[str, dict[str, Any]]) -> StorePlace:
        url, how = run
        can = Capabilities(create_only=True, listing=True, versions=how["storage"].policy.engine == "obstore")
        return StorePlace(url=url, storage=how["storage"], capabilities=can)


async def test_what_is_discarded_is_gone(store: Store) -> None:
    """In place of the suite's: SeaweedFS goes on listing the empty directory until it cleans up by itself."""
    transaction = suite.written(store, {"__0_0.distcp": b"content"})
    transaction.discard()
    transaction.discard()
    suite.written(store, {"__0_0.distcp": b"content"}, suite.OTHER_ID).discard()
    with pytest.raises(FileNotFoundError):
        await store.sizes("ckpt")
