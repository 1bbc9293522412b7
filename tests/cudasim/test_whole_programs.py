"""Whole programs on two simulated devices: saves, loads, a run that is resumed, and DCP's calls with our stagers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from leases import nothing_kept
from states import assert_same
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import sidestream
from sidestream._staging import AsyncStager
from sidestream._staging.blocking import BlockingAsyncStager
from sidestream.dcp import StorageReader, StorageWriter
from sidestream.options import StageMode

cudasim: Any = pytest.importorskip("cudasim", reason="needs the simulated CUDA runtime")
if not getattr(cudasim, "active", bool)():  # without it the name may stand for this folder
    pytest.skip("needs the simulated CUDA runtime", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from train_live_ import model as train_live_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*assuming the intent is to (save|load) in a single process.*:UserWarning"
)

MODES: tuple[StageMode, ...] = ("lazy", "eager")
SEED = int(os.environ.get("CUDASIM_SEED", "0"))
BOUND_S = 120.0  # against a hang


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    cudasim.tune(1000, 0.5, seed=SEED)
    torch.manual_seed(SEED)
    yield
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    assert nothing_kept()
    state = cudasim.state()
    assert (state["registrations"], state["violations"], state["queued"]) == ("0", "0", "0")


def state_of() -> dict[str, Any]:
    """Some 30 MiB on two devices."""
    whole = torch.randn(1 << 21, device="cuda:0")
    return {
        "large": [torch.randn(1 << 20, device=f"cuda:{index % 2}") for index in range(4)],
        "tied": {"a": whole, "b": whole[5:500].view(5, 99).t()},
        "conj": torch.randn(300, 40, dtype=torch.complex64, device="cuda:1").conj(),
        "neg": torch.randn(300, 40, dtype=torch.complex64, device="cuda:0").conj().imag,
        "small": [
            torch.randn(7, device="cuda:1"),
            torch.tensor(3.0, device="cuda:0"),
            torch.empty(0, 3, device="cuda"),
        ],
        "host": torch.randn(1000),
        "number": 5,
    }


def home(value: Any) -> Any:
    """``value`` with its tensors in host memory, as they are now."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: home(item) for key, item in value.items()}
    return [home(item) for item in value] if isinstance(value, list) else value


def overwrite(value: Any) -> Any:
    """Write zeros to every tensor, on the current streams."""
    if isinstance(value, torch.Tensor):
        value.detach().zero_()
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            overwrite(item)
    return value


@pytest.mark.parametrize("saver", ["thread", "process"])
@pytest.mark.parametrize("below", [False, True], ids=["as a whole", "below the state"])
@pytest.mark.parametrize("mode", MODES)
def test_a_state_comes_back_to_its_devices(mode: StageMode, below: bool, saver: Any, tmp_path: Path) -> None:
    async def run() -> None:
        state = state_of()
        expected = home(state)
        async with AsyncStager(budget_bytes=(12 if below else 256) << 20, mode=mode) as stager:
            async with asyncio.timeout(BOUND_S):
                pending = sidestream.async_save(
                    state,
                    tmp_path / "a",
                    stager=stager,
                    options=sidestream.SaveOptions(writer=saver, durability="flush", timeout_s=BOUND_S),
                )
                await pending.staged
                overwrite(state)  # at once
                await pending
        await sidestream.load(state, tmp_path / "a", options=sidestream.LoadOptions(timeout_s=BOUND_S))
        assert_same(expected, home(state))
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            with cudasim.held(torch.cuda.default_stream(0)):  # a load is ordered with the current stream only
                overwrite(state)
                await sidestream.load(
                    state, tmp_path / "a", options=sidestream.LoadOptions(atomic=True, timeout_s=BOUND_S)
                )
            torch.cuda.synchronize(0)
            found = home(state)
        assert_same(expected, found)
        checkpoint = await sidestream.open_checkpoint(tmp_path / "a")
        placed = await checkpoint.state_dict(memory=torch.device("cuda:1"))
        assert placed["large"][0].device == torch.device("cuda:1")
        assert_same(expected, home(placed))

    asyncio.run(run())


class Net(nn.Module):
    """Layers on two devices, tied weights, and buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 600), nn.BatchNorm1d(600)).to("cuda:0")
        self.second = nn.Sequential(nn.Linear(600, 64), nn.LayerNorm(64)).to("cuda:1")
        self.tied = self.first[0].weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(torch.relu(self.first(batch)).to("cuda:1"))
        return hidden.square().mean()


class Training:
    """A model on two devices and its optimizer; each step's data are a function of its number."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> float:
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(number)).to("cuda:0")
        loss: torch.Tensor = self.model(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize("mode", MODES)
def test_a_training_is_resumed_to_equal_numbers(mode: StageMode, tmp_path: Path) -> None:
    async def run() -> None:
        plain = Training()
        expected = [plain.step(number) for number in range(8)]
        first, losses = Training(), []
        async with AsyncStager(budget_bytes=1 << 26, mode=mode) as stager:
            guard = stager.guard(first.optimizer)
            async with sidestream.Checkpointer(
                tmp_path / "run", stager=stager, save=sidestream.SaveOptions(durability="flush")
            ) as run:
                for number in range(5):
                    losses.append(first.step(number))
                    saving = run.async_save(first.state(), step=number)  # forward changes buffers meanwhile
                await saving
            guard.remove()
        for step in (4, 2):
            second = Training()
            second.step(100)  # the optimizer has other values
            async with sidestream.Checkpointer(tmp_path / "run") as run:
                await run.restore(second.state(), step=step)
            resumed = [second.step(number) for number in range(step + 1, 8)]
            assert [*losses[: step + 1], *resumed] == expected

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["lazy", "eager", "blocking"])
def test_dcp_calls_with_our_stagers(kind: Any, tmp_path: Path) -> None:
    stager: Any = (
        BlockingAsyncStager(budget_bytes=1 << 27)
        if kind == "blocking"
        else AsyncStager(budget_bytes=1 << 27, mode=kind)
    )
    state = state_of()
    expected = home(state)
    dcp.save(state, storage_writer=StorageWriter(tmp_path / "plain"), no_dist=True)
    for number in range(2):
        answer: Any = dcp.async_save(
            state,
            storage_writer=StorageWriter(tmp_path / str(number)),
            async_stager=stager,
            no_dist=True,
        )
        if hasattr(answer, "staging_completion"):
            answer.staging_completion.result(BOUND_S)
            overwrite(state)
            answer.upload_completion.result(BOUND_S)
        else:
            stager.synchronize_staging()
            answer.result(BOUND_S)
            overwrite(state)
        for reader in (StorageReader(tmp_path / str(number)), dcp.FileSystemReader(tmp_path / str(number))):
            overwrite(state)
            dcp.load(state, storage_reader=reader, no_dist=True)
            assert_same(expected, home(state))
    dcp.load(overwrite(state), storage_reader=StorageReader(tmp_path / "plain"), no_dist=True)
    assert_same(expected, home(state))
    stager.close()


def test_cancelled_saves_and_loads(tmp_path: Path) -> None:
    async def run() -> None:
        state = state_of()
        expected = home(state)
        await sidestream.save(state, tmp_path / "a", options=sidestream.SaveOptions(durability="flush"))
        async with AsyncStager(budget_bytes=1 << 27) as stager:
            for number in range(12):
                for call in (
                    sidestream.save(
                        state,
                        tmp_path / f"b{number}",
                        stager=stager,
                        options=sidestream.SaveOptions(durability="flush"),
                    ),
                    sidestream.load(state, tmp_path / "a"),
                ):
                    task: asyncio.Task[Any] = asyncio.create_task(call)
                    await asyncio.sleep(number * 0.004)
                    task.cancel()
                    async with asyncio.timeout(BOUND_S):
                        await asyncio.wait([task])
            stager.fence()
            overwrite(state)
            await sidestream.load(state, tmp_path / "a")
            assert_same(expected, home(state))
            copies = await stager.stage(state)
            assert_same(expected["large"], copies["large"])
            copies.release()

    asyncio.run(run())


class Demo(train_live_model.Training):
    """The training of ``examples/train_live.py``, with its model on a device."""

    def __init__(self) -> None:
        with torch.device("cuda:0"):
            super().__init__(train_live_model.QUICK)

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.device("cpu"):
            inputs, targets = super().batch(step)
        return inputs.to("cuda:0"), targets.to("cuda:0")

    def step(self, number: int) -> float:
        # The kernels of fused attention are outside of what the simulator executes.
        with torch.device("cuda:0"), sdpa_kernel(SDPBackend.MATH):
            return self.compute_gradients(number)

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def test_the_training_of_the_demo_is_resumed_to_equal_weights(tmp_path: Path) -> None:
    async def run() -> None:
        first, losses, saves = Demo(), [], []
        async with sidestream.Checkpointer(tmp_path / "run", save=sidestream.SaveOptions(durability="flush")) as run:
            for number in range(4):
                losses.append(first.step(number))  # while the last checkpoint is staged
                for save in saves[-1:]:
                    await save.staged
                first.apply_update()
                saves.append(run.async_save(first.state(), step=number))
            await saves[-1]
        second = Demo()
        second.step(100)
        second.apply_update()
        async with sidestream.Checkpointer(tmp_path / "run") as run:
            await run.restore(second.state(), step=1)
        resumed = []
        for number in (2, 3):
            resumed.append(second.step(number))
            second.apply_update()
        assert resumed == losses[2:]
        assert_same(home(first.model.state_dict()), home(second.model.state_dict()))
        assert_same(home(first.optimizer.state_dict()), home(second.optimizer.state_dict()))

    asyncio.run(run())
