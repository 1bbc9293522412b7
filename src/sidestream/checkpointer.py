"""``Checkpointer``: the checkpoints of one run, step by step."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable, Mapping
from types import TracebackType
from typing import Any

from ._tasks import finish, running_loop
from ._threads import Deadline
from .catalog import list_steps, newest_step, next_generation, step_name
from .errors import CheckpointNotFound, Closed, ForkedProcess, SidestreamError, WrongLoop
from .loading import LoadOptions, LoadReport, load_from
from .options import (
    Allowance,
    Durability,
    Progress,
    Verify,
    check_choice,
    check_count,
    check_step,
    check_strict,
    check_timeout,
)
from .pending import PendingSave
from .plan.objects import allowed_types
from .saving import start_save
from .staging import AsyncStager
from .storage import Location, locate_run
from .writing import Stager

__all__ = ["Checkpointer"]


class Checkpointer:
    """The checkpoints under one directory: ``step-100``, and ``step-100.g2`` where step 100 was saved again.

    Use it as ``async with``; it belongs to the loop that enters it. ``in_flight`` saves may go on at once, each with
    staged memory of its own, which is used again and again; ``save`` waits for a free slot. ``stager`` replaces the
    stager that it would own. ``durability``, ``verify`` and ``timeout_s`` are as for ``save`` and ``load``.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        stager: AsyncStager | Stager | None = None,
        in_flight: int = 2,
        durability: Durability = "fsync",
        verify: Verify = "always",
        timeout_s: float = 600.0,
    ) -> None:
        check_count("in_flight", in_flight)
        check_choice("durability", durability, Durability)
        check_choice("verify", verify, Verify)
        check_timeout(timeout_s)
        self._store, self.url = locate_run(url)
        self._own_stager = AsyncStager(timeout_s=timeout_s) if stager is None else None
        self._stager = stager if self._own_stager is None else self._own_stager
        self._slots = asyncio.Semaphore(in_flight)
        self._starting = asyncio.Lock()  # a generation is chosen by one save at a time
        self._durability: Durability = durability
        self._verify: Verify = verify
        self._timeout_s = timeout_s
        self._pending: list[PendingSave] = []
        self._taken: dict[int, int] = {}  # highest generation that a save of ours has been started for
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._closed = False
        self._restored: LoadReport | None = None

    @property
    def restored(self) -> LoadReport | None:
        """What the last ``restore`` did, and what its ``strict`` let pass; None before the first."""
        return self._restored

    async def save(self, state: Mapping[str, Any], *, step: int) -> PendingSave:
        """Wait for a free slot, then launch the copies of ``state`` and return; see ``async_save`` for the result.

        A step that is committed already is saved as its next generation; the old one stays. Raises what an earlier
        save failed with if nobody has awaited it, and then starts nothing. Cancelling before this returns starts
        nothing either.
        """
        self._check_usable()
        check_step(step)
        self._raise_unheard()
        await self._slots.acquire()
        try:
            async with self._starting:
                pending = await self._start(state, step)
        except BaseException:
            self._slots.release()
            raise
        pending.when_done(self._slots.release)
        return pending

    async def _start(self, state: Mapping[str, Any], step: int) -> PendingSave:
        generation = await next_generation(self._store, step, self._deadline())
        generation = max(generation, self._taken.get(step, 0) + 1)
        self._check_usable()  # it may have been closed while this waited
        self._raise_unheard()
        name = step_name(step, generation)
        pending = start_save(
            state,
            Location(self._store, name, f"{self.url}/{name}"),
            stager=self._stager,
            durability=self._durability,
            timeout_s=self._timeout_s,
            step=step,
            generation=generation,
        )
        self._taken[step] = generation
        self._pending = [one for one in self._pending if not one.done() or one.unheard is not None] + [pending]
        return pending

    async def restore(
        self,
        state: Mapping[str, Any],
        step: int | None = None,
        *,
        strict: Collection[Allowance] = (),
        verify: Verify | None = None,
        atomic: bool = False,
        progress: Progress | None = None,
        timeout_s: float | None = None,
        allow: Iterable[type] = (),
    ) -> int | None:
        """Load the newest committed step, or ``step``, into ``state`` and return its number; None if there is none yet.

        As ``load``, in place, and with its keywords; ``verify`` and ``timeout_s`` are those of the ``Checkpointer``
        unless they are given here. ``restored`` has the report. Raises ``CheckpointNotFound`` for a ``step`` that is
        not there, ``Corrupt`` for one that is damaged: no older step is taken silently in its place.
        """
        self._check_usable()
        options = LoadOptions(
            self._verify if verify is None else verify,
            check_strict(strict),
            atomic,
            progress,
            self._timeout_s if timeout_s is None else timeout_s,
            allowed_types(allow),
        )
        if step is None:
            found = await newest_step(self._store, self._deadline())
            if found is None:
                return None
        else:
            steps = {each.step: each for each in await list_steps(self._store, self._deadline())}
            if step not in steps:
                raise CheckpointNotFound(f"{self.url} has no committed step {step}; it has {sorted(steps) or 'none'}")
            found = steps[step]
        if found.damage is not None:
            raise found.damage
        location = Location(self._store, found.name, f"{self.url}/{found.name}")
        self._restored = await load_from(location, state, options)
        return found.step

    async def steps(self) -> list[int]:
        """The committed steps, in order. What is being written, or was left by a crash, is not among them, nor is a
        step whose marker is damaged."""
        self._check_usable()
        return [found.step for found in await list_steps(self._store, self._deadline()) if found.damage is None]

    async def latest(self) -> int | None:
        """The newest committed step, or None."""
        return max(await self.steps(), default=None)

    async def aclose(self) -> None:
        """Wait for the saves in flight and free the staging memory. Raises the error of a save that nobody awaited.

        Cancelling it cancels those saves, and waits until they have cleaned up.
        """
        if self._closed:
            await self._all_ended()
            return
        self._closed = True
        try:
            await self._all_ended()
        except asyncio.CancelledError:
            for save in self._pending:
                save.cancel()
            await finish(self._all_ended)
            raise
        finally:
            if self._own_stager is not None:
                await finish(self._own_stager.aclose)
        self._raise_unheard()

    async def _all_ended(self) -> None:
        for save in self._pending:
            await save.ended()

    async def __aenter__(self) -> Checkpointer:
        self._loop = running_loop("Checkpointer")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.aclose()
        except SidestreamError as failure:
            if error is None:
                raise
            error.add_note(f"besides, a save failed and nobody had awaited it: {failure}")

    def _raise_unheard(self) -> None:
        for save in self._pending:
            error = save.unheard
            if error is not None:
                save.hear()
                raise error

    def _deadline(self) -> Deadline:
        return Deadline.after(self._timeout_s)

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcess("this Checkpointer was made before os.fork(); make a new one in the child")
        if self._closed:
            raise Closed(f"the Checkpointer of {self.url} is closed")
        if self._loop is None:
            raise Closed("enter the Checkpointer first: async with sidestream.Checkpointer(...) as checkpoints")
        if running_loop("Checkpointer") is not self._loop:
            raise WrongLoop(f"the Checkpointer of {self.url} belongs to another event loop")
