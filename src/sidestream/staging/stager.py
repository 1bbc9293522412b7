"""``AsyncStager``: copy a live state dict to host memory while the program goes on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

import torch

from .._threads import Deadline, Stop, Threads
from ..errors import Closed, DeadlineExceeded, ForkedProcess, InvalidOption
from .arena import Arena, ArenaStatistics
from .engine import Engine, HostEngine
from .image import ImageLayout, StagedImage
from .tree import StagedState, plan_stage

__all__ = ["AsyncStager", "StageMode", "StagingFuture"]

T = TypeVar("T")
StageMode = Literal["lazy", "snapshot"]


class StagingFuture(Future[T], Generic[T]):
    """A ``concurrent.futures.Future`` that can be awaited too, from any task of any loop, and any number of times.

    It counts as running from the beginning: cancelling one awaiter cancels neither the copy nor the other awaiters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.retrieved = False
        self.set_running_or_notify_cancel()

    def __await__(self) -> Generator[Any, None, T]:
        self.retrieved = True
        return asyncio.shield(asyncio.wrap_future(self)).__await__()

    def result(self, timeout: float | None = None) -> T:
        self.retrieved = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.retrieved = True
        return super().exception(timeout)


class _Copied:
    """Awaitable (and harmless when it is not awaited, as DCP does): all stages launched before have ended."""

    def __init__(self, stages: Sequence[StagingFuture[Any]]) -> None:
        self._stages = stages

    def __await__(self) -> Generator[Any, None, None]:
        for stage in self._stages:
            yield from stage.__await__()


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
        self._mode = mode
        self._timeout_s = timeout_s
        self._engine = engine or HostEngine()
        self._arena = Arena(_half_of_memory() if budget_bytes is None else budget_bytes)
        self._threads = Threads("sidestream-stage", 1)
        self._stop = Stop()
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._stages: list[StagingFuture[Any]] = []  # in flight, or failed and not yet heard of
        self._closed = False

    # --- what users call ---

    def stage(self, state_dict: Mapping[str, Any]) -> StagingFuture[StagedState]:
        """Launch the copies of every tensor in ``state_dict`` and return at once; other values are copied here.

        The result is a ``StagedState`` in host memory with the same structure, strides and shared storages. Raises
        ``UnsupportedTensor`` before anything is copied and ``Closed``; the future raises ``ArenaExhausted`` when the
        budget does not suffice. Cancelling an awaiter leaves the copy going.
        """
        template = plan_stage(state_dict)
        (image,), future = self._launch((template.layout,), lambda images: template.build(images[0].lease()))
        future.add_done_callback(lambda _: image.release())
        return future

    def synchronize_staging(self) -> Awaitable[None]:
        """Await it: every stage launched so far has been copied, so the sources may change. Raises what one raised."""
        return _Copied(self._outstanding())

    def fence(self, timeout_s: float | None = None) -> None:
        """Block the calling thread until every stage launched so far has been copied. Raises what one of them raised,
        and ``DeadlineExceeded``. On the loop, await ``synchronize_staging()`` instead."""
        stages = self._outstanding()
        limit = self._timeout_s if timeout_s is None else timeout_s
        _, unfinished = wait(stages, limit)
        if unfinished:
            raise DeadlineExceeded(f"{len(unfinished)} stages were not copied within timeout_s={limit:g}")
        for stage in stages:
            stage.result()

    def guard(self, optimizer: torch.optim.Optimizer) -> Any:
        """Call ``fence()`` before each ``optimizer.step()``. Returns torch's handle; its ``remove()`` ends that."""
        return optimizer.register_step_pre_hook(lambda *_: self.fence())

    def statistics(self) -> ArenaStatistics:
        """Bytes reserved and leased right now."""
        return self._arena.statistics()

    def prewarm(self, nbytes: int) -> StagingFuture[None]:
        """Map and touch ``nbytes`` in the stager's thread, so that the first stage is as fast as the later ones."""
        self._check_usable()
        future: StagingFuture[None] = StagingFuture()
        self._track(future)
        self._threads.submit(self._settle, future, lambda: self._arena.reserve(nbytes))
        return future

    # --- what sidestream.save calls ---

    def stage_images(self, layouts: Sequence[ImageLayout]) -> tuple[tuple[StagedImage, ...], StagingFuture[None]]:
        """Launch the filling of one image per layout, in order. The caller has to ``release()`` every image.

        Memory is leased image by image, so that a state larger than the budget passes through if earlier images are
        released as they are read.
        """
        return self._launch(layouts, lambda _: None)

    # --- DCP's AsyncStager protocol ---

    @property
    def should_synchronize_after_execute(self) -> bool:
        return self._synchronize_after_execute

    def close(self) -> None:
        """Take no more stages, let those in flight end, and give the memory back when the last reference is gone."""
        self._closed = True
        wait(self._stages, self._timeout_s)
        self._stop.set()
        self._threads.close()
        self._arena.close()

    # --- closing ---

    async def aclose(self) -> None:
        """As ``close()``, without blocking the loop. Raises the error of a stage that nobody has awaited."""
        self._closed = True
        try:
            for stage in self._outstanding():
                await stage
        finally:
            self._stop.set()
            self._threads.close()
            self._arena.close()

    async def __aenter__(self) -> AsyncStager:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- inside ---

    def _launch(
        self, layouts: Sequence[ImageLayout], finish: Callable[[tuple[StagedImage, ...]], T]
    ) -> tuple[tuple[StagedImage, ...], StagingFuture[T]]:
        self._check_usable()
        images = tuple(StagedImage(layout.nbytes) for layout in layouts)
        future: StagingFuture[T] = StagingFuture()

        def work() -> T:
            self._fill(layouts, images)
            return finish(images)

        self._track(future)
        self._threads.submit(self._settle, future, work)
        if self._mode == "snapshot":
            wait([future])
        return images, future

    def _fill(self, layouts: Sequence[ImageLayout], images: Sequence[StagedImage]) -> None:
        deadline = Deadline.after(self._timeout_s)
        for index, (layout, image) in enumerate(zip(layouts, images, strict=True)):
            try:
                if not image.released:
                    image.begin(self._arena.lease(layout.nbytes, deadline=deadline, stop=self._stop))
                    self._fill_image(layout, image)
            except BaseException as error:
                for unfilled in images[index:]:
                    unfilled.fail(error)
                raise
            finally:
                image.finish()

    def _fill_image(self, layout: ImageLayout, image: StagedImage) -> None:
        base = image.lease().address
        for copy in layout.copies:
            if image.released:
                return
            advance = partial(image.advance_from, copy.offset)
            self._engine.copy(copy, base + copy.offset, stop=self._stop, copied=advance)
        image.advance(layout.nbytes)

    def _settle(self, future: StagingFuture[T], work: Callable[[], T]) -> None:
        """The edge of the stager's thread: whatever happens ends in the future."""
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            with self._lock:
                self._stages.remove(future)
            future.set_result(result)

    def _track(self, future: StagingFuture[Any]) -> None:
        with self._lock:
            self._stages = [stage for stage in self._stages if not (stage.done() and stage.retrieved)]
            self._stages.append(future)

    def _outstanding(self) -> list[StagingFuture[Any]]:
        with self._lock:
            return [stage for stage in self._stages if not (stage.done() and stage.retrieved)]

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this stager was made before os.fork(); make a new one in the child")
        if self._closed:
            raise Closed("this stager is closed; make a new one")


def _half_of_memory() -> int:
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
