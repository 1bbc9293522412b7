"""``Journal``: the events in a file, a JSON object in each line."""

from __future__ import annotations

import os
from os import PathLike

from ..events import Event
from .observer import QueuedObserver
from .records import head, line_of


class Journal(QueuedObserver):
    """Appends each event to a file, as one JSON object in a line, for ``sidestream report`` and ``sidestream trace``.

    The observer puts events into a queue, and one thread writes them. If the disk is full, or too slow for 10,000
    events, events are lost, which is counted and logged once. A process that is killed may lose those of the last
    0.1 s. In a forked child it writes nothing.

    Args:
        path: The file; each process needs its own. It is created if it does not exist.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._torn = os.fstat(self._descriptor).st_size > 0
        """Whether the file may end with a part of a line, of a process that was killed or of a failed write."""
        self._told = 0
        """How many lost events the file tells of."""
        super().__init__(f"the journal {os.fspath(path)}")

    # --- the thread ---

    def _take_all(self) -> None:
        self._write(head())
        super()._take_all()

    def _take(self, event: Event, noted: int) -> None:
        self._write(line_of(event, noted))

    def _write(self, line: bytes) -> None:
        untold = self._lost - self._told
        left = memoryview(b"\n" * self._torn + line + (head(untold) if untold else b""))
        try:
            self._torn = True
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._lose(1, error)
        else:
            self._torn = False
            self._told += untold

    def _end(self) -> None:
        os.close(self._descriptor)
