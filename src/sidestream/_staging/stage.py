"""One stage, from the call until its last byte is in host memory."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, Self, TypeVar

from .._runtime.rate import RateLimiter
from .._runtime.threads import Deadline, Stop
from ..errors import ClosedError, DeadlineExceededError, SidestreamError, SkippedError, without_frames
from .captured import Captured
from .device import DeviceStage
from .drain import Drain
from .fill import Filler
from .future import StagingFuture
from .image import ImageLayout, StagedImage

__all__ = ["Laid", "Staging", "clean", "given_up"]


class Laid(Protocol):
    """What the stager needs of a plan: which copies fill which images, and the rest without the sources."""

    @property
    def images(self) -> tuple[ImageLayout, ...]: ...

    def without_sources(self) -> Self: ...


P = TypeVar("P", bound=Laid)


class Staging(Generic[P]):
    """Images on their way into memory. Its owner is their reader, and has to ``release()`` it; ``readers`` further ones
    are named when it is launched (``SnapshotReader``).

    ``laid`` has the plan (of the reader's own kind) once it is made; ``images`` are there from then on and are filled
    one after the other. ``free`` resolves when the sources may change, ``copied`` when everything is in host memory.
    """

    def __init__(
        self,
        captured: Captured,
        deadline: Deadline,
        pace: RateLimiter,
        *,
        device: DeviceStage | None,
        host: bool,
        outcome: StagingFuture[Any] | None = None,
        readers: int = 0,
    ) -> None:
        self.deadline = deadline
        self.pace = pace
        self.device = device
        self.host = host
        """Whether there are sources in host memory."""
        self.started: float = time.monotonic()
        self.laid: Future[P] = Future()
        self.images: tuple[StagedImage, ...] = ()
        self.issued: Future[None] = Future()
        """All host memory has been copied, and every copy from a device has been enqueued, or never will be."""
        self.copied: StagingFuture[None] = StagingFuture(outcome)
        self.free: StagingFuture[None] = StagingFuture(self.copied)
        self.stop: Stop = Stop()
        self.filler: Filler | None = None
        """Who fills images in place of the stager, as long as that works."""
        self.passes = False
        """Whether its reader releases each image as soon as it can."""
        self.drain: Drain | None = None
        """How fast the memory that it was given comes back; None where it does not before everything is staged."""
        self.waiting = False
        """Whether it is waiting for memory right now."""
        self.then: Callable[[], None] = _nothing
        """Called once ``copied`` is resolved, in whichever thread did that."""
        self.work: Future[None] | None = None
        """The stager's part, queued or running."""
        self.readers: frozenset[int] = frozenset(range(readers))
        """The numbers of further readers that have not left."""
        self.held_bytes = 0
        """How much memory they may keep that no other stage can take back."""
        self._captured: Captured | None = captured
        self._lock = threading.Lock()
        self._parts = 1
        self._committed = self._superseded = self._released = self._never_began = False
        self._resolved: set[int] = set()
        self._fenced = False
        self._error: BaseException | None = None

    def take(self) -> Captured:
        """What was captured; once, so that nothing refers to the sources for longer than they are read."""
        captured, self._captured = self._captured, None
        assert captured is not None
        return captured

    @property
    def reads_later(self) -> bool:
        """Whether a writer has to wait for more than copies that stand on its own stream already."""
        return self.host or self.device is None or self.device.lazily

    # --- progress; the stager's and the devices' threads ---

    def lay(self, plan: P, *, stays: bool = False) -> None:
        """``plan`` is made. ``stays``: all of it may stay in memory for further readers."""
        with self._lock:
            others = self.readers if stays else ()
            self.images = tuple(StagedImage(layout.nbytes, others) for layout in plan.images)
            released = self._released
        if released:
            for image in self.images:
                image.release()
        self.laid.set_result(plan.without_sources())

    def commit(self) -> None:
        """From here on a newer stage does not supersede this one. Raises ``SkippedError`` if one has."""
        with self._lock:
            if self._superseded:
                raise SkippedError("a newer stage has taken the place of this one, which had not begun")
            self._committed = True

    @property
    def committed(self) -> bool:
        return self._committed

    def abandon(self) -> None:
        """It was never launched: let go of everything."""
        self.then = _nothing
        if self.device is not None:
            self.device.drop()
        self._captured = None

    def part(self, image: StagedImage) -> Callable[[BaseException | None], None]:
        """One more writer of ``image``: it calls the result when it has ended, once, with its error if it failed."""
        with self._lock:
            self._parts += 1
        image.join()

        def ended(error: BaseException | None) -> None:
            if error is not None:
                error = clean(error, "a device's thread")
                self.fail(error)
            image.finish()
            self.part_done(error)

        return ended

    def part_done(self, error: BaseException | None = None) -> None:
        """A part has ended; the last one resolves ``copied``."""
        with self._lock:
            self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
            error = self._error
        if self.device is not None:
            self.device.drop()
        self._captured = None
        self._resolve(self.free, error)
        self._resolve(self.copied, error)
        self._go_on()

    def freed(self, error: BaseException | None) -> None:
        """The sources may change already, though not everything is in host memory."""
        if error is None:
            self._resolve(self.free, None)

    def forsake(self, error: SidestreamError) -> None:
        """Raise ``error`` in the futures of the stage now, although a device has not completed its copies. The stage
        refers to their memory and to the sources until it has."""
        self._resolve(
            self.free,
            DeadlineExceededError(
                f"{error}: do not change the sources before the device responds; it may still read them"
            ),
        )
        self._resolve(self.copied, error)
        self._go_on()

    def _go_on(self) -> None:
        """Call ``then`` after ``copied`` is resolved, and remove the reference to ``then``. It refers to this stage and
        its result, and the cycle would keep them alive."""
        with self._lock:
            then, self.then = self.then, _nothing
        then()

    def _resolve(self, future: StagingFuture[None], error: BaseException | None) -> None:
        with self._lock:
            if id(future) in self._resolved:
                return
            self._resolved.add(id(future))
        if error is None:  # without the lock: callbacks run here
            future.set_result(None)
        else:
            future.set_exception(error)

    def first_fence(self) -> bool:
        """Whether nobody has fenced this stage before."""
        with self._lock:
            first, self._fenced = not self._fenced, True
            return first

    def fail(self, error: BaseException) -> None:
        """Nothing more is filled."""
        if not self.laid.done():
            self.laid.set_exception(error)
        for image in self.images:
            image.fail(error)

    # --- the reader and other stages ---

    def supersede(self) -> None:
        """Give way to a newer stage, unless this one has begun."""
        with self._lock:
            if self._committed:
                return
            self._superseded = True
        self._give_up()

    @property
    def superseded(self) -> bool:
        return self._superseded

    def release(self) -> None:
        """Stop what is still being copied, and give the memory back once nothing writes into it. Idempotent."""
        self.copied.mark_retrieved()
        with self._lock:
            self._released = True
        self._give_up()
        for image in self.images:
            image.release()

    def leave(self, reader: int) -> None:
        """A further reader needs nothing of it any more. Idempotent."""
        with self._lock:
            self.readers -= {reader}
            images = self.images
        for image in images:
            image.leave(reader)

    def _give_up(self) -> None:
        self.stop.set()
        with self._lock:  # several threads may be here
            never = self.work is not None and not self._never_began and self.work.cancel()
            self._never_began = self._never_began or never
        if never:
            error = given_up(self)
            self.fail(error)
            self.issued.set_result(None)
            self.part_done(error)


def _nothing() -> None:
    """The default of ``Staging.then``."""


def clean(error: BaseException, where: str) -> BaseException:
    """``error`` without the frames behind it; of one that is not ours a note keeps what they would tell."""
    if not isinstance(error, SidestreamError) and error.__traceback__ is not None:
        error.add_note(f"in {where}:\n" + "".join(traceback.format_tb(error.__traceback__)))
    return without_frames(error)


def given_up(staging: Staging[Any]) -> SidestreamError:
    """The error of a stage that was stopped before it began."""
    if staging.superseded:
        return SkippedError("a newer stage has taken the place of this one, which had not begun")
    return ClosedError("this stage was given up before it had ended")
