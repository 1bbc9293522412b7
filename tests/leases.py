"""Waiting for staging memory to come back; a module of its own, because ``conftest`` is the name of several."""

from __future__ import annotations

import asyncio
import gc

import sidestream
from sidestream._runtime.memory_maps import wait_unmapped
from sidestream._runtime.threads import Deadline
from sidestream._staging import cached, ring


async def all_returned(stager: sidestream.AsyncStager) -> None:
    """Wait until no lease is left: the stager's thread may still be leaving the call that resolved the last future."""
    gc.collect()
    async with asyncio.timeout(60):
        while stager.statistics().leases:
            await asyncio.sleep(0)


def nothing_kept() -> bool:
    """Unmap the memory that the process keeps for later saves and loads, and all other that is not in use. Returns
    False if that takes too long."""
    ring._ring.drop()
    cached.close_all()
    gc.collect()
    return wait_unmapped(Deadline.after(60))
