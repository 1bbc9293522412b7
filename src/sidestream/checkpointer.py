"""``Checkpointer``: saving, restoring and deleting the checkpoints of one run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, NoReturn

from ._engine.calls import as_operation, in_operation
from ._load.checkpoint import Checkpoint
from ._load.report import LoadReport
from ._load.verification import VerifyReport
from ._run.exports import Exports, Upkeep
from ._run.health import Health
from ._run.opened import Opened
from ._run.preemption import Preemption, Then
from ._run.pruning import Pruner
from ._run.restore import Latest, Reading
from ._run.retention import Pruned, Retention, retention_of
from ._run.run import Run
from ._run.saves import Saves
from ._run.watch import Watch
from ._runtime.caller import run_by_caller
from ._runtime.public import public
from ._runtime.tasks import run_shielded
from ._save.api import Export, PendingSave, Publishes, SaveInfo, completed
from ._staging import AsyncStager
from ._storage import locate_run
from ._weights.following import Candidate, Follower
from ._weights.live import Live
from ._weights.run_source import RunSource
from .errors import AsyncOnlyError
from .options import (
    Fallback,
    FileSource,
    GroupChoice,
    LoadOptions,
    Names,
    Progress,
    SaveOptions,
    Storage,
    Tolerated,
    WhenFull,
    options_of,
    storage_of,
)

__all__ = ["Checkpointer"]


@public
class Checkpointer:
    """The checkpoints of one run: ``step-100``, and ``step-100.g2`` if step 100 was saved again.

    Enter it with ``async with``, or ``await`` its ``open()``. Tasks of any event loops may use it. Any number of
    processes may have one on the same run, to save or to read. Leaving it waits for saves, exports and pruning
    (``aclose``).

    With several ranks all ranks make the same calls in the same order, and rank 0 chooses, leases and deletes.

    Args:
        url: The directory or prefix of the run.
        keep: Which steps stay, such as ``KeepLast(3) | KeepBest("loss")``. None: all. The others are deleted after a
            save, when a newer step has been read back and is good, and no process has a lease on them.
        slots: How many saves may be in progress at the same time. Each has staged memory of its own, which is reused.
        when_full: What a save does that finds no slot free (``options.WhenFull``).
        stager: A stager to use in place of one of its own.
        save: How saves are done. With ``writer="process"`` one process writes, from the first save or ``prewarm()``
            until the ``Checkpointer`` is closed.
        load: How steps are restored and opened. If it has no ``names``, ``restore`` uses those of ``save``.
        export: A ``sidestream.HF``, or several, to write beside saves; ``{step}`` in its URL stands for the step.
        exports_every: Export the steps that are multiples of this number.
        exports_keep: How many exports stay, those of the highest steps. None: all.
        timeout_s: The limit of every call that neither saves nor loads, in seconds.
        lease_s: How long a lease lasts after its holder has died, in seconds. A save acquires one when it takes longer
            than a quarter of that.
        abandoned_after_s: How long the files of a killed writer without a lease stay after the last write to them, in
            seconds, where no lock shows that it has ended (``docs/saving.md``).
        process_group: The ranks that save and restore together (``options.GroupChoice``); ``"alone"``: this process
            only.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.

    Raises:
        InvalidOptionError, MissingExtraError: An argument is wrong, or a package is missing.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: Retention | None = None,
        slots: int = 2,
        when_full: WhenFull = "wait",
        stager: AsyncStager | None = None,
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
        options, self._load = options_of(save, SaveOptions), options_of(load, LoadOptions)
        store, found_url = locate_run(url, storage_of(storage_options, storage))
        self.url: str = found_url
        """The URL of the run."""
        durability = options.durability
        self._run = Run(store, self.url, process_group, timeout_s=timeout_s, lease_s=lease_s)
        self._opened = Opened(self.url, store, options, stager)
        # One pass at a time: the one after a save, and one that the program asks for, would verify and delete the same
        # steps.
        self._pruning = asyncio.Lock()
        self._upkeep = Upkeep(
            self._prune, f"sidestream retention {self.url}", lambda: list(self._pruner.damaged.values())
        )
        self._reading = Reading(self._run)
        self._pruner = Pruner(
            store,
            self.url,
            retention_of(keep),
            self._run.leases,
            durability,
            lease_s=lease_s,
            abandoned_after_s=abandoned_after_s,
        )
        self._exports = Exports(
            export,
            self.url,
            self._run.leases,
            None if self._pruner.keeps_all else self._upkeep.request,
            every=exports_every,
            keep=exports_keep,
            durability=durability,
            timeout_s=options.timeout_s,
        )
        self._saves = Saves(
            self._run,
            options,
            self._opened,
            self._exports,
            self._upkeep,
            slots=slots,
            when_full=when_full,
        )
        self._preemption: Preemption | None = None

    # --- saving ---

    @as_operation
    async def prewarm(self, state: Mapping[str, Any] | None = None) -> None:
        """Do now what the first save of ``state`` would have to do. Nothing is copied or written.

        The clients of an object store are imported and connected, the writer process is started, if there is one,
        staging memory is mapped, and in a run of one process the save is planned. A cancel leaves what has been done by
        then.

        Args:
            state: The state that will be saved. None: only connect and start the writer process. What is wrong with it
                is raised by the save.

        Raises:
            StorageError, MissingExtraError, InvalidOptionError, DeadlineExceededError: The store does not answer, or
                refuses to list the run.
            WriterProcessError: The process could not be started.
            ArenaExhaustedError: The memory does not fit the budget of the stager.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        await self._saves.prewarm(state)

    @as_operation
    async def reserve(self, nbytes: int) -> None:
        """Map staging memory now, and start the writer process, if there is one. A cancel leaves what has been done by
        then.

        Args:
            nbytes: How much memory to map, in bytes.

        Raises:
            InvalidOptionError: ``nbytes`` is not a positive integer.
            WriterProcessError: The process could not be started.
            ArenaExhaustedError: The memory does not fit the budget of the stager.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        await self._saves.reserve(nbytes)

    async def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        publish: Publishes | None = None,
        options: SaveOptions | None = None,
    ) -> SaveInfo:
        """Save ``state`` as ``step``, and return when the checkpoint is visible and durable, and its exports have
        ended.

        A cancel cancels the save and its exports. What that leaves is as for ``sidestream.save``.

        Args:
            state: As for ``sidestream.save``.
            step: The number of the step, not negative.
            metadata: Plain data that can be read without the state: metrics for ``KeepBest``, a configuration.
            files: Sidecar files, as for ``sidestream.save``.
            publish: A ``Publisher``: publish the weights from the same snapshot, with the step as their version; or its
                ``version()``. Of several ranks, those that have a publisher publish from the committed checkpoint.
            options: In place of the ``save=`` of the ``Checkpointer``, whose writer stays.

        Returns:
            What was committed. ``SaveInfo.exports`` has for each export its report, or the error that it failed with,
            and ``SaveInfo.published`` the version.

        Raises:
            TooManySavesError: No slot is free, and ``when_full="fail"``.
            SkippedError: The save gave way, as ``when_full`` says.
            ClosedError: The ``Checkpointer`` is closed.
            SidestreamError: The save failed as ``sidestream.save`` does; or an earlier save, or the pruning after it,
                failed, and its error was not retrieved.
        """
        self._opened.check()
        pending = await run_by_caller(self._saves.start, state, step, metadata, files, options, publish)
        return await in_operation(lambda: completed(pending), "save")

    def async_save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        files: Mapping[str, FileSource] | None = None,
        publish: Publishes | None = None,
        options: SaveOptions | None = None,
    ) -> PendingSave:
        """Start what ``save`` does, and return at once.

        Await ``pending.staged`` before the tensors change, and ``pending`` for the ``SaveInfo``. The call captures the
        state: plain values are copied, and what is enqueued on the current streams comes before the copies. The copies
        themselves wait for a free slot and, over several ranks, for the other ranks to make the call. ``fence()`` and
        ``guard()`` of the stager wait for them too.

        With ``when_full="latest"`` the state is captured when a slot is free and all ranks have made the call, on the
        event loop of this call, unless all have called a newer save by then.

        A step that is committed already is saved as its next generation. ``KeepAll``, the default, keeps the old
        one. Any other policy deletes it when the new one has been verified.

        Args:
            state: As for ``sidestream.save``.
            step: The number of the step, not negative.
            metadata: Plain data that can be read without the state: metrics for ``KeepBest``, a configuration.
            files: Sidecar files, as for ``sidestream.save``.
            publish: A ``Publisher``: publish the weights from the same snapshot, with the step as their version; or its
                ``version()``. Of several ranks, those that have a publisher publish from the committed checkpoint.
            options: In place of the ``save=`` of the ``Checkpointer``, whose writer stays.

        Returns:
            The save in progress. It continues if it is not awaited, and the program ends when it has ended. Awaiting it
            raises ``SkippedError`` if it was skipped, as ``when_full`` says. Over several ranks it also raises all that
            the call raises in one process, on all ranks.

        Raises:
            TooManySavesError: No slot is free, and ``when_full="fail"``.
            ClosedError: The ``Checkpointer`` is closed.
            WrongLoopError: This code runs in trio.
            SidestreamError: The call is wrong, or the state cannot be captured; or an earlier save, or the pruning
                after it, failed, and its error was not retrieved. Each error is raised once. Nothing was started.
        """
        self._opened.check()
        return self._saves.start(state, step, metadata, files, options, publish)

    # --- reading ---

    @as_operation
    async def restore(
        self,
        state: Mapping[str, Any],
        step: int | Latest = "latest",
        *,
        fallback: Fallback = "never",
        strict: bool = True,
        allow_missing: Tolerated = (),
        allow_unexpected: Tolerated = (),
        allow_cast: Tolerated = (),
        options: LoadOptions | None = None,
    ) -> int | None:
        """Load the newest committed step, or ``step``, into ``state``, in place, and return its number.

        While it is read the step is leased, so that it is not deleted. ``restored`` has the report. What a failure or a
        cancel leaves in ``state`` is as for ``sidestream.load``.

        Args:
            state: As for ``sidestream.load``.
            step: A number, or ``"latest"``.
            fallback: ``"older"``: if the step is damaged, load the newest older one that is good (an older generation
                of the same step first), and log a warning. ``restored.passed_over`` and ``health()`` list what was
                damaged.
            strict: False accepts missing and unexpected names, as in torch.
            allow_missing: Which names of ``state`` the step may lack: True, or glob patterns of FQNs.
            allow_unexpected: Which names in the step ``state`` may lack, inside of its top-level keys.
            allow_cast: Which tensors may have another dtype in the step. They are converted.
            options: In place of the ``load=`` of the ``Checkpointer``.

        Returns:
            The number of the step, or None if the run has no step yet.

        Raises:
            CheckpointNotFoundError: There is no step of this number.
            CorruptCheckpointError: The step is damaged; with ``fallback="older"``, all are.
            ClosedError: The ``Checkpointer`` is closed.
            SidestreamError: The load failed as ``sidestream.load`` does.
        """
        self._opened.check()
        options = self._load if options is None else options_of(options, LoadOptions)
        # What was saved under other names is restored under them, without a second declaration of the mapping.
        if options.names is None:
            options = replace(options, names=self._saves.options.names)
        tolerated = (strict, allow_missing, allow_unexpected, allow_cast)
        return await self._reading.restore(state, step, fallback, options, tolerated)

    @property
    def restored(self) -> LoadReport | None:
        """The report of the last ``restore``, with the differences that it accepted. None before the first."""
        return self._reading.restored

    @asynccontextmanager
    async def reading(
        self, step: int | Latest = "latest", *, options: LoadOptions | None = None
    ) -> AsyncIterator[Checkpoint]:
        """Open a step as a ``Checkpoint``, with a lease on it until the end of the ``async with``.

        Args:
            step: A number, or ``"latest"``.
            options: ``verify``, ``safe_globals``, ``trust`` and ``timeout_s`` of the calls on the ``Checkpoint``, in
                place of those of the ``Checkpointer``.

        Yields:
            The checkpoint. Use it inside of the ``async with`` only.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, UnsupportedCheckpointError: There is no such step, or it
                cannot be read.
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        opened = self._open(step, self._load if options is None else options_of(options, LoadOptions))
        begun = False

        async def enter() -> Checkpoint:
            nonlocal begun
            begun = True
            return await opened.__aenter__()

        async def close() -> None:
            await in_operation(lambda: opened.__aexit__(None, None, None), "reading")

        try:
            yield await in_operation(enter, "reading")
        finally:
            if begun:  # also after a cancel that came when it had been opened
                await run_shielded(close)

    @asynccontextmanager
    async def _open(self, step: int | Latest, options: LoadOptions) -> AsyncIterator[Checkpoint]:
        async with self._reading.step(step) as (found, _):
            # The newest step with a damaged marker is an error here, and not a reason to take an older one: that would
            # silently go back in training.
            if found.damage is not None:
                raise found.damage
            yield await self._run.open(found.name, options)

    @as_operation
    async def verify(self, step: int | Latest = "latest", *, progress: Progress | None = None) -> VerifyReport:
        """Read a step whole and compare it with all that is known about it, under a lease, as ``sidestream.verify``
        does. A cancel leaves nothing behind.

        Args:
            step: A number, or ``"latest"``.
            progress: Called on the event loop with the bytes read so far and the bytes to read. What it raises ends the
                call.

        Returns:
            The report. Damage is in it, and is not raised: see ``ok``.

        Raises:
            CheckpointNotFoundError: There is no such step.
            ClosedError: The ``Checkpointer`` is closed.
            SidestreamError: The call failed as ``sidestream.verify`` does.
        """
        self._opened.check()
        return await self._reading.verify(step, progress)

    @as_operation
    async def read_metadata(self, step: int | Latest = "latest") -> dict[str, Any]:
        """Read the ``metadata=`` of a step, and nothing else of it. A cancel leaves nothing behind.

        Args:
            step: A number, or ``"latest"``.

        Returns:
            The metadata, empty if the step was saved without.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: There is no such step, or it is damaged.
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        return await self._reading.metadata(step)

    @as_operation
    async def steps(self) -> list[int]:
        """Return the numbers of the committed steps, in order.

        Steps that are being written, that a crash left unfinished, or whose marker is damaged are left out.

        Raises:
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        return [found.step for found in await self._reading.steps() if found.damage is None]

    @as_operation
    async def latest(self) -> int | None:
        """Return the number of the newest committed step, or None.

        Raises:
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
            ClosedError: The ``Checkpointer`` is closed.
        """
        return max(await self.steps(), default=None)

    @as_operation
    async def best(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the number of the step with the best metric, or None if there is no step.

        It is the step that ``KeepBest(metric, 1, mode)`` keeps: of equal ones the newer. Damaged steps are left out.

        Args:
            metric: A key of the ``metadata=`` of the saves, or a path of keys joined by dots.
            mode: ``"min"``: the lowest value is best. ``"max"``: the highest is.

        Raises:
            InvalidOptionError: An argument is wrong, or no step has the metric. The message lists those that exist.
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        return await self._reading.best(metric, mode)

    def watch(self, *, after: int | None = None, newest: bool = False, poll_s: float = 2.0) -> Watch:
        """Return an iterator over the steps of the run: ``async for step in checkpoints.watch(newest=True): ...``.

        It yields the numbers of the steps that are there, in order, and then of every step that any process commits. A
        step may be gone when it is loaded, because retention has deleted it. ``restore`` then raises
        ``CheckpointNotFoundError``, and a newer step follows.

        Args:
            after: Begin with the first step above this number; ``after=0`` leaves out step 0. None: begin with the
                first step.
            newest: Yield the newest step only, whenever there is a newer one than was yielded last, and leave out those
                before it. So a consumer that starts late, or is slower than the saves, does not fall behind.
            poll_s: How often the run is looked at, in seconds. On a local file system changes are noticed earlier, with
                the extra ``watch``.

        Returns:
            The iterator. A cancel loses no step.

        Raises:
            InvalidOptionError: An argument is wrong.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        return Watch(self._run.store, after=after, newest=newest, poll_s=poll_s, timeout_s=self._run.timeout_s)

    def following(
        self,
        live: Live,
        *,
        names: Names | None = None,
        accept: Callable[[Candidate], object] | None = None,
        before_swap: Callable[[Candidate], object] | None = None,
        after_swap: Callable[[Candidate], object] | None = None,
        mapped: bool = True,
        poll_s: float = 2.0,
    ) -> Follower:
        """Return a follower, which puts the newest good step into ``live``, and each newer one after it, as long as its
        ``async with`` block lasts: ``async with checkpoints.following(live) as follower: ...``.

        Each step that is put in place is the newest one that was committed when its fetch began. While a step is read
        it is leased. A damaged step is passed over, and so is one that does not fit or is refused; ``health()`` of the
        follower and an event say so. A step with a lower number is served only when those above it are deleted, or
        after ``accept_lower()``. Errors of the storage are tried again. Ranks follow independently of each other.

        The options ``verify``, ``safe_globals``, ``trust`` and ``timeout_s`` of a fetch are those of ``load=``. The
        hooks are called in a task on the loop that enters the block, and may be coroutine functions.

        Args:
            live: What is served.
            names: The name in ``live`` of each FQN in a step (``options.Names``), such as
                ``sidestream.strip_prefix("model.")``.
            accept: Called with a ``Candidate`` before it is served. If it does not return True, or raises, the step is
                passed over.
            before_swap: Called before the weights are exchanged. If it raises, the step is passed over.
            after_swap: Called when readings that begin have the new weights.
            mapped: On local disks, use the pages of the files as the weights where that is possible, so that all
                processes of a host share them. False: read everything into memory of this process.
            poll_s: How often the run is looked at, in seconds, as for ``watch``.

        Returns:
            The follower, which has to be entered.

        Raises:
            InvalidOptionError: An argument is wrong.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        hooks = (accept, before_swap, after_swap)
        source = RunSource(self._run, self._load, live, names=names, mapped=mapped, poll_s=poll_s)
        return Follower(source, live, hooks)

    # --- maintenance of the run ---

    @as_operation
    async def prune(self, *, dry_run: bool = False) -> Pruned:
        """Delete the steps that ``keep`` does not keep, and what dead writers left. This is done after every save, too.

        A cancel leaves no step half visible. If the storage fails, what was deleted before stays deleted.

        Args:
            dry_run: Delete and verify nothing. ``deleted`` has the steps that would go if the newest step that stays
                proves to be good.

        Returns:
            What was deleted; nothing on ranks other than rank 0.

        Raises:
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        if not self._run.leads:
            return Pruned()
        return await self._prune(dry_run=dry_run)

    def health(self) -> Health:
        """Return the state of the run, as far as this ``Checkpointer`` knows it. Nothing is read from storage."""
        saved = self._saves.last
        return Health(
            pending=self._saves.pending,
            last_saved=None if saved is None else saved[0],
            since_saved_s=None if saved is None else time.monotonic() - saved[1],
            failures=tuple(f"{type(error).__name__}: {error}" for error in self._saves.failures),
            retention=self._upkeep.error or self._exports.pruning.error,
            sweeping=None if self._pruner.not_swept is None else str(self._pruner.not_swept),
            damaged={name: str(error) for name, error in self._pruner.damaged.items()},
            passed_over=dict(self._reading.passed_over),
            leases=dict(self._run.leases.trouble),
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
        """Finish the saves in progress, save once more, and end the program when a signal arrives.

        A failure is logged, and the program ends all the same. Closing the ``Checkpointer`` restores the handlers.

        Args:
            signals: The signals. ``SIGTERM`` if none is given.
            save: Called on the event loop. It returns a state and its step, or None if there is nothing new to save.
                None: only the saves in progress are finished.
            grace_s: The time for that, in seconds. The program ends after it, or when the signal arrives again.
            then: How the program ends (``options.Then``). ``"exit"``: raise ``SystemExit(exit_code)`` out of the loop.
                ``"signal"``: let the signal kill the process. ``"stay"``: continue; the program looks at ``preempted``.
            exit_code: The exit code. None: 128 + the number of the signal.

        Raises:
            InvalidOptionError: Called outside of the main thread, or with a signal that cannot be caught.
            ClosedError: The ``Checkpointer`` is closed.
        """
        self._opened.check()
        preemption = Preemption(
            signals or (signal.SIGTERM,),
            partial(self._save_all, save),
            self._cancel,
            grace_s=grace_s,
            then=then,
            exit_code=exit_code,
        )
        preemption.install(self._preemption)
        self._preemption = preemption

    @property
    def preempted(self) -> int | None:
        """The number of the signal that has arrived, or None."""
        return None if self._preemption is None else self._preemption.requested

    @as_operation
    async def _save_all(self, save: Callable[[], tuple[Mapping[str, Any], int] | None] | None) -> None:
        """Do the last save on preemption, and wait for all saves in progress, also if the last one fails."""
        try:
            last = None if save is None else await run_by_caller(save)
            if last is not None:
                state, step = last
                await (await run_by_caller(self._saves.start, state, step, promised=True))
        except Exception:
            await self._saves.ended()
            raise
        await self._saves.ended()

    def _cancel(self) -> None:
        """Cancel what is in progress, for which the end of the program would wait."""
        self._saves.cancel()
        self._exports.cancel()
        self._upkeep.cancel()

    async def _prune(self, *, dry_run: bool = False) -> Pruned:
        prune = self._pruner.preview if dry_run else self._pruner.run
        async with self._pruning:
            with self._run.time_limit():
                return await prune(self._saves.protected)

    # --- entering and closing ---

    async def aclose(self) -> None:
        """Wait for the saves in progress, their exports and the pruning after them, and free the staging memory.

        Any number of tasks may call it, at the same time too: each of them waits for all of that. A cancel cancels
        those saves, and waits until they have cleaned up.

        Raises:
            SidestreamError: A save whose error was not retrieved, or the pruning, failed.
        """
        try:
            await self._close()
        finally:
            if self._preemption is not None:
                self._preemption.uninstall()  # here, because signal handlers belong to the loop of the caller

    @as_operation
    async def _close(self) -> None:
        self._opened.closed = True
        try:
            await self._all_ended()
            if self._preemption is not None:
                await self._preemption.ended()  # its last save may have begun meanwhile
                await self._all_ended()
        except asyncio.CancelledError:
            # The saves are cancelled, and the exports and the upkeep after them. All of that is awaited, shielded: when
            # this raises, no task and no thread of the ``Checkpointer`` is left.
            self._saves.cancel()
            await run_shielded(self._stop)
            raise
        finally:
            # Last, because saves that still clean up need the stager and the writer process.
            await self._opened.release()
        self._saves.raise_unretrieved()

    async def _all_ended(self) -> None:
        await self._saves.ended()
        await self._exports.ended()
        await self._upkeep.ended()

    async def _stop(self) -> None:
        await self._saves.ended()
        await self._exports.stop()
        await self._upkeep.stop()

    def __enter__(self) -> NoReturn:
        raise AsyncOnlyError(
            "enter a Checkpointer with: async with sidestream.Checkpointer(...) as checkpoints; without an event "
            "loop use: with sidestream.blocking.Checkpointer(...) as checkpoints"
        )

    def __exit__(self, *_: object) -> None:
        """Do nothing: ``__enter__`` raises. Without this method Python would raise its own error first."""

    def __repr__(self) -> str:
        return f"<Checkpointer of {self.url}>"

    async def open(self) -> Checkpointer:
        """Open it as ``async with`` does, for notebooks and for classes that call ``aclose()`` at their end.

        Returns:
            This object.

        Raises:
            InvalidOptionError: There is a checkpoint at the URL, and not a run.
            StorageError, DeadlineExceededError: The storage failed, or the time did not suffice.
        """
        return await self.__aenter__()

    async def __aenter__(self) -> Checkpointer:
        try:
            await self._enter()
        except asyncio.CancelledError:  # perhaps it came when it had been entered
            await run_shielded(self._release)
            raise
        return self

    @as_operation
    async def _enter(self) -> None:
        await self._reading.check()
        self._opened.enter()

    @as_operation
    async def _release(self) -> None:
        if self._opened.entered:
            self._opened.closed = True
            await self._opened.release()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, KeyboardInterrupt):  # the second Ctrl-C: asyncio turns the first one into a cancel
                self._saves.cancel()
            await self.aclose()
        except KeyboardInterrupt:  # it may come anywhere here, and the end of the program would wait for the saves
            self._saves.cancel()
            raise
        except Exception as failure:
            if error is None:
                raise
            for text in (str(failure), *getattr(failure, "__notes__", ())):
                error.add_note(f"an earlier save, or the pruning after it, failed too: {text}")
