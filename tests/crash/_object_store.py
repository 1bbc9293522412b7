"""One name on object storage: a store in memory that is looked at after every request, and what has to stand there.

A request takes effect as a whole or not at all, so what a killed process leaves is what the store held after one of its
requests.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from _one_name import GONE, NEW, OLD
from _seeded import blank_state, files_of, make_state, same
from keywords import for_save

import sidestream
from sidestream import errors
from sidestream.options import BlobInfo, Capabilities, Listing

URL = "run/last"
Blobs = dict[str, tuple[bytes, str]]
Before = Callable[[int, str, str], Awaitable[Any]]


async def nothing(number: int, kind: str, name: str) -> None:
    """Before a request."""


class MemoryStore:
    """A store of the user, with versions. ``before`` and ``after`` are called around each request, with its number."""

    capabilities = Capabilities(create_only=True, listing=True, versions=True)

    def __init__(self, blobs: Blobs | None = None, before: Before = nothing, after: Before = nothing) -> None:
        self.blobs: Blobs = dict(blobs or {})
        self.before, self.after = before, after
        self.log: list[tuple[str, str]] = []
        self.snapshots: list[Blobs] = []
        """What was there before each request, in their order, and in the end."""

    async def _request(self, kind: str, name: str, work: Callable[[], Any]) -> Any:
        self.log.append((kind, name.rpartition("/")[2]))
        number = len(self.log)
        await self.before(number, kind, name)
        self.snapshots.append(dict(self.blobs))
        result = work()
        await self.after(number, kind, name)
        return result

    def _found(self, name: str) -> tuple[bytes, str]:
        if name not in self.blobs:
            raise FileNotFoundError(2, "no such object", name)
        return self.blobs[name]

    async def read(self, name: str, start: int, end: int) -> bytes:
        content: bytes = await self._request("read", name, lambda: self._found(name)[0][start:end])
        return content

    async def size(self, name: str) -> int:
        return int(await self._request("size", name, lambda: len(self._found(name)[0])))

    async def put(self, name: str, content: bytes, *, mode: str) -> None:
        def put() -> None:
            if mode == "create" and name in self.blobs:
                raise FileExistsError(17, "exists", name)
            self.blobs[name] = bytes(content), uuid.uuid4().hex

        await self._request("create" if mode == "create" else "put", name, put)

    async def version(self, name: str) -> str:
        return str(await self._request("version", name, lambda: self._found(name)[1]))

    async def replace(self, name: str, content: bytes, version: str) -> None:
        def replace() -> None:
            if self._found(name)[1] != version:
                raise FileExistsError(17, "another version", name)
            self.blobs[name] = bytes(content), uuid.uuid4().hex

        await self._request("replace", name, replace)

    async def upload(self, name: str, part_bytes: int) -> Any:
        raise NotImplementedError

    async def listing(self, prefix: str) -> Listing:
        def listing() -> Listing:
            found = [name.removeprefix(f"{prefix}/") for name in self.blobs if name.startswith(f"{prefix}/")]
            files = {name: BlobInfo(len(self.blobs[f"{prefix}/{name}"][0])) for name in found if "/" not in name}
            return Listing(files, {name.partition("/")[0] for name in found if "/" in name})

        answer: Listing = await self._request("list", prefix, listing)
        return answer

    async def delete(self, name: str) -> None:
        await self._request("delete", name, lambda: self.blobs.pop(name, None))


# --- what is done -----------------------------------------------------------------------------------------------------


async def save(store: MemoryStore, seed: int, **options: Any) -> sidestream.SaveInfo:
    state, files = make_state(seed), files_of(seed)
    where = sidestream.Storage(filesystem=store)
    return await sidestream.save(state, URL, overwrite=True, files=files, storage=where, **for_save(**options))


async def save_over(store: MemoryStore) -> None:
    await save(store, NEW)


async def remove(store: MemoryStore) -> None:
    await sidestream.remove(URL, storage=sidestream.Storage(filesystem=store))


WORK = {"a save over another": (save_over, NEW), "a removal": (remove, GONE)}


async def prepared() -> Blobs:
    store = MemoryStore()
    await save(store, OLD)
    return store.blobs


async def seed_in(store: MemoryStore) -> int:
    """What a reader finds; ``AssertionError`` for a mixture."""
    state = blank_state()
    try:
        await sidestream.load(state, URL, storage=sidestream.Storage(filesystem=store))
    except errors.CheckpointNotFoundError:
        return GONE
    seed = int(state["seed"])
    assert same(state, make_state(seed)), f"a mixture: {seed}"
    checkpoint = await sidestream.open_checkpoint(URL, storage=sidestream.Storage(filesystem=store))
    files = {name: await checkpoint.file(name) for name in checkpoint.files}
    assert files == files_of(seed), f"files of another save than {seed}"
    return seed


def ids(store: MemoryStore) -> set[str]:
    return {name.rpartition("manifest-")[2] for name in store.blobs if "manifest-" in name}


# --- trials: what is wrong, one after the other -----------------------------------------------------------------------


async def kills(name: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A kill at every request; then the same work is done again, and nothing of the dead process is left."""
    work, after = WORK[name]
    store = MemoryStore(await prepared())
    await work(store)
    marker = next(at for at, one in enumerate(store.log) if one in (("replace", ".metadata"), ("delete", ".metadata")))
    for at, blobs in enumerate([*store.snapshots, store.blobs]):
        left = MemoryStore(blobs)
        wrong = await found(left, {after if at > marker else OLD})
        try:
            await (save(left, NEW + 1) if name == "a save over another" else remove(left))
        except errors.CheckpointNotFoundError:
            if blobs:
                wrong.append("an interrupted removal was not continued")
        except errors.SidestreamError as error:
            wrong.append(f"done again, it failed: {error!r}")
        wrong += await found(left, {NEW + 1 if name == "a save over another" else GONE})
        if len(ids(left)) != (name == "a save over another") or (name == "a removal" and left.blobs):
            wrong.append(f"left behind: {sorted(left.blobs)}")
        yield f"killed before request {at + 1}, {[*store.log, ('nothing', '')][at]}", wrong


async def found(store: MemoryStore, allowed: set[int]) -> list[str]:
    try:
        seed = await seed_in(store)
    except (Exception, AssertionError) as error:
        return [f"visible and not good: {type(error).__name__}: {error}"]
    return [] if seed in allowed else [f"{seed} is there, and not one of {sorted(allowed)}"]


async def lost_answers(name: str) -> AsyncIterator[tuple[str, list[str]]]:
    """Each request is lost once, or its answer."""
    blobs = await prepared()
    whole = MemoryStore(blobs)
    await WORK[name][0](whole)
    trials = [(at, when) for at in range(1, len(whole.log) + 1) for when in ("before", "after")]
    found_wrong = await asyncio.gather(*(_losing(name, blobs, at, when) for at, when in trials))  # most of them wait
    for (at, when), wrong in zip(trials, found_wrong, strict=True):
        yield f"request {at}, {whole.log[at - 1]}, was lost {when} it was done", wrong


async def _losing(name: str, blobs: Blobs, at: int, when: str) -> list[str]:
    work, after = WORK[name]
    wrong = []

    async def lose(number: int, kind: str, name: str) -> None:
        if number == at:
            raise ConnectionResetError(104, "lost")

    store = MemoryStore(blobs, **{when: lose})
    try:
        await work(store)
    except errors.SidestreamError as error:
        wrong.append(f"a request that was lost once is {error!r}")
    return wrong + await found(MemoryStore(store.blobs), {after})


class MemoryView(MemoryStore):
    """The same blobs, without what is called around requests."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self.blobs = store.blobs


async def races() -> AsyncIterator[tuple[str, list[str]]]:
    """The markers of two saves come at the same moment, and one wins; or the target is removed just before the marker
    comes, and nothing is there."""
    for rival in ("save", "remove"):
        yield f"a save beside a {rival}", await _raced(rival)


async def _raced(rival: str) -> list[str]:
    waiting: list[str] = []
    both = asyncio.Event()

    async def meet(number: int, kind: str, name: str) -> None:
        if kind == "replace" and name.endswith(".metadata"):
            waiting.append(name)
            if rival == "remove":
                await asyncio.to_thread(
                    sidestream.blocking.remove, URL, storage=sidestream.Storage(filesystem=MemoryView(store))
                )
            elif len(waiting) < 2:
                await asyncio.wait_for(both.wait(), 60)
            both.set()

    store = MemoryStore(await prepared(), before=meet)
    saves = [save(store, seed) for seed in ((NEW, NEW + 1) if rival == "save" else (NEW,))]
    ends = await asyncio.gather(*saves, return_exceptions=True)
    won = [NEW + at for at, end in enumerate(ends) if isinstance(end, sidestream.SaveInfo)]
    wrong = [
        f"it ended with {end!r}"
        for end in ends
        if isinstance(end, Exception) and type(end) is not errors.CheckpointExistsError
    ]
    if len(won) != (rival == "save"):
        wrong.append(f"{won} were acknowledged")
    left = MemoryStore(store.blobs)
    wrong += await found(left, set(won) or {GONE})
    if len(ids(left)) != len(won):
        wrong.append(f"left behind: {sorted(left.blobs)}")
    return wrong


async def overtaken() -> AsyncIterator[tuple[str, list[str]]]:
    """Before its n-th request a whole save replaces what is read."""
    for reader in (load, unverified, verify):
        requests = at = 0
        while requests >= at:
            at += 1
            requests, wrong = await _overtaken(reader, at)
            yield f"{reader.__name__} overtaken at request {at}", wrong


async def _overtaken(reader: Callable[[MemoryStore], Awaitable[int]], at: int) -> tuple[int, list[str]]:
    async def replace(number: int, kind: str, name: str) -> None:
        if number == at:
            await asyncio.to_thread(asyncio.run, _save_to(MemoryView(store)))

    store = MemoryStore(await prepared(), before=replace)
    wrong = []
    try:
        seed = await reader(store)
        wrong += [] if seed in (OLD, NEW) else [f"{seed} was read"]
    except (Exception, AssertionError) as error:
        wrong.append(f"{type(error).__name__}: {error}")
    return len(store.log), wrong


async def _save_to(store: MemoryStore) -> None:
    await save(store, NEW)


async def load(store: MemoryStore) -> int:
    state = blank_state()
    await sidestream.load(state, URL, storage=sidestream.Storage(filesystem=store))
    assert same(state, make_state(state["seed"])), "a mixture"
    return int(state["seed"])


async def unverified(store: MemoryStore) -> int:
    state = blank_state()
    await sidestream.load(
        state, URL, storage=sidestream.Storage(filesystem=store), options=sidestream.LoadOptions(verify="manifest")
    )
    assert same(state, make_state(state["seed"])), "a mixture"
    return int(state["seed"])


async def verify(store: MemoryStore) -> int:
    report = await sidestream.verify(URL, storage=sidestream.Storage(filesystem=store))
    assert report.ok, report.damaged
    return OLD
