"""The cache of files on local disk: one fetch per host, whoever ends meanwhile, and nothing of it left."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from _places import s3_place
from _s3_server import Request, S3Server
from fsspec.implementations.cache_mapper import HashCacheMapper
from fsspec.implementations.memory import MemoryFileSystem
from keywords import for_load, for_save

import sidestream
from sidestream import errors
from sidestream._runtime import threads
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage.wrappers.file_cache import FetchLock, FileCache

STATE = {f"tensor{number}": torch.full((1 << 18,), float(number)) for number in range(8)}
PATIENCE_S = 60.0


def start(code: str, **values: object) -> subprocess.Popen[Any]:
    """A process that runs ``code`` with these values, and says what it does in lines."""
    given = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    return warm.Popen(
        [sys.executable, "-c", given + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def line_of(process: subprocess.Popen[Any]) -> str:
    assert process.stdout is not None
    return str(process.stdout.readline()).strip()


def tell(process: subprocess.Popen[Any], line: str = "go") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def end(processes: list[subprocess.Popen[Any]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=PATIENCE_S)


def wait_until(condition: Any) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


# --- processes ------------------------------------------------------------------------------------------------------

LOAD = """
    import asyncio, sys, torch, sidestream
    policy = sidestream.StorePolicy(cache_dir=CACHE, retries=2)
    target = {f"tensor{number}": torch.zeros(1 << 18) for number in range(8)}
    print("ready", flush=True)
    sys.stdin.readline()
    storage, limits = sidestream.Storage(OPTIONS, policy=policy), sidestream.LoadOptions(timeout_s=TIMEOUT_S)
    work = sidestream.load(target, URL, storage=storage, options=limits)
    asyncio.run(work)
    print(sum(int(one[0]) * 10 ** number for number, one in enumerate(target.values())), flush=True)
"""
LOADED = "76543210"


def loading(s3: S3Server, cache: Path, timeout_s: float = 60.0) -> subprocess.Popen[Any]:
    url = s3_place(s3, "auto").url()
    process = start(LOAD, CACHE=str(cache), URL=url, OPTIONS=s3.options, TIMEOUT_S=timeout_s)
    assert line_of(process) == "ready"
    return process


def fetched(s3: S3Server) -> Counter[str]:
    """How often each file was requested that the cache keeps."""
    with s3.lock:
        return Counter(one.key for one in s3.log if one.kind == "get" and not one.key.endswith(".metadata"))


async def save(s3: S3Server) -> None:
    place = s3_place(s3, "auto")
    await sidestream.save(STATE, place.url(), **for_save(**place.keywords))
    s3.log.clear()


class Stalling:
    """The first fetch of a shard file stalls midway; ``key`` names the file."""

    def __init__(self, s3: S3Server, cache: Path) -> None:
        self._s3, self._cache = s3, cache
        self.key = ""
        s3.fault = self._choose

    def _choose(self, request: Request) -> str | None:
        if request.kind != "get" or not request.key.endswith(".distcp") or self.key:
            return None
        self.key = request.key
        return "stall-midway"

    def is_half_there(self) -> bool:
        name = HashCacheMapper()(f"{self._s3.bucket}/{self.key}")
        return bool(self.key) and any(path.stat().st_size for path in self._cache.glob(f"{name}.*.partial"))


async def test_processes_of_a_host_fetch_each_file_once(s3: S3Server, tmp_path: Path) -> None:
    await save(s3)
    cache = tmp_path / "cache"
    processes = [loading(s3, cache) for _ in range(4)]
    try:
        for process in processes:
            tell(process)
        assert [line_of(process) for process in processes] == [LOADED] * 4
    finally:
        end(processes)
    times = fetched(s3)
    assert {name for name in s3.objects if not name.endswith(".metadata")} == set(times)
    assert set(times.values()) == {1}
    assert [path.name for path in cache.iterdir() if path.suffix] == []
    assert len(list(cache.iterdir())) == len(times)


async def test_a_process_is_killed_while_it_fetches(s3: S3Server, tmp_path: Path) -> None:
    """Another one that waits for it takes over."""
    await save(s3)
    cache = tmp_path / "cache"
    stalling = Stalling(s3, cache)
    processes = [loading(s3, cache) for _ in range(2)]
    first, second = processes
    try:
        tell(first)
        wait_until(stalling.is_half_there)
        s3.log.clear()
        tell(second)
        wait_until(lambda: any(one.key.endswith(".metadata") for one in s3.log))
        assert stalling.key not in fetched(s3)
        first.send_signal(signal.SIGKILL)
        assert line_of(second) == LOADED
    finally:
        end(processes)
    assert fetched(s3)[stalling.key] == 1
    assert [path.name for path in cache.iterdir() if path.suffix] == []


async def test_who_waits_for_another_process_keeps_its_deadline(s3: S3Server, tmp_path: Path) -> None:
    await save(s3)
    cache = tmp_path / "cache"
    stalling = Stalling(s3, cache)
    processes = [loading(s3, cache)]
    try:
        tell(processes[0])
        wait_until(stalling.is_half_there)
        place = s3_place(s3, "auto", cache_dir=str(cache))
        target = {name: torch.zeros_like(one) for name, one in STATE.items()}
        with pytest.raises(errors.DeadlineExceededError):
            await sidestream.load(target, place.url(), **for_load(timeout_s=1.0, **place.keywords))
    finally:
        end(processes)


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    """Processes create, lock and delete one lock file all the time. Whoever has it creates a file that is not there."""
    code = """
        import os, time
        from pathlib import Path
        from sidestream._storage.wrappers.file_cache import FetchLock
        had = 0
        until = time.monotonic() + 240.0
        while had < 300 and time.monotonic() < until:
            lock = FetchLock(Path(DIRECTORY) / "name")
            if lock.try_acquire():
                os.close(os.open(Path(DIRECTORY) / "held", os.O_CREAT | os.O_EXCL))
                os.unlink(Path(DIRECTORY) / "held")
                had += 1
            lock.release()
        print(had, flush=True)
    """
    processes = [start(code, DIRECTORY=str(tmp_path)) for _ in range(4)]
    try:
        assert [line_of(process) for process in processes] == ["300"] * 4
    finally:
        end(processes)
    assert list(tmp_path.iterdir()) == []


def test_a_child_does_not_keep_the_lock_of_its_parent(tmp_path: Path) -> None:
    code = """
        import os, sys, time
        from pathlib import Path
        from sidestream._storage.wrappers.file_cache import FetchLock
        lock = FetchLock(Path(PATH))
        assert lock.try_acquire() and lock.among_processes
        child = os.fork()
        if not child:
            time.sleep(600)
        print(child, flush=True)
        sys.stdin.readline()
    """
    path = tmp_path / "name"
    process = start(code, PATH=str(path))
    child = int(line_of(process))
    try:
        lock = FetchLock(path)
        assert not lock.try_acquire()
        process.kill()
        wait_until(lock.try_acquire)
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        end([process])
    assert list(tmp_path.iterdir()) == []


# --- in one process -------------------------------------------------------------------------------------------------


class _Counting(MemoryFileSystem):
    """Every file has the same content. The first fetch waits for ``go``."""

    cachable = False
    protocol = "counting"

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go, self.fetches = threading.Event(), threading.Event(), 0

    def get_file(self, rpath: str, lpath: str, **keywords: Any) -> None:
        self.fetches += 1
        with Path(lpath).open("wb", buffering=0) as file:
            file.write(b"con")
            if self.fetches == 1:
                self.begun.set()
                assert self.go.wait(120)
            file.write(b"tent")


def cache_of(directory: Path) -> tuple[_Counting, FileCache]:
    return _Counting(), FileCache(str(directory))


async def within(timeout_s: float, read: Coroutine[Any, Any, memoryview]) -> memoryview:
    with time_limit(Deadline.after(timeout_s)):
        return await read


async def begun(filesystem: _Counting) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not filesystem.begun.is_set():
            await asyncio.sleep(0.01)


async def begun_and_hanging(filesystem: _Counting, cache: FileCache) -> asyncio.Future[memoryview]:
    """A read whose fetch has begun before its deadline, which has not passed yet."""
    for timeout_s in (2.0, 8.0, 32.0):
        hangs = asyncio.ensure_future(within(timeout_s, cache.read(filesystem, "/file", 0, 3)))
        while not hangs.done():
            if filesystem.begun.is_set():
                return hangs
            await asyncio.sleep(0.01)
    raise AssertionError("no fetch has begun")


async def test_nobody_waits_for_a_fetch_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_GRACE_S", 0.2)
    filesystem, cache = cache_of(tmp_path)
    try:
        hangs = await begun_and_hanging(filesystem, cache)
        with pytest.raises(errors.DeadlineExceededError):
            await within(0.05, cache.read(filesystem, "/file", 0, 3))
        assert filesystem.fetches == 1
        # When the time of the first one is over.
        content = await within(PATIENCE_S, cache.read(filesystem, "/file", 1, 4))
        assert bytes(content) == b"ont"
        assert filesystem.fetches == 2
        with pytest.raises(errors.DeadlineExceededError):
            await hangs
    finally:
        filesystem.go.set()
    assert bytes(await within(PATIENCE_S, cache.read(filesystem, "/file", 0, 9))) == b"content"
    assert filesystem.fetches == 2
    wait_until(lambda: [path.suffix for path in tmp_path.iterdir()] == [""])


async def test_reads_of_one_process_share_a_fetch(tmp_path: Path) -> None:
    """Also through several caches, as several loads have."""
    filesystem, cache = cache_of(tmp_path)
    caches = [cache, FileCache(str(tmp_path))]
    reads = [asyncio.ensure_future(within(60.0, caches[n % 2].read(filesystem, "/file", n, n + 1))) for n in range(6)]
    await begun(filesystem)
    filesystem.go.set()
    assert b"".join([bytes(await read) for read in reads]) == b"conten"
    assert filesystem.fetches == 1


async def test_a_cancelled_fetch_lets_another_one_fetch(tmp_path: Path) -> None:
    filesystem, cache = cache_of(tmp_path)
    first = asyncio.ensure_future(within(60.0, cache.read(filesystem, "/file", 0, 3)))
    await begun(filesystem)
    first.cancel()
    filesystem.go.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert bytes(await within(60.0, cache.read(filesystem, "/file", 0, 3))) == b"con"
    assert [path.suffix for path in tmp_path.iterdir()] == [""]


async def test_what_dead_processes_left_is_deleted(tmp_path: Path) -> None:
    filesystem, cache = cache_of(tmp_path)
    filesystem.go.set()
    held = FetchLock(tmp_path / "held")
    assert held.try_acquire()
    for name in ("dead.12-34.partial", "dead.lock", "held.12-34.partial", "other.lock"):
        (tmp_path / name).touch()
    await within(60.0, cache.read(filesystem, "/file", 0, 3))
    assert {path.name for path in tmp_path.iterdir() if path.suffix} == {"held.12-34.partial", "held.lock"}
    held.release()


async def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of one process share a fetch. Of other processes only what is old is deleted."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    filesystem, cache = cache_of(tmp_path)
    for name, age_s in (("one.a.partial", 7200), ("two.b.partial", 60)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    reads = [asyncio.ensure_future(within(60.0, cache.read(filesystem, "/file", 0, 3))) for _ in range(3)]
    await begun(filesystem)
    filesystem.go.set()
    assert {bytes(await read) for read in reads} == {b"con"}
    assert filesystem.fetches == 1
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".partial"] == ["two.b.partial"]
