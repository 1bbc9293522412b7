"""The small examples run as programs. Those called ``*_live.py`` belong to sessions of their own (``nox -l``)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = sorted(path for path in EXAMPLES.glob("*.py") if not path.stem.endswith("_live"))


@pytest.mark.parametrize("example", SMALL, ids=lambda path: path.stem)
def test_runs(example: Path, tmp_path: Path) -> None:
    done = warm.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr.strip()


def test_the_demo_says_how_its_rows_were_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the order of the rows, and the load during each."""
    monkeypatch.syspath_prepend(EXAMPLES)
    from train_live_.records import Run, Save
    from train_live_.report import NOTES, figures, table

    runs = []
    for number in range(3):
        run = Run("any", 1, began=0.0, ended=9.0, ticks=[(1.0, 0.001), (2.0, 0.001)], answers=[1.0])
        run.saves = run.saves_alone = [Save(1, "url", 10, 0.5, 1.0, 2.0)]
        run.load_training, run.load_alone = (0.25 + number, 1.25 + number), (5.0, 6.0)
        run.write(tmp_path / f"{number}.json")
        runs.append(Run.read(tmp_path / f"{number}.json"))
    heading, *rows = table(figures(*runs)).splitlines()
    assert heading.endswith("  load")
    assert [row.split()[0] + " " + row.split()[-1] for row in rows] == [
        "sidestream 1.2-2.2", "dcp.async_save 2.2-3.2", "dcp.save 5.0-6.0", "no 0.2-1.2",
    ]  # fmt: skip
    assert "one after the other" in NOTES


def test_there_are_some() -> None:
    assert {path.stem for path in SMALL} >= {"quickstart", "inference_server"}
