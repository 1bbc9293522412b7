"""Ray Train: ``report``, which gives a save in progress to Ray as the checkpoint of a report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sidestream import PendingSave
from sidestream.errors import InvalidOptionError

from ._checks import Framework

_RAY = Framework("ray", ">=2.60,<2.61", extra="ray")

with _RAY.importing():
    import ray.train
    from pyarrow.fs import LocalFileSystem
    from ray.train import Checkpoint, CheckpointUploadMode, TrainContext

_RAY.check(
    ray.train,
    report=(
        "metrics",
        "checkpoint",
        "checkpoint_dir_name",
        "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload",
        "checkpoint_upload_fn",
        "validation",
    ),
)
_RAY.check(Checkpoint, __init__=("path", "filesystem"))
_RAY.check(TrainContext, get_storage=())

__all__ = ["report"]

_GENERATION = re.compile(r"\.g\d+$")


def report(pending: PendingSave | None, metrics: Mapping[str, Any]) -> None:
    """Report metrics and the checkpoint of a save to Ray Train, as ``ray.train.report`` does, and return at once.

    Ray gets the checkpoint when it is committed, and not before: a thread of Ray waits for it, in the order of the
    reports. If the save fails, that thread ends the run of this worker with the error, and Ray restarts the workers or
    fails, as ``FailureConfig`` says. Nothing is copied or uploaded: the checkpoint has to lie in the experiment
    directory, ``ray.train.get_context().get_storage().experiment_fs_path``.

    All workers call it equally often, and wait for each other in the call, as in ``ray.train.report``.

    Args:
        pending: The save, which is one save of all workers, or of one of them with ``process_group="alone"``. None:
            this worker reports metrics and no checkpoint.
        metrics: What ``ray.train.report`` takes. Ray keeps those of rank 0.

    Raises:
        InvalidOptionError: The checkpoint does not lie in the experiment directory. If workers save to a directory
            each, this is raised in Ray's thread, and ends the run.
    """
    if pending is None:
        ray.train.report(dict(metrics))
        return
    storage = ray.train.get_context().get_storage()
    announced = _GENERATION.sub("", _name_below(storage, pending.url))

    def committed(_: Any, announced_by_rank_0: str) -> Any:
        if announced != announced_by_rank_0:
            raise InvalidOptionError(
                f"this worker saves {announced}, and rank 0 {announced_by_rank_0}: Ray takes one checkpoint from all "
                "workers. Save once with all of them (process_group=None), or on one and report None on the others"
            )
        return _checkpoint(storage, pending.result().url)

    ray.train.report(
        dict(metrics),
        checkpoint=_checkpoint(storage, pending.url),
        checkpoint_dir_name=announced,  # all workers get that of rank 0
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        delete_local_checkpoint_after_upload=False,  # this mode deletes by default, and there is one copy only
        checkpoint_upload_fn=committed,
    )


def _checkpoint(storage: Any, url: str) -> Any:
    # Ray looks for the path of the experiment at its beginning, so this is not the path in the URL.
    return Checkpoint(f"{storage.experiment_fs_path}/{_name_below(storage, url)}", storage.storage_filesystem)


def _name_below(storage: Any, url: str) -> str:
    """Return the name of a checkpoint in the experiment directory, which may have several parts."""
    scheme, _, path = url.rpartition("://")
    root = storage.experiment_fs_path
    try:
        if isinstance(storage.storage_filesystem, LocalFileSystem) != (scheme in ("", "file")):
            raise ValueError("another kind of storage")
        if scheme in ("", "file"):
            return Path(path).resolve().relative_to(Path(root).resolve()).as_posix()
        return PurePosixPath(path).relative_to(root).as_posix()
    except ValueError as error:
        raise InvalidOptionError(
            f"{url} is not in the experiment directory of Ray Train, {root}, and Ray takes no other checkpoint: save "
            "below ray.train.get_context().get_storage().experiment_fs_path"
        ) from error
