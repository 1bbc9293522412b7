"""``Checkpointer``: the checkpoints of one run, step by step."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

from ._format.records import Node
from ._group import GroupChoice, Member, Operation, group_of, prepare_together
from ._layout.metadata import encode_metadata
from ._layout.values import copy_value
from ._load.api import LoadReport, LoadRequest
from ._load.checkpoint import Checkpoint, open_from
from ._load.open.manifest import read_metadata
from ._load.open.steps import Step
from ._load.verify import VerifyReport, verify_at
from ._run.exports import Exports
from ._run.health import Health
from ._run.leases import Leases
from ._run.maintenance import Upkeep
from ._run.preemption import Preemption, Then
from ._run.pruning import Pruned, Pruner
from ._run.restore import Restoring, RestoringTogether, Wish, choose
from ._run.retention import KeepAll, Retention
from ._run.slots import LeasedSave, OwnTurn, QueuedSave, SkippedSave, Slots
from ._run.starting import EARLIER, JointTurn, Starts, tells_of_earlier
from ._run.steps import check_run, list_steps, next_generation
from ._run.watch import Watch
from ._runtime.abandoned import RegisteredOperation, register
from ._runtime.public import public
from ._runtime.tasks import run_shielded, running_loop
from ._runtime.threads import Deadline, io_threads, time_limit
from ._save.api import STREAM_BYTES, Stager, completed, plan_alone, start_save, start_together
from ._save.pending import PendingSave, SaveInfo, SaveWork
from ._save.saved_as import SavedAs
from ._save.sinks import Export, PendingExport
from ._staging import AsyncStager, Backing, capture
from ._storage import FileSource, Location, check_sources, locate_run, step_name
from ._worker.client import Worker, choose_worker
from .errors import (
    AsyncOnlyError,
    CheckpointNotFoundError,
    ClosedError,
    ForkedProcessError,
    InvalidOptionError,
    KeyCollisionError,
    SidestreamError,
    TooManySavesError,
    UnsafeObjectError,
    UnsupportedTensorError,
    WrongLoopError,
)
from .options import (
    Fallback,
    LoadOptions,
    Progress,
    SaveOptions,
    Storage,
    Tolerated,
    WhenFull,
    check_choice,
    check_count,
    check_seconds,
    check_step,
    check_steps,
    check_timeout,
    options_of,
    storage_of,
    tolerance_of,
)

__all__ = ["Checkpointer"]

_REMEMBERED = 256
"""For how many steps the last generation that was started is remembered."""

Latest = Literal["latest"]


@dataclass(slots=True)
class _Holding:
    """The resources of an open ``Checkpointer``, registered in case its loop ends. Nothing here refers to that loop."""

    url: str
    stager: AsyncStager | None
    worker: Worker | None
    expires_at: float = math.inf

    def release(self) -> None:
        """Release the writer process."""
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.release()

    @property
    def what(self) -> str:
        return f"the Checkpointer of {self.url} was not closed"

    def abandon(self) -> None:
        """Do nothing: saves are registered separately."""

    def leave(self, *, stuck: bool) -> str:
        self.release()
        if self.stager is not None:
            with suppress(SidestreamError):  # reported elsewhere
                self.stager.close()
        return "its staging memory and its writer process were released"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a save of a run was asked to do."""

    state: Mapping[str, Any]
    step: int
    options: SaveOptions
    metadata: Node = None
    files: Mapping[str, FileSource] = field(default_factory=dict)


@public
class Checkpointer:
    """The checkpoints under one directory: ``step-100``, and ``step-100.g2`` where step 100 was saved again.

    Use it as ``async with``; it belongs to the loop that enters it. Any number of processes may have one on the same
    run, to save or to read.

    ``keep`` says which steps stay (``KeepLast(3) | KeepBest("loss")``); what it lets go is deleted after a save, when a
    newer step has been read back and is good, and nobody has a lease on it. ``in_flight`` saves may go on at once, each
    with staged memory of its own, which is used again and again; ``overlap`` says what becomes of one more. ``stager``
    replaces the stager that it would own. ``writer="process"`` keeps one process that writes, from the first save or
    ``prewarm()`` until it is closed. ``durability``, ``digest``, ``verify``, ``timeout_s``, ``rank_wait_s``,
    ``storage_options``, ``storage`` and ``process_group`` are as for ``save`` and ``load``. With
    several ranks all ranks call ``save`` and ``restore`` in the same order, and rank 0 chooses, leases and deletes. A
    lease ends ``lease_s`` after its holder has died; a save acquires one when it takes longer than a quarter of that.
    The files of a writer that was killed are deleted when its lease has ended or, if it had none, ``abandoned_after_s``
    after the last write to them.

    ``names`` and ``dtype`` are as for ``save``, for every save of this object. ``restore`` uses the same names, unless
    it is given others, and needs ``allow_cast=True`` where a target has another dtype than the checkpoint.

    ``export``, a ``sidestream.HF`` or several, is written beside the saves of those steps that are multiples of
    ``exports_every``; ``pending.exports`` has the outcome (``docs/exports.md``). Of each export those of the
    ``exports_keep`` highest steps stay; None: all.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: Retention | None = None,
        slots: int = 2,
        when_full: WhenFull = "wait",
        stager: AsyncStager | Stager | None = None,
        save: SaveOptions | None = None,
        load: LoadOptions | None = None,
        export: Export | Sequence[Export] | None = None,
        exports_every: int = 1,
        exports_keep: int | None = None,
        timeout_s: float = 600.0,
        lease_s: float = 300.0,
        abandoned_after_s: float = 3600.0,
        process_group: GroupChoice = None,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        check_count("slots", slots)
        check_choice("when_full", when_full, WhenFull)
        for name, seconds in (("timeout_s", timeout_s), ("lease_s", lease_s), ("abandoned_after_s", abandoned_after_s)):
            check_seconds(name, seconds)
        keep = KeepAll() if keep is None else keep
        if isinstance(keep, type) or not isinstance(keep, Retention):
            raise InvalidOptionError(f"keep={keep!r} has to be a policy, such as sidestream.KeepLast(3)")
        self._save_options = options_of(save, SaveOptions)
        self._load_options = options_of(load, LoadOptions)
        self._group: GroupChoice = process_group
        self._store, self.url = locate_run(url, storage_of(storage_options, storage))
        self._worker, self._fall_back = choose_worker(self._save_options.writer, self._store)
        durability = self._save_options.durability
        self._exports = Exports(
            export,
            self.url,
            every=exports_every,
            keep=exports_keep,
            durability=durability,
            timeout_s=self._save_options.timeout_s,
        )
        if self._save_options.streaming and stager is not None:
            raise InvalidOptionError("streaming=True passes through memory of its own: leave out stager=")
        backing: Backing = "private" if self._worker is None else "shared"
        budget_bytes = STREAM_BYTES if self._save_options.streaming else None
        self._own_stager = None
        if stager is None:
            self._own_stager = AsyncStager(
                budget_bytes=budget_bytes, timeout_s=self._save_options.timeout_s, backing=backing
            )
        self._stager = stager if self._own_stager is None else self._own_stager
        self._slots = Slots(slots)
        self._queued: OwnTurn | None = None
        self._starts = Starts(self._slots, self._save_options.timeout_s, self._claim_generation)
        self._starting = asyncio.Lock()  # a generation is chosen by one save at a time
        self._when_full: WhenFull = when_full
        self._timeout_s = timeout_s
        self._leases = Leases(self._store, lease_s)
        self._pruner = Pruner(
            self._store, self.url, keep, self._leases, durability, lease_s=lease_s, abandoned_after_s=abandoned_after_s
        )
        self._pruning = asyncio.Lock()
        self._upkeep = Upkeep(self._after_saves, f"sidestream retention {self.url}")
        self._pending: list[PendingSave] = []
        self._taken: dict[int, int] = {}  # the highest generation that a recent save of this object was started for
        self._orders = itertools.count()
        self._under_way: dict[int, int] = {}  # the steps of saves that have not ended, by the order of their calls
        self._last_order = -1
        self._last_saved: tuple[int, float] | None = None
        self._preemption: Preemption | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._holding: _Holding | None = None
        self._registration: RegisteredOperation | None = None
        self._pid = os.getpid()
        self._closed = False
        self._restored: LoadReport | None = None
        self._passed_over: dict[str, str] = {}

    # --- saving ---

    async def prewarm(self, state: Mapping[str, Any] | None = None) -> None:
        """Do now what the first save of ``state`` would have to: start the writer process, if there is one, map staging
        memory, and, in a run of one process, plan. Nothing is copied. Cancelling leaves what has been done by then.

        Args:
            state: The state that will be saved. None: only start the writer process. What is wrong with it is raised by
                the save.

        Raises:
            WriterProcessError: The process could not be started.
            ArenaExhaustedError: The memory does not fit the budget of the stager.
        """
        self._check_usable()
        with self._time_limit():
            await self._start_worker()
            if state is not None and isinstance(self._stager, AsyncStager):
                await self._prewarm(self._stager, state)
                await self._share_memory(self._stager)

    async def reserve(self, nbytes: int) -> None:
        """Map ``nbytes`` of staging memory now, and start the writer process, if there is one.

        Raises as ``prewarm``. Cancelling leaves what has been done by then.
        """
        self._check_usable()
        with self._time_limit():
            await self._start_worker()
            if isinstance(self._stager, AsyncStager):
                await self._stager.prewarm(nbytes)
                await self._share_memory(self._stager)

    async def _start_worker(self) -> None:
        if self._worker is not None and self._fall_back:
            await io_threads().run(self._worker.start)
        elif self._worker is not None:
            await self._worker.up()

    async def _share_memory(self, stager: AsyncStager) -> None:
        if self._worker is not None:
            await self._worker.share(stager.shared_memory())

    async def _prewarm(self, stager: AsyncStager, state: Mapping[str, Any]) -> None:
        try:
            captured = capture(state, copy_value)
        except UnsafeObjectError:  # for the save to say: its planner may leave that out
            await stager.prewarm(state)
            return
        await stager.prewarm_for(captured)
        if captured.sharded or self._together() is not None:
            return  # it takes a group to plan
        with suppress(InvalidOptionError, KeyCollisionError, UnsafeObjectError, UnsupportedTensorError):  # as above
            plan = SavedAs(self._save_options.names, self._save_options.dtype).applied(
                plan_alone, self.url, others=False
            )
            await io_threads().run(plan, stager.plans, stager.budget_bytes, captured)

    async def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        options: SaveOptions | None = None,
    ) -> SaveInfo:
        """Save ``state`` as ``step``, and return when the checkpoint is visible and durable, and its exports have
        ended.

        ``async_save`` describes arguments and errors. Cancelling cancels the save.

        Returns:
            What was committed. ``SaveInfo.exports`` has for each export its report, or the error that it failed with.
        """
        pending = await self.async_save(state, step=step, metadata=metadata, files=files, options=options)
        return await completed(pending)

    async def async_save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        options: SaveOptions | None = None,
    ) -> PendingSave:
        """Launch the copies of ``state``, and return a ``PendingSave`` when they have been launched.

        With ``when_full="wait"`` this waits for a free slot first. Over several ranks it waits for the other ranks to
        make the call. With ``when_full="latest"`` it waits for neither: the copies are launched when all ranks have
        made the call and a slot is free, unless all have called a newer save by then.

        A step that is committed already is saved as its next generation. The old one stays until the new one has been
        verified. Cancelling before this returns starts nothing.

        Args:
            state: As for ``sidestream.save``.
            step: The number of the step, not negative.
            metadata: Plain data that can be read without the state: metrics for ``KeepBest``, a configuration.
            files: Sidecar files, as for ``sidestream.save``.
            options: In place of the ``save=`` of the ``Checkpointer``, whose writer stays. A planner is given here: two
                saves at the same time need two.

        Raises:
            TooManySavesError: No slot is free, and ``when_full="fail"``. SidestreamError: An earlier save, or the
            pruning after it, failed, and its error was not retrieved; nothing was
                started. Each error is raised once.
        """
        self._check_usable()
        options = self._save_options if options is None else self._checked(options)
        member = self._together()
        if member is not None:
            return await self._save_together(member, state, step, options, metadata, files)
        check_step(step)
        asked = _Asked(state, step, options, encode_metadata(metadata), check_sources(files))
        self._raise_unretrieved()
        if self._slots.full and self._when_full == "latest":
            return self._queue(asked)
        if self._slots.full and self._when_full != "wait":
            return self._give_way(step)
        return await self._in_turn(asked)

    def _checked(self, options: SaveOptions) -> SaveOptions:
        """Return the options of one save. Raises ``InvalidOptionError`` for those that belong to the whole run."""
        options = options_of(options, SaveOptions)
        for name in ("writer", "streaming"):
            mine = getattr(self._save_options, name)
            if getattr(options, name) not in (mine, getattr(SaveOptions(), name)):
                raise InvalidOptionError(
                    f"{name}= is one for all saves of a Checkpointer: Checkpointer(save=SaveOptions({name}=...))"
                )
        return replace(options, writer=self._save_options.writer, streaming=self._save_options.streaming)

    async def _in_turn(self, asked: _Asked, *, promised: bool = False) -> PendingSave:
        exports = self._exports_of(asked.step)
        await self._slots.acquire()
        try:
            work = await self._start(asked, exports, promised=promised)
            pending = PendingSave(work, exports)
        except BaseException:
            self._slots.release()
            raise
        pending.when_done(self._slots.release)
        return self._watch_over(pending, asked.step)

    def _together(self) -> Member | None:
        """The group that saves and restores with this process; None where it is by itself."""
        member = group_of(self._group)
        return None if member is None or member.group.world == 1 else member

    async def _save_together(
        self,
        member: Member,
        state: Mapping[str, Any],
        step: int,
        options: SaveOptions,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        *,
        promised: bool = False,
    ) -> PendingSave:
        operation = member.begin("save", Deadline.after(options.timeout_s), options.rank_wait_s)
        when_full: WhenFull = "wait" if promised else self._when_full
        turn = JointTurn(self._starts, operation, step, self._when_full, promised=promised)

        async def begin() -> _Asked:
            check_step(step)
            asked = _Asked(state, step, options, encode_metadata(metadata), check_sources(files))
            if not promised:
                self._raise_unretrieved_to_all(operation)
            if when_full != "latest":
                await turn.agree()
            return asked

        try:
            asked = await prepare_together(operation, begin)
            if when_full != "latest" and turn.generation is None:
                operation.close()
                turn.leave()
                return self._give_way(step)
            exports = () if operation.rank else self._exports_of(step)
            start = partial(self._start_together, turn, operation, asked, exports)
            if when_full == "latest":
                queued = QueuedSave(self.url, step, turn, start)
                return self._watch_over(PendingSave(queued, exports), step)
            pending = PendingSave(await start(), exports)
        except BaseException:
            turn.leave()
            raise
        pending.when_done(turn.leave)
        return self._watch_over(pending, step)

    async def _start_together(
        self,
        turn: JointTurn,
        operation: Operation,
        asked: _Asked,
        exports: tuple[PendingExport, ...],
    ) -> SaveWork:
        generation = turn.generation
        assert generation is not None
        name = step_name(asked.step, generation)
        launch = partial(self._launch, asked, generation, exports)
        work = start_together(launch, operation, f"{self.url}/{name}")
        turn.begun()
        return work if operation.rank else LeasedSave(work, self._leases.announce(name, "save"))

    @property
    def _keeps_up(self) -> bool:
        """Of several ranks one deletes."""
        member = self._together()
        return member is None or member.group.rank == 0

    async def _next_generation(self, step: int) -> int:
        with self._time_limit():
            generation = await next_generation(self._store, step)
        return max(generation, self._taken.get(step, 0) + 1)

    async def _claim_generation(self, step: int) -> int:
        """On rank 0 of several: no other save gets this one."""
        async with self._starting:
            generation = await self._next_generation(step)
            self._take(step, generation)
            return generation

    def _take(self, step: int, generation: int) -> None:
        """Record a generation, and forget old steps: their saves are found in the listing."""
        self._taken.pop(step, None)
        self._taken[step] = generation
        while len(self._taken) > max(_REMEMBERED, 2 * self._slots.size):
            del self._taken[next(iter(self._taken))]

    def _give_way(self, step: int) -> PendingSave:
        url = f"{self.url}/{step_name(step, 1)}"
        if self._when_full == "fail":
            raise TooManySavesError(
                f"{url} was not saved: {self._slots.taken} saves are in flight, as many as slots= allows"
            )
        return PendingSave(SkippedSave(self.url, step, f"{self._slots.taken} saves are in flight"))

    def _queue(self, asked: _Asked) -> PendingSave:
        if self._queued is not None:
            self._queued.give_way()
        self._queued = OwnTurn(self._slots)
        exports = self._exports_of(asked.step)
        start = partial(self._start, asked, exports, promised=True)
        queued = QueuedSave(self.url, asked.step, self._queued, start)
        return self._watch_over(PendingSave(queued, exports), asked.step)

    def _exports_of(self, step: int) -> tuple[PendingExport, ...]:
        return self._exports.of(step, f"{self.url}/{step_name(step, 1)}")

    async def _start(self, asked: _Asked, exports: tuple[PendingExport, ...], *, promised: bool = False) -> SaveWork:
        async with self._starting:
            generation = await self._next_generation(asked.step)
            if not promised:  # for those closing waits, and they are made whatever became of others
                self._check_usable()  # it may have been closed while this waited
                self._raise_unretrieved()
            work = self._launch(asked, generation, exports)
            self._take(asked.step, generation)
            return LeasedSave(work, self._leases.announce(step_name(asked.step, generation), "save"))

    def _launch(
        self,
        asked: _Asked,
        generation: int,
        exports: tuple[PendingExport, ...],
        operation: Operation | None = None,
    ) -> SaveWork:
        name = step_name(asked.step, generation)
        return start_save(
            asked.state,
            Location(self._store, name, f"{self.url}/{name}"),
            asked.options,
            stager=self._stager,
            step=asked.step,
            generation=generation,
            metadata=asked.metadata,
            worker=(self._worker, self._fall_back),
            operation=operation,
            exports=exports,
            files=asked.files,
        )

    def _watch_over(self, pending: PendingSave, step: int) -> PendingSave:
        order = next(self._orders)
        self._under_way[order] = step
        pending.when_done(lambda: self._on_done(pending, order, step))
        self._pending = [one for one in self._pending if not one.done() or one.unretrieved is not None] + [pending]
        self._exports.watch_over(pending.exports)
        return pending

    def _on_done(self, pending: PendingSave, order: int, step: int) -> None:
        del self._under_way[order]
        if pending.outcome == "committed":
            if order > self._last_order:  # of two that overlap, the one that was begun later is the last one
                self._last_order, self._last_saved = order, (step, time.monotonic())
            if self._keeps_up:
                self._upkeep.request()

    # --- reading ---

    async def restore(
        self,
        state: Mapping[str, Any],
        step: int | Latest | None = "latest",
        *,
        fallback: Fallback = "never",
        strict: bool = True,
        allow_missing: Tolerated = (),
        allow_unexpected: Tolerated = (),
        allow_cast: Tolerated = (),
        options: LoadOptions | None = None,
    ) -> int | None:
        """Load the newest committed step, or ``step``, into ``state`` and return its number; None if there is none yet.

        As ``load``, in place, and with its keywords; ``verify``, ``timeout_s`` and ``names`` are those of the
        ``Checkpointer`` unless they are given here (``names={}``: none). ``restored`` has the report. While it is read
        the step is leased, so that nobody deletes it. Raises ``CheckpointNotFoundError`` for a ``step`` that is not
        there, ``CorruptCheckpointError`` for one that is damaged.

        With ``fallback="older"`` the newest older one that is good is loaded instead of a damaged one (of the same step
        an older generation first); ``restored.passed_over`` lists what was damaged, ``health()`` too, and a warning is
        logged. ``CorruptCheckpointError`` then means that none is good.
        """
        self._check_usable()
        wish = self._wish(step, fallback)
        options = self._load_options if options is None else options_of(options, LoadOptions)
        if options.names is None and options.planner is None:
            options = replace(options, names=self._save_options.names)
        request = LoadRequest(options, tolerance_of(strict, allow_missing, allow_unexpected, allow_cast))
        member = self._together()
        restoring: Restoring | RestoringTogether
        if member is None:
            restoring = Restoring(self._store, self.url, self._leases, wish, request)
        else:
            restoring = RestoringTogether(
                member, self._store, self.url, self._leases, wish, request, options.rank_wait_s
            )
        with time_limit(Deadline.after(options.timeout_s)):
            self._restored = await restoring.run(state)
        self._passed_over = restoring.passed_over
        if self._restored is None:
            if wish.step is not None:
                raise await self._not_found(wish.step)
            return None
        return restoring.step

    @property
    def restored(self) -> LoadReport | None:
        """What the last ``restore`` did, and which differences it accepted; None before the first."""
        return self._restored

    @asynccontextmanager
    async def reading(
        self, step: int | Latest = "latest", *, options: LoadOptions | None = None
    ) -> AsyncIterator[Checkpoint]:
        """``open_checkpoint`` of a step, with a lease on it: nobody deletes it within the ``async with``.

        Raises ``CheckpointNotFoundError``, ``CorruptCheckpointError``, ``UnsupportedCheckpointError``.
        """
        async with self._reading(step) as (found, location):
            if found.damage is not None:
                raise found.damage
            wanted = self._load_options if options is None else options_of(options, LoadOptions)
            yield await open_from(
                location,
                verify=wanted.verify,
                timeout_s=wanted.timeout_s,
                safe_globals=wanted.safe_globals,
                trust=wanted.trust,
            )

    async def verify(self, step: int | Latest = "latest", *, progress: Progress | None = None) -> VerifyReport:
        """Read a step whole and compare it with all that is known about it, under a lease; see ``sidestream.verify``.

        Damage is reported and not raised: look at ``ok``. Raises ``CheckpointNotFoundError``, and what ``verify``
        raises.
        """
        async with self._reading(step) as (_, location):
            with self._time_limit():
                return await verify_at(location, progress)

    async def read_metadata(self, step: int | Latest = "latest") -> dict[str, Any]:
        """What was noted about a step when it was saved, and nothing else of it is read; empty if nothing was.

        Raises ``CheckpointNotFoundError``, ``CorruptCheckpointError``.
        """
        async with self._reading(step) as (found, _):
            if found.damage is not None:
                raise found.damage
            with self._time_limit():
                return await read_metadata(self._store, found.name)

    async def steps(self) -> list[int]:
        """The committed steps, in order. What is being written, or was left by a crash, is not among them, nor is a
        step whose marker is damaged."""
        self._check_usable()
        with self._time_limit():
            return [found.step for found in await list_steps(self._store) if found.damage is None]

    async def latest(self) -> int | None:
        """The newest committed step, or None."""
        return max(await self.steps(), default=None)

    def watch(self, *, after: int | None = None, poll_s: float = 2.0) -> Watch:
        """``async for step in checkpoints.watch()``: the number of every step that is committed from now on, by any
        process; with ``after``, every one above it, those that are there already first.

        "Now" is when the first look at the run ends. A step may be gone again when it is loaded, if retention deletes
        it: then ``restore`` raises ``CheckpointNotFoundError``, and a newer one comes next.
        """
        self._check_usable()
        check_timeout(poll_s)
        if after is not None:
            check_step(after)
        return Watch(self._store, after=after, poll_s=poll_s, timeout_s=self._timeout_s)

    @asynccontextmanager
    async def _reading(self, step: int | Latest | None) -> AsyncIterator[tuple[Step, Location]]:
        self._check_usable()
        wish = self._wish(step, "never")
        with self._time_limit():
            chosen = await choose(self._store, self._leases, wish, ())
        if chosen is None:
            raise await self._not_found(wish.step)
        found, lease = chosen
        try:
            yield found, Location(self._store, found.name, f"{self.url}/{found.name}")
        finally:
            if lease is not None:
                await lease.release()

    def _wish(self, step: int | Latest | None, fallback: Fallback) -> Wish:
        check_choice("fallback", fallback, Fallback)
        if step is None or step == "latest":
            return Wish(None, fallback == "older")
        check_steps(step)
        return Wish(step, fallback == "older")

    async def _not_found(self, step: int | None) -> CheckpointNotFoundError:
        with self._time_limit():
            there = [found.step for found in await list_steps(self._store)]
        wanted = "step" if step is None else f"step {step}"
        return CheckpointNotFoundError(f"{self.url} has no committed {wanted}; it has {there or 'none'}")

    # --- looking after the run ---

    async def prune(self, *, dry_run: bool = False) -> Pruned:
        """Do now what is done after every save: delete what ``keep`` lets go and what dead writers left.

        With ``dry_run`` nothing is deleted, and nothing read back: ``deleted`` has what would go if the newest step
        that stays proves to be good. Raises what the storage raises; what was deleted until then is deleted. A cancel
        leaves no step half visible.
        """
        self._check_usable()
        if not self._keeps_up:
            return Pruned()
        if dry_run:
            async with self._pruning:
                with self._time_limit():
                    return await self._pruner.preview(self._protected)
        return await self._prune()

    def health(self) -> Health:
        """How the run is doing, as far as this ``Checkpointer`` knows."""
        saved = self._last_saved
        errors = [save.unretrieved for save in self._pending]
        return Health(
            pending=sum(not save.done() for save in self._pending),
            last_saved=None if saved is None else saved[0],
            since_saved_s=None if saved is None else time.monotonic() - saved[1],
            failures=tuple(f"{type(error).__name__}: {error}" for error in errors if error is not None),
            retention=None if self._upkeep.error is None else str(self._upkeep.error),
            sweeping=None if self._pruner.not_swept is None else str(self._pruner.not_swept),
            damaged={name: str(error) for name, error in self._pruner.damaged.items()},
            passed_over=dict(self._passed_over),
            leases=dict(self._leases.trouble),
            pruned=self._pruner.last,
        )

    def on_preemption(
        self,
        *signals: int,
        save: Callable[[], tuple[Mapping[str, Any], int] | None] | None = None,
        grace_s: float = 30.0,
        then: Then = "exit",
        exit_code: int | None = None,
    ) -> None:
        """When one of ``signals`` (``SIGTERM``) comes: finish the saves in flight, save once more, and end.

        ``save`` is called on the loop and returns a state and its step, or None if there is nothing new; without it
        only what is in flight is finished. After ``grace_s`` seconds, or when the signal comes again, the end comes
        whatever has been done. ``then`` says how: ``"exit"`` raises ``SystemExit(exit_code)`` out of the loop (128 +
        the signal's number if not given), ``"signal"`` lets the signal kill the process, ``"stay"`` leaves the end to
        the program, which looks at ``preempted``. A failure is logged, and the end comes all the same.

        Raises ``InvalidOptionError`` outside of the main thread. Closing the ``Checkpointer`` gives the signals back.
        """
        self._check_usable()
        if self._preemption is not None:
            self._preemption.uninstall()
        self._preemption = Preemption(
            signals or (signal.SIGTERM,),
            partial(self._save_all, save),
            grace_s=grace_s,
            then=then,
            exit_code=exit_code,
        )

    @property
    def preempted(self) -> int | None:
        """The number of the signal that ``on_preemption`` has seen; None before."""
        return None if self._preemption is None else self._preemption.requested

    async def _save_all(self, save: Callable[[], tuple[Mapping[str, Any], int] | None] | None) -> None:
        """Whatever failed before, or fails now, what is in flight is finished."""
        try:
            last = None if save is None else save()
            if last is not None:
                state, step = last
                check_step(step)
                member = self._together()
                if member is not None:
                    await (await self._save_together(member, state, step, self._save_options, promised=True))
                else:
                    await (await self._in_turn(_Asked(state, step, self._save_options), promised=True))
        except Exception:
            await self._all_ended()
            raise
        await self._all_ended()

    async def _after_saves(self) -> Exception | None:
        await self._prune()
        return next(iter(self._pruner.damaged.values()), None)

    async def _prune(self) -> Pruned:
        async with self._pruning:
            with self._time_limit():
                return await self._pruner.run(self._protected)

    def _protected(self) -> list[int]:
        """The step that was saved last, and those under way: a commit is listed before its save has ended."""
        return [*self._under_way.values(), *([] if self._last_saved is None else [self._last_saved[0]])]

    # --- its life ---

    async def aclose(self) -> None:
        """Wait for the saves in flight and for the deleting after them, and free the staging memory. Raises the error
        of a save that nobody awaited, or of the deleting.

        Cancelling it cancels those saves, and waits until they have cleaned up.
        """
        if self._closed:
            await self._all_ended()
            return
        self._closed = True
        try:
            await self._all_ended()
            await self._exports.ended()
            await self._upkeep.ended()
            if self._preemption is not None:
                await self._preemption.ended()  # its last save may have come meanwhile
                await self._all_ended()
                await self._exports.ended()
                await self._upkeep.ended()
        except asyncio.CancelledError:
            for save in self._pending:
                save.cancel()
            await run_shielded(self._stop)
            raise
        finally:
            if self._preemption is not None:
                self._preemption.uninstall()
            if self._holding is not None and self._registration is not None:
                self._holding.release()
                self._registration.end()
            if self._own_stager is not None:
                await run_shielded(self._own_stager.aclose)
        self._raise_unretrieved()

    async def _stop(self) -> None:
        await self._all_ended()
        await self._exports.stop()
        await self._upkeep.stop()

    async def _all_ended(self) -> None:
        for save in self._pending:
            await save.ended()

    def __enter__(self) -> NoReturn:
        raise AsyncOnlyError(
            "enter a Checkpointer with: async with sidestream.Checkpointer(...) as checkpoints; without an event "
            "loop use: with sidestream.blocking.Checkpointer(...) as checkpoints"
        )

    def __exit__(self, *_: object) -> None:
        """Never called, because ``__enter__`` raises. Without this method Python would raise its own error first."""

    async def __aenter__(self) -> Checkpointer:
        loop = running_loop("Checkpointer")
        if self._store.capabilities.rename:  # on object storage the first listing of the run shows the same
            with self._time_limit():
                await check_run(self._store)
        self._loop = loop
        if self._worker is not None:
            self._worker.acquire()
        self._holding = _Holding(self.url, self._own_stager, self._worker)
        self._registration = register(self._holding, holds_loop=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # asyncio makes a cancel of the first Ctrl-C: this is the second
            for save in self._pending:
                save.cancel()
        try:
            await self.aclose()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides, a save or the deleting after it failed, and nobody had heard of it: {failure}")

    def _raise_unretrieved(self) -> None:
        """One error, with the others as its notes."""
        errors: list[BaseException] = []
        for save in self._pending:
            if save.unretrieved is not None:
                errors.append(save.unretrieved)
                save.mark_retrieved()
        if self._upkeep.unretrieved is not None:
            errors.append(self._upkeep.unretrieved)
            self._upkeep.unretrieved = None
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"besides: {type(other).__name__}: {other}")
            raise errors[0]

    def _raise_unretrieved_to_all(self, operation: Operation) -> None:
        """It ends this save on all ranks. One that learns of that after its call does not raise it in its next one: a
        single failure would end save after save, by turns. Closing raises it."""
        self._pending = [save for save in self._pending if not tells_of_earlier(save.unretrieved)]
        operation.step = EARLIER
        self._raise_unretrieved()
        operation.step = "start"

    def _deadline(self) -> Deadline:
        return Deadline.after(self._timeout_s)

    def _time_limit(self) -> AbstractContextManager[None]:
        return time_limit(self._deadline())

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError("this Checkpointer was made before os.fork(); make a new one in the child")
        if self._closed:
            raise ClosedError(f"the Checkpointer of {self.url} is closed")
        if self._loop is None:
            raise ClosedError("enter the Checkpointer first: async with sidestream.Checkpointer(...) as checkpoints")
        if running_loop("Checkpointer") is not self._loop:
            raise WrongLoopError(f"the Checkpointer of {self.url} belongs to another event loop")
