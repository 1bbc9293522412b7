"""``RandomState`` and ``PerRank``, saved and loaded by ranks together."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _cases import TIMEOUT_S, failures_of, run

import sidestream

SAVE = sidestream.SaveOptions(timeout_s=TIMEOUT_S)
LOAD = sidestream.LoadOptions(timeout_s=TIMEOUT_S)


class Position:
    """As a loader has it: another structure on each rank."""

    def __init__(self, rank: int) -> None:
        self.state: dict[str, Any] = {"batches": [rank] * rank, "shard": torch.arange(3.0) + rank}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def drawn() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def bundles(rank: int, world: int, directory: Path) -> list[Any]:
    """Save states of this rank, and load them again with as many ranks. Returns what was drawn after both."""
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    state = {
        "random": sidestream.PerRank(sidestream.RandomState()),
        "loader": sidestream.PerRank(Position(rank)),
        "step": 3,
    }
    run(sidestream.save(state, directory / "c", options=SAVE))
    first = drawn()
    state["loader"].obj.state = {"batches": [], "shard": torch.zeros(3)}
    run(sidestream.load(state, directory / "c", options=LOAD))
    loaded = state["loader"].obj.state
    return [first, drawn(), loaded["batches"], loaded["shard"].tolist()]


def resized(rank: int, world: int, directory: Path) -> list[Any]:
    """Load what another number of ranks has saved. Returns the failures, and whether anything was changed."""
    own = Position(rank + 10)
    before = own.state["shard"].clone()
    state: dict[str, Any] = {"loader": sidestream.PerRank(own)}
    try:
        failures = failures_of(sidestream.load(state, directory / "c", options=LOAD))
    except sidestream.errors.LoadStateDictError as error:  # one process is no group
        failures = [[rank, type(error).__name__, str(error)]]
    kept = torch.equal(own.state["shard"], before)
    torch.manual_seed(rank + 10)
    ahead = torch.get_rng_state()
    state = {
        "random": sidestream.PerRank(sidestream.RandomState(), on_resize="skip"),
        "loader": sidestream.PerRank(own, on_resize="skip"),
        "step": 0,
    }
    run(sidestream.load(state, directory / "c", options=LOAD))
    kept = kept and torch.equal(own.state["shard"], before) and torch.equal(torch.get_rng_state(), ahead)
    return [failures, kept, state["step"]]
