"""``PendingSave``, the save in progress that a caller holds, and ``SaveInfo``, its result."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from .._runtime.abandoned import register
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.tasks import supervise
from .._runtime.threads import end_abandoned, release_in_background
from ..errors import SaveAbortedError, SkippedError, printable_lines
from ..options import Durability, Outcome
from .sinks import PendingExport

__all__ = ["PendingSave", "SaveInfo", "SaveProgress", "SaveWork"]

_log = logging.getLogger("sidestream")


@public
@dataclass(frozen=True, slots=True, repr=False)
class SaveInfo(Displayed):
    """A checkpoint that is committed and, with ``durability="fsync"``, durable.

    Attributes:
        url: The checkpoint.
        save_id: The id of the save that wrote it.
        step: The step of the run. None outside of a run.
        generation: How many saves of the step came before, plus 1.
        nbytes: The bytes of its data files.
        durability: Whether its files and directories were synced.
        seconds: How long it took from the call until the sources could change (``"staged"``), until all data was on
            storage (``"written"``) and until the commit was acknowledged (``"committed"``).
        exports: For each export of a ``save`` its ``ConvertReport``, or the error that it failed with. Empty for what
            ``async_save`` started.
    """

    url: str
    save_id: str
    step: int | None
    generation: int
    nbytes: int
    durability: Durability
    seconds: Mapping[str, float]
    exports: tuple[Any, ...] = ()

    def _summary(self) -> str:
        took = self.seconds.get("committed")
        return f"{self.url}: {readable_bytes(self.nbytes)}" + ("" if took is None else f" in {took:.2f} s")

    def _table(self) -> Table:
        rows = [[phase, f"{seconds:.3f} s"] for phase, seconds in self.seconds.items()]
        rows += [[f"export {number}", str(one)] for number, one in enumerate(self.exports)]
        return Table(("phase", "after"), rows, len(rows))


@public
@dataclass(frozen=True, slots=True)
class SaveProgress:
    """The progress of a save, in bytes of its data files.

    Attributes:
        total_bytes: The bytes to write. 0 until the save is planned.
        staged_bytes: How many of them have been copied to staging memory.
        written_bytes: How many of them have been given to the storage. The last sync and the commit come after that.
            What a lost writer process had written counts again from 0.
    """

    total_bytes: int = 0
    staged_bytes: int = 0
    written_bytes: int = 0


class SaveWork(Protocol):
    """The work of a ``PendingSave``. When ``run`` has ended, ``outcome`` is the true outcome."""

    @property
    def outcome(self) -> Outcome: ...

    @property
    def url(self) -> str: ...

    @property
    def progress(self) -> SaveProgress: ...

    @property
    def expires_at(self) -> float:
        """The deadline of the operation (``time.monotonic`` seconds)."""

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        """Do the save, and resolve ``staged`` when the sources may change again."""

    def abandon(self) -> None:
        """Signal every thread to stop, because ``run`` will not be called or continued. Does not block. Call ``leave``
        afterwards."""

    def leave(self, *, stuck: bool) -> None:
        """Wait until no thread uses the resources of the work. Then find out the outcome, remove an attempt that was
        not committed, and release all memory. Called in a thread after ``abandon``. ``stuck``: a thread is left behind
        in a system call. Raises what the storage raises."""


@public
class PendingSave(Displayed):
    """A save in progress. Awaiting it returns its ``SaveInfo``, or raises the error of the save.

    Any number of tasks may await it, any number of times. A cancel of an awaiting task does not cancel the save;
    ``cancel()`` does. It belongs to the event loop that started it. An error that is never retrieved is logged.
    """

    def __init__(self, work: SaveWork, exports: tuple[PendingExport, ...] = ()) -> None:
        loop = asyncio.get_running_loop()
        self._work = work
        self._exports = exports
        self._cancelling = False
        self._result: asyncio.Future[SaveInfo] = loop.create_future()
        self._unretrieved = _Unretrieved(work.url)
        # In contrast to __del__, it also runs when the interpreter ends, and before the globals of modules are gone.
        weakref.finalize(self, self._unretrieved.log)
        self._staged: asyncio.Future[None] = loop.create_future()
        self._started = False
        self._settled = False
        self._cut_off = False
        self._leaving: Future[Any] | None = None
        self._registration = register(_Unfinished(self))
        self._task = supervise(self._run(), f"sidestream save {work.url}")
        # ``_run`` settles the save once it has begun. The callback is for a task that is cancelled before its first
        # step, as a closing loop does with all tasks: then ``_run`` is never entered. ``_settle`` does nothing new
        # after ``_run``.
        self._task.add_done_callback(self._settle)

    def _summary(self) -> str:
        now = self.progress
        if self.outcome == "absent" and not now.total_bytes:
            return f"{self.url}: absent, nothing was written"
        state = self.outcome or ("staging" if not self._staged.done() else "writing")
        total = readable_bytes(now.total_bytes)
        return f"{self.url}: {state}, {readable_bytes(now.written_bytes)} of {total} written"

    def _table(self) -> Table:
        now = self.progress
        counts = {"total": now.total_bytes, "staged": now.staged_bytes, "written": now.written_bytes}
        return Table(
            ("bytes", "so far"), ([what, readable_bytes(count)] for what, count in counts.items()), len(counts)
        )

    @property
    def url(self) -> str:
        """The URL of the checkpoint that is being saved."""
        return self._work.url

    @property
    def staged(self) -> Awaitable[None]:
        """An awaitable that is done when everything has been copied, or the save has ended otherwise. The tensors may
        change then. Awaiting it raises the error of the staging."""
        return _Shared(self._staged)

    @property
    def exports(self) -> tuple[PendingExport, ...]:
        """The exports of the save: one ``PendingExport`` for each ``HF`` in ``export=``, in their order, on every rank.
        They continue when the save has ended."""
        return self._exports

    @property
    def outcome(self) -> Outcome | None:
        """The outcome: None while the save is in progress, then ``"committed"``, ``"absent"``, or ``"unknown"`` if the
        commit was sent and could not be read back."""
        return self._work.outcome if self.done() else None

    @property
    def progress(self) -> SaveProgress:
        """The progress so far. Any thread may read it at any time."""
        return self._work.progress

    @property
    def unretrieved(self) -> BaseException | None:
        """The error that this save ended with, if it was not retrieved. A save that was skipped has none."""
        return self._result.exception() if self._unretrieved.error else None

    @property
    def settled(self) -> bool:
        """True if the save is ``done()`` and has no error that was not retrieved."""
        return self.done() and self.unretrieved is None

    def mark_retrieved(self) -> None:
        """Count the error as retrieved."""
        self._unretrieved.error = ""

    def when_done(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` on the loop when the save is ``done()``."""
        self._task.add_done_callback(lambda _: callback())

    def done(self) -> bool:
        """Return True if the save has ended, with success or not, and has cleaned up."""
        end_abandoned()
        return self._settled if self._leaving is None else self._leaving.done()

    def cancel(self) -> bool:
        """Ask the save to stop. Awaiting it raises ``CancelledError`` then.

        Nothing becomes visible, and what was written is removed, unless the commit had been sent; ``outcome`` says
        which.

        Returns:
            False if the save had ended already.
        """
        if self._task.done() or self._leaving is not None:
            return False
        self._cancelling = True
        # The launch of the copies came before the task, so a save that never runs has a thread and memory. Therefore
        # the task is not cancelled before it has begun; ``_run`` cancels it at its start, and the work cleans up as
        # after any cancel.
        return not self._started or self._task.cancel()  # a task that is cancelled before its first step never runs

    async def ended(self) -> None:
        """Wait until the save is ``done()``. The error of the save is not raised, and not retrieved."""
        if not self.done():
            await asyncio.wait([self._task if self._leaving is None else asyncio.wrap_future(self._leaving)])

    def __await__(self) -> Generator[None, None, SaveInfo]:
        try:
            return (yield from asyncio.shield(self._result).__await__())
        finally:
            if self._result.done():
                self.mark_retrieved()

    async def _run(self) -> None:
        """Run the work. All errors are set on the two futures, because this is the top of a background task."""
        self._started = True
        try:
            if self._cancelling:
                self._task.cancel()
            info = await self._work.run(self._staged)
        except asyncio.CancelledError:
            self._settle()
        except Exception as error:
            self._fail(error)
        except BaseException as error:  # KeyboardInterrupt and SystemExit may have interrupted the cleanup
            self._cut_off = True
            self._fail(error)
            raise
        else:
            self._result.set_result(info)
        if not self._staged.done():
            self._staged.set_result(None)
        self._end()

    def _end(self) -> None:
        self._settled = True
        self._registration.end()
        error = asyncio.CancelledError() if self._result.cancelled() else self._result.exception()
        for export in self._exports:  # also if the save never began
            export.saved(self._work.outcome, error)

    def _settle(self, _: object = None) -> None:
        """End a save whose task has ended. ``cancel()`` or the loop may have cancelled it, perhaps before its first
        step."""
        # Two saves have not cleaned up: one whose task never began, and one whose clean-up was interrupted by
        # ``KeyboardInterrupt`` or ``SystemExit``. The loop may be about to close, so a thread does it, and ``done()``
        # follows the thread from here on.
        if self._cut_off or not (self._started or self._result.done()):
            self._clean_up_in_thread()
        if not self._result.done():
            if self._cancelling:
                self._result.cancel()
            else:
                self._fail(self._aborted())
            if not self._staged.done():
                self._staged.set_result(None)
        self._end()

    def _clean_up_in_thread(self) -> None:
        """Clean up in a thread, because the work has not begun or was interrupted, and the loop may be about to
        close."""
        self._work.abandon()
        self._leaving = release_in_background(partial(self._work.leave, stuck=False), "sidestream-abandoned")
        self._leaving.add_done_callback(self._log_what_remains)

    def _log_what_remains(self, left: Future[Any]) -> None:
        error = left.exception()
        if error is not None:
            _log.warning("the files of the attempt to save %s could not be removed: %s", self.url, error)

    def _aborted(self) -> SaveAbortedError:
        outcome = self._work.outcome
        return SaveAbortedError(f"the event loop was closed while {self.url} was being saved (outcome: {outcome})")

    def _fail(self, error: BaseException) -> None:
        self._result.set_exception(error)
        self._result.exception()  # marks it as retrieved for asyncio: ``_Unretrieved`` logs it, with more facts
        if not isinstance(error, SkippedError):
            self._unretrieved.error = printable_lines(f"{type(error).__name__}: {error}")
        elif not self._staged.done():
            self._staged.set_result(None)
        if not self._staged.done():
            self._staged.set_exception(error)
            self._staged.exception()

    def _resolve_from_outside(self) -> None:
        """Resolve the futures in another thread. The loop never runs again, so it cannot run their callbacks."""
        with suppress(RuntimeError, asyncio.InvalidStateError):  # "Event loop is closed"
            self._result.set_exception(self._aborted())
        with suppress(RuntimeError, asyncio.InvalidStateError):
            self._staged.set_result(None)
        self._result.done() and self._result.exception()
        self.mark_retrieved()
        self._settled = True
        if self._leaving is not None and not self._leaving.done():
            self._leaving.set_result(None)


@dataclass(slots=True)
class _Unretrieved:
    """The text of the error of a save until it is retrieved; empty if there is none. It refers to nothing that
    refers to the ``PendingSave``, as the error itself may."""

    url: str
    error: str = ""

    def log(self) -> None:
        if self.error:
            _log.error("saving %s failed, and the error was not retrieved: %s", self.url, self.error)


class _Unfinished:
    """The registered resources of a save, which are released if its loop ends first."""

    def __init__(self, pending: PendingSave) -> None:
        self._pending = pending
        self.what = f"saving {pending._work.url}"

    @property
    def expires_at(self) -> float:
        return self._pending._work.expires_at

    def abandon(self) -> None:
        # The loop has ended, so the task will never be done. From now on ``done()`` and ``ended()`` follow this future,
        # which ``_resolve_from_outside`` resolves.
        if self._pending._leaving is None:
            self._pending._leaving = Future()
        self._pending._work.abandon()

    def leave(self, *, stuck: bool) -> str:
        pending = self._pending
        try:
            pending._work.leave(stuck=stuck)
            removed = "its files were removed"
        except Exception as error:  # reported in the log line
            removed = f"its files could not be removed: {error}"
        outcome = pending._work.outcome
        pending._resolve_from_outside()
        remarks = {
            "absent": removed,
            "committed": "it is complete",
            "unknown": "nothing was deleted; check whether the checkpoint exists",
        }
        return f"outcome: {outcome}, {remarks[outcome]}"


class _Shared:
    """An awaitable for any number of tasks. A cancel of one of them does not cancel the future behind it."""

    def __init__(self, future: asyncio.Future[None]) -> None:
        self._future = future

    def __await__(self) -> Generator[None, None, None]:
        return asyncio.shield(self._future).__await__()
