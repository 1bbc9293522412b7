"""``save`` and ``async_save``: plan, stage, write, commit."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from inspect import iscoroutinefunction
from types import MappingProxyType
from typing import Any, Protocol

from ._tasks import finish, running_loop
from ._threads import Deadline, Stop, io_threads, politely
from ._torch import Stateful
from .catalog import attempt_name
from .commit import BytesBody, Verdict, clean_up, commit
from .errors import Conflict, InvalidOption
from .format.records import Manifest
from .format.shard import Sealer, ShardLayout
from .options import Durability, check_choice, check_timeout
from .pending import PendingSave, SaveInfo
from .plan.save import SavePlan, plan_save, shard_name
from .staging import AsyncStager, StagedImage, Staging
from .storage import Location, locate_directory

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
        await finish(pending.ended)
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
        source: _Source = _launch(state, stager, deadline)
    else:
        source = _ForeignStage(stager, state, deadline)
    return PendingSave(_SaveJob(location, source, durability, deadline, step, generation))


class _Source(Protocol):
    """Where the staged bytes of a save come from."""

    async def staging(self) -> _Staged:
        """The plan and its copies, launched. Whoever gets them has to ``release()`` them."""

    def abandon(self) -> None:
        """Nobody will ask for the staging."""


class _Staged:
    """A plan whose copies have been launched; ``own_stager`` is closed with it."""

    def __init__(self, plan: SavePlan, staging: Staging, own_stager: AsyncStager | None) -> None:
        self.plan = plan.without_sources()  # the staging has them for as long as it needs them
        self.images = staging.images
        self._staging = staging
        self._own_stager = own_stager

    async def staging(self) -> _Staged:
        return self

    def abandon(self) -> None:
        self._staging.release()

    def pass_on(self, staged: asyncio.Future[None]) -> None:
        """Resolve ``staged`` when the copies have ended, one way or the other."""
        copied = asyncio.wrap_future(self._staging.copied)
        copied.add_done_callback(partial(_pass_on, staged))

    async def release(self) -> None:
        """Give all memory back; no copy reads a source or writes into memory any more when this returns."""
        self._staging.release()
        copied = asyncio.wrap_future(self._staging.copied)
        copied.add_done_callback(lambda done: done.cancelled() or done.exception())  # told by other means
        await asyncio.wait([copied])
        if self._own_stager is not None:
            await self._own_stager.aclose()


def _launch(state: Mapping[str, Any], stager: AsyncStager | None, deadline: Deadline) -> _Staged:
    plan = plan_save(state)
    if stager is not None:
        return _Staged(plan, stager.stage_images(plan.images, deadline), None)
    own = AsyncStager(timeout_s=deadline.timeout_s)
    return _Staged(plan, own.stage_images(plan.images, deadline), own)


def _pass_on(staged: asyncio.Future[None], copied: asyncio.Future[None]) -> None:
    error = None if copied.cancelled() else copied.exception()
    if staged.done():
        return
    if error is None:
        staged.set_result(None)
    else:
        staged.set_exception(error)
        staged.exception()  # the save itself raises it too


class _ForeignStage:
    """Another stager makes the first copy, as it does under DCP: on this thread, from state dicts. It may use its
    memory again for the next stage, so ours is a second copy, and the sources are free when that one has ended."""

    def __init__(self, stager: Stager, state: Mapping[str, Any], deadline: Deadline) -> None:
        if not callable(getattr(stager, "stage", None)) or iscoroutinefunction(stager.stage):
            raise InvalidOption(f"stager={stager!r} has no plain method stage(state_dict)")
        if not isinstance(state, Mapping):
            raise InvalidOption(f"state is a mapping, not a {type(state).__name__}")
        state_dict = {key: item.state_dict() if isinstance(item, Stateful) else item for key, item in state.items()}
        self._result = stager.stage(state_dict)
        self._deadline = deadline

    async def staging(self) -> _Staged:
        result, self._result = self._result, None
        if isinstance(result, Future):
            try:
                async with asyncio.timeout(self._deadline.remaining_s()):
                    result = await asyncio.wrap_future(result)
            except TimeoutError as error:
                raise self._deadline.exceeded("the stager that was passed in") from error
        return _launch(result, None, self._deadline)

    def abandon(self) -> None:
        self._result = None


@dataclass(slots=True)
class _SaveJob:
    """One save, from launched copies to the commit."""

    location: Location
    source: _Source | None
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

    def abandon(self) -> None:
        if self.source is not None:
            self.source.abandon()

    async def run(self, staged: asyncio.Future[None]) -> SaveInfo:
        staged.add_done_callback(lambda _: self._mark("staged"))
        assert self.source is not None
        staging, self.source = await self.source.staging(), None
        staging.pass_on(staged)
        plan = staging.plan
        attempt = attempt_name(self.location.name, plan.save_id)
        try:
            await self._write(staging, attempt)
        except BaseException as error:
            await clean_up(self.location.store, attempt, self.verdict, error)
            raise
        finally:
            await finish(staging.release)
        seconds = MappingProxyType(self.seconds)
        return SaveInfo(self.url, plan.save_id, self.step, self.generation, plan.nbytes, self.durability, seconds)

    async def _write(self, staged: _Staged, attempt: str) -> None:
        """Small values first, then shard after shard in the order in which they are staged, then the commit."""
        store, target, plan = self.location.store, self.location.name, staged.plan
        if not await store.is_vacant(target, deadline=self.deadline):
            raise Conflict(
                f"{self.url} is not empty: save to a new directory, or let a Checkpointer make generations of a step"
            )
        await store.create(attempt, durability=self.durability, deadline=self.deadline)
        if plan.values:
            await self._put(f"{attempt}/{plan.values_file}", BytesBody(plan.values))
        crcs: list[list[bytes]] = []
        for index, (layout, image) in enumerate(zip(plan.shards, staged.images, strict=True)):
            await self._begun(image)
            body = _ShardBody(layout, image)
            await self._put(f"{attempt}/{shard_name(index)}", body)
            image.release()
            crcs.append(body.crcs)
        self._mark("written")
        entries = await io_threads().run(lambda: dict(politely(plan.entries(crcs))), deadline=self.deadline)
        manifest = Manifest(plan.save_id, entries, plan.files, self.step, self.generation)
        await commit(store, attempt, target, manifest, self.verdict, durability=self.durability, deadline=self.deadline)
        self._mark("committed")

    async def _begun(self, image: StagedImage) -> None:
        """No thread waits for memory that other saves may hold: they need the threads to give it back."""
        try:
            async with asyncio.timeout(self.deadline.remaining_s()):
                await asyncio.shield(asyncio.wrap_future(image.begun))
        except TimeoutError as error:
            raise self.deadline.exceeded("waiting for staging memory") from error

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
            for _ in politely(self._sealer.seal(view, end)):
                stop.check()
            yield view[start:end]
