"""``SnapshotReader``: a further reader of staged memory, beside the one that writes the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from .._runtime.threads import Deadline, Stop, result_of
from ..errors import SnapshotLost
from .stage import Laid, Staging

__all__ = ["SnapshotReader"]

P = TypeVar("P", bound=Laid)


class SnapshotReader(Generic[P]):
    """A reader of the payloads in a stage, which never delays the stage or its first reader.

    Each window is read once, in any order, by one thread at a time. The reader holds no window but the one that it is
    reading: when another stage waits for memory, all others can be taken back, and ``window`` raises ``SnapshotLost``.
    The same is raised for a state that does not fit into free memory, so that it only passes through. Call ``close``.
    """

    def __init__(self, staging: Staging[P], number: int) -> None:
        self._staging = staging
        self._number = number

    def plan(self, *, deadline: Deadline, stop: Stop) -> P:
        """Block until it is known what lies where, and return that. Raises what made the stage fail, ``Closed`` once
        ``stop`` is set, and ``DeadlineExceeded``."""
        return result_of(self._staging.laid, stop, deadline, "planning")

    @contextmanager
    def window(self, index: int, *, deadline: Deadline, stop: Stop) -> Iterator[memoryview]:
        """Block until a window has been staged, and return its memory for the time of the context. Only the payloads in
        it have defined contents. Raises what ``plan`` raises, and ``SnapshotLost``."""
        images = self._staging.images
        if index >= len(images):
            raise SnapshotLost("this stage has no such window")
        view = images[index].read(self._number, deadline=deadline, stop=stop)
        try:
            yield view
        finally:
            view.release()
            images[index].leave(self._number)

    def close(self) -> None:
        """Give up what has not been read. Idempotent; may be called in any thread."""
        self._staging.leave(self._number)
