"""Tests that need the simulated runtime, and are skipped where a process does not run on it."""

from __future__ import annotations

from collections.abc import Iterator

import cudasim
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not cudasim.active():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs the simulated CUDA runtime: nox -s cuda_sim"))


@pytest.fixture(autouse=True)
def every_kernel_is_executed() -> Iterator[None]:
    """No operator of torch launches a kernel that the simulator skips: its result would be wrong."""
    yield
    assert [name for name in cudasim.kernels() if "spin_kernel" not in name] == []
