"""Trainers of Lightning save, are killed, and resume, with both of its roots."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from lives import Life, Program

EXACT = (
    ("steps", 0, False), ("steps", 2, True),  # batches that depend on the step alone, and a rate by the epoch
    ("constant rate", 0, True),  # the same without a scheduler
    ("shuffled", 0, False),  # a shuffled loader and dropout
    ("random states", 0, False), ("random states", 2, False),  # these, with the random states in the checkpoint
)  # fmt: skip


class Lightning(Program):
    """The program whose functions are cases."""

    def begin(self, case: str, directory: Path, **options: Any) -> Life:
        return self.life(case=case, directory=str(directory), options=options)

    def run(self, case: str, directory: Path, **options: Any) -> Any:
        """Return what the case has returned."""
        return self.begin(case, directory, **options).end()[0]


@pytest.fixture(scope="module")
def lightning() -> Iterator[Lightning]:
    with Lightning(Path(__file__).parent / "lightning_program.py") as program:
        yield program


@pytest.fixture(scope="module")
def unkilled(lightning: Lightning, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a run that was not killed ends with."""
    return lightning.run("train", tmp_path_factory.mktemp("unkilled"))  # type: ignore[no-any-return]


def kill_and_resume(lightning: Lightning, directory: Path, kills: int, seed: int) -> list[str]:
    """Kill a run at random moments, resume it each time, and return what it ends with."""
    rng = random.Random(seed)
    had: list[str] = []
    while kills:
        life = lightning.begin("train", directory)
        for _ in range(rng.randint(1, 8)):
            if life.until("step", "ended").startswith("ended"):
                break
        time.sleep(rng.uniform(0, 0.1))  # a save takes about as long
        killed = life.kill()
        found = lightning.run("good", directory)
        assert "last.ckpt" in found or "last.ckpt" not in had  # there is a good one at any time
        had, kills = found, kills - killed
        if not killed:  # it came to its end: begin again
            directory, had = directory / "again", []
            directory.mkdir()
    return lightning.run("train", directory)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_that_was_killed_ends_as_one_that_was_not(
    kills: int, lightning: Lightning, unkilled: list[str], tmp_path: Path
) -> None:
    assert kill_and_resume(lightning, tmp_path, kills, seed=kills) == unkilled


CASES = ("removals_wait_for_commits", "a_failed_save_keeps_what_is_there", "calls_wait_for_what_is_in_progress",
         "what_cannot_be_replaced", "with_fabric")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_calls(case: str, lightning: Lightning, tmp_path: Path) -> None:
    lightning.run(case, tmp_path)


def test_what_cannot_be_saved_is_named_in_the_words_of_lightning(lightning: Lightning, tmp_path: Path) -> None:
    assert "save_hyperparameters(ignore=[...])" in lightning.run("what_cannot_be_saved", tmp_path)


def ranks(lightning: Lightning, directory: Path, plugin: str) -> list[list[str]]:
    directory.mkdir()
    options = {"plugin": plugin}
    return lightning.life(case="rank", directory=str(directory), options=options, world=2).end()


def test_two_ranks(lightning: Lightning, tmp_path: Path) -> None:
    """Rank 0 saves. Both resume, and read what rank 0 has just saved."""
    first, second = ranks(lightning, tmp_path / "run", "sidestream")
    assert first == second


@pytest.mark.long
def test_two_ranks_end_as_with_the_own_save_of_lightning(lightning: Lightning, tmp_path: Path) -> None:
    own, default = (ranks(lightning, tmp_path / plugin, plugin) for plugin in ("sidestream", "default"))
    assert own == default


@pytest.mark.long
@pytest.mark.parametrize("plugin", ["sidestream", "default"])
@pytest.mark.parametrize(("kind", "every", "equal"), EXACT)
def test_how_exact_a_resumed_run_is(
    plugin: str, kind: str, every: int, equal: bool, lightning: Lightning, tmp_path: Path
) -> None:
    """The page has this table: it is the same with the own save of Lightning."""
    assert lightning.run("resumed", tmp_path, plugin=plugin, kind=kind, every=every) is equal


@pytest.mark.long
def test_the_other_root(lightning: Lightning, unkilled: list[str], tmp_path: Path) -> None:
    assert lightning.run("train", tmp_path, root="pytorch_lightning") == unkilled


@pytest.mark.long
def test_on_an_event_loop(lightning: Lightning, unkilled: list[str], tmp_path: Path) -> None:
    assert lightning.run("in_a_loop", tmp_path) == unkilled


@pytest.mark.long
def test_a_tuner(lightning: Lightning, tmp_path: Path) -> None:
    assert lightning.run("with_a_tuner", tmp_path)
