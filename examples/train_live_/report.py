"""The figures of the runs: a table, a JSON file with everything behind it, and a picture."""

import json
import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from train_live_.records import Run, Save

NOTES = """\
The rows were taken one after the other, not at the same time: "no saves", then "sidestream", then "dcp.async_save";
"dcp.save" was measured in the process of "dcp.async_save" after its training. "load" is the load average of the machine
over one minute, when the row's run began and when it ended. It counts this program as well.
Seconds are medians over the saves. Answers (of the HTTP server) and pauses (of a 1 ms ticker on the loop) are those
from the call of a save until it is durable; without saves, those of the whole run. "alone" is a durable save while
nothing trains. DCP counts as durable when its future resolves; it syncs its files, but not their directory."""

HEADINGS = ("", "checkpoint", "staged", "durable", "alone", "answers", "longest pause", "p99 pause", "training", "load")

LEAST_PAUSE_MS = 0.1
STAGING_COLOR = "0.75"
WRITING_COLOR = "0.92"
LEGEND: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "ncols": 2,
    "frameon": False,
    "fontsize": "small",
}

Window = tuple[float, float]


class Liveness(TypedDict):
    """How the loop did for some stretches of time."""

    answers_per_s: float
    longest_pause_s: float
    p99_pause_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of the table. None stands where there is nothing to measure."""

    name: str
    checkpoint_bytes: int | None = None
    staged_s: float | None = None
    durable_s: float | None = None
    alone_s: float | None = None
    answers_per_s: float | None = None
    longest_pause_s: float | None = None
    p99_pause_s: float | None = None
    training_s: float | None = None
    load_average: tuple[float, float] | None = None
    """At the beginning and at the end of the row's run."""

    def cells(self) -> tuple[str, ...]:
        return (
            self.name,
            cell(self.checkpoint_bytes, "MB", scale=1e-6, digits=1),
            cell(self.staged_s, "s"),
            cell(self.durable_s, "s"),
            cell(self.alone_s, "s"),
            cell(self.answers_per_s, "/s", digits=0),
            cell(self.longest_pause_s, "ms", scale=1e3, digits=1),
            cell(self.p99_pause_s, "ms", scale=1e3, digits=1),
            cell(self.training_s, "s", digits=1),
            "-" if self.load_average is None else "-".join(f"{load:.1f}" for load in self.load_average),
        )


def cell(value: float | None, unit: str, *, scale: float = 1.0, digits: int = 3) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f} {unit}"


def figures(idle: Run, ours: Run, theirs: Run) -> list[Figures]:
    """Return the rows of the table."""
    return [
        saving_figures("sidestream", ours, alone_s=alone(ours.saves_alone)),
        saving_figures("dcp.async_save", theirs, alone_s=None),
        Figures(
            "dcp.save",
            checkpoint_bytes=theirs.saves_alone[-1].nbytes,
            alone_s=alone(theirs.saves_alone),
            load_average=theirs.load_alone,
        ),
        Figures(
            "no saves",
            **live_figures(idle, [(idle.began, idle.ended)]),
            training_s=duration(idle),
            load_average=idle.load_training,
        ),
    ]


def saving_figures(name: str, run: Run, *, alone_s: float | None) -> Figures:
    return Figures(
        name,
        checkpoint_bytes=run.saves[-1].nbytes,
        staged_s=median(save.staged_s for save in run.saves),
        durable_s=median(save.durable_s for save in run.saves),
        alone_s=alone_s,
        **during_saves(run),
        training_s=duration(run),
        load_average=run.load_training,
    )


def duration(run: Run) -> float:
    return run.ended - run.began


def alone(saves: Iterable[Save]) -> float:
    return median(save.durable_s for save in saves)


def during_saves(run: Run) -> Liveness:
    return live_figures(run, [(save.started, save.durable) for save in run.saves])


def live_figures(run: Run, windows: list[Window]) -> Liveness:
    """Return how the loop did within `windows`. A pause counts if any part of it lies in one."""
    pauses = sorted(late for at, late in run.ticks if any(at >= start and at - late <= end for start, end in windows))
    answers = sum(any(start <= at <= end for start, end in windows) for at in run.answers)
    return {
        "answers_per_s": answers / sum(end - start for start, end in windows),
        "longest_pause_s": pauses[-1],
        "p99_pause_s": pauses[int(0.99 * (len(pauses) - 1))],
    }


def table(rows: list[Figures]) -> str:
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(cells[column]) for cells in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]) for cells in lines)


def write_json(path: Path, rows: list[Figures], story: dict[str, Any], runs: dict[str, Run]) -> None:
    """Write everything that was measured, single ticks and answers apart."""
    report = {
        "machine": machine(),
        **story,
        "figures": [asdict(row) for row in rows],
        "notes": NOTES.replace("\n", " "),
        "runs": {name: summary(run) for name, run in runs.items()},
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def summary(run: Run) -> dict[str, Any]:
    """Return the record of a run, its saves timed from the beginning of the training."""
    record = asdict(run)
    record["ticks"] = len(run.ticks)
    record["answers"] = len(run.answers)
    record["seconds"] = duration(run)
    for save in record["saves"] + record["saves_alone"]:
        del save["url"]  # a temporary directory
        for moment in ("started", "staged", "durable"):
            save[moment] -= run.began
    del record["began"], record["ended"]
    return record


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": sys.version.split()[0],
        "torch": version("torch"),
    }


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def draw(path: Path, ours: Run, theirs: Run) -> None:
    """Draw the loop's pauses over time, sidestream above DCP, on the same logarithmic scale."""
    from matplotlib.figure import Figure as Picture
    from matplotlib.patches import Patch

    picture = Picture(figsize=(9, 5.5), layout="constrained")
    panels = picture.subplots(2, 1, sharex=True, sharey=True)
    draw_run(panels[0], "sidestream", "tab:blue", ours)
    draw_run(panels[1], "dcp.async_save", "tab:red", theirs)
    panels[0].set_yscale("log")
    panels[0].set_ylim(bottom=LEAST_PAUSE_MS)
    marks = [Patch(color=STAGING_COLOR), Patch(color=WRITING_COLOR)]
    panels[0].legend(marks, ["a save, until staged", "until durable"], **LEGEND)
    panels[1].set_xlabel("seconds of training")
    picture.suptitle("Pauses of the event loop while a model trains and is checkpointed")
    picture.savefig(path, dpi=120)


def draw_run(panel: Any, name: str, color: str, run: Run) -> None:
    for save in run.saves:
        panel.axvspan(save.started - run.began, save.staged - run.began, color=STAGING_COLOR, linewidth=0)
        panel.axvspan(save.staged - run.began, save.durable - run.began, color=WRITING_COLOR, linewidth=0)
    seconds = [at - run.began for at, _ in run.ticks]
    pauses_ms = [late * 1e3 for _, late in run.ticks]
    panel.fill_between(seconds, pauses_ms, LEAST_PAUSE_MS / 2, step="pre", color=color, linewidth=0.6)
    longest_ms = 1e3 * during_saves(run)["longest_pause_s"]
    panel.set_title(f"{name}: longest pause during a save {longest_ms:.1f} ms", loc="right", fontsize="medium")
    panel.set_ylabel("pause in ms")
    panel.grid(axis="y", color="0.85", linewidth=0.5)
    panel.set_axisbelow(True)
