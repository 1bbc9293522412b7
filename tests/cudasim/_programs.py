"""Random programs on the simulated CUDA runtime, and sabotaged versions of the library that they have to detect.

A program makes a state on one or two devices, and stages or saves it several times, and loads what was saved. Each
storage has a mirror in host
memory. Every write goes to both, so the mirrors hold what the state must contain at each call, whatever the streams do.

``python _programs.py --seed 3 --programs 40 --sabotage no-fence`` prints the number of the first program that finds
something wrong, or ``none``. A sabotage that leaves copies in flight may end in any error, so the process runs no
program after the first one that fails.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cudasim
import torch
from leases import nothing_kept

import sidestream
from sidestream._format.records import DTYPES
from sidestream._load import reader
from sidestream._staging import AsyncStager, ring
from sidestream._staging import stager as stager_module
from sidestream._staging.device import DeviceEngine
from sidestream._staging.driver import CudaDriver, TorchDriver
from sidestream._staging.ring import Slot
from sidestream._staging.runtime import CudaRuntime
from sidestream._staging.streams import Streams
from sidestream._storage import Batches
from sidestream.errors import CorruptCheckpointError, DeadlineExceededError, DeviceError, SidestreamError

__all__ = ["SABOTAGES", "Wrong", "program", "sabotaged"]

TIMEOUT_S = 60.0  # against a hang; nothing takes as long
HELD_S = 0.015
LOAD = sidestream.LoadOptions(timeout_s=TIMEOUT_S)
SAVED_DTYPES = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
NOT_COPIED = {getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)}
"""Dtypes that torch's ``copy_`` does not know, so that nothing can make a strided tensor of them contiguous."""
LAYOUTS = ("whole", "whole", "scalar", "empty", "slice", "transposed", "strided", "expanded", "conjugated")


class Wrong(AssertionError):
    """A program found bytes that are not those of the call, or something that was not given back."""


@dataclass(frozen=True)
class View:
    """How a tensor of the state lies in its storage."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Behind the last element."""
        return self.offset + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1

    def overlaps(self, other: View) -> bool:
        return self.storage == other.storage and self.offset < other.end and other.offset < self.end

    def of(self, raw: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=raw.device)
        tensor.set_(raw.untyped_storage(), self.offset, self.shape, self.stride)
        return tensor.conj() if self.conjugated else tensor


class Buffers(torch.nn.Module):
    """A module whose buffers change in forward, which no fence precedes."""

    def __init__(self, buffers: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


@dataclass
class Storage:
    """The bytes of a source, and its mirror in host memory."""

    raw: torch.Tensor
    mirror: torch.Tensor
    mask: int
    """The largest value that its bytes may be changed by."""
    volatile: bool = False
    """Whether it may be written to without a fence."""

    def change(self, value: int) -> None:
        """Write to every byte, on the current stream of the device."""
        self.raw.bitwise_xor_(value & self.mask)
        self.mirror.bitwise_xor_(value & self.mask)


class State:
    """A random state dict."""

    def __init__(self, random_: random.Random, devices: list[str], mode: str, small_bytes: int) -> None:
        self.storages: list[Storage] = []
        self.views: dict[str, View] = {}
        self.root: dict[str, Any] = {"number": 7, "list": []}
        for index in range(random_.randint(1, 9)):
            self._add_storage(random_, index, random_.choice(devices), mode, small_bytes)
        buffers = {}
        for index in range(random_.randint(0, 2)):
            storage = self._storage(random_, random_.choice(devices[:-1] or devices), torch.float32)
            storage.volatile = True
            view = View(len(self.storages) - 1, torch.float32, 0, (storage.raw.nbytes // 4,), (1,))
            buffers[f"b{index}"] = view.of(storage.raw)
            self.views[f"model.b{index}"] = view
        if buffers:
            self.root["model"] = Buffers(buffers)

    def _storage(self, random_: random.Random, device: str, dtype: torch.dtype) -> Storage:
        nbytes = random_.choice([16, 64, 1000, 4096, 40_000, 300_000, random_.randint(1, 3 << 20)]) // 16 * 16 + 16
        high = 2 if dtype == torch.bool else 256
        mirror = torch.randint(0, high, (nbytes,), dtype=torch.uint8)
        self.storages.append(Storage(mirror.to(device, copy=True), mirror, high - 1))
        return self.storages[-1]

    def _add_storage(self, random_: random.Random, index: int, device: str, mode: str, small_bytes: int) -> None:
        dtype = random_.choice(SAVED_DTYPES)
        storage = self._storage(random_, device, dtype)
        on_device = device != "cpu"
        # What is copied at the call, in the order of the stream, may be written to at once.
        storage.volatile = mode == "eager" or (on_device and storage.raw.nbytes <= small_bytes)
        for alias in range(random_.choice([1, 1, 2, 3])):
            layout = random_.choice(LAYOUTS)
            if dtype in NOT_COPIED and layout not in ("empty", "scalar", "slice"):
                layout = "whole"
            view = _laid(random_, layout, len(self.storages) - 1, dtype, storage.raw.nbytes // dtype.itemsize)
            name = f"t{index}_{alias}"
            tensor = view.of(storage.raw)
            if random_.random() < 0.2:
                self.views[f"list.{len(self.root['list'])}"] = view
                self.root["list"].append(tensor)
            else:
                self.views[name] = view
                self.root[name] = tensor

    @property
    def need_bytes(self) -> int:
        """Of host memory for one copy, with the rounding of small extents."""
        tensors = {index: self.storages[index].raw.nbytes for index in {view.storage for view in self.views.values()}}
        return sum(-(-nbytes // 4096) * 4096 + 4096 for nbytes in tensors.values()) * 2 + (1 << 16)

    @property
    def largest_bytes(self) -> int:
        return max(storage.raw.nbytes for storage in self.storages)

    def expected(self) -> dict[str, torch.Tensor]:
        """What the tensors hold after everything that was written so far."""
        copies = [storage.mirror.clone() for storage in self.storages]
        return {name: view.of(copies[view.storage]) for name, view in self.views.items()}


def _laid(random_: random.Random, layout: str, storage: int, dtype: torch.dtype, numel: int) -> View:
    """A view of ``layout`` in a storage of ``numel`` elements."""
    start = random_.randint(0, numel // 2)
    count = random_.randint(1, numel - start)
    rows = random_.randint(1, min(count, 50))
    columns = count // rows
    match layout:
        case "scalar":
            return View(storage, dtype, start, (), ())
        case "empty":
            return View(storage, dtype, 0, (0, 3), (3, 1))
        case "slice":
            return View(storage, dtype, start, (count,), (1,))
        case "transposed":
            return View(storage, dtype, start, (columns, rows), (1, columns))
        case "strided":
            return View(storage, dtype, start, ((count + 2) // 3,), (3,))
        case "expanded":
            return View(storage, dtype, start, (3, min(count, 1000)), (0, 1))
        case "conjugated" if dtype.is_complex:
            return View(storage, dtype, 0, (numel,), (1,), conjugated=True)
        case _:
            return View(storage, dtype, 0, (numel,), (1,))


def _row_major(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj()
    if not plain.is_contiguous():
        plain = plain.clone(memory_format=torch.contiguous_format)
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8)
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def _item(root: Any, name: str) -> torch.Tensor:
    for part in [name] if name in root else name.split("."):
        root = root[int(part)] if isinstance(root, list) else root[part]
    found: torch.Tensor = root
    return found


def check_bytes(expected: dict[str, torch.Tensor], found: Any, what: str) -> None:
    """Raise ``Wrong`` at the first tensor that does not have the dtype, shape and bytes of ``expected``."""
    for name, tensor in expected.items():
        copy = _item(found, name)
        if (copy.dtype, copy.shape, copy.device.type) != (tensor.dtype, tensor.shape, "cpu"):
            raise Wrong(f"{what}: {name} is {copy.dtype} {copy.shape} on {copy.device}")
        if not torch.equal(_row_major(tensor), _row_major(copy)):
            wrong = int((_row_major(tensor) != _row_major(copy)).sum())
            raise Wrong(f"{what}: {name} {tensor.dtype} {tuple(tensor.shape)}: {wrong} wrong bytes")


def check_aliases(state: State, found: Any, what: str) -> None:
    """Raise ``Wrong`` unless tensors whose bytes overlap in the state share memory in the copy, and no others do."""
    plain = {name: view for name, view in state.views.items() if view.numel and not view.conjugated}
    for name, view in plain.items():
        copy = _item(found, name)
        if copy.stride() != view.stride:
            raise Wrong(f"{what}: {name} has strides {copy.stride()} instead of {view.stride}")
        for other, its in plain.items():
            shared = copy.untyped_storage().data_ptr() == _item(found, other).untyped_storage().data_ptr()
            if view.overlaps(its) and not shared:
                raise Wrong(f"{what}: {name} does not share the memory of {other}")
            if view.storage != its.storage and shared:
                raise Wrong(f"{what}: {name} shares the memory of {other}")


# --- one program ---


@dataclass(frozen=True)
class Baseline:
    """What a program has to leave as it was."""

    registrations: str
    contexts: str
    device_bytes: tuple[int, ...]
    pinned_bytes: str

    @classmethod
    def now(cls) -> Baseline:
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        if not nothing_kept():
            raise Wrong("memory was not unregistered in time")
        state = cudasim.state()
        allocated = tuple(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
        return cls(state["registrations"], state["contexts"], allocated, state["pinned_bytes"])


def check_left(before: Baseline) -> None:
    """Raise ``Wrong`` unless everything is as ``before``, the streams are empty, and no rule of CUDA was violated."""
    after = Baseline.now()
    if after != before:
        raise Wrong(f"before {before}, after {after}")
    state = cudasim.state()
    if state["queued"] != "0" or cudasim.queues():
        raise Wrong(f"operations left: {cudasim.queues()}")
    if state["violations"] != "0":
        raise Wrong(f"{state['violations']} violations")
    if any("spin_kernel" not in name for name in cudasim.kernels()):
        raise Wrong(f"kernels that were not carried out: {cudasim.kernels()}")


def program(seed: int, *, driver: str = "any") -> int:
    """Run one program; returns how many stages and saves it made. Raises ``Wrong``, or what the library raises."""
    random_ = random.Random(seed)
    torch.manual_seed(seed)
    for device in range(torch.cuda.device_count()):
        torch.ones(1, device=f"cuda:{device}")
    torch.cuda._sleep(0)  # type: ignore[no-untyped-call]
    before = Baseline.now()
    cudasim.tune(random_.choice([0, 300, 3000]), random_.choice([0.1, 0.5, 0.9]), seed=seed)
    # So few slots, and so little in each, that these small loads use them again.
    ring._SLOTS = random_.choice([1, 2, 8])
    reader._MOST_FOR_DEVICE = random_.choice([1, 3, 4096])
    try:
        with TemporaryDirectory(prefix="program") as folder:
            stages = asyncio.run(_Program(random_, driver, Path(folder)).run())
    finally:
        cudasim.hold_sides(False)
    check_left(before)
    return stages


class _Program:
    def __init__(self, random_: random.Random, driver: str, folder: Path) -> None:
        self.random = random_
        self.folder = folder
        self.mode: Any = random_.choice(["lazy", "eager"])
        self.generic = driver == "torch" or (driver == "any" and random_.random() < 0.3)
        count = min(random_.choice([1, 1, 2]), torch.cuda.device_count())
        self.cuda = [f"cuda:{index}" for index in random_.sample(range(torch.cuda.device_count()), count)]
        devices = [*self.cuda, "cpu"] if random_.random() < 0.3 else self.cuda
        self.small_bytes = random_.choice([0, 1 << 12, 1 << 20])
        self.state = State(random_, devices, self.mode, self.small_bytes)
        self.timers: list[threading.Timer] = []
        self.in_flight: list[tuple[Any, dict[str, torch.Tensor], str]] = []
        self.stages = self.loads = 0
        self.sums = 0

    def stager(self, budget_bytes: int) -> AsyncStager:
        engine = DeviceEngine(
            TorchDriver("cuda") if self.generic else CudaDriver(),
            small_bytes=self.small_bytes,
            chunk_bytes=self.random.choice([12 << 10, 100_000, None]),
        )
        return AsyncStager(
            mode=self.mode,
            budget_bytes=budget_bytes,
            engine=engine,
            timeout_s=TIMEOUT_S,
            max_bytes_per_second=self.random.choice([None, None, None, 50e6]),
            backing=self.random.choice(["private", "private", "shared"]),
        )

    async def run(self) -> int:
        for device in self.cuda:
            torch.cuda.synchronize(device)
        self.sums = self.random.choice([1, 2, 3])  # how many stages the budget holds at once
        self.below = self.random.random() < 0.3
        budget_bytes = self.state.need_bytes * self.sums
        if self.below:  # only saves pass through less memory than the state has
            budget_bytes = self.state.largest_bytes * 2 + self.state.need_bytes // 3 + (1 << 20)
        with ExitStack() as stack:
            own = self.random.random() < 0.4
            for device in self.cuda:
                stream = torch.cuda.Stream(device) if own else torch.cuda.default_stream(device)
                stack.enter_context(torch.cuda.stream(stream))
            stager = self.stager(budget_bytes)
            parameter = torch.nn.Parameter(torch.zeros(1))
            parameter.grad = torch.ones(1)
            self.optimizer = torch.optim.SGD([parameter], lr=1.0)
            guard = stager.guard(self.optimizer)
            try:
                for number in range(self.random.randint(2, 4)):
                    await self._round(stager, number)
                while self.in_flight:
                    await self._finish()
            finally:
                guard.remove()
                for timer in self.timers:
                    timer.join()
                await stager.aclose()
        return self.stages

    async def _round(self, stager: AsyncStager, number: int) -> None:
        current = [torch.cuda.current_stream(device) for device in self.cuda]
        self._change([storage for storage in self.state.storages if not self.in_flight or storage.volatile])
        waits = self._elsewhere() if self.random.random() < 0.3 and not self.in_flight else []
        while not self.below and len(self.in_flight) >= self.sums:
            await self._finish()
        expected = self.state.expected()
        what = f"round {number}, {self.mode}"
        self._stand_still(current)
        if self.below or self.random.random() < 0.3:
            target = self.folder / str(number)
            for stream in waits:
                for one in current:
                    one.wait_stream(stream)
            while self.in_flight:
                await self._finish()
            result: Any = sidestream.async_save(
                self.state.root,
                target,
                stager=stager,
                options=sidestream.SaveOptions(durability="flush", timeout_s=TIMEOUT_S),
            )
            self.in_flight.append((result, expected, what))
        else:
            result = stager.stage(self.state.root, wait_streams=waits)
            self.in_flight.append((result, expected, what))
            if self.random.random() < 0.2:
                await self._cancel(result)
        self.stages += 1
        self._change([storage for storage in self.state.storages if storage.volatile])
        await self._order(stager, result)

    async def _order(self, stager: AsyncStager, result: Any) -> None:
        """Order the next writes after the copies, or write nothing until the next stage has been launched too."""
        saved = isinstance(result, sidestream.PendingSave)
        match self.random.choice(["fence", "guard", "synchronize", "await", "none"]):
            case "synchronize":
                await stager.synchronize_staging()
                if saved:
                    await result.staged
            case "await":
                await self._finish(last=True)
                if self.in_flight:
                    return
            case "none" if not saved:
                return
            case way:
                if saved:  # its images pass through the budget only while the loop runs
                    await result.staged
                elif way == "guard":
                    self.optimizer.step()
                else:
                    stager.fence()
        self._change(self.state.storages)

    def _change(self, storages: list[Storage]) -> None:
        for storage in storages:
            if self.random.random() < 0.7:
                storage.change(self.random.randint(1, 255))

    def _elsewhere(self) -> list[Any]:
        """Write to some sources on streams that are not current; returns those."""
        streams = []
        for device in self.cuda:
            mine = [one for one in self.state.storages if str(one.raw.device) == device]
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch.cuda._sleep(int(2e6))  # type: ignore[no-untyped-call]
                self._change(mine)
            streams.append(stream)
        return streams

    def _stand_still(self, current: list[Any]) -> None:
        """Some streams do nothing for a moment, in which the program goes on."""
        match self.random.choice(["nothing", "the program's", "the stager's", "the stager's"]):
            case "the program's":
                stream = self.random.choice(current)
                cudasim.hold(stream)
                self._later(lambda: cudasim.release(stream))
            case "the stager's":
                cudasim.hold_sides()
                self._later(lambda: cudasim.hold_sides(False))

    def _later(self, release: Callable[[], None]) -> None:
        timer = threading.Timer(HELD_S, release)
        timer.start()
        self.timers.append(timer)

    async def _cancel(self, future: Any) -> None:
        async def wait() -> None:
            await future

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    async def _finish(self, *, last: bool = False) -> None:
        """Await one stage that is in flight, and compare it."""
        result, expected, what = self.in_flight.pop(-1 if last else 0)
        if isinstance(result, sidestream.PendingSave):
            info = await result
            checkpoint = await sidestream.open_checkpoint(info.url)
            try:
                saved = await checkpoint.state_dict()
            except CorruptCheckpointError as error:  # bytes changed after their checksum was computed
                raise Wrong(f"{what}, save: {error}") from error
            check_bytes(expected, saved, f"{what}, save")
            await self._load(Path(info.url.removeprefix("file://")), {**expected}, f"{what}, load")
            return
        async with asyncio.timeout(TIMEOUT_S):
            copies = await result
        check_bytes(expected, copies, what)
        check_aliases(self.state, copies, what)
        copies.release()

    async def _load(self, folder: Path, expected: dict[str, torch.Tensor], what: str) -> None:
        """Load a checkpoint to the devices, beside what is in flight, and compare it."""
        target = {name: self._target(tensor) for name, tensor in expected.items()}
        if self.random.random() < 0.3:
            damage(folder, self.random)
            await self._load_damaged(folder, expected, target, what)
            return
        current = [torch.cuda.current_stream(device) for device in self.cuda]
        self._stand_still(current)
        await self._load_badly(target, folder)
        for one in target.values():  # the load comes after this
            fill(one, 0x5A)
        await sidestream.load(target, folder, strict=False, options=LOAD)
        loaded = {name: one.clone() for name, one in target.items()}  # and before this
        for device in self.cuda:
            torch.cuda.current_stream(device).synchronize()
        check_bytes(expected, {name: copy_of(one) for name, one in loaded.items()}, what)
        self.loads += 1

    async def _load_badly(self, target: dict[str, torch.Tensor], folder: Path) -> None:
        """Begin a load that does not end well, if the dice say so."""
        way = self.random.choice(["cancel", "deadline", "device", "none", "none"])
        if way == "cancel":
            task = asyncio.create_task(sidestream.load(target, folder, strict=False, options=LOAD))
            for _ in range(self.random.choice([1, 20, 200])):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        elif way == "deadline":
            options = sidestream.LoadOptions(timeout_s=self.random.choice([0.001, 0.01, 0.05]))
            with suppress(DeadlineExceededError):
                await sidestream.load(target, folder, strict=False, options=options)
        elif way == "device" and not self.in_flight:
            for timer in self.timers:
                timer.join()
            cudasim.fail_copy(self.random.randint(1, 6))
            with suppress(DeviceError):
                await sidestream.load(target, folder, strict=False, options=LOAD)
            cudasim.heal()

    async def _load_damaged(
        self, folder: Path, expected: dict[str, torch.Tensor], target: dict[str, torch.Tensor], what: str
    ) -> None:
        """No byte that differs from its checksum reaches a target."""
        for one in target.values():
            fill(one, 0x5A)
        with suppress(CorruptCheckpointError):
            await sidestream.load(target, folder, strict=False, options=LOAD)
        for device in self.cuda:
            torch.cuda.synchronize(device)
        for name, one in target.items():
            found, right = _row_major(copy_of(one)), _row_major(expected[name])
            # Torch reads a bool of any other value as 1.
            if one.dtype != torch.bool and not bool(((found == right) | (found == 0x5A)).all()):
                raise Wrong(f"{what}: damaged bytes reached {name}")

    def _target(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on a device like ``tensor``, which may have other strides."""
        device = self.random.choice(self.cuda)
        if tensor.dim() == 2 and tensor.dtype not in NOT_COPIED and self.random.random() < 0.3:
            return torch.empty(*reversed(tensor.shape), dtype=tensor.dtype, device=device).t()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def fill(tensor: torch.Tensor, value: int) -> None:
    """Write ``value`` to every byte of a tensor that is dense, on the current stream."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    raw.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,)).fill_(value)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory with the same strides, also of a dtype that ``copy_`` does not know."""
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage = raw.set_(tensor.untyped_storage()).cpu().untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def damage(folder: Path, random_: random.Random) -> Path:
    """Change one byte of the largest file."""
    file = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[random_.randrange(len(content))] ^= 0xFF
    file.write_bytes(content)
    return file


# --- sabotage ---


def _no_wait(patch: Callable[[Any, str, Any], None]) -> None:
    """The side stream does not wait for the program's."""
    sides: list[Any] = []
    for driver in (TorchDriver, CudaDriver):
        make, wait = driver.side_stream, driver.wait

        def side_stream(self: Any, device: Any, make: Any = make) -> Any:
            sides.append(make(self, device))
            return sides[-1]

        def skip(self: Any, stream: Any, event: Any, wait: Any = wait) -> None:
            if all(stream is not side for side in sides):
                wait(self, stream, event)

        patch(driver, "side_stream", side_stream)
        patch(driver, "wait", skip)


def _no_fence(patch: Callable[[Any, str, Any], None]) -> None:
    """Writers do not wait for the copies."""
    patch(DeviceEngine, "fence", lambda self, stage: None)


def _no_clones(patch: Callable[[Any, str, Any], None]) -> None:
    """Buffers are copied late."""
    capture = stager_module.capture

    def careless(*arguments: Any, **options: Any) -> Any:
        captured = capture(*arguments, **options)
        captured.volatile.clear()
        return captured

    patch(stager_module, "capture", careless)


def _no_end(patch: Callable[[Any, str, Any], None]) -> None:
    """Nobody waits until the copies have ended."""
    patch(CudaRuntime, "synchronize", lambda self, event: None)
    patch(TorchDriver, "synchronize", lambda self, event: None)


def _no_wait_streams(patch: Callable[[Any, str, Any], None]) -> None:
    """``wait_streams=`` is ignored."""
    begin = DeviceEngine.begin

    def ignoring(self: Any, tensors: Any, *, wait_streams: Any, **options: Any) -> Any:
        return begin(self, tensors, wait_streams=(), **options)

    patch(DeviceEngine, "begin", ignoring)


def _no_wait_for_caller(patch: Callable[[Any, str, Any], None]) -> None:
    """A load does not wait for what the caller has enqueued."""

    def apart(self: Any) -> Streams:
        return Streams([(driver, device, driver.side_stream(device)) for driver, device, _ in self.sides])

    patch(Streams, "apart", apart)


def _no_wait_for_slot(patch: Callable[[Any, str, Any], None]) -> None:
    """A slot is used again while it is being copied."""
    patch(Slot, "is_copied", lambda self: True)
    patch(Slot, "wait", lambda self: None)


def _verify_late(patch: Callable[[Any, str, Any], None]) -> None:
    """What was read is copied, and compared with its checksum after that."""

    def work(self: Any, batch: Any, stop: Any) -> int:
        reads = self.reads(batch, self.scratch, stop)
        try:
            self._files.read(reads.file, reads.ranges, stop)
        finally:
            if reads.arrived is not None:
                reads.arrived()
        self.scratch.give_back(reads.scratch)
        return int(reads.nbytes)

    patch(Batches, "_work", work)


SABOTAGES: dict[str, Callable[[Callable[[Any, str, Any], None]], None]] = {
    "no-wait": _no_wait,
    "no-fence": _no_fence,
    "no-clones": _no_clones,
    "no-end": _no_end,
    "no-wait-streams": _no_wait_streams,
    "no-wait-for-caller": _no_wait_for_caller,
    "no-wait-for-slot": _no_wait_for_slot,
    "verify-late": _verify_late,
}


@contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """Within, the library lacks one of its waits or copies."""
    with ExitStack() as stack:

        def patch(owner: Any, attribute: str, value: Any) -> None:
            stack.callback(setattr, owner, attribute, getattr(owner, attribute))
            setattr(owner, attribute, value)

        if name is not None:
            SABOTAGES[name](patch)
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--driver", choices=("any", "cuda", "torch"), default="any")
    parser.add_argument("--sabotage", choices=[*SABOTAGES])
    parser.add_argument("--only", type=int, help="the seed of one program")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    stages = 0
    seeds = range(options.seed * 100_000, options.seed * 100_000 + options.programs)
    with sabotaged(options.sabotage):
        for number, seed in enumerate(seeds if options.only is None else [options.only]):
            try:
                stages += program(seed, driver=options.driver)
            except (Wrong, SidestreamError) as error:
                print(number, f"(seed {seed}): {type(error).__name__}: {error}")
                return
    print("none:", stages, "stages and saves were right")


if __name__ == "__main__":
    main()
