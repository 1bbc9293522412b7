"""A program on a machine whose ``/dev/shm`` is full. Driven by ``test_row_shared_memory.py``."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from _look import attempts_in
from _seeded import blank_state, make_state, same

import sidestream


async def work(run: Path, saver: Any) -> dict[str, Any]:
    """Save and load; a failure must be an error of sidestream."""
    told: dict[str, Any] = {"wrong": [], "acked": []}
    async with sidestream.Checkpointer(run, save=sidestream.SaveOptions(writer=saver)) as checkpoints:
        for step in (1, 2):
            try:
                await checkpoints.save(make_state(step), step=step)
            except sidestream.errors.SidestreamError as error:
                told.setdefault("refused", []).append(f"{type(error).__name__}: {error}")
                continue
            told["acked"].append(step)
            state = blank_state()
            await checkpoints.restore(state, step)
            if not same(state, make_state(step)):
                told["wrong"].append(f"step {step} holds something else")
    told["wrong"] += [f"left: {one}" for one in attempts_in(run)]
    return told


def main() -> None:
    run, saver = Path(sys.argv[1]), sys.argv[2]
    free = os.statvfs("/dev/shm")
    told = asyncio.run(work(run, saver))
    told["free_bytes"] = free.f_bavail * free.f_bsize
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
