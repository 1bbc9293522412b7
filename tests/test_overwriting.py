"""``overwrite=True`` and ``remove``: the old checkpoint or the new one, never neither, never a mixture."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import sidestream
from sidestream import HF, load, remove, save
from sidestream._storage.local import transaction
from sidestream.errors import CheckpointExistsError, CheckpointNotFoundError, InvalidOptionError


def state_of(seed: int) -> dict[str, Any]:
    return {"a": torch.full((1000,), float(seed)), "b": torch.full((300, 300), seed), "step": seed}


async def loaded(url: Path | str) -> int:
    """The seed of the checkpoint, all parts of which have to say the same."""
    state = state_of(-1)
    await load(state, url)
    seeds = {int(value) for tensor in (state["a"], state["b"]) for value in tensor.unique()} | {state["step"]}
    (seed,) = seeds
    return int(seed)


@pytest.mark.parametrize("saver", ["thread", "process"])
async def test_a_checkpoint_is_replaced(saver: Any, tmp_path: Path) -> None:
    for seed in range(3):
        await save(state_of(seed), tmp_path / "last", overwrite=True, options=sidestream.SaveOptions(writer=saver))
        assert await loaded(tmp_path / "last") == seed
    assert os.listdir(tmp_path) == ["last"]


async def test_one_of_stock_dcp_is_replaced(tmp_path: Path) -> None:
    dcp.save(state_of(1), checkpoint_id=tmp_path / "last", no_dist=True)
    await save(state_of(2), tmp_path / "last", overwrite=True)
    assert await loaded(tmp_path / "last") == 2


async def test_not_without_being_asked(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "last")
    with pytest.raises(CheckpointExistsError):
        await save(state_of(2), tmp_path / "last")
    assert await loaded(tmp_path / "last") == 1


async def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointExistsError, match="no checkpoint"):
        await save(state_of(1), tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    assert os.listdir(tmp_path) == ["home"]


async def test_object_storage_says_what_to_do() -> None:
    with pytest.raises(InvalidOptionError, match="remove"):
        await save(state_of(1), "memory://overwriting/last", overwrite=True)


async def test_readers_find_one_of_both(tmp_path: Path) -> None:
    await save(state_of(0), tmp_path / "last")
    over = False
    found: list[int] = []

    async def read() -> None:
        while not over:
            found.append(await loaded(tmp_path / "last"))

    readers = [asyncio.create_task(read()) for _ in range(2)]
    for seed in range(1, 20):
        await save(
            state_of(seed), tmp_path / "last", overwrite=True, options=sidestream.SaveOptions(durability="flush")
        )
    over = True
    await asyncio.gather(*readers)
    assert found == sorted(found) or len(set(found)) > 1
    assert await loaded(tmp_path / "last") == 19


async def test_several_overwrite_at_once(tmp_path: Path) -> None:
    """Each succeeds, and one of them stays; none deletes what another has committed."""
    await save(state_of(0), tmp_path / "last")
    for _ in range(5):
        saves = [
            save(state_of(seed), tmp_path / "last", overwrite=True, options=sidestream.SaveOptions(durability="flush"))
            for seed in range(1, 7)
        ]
        await asyncio.gather(*saves)
        assert await loaded(tmp_path / "last") in range(1, 7)
        assert os.listdir(tmp_path) == ["last"]


async def test_one_that_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the exchange and the look at what was published another save replaces it, and deletes it."""
    await save(state_of(0), tmp_path / "last")
    real, nested = transaction.exchange, []

    def exchange(attempt: Path, target: Path) -> None:
        real(attempt, target)
        if not nested:
            nested.append(attempt)
            sidestream.blocking.save(state_of(2), tmp_path / "last", overwrite=True)

    monkeypatch.setattr(transaction, "exchange", exchange)
    await save(state_of(1), tmp_path / "last", overwrite=True)
    assert nested
    assert await loaded(tmp_path / "last") == 2
    assert os.listdir(tmp_path) == ["last"]


async def test_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "last")
    with pytest.raises(sidestream.errors.UnsafeObjectError):
        await save({**state_of(2), "bad": object()}, tmp_path / "last", overwrite=True)
    assert await loaded(tmp_path / "last") == 1
    assert os.listdir(tmp_path) == ["last"]


# --- remove ---


async def test_remove(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "a")
    await remove(tmp_path / "a")
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError):
        await remove(tmp_path / "a")


async def test_remove_on_object_storage() -> None:
    await save(state_of(1), "memory://removing/a")
    await save(state_of(2), "memory://removing/b")
    await remove("memory://removing/a")
    with pytest.raises(CheckpointNotFoundError):
        await loaded("memory://removing/a")
    assert await loaded("memory://removing/b") == 2
    await save(state_of(3), "memory://removing/a")  # the name is free again
    assert await loaded("memory://removing/a") == 3


@pytest.mark.parametrize("what", ["a run", "an export", "a directory"])
async def test_only_a_checkpoint_is_removed(what: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if what == "a run":
        async with sidestream.Checkpointer(place) as checkpoints:
            await checkpoints.save(state_of(1), step=1)
    elif what == "an export":
        await save({"a": torch.ones(3)}, tmp_path / "step", export=HF(place))
    else:
        place.mkdir()
        (place / "file").touch()
    before = sorted(path for path in place.rglob("*") if ".leases" not in path.parts)
    with pytest.raises(CheckpointNotFoundError, match="nothing was removed"):
        await remove(place)
    assert sorted(path for path in place.rglob("*") if ".leases" not in path.parts) == before


def test_blocking(tmp_path: Path) -> None:
    for seed in (1, 2):
        sidestream.blocking.save(state_of(seed), tmp_path / "a", overwrite=True)
    sidestream.blocking.remove(tmp_path / "a")
    assert os.listdir(tmp_path) == []
