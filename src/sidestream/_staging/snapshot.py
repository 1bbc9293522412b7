"""``SnapshotReader``: a further reader of staged memory, beside the one that writes the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from .._runtime.threads import Stop, current_deadline, result_of
from ..errors import ClosedError, SnapshotLostError
from .stage import Laid, Staging

__all__ = ["SnapshotReader"]

P = TypeVar("P", bound=Laid)


class SnapshotReader(Generic[P]):
    """A further reader of the payloads in a stage. It never delays the stage or its first reader.

    Each window is read once, in any order, by one thread at a time. Its memory is kept until the last view or tensor
    over it is gone, so the reader drops one window before it reads the next. When another stage waits for memory, all
    windows that are not being read can be taken back. ``window`` raises ``SnapshotLostError`` then. It also does if the
    state did not fit into free memory, and if the save has stopped the copies. The owner has to call ``close``.
    """

    def __init__(self, staging: Staging[P], number: int) -> None:
        self._staging = staging
        self._number = number

    def plan(self, stop: Stop) -> P:
        """Block until the stage has a plan, and return the plan. Raises the error of the stage, ``ClosedError`` when
        ``stop`` is set, and ``DeadlineExceededError``."""
        try:
            return result_of(self._staging.laid, stop, "planning")
        except ClosedError as error:
            raise _lost(error, stop) from error

    @contextmanager
    def window(self, index: int, stop: Stop) -> Iterator[memoryview]:
        """Block until a window has been staged, and return its memory for the duration of the context. Only payloads
        have defined contents. Raises what ``plan`` raises, and ``SnapshotLostError``."""
        image = self._staging.images[index]
        try:
            view = image.read(self._number, deadline=current_deadline(), stop=stop)
        except ClosedError as error:
            raise _lost(error, stop) from error
        try:
            yield view
        finally:
            del view  # and no release(): a tensor of torch.frombuffer() would not prevent it, and still use the memory
            image.leave(self._number)

    def close(self) -> None:
        """Give up the windows that have not been read. Idempotent. May be called in any thread."""
        self._staging.leave(self._number)


def _lost(error: ClosedError, stop: Stop) -> ClosedError | SnapshotLostError:
    """Return the error to raise for ``error``: itself if ``stop`` is set, otherwise ``SnapshotLostError``, because the
    save has stopped the copies."""
    return error if stop.is_set() else SnapshotLostError("the save has ended before everything was staged")
