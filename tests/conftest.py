"""What every test shares."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings
from leases import all_returned

import sidestream
from sidestream.dcp import StorageWriter

settings.register_profile("sidestream", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("sidestream")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--saver",
        default="thread",
        choices=("thread", "process"),
        help="who writes where a test does not say: with 'process', the tests of threads are those of a saver process",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (saver := config.getoption("--saver")) != "thread":
        for function in (
            sidestream.save,
            sidestream.async_save,
            sidestream.Checkpointer.__init__,
            StorageWriter.__init__,
        ):
            assert function.__kwdefaults__ is not None
            function.__kwdefaults__["saver"] = saver


@pytest.fixture
async def stager() -> AsyncIterator[sidestream.AsyncStager]:
    """A stager whose memory is all given back at the end of the test."""
    async with sidestream.AsyncStager(budget_bytes=1 << 30) as stager:
        yield stager
        await all_returned(stager)
