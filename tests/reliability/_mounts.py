"""File systems of our own, for those who may mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, *arguments: str) -> Iterator[Path]:
    """``mount *arguments place``, undone at the end. Skips where that is not permitted."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(place)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mount {' '.join(arguments)} is not possible here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True, capture_output=True)
