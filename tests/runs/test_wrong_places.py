"""A run given as a checkpoint, and a checkpoint given as a run: the error says what was found and what to do."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest
import torch
from _run import blank, save_steps, state_of
from safetensors.torch import save_file
from stock import stock_save

import sidestream
from sidestream import errors


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid.uuid4().hex}/runs"


async def not_found(url: str) -> str:
    """Return the message of the error that every reader raises."""
    said = set()
    for refuses in (
        sidestream.load(blank(), url),
        sidestream.open_checkpoint(url),
        sidestream.verify(url),
        sidestream.convert(url, f"{url}-converted"),
    ):
        with pytest.raises(errors.CheckpointNotFoundError) as refused:
            await refuses
        said.add(str(refused.value))
    (one,) = said
    return one


async def test_a_run_is_not_a_checkpoint(root: str) -> None:
    url = f"{root}/7"
    async with sidestream.Checkpointer(
        url, save=sidestream.SaveOptions(writer="thread")
    ) as checkpoints:  # memory belongs to this process
        await save_steps(checkpoints, 10, 20, 30, 30)
    said = await not_found(url)
    assert "This is a run with 3 steps, from 10 to 30" in said
    assert re.search(r"load \S+/7/step-30\.g2, or restore with sidestream\.Checkpointer\('\S+/7'\)", said)
    await sidestream.load(blank(), f"{url}/step-30.g2")

    assert "Use one of the checkpoints in" in await not_found(root)
    assert f"{root}/7".removeprefix("memory://") in await not_found(root)
    assert "The run of this step has 3 steps, from 10 to 30" in await not_found(f"{url}/step-40")
    said = await not_found(f"{url}/best")
    assert said.endswith("there is nothing of that name. Beside it: step-10, step-20, step-30, step-30.g2")
    assert (await not_found(f"{root}/8")).endswith("there is nothing of that name. Beside it: 7")
    assert (await not_found(f"{root}-/deep/8")).endswith("there is nothing of that name.")


async def test_a_step_that_was_not_committed_is_not_recommended(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        await save_steps(checkpoints, 10)
    (tmp_path / "run" / "step-20").mkdir()
    assert "This is a run with step 10: load" in await not_found(str(tmp_path / "run"))


async def test_a_directory_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    said = await not_found(str(tmp_path / "best"))
    assert said.endswith("there is no .metadata. Its save was interrupted, or it is not a checkpoint")


async def test_names_that_begin_alike_are_named_first(tmp_path: Path) -> None:
    for name in (*"abcdefghi", "policy"):
        await sidestream.save(state_of(1), tmp_path / name)
    assert "Beside it: policy, a, b, c, d, e, f, g" in await not_found(str(tmp_path / "polcy"))


async def test_directories_of_checkpoints_and_of_files(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(3)}, tmp_path / "runs" / "checkpoint-500")
    (tmp_path / "runs" / "logs").mkdir()
    said = await not_found(str(tmp_path / "runs"))
    assert said.endswith(f"Use one of the checkpoints in {tmp_path}/runs/checkpoint-500")

    (tmp_path / "weights").mkdir()
    torch.save({"w": torch.ones(3)}, tmp_path / "weights" / "model.pt")
    assert "It has files that are checkpoints by themselves: model.pt" in await not_found(str(tmp_path / "weights"))


async def test_a_checkpoint_is_not_a_run(root: str) -> None:
    url = f"{root}/7"
    async with sidestream.Checkpointer(url, save=sidestream.SaveOptions(writer="thread")) as checkpoints:
        await save_steps(checkpoints, 10)
    says = r"/7/step-10 is a checkpoint, not a run.*, here \S+/7:"
    with pytest.raises(errors.InvalidOptionError, match=says):
        async with sidestream.Checkpointer(f"{url}/step-10", save=sidestream.SaveOptions(writer="thread")) as wrong:
            await wrong.restore(blank())
    with pytest.raises(errors.InvalidOptionError, match=says):
        async with sidestream.Checkpointer(f"{url}/step-10", save=sidestream.SaveOptions(writer="thread")) as wrong:
            wrong.async_save(state_of(1), step=1)
    with pytest.raises(errors.InvalidOptionError, match=says):
        async with sidestream.Checkpointer(f"{url}/step-10", save=sidestream.SaveOptions(writer="thread")) as wrong:
            await wrong.steps()
    async with sidestream.Checkpointer(url, save=sidestream.SaveOptions(writer="thread")) as checkpoints:
        assert await checkpoints.steps() == [10]
        assert (await checkpoints.verify(10)).ok


async def test_checkpoints_of_other_writers_are_no_runs(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(3)}, tmp_path / "last")
    with pytest.raises(errors.InvalidOptionError, match=f"contains its checkpoints, here {tmp_path}:"):
        async with sidestream.Checkpointer(tmp_path / "last"):
            pass
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    async with sidestream.Checkpointer(tmp_path) as checkpoints:  # a run may lie beside other files
        assert await checkpoints.latest() is None


def test_a_blocking_one(tmp_path: Path) -> None:
    sidestream.blocking.save(state_of(1), tmp_path / "run" / "step-1")
    with pytest.raises(errors.InvalidOptionError, match="is a checkpoint, not a run"):
        sidestream.blocking.Checkpointer(tmp_path / "run" / "step-1")
