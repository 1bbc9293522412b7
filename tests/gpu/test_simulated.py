"""Tests that hold, break and count a device: on the simulated CUDA runtime only, in ``nox -s cuda_sim``."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from leases import nothing_kept

import sidestream
from sidestream._runtime.memory_maps import wait_unmapped
from sidestream._runtime.threads import Deadline
from sidestream._staging import AsyncStager
from sidestream.errors import ArenaExhaustedError, ClosedError, DeadlineExceededError, DeviceError

if "CUDASIM_BUILD" not in os.environ:
    pytest.skip("needs the simulated CUDA runtime: nox -s cuda_sim", allow_module_level=True)

import cudasim  # tests/cudasim/run.sh puts it on the path

BUDGET_BYTES = 1 << 28


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    nothing_kept()
    before = cudasim.state()["registrations"]
    yield
    assert nothing_kept()
    assert cudasim.state()["registrations"] == before
    assert cudasim.state()["violations"] == "0"


def script(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, and return its output and exit status."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False
    )


def large(value: float = 1.0) -> torch.Tensor:
    return torch.full((1 << 22,), value, device="cuda")


# --- registered memory is released ---


CONTEXTS = """
import asyncio, gc, pathlib, sys, threading
import cudasim, torch, sidestream
from sidestream._staging import AsyncStager
from sidestream._staging.blocking import BlockingAsyncStager

torch.cuda.set_device(1)
folder = pathlib.Path(sys.argv[1])
state = {"t": torch.ones(1 << 20, device="cuda"), "s": [torch.ones(3, device="cuda")]}
host = {"h": torch.ones(1 << 16), **state}
budget = {"budget_bytes": 1 << 28}


def check(what):
    contexts = cudasim.state()["contexts"]
    print(contexts, what)


async def main():
    for mode in ("lazy", "eager"):
        stager = AsyncStager(mode=mode, **budget)
        await stager.prewarm(state)
        future = stager.stage(host)
        stager.fence()
        copies = await future
        check(f"a stage, {mode}")
        kept = copies["t"]
        copies.release()
        del copies, future
        stager.trim()
        check("trim()")
        await stager.aclose()
        check("aclose()")
        ring = [kept]
        ring.append(ring)
        del kept, ring
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        check("the last tensor, in a collection of another thread")
    await sidestream.save(host, folder / "a")
    check("save()")
    await sidestream.save(host, folder / "b", options=sidestream.SaveOptions(writer="process"))
    check("save(writer='process')")
    await sidestream.load(host, folder / "a")
    check("load()")
    await sidestream.load(host, folder / "a", options=sidestream.LoadOptions(atomic=True))
    check("load(atomic=True)")
    checkpoint = await sidestream.open_checkpoint(folder / "a")
    await checkpoint.tensor("t", device="cuda:1")
    await checkpoint.state_dict(memory=torch.device("cuda:1"))
    check("open_checkpoint()")
    async with sidestream.Checkpointer(folder / "run") as run:
        await run.save(state, step=1)
        await run.restore(state)
    check("Checkpointer")


asyncio.run(main())
stager = AsyncStager(mode="eager", **budget)
sidestream.blocking.save(host, folder / "c", stager=stager)
sidestream.blocking.load(host, folder / "c")
check("sidestream.blocking")
stager.close()
check("close()")
stager = BlockingAsyncStager(**budget)
for _ in range(2):
    stager.stage(host)
stager.close()
check("BlockingAsyncStager")
gc.collect()
check("a collection")
"""


def test_everything_on_the_second_device_makes_no_context_on_the_first(tmp_path: Path) -> None:
    ended = script(CONTEXTS, tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) >= 18
    assert [line for line in lines if not line.startswith("01 ")] == [], ended.stdout


@contextmanager
def capture_elsewhere() -> Iterator[None]:
    """Within, another thread captures a graph in the mode that careless calls of any thread end with an error."""
    ones = torch.ones(10, device="cuda")
    torch.cuda.synchronize()
    begun, over = threading.Event(), threading.Event()
    failed: list[str] = []

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.capture_begin(capture_error_mode="global")
                ones * 2
                begun.set()
                over.wait(60)
                graph.capture_end()
        except RuntimeError as error:
            failed.append(str(error))
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(60)
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed
    ones + 1  # no error is left in this thread


@pytest.mark.parametrize("way", ["trim", "close", "aclose", "a tensor", "a collection on the loop"])
def test_captures_of_other_threads_go_on_while_memory_is_given_back(way: str) -> None:
    async def run() -> None:
        stager = AsyncStager(budget_bytes=BUDGET_BYTES)
        copies = await stager.stage({"t": large()})
        kept = [copies["t"]]
        copies.release()
        del copies
        if way in ("a tensor", "a collection on the loop"):
            await stager.aclose()
            kept.append(kept)  # type: ignore[arg-type]
        else:
            kept.clear()
            await settled(stager)
        with capture_elsewhere():
            match way:
                case "trim":
                    stager.trim()
                case "close":
                    stager.close()
                case "aclose":
                    await stager.aclose()
                case "a tensor":
                    kept.clear()
                case _:
                    del kept
                    gc.collect()
            assert wait_unmapped(Deadline.after(60))
        await stager.aclose()

    asyncio.run(run())
    assert cudasim.state()["registrations"] == "0"


def test_memory_that_the_device_does_not_unregister_stays_mapped() -> None:
    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            (await stager.stage({"t": large()})).release()
            await settled(stager)
            reserved = stager.statistics().reserved_bytes
            cudasim.fail_call("cudaHostUnregister", code=900, times=2)  # trim() tries it twice
            stager.trim()
            assert stager.statistics().kept_bytes == stager.statistics().reserved_bytes == reserved
            assert cudasim.state()["registrations"] == "1"
            (await stager.stage({"t": large(2.0)})).release()
            stager.trim()  # tries it again
            assert stager.statistics().kept_bytes == 0
            large() + 1

    asyncio.run(run())


async def settled(stager: AsyncStager) -> None:
    """The device's thread has left the call that resolved the future."""
    async with asyncio.timeout(60):
        while stager.statistics().leases:
            await asyncio.sleep(0.001)


# --- errors ---


@pytest.mark.parametrize("code", [2, 700, 712, 900])
def test_a_registration_that_fails(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            cudasim.fail_call("cudaHostRegister", code=code)
            expected = ArenaExhaustedError if code == 2 else DeviceError
            with pytest.raises(
                expected, match=rf"cudaHostRegister of \d+ bytes: CUDA error: .*cudaError {code}"
            ) as seen:
                await stager.stage({"model": {"t": large()}})
            assert ("lower budget_bytes=" in str(seen.value)) == (code == 2)
            assert ("model.t: " in str(seen.value)) == (code != 2)
            copies = await stager.stage({"t": large(3.0)})
            assert bool((copies["t"] == 3).all())
            copies.release()

    asyncio.run(run())
    assert "Traceback" not in capfd.readouterr().err


ERRORS = """
import asyncio, os, sys
import cudasim, torch, sidestream
from sidestream._staging import AsyncStager

where = sys.argv[1]


async def say(name, call):
    try:
        result = call()
        if result is not None:
            await result
        print(name, "ok")
    except Exception as error:
        print(name, type(error).__name__, error)


async def main():
    state = {"model": {"w": torch.ones(1 << 22, device="cuda")}}
    await sidestream.save(state, where + "/a")
    torch.cuda.synchronize()
    stager, other = AsyncStager(budget_bytes=1 << 28), AsyncStager(budget_bytes=1 << 28)
    (await stager.stage(state)).release()
    with cudasim.held(torch.cuda.current_stream()):
        future, synchronized = stager.stage(state), stager.synchronize_staging()
        await asyncio.to_thread(lambda: [one.issued.result(60) for one in stager._stagings])
        registering = other.stage(state)  # has yet to map and register its memory
        cudasim.fail_device()
        await say("fence", stager.fence)
    await say("future", lambda: future)
    await say("synchronize_staging", lambda: synchronized)
    await say("registering", lambda: registering)
    await say("stage", lambda: stager.stage(state) and None)
    await say("save", lambda: sidestream.save(state, where + "/b"))
    await say("save with a stager", lambda: sidestream.save(state, where + "/c", stager=stager))
    await say("load", lambda: sidestream.load(state, where + "/a"))
    await say("tensor", lambda: checkpoint_tensor(where + "/a"))
    await say("aclose", stager.aclose)
    sys.stdout.flush()
    os._exit(0)


async def checkpoint_tensor(url):
    await (await sidestream.open_checkpoint(url)).tensor("model.w", device="cuda")


asyncio.run(main())
"""


def test_every_call_on_a_broken_device_says_so(tmp_path: Path) -> None:
    ended = script(ERRORS, tmp_path)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines.pop() == "aclose ok"  # all errors have been retrieved
    assert len(lines) == 9, ended.stdout
    for line in lines:
        assert "DeviceError" in line, line
        assert "an illegal memory access was encountered" in line, line
        assert ("while loading to cuda" if line.split()[0] in ("load", "tensor") else "model.w: ") in line, line
    assert "Traceback" not in ended.stderr


# --- the end of the process ---


LATE = """
import sys, time
import cudasim, torch
from sidestream._staging import AsyncStager


class Late:
    # The device answers while the interpreter ends: nothing of Python runs any more in other threads.
    def __init__(self):
        self.hold, self.sleep, self.answers = cudasim._library().cudasim_hold_sides, time.sleep, sys.argv[1] == "late"

    def __del__(self):
        if self.answers:
            self.hold(0)
            self.sleep(1)


source = torch.ones(1 << 20, device="cuda")
stager = AsyncStager(budget_bytes=1 << 28)
stager.stage({"t": source}).result(60).release()
late = Late()
cudasim.hold_sides()
future = stager.stage({"t": source})
print(time.time(), flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("answer", ["never", "late"])
def test_a_process_ends_though_the_device_does_not_answer(answer: str) -> None:
    ended = script(LATE, answer)
    assert ended.returncode == 7, ended.stderr
    assert time.time() - float(ended.stdout) < 10, "3 s, and what the machine takes"


# --- a full device, and a device that hangs ---


FULL = """
import cudasim, torch
from sidestream._staging import AsyncStager

source = torch.ones(64 << 18, device="cuda")
cached = [torch.empty(20 << 20, dtype=torch.uint8, device="cuda") for _ in range(8)]
rest = torch.cuda.mem_get_info()[0] // (2 << 20) * (2 << 20)
full = torch.empty(rest, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
del cached


def kept_by_torch():
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


before = kept_by_torch()
for _ in range(2):
    stager = AsyncStager(budget_bytes=1 << 28)
    assert bool((stager.stage({"t": source}).result(60)["t"] == 1).all())
    stager.close()
    assert kept_by_torch() == before, "torch had to give its cache back"
    torch.cuda.empty_cache()  # the second time there is nothing else to give
    before = kept_by_torch()
    cudasim.fail_call("cudaMalloc", times=10**6)
"""


def test_a_lazy_stage_needs_no_memory_of_a_full_device() -> None:
    ended = script(FULL, CUDASIM_MEMORY_GB="0.5")
    assert ended.returncode == 0, ended.stderr
    assert "OOM" not in ended.stderr


@pytest.mark.parametrize("own", [False, True], ids=["a stager", "none"])
def test_a_cancelled_save_leaves_a_device_that_stands_still(own: bool, tmp_path: Path) -> None:
    async def run() -> None:
        source, stager = large(), AsyncStager(budget_bytes=BUDGET_BYTES)
        torch.cuda.synchronize()
        with cudasim.held(torch.cuda.current_stream()):
            saving = asyncio.create_task(
                sidestream.save(
                    {"t": source},
                    tmp_path / "c",
                    stager=None if own else stager,
                    options=sidestream.SaveOptions(timeout_s=600),
                )
            )
            await asyncio.sleep(0.5)
            saving.cancel()
            async with asyncio.timeout(60):
                with pytest.raises(asyncio.CancelledError):
                    await saving
        assert not (tmp_path / "c").exists()
        await stager.aclose()

    asyncio.run(run())
    torch.cuda.synchronize()


async def closed(stager: AsyncStager) -> None:
    stager.close()


@pytest.mark.parametrize("close", [closed, AsyncStager.aclose], ids=["close", "aclose"])
def test_closing_beside_a_device_that_stands_still(close: Callable[..., Any]) -> None:
    async def run() -> None:
        source, stager = large(), AsyncStager(budget_bytes=BUDGET_BYTES, timeout_s=5.0)
        torch.cuda.synchronize()
        with cudasim.held(torch.cuda.current_stream()):
            future = stager.stage({"t": source})
            with pytest.raises(DeadlineExceededError, match="did not end"):
                await close(stager)
            with pytest.raises(ClosedError):
                await future
            assert cudasim.state()["registrations"] == "1"
        torch.cuda.synchronize()
        await settled(stager)

    asyncio.run(run())
