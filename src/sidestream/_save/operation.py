"""What every save is while it runs, and the save of one process, from launched copies to the commit."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from .._format.records import Manifest
from .._runtime.tasks import finish
from .._storage import Outcome
from .commit import commit
from .pending import SaveInfo, SaveProgress
from .writing import SaveOrder

__all__ = ["Job", "SaveJob", "Source", "Writer"]


class Writer(Protocol):
    """Data on its way to storage, in threads of its own: ``Writing``, or what writes as a planner says."""

    def pass_on(self, staged: asyncio.Future[None]) -> None:
        """Resolve ``staged`` when the sources may change, one way or the other."""

    async def ended(self) -> tuple[Any, Any]:
        """When all data is on storage: the plan, and what is known of its items since they are written."""

    async def release(self) -> None: ...

    def interrupt(self) -> None: ...

    def progress(self) -> SaveProgress: ...


class Source(Protocol):
    """What becomes a writer, when the stager of the caller has made the first copy."""

    async def launch(self) -> Writer: ...

    def progress(self) -> SaveProgress: ...

    def abandon(self) -> None:
        """Signal the threads to stop, because the job, or the writer it became, will not be awaited. Does not block."""

    def leave(self) -> None:
        """Wait until no thread reads a source or writes to memory or storage any more, then release all memory. Called
        in a thread, after ``abandon``."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A save of this process, or this rank's part in one."""

    order: SaveOrder
    source: Source
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        return self.order.location.url

    @property
    def outcome(self) -> Outcome:
        return self.order.outcome

    @property
    def progress(self) -> SaveProgress:
        return self.source.progress()

    @property
    def expires_at(self) -> float:
        return self.order.deadline.at

    def _mark(self, phase: str) -> None:
        self.seconds.setdefault(phase, time.monotonic() - self.started)


@dataclass(slots=True, kw_only=True)
class SaveJob(Job):
    """One save, from launched copies to the commit."""

    def abandon(self) -> None:
        self.source.abandon()

    def leave(self, *, stuck: bool) -> None:
        self.source.leave()
        self.order.transaction.settle(stuck=stuck)

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        staged.add_done_callback(lambda _: self._mark("staged"))
        order = self.order
        writing = await self.source.launch()
        writing.pass_on(staged)
        try:
            plan, written = await writing.ended()
            self._mark("written")
            nbytes = await self._commit(plan, written)
        except BaseException as error:
            await order.transaction.clean_up(error)
            raise
        finally:
            await finish(writing.release)
        return SaveInfo(
            self.url,
            order.told_id,
            order.step,
            order.generation,
            nbytes,
            order.durability,
            MappingProxyType(self.seconds),
        )

    async def _commit(self, plan: Any, written: Any) -> int:
        """Returns the bytes of the data files."""
        order = self.order
        names = {name: order.transaction.published_name(name) for name in plan.files}
        files = {names[name]: nbytes for name, nbytes in plan.files.items()}
        manifest = Manifest(order.save_id, {}, files, order.step, order.generation, order.digest, order.metadata)
        render = partial(plan.describe, written, names)
        await commit(order.transaction, manifest, saved_at=order.saved_at, render=render)
        self._mark("committed")
        return sum(files.values())
