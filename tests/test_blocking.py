"""The same verbs without a loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from states import assert_same, model_and_optimizer

import sidestream.blocking
from sidestream.errors import CheckpointNotFound, Conflict, WrongLoop


def test_the_verbs(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    state = {"model": model, "optimizer": optimizer, "step": 3}
    info = sidestream.blocking.save(state, tmp_path / "a")
    assert info.url == str(tmp_path / "a")
    with pytest.raises(Conflict):
        sidestream.blocking.save(state, tmp_path / "a")
    fresh = {"model": model_and_optimizer(seed=8)[0], "step": 0}
    report = sidestream.blocking.load(fresh, tmp_path / "a")
    assert report.save_id == info.save_id
    assert_same(model.state_dict(), fresh["model"].state_dict())
    checkpoint = sidestream.blocking.open_checkpoint(tmp_path / "a")
    assert torch.equal(checkpoint.tensor("model.0.weight", rows=slice(2, 5)), model[0].weight[2:5])
    assert checkpoint.value("step") == 3
    assert checkpoint.state_dict()["step"] == 3
    assert len(checkpoint) == len(list(checkpoint))
    with pytest.raises(CheckpointNotFound):
        sidestream.blocking.open_checkpoint(tmp_path / "b")


def test_async_save_and_checkpointer(tmp_path: Path) -> None:
    tensor = torch.arange(1000)
    pending = sidestream.blocking.async_save({"t": tensor}, tmp_path / "a")
    pending.staged.result()
    tensor.zero_()
    assert pending.result(60).url == str(tmp_path / "a")
    assert pending.done()
    assert pending.outcome == "committed"
    assert not pending.cancel()
    with sidestream.blocking.Checkpointer(tmp_path / "run") as checkpoints:
        assert checkpoints.save({"t": torch.ones(2)}, step=4).result().step == 4
        assert checkpoints.steps() == [4]
        assert checkpoints.latest() == 4
        target = {"t": torch.zeros(2)}
        assert checkpoints.restore(target) == 4
        assert target["t"].tolist() == [1, 1]
    assert sidestream.blocking.open_checkpoint(tmp_path / "a").tensor("t").tolist() == list(range(1000))


async def test_inside_a_loop_they_refuse(tmp_path: Path) -> None:
    for call in (
        lambda: sidestream.blocking.save({}, tmp_path / "a"),
        lambda: sidestream.blocking.Checkpointer(tmp_path),
    ):
        with pytest.raises(WrongLoop, match="await the functions of sidestream"):
            call()


def test_without_a_loop_the_others_refuse(tmp_path: Path) -> None:
    with pytest.raises(WrongLoop, match=r"use sidestream\.blocking"):
        sidestream.async_save({}, tmp_path / "a")


def test_in_a_forked_child(tmp_path: Path) -> None:
    sidestream.blocking.save({"t": torch.ones(3)}, tmp_path / "a")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sidestream.blocking.save({"t": torch.ones(3)}, tmp_path / "b")
            code = 0
        finally:
            os._exit(code)
    signal.alarm(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sidestream.blocking.open_checkpoint(tmp_path / "b").tensor("t").tolist() == [1, 1, 1]


def test_the_interpreter_ends_by_itself(tmp_path: Path) -> None:
    code = """
import sys, torch, sidestream.blocking
pending = sidestream.blocking.async_save({"t": torch.ones(1 << 20)}, sys.argv[1])
if len(sys.argv) > 2:
    print(pending.result().url)
"""
    for arguments in ([str(tmp_path / "a"), "wait"], [str(tmp_path / "b")]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / ".metadata").exists()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left in (["a"], ["a", "b"]), "what was in flight at exit is whole or absent"
