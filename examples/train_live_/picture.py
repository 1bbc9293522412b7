"""The picture: pauses of the loop over time, and the phases of the saves."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from train_live_.records import Run, Save
from train_live_.report import Rounds, during_saves

LEAST_PAUSE_MS = 0.1
OURS_COLOR = "tab:blue"
THEIRS_COLOR = "tab:red"

Phase = tuple[str, str, str]
"""The name of a phase, what it is, and its color."""

OUR_PHASES: list[Phase] = [
    ("copied", "SaveStarted to SaveStaged", "#1f77b4"),
    ("written", "SavePlanned to SaveWritten", "#ff9f1c"),
    ("committed", "SaveWritten to SaveCommitted", "#2a9d4a"),
]
THEIR_PHASES: list[Phase] = [
    ("call", "dcp.async_save until it returns", "#d62728"),
    ("future", "until its future resolves", "#f2a6a6"),
]


def draw(path: Path, ours: Rounds, theirs: Rounds) -> None:
    """Draw the first round, sidestream above DCP on the same scales, and below one save of each, enlarged."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(10, 9), layout="constrained")
    panels = picture.subplots(5, 1, height_ratios=[4, 1.3, 4, 1, 2.2])
    for panel in panels[1:4]:
        panel.sharex(panels[0])
    draw_pauses(panels[0], "sidestream", OURS_COLOR, ours)
    draw_saves(panels[1], OUR_PHASES, [(save, our_spans(save)) for save in ours[0].saves], ours[0].began)
    draw_pauses(panels[2], "dcp.async_save", THEIRS_COLOR, theirs)
    draw_saves(panels[3], THEIR_PHASES, [(save, their_spans(save)) for save in theirs[0].saves], theirs[0].began)
    panels[3].set_xlabel("time since the training began (s), first round")
    draw_enlarged(panels[4], ours, theirs)
    picture.suptitle("Pauses of the event loop while a model trains and is checkpointed")
    picture.savefig(path, dpi=110)


Spans = list[tuple[float, float]]
"""The beginning and the end of each phase of a save, in the order of the phases."""


def our_spans(save: Save) -> Spans:
    """Return the phases of a save as sidestream's events say."""
    at = save.phases
    return [(at["started"], at["staged"]), (at["planned"], at["written"]), (at["written"], at["committed"])]


def their_spans(save: Save) -> Spans:
    return [(save.started, save.staged), (save.staged, save.durable)]


def draw_pauses(panel: Any, name: str, color: str, rounds: Rounds) -> None:
    run = rounds[0]
    panel.fill_between(
        [at - run.began for at, _ in run.ticks],
        [late * 1e3 for _, late in run.ticks],
        LEAST_PAUSE_MS / 2,
        step="pre",
        color=color,
        linewidth=0.6,
    )


def draw_saves(panel: Any, phases: list[Phase], saves: Any, began: float) -> None:
    pass


def draw_enlarged(panel: Any, ours: Rounds, theirs: Rounds) -> None:
    pass
