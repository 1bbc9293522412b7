"""The state of one stage, from the call until its last byte is in host memory and its last reader has left.

``SnapshotReader`` is a further reader of the memory, beside the one that writes the checkpoint. A program that changes
sources waits for the copies, before each optimizer step or at a ``fence()``.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._runtime.rate import RateLimiter
from .._runtime.threads import Deadline, Stop, ThreadFuture, result_of
from .._runtime.torch_probes import outside_compile
from .._runtime.waits import WaitReasons
from ..errors import (
    ArenaExhaustedError,
    ClosedError,
    DeadlineExceededError,
    SidestreamError,
    SkippedError,
    SnapshotLostError,
    without_frames,
)
from .captured import Captured
from .device import DeviceEngine, DeviceStage
from .drain import Drain
from .future import StagingFuture
from .image import ImageLayout, StagedImage


class ImagePlan(Protocol):
    """The part of a plan that the stager uses: the images with their copies, and the plan without its sources."""

    @property
    def images(self) -> tuple[ImageLayout, ...]: ...

    def without_sources(self) -> Self: ...


P = TypeVar("P", bound=ImagePlan)


class Staging(Generic[P]):
    """One stage and its images. Its owner reads the images and has to call ``release()``. ``readers`` is the number of
    further readers (``SnapshotReader``).

    ``planned`` resolves to the plan. From then on there are ``images``, which are filled one after the other. ``free``
    resolves when the sources may change, and ``copied`` when everything is in host memory.
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
        self.called_by = deadline
        """The deadline of the call, for ``mode="eager"``: the sources may change after it. ``deadline`` may be set anew
        when the stage is enqueued."""
        self.pace = pace
        self.device = device
        self.host = host
        """Whether there are sources in host memory."""
        self.planned: Future[P] = ThreadFuture()
        self.images: tuple[StagedImage, ...] = ()
        self.issued: Future[None] = ThreadFuture()
        """Resolves when all sources in host memory have been copied and all copies from devices have been enqueued, or
        when the stage has failed before that."""
        self.copied: StagingFuture[None] = StagingFuture(outcome)
        self.free: StagingFuture[None] = StagingFuture(self.copied)
        self.stop: Stop = Stop()
        self.passes = False
        """Whether the reader releases each image as soon as it can."""
        self.drain: Drain | None = None
        """The rate at which memory is returned. None if none is returned before everything is staged."""
        self.reasons = WaitReasons()
        """Why a caller has to wait for the sources."""
        self.on_copied: Callable[[], None] = _nothing
        """Called when ``copied`` has been resolved, in the thread that did that."""
        self.work: Future[None] | None = ThreadFuture()
        """The stager's part: to be queued, queued or running. None once the stage has to stop."""
        self.readers: frozenset[int] = frozenset(range(readers))
        """The numbers of further readers that have not left."""
        self.held_bytes = 0
        """The bytes that further readers may keep and that other stages cannot take back."""
        self._captured: Captured | None = captured
        self._lock = threading.Lock()
        self._parts = 1
        self.committed = self.superseded = self._released = False
        self._error: BaseException | None = None

    def take(self) -> Captured:
        """Return the captured state dict, once. The stage does not refer to it after that, so that the sources can be
        freed when they have been read."""
        captured, self._captured = self._captured, None
        assert captured is not None
        return captured

    @property
    def reads_later(self) -> bool:
        """Whether a writer of the sources has to wait for more than copies on its own stream."""
        return self.host or self.device is None or self.device.lazily

    # --- progress, in the stager's thread and the threads of devices ---

    def set_plan(self, plan: P, *, stays: bool = False) -> None:
        """Make the images of ``plan`` and resolve ``planned``. ``stays``: they may stay in memory for further
        readers."""
        # The stage may be released while it is being planned. ``release`` found no images then, so they are released
        # here. The lock makes sure that one of the two sees the other.
        with self._lock:
            others = self.readers if stays else ()
            self.images = tuple(StagedImage(layout.nbytes, others) for layout in plan.images)
            released = self._released
        if released:
            for image in self.images:
                image.release()
        self.planned.set_result(plan.without_sources())

    def commit(self) -> None:
        """Begin: from now on a newer stage does not supersede this one. Raises ``SkippedError`` if one has before."""
        with self._lock:
            if self.superseded:
                raise given_up(self)
            self.committed = True

    def queue(self, submit: Callable[[], Future[None]]) -> None:
        """Queue the stager's part with ``submit``. Raises what stopped the stage, if something has."""
        with self._lock:
            if self.work is None:
                raise given_up(self)
            self.work = submit()

    def part(self, image: StagedImage) -> Callable[[BaseException | None], None]:
        """Add a writer of ``image``. Returns a function that the writer calls once when it has ended, with its error if
        it failed."""
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
        """Count a part as ended. The last one resolves ``free`` and ``copied``."""
        with self._lock:
            # Parts end in different threads: the stager's, and one for each device. The last one resolves the futures
            # with the first error, when no copy reads a source or writes into memory any more.
            self._error = self._error or error
            self._parts -= 1
            if self._parts:
                return
            error = self._error
        if self.device is not None:
            self.device.drop()
        self._captured = None
        self.reasons.change(None)
        self._resolve(self.free, error)
        self._resolve(self.copied, error)
        self._call_on_copied()

    def freed(self, error: BaseException | None) -> None:
        """Resolve ``free`` before everything is in host memory, unless the copies on the devices failed."""
        if error is None:
            self.reasons.change(None)
            self._resolve(self.free, None)

    def fail_early(self, error: SidestreamError) -> None:
        """Resolve the futures of the stage with ``error``, although a device has not completed its copies. Until it
        has, the stage refers to their memory and to the sources."""
        self._resolve(
            self.free,
            DeadlineExceededError(
                f"{error}: do not change the sources before the device responds; it may still read them"
            ),
        )
        self._resolve(self.copied, error)
        self._call_on_copied()

    def _call_on_copied(self) -> None:
        """Call ``on_copied`` after ``copied`` is resolved, and drop it. It refers to this stage and its result, and the
        reference cycle would keep them alive."""
        with self._lock:
            on_copied, self.on_copied = self.on_copied, _nothing
        on_copied()

    @staticmethod
    def _resolve(future: StagingFuture[None], error: BaseException | None) -> None:
        """Resolve ``future``, unless it has been resolved before."""
        with suppress(InvalidStateError):
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    def fail(self, error: BaseException) -> None:
        """Fail the plan, unless it is made, and all images."""
        if not self.planned.done():
            self.planned.set_exception(error)
        for image in self.images:
            image.fail(error)

    # --- the reader and other stages ---

    def supersede(self) -> None:
        """Give way to a newer stage, unless this one has begun."""
        with self._lock:
            if self.committed:
                return
            self.superseded = True
        self.cancel()

    def release(self) -> None:
        """Stop the copies, and release the memory when nothing writes into it any more. Idempotent."""
        self.copied.mark_retrieved()
        with self._lock:
            self._released = True
        self.cancel()
        for image in self.images:
            image.release()

    def release_for(self, reader: int) -> None:
        """Remove a further reader from all images. Idempotent."""
        with self._lock:
            self.readers -= {reader}
            images = self.images
        for image in images:
            image.release_for(reader)

    def cancel(self) -> None:
        """Stop the copies. A stage that has not begun ends at once."""
        self.stop.set()
        with self._lock:  # several threads may call this at the same time
            # If the stager's thread has not begun the stage, or was not given it yet, it never will, so its futures are
            # resolved here. If it has begun, the flag makes it stop, and it resolves them itself.
            work, self.work = self.work, None
        if work is not None and work.cancel():
            error = given_up(self)
            self.fail(error)
            self.issued.set_result(None)
            self.part_done(error)


def _nothing() -> None:
    """The default of ``Staging.on_copied``."""


def clean(error: BaseException, where: str) -> BaseException:
    """Return ``error`` without the frames of its traceback. An error that is not one of sidestream gets the traceback
    as a note."""
    if not isinstance(error, SidestreamError) and error.__traceback__ is not None:
        error.add_note(f"in {where}:\n" + "".join(traceback.format_tb(error.__traceback__)))
    return without_frames(error)


def given_up(staging: Staging[Any]) -> SidestreamError:
    """The error of a stage that was stopped before it began."""
    if staging.superseded:
        return SkippedError("a newer stage has taken the place of this one, which had not begun")
    return ClosedError("this stage was given up before it had ended")


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
            return result_of(self._staging.planned, stop, "planning")
        except ClosedError as error:
            raise _lost(error, stop) from error

    @contextmanager
    def window(self, index: int, stop: Stop) -> Iterator[memoryview]:
        """Block until a window has been staged, and return its memory for the duration of the context. Only payloads
        have defined contents. Raises what ``plan`` raises, ``ArenaExhaustedError`` and ``SnapshotLostError``."""
        image = self._staging.images[index]
        try:
            view = image.read(self._number, stop=stop)
        except ClosedError as error:
            raise _lost(error, stop) from error
        try:
            yield view
        finally:
            del view  # and no release(): a tensor of torch.frombuffer() would not prevent it, and still use the memory
            image.release_for(self._number)

    def close(self) -> None:
        """Give up the windows that have not been read. Idempotent. May be called in any thread."""
        self._staging.release_for(self._number)


class FirstReader(Generic[P]):
    """The first and only reader of a stage that is not saved, with the methods of a ``SnapshotReader``. Each window is
    released when it has been read, so that a state larger than the budget passes through."""

    def __init__(self, staging: Staging[P]) -> None:
        self._staging = staging

    def plan(self, stop: Stop) -> P:
        """Block until the stage has a plan, and return the plan. Raises what ``SnapshotReader.plan`` raises."""
        return result_of(self._staging.planned, stop, "planning")

    @contextmanager
    def window(self, index: int, stop: Stop) -> Iterator[memoryview]:
        """Block until a window has been staged, and return its memory for the duration of the context."""
        image = self._staging.images[index]
        view = image.wait(image.nbytes, stop=stop)
        try:
            yield view.toreadonly()
        finally:
            del view
            image.release()

    def close(self) -> None:
        """Stop the stage, and release the windows that have not been read. Idempotent."""
        self._staging.release()


def _lost(error: ClosedError, stop: Stop) -> ClosedError | SnapshotLostError:
    """Return the error to raise for ``error``: itself if ``stop`` is set, otherwise ``SnapshotLostError``, because the
    save has stopped the copies."""
    return error if stop.is_set() else SnapshotLostError("the save has ended before everything was staged")


def wait_until_read(stagings: Sequence[Staging[Any]], engine: DeviceEngine | None, deadline: Deadline) -> None:
    """Make the caller, and its current streams, wait until ``stagings`` have read their sources.

    The streams wait for copies from a device. The caller blocks only until those are enqueued. Raises
    ``ArenaExhaustedError`` if a stage still waits for memory when ``deadline`` passes, and ``DeadlineExceededError`` if
    it is late for another reason.
    """
    # Three passes. First the graphs: an error must come before any stream has been made to wait. Then all limits of
    # rate are lifted, because the first wait would otherwise be for a stage that is slow on purpose. Then the waits, in
    # the order of the stages.
    for staging in stagings:
        if staging.device is not None and engine is not None:
            engine.check_fence(staging.device)
    for staging in stagings:
        staging.pace.lift_limit()
    for staging in stagings:
        if staging.reads_later:
            wait([staging.issued], deadline.remaining_s())
            if not staging.issued.done() and staging.reasons.now == "memory":
                raise ArenaExhaustedError(
                    f"a stage found no memory within timeout_s={deadline.timeout_s:g}, and its sources must not change "
                    "before it has: release() staged state dicts, raise budget_bytes=, or choose when_full="
                )
            if not staging.issued.done():
                raise DeadlineExceededError(f"a stage was not copied within timeout_s={deadline.timeout_s:g}")
        if staging.device is not None and engine is not None:
            engine.fence(staging.device)


def guard(fence: Callable[[], None], optimizer: torch.optim.Optimizer | None) -> Any:
    """Call ``fence`` before each step of ``optimizer``, or of every optimizer. Returns the handle of torch."""
    hook = outside_compile(fence)
    if optimizer is None:
        return register_optimizer_step_pre_hook(hook)
    return optimizer.register_step_pre_hook(hook)
