"""``SidestreamTrainer`` on several ranks (gloo, DDP)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lives import Program

from sidestream import blocking

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with Program(Path(__file__).parent / "transformers_program.py") as program:
        yield program


def trained(
    program: Program, out: Path, *, steps: int = 12, world: int = 2, trainer: str = "sidestream"
) -> dict[str, torch.Tensor]:
    weights = out.with_suffix(".pt")
    program.life(trainer=trainer, out=str(out), steps=steps, world=world, weights=str(weights)).end()
    found: dict[str, torch.Tensor] = torch.load(weights)
    return found


def test_two_ranks_resume_exactly(program: Program, tmp_path: Path) -> None:
    """Each rank drops out other units, so each needs the random states of its own."""
    whole = trained(program, tmp_path / "whole", trainer="stock")
    trained(program, tmp_path / "first", steps=12)
    blocking.remove(tmp_path / "first" / "checkpoint-12")
    resumed = trained(program, tmp_path / "first")
    assert [name for name, tensor in whole.items() if not torch.equal(tensor, resumed[name])] == []


def test_another_number_of_ranks(program: Program, tmp_path: Path) -> None:
    trained(program, tmp_path / "run", steps=6)
    trained(program, tmp_path / "run", steps=9, world=1)
    trained(program, tmp_path / "run", steps=12, world=3)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-12", "checkpoint-9"]
