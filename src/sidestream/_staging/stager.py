"""``AsyncStager``: copies a live state dict to host memory while the program continues."""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import islice, takewhile
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch

from .._runtime.gil import give_turns
from .._runtime.public import public
from .._runtime.rate import RateLimiter
from .._runtime.tasks import run_shielded, running_loop
from .._runtime.threads import Deadline, Stop, Threads, TorchThreads, time_limit
from .._runtime.unretrieved import UnretrievedErrors, raise_all
from .._runtime.waits import caller_waits
from ..errors import (
    ArenaExhaustedError,
    AsyncOnlyError,
    ClosedError,
    DeadlineExceededError,
    ForkedProcessError,
    InvalidOptionError,
    SidestreamError,
    SkippedError,
)
from ..events import WaitReason
from ..options import Backing, StageMode, WhenFull, check_choice, check_count, check_timeout
from .arena import PAGE_BYTES, Allocation, Arena, ArenaStatistics, MappedMemory, whole_pages
from .captured import Captured, capture
from .device import DeviceEngine
from .drain import Drain
from .driver import driver_for
from .future import Copied, StagingFuture, raise_first
from .host import HostEngine
from .idle import IdleMemory
from .image import Copy, ImageLayout, StagedImage
from .plans import PlanCache
from .stage import ImagePlan, Staging, clean, given_up, guard, wait_until_read
from .tree import StagedState, StagePlan, plan_stage

_GRACE_S = 5.0
_STOPPED_S = 1.0
_HELD_SHARE = 4  # the part of the budget for windows that further readers are reading
_NO_LIMIT = RateLimiter(None)
P = TypeVar("P", bound=ImagePlan)
_Image: TypeAlias = tuple[ImageLayout, StagedImage]
_IS_CPU = attrgetter("is_cpu")


@public
class AsyncStager:
    """Copies state dicts into host memory, in threads of its own, while the program continues.

    A stager belongs to no event loop, and any thread may use it. Enter it with ``async with``, or call ``aclose()`` or
    ``close()`` at the end. DCP takes it as ``dcp.async_save(..., async_stager=stager)``.

    A forked child cannot use it: its calls raise ``ForkedProcessError`` there.

    Args:
        budget_bytes: The most host memory that is mapped at any time, in bytes. None: half of the machine's memory,
            divided by ``LOCAL_WORLD_SIZE``, the number of ranks on the host, if that is set (torchrun sets it).
        mode: When tensors are copied. With ``"lazy"`` copies continue after ``stage()`` has returned, and the sources
            must not change before ``synchronize_staging()``, ``fence()`` or ``guard()``; a source that changes earlier
            has undefined contents in the copy, that tensor alone. With ``"eager"`` the sources may change when
            ``stage()`` has returned: tensors on a device are copied on the device first, in stream order, which takes
            as much device memory again, and tensors in host memory are copied before it returns.
        when_full: What a stage does that finds no memory free within the budget (``options.WhenFull``).
        max_bytes_per_second: The rate of the copies, until a writer waits at the fence. None: no limit.
        timeout_s: The limit of each stage, of each ``fence()`` and of closing, in seconds.
        backing: ``"shared"``: memory that a writer process can be handed, from the first byte. A save with
            ``writer="process"`` asks for it too, and maps anew what was private until then. A forked child sees later
            stages in it.
        engine: An engine for tests, in place of the one that the tensors need.

    Raises:
        InvalidOptionError: An argument is wrong.
    """

    _synchronize_after_execute = False  # read by DCP: the future of stage() resolves when the sources may change

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        mode: StageMode = "lazy",
        when_full: WhenFull = "wait",
        max_bytes_per_second: float | None = None,
        timeout_s: float = 600.0,
        backing: Backing = "private",
        engine: DeviceEngine | HostEngine | None = None,
    ) -> None:
        check_choice("mode", mode, StageMode)
        check_choice("backing", backing, Backing)
        check_choice("when_full", when_full, WhenFull)
        check_timeout(timeout_s)
        if budget_bytes is not None:
            check_count("budget_bytes", budget_bytes)
        if max_bytes_per_second is not None and not max_bytes_per_second > 0:
            raise InvalidOptionError(f"max_bytes_per_second={max_bytes_per_second!r} has to be positive")
        self._mode: StageMode = mode
        self._when_full: WhenFull = when_full
        self._bytes_per_second = max_bytes_per_second
        self._timeout_s = timeout_s
        self._host = engine if isinstance(engine, HostEngine) else engine.host if engine else HostEngine()
        self._device = engine if isinstance(engine, DeviceEngine) else None
        self._arena = Arena(share_of_memory() if budget_bytes is None else budget_bytes, backing=backing)
        self._plans = PlanCache()
        self._idle = IdleMemory(self._arena)
        self._threads = TorchThreads("sidestream-stage", 1, self._idle)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._unretrieved: UnretrievedErrors[StagingFuture[Any]] = UnretrievedErrors()
        self._stagings: list[Staging[Any]] = []
        self._read: list[Staging[Any]] = []  # the stages with further readers
        self._closed = False

    # --- what users call ---

    def stage(
        self,
        state_dict: Mapping[str, Any],
        *,
        wait_streams: Sequence[Any] = (),
        copy_value: Callable[[Any], Any] = copy.deepcopy,
    ) -> StagingFuture[StagedState]:
        """Launch the copies of every tensor in ``state_dict``, and return at once. Other values are copied during the
        call.

        The copy has what the tensors hold after all work that the current streams and ``wait_streams`` have been given
        so far. Cancelling an awaiter of the result leaves the copies running.

        Args:
            state_dict: Nested dicts, lists and tuples of tensors and values.
            wait_streams: Further streams, beside the current ones, whose work the copies wait for.
            copy_value: Copies each value that is not a tensor, number, text or container.

        Returns:
            A future of a ``StagedState`` in host memory, with the same structure, shapes, strides and shared storages.
            It raises ``UnsupportedTensorError`` for a tensor that has no bytes, ``ArenaExhaustedError`` if the budget
            does not suffice, ``SkippedError`` as ``when_full`` says, and ``DeadlineExceededError``.

        Raises:
            ClosedError: The stager was closed.
            ForkedProcessError: The stager was made before a fork, in the parent.
            GraphCaptureError: A stream that the copies need is being captured. Nothing was enqueued.
            InvalidOptionError: ``state_dict`` is not a state dict.
            UnsafeObjectError: A value cannot be copied.
        """
        return self.launch_state(state_dict, Deadline.after(self._timeout_s), wait_streams, copy_value)[1]

    def synchronize_staging(self) -> Awaitable[None]:
        """Return an awaitable that is done when the sources of every stage launched so far may change.

        A cancel of the awaiting task leaves the copies running. Awaiting it raises the error of a stage that has
        failed.

        Returns:
            The awaitable. It is harmless not to await it, as DCP does.

        Raises:
            ForkedProcessError: The stager was made before a fork, in the parent.
        """
        self._check_process()
        stagings = self._in_flight()
        for staging in stagings:
            staging.pace.lift_limit()
        return Copied(
            [one for one in self._unretrieved.operations() if one.done()] + [staging.free for staging in stagings],
            [staging.reasons for staging in stagings],
        )

    def fence(self, timeout_s: float | None = None) -> None:
        """Order what the caller does next, on the host or on its current streams, after the reading of the sources.

        Copies from a device are waited for on the device. Copies from host memory, and copies that could not be
        enqueued for want of memory, block the calling thread. On an event loop await ``synchronize_staging()`` in place
        of this.

        Args:
            timeout_s: The limit of the wait, in seconds. None: that of the stager.

        Raises:
            ArenaExhaustedError, UnsupportedTensorError, DeviceError: A stage has failed with this error. Each error is
                raised once.
            DeadlineExceededError: The copies were not done in time. The sources must not change yet.
            GraphCaptureError: A stream that the fence needs is being captured.
            ForkedProcessError: The stager was made before a fork, in the parent.
        """
        self._check_process()
        deadline = Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        stagings = self._in_flight()
        with caller_waits("fence", [staging.reasons for staging in stagings]):
            wait_until_read(stagings, self._device, deadline)
        raise_first(self._unretrieved.operations())

    def guard(self, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Call ``fence()`` before each step of an optimizer.

        A replayed CUDA graph makes no call: call ``fence()`` before the replay.

        Args:
            optimizer: The optimizer. None: all optimizers of the process, also those that step during backward.

        Returns:
            A handle of torch, whose ``remove()`` ends the calls.
        """
        return guard(self.fence, optimizer)

    def statistics(self) -> ArenaStatistics:
        """Return how much memory is mapped, registered and in use now, in bytes."""
        return self._arena.statistics()

    def prewarm(self, state_dict: Mapping[str, Any]) -> StagingFuture[None]:
        """Map and touch memory for a state in a thread of the stager, so that the first stage is as fast as later ones.
        Nothing is copied.

        Args:
            state_dict: The state that will be staged.

        Returns:
            A future that is done when the memory is ready. It raises ``ArenaExhaustedError`` or
            ``DeadlineExceededError``. A cancel of its awaiter leaves what has been mapped.

        Raises:
            ClosedError: The stager was closed.
            ForkedProcessError: The stager was made before a fork, in the parent.
            InvalidOptionError: ``state_dict`` is not a state dict.
        """
        return self.prewarm_for(capture(state_dict, lambda value: value))

    def reserve(self, nbytes: int) -> StagingFuture[None]:
        """Map and touch memory, as ``prewarm()`` does.

        Args:
            nbytes: How much memory, in bytes.

        Returns:
            A future that is done when the memory is ready, as for ``prewarm()``.

        Raises:
            ClosedError: The stager was closed.
            ForkedProcessError: The stager was made before a fork, in the parent.
            InvalidOptionError: ``nbytes`` is not a positive integer.
        """
        check_count("nbytes", nbytes)
        return self._prewarm(nbytes, [])

    def _prewarm(self, nbytes: int, tensors: list[torch.Tensor]) -> StagingFuture[None]:
        self._check_usable()
        on_device = self._split(tensors)  # finds the engine, which registers what is mapped
        warmed: StagingFuture[None] = StagingFuture()
        nbytes = min(nbytes, self.budget_bytes)
        self._threads.submit(self._warm, warmed, nbytes, on_device[:1], Deadline.after(self._timeout_s))
        self._unretrieved.track(warmed)
        return warmed

    def trim(self) -> None:
        """Unmap the memory that is not in use. The next stage maps memory again.

        It blocks: memory that is registered with a device is unregistered first, in a thread of the library.

        Raises:
            DeadlineExceededError: Unregistering took longer than ``timeout_s``.
        """
        self._arena.trim(Deadline.after(self._timeout_s))

    # --- what sidestream.save calls ---

    @property
    def plans(self) -> PlanCache:
        """The plans that are kept for states that come again."""
        return self._plans

    @property
    def budget_bytes(self) -> int:
        """The most host memory that is mapped at any time, in bytes."""
        return self._arena.budget_bytes

    def prewarm_for(self, captured: Captured) -> StagingFuture[None]:
        """Map and touch memory for a captured state dict, as ``prewarm()`` does."""
        tensors = captured.tensors
        # The most that the layout of a save needs: whole pages, and a frame for each tensor.
        nbytes = sum(tensor.nbytes + 4096 + (PAGE_BYTES if tensor.nbytes >= 1 << 16 else 0) for tensor in tensors)
        return self._prewarm(nbytes, tensors)

    @property
    def wanted_bytes(self) -> int:
        """The memory that the stager has, or will have when it has grown to the size of the state that it saves, in
        bytes."""
        return max(self._arena.statistics().reserved_bytes, self._idle.wanted_bytes)

    def set_aside(self, nbytes: int) -> None:
        """Keep ``nbytes`` of memory at most, for ten minutes, because nothing is staged for a while."""
        self._threads.submit(self._set_aside, nbytes)

    def _set_aside(self, nbytes: int) -> None:
        self._arena.trim_idle(nbytes)
        self._idle.set_aside(nbytes)

    def close_later(self) -> None:
        """Close in the stager's thread, where nothing is staged any more. Does not wait."""
        self._closed = True
        self._threads.submit(self._arena.trim_idle)
        self._threads.submit(self._arena.close)
        self._threads.close()
        self._host.close()
        if self._device is not None:
            self._device.close()

    def shared_memory(self) -> list[MappedMemory]:
        """Return all of its memory that exists now and that another process can be handed."""
        return self._arena.shared_memory()

    def share(self) -> None:
        """Map memory that a writer process can be handed, from here on."""
        self._arena.share()

    def launch(
        self,
        captured: Captured,
        lay_out: Callable[[Captured], P],
        deadline: Deadline,
        wait_streams: Sequence[Any] = (),
        *,
        readers: int = 0,
        passes: bool = False,
        outcome: StagingFuture[StagedState] | None = None,
    ) -> Staging[P]:
        """``prepare`` a stage and ``enqueue`` it."""
        staging: Staging[P] = self.prepare(
            captured, deadline, wait_streams, readers=readers, passes=passes, outcome=outcome
        )
        try:
            self.enqueue(staging, lay_out)
        except BaseException:
            staging.release()
            raise
        return staging

    def prepare(
        self,
        captured: Captured,
        deadline: Deadline,
        wait_streams: Sequence[Any] = (),
        *,
        readers: int = 0,
        passes: bool = False,
        outcome: StagingFuture[StagedState] | None = None,
    ) -> Staging[Any]:
        """Return a stage of the state as it is now, in the order of the current streams. Nothing is copied before
        ``enqueue``, except on devices; ``fence()`` waits for the stage from here on.

        ``readers`` is the number of further readers, each with a
        ``SnapshotReader``. ``passes``: the first reader releases each image as soon as it can, so that its memory may
        be used again within this stage. ``outcome`` resolves to the staged state dict, for a plan of ``plan_stage``.
        """
        self._check_usable()
        on_device = self._split(captured.tensors)
        stage = None
        if on_device and self._device is not None:
            # In the thread of the caller. The copies have to be ordered after the work that the current streams of this
            # thread have been given so far, and only this thread can say which streams those are.
            stage = self._device.begin(
                on_device,
                mode=self._mode,
                volatile=captured.volatile,
                wait_streams=wait_streams,
                root=captured.root,
            )
            # The small tensors, and those that forward changes, have been copied on the device now. What happens to
            # them later does not matter any more.
            captured.held.update(stage.held)
        host = len(on_device) < len(captured.tensors)
        pace = RateLimiter(self._bytes_per_second) if self._bytes_per_second is not None else _NO_LIMIT
        staging: Staging[Any] = Staging(
            captured, deadline, pace, device=stage, host=host, outcome=outcome, readers=readers
        )
        staging.on_copied = partial(self._ended, staging, outcome)
        staging.passes = passes and stage is None
        if stage is not None and self._device is not None and not staging.reads_later:
            # Everything has a copy on the device, so the sources are free when those copies have ended, long before the
            # bytes are in host memory.
            self._device.watch_ready(stage, staging.freed)
        try:
            with self._lock:
                self._stagings.append(staging)
            # The loop that called gives turns to the stager's threads until the copies have ended. Beside a loop that
            # always has something to do they would starve otherwise.
            give_turns(staging.copied)
            self._unretrieved.track(staging.copied if outcome is None else outcome)
        except BaseException:  # a signal: the fence must not wait for it
            staging.release()
            raise
        return staging

    def enqueue(self, staging: Staging[P], lay_out: Callable[[Captured], P]) -> None:
        """Let the stager's thread copy ``staging``, in images that ``lay_out`` plans. ``lay_out`` is called there.

        The images are filled in order, and memory is leased image by image. So a state larger than the budget can be
        staged if earlier images are released as they are read. The reader calls ``wait_if_eager()`` when it is ready to
        read.
        """
        self._check_usable()
        with self._lock, time_limit(staging.deadline):
            older = list(takewhile(lambda one: one is not staging, self._stagings))
            staging.queue(lambda: self._threads.submit(self._conduct, staging, lay_out))
        # Only now. If the new stage could not be queued, the older ones would have been skipped for nothing.
        for earlier in older if self._when_full == "latest" else ():
            earlier.supersede()

    def launch_state(
        self,
        state_dict: Mapping[str, Any],
        deadline: Deadline,
        wait_streams: Sequence[Any] = (),
        copy_value: Callable[[Any], Any] = copy.deepcopy,
    ) -> tuple[Staging[StagePlan], StagingFuture[StagedState]]:
        """Stage ``state_dict`` as ``stage()`` does, and return its staging beside the future. ``release()`` of the
        staging stops it, and changes nothing that has been delivered."""
        self._check_usable()  # before values are copied
        future: StagingFuture[StagedState] = StagingFuture()
        lay_out = partial(plan_stage, self._plans)
        staging = self.launch(capture(state_dict, copy_value), lay_out, deadline, wait_streams, outcome=future)
        self.wait_if_eager(staging)
        return staging, future

    def wait_if_eager(self, staging: Staging[Any]) -> None:
        """Copy sources in host memory before this returns, as ``mode="eager"`` promises. It blocks for the copies, and
        for memory if there is none, until the deadline of the stage at most."""
        if self._mode == "eager" and staging.host:
            for earlier in self._in_flight():
                earlier.pace.lift_limit()
            wait([staging.issued], staging.called_by.remaining_s())

    # --- DCP's AsyncStager protocol ---

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: DCP does not wait for ``synchronize_staging()``, because the future of ``stage()`` says when the
        sources are free."""
        return self._synchronize_after_execute

    def close(self) -> None:
        """Take no more stages, wait for those in flight, and give the memory back when the last reference to it is
        gone.

        It blocks. Memory that a device may still write to stays mapped until the device responds. In a forked child it
        does nothing.

        Raises:
            DeadlineExceededError: A stage did not end within ``timeout_s``, and was stopped: its future raises
                ``ClosedError``.
            SidestreamError: The first error of a stage that was not retrieved.
        """
        self.close_by(Deadline.after(self._timeout_s))

    def close_by(self, deadline: Deadline) -> None:
        """Close as ``close()`` does, with a deadline other than that of the stager."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        ended = self._unretrieved.wait(deadline.remaining_s())
        stages = self._unretrieved.operations()
        self._shut_down(deadline)
        if not ended:
            raise self._not_ended()
        raise_all(stages)

    # --- closing ---

    async def aclose(self) -> None:
        """Close as ``close()`` does, without blocking the event loop.

        A cancel stops the stages in flight: their futures raise ``ClosedError``. Memory and threads are given back in
        either case.

        Raises:
            DeadlineExceededError: A stage did not end within ``timeout_s``, and was stopped: its future raises
                ``ClosedError``.
            SidestreamError: The first error of a stage that was not retrieved.
        """
        await self.aclose_by(Deadline.after(self._timeout_s))

    async def aclose_by(self, deadline: Deadline) -> None:
        """Close as ``aclose()`` does, with a deadline other than that of the stager."""
        if os.getpid() != self._pid:
            return
        running_loop("AsyncStager.aclose")
        self._closed = True
        grace = Deadline.after(_GRACE_S)
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                await self._unretrieved.ended()
            grace = deadline
        except TimeoutError as error:
            raise self._not_ended() from error
        finally:
            stages = self._unretrieved.operations()
            await run_shielded(self._shut_down_off_loop, grace)
        raise_all(stages)

    def _not_ended(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"stages in flight did not end within timeout_s={self._timeout_s:g} and were abandoned: their futures "
            "raise ClosedError; memory that a device may still write to stays mapped until the device responds"
        )

    async def _shut_down_off_loop(self, deadline: Deadline) -> None:
        """Shut down in a thread of its own. Unmapping gigabytes takes long, and all threads for storage may hang."""
        threads = Threads("sidestream-close", 1)
        with time_limit(None):  # the work ends at its own deadline
            done = threads.submit(self._shut_down, deadline)
            threads.close()  # before the wait, because an interrupt may end this function there
            await threads.wait(done, "waiting for the stages to end")

    def _shut_down(self, deadline: Deadline) -> None:
        # The order of the end. The stages are stopped. The threads are closed, after what they had begun. The arena
        # drops its memory, which is unmapped when nothing refers to it any more. Only then is it waited for, up to a
        # limit, because a device that hangs keeps its memory for ever.
        ended = self._stop_stages()
        if self._device is not None:
            with suppress(ClosedError):  # the engine's threads are needed until the last stage has been issued
                self._threads.submit(self._device.close)
        self._threads.close()
        self._host.close()
        self._arena.close()
        # No thread may refer to staged memory: one that resolves a future refers to the result until it has returned
        # from that call, and released memory is unregistered only after that.
        grace = Deadline.after(_GRACE_S)
        if ended and self._threads.join(grace) and self._device is not None:
            self._device.join(grace)
        self._arena.wait_unmapped(Deadline(max(deadline.at, Deadline.after(_GRACE_S).at), deadline.timeout_s))

    def _stop_stages(self) -> bool:
        """Stop the stages. Returns whether all have ended. Stages that wait for memory or copy in threads end when they
        are signalled. Copies of a device may not end."""
        stagings = self._in_flight()
        for staging in stagings:
            staging.cancel()
        if stagings:
            self._unretrieved.wait(_STOPPED_S)
        left = self._in_flight()
        for staging in left:
            if staging.device is not None:
                staging.fail_early(
                    ClosedError("the stager was closed before the device completed the copies of this stage")
                )
        return not left

    def __enter__(self) -> NoReturn:
        raise AsyncOnlyError(
            "enter an AsyncStager with: async with sidestream.AsyncStager() as stager; in code without an event loop "
            "call close() at the end"
        )

    def __exit__(self, *_: object) -> None:
        """Never called, because ``__enter__`` raises. Without this method Python would raise its own error first."""

    async def __aenter__(self) -> AsyncStager:
        running_loop("AsyncStager")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- private: the caller's thread ---

    def _split(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors on a device, and make the engine of the device if there is none yet."""
        with self._lock:
            if self._device is not None:
                where = self._device.driver.device_of
                return [tensor for tensor in tensors if where(tensor) is not None and not tensor.is_meta]
            if all(map(_IS_CPU, tensors)):
                return []
            found = [tensor for tensor in tensors if not tensor.is_cpu and not tensor.is_meta]
            if found:
                self._device = DeviceEngine(driver_for(found[0].device), self._host)
            return found

    # --- private: the stager's thread ---

    def _conduct(self, staging: Staging[P], lay_out: Callable[[Captured], P]) -> None:
        """Run one stage: plan, lease memory, copy what is in host memory, and enqueue copies from devices. This is the
        top function of the stager's thread, so it catches all errors."""
        error: BaseException | None = None
        plan: P | None = None
        try:
            staging.stop.check()
            plan = self._stage(staging, lay_out)
        except BaseException as failure:
            stopped = isinstance(failure, ClosedError) and staging.stop.is_set()
            error = clean(given_up(staging) if stopped else failure, "the stager's thread")
            staging.fail(error)
        staging.issued.set_result(None)
        staging.part_done(error)
        # Only now: torch releases the GIL for each tensor that it destroys. Beside a busy thread the aliases of 10,000
        # sources take some 100 ms, and the sources may change before.
        del plan

    def _stage(self, staging: Staging[P], lay_out: Callable[[Captured], P]) -> P:
        """Plan and fill. Only the plan that this returns refers to the sources."""
        captured = staging.take()
        plan = lay_out(captured)
        del captured
        self._fill(staging, plan)
        if staging.passes:
            self._idle.note_staged(tuple([image.nbytes for image in staging.images]))
        return plan

    def _fill(self, staging: Staging[P], plan: P) -> None:
        stays = self._stays(staging, plan)
        # From here on the writer has the plan, and waits for the first image. It writes while later images are filled.
        staging.set_plan(plan, stays=stays)
        staging.passes = staging.passes and not stays
        if staging.passes and not self._idle.will_grow_to([image.nbytes for image in staging.images]):
            staging.drain = Drain(self._arena.given_back_bytes)
        if staging.device is not None and self._device is not None:
            device = next(iter(staging.device.sides), None)
            if device is not None:
                self._device.pin(self._arena, device, staging.device.names)
        self._lease_scratch(staging, [layout.nbytes for layout in plan.images])
        left: deque[_Image] = deque(zip(plan.images, staging.images, strict=True))
        while left:
            layout, image = left[0]
            # The image owns the lease from here on. The stager only fills it; the last reader releases it. The head of
            # ``left`` goes after the lease, because ``_behind`` reads the list while the lease is waited for.
            image.begin(self._lease(staging, layout.nbytes, partial(_behind, left)))
            left.popleft()
            try:
                self._fill_image(staging, layout, image)
                if self._mode == "eager" and staging.host:  # ``wait_if_eager`` waits no longer: the sources may change
                    staging.called_by.check("staging")
            except BaseException as error:
                image.fail(error)  # before finish(), which takes an image without an error for a filled one
                raise
            finally:
                image.finish()

    def _stays(self, staging: Staging[P], plan: P) -> bool:
        """Return whether the whole stage fits into memory that is free now, so that further readers may keep it.

        Each of them may keep two windows for any time, and other stages cannot take these back: the window that it
        reads, and the window before while it waits for the next. That much has to be free in addition. In all stages
        together these windows may use at most a quarter of the budget."""
        if not staging.readers or not plan.images:
            return False
        images = [whole_pages(layout.nbytes) for layout in plan.images]
        scratch = [] if staging.device is None else staging.device.scratch
        held = 2 * max(images) * len(staging.readers)
        with self._lock:
            self._read = [one for one in self._read if one.readers]
            others = sum(one.held_bytes for one in self._read)
            stays = (
                others + held <= self.budget_bytes // _HELD_SHARE
                and sum(images) + sum(map(whole_pages, scratch)) + held <= self._arena.free_bytes
            )
            if stays:
                staging.held_bytes = held
                self._read.append(staging)
        return stays

    def _lease_scratch(self, staging: Staging[Any], images: Sequence[int]) -> None:
        """Lease the scratch, which is needed until the end of the stage, before any image."""
        scratch = [] if staging.device is None else staging.device.scratch
        self._check_room(images, scratch)
        together = sum(map(whole_pages, (*scratch, *images))) <= self.budget_bytes
        # A state that does not fit as a whole is copied image by image, in addition to the scratch.
        behind = images if together else [max(images, default=0)]
        self._arena.make_way([*scratch, *behind])
        if staging.device is None or self._device is None:
            return
        sizes = deque([*scratch, *behind])

        def lease(nbytes: int) -> Allocation:
            sizes.popleft()
            return self._lease(staging, nbytes, lambda: sizes)

        self._device.lease_scratch(staging.device, lease)

    def _check_room(self, images: Sequence[int], scratch: Sequence[int]) -> None:
        """Raise an error if the stage exceeds the budget, or if memory is missing and ``when_full`` forbids to wait."""
        through = sum(map(whole_pages, scratch))
        largest = through + (whole_pages(max(images)) if images else 0)
        if largest > self.budget_bytes:
            raise ArenaExhaustedError(
                f"{largest} bytes of staging memory are needed at once, the budget is {self.budget_bytes}: "
                "raise budget_bytes= of the stager"
            )
        everything = through + sum(map(whole_pages, images))
        if self._when_full in ("skip", "fail") and not self._arena.has_room(everything):
            raise self._full(everything)

    def _full(self, nbytes: int) -> SidestreamError:
        if self._when_full == "skip":
            return SkippedError(f"no {nbytes} bytes of staging memory are free, and when_full is 'skip'")
        return ArenaExhaustedError(
            f"no {nbytes} bytes of staging memory are free: release() staged state dicts, raise budget_bytes=, or "
            "choose another when_full="
        )

    def _lease(self, staging: Staging[Any], nbytes: int, coming: Callable[[], Iterable[int]]) -> Allocation:
        # The free memory may be fragmented. With "skip" and "fail" a stage does not wait for its first image either.
        refuse = self._when_full in ("skip", "fail") and not staging.committed
        # Read by ``wait_until_read`` in another thread: a fence that ends at its deadline says whether the stage had
        # found no memory, or was only slow.
        self._change_reasons("copies", "memory")
        try:
            lease = self._arena.lease(
                nbytes,
                deadline=staging.deadline,
                stop=staging.stop,
                coming=coming,
                at_once=refuse,
                drain=staging.drain,
            )
        except ArenaExhaustedError as error:
            if refuse:
                raise self._full(nbytes) from error
            raise
        finally:
            self._change_reasons("memory", "copies")
        # With its first memory the stage has begun. Until then a newer stage may take its place, and nothing is lost.
        staging.commit()
        return lease

    def _change_reasons(self, old: WaitReason, new: WaitReason) -> None:
        """Record why callers wait, also for the stages behind the one that is being copied."""
        for staging in self._in_flight():
            if staging.reasons.now == old:
                staging.reasons.change(new)

    def _fill_image(self, staging: Staging[Any], layout: ImageLayout, image: StagedImage) -> None:
        engine, lease = self._device, image.lease()
        host: Sequence[Copy] = layout.copies
        if staging.device is not None and engine is not None:
            parts, host = engine.issue(staging.device, layout.copies, lease, pace=staging.pace, stop=staging.stop)
            for part in parts:
                engine.watch(part, staging.stop, staging.part(image))
        advance = image.advance if len(host) == len(layout.copies) else _ignore
        self._host.fill(host, lease.address, advance=advance, pace=staging.pace, stop=staging.stop)

    # --- private: the thread that ends the last part of a stage ---

    def _ended(self, staging: Staging[Any], outcome: StagingFuture[StagedState] | None) -> None:
        with self._lock:
            self._stagings = [one for one in self._stagings if one is not staging]
        if outcome is not None:
            _deliver(staging, outcome)

    def _warm(
        self, warmed: StagingFuture[None], nbytes: int, on_device: list[torch.Tensor], deadline: Deadline
    ) -> None:
        try:
            for tensor in on_device:
                assert self._device is not None
                self._device.pin(self._arena, self._device.driver.device_of(tensor))
            if nbytes:
                lease, ready = self._arena.lease(nbytes, deadline=deadline, stop=Stop()), 0
                while ready < nbytes:
                    ready = lease.register(ready)
                lease.release()
        except BaseException as error:
            warmed.set_exception(clean(error, "the stager's thread"))
        else:
            warmed.set_result(None)

    def _in_flight(self) -> list[Staging[Any]]:
        with self._lock:
            return list(self._stagings)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError("this stager was made before os.fork(); make a new one in the child")

    def _check_usable(self) -> None:
        self._check_process()
        if self._closed:
            raise ClosedError("this stager is closed; make a new one")


def _behind(left: deque[_Image]) -> Iterable[int]:
    """Return the sizes of the images that are leased after the first one of ``left``."""
    return (layout.nbytes for layout, _ in islice(left, 1, None))


def _ignore(_: int) -> None:
    """Ignore the progress of host copies: between them lie copies from devices, so only the end of all writers
    counts."""


def _deliver(staging: Staging[StagePlan], future: StagingFuture[StagedState]) -> None:
    """Resolve ``future`` with the state dict over the images, or with the error of the stage."""
    error = Future.exception(staging.copied)
    if error is not None:
        future.set_exception(error)
    else:
        try:
            future.set_result(staging.planned.result().build([image.lease() for image in staging.images]))
        except BaseException as failure:
            future.set_exception(clean(failure, "building the staged state dict"))
    for image in staging.images:
        image.release()


def share_of_memory() -> int:
    """Return half of the machine's memory, or of the limit of the control group if that is less. Ranks of one host
    divide it among them, because each has a stager of its own."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path("/sys/fs/cgroup", name).read_text()))
    ranks = 1
    with suppress(ValueError):
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "")))
    return min(limits) // 2 // ranks
