"""The objects below one root: each request with its retries, on the loop of the storage clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from ..._runtime.threads import Deadline, Stop, current_deadline, time_limit
from ...errors import CheckpointExistsError
from ...options import Listing, StorePolicy
from ..bodies import Body
from ..clients.engine import Engine, LateEngine
from ..clients.io_loop import LoopCall, on_io_loop
from ..clients.requests import Requests, Taken, fate_of, is_refused
from .names import id_of

__all__ = ["Bucket"]

T = TypeVar("T")

_LOOK_S = 15.0  # for uploads that may have been left open, at most: nobody shall wait much longer for what is rare


class Bucket:
    """``root`` is bucket and prefix; ``url`` is what messages call it. Names are relative to the root."""

    def __init__(self, engine: Engine | LateEngine, root: str, url: str, policy: StorePolicy) -> None:
        self.engine = engine
        self.capabilities = engine.capabilities
        self.root = root.rstrip("/")
        self.url = url
        self.policy = policy
        self.requests = Requests(url, policy)

    def shown(self, key: str) -> str:
        return f"{self.url}/{key.removeprefix(f'{self.root}/')}"

    def key(self, name: str) -> str:
        """``.`` is the root itself."""
        name = name.removeprefix("./") if name != "." else ""
        return f"{self.root}/{name}".rstrip("/") if self.root else name

    async def made(self) -> Engine:
        return await self.engine.get() if isinstance(self.engine, LateEngine) else self.engine

    async def run(self, doing: str, name: str, request: Callable[[Engine], Awaitable[T]]) -> T:
        """Send ``request``, again where that may help: see ``Requests.run``."""

        async def send() -> T:
            return await request(await self.made())

        return await self.requests.run(doing, name, send)

    async def tail(self, name: str, nbytes: int) -> bytes:
        key = self.key(name)

        async def get() -> bytes:
            return await self.run("reading", name, lambda engine: engine.tail(key, nbytes))

        return await on_io_loop(get, f"reading {name}")

    async def size(self, name: str) -> int:
        key = self.key(name)
        return await self.run("looking at", name, lambda engine: engine.size(key))

    async def put(self, key: str, content: memoryview) -> None:
        name = key.removeprefix(f"{self.root}/")
        await self.run("writing", name, lambda engine: engine.put(key, content, mode="overwrite"))

    def upload(self, key: str, body: Body, stop: Stop) -> None:
        """In a thread: see ``Engine.upload``."""
        engine = LoopCall(self.made).result("connecting", stop)
        engine.upload(key, body, self.requests, stop)

    async def listing(self, directory: str) -> Listing:
        key = self.key(directory)
        return await self.run("listing", directory, lambda engine: engine.listing(key))

    async def create(self, name: str, content: bytes | memoryview, *, whole: bool = False) -> bool:
        """Whether this created it. False: its content is there already, perhaps from a request that was carried out
        though its answer was lost. What names its writer at its end is compared by that, all else as a ``whole``.

        Raises ``CheckpointExistsError`` if the name is taken by another content."""
        key = self.key(name)
        end = bytes(content[0 if whole else -4096 :])

        async def create(engine: Engine) -> bool:
            try:
                await engine.put(key, memoryview(content), mode="create")
            except Exception as error:
                if fate_of(error) != "taken":
                    raise
                if not await _holds(engine, key, end, whole=whole):
                    raise Taken(name) from error
                return False
            return True

        try:
            return await self.run("writing", name, create)
        except Taken as taken:
            raise CheckpointExistsError(f"{self.url}/{name} exists already: another writer was first") from taken

    async def version(self, name: str) -> str:
        key = self.key(name)
        return await self.run("looking at", name, lambda engine: engine.version(key))

    async def replace(self, name: str, content: bytes, version: str) -> None:
        """Replace the object by ``content`` if the object has this version. The end of ``content`` names its writer.

        Raises ``CheckpointExistsError`` if it has another one, or is gone."""
        key = self.key(name)

        async def replace(engine: Engine) -> None:
            try:
                await engine.replace(key, memoryview(content), version)
            except Exception as error:
                if fate_of(error) not in ("taken", "absent"):
                    raise
                if not await _has_replaced(engine, key, content[-4096:], version):
                    raise Taken(name) from error

        try:
            await self.run("writing", name, replace)
        except Taken as taken:
            raise CheckpointExistsError(
                f"{self.url}/{name} was replaced or removed meanwhile: another writer was first"
            ) from taken

    async def compares_versions(self, name: str, version: str) -> bool:
        """Return whether the storage refuses to replace ``name``, which is not there. One that knows no conditions
        creates it, and is asked once."""
        engine = await self.made()
        if engine.compares_versions is None:
            key = self.key(name)

            async def refuses(engine: Engine) -> bool:
                try:
                    await engine.replace(key, memoryview(b""), version)
                except Exception as error:
                    fate = fate_of(error)
                    if fate not in ("taken", "absent") and (fate == "denied" or not is_refused(error)):
                        raise
                    return fate in ("taken", "absent")
                return False

            engine.compares_versions = await self.run("writing", name, refuses)
            if not engine.compares_versions:
                await self.run("deleting", name, lambda engine: engine.delete(key))
        return engine.compares_versions

    async def delete_of(self, target: str, save_id: str) -> None:
        listing = await self.listing(target)
        found = [file for file in listing.files if id_of(file) == save_id]
        try:
            await self.delete(target, found)
        finally:
            await self.abort_uploads(target, save_id)
        await self.forget(target)

    async def forget(self, target: str) -> None:
        await (await self.made()).forget(self.key(target))

    async def abort_uploads(self, target: str, save_id: str) -> None:
        uploads = await self.uploads(target)
        await self.abort([upload for upload in uploads if f"-{save_id}" in upload], target)

    async def abort(self, uploads: Sequence[str], name: str) -> None:
        """End these uploads; ``name`` is what messages call them."""
        if uploads:
            await self.run("aborting", name, lambda engine: engine.abort_uploads(uploads))

    async def delete(self, target: str, files: Iterable[str]) -> None:
        for file in files:
            name = f"{target}/{file}" if target else file
            key = self.key(name)

            async def delete(engine: Engine, key: str = key) -> None:
                await engine.delete(key)

            await self.run("deleting", name, delete)

    async def uploads(self, target: str) -> dict[str, datetime | None]:
        key = self.key(target) + "/"

        async def ask(engine: Engine) -> dict[str, datetime | None]:
            try:
                return dict(await engine.open_uploads(key))
            except Exception as error:
                if is_refused(error):  # a right that a writer need not have, or a request that not all servers know
                    return {}
                raise

        with time_limit(Deadline.after(min(_LOOK_S, current_deadline().remaining_s()))):
            return await self.run("listing the uploads of", target, ask)


async def _holds(engine: Engine, key: str, end: bytes, *, whole: bool) -> bool:
    try:
        if whole and await engine.size(key) != len(end):
            return False
        return (whole and not end) or (bool(end) and await engine.tail(key, len(end)) == end)
    except Exception as error:
        if fate_of(error) == "absent":  # 409: somebody else was creating it at that moment, and did not (yet)
            raise ConnectionError("another request for the same name was in the way") from error
        raise


async def _has_replaced(engine: Engine, key: str, end: bytes, version: str) -> bool:
    """After a refusal: whether the object is ours, put by a request that was carried out though its answer was lost."""
    try:
        if await engine.tail(key, len(end)) == end:
            return True
        unchanged = await engine.version(key) == version
    except Exception as error:
        if fate_of(error) == "absent":
            return False
        raise
    if unchanged:  # 409: somebody else was replacing it at that moment, and did not (yet)
        raise ConnectionError("another request for the same name was in the way")
    return False
