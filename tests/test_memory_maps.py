"""Memory maps are unmapped by one thread, in small pieces, wherever their last reference is dropped."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestream
from sidestream import blocking
from sidestream._runtime import memory_maps
from sidestream._runtime.memory_maps import MemoryMap, address_of, wait_unmapped
from sidestream._runtime.threads import Deadline, Stop
from sidestream._staging.arena import Arena

MIB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        bounds = (line.split()[0].split("-") for line in lines)
        return any(int(start, 16) <= address < int(end, 16) for start, end in bounds)


class Holding(MemoryMap):
    """Keeps the thread that unmaps busy until ``go``."""

    busy: threading.Event
    go: threading.Event

    def unused(self) -> bool:
        self.busy.set()
        return self.go.wait(60)


@contextmanager
def nothing_unmapped() -> Iterator[None]:
    """Within this, the thread unmaps nothing. At the end it has unmapped all that was dropped."""
    holding = Holding(-1, 4096)
    busy, go = holding.busy, holding.go = threading.Event(), threading.Event()
    del holding
    try:
        assert busy.wait(60)
        yield
    finally:
        go.set()
    gc.collect()
    assert wait_unmapped(Deadline.after(60))


def a_map(tmp_path: Path) -> tuple[Any, int]:
    memory = MemoryMap(-1, 16 * MIB)
    return memory, address_of(memory)


def memory_of_an_arena(tmp_path: Path) -> tuple[Any, int]:
    lease = Arena(64 * MIB).lease(9 * MIB, deadline=Deadline.after(60), stop=Stop())
    return torch.frombuffer(lease.array, dtype=torch.uint8), lease.address


def shared_memory_of_an_arena(tmp_path: Path) -> tuple[Any, int]:
    lease = Arena(64 * MIB, backing="shared").lease(9 * MIB, deadline=Deadline.after(60), stop=Stop())
    return lease.view, lease.address


def a_mapped_checkpoint(tmp_path: Path) -> tuple[Any, int]:
    blocking.save({"t": torch.arange(MIB)}, tmp_path / "c")
    checkpoint = blocking.open_checkpoint(tmp_path / "c")
    tensor = checkpoint.state_dict(memory="mapped")["t"]
    return tensor, tensor.data_ptr()


KINDS = [a_map, memory_of_an_arena, shared_memory_of_an_arena, a_mapped_checkpoint]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_unmapped_on_the_loop(kind: Callable[[Path], tuple[Any, int]], tmp_path: Path) -> None:
    held, address = kind(tmp_path)
    gc.collect()

    async def drop() -> bool:
        nonlocal held
        held = None
        gc.collect()
        return mapped(address)

    with nothing_unmapped():
        assert asyncio.run(drop()), "its last reference unmapped it"
    assert not mapped(address)


def test_other_threads_map_memory_between_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a piece is returned, the kernel lets no thread map memory, so a piece is small."""
    pieces: list[tuple[str, int]] = []
    advise = memory_maps.advise

    def noted(address: int, nbytes: int, advice: int) -> int:
        result = advise(address, nbytes, advice)
        pieces.append((threading.current_thread().name, nbytes))
        other = threading.Thread(target=lambda: mmap.mmap(-1, MIB).close())
        other.start()
        other.join(60)
        assert not other.is_alive()
        return result

    memory = MemoryMap(-1, 37 * MIB)
    memory[:] = b"x" * len(memory)
    assert wait_unmapped(Deadline.after(60))
    monkeypatch.setattr(memory_maps, "advise", noted)
    del memory
    assert wait_unmapped(Deadline.after(60))
    assert {name for name, _ in pieces} == {"sidestream-unmap"}
    assert sum(nbytes for _, nbytes in pieces) == 37 * MIB
    assert max(nbytes for _, nbytes in pieces) <= 4 * MIB


def test_the_pages_are_gone_before_the_rest_is_unmapped() -> None:
    """Otherwise unmapping it would return all of them in one call."""
    resident: list[int] = []

    class Watched(MemoryMap):
        def __init__(self, *_: object) -> None:
            self.ended = lambda outcome: resident.append(pages_at(address))

    memory = Watched(-1, 16 * MIB)
    address = address_of(memory)
    memory[:] = b"x" * len(memory)
    kept = memoryview(memory)  # the thread returns the pages, and this keeps the map
    assert pages_at(address) >= 15 * MIB
    memory_maps._unmapping.take(memory)
    assert wait_unmapped(Deadline.after(60))
    assert resident == [0]
    kept.release()


def pages_at(address: int) -> int:
    """The resident bytes of the map at ``address``."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                start, end = (int(one, 16) for one in first.split("-"))
                inside = start <= address < end
            elif inside and first == "Rss:":
                return int(line.split()[1]) << 10
    return 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_unmaps_what_it_has_inherited() -> None:
    memory = MemoryMap(-1, MIB)
    address = address_of(memory)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            before = mapped(address)
            del memory
            status = 0 if before and not mapped(address) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mapped(address)


WITHOUT_THREADS = """
    import threading
    def refused(self):
        raise RuntimeError("can't start new thread")
    threading.Thread.start = refused
    from sidestream._runtime.memory_maps import MemoryMap, address_of
    memory = MemoryMap(-1, 1 << 20)
    address = address_of(memory)
    def mapped():
        with open("/proc/self/maps") as lines:
            bounds = [line.split()[0].split("-") for line in lines]
        return any(int(start, 16) <= address < int(end, 16) for start, end in bounds)
    before = mapped()
    del memory
    print(before, mapped())
"""


AT_THE_END = """
    import builtins
    from sidestream._runtime.memory_maps import MemoryMap
    from sidestream._staging.arena import _map
    builtins.kept = [MemoryMap(-1, 1 << 20), _map(1 << 20, "private"), _map(1 << 20, "shared")]
    print("done")
"""


@pytest.mark.parametrize(("program", "printed"), [(WITHOUT_THREADS, "True False"), (AT_THE_END, "done")])
def test_without_a_thread_memory_is_unmapped_where_it_dies(program: str, printed: str) -> None:
    """The system starts none, or the interpreter ends."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stdout.strip(), done.stderr, done.returncode) == (printed, "", 0)


def test_the_package_makes_no_other_maps() -> None:
    """Apart from the writer process, which has no loop to hold up."""
    sources = Path(sidestream.__file__).parent
    found = {
        str(path.relative_to(sources))
        for path in sources.rglob("*.py")
        if re.search(r"(?<!def )\bmmap\((?!\))", path.read_text(encoding="utf-8"))
    }
    assert found == {"_worker/main.py"}
