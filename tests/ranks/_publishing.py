"""Versions of weights that rank 0 publishes from what all ranks save."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from _cases import COLUMNS, ROWS, TIMEOUT_S, placed, run
from keywords import for_run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import sidestream
from sidestream.errors import InvalidOptionError, RankFailuresError, SnapshotLostError, UnsupportedTensorError


def state_of(world: int, plus: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    rows, columns = placed(ROWS + plus, mesh, Shard(0)), placed(COLUMNS + plus, mesh, Shard(1))
    return {"model": {"rows": rows, "columns": columns, "tied": columns, "plain": torch.tensor(plus)}, "step": plus}


async def check(weights: sidestream.Subscriber, stamp: str, plus: int) -> None:
    image = await anext(weights)
    assert image.stamp == stamp
    assert image.tensors.keys() == {"rows", "columns", "tied", "plain"}
    assert torch.equal(image.tensors["rows"], (ROWS + plus).bfloat16())
    assert torch.equal(image.tensors["columns"], COLUMNS + plus)
    assert image.tensors["tied"] is image.tensors["columns"]
    assert image.tensors["plain"] == plus
    await image.verify()


def publishes(rank: int, world: int, directory: Path) -> None:
    """Rank 0 has the publisher; an export beside the version is made by all ranks."""
    taken: dict[str, Any] = {
        "select": "model.*",
        "names": sidestream.strip_prefix("model."),
        "dtype": torch.bfloat16,
    }
    options = sidestream.SaveOptions(timeout_s=TIMEOUT_S)

    async def save() -> None:
        async with AsyncExitStack() as stack:
            publisher = weights = None
            if rank == 0:
                publisher = await stack.enter_async_context(sidestream.Publisher(directory / "home", **taken))
                weights = await stack.enter_async_context(sidestream.Subscriber(publisher.url))
                with pytest.raises(UnsupportedTensorError, match="divided among ranks"):
                    publisher.publish(state_of(world, 0), version=1)
            else:
                state_of(world, 0)  # makes a group
            export = sidestream.HF(str(directory / "hf{step}"), **taken)
            checkpoints = await stack.enter_async_context(
                sidestream.Checkpointer(directory / "run", export=export, **for_run(timeout_s=TIMEOUT_S))
            )
            for step in (1, 2):
                info = await checkpoints.save(state_of(world, step), step=step, publish=publisher)
                assert not isinstance(info.exports[0], BaseException), info.exports
                if weights is None:
                    assert info.published is None
                    continue
                assert info.published.stamp == f"e1.v{step}"
                await check(weights, f"e1.v{step}", step)
            pending = sidestream.async_save(
                state_of(world, 3), directory / "alone", options=options,
                publish=None if publisher is None else publisher.version(30),
            )  # fmt: skip
            if weights is None:
                await pending
            else:
                assert (await pending.published).version == 30
                await check(weights, "e1.v30", 3)
            # One rank cannot save: no rank has saved, and nothing is published.
            state = state_of(world, 4) | ({"bad": object()} if rank == 1 else {})
            with pytest.raises(RankFailuresError):
                await checkpoints.save(state, step=40, publish=publisher)
            # The call of rank 0 is wrong: it fails on all ranks.
            with pytest.raises((RankFailuresError, InvalidOptionError)):
                await checkpoints.save(state_of(world, 5), step=5, publish=publisher)
            if publisher is not None:
                assert publisher.health().channels == {"stable": "e1.v30"}
                failing = checkpoints.async_save(state_of(world, 6), step=50, publish=publisher)
                with pytest.raises(RankFailuresError):
                    await failing
                with pytest.raises(SnapshotLostError):
                    await failing.published
            else:
                with pytest.raises(RankFailuresError):
                    await checkpoints.save({"bad": object()}, step=50)

    run(save())
