"""Power cuts on a modelled disk that keeps nothing that it was not asked to: after every change, in several ways.

Where a writer process writes, its changes and those of the trainer are in one order, and the power is cut after each.

Many cuts leave what another one left. In the quick form such files are not judged again, unless more was acknowledged.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from _cutting import WORK, Writer, judged, recorded, runs
from _disk_model import Keeps, Model, Tree
from _judge import Oracle
from _rows import Row, Size, spread

SHORT, LONG = 500, 20_000
ROWS: dict[Writer, str] = {
    "threads": "power cuts, modelled",
    "a writer process": "power cuts, modelled, a writer process writes",
}
OTHERS: tuple[Keeps, ...] = ("everything", "names", "content", "chance", "chance")


ALIKE = ("a removal", "an export")
"""Work of which a writer process does no part, or the same part as of other work."""


@pytest.mark.parametrize(
    ("name", "writer"),
    [(name, writer) for name in WORK for writer in ROWS if writer == "threads" or name not in ALIKE],
)
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
    looked_at = dict.fromkeys(runs(name))
    verdicts: dict[tuple[Tree, frozenset[tuple[str, int]]], list[str]] = {}

    def trial(number: int, model: Model, keeps: Keeps) -> None:
        acked = recording.acknowledged(number)
        left = model.write_to(cut, keeps, random), frozenset(acked.items())
        if not size.quick or left not in verdicts:
            found = {run: judge.look(cut / run) for run in looked_at}
            verdicts[left] = judged(cut, [found[run] for run in runs(name)], acked, name)
            counts.note("judged")
        wrong = verdicts[left]
        operation = recording.events[number - 1].operation if number else "nothing"
        counts.trial((f"after {operation}, event {number}", keeps), wrong)

    while counts.trials < total:
        for number, model in recording.moments():
            last = number == len(recording.events)
            for keeps in get_args(Keeps) if last else ("nothing", random.choice(OTHERS)):
                trial(number, model, keeps)
    shutil.rmtree(cut, ignore_errors=True)
    counts.end(at_least=total)
