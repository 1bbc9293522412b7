"""How the saves of a run begin over several ranks: rank 0 decides which of them do, all begin those in one order.

Ranks run at different speeds, so none decides for itself. When every rank has called a save, rank 0 finds a slot for
it, or skips it, as the policy says, and tells all. Each rank begins what is to begin in the order of its calls, which
is the same on all of them: ranks that planned two saves in different orders would wait for each other.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence

from .._group import Operation, prepare_together, stoppable
from .._runtime.threads import Deadline
from ..errors import InvalidOptionError, RankFailuresError
from ..options import WhenFull
from .slots import Slots

__all__ = ["EARLIER", "JointTurn", "Starts", "tells_of_earlier"]

EARLIER = "an earlier save"
"""The step in which a rank fails that raises, in its call, what it had not told anybody yet."""


def tells_of_earlier(error: BaseException | None) -> bool:
    """Whether a save failed for no reason of its own."""
    return isinstance(error, RankFailuresError) and all(one.step == EARLIER for one in error.failures)


class Line:
    """Members come to the front in the order in which they joined; one that leaves earlier holds up nobody."""

    def __init__(self) -> None:
        self._joined = 0
        self._front = 0
        self._left: set[int] = set()
        self._waiting: dict[int, asyncio.Event] = {}

    def join(self) -> int:
        self._joined += 1
        return self._joined - 1

    async def at_front(self, member: int) -> None:
        if self._front < member:
            waiting = self._waiting[member] = asyncio.Event()
            await waiting.wait()

    def leave(self, member: int) -> None:
        """Any number of times."""
        if member < self._front:
            return
        self._left.add(member)
        self._waiting.pop(member, None)
        while self._front in self._left:
            self._left.remove(self._front)
            self._front += 1
        if self._front in self._waiting:
            self._waiting[self._front].set()


class Starts:
    """What the saves of one run know of each other. ``claim`` finds the generation for a step, on rank 0."""

    def __init__(self, slots: Slots, timeout_s: float, claim: Callable[[int], Awaitable[int]]) -> None:
        self.slots = slots
        self.timeout_s = timeout_s
        self.claim = claim
        self.asking = Line()
        """For a place in the queue of rank 0."""
        self.beginning = Line()
        self.queued: JointTurn | None = None
        """On rank 0: the one that gives way to the next."""


class JointTurn:
    """The place of one save in the queue, from its call on. ``promised``: it is never skipped, and waits.

    What it waits for in the queue has deadlines of its own, so its own time counts before it and after it: ranks have
    ``timeout_s`` to come to the call, and the save has that from when it begins. Ranks above 0 know the queue by what
    is on its way with them.
    """

    def __init__(
        self, starts: Starts, operation: Operation, step: int, overlap: WhenFull, *, promised: bool = False
    ) -> None:
        self.generation: int | None = None
        self._starts = starts
        self._operation = operation
        self._step = step
        self._overlap: WhenFull = overlap
        self._promised = promised
        self._place: asyncio.Future[bool] | None = None
        self._holds = False
        self._asking = starts.asking.join()
        self._beginning = starts.beginning.join()

    async def come(self) -> bool:
        if await prepare_together(self._operation, self.agree):
            return True
        self._operation.close()
        return False

    async def agree(self) -> bool:
        """Whether all ranks begin this save now: then a slot is held, and ``generation`` is known. Whoever starts it
        says so with ``begun``. On rank 0, ``InvalidOptionError`` where ranks mean different saves."""
        operation = self._operation
        part = json.dumps({"step": self._step, "overlap": self._overlap, "promised": self._promised}).encode()
        if operation.rank:
            self._count()
            self._starts.slots.watch(self._count)
        try:
            self.generation = json.loads(await operation.aexchange("begin", part, self._decide))
        finally:
            if operation.rank:
                self._starts.slots.unwatch(self._count)
                operation.resume(self._deadline())  # however it ended: the verdict has a deadline too
        if self.generation is None:
            return False
        await stoppable(operation, self._follow())
        return True

    def begun(self) -> None:
        """The next one may."""
        self._starts.asking.leave(self._asking)
        self._starts.beginning.leave(self._beginning)

    def give_way(self) -> None:
        if self._place is not None:
            self._starts.slots.withdraw(self._place)

    def leave(self) -> None:
        self.begun()
        if self._holds:
            self._holds = False
            self._starts.slots.release()

    def abandon(self) -> None:
        self._operation.report(asyncio.CancelledError())
        self.leave()

    def _deadline(self) -> Deadline:
        return Deadline.after(self._starts.timeout_s)

    # --- rank 0 ---

    async def _decide(self, parts: Sequence[bytes]) -> bytes:
        """When all have called: the generation, or null where this save is skipped."""
        operation = self._operation
        policy = self._policy([json.loads(part) for part in parts])
        operation.suspend()
        self._holds = await stoppable(operation, self._slot(policy))
        operation.resume(self._deadline())
        return json.dumps(await self._starts.claim(self._step) if self._holds else None).encode()

    def _policy(self, told: Sequence[dict[str, object]]) -> WhenFull:
        for name in ("step", "overlap"):
            said = {str(one[name]) for one in told}
            if len(said) > 1:
                raise InvalidOptionError(f"ranks that save together have to say the same: {name} is {sorted(said)}")
        return "wait" if any(one["promised"] for one in told) else self._overlap

    async def _slot(self, policy: WhenFull) -> bool:
        starts = self._starts
        await starts.asking.at_front(self._asking)
        if policy in ("skip", "fail") and starts.slots.full:
            return False
        if policy == "latest":
            if starts.queued is not None:
                starts.queued.give_way()
            starts.queued = self
        self._place = starts.slots.ask()
        starts.asking.leave(self._asking)
        self._holds = await starts.slots.granted(self._place)
        return self._holds

    # --- the others ---

    def _count(self) -> None:
        """Its time counts when nothing is on its way here that it could wait for."""
        if self._starts.slots.taken:
            self._operation.suspend()
        else:
            self._operation.resume(self._deadline())

    async def _follow(self) -> None:
        """Rank 0 has taken its slot by now; the others take theirs in the order in which all begin."""
        await self._starts.beginning.at_front(self._beginning)
        if not self._holds:
            await self._starts.slots.acquire()
            self._holds = True
