"""Programs of tests as processes: what they say, the memory that they have, and the memory that anybody has."""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from warm import Popen

import sidestream

PATIENCE_S = 120.0
_SOURCE = Path(sidestream.__file__).parents[1]
_PROGRAM = Path(__file__).with_name("_published.py")


class Program:
    """A process, and what it has said."""

    def __init__(
        self, role: str, home: Path, *arguments: str, program: Path = _PROGRAM, env: Mapping[str, str] | None = None
    ) -> None:
        path = os.pathsep.join(map(str, (_SOURCE, _PROGRAM.parent, _PROGRAM.parents[1])))
        self.process = Popen(
            [sys.executable, str(program), role, str(home), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
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
        assert self.process.stdin is not None
        self.kill()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
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


def lock(image: sidestream._weights.images.SealedImage) -> str:
    """Lock the image. The lock lasts as long as anybody, or a message on its way, has the memory."""
    fcntl.flock(image.memory.fileno(), fcntl.LOCK_SH)
    return str(os.fstat(image.memory.fileno()).st_ino)


def alive(inodes: dict[str, str]) -> set[str]:
    """Those of the locked images that somebody has."""
    there = {line.split()[5].split(":")[2] for line in Path("/proc/locks").read_text().splitlines() if "->" not in line}
    return {stamp for inode, stamp in inodes.items() if inode in there}
