"""Power cuts on a modelled disk that keeps nothing that it was not asked to: after every change, in several ways.

Where a writer process writes, its changes and those of the trainer are in one order, and the power is cut after each.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from _cutting import WORK, Writer, judged, recorded
from _disk_model import Keeps, Model
from _judge import Oracle
from _rows import Row, Size, spread

SHORT, LONG = 500, 20_000
ROWS: dict[Writer, str] = {
    "threads": "power cuts, modelled",
    "a writer process": "power cuts, modelled, a writer process writes",
}
OTHERS: tuple[Keeps, ...] = ("everything", "names", "content", "chance", "chance")


@pytest.mark.parametrize("writer", ROWS)
@pytest.mark.parametrize("name", WORK)
async def test_the_power_is_cut_after_every_change(
    name: str, writer: Writer, place: Path, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    counts = row(ROWS[writer], name)
    random = size.random(name)
    cut = place / "cut"
    recording = await recorded(place, name, writer)
    of_others = {event.operation for event in recording.events if event.process != os.getpid()}
    assert of_others >= ({"pwrite", "fsync"} if writer == "a writer process" else set()), of_others
    total = spread(size.of(SHORT, LONG), WORK)[name]
    new = "run/new/below" if name == "a new run" else "run"

    def trial(number: int, model: Model, keeps: Keeps) -> None:
        model.write_to(cut, keeps, random)
        found = judge.look(cut / new)
        older = found if new == "run" else judge.look(cut / "run")
        wrong = judged(found, recording.acknowledged(number), older, name)
        operation = recording.events[number - 1].operation if number else "nothing"
        counts.trial((f"after {operation}, event {number}", keeps), wrong)

    while counts.trials < total:
        for number, model in recording.moments():
            last = number == len(recording.events)
            for keeps in get_args(Keeps) if last else ("nothing", random.choice(OTHERS)):
                trial(number, model, keeps)
    shutil.rmtree(cut, ignore_errors=True)
    counts.end(at_least=total)
