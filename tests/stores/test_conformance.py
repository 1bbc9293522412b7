"""The contract of a store, and a run, on the real servers: each through every client that speaks to it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from _servers import Endpoint
from _states import PART_BYTES, blank_state, make_state, seed_in
from keywords import for_load, for_run, for_save

import sidestream
from sidestream import events
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import Store, locate_directory, locate_run

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


async def test_a_checkpoint_is_replaced(run: tuple[str, dict[str, Any]]) -> None:
    url, how = f"{run[0]}/last", run[1]
    if how["storage"].policy.engine == "fsspec":
        with pytest.raises(sidestream.errors.InvalidOptionError):
            await sidestream.save(make_state(31), url, overwrite=True, **for_save(**how))
        return
    for seed in (31, 32):
        info = await sidestream.save(make_state(seed), url, overwrite=True, **for_save(**how))
    ends = await asyncio.gather(
        *(sidestream.save(make_state(seed), url, overwrite=True, **for_save(**how)) for seed in (33, 34)),
        return_exceptions=True,
    )
    assert {type(end) for end in ends} <= {sidestream.SaveInfo, sidestream.errors.CheckpointExistsError}
    info = await sidestream.save(make_state(35), url, overwrite=True, **for_save(**how))
    state = blank_state()
    await sidestream.load(state, url, **for_load(**how))
    assert seed_in(state) == 35
    with time_limit(Deadline.after(60)):
        names = set(await locate_directory(url, how["storage"]).store.sizes("last"))
    assert all(info.save_id in name for name in names - {".metadata"})
    await sidestream.remove(url, **how)
    with pytest.raises(sidestream.errors.CheckpointNotFoundError):
        await sidestream.load(state, url, **for_load(**how))


async def test_what_is_discarded_is_gone(store: Store) -> None:
    """In place of the suite's: SeaweedFS goes on listing the empty directory until it cleans up by itself."""
    transaction = suite.written(store, {"__0_0.distcp": b"content"})
    await transaction.discard()
    await transaction.discard()
    suite.written(store, {"__0_0.distcp": b"content"}, suite.OTHER_ID).discard_here()
    with pytest.raises(FileNotFoundError):
        await store.sizes("ckpt")


async def test_a_run_is_saved_and_restored(run: tuple[str, dict[str, Any]]) -> None:
    url, how = run
    told: list[events.Event] = []
    with events.observe(told.append):
        async with sidestream.Checkpointer(url, **for_run(**how)) as checkpoints:
            assert await checkpoints.restore(blank_state()) is None
            for step, seed in ((1, 31), (2, 32), (2, 33)):
                await checkpoints.save(make_state(seed), step=step)
            assert await checkpoints.steps() == [1, 2]
        state = blank_state()
        async with sidestream.Checkpointer(url, **for_run(**how)) as checkpoints:
            assert await checkpoints.restore(state) == 2
            assert seed_in(state) == 33
            assert await checkpoints.restore(state, 1) == 1
            assert seed_in(state) == 31
        with pytest.raises(sidestream.errors.CheckpointExistsError):
            await sidestream.save(make_state(34), f"{url}/step-1", **for_save(**how))
    secret = how["storage"].options.get("secret") or how["storage"].options.get("account_key")
    assert secret is None or secret not in repr(told)
