"""Every mutant of the commit protocol is caught by a row, and without one every row is content."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from _mutants import CATCHERS, MUTANTS, Mutant, mutate
from _rows import HERE, SOURCE, Row, Size, Warm, warm


@pytest.fixture(scope="module")
def catching() -> Iterator[Warm]:
    with warm(HERE / "_mutants.py", source=HERE) as process:  # no sidestream yet: each child takes its own
        yield process


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, place: Path, catching: Warm, row: Callable[..., Row], size: Size) -> None:
    counts = row("mutants", mutant.name)
    mutate(mutant, SOURCE, place / "source")
    (place / "trials").mkdir()
    told = catching.ask(
        source=place / "source", catcher=mutant.catcher, first=mutant.first, place=place / "trials", seed=size.seed
    )
    print(told)
    counts.trial(mutant.name, [] if told["caught"] else [f"{mutant.catcher} did not notice in {told['trials']} trials"])
    counts.note(f"by {mutant.catcher}")
    counts.end(at_least=1)


ROWS = ("corruption", "cuts", "saver_cuts", "kills", "faults", "object_store", "retention", "stock")
"""Catchers whose trials are also rows of the campaign, which run without a mutant."""


@pytest.mark.parametrize("catcher", [name for name in CATCHERS if name not in ROWS])
def test_without_a_mutant_nothing_is_caught(catcher: str, place: Path, catching: Warm, size: Size) -> None:
    told = catching.ask(source=SOURCE, catcher=catcher, first="", place=place, seed=size.seed)
    assert told["caught"] is None, told
    shutil.rmtree(place, ignore_errors=True)
