"""Stages that the writer process fills: it copies from the memory of the trainer, so that no thread of the trainer has
to."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .._runtime.threads import Deadline, Stop
from .._staging import FillPart, FillPiece
from ..errors import WriterProcessError
from .link import ACKNOWLEDGE_S, WorkerLink
from .wire import WorkerMessage, WorkerMessageKind, pack_fill

__all__ = ["LinkFiller"]


class LinkFiller:
    """A ``Filler`` that has the writer process copy."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link

    def fill(self, pieces: Sequence[FillPart], *, deadline: Deadline, stop: Stop) -> bool:
        """Copy ``pieces`` as ``Filler.fill`` requires. A process that does not stop using the memory is killed."""
        try:
            return _Fill(self._link, deadline, stop).run(pieces)
        except WriterProcessError:
            return False


class _Fill:
    """One request."""

    def __init__(self, link: WorkerLink, deadline: Deadline, stop: Stop) -> None:
        self._link = link
        self._deadline = deadline
        self._stop = stop
        self._changed = threading.Condition()
        self._answer: WorkerMessageKind | None = None
        self._lost = False
        self._sending = False
        self._late_since: float | None = None

    def run(self, pieces: Sequence[FillPart]) -> bool:
        packed = pack_fill(
            ((one.memory.number, *one[1:]) for one in pieces if isinstance(one, FillPiece)),
            ((one.memory.number, *one[1:]) for one in pieces if not isinstance(one, FillPiece)),
        )
        memories = {piece.memory.number: piece.memory for piece in pieces}
        number = self._link.request(self)  # first, because the thread of the link monitors registered requests
        sent = False
        try:
            with self._stop.waking(self._wake):
                self._sending = True
                for memory in memories.values():
                    self._link.share(memory)
                self._stop.check()
                sent = True
                self._link.send(WorkerMessageKind.FILL, number, packed)
                self._sending = False
                with self._changed:
                    self._changed.wait_for(lambda: self.finished or self._stop.is_set(), self._deadline.remaining_s())
                if not self.finished:
                    self._cancel(number)
                    self._stop.check()
                    raise self._deadline.exceeded("staging")
        finally:
            self._sending = False
            if not sent:
                self._link.withdraw(number)
        return self._answer == WorkerMessageKind.FILLED

    def _cancel(self, number: int) -> None:
        """Cancel the request. When this returns, the process neither reads nor writes its memory any more."""
        self._sending = True
        self._link.send(WorkerMessageKind.CANCEL, number, b"")
        self._sending = False
        with self._changed:
            ended = self._changed.wait_for(lambda: self.finished, ACKNOWLEDGE_S)
        if not ended:
            self._link.end("the writer process did not end a copy that was cancelled, and was killed", ACKNOWLEDGE_S)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- in the thread of the link ---

    @property
    def finished(self) -> bool:
        return self._lost or self._answer is not None

    @property
    def stuck(self) -> bool:
        if not (self._sending and (self._stop.is_set() or self._deadline.remaining_s() == 0.0)):
            self._late_since = None
            return False
        self._late_since = self._late_since or time.monotonic()
        return time.monotonic() - self._late_since > ACKNOWLEDGE_S

    def on_message(self, message: WorkerMessage) -> None:
        with self._changed:
            self._answer = WorkerMessageKind(message.kind)
            self._changed.notify_all()

    def on_lost(self, reason: str) -> None:
        with self._changed:
            self._lost = True
            self._changed.notify_all()
