"""``LiveWriter``: the writing of a live state to storage, in threads that need no event loop, and the ``Stage`` that
it writes.

A thread of the save takes each staged window when it is filled, and releases its memory when it is written. The thread
never waits for the event loop. So code on the loop may block at the fence while a later stage waits for that memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any

from .._engine.calls import call_from_thread
from .._format.shard import BlockSums, ShardLayout
from .._layout.save_layout import PlannedFiles
from .._runtime.caller import cancel_if_interrupted
from .._runtime.threads import (
    Deadline,
    Stop,
    ThreadFuture,
    release_in_background,
    result_of,
    time_limit,
    write_threads,
)
from .._runtime.waits import WaitReasons, waited_for
from .._staging import AsyncStager, Captured, SnapshotReader, Staging, borrow, give_back
from .._storage import Body, BytesBody, ShardBody
from ..errors import (
    ClosedError,
    DeadlineExceededError,
    SaveAbortedError,
    SidestreamError,
    SkippedError,
)
from ..events import WaitReason, observed
from .layouts import AgreedLayout, NativeLayout
from .pending import SaveProgress
from .running import Save

__all__ = ["LiveWriter", "Stage", "write_files"]


_GRACE_S = 5.0
_CLEAN_UP_S = 60.0


class _Launch:
    """The report to the writing thread, through ``succeeded``, whether the stage was launched.

    An interrupt may end the launching thread between any two instructions. So the queue takes no lock, and an object
    that is freed without a report reports a failure.
    """

    def __init__(self) -> None:
        self.succeeded: SimpleQueue[bool] = SimpleQueue()

    def __del__(self) -> None:
        self.succeeded.put(False)


class LiveWriter:
    """A launched stage and the thread that writes it. ``finish`` is called in that thread at the end."""

    def __init__(
        self,
        save: Save,
        stage: Stage,
        layout: NativeLayout | AgreedLayout,
        finish: Callable[[PlannedFiles, list[BlockSums], Stop], Any],
    ) -> None:
        self._save = save
        self._finish = finish
        self._stage = stage
        self._files_read: ThreadFuture[None] = ThreadFuture()
        if not save.reads_files:
            self._files_read.set_result(None)
        self._stop = Stop()
        self._written = self._launched = False
        self._withdrawn = False  # the caller was interrupted and will not await this save
        self._done: Future[Any] | None = None
        # Before the launch: starting a thread releases the GIL, and the stager's thread would then keep it for a while.
        launch = _Launch()
        self._threads = write_threads()
        try:
            self._done = self._threads.submit(self._work, launch.succeeded)
            stage.launch(save, layout)
            self._launched = True
            save.lifecycle.will_start()  # the writing thread calls the observers
            # The hand-over to the caller. In a blocking call this code runs in the calling thread, where
            # ``KeyboardInterrupt`` may come between any two instructions. Before this line the ``except`` clause below
            # ends the save. After it the object is on the list of the call, which cancels it if the call never
            # returns a result.
            cancel_if_interrupted(self.cancel)
            # Only now may the thread write: a save whose caller was interrupted before this line leaves nothing on
            # storage.
            launch.succeeded.put(True)
        except BaseException:  # also one that a signal handler raises
            launch.succeeded.put(False)
            self.cancel()
            raise

    def pass_on(self, staged: Future[None]) -> None:
        # The sidecar files are sources too. If they cannot be read, the save resolves ``staged`` when it fails.
        free = self._stage.free
        self._files_read.add_done_callback(lambda _: free.add_done_callback(partial(self._on_free, staged)))

    def _on_free(self, staged: Future[None], free: Future[None]) -> None:
        """Resolve ``staged`` like ``free``, which has ended. A stage that gave way counts as success, because no copy
        reads its sources."""
        error, lifecycle = Future.exception(free), self._save.lifecycle  # it is not retrieved by that
        if error is None:
            lifecycle.staged()
        with suppress(InvalidStateError):  # it is resolved already if the save has ended before its copies
            if error is None or isinstance(error, (SkippedError, ClosedError)):
                staged.set_result(None)
            else:
                staged.set_exception(error)
        if asyncio._get_running_loop() is not None and observed():  # not on the loop of operations
            self._threads.submit(lifecycle.emit_queued)
        else:
            lifecycle.emit_queued()

    async def ended(self) -> Any:
        assert self._done is not None
        try:
            # A stop has to reach the stager's thread as well: it may be copying, or waiting for memory that only this
            # save would give back. It also ends the wait of ``Stage.plan`` in a group, which does not look at ``stop``.
            with self._stop.waking(self._stage.cancel):
                return await self._threads.wait(self._done, "writing", stop=self._stop)
        except asyncio.CancelledError:
            # ``wait`` cancels work that no thread has begun, and does not set the flag then. ``release`` needs it: it
            # says that the copies were stopped, so that 5 s are enough to wait for them.
            self._stop.set()
            raise

    async def release(self) -> None:
        """Release all memory. When this returns, no copy reads a source or writes into memory any more.

        The exception is a device that hangs. The wait for it ends at the deadline, or after 5 s if the save was
        signalled to stop; the copies then keep their memory until they end.
        """
        self._stage.cancel()
        copied = self._stage.copied
        stopped = self._stop.is_set()
        await _ended(copied, _GRACE_S if stopped else max(self._save.deadline.remaining_s(), _GRACE_S))
        if self._stage.own is not None and not (self._ended_well() and self._stage.give_back()):
            # There are three cases for a stager that was borrowed. Everything has ended well: it is kept for the next
            # save, if there is room. Something failed, and the copies have ended: it is closed. A device hangs: it is
            # closed without a further wait, and the memory stays mapped until the device responds.
            hangs = not copied.done()
            with suppress(DeadlineExceededError):  # a device hangs; the save itself reports its outcome
                await self._stage.own.aclose_by(Deadline.after(0.0 if hangs else _GRACE_S))

    def _ended_well(self) -> bool:
        """Return whether everything was staged and written, so that no thread of this save uses the stager any more. A
        commit that was refused makes no difference."""
        copied = self._stage.copied
        ended = self._written and self._done is not None and self._done.done() and not self._stop.is_set()
        return ended and copied.done() and not copied.cancelled() and Future.exception(copied) is None

    def progress(self) -> SaveProgress:
        return self._stage.progress()

    def interrupt(self) -> None:
        self._stop.set()
        self._stage.cancel()

    def cancel(self) -> None:
        """End a save whose caller was interrupted and will not await it, and remove what it wrote. Called in the
        launching thread; does not wait."""
        self._withdrawn = True
        self.interrupt()
        if self._done is None or not self._launched:
            self._report_interrupt()
            return
        # Two threads may find that they have to discard. The writing thread looks at ``_withdrawn`` when it ends, and
        # this callback runs when it has ended. If the flag was set after that look, only the callback discards.
        # ``_discard`` may run twice.
        self._done.add_done_callback(lambda _: release_in_background(self._discard, "sidestream-abandoned"))

    def _report_interrupt(self) -> None:
        self._save.lifecycle.failed(SaveAbortedError("the caller was interrupted"), self._save.outcome)

    def _close_own(self) -> None:
        if self._stage.own is not None:
            with suppress(SidestreamError):  # a device may hang; the log names the remaining files
                self._stage.own.close_by(Deadline.after(_GRACE_S))

    # --- the thread ---

    def _work(self, launched: SimpleQueue[bool]) -> Any:
        save = self._save
        try:
            if not launched.get(timeout=save.deadline.remaining_s()):
                return None
        except Empty:
            raise save.deadline.exceeded("launching the copies") from None
        try:
            save.lifecycle.emit_queued()
            with time_limit(save.deadline):
                return self._save_here()
        finally:
            if self._withdrawn:
                self._discard()

    def _save_here(self) -> Any:
        save, stage, stop = self._save, self._stage, self._stop
        if save.reads_files:
            call_from_thread(save.read_files, save.deadline)
            self._files_read.set_result(None)
        if save.worker is not None:
            save.worker.start()  # while the plan is made
        # The order is a promise. A state that cannot be saved fails in ``plan``, and one that does not fit on the disk
        # in ``take``, before the attempt is made: nothing has to be removed after them. In a group the transaction is
        # not touched before the plan, because the ranks get the id of the save with it.
        plan = stage.plan(stop)
        save.lifecycle.planned(save.save_id)
        save.space.take(save.transaction, plan.nbytes, alone=True)
        write_files(save, stage.files(plan), stop)  # after planning: it needs the id of the save
        self._written = True
        save.lifecycle.staged()  # if ``pass_on`` was not called yet
        return self._finish(plan, stage.written(), stop)

    def _discard(self) -> None:
        """End a save whose caller was interrupted: remove what it wrote, or, if it has committed all the same, what it
        has replaced, and free its memory. Called in a thread when the save has ended."""
        transaction = self._save.transaction
        with time_limit(Deadline.after(_CLEAN_UP_S)):
            if transaction.outcome == "absent":
                transaction.discard()
            elif transaction.has_replaced:
                transaction.discard_replaced()
        self._report_interrupt()
        self._close_own()


def write_files(save: Save, files: Iterable[tuple[str, Body]], stop: Stop) -> None:
    """Write ``files`` into the attempt, in threads or in the writer process. Blocks. Raises what
    ``Transaction.write`` raises, and ``WriterProcessError``."""
    transaction, worker = save.transaction, save.worker
    if worker is None:
        transaction.write(files, stop=stop)
    else:
        worker.write(transaction, files, stop=stop, fall_back=save.fall_back, url=save.location.url)


async def _ended(copied: Future[Any], patience_s: float) -> None:
    ended = asyncio.wrap_future(copied)
    ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # the save itself raises it
    await asyncio.wait([ended], timeout=patience_s)


_PATIENCE_S = 20.0


class Stage:
    """The staging of a live state in host memory, window by window, in the layout of the files of the checkpoint.

    It is made in the thread of the call, so that copies are ordered after the work on the current streams of that
    thread. ``launch`` may come later, in any thread. ``stager`` is None if one is borrowed for this save, with
    ``budget_bytes``. ``shared``: a writer process writes. ``readers`` is the number of sinks that read the staged
    memory too. ``reasons`` are those of a save that has waited before this was made.
    """

    def __init__(
        self,
        captured: Captured,
        stager: AsyncStager | None,
        deadline: Deadline,
        *,
        budget_bytes: int | None,
        shared: bool,
        readers: int,
        reasons: WaitReasons | None = None,
    ) -> None:
        self.own: AsyncStager | None = None
        """The stager that was borrowed for this save."""
        self._budget_bytes = budget_bytes
        self._shared = shared
        if stager is None:
            stager = self.own = borrow(budget_bytes, shared=shared, timeout_s=deadline.timeout_s)
        self._stager = stager
        self.sharded = bool(captured.sharded)
        """Whether the state has tensors that only a group can describe."""
        # ``passes`` says that windows come back while the stage is in progress, so that waiting for one may be better
        # than touching new memory. Not with a writer process: its windows stay leased until the receipt of their file,
        # so that another process can write them if this one is lost.
        self._staging: Staging[Any] = stager.prepare(captured, deadline, readers=readers, passes=not shared)
        self._staging.reasons = reasons or self._staging.reasons
        self.snapshots = tuple(SnapshotReader(self._staging, number) for number in range(readers))
        """The reader of the snapshot for each sink."""
        self._bodies: list[ShardBody] = []
        self._save: Save | None = None

    @property
    def free(self) -> Future[None]:
        """A future that is resolved when the sources may change, or with the error of the staging."""
        return self._staging.free

    @property
    def copied(self) -> Future[Any]:
        """A future that is resolved when no copy reads a source or writes into memory any more."""
        return self._staging.copied

    def launch(self, save: Save, layout: NativeLayout | AgreedLayout) -> None:
        """Start the copies."""
        self._save = save
        stager = self._stager
        if self._shared:
            # Before the launch: memory that is allocated from here on is a memfd, whose descriptor can be sent to the
            # process.
            stager.share()
        self._staging.deadline = save.deadline
        save.reasons = self._staging.reasons
        save.reasons.change("copies")
        stager.enqueue(self._staging, partial(layout.lay_out, stager.plans, stager.budget_bytes))

    def wait_if_eager(self) -> dict[WaitReason, float]:
        """Block until the sources in host memory are copied, if the mode of the stager guarantees that for a call. If
        the state is larger than the free memory, that needs the windows that the writing thread releases. Return the
        seconds by their reason."""
        began = time.monotonic()
        self._stager.wait_if_eager(self._staging)
        return waited_for((self._staging.reasons,), began)

    def plan(self, stop: Stop) -> PlannedFiles:
        """Wait for the plan of what has to be written, and return it. Called in the writing thread; blocks."""
        staging, save = self._staging, self._save
        assert save is not None
        plan: PlannedFiles
        if save.operation is None:
            plan = result_of(staging.planned, stop, "waiting for earlier stages")
        else:  # rank 0 raises at the deadline, and its error names the ranks that have not made the call
            # Not ``result_of``: in a group a stop is the failure of a rank, and ``cancel`` ends this wait with it.
            plan = save.deadline.result(staging.planned, "waiting for earlier stages", _PATIENCE_S)
        return plan

    def files(self, plan: PlannedFiles) -> list[tuple[str, Body]]:
        """Return the file of plain values, and then the shards in the order in which they are staged."""
        assert self._save is not None
        found: list[tuple[str, Body]] = []
        if plan.values:
            found.append((plan.values_file, BytesBody(plan.values)))
        # The stager fills the images of all shards in this one order. The files are written in the same order, so the
        # window that the writer waits for is always the next one that is filled.
        images = iter(self._staging.images)
        for index, layout in enumerate(plan.shards):
            body = ShardBody(layout, tuple(islice(images, len(layout.windows))), self._save.order.digest)
            self._bodies.append(body)
            found.append((plan.shard_file(index), body))
        return found

    def written(self) -> list[BlockSums]:
        """Return the checksums of each shard's blocks."""
        return [body.sums for body in self._bodies]

    def cancel(self) -> None:
        """Stop copies, and end waits for memory. Called in any thread; does not block."""
        self._staging.release()

    def give_back(self) -> bool:
        """Keep the stager that was borrowed for this save for the next one. Returns False if it has to be closed."""
        return self.own is not None and give_back(self.own, self._budget_bytes, shared=self._shared)

    def progress(self) -> SaveProgress:
        planned = self._staging.planned
        if not planned.done() or planned.cancelled() or planned.exception() is not None:
            return SaveProgress()
        shards: Sequence[ShardLayout] = planned.result().shards
        written = 0
        # Copies, because the writing threads append to the list and to the sets meanwhile.
        for body in list(self._bodies):
            windows = body.layout.windows
            written += sum(windows[number].end - windows[number].start for number in list(body.written))
        total = sum(layout.nbytes for layout in shards)
        return SaveProgress(total, sum(image.staged_bytes for image in self._staging.images), written)
