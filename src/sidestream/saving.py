"""``save`` and ``async_save``: plan, stage, write, commit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ._tasks import finish, running_loop
from ._threads import Deadline, io_threads, politely
from .commit import Verdict, clean_up, commit
from .errors import InvalidOption
from .format.records import Manifest
from .options import Durability, check_choice, check_timeout
from .pending import PendingSave, SaveInfo
from .plan.save import SavePlan
from .plan.values import copy_value
from .staging import AsyncStager, capture
from .storage import Location, locate_directory
from .writing import ForeignStage, SaveOrder, Stager, Writing

__all__ = ["async_save", "save", "start_save"]

_STREAM_BYTES = 256 << 20


async def save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | Stager | None = None,
    snapshot: bool = True,
    durability: Durability = "fsync",
    timeout_s: float = 600.0,
) -> SaveInfo:
    """Save ``state`` to the new directory ``url``; when this returns the checkpoint is visible and durable.

    ``state`` is what DCP takes: nested dicts and lists of tensors, plain values, and objects with ``state_dict()``.
    What is saved is what they hold at the call, provided that no tensor changes before it is staged (``async_save``
    tells when that is). ``stager`` brings warm memory from save to save; without one, memory is mapped for this save
    alone. ``snapshot=False`` is for weights that nobody changes while they are saved, and for hosts with less memory
    than the state has: it passes through 256 MiB of memory, and ``staged`` is done when nearly everything is written.
    ``durability="flush"`` leaves out the syncs. The whole save has ``timeout_s``.

    Raises ``UnsafeObject``, ``UnsupportedTensor``, ``KeyCollision``, ``InvalidOption`` before anything is written,
    ``Conflict`` if the target is not empty, and ``NoSpace``, ``AccessDenied``, ``StorageError``, ``ArenaExhausted``,
    ``DeadlineExceeded``: then nothing is visible, what was written has been removed, and older checkpoints are
    untouched. ``NotDurable`` and ``OutcomeUnknown`` tell of a commit that was sent and did not end well. Cancelling
    leaves nothing behind either, unless the commit had been sent: then it is finished, and the checkpoint is there.
    """
    pending = async_save(state, url, stager=stager, snapshot=snapshot, durability=durability, timeout_s=timeout_s)
    try:
        return await pending
    except asyncio.CancelledError:
        pending.cancel()
        await finish(pending.ended)
        raise


def async_save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | Stager | None = None,
    snapshot: bool = True,
    durability: Durability = "fsync",
    timeout_s: float = 600.0,
) -> PendingSave:
    """Start what ``save`` does and return at once. Needs a running event loop.

    ``await pending.staged`` before the tensors change, ``await pending`` for the ``SaveInfo``. Plain values are copied
    here and now. Raises what is wrong with ``url`` and options at once; the rest is raised by ``pending``, what is
    wrong with a tensor or value of ``state`` before anything has been written.
    """
    location = locate_directory(url)
    if not snapshot and stager is not None:
        raise InvalidOption(
            "snapshot=False passes through memory of its own: leave out stager=, or give that one a budget"
        )
    budget_bytes = None if snapshot else _STREAM_BYTES
    return start_save(
        state, location, stager=stager, durability=durability, timeout_s=timeout_s, budget_bytes=budget_bytes
    )


def start_save(
    state: Mapping[str, Any],
    location: Location,
    *,
    stager: AsyncStager | Stager | None,
    durability: Durability,
    timeout_s: float,
    step: int | None = None,
    generation: int = 1,
    budget_bytes: int | None = None,
) -> PendingSave:
    """``async_save`` to a resolved location; ``step`` and ``generation`` go into the marker. ``budget_bytes`` bounds
    the memory of a save without a ``stager``."""
    running_loop("async_save")
    check_choice("durability", durability, Durability)
    check_timeout(timeout_s)
    order = SaveOrder(location, durability, Deadline.after(timeout_s), step, generation, budget_bytes)
    if stager is None or isinstance(stager, AsyncStager):
        return PendingSave(SaveJob(order, Writing(order, capture(state, copy_value), stager)))
    return PendingSave(SaveJob(order, ForeignStage(order, state, stager)))


@dataclass(slots=True)
class SaveJob:
    """One save, from launched copies to the commit."""

    order: SaveOrder
    source: Writing | ForeignStage
    verdict: Verdict = field(default_factory=Verdict)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        return self.order.location.url

    def abandon(self) -> None:
        self.source.abandon()

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        staged.add_done_callback(lambda _: self._mark("staged"))
        order = self.order
        writing = self.source if isinstance(self.source, Writing) else await self.source.launch()
        writing.pass_on(staged)
        try:
            plan, crcs = await writing.ended()
            self._mark("written")
            await self._commit(plan, crcs)
        except BaseException as error:
            await clean_up(order.location.store, order.attempt, self.verdict, error)
            raise
        finally:
            await finish(writing.release)
        return SaveInfo(
            self.url,
            order.save_id,
            order.step,
            order.generation,
            plan.nbytes,
            order.durability,
            MappingProxyType(self.seconds),
        )

    async def _commit(self, plan: SavePlan, crcs: list[list[bytes]]) -> None:
        order = self.order
        entries = await io_threads().run(lambda: dict(politely(plan.entries(crcs))), deadline=order.deadline)
        manifest = Manifest(order.save_id, entries, plan.files, order.step, order.generation)
        await commit(
            order.location.store,
            order.attempt,
            order.location.name,
            manifest,
            self.verdict,
            durability=order.durability,
            deadline=order.deadline,
        )
        self._mark("committed")

    def _mark(self, phase: str) -> None:
        self.seconds.setdefault(phase, time.monotonic() - self.started)
