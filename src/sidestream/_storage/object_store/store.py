"""Checkpoints on object storage: unique names, and one create-only put of the marker that makes them visible.

Nothing can be renamed there, so an attempt writes into the prefix of its target, under names that carry its id, and the
marker is kept back until the publish. What has no marker is no checkpoint.
"""

from __future__ import annotations

import asyncio
import errno
import re
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from ..._runtime.threads import Deadline, Stop, Threads, io_threads
from ...errors import (
    AccessDenied,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidOption,
    SidestreamError,
    StorageError,
    without_frames,
)
from ...events import PromiseLost, emit
from ...options import Durability, StorePolicy
from ..clients.engine import Engine, Listing, ObjectInfo
from ..clients.io_loop import Call, on_io_loop
from ..clients.requests import Requests, Taken, fate_of, is_refused, is_uncertain, translated
from ..coalesce import coalesce
from ..store import Body, Leftover, Naming, Place, ReadRange, StoreAddress
from ..wrappers.file_cache import FileCache
from .parts import part_bytes_for

__all__ = ["ObjectStore"]

T = TypeVar("T")

_MARKER = ".metadata"
_NOTE = "retired"
_GAP_BYTES = 256 << 10  # to read past as many costs less than another request
_RUN_BYTES = 16 << 20
_RUN_RANGES = 4096
_CLEAN_UP_S = 60.0
_LOOK_S = 15.0  # for uploads that may have been left open, at most: nobody shall wait much longer for what is rare
_ATTEMPT = re.compile(r"\.([0-9a-f]{32})\.partial")
_OURS = re.compile(r"(?:__[0-9]+_[0-9]+|manifest)-([0-9a-f]{32})(?:\.distcp|\.[0-9]+)?")
_warned: set[str] = set()


@dataclass(slots=True)
class _Attempt:
    target: str
    save_id: str
    naming: Naming = "attempt"
    marker: bytes = b""
    in_parts: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)

    @property
    def directory(self) -> str:
        return (self.target.rpartition("/")[0] or ".") if self.naming == "single" else self.target


class _NotSent(StorageError):
    """A commit that was not even sent."""


class ObjectStore:
    """A ``Store`` below ``root`` (bucket and prefix); ``url`` is what messages call it."""

    appears_whole = False

    def __init__(
        self,
        engine: Engine,
        root: str,
        url: str,
        policy: StorePolicy,
        cache: FileCache | None = None,
        address: StoreAddress | None = None,
    ) -> None:
        self.url = url
        self.address = address
        self._engine = engine
        self._root = root.rstrip("/")
        self._policy = policy
        self._requests = Requests(url, policy)
        self._cache = cache
        self._attempts: dict[str, _Attempt] = {}

    def __repr__(self) -> str:
        return f"<ObjectStore {self.url} through {self._engine.name}>"

    def __reduce__(self) -> Any:
        raise TypeError("a store holds credentials: it is not pickled")

    @property
    def lists(self) -> bool:
        return self._engine.lists

    # --- saving ---

    def published_name(self, attempt: str, name: str) -> str:
        save_id = _save_id(attempt)
        stem, dot, suffix = name.rpartition(".")
        return f"{stem}-{save_id}{dot}{suffix}" if dot else f"{name}-{save_id}"

    def write(
        self,
        attempt: str,
        target: str,
        files: Iterable[tuple[str, Body]],
        *,
        threads: Threads,
        durability: Durability,
        stop: Stop,
        deadline: Deadline,
        place: Place = "new",
        naming: Naming = "attempt",
    ) -> None:
        try:
            self._write(attempt, target, files, stop, deadline, place, naming)
        except BaseException as error:
            raise without_frames(error)  # noqa: B904  # whoever keeps the error shall not keep staging memory with it

    def _write(
        self,
        attempt: str,
        target: str,
        files: Iterable[tuple[str, Body]],
        stop: Stop,
        deadline: Deadline,
        place: Place,
        naming: Naming,
    ) -> None:
        stop.check()
        self._check_promises()
        if place == "apart":
            naming = "given"
        elif place != "joined":  # or else another process, which made the attempt, has looked
            call = Call(lambda: self._look_at(target, naming, deadline))
            call.result(f"looking at {self.url}/{target}", stop=stop, deadline=deadline)
        own = self._attempts.setdefault(attempt, _Attempt(target, _save_id(attempt), naming))
        for given, body in files:
            file = self.published_name(attempt, given) if naming == "attempt" else given
            name = target if naming == "single" else f"{target}/{file}"
            if body.nbytes <= part_bytes_for(body.nbytes, self._policy.part_bytes):
                self._send_whole(name, own, body, stop, deadline)
            else:
                own.in_parts = True
                own.begun.add(name)
                self._send_parts(self._key(name), body, stop, deadline)
            own.sizes[name.rpartition("/")[2]] = body.nbytes
            del body

    def wrote(self, attempt: str, sizes: Mapping[str, int]) -> None:
        own = self._attempts[attempt]
        own.in_parts = True  # for all that is known: one that is open is looked for
        for name, nbytes in sizes.items():
            file = self.published_name(attempt, name)
            own.begun.add(f"{own.target}/{file}")
            own.sizes[file] = nbytes

    def clear(self, attempt: str, names: Sequence[str], *, deadline: Deadline) -> None:
        own = self._attempts[attempt]
        own.in_parts = True
        files = [self.published_name(attempt, name) for name in names]
        own.begun.update(f"{own.target}/{file}" for file in files)

        async def clear() -> None:
            await self._delete(own.target, files, deadline)
            uploads: Mapping[str, datetime | None] = {}
            with suppress(StorageError):  # the publish looks for them again, and says so where it may not
                uploads = await self._uploads(own.target, deadline)
            for file in files:  # not those of other ranks, which have the same id
                mine = [upload for upload in uploads if f"/{file}?upload=" in upload]
                if mine:
                    await self._requests.run("aborting", file, partial(self._engine.abort_uploads, mine), deadline)

        Call(clear).result(f"removing files of {attempt}", stop=Stop(), deadline=deadline)

    async def _look_at(self, target: str, naming: Naming, deadline: Deadline) -> None:
        """Raises ``Conflict`` unless it is free."""
        self._check_vacant(target, await self._list(target, deadline), naming)
        if naming == "single":
            key = self._key(target)
            try:
                await self._requests.run("looking at", target, lambda: self._engine.size(key), deadline)
            except FileNotFoundError:
                return
            raise Conflict(f"{self.url}/{target} already exists: choose another name, or delete it first")

    def _send_whole(self, name: str, own: _Attempt, body: Body, stop: Stop, deadline: Deadline) -> None:
        key = self._key(name)
        try:
            content = _in_one_piece(body, stop, deadline)
            if own.naming == "attempt":
                call = Call(lambda: self._put(key, content, deadline))
                call.result(f"writing {key}", stop=stop, deadline=deadline)
                return
            creation = Call(lambda: self._create(name, content, deadline, whole=True))
            own.begun.add(name)  # also what a cancel leaves in doubt is ours: it was created, or is not there
            try:
                if not creation.result(f"writing {key}", stop=stop, deadline=deadline):
                    own.begun.discard(name)  # another writer's, perhaps, and good: it stays, whatever becomes of us
            except Conflict:
                own.begun.discard(name)
                raise
        finally:
            for part in body.parts:
                part.release()

    def _send_parts(self, key: str, body: Body, stop: Stop, deadline: Deadline) -> None:
        try:
            self._engine.upload(key, body, self._requests, stop=stop, deadline=deadline)
        except Exception as error:
            failure = translated(error, "uploading", self._shown(key))
            if isinstance(failure, FileNotFoundError) and not isinstance(failure, SidestreamError):
                failure = StorageError(errno.ENOENT, "the bucket, or the upload, is not there", self._shown(key))
            raise failure from error

    async def put(self, name: str, body: Body, *, durability: Durability, deadline: Deadline) -> None:
        stop = Stop()
        taken = [part.take(stop, deadline) for part in body.parts]
        content = _in_one(taken)
        if content is None:  # a manifest of many tensors has tens of megabytes: it is not copied on the loop
            content = await io_threads().run(_joined, taken, deadline=deadline)
        directory, _, file = name.rpartition("/")
        attempt = self._attempts.get(directory)
        if self._engine.creation == "none":
            raise AccessDenied(errno.EROFS, "it can be read and not written", f"{self.url}/{name}")
        if attempt is None:
            await self._io(lambda: self._create(name, content, deadline), f"writing {name}", deadline)
        elif file == _MARKER:
            attempt.marker = content  # to be sent by publish()
        else:
            key = self._key(f"{attempt.target}/{file}")
            attempt.sizes[file] = len(content)
            await self._io(lambda: self._put(key, memoryview(content), deadline), f"writing {name}", deadline)

    async def publish(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        """One create-only put. It is never cut short: a cancel is raised when its outcome is known."""
        marker = self._attempts[attempt].marker
        await self._io(lambda: self._check_complete(attempt, deadline), f"looking at {target}", deadline)
        if marker:  # or else the last of its files has made it visible
            await self._publish(f"{target}/{_MARKER}", marker, deadline)
        self._attempts.pop(attempt, None)

    async def publish_part(
        self, attempt: str, target: str, name: str, body: Body, *, durability: Durability, deadline: Deadline
    ) -> None:
        content = b"".join(part.take(Stop(), deadline) for part in body.parts)
        await self._io(lambda: self._check_complete(attempt, deadline), f"looking at {target}", deadline)
        await self._publish(f"{target}/{name}", content, deadline)
        self._attempts.pop(attempt, None)

    async def _publish(self, name: str, content: bytes, deadline: Deadline) -> None:
        """Create it. It is never cut short: a cancel is raised when its outcome is known."""
        uncertain: list[BaseException] = []

        async def create() -> None:
            try:
                await self._create(name, content, deadline)
            except Exception as error:
                if is_uncertain(error) and not isinstance(error, Conflict):
                    error.left_behind = True  # type: ignore[attr-defined]  # it may still arrive
                    uncertain.append(error)
                raise

        try:
            await on_io_loop(create, f"publishing {name}", deadline=deadline, unstoppable=True)
        except asyncio.CancelledError as cancel:
            if uncertain:
                cancel.left_behind = True  # type: ignore[attr-defined]
            raise

    async def publish_file(self, attempt: str, target: str, *, durability: Durability, deadline: Deadline) -> None:
        await self.publish(attempt, target, durability=durability, deadline=deadline)

    async def _check_complete(self, attempt: str, deadline: Deadline) -> None:
        """Whoever took this attempt for dead has deleted it; a client that cut a file short has lost some. And where an
        upload was begun and the answer lost, one is open that nobody knows."""
        own = self._attempts[attempt]
        if own.in_parts and own.naming == "attempt":
            try:
                await self._abort_uploads(own.target, own.save_id, deadline)
            except (StorageError, DeadlineExceeded) as error:  # all the same, what was acknowledged is there
                deadline.check("listing uploads")
                unknown = f"what fails leaves nothing: an upload of which nobody heard may stay open ({error})"
                emit(PromiseLost(f"{self.url}/{own.target}", unknown))
        listing = await self._list(own.directory, deadline)
        for name, nbytes in own.sizes.items():
            info = listing.files.get(name)
            if info is None or info.nbytes != nbytes:
                found = "is gone" if info is None else f"has {info.nbytes} bytes"
                raise _NotSent(
                    5,
                    f"{name} {found}, {nbytes} were written: the attempt was removed, or the storage lost a part",
                    self.url,
                )

    async def _create(self, name: str, content: bytes | memoryview, deadline: Deadline, *, whole: bool = False) -> bool:
        """Whether this created it. False: its content is there already, perhaps from a request that was carried out
        though its answer was lost. What names its writer at its end is compared by that, all else as a ``whole``.

        Raises ``Conflict`` if the name is taken by another content."""
        key = self._key(name)
        end = bytes(content[0 if whole else -4096 :])

        async def create() -> bool:
            try:
                await self._engine.put(key, memoryview(content), create=True)
            except Exception as error:
                if fate_of(error) != "taken":
                    raise
                if not await self._holds(key, end, whole=whole):
                    raise Taken(name) from error
                return False
            return True

        try:
            return await self._requests.run("writing", name, create, deadline)
        except Taken as taken:
            raise Conflict(f"{self.url}/{name} exists already: another writer was first") from taken

    async def _holds(self, key: str, end: bytes, *, whole: bool) -> bool:
        try:
            if whole and await self._engine.size(key) != len(end):
                return False
            return (whole and not end) or (bool(end) and await self._engine.tail(key, len(end)) == end)
        except Exception as error:
            if fate_of(error) == "absent":  # 409: somebody else was creating it at that moment, and did not (yet)
                raise ConnectionError("another request for the same name was in the way") from error
            raise

    async def discard(self, attempt: str, *, deadline: Deadline) -> None:
        await self._io(lambda: self._discard(attempt, deadline), f"removing {attempt}", deadline)

    def forget(self, attempt: str) -> None:
        self._attempts.pop(attempt, None)

    def discard_here(self, attempt: str) -> None:
        deadline = Deadline.after(_CLEAN_UP_S)
        Call(lambda: self._discard(attempt, deadline)).result("removing", stop=Stop(), deadline=deadline)

    async def _discard(self, attempt: str, deadline: Deadline) -> None:
        """Of an attempt of ours, what carries its id; of a leftover, what its name says."""
        known = self._attempts.get(attempt)
        if known is not None:
            if known.naming == "attempt":
                await self._delete_of(known.target, known.save_id, deadline)
            else:
                await self._delete_begun(known, deadline)
            self._attempts.pop(attempt, None)
        elif "?upload=" in attempt:
            key = self._key(attempt)
            await self._requests.run("aborting", attempt, lambda: self._engine.abort_uploads([key]), deadline)
        elif attempt.endswith(f"/{_NOTE}"):
            await self._finish_retiring(attempt.removesuffix(f"/{_NOTE}"), deadline)
        elif "/" in attempt:
            target, _, save_id = attempt.rpartition("/")
            await self._delete_of(target, save_id, deadline)

    async def _delete_of(self, target: str, save_id: str, deadline: Deadline) -> None:
        listing = await self._list(target, deadline)
        found = [file for file in listing.files if (match := _OURS.fullmatch(file)) and match[1] == save_id]
        try:
            await self._delete(target, found, deadline)
        finally:
            await self._abort_uploads(target, save_id, deadline)
        await self._engine.forget(self._key(target))

    async def _delete_begun(self, own: _Attempt, deadline: Deadline) -> None:
        """What this attempt wrote under names that others may use too; nothing, where another writer has committed."""
        committed = own.naming == "given" and _MARKER in (await self._list(own.target, deadline)).files
        try:
            await self._delete("", () if committed else sorted(own.begun), deadline)
        finally:
            keys = {self._key(name) for name in own.begun}
            uploads = await self._uploads(own.directory, deadline) if own.in_parts else {}
            mine = [upload for upload in uploads if upload.partition("?upload=")[0] in keys]
            if mine:
                await self._requests.run("aborting", own.target, lambda: self._engine.abort_uploads(mine), deadline)
        await self._engine.forget(self._key(own.target))

    async def _abort_uploads(self, target: str, save_id: str, deadline: Deadline) -> None:
        uploads = await self._uploads(target, deadline)
        mine = [upload for upload in uploads if f"-{save_id}" in upload]
        if mine:
            await self._requests.run("aborting", target, lambda: self._engine.abort_uploads(mine), deadline)

    async def _delete(self, target: str, files: Iterable[str], deadline: Deadline) -> None:
        for file in files:
            name = f"{target}/{file}" if target else file
            key = self._key(name)

            async def delete(key: str = key) -> None:
                await self._engine.delete([key])

            await self._requests.run("deleting", name, delete, deadline)

    # --- reading ---

    async def read(self, name: str, ranges: Sequence[ReadRange], *, deadline: Deadline) -> None:
        runs = await io_threads().run(_runs, ranges, deadline=deadline)
        if runs:
            await self._io(lambda: self._read(name, runs, deadline), f"reading {name}", deadline)

    async def _read(self, name: str, runs: Sequence[Sequence[ReadRange]], deadline: Deadline) -> None:
        queue = iter(runs)

        async def work() -> None:
            for run in queue:
                await self._read_run(name, run, deadline)

        workers = [asyncio.ensure_future(work()) for _ in range(min(self._policy.in_flight, len(runs)))]
        try:
            for worker in workers:
                await worker
        finally:
            for worker in workers:
                worker.cancel()
            while any(not worker.done() for worker in workers):
                await asyncio.wait(workers)
            for worker in workers:
                worker.cancelled() or worker.exception()

    async def _read_run(self, name: str, run: Sequence[ReadRange], deadline: Deadline) -> None:
        key = self._key(name)
        start, end = run[0].offset, run[-1].offset + len(run[-1].into)

        async def get() -> memoryview:
            content = await self._engine.read(key, start, end)
            if len(content) < end - start and await self._engine.size(key) >= end:
                raise ConnectionError(f"{len(content)} bytes came of {end - start}")
            return content

        if self._cache is not None and _OURS.fullmatch(name.rpartition("/")[2]):
            content = await self._read_cached(self._cache, key, start, end, deadline)
        else:
            content = await self._requests.run("reading", name, get, deadline)
        if len(content) < end - start:
            at = start + len(content)
            raise Corrupt(
                f"{self.url}/{name} ends at byte {at}, but {end - at} more belong there",
                file=name.rpartition("/")[2],
                offset=at,
            )
        await io_threads().run(_hand_out, content, run, start)

    async def _read_cached(self, cache: FileCache, key: str, start: int, end: int, deadline: Deadline) -> memoryview:
        async def get() -> memoryview:
            return await io_threads().run(cache.read, key, start, end, deadline, deadline=deadline)

        whole_file = replace(self._policy, request_timeout_s=deadline.timeout_s)
        return await Requests(self.url, whole_file).run("fetching", key.rpartition("/")[2], get, deadline)

    async def read_tail(self, name: str, nbytes: int, *, deadline: Deadline) -> bytes:
        key = self._key(name)

        async def get() -> bytes:
            return await self._requests.run("reading", name, lambda: self._engine.tail(key, nbytes), deadline)

        return await self._io(get, f"reading {name}", deadline)

    async def size(self, name: str, *, deadline: Deadline) -> int:
        key = self._key(name)

        async def get() -> int:
            return await self._requests.run("looking at", name, lambda: self._engine.size(key), deadline)

        return await self._io(get, f"looking at {name}", deadline)

    async def sizes(self, directory: str, *, deadline: Deadline) -> dict[str, int]:
        listing = await self._io(lambda: self._list(directory, deadline), f"listing {directory}", deadline)
        if not listing.files and not listing.directories:
            raise FileNotFoundError(errno.ENOENT, "nothing there", f"{self.url}/{directory}")
        return {name: info.nbytes for name, info in listing.files.items()}

    async def directories(self, directory: str = ".", *, deadline: Deadline) -> list[str]:
        shown = "listing" if directory == "." else f"listing {directory}"
        return list((await self._io(lambda: self._list(directory, deadline), shown, deadline)).directories)

    # --- hygiene ---

    async def remove(self, names: Sequence[str], *, deadline: Deadline) -> None:
        await self._io(lambda: self._delete("", names, deadline), "removing", deadline)

    async def retire(self, directory: str, *, durability: Durability, deadline: Deadline) -> None:
        """The marker goes first, so that nobody takes what is left for a checkpoint."""

        async def retire() -> None:
            if not (await self._list(directory, deadline)).files:
                return
            await self._put(self._key(f"{directory}/{_NOTE}"), memoryview(b"is being deleted"), deadline)
            await self._delete(directory, [_MARKER], deadline)
            await self._finish_retiring(directory, deadline)

        await self._io(retire, f"removing {directory}", deadline)

    async def _finish_retiring(self, directory: str, deadline: Deadline) -> None:
        """The note goes last: it says that the rest is no attempt."""
        listing = await self._list(directory, deadline)
        if _MARKER in listing.files:
            return
        await self._delete(directory, sorted(listing.files, key=lambda name: name == _NOTE), deadline)
        await self._engine.forget(self._key(directory))

    async def leftovers(self, *, deadline: Deadline) -> list[Leftover]:
        return await self._io(lambda: self._leftovers(deadline), "looking for leftovers", deadline)

    async def _leftovers(self, deadline: Deadline) -> list[Leftover]:
        now = await self._clock(deadline)
        found: list[Leftover] = []
        for directory in (await self._list("", deadline)).directories:
            listing = await self._list(directory, deadline)
            if _MARKER in listing.files:
                continue
            if (note := listing.files.get(_NOTE)) is not None:
                found.append(Leftover(f"{directory}/{_NOTE}", "retired", _age_s(now, note.modified)))
                continue
            ids: dict[str, list[ObjectInfo]] = {}
            for file, info in listing.files.items():
                if (match := _OURS.fullmatch(file)) is not None:
                    ids.setdefault(match[1], []).append(info)
            for save_id, infos in ids.items():
                newest = max((info.modified for info in infos if info.modified), default=None)
                found.append(Leftover(f"{directory}/{save_id}", "attempt", _age_s(now, newest)))
        root = f"{self._root}/"
        for upload, begun in (await self._uploads("", deadline)).items():
            name = upload.partition("?upload=")[0].rpartition("/")[2]
            if _OURS.fullmatch(name) is not None:
                found.append(Leftover(upload.removeprefix(root), "attempt", _age_s(now, begun)))
        return found

    async def ages(self, directory: str, *, deadline: Deadline) -> dict[str, float]:
        async def look() -> dict[str, float]:
            now = await self._clock(deadline)
            listing = await self._list(directory, deadline)
            return {name: _age_s(now, info.modified) for name, info in listing.files.items()}

        return await self._io(look, f"listing {directory}", deadline)

    async def _clock(self, deadline: Deadline) -> datetime | None:
        """What time it is there, as a freshly written object says."""
        name = f".leases/clock-{uuid.uuid4().hex}"  # each call has its own: it is deleted at the end
        key = self._key(name)

        async def write() -> None:
            await self._engine.put(key, memoryview(b"now"), create=False)

        await self._requests.run("writing", name, write, deadline)
        listing = await self._list(".leases", deadline)
        await self._delete(".leases", [name.rpartition("/")[2]], deadline)
        written = listing.files.get(name.rpartition("/")[2])
        return None if written is None else written.modified

    async def _uploads(self, target: str, deadline: Deadline) -> dict[str, datetime | None]:
        key = self._key(target) + "/"

        async def ask() -> dict[str, datetime | None]:
            try:
                return dict(await self._engine.open_uploads(key))
            except Exception as error:
                if is_refused(error):  # a right that a writer need not have, or a request that not all servers know
                    return {}
                raise

        soon = Deadline.after(min(_LOOK_S, deadline.remaining_s()))
        return await self._requests.run("listing the uploads of", target, ask, soon)

    # --- all of them ---

    def _shown(self, key: str) -> str:
        return f"{self.url}/{key.removeprefix(f'{self._root}/')}"

    def _key(self, name: str) -> str:
        """``.`` is the root itself."""
        name = name.removeprefix("./") if name != "." else ""
        return f"{self._root}/{name}".rstrip("/") if self._root else name

    async def _io(self, work: Callable[[], Coroutine[Any, Any, T]], doing: str, deadline: Deadline) -> T:
        return await on_io_loop(work, doing, deadline=deadline)

    async def _put(self, key: str, content: memoryview, deadline: Deadline) -> None:
        async def put() -> None:
            await self._engine.put(key, content, create=False)

        await self._requests.run("writing", key.removeprefix(f"{self._root}/"), put, deadline)

    async def _list(self, directory: str, deadline: Deadline) -> Listing:
        key = self._key(directory)
        return await self._requests.run("listing", directory, lambda: self._engine.listing(key), deadline)

    def _check_vacant(self, target: str, listing: Listing, naming: Naming) -> None:
        """What attempts have left behind is no obstacle to another one: their names are their own."""
        taken = [name for name in listing.files if naming != "attempt" or _OURS.fullmatch(name) is None]
        others = [*listing.directories, *taken]
        if others:
            raise Conflict(
                f"{self.url}/{target} is not empty: save to a new prefix, or let a Checkpointer make generations of a "
                "step"
            )

    def _check_promises(self) -> None:
        if self._engine.creation == "none":
            raise InvalidOption(f"{self.url} can be read and not written: save to object storage or a directory")
        if self._engine.creation == "checked" and self._engine.name not in _warned:
            _warned.add(self._engine.name)
            emit(
                PromiseLost(
                    self.url,
                    f"{self._engine.name} has no conditional put: of two saves to one name at the same time both may "
                    "report success, and the marker of the later one stays",
                )
            )


def _in_one(taken: Sequence[memoryview]) -> bytes | None:
    """What is one object in memory already."""
    whole = taken[0].obj if len(taken) == 1 else None
    return whole if isinstance(whole, bytes) and len(whole) == taken[0].nbytes else None


def _joined(taken: Sequence[memoryview]) -> bytes:
    return b"".join(taken)


def _save_id(attempt: str) -> str:
    match = _ATTEMPT.search(attempt)
    assert match is not None, attempt
    return match[1]


def _age_s(now: datetime | None, then: datetime | None) -> float:
    if now is None or then is None:
        return 0.0
    return max(0.0, (now.astimezone(UTC) - then.astimezone(UTC)).total_seconds())


def _runs(ranges: Sequence[ReadRange]) -> list[list[ReadRange]]:
    return list(coalesce(ranges, gap_bytes=_GAP_BYTES, most=_RUN_RANGES, most_bytes=_RUN_BYTES))


def _hand_out(content: memoryview, run: Sequence[ReadRange], start: int) -> None:
    """In a thread: every byte to its place."""
    for one in run:
        at = one.offset - start
        one.into[:] = content[at : at + len(one.into)]
        if one.arrived is not None:
            one.arrived()


def _in_one_piece(body: Body, stop: Stop, deadline: Deadline) -> memoryview:
    """Each part is released when it is copied: together they may be more than a stager's budget has room for."""
    if len(body.parts) == 1:
        return body.parts[0].take(stop, deadline)
    content, filled = bytearray(body.nbytes), 0
    for part in body.parts:
        piece = part.take(stop, deadline)
        content[filled : filled + piece.nbytes] = piece
        filled += piece.nbytes
        del piece
        part.release()
    return memoryview(content).toreadonly()
