"""Tests that need the simulated runtime, and are skipped where a process does not run on it."""

from __future__ import annotations

import cudasim
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not cudasim.active():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs the simulated CUDA runtime: nox -s cuda_sim"))
