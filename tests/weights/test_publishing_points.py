"""Each side is killed and stopped at each message of publishing: before it is sent, while it is sent, after it was
sent, and when it was received and nothing was done about it yet.

One run without a signal counts the points. Then there is a run for each point and signal. After the signal readings go
on, the other side says what happened, the side comes back, the next version is served and counted, and all memory is
given back.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _points import KEEP, LARGE
from _programs import PATIENCE_S, Program, alive, memory_of, parts, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is handed over on Linux only")
PROGRAM = Path(__file__).with_name("_points.py")
SIDES = ("publisher", "subscriber")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
AT_ONCE = 2
"""Runs at the same time."""


@dataclass(frozen=True)
class Hit:
    side: str
    point: str
    signal: signal.Signals

    @property
    def kind(self) -> tuple[str, str]:
        """The point without its number."""
        return self.side, self.point.rpartition(" ")[0]

    def __str__(self) -> str:
        return f"{self.signal.name} of the {self.side} at {self.point!r}"


class Actor(Program):
    """A program that does what it is told."""

    def __init__(self, role: str, home: Path, *name: str, hit: Hit | None = None) -> None:
        env = {"POINT": "none"} if hit is None else {"POINT": hit.point, "POINT_SIGNAL": str(int(hit.signal))}
        super().__init__(role, home, *name, program=PROGRAM, env=env)
        self.points: list[str] = []
        self.hit = asyncio.Event()
        """Set when it has come to its point."""
        self.at = ""
        self._asked = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._taking = asyncio.create_task(self._take())

    async def _take(self) -> None:
        while True:
            while not self._lines.empty():
                what, _, rest = self._lines.get().partition(" ")
                if what == "point":
                    self.points.append(rest)
                elif what == "at":
                    self.at = rest
                    self.hit.set()
                elif what == "reply":
                    number, _, answer = rest.partition(" ")
                    if not (reply := self._replies.pop(int(number))).done():
                        reply.set_result(json.loads(answer))
            await asyncio.sleep(0.002)

    def tell(self, verb: str, *arguments: Any) -> asyncio.Future[Any]:
        self._asked += 1
        reply = self._replies[self._asked] = asyncio.get_running_loop().create_future()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it was killed
            self.process.stdin.write(json.dumps([self._asked, verb, arguments]) + "\n")
            self.process.stdin.flush()
        return reply

    async def ask(self, verb: str, *arguments: Any) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            answer = await self.tell(verb, *arguments)
        assert not (isinstance(answer, dict) and "error" in answer), f"{verb}{arguments}: {answer['error']}"
        return answer

    async def stopped(self) -> None:
        await until(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None)
        return int(self.process.returncode)

    async def leave(self) -> None:
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await self.ended() == 0

    def close(self) -> None:
        self._taking.cancel()
        super().close()


class Run:
    """A publisher, and the subscribers "a" and "b". "a" is the one that is hit, if a subscriber is."""

    def __init__(self, home: Path, hit: Hit | None = None) -> None:
        self.home, self.hit = home, hit
        self._actors: list[Actor] = []
        self.inodes: dict[str, str] = {}
        self.version = 0
        self.epoch = 0

    def start(self, role: str, *name: str, hit: Hit | None = None) -> Actor:
        self._actors.append(Actor(role, self.home, *name, hit=hit))
        return self._actors[-1]

    @asynccontextmanager
    async def cast(self, record: bool = False) -> AsyncIterator[None]:
        hit, every = self.hit, Hit("", "", signal.SIGKILL) if record else None
        try:
            self.publisher = self.start("publisher", hit=hit if hit and hit.side == "publisher" else every)
            self.a = self.start("subscriber", "a", hit=hit if hit and hit.side == "subscriber" else every)
            self.b = self.start("subscriber", "b")
            self.target = self.publisher if hit and hit.side == "publisher" else self.a
            yield
        finally:
            for one in self._actors:
                one.close()

    # --- what is done ---

    async def publish(self, **metadata: str) -> str:
        self.version += 1
        stamp, inode = await self.publisher.ask("publish", self.version, metadata)
        self.inodes[inode] = stamp
        return str(stamp)

    async def served(self, stamp: str, *, a: str = "applied", b: str = "applied") -> None:
        """Wait until the publisher has these answers."""
        wanted = {name: f"sent {stamp}; {answer} {stamp}" for name, answer in (("a", a), ("b", b)) if answer}

        def found(health: dict[str, Any]) -> bool:
            said = health["subscribers"]
            return all(said.get(name, "").startswith(text) for name, text in wanted.items())

        await self.until_health(found)

    async def until_health(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        health: dict[str, Any] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    health = await self.publisher.ask("health")
                    if wanted(health):
                        return health
                    await asyncio.sleep(0.005)
        except TimeoutError as error:
            states = [await asyncio.wait_for(one.tell("state"), 5) for one in (self.a, self.b)]
            raise AssertionError(f"{health} {states}") from error

    async def until_state(self, one: Actor, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                state: dict[str, Any] = await one.ask("state")
                assert state["wrong"] == []
                if wanted(state):
                    return state
                await asyncio.sleep(0.005)

    async def more_readings(self, one: Actor) -> None:
        before = (await one.ask("state"))["readings"]
        await self.until_state(one, lambda state: state["readings"] > before + 5)

    async def everything(self) -> None:
        """All kinds of messages, and in each direction the same ones in each run."""
        publisher, a, b = self.publisher, self.a, self.b
        self.epoch = await publisher.ask("open")
        await asyncio.gather(a.ask("open"), b.ask("open"))
        nothing = dict.fromkeys("ab", "sent nothing yet")
        await self.until_health(lambda health: health["subscribers"] == nothing)
        await self.served(await self.publish())
        second = await self.publish(text=LARGE)
        await self.served(second)
        await self.served(await self.publish(refused_by="a"), a="refused")
        await publisher.ask("promote", parts(second)[1])
        await self.served(second)
        await self.served(await self.publish())
        assert await publisher.ask("rollback") == second
        await self.served(second)
        await a.ask("reopen")
        await self.served(second)
        self.epoch = await publisher.ask("reopen")
        await self.served(await self.publish())

    async def until_hit(self) -> None:
        work, hit = asyncio.create_task(self.everything()), asyncio.create_task(self.target.hit.wait())
        await asyncio.wait([work, hit], return_when=asyncio.FIRST_COMPLETED)
        reached = self.target.hit.is_set()
        for one in (work, hit):
            one.cancel()
        await asyncio.gather(work, hit, return_exceptions=True)
        if not reached:
            raise AssertionError("the point was not reached") from work.exception()

    # --- what is so after a signal ---

    async def recovered(self) -> None:
        assert self.hit is not None
        stop = self.hit.signal == signal.SIGSTOP
        if stop:
            await self.target.stopped()
        else:
            assert await self.target.ended() == -signal.SIGKILL
        match self.hit.side, stop:
            case "subscriber", True:
                await self.a_is_stopped()
            case "subscriber", False:
                await self.a_is_dead()
            case "publisher", True:
                await self.the_publisher_is_stopped()
            case _:
                await self.the_publisher_is_dead()
        await self.all_is_well()

    async def a_is_stopped(self) -> None:
        for _ in range(3):  # the publisher goes on with the other one
            await self.served(await self.publish(), a="")
        held = set((await self.publisher.ask("health"))["versions"])
        # What it serves, the one before if that was about to be freed, and one on its way.
        await until(lambda: len(alive(self.inodes) - held) <= 3)
        await self.more_readings(self.b)
        self.a.signal(signal.SIGCONT)

    async def a_is_dead(self) -> None:
        if self.a.at.startswith(("after send APPLIED", "after send REFUSED")):
            stamp = self.a.at.rpartition(" ")[2]
            report = await self.publisher.ask("applied", stamp, 2)  # what was sent has arrived
            assert "a" in {*report["applied"], *report["refused"], *report["skipped"]}
        await self.until_health(lambda health: "a" not in health["subscribers"])
        stamp = await self.publish()
        await self.served(stamp, a="")
        held = set((await self.publisher.ask("health"))["versions"])
        await until(lambda: alive(self.inodes) <= held)
        self.a = self.start("subscriber", "a")
        await self.a.ask("open")
        await self.served(stamp)

    async def the_publisher_is_stopped(self) -> None:
        for one in (self.a, self.b):
            # Each reply is one of a loop and of a follower that are not held up.
            ends = " end " in self.publisher.at  # then it may have no socket at the moment
            state = await self.until_state(one, lambda state, ends=ends: ends or state["problem"] is None)
            await self.more_readings(one)
            if state["followed"] is not None:
                assert await one.ask("second") is not None
        self.publisher.signal(signal.SIGCONT)

    async def the_publisher_is_dead(self) -> None:
        for one in (self.a, self.b):
            await self.until_state(one, lambda state: "has no publisher" in str(state["problem"]))
            await self.more_readings(one)
        self.publisher = self.start("publisher")
        assert await self.publisher.ask("open") > self.epoch
        self.version = 0

    async def all_is_well(self) -> None:
        a, b, publisher = self.a, self.b, self.publisher
        for _ in range(2):
            stamp = await self.publish()
            await self.served(stamp)
            report = await publisher.ask("applied", stamp, 2)
            assert report == {"applied": ["a", "b"], "refused": {}, "skipped": []}
            for one in (a, b):
                state = await self.until_state(one, lambda state, stamp=stamp: state["stamp"] == stamp)
                assert (state["problem"], state["passed_over"]) == (None, {})
                await self.more_readings(one)
                await until(lambda one=one: len(memory_of(one.pid)) == 2)  # an image and its checksums
        health = await publisher.ask("health")
        assert len(health["versions"]) <= KEEP
        await until(lambda: alive(self.inodes) <= set(health["versions"]))
        # That of the next one is touched ahead, and has no checksums.
        assert len(memory_of(publisher.pid)) <= 2 * len(health["versions"]) + 1
        for one in (a, b):
            await one.ask("close")
            await until(lambda one=one: not memory_of(one.pid))
        await self.until_health(lambda health: not health["subscribers"])
        await publisher.ask("close")
        await until(lambda: not memory_of(publisher.pid))
        await until(lambda: not alive(self.inodes))
        await asyncio.gather(*(one.leave() for one in (a, b, publisher)))


async def recorded(home: Path) -> dict[str, list[str]]:
    """The points of each side, and that all is well without a signal."""
    run = Run(home)
    async with run.cast(record=True):
        await run.everything()
        found = {"publisher": list(run.publisher.points), "subscriber": list(run.a.points)}
        await run.all_is_well()
    return found


async def hit_at(hit: Hit, home: Path) -> str | None:
    """Do one run. Return what was wrong."""
    run = Run(home, hit)
    try:
        async with run.cast():
            await run.until_hit()
            await run.recovered()
    except (AssertionError, TimeoutError) as error:
        return f"{hit}: {''.join(traceback.format_exception(error, limit=-4))}"
    return None


def sample(points: dict[str, list[str]], seed: int) -> list[Hit]:
    """One point of each kind and side, and a signal for it."""
    chance, kinds = random.Random(seed), dict[tuple[str, str], list[Hit]]()
    for side in SIDES:
        for point in points[side]:
            one = Hit(side, point, chance.choice(SIGNALS))
            kinds.setdefault(one.kind, []).append(one)
    return [chance.choice(ones) for ones in kinds.values()]


EXPECTED = {
    "publisher": [
        "connected", "received HELLO", "before send VERSION", "within send VERSION", "after send VERSION",
        "received RECEIVED", "received APPLIED", "received REFUSED", "received end", "before end", "after end",
    ],
    "subscriber": [
        "connected", "before send HELLO", "after send HELLO", "received VERSION", "before send RECEIVED",
        "after send RECEIVED", "before send APPLIED", "after send APPLIED", "before send REFUSED",
        "after send REFUSED", "received end", "before end", "after end",
    ],
}  # fmt: skip


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)], ids=["short", "long"])
async def test_a_signal_at_each_message(long: bool, tmp_path: Path) -> None:
    points = await recorded(tmp_path / "recorded")
    kinds = {side: Counter(Hit(side, one, SIGNALS[0]).kind[1] for one in points[side]) for side in SIDES}
    assert {side: sorted(found) for side, found in kinds.items()} == {side: sorted(EXPECTED[side]) for side in SIDES}
    every = [Hit(side, point, number) for side in SIDES for point in points[side] for number in SIGNALS]
    hits = every if long else sample(points, seed=0)
    left, wrong = list(enumerate(hits)), list[str]()

    async def work() -> None:
        while left:
            number, hit = left.pop()
            if (found := await hit_at(hit, tmp_path / f"home-{number}")) is not None:
                wrong.append(found)
                print(found, flush=True)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    print({side: dict(found) for side, found in kinds.items()}, f"{len(hits)} runs of {len(every)}")
    assert not wrong, "\n".join(wrong)
