from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import warm
from fsspec.asyn import get_loop

from sidestream._engine.loop import operation_loop
from sidestream._staging import cached
from sidestream._worker import link
from sidestream._worker.client import close_all

sys.path.append(str(Path(__file__).parents[1] / "crash"))  # for what happens inside a saver

Until = Callable[[Callable[[], bool]], None]


@pytest.fixture(autouse=True)
def _no_saver_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test starts its own processes, and leaves no descriptor and no process behind."""
    cached.close_all()  # idle memory is kept on purpose, and has descriptors
    close_all()
    operation_loop()  # the loops that this process keeps have descriptors of their own
    get_loop()
    warm.start()
    gc.collect()
    before = _descriptors()
    yield
    cached.close_all()
    close_all()
    if getattr(request.module, "CONNECTS", False):  # clients of storage keep their connections
        return
    gc.collect()
    end = time.monotonic() + 60  # a process that was killed is reaped by a thread
    while left := _descriptors() - before:
        assert time.monotonic() < end, f"left open: {sorted(left)}"
        time.sleep(0.01)
        gc.collect()  # an error that a test raised refers to its frame, and a thread may have held both until now


def _descriptors() -> set[tuple[str, str]]:
    """What is open, and as what. Others (servers of other tests, in this process) may close theirs meanwhile."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver that does not answer a cancel is killed after 0.5 s instead of 2.5 s."""
    monkeypatch.setattr(link, "ACKNOWLEDGE_S", 0.5)


@pytest.fixture
def until() -> Until:
    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "not within 60 s"
            time.sleep(0.005)

    return wait


@pytest.fixture
def children() -> Callable[[], list[int]]:
    """The writer processes of this one."""

    def find() -> list[int]:
        found = []
        for task in Path("/proc/self/task").iterdir():
            try:
                found += [int(pid) for pid in (task / "children").read_text().split()]
            except OSError:
                continue  # the thread has ended
        return [pid for pid in found if _is_saver(pid)]

    return find


def _is_saver(pid: int) -> bool:
    try:
        return b"sidestream._worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
