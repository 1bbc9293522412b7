"""Made-up manifests, metadata and headers: typed errors only, no code run, no import, no file, no socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from _fuzzing import TARGETS
from _rows import HERE, Row, Size, Warm, spread, warm
from _stock_metadata import samples

SHORT, LONG = 200_000, 20_000_000
BATCH = 500_000  # inputs for one process


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory, size: Size) -> Iterator[Warm]:
    """It has files of stock DCP and files that lie, one a line, to start from."""
    folder = tmp_path_factory.mktemp("samples")
    made = samples(folder / "stock", size.of(400, 20_000), size.random("samples"))
    (folder / "samples").write_text("\n".join(one.hex() for one in made))
    with warm(HERE / "_fuzzing.py", str(folder / "samples"), alone=True) as process:
        yield process


@pytest.mark.parametrize("target", TARGETS)
def test_made_up_files(target: str, reading: Warm, row: Callable[..., Row], size: Size) -> None:
    counts = row("fuzzing", target)
    left = spread(size.of(SHORT, LONG), TARGETS)[target]
    batch = 0
    while left:
        trials = min(left, BATCH)
        told = reading.ask(target=target, seed=size.seed + (batch << 32), trials=trials)
        assert "ended" not in told, told
        counts.trial(f"{target}, batch {batch}", told["violations"], count=told["trials"])
        for kind, count in told["kinds"].items():
            counts.note(kind, count)
        left -= trials
        batch += 1
    assert 0 < counts.notes.get("read", 0) < counts.trials  # some are right, and not all of them
    counts.end(at_least=spread(size.of(SHORT, LONG), TARGETS)[target])
