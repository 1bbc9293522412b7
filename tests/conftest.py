"""What every test shares."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from leases import all_returned

import sidestream


@pytest.fixture
async def stager() -> AsyncIterator[sidestream.AsyncStager]:
    """A stager whose memory is all given back at the end of the test."""
    async with sidestream.AsyncStager(budget_bytes=1 << 30) as stager:
        yield stager
        await all_returned(stager)
