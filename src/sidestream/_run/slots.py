"""What happens to a save that finds every slot taken."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Protocol

from .._save.pending import SaveInfo, SaveProgress, SaveWork
from .._storage import Outcome, step_name
from ..errors import SkippedError
from ..events import SaveContext, SaveSkipped, emit
from .leases import Lease

__all__ = ["LeasedSave", "OwnTurn", "QueuedSave", "SkippedSave", "Slots", "Turn"]


class Slots:
    """``size`` saves may be on their way at once. Slots are given in the order in which they were asked for."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free = size
        self._asked: deque[asyncio.Future[bool]] = deque()
        self._watchers: list[Callable[[], None]] = []

    @property
    def size(self) -> int:
        return self._size

    @property
    def taken(self) -> int:
        return self._size - self._free

    @property
    def full(self) -> bool:
        return not self._free

    def ask(self) -> asyncio.Future[bool]:
        """Take a place in the queue, now: True when it brings a slot, False when it was withdrawn. It has to come to
        ``granted``, or be withdrawn, and a slot that it has brought released."""
        place: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            place.set_result(True)
            self._tell()
        else:
            self._asked.append(place)
        return place

    def withdraw(self, place: asyncio.Future[bool]) -> None:
        """It brings no slot any more, unless it has."""
        if not place.done():
            self._asked.remove(place)
            place.set_result(False)

    async def granted(self, place: asyncio.Future[bool]) -> bool:
        """Wait until the slot is there; False, and without one, if the place was withdrawn before. Nor is there one
        after a cancel."""
        try:
            return await place
        except asyncio.CancelledError:
            if not place.cancelled() and place.result():  # the slot came first
                self.release()
            raise

    async def acquire(self) -> None:
        await self.granted(self.ask())

    def release(self) -> None:
        while self._asked:
            place = self._asked.popleft()
            if not place.done():
                place.set_result(True)
                return
        self._free += 1
        self._tell()

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call ``watcher`` whenever ``taken`` has changed."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        self._watchers.remove(watcher)

    def _tell(self) -> None:
        for watcher in list(self._watchers):
            watcher()


class LeasedSave:
    """A save whose target is leased while it is written, so that nobody takes the attempt for abandoned."""

    def __init__(self, job: SaveWork, lease: Lease) -> None:
        self._job = job
        self._lease = lease

    @property
    def outcome(self) -> Outcome:
        return self._job.outcome

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

    @property
    def expires_at(self) -> float:
        return self._job.expires_at

    def abandon(self) -> None:
        self._job.abandon()
        self._lease.abandon()

    def leave(self, *, stuck: bool) -> None:
        try:
            self._job.leave(stuck=stuck)
        finally:
            self._lease.drop()


class SkippedSave:
    """A save that never was."""

    expires_at = 0.0

    def __init__(self, run: str, step: int, why: str) -> None:
        save = _not_begun(run, step)
        self.url = save.url
        self._save = save
        self.outcome: Outcome = "absent"
        self.progress = SaveProgress()
        self._why = why

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        raise _skipped(self._save, self._why)

    def abandon(self) -> None:
        """Do nothing: no thread works for this save yet."""

    def leave(self, *, stuck: bool) -> None:
        """Do nothing: nothing has been written."""


class Turn(Protocol):
    """The place of a save in the queue."""

    async def come(self) -> bool:
        """Wait for a slot. False if a newer save came first."""

    def give_way(self) -> None:
        """A newer save has come. Has no effect once this one has its slot."""

    def leave(self) -> None:
        """Give back what this place in the queue has brought."""

    def abandon(self) -> None:
        """As ``leave``, where nobody ever waited for it."""


class OwnTurn:
    """The turn of a save by one process."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._place = slots.ask()
        self._holds = False

    async def come(self) -> bool:
        self._holds = await self._slots.granted(self._place)
        return self._holds

    def give_way(self) -> None:
        self._slots.withdraw(self._place)

    def leave(self) -> None:
        if self._holds:
            self._holds = False
            self._slots.release()

    def abandon(self) -> None:
        self._holds = self._place.done() and self._place.result()
        self._slots.withdraw(self._place)
        self.leave()


def _not_begun(run: str, step: int) -> SaveContext:
    """Return the context of a save of ``step`` whose generation is not known yet."""
    return SaveContext("save", f"{run}/{step_name(step, 1)}", run=run, step=step)


def _skipped(save: SaveContext, why: str) -> SkippedError:
    error = SkippedError(f"{save.url} was not saved: {why}")
    emit(SaveSkipped(save, str(error)))
    return error


class QueuedSave:
    """A save that waits for a slot, in the background, until a newer one takes its place."""

    def __init__(self, run: str, step: int, turn: Turn, start: Callable[[], Awaitable[SaveWork]]) -> None:
        self._save = _not_begun(run, step)
        self._turn = turn
        self._start: Callable[[], Awaitable[SaveWork]] | None = start  # with the state: not kept once it has begun
        self._begun: SaveWork | None = None

    @property
    def url(self) -> str:
        return self._save.url if self._begun is None else self._begun.url

    @property
    def outcome(self) -> Outcome:
        return "absent" if self._begun is None else self._begun.outcome

    @property
    def progress(self) -> SaveProgress:
        return SaveProgress() if self._begun is None else self._begun.progress

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        try:
            begun = await self._begin()
            if begun is None:
                raise _skipped(self._save, "a newer save came before it had begun")
            self._begun = begun
            return await begun.run(staged)
        finally:
            self._turn.leave()

    async def _begin(self) -> SaveWork | None:
        """None if a newer save came first. In either case the state is let go of here."""
        start = None
        try:
            if await self._turn.come():
                start = self._start
        finally:
            self._start = None
        if start is None:
            return None
        begun = start()
        del start
        return await begun

    @property
    def expires_at(self) -> float:
        """No deadline: a save in the queue may wait for any time."""
        return math.inf if self._begun is None else self._begun.expires_at

    def abandon(self) -> None:
        self._start = None
        if self._begun is not None:
            self._begun.abandon()
            return
        with suppress(RuntimeError):  # the loop is closed, and with it all tasks in the queue
            self._turn.abandon()

    def leave(self, *, stuck: bool) -> None:
        if self._begun is not None:
            self._begun.leave(stuck=stuck)
