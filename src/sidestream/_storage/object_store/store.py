"""The store of checkpoints on object storage. It reads and deletes checkpoints; the module ``transaction`` writes
them."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from mmap import mmap
from typing import Any

from ..._runtime.tasks import in_parallel
from ..._runtime.threads import current_deadline, io_threads
from ...errors import AccessDeniedError, CheckpointNotFoundError, CorruptCheckpointError
from ...options import BlobInfo, Capabilities, Durability, StorePolicy
from ..clients.engine import Engine, LateEngine
from ..clients.requests import on_io_loop
from ..names import MARKER, NOTE, export_files, id_of, parse_step, retired_files
from ..replacing import Found, Use, refusal
from ..store import Leftover, RangeSource, ReadRange, coalesce
from ..transaction import Attempt, StoreAddress, Transaction
from ..wrappers.file_cache import FileCache
from .bucket import Bucket, age_s, clock_of, collect_orphans, look_at
from .transaction import ObjectTransaction, check_replaces

_GAP_BYTES = 256 << 10  # reading this many unneeded bytes costs less than another request
_RUN_BYTES = 16 << 20
_RUN_RANGES = 4096


class ObjectStore:
    """A ``Store`` below ``root``, which is a bucket with a prefix. ``url`` is its name in messages."""

    def __init__(
        self,
        engine: Engine | LateEngine,
        root: str,
        url: str,
        policy: StorePolicy,
        cache: FileCache | None = None,
        address: StoreAddress | None = None,
    ) -> None:
        self.url = url
        self.address = address
        self._bucket = Bucket(engine, root, url, policy)
        self._cache = cache

    def __repr__(self) -> str:
        return f"<ObjectStore {self.url} through {self._bucket.engine.name}>"

    def __reduce__(self) -> Any:
        raise TypeError("a store holds credentials: it is not pickled")

    @property
    def capabilities(self) -> Capabilities:
        return self._bucket.capabilities

    # --- saving ---

    async def connect(self) -> None:
        await on_io_loop(self._bucket.connect, "connecting")

    def begin(self, attempt: Attempt) -> Transaction:
        return ObjectTransaction(self._bucket, self.address, attempt)

    def check_replaces(self) -> None:
        check_replaces(self._bucket)

    async def put(self, name: str, content: bytes, *, durability: Durability) -> None:
        if not self.capabilities.listing:
            raise AccessDeniedError(errno.EROFS, "it can be read and not written", f"{self.url}/{name}")
        await on_io_loop(lambda: self._bucket.create(name, content), f"writing {name}")

    async def discard(self, leftover: str) -> None:
        await on_io_loop(lambda: self._discard(leftover), f"removing {leftover}")

    async def _discard(self, leftover: str) -> None:
        if leftover.endswith(f"/{NOTE}"):
            await self._finish_retiring(leftover.removesuffix(f"/{NOTE}"))
        elif "/" in leftover:
            target, _, save_id = leftover.rpartition("/")
            await self._bucket.delete_of(target, save_id, unless_committed=True)

    # --- reading ---

    def source(self, directory: str) -> RangeSource:
        return ObjectSource(self._bucket, self._cache, directory)

    async def sizes(self, directory: str) -> dict[str, int]:
        return await on_io_loop(lambda: self._bucket.sizes(directory), f"listing {directory}")

    async def directories(self, directory: str = ".") -> list[str]:
        shown = "listing" if directory == "." else f"listing {directory}"
        return list((await on_io_loop(lambda: self._bucket.listing(directory), shown)).directories)

    # --- removal ---

    async def remove(self, names: Sequence[str]) -> None:
        await on_io_loop(lambda: self._bucket.delete("", names), "removing")

    async def look_at(self, directory: str) -> Found:
        return await on_io_loop(lambda: look_at(self._bucket, directory), f"looking at {directory}")

    async def remove_directory(self, directory: str, *, durability: Durability, use: Use = "remove") -> bool:
        """Write the note, and delete the marker before the other files, so that readers never find an incomplete
        checkpoint. Of an export, delete first what readers look for."""
        return await on_io_loop(lambda: self._remove_directory(directory, use), f"removing {directory}")

    async def _remove_directory(self, directory: str, use: Use) -> bool:
        bucket, save_id = self._bucket, None
        listing = await bucket.listing(directory)
        files = listing.files
        # There are three cases. A note without a marker: an earlier removal was interrupted, and this one finishes it.
        # A marker: the note is written first, then the marker goes, then the rest. Neither: an export, of which the
        # file that readers look for goes first.
        if MARKER in files or NOTE not in files:
            found = await look_at(bucket, directory, listing)
            if found in ("empty", "leftover"):
                return MARKER in files  # another process has removed it meanwhile
            if refused := refusal(found, use, f"{bucket.url}/{directory}"):
                raise CheckpointNotFoundError(refused)
        if MARKER in files:
            with suppress(FileNotFoundError):  # another removal has deleted the marker: its note has the id
                save_id = await self._write_note(directory)
                await bucket.delete(directory, [MARKER])
        elif NOTE not in files:
            await bucket.delete(directory, export_files(files))
            await bucket.forget(directory)
            return True
        await self._finish_retiring(directory, save_id)
        return True

    async def _write_note(self, directory: str) -> str:
        """Write the id of the save whose marker is in ``directory`` to the note, and return it. Raises
        ``FileNotFoundError`` if there is no marker.

        The marker is read again after that, because another save may have put its own meanwhile. Saves that find the
        note put none."""
        written, save_id = None, await self._marked_id(directory)
        while save_id != written:
            await self._bucket.put(f"{directory}/{NOTE}", memoryview(save_id.encode()))
            written, save_id = save_id, await self._marked_id(directory)
        return save_id

    async def _marked_id(self, directory: str) -> str:
        """Return the id of the save whose marker is in ``directory``; empty if the marker is damaged or of another
        writer. Raises ``FileNotFoundError`` if there is no marker."""
        try:
            marker = await self._bucket.marker(f"{directory}/{MARKER}")
        except CorruptCheckpointError:
            return ""
        return "" if marker is None else marker.save_id

    async def _finish_retiring(self, directory: str, save_id: str | None = None) -> None:
        """Delete the files of a retired checkpoint, whose marker was deleted before. ``save_id`` is the content of the
        note, if it is known."""
        files = (await self._bucket.listing(directory)).files
        if save_id is None:
            try:
                save_id = (await self._bucket.tail(f"{directory}/{NOTE}", 32)).decode()
            except FileNotFoundError:  # another process has finished it
                return
        await self._bucket.delete(directory, retired_files(files, save_id))
        await self._bucket.forget(directory)

    async def collect(self, target: str, *, after_s: float) -> list[str]:
        return await on_io_loop(lambda: collect_orphans(self._bucket, target, after_s), f"looking at {target}")

    async def leftovers(self) -> list[Leftover]:
        return await on_io_loop(self._leftovers, "looking for leftovers")

    async def _leftovers(self) -> list[Leftover]:
        now = await clock_of(self._bucket)
        found: list[Leftover] = []
        for directory in (await self._bucket.listing("")).directories:
            listing = await self._bucket.listing(directory)
            if MARKER in listing.files:
                continue
            if (note := listing.files.get(NOTE)) is not None:
                if parse_step(directory) is not None:
                    found.append(Leftover(f"{directory}/{NOTE}", "retired", age_s(now, note.modified)))
                continue
            ids: dict[str, list[BlobInfo]] = {}
            for file, info in listing.files.items():
                if (save_id := id_of(file)) is not None:
                    ids.setdefault(save_id, []).append(info)
            for save_id, infos in ids.items():
                newest = max((info.modified for info in infos if info.modified), default=None)
                found.append(Leftover(f"{directory}/{save_id}", "attempt", age_s(now, newest)))
        return found

    async def ages(self, directory: str) -> dict[str, float]:
        async def look() -> dict[str, float]:
            now = await clock_of(self._bucket)
            listing = await self._bucket.listing(directory)
            return {name: age_s(now, info.modified) for name, info in listing.files.items()}

        return await on_io_loop(look, f"listing {directory}")


class ObjectSource(RangeSource):
    """The ``RangeSource`` of a directory in ``bucket``. Nothing is open between two requests."""

    def __init__(self, bucket: Bucket, cache: FileCache | None, name: str) -> None:
        super().__init__(name)
        self._bucket = bucket
        self._cache = cache
        self.concurrency = bucket.policy.concurrency

    async def read(self, file: str, ranges: Sequence[ReadRange]) -> None:
        name = self.path_of(file)
        runs = await io_threads().run(_runs, ranges)
        if runs:
            workers = min(self.concurrency, len(runs))
            # A request in flight writes into memory of the caller. When this returns or raises, none does.
            await on_io_loop(lambda: in_parallel(runs, partial(self._read_run, name), workers), f"reading {name}")

    async def _read_run(self, name: str, run: Sequence[ReadRange]) -> None:
        key = self._bucket.key(name)
        start, end = run[0].offset, run[-1].offset + len(run[-1].into)

        async def get(engine: Engine) -> memoryview:
            content = await engine.read(key, start, end)
            # A short answer has two reasons. If the object is long enough, the connection has ended early, and the
            # request is repeated. Otherwise the file is damaged, and repeating would not help.
            if len(content) < end - start and await engine.size(key) >= end:
                raise ConnectionError(f"{len(content)} bytes came of {end - start}")
            return content

        # Only names that contain the id of a save: such a name always stands for the same bytes. ``.metadata``, and
        # shards without an id, may be replaced under their names, and a cache would return the old ones.
        if self._cache is not None and id_of(name.rpartition("/")[2]) is not None:
            content = await self._read_cached(self._cache, key, start, end)
        else:
            content = await self._bucket.run("reading", name, get)
        if len(content) < end - start:
            at = start + len(content)
            raise CorruptCheckpointError(
                f"{self._bucket.url}/{name} ends at byte {at}, but {end - at} more belong there",
                file=name.rpartition("/")[2],
                offset=at,
            )
        await io_threads().run(_hand_out, content, run, start)

    async def _read_cached(self, cache: FileCache, key: str, start: int, end: int) -> memoryview:
        async def get() -> memoryview:
            return await cache.read((await self._bucket.made()).filesystem, key, start, end)

        # The first read fetches the whole file, and others wait for it. That may take longer than one request is
        # allowed to.
        name, timeout_s = key.rpartition("/")[2], current_deadline().timeout_s
        return await self._bucket.requests.run("fetching", name, get, request_timeout_s=timeout_s)

    async def _tail(self, file: str, nbytes: int) -> bytes:
        name = self.path_of(file)
        return await on_io_loop(lambda: self._bucket.tail(name, nbytes), f"reading {name}")

    async def size(self, file: str) -> int:
        name = self.path_of(file)
        return await on_io_loop(lambda: self._bucket.size(name), f"looking at {name}")

    async def sizes(self) -> dict[str, int]:
        return await on_io_loop(lambda: self._bucket.sizes(self.name), f"listing {self.name}")

    async def map(self, file: str, nbytes: int) -> mmap:
        name = self.path_of(file)
        key = self._bucket.key(name)

        async def map_file() -> mmap:
            return await self._bucket.run("mapping", name, lambda engine: engine.map(key, nbytes))

        mapped = await on_io_loop(map_file, f"mapping {name}")
        if len(mapped) < nbytes:
            raise CorruptCheckpointError(
                f"{self._bucket.url}/{name} is shorter than the {nbytes} bytes that were saved", file=file
            )
        return mapped


def _runs(ranges: Sequence[ReadRange]) -> list[list[ReadRange]]:
    return list(coalesce(ranges, gap_bytes=_GAP_BYTES, most=_RUN_RANGES, most_bytes=_RUN_BYTES))


def _hand_out(content: memoryview, run: Sequence[ReadRange], start: int) -> None:
    """Copy the content of a run to its ranges. Called in a thread."""
    for one in run:
        at = one.offset - start
        one.into[:] = content[at : at + len(one.into)]
        if one.seen is not None:
            one.seen(one.into)
        if one.arrived is not None:
            one.arrived()
