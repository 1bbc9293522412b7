"""Damage of every kind to every file of a checkpoint: it is found, or it does no harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from _corrupting import DAMAGES, OWN_READERS, STOCK_READERS, bit_flip, damaged, foreign, judged
from _rows import Row, Size
from _seeded import files_of, make_state

import sidestream

SHORT, LONG = 5_000, 100_000
PARTS = {"own": 0.7, "stock DCP": 0.3}


@pytest.mark.parametrize("part", PARTS)
async def test_damage_is_found(part: str, place: Path, row: Callable[..., Row], size: Size) -> None:
    counts, random = row("corruption", part), size.random(part)
    url, readers = await (own(place) if part == "own" else stock(place))
    for reader in readers:
        assert await judged(url, reader) == ("harmless", []), "undamaged"
    total = int(size.of(SHORT, LONG) * PARTS[part])
    # A file of stock DCP says nothing about the save that wrote it: nobody can tell one of equal shapes from another.
    damages = DAMAGES if part == "own" else [one for one in DAMAGES if one is not foreign]
    for _ in range(total):
        reader, damage = random.choice(readers), random.choice(damages)
        with damaged(url, damage, random) as what:
            ended, wrong = await judged(url, reader)
        counts.trial((what, reader.__name__), wrong)
        counts.note(ended)
    counts.end(at_least=total)


async def own(place: Path) -> tuple[Path, Any]:
    async with sidestream.Checkpointer(place / "run") as checkpoints:
        for step, seed in ((1, 11), (2, 12)):
            await checkpoints.save(make_state(seed), step=step, files=files_of(seed))
    return place / "run" / "step-1", OWN_READERS


async def stock(place: Path) -> tuple[Path, Any]:
    dcp.save(make_state(11), checkpoint_id=place / "stock", no_dist=True)
    return place / "stock", STOCK_READERS


async def test_a_flip_in_a_shard_of_stock_dcp_is_found(place: Path, row: Callable[..., Row], size: Size) -> None:
    """Stock DCP loads every one of these: its zips carry a checksum that it never looks at."""
    counts, random = row("bit flips in stock DCP's shards"), size.random("flips")
    url, readers = await stock(place)
    total = size.of(300, 20_000)
    hidden = [path for path in url.iterdir() if path.suffix != ".distcp"]
    for _ in range(total):
        for path in hidden:
            path.rename(place / path.name)  # out of reach of the damage
        try:
            with damaged(url, bit_flip, random) as what:
                for path in hidden:
                    (url / path.name).write_bytes((place / path.name).read_bytes())
                ended, wrong = await judged(url, readers[0])
        finally:
            for path in hidden:
                (place / path.name).rename(path)
        counts.trial(what, wrong)
        counts.note(ended)
    counts.end(at_least=total)
