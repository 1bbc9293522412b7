"""Loads of local files in threads of their own: what ends them, what they hold up, and what they compare."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestream
from sidestream import errors
from sidestream._format.checksum import pack_crcs
from sidestream._format.records import BLOCK_BYTES
from sidestream._load.ranges import Direct, Range
from sidestream._load.reader import Check
from sidestream._runtime import threads
from sidestream._runtime.threads import Deadline, Stop, time_limit
from sidestream._storage import jobs
from sidestream._storage.jobs import Jobs

STATE = {f"t{index}": torch.full((5 << 20,), float(index)) for index in range(4)}


def blank() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}


def slow_reads(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[Sequence[Any]], None], nowait: int = errno.EAGAIN
) -> None:
    """A disk that does something before it answers. If it is asked not to wait, it fails with ``nowait``, or returns
    nothing if that is 0."""
    preadv = os.preadv

    def read(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if flags and not nowait:
            return 0
        if flags:
            raise OSError(nowait, os.strerror(nowait))
        before(buffers)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


async def test_loads_that_stand_still_hold_up_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await sidestream.save(STATE, tmp_path / "c")
    hangs = threading.Event()
    reading = threading.Semaphore(0)

    def hang(buffers: Sequence[Any]) -> None:
        if sum(map(len, buffers)) >= 1 << 16:  # payloads, and no manifest
            reading.release()
            hangs.wait(60)

    slow_reads(monkeypatch, hang)
    loads = [
        asyncio.create_task(sidestream.load(blank(), tmp_path / "c", options=sidestream.LoadOptions(verify="manifest")))
        for _ in range(12)
    ]
    try:
        for _ in range(16):  # all threads there are
            assert await asyncio.to_thread(reading.acquire, timeout=60)
        await sidestream.save(STATE, tmp_path / "d", options=sidestream.SaveOptions(timeout_s=60))
    finally:
        hangs.set()
        await asyncio.gather(*loads)


async def test_a_read_that_does_not_return_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_GRACE_S", 0.2)
    await sidestream.save(STATE, tmp_path / "c")
    hangs = threading.Event()
    slow_reads(monkeypatch, lambda buffers: sum(map(len, buffers)) >= 1 << 16 and not hangs.wait(60) and None)
    try:
        with pytest.raises(errors.DeadlineExceededError):
            await sidestream.load(
                blank(), tmp_path / "c", options=sidestream.LoadOptions(verify="manifest", timeout_s=0.5)
            )
    finally:
        hangs.set()


@pytest.mark.parametrize("nowait", [errno.EAGAIN, errno.EOPNOTSUPP])
async def test_where_reads_wait_more_threads_read_more_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowait: int
) -> None:
    await sidestream.save(STATE, tmp_path / "c")
    sizes: list[int] = []
    inside, most, lock, go_on = 0, 0, threading.Lock(), threading.Event()

    def wait(buffers: Sequence[Any]) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            sizes.append(sum(map(len, buffers)))
            if most == jobs._MOST_JOBS:
                go_on.set()
        if len(sizes) <= 8:  # more threads begin when a read has waited
            time.sleep(0.02)
        elif not go_on.wait(60):  # for the others
            go_on.set()
        with lock:
            inside -= 1

    slow_reads(monkeypatch, wait, nowait)
    state = blank()
    await sidestream.load(state, tmp_path / "c")
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)
    assert most == jobs._MOST_JOBS
    assert max(sizes) >= 4 << 20


@pytest.mark.parametrize("nowait", [0, errno.EPERM, errno.ENOSYS])
async def test_what_a_read_without_waiting_reports_ends_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowait: int
) -> None:
    """Linux 5.9 and 5.10 may return 0 bytes before the end of a file, and a sandbox may refuse ``preadv2``."""
    await sidestream.save(STATE, tmp_path / "c")
    slow_reads(monkeypatch, lambda _: None, nowait)
    state = blank()
    await sidestream.load(state, tmp_path / "c")
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


async def test_reads_without_waiting_may_return_any_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing from the page cache begins anywhere, also within a block of the checksums."""
    small = {f"s{number}": torch.rand(300 + number) for number in range(50)}
    await sidestream.save(STATE | small, tmp_path / "c")
    seeded, preadv = random.Random(3), os.preadv

    def read(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if flags and seeded.random() < 0.3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if seeded.random() < 0.5:
            first = memoryview(buffers[0]).cast("B")
            buffers = [first[: seeded.choice([1, 7, 4096, max(1, len(first) // 2)])]]
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    state = blank() | {name: torch.zeros_like(one) for name, one in small.items()}
    await sidestream.load(state, tmp_path / "c")
    assert all(torch.equal(state[name], one) for name, one in (STATE | small).items())


@pytest.mark.parametrize(("verify", "most_bytes"), [("always", 1 << 19), ("manifest", 2 << 20)])
async def test_reads_of_cached_files_stay_small_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify: Any, most_bytes: int
) -> None:
    """A reader that waited for a core or for the GIL was taken for one that waited for the disk. Bytes that nobody
    verifies need not stay in the cache of the processor, and fewer calls wait less often for the GIL."""
    await sidestream.save(STATE, tmp_path / "c")
    sizes: list[int] = []
    preadv = os.preadv

    def read(descriptor: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        sizes.append(sum(map(len, buffers)))
        count = preadv(descriptor, buffers, offset)  # no read that may not wait says that it would have to
        time.sleep(2e-3)  # another thread computes
        return count

    monkeypatch.setattr(os, "preadv", read)
    state = blank()
    await sidestream.load(state, tmp_path / "c", options=sidestream.LoadOptions(verify=verify))
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)
    assert max(sizes) == most_bytes


@pytest.mark.parametrize("ending", ["failure", "cancel"])
async def test_the_end_stops_all_threads(ending: str) -> None:
    working = threading.Semaphore(0)
    left = []

    def work(item: int, stop: Stop) -> int:
        working.release()
        try:
            if item == 1 and ending == "failure":
                raise errors.CorruptCheckpointError("item 1")
            while True:
                stop.check()
                time.sleep(0.001)
        finally:
            left.append(item)

    with time_limit(Deadline.after(60)):
        task = asyncio.create_task(Jobs(range(100), work, None).run())
        for _ in range(2):
            assert await asyncio.to_thread(working.acquire, timeout=60)
        if ending == "cancel":
            task.cancel()
        with pytest.raises(errors.CorruptCheckpointError if ending == "failure" else asyncio.CancelledError):
            await task
    assert 2 <= len(left) <= jobs._JOBS
    assert len(left) == len(set(left))


async def test_progress_ends_with_all() -> None:
    told: list[int] = []

    async def progress(nbytes: int) -> None:
        told.append(nbytes)

    with time_limit(Deadline.after(60)):
        await Jobs(range(1000), lambda item, stop: item, progress).run()
    assert told == sorted(set(told))
    assert told[-1] == sum(range(1000))


async def test_a_progress_that_fails_ends_the_load() -> None:
    def fail(nbytes: int) -> None:
        raise ZeroDivisionError

    with time_limit(Deadline.after(60)), pytest.raises(ZeroDivisionError):
        await Jobs(range(1, 1000), lambda item, stop: item, fail).run()


@pytest.mark.parametrize("nbytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 17])
@pytest.mark.parametrize("of", ["blocks", "whole"])
def test_checksums_of_pieces(nbytes: int, of: str) -> None:
    """However the bytes are cut, every altered one is found, in its block."""
    seeded = random.Random(nbytes)
    content = bytearray(seeded.randbytes(nbytes))
    blocks = [zlib.crc32(content[start : start + BLOCK_BYTES]) for start in range(0, nbytes, BLOCK_BYTES)]
    crcs = pack_crcs(blocks) if of == "blocks" else None
    whole = zlib.crc32(content) if of == "whole" else None
    one = Range("t", "f", 1000, nbytes, Direct(0), crcs, whole)

    def feed() -> None:
        check, start = Check(one), 0
        while start < nbytes:
            end = min(nbytes, start + seeded.choice([1, 4096, BLOCK_BYTES // 2, BLOCK_BYTES, 5 * BLOCK_BYTES]))
            if end - start == 1 and nbytes > BLOCK_BYTES:
                end = min(nbytes, start + 65_537)
            check(memoryview(content)[start:end])
            start = end

    for _ in range(5):
        feed()
    for at in {0, nbytes // 2, nbytes - 1}:
        content[at] ^= 1
        with pytest.raises(errors.CorruptCheckpointError) as caught:
            feed()
        assert caught.value.offset == 1000 + (at // BLOCK_BYTES * BLOCK_BYTES if of == "blocks" else 0)
        content[at] ^= 1
