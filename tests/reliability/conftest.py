from __future__ import annotations

from collections.abc import Iterator

import pytest
from _trials import Trials, trials


@pytest.fixture(scope="session")
def children() -> Iterator[Trials]:
    with trials() as running:
        yield running
