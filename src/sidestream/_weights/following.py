"""``Follower``: a task that fetches each newest step of a run, and puts it into a ``Live``."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

import torch

from .._engine.calls import in_operation
from .._load.open.steps import Step
from .._run.restore import StepSelector, choose, newest
from .._run.run import Run
from .._run.steps import changed_among, list_generations
from .._run.watch import Pauses
from .._runtime.public import Displayed, Table, public
from .._runtime.tasks import create_owned_task, running_loop, wait_out
from .._runtime.threads import Stop, current_deadline, io_threads
from .._staging.arena import Arena
from ..errors import (
    CheckpointNotFoundError,
    ClosedError,
    CorruptCheckpointError,
    DeadlineExceededError,
    IncompleteCheckpointError,
    InvalidOptionError,
    KeyCollisionError,
    RefusedVersionError,
    SidestreamError,
    SkippedError,
    StateMismatchError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
    without_frames,
)
from ..events import VersionPassedOver, VersionServed, emit
from ..options import LoadOptions, Names, check_bool, check_names, check_seconds
from .live import Live
from .matching import dtypes_of, match
from .shells import Shell

_log = logging.getLogger("sidestream")

_NEWEST = StepSelector()
_GONE_S = 0.05
"""The pause after a step was deleted before it could be fetched."""

_OF_THE_STEP = (
    CorruptCheckpointError,
    InvalidOptionError,
    KeyCollisionError,
    RefusedVersionError,
    StateMismatchError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
"""Errors that a step has whenever it is fetched. All others are those of an attempt, which is made again."""


@public
@dataclass(frozen=True, slots=True)
class Candidate:
    """A version that was fetched and verified, and is not served yet.

    Attributes:
        stamp: Its stamp: the name of the step.
        step: The number of the step.
        generation: The generation of the step.
        save_id: The id of the save that wrote it. Empty if another writer did.
        metadata: The ``metadata=`` of the save.
        tensors: The weights by the names of the state dict, in host memory. Do not change them.
    """

    stamp: str
    step: int
    generation: int
    save_id: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]


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
        checked_s: The seconds since it has last looked at the run without an error; None before the first time.
        problem: The error of its last attempt, which it makes again, or of ``after_swap``. None if there was none.
        passed_over: The steps above it that are not served, and why, by stamp. A newer step that is served ends that.
        waiting: Whether a newer step waits for readings of old versions (``Live.health().oldest_reading``).
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
        return f"{'ok' if self.ok else 'not ok'}: {self.stamp or 'no step yet'} for {self.served_s:.0f} s"

    def _table(self) -> Table:
        rows = [["problem", self.problem]] if self.problem else []
        rows += [["waits for", "readings of old versions"]] if self.waiting else []
        rows += [[f"passed over {name}", text] for name, text in self.passed_over.items()]
        return Table(("what", "problem"), rows, len(rows))


@public
class Follower:
    """A task that puts the newest good step of a run into a ``Live``, and each newer one after it.

    ``Checkpointer.following`` returns it. The task runs inside of its ``async with`` block. It ends with the block, and
    what is served then stays.
    """

    def __init__(
        self,
        run: Run,
        options: LoadOptions,
        live: Live,
        *,
        names: Names | None,
        hooks: tuple[Hook, Hook, Hook],
        mapped: bool,
        poll_s: float,
    ) -> None:
        if not isinstance(live, Live):
            raise InvalidOptionError(f"live={live!r} has to be a sidestream.Live")
        check_names(names)
        check_bool("mapped", mapped)
        self._run, self._options, self._live = run, options, live
        self._names, self._mapped = names, mapped
        self._accept, self._before, self._after_swap = hooks
        self._pauses = Pauses(run.store, poll_s)
        self._memory = Arena(sys.maxsize)
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        """Set when a step is served, or when none of the steps that are there fits."""
        self._served: Step | None = None
        self._save_id = ""
        self._since = time.monotonic()
        self._checked: float | None = None
        self._left_out: dict[str, Step] = {}
        """Steps above the one that is served, which are not served: damaged, refused, or above ``accept_lower``."""
        self._passed_over: dict[str, SidestreamError] = {}
        self._problem: BaseException | None = None
        self._late: BaseException | None = None
        """What ``after_swap`` raised for the version that is served."""
        self._waiting = self._lower = self._goes_back = False

    # --- what a program calls ---

    async def ready(self, *, timeout_s: float | None = None) -> None:
        """Wait until the first step is served.

        A cancel has no effect on the follower.

        Args:
            timeout_s: The limit, in seconds. None: none.

        Raises:
            StateMismatchError: The steps that are there do not fit: names are missing, or shapes differ. The follower
                continues all the same.
            DeadlineExceededError: No good step was committed in time. The message says which were passed over.
            ClosedError: The follower was not entered, or has ended.
        """
        if self._task is None:
            raise ClosedError("enter the follower first: async with checkpoints.following(live) as follower")
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    await self._settled.wait()
                    if self._served is not None:
                        return
                    self._raise_what_settles()
                    self._settled.clear()  # the steps that did not fit are gone
        if self._served is not None:
            return
        known = {**self._reasons(), **({"the last attempt": str(self._problem)} if self._problem else {})}
        why = "; ".join(f"{name}: {reason}" for name, reason in known.items()) or "the run has no step"
        raise DeadlineExceededError(f"no step of {self._run.url} could be served within {timeout_s} s: {why}")

    def _raise_what_settles(self) -> None:
        """Raise the reason why waiting for the first step is of no use."""
        if self._task is None or self._task.done():
            raise ClosedError(f"the follower of {self._run.url} has ended: {self._problem}") from self._problem
        for error in list(self._passed_over.values()):
            if isinstance(error, StateMismatchError):
                raise error

    def accept_lower(self) -> None:
        """Serve a step with a lower number, if it was saved later than the one that is served: a trainer went back.

        The steps above it that are there now are left out from then on. If no such step is there yet, the first one
        that is committed counts. Without this call a lower step is served when those above it are deleted.
        """
        self._lower = True

    def health(self) -> FollowerHealth:
        """Return the state: what is served, and what needs attention."""
        now, served, problem = time.monotonic(), self._served, self._problem or self._late
        return FollowerHealth(
            stamp=None if served is None else served.name,
            save_id=self._save_id,
            served_s=now - self._since,
            checked_s=None if self._checked is None else now - self._checked,
            problem=None if problem is None else f"{type(problem).__name__}: {problem}",
            passed_over=self._reasons(),
            waiting=self._waiting,
        )

    def _reasons(self) -> dict[str, str]:
        passed_over = list(self._passed_over.items())  # at once, because the operation loop changes it
        return {name: f"{type(error).__name__}: {error}" for name, error in passed_over}

    async def __aenter__(self) -> Follower:
        running_loop("following")
        if self._task is not None:
            raise ClosedError("this follower was entered before: call following() again")
        self._task = create_owned_task(self._follow(), f"sidestream follower of {self._run.url}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        task = self._task
        assert task is not None
        task.cancel()
        cancelled = await wait_out(task, lambda _: task.cancel())
        self._memory.close()
        self._settled.set()  # a task that was cancelled before its first step has not done it
        if cancelled is not None:
            raise cancelled
        if error is None and not task.cancelled() and (failure := task.exception()) is not None:
            raise failure

    # --- the task ---

    async def _follow(self) -> None:
        try:
            while True:
                if not await self._advance():
                    await in_operation(self._pauses.wait, "following", ends=False)
        except Exception as error:  # a fault: ``health()`` shows it too, and the end of the block raises it
            _log.exception("the follower of %s has ended", self._run.url)
            self._problem = error
            raise
        finally:
            self._settled.set()

    async def _advance(self) -> bool:
        """Look at the run, and take up what is new. Return whether to look again at once."""
        try:
            if await in_operation(self._look, "following"):
                if self._live._next is not None:  # what the program installs waits for a copy, and comes first
                    return False
                await self._take()
                return True
            self._problem = None
        except SkippedError:  # the program installs other weights
            return False
        except (CheckpointNotFoundError, IncompleteCheckpointError):  # deleted since it was chosen
            await asyncio.sleep(_GONE_S)
            return True
        except SidestreamError as error:
            self._problem = without_frames(error)
        return False

    async def _look(self) -> bool:
        """Return whether the run has a step to take up. Part of an operation."""
        with self._run.time_limit():
            for changed in await changed_among(self._run.store, list(self._left_out.values())):
                del self._left_out[changed.name]
                self._passed_over.pop(changed.name, None)
            if self._lower:
                await self._exclude_higher()
            step = await newest(self._run.store, _NEWEST, self._left_out)
            news = step is not None and await self._is_news(step)
        self._checked = time.monotonic()
        mismatch = any(isinstance(error, StateMismatchError) for error in self._passed_over.values())
        if step is None and mismatch and self._served is None:
            self._settled_from_any_loop()
        return news

    async def _is_news(self, step: Step) -> bool:
        """Return whether ``step``, the newest one, is to be served in place of what is served."""
        served = self._served
        if served is None or step.order > served.order:
            return True
        if step.name == served.name:
            return step.marker != served.marker
        return self._goes_back or await served.current(self._run.store) is None

    async def _exclude_higher(self) -> None:
        """If the step that was saved last is lower than the one that is served, leave out the steps above it, and those
        that were not saved later than the one that is served."""
        served = self._served
        if served is None or served.marker is None:
            return
        found = [step for step in await list_generations(self._run.store, {}) if step.name not in self._left_out]
        times = {step: step.marker.saved_at for step in (*found, served) if step.marker}
        last = max(times, key=lambda step: (times[step], step.order))
        if last.order < served.order:
            others = (step for step, time in times.items() if step.order > last.order or time <= times[served])
            self._left_out |= {step.name: step for step in others}
            self._lower, self._goes_back = False, True

    async def _take(self) -> None:
        """Fetch the newest step, ask the program, and exchange the weights."""
        self._waiting = True
        try:
            shell = await self._live._claim()
        finally:
            self._waiting = False
        began = time.monotonic()
        try:
            # In the task that follows, and not in an operation: a cancel between them gives the shell back here.
            fetched = await in_operation(partial(self._fetch, shell), "following")
            if fetched is None:
                return
            step, candidate = fetched
            try:
                await self._ask(candidate)
                await _call(self._before, "before_swap", candidate)
            except RefusedVersionError as error:
                await in_operation(partial(self._pass_over, step, error), "following")
                return
            await in_operation(partial(self._serve, shell, step, candidate, began), "following")
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

    async def _fetch(self, shell: Shell) -> tuple[Step, Candidate] | None:
        """Choose the newest step, under a lease, and read it. Return None if there is nothing to take up any more. Part
        of an operation."""
        await self._live._clear(shell)
        run = self._run
        with run.time_limit(self._options.timeout_s):
            chosen = await choose(run.store, run.leases, _NEWEST, self._left_out)
            if chosen is None:
                return None
            step, lease = chosen
            try:
                return (step, await self._read(step)) if await self._is_news(step) else None
            except _OF_THE_STEP as error:
                if lease is None and step.damage is None and await step.current(run.store) is None:
                    raise CheckpointNotFoundError(f"{step.name} was deleted while it was read") from error
                await self._pass_over(step, error)
                return None
            finally:
                if lease is not None:
                    await lease.release()

    async def _read(self, step: Step) -> Candidate:
        if step.damage is not None:
            raise step.damage
        places = self._live._shells.places
        checkpoint = await self._run.open(step.name, self._options)
        found = await io_threads().run(match, checkpoint, places, self._names)
        deadline, stop = current_deadline(), Stop()
        tensors = await checkpoint.fetch(
            dtypes_of(found, places),
            lambda nbytes: self._memory.lease(nbytes, deadline=deadline, stop=stop).array,
            mapped=self._mapped,
        )
        by_name = {name: tensors[fqn] for leader, fqn in found.items() for name in places[leader].names}
        named = MappingProxyType(by_name)
        return Candidate(step.name, step.step, step.generation, checkpoint.save_id, checkpoint.metadata, named)

    async def _serve(self, shell: Shell, step: Step, candidate: Candidate, began: float) -> None:
        await self._live._serve(shell, candidate.tensors, candidate.stamp, candidate.step, candidate.save_id)
        self._served, self._save_id, self._since = step, candidate.save_id, time.monotonic()
        self._left_out = {name: one for name, one in self._left_out.items() if one.order > step.order}
        self._passed_over = {name: one for name, one in self._passed_over.items() if name in self._left_out}
        self._problem = self._late = None
        self._goes_back = False
        self._settled_from_any_loop()
        seconds = time.monotonic() - began
        await io_threads().run(emit, VersionServed(self._run.url, candidate.stamp, candidate.save_id, seconds))

    async def _pass_over(self, step: Step, error: SidestreamError) -> None:
        self._left_out[step.name] = step
        without_frames(error)
        self._passed_over[step.name] = error
        await io_threads().run(emit, VersionPassedOver(self._run.url, step.name, type(error).__name__, str(error)))

    def _settled_from_any_loop(self) -> None:
        task = self._task
        if task is not None:
            task.get_loop().call_soon_threadsafe(self._settled.set)


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
