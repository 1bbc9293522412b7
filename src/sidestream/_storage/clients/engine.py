"""What a client of object storage has to be able to do, so that ``ObjectStore`` can keep the contract of a store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from ..._runtime.threads import Deadline, Stop
from ..bodies import Body
from .requests import Requests

__all__ = ["Creation", "Engine", "Listing", "ObjectInfo"]

Creation = Literal["conditional", "checked", "none"]
"""How ``put(create=True)`` keeps its promise: the storage refuses an existing name; the client looks first, so that two
writers may both succeed; or nothing can be written at all."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """``modified`` is by the storage's clock, and None where it does not tell."""

    nbytes: int
    modified: datetime | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What is directly below a prefix: objects, and the next components of longer names."""

    files: Mapping[str, ObjectInfo]
    directories: Collection[str]


class Engine(Protocol):
    """Names are whole keys (or paths), without the protocol. The coroutines run on fsspec's loop; they raise what the
    client raises, may be called again after a failure, and may be cancelled: nothing of theirs is at work afterwards.
    """

    name: str

    @property
    def creation(self) -> Creation: ...

    @property
    def lists(self) -> bool:
        """Whether there are listings to be had (web servers have none)."""

    async def put(self, key: str, content: memoryview, *, create: bool) -> None:
        """One request. With ``create`` it fails if the name is taken."""

    def upload(self, key: str, body: Body, requests: Requests, *, stop: Stop, deadline: Deadline) -> None:
        """In the calling thread: send a large object in parts, while its content is still being staged. Parts are
        released as they are accepted. When this raises, nothing of the object is visible; an upload is left open only
        where the storage did not answer, and then ``open_uploads`` has it."""

    async def read(self, key: str, start: int, end: int) -> memoryview:
        """Bytes ``start`` to ``end``; fewer only if the object ends before."""

    async def tail(self, key: str, nbytes: int) -> bytes: ...

    async def listing(self, prefix: str) -> Listing:
        """Below ``prefix/``, as it is now: never from a cache. Nothing, if there is nothing."""

    async def size(self, key: str) -> int: ...

    async def delete(self, keys: Collection[str]) -> None:
        """What is not there is passed over."""

    async def forget(self, prefix: str) -> None:
        """Remove the empty directory of a storage that has directories."""

    async def open_uploads(self, prefix: str) -> Mapping[str, datetime | None]:
        """Uploads below ``prefix`` that were begun and neither completed nor aborted, as ``key?upload=id``, with the
        time at which they began. Empty where the storage has none, or does not tell."""

    async def checksum(self, key: str) -> str | None:
        """CRC-64/NVME of the whole object as the storage has it, in base64; None where it has none."""

    async def abort_uploads(self, uploads: Collection[str]) -> None: ...
