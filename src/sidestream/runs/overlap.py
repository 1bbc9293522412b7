"""What happens to a save that finds every slot taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from ..commit import Verdict
from ..errors import Skipped
from ..pending import SaveInfo, SaveProgress, SaveWork
from .leases import Lease

__all__ = ["LeasedSave", "QueuedSave", "SkippedSave", "Slots"]


class Slots:
    """``size`` saves may be on their way at once."""

    def __init__(self, size: int) -> None:
        self._semaphore = asyncio.Semaphore(size)
        self.taken = 0

    @property
    def full(self) -> bool:
        return self._semaphore.locked()

    async def acquire(self) -> None:
        await self._semaphore.acquire()
        self.taken += 1

    def release(self) -> None:
        self.taken -= 1
        self._semaphore.release()


class LeasedSave:
    """A save whose target is leased while it is written, so that nobody takes the attempt for abandoned."""

    def __init__(self, job: SaveWork, lease: Lease) -> None:
        self._job = job
        self._lease = lease

    @property
    def verdict(self) -> Verdict:
        return self._job.verdict

    @property
    def url(self) -> str:
        return self._job.url

    @property
    def progress(self) -> SaveProgress:
        return self._job.progress

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        try:
            return await self._job.run(staged)
        finally:
            await self._lease.release()

    def abandon(self) -> None:
        self._job.abandon()
        self._lease.abandon()


class SkippedSave:
    """A save that never was."""

    def __init__(self, url: str, why: str) -> None:
        self.url = url
        self.verdict = Verdict()
        self.progress = SaveProgress()
        self._why = why

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        raise Skipped(f"{self.url} was not saved: {self._why}")

    def abandon(self) -> None:
        """There is nothing to let go of."""


class QueuedSave:
    """A save that waits for a slot, in the background, until a newer one takes its place."""

    def __init__(self, url: str, slots: Slots, start: Callable[[], Awaitable[SaveWork]]) -> None:
        self._url = url
        self._slots = slots
        self._start: Callable[[], Awaitable[SaveWork]] | None = start  # with the state: not kept once it has begun
        self._begun: SaveWork | None = None
        self._verdict = Verdict()
        self._superseded = asyncio.Event()

    @property
    def url(self) -> str:
        return self._url if self._begun is None else self._begun.url

    @property
    def verdict(self) -> Verdict:
        return self._verdict if self._begun is None else self._begun.verdict

    @property
    def progress(self) -> SaveProgress:
        return SaveProgress() if self._begun is None else self._begun.progress

    def give_way(self) -> None:
        """A newer save has come. Has no effect once this one has its slot."""
        self._superseded.set()

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        taken = False
        try:
            taken = await self._slot()
        finally:
            start, self._start = self._start, None
        if not taken:
            del start
            raise Skipped(f"{self.url} was not saved: a newer save came before it had begun")
        try:
            assert start is not None
            begun = start()
            del start
            self._begun = await begun
            return await self._begun.run(staged)
        finally:
            self._slots.release()

    def abandon(self) -> None:
        """Nothing has been begun."""
        self._start = None

    async def _slot(self) -> bool:
        """Wait for one; False if a newer save came first."""
        slot = asyncio.ensure_future(self._slots.acquire())
        newer = asyncio.ensure_future(self._superseded.wait())
        taken = False
        try:
            await asyncio.wait([slot, newer], return_when=asyncio.FIRST_COMPLETED)
            taken = slot.done() and not self._superseded.is_set()
        finally:
            newer.cancel()
            if not taken:
                slot.add_done_callback(lambda slot: None if slot.cancelled() else self._slots.release())
                slot.cancel()
        return taken
