"""No operation leaves objects in memory, not even objects that only a garbage collection frees."""

from __future__ import annotations

from pathlib import Path

import pytest
from _growing import KINDS, MOST_OBJECTS, growth

ROUNDS = 150


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_grows_with_the_number_of_operations(kind: str, tmp_path: Path) -> None:
    objects, blocks, more = await growth(kind, tmp_path, ROUNDS)
    print(f"{kind}: {objects:.2f} objects, {blocks:.2f} blocks more for each")
    assert objects < MOST_OBJECTS, more
    assert blocks < MOST_OBJECTS, more
