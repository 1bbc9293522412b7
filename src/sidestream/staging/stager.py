"""``AsyncStager``: copy a live state dict to host memory while the program goes on."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from .._tasks import finish
from .._threads import Deadline, Stop, Threads, politely
from ..errors import Closed, DeadlineExceeded, ForkedProcess, InvalidOption, SidestreamError
from ..options import check_count, check_timeout
from .arena import Arena, ArenaStatistics
from .engine import Engine, HostEngine
from .future import Copied, StagingFuture
from .image import ImageLayout, StagedImage
from .tree import StagedState, Template, plan_stage

__all__ = ["AsyncStager", "StageMode", "Staging"]

T = TypeVar("T")
StageMode = Literal["lazy", "snapshot"]


class Staging:
    """Images on their way into memory, for one reader. Whoever holds it has to ``release()`` it.

    ``copied`` resolves when the sources may change; ``images`` are filled one after the other.
    """

    def __init__(self, layouts: Sequence[ImageLayout], deadline: Deadline) -> None:
        self.images = tuple(StagedImage(layout.nbytes) for layout in layouts)
        self.copied: StagingFuture[None] = StagingFuture()
        self.deadline = deadline
        self.stop = Stop()
        self.work: Future[None] | None = None

    def release(self) -> None:
        """Stop what is still being copied, and give the memory back once nothing writes into it. Idempotent."""
        self.copied.heard = True
        self.stop.set()
        if self.work is not None and self.work.cancel() and not self.copied.done():  # it had not begun, and never will
            error = Closed("this stage was given up before it began")
            for image in self.images:
                image.fail(error)
            self.copied.set_exception(error)
        for image in self.images:
            image.release()


class AsyncStager:
    """Copies state dicts into leased host memory in a thread of its own.

    ``budget_bytes`` bounds the host memory that is mapped at any time (None: half of the machine's memory); a stage
    that finds none free waits for it, up to ``timeout_s``. With ``mode="lazy"`` copies go on after ``stage()`` has
    returned, and the sources must not change before ``synchronize_staging()``, ``fence()`` or a ``guard()`` says so;
    a source that does change has undefined contents in the copy (that tensor alone). With ``mode="snapshot"``
    ``stage()`` returns when everything has been copied.

    A stager belongs to no loop and may be used from any thread. Use it as ``async with`` or call ``aclose()``. DCP
    takes it as ``dcp.async_save(..., async_stager=stager)``.
    """

    _synchronize_after_execute = False  # DCP: the future that stage() returns says when the sources are free

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        mode: StageMode = "lazy",
        timeout_s: float = 600.0,
        engine: Engine | None = None,
    ) -> None:
        if mode not in ("lazy", "snapshot"):
            raise InvalidOption(f'mode={mode!r} has to be "lazy" or "snapshot"')
        check_timeout(timeout_s)
        if budget_bytes is not None:
            check_count("budget_bytes", budget_bytes)
        self._mode = mode
        self._timeout_s = timeout_s
        self._engine = engine or HostEngine()
        self._arena = Arena(_half_of_memory() if budget_bytes is None else budget_bytes)
        self._threads = Threads("sidestream-stage", 1)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._futures: list[StagingFuture[Any]] = []
        self._stagings: list[Staging] = []
        self._closed = False

    # --- what users call ---

    def stage(self, state_dict: Mapping[str, Any]) -> StagingFuture[StagedState]:
        """Launch the copies of every tensor in ``state_dict`` and return at once; other values are copied here.

        The result is a ``StagedState`` in host memory with the same structure, strides and shared storages. Raises
        ``UnsupportedTensor`` before anything is copied and ``Closed``; the future raises ``ArenaExhausted`` when the
        budget does not suffice. Cancelling an awaiter leaves the copy going.
        """
        self._check_usable()
        template, layout = plan_stage(state_dict)
        staging = Staging((layout,), Deadline.after(self._timeout_s))
        future: StagingFuture[StagedState] = StagingFuture()
        self._launch((layout,), staging, partial(_build, template, staging, future))
        self._track(future)
        if self._mode == "snapshot":
            wait([future])
        return future

    def synchronize_staging(self) -> Awaitable[None]:
        """Await it: every stage launched so far has been copied, so the sources may change. Raises what one raised."""
        return Copied(self._outstanding())

    def fence(self, timeout_s: float | None = None) -> None:
        """Block the calling thread until every stage launched so far has been copied. Raises what one of them raised,
        and ``DeadlineExceeded``. On the loop, await ``synchronize_staging()`` instead."""
        stages = self._outstanding()
        limit = self._timeout_s if timeout_s is None else timeout_s
        _, unfinished = wait(stages, limit)
        if unfinished:
            raise DeadlineExceeded(f"{len(unfinished)} stages were not copied within timeout_s={limit:g}")
        failed = [error for stage in stages if (error := stage.exception()) is not None]
        if failed:
            raise failed[0]

    def guard(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call ``fence()`` before each ``optimizer.step()``. Returns torch's handle; its ``remove()`` ends that."""
        return optimizer.register_step_pre_hook(lambda *_: self.fence())

    def statistics(self) -> ArenaStatistics:
        """Bytes reserved and leased right now."""
        return self._arena.statistics()

    def prewarm(self, nbytes: int) -> StagingFuture[None]:
        """Map and touch ``nbytes`` in the stager's thread, so that the first stage is as fast as the later ones."""
        self._check_usable()
        warmed: StagingFuture[None] = StagingFuture()
        deadline = Deadline.after(self._timeout_s)
        self._threads.submit(
            _settle, warmed, lambda: self._arena.lease(nbytes, deadline=deadline, stop=Stop()).release()
        )
        self._track(warmed)
        return warmed

    # --- what sidestream.save calls ---

    def stage_images(self, layouts: Sequence[ImageLayout], deadline: Deadline) -> Staging:
        """Launch the filling of one image per layout, in order.

        Memory is leased image by image, so that a state larger than the budget passes through if earlier images are
        released as they are read.
        """
        self._check_usable()
        staging = Staging(layouts, deadline)
        self._launch(layouts, staging, lambda: None)
        if self._mode == "snapshot":
            wait([staging.copied])
        return staging

    # --- DCP's AsyncStager protocol ---

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def close(self) -> None:
        """Take no more stages, let those in flight end, and give the memory back when the last reference is gone.
        Blocks; what is not copied within ``timeout_s`` fails with ``Closed``."""
        self._closed = True
        wait(self._outstanding(), self._timeout_s)
        self._shut_down()

    # --- closing ---

    async def aclose(self) -> None:
        """As ``close()``, without blocking the loop. Raises the first error of a stage that nobody has awaited.
        Cancelling it stops the stages in flight: their futures raise ``Closed``."""
        self._closed = True
        try:
            await Copied(self._outstanding())
        finally:
            await finish(self._shut_down_off_loop)

    async def _shut_down_off_loop(self) -> None:
        """Unmapping gigabytes takes its time; the pool for storage may be full of threads that hang."""
        await Threads("sidestream-close", 1).run(self._shut_down)

    def _shut_down(self) -> None:
        with self._lock:
            stagings, self._stagings = self._stagings, []
        for staging in stagings:
            staging.stop.set()
        self._threads.close()
        self._arena.close()

    async def __aenter__(self) -> AsyncStager:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- inside ---

    def _launch(self, layouts: Sequence[ImageLayout], staging: Staging, then: Callable[[], None]) -> None:
        """Fill the images and resolve ``staging.copied``, then call ``then``, all in the stager's thread."""
        fill = partial(self._fill, tuple(layouts), staging)

        def work() -> None:
            _settle(staging.copied, fill)
            then()

        staging.work = self._threads.submit(work)
        self._track(staging.copied)
        with self._lock:
            self._stagings = [one for one in self._stagings if not one.copied.done()] + [staging]

    def _fill(self, layouts: Sequence[ImageLayout], staging: Staging) -> None:
        """In the stager's thread."""
        for index, (layout, image) in enumerate(zip(layouts, staging.images, strict=True)):
            try:
                staging.stop.check()
                image.begin(self._arena.lease(layout.nbytes, deadline=staging.deadline, stop=staging.stop))
                self._fill_image(layout, image, staging.stop)
            except BaseException as error:
                for unfilled in staging.images[index:]:
                    unfilled.fail(error)
                raise
            finally:
                image.finish()

    def _fill_image(self, layout: ImageLayout, image: StagedImage, stop: Stop) -> None:
        base = image.lease().address
        for copy in politely(layout.copies, every=64):
            advance = partial(image.advance_from, copy.offset)
            self._engine.copy(copy, base + copy.offset, stop=stop, copied=advance)
        image.advance(layout.nbytes)

    def _track(self, future: StagingFuture[Any]) -> None:
        with self._lock:
            self._futures = [one for one in self._futures if not one.heard] + [future]
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[Any]) -> None:
        """Only failures are kept, until somebody has heard of them: a result would keep its memory."""
        if Future.exception(future) is None:
            with self._lock:
                self._futures = [one for one in self._futures if one is not future]

    def _outstanding(self) -> list[StagingFuture[Any]]:
        """In flight, or failed and not heard of yet."""
        with self._lock:
            return [one for one in self._futures if not one.heard]

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this stager was made before os.fork(); make a new one in the child")
        if self._closed:
            raise Closed("this stager is closed; make a new one")


def _build(template: Template, staging: Staging, future: StagingFuture[StagedState]) -> None:
    """In the stager's thread, which has just filled the one image of ``staging``: the state dict over it."""
    (image,) = staging.images

    def state() -> StagedState:
        staging.copied.result()
        return template.build(image.lease())

    _settle(future, state)
    image.release()


def _settle(future: StagingFuture[T], work: Callable[[], T]) -> None:
    """The edge of the stager's thread: whatever happens ends in the future."""
    try:
        result = work()
    except BaseException as error:
        if not isinstance(error, SidestreamError):
            error.add_note("in the stager's thread:\n" + "".join(traceback.format_tb(error.__traceback__)))
        # The frames behind the traceback would keep the sources alive for as long as somebody keeps the error.
        future.set_exception(error.with_traceback(None))
    else:
        future.set_result(result)


def _half_of_memory() -> int:
    """Of the machine's, or of what a control group allows this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    return min(limits) // 2
