"""``trust="pickle"``: the one way in which a file's own code runs, and all the ways in which it does not."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from _hostile import STATE, Evil, described, item, with_records
from stock import stock_save

import sidestream
from sidestream import errors


async def test_objects_are_unpickled_if_the_caller_says_so(tmp_path: Path) -> None:
    stock_save({"v": timedelta(hours=1), "t": torch.ones(2)}, tmp_path / "c")
    for _ in range(2):  # trust is of one call: the next one has none
        state: dict[str, Any] = {"v": None, "t": torch.zeros(2)}
        with pytest.raises(errors.UnsafeObjectError, match=r"v: .*timedelta"):
            await sidestream.load(state, tmp_path / "c")
        await sidestream.load(state, tmp_path / "c", options=sidestream.LoadOptions(trust="pickle"))
        assert state["v"] == timedelta(hours=1)
        assert torch.equal(state["t"], torch.ones(2))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", trust="pickle")
    assert await checkpoint.value("v") == timedelta(hours=1)
    with pytest.raises(errors.UnsafeObjectError):
        await (await sidestream.open_checkpoint(tmp_path / "c")).value("v")


async def test_a_checkpointer_restores_a_stock_step(tmp_path: Path) -> None:
    stock_save({"v": timedelta(hours=1)}, tmp_path / "step-3")
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        state: dict[str, Any] = {"v": None}
        with pytest.raises(errors.UnsafeObjectError):
            await checkpoints.restore(state)
        assert await checkpoints.restore(state, options=sidestream.LoadOptions(trust="pickle")) == 3
    assert state["v"] == timedelta(hours=1)


@pytest.mark.parametrize("where", ["metadata", "tensor"])
async def test_trust_is_for_values_alone(where: str, tmp_path: Path) -> None:
    evil = Evil(os.system, f"touch {tmp_path / 'executed'}")
    weight, value = item(STATE["w"]), item(STATE["v"])
    if where == "metadata":
        described(tmp_path / "c", weight, value, attributes={"planner_data": evil})
    else:
        pickled = item(evil)  # a value where the tensor belongs
        described(tmp_path / "c", pickled, value)
    with pytest.raises(errors.UnsafeObjectError):
        await sidestream.load(
            {"w": torch.zeros(4), "v": None}, tmp_path / "c", options=sidestream.LoadOptions(trust="pickle")
        )
    assert not (tmp_path / "executed").exists()


async def test_an_altered_pickle_is_not_run(tmp_path: Path) -> None:
    """Its checksum is compared before, which torch does not do."""
    value = item(Evil(os.system, f"touch {tmp_path / 'executed!'}"))
    altered = value.replace(b"executed!", b"executed?")
    described(tmp_path / "c", item(STATE["w"]), altered)
    with pytest.raises(errors.CorruptCheckpointError, match="v: "):
        await sidestream.load({"v": None}, tmp_path / "c", options=sidestream.LoadOptions(trust="pickle"))
    assert not (tmp_path / "executed?").exists()
    described(tmp_path / "d", item(STATE["w"]), value)
    await sidestream.load({"v": None}, tmp_path / "d", options=sidestream.LoadOptions(trust="pickle"))
    assert (tmp_path / "executed!").exists()  # so it would have been run


async def test_no_way_is_tried_after_the_other(tmp_path: Path) -> None:
    """What cannot be unpickled is not read as data instead, although it could be."""
    plain = item((1, 2))
    broken = with_records(plain, lambda name, raw: b"\x80\x02cno_such\nmodule\n." if "data.pkl" in name else raw)
    described(tmp_path / "c", item(STATE["w"]), broken)
    with pytest.raises(errors.UnsupportedCheckpointError, match="v: it cannot be unpickled"):
        await sidestream.load({"v": None}, tmp_path / "c", options=sidestream.LoadOptions(trust="pickle"))


async def test_our_own_checkpoints_hold_no_pickle_that_is_read(tmp_path: Path) -> None:
    await sidestream.save({"v": (1, 2)}, tmp_path / "c")
    shard = tmp_path / "c" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    state: dict[str, Any] = {"v": None}
    await sidestream.load(state, tmp_path / "c", options=sidestream.LoadOptions(trust="pickle"))
    assert state["v"] == (1, 2)


@pytest.mark.parametrize("trust", [True, "yes", None, "Pickle"])
async def test_what_trust_takes(trust: Any, tmp_path: Path) -> None:
    await sidestream.save({"v": 1}, tmp_path / "c")
    for call in (
        lambda: sidestream.load({"v": 0}, tmp_path / "c", options=sidestream.LoadOptions(trust=trust)),
        lambda: sidestream.open_checkpoint(tmp_path / "c", trust=trust),
    ):
        with pytest.raises(errors.InvalidOptionError, match="trust="):
            await call()
