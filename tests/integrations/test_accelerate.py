"""``save_accelerator`` and ``restore_accelerator``, in processes of their own: an ``Accelerator`` is one for each."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from lives import Program

from sidestream import blocking

STEPS = 40  # in epochs of 24


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with Program(Path(__file__).parent / "accelerate_program.py") as program:
        yield program


def ended(program: Program, tmp_path: Path, name: str, **request: Any) -> dict[str, Any]:
    """Run a request to its end, and return what it wrote."""
    weights = tmp_path / "weights" / f"{name}.pt"
    defaults = {"work": "train", "out": str(tmp_path / name), "steps": STEPS, "every": 10, "weights": str(weights)}
    program.life(**defaults | request).end()
    found: dict[str, Any] = torch.load(weights, weights_only=False)
    return found


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert {name: part for name, part in one.items() if name != "model"} == {
        name: part for name, part in other.items() if name != "model"
    }
    assert [name for name, tensor in one["model"].items() if not torch.equal(tensor, other["model"][name])] == []


@pytest.mark.parametrize("ranks", [{}, pytest.param({"world": 2}, marks=pytest.mark.long)], ids=["1", "2"])
def test_resume_is_exact(ranks: dict[str, int], program: Program, tmp_path: Path) -> None:
    """The model has dropout and batch norms, two batches make a gradient, and the runs go on in the middle of an epoch:
    this needs all parts of the state."""
    whole = ended(program, tmp_path, "whole", every=STEPS + 1, **ranks)
    ended(program, tmp_path, "run", steps=23, **ranks)
    assert_same(whole, ended(program, tmp_path, "run", **ranks))
    opened = blocking.open_checkpoint(tmp_path / "run" / f"step-{STEPS}")
    parts = {"models", "optimizers", "schedulers", "loaders", "objects", "counters", "random"}
    assert {name.partition(".")[0] for name in opened} == parts


def test_on_an_event_loop(program: Program, tmp_path: Path) -> None:
    whole = ended(program, tmp_path, "whole", every=STEPS + 1)
    ended(program, tmp_path, "run", work="loop", steps=23)
    assert_same(whole, ended(program, tmp_path, "run", work="loop"))


@pytest.mark.long
def test_a_loader_that_knows_its_position(program: Program, tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    whole = ended(program, tmp_path, "whole", every=STEPS + 1, stateful=True)
    ended(program, tmp_path, "run", steps=23, stateful=True)
    assert_same(whole, ended(program, tmp_path, "run", stateful=True))


@pytest.mark.long
def test_as_save_state(program: Program, tmp_path: Path) -> None:
    """accelerate's own calls come to the same weights."""
    whole = ended(program, tmp_path, "whole", work="save_state")
    assert_same(whole, ended(program, tmp_path, "again", work="save_state", start=20, out=str(tmp_path / "whole")))
    assert_same(whole, ended(program, tmp_path, "own"))


@pytest.mark.long
def test_another_number_of_ranks(program: Program, tmp_path: Path) -> None:
    ended(program, tmp_path, "run", steps=10, world=2)
    assert ended(program, tmp_path, "run", steps=20)["seen"] == 20 * 4
    assert ended(program, tmp_path, "run", steps=30, world=3)["seen"] == 30 * 4


@pytest.mark.long
def test_sharded_parameters_on_another_number_of_ranks(program: Program, tmp_path: Path) -> None:
    """``save_state`` with ``use_dcp=False`` writes a file for each rank, which only as many ranks can read."""
    request = {"work": "shard", "out": str(tmp_path / "run")}
    saved = ended(program, tmp_path, "saved", world=2, load=False, **request)
    for world in (1, 2, 3):
        loaded = ended(program, tmp_path, f"loaded-{world}", world=world, load=True, **request)
        assert [name for name, one in saved["model"].items() if not torch.equal(one, loaded["model"][name])] == []
        assert all(torch.equal(one, other) for one, other in zip(saved["moments"], loaded["moments"], strict=True))
    with pytest.raises(AssertionError, match="failed"):
        ended(program, tmp_path, "stock", world=1, load=True, stock=True, **request)


def test_a_release_that_keeps_its_models_elsewhere_is_refused() -> None:
    code = (
        "import accelerate\n"
        "def without(self): self._models, self._optimizers, self._schedulers = [], [], []\n"
        "accelerate.Accelerator.__init__ = without\n"
        "import sidestream.integrations.accelerate"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "UnsupportedError: accelerate " in done.stderr
    assert "sets no _dataloaders, _custom_objects, scaler, step. " in done.stderr
    assert 'pip install "accelerate>=1.10,<2"' in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("kills", [20])
def test_killed_in_a_save(kills: int, program: Program, tmp_path: Path) -> None:
    chance = random.Random(seed := int.from_bytes(os.urandom(4), "little"))
    print("seed", seed)
    steps = 12 * kills + 4
    run = {"out": str(tmp_path / "run"), "steps": steps, "every": 2, "width": 20_000}
    whole = ended(program, tmp_path, "whole", **run | {"out": str(tmp_path / "whole"), "every": steps + 1})
    possible = {0}
    for _ in range(kills):
        life = program.life(work="train", weights=str(tmp_path / "unwritten.pt"), **run)
        begun = int(life.until("begins").split()[1])
        assert begun in possible
        for _ in range(chance.randint(1, 3)):
            life.until("saving")
        time.sleep(chance.uniform(0, 0.06))  # a save takes about as long
        life.kill()
        told = [int(line.split()[1]) for line in life.said if line.startswith(("saving", "saved"))]
        possible = {max(begun, max(told) - 2), max(told)}  # the last save may have been committed
        for path in (tmp_path / "run").glob("step-*"):
            assert blocking.verify(path).ok
        print("killed in the life from step", begun, possible)
    assert_same(whole, ended(program, tmp_path, "run", **run))
