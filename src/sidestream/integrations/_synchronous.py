"""Saves, loads and removals for frameworks, whose code blocks, also where it runs on the event loop of a notebook."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import sidestream
from sidestream import blocking
from sidestream.errors import CheckpointNotFoundError, SidestreamError

T = TypeVar("T")

_log = logging.getLogger("sidestream")


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a committed checkpoint in a local directory."""
    return os.path.isfile(os.path.join(path, ".metadata"))


def load_parts(state: Mapping[str, Any], path: str) -> None:
    """Load those top-level parts of ``state`` that the checkpoint has."""
    with blocking.stopping_the_loop():
        saved = {name.partition(".")[0] for name in blocking.open_checkpoint(path)}
        if wanted := {name: part for name, part in state.items() if name in saved}:
            blocking.load(wanted, path)


def remove_all_but(kept: Collection[str], found: Sequence[str], limit: int) -> None:
    """Remove the first of the directories ``found`` that are not ``kept``, until ``limit`` are left. A checkpoint goes
    in one step: a kill leaves no part under its name."""
    spare = [path for path in found if path not in kept]
    for path in spare[: max(0, len(found) - max(limit, len({*kept} & {*found})))]:
        if not is_checkpoint(path):
            shutil.rmtree(path, ignore_errors=True)
            continue
        with blocking.stopping_the_loop(), suppress(CheckpointNotFoundError):  # another process may have removed it
            blocking.remove(path)


class SavesInProgress:
    """Saves to directories, a few at the same time, that are looked at in the order in which they began.

    Args:
        slots: How many saves may be in progress at the same time.
        committed: Called with the path of each save that is committed, when those before it have ended.
    """

    def __init__(self, slots: int, committed: Callable[[str], object]) -> None:
        self._slots = slots
        self._committed = committed
        self._saves: list[_Save] = []
        self._exports: list[sidestream.PendingExport] = []
        self._stager: sidestream.AsyncStager | None = None

    @property
    def paths(self) -> list[str]:
        """The directories that are being written."""
        return [save.path for save in self._saves]

    def make_room(self, path: str) -> None:
        """Wait until a slot is free, and until no save to ``path`` is in progress."""
        self._wait_until(0 if path in self.paths else self._slots - 1)

    def start(self, state: Mapping[str, Any], path: str, **arguments: Any) -> None:
        """Save ``state`` in the place of what is at ``path``. Its tensors may change after ``fence()``."""
        if self._stager is None:
            self._stager = sidestream.AsyncStager()
        pending = sidestream.async_save(state, path, stager=self._stager, overwrite=True, **arguments)
        self._saves.append(_Save(pending, path))
        self._exports = [*(one for one in self._exports if not one.done()), *pending.exports]

    def fence(self) -> None:
        """Order what comes next after the copies of the tensors, and raise the error of a save that cannot be made."""
        if self._saves and self._stager is not None:
            try:
                self._stager.fence()
            except SidestreamError:
                self._wait_until(0)  # the save has the same error, which is raised once
                raise

    def collect(self) -> None:
        """Look at the saves that have ended, and raise the error of the first that has failed."""
        self._wait_until(self._slots)

    def wait(self) -> None:
        """Wait for all saves, and for all exports, which may end later, and raise the error of the first save that has
        failed. The error of an export is logged."""
        exports, self._exports = self._exports, []
        try:
            self._wait_until(0)
        finally:
            for export in exports:
                _in_thread(partial(_log_error, export))

    def close(self) -> None:
        """Do what ``wait`` does, and free the memory."""
        self.wait()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _wait_until(self, most: int) -> None:
        while self._saves and (len(self._saves) > most or self._saves[0].pending.done()):
            save = self._saves.pop(0)
            _in_thread(save.pending.result)
            self._committed(save.path)


@dataclass(frozen=True, slots=True)
class _Save:
    pending: sidestream.PendingSave
    path: str


def _in_thread(wait: Callable[[], T]) -> T:
    """Wait in a thread: where a loop runs, as in a notebook, a handle refuses to be waited for."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(wait).result()


def _log_error(export: sidestream.PendingExport) -> None:
    try:
        export.result()
    except Exception as error:
        _log.error("an export failed: %s", error)
