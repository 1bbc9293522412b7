"""``save`` and ``async_save``: plan, stage, write, commit."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .._format.records import Node
from .._group import GroupChoice, Member, Operation, deadline_of, group_of
from .._layout.metadata import encode_metadata
from .._layout.save_layout import SavePlan, plan_save
from .._layout.values import copy_value
from .._runtime.caller import by_caller
from .._runtime.public import public
from .._runtime.tasks import finish, running_loop
from .._runtime.threads import Deadline, run_sliced
from .._staging import AsyncStager, Captured, PlanCache, capture
from .._storage import FileSource, Location, check_sources, locate_directory
from .._worker.client import Saver, choose_worker
from ..errors import InvalidOptionError
from ..options import (
    RANK_WAIT_S,
    Digest,
    Dtypes,
    Durability,
    Names,
    Storage,
    WriterChoice,
    check_choice,
    check_seconds,
    check_timeout,
    storage_of,
)
from .group import FailedSave, Group, planning_of
from .layouts import AgreedLayout, NativeLayout
from .operation import SaveOperation, Solo
from .order import SaveOrder
from .pending import PendingSave, SaveInfo, SaveWork
from .saved_as import AS_IT_IS, SavedAs
from .sinks import Export, PendingExport, all_ended, exports_in, sinks_of
from .stage import LaidOutStage
from .writer import LiveWriter, Stager

__all__ = ["Stager", "async_save", "plan_alone", "save", "start_save", "start_together"]

_STREAM_BYTES = 256 << 20


@public
async def save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | Stager | None = None,
    snapshot: bool = True,
    durability: Durability = "fsync",
    metadata: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    rank_wait_s: float = RANK_WAIT_S,
    digest: Digest | None = None,
    saver: WriterChoice = "thread",
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    process_group: GroupChoice = None,
    planner: Any = None,
    overwrite: bool = False,
    export: Export | Sequence[Export] | None = None,
    files: Mapping[str, FileSource] | None = None,
    names: Names | None = None,
    dtype: Dtypes | None = None,
) -> SaveInfo:
    """Save ``state`` to the new directory or prefix ``url``; when this returns the checkpoint is visible and durable.

    ``state`` is what DCP takes: nested dicts and lists of tensors, plain values, and objects with ``state_dict()``.
    What is saved is what they hold at the call, provided that no tensor changes before it is staged (``async_save``
    tells when that is). ``stager`` brings warm memory from save to save; without one, memory is mapped for this save
    alone. ``streaming=True`` is for weights that nobody changes while they are saved, and for hosts with less memory
    than the state has: it passes through 256 MiB of memory, and ``staged`` is done when nearly everything is written.
    ``durability="flush"`` leaves out the syncs. ``metadata`` is a mapping of plain data (metrics, configuration) that
    can be read without the state; stock DCP ignores it. ``digest="blake3"`` keeps a cryptographic digest of each block
    beside its checksum (extra ``digest``). ``saver`` says who writes: threads of this process, or a process of its own,
    which leaves the interpreter to the trainer (``WriterChoice``). The whole save has ``timeout_s``.

    ``url`` is a path, or what fsspec understands: ``s3://``, ``gs://``, ``az://``, ``memory://`` and so on, with
    ``storage_options`` as fsspec users write them. ``storage``, a ``sidestream.Storage``, takes their place if more is
    needed: an fsspec file system that has its options already, a store of your own, the settings of the requests.

    Where ``torch.distributed`` is initialized this is a call of all ranks together, or of those in ``process_group``,
    each with its own part of the state (``docs/ranks.md``); ``process_group="alone"`` saves from this process only.
    Then everything that any rank raises becomes ``RankFailuresError`` on all of them. ``rank_wait_s`` is how long a
    rank waits for the others to make the call; after 5 s it logs a warning that names the ranks that have not.

    ``planner``, a ``SavePlanner`` of torch, decides what is saved under which name (``docs/ranks.md``). It is asked in
    a thread, about the staged copy; then the checkpoint is one that DCP's planning has made, string keys and all.

    ``overwrite=True`` replaces a checkpoint: readers find the old one or the new one, never neither. With several ranks
    all give it. A directory that is not a checkpoint is a ``CheckpointExistsError`` as before. On object storage it
    needs puts on a condition, and ``InvalidOptionError`` is raised without them; of several saves at the same time one
    succeeds, the others raise ``CheckpointExistsError``.

    ``files`` are sidecar files that are committed with the checkpoint: by name their content, or the path of a regular
    file of this machine, of 64 MiB at most each. Paths are read before ``staged`` is done. ``Checkpoint.file`` returns
    them. With several ranks those of rank 0 count.

    ``names``: the FQN in the checkpoint of each FQN in the state, as a function or a mapping (``Names``); None leaves
    the entry out. ``dtype``: what floating-point tensors become while they are staged, or patterns of FQNs in the
    checkpoint and what those become (``Dtypes``). A function is called in a thread. Neither goes with a ``planner``,
    or with a ``stager`` that is not an ``AsyncStager``.

    ``export``, a ``sidestream.HF`` or several, is written beside the checkpoint (``docs/exports.md``). This call waits
    for it; ``SaveInfo.exports`` has its report, or the error that it failed with, which does not fail the save.

    Raises ``UnsafeObjectError``, ``UnsupportedTensorError``, ``KeyCollisionError``, ``InvalidOptionError``,
    ``MissingExtraError`` before anything is written, ``CheckpointExistsError`` if the target is not empty, and
    ``NoSpaceError``, ``AccessDeniedError``, ``StorageError``, ``ArenaExhaustedError``, ``WriterProcessError``,
    ``PlannerError``, ``DeadlineExceededError``: then nothing is visible, what was written has been removed, and older
    checkpoints are untouched. ``NotDurableError`` and ``OutcomeUnknownError`` tell of a commit that was sent and did
    not end well. Cancelling leaves nothing behind either, unless the commit had been sent: then it is finished, and the
    checkpoint is there.
    """
    pending = async_save(
        state,
        url,
        stager=stager,
        snapshot=snapshot,
        durability=durability,
        metadata=metadata,
        timeout_s=timeout_s,
        rank_wait_s=rank_wait_s,
        digest=digest,
        saver=saver,
        storage_options=storage_options,
        storage=storage,
        process_group=process_group,
        planner=planner,
        overwrite=overwrite,
        export=export,
        files=files,
        names=names,
        dtype=dtype,
    )
    try:
        info = await pending
        await all_ended(pending.exports)
    except (Exception, asyncio.CancelledError):
        for one in pending.exports:
            one.cancel()
        pending.cancel()
        await finish(pending.ended)
        await finish(partial(all_ended, pending.exports))
        raise
    return replace(info, exports=tuple(one.report_or_error() for one in pending.exports))


@public
def async_save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | Stager | None = None,
    snapshot: bool = True,
    durability: Durability = "fsync",
    metadata: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    rank_wait_s: float = RANK_WAIT_S,
    digest: Digest | None = None,
    saver: WriterChoice = "thread",
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    process_group: GroupChoice = None,
    planner: Any = None,
    overwrite: bool = False,
    export: Export | Sequence[Export] | None = None,
    files: Mapping[str, FileSource] | None = None,
    names: Names | None = None,
    dtype: Dtypes | None = None,
) -> PendingSave:
    """Start what ``save`` does and return at once. Needs a running event loop.

    ``await pending.staged`` before the tensors change, ``await pending`` for the ``SaveInfo``. Plain values are copied
    here and now. Raises what is wrong with ``url`` and options at once; the rest is raised by ``pending``: credentials
    that cannot be found, and what is wrong with a tensor or value of ``state``, before anything has been written.
    """
    running_loop("async_save")
    member = group_of(process_group)
    wanted = exports_in(export)
    exports: list[PendingExport] = []

    def start(operation: Operation | None) -> SaveOperation:
        if not snapshot and stager is not None:
            raise InvalidOptionError(
                "streaming=True passes through memory of its own: leave out stager=, or give that one a budget"
            )
        check_seconds("rank_wait_s", rank_wait_s)
        saved_as = SavedAs(names, dtype)
        location = locate_directory(url, storage_of(storage_options, storage))
        if overwrite:
            location.store.check_replaces()
        sinks = sinks_of(wanted, location.url, step=None, durability=durability)
        if operation is None or operation.rank == 0:
            exports.extend(map(PendingExport, sinks))
        return start_save(
            state,
            location,
            stager=stager,
            durability=durability,
            timeout_s=timeout_s,
            budget_bytes=None if snapshot else _STREAM_BYTES,
            metadata=encode_metadata(metadata),
            digest=digest,
            operation=operation,
            member=member,
            saver=choose_worker(saver, location.store),
            planner=planner,
            exports=exports,
            overwrite=overwrite,
            files=files,
            saved_as=saved_as,
        )

    if member is None or member.group.world == 1:
        return PendingSave(start(None), tuple(exports))
    operation = member.begin("save", deadline_of(timeout_s), rank_wait_s)
    work = start_together(start, operation, str(url))
    return PendingSave(work, tuple(exports))


def start_together(start: Callable[[Operation], SaveWork], operation: Operation, url: str) -> SaveWork:
    """What keeps this rank from starting is told to the others, and raised by all alike."""
    try:
        return start(operation)
    except Exception as error:
        return FailedSave(operation, url, error)


@by_caller
def start_save(
    state: Mapping[str, Any],
    location: Location,
    *,
    stager: AsyncStager | Stager | None,
    durability: Durability,
    timeout_s: float,
    step: int | None = None,
    generation: int = 1,
    budget_bytes: int | None = None,
    metadata: Node = None,
    digest: Digest | None = None,
    saver: tuple[Saver | None, bool] = (None, False),
    operation: Operation | None = None,
    member: Member | None = None,
    planner: Any = None,
    exports: Sequence[PendingExport] = (),
    overwrite: bool = False,
    files: Mapping[str, FileSource] | None = None,
    saved_as: SavedAs = AS_IT_IS,
) -> SaveOperation:
    """Launch the copies of a save to a resolved location; ``step`` and ``generation`` go into the marker.

    Runs in the thread of a blocking call: copies are ordered after the work that was enqueued on its current streams.
    ``budget_bytes`` bounds the memory of a save without a ``stager``. Whoever gets the result runs it, or abandons it.

    ``exports`` read the snapshot if one process saves without a planner; otherwise rank 0 exports the checkpoint.

    ``operation`` is there where several ranks save. A ``member`` alone in its group saves as any process does, unless
    it has tensors that only a group can describe.
    """
    check_choice("durability", durability, Durability)
    check_timeout(timeout_s)
    if digest is not None:
        check_choice("digest", digest, Digest)
    deadline = Deadline.after(timeout_s)
    own = stager is None or isinstance(stager, AsyncStager)
    saved_as.check(planner=planner is not None, own=own)
    captured = capture(state, copy_value) if own and planner is None else None
    if operation is None and member is not None and captured is not None and captured.sharded:
        operation = member.begin("save", deadline)
    order = SaveOrder(
        location,
        durability,
        deadline,
        step,
        generation,
        budget_bytes,
        digest,
        metadata,
        operation,
        *saver,
        kind="replacement" if overwrite else "directory",
        files=check_sources(files) if operation is None or operation.rank == 0 else {},
    )
    if planner is not None:
        from .planner.save import start_planned  # imports DCP, as the planner has done

        planned = start_planned(order, state, planner, stager)
        planned.exports = exports
        return planned
    if operation is None:
        lay_out = saved_as.applied(plan_alone, location.url, others=False)
        stage = LaidOutStage(order, state, captured, stager, lay_out, len(exports))
        return SaveOperation(
            order=order,
            writer=LiveWriter(order, stage),
            layout=NativeLayout(order),
            coordinator=Solo(order),
            exports=exports,
            snapshots=stage.snapshots,
        )
    planning = planning_of(order, operation)
    lay_out = saved_as.applied(planning.lay_out, location.url, others=True)
    writer = LiveWriter(order, LaidOutStage(order, state, captured, stager, lay_out))
    group = Group(order, operation, planning)
    layout = AgreedLayout(order, planning)
    return SaveOperation(order=order, writer=writer, layout=layout, coordinator=group, exports=exports)


def plan_alone(plans: PlanCache, budget_bytes: int, captured: Captured) -> SavePlan:
    """Plan the save of one process, in a thread."""
    return run_sliced(plan_save(plans, budget_bytes, captured))
