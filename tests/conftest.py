"""What every test shares."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings
from leases import all_returned

import sidestream
from sidestream.dcp import StorageWriter

settings.register_profile("sidestream", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("sidestream")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--writer",
        default="thread",
        choices=("thread", "process"),
        help="what writes if a test does not say: with 'process', the tests of threads are those of a writer process",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (writer := config.getoption("--writer")) != "thread":
        for function in (sidestream.SaveOptions.__init__, StorageWriter.__init__):
            assert function.__kwdefaults__ is not None
            function.__kwdefaults__["writer"] = writer


_LONGEST = (
    "security/test_bounds.py",
    "saver/test_saver_process.py",
    "storage/test_store_faults.py",
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
)
"""Files that begin first, so that no process of xdist is left with one of them while the other has ended. The sessions
give ``--no-loadscope-reorder``, because xdist would begin with the files that have most tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    order = {tests / name: number for number, name in enumerate(_LONGEST)}
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
