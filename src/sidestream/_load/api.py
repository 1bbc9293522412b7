"""``load``: a checkpoint into a live state dict, in place."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from .._group import GroupChoice, Operation, deadline_of, group_of, together
from .._layout.objects import allowed_types
from .._runtime.abandoned import noted
from .._runtime.public import public
from .._runtime.tasks import running_loop
from .._runtime.threads import Deadline, time_limit
from .._storage import Location, locate_directory
from ..events import LoadContext
from ..options import (
    RANK_WAIT_S,
    Allowance,
    Names,
    Progress,
    Storage,
    Trust,
    Verify,
    check_seconds,
    check_strict,
    storage_of,
)
from .operation import LoadLifecycle, LoadOperation, Target
from .report import LoadOptions, LoadReport, PassedOver
from .target import StateTarget

__all__ = ["LoadOptions", "LoadReport", "PassedOver", "load", "load_from"]


@public
async def load(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    strict: Collection[Allowance] = (),
    names: Names | None = None,
    verify: Verify = "always",
    atomic: bool = False,
    progress: Progress | None = None,
    timeout_s: float = 600.0,
    rank_wait_s: float = RANK_WAIT_S,
    allow: Iterable[type] = (),
    trust: Trust = "data",
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    process_group: GroupChoice = None,
    planner: Any = None,
) -> LoadReport:
    """Load the checkpoint at ``url`` into ``state``, in place: ours, or one that stock DCP wrote.

    Tensors of ``state`` are read into; plain values are replaced in their dict or list. An object with
    ``load_state_dict`` is handed everything saved below its key: tensors of its own ``state_dict()`` are read in place
    first, those that it lacks (the moments of a fresh optimizer) come as new tensors. Those two methods are called on
    the event loop, everything else happens in threads; leave the structure of ``state`` alone until this returns.

    Everything is checked before anything is changed: a ``StateMismatchError`` lists every missing key, unexpected key
    (inside the top-level keys of ``state``), shape, dtype and kind that differs. ``strict`` names what may differ,
    ``"partial"``, ``"cast"``, ``"ignore_unexpected"``, and the report lists what did. ``progress(done, total)`` is
    called on the loop with bytes. Raises ``CheckpointNotFoundError``; ``CorruptCheckpointError``, also for altered
    bytes (``verify``), which may be found after some tensors were written: ``error.written`` lists them. With
    ``atomic=True`` everything is read into memory of its own first, so that a failure leaves ``state`` untouched. The
    same holds for a cancel, ``StorageError`` and ``DeadlineExceededError``; a cancel that comes when all has been read
    is raised after ``state`` has changed as a whole.

    ``names``: the FQN in the checkpoint of an FQN in ``state``, as a function or a mapping (``Names``), where they
    differ: ``names=sidestream.add_prefix("module.")`` reads ``"weight"`` from ``"module.weight"``. It is asked once for
    each name in ``state`` and in the ``state_dict()`` of its objects, in a thread. Raises ``KeyCollisionError``, which
    lists all names that would be given to two tensors of different memory. Unexpected keys are then those inside the
    top-level keys of the new names.

    Of other writers' values only plain data is read, and objects of the types in ``allow``: those, and no others, are
    made again by their own code from what was saved. Anything else raises ``UnsafeObjectError``. ``trust="pickle"``
    unpickles those values instead, and so runs whatever code the file brings: only for files that you would run as a
    program. It concerns values of other writers alone; metadata, tensors and our own checkpoints are data all the same.

    Where ``torch.distributed`` is initialized this is a call of all ranks together, as ``save`` is: each reads what its
    own tensors need, and all ranks raise the same ``RankFailuresError``. ``process_group="alone"`` loads into this
    process only; ``rank_wait_s`` is as for ``save``.

    ``planner``, a ``LoadPlanner`` of torch, decides what is read, and into what: names, missing keys and dtypes are its
    affair then (``docs/ranks.md``). It is asked in threads, one call after the other; ``PlannerError`` is what it
    raises.

    ``storage_options`` and ``storage`` are as for ``save``; ``http(s)://`` can be read too.
    """
    running_loop("load")
    member = group_of(process_group)

    async def run(operation: Operation | None) -> LoadReport:
        check_seconds("rank_wait_s", rank_wait_s)
        allowed = allowed_types(allow)
        options = LoadOptions(verify, check_strict(strict), atomic, progress, timeout_s, allowed, trust, planner, names)
        location = locate_directory(url, storage_of(storage_options, storage))
        return await load_from(location, state, options, LoadContext("load", location.url), operation)

    if member is None or member.group.world == 1:
        return await run(None)
    return await together(run, member.begin("load", deadline_of(timeout_s), rank_wait_s))


async def load_from(
    location: Location,
    state: Mapping[str, Any],
    options: LoadOptions,
    context: LoadContext,
    operation: Operation | None = None,
) -> LoadReport:
    """``load`` from a resolved location. ``context`` is for the events of the load; ``operation`` is there where
    several ranks load."""
    deadline = Deadline.after(options.timeout_s)
    changed = "its threads have stopped; tensors may have been changed"
    if operation is not None:
        context = replace(context, rank=operation.rank, world=operation.world)
    target = _target_of(location, state, options, operation)
    with time_limit(deadline), noted(f"loading {location.url}", changed, deadline.at):
        return await LoadOperation(location.url, target, options, LoadLifecycle(context), operation).run()


def _target_of(
    location: Location, state: Mapping[str, Any], options: LoadOptions, operation: Operation | None
) -> Target:
    if options.planner is None:
        return StateTarget(location, state, options, operation)
    from .planner.load import PlannerTarget  # imports DCP, as the planner has done

    return PlannerTarget(location, state, options, operation)
