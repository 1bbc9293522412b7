"""The oracle: a process of its own that tells what can be read in a run. Driven by ``Oracle``.

It has no memory of what was saved there; it recognises every state by its seed (``_seeded.py``).
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from _look import Found, look
from _rows import HERE, SOURCE, Warm, warm
from _seeded import blank_state, make_state, same

import sidestream


class Oracle:
    """The other end, in the test."""

    def __init__(self, process: Warm) -> None:
        self._process = process
        self.pid = process.pid

    def look(self, run: Path, *, further: int | None = None, stock: bool = False) -> Found:
        """What stands in ``run``. ``further``: save that step with the seed 99 afterwards, which has to work and to
        change nothing else. ``stock``: stock DCP has to read the same from every checkpoint."""
        found = self._process.ask(run=run, further=further, stock=stock)
        found["steps"] = {int(step): seed for step, seed in found["steps"].items()}
        return Found(**found)


@contextmanager
def oracle(source: Path = SOURCE) -> Iterator[Oracle]:
    with warm(HERE / "_judge.py", source=source) as process:
        yield Oracle(process)


# --- in the process ---


async def answer(run: Path, further: int | None, stock: bool) -> Found:
    found = await look(run)
    if stock:
        found.violations += [wrong for name, seed in found.seeds.items() for wrong in stock_reads(run / name, seed)]
    if further is not None:
        found.violations += await save_further(run, further, found)
    return found


def stock_reads(url: Path, seed: int) -> Iterator[str]:
    import torch.distributed.checkpoint as dcp

    state = blank_state()
    try:
        dcp.load(state, checkpoint_id=url, no_dist=True)
    except Exception as error:
        yield f"stock DCP cannot read {url.name}: {type(error).__name__}: {error}"
    else:
        if not same(state, make_state(seed)):
            yield f"stock DCP reads something else from {url.name}"


async def save_further(run: Path, step: int, found: Found) -> list[str]:
    """What is wrong with one more save."""
    try:
        async with sidestream.Checkpointer(run, save=sidestream.SaveOptions(durability="flush")) as checkpoints:
            await checkpoints.save(make_state(99), step=step)
    except Exception as error:
        return [f"a further save failed: {type(error).__name__}: {error}"]
    after = await look(run)
    wrong = [f"after a further save: {one}" for one in after.violations]
    if after.seeds != {**found.seeds, f"step-{step}": 99}:
        wrong.append(f"a further save made {found.seeds} into {after.seeds}")
    return wrong


def serve() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", ResourceWarning)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            asked: dict[str, Any] = json.loads(line)
            found = runner.run(answer(Path(asked["run"]), asked["further"], asked["stock"]))
            print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    serve()
