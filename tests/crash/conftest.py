from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _stepping import leave_out_busy_threads
from _trials import Trials, trials


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Thousands of tiny tensors: torch's team of threads would only spin between them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _others_are_left_out() -> None:
    leave_out_busy_threads()


@pytest.fixture(scope="session")
def children() -> Iterator[Trials]:
    with trials() as running:
        yield running
