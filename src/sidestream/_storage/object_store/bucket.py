"""The objects below one root: each request with its retries, on the loop of the storage clients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from ..._runtime.threads import Deadline
from ...errors import Conflict
from ...options import StorePolicy
from ..clients.engine import Engine, Listing
from ..clients.io_loop import on_io_loop
from ..clients.requests import Requests, Taken, fate_of, is_refused
from .names import id_of

__all__ = ["Bucket"]

_LOOK_S = 15.0  # for uploads that may have been left open, at most: nobody shall wait much longer for what is rare


class Bucket:
    """``root`` is bucket and prefix; ``url`` is what messages call it. Names are relative to the root."""

    def __init__(self, engine: Engine, root: str, url: str, policy: StorePolicy) -> None:
        self.engine = engine
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

    async def tail(self, name: str, nbytes: int, deadline: Deadline) -> bytes:
        key = self.key(name)

        async def get() -> bytes:
            return await self.requests.run("reading", name, lambda: self.engine.tail(key, nbytes), deadline)

        return await on_io_loop(get, f"reading {name}", deadline=deadline)

    async def put(self, key: str, content: memoryview, deadline: Deadline) -> None:
        async def put() -> None:
            await self.engine.put(key, content, create=False)

        await self.requests.run("writing", key.removeprefix(f"{self.root}/"), put, deadline)

    async def listing(self, directory: str, deadline: Deadline) -> Listing:
        key = self.key(directory)
        return await self.requests.run("listing", directory, lambda: self.engine.listing(key), deadline)

    async def create(self, name: str, content: bytes | memoryview, deadline: Deadline, *, whole: bool = False) -> bool:
        """Whether this created it. False: its content is there already, perhaps from a request that was carried out
        though its answer was lost. What names its writer at its end is compared by that, all else as a ``whole``.

        Raises ``Conflict`` if the name is taken by another content."""
        key = self.key(name)
        end = bytes(content[0 if whole else -4096 :])

        async def create() -> bool:
            try:
                await self.engine.put(key, memoryview(content), create=True)
            except Exception as error:
                if fate_of(error) != "taken":
                    raise
                if not await self._holds(key, end, whole=whole):
                    raise Taken(name) from error
                return False
            return True

        try:
            return await self.requests.run("writing", name, create, deadline)
        except Taken as taken:
            raise Conflict(f"{self.url}/{name} exists already: another writer was first") from taken

    async def _holds(self, key: str, end: bytes, *, whole: bool) -> bool:
        try:
            if whole and await self.engine.size(key) != len(end):
                return False
            return (whole and not end) or (bool(end) and await self.engine.tail(key, len(end)) == end)
        except Exception as error:
            if fate_of(error) == "absent":  # 409: somebody else was creating it at that moment, and did not (yet)
                raise ConnectionError("another request for the same name was in the way") from error
            raise

    async def delete_of(self, target: str, save_id: str, deadline: Deadline) -> None:
        listing = await self.listing(target, deadline)
        found = [file for file in listing.files if id_of(file) == save_id]
        try:
            await self.delete(target, found, deadline)
        finally:
            await self.abort_uploads(target, save_id, deadline)
        await self.engine.forget(self.key(target))

    async def abort_uploads(self, target: str, save_id: str, deadline: Deadline) -> None:
        uploads = await self.uploads(target, deadline)
        await self.abort([upload for upload in uploads if f"-{save_id}" in upload], target, deadline)

    async def abort(self, uploads: Sequence[str], name: str, deadline: Deadline) -> None:
        """End these uploads; ``name`` is what messages call them."""
        if uploads:
            await self.requests.run("aborting", name, lambda: self.engine.abort_uploads(uploads), deadline)

    async def delete(self, target: str, files: Iterable[str], deadline: Deadline) -> None:
        for file in files:
            name = f"{target}/{file}" if target else file
            key = self.key(name)

            async def delete(key: str = key) -> None:
                await self.engine.delete([key])

            await self.requests.run("deleting", name, delete, deadline)

    async def uploads(self, target: str, deadline: Deadline) -> dict[str, datetime | None]:
        key = self.key(target) + "/"

        async def ask() -> dict[str, datetime | None]:
            try:
                return dict(await self.engine.open_uploads(key))
            except Exception as error:
                if is_refused(error):  # a right that a writer need not have, or a request that not all servers know
                    return {}
                raise

        soon = Deadline.after(min(_LOOK_S, deadline.remaining_s()))
        return await self.requests.run("listing the uploads of", target, ask, soon)
