"""``load`` and its kin from single files: straight into a target, and as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from states import assert_same, model_and_optimizer

import sidestream
from sidestream import errors
from sidestream.dcp import StorageReader


def state_of_all_kinds() -> dict[str, Any]:
    base = torch.randn(300, 70)
    return {
        "weights": torch.randn(64, 16),
        "half": torch.randn(5, dtype=torch.float64).bfloat16(),
        "views": {"rows": base[10:20], "column": base[:, 3], "turned": base.t(), "whole": base},
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "epoch": 4,
        "betas": (0.9, [1, "x"]),
        "empty": {},
    }


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(state_of_all_kinds(), tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.parametrize("verify", ["always", "manifest"])
async def test_a_file_of_torch_save_into_a_target(verify: Any, file: Path) -> None:
    state = torch.load(file, weights_only=True)
    target = blank(state)
    report = await sidestream.load(target, file, options=sidestream.LoadOptions(verify=verify))
    assert_same(state, target)
    assert report.unverified == ()
    assert {"weights", "views.turned", "epoch", "betas"} <= set(report.loaded)
    checkpoint = await sidestream.open_checkpoint(file, verify=verify)
    assert torch.equal(await checkpoint.tensor("weights", slice(3, 5)), state["weights"][3:5])
    assert torch.equal(await checkpoint.tensor("views.turned", slice(3, 5)), state["views"]["turned"][3:5])
    assert_same(state, await checkpoint.state_dict())
    assert_same(state, await checkpoint.state_dict(memory="mapped"))
    assert (await sidestream.verify(file)).ok
    with pytest.raises(errors.StateMismatchError) as raised:
        await sidestream.load({"weights": torch.zeros(3), "more": torch.zeros(1)}, file)
    assert "weights" in str(raised.value)
    assert "more" in str(raised.value)


async def test_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "training.bin")
    fresh_model, fresh_optimizer = model_and_optimizer(seed=5)
    await sidestream.load({"model": fresh_model, "optimizer": fresh_optimizer}, tmp_path / "training.bin")
    assert_same(dict(model.state_dict()), dict(fresh_model.state_dict()))


async def test_safetensors_by_file_and_directory(tmp_path: Path) -> None:
    tensors = {"a.b": torch.randn(30, 4), "c": torch.arange(5)}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    for source in (tmp_path / "hf", tmp_path / "hf" / "model.safetensors"):
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        report = await sidestream.load(target, source)
        assert_same(tensors, target)
        assert report.unverified == ("a.b", "c")
        again = await (await sidestream.open_checkpoint(source)).state_dict(memory="mapped")
        assert torch.equal(again["c"], tensors["c"])


def test_stock_planners_read_it(file: Path) -> None:
    """What BroadcastingTorchSaveReader and DynamicMetaLoadPlanner are for."""
    state = torch.load(file, weights_only=True)
    target = {"weights": torch.zeros(64, 16), "views": {"turned": torch.zeros(70, 300)}, "epoch": 0}
    for trust in ("data", "pickle"):
        dcp.load(target, storage_reader=StorageReader(file, trust=trust))  # type: ignore[arg-type]
        assert torch.equal(target["weights"], state["weights"])  # type: ignore[arg-type]
        assert torch.equal(target["views"]["turned"], state["views"]["turned"])  # type: ignore[index]
        assert target["epoch"] == 4


async def test_only_rows_that_are_needed_are_read(tmp_path: Path) -> None:
    """Its one checksum covers a tensor as a whole, so that is read whole where it has to be verified."""
    torch.save({"large": torch.randn(4096, 1024)}, tmp_path / "large.pt")
    raw = bytearray((tmp_path / "large.pt").read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "large.pt").write_bytes(raw)
    with pytest.raises(errors.CorruptCheckpointError, match="large"):
        await (await sidestream.open_checkpoint(tmp_path / "large.pt")).tensor("large", slice(0, 4))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "large.pt", verify="manifest")
    assert (await checkpoint.tensor("large", slice(0, 4))).shape == (4, 1024)
    report = await sidestream.verify(tmp_path / "large.pt")
    assert [damage.fqn for damage in report.damaged] == ["large"]


async def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("nothing of that kind")
    for call in (sidestream.open_checkpoint, sidestream.verify):
        with pytest.raises(errors.UnsupportedCheckpointError, match=r"text\.pt.*it is a text file"):
            await call(tmp_path / "text.pt")
        with pytest.raises(errors.CheckpointNotFoundError, match=r"missing\.pt"):
            await call(tmp_path / "missing.pt")
    torch.save({"w": torch.ones(2), "v": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(errors.UnsafeObjectError, match="system"):
        await sidestream.load({"w": torch.zeros(2)}, tmp_path / "evil.pt")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("exit 1",)
