"""The function ``load``, which loads a checkpoint into a live state dict in place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .._group import GroupChoice, Operation, deadline_of, group_of, run_together
from .._runtime.abandoned import registered
from .._runtime.public import public
from .._runtime.tasks import running_loop
from .._runtime.threads import Deadline, time_limit
from .._storage import Location, locate_directory
from ..events import LoadContext
from ..options import LoadOptions, Storage, Tolerated, options_of, storage_of, tolerance_of
from .operation import LoadLifecycle, LoadOperation, Target
from .report import LoadReport, LoadRequest, PassedOver
from .target import StateTarget

__all__ = ["LoadReport", "LoadRequest", "PassedOver", "load", "load_from"]


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
    on the event loop; everything else happens in threads. Do not change the structure of ``state`` until this returns.

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
        PlannerError, LoadStateDictError: The planner or an object of the caller raised.
        StorageError, DeadlineExceededError, OutOfMemoryError: The storage, the time or the memory did not suffice.
        RankFailuresError: A rank has failed.
    """
    running_loop("load")
    options = options_of(options, LoadOptions)
    member = group_of(process_group)

    async def run(operation: Operation | None) -> LoadReport:
        request = LoadRequest(options, tolerance_of(strict, allow_missing, allow_unexpected, allow_cast))
        location = locate_directory(url, storage_of(storage_options, storage))
        return await load_from(location, state, request, LoadContext("load", location.url), operation)

    if member is None or member.group.world == 1:
        return await run(None)
    return await run_together(run, member.begin("load", deadline_of(options.timeout_s), options.rank_wait_s))


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
    changed = "its threads have stopped; tensors may have been changed"
    if operation is not None:
        context = replace(context, rank=operation.rank, world=operation.world)
    target = _target_of(location, state, request, operation)
    with time_limit(deadline), registered(f"loading {location.url}", changed, deadline.at):
        return await LoadOperation(location.url, target, request, LoadLifecycle(context), operation).run()


def _target_of(
    location: Location, state: Mapping[str, Any], request: LoadRequest, operation: Operation | None
) -> Target:
    if request.options.planner is None:
        return StateTarget(location, state, request, operation)
    from .planner.load import PlannerTarget  # imports DCP, as the planner has done

    return PlannerTarget(location, state, request, operation)
