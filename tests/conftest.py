"""What every test shares."""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from leases import all_returned

import sidestream
from sidestream.dcp import StorageWriter

# How long an example takes, or is made, says how busy the machine is. Examples are the same in each run: `nox -s long`
# looks for others, and nobody who runs the tests for the first time finds one.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("sidestream", settings.get_profile("random"), derandomize=True)
settings.load_profile("sidestream")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--writer",
        default="thread",
        choices=("thread", "process"),
        help="what writes if a test does not say: with 'process', the tests of threads are those of a writer process",
    )
    parser.addoption(
        "--shuffle",
        type=int,
        metavar="SEED",
        help="run the files in a random order, the same for the same seed: no test may need what another file leaves",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (writer := config.getoption("--writer")) != "thread":
        for function in (sidestream.SaveOptions.__init__, StorageWriter.__init__):
            assert function.__kwdefaults__ is not None
            assert "writer" in function.__kwdefaults__
            function.__kwdefaults__["writer"] = writer


_LONGEST = (
    "security/test_bounds.py",
    "saver/test_saver_process.py",
    "storage/test_store_faults.py",
    "storage/test_store_suite.py",
    "goldens/test_goldens.py",
    "test_budgets.py",
    "crash/test_ended_loops.py",
    "convert/test_object_targets.py",
    "test_foreign_ranks.py",
    "storage/test_object_saver.py",
    "test_device_staging.py",
    "test_roundtrip.py",
    "convert/test_convert.py",
    "dcp/test_dcp_ranks.py",
    "storage/test_store_processes.py",
    "security/test_hostile.py",
    "test_giving_back.py",
    "ranks/test_shown_commands.py",
    "ranks/test_example.py",
)
"""Files that begin first, so that no process of xdist is left with one of them while the other has ended. The sessions
give ``--no-loadscope-reorder``, because xdist would begin with the files that have most tests."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    first = [tests / name for name in _LONGEST]
    if (seed := config.getoption("--shuffle")) is not None:
        random.Random(seed).shuffle(first := sorted({item.path for item in items}))
    order = {path: number for number, path in enumerate(first)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """What torch and the tests have imported takes no part in garbage collections, of which there are many: each would
    take 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
async def stager() -> AsyncIterator[sidestream.AsyncStager]:
    """A stager whose memory is all given back at the end of the test."""
    async with sidestream.AsyncStager(budget_bytes=1 << 30) as stager:
        yield stager
        await all_returned(stager)
