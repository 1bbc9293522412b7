"""``PendingSave``, the save in progress that a caller holds, and ``SaveInfo``, its result."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from .._engine.handle import Pending, Waitable
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.waits import WaitReasons, caller_waits
from ..errors import InvalidOptionError, SkippedError
from ..events import SaveContext
from ..options import Durability, Outcome
from .sinks import PendingExport, PendingOutcome, PendingVersion


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
        published: For ``publish=`` of a ``save`` its ``PublishedVersion``, or the error that it failed with.
    """

    url: str
    save_id: str
    step: int | None
    generation: int
    nbytes: int
    durability: Durability
    seconds: Mapping[str, float]
    exports: tuple[Any, ...] = ()
    published: Any = None

    def _summary(self) -> str:
        took = self.seconds.get("committed")
        return f"{self.url}: {readable_bytes(self.nbytes)}" + ("" if took is None else f" in {took:.2f} s")

    def _table(self) -> Table:
        rows = [[phase, f"{seconds:.3f} s"] for phase, seconds in self.seconds.items()]
        rows += [[f"export {number}", str(one)] for number, one in enumerate(self.exports)]
        rows += [] if self.published is None else [["published", str(self.published)]]
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
    def context(self) -> SaveContext: ...

    @property
    def reasons(self) -> WaitReasons:
        """Why a caller has to wait until the sources may change."""

    async def run(self, staged: Future[None]) -> SaveInfo:
        """Do the save, and resolve ``staged`` when the sources may change again."""


class _Staged(Waitable[None]):
    """``PendingSave.staged``. Observers learn how long it held up its callers."""

    def __init__(self, work: SaveWork) -> None:
        super().__init__(f"staging {work.url}")
        self._work = work

    async def ended(self) -> None:
        with self._waits():
            await super().ended()

    def _wait(self, timeout_s: float | None) -> None:
        with self._waits():
            super()._wait(timeout_s)

    def _waits(self) -> AbstractContextManager[None]:
        return caller_waits("staged", (self._work.reasons,), self._work.context)


@public
class PendingSave(Displayed, Pending[SaveInfo]):
    """A save in progress. Awaiting it returns its ``SaveInfo``, or raises the error of the save.

    Any number of tasks may await it, any number of times, on any event loops, and ``result()`` waits for it in a
    thread. A cancel of an awaiting task does not cancel the save; ``cancel()`` does. It continues if nothing waits for
    it, also when the event loop that started it has ended. An error that is never retrieved is logged.
    """

    def __init__(self, work: SaveWork, outcomes: tuple[PendingOutcome, ...] = ()) -> None:
        super().__init__(f"sidestream save {work.url}", f"saving {work.url}")
        self._work = work
        self._outcomes = outcomes
        self._staged: Waitable[None] = _Staged(work)
        self._start(self._save)

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
    def staged(self) -> Waitable[None]:
        """An awaitable that is done when everything has been copied, or the save has ended otherwise. The tensors may
        change then. Awaiting it, or its ``result(timeout_s)`` in a thread, raises the error of the staging."""
        return self._staged

    @property
    def exports(self) -> tuple[PendingExport, ...]:
        """The exports of the save: one ``PendingExport`` for each ``HF`` in ``export=``, in their order, on every rank.
        They continue when the save has ended."""
        return tuple(one for one in self._outcomes if isinstance(one, PendingExport))

    @property
    def published(self) -> PendingVersion:
        """The version that ``publish=`` asked for. It continues when the save has ended.

        Raises:
            InvalidOptionError: The save has no ``publish=``.
        """
        for one in self._outcomes:
            if isinstance(one, PendingVersion):
                return one
        raise InvalidOptionError("this save publishes nothing: call it with publish=")

    @property
    def outcomes(self) -> tuple[PendingOutcome, ...]:
        """What the save produces beside the checkpoint."""
        return self._outcomes

    @property
    def outcome(self) -> Outcome | None:
        """The outcome: None while the save is in progress, then ``"committed"``, ``"absent"``, or ``"unknown"`` if the
        commit was sent and could not be read back."""
        return self._work.outcome if self.done() else None

    @property
    def progress(self) -> SaveProgress:
        """The progress so far. Any thread may read it at any time."""
        return self._work.progress

    def cancel(self) -> bool:
        """Ask the save to stop. Awaiting it raises ``CancelledError`` when it has cleaned up.

        Nothing becomes visible, and what was written is removed, unless the commit had been sent; ``outcome`` says
        which.

        Returns:
            False if the save had ended already.
        """
        return super().cancel()

    async def _save(self) -> SaveInfo:
        error: BaseException | None = None
        try:
            return await self._work.run(self._staged._future)
        except BaseException as failure:
            error = failure
            raise
        finally:
            # Before the handle is done. A skipped or cancelled save has no copy that reads the sources any more.
            if error is None or isinstance(error, (SkippedError, asyncio.CancelledError)):
                self._staged.succeed(None)
            else:
                self._staged.fail(error)
            for one in self._outcomes:
                one.saved(self._work.outcome, error)
            del error  # which refers to this frame
