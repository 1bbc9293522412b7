"""``save`` and ``async_save``: plan, stage, write, commit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import anyio

from ._tasks import running_loop
from ._threads import Deadline, Stop, io_threads
from ._torch import Stateful
from .catalog import attempt_name
from .commit import BytesBody, Verdict, clean_up, commit
from .errors import Conflict, InvalidOption
from .format.records import Manifest
from .format.shard import Sealer, ShardLayout
from .options import check_choice, check_timeout
from .pending import PendingSave, SaveInfo
from .plan.save import SavePlan, plan_save, shard_name
from .staging import AsyncStager, StagedImage
from .storage import Durability, Location, locate_directory

__all__ = ["Stager", "async_save", "save", "start_save"]

_WRITE_BYTES = 32 << 20


class Stager(Protocol):
    """What ``stager=`` takes beside our own: torch's stagers, or any object with this method. It returns a state dict
    in host memory that nobody changes, or a ``concurrent.futures.Future`` of one."""

    def stage(self, state_dict: dict[str, Any]) -> Any: ...


async def save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | Stager | None = None,
    durability: Durability = "fsync",
    timeout_s: float = 600.0,
) -> SaveInfo:
    """Save ``state`` to the new directory ``url``; when this returns the checkpoint is visible and durable.

    ``state`` is what DCP takes: nested dicts and lists of tensors, plain values, and objects with ``state_dict()``.
    What is saved is what they hold at the call, provided that no tensor changes before it is staged (``async_save``
    tells when that is). ``stager`` brings warm memory from save to save; without one, memory is mapped for this save
    alone. ``durability="flush"`` leaves out the syncs. The whole save has ``timeout_s``.

    Raises ``UnsafeObject``, ``UnsupportedTensor``, ``KeyCollision``, ``InvalidOption`` before anything is written,
    ``Conflict`` if the target is not empty, and ``NoSpace``, ``AccessDenied``, ``StorageError``, ``ArenaExhausted``,
    ``DeadlineExceeded``: then nothing is visible, what was written has been removed, and older checkpoints are
    untouched. ``NotDurable`` and ``OutcomeUnknown`` tell of a commit that was sent and did not end well. Cancelling
    leaves nothing behind either, unless the commit had been sent: then it is finished, and the checkpoint is there.
    """
    pending = async_save(state, url, stager=stager, durability=durability, timeout_s=timeout_s)
    try:
        return await pending
    except asyncio.CancelledError:
        pending.cancel()
        with anyio.CancelScope(shield=True):
            await pending.ended()
        raise


def async_save(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    stager: AsyncStager | Stager | None = None,
    durability: Durability = "fsync",
    timeout_s: float = 600.0,
) -> PendingSave:
    """Start what ``save`` does and return at once. Needs a running event loop.

    ``await pending.staged`` before the tensors change, ``await pending`` for the ``SaveInfo``. Plain values are copied
    here and now. Raises what is wrong with ``state``, ``url`` and options at once; the rest is raised by ``pending``.
    """
    return start_save(state, locate_directory(url), stager=stager, durability=durability, timeout_s=timeout_s)


def start_save(
    state: Mapping[str, Any],
    location: Location,
    *,
    stager: AsyncStager | Stager | None,
    durability: Durability,
    timeout_s: float,
    step: int | None = None,
    generation: int = 1,
) -> PendingSave:
    """``async_save`` to a resolved location; ``step`` and ``generation`` go into the marker."""
    running_loop("async_save")
    check_choice("durability", durability, Durability)
    check_timeout(timeout_s)
    deadline = Deadline.after(timeout_s)
    if stager is None or isinstance(stager, AsyncStager):
        prepare = _prepare_own(state, stager, timeout_s)
    else:
        prepare = _prepare_foreign(state, stager, timeout_s)
    return PendingSave(_SaveJob(location, prepare, durability, deadline, step, generation))


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A plan whose copies have been launched, ``copied`` when they have ended. Whoever gets it has to ``release()`` it;
    ``own_stager`` is closed with it."""

    plan: SavePlan
    images: tuple[StagedImage, ...]
    copied: asyncio.Future[None]
    own_stager: AsyncStager | None

    async def release(self) -> None:
        """Give all memory back; no copy reads a source or writes into memory any more when this returns."""
        for image in self.images:
            image.release()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self.copied])
            if self.own_stager is not None:
                await self.own_stager.aclose()


def _prepare_own(
    state: Mapping[str, Any], stager: AsyncStager | None, timeout_s: float
) -> Callable[[asyncio.Future[None]], Awaitable[_Prepared]]:
    """Plan and launch the copies now; the result passes on to ``staged`` when they have ended."""
    plan = plan_save(state)
    own = AsyncStager(timeout_s=timeout_s) if stager is None else None
    images, future = (stager or own or AsyncStager()).stage_images(plan.images)
    copied = _watch(future)

    async def prepared(staged: asyncio.Future[None]) -> _Prepared:
        copied.add_done_callback(lambda done: _pass_on(done, staged))
        return _Prepared(plan, images, copied, own)

    return prepared


def _prepare_foreign(
    state: Mapping[str, Any], stager: Stager, timeout_s: float
) -> Callable[[asyncio.Future[None]], Awaitable[_Prepared]]:
    """Let the other stager copy, as it does under DCP: on this thread, from the state dicts of ``Stateful`` objects."""
    if not callable(getattr(stager, "stage", None)):
        raise InvalidOption(f"stager={stager!r} has no method stage(state_dict)")
    result = stager.stage(
        {key: item.state_dict() if isinstance(item, Stateful) else item for key, item in state.items()}
    )

    async def prepared(staged: asyncio.Future[None]) -> _Prepared:
        copy = await asyncio.wrap_future(result) if isinstance(result, Future) else result
        staged.set_result(None)
        prepare = _prepare_own(copy, None, timeout_s)
        return await prepare(asyncio.get_running_loop().create_future())

    return prepared


def _watch(future: Future[None]) -> asyncio.Future[None]:
    watched = asyncio.wrap_future(future)
    watched.add_done_callback(lambda done: done.cancelled() or done.exception())  # the image raises it to its reader
    return watched


def _pass_on(done: asyncio.Future[None], staged: asyncio.Future[None]) -> None:
    if staged.done() or done.cancelled():
        return
    error = done.exception()
    if error is None:
        staged.set_result(None)
    else:
        staged.set_exception(error)
        staged.exception()  # the save itself raises it too


@dataclass(slots=True)
class _SaveJob:
    """One save, from launched copies to the commit."""

    location: Location
    prepare: Callable[[asyncio.Future[None]], Awaitable[_Prepared]]
    durability: Durability
    deadline: Deadline
    step: int | None
    generation: int
    verdict: Verdict = field(default_factory=Verdict)
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @property
    def url(self) -> str:
        return self.location.url

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        staged.add_done_callback(lambda _: self._mark("staged"))
        prepared = await self.prepare(staged)
        plan = prepared.plan
        attempt = attempt_name(self.location.name, plan.save_id)
        try:
            await self._write(prepared, attempt)
        except BaseException as error:
            await clean_up(self.location.store, attempt, self.verdict, error)
            raise
        finally:
            await prepared.release()
        seconds = MappingProxyType(self.seconds)
        return SaveInfo(self.url, plan.save_id, self.step, self.generation, plan.nbytes, self.durability, seconds)

    async def _write(self, prepared: _Prepared, attempt: str) -> None:
        """Small values first, then shard after shard in the order in which they are staged, then the commit."""
        store, target, plan = self.location.store, self.location.name, prepared.plan
        if not await store.is_vacant(target, deadline=self.deadline):
            raise Conflict(
                f"{self.url} is not empty: save to a new directory, or let a Checkpointer make generations of a step"
            )
        await store.create(attempt, durability=self.durability, deadline=self.deadline)
        if plan.values:
            await self._put(f"{attempt}/{plan.values_file}", BytesBody(plan.values))
        crcs: list[list[bytes]] = []
        for index, (layout, image) in enumerate(zip(plan.shards, prepared.images, strict=True)):
            body = _ShardBody(layout, image)
            await self._put(f"{attempt}/{shard_name(index)}", body)
            image.release()
            crcs.append(body.crcs)
        self._mark("written")
        entries = await io_threads().run(plan.entries, crcs, deadline=self.deadline)
        manifest = Manifest(plan.save_id, entries, plan.files, self.step, self.generation)
        await commit(store, attempt, target, manifest, self.verdict, durability=self.durability, deadline=self.deadline)
        self._mark("committed")

    async def _put(self, name: str, body: BytesBody | _ShardBody) -> None:
        await self.location.store.put(name, body, durability=self.durability, deadline=self.deadline)

    def _mark(self, phase: str) -> None:
        self.seconds.setdefault(phase, time.monotonic() - self.started)


class _ShardBody:
    """A shard as it is staged: each part is framed and checksummed on its way to storage, in the writer's thread."""

    aligned = True

    def __init__(self, layout: ShardLayout, image: StagedImage) -> None:
        self.nbytes = layout.nbytes
        self._sealer = Sealer(layout)
        self._image = image

    @property
    def crcs(self) -> list[bytes]:
        """The block CRCs of every item, packed; complete when the last part has been written."""
        return self._sealer.crcs

    def buffers(self, stop: Stop, deadline: Deadline) -> Iterator[memoryview]:
        for start in range(0, self.nbytes, _WRITE_BYTES):
            end = min(start + _WRITE_BYTES, self.nbytes)
            view = self._image.wait(end, deadline=deadline, stop=stop)
            self._sealer.seal(view, end)
            yield view[start:end]
