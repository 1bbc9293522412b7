"""The picture: pauses of the loop over time, and the phases of the saves."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from train_live_.records import Save
from train_live_.report import Rounds, during_saves

LEAST_PAUSE_MS = 0.1
SAVING_COLOR = "0.92"
NARROWEST_BAR = 0.7
"""The width of the edge of a bar in points, so that a phase of a millisecond is seen."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A bar of each save."""

    name: str
    meaning: str
    color: str


@dataclass(frozen=True, slots=True)
class Row:
    """What is drawn of one library: the pauses of the loop, and the phases of the saves."""

    name: str
    color: str
    phases: tuple[Phase, ...]
    rounds: Rounds

    def spans(self, save: Save) -> list[tuple[float, float]]:
        """Return when each phase of a save began and ended: by sidestream's events, or by DCP's call and future."""
        at = save.phases
        if not at:
            return [(save.started, save.staged), (save.staged, save.durable)]
        return [(at["started"], at["staged"]), (at["planned"], at["written"]), (at["written"], at["committed"])]


SIDESTREAM_PHASES = (
    Phase("staged", "SaveStarted to SaveStaged: the state is copied", "tab:blue"),
    Phase("written", "SavePlanned to SaveWritten: the files are written", "tab:orange"),
    Phase("committed", "SaveWritten to SaveCommitted: made durable and visible", "tab:green"),
)
DCP_PHASES = (
    Phase("call", "from the call until it returns", "tab:red"),
    Phase("future", "until its future is resolved", "rosybrown"),
)


def draw(path: Path, ours: Rounds, theirs: Rounds) -> None:
    """Draw the first round, sidestream above DCP on the same scales, and a save of each enlarged."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Patch

    rows = (
        Row("sidestream", "tab:blue", SIDESTREAM_PHASES, ours),
        Row("dcp.async_save", "tab:red", DCP_PHASES, theirs),
    )
    picture = Picture(figsize=(10, 9), layout="constrained")
    panels = picture.subplots(5, 1, height_ratios=[4, 1.5, 4, 1, 2.5])
    for row, pauses, saves in zip(rows, panels[0:4:2], panels[1:4:2], strict=True):
        draw_pauses(pauses, row)
        draw_saves(saves, row)
        saves.sharex(pauses)
    share_scales(panels[0], panels[2])
    panels[3].tick_params(labelbottom=True)
    panels[3].set_xlabel("time since the training began (s)")
    draw_enlarged(panels[4], rows)
    picture.align_ylabels(panels[:4])
    picture.legend(
        [*(Patch(color=phase.color) for row in rows for phase in row.phases), Patch(color=SAVING_COLOR)],
        [*(f"{row.name}: {phase.meaning}" for row in rows for phase in row.phases), "a save is in progress"],
        loc="outside lower center",
        ncols=2,
        fontsize="small",
        frameon=False,
    )
    picture.suptitle("Pauses of the event loop while a model trains and is checkpointed (first of two rounds)")
    picture.savefig(path, dpi=110)


def draw_pauses(panel: Any, row: Row) -> None:
    run = row.rounds[0]
    seconds = [at - run.began for at, _ in run.ticks]
    pauses_ms = [late * 1e3 for _, late in run.ticks]
    panel.fill_between(seconds, pauses_ms, LEAST_PAUSE_MS / 2, step="pre", color=row.color, linewidth=0.6)
    first, second = (f"{1e3 * during_saves([each])['longest_pause_s']:.1f} ms" for each in row.rounds)
    title = f"{row.name}: longest pause during a save {first} (second round: {second})"
    panel.set_title(title, loc="left", fontsize="medium")
    shade_saves(panel, row)
    panel.set_yscale("log")
    panel.set_ylabel("pause (ms)")
    panel.tick_params(labelbottom=False)
    panel.grid(axis="y", color="0.85", linewidth=0.5)
    panel.set_axisbelow(True)


def shade_saves(panel: Any, row: Row) -> None:
    run = row.rounds[0]
    for save in run.saves:
        spans = row.spans(save)
        panel.axvspan(spans[0][0] - run.began, spans[-1][1] - run.began, color=SAVING_COLOR, linewidth=0, zorder=0)


def share_scales(first: Any, second: Any) -> None:
    """Give both panels the scales of the one that needs more."""
    longest_ms = max(first.get_ylim()[1], second.get_ylim()[1])
    second.sharex(first)
    second.sharey(first)
    first.set_xlim(0, max(panel.dataLim.x1 for panel in (first, second)))
    first.set_ylim(LEAST_PAUSE_MS, longest_ms)


def draw_saves(panel: Any, row: Row) -> None:
    """Draw a bar for each phase of each save, below the pauses."""
    run = row.rounds[0]
    for save in run.saves:
        draw_bars(panel, row.phases, [(begin - run.began, end - run.began) for begin, end in row.spans(save)])
    name_bars(panel, [phase.name for phase in row.phases])
    panel.set_ylabel("saves")
    panel.tick_params(labelbottom=False)


def draw_enlarged(panel: Any, rows: Sequence[Row]) -> None:
    """Draw the phases since the call of a save: the medians over the saves of both rounds."""
    phases = [phase for row in rows for phase in row.phases]
    draw_bars(panel, phases, [span for row in rows for span in median_spans(row)])
    name_bars(panel, [f"{row.name}: {phase.name}" for row in rows for phase in row.phases])
    panel.set_xlim(left=0)
    panel.grid(axis="x", color="0.85", linewidth=0.5)
    panel.set_axisbelow(True)
    saves = sum(len(run.saves) for run in rows[0].rounds)
    title = f"One save of each: medians over the {saves} saves of both rounds"
    panel.set_title(title, loc="left", fontsize="medium")
    panel.set_xlabel("time since the call (s)")


def median_spans(row: Row) -> list[tuple[float, float]]:
    """Return the median beginning and the median end of each phase, in seconds since the call."""
    saves: list[Save] = [save for run in row.rounds for save in run.saves]
    since = [[(begin - save.started, end - save.started) for begin, end in row.spans(save)] for save in saves]
    return [
        (median(spans[number][0] for spans in since), median(spans[number][1] for spans in since))
        for number in range(len(row.phases))
    ]


def draw_bars(panel: Any, phases: Sequence[Phase], spans: Sequence[tuple[float, float]]) -> None:
    for place, (phase, (begin, end)) in enumerate(zip(phases, spans, strict=True)):
        color = phase.color
        panel.barh(place, end - begin, left=begin, height=0.75, color=color, edgecolor=color, linewidth=NARROWEST_BAR)


def name_bars(panel: Any, names: Sequence[str]) -> None:
    """Label the rows of bars, the first one on top."""
    panel.set_yticks(range(len(names)), names, fontsize="small")
    panel.set_ylim(len(names) - 0.4, -0.6)
