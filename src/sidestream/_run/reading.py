"""``Reading``: restoring and reading the steps of a run, with leases on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from .._load.api import LoadReport, LoadRequest
from .._load.open.steps import Step
from .._storage import Location
from ..errors import CheckpointNotFoundError
from ..options import Fallback, Latest, check_choice, check_steps
from .restore import Restoring, RestoringTogether, Wish, choose
from .run import Run
from .steps import check_run, list_steps

__all__ = ["Latest", "Reading"]


class Reading:
    """The operations with which one ``Checkpointer`` reads its run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.restored: LoadReport | None = None
        self.passed_over: Mapping[str, str] = {}
        """The errors of the directories that the last ``restore`` passed over, by name."""

    async def check(self) -> None:
        """Raise ``InvalidOptionError`` if the URL is that of a checkpoint."""
        if self._run.store.capabilities.rename:  # on object storage the first listing of the run does this check
            with self._run.time_limit():
                await check_run(self._run.store)

    async def restore(
        self, state: Mapping[str, Any], step: int | Latest, fallback: Fallback, request: LoadRequest
    ) -> int | None:
        """As ``Checkpointer.restore``."""
        run, member, wish = self._run, self._run.together(), wish_for(step, fallback)
        restoring: Restoring | RestoringTogether
        if member is None:
            restoring = Restoring(run.store, run.url, run.leases, wish, request)
        else:
            restoring = RestoringTogether(member, run.store, run.url, run.leases, wish, request)
        with run.time_limit(request.options.timeout_s):
            self.restored = await restoring.run(state)
        self.passed_over = restoring.passed_over
        if self.restored is None:
            if wish.step is not None:
                raise await self._not_found(wish.step)
            return None
        return restoring.step

    @asynccontextmanager
    async def step(self, step: int | Latest) -> AsyncIterator[tuple[Step, Location]]:
        """A committed step, which may be damaged, and where it is; it is leased within the ``async with``."""
        run, wish = self._run, wish_for(step, "never")
        with run.time_limit():
            chosen = await choose(run.store, run.leases, wish, ())
        if chosen is None:
            raise await self._not_found(wish.step)
        found, lease = chosen
        try:
            yield found, run.at(found.name)
        finally:
            if lease is not None:
                await lease.release()

    async def steps(self) -> list[Step]:
        """Return the committed steps, in order, including damaged ones."""
        with self._run.time_limit():
            return await list_steps(self._run.store)

    async def _not_found(self, step: int | None) -> CheckpointNotFoundError:
        there = [found.step for found in await self.steps()]
        wanted = "step" if step is None else f"step {step}"
        return CheckpointNotFoundError(f"{self._run.url} has no committed {wanted}; it has {there or 'none'}")


def wish_for(step: int | Latest, fallback: Fallback) -> Wish:
    check_choice("fallback", fallback, Fallback)
    if step == "latest":
        return Wish(None, fallback == "older")
    check_steps(step)
    return Wish(step, fallback == "older")
