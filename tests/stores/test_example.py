"""The example that brings its own server runs as it stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _servers import Endpoint

EXAMPLE = Path(__file__).parents[2] / "examples" / "s3_live.py"


def test_s3_live(seaweed: Endpoint, tmp_path: Path) -> None:
    """``seaweed`` says whether there is a server to be had; the example starts another."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE)],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "never interrupted" in done.stdout
    assert not done.stderr.strip()
