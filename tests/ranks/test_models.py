"""Models as FSDP2, tensor parallelism, both, HSDP and DDP have them, with their optimizers' state through torch's own
helpers: saved by some ranks, gone on with by others, to equal losses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Groups

KINDS = [("fsdp", 2), ("fsdp", 3), ("tp", 2), ("hsdp", 4), ("2d", 4), ("ddp", 2)]


@pytest.fixture(scope="module")
def saved(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    directory = tmp_path_factory.mktemp("models")
    losses = {}
    for kind, world in KINDS:
        told = groups.run("save_model", world, directory, kind=kind).results
        assert len({round(loss, 5) for loss in told}) == 1
        losses[f"{kind}-{world}"] = told[0]
    return directory, losses


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 4), ("tp", 2), ("hsdp", 4), ("2d", 4), ("ddp", 3), ("fsdp", 1)])
def test_goes_on_with_equal_loss(kind: str, world: int, groups: Groups, saved: tuple[Path, dict[str, Any]]) -> None:
    directory, losses = saved
    told = groups.run("load_model", world, directory, kind=kind, names=[*losses, "stock-fsdp-3"]).results
    for results in told:
        assert results == pytest.approx([*losses.values(), losses["fsdp-3"]], rel=1e-3)


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_tensors(world: int, groups: Groups, tmp_path: Path) -> None:
    groups.run("sharded_tensors", world, tmp_path)
