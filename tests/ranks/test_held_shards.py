"""Tensors that say which shards they hold, over ranks and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import sidestream
from sidestream.errors import UnsupportedTensorError

if TYPE_CHECKING:
    from conftest import Groups


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensors_that_hold_shards(world: int, groups: Groups, tmp_path: Path) -> None:
    groups.run("holders", world, tmp_path)


async def test_shards_without_a_group_are_refused_by_name(tmp_path: Path) -> None:
    from _held import ROWS, boxes_of, holder

    with pytest.raises(UnsupportedTensorError, match="held"):
        await sidestream.save({"held": holder(ROWS, boxes_of(0, 1))}, tmp_path / "a")
    await sidestream.save({"held": ROWS}, tmp_path / "a")
    target = holder(ROWS, boxes_of(0, 2), fill=False)
    await sidestream.load({"held": target}, tmp_path / "a")
    assert torch.equal(target, holder(ROWS, boxes_of(0, 2)))
