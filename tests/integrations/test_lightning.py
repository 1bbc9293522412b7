"""Trainers of Lightning save, are killed, and resume, with both of its roots."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Server

pytest.importorskip("lightning")
ROOTS = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(scope="module")
def lightning(servers: Callable[[str], Server]) -> Server:
    return servers("_lightning_cases")


@pytest.fixture(scope="module")
def unkilled(lightning: Server, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a run that was not killed ends with."""
    return lightning.run("train", tmp_path_factory.mktemp("unkilled"))  # type: ignore[no-any-return]


def kill_and_resume(lightning: Server, directory: Path, kills: int, seed: int) -> list[str]:
    """Kill a run at random moments, resume it each time, and return what it ends with."""
    rng = random.Random(seed)
    had: list[str] = []
    while kills:
        killed = lightning.killed("train", directory, after=rng.randint(1, 8), delay_s=rng.uniform(0, 0.1))
        found = lightning.run("good", directory)
        assert "last.ckpt" in found or "last.ckpt" not in had  # there is a good one at any time
        had, kills = found, kills - killed
        if not killed:  # it came to its end: begin again
            directory, had = directory / "again", []
            directory.mkdir()
    return lightning.run("train", directory)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_that_was_killed_ends_as_one_that_was_not(
    kills: int, lightning: Server, unkilled: list[str], tmp_path: Path
) -> None:
    assert kill_and_resume(lightning, tmp_path, kills, seed=kills) == unkilled
