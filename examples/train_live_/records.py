"""What a trainer process measures and hands to the script, as JSON. All times are `time.monotonic()`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint: when it was asked for, when its sources were free to change, when it was durable."""

    step: int
    url: str
    nbytes: int
    started: float
    staged: float
    durable: float
    phases: dict[str, float] = field(default_factory=dict)
    """When sidestream's events say that the save was started, planned, staged, written and committed."""

    @property
    def staged_s(self) -> float:
        return self.staged - self.started

    @property
    def durable_s(self) -> float:
        return self.durable - self.started


@dataclass(slots=True)
class Run:
    """One life of a trainer process."""

    saver: str
    parameters: int
    resumed_from: int | None = None
    steps_seen: list[int] = field(default_factory=list)
    """Steps that were visible to the checkpointer when the process began."""
    began: float = 0.0
    ended: float = 0.0
    losses: dict[int, float] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    saves_alone: list[Save] = field(default_factory=list)
    """Saves made after the training, one after the other, with the machine to themselves."""
    ticks: list[tuple[float, float]] = field(default_factory=list)
    """When the ticker woke up, and by how many seconds it was late."""
    answers: list[float] = field(default_factory=list)
    """When the client process received an answer."""
    load_training: tuple[float, float] | None = None
    """The machine's load average over one minute, when the training began and when it ended."""
    load_alone: tuple[float, float] | None = None
    """The same for `saves_alone`."""
    cost_s: float | None = None
    """The seconds that the training lost to its saves, as `sidestream.observability.Costs` reports them."""
    digest: str = ""
    """SHA-256 of the final weights and optimizer state."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        fields: dict[str, Any] = json.loads(path.read_text())
        fields["losses"] = {int(step): loss for step, loss in fields["losses"].items()}
        fields["saves"] = [Save(**save) for save in fields["saves"]]
        fields["saves_alone"] = [Save(**save) for save in fields["saves_alone"]]
        fields["ticks"] = [(at, late) for at, late in fields["ticks"]]
        for name in ("load_training", "load_alone"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class StockLoad:
    """What a process without sidestream got from `dcp.load`."""

    step: int
    digest: str
    """SHA-256 of weights and optimizer state, as in `Run`."""
    sidestream_imported: bool


def directory_size(path: Path) -> int:
    """Return the bytes of all files under `path`."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
