"""Waiting for staging memory to come back; a module of its own, because ``conftest`` is the name of several."""

from __future__ import annotations

import asyncio
import gc

import sidestream


async def all_returned(stager: sidestream.AsyncStager) -> None:
    """Wait until no lease is left: the stager's thread may still be leaving the call that resolved the last future."""
    gc.collect()
    async with asyncio.timeout(60):
        while stager.statistics().leases:
            await asyncio.sleep(0)
