"""Made-up manifests, metadata and headers: typed errors only, no code run, no import, no file, no socket."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from _fuzzing import TARGETS
from _rows import HERE, SOURCE, Row, Size, spread
from _stock_metadata import samples

SHORT, LONG = 200_000, 20_000_000
BATCH = 500_000  # inputs for one process


@pytest.fixture(scope="module")
def sample_file(tmp_path_factory: pytest.TempPathFactory, size: Size) -> Path:
    """Files of stock DCP and files that lie, one a line, to start from."""
    folder = tmp_path_factory.mktemp("samples")
    made = samples(folder / "stock", size.of(400, 20_000), size.random("samples"))
    (folder / "samples").write_text("\n".join(one.hex() for one in made))
    return folder / "samples"


@pytest.mark.parametrize("target", TARGETS)
def test_made_up_files(target: str, sample_file: Path, row: Callable[..., Row], size: Size) -> None:
    counts = row("fuzzing", target)
    left = spread(size.of(SHORT, LONG), TARGETS)[target]
    batch = 0
    while left:
        trials = min(left, BATCH)
        done = subprocess.run(
            [
                sys.executable,
                str(HERE / "_fuzzing.py"),
                target,
                str(size.seed + (batch << 32)),
                str(trials),
                str(sample_file),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        )
        assert done.returncode == 0, done.stderr[-4000:]
        told = json.loads(done.stdout)
        counts.trial(f"{target}, batch {batch}", told["violations"], count=told["trials"])
        for kind, count in told["kinds"].items():
            counts.note(kind, count)
        left -= trials
        batch += 1
    assert 0 < counts.notes.get("read", 0) < counts.trials  # some are right, and not all of them
    counts.end(at_least=spread(size.of(SHORT, LONG), TARGETS)[target])
