"""``RandomState`` and ``PerRank`` in one process; tests/ranks has several."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import sidestream
from sidestream.errors import InvalidOptionError, LoadStateDictError, StateMismatchError, UnsupportedCheckpointError


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.random()), float(torch.rand(()))]


@pytest.mark.parametrize("wrapped", [False, True])
async def test_what_is_drawn_after_a_load_is_what_was_drawn_after_the_save(wrapped: bool, tmp_path: Path) -> None:
    state: dict[str, Any] = {"random": sidestream.RandomState()}
    if wrapped:
        state = {"random": sidestream.PerRank(state["random"])}
    random.gauss(0, 1)  # python keeps the second one of a pair
    np.random.standard_normal()
    await sidestream.save(state, tmp_path / "c")
    first = drawn()
    assert drawn() != first
    await sidestream.load(state, tmp_path / "c")
    assert drawn() == first
    assert (await sidestream.verify(tmp_path / "c")).ok


async def test_the_states_are_those_of_the_call(tmp_path: Path) -> None:
    pending = sidestream.async_save({"random": sidestream.RandomState()}, tmp_path / "c")
    first = drawn()
    await pending
    await sidestream.load({"random": sidestream.RandomState()}, tmp_path / "c")
    assert drawn() == first


def test_another_generator_of_numpy() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        saved = sidestream.RandomState().state_dict()
        first = np.random.random()
        sidestream.RandomState().load_state_dict(saved)
        assert np.random.random() == first
    finally:
        np.random.set_bit_generator(before)


def test_stock_dcp_saves_and_loads_it(tmp_path: Path) -> None:
    state = {"random": sidestream.PerRank(sidestream.RandomState())}
    dcp.save(state, checkpoint_id=tmp_path / "c")
    first = drawn()
    sidestream.blocking.load(state, tmp_path / "c")
    assert drawn() == first


def test_a_program_without_numpy_saves_none() -> None:
    code = """
import sys, torch, sidestream
assert "numpy.random" not in sys.modules
saved = sidestream.RandomState().state_dict()
assert sorted(saved) == ["devices", "python", "torch"]
first = torch.rand(3)
sidestream.RandomState().load_state_dict(saved)
assert torch.equal(torch.rand(3), first)
assert "numpy.random" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("saved", [{}, {"python": {}}, {"python": {"version": 3, "words": [1], "gauss": None}}])
def test_other_data_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedCheckpointError, match="not the random states of a RandomState"):
        sidestream.RandomState().load_state_dict(saved)


async def test_what_one_rank_saved_is_not_for_two(tmp_path: Path) -> None:
    saved = {f"rank{rank}-of-2": torch.nn.Linear(2, 2).state_dict() for rank in range(2)}
    await sidestream.save({"own": saved}, tmp_path / "c")
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(LoadStateDictError, match="saved by 2 ranks, and this is rank0-of-1") as error:
        await sidestream.load({"own": sidestream.PerRank(model)}, tmp_path / "c")
    assert type(error.value.__cause__) is StateMismatchError
    await sidestream.load({"own": sidestream.PerRank(model, on_resize="skip")}, tmp_path / "c")
    assert torch.equal(model.weight, before)


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidOptionError, match="on_resize='warn' has to be one of"):
        sidestream.PerRank(torch.nn.Linear(1, 1), on_resize="warn")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match=r"PerRank takes an object with state_dict\(\)"):
        sidestream.PerRank({"a": 1})  # type: ignore[arg-type]
