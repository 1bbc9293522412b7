"""``Trainer(plugins=[SidestreamCheckpointIO()])``: the checkpoints of Lightning, with either of its import roots."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from types import new_class
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import fsspec
import torch

from sidestream import AsyncStager, SaveOptions, Storage, async_save, blocking
from sidestream.errors import InvalidOptionError, SidestreamError, UnsafeObjectError

from ._checks import Framework, check_options

__all__ = ["SidestreamCheckpointIO"]

# Either is enough. A trainer accepts the class of its own root only, and both may be in one program.
_ROOTS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_INSTALLED = [root for root in _ROOTS if importlib.util.find_spec(root)] or ["lightning"]
_LIGHTNING = Framework(_INSTALLED[0].replace("_", "-"), ">=2.6,<2.7", extra="lightning")
with _LIGHTNING.importing():
    _PLUGINS: list[Any] = [importlib.import_module(f"{_ROOTS[root]}.plugins") for root in _INSTALLED]
    for _io in (one.CheckpointIO for one in _PLUGINS):
        _LIGHTNING.check(_io, save_checkpoint=("checkpoint", "path", "storage_options"), teardown=())
        _LIGHTNING.check(_io, load_checkpoint=("path", "map_location", "weights_only"), remove_checkpoint=("path",))

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO as _Base
else:
    _Base = new_class("CheckpointIO", tuple(one.CheckpointIO for one in _PLUGINS))


_HAS_TO_BE_DATA = (
    "hyperparameters: leave them out with self.save_hyperparameters(ignore=[...]); states of callbacks and modules: "
    "return plain data from state_dict() and on_save_checkpoint()"
)
_SAVING: WeakSet[SidestreamCheckpointIO] = WeakSet()
"""Those that have saved: another trainer of this process may load what one of them is saving."""


class SidestreamCheckpointIO(_Base):
    """Saves and loads the checkpoints of a ``Trainer`` or a ``Fabric`` with sidestream.

    A save continues in the background, and the next call of this object raises its error, once. A removal waits for the
    commits of all saves that were submitted before it, and is left out if one of them fails: there is a good checkpoint
    at any time. Strategies that ask no ``CheckpointIO`` (FSDP, ModelParallel, DeepSpeed) do not use it.

    Args:
        options: How a save is done. None: ``SaveOptions()``.
        slots: The most saves in progress. Another one waits for the oldest.
        storage_options: What the fsspec file system of the checkpoints takes, unless a call has its own.
        storage: How their storage is reached, in place of ``storage_options``.
        stager: A stager of your own, which stays open. None: one for the time until ``teardown()``.

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
        check_options(options, slots)
        self._slots = slots
        self._storage: dict[str, Any] = {"storage_options": storage_options, "storage": storage}
        self._marked = storage is not None and storage.commit == "marker"  # where no directory can be renamed
        self._how: dict[str, Any] = {"process_group": "alone", "overwrite": not self._marked, "options": options}
        self._given_stager = stager
        self._stager: AsyncStager | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._jobs: dict[Future[Any], str] = {}
        """Saves and removals in progress, each with the checkpoint that it concerns."""
        self._saves: list[Future[Any]] = []

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Start to save ``checkpoint`` at ``path``, and return when it may change.

        On return copies from devices are launched, ahead of what the current streams do next, and copies from host
        memory are complete. The commit replaces what is at ``path``. What cannot be replaced (``commit="marker"``, a
        file, a link) is removed after the commit of the new one beside it, ``last-r1.ckpt``.

        Args:
            checkpoint: The state that Lightning has put together.
            path: The name of the checkpoint, which is a directory.
            storage_options: What the fsspec file system takes, in place of that of this object.

        Raises:
            InvalidOptionError, MissingExtraError, UnsupportedError: The call is wrong, or the storage cannot replace.
            UnsafeObjectError, UnsupportedTensorError: The state cannot be saved. The next call may be the one to raise.
            SidestreamError: An earlier save or removal has failed. Nothing was started.
        """
        name = _name(path)
        self._finish(
            [*(job for job, one in self._jobs.items() if one == name), *self._saves[: 1 - self._slots or None]]
        )
        place, replaced = self._place(name)
        _SAVING.add(self)
        self._stager = self._stager or self._given_stager or AsyncStager()
        storage = self._storage if storage_options is None else {"storage_options": storage_options}
        pending = async_save(checkpoint, place, stager=self._stager, **self._how, **storage)
        self._saves.append(saving := self._submit(name, pending.result))
        if replaced:
            self._submit(name, self._remove, replaced, [saving])
        # Lightning has no place at which the sources are certain to be unchanged: callbacks and modules write averages
        # of weights after the save, and an optimizer calls ``training_step``, whose forward writes buffers.
        try:
            self._stager.fence()
        except SidestreamError:  # what cannot be saved is known here; the save ends with the same error, or another one
            self._finish(self._jobs)
            raise
        if os.path.basename(name).startswith("hpc_ckpt_"):  # Lightning gives the job back to SLURM next
            self._finish(self._jobs)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the checkpoint at ``path``, after a save of this process to it. A file is read by Lightning.

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
        self._finish([job for one in _SAVING for job, place in [*one._jobs.items()] if place == name])
        place = self._newest(name)
        if self._is_file(place):
            where = {} if map_location is None else {"map_location": map_location}
            return _PLUGINS[0].TorchCheckpointIO().load_checkpoint(place, weights_only=weights_only, **where)  # type: ignore[no-any-return]
        if callable(map_location) or isinstance(map_location, Mapping):
            raise InvalidOptionError(f"{place}: map_location={map_location!r} has to be a device: nothing is unpickled")
        memory: Any = "host" if map_location is None else torch.device(map_location)
        with blocking.stopping_the_loop():  # a notebook runs a fit on its event loop
            return blocking.open_checkpoint(place, **self._storage).state_dict(memory=memory)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Start to remove the checkpoint at ``path`` when all earlier saves are committed. It stays if one fails.

        Args:
            path: The name of the checkpoint.
        """
        name = _name(path)
        self._submit(name, self._remove, [*_versions(name).values(), name], [*self._saves])

    def teardown(self) -> None:
        """Wait until all saves and removals have ended, and free the memory. The object works again afterwards.

        Raises:
            SidestreamError: A save or a removal has failed.
        """
        if self._threads is not None:
            self._threads.shutdown()  # waits for the jobs
        if self._stager is not None and self._given_stager is None:
            self._stager.close()
        self._threads = self._stager = None
        self._finish(())

    def _submit(self, name: str, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        # More threads than jobs: one that waits for others must not keep these from a thread.
        self._threads = self._threads or ThreadPoolExecutor(64, "sidestream-lightning")
        self._jobs[job := self._threads.submit(work, *arguments)] = name
        return job

    def _finish(self, jobs: Iterable[Future[Any]]) -> None:
        """Wait for ``jobs``. Forget all of this object that have ended, and raise the first of their errors."""
        wait(jobs)
        ended = [job for job in [*self._jobs] if job.done()]
        self._jobs = {job: name for job, name in self._jobs.items() if job not in ended}
        self._saves = [job for job in self._saves if job not in ended]
        errors = [error for job in ended if (error := job.exception()) is not None]
        if errors and isinstance(errors[0], UnsafeObjectError):
            errors[0].add_note(_HAS_TO_BE_DATA)
        for other in errors[1:]:
            errors[0].add_note(f"and afterwards {type(other).__name__}: {other}")
        if errors:
            raise errors[0]

    def _place(self, name: str) -> tuple[str, list[str]]:
        """Return where to save ``name``, and what to remove afterwards because it cannot be replaced."""
        found = _versions(name)
        number, newest = max(found.items(), default=(0, name))
        if not found or not (self._marked or os.path.islink(newest) or os.path.isfile(newest)):
            return newest, []
        stem, suffix = os.path.splitext(name)
        return f"{stem}-r{number + 1}{suffix}", [*found.values()]

    def _newest(self, name: str) -> str:
        """Return the newest version of a checkpoint that is complete: a kill may have left a newer one that is not."""
        places = [*_versions(name).values()]
        if places:  # Lightning itself may have chosen the incomplete one, for ``ckpt_path="last"``
            places = [*_versions(re.sub(r"-r[1-9]\d*(?=\.[^.]*$)", "", name)).values(), *places]
        return next(filter(self._is_there, reversed(places)), name)

    def _is_there(self, place: str) -> bool:
        with blocking.stopping_the_loop(), suppress(FileNotFoundError):
            return self._is_file(place) or blocking.open_checkpoint(place, **self._storage) is not None
        return False

    def _is_file(self, place: str) -> bool:
        if "://" not in place:
            return os.path.isfile(place)
        files, path = fsspec.core.url_to_fs(place, **(self._storage["storage_options"] or {}))
        return bool(files.isfile(path))

    def _remove(self, places: list[str], saves: list[Future[Any]]) -> None:
        if any(save.exception() is not None for save in saves):  # waits
            return
        for place in places:
            try:
                os.unlink(place) if os.path.islink(place) else blocking.remove(place, **self._storage)
            except (FileNotFoundError, FileExistsError):  # what Lightning itself has written, or nothing
                _PLUGINS[0].TorchCheckpointIO().remove_checkpoint(place)


def _name(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path).removeprefix("file://")
    return text if "://" in text else os.path.abspath(text)


def _versions(name: str) -> dict[int, str]:
    """Return what is there of ``last.ckpt`` by its number, the newest last: n for ``last-r<n>.ckpt``, 0 for itself."""
    stem, suffix = map(re.escape, os.path.splitext(name))
    places = map(str, Path(name).parent.glob("*"))
    found = (re.fullmatch(rf"{stem}(?:-r([1-9]\d*))?{suffix}", place) for place in places)
    return dict(sorted((int(one[1] or 0), one[0]) for one in found if one))
