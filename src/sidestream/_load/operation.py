"""The function ``load``, and ``LoadOperation``: the course of every load, from opening the checkpoint to the report."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from .._engine.calls import in_operation
from .._format.records import Manifest
from .._group import Operation, Stopped, deadline_of, group_of, run_together, stoppable
from .._runtime.public import public
from .._runtime.tasks import run_shielded, running_loop
from .._runtime.threads import Deadline, io_threads, report, time_limit
from .._storage import Location, locate_by_caller
from ..errors import CorruptCheckpointError, SidestreamError, StorageNotSharedError, printable
from ..events import (
    LoadApplied,
    LoadContext,
    LoadEvent,
    LoadFailed,
    LoadOpened,
    LoadPlanned,
    LoadRead,
    LoadStarted,
    LoadVerified,
    ReadCall,
    emit,
)
from ..options import GroupChoice, LoadOptions, Storage, Tolerated, options_of, tolerance_of
from .report import LoadReport, LoadRequest, report_of
from .target import StateTarget

__all__ = ["LoadReport", "ReadCall"]  # that others take from here

E = TypeVar("E", bound=BaseException)

_NAMES_SHOWN = 20
_MOST_RESTARTS = 8
"""The limit of restarts in a group. Without it, ranks that do not share storage could start over for ever."""


class LoadLifecycle:
    """The phases of one load, or of another call that reads a checkpoint: their times in seconds since it began, and an
    event for each."""

    def __init__(self, load: LoadContext) -> None:
        self.seconds: dict[str, float] = {}
        self._load = load
        self._phase: Literal["open", "plan", "read", "apply"] = "open"
        self._began = time.monotonic()
        self._nbytes = 0
        self._open = False  # started, and not ended

    def started(self) -> None:
        self._open = True
        emit(LoadStarted(self._load))

    def opening(self) -> None:
        self._phase = "open"

    def opened(self, manifest: Manifest) -> None:
        known = replace(self._load, save_id=manifest.save_id)
        if manifest.step is not None:
            known = replace(known, step=manifest.step, generation=manifest.generation)
        self._load = known
        self._end("opened", "plan", LoadOpened(known))

    def planned(self) -> None:
        self._end("planned", "read", LoadPlanned(self._load))

    def read(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._end("read", "apply", LoadRead(self._load, nbytes))

    def verified(self, unverified: int) -> None:
        emit(LoadVerified(self._load, unverified))

    def applied(self) -> None:
        """Emit the success of a load, unless the load has ended before."""
        if self._open:
            self._open = False
            self.seconds["applied"] = time.monotonic() - self._began
            emit(LoadApplied(self._load, self._nbytes, MappingProxyType(dict(self.seconds))))

    def failed(self, error: BaseException, written: int) -> None:
        """Emit the failure of a load, unless the load has ended before or never started."""
        if isinstance(error, SidestreamError):
            error.about(phase=self._phase, url=self._load.url, step=self._load.step)
        if self._open:
            self._open = False
            emit(LoadFailed(self._load, self._phase, type(error).__name__, str(error), written))

    def _end(self, phase: str, following: Literal["plan", "read", "apply"], event: LoadEvent) -> None:
        self.seconds[phase] = time.monotonic() - self._began
        self._phase = following
        emit(event)


@asynccontextmanager
async def reading(operation: ReadCall, url: str, run: str | None = None) -> AsyncIterator[LoadLifecycle]:
    """Emit the start and the end of a call that reads the checkpoint at ``url`` and changes no state. The ``with``
    block emits the phases between them."""
    lifecycle = LoadLifecycle(LoadContext(operation, url, run=run))
    await report(lifecycle.started)
    try:
        yield lifecycle
    except BaseException as error:
        with suppress(asyncio.CancelledError):
            await report(lifecycle.failed, error, 0)
        raise
    await report(lifecycle.applied)


@dataclass(slots=True)
class LoadOperation:
    """One load, or the part of this rank in a load of a group. ``run`` may be called once."""

    url: str
    target: StateTarget
    request: LoadRequest
    lifecycle: LoadLifecycle
    together: Operation | None = None
    """Set for a load by several ranks together."""

    async def run(self) -> LoadReport:
        """Change the target. ``written`` of an error, and a note, list the tensors of the target that were written."""
        await report(self.lifecycle.started)
        try:
            return await self._run()
        except BaseException as raised:
            error = await self._failed(raised)
            try:
                if error is raised:
                    raise
                raise error from raised
            finally:
                del error  # which refers to this frame: it would be in a reference cycle
        finally:
            await self.target.aclose()

    async def _failed(self, raised: BaseException) -> BaseException:
        """Report the failure, and return the error to raise."""
        written = self.target.written()
        error = self._explained(raised, written)
        verdict = error
        if self.together is not None and isinstance(error, Exception):
            verdict = await self.together.failed(error)
        with suppress(asyncio.CancelledError):
            await report(self.lifecycle.failed, verdict, len(written))
        late = None if self.together is None else self.together.cancelled
        return error if late is None else self._explained(late, written)

    async def _run(self) -> LoadReport:
        target, lifecycle, together = self.target, self.lifecycle, self.together
        await target.call_state_dicts()
        # What is more than bytes (plain values, ``load_state_dict``) changes below, when every rank has read
        # everything. Until then only bytes of tensors may have changed, and with ``atomic=True`` not even those.
        manifest = await self._read()
        if together is not None:
            together.step = "hand over"
        # From here on the target changes as a whole. A cancel is raised afterwards, and the deadline of the load does
        # not end this. Only for the caller to run its code there is a limit, anew for each call.
        with time_limit(None):
            await run_shielded(target.apply)
        if together is not None:
            # Also after the change, so that no rank returns from a load that failed on another one.
            await together.agree("hand over")
        await report(lifecycle.applied)
        return await self._report(manifest)

    async def _read(self) -> Manifest:
        """Open, plan and read. Start over if files are missing or altered because another checkpoint has taken the
        place of the one that was opened. Ranks of a group start over together, so this returns when all ranks have
        read."""
        restarts = 0
        while True:
            # ``open``, ``plan`` and ``read`` are repeated. The objects are not asked again: their answers do not depend
            # on the checkpoint, and their code may run a collective, which all ranks would have to repeat.
            manifest = None
            self.lifecycle.opening()
            try:
                manifest = await stoppable(self.together, self.target.open())
                await self._read_opened(manifest)
            except (SidestreamError, FileNotFoundError, Stopped) as error:
                # An error of a file that is gone or altered has two causes: damage, or another save that has replaced
                # the checkpoint. The marker tells them apart, and is read only now, because it costs a request.
                if not await self._starts_over(error, restarts, opened=manifest is not None):
                    raise
            else:
                return manifest
            restarts += 1

    async def _read_opened(self, manifest: Manifest) -> None:
        target, lifecycle, together = self.target, self.lifecycle, self.together
        await report(lifecycle.opened, manifest)
        await stoppable(self.together, target.plan())
        await report(lifecycle.planned)
        if together is not None:
            together.step = "read"
        await stoppable(self.together, target.read())
        await report(lifecycle.read, target.nbytes)
        if self.request.options.verify == "always":
            await report(lifecycle.verified, len(target.unverified))
        if together is not None:
            await together.agree("read")  # before anything but the bytes of tensors changes

    async def _starts_over(self, error: Exception, restarts: int, *, opened: bool) -> bool:
        """Return whether the load starts over after ``error``, on all ranks. Waits until the other ranks have
        stopped."""
        together, lost = (
            self.together,
            opened and isinstance(error, (CorruptCheckpointError, FileNotFoundError, StorageNotSharedError)),
        )
        # Alone, there is no limit: each restart means that another save has been committed meanwhile. Ranks have one,
        # because ranks that do not share storage see another checkpoint in each round.
        if together is None:
            return lost and await self.target.replaced()
        replaced = lost and restarts < _MOST_RESTARTS and await self.target.replaced()
        # There are three cases for a rank. It wants to start over: it reports its error together with that. It fails
        # for a reason of its own: ``failed`` reports it, and waits for the verdict. Another rank has failed: this one
        # reports that it has stopped, and learns whether all start over. No rank is in the second round before all have
        # left the first.
        if not replaced and not together.stopping:
            return False
        return await together.starts_over(self._as_ours(error), wanted=replaced)

    async def _report(self, manifest: Manifest) -> LoadReport:
        target, digest = self.target, manifest.digest if self.request.options.verify == "always" else None
        with time_limit(None):  # the load has succeeded and must not fail any more
            loaded = await io_threads().run(target.finish)
        return report_of(self.url, manifest, digest, loaded, target.nbytes, target.unverified)

    def _explained(self, error: BaseException, written: tuple[str, ...]) -> BaseException:
        """Return the error to raise for ``error``. It lists the tensors of the target that were written."""
        if not isinstance(error, (Exception, asyncio.CancelledError)):
            return error
        if written:
            names = printable(", ".join(written[:_NAMES_SHOWN]))
            error.add_note(f"{len(written)} tensors of the target were written already: {names}")
        error = self._as_ours(error)
        if isinstance(error, (SidestreamError, Stopped)):
            error.written = written
        return error

    def _as_ours(self, error: E) -> E | CorruptCheckpointError:
        if isinstance(error, FileNotFoundError) and not isinstance(error, SidestreamError):
            return CorruptCheckpointError(f"{self.url}: {error.filename} is missing")
        return error


@public
async def load(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    strict: bool = True,
    allow_missing: Tolerated = (),
    allow_unexpected: Tolerated = (),
    allow_cast: Tolerated = (),
    process_group: GroupChoice = None,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Load the checkpoint at ``url`` into ``state``, in place: one of sidestream, or one that stock DCP wrote.

    Tensors of ``state`` are read into, and plain values are replaced in their dict or list. An object with
    ``load_state_dict`` gets everything that was saved below its key: tensors of its own ``state_dict()`` are read in
    place first, and those that it lacks (the moments of a fresh optimizer) come as new tensors. Both methods are called
    in the task of the caller; everything else happens in threads. Do not change the structure of ``state`` meanwhile.

    All differences between ``state`` and the checkpoint are found before anything is changed, and one error lists all
    that are not accepted.

    Where ``torch.distributed`` is initialized this is a call of all ranks together. Each reads what its own tensors
    need, and an error of one rank becomes the same ``RankFailuresError`` on all of them.

    After a failure or a cancel, tensors may have been overwritten; ``error.written`` lists them. With
    ``LoadOptions(atomic=True)`` a failure leaves ``state`` unchanged. A cancel that comes when everything has been read
    is raised after ``state`` has changed as a whole.

    Args:
        state: What ``save`` takes.
        url: A directory, prefix or single file that ``save``, stock DCP, ``torch.save`` or safetensors wrote;
            ``http(s)://`` can be read too.
        strict: False accepts missing and unexpected names, as in torch.
        allow_missing: Which names of ``state`` the checkpoint may lack: True, or glob patterns of FQNs. What is missing
            stays as it is in ``state``.
        allow_unexpected: Which names in the checkpoint ``state`` may lack, inside of its top-level keys.
        allow_cast: Which tensors may have another dtype in the checkpoint. They are converted.
        process_group: The ranks that load together (``options.GroupChoice``); ``"alone"`` loads into this process only.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.
        options: How the load is done: verification, names, limits, types. None: ``LoadOptions()``.

    Returns:
        What was loaded, and which differences were accepted.

    Raises:
        InvalidOptionError, MissingExtraError, KeyCollisionError: The call is wrong; nothing was changed.
        CheckpointNotFoundError: There is no committed checkpoint at ``url``.
        StateMismatchError: ``state`` and the checkpoint differ; nothing was changed. The subclasses
            ``MissingKeysError``, ``UnexpectedKeysError``, ``ShapeMismatchError``, ``DtypeMismatchError``,
            ``KindMismatchError`` and ``IncompleteTensorError`` are raised where all differences are of one kind.
        UnsafeObjectError: A value of another writer is more than data, and its type is not in ``safe_globals``.
        UnsupportedCheckpointError, UnsupportedTensorError: This version does not read that.
        CorruptCheckpointError: Bytes are missing or altered.
        LoadStateDictError: An object of the caller raised.
        StorageError, DeadlineExceededError, OutOfMemoryError: The storage, the time or the memory did not suffice.
        RankFailuresError: A rank has failed.
    """
    # The number of an operation of ranks is taken at the call, so that all ranks have the same order.
    running_loop("load")
    member = group_of(process_group)
    operation: Operation | None = None
    if member is not None and member.group.world > 1:
        limits = options if isinstance(options, LoadOptions) else LoadOptions()  # what is wrong is raised on all ranks
        operation = member.begin("load", deadline_of(limits.timeout_s), limits.rank_wait_s)

    async def prepared() -> tuple[Location, LoadRequest]:
        chosen = options_of(options, LoadOptions)
        request = LoadRequest(chosen, tolerance_of(strict, allow_missing, allow_unexpected, allow_cast))
        return await locate_by_caller(url, storage_options, storage), request

    # In a group everything that may be wrong about the call is checked inside of ``run``, so that the error of one rank
    # becomes that of all. A rank that raised before its operation began would leave the others waiting for it.
    async def run(operation: Operation) -> LoadReport:
        location, request = await prepared()
        return await load_from(location, state, request, LoadContext("load", location.url), operation)

    if operation is not None:
        return await in_operation(partial(run_together, run, operation), "load")
    location, request = await prepared()
    context = LoadContext("load", location.url)
    return await in_operation(partial(load_from, location, state, request, context), "load")


async def load_from(
    location: Location,
    state: Mapping[str, Any],
    request: LoadRequest,
    context: LoadContext,
    operation: Operation | None = None,
) -> LoadReport:
    """Load from a resolved location. ``context`` is for the events of the load. ``operation`` is set if several ranks
    load."""
    deadline = Deadline.after(request.options.timeout_s)
    if operation is not None:
        context = replace(context, rank=operation.rank, world=operation.world)
    target = StateTarget(location, state, request, operation)
    with time_limit(deadline):
        return await LoadOperation(location.url, target, request, LoadLifecycle(context), operation).run()
