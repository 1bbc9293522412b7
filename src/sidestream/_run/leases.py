"""Leases: small files that say "somebody uses this step", so that nobody deletes it meanwhile.

``.leases/<directory>.<kind><seconds>.<nonce>``. The name says everything, so one listing is enough; the content (host,
process) is for people. A lease that is older than its seconds, by the storage's clock, has expired: its holder is dead.

Readers and deleters meet here. A reader puts its lease and then looks for a deleter's; a deleter puts its own and then
looks for others'. Whoever comes second sees the first, and gives way; if both see each other, both do.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal

from .._runtime.abandoned import RegisteredOperation, register
from .._runtime.tasks import create_owned_task, run_shielded
from .._runtime.threads import Deadline, time_limit
from .._storage import LEASES, BytesBody, Store
from ..errors import AccessDeniedError, NoSpaceError, SidestreamError

__all__ = ["Lease", "Leases", "Seen", "parse_lease"]

Kind = Literal["read", "save", "delete"]

_DIRECTORY = LEASES
_NAME = re.compile(r"(?P<directory>.+)\.(?P<kind>read|save|delete)(?P<ttl>[0-9]{1,9})\.[0-9a-f]{32}")
_RENEWALS = 4  # within the time that a lease lasts
_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Somebody's lease: it lasts for ``ttl_s`` from when it was put, ``age_s`` ago."""

    name: str
    directory: str
    kind: Kind
    ttl_s: float
    age_s: float

    @property
    def expired(self) -> bool:
        return self.age_s > self.ttl_s


def parse_lease(name: str, age_s: float) -> Seen | None:
    """None for a file that is no lease."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return Seen(name, match["directory"], match["kind"], float(match["ttl"]), age_s)  # type: ignore[arg-type]


class Leases:
    """The leases of a run, and those among them that this process holds. Failures to renew or to give back are no
    reason to stop: they stand in ``trouble``, and a lease ends by itself."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._first_seen: dict[str, float] = {}
        self.trouble: dict[str, str] = {}

    async def take(self, directory: str, kind: Kind) -> Lease:
        """Put a lease, and keep it alive until it is released. Raises what the storage raises, ``AccessDeniedError``
        where this process may not write. A cancel leaves at most a file that expires."""
        lease = Lease(self, self._store, directory, kind, self._ttl_s / 10 if kind == "delete" else self._ttl_s)
        await lease.put()
        return lease

    def announce(self, directory: str, kind: Kind) -> Lease:
        """A lease that is put when its holder has been busy for a while: until then it needs none."""
        lease = Lease(self, self._store, directory, kind, self._ttl_s)
        lease.renew()
        return lease

    async def try_reading(self, directory: str) -> Lease | None:
        """``take`` a reader's lease; None where this process may not write or the disk is full, which is told by
        whoever reads."""
        try:
            return await self.take(directory, "read")
        except (AccessDeniedError, NoSpaceError):  # reading has to work there too
            return None

    async def seen(self) -> list[Seen]:
        """Every lease there is, our own included."""
        ages = await self._store.ages(_DIRECTORY)
        found = [seen for name, age_s in ages.items() if (seen := parse_lease(name, age_s)) is not None]
        now = time.monotonic()
        self._first_seen = {seen.name: self._first_seen.get(seen.name, now) for seen in found}
        return found

    def dead(self, seen: Seen) -> bool:
        """Whether its holder is gone: it has expired by the storage's clock, and this process has seen it unchanged for
        longer than a living holder takes to renew it. A clock that was set forward makes the first true at once."""
        waited_s = time.monotonic() - self._first_seen.get(seen.name, time.monotonic())
        return seen.expired and waited_s >= 2 * seen.ttl_s / _RENEWALS

    async def forget(self, dead: Iterable[Seen]) -> None:
        """Remove leases of holders that are gone."""
        names = [f"{_DIRECTORY}/{seen.name}" for seen in dead]
        if names:
            await self._store.remove(names)


class Lease:
    """One lease that this process holds."""

    def __init__(self, leases: Leases, store: Store, directory: str, kind: Kind, ttl_s: float) -> None:
        self.directory = directory
        self._leases = leases
        self._store = store
        self._kind = kind
        self._ttl_s = ttl_s
        self._files: list[str] = []
        self._put_at = time.monotonic()
        self._renewing: asyncio.Task[None] | None = None
        self._registration: RegisteredOperation | None = None

    @property
    def doubtful(self) -> bool:
        """Whether so much time has passed since it was renewed that others may soon take its holder for dead."""
        return time.monotonic() - self._put_at > self._ttl_s / 2

    async def put(self) -> None:
        try:
            await self._put_one()
        except BaseException:
            await self.release()
            raise
        self.renew()
        self._registration = register(self)

    def renew(self) -> None:
        """Put it again and again, the first time when a part of its time is over."""
        self._renewing = create_owned_task(self._renew(), f"sidestream lease {self.directory}")

    def owns(self, seen: Seen) -> bool:
        return f"{_DIRECTORY}/{seen.name}" in self._files

    async def release(self) -> None:
        """Give it back, cancelled or not. Never raises what the storage raises: what is left expires."""
        self.abandon()
        if self._registration is not None:
            self._registration.end()
        await run_shielded(self._remove)

    # --- after the end of the loop that renews the lease ---

    @property
    def what(self) -> str:
        return f"a lease on {self.directory}"

    @property
    def expires_at(self) -> float:
        return self._put_at + self._ttl_s

    def abandon(self) -> None:
        """Stop renewing the lease."""
        if self._renewing is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._renewing.cancel()

    def leave(self, *, stuck: bool) -> None:
        self.drop()

    def drop(self) -> None:
        """Release the lease as far as possible; files that cannot be removed expire. Called in a thread."""
        from .._storage.clients.io_loop import LoopCall  # imports fsspec

        names, self._files = self._files, []
        if names:
            with suppress(SidestreamError), time_limit(Deadline.after(_CALL_S)):
                LoopCall(partial(self._store.remove, names)).result("releasing a lease")

    async def _put_one(self) -> None:
        name = f"{_DIRECTORY}/{self.directory}.{self._kind}{max(1, round(self._ttl_s))}.{uuid.uuid4().hex}"
        self._files.append(name)  # before it is there: a cancel may come when it is
        put_at = time.monotonic()
        await self._store.put(name, BytesBody(_content(self._kind)), durability="flush")
        self._put_at = put_at

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS)
            try:
                with time_limit(Deadline.after(_CALL_S)):
                    await self._put_one()
                await self._drop(self._files[:-1])
            except SidestreamError as error:
                self._leases.trouble[self.directory] = f"the lease could not be renewed: {error}"

    async def _remove(self) -> None:
        if self._renewing is not None:
            await asyncio.wait([self._renewing])
            self._renewing = None  # the traceback of the task refers to this lease
        try:
            await self._drop(list(self._files))
        except SidestreamError as error:
            self._leases.trouble[self.directory] = f"the lease could not be given back: {error}"

    async def _drop(self, names: list[str]) -> None:
        if names:
            with time_limit(Deadline.after(_CALL_S)):
                await self._store.remove(names)
        self._files = [name for name in self._files if name not in names]
        self._leases.trouble.pop(self.directory, None)


def _content(kind: Kind) -> bytes:
    holder: Mapping[str, object] = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps(holder).encode() + b"\n"
