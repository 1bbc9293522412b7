"""Publishers and subscribers as processes that are killed and stopped, and children that live on after a fork."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from _published import CHILDREN, LARGE, state_of, value_in
from warm import Popen

import sidestream
from sidestream.errors import PublisherRunningError

PATIENCE_S = 120.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is handed over on Linux only")
PROGRAM = Path(__file__).with_name("_published.py")
SOURCE = Path(sidestream.__file__).parents[1]


class Program:
    """A process, and what it has said."""

    def __init__(self, role: str, home: Path) -> None:
        path = os.pathsep.join((str(SOURCE), str(PROGRAM.parent)))
        self.process = Popen(
            [sys.executable, str(PROGRAM), role, str(home)], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        self.pid = self.process.pid
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    async def until(self, wanted: Callable[[str], object]) -> str:
        """Wait until it says something new that is ``wanted``."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                while not self._lines.empty():
                    self.said.append(self._lines.get())
                    if wanted(self.said[-1]):
                        return self.said[-1]
                assert self.process.poll() is None, self.said[-5:]
                await asyncio.sleep(0.002)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdout is not None
        self.kill()
        self._listener.join(PATIENCE_S)
        self.process.stdout.close()

    @property
    def wrong(self) -> list[str]:
        return [line for line in self.said if line.startswith("wrong")]


@contextmanager
def programs() -> Iterator[Callable[[str, Path], Program]]:
    made: list[Program] = []

    def start(role: str, home: Path) -> Program:
        made.append(Program(role, home))
        return made[-1]

    try:
        yield start
    finally:
        for one in made:
            one.close()


def stamp_above(epoch: int, number: int = 0) -> Callable[[str], bool]:
    def found(line: str) -> bool:
        return line.startswith("e") and tuple(map(int, line.removeprefix("e").split(".v"))) > (epoch, number)

    return found


def parts(stamp: str) -> tuple[int, int]:
    epoch, number = stamp.removeprefix("e").split(".v")
    return int(epoch), int(number)


def memory_of(pid: int) -> set[str]:
    """The images that a process has open or mapped, by their inodes."""
    found = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            if os.readlink(f"/proc/{pid}/fd/{number}").startswith("/memfd:sidestream version"):
                found.add(str(os.stat(f"/proc/{pid}/fd/{number}").st_ino))
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "/memfd:sidestream version" in line:
            found.add(line.split()[4])
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


# --- kills and stops ---


@pytest.mark.parametrize(
    ("rounds", "seed"), [(12, 0), *(pytest.param(80, seed, marks=pytest.mark.long) for seed in range(1, 5))]
)
async def test_kills_and_stops_at_many_moments(rounds: int, seed: int, tmp_path: Path) -> None:
    chance, home = random.Random(seed), tmp_path / "home"
    with programs() as start:
        publisher, subscribers = start("publisher", home), [start("subscriber", home) for _ in range(2)]
        epoch, ended = 1, list[Program]()
        for one in subscribers:
            await one.until(stamp_above(0))
        actions = ["kill the publisher", "stop the publisher", "kill a subscriber", "stop a subscriber"]
        for turn in range(rounds):
            at = chance.randrange(2)
            await asyncio.sleep(chance.random() * 0.05)  # another moment each time
            match actions[turn % 4]:
                case "kill the publisher":
                    publisher.kill()
                    publisher, epoch = start("publisher", home), epoch + 1
                case "kill a subscriber":
                    subscribers[at].kill()
                    ended.append(subscribers[at])
                    subscribers[at] = start("subscriber", home)
                case action:
                    stopped = publisher if action == "stop the publisher" else subscribers[at]
                    stopped.signal(signal.SIGSTOP)
                    await asyncio.sleep(chance.random() * 0.1)
                    stopped.signal(signal.SIGCONT)
            newest = parts(await publisher.until(stamp_above(epoch - 1)))
            for one in subscribers:  # all of them serve what came after it
                await one.until(stamp_above(*newest))
        publisher.kill()
        # What they have left, and then nothing: the socket of a dead publisher is in nobody's way.
        async with sidestream.Publisher(home) as last:
            assert last.epoch == epoch + 1
            await last.publish(state_of(last.epoch, 1), version=1)
            for one in subscribers:
                await one.until(f"e{last.epoch}.v1".__eq__)
                await until(lambda one=one: len(memory_of(one.pid)) == 2)  # an image and its checksums
        assert [line for one in (*subscribers, *ended) for line in one.wrong] == []


# --- memory ---


def lock(image: sidestream._weights.images.SealedImage) -> str:
    """Lock the image. The lock lasts as long as anybody, or a message on its way, has the memory."""
    fcntl.flock(image.memory.fileno(), fcntl.LOCK_SH)
    return str(os.fstat(image.memory.fileno()).st_ino)


def alive(inodes: dict[str, str]) -> set[str]:
    """Those of the locked images that somebody has."""
    there = {line.split()[5].split(":")[2] for line in Path("/proc/locks").read_text().splitlines() if "->" not in line}
    return {stamp for inode, stamp in inodes.items() if inode in there}


async def test_a_subscriber_that_stands_still_holds_two_versions_and_one_that_dies_none(tmp_path: Path) -> None:
    home, inodes = tmp_path / "home", dict[str, str]()
    with programs() as start:
        async with sidestream.Publisher(home, keep=1) as publisher:

            async def publish(number: int) -> sidestream.PendingVersion:
                pending = publisher.publish(state_of(publisher.epoch, number), version=number)
                stamp = (await pending).stamp
                inodes[lock(publisher._versions.channels.held[number].image)] = stamp
                return pending

            one = start("subscriber", home)
            for number in range(1, 6):
                await (await publish(number)).applied(count=1, timeout_s=PATIENCE_S)
            await until(lambda: alive(inodes) == {"e1.v5"})
            one.signal(signal.SIGSTOP)
            for number in range(6, 20):
                await publish(number)
            await until(
                lambda: alive(inodes) == {"e1.v5", "e1.v6", "e1.v19"}
            )  # served, on its way, and the publisher's
            one.signal(signal.SIGCONT)
            await one.until("e1.v19".__eq__)
            await until(lambda: alive(inodes) == {"e1.v19"})
            one.signal(signal.SIGSTOP)
            for number in range(20, 24):
                await publish(number)
            await until(lambda: alive(inodes) == {"e1.v19", "e1.v20", "e1.v23"})
            one.kill()
            await until(lambda: alive(inodes) == {"e1.v23"})
            await until(lambda: not publisher.health().subscribers)
            assert one.wrong == []
        await until(lambda: not alive(inodes))


# --- forks ---


async def test_children_that_live_on_keep_nothing(tmp_path: Path) -> None:
    home, each = tmp_path / "home", LARGE // len(state_of(0, 0))
    live, children, stamp = sidestream.Live(state_of(0, 0, each)), list[int](), ""
    with programs() as start:
        forker = start("forker", home)
        async with sidestream.Subscriber(f"unix:{home}") as weights, weights.following(live) as follower:
            try:
                while len(children) < CHILDREN or not stamp:
                    line = await forker.until(lambda line: line.startswith(("e", "child")))
                    if line.startswith("child"):
                        children.append(int(line.split()[1]))
                    else:
                        stamp = line
                await forker.until(stamp_above(*parts(stamp)))  # seals still succeed
                await until(lambda: live.stamp is not None and stamp_above(*parts(stamp))(live.stamp))
                with pytest.raises(PublisherRunningError):
                    async with sidestream.Publisher(home):
                        pass
                forker.kill()
                await until(lambda: "has no publisher" in str(follower.health().problem))  # the connection has ended
                assert [memory_of(pid) for pid in children] == [set()] * CHILDREN
                async with sidestream.Publisher(home) as publisher:  # the lock is free
                    state = state_of(publisher.epoch, 1, each)
                    await publisher.publish(state, version=1).applied(count=1, timeout_s=PATIENCE_S)
                    with live.reading() as reading:
                        assert reading.stamp == "e2.v1"
                        assert {float(one[0]) for one in reading.tensors.values()} == {value_in("e2.v1")}
            finally:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)


def test_the_programs_tell_versions_apart() -> None:
    assert {value_in(f"e{epoch}.v{number}") for epoch in (1, 2) for number in (1, 2)} == {20001, 20002, 40001, 40002}
