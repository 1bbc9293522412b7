"""The objects below one root, and requests to them, which are repeated as the policy says.

Files that killed saves left behind are removed by their ages, which are those of the clock of the storage.
"""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from ..._format.marker import TAIL_BYTES, Marker, find_marker
from ..._runtime.threads import Stop
from ...errors import CheckpointExistsError, StorageError
from ...options import BlobInfo, Listing, StorePolicy
from ..bodies import Body
from ..clients.engine import Engine, LateEngine
from ..clients.requests import FailureKind, LoopCall, Requests, failure_kind, is_refused
from ..names import ABANDONED_AFTER_S, LEASES, MARKER, NOTE, READ_FIRST, export_files, id_of, is_plain_shard
from ..replacing import DECIDING_BYTES, Found, deciding_file, kind_of

T = TypeVar("T")

_NO_BUCKET = "there is no such bucket; check the URL, or create the bucket first"


class Bucket:
    """The objects below ``root``, which is a bucket with a prefix. ``url`` is its name in messages. Names are relative
    to the root."""

    def __init__(self, engine: Engine | LateEngine, root: str, url: str, policy: StorePolicy) -> None:
        self.engine = engine
        self.capabilities = engine.capabilities
        self.root = root.rstrip("/")
        self.url = url
        self.policy = policy
        self.requests = Requests(url, self.root, policy)

    def key(self, name: str) -> str:
        """Return the key of a name. ``.`` is the root itself."""
        name = name.removeprefix("./") if name != "." else ""
        return f"{self.root}/{name}".rstrip("/") if self.root else name

    async def made(self) -> Engine:
        return await self.engine.get() if isinstance(self.engine, LateEngine) else self.engine

    async def connect(self) -> None:
        """Import and make the clients, and send a first request with each, which opens a connection."""
        await self.run("connecting", "", lambda engine: engine.connect(self.root))

    async def run(self, doing: str, name: str, request: Callable[[Engine], Awaitable[T]]) -> T:
        """Send ``request``, and repeat it after passing failures: see ``Requests.run``."""

        async def send() -> T:
            return await request(await self.made())

        return await self.requests.run(doing, name, send)

    async def _run_in_bucket(self, doing: str, name: str, request: Callable[[Engine], Awaitable[T]]) -> T:
        """Do ``run`` for a request that needs no object. If the storage does not find something, it is the bucket."""

        async def send(engine: Engine) -> T:
            try:
                return await request(engine)
            except Exception as error:
                if failure_kind(error) != "absent":
                    raise
                raise StorageError(errno.ENOENT, f"{doing} failed: {_NO_BUCKET}", f"{self.url}/{name}") from error

        return await self.run(doing, name, send)

    async def tail(self, name: str, nbytes: int) -> bytes:
        key = self.key(name)
        return await self.run("reading", name, lambda engine: engine.tail(key, nbytes))

    async def marker(self, name: str) -> Marker | None:
        """Return the marker ``name``; None if another writer made it. Raises ``CorruptCheckpointError``, and
        ``FileNotFoundError`` if there is no such object."""
        return find_marker(await self.tail(name, TAIL_BYTES))

    async def size(self, name: str) -> int:
        key = self.key(name)
        return await self.run("looking at", name, lambda engine: engine.size(key))

    async def put(self, name: str, content: memoryview) -> None:
        key = self.key(name)
        await self._run_in_bucket("writing", name, lambda engine: engine.put(key, content, mode="overwrite"))

    def upload(self, name: str, body: Body, stop: Stop) -> None:
        """Do ``Engine.upload``. Called in a thread."""
        engine = LoopCall(self.made).result("connecting", stop)
        engine.upload(self.key(name), body, self.requests, stop)

    async def listing(self, directory: str) -> Listing:
        key = self.key(directory)
        return await self._run_in_bucket("listing", directory, lambda engine: engine.listing(key))

    async def sizes(self, directory: str) -> dict[str, int]:
        """Do ``Store.sizes``. A bucket that does not exist has no directories."""
        key = self.key(directory)
        listing = await self.run("listing", directory, lambda engine: engine.listing(key))
        if not listing.files and not listing.directories:
            raise FileNotFoundError(errno.ENOENT, "nothing there", f"{self.url}/{directory}")
        return {name: info.nbytes for name, info in listing.files.items()}

    async def create(self, name: str, content: bytes | memoryview, *, whole: bool = False) -> bool:
        """Create an object, and return whether this call created it.

        False means that an object with this content exists already. It may come from a request of this call that was
        carried out although its answer was lost. Only the last bytes are compared, which identify the writer of a
        marker. With ``whole``, all of the content is compared.

        Raises ``CheckpointExistsError`` if an object with other content has the name."""
        key = self.key(name)
        end = bytes(content[0 if whole else -4096 :])

        async def create(engine: Engine) -> bool:
            # Three cases. The object was created. It exists with the same end: an earlier request of this call was
            # carried out and its answer was lost, so the writer is this one. It exists with another end: another writer
            # was first.
            if not await _is_refused_as(engine.put(key, memoryview(content), mode="create"), "taken"):
                return True
            if not await _holds(engine, key, end, whole=whole):
                raise CheckpointExistsError(f"{self.url}/{name} exists already: another writer was first")
            return False

        return await self._run_in_bucket("writing", name, create)

    async def version(self, name: str) -> str:
        key = self.key(name)
        return await self.run("looking at", name, lambda engine: engine.version(key))

    async def replace(self, name: str, content: bytes, version: str) -> None:
        """Put ``content``, whose last bytes identify its writer, if the object has this version.

        Raises ``CheckpointExistsError`` if the object has another version or does not exist."""
        key = self.key(name)

        async def replace(engine: Engine) -> None:
            refused = await _is_refused_as(engine.replace(key, memoryview(content), version), "taken", "absent")
            if refused and not await _has_replaced(engine, key, content[-4096:], version):
                raise self.overtaken(name)

        await self.run("writing", name, replace)

    def overtaken(self, name: str) -> CheckpointExistsError:
        return CheckpointExistsError(f"{self.url}/{name} was replaced or removed meanwhile: another writer was first")

    async def compares_versions(self, name: str, version: str) -> bool:
        """Return whether the storage refuses to replace the object ``name``, which does not exist. Storage that ignores
        conditions creates the object, which is then deleted. This is tried once for each engine."""
        engine = await self.made()
        # A server that ignores the condition would carry out the put of every loser. Two saves would then delete the
        # files of each other, and both would report success. So the condition is tried before the first replacement, on
        # an object that does not exist.
        if engine.compares_versions is None:
            key = self.key(name)

            async def refuses(engine: Engine) -> bool:
                try:
                    await engine.replace(key, memoryview(b""), version)
                except Exception as error:
                    failure = failure_kind(error)
                    if failure not in ("taken", "absent") and (failure == "denied" or not is_refused(error)):
                        raise
                    return failure in ("taken", "absent")
                return False

            engine.compares_versions = await self.run("writing", name, refuses)
            if not engine.compares_versions:
                await self.run("deleting", name, lambda engine: engine.delete(key))
        return engine.compares_versions

    async def delete_of(self, target: str, save_id: str, *, unless_committed: bool = False) -> None:
        """Delete the files of a save, with ``unless_committed`` only if there is no marker, which may be its own."""
        # Listed again in this call, and not taken from an earlier one: a save that was taken for dead may have
        # committed since.
        listing = await self.listing(target)
        if unless_committed and MARKER in listing.files:
            return
        found = [file for file in listing.files if id_of(file) == save_id]
        await self.delete(target, found)
        await self.forget(target)

    async def forget(self, target: str) -> None:
        await (await self.made()).forget(self.key(target))

    async def delete(self, target: str, files: Iterable[str]) -> None:
        """Delete these files, first those that readers look for, and the note of a removal last. Of the others many are
        deleted by one request, if the client can."""
        names = [f"{target}/{file}" if target else file for file in files]
        most = (await self.made()).deletes_at_once if names else 1
        for rank in _RANKS:
            some = [name for name in names if _rank(name) == rank]
            for start in range(0, len(some), most):
                keys = [self.key(name) for name in some[start : start + most]]
                await self.run("deleting", some[start], partial(_delete_all, keys=keys))


async def _is_refused_as(request: Awaitable[object], *failures: FailureKind) -> bool:
    """Do ``request``, and return whether its failure is one of ``failures``. Raises every other error.

    What is asked next is asked outside of the ``except`` clause. Otherwise this error would be the context of the next
    one, and the next one would be taken for a refusal of this kind."""
    try:
        await request
    except Exception as error:
        if failure_kind(error) not in failures:
            raise
        return True
    return False


_RANKS = range(3)


def _rank(name: str) -> int:
    """Return when a file is deleted. Without those of rank 0 readers find nothing, and with that of rank 2 the next
    removal finds the rest."""
    file = name.rpartition("/")[2]
    if file == NOTE:
        return 2
    return 0 if file == MARKER or file in READ_FIRST else 1


async def _delete_all(engine: Engine, *, keys: Sequence[str]) -> None:
    await engine.delete_all(keys)


async def _holds(engine: Engine, key: str, end: bytes, *, whole: bool) -> bool:
    try:
        if whole and await engine.size(key) != len(end):
            return False
        return (whole and not end) or (bool(end) and await engine.tail(key, len(end)) == end)
    except Exception as error:
        if failure_kind(error) != "absent":
            raise
    # 409: another request was creating the object, and has failed or not ended.
    raise ConnectionError("another request for the same name was in the way")


async def _has_replaced(engine: Engine, key: str, end: bytes, version: str) -> bool:
    """Return whether the object ends with ``end`` although a request to put it was refused: an earlier request was
    carried out and its answer lost. Raises ``ConnectionError`` if the request should be sent again."""
    try:
        if await engine.tail(key, len(end)) == end:
            return True
        unchanged = await engine.version(key) == version
    except Exception as error:
        if failure_kind(error) == "absent":
            return False
        raise
    if unchanged:  # 409: another request was replacing the object, and has failed or not ended
        raise ConnectionError("another request for the same name was in the way")
    return False


_MOST_LOOKS = 8
_CLOCK = re.compile(r"clock-[0-9a-f]{32}")


async def clock_of(bucket: Bucket) -> datetime | None:
    """Return the time of the storage, which is that of an object that this writes. Objects of earlier calls that were
    cancelled or killed before they deleted theirs are deleted too."""
    name = f"clock-{uuid.uuid4().hex}"  # unique, because each call deletes its object
    await bucket.put(f"{LEASES}/{name}", memoryview(b"now"))
    listing = (await bucket.listing(LEASES)).files
    now = written.modified if (written := listing.get(name)) is not None else None
    old = [
        file
        for file, info in listing.items()
        if file != name and _CLOCK.fullmatch(file) and age_s(now, info.modified) > ABANDONED_AFTER_S
    ]
    await bucket.delete(LEASES, [name, *old])
    return now


def age_s(now: datetime | None, then: datetime | None) -> float:
    if now is None or then is None:
        return 0.0
    return max(0.0, (now.astimezone(UTC) - then.astimezone(UTC)).total_seconds())


async def collect_orphans(bucket: Bucket, target: str, after_s: float) -> list[str]:
    """Delete the files of each save to ``target``, and those of a copy or of an export that did not become complete, if
    none of them was written within ``after_s``. Return the names of the deleted files.

    Does nothing if there is a checkpoint. Then the version of its marker decides which saves can still be committed,
    and a replacement deletes the files of the others."""
    listing = await bucket.listing(target)
    if MARKER in listing.files or NOTE in listing.files:
        return []
    owned: dict[str, list[str]] = {}
    for file in listing.files:
        owner = "" if is_plain_shard(file) else id_of(file)
        if owner is not None:
            owned.setdefault(owner, []).append(file)
    if await look_at(bucket, target, listing) == "leftover":
        owned[""] = [file for file in listing.files if id_of(file) is None]
    if not owned:
        return []
    # By the clock of the storage, which has also dated the files. The clocks of the hosts that wrote them may differ by
    # more than an hour.
    now = await clock_of(bucket)
    collected: list[str] = []
    for files in owned.values():
        if _silence_s(now, (listing.files[file] for file in files)) > after_s:
            await bucket.delete(target, files)
            collected += files
    await bucket.forget(target)
    return collected


def _silence_s(now: datetime | None, files: Iterable[BlobInfo]) -> float:
    """Return the time since the last write to one of these files."""
    return min(age_s(now, info.modified) for info in files)


async def look_at(bucket: Bucket, target: str, listing: Listing | None = None) -> Found:
    """Return what lies at ``target``. The files of saves that have not been committed do not count."""
    for _ in range(_MOST_LOOKS):
        try:
            return await _look_at(bucket, target, listing or await bucket.listing(target))
        except FileNotFoundError:  # another process has replaced or removed it meanwhile
            listing = None
    return "directory"  # it changes as often as it is looked at


async def _look_at(bucket: Bucket, target: str, listing: Listing) -> Found:
    files = listing.files
    if MARKER not in files:
        files = {name: info for name, info in files.items() if id_of(name) is None}
    if not files:
        return "directory" if listing.directories else "empty"
    name = deciding_file(files)
    if name is None:
        return kind_of(files, b"")
    if name == MARKER:
        return kind_of(files, await bucket.tail(f"{target}/{name}", DECIDING_BYTES))
    key, nbytes = bucket.key(f"{target}/{name}"), min(DECIDING_BYTES, files[name].nbytes)
    start = await bucket.run("reading", name, lambda engine: engine.read(key, 0, nbytes)) if nbytes else b""
    return kind_of(files, bytes(start))


async def clear_export(bucket: Bucket, target: str, listing: Listing) -> bool:
    """Delete the export at ``target``, whether it is complete or was left behind by a killed process, so that another
    one can be written. Returns False and does nothing if there is none.

    Of two exports at the same time at most one succeeds, because each creates its files. Raises
    ``CheckpointExistsError`` if the storage cannot create objects conditionally, or if something else is there."""
    files = listing.files
    found = await look_at(bucket, target, listing)
    if listing.directories or found not in ("export", "leftover"):
        return False
    if not bucket.capabilities.create_only:
        raise CheckpointExistsError(
            f"{bucket.url}/{target} has an export, and {bucket.engine.name} creates no object conditionally, so it was "
            "not replaced: delete it first"
        )
    if found == "leftover" and _silence_s(await clock_of(bucket), files.values()) <= ABANDONED_AFTER_S:
        return False
    await bucket.delete(target, export_files(files))
    await bucket.forget(target)
    return True
