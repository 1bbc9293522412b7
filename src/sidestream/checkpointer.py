"""``Checkpointer``: the checkpoints of one run, step by step."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

from ._group import GroupChoice
from ._load.api import LoadOptions, LoadReport
from ._load.checkpoint import Checkpoint, open_from
from ._load.open.manifest import read_metadata
from ._load.verify import VerifyReport, verify_at
from ._run.exports import Exports
from ._run.health import Health
from ._run.maintenance import Upkeep
from ._run.opened import Opened
from ._run.preemption import Preemption, Then
from ._run.pruning import Pruned, Pruner
from ._run.reading import Latest, Reading
from ._run.retention import KeepAll, Retention
from ._run.run import Run
from ._run.saves import SaveOptions, Saves
from ._run.watch import Watch
from ._runtime.public import public
from ._runtime.tasks import finish, running_loop
from ._save.api import Export, PendingSave, SavedAs, Stager
from ._staging import AsyncStager, Backing
from ._storage import FileSource, locate_run
from ._worker.client import choose_saver
from .errors import AsyncOnly, InvalidOption
from .options import (
    RANK_WAIT_S,
    Allowance,
    Digest,
    Dtypes,
    Durability,
    Fallback,
    Names,
    Overlap,
    Progress,
    SaverChoice,
    Storage,
    Trust,
    Verify,
    check_choice,
    check_count,
    check_seconds,
    check_step,
    check_timeout,
    check_verify,
    storage_of,
)

__all__ = ["Checkpointer"]


@public
class Checkpointer:
    """The checkpoints under one directory: ``step-100``, and ``step-100.g2`` where step 100 was saved again.

    Use it as ``async with``; it belongs to the loop that enters it. Any number of processes may have one on the same
    run, to save or to read.

    ``keep`` says which steps stay (``KeepLast(3) | KeepBest("loss")``); what it lets go is deleted after a save, when a
    newer step has been read back and is good, and nobody has a lease on it. ``in_flight`` saves may go on at once, each
    with staged memory of its own, which is used again and again; ``overlap`` says what becomes of one more. ``stager``
    replaces the stager that it would own. ``saver="process"`` keeps one process that writes, from the first save or
    ``prewarm()`` until it is closed. ``durability``, ``digest``, ``verify``, ``timeout_s``, ``rank_wait_s``,
    ``storage_options``, ``storage`` and ``process_group`` are as for ``save`` and ``load``. With
    several ranks all ranks call ``save`` and ``restore`` in the same order, and rank 0 chooses, leases and deletes. A
    lease ends ``lease_s`` after its holder has died; a save acquires one when it takes longer than a quarter of that.
    The files of a writer that was killed are deleted when its lease has ended or, if it had none, ``abandoned_after_s``
    after the last write to them.

    ``names`` and ``dtype`` are as for ``save``, for every save of this object. ``restore`` uses the same names, unless
    it is given others, and needs ``strict={"cast"}`` where a target has another dtype than the checkpoint.

    ``export``, a ``sidestream.HF`` or several, is written beside the saves of those steps that are multiples of
    ``exports_every``; ``pending.exports`` has the outcome (``docs/exports.md``). Of each export those of the
    ``exports_keep`` highest steps stay; None: all.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: Retention | None = None,
        overlap: Overlap = "wait",
        stager: AsyncStager | Stager | None = None,
        in_flight: int = 2,
        durability: Durability = "fsync",
        verify: Verify = "always",
        timeout_s: float = 600.0,
        rank_wait_s: float = RANK_WAIT_S,
        lease_s: float = 300.0,
        abandoned_after_s: float = 3600.0,
        digest: Digest | None = None,
        saver: SaverChoice = "thread",
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        process_group: GroupChoice = None,
        export: Export | Sequence[Export] | None = None,
        exports_every: int = 1,
        exports_keep: int | None = None,
        names: Names | None = None,
        dtype: Dtypes | None = None,
    ) -> None:
        check_count("in_flight", in_flight)
        check_choice("overlap", overlap, Overlap)
        check_choice("durability", durability, Durability)
        check_verify(verify)
        for seconds in (timeout_s, lease_s, abandoned_after_s):
            check_timeout(seconds)
        check_seconds("rank_wait_s", rank_wait_s)
        if digest is not None:
            check_choice("digest", digest, Digest)
        keep = KeepAll() if keep is None else keep
        if isinstance(keep, type) or not isinstance(keep, Retention):
            raise InvalidOption(f"keep={keep!r} has to be a policy, such as sidestream.KeepLast(3)")
        saved_as = SavedAs(names, dtype)
        store, self.url = locate_run(url, storage_of(storage_options, storage))
        own_saver = choose_saver(saver, store)
        self._exports = Exports(
            export, self.url, every=exports_every, keep=exports_keep, durability=durability, timeout_s=timeout_s
        )
        backing: Backing = "private" if own_saver[0] is None else "shared"
        own_stager = None
        if stager is None:
            stager = own_stager = AsyncStager(timeout_s=timeout_s, backing=backing)
        self._opened = Opened(self.url, own_stager, own_saver[0])
        self._run = Run(store, self.url, process_group, timeout_s=timeout_s, rank_wait_s=rank_wait_s, lease_s=lease_s)
        self._verify: Verify = verify
        self._reading = Reading(self._run)
        self._pruner = Pruner(
            store, self.url, keep, self._run.leases, durability, lease_s=lease_s, abandoned_after_s=abandoned_after_s
        )
        self._pruning = asyncio.Lock()
        self._upkeep = Upkeep(self._after_saves, f"sidestream retention {self.url}")
        options = SaveOptions(stager, own_saver, durability, digest, overlap, saved_as)
        self._saves = Saves(self._run, options, self._exports, self._upkeep, self._opened.check, in_flight=in_flight)
        self._preemption: Preemption | None = None

    # --- saving ---

    async def prewarm(self, state: Mapping[str, Any] | int | None = None) -> None:
        """Do now what the first save would have to: start the saver process, if there is one, map staging memory for
        ``state`` (or so many bytes), and, in a run of one process, plan. Nothing is copied. Raises ``SaverLost``,
        ``ArenaExhausted``; what is wrong with ``state`` is left to the save to say.

        Cancelling it leaves what has been done by then.
        """
        self._opened.check()
        await self._saves.prewarm(state)

    async def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        metadata: Mapping[str, Any] | None = None,
        planner: Any = None,
        files: Mapping[str, FileSource] | None = None,
    ) -> PendingSave:
        """Launch the copies of ``state`` and return; see ``async_save`` for the result. With ``overlap="wait"`` this
        waits for a free slot first, with the other policies for nothing but the listing of the run. Over several ranks
        it waits for the others to come to the call too, but with ``overlap="latest"`` for nothing at all: the copies
        are launched when all have called and rank 0 has a slot, unless all have called a newer save by then.

        ``metadata`` is plain data that can be read without the state: metrics for ``KeepBest``, a configuration.
        ``planner`` and ``files`` are as for ``save``; two saves that overlap need a planner each. A step
        that is committed already is saved as its next generation; the old one stays until that is verified. Raises
        ``Busy`` (``overlap="fail"``), and what an earlier save, or the deleting after it, failed with if nobody has
        heard of it; then it starts nothing. Cancelling before this returns starts nothing either.
        """
        self._opened.check()
        return await self._saves.save(state, step, metadata, planner, files)

    # --- reading ---

    async def restore(
        self,
        state: Mapping[str, Any],
        step: int | Latest | None = "latest",
        *,
        fallback: Fallback = "never",
        strict: Collection[Allowance] = (),
        names: Names | None = None,
        verify: Verify | None = None,
        atomic: bool = False,
        progress: Progress | None = None,
        timeout_s: float | None = None,
        allow: Iterable[type] = (),
        trust: Trust = "data",
        planner: Any = None,
    ) -> int | None:
        """Load the newest committed step, or ``step``, into ``state`` and return its number; None if there is none yet.

        As ``load``, in place, and with its keywords; ``verify``, ``timeout_s`` and ``names`` are those of the
        ``Checkpointer`` unless they are given here (``names={}``: none). ``restored`` has the report. While it is read
        the step is leased, so that nobody deletes it. Raises ``CheckpointNotFound`` for a ``step`` that is not there,
        ``Corrupt`` for one that is damaged.

        With ``fallback="older"`` the newest older one that is good is loaded instead of a damaged one (of the same step
        an older generation first); ``restored.passed_over`` lists what was damaged, ``health()`` too, and a warning is
        logged. ``Corrupt`` then means that none is good.
        """
        self._opened.check()
        options = LoadOptions.checked(
            strict=strict,
            allow=allow,
            verify=self._verify if verify is None else verify,
            atomic=atomic,
            progress=progress,
            timeout_s=self._run.timeout_s if timeout_s is None else timeout_s,
            trust=trust,
            planner=planner,
            names=self._saves.options.saved_as.names if names is None and planner is None else names,
        )
        return await self._reading.restore(state, step, fallback, options)

    @property
    def restored(self) -> LoadReport | None:
        """What the last ``restore`` did, and what its ``strict`` let pass; None before the first."""
        return self._reading.restored

    @asynccontextmanager
    async def open(
        self, step: int | Latest = "latest", *, allow: Iterable[type] = (), trust: Trust = "data"
    ) -> AsyncIterator[Checkpoint]:
        """``open_checkpoint`` of a step, with a lease on it: nobody deletes it within the ``async with``.

        Raises ``CheckpointNotFound``, ``Corrupt``, ``UnsupportedCheckpoint``.
        """
        self._opened.check()
        async with self._reading.step(step) as (found, location):
            if found.damage is not None:
                raise found.damage
            yield await open_from(
                location,
                verify=self._verify,
                timeout_s=self._run.timeout_s,
                allow=allow,
                trust=trust,
                run=self.url,
            )

    async def verify(self, step: int | Latest = "latest", *, progress: Progress | None = None) -> VerifyReport:
        """Read a step whole and compare it with all that is known about it, under a lease; see ``sidestream.verify``.

        Damage is reported and not raised: look at ``ok``. Raises ``CheckpointNotFound``, and what ``verify`` raises.
        """
        self._opened.check()
        async with self._reading.step(step) as (_, location):
            with self._run.time_limit():
                return await verify_at(location, progress, self.url)

    async def metadata(self, step: int | Latest = "latest") -> dict[str, Any]:
        """What was noted about a step when it was saved, and nothing else of it is read; empty if nothing was.

        Raises ``CheckpointNotFound``, ``Corrupt``.
        """
        self._opened.check()
        async with self._reading.step(step) as (found, _):
            if found.damage is not None:
                raise found.damage
            with self._run.time_limit():
                return await read_metadata(self._run.store, found.name)

    async def steps(self) -> list[int]:
        """The committed steps, in order. What is being written, or was left by a crash, is not among them, nor is a
        step whose marker is damaged."""
        self._opened.check()
        return [found.step for found in await self._reading.steps() if found.damage is None]

    async def latest(self) -> int | None:
        """The newest committed step, or None."""
        return max(await self.steps(), default=None)

    def watch(self, *, after: int | None = None, poll_s: float = 2.0) -> Watch:
        """``async for step in checkpoints.watch()``: the number of every step that is committed from now on, by any
        process; with ``after``, every one above it, those that are there already first.

        "Now" is when the first look at the run ends. A step may be gone again when it is loaded, if retention deletes
        it: then ``restore`` raises ``CheckpointNotFound``, and a newer one comes next.
        """
        self._opened.check()
        check_timeout(poll_s)
        if after is not None:
            check_step(after)
        return Watch(self._run.store, after=after, poll_s=poll_s, timeout_s=self._run.timeout_s)

    # --- looking after the run ---

    async def prune(self, *, dry_run: bool = False) -> Pruned:
        """Do now what is done after every save: delete what ``keep`` lets go and what dead writers left.

        With ``dry_run`` nothing is deleted, and nothing read back: ``deleted`` has what would go if the newest step
        that stays proves to be good. Raises what the storage raises; what was deleted until then is deleted. A cancel
        leaves no step half visible.
        """
        self._opened.check()
        if not self._run.leads:
            return Pruned()
        if dry_run:
            async with self._pruning:
                with self._run.time_limit():
                    return await self._pruner.preview(self._saves.protected)
        return await self._prune()

    def health(self) -> Health:
        """How the run is doing, as far as this ``Checkpointer`` knows."""
        saved = self._saves.last
        return Health(
            in_flight=self._saves.in_flight,
            last_saved=None if saved is None else saved[0],
            since_saved_s=None if saved is None else time.monotonic() - saved[1],
            failures=tuple(f"{type(error).__name__}: {error}" for error in self._saves.failures),
            retention=None if self._upkeep.error is None else str(self._upkeep.error),
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
        """When one of ``signals`` (``SIGTERM``) comes: finish the saves in flight, save once more, and end.

        ``save`` is called on the loop and returns a state and its step, or None if there is nothing new; without it
        only what is in flight is finished. After ``grace_s`` seconds, or when the signal comes again, the end comes
        whatever has been done. ``then`` says how: ``"exit"`` raises ``SystemExit(exit_code)`` out of the loop (128 +
        the signal's number if not given), ``"signal"`` lets the signal kill the process, ``"stay"`` leaves the end to
        the program, which looks at ``preempted``. A failure is logged, and the end comes all the same.

        Raises ``InvalidOption`` outside of the main thread. Closing the ``Checkpointer`` gives the signals back.
        """
        self._opened.check()
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
                await (await self._saves.save(state, step, promised=True))
        except Exception:
            await self._saves.ended()
            raise
        await self._saves.ended()

    async def _after_saves(self) -> Exception | None:
        await self._prune()
        return next(iter(self._pruner.damaged.values()), None)

    async def _prune(self) -> Pruned:
        async with self._pruning:
            with self._run.time_limit():
                return await self._pruner.run(self._saves.protected)

    # --- its life ---

    async def aclose(self) -> None:
        """Wait for the saves in flight and for the deleting after them, and free the staging memory. Raises the error
        of a save that nobody awaited, or of the deleting.

        Cancelling it cancels those saves, and waits until they have cleaned up.
        """
        if self._opened.closed:
            await self._saves.ended()
            return
        self._opened.closed = True
        try:
            await self._all_ended()
            if self._preemption is not None:
                await self._preemption.ended()  # its last save may have come meanwhile
                await self._all_ended()
        except asyncio.CancelledError:
            self._saves.cancel()
            await finish(self._stop)
            raise
        finally:
            if self._preemption is not None:
                self._preemption.uninstall()
            await self._opened.release()
        self._saves.raise_unheard()

    async def _all_ended(self) -> None:
        await self._saves.ended()
        await self._exports.ended()
        await self._upkeep.ended()

    async def _stop(self) -> None:
        await self._saves.ended()
        await self._exports.stop()
        await self._upkeep.stop()

    def __enter__(self) -> NoReturn:
        raise AsyncOnly(
            "enter a Checkpointer with: async with sidestream.Checkpointer(...) as checkpoints; without an event "
            "loop use: with sidestream.blocking.Checkpointer(...) as checkpoints"
        )

    def __exit__(self, *_: object) -> None:
        """Never called, because ``__enter__`` raises. Without this method Python would raise its own error first."""

    async def __aenter__(self) -> Checkpointer:
        loop = running_loop("Checkpointer")
        await self._reading.check()
        self._opened.enter(loop)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):  # asyncio makes a cancel of the first Ctrl-C: this is the second
            self._saves.cancel()
        try:
            await self.aclose()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"besides, a save or the deleting after it failed, and nobody had heard of it: {failure}")
