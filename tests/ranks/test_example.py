"""The example that loses a rank and goes on with fewer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_live.py"
STEPS = 32


def last_loss(said: str) -> float:
    return float(json.loads(said.splitlines()[-1])["loss"])


def test_goes_on_with_another_world_size(groups: Groups, tmp_path: Path) -> None:
    """Its four ranks are forks; the two that go on are started as by a user."""
    undisturbed = groups.run("example", 4, tmp_path, into="undisturbed", steps=STEPS)
    lost = groups.run_any("example", 4, tmp_path, into="run", steps=STEPS, lose=2, at=25)
    assert lost.codes[2] == -signal.SIGKILL, lost.said
    assert 0 not in lost.codes
    assert "4 ranks begin at step 0\n" in lost.said[0]
    assert "step 29 is on storage" not in lost.said[0]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        [*command, "--into", str(tmp_path / "run"), "--steps", str(STEPS)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks begin at step 20\n" in done.stdout
    assert last_loss(done.stdout) == pytest.approx(last_loss(undisturbed.said[0]), rel=1e-4)


@pytest.mark.long
def test_all_of_it_as_a_user_starts_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", str(STEPS)],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks begin at step" in done.stdout
    assert "last loss, undisturbed and resumed" in done.stdout
