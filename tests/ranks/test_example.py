"""The example that loses a rank and goes on with fewer, as a user starts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_live.py"


def test_goes_on_with_another_world_size(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "32"],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 ranks begin at step" in done.stdout
    assert "last loss, undisturbed and resumed" in done.stdout
