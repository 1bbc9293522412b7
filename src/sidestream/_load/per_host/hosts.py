"""What several ranks of one machine need of a file is read by one of them, once, and copied by the others.

Each of them tells what it needs, in memory that the others open; all make the same plan of it. Its windows are read in
turns into a ring of slots that each rank has, and every rank goes through them in the same order. A slot is used again
when all who need its window have copied it: so what is smallest in that order can always go on, and nothing waits in a
circle. Who dies meanwhile ends the load for all, by the connections of the ranks.
"""

from __future__ import annotations

import asyncio
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from ..._format.records import Manifest
from ..._group import Operation, this_process
from ..._runtime.tasks import first_error
from ..._runtime.threads import Deadline, io_threads
from ..._storage import Location, ReadRange, Store
from ...events import ReadAlone, emit
from ...options import PerHost
from .machines import Told, all_or_none, by_machine, source_of
from .neighbours import Mail, Pages, open_pages
from .sharing import Piece, Slice, Window, pack, plan_windows, slices, unpack

__all__ = ["HostReads"]

_READY, _DONE = 1, 2
_PAGE = 4096
_MOST_WINDOW_BYTES = 8 << 20
_SLOTS = 4
_IN_FLIGHT = 4
_NOT_OPENED = "the memory of one process cannot be opened by another one"


@dataclass(frozen=True, slots=True)
class _Ring:
    """The slots that each rank has, with so many ranks on the machine."""

    slots: int
    window_bytes: int

    @classmethod
    def of(cls, choice: PerHost, ranks: int) -> _Ring:
        share = choice.memory_bytes // ranks
        window = max(_PAGE, min(_MOST_WINDOW_BYTES, share // _SLOTS) // _PAGE * _PAGE)
        return cls(max(1, share // window), window)

    @property
    def nbytes(self) -> int:
        return self.slots * self.window_bytes


@dataclass(frozen=True, slots=True)
class _Plan:
    """``mine``: the numbers of the windows that this rank reads. ``taken``: those that it takes something of, and
    what. ``rest``: the pieces that no other rank needs anything of."""

    windows: Sequence[Window]
    mine: Sequence[int]
    taken: Sequence[tuple[int, Sequence[Slice]]]
    rest: Sequence[Piece]


class HostReads:
    """The reads of one load, which is ``operation``. ``close`` it when all ranks have come through it, or it failed."""

    def __init__(self, operation: Operation, location: Location, manifest: Manifest, choice: PerHost) -> None:
        self._operation = operation
        self._location = location
        self._manifest = manifest
        self._choice = choice
        self._rounds = count(1)
        self._round: _Round | None = None

    async def read(self, directory: str, pieces: Sequence[Piece], delivered: Callable[[int], None]) -> Sequence[Piece]:
        """See ``SharedReads``. Raises ``Stopped``, and what the store and the pieces raise."""
        operation, threads = self._operation, io_threads()
        pieces, raw = await threads.run(_by_place, pieces)
        current = _Round(pieces, self._choice, operation.deadline)
        before, self._round = self._round, current
        name = f"{next(self._rounds)}"
        source = await threads.run(source_of, self._location, self._manifest, operation)
        introduced = json.dumps(current.introduce(operation.rank, source, raw)).encode()
        answer = await operation.aexchange(f"share {name}", introduced, by_machine(operation.deadline))
        hosts: list[Told] = json.loads(answer)
        if before is not None:
            before.close()  # everybody has come here, and is through it
        opened = await self._agree(f"open {name}", hosts, await current.propose(hosts, operation.rank))
        why = current.open(opened["host"]) if opened["why"] is None else opened["why"]
        # Only when all have opened everything may one of them let go of anything, by failing.
        mapped = await self._agree(f"map {name}", hosts, {"why": why})
        if mapped["why"] is not None:
            self.close()
            if mapped["why"]:
                emit(ReadAlone(self._location.url, mapped["why"]))
            return pieces
        await current.go(self._location.store, directory, delivered)
        return current.rest

    async def _agree(self, step: str, hosts: Sequence[Told], proposal: Told) -> Told:
        operation = self._operation
        part = json.dumps({"host": hosts[0]["rank"], **proposal}).encode()
        answer: Told = json.loads(await operation.aexchange(step, part, all_or_none(operation.deadline)))
        return answer

    def close(self) -> None:
        current, self._round = self._round, None
        if current is not None:
            current.close()


def _by_place(pieces: Sequence[Piece]) -> tuple[Sequence[Piece], bytes]:
    ordered = sorted(pieces, key=lambda one: one.span)
    return ordered, pack([one.span for one in ordered])


@dataclass(slots=True)
class _Copying:
    """A window that stands in its slot until all of ``users`` have copied it."""

    users: set[int]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class _Round:
    """One ``read``, as far as this rank has to do with it. ``me``: its place among the ranks of the machine."""

    def __init__(self, pieces: Sequence[Piece], choice: PerHost, deadline: Deadline) -> None:
        self._pieces = pieces
        self._choice = choice
        self._deadline = deadline
        self._me = 0
        self._needs: Pages | None = None
        self._mail: Mail | None = None
        self._own: Pages | None = None
        self._ring = _Ring(1, _PAGE)
        self._rings: list[mmap.mmap] = []
        self._told: Sequence[Told] = ()
        self._plan: _Plan | None = None
        self._ready: dict[int, asyncio.Event] = {}
        self._copying: dict[int, _Copying] = {}

    @property
    def rest(self) -> Sequence[Piece]:
        assert self._plan is not None
        return self._plan.rest

    # --- to come together ---

    def introduce(self, rank: int, source: str, raw: bytes) -> dict[str, Any]:
        """What the others of this machine have to know of this rank, which reads from ``source``."""
        told: dict[str, Any] = {"rank": rank, **this_process(), "source": source, "why": None}
        if not told["scope"]:
            return {**told, "why": "processes of one machine share memory on Linux only"}
        try:
            self._needs = Pages(len(raw))
            self._needs.memory[:] = raw
            self._mail = Mail(self._heard)
        except (OSError, AttributeError, NotImplementedError) as error:  # an older C library, another event loop
            return {**told, "why": f"this process cannot share memory: {error}"}
        return {**told, "needs": self._needs.address, "mail": self._mail.address}

    async def propose(self, hosts: Sequence[Told], rank: int) -> dict[str, Any]:
        """Its part in what they do: a ring to read into, or why not; empty if there is nobody else."""
        whys = [one["why"] for one in hosts if one["why"] is not None]
        if whys or len(hosts) == 1:
            return {"why": max(whys, default="")}
        self._told = hosts
        self._me = [one["rank"] for one in hosts].index(rank)
        self._ring = _Ring.of(self._choice, len(hosts))
        try:
            for place, one in enumerate(hosts):
                if place != self._me:
                    assert self._mail is not None
                    self._mail.open(place, one["pid"], one["mail"])
            needs = [open_pages(one["pid"], one["needs"]) for one in hosts]
            self._own = Pages(self._ring.nbytes)
        except OSError as error:
            return {"why": f"{_NOT_OPENED}: {error}"}
        self._plan = await io_threads().run(self._made, needs)
        return {"why": None, "ring": self._own.address}

    def _made(self, needs: Sequence[mmap.mmap]) -> _Plan:
        windows = plan_windows([unpack(bytes(one)) for one in needs], self._ring.window_bytes)
        taken = slices([one.span for one in self._pieces], windows)
        shared = {one.piece for _, found in taken for one in found}
        rest = [piece for number, piece in enumerate(self._pieces) if number not in shared]
        mine = [number for number, window in enumerate(windows) if window.reader == self._me]
        return _Plan(windows, mine, taken, rest)

    def open(self, proposals: Sequence[Told]) -> str | None:
        """Every ring; or why not."""
        assert self._own is not None
        try:
            for place, one in enumerate(proposals):
                own = place == self._me
                self._rings.append(self._own.memory if own else open_pages(self._told[place]["pid"], one["ring"]))
        except OSError as error:
            return f"{_NOT_OPENED}: {error}"
        return None

    def close(self) -> None:
        for pages in (self._needs, self._own):
            if pages is not None:
                pages.close()
        mail, self._mail = self._mail, None
        if mail is not None:
            mail.close()
        self._rings.clear()

    # --- to read ---

    async def go(self, store: Store, directory: str, delivered: Callable[[int], None]) -> None:
        assert self._plan is not None
        queue = iter(self._plan.mine)
        try:
            async with asyncio.timeout(self._deadline.remaining_s()), asyncio.TaskGroup() as group:
                for _ in range(min(self._ring.slots, _IN_FLIGHT)):
                    group.create_task(self._fill(queue, store, directory))
                group.create_task(self._take(delivered))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        except TimeoutError as error:
            raise self._deadline.exceeded("waiting for what other ranks of this machine read") from error

    async def _fill(self, queue: Iterator[int], store: Store, directory: str) -> None:
        """Read the windows that are this rank's."""
        assert self._plan is not None
        for number in queue:
            window = self._plan.windows[number]
            self._copying[number] = _Copying(set(window.users))
            if window.turn >= self._ring.slots:
                earlier = self._plan.mine[window.turn - self._ring.slots]
                await self._copying[earlier].over.wait()
                del self._copying[earlier]
            into = memoryview(self._rings[self._me])
            position = self._start(window)
            reads = []
            for start, end in window.bounds:
                reads.append(ReadRange(start, into[position : position + end - start]))
                position += end - start
            await store.read(f"{directory}/{window.file}", reads)
            for user in window.users:
                self._tell(user, _READY, number)

    async def _take(self, delivered: Callable[[int], None]) -> None:
        """Copy what this rank needs of every window, in their order."""
        assert self._plan is not None
        for number, taken in self._plan.taken:
            window = self._plan.windows[number]
            await self._ready.setdefault(number, asyncio.Event()).wait()
            del self._ready[number]
            content = memoryview(self._rings[window.reader])[self._start(window) :]
            await io_threads().run(_copy, self._pieces, taken, content)
            self._tell(window.reader, _DONE, number)
            delivered(sum(one.nbytes for one in taken))

    def _start(self, window: Window) -> int:
        return window.turn % self._ring.slots * self._ring.window_bytes

    def _tell(self, place: int, kind: int, number: int) -> None:
        if place == self._me:
            self._heard(kind, self._me, number)
        elif self._mail is not None:
            self._mail.send(place, kind, self._me, number)

    def _heard(self, kind: int, sender: int, number: int) -> None:
        if kind == _READY:
            self._ready.setdefault(number, asyncio.Event()).set()
        elif number in self._copying:
            copying = self._copying[number]
            copying.users.discard(sender)
            if not copying.users:
                copying.over.set()


def _copy(pieces: Sequence[Piece], taken: Sequence[Slice], content: memoryview) -> None:
    for one in taken:
        pieces[one.piece].take(one.at, content[one.position : one.position + one.nbytes])
