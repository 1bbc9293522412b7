"""``LiveWriter``: the writing of a live state to storage, in threads that need no event loop, and the stage that it
writes.

A thread of the save takes each staged window when it is filled, and releases its memory when it is written. The thread
never waits for the event loop. So code on the loop may block at the fence while a later stage waits for that memory.
``LaidOutStage`` is staged window by window, in the layout of the files of the checkpoint.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from inspect import iscoroutinefunction
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from .._format.checksum import digest_of
from .._format.shard import BlockSums, ShardLayout
from .._layout.names import renamed_state
from .._layout.save_layout import PlannedFiles
from .._layout.values import copy_value
from .._runtime.caller import withdraw_if_interrupted
from .._runtime.state_dict_calls import with_state_dicts
from .._runtime.threads import (
    Deadline,
    Stop,
    ThreadFuture,
    release_in_background,
    result_of,
    run_sliced,
    time_limit,
    write_threads,
)
from .._staging import AsyncStager, Captured, PlanCache, SnapshotReader, Staging, borrow, capture, give_back
from .._storage import Body, BytesBody, ShardBody
from ..errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidOptionError,
    SaveAbortedError,
    SidestreamError,
    SkippedError,
)
from ..options import SaveOptions, Stager
from .order import Lifecycle, SaveOrder
from .pending import SaveProgress

__all__ = ["FirstCopy", "LaidOutStage", "LiveWriter", "Stage", "check_saved_as", "saved_as", "write_files"]


_GRACE_S = 5.0


class Stage(ABC):
    """The staging of a live state in host memory, and the files that are made from the staged memory."""

    def __init__(self) -> None:
        self.own: AsyncStager | None = None
        """The stager that was made for this save alone."""
        self._staging: Staging[Any] | None = None
        self._first: FirstCopy | None = None
        self._first_free: Future[None] = ThreadFuture()
        """The result of ``free`` if there is a first copy."""

    @property
    def free(self) -> Future[None]:
        """A future that is resolved when the sources may change, or with the error of the staging."""
        return self._first_free if self._first is not None or self._staging is None else self._staging.free

    @property
    def copied(self) -> Future[Any] | None:
        """A future that is resolved when no copy of ours reads a source or writes into memory any more; None if there
        is no such copy."""
        return None if self._staging is None else self._staging.copied

    @property
    def first(self) -> Future[Any] | None:
        """The future of the copy of a stager of another kind, which cannot be stopped; None if there is nothing to wait
        for."""
        return None if self._first is None else self._first.future

    @abstractmethod
    def launch(self) -> None:
        """Start the copies, in the thread of the caller."""

    @abstractmethod
    def settle(self) -> None:
        """Block until the sources in host memory are copied, if the mode of the stager guarantees that."""

    @abstractmethod
    def plan(self, stop: Stop) -> Any:
        """Wait for the plan of what has to be written, and return it. Called in the writing thread; blocks."""

    @abstractmethod
    def files(self, plan: Any) -> Iterable[tuple[str, Body]]:
        """Return the name and the content of each file, in the order in which they can be written. Unless it is a list,
        its iterator may block."""

    @abstractmethod
    def written(self) -> Any:
        """Return what is known of the items after all of them were written to storage."""

    @abstractmethod
    def end(self) -> None:
        """Release what the writing thread has used. Called when that thread is about to end."""

    @abstractmethod
    def give_way(self) -> None:
        """Stop copies, and end waits for memory. Called in any thread; does not block."""

    @abstractmethod
    def drop(self) -> None:
        """Drop the references to staged memory."""

    def give_back(self) -> bool:
        """Keep the stager that was made for this save for the next one. Returns False if it has to be closed."""
        return False

    @abstractmethod
    def progress(self) -> SaveProgress: ...


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
    """A launched stage and the thread that writes it. ``ready`` is called in that thread, after the plan was made and
    before anything is written. An error of ``ready`` ends the save."""

    def __init__(self, order: SaveOrder, stage: Stage, ready: Callable[[Stop], None] | None = None) -> None:
        self._order = order
        self._stage = stage
        self._ready = ready
        self._stop = Stop()
        self._launched = self._withdrawn = False  # withdrawn: the caller was interrupted and will not await this save
        self._done: Future[Any] | None = None
        # Before the launch: starting a thread releases the GIL, and the stager's thread would then keep it for a while.
        launch = _Launch()
        self._threads = write_threads()
        try:
            self._done = self._threads.submit(self._work, launch.succeeded)
            stage.launch()
            self._launched = True
            order.lifecycle.started()  # before the writing thread can report a plan
            withdraw_if_interrupted(self)
            launch.succeeded.put(True)
            stage.settle()
        except BaseException:  # also one that a signal handler raises
            launch.succeeded.put(False)
            self.withdraw()
            raise

    def pass_on(self, staged: asyncio.Future[None]) -> None:
        asyncio.wrap_future(self._stage.free).add_done_callback(partial(_resolve, staged, self._order.lifecycle))

    async def ended(self) -> tuple[Any, Any]:
        assert self._done is not None
        try:
            with self._stop.waking(self._stage.give_way):
                result: tuple[Any, Any] = await self._threads.wait(self._done, "writing", stop=self._stop)
        except asyncio.CancelledError:
            self._stop.set()
            raise
        return result

    async def release(self) -> None:
        """Release all memory. When this returns, no copy reads a source or writes into memory any more.

        There are two exceptions. The wait for a device that hangs ends at the deadline, or after 5 s if the save was
        signalled to stop; the copies then keep their memory until they end. The wait for the copy of a stager of
        another kind ends after 5 s.
        """
        self._stage.give_way()
        copied, first = self._stage.copied, self._stage.first
        if first is not None:
            await _ended(first, _GRACE_S)
        if copied is not None:
            stopped = self._stop.is_set()
            await _ended(copied, _GRACE_S if stopped else max(self._order.deadline.remaining_s(), _GRACE_S))
        self._stage.drop()
        if self._stage.own is not None and not (self._ended_well() and self._stage.give_back()):
            hangs = copied is not None and not copied.done()
            with suppress(DeadlineExceededError):  # a device hangs; the save itself reports its outcome
                await self._stage.own.aclose_by(Deadline.after(0.0 if hangs else _GRACE_S))

    def _ended_well(self) -> bool:
        """Return whether everything was staged and written, so that no thread of this save uses the stager any more."""
        used = (self._done, self._stage.copied)
        ended = all(one is not None and one.done() and not one.cancelled() for one in used)
        return ended and not self._stop.is_set() and all(Future.exception(one) is None for one in used if one)

    def progress(self) -> SaveProgress:
        return self._stage.progress()

    def interrupt(self) -> None:
        self._stop.set()
        self._stage.give_way()

    def withdraw(self) -> None:
        """End a save whose caller was interrupted and will not await it, and remove what it wrote. Called in the
        launching thread; does not wait."""
        self._withdrawn = True
        self.interrupt()
        self._order.lifecycle.failed(SaveAbortedError("the caller was interrupted"), "absent")
        if self._done is not None and self._launched:  # the writing thread may have ended before ``_withdrawn`` was set
            self._done.add_done_callback(lambda _: release_in_background(self._discard, "sidestream-abandoned"))

    def leave(self) -> None:
        used = [one for one in (self._done, self._stage.copied) if one is not None]
        wait(used, self._order.deadline.remaining_s() + _GRACE_S)  # not for a copy of a stager of another kind
        self._stage.drop()
        self._close_own()

    def _close_own(self) -> None:
        if self._stage.own is not None:
            with suppress(SidestreamError):  # a device may hang; the log names the remaining files
                self._stage.own.close_by(Deadline.after(_GRACE_S))

    # --- the thread ---

    def _work(self, launched: SimpleQueue[bool]) -> tuple[Any, Any] | None:
        began = False
        try:
            began = launched.get(timeout=self._order.deadline.remaining_s())
            with time_limit(self._order.deadline):
                return self._write() if began else None
        except Empty:
            raise self._order.deadline.exceeded("launching the copies") from None
        finally:
            self._stage.end()
            if began and self._withdrawn:
                self._discard()

    def _write(self) -> tuple[Any, Any]:
        order, stage, stop = self._order, self._stage, self._stop
        if order.worker is not None:
            order.worker.start()  # while the plan is made
        plan = stage.plan(stop)  # raises for a state that cannot be saved, before the attempt is made
        order.lifecycle.planned(order.save_id)
        nbytes = getattr(plan, "nbytes", None)  # the plan of a planner has no sizes
        if nbytes is not None:
            order.space.take(order.transaction, nbytes, alone=True)
        if self._ready is not None:
            self._ready(stop)
        write_files(order, stage.files(plan), stop)  # after planning: it needs the id of the save
        return plan, stage.written()

    def _discard(self) -> None:
        """Remove what was written, and free the memory of a save whose caller was interrupted. Called in a thread."""
        self._order.transaction.discard_here()
        self._close_own()


def write_files(order: SaveOrder, files: Iterable[tuple[str, Body]], stop: Stop) -> None:
    """Write ``files`` into the attempt, in threads or in the writer process. Blocks. Raises what
    ``Transaction.write`` raises, and ``WriterProcessError``."""
    transaction, worker = order.transaction, order.worker
    if worker is None:
        transaction.write(files, stop=stop)
    else:
        worker.write(transaction, files, stop=stop, fall_back=order.fall_back, url=order.location.url)


async def _ended(copied: Future[Any], patience_s: float) -> None:
    ended = asyncio.wrap_future(copied)
    ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # the save itself raises it
    await asyncio.wait([ended], timeout=patience_s)


def _resolve(staged: asyncio.Future[None], lifecycle: Lifecycle, free: asyncio.Future[None]) -> None:
    """Resolve ``staged`` like ``free``, which has ended. A stage that gave way counts as success, because no copy reads
    its sources."""
    error = None if free.cancelled() else free.exception()
    if error is None and not free.cancelled():
        lifecycle.staged()
    if staged.done():
        return
    if error is None or isinstance(error, (SkippedError, ClosedError)):
        staged.set_result(None)
    else:
        staged.set_exception(error)
        staged.exception()  # the save itself raises it too


class FirstCopy:
    """The copy that a stager of another kind makes. As under DCP, it is called in the thread of the caller, and objects
    with a ``state_dict`` are replaced by their state dicts first. Raises ``InvalidOptionError``."""

    def __init__(self, state: Mapping[str, Any], stager: Stager) -> None:
        if not callable(getattr(stager, "stage", None)) or iscoroutinefunction(stager.stage):
            raise InvalidOptionError(f"stager={stager!r} has no plain method stage(state_dict)")
        if not isinstance(state, Mapping):
            raise InvalidOptionError(f"state is a mapping, not a {type(state).__name__}")
        self._stager: Any = stager
        self._copy: Any = stager.stage(with_state_dicts(state))

    @property
    def future(self) -> Future[Any] | None:
        """The future of a copy that ``wait`` has not returned; None if the copy is not a future."""
        return self._copy if isinstance(self._copy, Future) else None

    def wait(self, stop: Stop) -> Any:
        """Wait until the copy is complete, and return it. May be called once, in a thread. Raises what the stager
        raised, ``ClosedError`` when ``stop`` is set, and ``DeadlineExceededError``."""
        copy = self._copy
        try:
            if isinstance(copy, Future):
                copy = result_of(copy, stop, "the stager that was passed in")
            elif getattr(self._stager, "should_synchronize_after_execute", False):
                self._stager.synchronize_staging()
            self._copy = None  # so that only the caller keeps the copy alive
            return copy
        finally:
            del copy  # the traceback of an error refers to this frame

    def drop(self) -> None:
        """Drop the reference to a copy that has not been returned."""
        self._copy = None


_PATIENCE_S = 20.0


LayOut: TypeAlias = Callable[[PlanCache, int, Captured], Any]
"""A function that plans a save, in the stager's thread. Its arguments are the stager's cache of plans, the stager's
budget in bytes, and the captured state."""


def check_saved_as(options: SaveOptions, *, own: bool) -> None:
    """Raise ``InvalidOptionError`` if names or dtypes are given and the stager is not our ``own``."""
    given = [name for name, one in (("names=", options.names), ("dtype=", options.dtype)) if one is not None]
    if given and not own:
        raise InvalidOptionError(
            f"{' and '.join(given)} need a stager of sidestream, which renames and converts while it copies: leave out "
            "stager=, or pass a sidestream.AsyncStager()"
        )


def saved_as(lay_out: LayOut, options: SaveOptions, url: str, *, others: bool) -> LayOut:
    """Return a function that plans the state with the names and dtypes of ``options``. With ``others``, a mapping of
    names may contain names of other ranks."""
    names, dtype = options.names, options.dtype
    if names is None and dtype is None:
        return lay_out

    def renamed(plans: PlanCache, budget_bytes: int, captured: Captured) -> object:
        captured = run_sliced(renamed_state(captured, names, dtype, url, others=others))
        return lay_out(plans, budget_bytes, captured)

    return renamed


class LaidOutStage(Stage):
    """The stage of a save that plans its files itself. If the caller has passed no ``AsyncStager``, one is borrowed for
    this save.

    ``readers`` is the number of sinks that read the staged memory too. ``captured`` is None if a stager of another kind
    makes a first copy. That stager may use its memory again for the next stage. So a second copy is made from the
    first one, and the sources are free when the second copy has ended.
    """

    def __init__(
        self,
        order: SaveOrder,
        state: Mapping[str, Any],
        captured: Captured | None,
        stager: AsyncStager | Stager | None,
        lay_out: LayOut,
        readers: int = 0,
    ) -> None:
        super().__init__()
        if order.digest is not None:
            digest_of(order.digest)  # raises MissingExtraError where it is not installed
        self._order = order
        self._lay_out = lay_out
        self._captured = captured
        self._foreign: tuple[Mapping[str, Any], Stager] | None = None
        if isinstance(stager, AsyncStager):
            self._stager = stager
        else:
            shared, timeout_s = order.worker is not None, order.deadline.timeout_s
            self._stager = self.own = borrow(order.budget_bytes, shared=shared, timeout_s=timeout_s)
            self._foreign = None if stager is None else (state, stager)
        self._given_way = False
        self._readers = readers
        self.snapshots: tuple[SnapshotReader[Any], ...] = ()
        """The reader of the snapshot for each sink. Empty if the sinks have to read the checkpoint."""
        self._bodies: list[ShardBody] = []

    def launch(self) -> None:
        if self._foreign is not None:
            (state, stager), self._foreign = self._foreign, None
            self._first = FirstCopy(state, stager)
            return
        captured, self._captured = self._captured, None
        assert captured is not None
        staging = self._launch(captured, self._readers)
        self.snapshots = tuple(SnapshotReader(staging, number) for number in range(self._readers))

    def _launch(self, captured: Captured, readers: int = 0) -> Staging[Any]:
        stager, worker = self._stager, self._order.worker
        if worker is not None:
            stager.share()
        planned = partial(self._lay_out, stager.plans, stager.budget_bytes)
        staging = self._staging = stager.launch(
            captured, planned, self._order.deadline, readers=readers, passes=worker is None
        )
        if self._given_way:
            staging.release()
        return staging

    def settle(self) -> None:
        if self._staging is not None:
            self._stager.settle(self._staging)

    def plan(self, stop: Stop) -> PlannedFiles:
        staging, deadline = self._staging, self._order.deadline
        if staging is None:
            staging = self._launch_second(stop)
        plan: PlannedFiles
        if self._order.operation is None:
            plan = result_of(staging.laid, stop, "waiting for earlier stages")
        else:  # rank 0 raises at the deadline, and its error names the ranks that have not made the call
            plan = deadline.result(staging.laid, "waiting for earlier stages", _PATIENCE_S)
        return plan

    def _launch_second(self, stop: Stop) -> Staging[Any]:
        assert self._first is not None
        try:
            copy = self._first.wait(stop)
            staging = self._launch(capture(copy, copy_value))
        except BaseException as error:
            self._first_free.set_exception(error)
            raise
        staging.free.add_done_callback(partial(_follow, self._first_free))
        self._stager.settle(staging)
        return staging

    def files(self, plan: PlannedFiles) -> list[tuple[str, Body]]:
        """Return the file of plain values, and then the shards in the order in which they are staged."""
        assert self._staging is not None
        found: list[tuple[str, Body]] = []
        if plan.values:
            found.append((plan.values_file, BytesBody(plan.values)))
        images = iter(self._staging.images)
        for index, layout in enumerate(plan.shards):
            body = ShardBody(layout, tuple(islice(images, len(layout.windows))), self._order.digest)
            self._bodies.append(body)
            found.append((plan.shard_file(index), body))
        return found

    def written(self) -> list[BlockSums]:
        """Return the checksums of each shard's blocks."""
        return [body.sums for body in self._bodies]

    def end(self) -> None:
        """Do nothing: each window is released when it has been written."""

    def give_way(self) -> None:
        self._given_way = True
        if self._staging is not None:
            self._staging.release()

    def drop(self) -> None:
        if self._first is not None:
            self._first.drop()

    def give_back(self) -> bool:
        order = self._order
        return self.own is not None and give_back(self.own, order.budget_bytes, shared=order.worker is not None)

    def progress(self) -> SaveProgress:
        laid = None if self._staging is None else self._staging.laid
        if laid is None or not laid.done() or laid.cancelled() or laid.exception() is not None:
            return SaveProgress()
        assert self._staging is not None
        shards: Sequence[ShardLayout] = laid.result().shards
        written = 0
        for body in list(self._bodies):
            windows = body.layout.windows
            written += sum(windows[number].end - windows[number].start for number in list(body.written))
        total = sum(layout.nbytes for layout in shards)
        return SaveProgress(total, sum(image.staged_bytes for image in self._staging.images), written)


def _follow(future: Future[None], other: Future[None]) -> None:
    """Resolve ``future`` as ``other``, which has ended."""
    error = None if other.cancelled() else other.exception()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
