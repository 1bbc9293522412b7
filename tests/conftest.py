"""What every test shares."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from hypothesis import settings
from leases import all_returned

import sidestream

settings.register_profile("sidestream", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("sidestream")


@pytest.fixture
async def stager() -> AsyncIterator[sidestream.AsyncStager]:
    """A stager whose memory is all given back at the end of the test."""
    async with sidestream.AsyncStager(budget_bytes=1 << 30) as stager:
        yield stager
        await all_returned(stager)
