"""Staging from a GPU: which of its settings are right on this one, and what a checkpoint costs a training loop.

    python benchmarks/gpu.py [--sections NAMES] [--gigabytes N] [--json FILE] [--rehearsal]

Without CUDA it says so and ends. Each section is bounded in time, all of them together to eight minutes, and the JSON
is written after each. What the figures decide stands in ``docs/gpu.md``. ``--rehearsal`` executes every line with
small sizes, on a simulated device too; its figures mean nothing.

- copies: the rate of a stage against one copy of the same bytes into pinned memory, on an idle device and beside matrix
  products; how much slower the products get; how long ``item()`` on another stream takes meanwhile. For several chunk
  sizes, with and without a gap between chunks, with a side stream of high priority.
- first: what the first stage of a stager costs more than a later one: mapping, touching and registering memory.
- small: call and end of a stage of many small tensors, coalesced on the device or copied one by one.
- many: a stage of so many tensors that a queue with one copy for each would be full: the call, the fence, the rate.
- loads: to host memory, to the device, and by stock ``dcp.load``, from files in memory.
- hazard: in how many tries the copy is not the state at the call: work still queued at the call, and overwriting after
  it, with the fence and without; DCP's ``DefaultStager`` beside it.
- training: how much longer a loop with AdamW takes for each checkpoint, without ``state_dict()`` and without writing.
- capture: whether a CUDA graph can be captured while the stager's threads wait and copy. Last, because a broken capture
  may spoil the process.

The heap is collected and frozen before anything is measured (see ``staging.py``). Rivals run in interleaved rounds.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _common import describe, headline, quantile, still_heap, write_json
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import sidestream
from sidestream._staging import CudaDriver, DeviceEngine

State = dict[str, torch.Tensor]
Results = dict[str, Any]
DEVICE = "cuda"
MIB = 1 << 20
LIMIT_S = 480
REHEARSAL = False
clock = time.perf_counter


class Budget:
    """The seconds that a section has. What does not fit any more is left out, and said to be."""

    def __init__(self, seconds: float) -> None:
        self._end = clock() + seconds

    def over(self, what: str) -> bool:
        if clock() < self._end:
            return False
        print(f"  {what}: left out, the time of this section is over")
        return True


class NoGap(CudaDriver):
    def gap(self, device: Any) -> None: ...


class OwnStreams(CudaDriver):
    """Streams of its own, with a priority."""

    def __init__(self, priority: int) -> None:
        super().__init__()
        self._own = {0: [torch.cuda.Stream(0, priority=priority) for _ in range(2)]}

    def _streams(self, device: Any) -> Any:
        return self._own[torch.device(device).index or 0]


def new_stager(
    nbytes: int, *, driver: CudaDriver | None = None, engine: dict[str, int] | None = None, **options: Any
) -> sidestream.AsyncStager:
    """With room for two stages of ``nbytes``, and as much again for the small tensors."""
    made = DeviceEngine(driver or CudaDriver(), **(engine or {})) if DEVICE == "cuda" else None
    return sidestream.AsyncStager(budget_bytes=4 * nbytes + (64 << 20), engine=made, **options)


def size_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def wait(staged: Any) -> None:
    """Until a stage of whichever stager has ended; its memory may be used again."""
    result = staged.result() if hasattr(staged, "result") else staged
    if isinstance(result, sidestream.StagedState):
        result.release()


def fields(values: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def show(name: str, row: Results) -> None:
    print(f"  {name:44}{fields(row)}", flush=True)


# --- copies ---


def copies(budget: Budget, state: State) -> Results:
    nbytes = size_of(state)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=DEVICE == "cuda")
    results: Results = {"one pinned copy, GB/s": nbytes / min(pinned_copy(state, pinned) for _ in range(5)) / 1e9}
    show("one pinned copy per tensor", results)
    del pinned
    product = Product()
    settings: dict[str, tuple[CudaDriver, dict[str, int]]] = {"as it is": (CudaDriver(), {})}
    for chunk in (8, 32, 128, 512):
        settings[f"{chunk} MiB"] = (CudaDriver(), {"chunk_bytes": chunk * MIB})
    settings["32 MiB, no gap"] = (NoGap(), {"chunk_bytes": 32 * MIB})
    settings["one chunk"] = (NoGap(), {"chunk_bytes": 1 << 40})
    settings["32 MiB, priority 0"] = (OwnStreams(0), {"chunk_bytes": 32 * MIB})
    settings["32 MiB, priority -1"] = (OwnStreams(-1), {"chunk_bytes": 32 * MIB})
    for name, (driver, engine) in settings.items():
        if budget.over(name):
            break
        stager = new_stager(nbytes, driver=driver, engine=engine)
        wait(stager.stage(state))
        idle = [staging(stager, state) for _ in range(5)]
        beside, products = zip(*(product.beside(stager, state) for _ in range(3)), strict=True)
        latencies = [one for _ in range(3) for one in item_latencies(stager, state)]
        stager.close()
        results[name] = {
            "GB/s": nbytes / statistics.median(idle) / 1e9,
            "x pinned copy": nbytes / statistics.median(idle) / 1e9 / results["one pinned copy, GB/s"],
            "GB/s beside products": nbytes / statistics.median(beside) / 1e9,
            "products slower by": statistics.median(products) / product.alone - 1,
            "item() p50 ms": quantile(latencies, 0.5) * 1e3,
            "p99 ms": quantile(latencies, 0.99) * 1e3,
            "max ms": max(latencies) * 1e3,
        }
        show(name, results[name])
    return results


def pinned_copy(state: State, target: torch.Tensor) -> float:
    torch.cuda.synchronize()
    start, at = clock(), 0
    for tensor in state.values():
        target[at : at + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
        at += tensor.nbytes
    torch.cuda.synchronize()
    return clock() - start


def staging(stager: sidestream.AsyncStager, state: State) -> float:
    torch.cuda.synchronize()
    start = clock()
    future = stager.stage(state)
    future.exception()  # waits
    seconds = clock() - start
    wait(future)
    return seconds


class Product:
    """Matrix products that keep all of the device busy."""

    def __init__(self, size: int = 8192, count: int = 100) -> None:
        if REHEARSAL:
            size, count = 64, 2
        self._a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
        self._out = torch.empty_like(self._a)
        self._count = count
        self.run()
        self.alone = statistics.median(self.timed() for _ in range(3))

    def run(self) -> None:
        for _ in range(self._count):
            torch.matmul(self._a, self._a, out=self._out)

    def timed(self) -> float:
        torch.cuda.synchronize()
        start = clock()
        self.run()
        torch.cuda.synchronize()
        return clock() - start

    def beside(self, stager: sidestream.AsyncStager, state: State) -> tuple[float, float]:
        """Seconds of a stage and of the products beside it. The products outlast it: their share is what counts."""
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = clock()
        future = stager.stage(state)
        begin.record()
        self.run()
        end.record()
        future.exception()
        seconds = clock() - start
        torch.cuda.synchronize()
        wait(future)
        return seconds, begin.elapsed_time(end) / 1e3


def item_latencies(stager: sidestream.AsyncStager, state: State) -> list[float]:
    """Seconds that ``item()`` takes on a stream that waits for nothing, until the stage beside it has ended."""
    loss = torch.ones(1, device=DEVICE)
    loss.item()
    future = stager.stage(state)
    taken = []
    while not future.done() or not taken:
        start = clock()
        loss.item()
        taken.append(clock() - start)
    wait(future)
    return taken


# --- first ---


def first(budget: Budget, state: State) -> Results:
    nbytes = size_of(state)
    stager = new_stager(nbytes)
    seconds = [staging(stager, state) for _ in range(3)]
    stager.close()
    results: Results = {"first s": seconds[0], "later s": min(seconds[1:])}
    results["ms per GB"] = (seconds[0] - min(seconds[1:])) / nbytes * 1e12
    show(f"{nbytes / 1e9:.1f} GB", results)
    for mib in (256, 257):
        if DEVICE == "cuda" and not budget.over(f"pin_memory of {mib} MiB"):
            start = clock()
            pinned = torch.empty(mib * MIB, dtype=torch.uint8, pin_memory=True)
            row = {"ms per GB": (clock() - start) / pinned.nbytes * 1e12}
            results[f"torch.empty(pin_memory=True), {mib} MiB"] = row
            show(f"torch.empty(pin_memory=True), {mib} MiB", row)
    return results


# --- small ---


def small(budget: Budget, _: State) -> Results:
    results: Results = {}
    for count, kib in ((10, 1), (64, 1), (1_000, 1), (10_000, 1), (1_000, 64), (1_000, 512), (500, 2048)):
        state = {f"t{index}": torch.ones(kib << 8, device=DEVICE) for index in range(count)}
        for how, small_bytes in (("coalesced", 4 * MIB), ("one by one", 0), ("as it is", None)):
            name = f"{count:,} x {kib} KiB, {how}"
            if budget.over(name):
                return results
            stager = new_stager(size_of(state), engine={} if small_bytes is None else {"small_bytes": small_bytes})
            wait(stager.stage(state))
            calls, ends = [], []
            for _ in range(5):
                torch.cuda.synchronize()
                start = clock()
                future = stager.stage(state)
                calls.append(clock() - start)
                future.exception()
                ends.append(clock() - start)
                wait(future)
            stager.close()
            results[name] = {"call ms": statistics.median(calls) * 1e3, "copied ms": statistics.median(ends) * 1e3}
            show(name, results[name])
    return results


# --- many ---


def many(budget: Budget, _: State) -> Results:
    results: Results = {}
    for count, kib in ((10_000, 64), (10_000, 256), (2_500, 2048), (600, 8192)):
        name = f"{count:,} x {kib} KiB"
        if budget.over(name):
            return results
        made = count // 20 if REHEARSAL else count
        state = {f"t{index}": torch.ones(kib << 8, device=DEVICE) for index in range(made)}
        stager = new_stager(size_of(state))
        wait(stager.stage(state))
        calls, fences, ends = [], [], []
        for _ in range(5):
            torch.cuda.synchronize()
            start = clock()
            future = stager.stage(state)
            calls.append(clock() - start)
            stager.fence()
            fences.append(clock() - start - calls[-1])
            future.exception()
            ends.append(clock() - start)
            wait(future)
        stager.close()
        row = {"call ms": statistics.median(calls) * 1e3, "fence ms on the host": statistics.median(fences) * 1e3}
        results[name] = row | {"GB/s": size_of(state) / statistics.median(ends) / 1e9}
        show(name, results[name])
    return results


# --- loads ---


def loads(budget: Budget, state: State) -> Results:
    """From memory: of a disk nothing is measured here."""
    results: Results = {}
    small_ones = {f"t{index}": torch.ones(16 << 10, device=DEVICE) for index in range(500 if REHEARSAL else 10_000)}
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
    for what, saved in (("large", state), ("10,000 x 64 KiB", small_ones)):
        with tempfile.TemporaryDirectory(dir=folder) as where:
            sidestream.blocking.save(saved, where + "/c")
            host = {name: torch.empty_like(one, device="cpu") for name, one in saved.items()}
            ways: dict[str, Callable[[], Any]] = {
                "to host memory": lambda host=host, where=where: sidestream.blocking.load(host, where + "/c"),
                "to the device": lambda saved=saved, where=where: sidestream.blocking.load(saved, where + "/c"),
                "stock dcp.load": lambda saved=saved, where=where: dcp.load(
                    saved, checkpoint_id=where + "/c", no_dist=True
                ),
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(4):  # the first round maps, touches and registers
                for name, way in ways.items():
                    if not budget.over(f"{what}, {name}"):
                        start = clock()
                        way()
                        torch.cuda.synchronize()
                        seconds[name].append(clock() - start)
            for name, took in seconds.items():
                if len(took) > 1:
                    row = {"first s": took[0], "GB/s": size_of(saved) / statistics.median(took[1:]) / 1e9}
                    results[f"{what}, {name}"] = row
                    show(f"{what}, {name}", row)
    return results


# --- hazard ---


def hazard(budget: Budget, _: State) -> Results:
    source = torch.zeros(MIB if REHEARSAL else 64 * MIB, device=DEVICE)
    stager, stock = new_stager(source.nbytes), dcp_stager()
    tries: dict[str, Callable[[int], bool]] = {
        "sidestream, queued before": lambda value: queued_before(stager, source, value),
        "sidestream, overwritten behind the fence": lambda value: overwritten(stager, source, value, stager.fence),
        "sidestream, overwritten without a fence": lambda value: overwritten(stager, source, value, lambda: None),
    }
    if stock is not None:
        tries["DefaultStager, queued before"] = lambda value: queued_before(stock, source, value)
    results: Results = {}
    for name, attempt in tries.items():
        if budget.over(name):
            break
        wrong = sum(attempt(value) for value in range(1, 21))
        results[name] = {"tries": 20, "wrong": wrong}
        show(name, results[name])
    stager.close()
    if stock is not None:
        stock.close()
    return results


def queued_before(stager: Any, source: torch.Tensor, value: int) -> bool:
    """Whether the copy lacks work that was queued before the call, and not done."""
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    source.fill_(value)
    return differs(stager.stage({"t": source}), value)


def overwritten(stager: Any, source: torch.Tensor, value: int, fence: Callable[[], None]) -> bool:
    """Whether the copy has something of what was written after the call."""
    source.fill_(value)
    torch.cuda.synchronize()
    staged = stager.stage({"t": source})
    fence()
    source.fill_(-1)
    return differs(staged, value)


def differs(staged: Any, value: int) -> bool:
    result = staged.result() if hasattr(staged, "result") else staged
    found = bool((result["t"] != value).any())
    torch.cuda.synchronize()
    wait(result)
    return found


# --- training ---


class Loop:
    """A training loop: 24 layers of 4096 x 4096 in float32 under autocast, AdamW, 8192 rows a micro-batch."""

    def __init__(self) -> None:
        layers, width, rows = (2, 64, 16) if REHEARSAL else (24, 4096, 8192)
        linear = (torch.nn.Linear(width, width, bias=False, device=DEVICE) for _ in range(layers))
        self.model = torch.nn.Sequential(*(part for one in linear for part in (one, torch.nn.ReLU())))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=DEVICE == "cuda")
        self._batch = torch.randn(rows, width, device=DEVICE)
        self.run(3, 0, 1, False, Checkpoints())
        self.state: State = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in self.optimizer.state[parameter].items():
                self.state[f"optimizer.{index}.{key}"] = value

    def run(self, steps: int, every: int, micro_batches: int, item: bool, checkpoints: Checkpoints) -> float:
        """Seconds that ``steps`` take, at most two of them queued ahead, with a checkpoint after each ``every``."""
        ahead: deque[Any] = deque()
        torch.cuda.synchronize()
        start = clock()
        for step in range(1, steps + 1):
            for _ in range(micro_batches):
                with torch.autocast(torch.device(DEVICE).type, dtype=torch.bfloat16):
                    loss = self.model(self._batch).float().square().mean()
                loss.backward()
            if item:
                loss.item()
            checkpoints.before_update()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if every and step % every == 0 and step < steps:
                checkpoints.take(self.state)
            ahead.append(torch.cuda.Event(blocking=True))
            ahead[-1].record()
            if len(ahead) > 2:
                ahead.popleft().synchronize()
        checkpoints.before_update()
        torch.cuda.synchronize()
        return clock() - start


class Checkpoints:
    """One way to take checkpoints; this one takes none."""

    def take(self, state: State) -> None: ...

    def before_update(self) -> None: ...

    def close(self) -> None: ...


class Ours(Checkpoints):
    def __init__(self, loop: Loop, mode: Any) -> None:
        self._stager = new_stager(size_of(loop.state), mode=mode)
        self._handle = self._stager.guard(loop.optimizer)
        self._last: Any = None

    def take(self, state: State) -> None:
        if self._last is not None:
            wait(self._last)
        self._last = self._stager.stage(state)

    def close(self) -> None:
        if self._last is not None:
            wait(self._last)
        self._handle.remove()
        self._stager.close()


class Pinned(Checkpoints):
    """Copies into pinned memory, and waits for them: as fast as it gets with nothing overlapped."""

    def __init__(self, loop: Loop) -> None:
        self._copies = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=DEVICE == "cuda")
            for name, tensor in loop.state.items()
        }

    def take(self, state: State) -> None:
        for name, tensor in state.items():
            self._copies[name].copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()


class Rival(Checkpoints):
    """A stager whose future, if it gives one, is waited for before the next update, as its documentation asks."""

    def __init__(self, stager: Any) -> None:
        self._stager = stager
        self._future: Any = None

    def take(self, state: State) -> None:
        self._future = self._stager.stage(state)

    def before_update(self) -> None:
        if hasattr(self._future, "result"):
            self._future.result()
        self._future = None

    def close(self) -> None:
        self._stager.close()


def training(budget: Budget, _: State) -> Results:
    loop = Loop()
    nbytes = size_of(loop.state)
    results: Results = {"state GB": nbytes / 1e9}
    ways: dict[str, Checkpoints] = {"none": Checkpoints()}
    for mode in ("lazy", "eager"):
        ways[f"sidestream, {mode}"] = Ours(loop, mode)
    ways["pinned copy, synchronous"] = Pinned(loop)
    stock = dcp_stager()
    if stock is not None:
        ways["DCP DefaultStager"] = Rival(stock)
        ways["DCP BlockingAsyncStager, cached"] = Rival(BlockingAsyncStager(cache_staged_state_dict=True))
    if find_spec("torch_checkpointing") and DEVICE == "cuda":
        from torch_checkpointing.staging import DefaultStager as Successor

        ways["torch_checkpointing"] = Rival(Successor())
    for way in ways.values():  # the first two checkpoints of each, in which memory is mapped and plans are made
        loop.run(6, 2, 1, False, way)
    for micro_batches, item, steps, every in ((4, False, 13, 4), (4, True, 13, 4), (1, False, 25, 6)):
        seconds: dict[str, list[float]] = {}
        for _ in range(3):
            for name, way in ways.items():
                if not budget.over(name):
                    seconds.setdefault(name, []).append(loop.run(steps, every, micro_batches, item, way))
        if "none" not in seconds:
            break
        base = statistics.median(seconds["none"])
        taken = (steps - 1) // every
        title = f"{micro_batches} micro-batches, item() {'each step' if item else 'never'}"
        rows: Results = {"step ms": base / steps * 1e3}
        print(f"  {title}: {fields(rows)}")
        for name, times in seconds.items():
            if name != "none":
                lost = [(one - base) / taken * 1e3 for one in times]
                rows[name] = {"lost ms per checkpoint": statistics.median(lost), "best": min(lost), "worst": max(lost)}
                show(f"  {name}", rows[name])
        results[title] = rows
    for way in ways.values():
        way.close()
    return results


def dcp_stager() -> Any:
    """DCP's stager with all its options on, as far as this machine has room for shared memory.

    The one of torch 2.11 closes itself after each use and then fails (pytorch #183413): it is kept from that.
    """
    options = StagingOptions(use_shared_memory=False)
    if DEVICE != "cuda":
        options = StagingOptions(False, False, True, False)
    try:
        stager = DefaultStager(options)
        if torch.__version__.startswith("2.11."):
            stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
        small = {"t": torch.ones(10, device=DEVICE)}
        for _ in range(2):
            stager.stage(small).result()
    except Exception as error:
        print(f"  DefaultStager: left out, it does not work here: {error!r:.200}")
        return None
    return stager


# --- capture ---


def capture(budget: Budget, state: State) -> Results:
    results: Results = {}
    ones = torch.ones(1000, device=DEVICE)
    for name, throttle in (("while the device's thread waits", None), ("while copies are enqueued", 4e9)):
        if budget.over(name):
            break
        stager = new_stager(size_of(state), max_bytes_per_second=throttle)
        captured, error = 0, ""
        try:
            wait(stager.stage(state))
            future = stager.stage(state)
            while not future.done():
                graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    graph.capture_begin(capture_error_mode="global")
                    ones * 2
                    graph.capture_end()
                captured += 1
            wait(future)
        except RuntimeError as failure:
            error = f"{failure}".splitlines()[0][:100]
        results[name] = {"graphs": captured, "error": error or "none"}
        show(name, results[name])
        if error:
            break  # the process may be spoiled: closing would wait for it
        stager.close()
    return results


SECTIONS: dict[str, tuple[float, Callable[[Budget, State], Results]]] = {
    "copies": (90, copies),
    "first": (30, first),
    "small": (50, small),
    "many": (30, many),
    "loads": (50, loads),
    "hazard": (40, hazard),
    "training": (150, training),
    "capture": (20, capture),
}


@contextmanager
def no_hang() -> Iterator[None]:
    """A hang ends the process with the stacks of all threads; what was measured before stands in the JSON."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def main(arguments: argparse.Namespace) -> None:
    results = describe("torch_checkpointing")
    if DEVICE == "cuda":
        device = torch.cuda.get_device_properties(0)
        results["machine"]["gpu"] = f"{device.name}, {device.total_memory / 1e9:.0f} GB"
        results["versions"]["cuda"] = torch.version.cuda
    print(headline(results))
    print(results["machine"].get("gpu", ""))
    total = int(arguments.gigabytes * 1e9)
    state = {f"layers.{index}": torch.ones(total // 256, device=DEVICE) for index in range(64)}
    still_heap()
    for name in arguments.sections.split(","):
        seconds, section = SECTIONS[name]
        print(f"\n{name}", flush=True)
        start = clock()
        try:
            results[name] = section(Budget(seconds), state)
        except Exception as error:  # a section that fails takes no other one with it
            results[name] = {"error": repr(error)}
            print(f"  failed: {error!r:.500}")
        results[name]["seconds"] = round(clock() - start, 1)
        write_json(arguments.json, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="separated by commas (default: all)")
    parser.add_argument("--gigabytes", type=float, default=4.3, help="of the state, where the section does not say")
    parser.add_argument("--json", help="write all figures to this file too")
    parser.add_argument("--rehearsal", action="store_true", help="execute every line with small sizes, measure nothing")
    arguments = parser.parse_args()
    REHEARSAL = arguments.rehearsal
    if REHEARSAL:
        arguments.gigabytes = min(arguments.gigabytes, 0.1)
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here: there is nothing to measure")
        sys.exit(0)
    warnings.filterwarnings("ignore", message="torch.distributed is")
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
    with no_hang():
        main(arguments)
