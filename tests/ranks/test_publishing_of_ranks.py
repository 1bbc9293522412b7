"""Of several ranks, rank 0 publishes, from the committed checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is handed over on Linux only")


@pytest.mark.parametrize("world", [2])
def test_rank_0_publishes_what_all_have_saved(world: int, groups: Groups, tmp_path: Path) -> None:
    groups.run("publishes", world, tmp_path)
