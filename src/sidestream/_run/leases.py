"""Leases: small files that prevent the deletion of a step while a process uses it.

The name of a lease is ``.leases/<directory>.<kind><seconds>.<nonce>``. It has all the facts, so one listing reads all
leases. The content, a host and a process, helps users to find the holder. A lease that is older than its seconds, by
the storage's clock, has expired: then its holder is dead.

A reader puts its lease and then looks for leases of deleters. A deleter puts its lease and then looks for leases of
readers. So the second of them sees the lease of the first and gives up. If both see each other, both give up.
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
from typing import Literal

from .._runtime.caller import loop_of_caller_ended
from .._runtime.tasks import create_owned_task, run_shielded
from .._runtime.threads import Deadline, time_limit
from .._storage import LEASES, Store
from ..errors import AccessDeniedError, NoSpaceError, SidestreamError

Kind = Literal["read", "save", "delete"]

_NAME = re.compile(r"(?P<directory>.+)\.(?P<kind>read|save|delete)(?P<ttl>[0-9]{1,10})\.[0-9a-f]{32}")
_RENEWALS = 4  # per lifetime of a lease
_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class ListedLease:
    """A lease of any process, as a listing shows it. It was put ``age_s`` ago and expires at the age of ``ttl_s``."""

    name: str
    directory: str
    kind: Kind
    ttl_s: float
    age_s: float

    @property
    def expired(self) -> bool:
        return self.age_s > self.ttl_s


def parse_lease(name: str, age_s: float) -> ListedLease | None:
    """Return the lease with this file name; None if the file is not a lease."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return ListedLease(name, match["directory"], match["kind"], float(match["ttl"]), age_s)  # type: ignore[arg-type]


class Leases:
    """The leases of a run, and operations on those that this process holds. A failure to renew or to release a lease
    raises no error, because leases expire. It is recorded in ``trouble``."""

    def __init__(self, store: Store, ttl_s: float) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._first_seen: dict[str, float] = {}
        self.trouble: dict[str, str] = {}

    async def take(self, directory: str, kind: Kind, *, of_caller: bool = False) -> Lease:
        """Put a lease, and renew it until it is released; with ``of_caller`` also until the loop of the caller ends.

        Raises what the storage raises, such as ``AccessDeniedError`` if this process may not write. A cancel leaves at
        most a file that expires."""
        lease = Lease(self, directory, kind, self._ttl_s / 10 if kind == "delete" else self._ttl_s, of_caller)
        await lease.put()
        return lease

    def announce(self, directory: str) -> Lease:
        """Return a lease whose file is only put after the first renewal interval. Before that its holder needs no
        lease, because its attempt is too new to count as abandoned."""
        lease = Lease(self, directory, "save", self._ttl_s)
        lease.renew()
        return lease

    async def try_reading(self, directory: str, *, of_caller: bool = False) -> Lease | None:
        """Put a reader's lease and return it. Return None if this process may not write or the disk is full; the report
        of the load shows that there was no lease."""
        try:
            return await self.take(directory, "read", of_caller=of_caller)
        except (AccessDeniedError, NoSpaceError):  # reading must not depend on writing
            return None

    async def seen(self) -> list[ListedLease]:
        """Return all leases of the run, including those of this process."""
        ages = await self._store.ages(LEASES)
        found = [seen for name, age_s in ages.items() if (seen := parse_lease(name, age_s)) is not None]
        now = time.monotonic()
        self._first_seen = {seen.name: self._first_seen.get(seen.name, now) for seen in found}
        return found

    def dead(self, seen: ListedLease) -> bool:
        """Return whether the holder of the lease is dead.

        The lease has to be expired by the storage's clock. This process must also have seen it for longer than a living
        holder takes to renew it, because all leases look expired when the storage's clock is set forward."""
        waited_s = time.monotonic() - self._first_seen.get(seen.name, time.monotonic())
        return seen.expired and waited_s >= 2 * seen.ttl_s / _RENEWALS

    async def forget(self, dead: Iterable[ListedLease]) -> None:
        """Remove the leases of dead holders."""
        names = [f"{LEASES}/{seen.name}" for seen in dead]
        if names:
            await self._store.remove(names)


class Lease:
    """One lease that this process holds."""

    def __init__(self, leases: Leases, directory: str, kind: Kind, ttl_s: float, of_caller: bool = False) -> None:
        self.directory = directory
        self._leases = leases
        self._store = leases._store
        self._kind = kind
        self._ttl_s = ttl_s
        self._of_caller = of_caller
        self._files: list[str] = []
        self._put_at = time.monotonic()
        self._renewing: asyncio.Task[None] | None = None

    @property
    def doubtful(self) -> bool:
        """Whether the last renewal was so long ago that other processes may soon take the holder for dead."""
        return time.monotonic() - self._put_at > self._ttl_s / 2

    async def put(self) -> None:
        try:
            await self._put_one()
        except BaseException:
            await self.release()
            raise
        self.renew()

    def renew(self) -> None:
        """Start the task that renews the lease, first after one renewal interval."""
        self._renewing = create_owned_task(self._renew(), f"sidestream lease {self.directory}")

    async def release(self) -> None:
        """Release the lease. A cancel does not interrupt this. Never raises what the storage raises, because files that
        are left behind expire."""
        if self._renewing is not None:
            self._renewing.cancel()
        await run_shielded(self._remove)

    async def _put_one(self) -> None:
        name = f"{LEASES}/{self.directory}.{self._kind}{max(1, round(self._ttl_s))}.{uuid.uuid4().hex}"
        self._files.append(name)  # before the put: after a cancel the file may exist
        put_at = time.monotonic()
        await self._store.put(name, _content(self._kind), durability="flush")
        # The time before the put: how long the put took must not make the lease look younger.
        self._put_at = put_at

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / _RENEWALS)
            # The lease of a ``reading()`` whose loop has ended, which nothing will release.
            if self._of_caller and loop_of_caller_ended():
                with suppress(SidestreamError, OSError):  # files that cannot be removed expire
                    await self._drop(list(self._files))
                return
            try:
                with time_limit(Deadline.after(_CALL_S)):
                    await self._put_one()
                # After the new one is there, so that there is no moment without a lease. A failure leaves both, and
                # they expire.
                await self._drop(self._files[:-1])
            except (SidestreamError, OSError) as error:  # OSError: the answer was that there is no such object
                self._leases.trouble[self.directory] = f"the lease could not be renewed: {error}"

    async def _remove(self) -> None:
        if self._renewing is not None:
            # The task first: it may be putting another file, which has to be removed too.
            await asyncio.wait([self._renewing])
            self._renewing = None  # breaks a reference cycle through the traceback of the task
        try:
            await self._drop(list(self._files))
        except (SidestreamError, OSError) as error:
            self._leases.trouble[self.directory] = f"the lease could not be released: {error}"

    async def _drop(self, names: list[str]) -> None:
        if names:
            with time_limit(Deadline.after(_CALL_S)):
                await self._store.remove(names)
        self._files = [name for name in self._files if name not in names]
        self._leases.trouble.pop(self.directory, None)


def _content(kind: Kind) -> bytes:
    holder: Mapping[str, object] = {"kind": kind, "host": socket.gethostname(), "pid": os.getpid()}
    return json.dumps(holder).encode() + b"\n"
