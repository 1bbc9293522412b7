"""Tests that need a GPU, and say so where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    """Nothing is left on the device's streams from one test to the next."""
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
