"""The saves of one run, from their calls to their ends, in one process or in a group, and the queue that they pass.

The queue decides which save begins, waits, is skipped, or is refused. A save is in it from its call to its end. Saves
begin in the order of their calls. In a group, rank 0 decides when every rank has called a save, and sends the decision
to all ranks. Each rank then begins the saves in the order of its calls, which is the same on all ranks. If two ranks
planned two saves in different orders, each of them would wait for the other.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

from .._group import Operation, prepare_together, stoppable
from .._runtime.caller import context_of_caller, run_by_caller
from .._runtime.tasks import running_loop, runs_in_trio
from .._runtime.threads import Deadline, ThreadFuture, Wakeup, report, time_limit
from .._runtime.unretrieved import UnretrievedErrors, raise_all
from .._runtime.waits import WaitReasons, caller_waited
from .._save.api import (
    LiveWriter,
    PendingSave,
    SaveInfo,
    SaveProgress,
    SaveRequest,
    SaveWork,
    prewarm,
)
from .._save.group import FailedSave
from .._save.sinks import PendingOutcome, Publishes
from .._storage import step_name
from ..errors import InvalidOptionError, RankFailuresError, SidestreamError, SkippedError, TooManySavesError
from ..events import SaveContext, SaveSkipped, emit
from ..options import (
    FileSource,
    Outcome,
    SaveOptions,
    WhenFull,
    check_choice,
    check_count,
    options_of,
    plain_integer,
    step_number,
)
from .exports import Exports, Upkeep
from .leases import Lease
from .opened import Opened
from .run import Run
from .steps import Generations

Decision = Literal["wait", "slot", "begin", "full", "overtaken"]
"""The decision about a save. With ``"slot"`` it has a slot, and begins when the saves before it have begun. With
``"full"`` and ``"overtaken"`` it never begins."""

Started: TypeAlias = tuple[SaveWork, Lease | None]
"""A save that has begun, and the lease on its target."""


@dataclass(frozen=True, slots=True)
class EntryState:
    """The state of a save in the queue. ``wants_slot`` says that it may get a slot. In a group that is true on rank 0
    when every rank has called the save, and on the other ranks when rank 0 has decided that it begins."""

    when_full: WhenFull
    wants_slot: bool = False
    has_slot: bool = False
    """Whether it has a slot."""
    begun: bool = False


def decide(size: int, states: Sequence[EntryState]) -> list[Decision]:
    """Return the decision about each of ``states``, which are in the order of the calls, with ``size`` slots.

    Slots are given in that order. So a save that does not want one yet blocks the saves behind it.
    """
    free = size - sum(state.has_slot for state in states)
    wanting = next((number for number, state in enumerate(states) if not state.wants_slot), len(states))
    # Only among those that want a slot: in a group, those that every rank has called. If the newest call of one rank
    # decided, a rank that is always ahead would have every save skipped but the last.
    newest = max(
        (number for number in range(wanting) if states[number].when_full == "latest"),
        default=0,
    )
    decisions: list[Decision] = []
    all_begun = True
    for number, state in enumerate(states):
        decision: Decision = "wait"
        if state.has_slot or (number < wanting and free):
            free -= not state.has_slot
            decision = "begin" if all_begun else "slot"
        elif number < wanting and state.when_full in ("skip", "fail"):
            decision = "full"
        elif number < newest and state.when_full == "latest":
            decision = "overtaken"
        all_begun = all_begun and (state.begun or decision in ("full", "overtaken"))
        decisions.append(decision)
    return decisions


class SaveQueue:
    """The saves of one run in this process, for any thread. At most ``size`` of them have a slot at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self.slots_used = 0
        """The number of slots that saves have."""
        self._entries: list[QueueEntry] = []

    def join(self, entry: QueueEntry) -> None:
        with self._lock:
            self._entries.append(entry)

    def release(self, entry: QueueEntry) -> None:
        with self._lock:
            entry.refuse()
            if entry in self._entries:
                self._entries.remove(entry)
                self._decide_again()

    def change(self, entry: QueueEntry, **changes: Any) -> None:
        """Change the state of ``entry``, decide again, and apply the decisions."""
        with self._lock:
            entry.state = replace(entry.state, **changes)
            self._decide_again()

    def _decide_again(self) -> None:
        decisions = decide(self.size, [entry.state for entry in self._entries])
        for entry, decision in zip(list(self._entries), decisions, strict=True):
            entry.apply(decision)
            if decision in ("full", "overtaken"):
                self._entries.remove(entry)
        used = sum(entry.state.has_slot for entry in self._entries)
        if used != self.slots_used:
            self.slots_used = used
            for entry in self._entries:
                entry.on_slots_changed()


class QueueEntry:
    """One save in the queue, from ``join`` on. Its owner calls ``release`` when the save has ended."""

    generation: int | None = None
    """The generation of the save, if it is decided when the ranks agree that it begins."""
    rank, world = 0, 1

    def __init__(self, queue: SaveQueue, when_full: WhenFull) -> None:
        self.state = EntryState(when_full)
        self._queue = queue
        self.reasons = WaitReasons("slot")
        """Why a caller has to wait until the sources of the save may change."""
        self._decision: Decision = "wait"
        self._decided: Future[None] = ThreadFuture()

    def join(self) -> None:
        self._queue.join(self)

    @property
    def begins(self) -> bool:
        """Whether the save may begin now."""
        return self._decision == "begin"

    @property
    def is_refused(self) -> bool:
        """Whether the save never begins."""
        return self._decision in ("full", "overtaken")

    def refusal(self, url: str) -> SidestreamError:
        """Return the error of a save that never begins."""
        if self.state.when_full == "latest":
            return SkippedError(f"{url} was not saved: a newer save came before it had begun")
        count = "1 save is" if self._queue.size == 1 else f"{self._queue.size} saves are"
        if self.state.when_full == "skip":
            return SkippedError(f"{url} was not saved: {count} in progress")
        return TooManySavesError(
            f"{url} was not saved: {count} in progress, as many as slots= allows: await one of them first, raise "
            "slots=, or choose another when_full="
        )

    def request_slot(self, when_full: WhenFull | None = None) -> bool:
        """Request a slot, and return whether the save has one. ``when_full`` replaces that of the entry if it is
        given."""
        self._queue.change(self, wants_slot=True, when_full=when_full or self.state.when_full)
        return self.state.has_slot

    async def wait_to_begin(self) -> bool:
        """Wait until the save may begin, and return True. Return False if it never may."""
        self.request_slot()
        return await self.decided()

    async def decided(self) -> bool:
        if not self._decided.done():
            await Wakeup(self._decided).wait(None)
        return self.begins

    def mark_begun(self) -> None:
        """Record that the save has begun, so that the next one may begin."""
        self._queue.change(self, begun=True)

    def release(self) -> None:
        """Leave the queue, and give back the slot if the save has one. Idempotent."""
        self._queue.release(self)

    # --- called by the queue ---

    def apply(self, decision: Decision) -> None:
        self._decision = decision
        self.state = replace(self.state, has_slot=decision in ("slot", "begin"))
        if decision not in ("wait", "slot") and not self._decided.done():
            self.reasons.change(None)
            self._decided.set_result(None)

    def refuse(self) -> None:
        """Make a save that has not been decided about never begin."""
        if not self._decided.done():
            self._decision = "full"
            self._decided.set_result(None)

    def on_slots_changed(self) -> None:
        """Do nothing. Called when ``slots_used`` has changed."""


class GroupQueueEntry(QueueEntry):
    """The entry of one save of a group. ``promised`` says that the save waits and is never skipped. ``claim`` returns
    the generation for a step, on rank 0.

    The saves ahead in the queue have their own deadlines. So the time of this save does not count while it waits for
    them: the ranks have one ``deadline()`` to make the call, and another one from the beginning of the save. On ranks
    above 0, the save waits in the queue as long as other saves have slots there.
    """

    def __init__(
        self,
        queue: SaveQueue,
        when_full: WhenFull,
        operation: Operation,
        step: int,
        deadline: Callable[[], Deadline],
        claim: Callable[[int], Awaitable[int]],
        *,
        promised: bool = False,
    ) -> None:
        super().__init__(queue, when_full)
        self._operation = operation
        self.rank, self.world = operation.rank, operation.world
        self._step = step
        self._deadline = deadline
        self._claim = claim
        self._promised = promised
        self._exchanging = False

    async def wait_to_begin(self) -> bool:
        """Wait until the save may begin, and return True. Return False if it never may. The result is the same on all
        ranks. Raises ``InvalidOptionError`` on rank 0 if the calls of the ranks differ."""
        if await prepare_together(self._operation, self._agree):
            return True
        self._operation.close()
        return False

    def on_slots_changed(self) -> None:
        """Above rank 0, stop the deadline while other saves have slots, and start it again when none has."""
        if self._exchanging:
            self.reasons.change("slot" if self._queue.slots_used == self._queue.size else "ranks")
        if self._exchanging and self._queue.slots_used:
            self._operation.suspend()
        elif self._exchanging:
            self._operation.resume(self._deadline())

    async def _agree(self) -> bool:
        operation = self._operation
        part = {
            "step": self._step,
            "when_full": self.state.when_full,
            "promised": self._promised,
        }
        self._exchanging = operation.rank > 0
        self.reasons.change("ranks")
        self.on_slots_changed()
        try:
            # One exchange decides for all ranks: the slot, the generation, and whether the save is skipped. Ranks above
            # 0 then wait in their own queue, so that each begins the saves in the order of its calls.
            answer = await operation.aexchange("begin", json.dumps(part).encode(), self._decide)
        finally:
            if self._exchanging:
                operation.resume(self._deadline())  # also after an error: agreeing on it needs a deadline
            self._exchanging = False
        self.generation = json.loads(answer)
        if self.generation is None:
            return False
        if operation.rank:
            self.reasons.change("slot")
            self.request_slot("wait")
            await stoppable(operation, self.decided())
        return True

    async def _decide(self, parts: Sequence[bytes]) -> bytes:
        """Return the generation as JSON, or null if this save is skipped. Called on rank 0, when all ranks have made
        the call."""
        operation = self._operation
        self.reasons.change("slot")  # not for ranks any more: all have made the call
        calls = [json.loads(part) for part in parts]
        for name in ("step", "when_full"):
            values = {str(call[name]) for call in calls}
            if len(values) > 1:
                raise InvalidOptionError(f"ranks that save together have to say the same: {name} is {sorted(values)}")
        # The saves ahead have their own deadlines, and may take any time. Only from its beginning does this save have
        # one.
        operation.suspend()
        self.request_slot("wait" if any(call["promised"] for call in calls) else None)
        begins = await stoppable(operation, self.decided())
        operation.resume(self._deadline())
        return json.dumps(await self._claim(self._step) if begins else None).encode()


class QueuedSave:
    """The work of one save of a run, with its ``writer``. It waits in the queue and calls ``launch``. It has a lease
    while it writes, so that no process deletes its attempt as abandoned. ``writer`` is None if the state is captured
    when the turn of the save comes."""

    def __init__(
        self,
        run: str,
        step: int,
        entry: QueueEntry,
        writer: LiveWriter | None,
        launch: Callable[[LiveWriter | None], Awaitable[Started]],
    ) -> None:
        # The first generation, because the true one is only known when the save begins.
        url = f"{run}/{step_name(step, 1)}"
        self._save = SaveContext("save", url, run=run, step=step, rank=entry.rank, world=entry.world)
        self._entry = entry
        self.reasons = entry.reasons
        self._writer = writer
        self._launch: Callable[[LiveWriter | None], Awaitable[Started]] | None = launch
        self._work: SaveWork | None = None
        self._lease: Lease | None = None

    @property
    def url(self) -> str:
        return self._save.url if self._work is None else self._work.url

    @property
    def outcome(self) -> Outcome:
        return "absent" if self._work is None else self._work.outcome

    @property
    def progress(self) -> SaveProgress:
        return SaveProgress() if self._work is None else self._work.progress

    @property
    def context(self) -> SaveContext:
        return self._save if self._work is None else self._work.context

    async def run(self, staged: Future[None]) -> SaveInfo:
        try:
            launch, self._launch = self._launch, None  # releases the reference to the state
            assert launch is not None
            if not await self._entry.wait_to_begin():
                error = self._entry.refusal(self.url)
                if isinstance(error, SkippedError):
                    await report(emit, SaveSkipped(self._save, str(error)))
                raise error
            self._work, self._lease = await launch(self._writer)
            del launch
            self._writer = None
            self._entry.mark_begun()
            return await self._work.run(staged)
        finally:
            if self._writer is not None:
                self._writer.cancel()
            try:
                if self._lease is not None:
                    await self._lease.release()
            finally:
                self._entry.release()


EARLIER = "an earlier save"
"""The step of the failure of a rank whose call raises the unretrieved error of an earlier save."""


class Saves:
    """The saves of one ``Checkpointer``, with the stager and the worker of ``opened``. ``upkeep`` runs after each
    committed save. ``options`` are the defaults of each save."""

    def __init__(
        self,
        run: Run,
        options: SaveOptions,
        opened: Opened,
        exports: Exports,
        upkeep: Upkeep,
        *,
        slots: int,
        when_full: WhenFull,
    ) -> None:
        check_count("slots", slots)
        check_choice("when_full", when_full, WhenFull)
        self._run = run
        self.options = options
        self._stager = opened.stager
        self._worker = opened.worker
        self._when_full: WhenFull = when_full
        self._exports = exports
        self._upkeep = upkeep
        self._queue = SaveQueue(slots)
        self._pending: UnretrievedErrors[PendingSave] = UnretrievedErrors()
        self._generations = Generations(run.store, slots)
        self._orders = itertools.count()
        self._under_way: dict[int, int] = {}  # the steps of saves that have not ended, by the order of their calls
        self._last_order = -1
        self.last: tuple[int, float] | None = None
        """The step that was committed last, and the time of that (``time.monotonic`` seconds)."""

    async def prewarm(self, state: Mapping[str, Any] | int | None) -> None:
        """Do ``Checkpointer.prewarm``, for a state or a number of bytes."""
        run, options = self._run, self.options
        with run.time_limit():
            await run.store.connect()
            alone = run.together() is None  # ranks plan together
            await prewarm(state, self._stager, self._worker, options if alone else None, run.url)

    async def reserve(self, nbytes: int) -> None:
        """Do ``Checkpointer.reserve``."""
        check_count("nbytes", nbytes)
        await self.prewarm(nbytes)

    # --- one save ---

    def start(
        self,
        state: Mapping[str, Any],
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        options: SaveOptions | None = None,
        publish: Publishes | None = None,
        *,
        promised: bool = False,
    ) -> PendingSave:
        """Do ``Checkpointer.async_save``, in the thread of its caller. A ``promised`` save is never skipped, and is
        made also if other saves have failed."""
        began = time.monotonic()
        if runs_in_trio():
            running_loop("a save of a Checkpointer")  # raises: what this returns cannot be awaited there
        step = plain_integer(step)
        # In a group the number of the operation is taken here, in the order of the calls, which is the same on all
        # ranks. Wrong options are not raised before: the other ranks learn of them through the operation, which needs a
        # deadline to begin with.
        limits = options if isinstance(options, SaveOptions) else self.options
        member = self._run.together()
        limit = Deadline.after(limits.timeout_s)
        operation = None if member is None else member.begin("save", limit, limits.rank_wait_s)
        outcomes: tuple[PendingOutcome, ...] = ()
        try:
            wanted = self._checked(step, options, operation, promised=promised)
            outcomes = self._exports.of(step, self._run.at(step_name(step, 1)).url, publish, metadata)
            request = SaveRequest(
                state=state,
                options=wanted,
                stager=self._stager,
                worker=self._worker,
                step=step,
                metadata=metadata,
                files=files,
                outcomes=outcomes,
            )
            return self._enter(request, step, operation, began, promised=promised)
        except BaseException as error:
            for one in outcomes:
                one.drop()
            if operation is None:
                raise
            if not isinstance(error, Exception):
                operation.report(error)
                raise
            # The other ranks wait for this one, so the error has to reach them: it becomes a save that fails on all.
            pending = PendingSave(FailedSave(operation, self._run.at(step_name(step, 1)).url, error))
        self._watch_over(pending, step)
        return pending

    def _checked(
        self, step: int, options: SaveOptions | None, operation: Operation | None, *, promised: bool
    ) -> SaveOptions:
        """Return the options of one save. Raises what is wrong with the call, and the errors of earlier saves."""
        step_number(step)
        wanted = self.options if options is None else self._of_one_save(options)
        if not promised:
            self._raise_unretrieved_to_all(operation) if operation else self.raise_unretrieved()
        return wanted

    def _of_one_save(self, options: SaveOptions) -> SaveOptions:
        """Return these options. Raises ``InvalidOptionError`` for those that belong to the whole run."""
        options, mine, default = options_of(options, SaveOptions), self.options, SaveOptions()
        for name in ("writer", "streaming"):
            if getattr(options, name) not in (getattr(mine, name), getattr(default, name)):
                raise InvalidOptionError(
                    f"{name}= is the same for all saves of a Checkpointer: "
                    f"pass Checkpointer(save=SaveOptions({name}=...))"
                )
        return replace(options, writer=mine.writer, streaming=mine.streaming)

    def _enter(
        self, request: SaveRequest, step: int, operation: Operation | None, began: float, *, promised: bool
    ) -> PendingSave:
        """Let a save enter the queue, and begin when its turn comes. Its call has begun at ``began``."""
        when_full: WhenFull = "wait" if promised else self._when_full
        if operation is None:
            entry = QueueEntry(self._queue, when_full)
        else:
            entry = GroupQueueEntry(
                self._queue, self._when_full, operation, step, self._run.deadline, self._claim, promised=promised
            )
        # A signal may end this anywhere. Then the entry has to leave the queue, or its slot would be lost.
        context = context_of_caller("when_full='latest'") if when_full == "latest" else copy_context()
        writer: LiveWriter | None = None
        pending: PendingSave | None = None
        try:
            entry.join()
            if operation is None:
                entry.request_slot()
            if entry.is_refused and when_full == "fail":
                raise entry.refusal(self._run.at(step_name(step, 1)).url)
            # Not if the save has a slot, and an older one has to begin first: that one may have to capture on a loop
            # that waits at the fence for this one.
            later = when_full == "latest" and not entry.begins
            if not later and not entry.is_refused:
                writer = request.prepare(operation, reasons=entry.reasons)
            launch = partial(self._launch, request, entry, operation, step)
            work = QueuedSave(self._run.url, step, entry, writer, launch)
            if self._run.leads:
                self._exports.delete_after(request.outcomes)
            pending = context.run(PendingSave, work, request.outcomes)
            self._watch_over(pending, step)
            caller_waited("call", began, {} if writer is None else writer.wait_if_eager(), work.context)
        except BaseException:
            entry.release() if pending is None else pending.cancel()
            if writer is not None:
                writer.cancel()
            raise
        return pending

    async def _claim(self, step: int) -> int:
        with self._run.time_limit():
            return await self._generations.claim(step)

    async def _launch(
        self, request: SaveRequest, entry: QueueEntry, operation: Operation | None, step: int, writer: LiveWriter | None
    ) -> Started:
        run, generation = self._run, entry.generation
        if generation is None:
            with run.time_limit():
                generation = await self._generations.next(step)
        target = run.at(step_name(step, generation))
        try:
            if writer is None:
                with time_limit(Deadline.after(request.options.timeout_s)):
                    writer = await run_by_caller(request.prepare, operation, reasons=entry.reasons)
            work = request.launch(writer, target, generation, operation=operation)
        except Exception as error:
            if operation is None:
                raise
            return FailedSave(operation, target.url, error), None
        # After the launch: if it raises, the generation is free for the next save. In a group the generation was
        # claimed with the slot.
        if operation is None:
            self._generations.started(step, generation)
        leads = operation is None or operation.rank == 0
        return work, run.leases.announce(target.name) if leads else None

    # --- all saves ---

    def _watch_over(self, pending: PendingSave, step: int) -> None:
        order = next(self._orders)
        self._under_way[order] = step
        pending.when_done(lambda: self._on_done(pending, order, step))
        self._pending.track(pending)

    def _on_done(self, pending: PendingSave, order: int, step: int) -> None:
        del self._under_way[order]
        if pending.outcome == "committed":
            if order > self._last_order:  # of two saves that overlap, the last one is that with the later call
                self._last_order, self.last = order, (step, time.monotonic())
            if self._run.leads:
                self._upkeep.request()

    def protected(self) -> list[int]:
        """Return the step that was saved last, and the steps of saves that have not ended. A listing may contain the
        commit of a save that has not ended."""
        return [*self._under_way.values(), *([] if self.last is None else [self.last[0]])]

    @property
    def pending(self) -> int:
        """The number of saves that have not ended."""
        return sum(not save.done() for save in self._pending.operations())

    @property
    def failures(self) -> list[BaseException]:
        """The errors of saves that were not retrieved."""
        return self._pending.errors()

    def raise_unretrieved(self) -> None:
        """Raise the unretrieved errors of saves and of upkeep: the first one, with the others as its notes. They are
        retrieved then."""
        upkeep = (self._upkeep, self._exports.pruning)
        raise_all([*self._pending.operations(), *(problem for one in upkeep for problem in one.problems())])

    def _raise_unretrieved_to_all(self, operation: Operation) -> None:
        """Raise the unretrieved errors of this rank, which ends this save on all ranks.

        Another rank may receive the failure of this save after its own call has returned. It does not raise that
        failure in its next call, because then one failure would end one save after another, on one rank after another.
        Closing raises it."""
        for save in self._pending.operations():
            if _ended_by_earlier(save.unretrieved):
                self._pending.forget(save)
        operation.step = EARLIER
        self.raise_unretrieved()
        operation.step = "start"

    def cancel(self) -> None:
        for save in self._pending.operations():
            save.cancel()

    async def ended(self) -> None:
        """Wait until all saves have ended, and have requested the upkeep after them. Never raises their errors."""
        for save in self._pending.operations():
            await save.ended()


def _ended_by_earlier(error: BaseException | None) -> bool:
    """Return whether a save failed only because a rank raised the error of an earlier save."""
    return isinstance(error, RankFailuresError) and all(one.step == EARLIER for one in error.failures)
