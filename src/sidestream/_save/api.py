"""The functions ``save`` and ``async_save``, and the start of every other save."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from .._format.checksum import digest_of
from .._format.records import Node
from .._group import Member, Operation, deadline_of, group_of
from .._layout.names import renamed_state
from .._layout.save_layout import SavePlan
from .._layout.values import copy_value, encode_metadata
from .._runtime.caller import run_by_caller
from .._runtime.public import public
from .._runtime.tasks import run_shielded, running_loop, runs_in_trio
from .._runtime.threads import Deadline, io_threads
from .._runtime.waits import WaitReasons, caller_waited
from .._staging import AsyncStager, Captured, capture
from .._storage import Location, check_sources, locate_directory
from .._worker.client import Worker, choose_worker
from ..errors import InvalidOptionError, KeyCollisionError, UnsafeObjectError, UnsupportedTensorError
from ..options import FileSource, GroupChoice, SaveOptions, Storage, options_of, storage_of
from .group import FailedSave, Group
from .layouts import AgreedLayout, NativeLayout
from .lifecycle import Lifecycle
from .operation import SaveOperation, Solo
from .pending import PendingSave, SaveInfo, SaveProgress, SaveWork
from .running import Save, SaveOrder
from .sinks import (
    Export,
    PendingExport,
    PendingOutcome,
    PendingVersion,
    Publishes,
    all_ended,
    exports_in,
    publication,
    sinks_of,
)
from .writer import LiveWriter

__all__ = [
    "STREAM_BYTES",
    "Export",
    "Lifecycle",
    "LiveWriter",
    "PendingExport",
    "PendingSave",
    "PendingVersion",
    "Publishes",
    "SaveInfo",
    "SaveProgress",
    "SaveRequest",
    "SaveWork",
    "Worker",
    "async_save",
    "check_stager",
    "completed",
    "prewarm",
    "save",
]

STREAM_BYTES = 256 << 20


@public
async def save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | None = None,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, FileSource] | None = None,
    export: Export | Sequence[Export] | None = None,
    publish: Publishes | None = None,
    overwrite: bool = False,
    process_group: GroupChoice = None,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    options: SaveOptions | None = None,
) -> SaveInfo:
    """Save ``state`` to ``url``, and return when the checkpoint is visible and durable.

    Where ``torch.distributed`` is initialized this is a call of all ranks together, each with its own part of the state
    (``docs/ranks.md``). An error of one rank becomes the same ``RankFailuresError`` on all of them.

    A cancel leaves nothing behind and raises ``CancelledError``. If the commit has been sent by then, it is finished,
    and the checkpoint is there.

    Args:
        state: What DCP takes: nested dicts and lists of tensors, plain values, and objects with ``state_dict()``. The
            checkpoint has what they hold at the call, provided that no tensor changes before it is staged
            (``async_save`` says when that is).
        url: The new directory or prefix: a path, or what fsspec understands (``s3://``, ``gs://``, ``az://``,
            ``memory://`` and so on).
        stager: A stager whose memory is used from save to save. None: memory that the process keeps for such saves
            (``set_cache_bytes``).
        metadata: Plain data that can be read without the state, such as metrics or a configuration. Stock DCP ignores
            it.
        files: Sidecar files that are committed with the checkpoint: by name their content, or the path of a regular
            file of this machine; 64 MiB at most each. Paths are read before ``staged`` is done. ``Checkpoint.file``
            returns them. With several ranks those of rank 0 count.
        export: A ``sidestream.HF``, or several, to write beside the checkpoint (``docs/exports.md``). This call waits
            for them. An export that fails does not fail the save.
        publish: A version of weights to publish from the same snapshot: ``publisher.version(120)``
            (``docs/live_weights.md``). This call waits for it. If it fails, the save does not.
        overwrite: Replace the checkpoint that is at ``url``. At any time a reader finds the old one or the new one. Of
            several such saves at the same time each succeeds in a local directory, and the last one stays. On object
            storage one succeeds, and conditional puts are needed. Not possible with ``Storage(commit="marker")``.
        process_group: The ranks that save together (``options.GroupChoice``); ``"alone"`` saves from this process only.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.
        options: How the save is done: durability, writer, names, dtypes, limits. None: ``SaveOptions()``.

    Returns:
        What was committed. ``SaveInfo.exports`` has for each export its report, or the error that it failed with, and
        ``SaveInfo.published`` the version.

    Raises:
        InvalidOptionError, MissingExtraError, KeyCollisionError, UnsafeObjectError, UnsupportedTensorError: The call or
            the state is wrong; nothing was written.
        CheckpointExistsError: The target is not empty, or it is not a checkpoint that ``overwrite=True`` could replace;
            or another save was committed first.
        NoSpaceError, AccessDeniedError, StorageError: The storage failed. Nothing is visible, what was written has been
            removed, and older checkpoints are unchanged.
        ArenaExhaustedError, OutOfMemoryError, DeadlineExceededError, WriterProcessError: The memory, the time or the
            writer process failed, with the same result.
        NotDurableError: The checkpoint is visible, but a sync failed.
        OutcomeUnknownError: The commit was sent, and its result could not be read back.
        RankFailuresError: A rank has failed.
    """
    running_loop("save")
    pending = await run_by_caller(
        async_save,
        state,
        url,
        stager=stager,
        metadata=metadata,
        files=files,
        export=export,
        publish=publish,
        overwrite=overwrite,
        process_group=process_group,
        storage_options=storage_options,
        storage=storage,
        options=options,
    )
    return await completed(pending)


async def completed(pending: PendingSave) -> SaveInfo:
    """Wait for a save and all its outcomes. A cancel cancels all of them, and waits until they have cleaned up."""
    # The outcomes come after the save, because they may need the committed checkpoint. A cancel of this call has to end
    # both: nothing else waits for them.
    try:
        info = await pending
        await all_ended(pending.outcomes)
    except (Exception, asyncio.CancelledError):
        for one in pending.outcomes:
            one.cancel()
        pending.cancel()
        await run_shielded(pending.ended)
        await run_shielded(all_ended, pending.outcomes)
        raise
    published = [one.report_or_error() for one in pending.outcomes if isinstance(one, PendingVersion)]
    exports = tuple(one.report_or_error() for one in pending.exports)
    return replace(info, exports=exports, published=published[0] if published else None)


@public
def async_save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | None = None,
    metadata: Mapping[str, Any] | None = None,
    files: Mapping[str, FileSource] | None = None,
    export: Export | Sequence[Export] | None = None,
    publish: Publishes | None = None,
    overwrite: bool = False,
    process_group: GroupChoice = None,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    options: SaveOptions | None = None,
) -> PendingSave:
    """Start what ``save`` does, and return at once.

    Await ``pending.staged`` before the tensors change, and ``pending`` for the ``SaveInfo``. Plain values are copied
    during this call. It raises what is wrong with ``url`` and the options. All other errors of ``save`` are raised by
    ``pending``, also for credentials that cannot be found and for a tensor or value of ``state`` that cannot be saved;
    nothing has been written then.

    Args:
        state: The state, as for ``save``.
        url: The new directory or prefix, as for ``save``.
        stager: A stager whose memory is used from save to save.
        metadata: Plain data that can be read without the state.
        files: Sidecar files, by name: their content or their path.
        export: A ``sidestream.HF``, or several. ``pending.exports`` has their outcomes.
        publish: As for ``save``. ``pending.published`` has the outcome.
        overwrite: Replace the checkpoint that is at ``url``, as for ``save``.
        process_group: The ranks that save together (``options.GroupChoice``).
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.
        options: How the save is done. None: ``SaveOptions()``.

    Returns:
        The save in progress. It continues if it is not awaited, and the program ends when it has ended. If it fails and
        its error is not retrieved, the error is logged.

    Raises:
        InvalidOptionError, MissingExtraError: The call is wrong; nothing was started.
        WrongLoopError: This code runs in trio.
    """
    # What is wrong with the call is raised here, and what is wrong with the state by the pending: a look at every
    # tensor takes about ten times as long as taking references to them, and this call is on the loop. Nothing is
    # written before the look.
    began = time.monotonic()
    if runs_in_trio():
        running_loop("async_save")  # raises: what this returns cannot be awaited there
    member, operation = group_of(process_group), None
    if member is not None and member.group.world > 1:
        # ``options`` may be wrong, which is raised on all ranks. The operation has to begin before that, with defaults.
        limits = options if isinstance(options, SaveOptions) else SaveOptions()
        operation = member.begin("save", deadline_of(limits.timeout_s), limits.rank_wait_s)
    outcomes: tuple[PendingOutcome, ...] = ()
    writer: LiveWriter | None = None
    pending: PendingSave | None = None
    try:
        chosen, wanted = options_of(options, SaveOptions), exports_in(export)
        if chosen.streaming and stager is not None:
            raise InvalidOptionError(
                "streaming=True passes through memory of its own: leave out stager=, or give that one a budget"
            )
        location = locate_directory(url, storage_of(storage_options, storage))
        if overwrite:
            location.store.check_replaces()
        sinks = sinks_of(wanted, location.url, step=None, durability=chosen.durability)
        outcomes = (*map(PendingExport, sinks), *publication(publish, None, metadata))
        request = SaveRequest(
            state=state,
            options=chosen,
            stager=stager,
            worker=choose_worker(chosen.writer, location.store),
            metadata=metadata,
            files=files,
            outcomes=outcomes,
            overwrite=overwrite,
        )
        writer = request.prepare(operation, member)
        work = request.launch(writer, location, operation=operation, member=member)
        pending = PendingSave(work, outcomes)
        caller_waited("call", began, writer.wait_if_eager(), work.context)
        return pending
    except BaseException as error:  # also one that a signal handler raises
        if pending is not None:
            pending.cancel()  # the caller does not get the handle
            raise
        if writer is not None:
            writer.cancel()
        if operation is None or not isinstance(error, Exception):
            for one in outcomes:
                one.drop()
            raise
        # Not a variable: the error refers to this frame, and must not be in a cycle with what refers to it.
        return PendingSave(FailedSave(operation, str(url), error), outcomes)


def check_stager(stager: object) -> None:
    """Raise ``InvalidOptionError`` unless ``stager`` is None or an ``AsyncStager``."""
    if stager is not None and not isinstance(stager, AsyncStager):
        raise InvalidOptionError(
            f"stager={stager!r} has to be a sidestream.AsyncStager; other stagers are for DCP's own "
            "dcp.async_save(async_stager=)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What a save was asked for, apart from where it goes and with whom.

    ``outcomes`` read the snapshot if one process saves. Otherwise they read the checkpoint, and the ranks divide the
    files of the exports.
    """

    state: Mapping[str, Any]
    options: SaveOptions
    stager: AsyncStager | None
    worker: tuple[Worker | None, bool] = (None, False)
    step: int | None = None
    metadata: InitVar[Mapping[str, Any] | None]
    files: InitVar[Mapping[str, FileSource] | None] = None
    outcomes: tuple[PendingOutcome, ...] = ()
    overwrite: bool = False
    encoded_metadata: Node = field(init=False)
    sources: Mapping[str, FileSource] = field(init=False)

    def __post_init__(self, metadata: Mapping[str, Any] | None, files: Mapping[str, FileSource] | None) -> None:
        # Now, and not when the save begins: it may wait for a slot, and the caller may change its dict meanwhile.
        object.__setattr__(self, "encoded_metadata", encode_metadata(metadata))
        object.__setattr__(self, "sources", check_sources(files))

    def prepare(
        self,
        operation: Operation | None = None,
        member: Member | None = None,
        reasons: WaitReasons | None = None,
    ) -> LiveWriter:
        """Return the writer of the state as it is now, for ``launch``. Called in the thread of the call. ``reasons``
        are those for which the save waits before it begins."""
        options = self.options
        check_stager(self.stager)
        if options.digest is not None:
            digest_of(options.digest)  # raises MissingExtraError where it is not installed
        # Plain values are copied here, during the call: afterwards the caller may change them. Of tensors it takes only
        # references.
        captured = capture(self.state, copy_value, alone=operation is None)
        together = operation is not None or (member is not None and captured.sharded)
        return LiveWriter(
            captured,
            self.stager,
            Deadline.after(options.timeout_s),
            budget_bytes=STREAM_BYTES if options.streaming else None,
            shared=self.worker[0] is not None,
            readers=0 if together else len(self.outcomes),
            reasons=reasons,
        )

    def launch(
        self,
        writer: LiveWriter,
        location: Location,
        generation: int = 1,
        *,
        operation: Operation | None = None,
        member: Member | None = None,
    ) -> SaveOperation:
        """Launch the copies of a save to ``location``. The caller runs the result.

        ``operation`` is set if several ranks save. A ``member`` that is the only rank of its group saves like a process
        without a group, unless it has tensors that only a group can describe.
        """
        options, outcomes = self.options, self.outcomes
        begun = None
        try:
            deadline = Deadline.after(options.timeout_s)
            # A group of one rank saves like a process without a group, except that a sharded tensor has offsets in a
            # global shape. Only the layout of a group describes these.
            if operation is None and member is not None and writer.sharded:
                operation = begun = member.begin("save", deadline)
            order = SaveOrder(
                durability=options.durability,
                step=self.step,
                generation=generation,
                digest=options.digest,
                metadata=self.encoded_metadata,
                # Only rank 0 commits sidecar files, so a path need not exist on the other ranks.
                files=self.sources if operation is None or operation.rank == 0 else {},
                exports=tuple(one.url for one in outcomes if isinstance(one, PendingExport)),
            )
            worker, fall_back = self.worker
            running = Save(
                location,
                deadline,
                order,
                kind="replacement" if self.overwrite else "directory",
                operation=operation,
                worker=worker,
                fall_back=fall_back,
            )
            layout: NativeLayout | AgreedLayout
            coordinator: Solo | Group
            if operation is None:
                layout = NativeLayout(running, options)
                coordinator = Solo(running, layout)
            else:
                layout = AgreedLayout(running, options)
                coordinator = Group(running, layout)
            writer.launch(running, layout, coordinator.finish)
            return SaveOperation(
                save=running,
                writer=writer,
                coordinator=coordinator,
                outcomes=outcomes,
                snapshots=writer.snapshots,
            )
        except BaseException as error:
            writer.cancel()
            if begun is not None:  # otherwise it stays open until its deadline
                begun.report(error)
            raise


async def prewarm(
    state: Mapping[str, Any] | int | None,
    stager: AsyncStager,
    worker: tuple[Worker | None, bool],
    options: SaveOptions | None,
    url: str,
) -> None:
    """Do the preparations of the first save of ``state``, or of a state with this number of bytes. Start the writer
    process, map staging memory and, if there are ``options``, plan the save by one process below ``url``."""
    process, falls_back = worker
    # With ``writer="auto"`` threads write where no process starts, so a failure here is not an error.
    if process is not None and falls_back:
        await io_threads().run(process.start)
    elif process is not None:
        await process.up()
    if state is None:
        return
    if isinstance(state, int):
        await stager.reserve(state)
    else:
        await _prewarm_for(stager, state, options, url)
    if process is not None:
        await process.share(stager.shared_memory())


async def _prewarm_for(stager: AsyncStager, state: Mapping[str, Any], options: SaveOptions | None, url: str) -> None:
    try:
        captured = capture(state, copy_value)
    except UnsafeObjectError:  # raised by the save
        await stager.prewarm(state)
        return
    await stager.prewarm_for(captured)
    if options is not None and not captured.sharded:
        with suppress(InvalidOptionError, KeyCollisionError, UnsafeObjectError, UnsupportedTensorError):  # as above
            await io_threads().run(_plan_ahead, stager, captured, options, url)


def _plan_ahead(stager: AsyncStager, captured: Captured, options: SaveOptions, url: str) -> None:
    """Make the plan that ``NativeLayout.lay_out`` finds in the stager's cache. Called in a thread."""
    captured = renamed_state(captured, options.names, options.dtype, url, others=False)
    SavePlan.of(stager.plans, stager.budget_bytes, captured)
