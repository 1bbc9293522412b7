"""The small examples run as programs. Those called ``*_live.py`` belong to sessions of their own (``nox -l``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = sorted(path for path in EXAMPLES.glob("*.py") if not path.stem.endswith("_live"))


@pytest.mark.parametrize("example", SMALL, ids=lambda path: path.stem)
def test_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert not done.stderr.strip()


def test_there_are_some() -> None:
    assert {path.stem for path in SMALL} >= {"quickstart", "inference_server"}
