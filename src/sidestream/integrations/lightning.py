"""The checkpoints of Lightning's ``Trainer`` and ``Fabric``, for ``lightning`` and for ``pytorch_lightning``.

``Trainer(plugins=[SidestreamCheckpointIO()])`` is all that a program changes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import fsspec
import torch

from sidestream import AsyncStager, PendingSave, SaveOptions, Storage, async_save, blocking
from sidestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidOptionError,
    SidestreamError,
    UnsafeObjectError,
)

from ._checks import Framework, check_options

__all__ = ["SidestreamCheckpointIO"]

# Either is enough. A trainer accepts the class of its own root only, and both may be in one program.
_ROOTS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_INSTALLED = [root for root in _ROOTS if find_spec(root)] or ["lightning"]
_LIGHTNING = Framework(_INSTALLED[0].replace("_", "-"), ">=2.6,<2.7", extra="lightning")
with _LIGHTNING.importing():
    _PLUGINS: list[Any] = [import_module(f"{_ROOTS[root]}.plugins") for root in _INSTALLED]
    for _one in _PLUGINS:
        _LIGHTNING.check(
            _one.CheckpointIO,
            save_checkpoint=("checkpoint", "path", "storage_options"),
            load_checkpoint=("path", "map_location", "weights_only"),
            remove_checkpoint=("path",),
            teardown=(),
        )

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as _Base
else:
    _Base = new_class("CheckpointIO", tuple(one.CheckpointIO for one in _PLUGINS))


@dataclass(frozen=True, slots=True)
class _Job:
    """A save or a removal in progress, which a thread waits for."""

    path: str
    saves: bool
    future: Future[Any]


class SidestreamCheckpointIO(_Base):
    """Saves and loads the checkpoints of a ``Trainer`` or a ``Fabric`` with sidestream.

    A save continues in the background. The error of a save is raised once, by the next call of this object. What
    Lightning removes is removed when all saves that were submitted before have been committed, and stays if one of them
    has failed, so there is a good checkpoint at any time. Strategies that ask no ``CheckpointIO`` (FSDP,
    ModelParallel, DeepSpeed) do not use it.

    Args:
        options: How a save is done. None: ``SaveOptions()``.
        slots: The most saves in progress. Another one waits for the oldest.
        storage_options: What the fsspec file system of the checkpoints takes, unless a call has its own.
        storage: How their storage is reached, in place of ``storage_options``.
        stager: A stager of your own, which stays open. With ``mode="eager"`` a device copies within its memory first.
            None: one for the time until ``teardown()``.

    Raises:
        InvalidOptionError: ``slots`` is not a positive number, or ``options`` ask for streaming.
    """

    def __init__(
        self,
        *,
        options: SaveOptions | None = None,
        slots: int = 2,
        storage_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
        stager: AsyncStager | None = None,
    ) -> None:
        if type(slots) is not int or slots < 1:
            raise InvalidOptionError(f"slots={slots!r} has to be a number of saves, at least 1")
        check_options(options)
        self._options = options
        self._slots = slots
        self._storage: dict[str, Any] = {"storage_options": storage_options, "storage": storage}
        self._marked = storage is not None and storage.commit == "marker"  # where no directory can be renamed
        self._given_stager = stager
        self._stager: AsyncStager | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: list[_Job] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Start to save ``checkpoint`` at ``path``, and return when it may change.

        On return the copies of tensors on a device have been launched, and whatever the current streams do next comes
        after them; those in host memory are complete. A checkpoint that is at ``path`` is replaced when the new one is
        committed. Where nothing can be replaced (``Storage(commit="marker")``, a file, a link) the new one lies beside
        it, as ``last-r1.ckpt``, and the old one is removed afterwards.

        Args:
            checkpoint: The state that Lightning has put together.
            path: The name of the checkpoint, which is a directory.
            storage_options: What the fsspec file system takes, in place of that of this object.

        Raises:
            InvalidOptionError, MissingExtraError, UnsupportedError: The call is wrong, or the storage cannot replace.
            UnsafeObjectError, UnsupportedTensorError: The state cannot be saved. If this is not known yet, the
                next call raises it.
            SidestreamError: An earlier save or removal has failed. Nothing was started.
        """
        name = _name(path)
        self._wait([job for job in self._jobs if job.path == name])
        self._wait([job for job in self._jobs if job.saves][: 1 - self._slots or None])
        self._raise_error()
        storage = self._storage if storage_options is None else {"storage_options": storage_options}
        place, replaced = self._place(name)
        _SAVING.add(self)
        if self._stager is None:
            self._stager = self._given_stager or AsyncStager()
        pending = async_save(
            checkpoint,
            place,
            overwrite=not self._marked,
            stager=self._stager,
            process_group="alone",
            options=self._options,
            **storage,
        )
        saving = self._submit(name, partial(_committed, pending), saves=True)
        if replaced:
            self._submit(name, partial(self._remove, replaced, [saving]), saves=False)
        # Lightning has no place at which the sources are certain to be unchanged: callbacks and modules write averages
        # of weights after the save, and an optimizer calls ``training_step``, whose forward writes buffers.
        try:
            self._stager.fence()
        except SidestreamError:  # what cannot be saved is known here; the save ends with the same error, or another one
            self._wait(self._jobs)
            self._raise_error()
            raise
        if os.path.basename(name).startswith("hpc_ckpt_"):  # Lightning gives the job back to SLURM next
            self._wait(self._jobs)
            self._raise_error()

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``, after a save of this process to it that is in progress. A file is read by
        Lightning.

        Args:
            path: The name of the checkpoint.
            map_location: A device for the tensors. None: host memory. For a file, anything that ``torch.load`` takes.
            weights_only: For a file, as in ``torch.load``. A checkpoint of sidestream is data, and holds no code.

        Returns:
            What was saved.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: There is no checkpoint, or it is damaged.
            InvalidOptionError: ``map_location`` is not a device.
            SidestreamError: An earlier save or removal has failed, or the storage did.
        """
        name = _name(path)
        self._wait([job for one in _SAVING for job in one._jobs if job.path == name])
        self._raise_error()
        place = self._newest(name)
        if self._is_file(place):
            where = {} if map_location is None else {"map_location": map_location}
            return _PLUGINS[0].TorchCheckpointIO().load_checkpoint(place, weights_only=weights_only, **where)  # type: ignore[no-any-return]
        if callable(map_location) or isinstance(map_location, Mapping):
            raise InvalidOptionError(
                f"{place}: map_location={map_location!r} has to be a device for a checkpoint of sidestream"
            )
        memory: Any = "host" if map_location is None else torch.device(map_location)
        with blocking.stopping_the_loop():  # a notebook runs a fit on its event loop
            return blocking.open_checkpoint(place, **self._storage).state_dict(memory=memory)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at ``path`` in the background, when all saves that were submitted before have been
        committed. If one of them fails, it stays.

        Args:
            path: The name of the checkpoint.
        """
        name = _name(path)
        places = [name] if "://" in name else [*_versions(name), name]
        self._submit(name, partial(self._remove, places, [job.future for job in self._jobs if job.saves]), saves=False)

    def teardown(self) -> None:
        """Wait until all saves and removals have ended, and free the memory. The object works again afterwards.

        Raises:
            SidestreamError: A save or a removal has failed.
        """
        self._wait(self._jobs)
        if self._threads is not None:
            self._threads.shutdown()
        if self._stager is not None and self._given_stager is None:
            self._stager.close()
        self._threads = self._stager = None
        self._raise_error()

    def _submit(self, name: str, work: Callable[[], Any], *, saves: bool) -> Future[Any]:
        if self._threads is None:
            # More than the jobs that there can be: one that waits for others must not keep these from a thread.
            self._threads = ThreadPoolExecutor(64, "sidestream-lightning")
        future = self._threads.submit(work)
        self._jobs.append(_Job(name, saves, future))
        return future

    @staticmethod
    def _wait(jobs: list[_Job]) -> None:
        wait([job.future for job in jobs])

    def _raise_error(self) -> None:
        """Forget the jobs that have ended, and raise the first of their errors."""
        ended = [job for job in self._jobs if job.future.done()]
        self._jobs = [job for job in self._jobs if job not in ended]
        errors = [error for job in ended if (error := job.future.exception()) is not None]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and afterwards {type(other).__name__}: {other}")
            raise errors[0]

    def _place(self, name: str) -> tuple[str, list[str]]:
        """Return where to save ``name``, and what to remove afterwards because it cannot be replaced."""
        if "://" in name:
            return name, []
        found = _versions(name)
        newest = found[-1] if found else name
        if not os.path.lexists(newest) or not (self._marked or os.path.islink(newest) or os.path.isfile(newest)):
            return newest, []
        stem, suffix = os.path.splitext(name)
        return f"{stem}-r{_number(newest, name) + 1}{suffix}", found

    def _newest(self, name: str) -> str:
        """Return the newest version of a checkpoint that is complete: a kill may have left a newer one that is not."""
        places = _versions(name)
        if places:  # Lightning itself may have chosen the incomplete one, for ``ckpt_path="last"``
            places = [*_versions(re.sub(r"-r[1-9]\d*(?=\.[^.]*$)", "", name)), *places]
        for place in reversed(places):
            if self._is_file(place):
                return place
            with blocking.stopping_the_loop(), suppress(CheckpointNotFoundError):
                blocking.open_checkpoint(place, **self._storage)
                return place
        return name

    def _is_file(self, place: str) -> bool:
        if "://" not in place:
            return os.path.isfile(place)
        files, path = fsspec.core.url_to_fs(place, **(self._storage["storage_options"] or {}))
        return bool(files.isfile(path))

    def _remove(self, places: list[str], saves: list[Future[Any]]) -> None:
        if any(save.exception() is not None for save in saves):  # waits
            return
        for place in places:
            if os.path.islink(place):
                os.unlink(place)
                continue
            try:
                blocking.remove(place, **self._storage)
            except (CheckpointNotFoundError, CheckpointExistsError):  # what Lightning itself has written, or nothing
                _PLUGINS[0].TorchCheckpointIO().remove_checkpoint(place)


_SAVING: WeakSet[SidestreamCheckpointIO] = WeakSet()
"""Those that have saved: another trainer of this process may load what one of them is saving."""


def _committed(pending: PendingSave) -> None:
    try:
        pending.result()
    except UnsafeObjectError as error:
        error.add_note(
            "hyperparameters: leave them out with self.save_hyperparameters(ignore=[...]); states of callbacks and "
            "modules: return plain data from state_dict() and on_save_checkpoint()"
        )
        raise


def _name(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path).removeprefix("file://")
    return text if "://" in text else os.path.abspath(text)


def _number(place: str, name: str) -> int:
    """Return n for ``last-r<n>.ckpt`` of ``last.ckpt``, 0 for itself, and -1 for others."""
    stem, suffix = os.path.splitext(name)
    found = re.fullmatch(rf"{re.escape(stem)}(?:-r([1-9]\d*))?{re.escape(suffix)}", place)
    return -1 if found is None else int(found[1] or 0)


def _versions(name: str) -> list[str]:
    """Return what is there of a checkpoint, the newest last."""
    folder = Path(name).parent
    places = [str(one) for one in folder.iterdir()] if folder.is_dir() else []
    return sorted((one for one in places if _number(one, name) >= 0), key=lambda one: _number(one, name))
