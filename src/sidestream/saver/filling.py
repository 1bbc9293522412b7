"""In the trainer: images that the saver process fills, out of this process's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from .._threads import Deadline, Stop
from ..errors import SaverLost
from ..staging import Piece
from .copying import PIECE
from .link import Link
from .wire import Frame, Kind

__all__ = ["LinkFiller"]

_ACKNOWLEDGE_S = 2.5


class LinkFiller:
    """The process of ``link``, a ``Filler`` for stages."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def fill(self, pieces: Sequence[Piece], *, deadline: Deadline, stop: Stop) -> bool:
        """Of the contract of ``Filler``. A process that does not let go of the memory is killed."""
        try:
            return _Fill(self._link, deadline, stop).run(pieces)
        except SaverLost:
            return False


class _Fill:
    """One request."""

    def __init__(self, link: Link, deadline: Deadline, stop: Stop) -> None:
        self._link = link
        self._deadline = deadline
        self._stop = stop
        self._changed = threading.Condition()
        self._answer: Kind | None = None
        self._lost = False
        self._sending = False
        self._late_since: float | None = None

    def run(self, pieces: Sequence[Piece]) -> bool:
        for memory in {piece.memory.number: piece.memory for piece in pieces}.values():
            self._link.hand(memory)
        packed = b"".join(PIECE.pack(piece.memory.number, *piece[1:]) for piece in pieces)
        number = self._link.request(self)
        with self._stop.waking(self._wake):
            self._send(Kind.FILL, number, packed)
            with self._changed:
                self._changed.wait_for(lambda: self.over or self._stop.is_set(), self._deadline.remaining_s())
            if not self.over:
                self._let_go(number)
                self._stop.check()
                raise self._deadline.exceeded("staging")
        return self._answer == Kind.FILLED

    def _send(self, kind: Kind, number: int, body: bytes) -> None:
        self._sending = True
        try:
            self._link.send(kind, number, body)
        finally:
            self._sending = False

    def _let_go(self, number: int) -> None:
        """Nothing of it is read or written any more when this returns."""
        self._send(Kind.CANCEL, number, b"")
        with self._changed:
            ended = self._changed.wait_for(lambda: self.over, _ACKNOWLEDGE_S)
        if not ended:
            self._link.kill("the saver process did not end a copy that was cancelled, and was killed")
            self._link.ended(_ACKNOWLEDGE_S)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- in the thread of the link ---

    @property
    def over(self) -> bool:
        return self._lost or self._answer is not None

    @property
    def stuck(self) -> bool:
        if not (self._sending and (self._stop.is_set() or self._deadline.remaining_s() == 0.0)):
            self._late_since = None
            return False
        self._late_since = self._late_since or time.monotonic()
        return time.monotonic() - self._late_since > _ACKNOWLEDGE_S

    def on_frame(self, frame: Frame) -> None:
        with self._changed:
            self._answer = Kind(frame.kind)
            self._changed.notify_all()

    def on_lost(self, reason: str) -> None:
        with self._changed:
            self._lost = True
            self._changed.notify_all()
