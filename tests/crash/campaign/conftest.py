"""Size and seed of the rows, the oracle, and the table at the end."""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _judge import Oracle, oracle
from _rows import Row, Size

_SHORT_SEED = 0
_MEMORY = Path("/dev/shm")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("campaign")
    group.addoption("--long", action="store_true", help="hours instead of minutes")
    group.addoption("--quick", action="store_true", help="a tenth of the short form")
    group.addoption("--seed", type=int, default=None, help="replay; 0 in the short form, by chance in the long one")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give all workers of pytest-xdist one seed. They do not see options that are changed in this process."""
    node.workerinput["campaign_seed"] = _seed_of(node.config)


@pytest.fixture(scope="session")
def size(pytestconfig: pytest.Config) -> Size:
    seed = getattr(pytestconfig, "workerinput", {}).get("campaign_seed")
    long, quick = (bool(pytestconfig.getoption(option, False)) for option in ("--long", "--quick"))
    return Size(long, _seed_of(pytestconfig) if seed is None else seed, quick)


def _seed_of(config: pytest.Config) -> int:
    """Return the seed that was given, or one drawn by chance in the long form."""
    given: int | None = config.getoption("--seed", None)
    if given is None:
        given = random.SystemRandom().randrange(1 << 32) if config.getoption("--long", False) else _SHORT_SEED
        config.option.seed = given
    return given


@pytest.fixture
def row(request: pytest.FixtureRequest, size: Size) -> Iterator[Callable[..., Row]]:
    """Makes the row of this test; its counts go into the table, also when it fails."""
    made: list[Row] = []

    def make(name: str, part: str = "") -> Row:
        made.append(Row(name, part, size.seed))
        return made[-1]

    yield make
    for one in made:
        request.node.user_properties.append(("row", json.dumps(one.told())))


@pytest.fixture(scope="session")
def judge() -> Iterator[Oracle]:
    with oracle() as running:
        yield running


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory, where a sync costs nothing: for what a kill or an injected error does, the disk is the
    same. On a machine without one, on disk."""
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < 1 << 28:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="sidestream-campaign-") as name:
        yield Path(name)


# --- the table --------------------------------------------------------------------------------------------------------


def pytest_terminal_summary(terminalreporter: Any) -> None:
    parts = [
        json.loads(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "teardown"
        for name, value in report.user_properties
        if name == "row"
    ]
    if not parts:
        return
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        row = rows.setdefault(part["row"], {"trials": 0, "violations": 0, "seconds": 0.0, "notes": {}})
        for key in ("trials", "violations", "seconds"):
            row[key] += part[key]
        for what, count in part["notes"].items():
            row["notes"][what] = row["notes"].get(what, 0) + count
    seeds = ", ".join(str(seed) for seed in sorted({part["seed"] for part in parts}))
    terminalreporter.write_sep("=", f"campaign, --seed {seeds}")
    terminalreporter.write_line(f"{'row':<44} {'trials':>9} {'violations':>11} {'seconds':>8}  notes")
    for name, row in sorted(rows.items()):
        notes = ", ".join(f"{count:,} {what}" for what, count in sorted(row["notes"].items()))
        counts = f"{row['trials']:>9,} {row['violations']:>11,} {row['seconds']:>8.1f}"
        terminalreporter.write_line(f"{name:<44} {counts}  {notes}")
