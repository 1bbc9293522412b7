"""``Follower``: a task that fetches each newest version of a source, and puts it into a ``Live``."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch

from .._engine.calls import in_operation
from .._runtime.public import Displayed, Table, public
from .._runtime.tasks import create_owned_task, running_loop, wait_out
from .._runtime.threads import io_threads
from ..errors import (
    CheckpointNotFoundError,
    ClosedError,
    DeadlineExceededError,
    IncompleteCheckpointError,
    InvalidOptionError,
    RefusedVersionError,
    SidestreamError,
    SkippedError,
    StateMismatchError,
    without_frames,
)
from ..events import VersionPassedOver, VersionServed, emit
from ..options import check_seconds
from .live import Live
from .shells import Shell

_log = logging.getLogger("sidestream")

_GONE_S = 0.05
"""The pause after a version was deleted before it could be fetched."""


@public
@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that was fetched and verified, and is not served yet.

    Attributes:
        stamp: Its stamp: the name of the step, or epoch and version of what a ``Publisher`` has published.
        version: Its number: that of the step, or the ``version=`` of the publisher.
        save_id: The id of the save that wrote it. Empty if there is none.
        metadata: The ``metadata=`` of the save or of the version.
        tensors: The weights by the names of the state dict, in host memory. Do not change them.
    """

    stamp: str
    version: int
    save_id: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class NotServed:
    """A version that cannot be served, and why."""

    stamp: str
    error: SidestreamError


class VersionSource(Protocol):
    """Where a ``Follower`` gets versions from. ``pass_over`` and ``served`` are about what ``fetch`` has returned last.
    All coroutines are parts of operations."""

    url: str
    passed_over: dict[str, SidestreamError]
    """The versions above the one that is served, which are not served, by stamp."""

    @property
    def checked(self) -> float | None:
        """When the source was last looked at without an error, by ``time.monotonic()``."""

    @property
    def problem(self) -> BaseException | None:
        """What is wrong with the source, although it was looked at."""

    async def look(self) -> bool:
        """Return whether there is a version to take up."""

    async def wait(self) -> None:
        """Wait until ``look`` may find something new."""

    async def fetch(self) -> Candidate | NotServed | None:
        """Return the newest version. None: there is nothing to take up any more. Raises what another try may not
        raise."""

    async def pass_over(self, error: SidestreamError) -> None:
        """Note that the version is not served."""

    async def served(self, candidate: Candidate) -> None:
        """Note that the version is served."""

    def accept_lower(self) -> None:
        """Do ``Follower.accept_lower``."""

    def close(self) -> None:
        """Free the memory that is not served any more."""


Hook: TypeAlias = Callable[[Candidate], object] | None
"""Code of the caller, which may be a coroutine function."""


@public
@dataclass(frozen=True, slots=True, repr=False)
class FollowerHealth(Displayed):
    """The state of a ``Follower``.

    Attributes:
        stamp: The stamp of the version that it has put in place last; None before the first.
        save_id: The id of the save that wrote it.
        served_s: The seconds since then, or since the follower was entered.
        checked_s: The seconds since it last looked at the run, or got a message of the publisher; None before that.
        problem: The error of its last attempt, which it makes again, or of ``after_swap``, or that the publisher is
            gone. None if there is none.
        passed_over: The versions above it that are not served, and why, by stamp. A newer one that is served ends that.
        waiting: Whether a newer version waits for readings of old versions (``Live.health().oldest_reading``).
    """

    stamp: str | None
    save_id: str
    served_s: float
    checked_s: float | None
    problem: str | None
    passed_over: Mapping[str, str]
    waiting: bool

    @property
    def ok(self) -> bool:
        """True if weights are served and nothing needs attention."""
        return self.stamp is not None and not (self.problem or self.passed_over or self.waiting)

    def _summary(self) -> str:
        served = f"{'ok' if self.ok else 'not ok'}: {self.stamp or 'no version yet'} for {self.served_s:.0f} s"
        over = f"passed over {', '.join(self.passed_over)}" if self.passed_over else ""
        waits = "a version waits for readings" if self.waiting else ""
        return "; ".join(part for part in (served, self.problem, over, waits) if part)

    def _table(self) -> Table:
        rows = [["problem", self.problem]] if self.problem else []
        rows += [["waits for", "readings of old versions"]] if self.waiting else []
        rows += [[f"passed over {name}", text] for name, text in self.passed_over.items()]
        return Table(("what", "problem"), rows, len(rows))


@public
class Follower:
    """A task that puts the newest good version of a run, or of a channel, into a ``Live``, and each newer one after it.

    ``Checkpointer.following`` and ``Subscriber.following`` return it. The task runs inside of its ``async with`` block.
    It ends with the block, and what is served then stays.
    """

    def __init__(self, source: VersionSource, live: Live, hooks: tuple[Hook, Hook, Hook]) -> None:
        self._source, self._live = source, live
        self._accept, self._before, self._after_swap = hooks
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        """Whether the block was left."""
        self._settled = asyncio.Event()
        """Set when a version is served, or when none of those that are there fits."""
        self._served: Candidate | None = None
        """Without its tensors."""
        self._since = time.monotonic()
        self._problem: BaseException | None = None
        self._late: BaseException | None = None
        """What ``after_swap`` raised for the version that is served."""
        self._waiting = False

    # --- what a program calls ---

    async def ready(self, *, timeout_s: float | None = None) -> None:
        """Wait until the first version is served.

        A cancel has no effect on the follower.

        Args:
            timeout_s: The limit, in seconds. None: none.

        Raises:
            StateMismatchError: The versions that are there do not fit: names are missing, or shapes differ. The
                follower continues all the same.
            InvalidOptionError: A checkpoint was saved where the run should be.
            DeadlineExceededError: There was no good version in time. The message says which were passed over.
            ClosedError: The follower was not entered, or has ended.
        """
        if self._task is None and not self._ended:
            raise ClosedError("enter the follower first: async with ....following(live) as follower")
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._settled.wait()
                    if self._served is not None:
                        return
                    self._raise_what_settles()
                    self._settled.clear()  # the versions that did not fit are gone
        if self._served is not None:
            return
        problem = self._problem or self._source.problem
        known = {**self._reasons(), **({"the last attempt": str(problem)} if problem else {})}
        why = "; ".join(f"{name}: {reason}" for name, reason in known.items()) or "there is none yet"
        raise DeadlineExceededError(f"no version of {self._source.url} could be served within {timeout_s} s: {why}")

    def _raise_what_settles(self) -> None:
        """Raise the reason why waiting for the first version is of no use."""
        if self._task is None or self._task.done():
            raise ClosedError(f"the follower of {self._source.url} has ended: {self._problem}") from self._problem
        if (mismatch := self._mismatch()) is not None:
            raise mismatch
        if isinstance(self._problem, InvalidOptionError):
            raise self._problem

    def accept_lower(self) -> None:
        """Serve a step with a lower number, if it was saved later than the one that is served: a trainer went back.

        The steps above it that are there now are left out from then on. If no such step is there yet, the first one
        that is committed counts. Without this call a lower step is served when those above it are deleted. The
        ``rollback`` of a channel needs no such call.
        """
        self._source.accept_lower()

    def health(self) -> FollowerHealth:
        """Return the state: what is served, and what needs attention."""
        now, served, source = time.monotonic(), self._served, self._source
        problem = self._problem or source.problem or self._late
        return FollowerHealth(
            stamp=None if served is None else served.stamp,
            save_id="" if served is None else served.save_id,
            served_s=now - self._since,
            checked_s=None if source.checked is None else now - source.checked,
            problem=None if problem is None else f"{type(problem).__name__}: {problem}",
            passed_over=self._reasons(),
            waiting=self._waiting,
        )

    def _reasons(self) -> dict[str, str]:
        passed_over = list(self._source.passed_over.items())  # at once, because the operation loop changes it
        return {name: f"{type(error).__name__}: {error}" for name, error in passed_over}

    async def __aenter__(self) -> Follower:
        running_loop("following")
        if self._task is not None or self._ended:
            raise ClosedError("this follower was entered before: call following() again")
        self._task = create_owned_task(self._follow(), f"sidestream follower of {self._source.url}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = self._task
        assert task is not None
        task.cancel()
        cancelled = await wait_out(task, lambda _: task.cancel())
        self._source.close()
        self._settled.set()  # a task that was cancelled at once has not done it
        self._task, self._ended = None, True  # its cancel refers to this object, and with it to the weights
        if cancelled is not None:
            try:
                raise cancelled
            finally:
                del cancelled  # it refers to this frame
        if error is None and not task.cancelled() and (failure := task.exception()) is not None:
            raise failure

    # --- the task ---

    async def _follow(self) -> None:
        try:
            while True:
                if not await self._advance():
                    await in_operation(self._source.wait, "following", ends=False)
        except Exception as error:  # a fault: ``health()`` shows it too, and the end of the block raises it
            _log.exception("the follower of %s has ended", self._source.url)
            self._problem = error
            raise
        finally:
            self._settled.set()

    async def _advance(self) -> bool:
        """Look at the source, and take up what is new. Return whether to look again at once."""
        try:
            if await in_operation(self._source.look, "following"):
                if self._live._next is not None:  # what the program installs waits for a copy, and comes first
                    return False
                await self._take()
                return True
            self._problem = None
            if self._served is None and self._mismatch() is not None:
                self._settled.set()
        except SkippedError:  # the program installs other weights
            return False
        except (CheckpointNotFoundError, IncompleteCheckpointError):  # deleted since it was chosen
            await asyncio.sleep(_GONE_S)
            return True
        except SidestreamError as error:
            self._problem = without_frames(error)
            if isinstance(error, InvalidOptionError):  # for example a checkpoint, and not a run: a wait is of no use
                self._settled.set()
        return False

    def _mismatch(self) -> SidestreamError | None:
        found = list(self._source.passed_over.values())
        return next((error for error in found if isinstance(error, StateMismatchError)), None)

    async def _take(self) -> None:
        """Fetch the newest version, ask the program, and exchange the weights."""
        self._waiting = True
        try:
            shell = await self._live._claim()
        finally:
            self._waiting = False
        began = time.monotonic()
        try:
            # In the task that follows, and not in an operation: a cancel between them gives the shell back here.
            candidate = await in_operation(partial(self._fetch, shell), "following")
            if candidate is None:
                return
            try:
                await self._ask(candidate)
                await _call(self._before, "before_swap", candidate)
            except RefusedVersionError as error:
                await in_operation(partial(self._pass_over, NotServed(candidate.stamp, error)), "following")
                return
            await in_operation(partial(self._serve, shell, candidate, began), "following")
            self._settled.set()
            await self._after(candidate)
        finally:
            self._live._give_back(shell)

    async def _ask(self, candidate: Candidate) -> None:
        if self._accept is None:
            return
        answer = await _call(self._accept, "accept", candidate)
        if answer is not True:
            raise RefusedVersionError(f"{candidate.stamp}: accept= returned {answer!r}, and only True accepts")

    async def _after(self, candidate: Candidate) -> None:
        try:
            await _call(self._after_swap, "after_swap", candidate)
        except RefusedVersionError as error:  # too late to refuse it
            self._late = without_frames(error)

    async def _fetch(self, shell: Shell) -> Candidate | None:
        await self._live._clear(shell)
        fetched = await self._source.fetch()
        if isinstance(fetched, NotServed):
            await self._pass_over(fetched)
            return None
        return fetched

    async def _serve(self, shell: Shell, candidate: Candidate, began: float) -> None:
        stamp, save_id = candidate.stamp, candidate.save_id
        await self._live._serve(shell, candidate.tensors, stamp, candidate.version, save_id)
        self._served, self._since = replace(candidate, tensors={}), time.monotonic()
        self._problem = self._late = None
        await self._source.served(candidate)
        seconds = time.monotonic() - began
        await io_threads().run(emit, VersionServed(self._source.url, stamp, save_id, seconds))

    async def _pass_over(self, not_served: NotServed) -> None:
        stamp, error = not_served.stamp, not_served.error
        without_frames(error)
        self._source.passed_over[stamp] = error
        await self._source.pass_over(error)
        event = VersionPassedOver(self._source.url, stamp, type(error).__name__, str(error))
        await io_threads().run(emit, event)


async def _call(hook: Hook, name: str, candidate: Candidate) -> Any:
    """Call code of the program. Raises ``RefusedVersionError`` for what it raises."""
    if hook is None:
        return None
    try:
        answer: Any = hook(candidate)
        return await answer if inspect.isawaitable(answer) else answer
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise  # otherwise the hook awaited what was cancelled, and the follower was not
        text = f"{candidate.stamp}: {name}= raised {type(error).__name__}: {error}"
        raise RefusedVersionError(text) from error
