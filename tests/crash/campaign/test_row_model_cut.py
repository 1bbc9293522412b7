"""Power cuts on a modelled disk that keeps nothing that it was not asked to: after every change, in several ways."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from _cutting import WORK, judged
from _disk_model import Keeps, Model, record
from _judge import Oracle
from _rows import Row, Size, spread
from _seeded import make_state

import sidestream

SHORT, LONG = 500, 20_000
OTHERS: tuple[Keeps, ...] = ("everything", "names", "content", "chance", "chance")


@pytest.mark.parametrize("name", WORK)
async def test_the_power_is_cut_after_every_change(
    name: str, place: Path, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    counts = row("power cuts, modelled", name)
    random = size.random(name)
    root, cut = place / "root", place / "cut"
    async with sidestream.Checkpointer(root / "run") as checkpoints:
        await (await checkpoints.save(make_state(11), step=1))
    recording = await record(root, place / "before", lambda acked: WORK[name](root / "run", acked))
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
