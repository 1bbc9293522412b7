"""The figures of the runs: a table, and a JSON file with everything behind it."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from train_live_.records import Run

NOTES = """\
The rows were taken in turns, in two rounds: "no saves", "sidestream", "dcp.async_save", then the same in the
reverse order. "dcp.save" was measured in the processes of "dcp.async_save" after their training. "load" is the
load average of the machine over one minute, when the row's run began and when it ended, for each round. It
counts this program as well, and with it the runs before. Seconds are medians over the saves of both rounds,
"training" and "cost" are means of both. "cost" is the part of "training" that was lost to saves: waits and
longer steps, as `sidestream.observability.Costs` reports them. Answers (of the HTTP server) and pauses (of a 1
ms ticker on the loop) are those of both rounds, from the call of a save until it is durable; without saves,
those of the whole runs. "alone" is a durable save while nothing trains. DCP counts as durable when its future
resolves; it syncs its files, but not their directory."""

HEADINGS = (
    "",
    "checkpoint",
    "staged",
    "durable",
    "alone",
    "answers",
    "longest pause",
    "p99 pause",
    "training",
    "cost",
    "load",
)

Window = tuple[float, float]
Rounds = Sequence[Run]
"""The runs of one row: one from each round."""


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
    cost_s: float | None = None
    """The seconds that the training lost to its saves, where `Costs` has measured them."""
    load_average: Sequence[tuple[float, float]] = ()
    """At the beginning and at the end of the row's run, for each round."""

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
            cell(self.cost_s, "s"),
            ", ".join(f"{began:.1f}-{ended:.1f}" for began, ended in self.load_average) or "-",
        )


def cell(value: float | None, unit: str, *, scale: float = 1.0, digits: int = 3) -> str:
    return "-" if value is None else f"{value * scale:.{digits}f} {unit}"


def figures(idle: Rounds, ours: Rounds, theirs: Rounds) -> list[Figures]:
    """Return the rows of the table."""
    return [
        saving_figures("sidestream", ours, alone_s=alone(ours)),
        saving_figures("dcp.async_save", theirs, alone_s=None),
        Figures(
            "dcp.save",
            checkpoint_bytes=theirs[-1].saves_alone[-1].nbytes,
            alone_s=alone(theirs),
            load_average=[run.load_alone for run in theirs if run.load_alone is not None],
        ),
        Figures(
            "no saves",
            **live_figures((run, [(run.began, run.ended)]) for run in idle),
            training_s=training(idle),
            load_average=loads(idle),
        ),
    ]


def saving_figures(name: str, rounds: Rounds, *, alone_s: float | None) -> Figures:
    saves = list(chain.from_iterable(run.saves for run in rounds))
    return Figures(
        name,
        checkpoint_bytes=saves[-1].nbytes,
        staged_s=median(save.staged_s for save in saves),
        durable_s=median(save.durable_s for save in saves),
        alone_s=alone_s,
        **during_saves(rounds),
        training_s=training(rounds),
        cost_s=cost(rounds),
        load_average=loads(rounds),
    )


def duration(run: Run) -> float:
    return run.ended - run.began


def training(rounds: Rounds) -> float:
    return sum(map(duration, rounds)) / len(rounds)


def cost(rounds: Rounds) -> float | None:
    costs = [run.cost_s for run in rounds if run.cost_s is not None]
    return sum(costs) / len(costs) if costs else None


def loads(rounds: Rounds) -> list[tuple[float, float]]:
    return [run.load_training for run in rounds if run.load_training is not None]


def alone(rounds: Rounds) -> float:
    return median(save.durable_s for run in rounds for save in run.saves_alone)


def during_saves(rounds: Rounds) -> Liveness:
    return live_figures((run, [(save.started, save.durable) for save in run.saves]) for run in rounds)


def live_figures(observed: Iterable[tuple[Run, list[Window]]]) -> Liveness:
    """Return how the loops did within the windows of each run. A pause counts if any part of it lies in one."""
    pauses: list[float] = []
    answers, seconds = 0, 0.0
    for run, windows in observed:
        pauses += [late for at, late in run.ticks if any(at >= start and at - late <= end for start, end in windows)]
        answers += sum(any(start <= at <= end for start, end in windows) for at in run.answers)
        seconds += sum(end - start for start, end in windows)
    pauses.sort()
    return {
        "answers_per_s": answers / seconds,
        "longest_pause_s": pauses[-1],
        "p99_pause_s": pauses[int(0.99 * (len(pauses) - 1))],
    }


def table(rows: list[Figures]) -> str:
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(cells[column]) for cells in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])]) for cells in lines)


def sentence(name: str, run: Run) -> str:
    """Describe a run in one line, for the user who waits for the table."""
    first, last = run.losses[min(run.losses)], run.losses[max(run.losses)]
    text = f"{name:<14}  {duration(run):4.1f} s, loss {first:.2f} -> {last:.2f}"
    if not run.saves:
        return text
    durable = median(save.durable_s for save in run.saves)
    longest = during_saves([run])["longest_pause_s"]
    return f"{text}, {len(run.saves)} saves, durable after {durable:.3f} s, longest pause {1e3 * longest:.1f} ms"


def write_json(path: Path, rows: list[Figures], story: dict[str, Any], runs: dict[str, Rounds]) -> None:
    """Write everything that was measured, single ticks and answers apart."""
    report = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        **story,
        "figures": [asdict(row) for row in rows],
        "notes": NOTES.replace("\n", " "),
        "runs": {name: [summary(run) for run in rounds] for name, rounds in runs.items()},
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
        save["phases"] = {name: at - run.began for name, at in save["phases"].items()}
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
