"""``LiveWriter``: the staging of a live state, and the thread that writes it to storage.

A thread of the save takes each staged window when it is filled, and releases its memory when it is written. The thread
never waits for the caller's event loop. So code on that loop may block at the fence while a later stage waits for the
memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from .._engine.calls import call_from_thread
from .._format.shard import BlockSums, ShardLayout
from .._layout.save_layout import PlannedFiles
from .._runtime.threads import (
    Deadline,
    Stop,
    ThreadFuture,
    result_of,
    write_threads,
)
from .._runtime.waits import WaitReasons, waited_for
from .._staging import AsyncStager, Captured, SnapshotReader, Staging, borrow, give_back
from .._storage import Body, BytesBody, ShardBody
from ..errors import (
    ClosedError,
    DeadlineExceededError,
    SkippedError,
)
from ..events import WaitReason, may_wait
from .layouts import AgreedLayout, NativeLayout
from .pending import SaveProgress
from .running import Save

_GRACE_S = 5.0
_PATIENCE_S = 20.0


class LiveWriter:
    """The staging of a live state in host memory, window by window, in the layout of the files of the checkpoint, and
    the thread that writes these files.

    It is made in the thread of the call, so that copies are ordered after the work on the current streams of that
    thread. ``launch`` may come later, in any thread. ``stager`` is None if one is borrowed for this save, with
    ``budget_bytes``. ``shared``: a writer process writes. ``readers`` is the number of sinks that read the staged
    memory too. ``reasons`` are those of a save that has waited before this was made.
    """

    _save: Save
    _finish: Callable[[PlannedFiles, list[BlockSums], Stop], Any]
    """Called in the thread when all is written. Set by ``launch``, as ``_save`` is."""

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
        self._own: AsyncStager | None = None
        """The stager that was borrowed for this save."""
        self._budget_bytes = budget_bytes
        self._shared = shared
        if stager is None:
            stager = self._own = borrow(budget_bytes, shared=shared, timeout_s=deadline.timeout_s)
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
        self._files_read: ThreadFuture[None] = ThreadFuture()
        self._stop = Stop()
        self._written = False
        self._threads = write_threads()
        self._done: Future[Any] | None = None

    def launch(
        self,
        save: Save,
        layout: NativeLayout | AgreedLayout,
        finish: Callable[[PlannedFiles, list[BlockSums], Stop], Any],
    ) -> None:
        """Start the copies. ``ended`` starts the thread."""
        self._save, self._finish = save, finish
        if not save.reads_files:
            self._files_read.set_result(None)
        stager = self._stager
        if self._shared:
            # Before the copies: memory that is allocated from here on is a memfd, whose descriptor can be sent to the
            # process.
            stager.share()
        self._staging.deadline = save.deadline
        save.reasons = self._staging.reasons
        save.reasons.change("copies")
        stager.enqueue(self._staging, partial(layout.lay_out, stager.plans, stager.budget_bytes))
        save.lifecycle.will_start()  # the writing thread calls the observers

    def wait_if_eager(self) -> dict[WaitReason, float]:
        """Block until the sources in host memory are copied, if the mode of the stager guarantees that for a call. If
        the state is larger than the free memory, that needs the windows that the writing thread releases. Return the
        seconds by their reason."""
        began = time.monotonic()
        self._stager.wait_if_eager(self._staging)
        return waited_for((self._staging.reasons,), began)

    def cancel(self) -> None:
        """Stop copies, and end waits for memory. Called in any thread; does not block."""
        self._staging.release()

    def pass_on(self, staged: Future[None]) -> None:
        # The sidecar files are sources too. If they cannot be read, the save resolves ``staged`` when it fails.
        free = self._staging.free
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
        if asyncio._get_running_loop() is not None and may_wait():  # not on the loop of operations
            self._threads.submit(lifecycle.emit_queued)
        else:
            lifecycle.emit_queued()

    async def ended(self) -> Any:
        self._done = self._threads.submit(self._work)
        try:
            # A stop has to reach the stager's thread as well: it may be copying, or waiting for memory that only this
            # save would give back. It also ends the wait of ``_plan`` in a group, which does not look at ``stop``.
            with self._stop.waking(self.cancel):
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
        self.cancel()
        stopped = self._stop.is_set()
        await copies_ended(self._staging, _GRACE_S if stopped else max(self._save.deadline.remaining_s(), _GRACE_S))
        own = self._own
        if own and not (self._ended_well() and give_back(own, self._budget_bytes, shared=self._shared)):
            # There are three cases for a stager that was borrowed. Everything has ended well: it is kept for the next
            # save, if there is room. Something failed, and the copies have ended: it is closed. A device hangs: it is
            # closed without a further wait, and the memory stays mapped until the device responds.
            hangs = not self._staging.copied.done()
            with suppress(DeadlineExceededError):  # a device hangs; the save itself reports its outcome
                await own.aclose_by(Deadline.after(0.0 if hangs else _GRACE_S))

    def _ended_well(self) -> bool:
        """Return whether everything was staged and written, so that no thread of this save uses the stager any more. A
        commit that was refused makes no difference."""
        copied = self._staging.copied
        ended = self._written and self._done is not None and self._done.done() and not self._stop.is_set()
        return ended and copied.done() and not copied.cancelled() and Future.exception(copied) is None

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

    def interrupt(self) -> None:
        self._stop.set()
        self.cancel()

    # --- the thread ---

    def _work(self) -> Any:
        save, stop = self._save, self._stop
        save.lifecycle.emit_queued()
        if save.reads_files:
            call_from_thread(save.read_files, save.deadline)
            self._files_read.set_result(None)
        if save.worker is not None:
            save.worker.start()  # while the plan is made
        # The order is a promise. A state that cannot be saved fails in ``plan``, and one that does not fit on the disk
        # in ``take``, before the attempt is made: nothing has to be removed after them. In a group the transaction is
        # not touched before the plan, because the ranks get the id of the save with it.
        plan = self._plan(stop)
        save.lifecycle.planned(save.save_id)
        save.space.take(save.transaction, plan.nbytes, alone=True)
        write_files(save, self._files(plan), stop)  # after planning: it needs the id of the save
        self._written = True
        save.lifecycle.staged()  # if the thread that ended the copies has not done it yet
        return self._finish(plan, [body.sums for body in self._bodies], stop)

    def _plan(self, stop: Stop) -> PlannedFiles:
        """Wait for the plan of what has to be written, and return it."""
        staging, save = self._staging, self._save
        plan: PlannedFiles
        if save.operation is None:
            plan = result_of(staging.planned, stop, "waiting for earlier stages")
        else:  # rank 0 raises at the deadline, and its error names the ranks that have not made the call
            # Not ``result_of``: in a group a stop is the failure of a rank, and ``cancel`` ends this wait with it.
            plan = save.deadline.result(staging.planned, "waiting for earlier stages", _PATIENCE_S)
        return plan

    def _files(self, plan: PlannedFiles) -> list[tuple[str, Body]]:
        """Return the file of plain values, and then the shards in the order in which they are staged."""
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


def write_files(save: Save, files: Iterable[tuple[str, Body]], stop: Stop) -> None:
    """Write ``files`` into the attempt, in threads or in the writer process. Blocks. Raises what
    ``Transaction.write`` raises, and ``WriterProcessError``."""
    transaction, worker = save.transaction, save.worker
    if worker is None:
        transaction.write(files, stop=stop)
    else:
        worker.write(transaction, files, stop=stop, fall_back=save.fall_back, url=save.location.url)


async def copies_ended(staging: Staging[Any], patience_s: float) -> None:
    """Wait until no copy of the stage reads a source or writes into memory, or until ``patience_s`` have passed."""
    ended = asyncio.wrap_future(staging.copied)
    ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # the save itself raises it
    await asyncio.wait([ended], timeout=patience_s)
