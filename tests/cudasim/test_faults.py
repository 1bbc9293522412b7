"""Devices that fail, have no memory, do not answer, or record graphs, and processes that fork or end, at each phase.

Each row ends the same way: a typed error in bounded time, everything given back, and the next stage is right. An
asynchronous error stays on a real device until the process ends; ``cudasim.heal()`` ends it, so that the rows can show
that nothing was left behind.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from leases import nothing_kept

import sidestream
from sidestream._runtime.memory_maps import wait_unmapped
from sidestream._runtime.threads import Deadline
from sidestream._staging import AsyncStager
from sidestream.errors import ArenaExhaustedError, ClosedError, DeadlineExceededError, DeviceError, GraphCaptureError
from sidestream.options import StageMode

cudasim: Any = pytest.importorskip("cudasim", reason="needs the simulated CUDA runtime")
if not getattr(cudasim, "active", bool)():  # without it the name may stand for this folder
    pytest.skip("needs the simulated CUDA runtime", allow_module_level=True)

MODES: tuple[StageMode, ...] = ("lazy", "eager")
BUDGET_BYTES = 1 << 28
LARGE = 1 << 20  # elements: 4 MiB of float32, beyond what is coalesced
BOUND_S = 60.0  # against a hang, on a busy machine
EXIT_BOUND_S = 5.0  # a promise: from the decision to exit until nothing of the library delays it any more
DEVICES = range(torch.cuda.device_count())


def synchronize() -> None:
    for device in DEVICES:
        torch.cuda.synchronize(device)


def left() -> tuple[str, str, tuple[int, ...]]:
    """Registrations, contexts and device memory, once everything that is on its way back has come back."""
    synchronize()
    assert nothing_kept()
    state = cudasim.state()
    return state["registrations"], state["contexts"], tuple(map(torch.cuda.memory_allocated, DEVICES))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    cudasim.heal()
    for device in DEVICES:
        torch.ones(1, device=f"cuda:{device}")
    before = left()
    yield
    cudasim.hold_sides(False)
    cudasim.heal()
    end = time.monotonic() + BOUND_S
    while left() != before and time.monotonic() < end:
        time.sleep(0.01)  # a device's thread may still be leaving the call that resolved the last future
    assert left() == before
    assert cudasim.state()["violations"] == "0"
    assert cudasim.state()["queued"] == "0"


def state_of(value: float, device: str = "cuda:0") -> dict[str, Any]:
    """Large, small, strided and lazily conjugated tensors, and one in host memory."""
    whole = torch.full((LARGE,), value, device=device)
    return {
        "large": whole,
        "part": torch.full((LARGE,), value, device=device)[1::2],
        "conj": torch.full((LARGE // 2,), complex(value, 0), device=device).conj(),
        "small": [torch.full((7,), value, device=device), torch.full((), value, device=device)],
        "host": torch.full((100,), value),
    }


def assert_holds(copies: Any, value: float) -> None:
    for tensor in (copies["large"], copies["part"], copies["conj"].real, *copies["small"], copies["host"]):
        assert tensor.device.type == "cpu"
        assert bool((tensor == value).all())


async def assert_works(stager: AsyncStager, value: float, device: str = "cuda:0") -> None:
    async with asyncio.timeout(BOUND_S):
        copies = await stager.stage(state_of(value, device))
    assert_holds(copies, value)
    copies.release()


# --- registering fails ---


async def _stage(stager: AsyncStager, _: Path) -> None:
    await stager.stage(state_of(1.0))


async def _prewarm(stager: AsyncStager, _: Path) -> None:
    await stager.prewarm(state_of(1.0))


async def _save(stager: AsyncStager, target: Path) -> None:
    await sidestream.save(state_of(1.0), target, stager=stager)


async def _save_alone(_: AsyncStager, target: Path) -> None:
    await sidestream.save(state_of(1.0), target)


ROWS = [(_stage, mode) for mode in MODES] + [(_prewarm, "lazy"), (_save, "eager"), (_save_alone, "lazy")]


@pytest.mark.parametrize(("call", "mode"), ROWS)
@pytest.mark.parametrize("code", [2, 700, 712, 900])
def test_a_registration_fails(
    code: int, call: Callable[..., Awaitable[None]], mode: StageMode, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode) as stager:
            cudasim.fail_call("cudaHostRegister", code=code)
            with pytest.raises((ArenaExhaustedError, DeviceError), match=f"cudaError {code}") as seen:
                async with asyncio.timeout(BOUND_S):
                    await call(stager, tmp_path / "a")
            assert type(seen.value) is (ArenaExhaustedError if code == 2 else DeviceError)
            assert not (tmp_path / "a" / ".metadata").exists()
            await assert_works(stager, 2.0)
            await sidestream.save(
                state_of(3.0), tmp_path / "b", stager=stager, options=sidestream.SaveOptions(durability="flush")
            )

    asyncio.run(run())
    torch.ones(1, device="cuda") + 1  # no error is left behind for the next kernel
    assert "Traceback" not in capfd.readouterr().err


# --- no device memory ---


@contextmanager
def no_device_memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    cudasim.fail_call("cudaMalloc", times=10**9)
    try:
        yield
    finally:
        cudasim.heal()


@pytest.mark.parametrize("mode", MODES)
def test_a_full_device(mode: StageMode) -> None:
    async def run() -> None:
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode) as stager:
            for _ in range(2):  # as in a run: stages before the one that finds the device full
                future = stager.stage({"t": torch.full((LARGE,), 1.0, device="cuda")})
                stager.fence()
                (await future).release()
                del future
            large, state = {"t": torch.full((4 * LARGE,), 5.0, device="cuda")}, state_of(5.0)
            synchronize()
            with no_device_memory():
                if mode == "eager":
                    message = r'cuda:0 does not have 16777216 bytes left.* mode="lazy"'
                    with pytest.raises(ArenaExhaustedError, match=message):
                        stager.stage(large)
                else:
                    copies = await stager.stage(large)
                    assert bool((copies["t"] == 5).all())
                    copies.release()
                    del copies
                if mode == "lazy":  # also those that would be gathered or made contiguous on the device
                    copies = await stager.stage(state)
                    assert_holds(copies, 5.0)
                    copies.release()
                    del copies
                stager.fence()
            await assert_works(stager, 6.0)

    asyncio.run(run())


# --- errors in the middle of the work ---


def elsewhere(stager: AsyncStager) -> None:
    """In a thread that has made no call on the device that failed: the second device works."""
    torch.cuda.set_device(1)
    asyncio.run(assert_works(stager, 2.0, "cuda:1"))


async def says_so(call: Callable[[], Any], text: str = "CUDA error: ") -> bool:
    """Whether ``call`` fails, as calls do whose device has failed."""
    try:
        result = call()
        if result is not None:
            await result
    except DeviceError as error:
        if text not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize(("mode", "code"), [("lazy", 700), ("eager", 719), ("lazy", 214)])
def test_the_device_fails_at_each_copy(
    mode: StageMode, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def run(nth: int) -> bool:
        """Whether there were as many copies as ``nth``."""
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode) as other:
            stager = AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode)
            state = state_of(1.0)
            synchronize()
            cudasim.fail_copy(nth, code)
            failed = 0
            async with asyncio.timeout(BOUND_S):
                for call in (lambda: stager.stage(state), stager.synchronize_staging, lambda: stager.stage(state)):
                    failed += await says_so(call)
                    failed += await says_so(stager.fence)
                if failed:  # else this stage's copies would be the next to fail
                    await asyncio.to_thread(elsewhere, other)
                target = tmp_path / f"{nth}"
                not_saved = await says_so(
                    lambda: sidestream.save(
                        state, target, stager=stager, options=sidestream.SaveOptions(durability="flush")
                    )
                )
                assert (target / ".metadata").exists() is not not_saved
                failed += not_saved
                await stager.aclose()
        cudasim.heal()
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode) as stager:
            await assert_works(stager, 3.0)
            stager.trim()  # tries again to unregister what the device refused to
        return failed > 0

    nth = 1
    while asyncio.run(run(nth)):
        nth += 1
        assert nth < 100
    assert nth > 4, "the copies of two stages and a save were each hit"
    assert "Traceback" not in capfd.readouterr().err


def test_the_device_fails_at_each_copy_of_a_load(tmp_path: Path) -> None:
    async def run() -> int:
        await sidestream.save(state_of(1.0), tmp_path / "a")
        target = state_of(0.0)
        for nth in range(1, 100):
            synchronize()
            cudasim.fail_copy(nth)
            async with asyncio.timeout(BOUND_S):
                failed = await says_so(lambda: sidestream.load(target, tmp_path / "a"), "while loading to cuda")
            cudasim.heal()
            if not failed:
                break
            synchronize()
        assert bool((target["large"] == 1).all())
        assert bool((target["part"] == 1).all())
        return nth

    assert asyncio.run(run()) > 3


# --- copies that never end ---


@pytest.mark.parametrize("mode", MODES)
def test_copies_that_never_end(mode: StageMode, tmp_path: Path) -> None:
    async def run() -> None:
        stager = AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode, timeout_s=5.0)
        await stager.reserve(1 << 26)
        await assert_works(stager, 1.0)  # the side stream exists
        state = state_of(2.0)
        synchronize()
        cudasim.hold_sides()
        async with asyncio.timeout(BOUND_S):
            future = stager.stage(state)
            stager.fence()  # the device waits, the host does not
            with pytest.raises(DeadlineExceededError):
                await sidestream.save(
                    state, tmp_path / "a", stager=stager, options=sidestream.SaveOptions(timeout_s=1.0)
                )
            assert not (tmp_path / "a" / ".metadata").exists()
            with pytest.raises(DeadlineExceededError, match="did not end within timeout_s=5"):
                await stager.aclose()
            with pytest.raises(ClosedError):
                await future
        assert cudasim.state()["registrations"] != "0", "the device may still write into it"
        cudasim.hold_sides(False)
        async with AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode) as stager:
            await assert_works(stager, 3.0)

    asyncio.run(run())


def test_a_load_onto_a_stream_that_stands_still(tmp_path: Path) -> None:
    async def run() -> None:
        await sidestream.save(state_of(1.0), tmp_path / "a")
        target = state_of(0.0)
        synchronize()
        with cudasim.held(torch.cuda.current_stream()):
            async with asyncio.timeout(BOUND_S):
                with pytest.raises(DeadlineExceededError):
                    await sidestream.load(target, tmp_path / "a", options=sidestream.LoadOptions(timeout_s=1.0))
        synchronize()
        await sidestream.load(target, tmp_path / "a")
        assert bool((target["large"] == 1).all())

    asyncio.run(run())


# --- captures ---


@contextmanager
def capture_elsewhere(failed: list[str]) -> Iterator[None]:
    """Within, another thread captures a graph in the mode that careless calls of any thread end with an error."""
    ones = torch.ones(10, device="cuda")
    synchronize()
    begun, over = threading.Event(), threading.Event()

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.capture_begin(capture_error_mode="global")
                ones * 2
                begun.set()
                over.wait(BOUND_S)
                graph.capture_end()
        except RuntimeError as error:
            failed.append(str(error))
            begun.set()

    thread = threading.Thread(target=capture)
    thread.start()
    begun.wait(BOUND_S)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("mode", MODES)
def test_a_capture_beside_every_call(mode: StageMode, tmp_path: Path) -> None:
    async def run() -> None:
        state, target = state_of(1.0), state_of(0.0)
        await sidestream.save(state, tmp_path / "a")
        checkpoint = await sidestream.open_checkpoint(tmp_path / "a")
        stager = AsyncStager(budget_bytes=BUDGET_BYTES, mode=mode)
        run = await sidestream.Checkpointer(tmp_path / "run", stager=stager).__aenter__()
        await assert_works(stager, 0.0)

        async def stage() -> None:
            (await stager.stage(state)).release()

        async def fenced() -> None:
            future = stager.stage(state)
            stager.fence()
            await stager.synchronize_staging()
            (await future).release()

        async def nothing(call: Callable[[], Any]) -> None:
            call()

        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "stage": stage,
            "fence and synchronize_staging": fenced,
            "statistics": lambda: nothing(stager.statistics),
            "trim": lambda: nothing(stager.trim),
            "reserve": lambda: stager.reserve(1 << 26),
            "save": lambda: sidestream.save(state, tmp_path / "b", stager=stager),
            "save without a stager": lambda: sidestream.save(state, tmp_path / "c"),
            "load": lambda: sidestream.load(target, tmp_path / "a"),
            "load(atomic=True)": lambda: sidestream.load(
                target, tmp_path / "a", options=sidestream.LoadOptions(atomic=True)
            ),
            "tensor": lambda: checkpoint.tensor("large", device="cuda:0"),
            "state_dict": lambda: checkpoint.state_dict(memory=torch.device("cuda:0")),
            "Checkpointer.save": lambda: run.async_save(state, step=1),
            "Checkpointer.restore": lambda: run.restore(target),
            "Checkpointer.aclose": run.aclose,
            "aclose": stager.aclose,
        }
        broken = {}
        for name, call in calls.items():
            failed: list[str] = []
            with capture_elsewhere(failed):
                async with asyncio.timeout(BOUND_S):
                    ended: Any = await call()
                    if isinstance(ended, sidestream.PendingSave):
                        await ended
                    del ended
                gc.collect()
                assert wait_unmapped(Deadline.after(BOUND_S))
            if failed:
                broken[name] = failed
        assert broken == {}
        assert bool((target["large"] == 1).all())
        assert nothing_kept()
        assert cudasim.state()["registrations"] == "0"

    asyncio.run(run())
    torch.ones(1, device="cuda") + 1


def test_every_call_within_a_capture(tmp_path: Path) -> None:
    async def run() -> None:
        state = state_of(1.0)
        await sidestream.save(state, tmp_path / "a")
        async with AsyncStager(budget_bytes=BUDGET_BYTES) as stager:
            future = stager.stage(state)
            await asyncio.sleep(0)
            graph, source = torch.cuda.CUDAGraph(), torch.ones(10, device="cuda")
            synchronize()
            with torch.cuda.graph(graph):
                result = source * 2
                with pytest.raises(GraphCaptureError):
                    stager.stage(state)
                with pytest.raises(GraphCaptureError):
                    await sidestream.save(state, tmp_path / "b", stager=stager)
                with pytest.raises(GraphCaptureError):
                    await sidestream.load(state, tmp_path / "a")
                with pytest.raises(GraphCaptureError):
                    await (await sidestream.open_checkpoint(tmp_path / "a")).tensor("large", device="cuda:0")
                stager.statistics()
                stager.trim()
                await stager.synchronize_staging()
            graph.replay()
            synchronize()
            assert bool((result == 2).all())
            assert not (tmp_path / "b").exists()
            assert_holds(await future, 1.0)
            del future
            await assert_works(stager, 2.0)

    asyncio.run(run())


# --- processes ---


FORK = """
import asyncio, os, sys, time
import cudasim, torch, sidestream
from sidestream.errors import ForkedProcessError
from sidestream._staging import AsyncStager

phase = sys.argv[1]
source = torch.full((1 << 20,), 3.0, device="cuda")
stager = AsyncStager(budget_bytes=1 << 28)
stager.stage({"t": source}).result(60).release()
torch.cuda.synchronize()
future = None
if phase != "idle":
    if phase == "held":
        cudasim.hold_sides()
    future = stager.stage({"t": source, "s": source[:7]})
    if phase == "done":
        future.result(60)
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: stager.stage({}), stager.synchronize_staging, stager.fence, lambda: stager.reserve(1)):
        try:
            call()
        except ForkedProcessError:
            refused += 1
    stager.close()
    asyncio.run(stager.aclose())
    del future, stager
    sys.exit(refused)
begun = time.monotonic()
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
cudasim.hold_sides(False)
if future is not None:
    copies = future.result(60)
    assert bool((copies["t"] == 3).all())
    copies.release()
    del copies, future
source.fill_(4.0)
assert bool((stager.stage({"t": source}).result(60)["t"] == 4).all())
stager.close()
assert cudasim.state()["registrations"] == "0", cudasim.state()
assert cudasim.state()["violations"] == "0"
print(status, time.monotonic() - begun)
"""


# torch is imported once, by a process that makes no call of CUDA and forks the others, two at a time.
FORKING = """
import atexit, json, os, sys, tempfile, time
import cudasim, torch
mark = []  # exit functions are called in reverse order: this one is after those that sidestream registers
atexit.register(lambda: print(*mark, time.time() - mark[0] if mark else "", flush=True))
import sidestream._staging, sidestream._save.api, sidestream._load.operation

rows, running, child = json.loads(sys.argv[1]), {}, False
while rows or running:
    while rows and len(running) < 2:
        row, files = rows.pop(), [tempfile.TemporaryFile() for _ in range(2)]
        process = os.fork()
        if process == 0:
            child = True
            break
        running[process] = row, files
    if child:
        break
    process, status = os.wait()
    row, files = running.pop(process)
    report = [row, os.waitstatus_to_exitcode(status), time.time()]
    for file in files:
        file.seek(0)
        report.append(file.read().decode())
    print(json.dumps(report), flush=True)
if not child:
    os._exit(0)
for number, file in enumerate(files, 1):
    os.dup2(file.fileno(), number)
sys.argv[1:] = row
"""


@dataclass(frozen=True)
class Ended:
    """The end of a process. ``at`` is the time, in seconds of ``time.time()``."""

    status: int
    at: float
    output: str
    errors: str


def scripts(code: str, arguments: list[tuple[str, ...]]) -> dict[tuple[str, ...], Ended]:
    """Run ``code`` in a process for each of ``arguments``."""
    command = [sys.executable, "-W", "ignore", "-c", FORKING + code, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(arguments), done.stderr
    return {tuple(row): Ended(*ended) for row, *ended in reports}


def test_forks_at_every_phase() -> None:
    phases = [("idle",), ("launched",), ("held",), ("done",)]
    for phase, child in scripts(FORK, phases).items():
        assert child.status == 0, (phase, child)
        assert child.output.split()[0] == "4", (phase, child)
        assert float(child.output.split()[1]) < BOUND_S, phase


EXIT = """
import asyncio, os, pathlib, sys, tempfile, time
import cudasim, torch, sidestream
from sidestream._staging import AsyncStager

phase, how = sys.argv[1:]
source = torch.full((1 << 20,), 3.0, device="cuda")
state = {"t": source, "s": source[:7].clone(), "c": torch.ones(1 << 19, dtype=torch.complex64, device="cuda").conj()}
stager = AsyncStager(budget_bytes=1 << 28, mode="eager" if phase == "eager" else "lazy")
folder = pathlib.Path(tempfile.mkdtemp())


async def main():
    keep = []
    if phase in ("launched", "eager"):
        keep.append(stager.stage(state))
    if phase == "registering":
        keep.append(stager.reserve(1 << 27))
    if phase in ("held", "copied", "closing"):
        (await stager.stage(state)).release()
        torch.cuda.synchronize()
    if phase in ("held", "closing"):
        cudasim.hold_sides()
        keep.append(stager.stage(state))
        stager.fence()
    if phase == "closing":
        keep.append(asyncio.create_task(stager.aclose()))
        await asyncio.sleep(0.1)
    if phase == "copied":
        keep.append(await stager.stage(state))
    if phase == "saving":
        keep.append(sidestream.async_save(state, folder / "a", stager=stager))
        await keep[0].staged
    if phase == "loading":
        await sidestream.save(state, folder / "a", stager=stager)
        keep.append(asyncio.create_task(sidestream.load(state, folder / "a")))
        await asyncio.sleep(0.001)
    mark.append(time.time())
    if how == "_exit":
        print(*mark, flush=True)
    if how == "exit":
        sys.exit(7)
    if how == "raise":
        raise KeyError("unhandled")
    if how == "_exit":
        os._exit(7)
    return keep


kept = asyncio.run(main())
"""


PHASES = ("idle", "launched", "eager", "registering", "held", "closing", "copied", "saving", "loading")
EXITS = {
    "exit": (7, PHASES),
    "raise": (1, ("launched", "held", "saving", "loading")),
    "return": (0, ("launched", "held", "saving", "loading")),
    "_exit": (7, ("launched", "held", "closing")),
}
"""For each way to end a process its exit status and the phases in which it ends."""


@pytest.mark.parametrize("how", EXITS)
def test_exits_at_every_phase(how: str) -> None:
    expected, phases = EXITS[how]
    wrong = {}
    for (phase, _), process in scripts(EXIT, [(phase, how) for phase in phases]).items():
        decided, *until_left_s = map(float, process.output.split())
        ended_s = process.at - decided
        # What follows the last exit function is the end of Python and torch, which take longer on a busy machine.
        took_s = until_left_s[0] if until_left_s else ended_s
        print(f"{phase}: {took_s:.2f} s, {ended_s:.2f} s until the process had ended, status {process.status}")
        in_time = took_s < EXIT_BOUND_S and len(until_left_s) == (how != "_exit")
        if process.status != expected or not in_time or "terminate called" in process.errors:
            wrong[phase] = (took_s, process)
    assert wrong == {}
