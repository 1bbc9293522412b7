"""The data of a save on its way to storage: staged, framed, checksummed and written in threads that need no loop.

A thread of the save's own takes each image as it is filled and gives its memory back when it is written. Nothing in it
waits for the event loop, so that code on the loop may block at the fence while a later stage waits for that memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from .._format.digest import digest_of
from .._format.records import Node
from .._format.shard import BlockSums, ShardLayout
from .._group import Operation
from .._layout.save_layout import plan_save
from .._layout.values import copy_value
from .._runtime.caller import withdrawn_with_caller
from .._runtime.state_dict_calls import Found, ask, in_order, key_order
from .._runtime.threads import Deadline, Stop, Threads, in_background, io_threads
from .._runtime.torch_probes import Stateful
from .._staging import AsyncStager, Captured, PlanCache, Staging, capture
from .._storage import WRITE_THREADS, Attempt, Kind, Location, Outcome, Transaction
from .._storage.bodies import BytesBody, ShardBody
from .._worker.client import Saver
from ..errors import Closed, DeadlineExceeded, InvalidOption, SidestreamError, Skipped
from ..options import Apart, Digest, Durability
from .pending import SaveProgress

__all__ = ["ForeignStage", "SaveOrder", "Stager", "Writing", "first_copy", "resolve_staged"]

_GRACE_S = 5.0
_PATIENCE_S = 20.0


class Stager(Protocol):
    """What ``stager=`` takes beside our own: torch's stagers, or any object with this method. It returns a state dict
    in host memory that nobody changes, or a ``concurrent.futures.Future`` of one."""

    def stage(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What a save was asked to do, and the transaction that it does it in."""

    location: Location
    durability: Durability
    deadline: Deadline
    step: int | None
    generation: int
    budget_bytes: int | None = None
    """Of the memory that is mapped for this save alone."""
    digest: Digest | None = None
    metadata: Node = None
    operation: Operation | None = None
    """Of a save that several ranks do together."""
    saver: Saver | None = None
    """The process that writes; None: threads of this one."""
    fall_back: bool = False
    """Whether threads write where no process can be started."""
    apart: Apart | None = None
    """Of one that this process saves as a part, in the target itself."""
    own_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    saved_at: int = field(default_factory=lambda: int(time.time()))
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)
    _begun: list[Transaction] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def transaction(self) -> Transaction:
        """The transaction, which the first call begins. Over ranks it must not be called before they have planned,
        because the id of the save is not known until then."""
        with self._lock:
            if not self._begun:
                kind: Kind = "directory" if self.operation is None or self.operation.rank == 0 else "joined"
                if self.apart is not None:
                    kind = "part"
                attempt = Attempt(self.location.name, kind, self.save_id, self.durability, self.deadline)
                self._begun.append(self.location.store.begin(attempt))
            return self._begun[0]

    @property
    def outcome(self) -> Outcome:
        return self._begun[0].outcome if self._begun else "absent"

    @property
    def save_id(self) -> str:
        """Several ranks have one id, which is known once they have planned."""
        return self.own_id if self.operation is None else self.operation.save_id

    @property
    def told_id(self) -> str:
        """What its caller calls it."""
        return self.save_id if self.apart is None else self.apart.save_id


class FilePlan(Protocol):
    """What a writer needs of a plan: the content of the file of plain values (empty: no such file), the shards, and
    what the files are called."""

    @property
    def values(self) -> bytes: ...

    @property
    def values_file(self) -> str: ...

    @property
    def shards(self) -> tuple[ShardLayout, ...]: ...

    def shard_file(self, index: int) -> str: ...


class _Launch:
    """Reports to the writing thread whether the stage was launched, through ``succeeded``.

    An interrupt may end the launching thread between any two instructions. So the queue takes no lock, and an object
    that is dropped without a report reports a failure.
    """

    def __init__(self) -> None:
        self.succeeded: SimpleQueue[bool] = SimpleQueue()

    def __del__(self) -> None:
        self.succeeded.put(False)


LayOut: TypeAlias = Callable[[PlanCache, int, Captured], Any]


class Writing:
    """A launched stage and the thread that writes it; without a ``stager``, memory is mapped for this save alone.

    With ``mode="snapshot"`` the sources have been read when this is made. ``lay_out`` plans, in the stager's thread,
    given its cache of plans and its budget.
    """

    def __init__(
        self, order: SaveOrder, captured: Captured, stager: AsyncStager | None, lay_out: LayOut = plan_save
    ) -> None:
        self._order = order
        self._stop = Stop()
        self._own: AsyncStager | None = None
        if stager is None:
            timeout_s = order.deadline.timeout_s
            stager = self._own = AsyncStager(budget_bytes=order.budget_bytes, timeout_s=timeout_s)
        filler = None
        if order.saver is not None:
            stager.share()
            filler = order.saver.filler()
        self._withdrawn = False  # the caller was interrupted and will not await this save
        self._sums: list[BlockSums] = []
        self._written: list[set[int]] = []  # of each shard
        if order.digest is not None:
            digest_of(order.digest)  # or raise that it is not installed
        planned = partial(lay_out, stager.plans, stager.budget_bytes)
        # First: to start a thread is to let go of the GIL, which that of the stager would keep for a while.
        launch = _Launch()
        self._threads = Threads("sidestream-write", WRITE_THREADS)
        try:
            self._done = self._threads.submit(self._write, launch.succeeded)
            self._staging: Staging[Any] = stager.launch(captured, planned, order.deadline, filler=filler)
            withdrawn_with_caller(self)
            launch.succeeded.put(True)
            stager.settle(self._staging)
        except BaseException:  # also of a signal
            launch.succeeded.put(False)
            self.withdraw()
            raise

    async def launch(self) -> Writing:
        """It is launched."""
        return self

    def pass_on(self, staged: asyncio.Future[None]) -> None:
        """Resolve ``staged`` when the sources may change, one way or the other."""
        asyncio.wrap_future(self._staging.free).add_done_callback(partial(resolve_staged, staged))

    async def ended(self) -> tuple[Any, list[BlockSums]]:
        """Wait until all data is on storage: what ``lay_out`` made, and the checksums of each shard's blocks."""
        try:
            with self._stop.waking(self._staging.release):
                await self._threads.wait(self._done, "writing", stop=self._stop, deadline=self._order.deadline)
        except asyncio.CancelledError:
            self._stop.set()
            raise
        return self._staging.laid.result(0), self._sums

    async def release(self) -> None:
        """Give all memory back; no copy reads a source or writes into memory any more when this returns.

        The wait for a device that hangs ends at the deadline, or after 5 s if the save was signalled to stop: its
        copies keep their memory until they end.
        """
        self._staging.release()
        copied = asyncio.wrap_future(self._staging.copied)
        copied.add_done_callback(lambda done: done.cancelled() or done.exception())  # told by other means
        patience_s = _GRACE_S if self._stop.is_set() else max(self._order.deadline.remaining_s(), _GRACE_S)
        await asyncio.wait([copied], timeout=patience_s)
        if self._own is not None:
            with suppress(DeadlineExceeded):  # a device hangs; the save itself reports its outcome
                await self._own.aclose_by(Deadline.after(0.0 if not copied.done() else _GRACE_S))

    def progress(self) -> SaveProgress:
        """From any thread."""
        laid = self._staging.laid
        if not laid.done() or laid.cancelled() or laid.exception() is not None:
            return SaveProgress()
        shards: Sequence[ShardLayout] = laid.result().shards
        written = 0
        for layout, numbers in zip(shards, list(self._written), strict=False):
            written += sum(layout.windows[number].end - layout.windows[number].start for number in list(numbers))
        total = sum(layout.nbytes for layout in shards)
        return SaveProgress(total, sum(image.staged_bytes for image in self._staging.images), written)

    def interrupt(self) -> None:
        """From any thread: stop, so that ``ended()`` raises. Whoever awaits that sees to the rest."""
        self._stop.set()
        self._staging.release()

    def abandon(self) -> None:
        self._stop.set()
        self._staging.release()

    def withdraw(self) -> None:
        """End a save that nobody will await, and remove what it wrote. For the launching thread; does not wait."""
        self._withdrawn = True
        if hasattr(self, "_staging"):
            self.abandon()
            if self._done.done():  # before it could see that
                in_background(self._discard, "sidestream-abandoned")

    def leave(self) -> None:
        patience_s = self._order.deadline.remaining_s() + _GRACE_S
        wait([self._done, self._staging.copied], patience_s)
        if self._own is not None:
            with suppress(SidestreamError):  # a device may hang; the log names the remaining files
                self._own.close_by(Deadline.after(_GRACE_S))

    # --- the thread ---

    def _write(self, launched: SimpleQueue[bool]) -> None:
        order, began = self._order, False
        try:
            began = launched.get(timeout=order.deadline.remaining_s())
            if began:
                self._write_files()
        except Empty:
            raise order.deadline.exceeded("launching the copies") from None
        finally:
            self._threads.close()
            if began and self._withdrawn:
                self._discard()

    def _discard(self) -> None:
        """Remove what was written, and free the memory of a save whose caller was interrupted. Called in a thread."""
        self._order.transaction.discard_here()
        if self._own is not None:
            with suppress(SidestreamError):  # a device may hang
                self._own.close_by(Deadline.after(_GRACE_S))

    def _write_files(self) -> None:
        order = self._order
        if order.saver is not None:
            order.saver.start()  # while the plan is made
        plan = self._plan()  # what cannot be saved is refused before anything is made
        write = order.transaction.write  # ranks know the id of the save now
        if order.saver is not None:
            write = partial(order.saver.write, order.transaction, fall_back=order.fall_back, url=order.location.url)
        write(self._files(plan), threads=self._threads, stop=self._stop)

    def _files(self, plan: FilePlan) -> Iterator[tuple[str, BytesBody | ShardBody]]:
        """Small values first, then shard after shard in the order in which they are staged."""
        if plan.values:
            yield plan.values_file, BytesBody(plan.values)
        images = iter(self._staging.images)
        for index, layout in enumerate(plan.shards):
            body = ShardBody(layout, tuple(islice(images, len(layout.windows))), self._order.digest)
            self._sums.append(body.sums)
            self._written.append(body.written)
            yield plan.shard_file(index), body

    def _plan(self) -> FilePlan:
        # Ranks that plan together are told by rank 0, at the deadline, who did not come.
        patience_s = 0.0 if self._order.operation is None else _PATIENCE_S
        try:
            plan: FilePlan = self._staging.laid.result(self._order.deadline.remaining_s() + patience_s)
        except TimeoutError as error:
            if self._staging.laid.done():
                raise
            raise self._order.deadline.exceeded("waiting for earlier stages") from error
        return plan


def resolve_staged(staged: asyncio.Future[None], free: asyncio.Future[None]) -> None:
    """``staged`` becomes what ``free``, which has ended, says. Nothing reads a source of a stage that gave way."""
    error = None if free.cancelled() else free.exception()
    if staged.done():
        return
    if error is None or isinstance(error, (Skipped, Closed)):  # nothing of it will be read any more
        staged.set_result(None)
    else:
        staged.set_exception(error)
        staged.exception()  # the save itself raises it too


def first_copy(state: Mapping[str, Any], stager: Stager) -> Any:
    """What another stager makes of the state dicts in ``state``. Raises ``InvalidOption``."""
    if not callable(getattr(stager, "stage", None)) or iscoroutinefunction(stager.stage):
        raise InvalidOption(f"stager={stager!r} has no plain method stage(state_dict)")
    if not isinstance(state, Mapping):
        raise InvalidOption(f"state is a mapping, not a {type(state).__name__}")
    objects = in_order(
        Found((key_order(key),), str(key), one) for key, one in state.items() if isinstance(one, Stateful)
    )
    answers = {id(one.instance): ask(one) for one in objects}
    return stager.stage({key: answers.get(id(item), item) for key, item in state.items()})


class ForeignStage:
    """Another stager makes the first copy, as it does under DCP: on this thread, from state dicts. It may use its
    memory again for the next stage, so ours is a second copy, and the sources are free when that one has ended."""

    def __init__(self, order: SaveOrder, state: Mapping[str, Any], stager: Stager, lay_out: LayOut = plan_save) -> None:
        self._order = order
        self._lay_out = lay_out
        self._stager: Any = stager
        self._result = first_copy(state, stager)
        self._writing: Writing | None = None

    def progress(self) -> SaveProgress:
        """Of our own stage."""
        return SaveProgress() if self._writing is None else self._writing.progress()

    async def launch(self) -> Writing:
        """Our own stage of what the other one made, once it has."""
        result, self._result = self._result, None
        deadline = self._order.deadline
        if isinstance(result, Future):
            try:
                async with asyncio.timeout(deadline.remaining_s()):
                    result = await asyncio.wrap_future(result)
            except TimeoutError as error:
                raise deadline.exceeded("the stager that was passed in") from error
        elif getattr(self._stager, "should_synchronize_after_execute", False):
            await io_threads().run(self._stager.synchronize_staging, deadline=deadline)
        self._writing = Writing(self._order, capture(result, copy_value), None, self._lay_out)
        return self._writing

    def abandon(self) -> None:
        self._result = None
        if self._writing is not None:
            self._writing.abandon()

    def leave(self) -> None:
        if self._writing is not None:
            self._writing.leave()
