"""What every test shares."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import pytest

import sidestream


async def all_returned(stager: sidestream.AsyncStager) -> None:
    """Wait until no lease is left: the stager's thread may still be leaving the call that resolved the last future."""
    gc.collect()
    async with asyncio.timeout(30):
        while stager.statistics().leases:
            await asyncio.sleep(0)


@pytest.fixture
async def stager() -> AsyncIterator[sidestream.AsyncStager]:
    """A stager whose memory is all given back at the end of the test."""
    async with sidestream.AsyncStager(budget_bytes=1 << 30) as stager:
        yield stager
        await all_returned(stager)
