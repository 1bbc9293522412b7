"""The loop keeps turning: no file operation and no copy of a tensor happens on its thread."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from _operations import Intercept, Operation

import sidestream
from sidestream._runtime.threads import Stop
from sidestream._staging import Copy, HostEngine


class WatchedEngine(HostEngine):
    """The host engine, which notes the threads that copy."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()

    def copy(self, copy: Copy, address: int, *, stop: Stop) -> None:
        self.threads.add(threading.get_ident())
        super().copy(copy, address, stop=stop)


async def test_files_and_copies_are_the_work_of_other_threads(tmp_path: Path) -> None:
    loop_thread = threading.get_ident()
    seen: list[tuple[str, bool]] = []

    def hook(operation: Operation) -> Any:
        seen.append((operation.name, threading.get_ident() == loop_thread))
        return operation.call()

    state = {"t": torch.randn(500, 700), "s": torch.randn(700, 30).t(), "n": {"v": (1, 2)}}
    blank = {"t": torch.zeros(500, 700), "s": torch.zeros(700, 30).t(), "n": {"v": None}}
    engine = WatchedEngine()
    with Intercept(tmp_path, hook).installed():
        async with (
            sidestream.AsyncStager(budget_bytes=1 << 26, engine=engine) as stager,
            sidestream.Checkpointer(tmp_path / "run", stager=stager) as checkpoints,
        ):
            await checkpoints.save(state, step=1)
            await checkpoints.restore(blank)
            assert await checkpoints.steps() == [1]
            (await stager.stage(state)).release()
        await sidestream.load(blank, tmp_path / "run" / "step-1", options=sidestream.LoadOptions(atomic=True))
        checkpoint = await sidestream.open_checkpoint(tmp_path / "run" / "step-1")
        await checkpoint.tensor("t", rows=slice(3, 90))
        await checkpoint.state_dict()
        pending = sidestream.async_save(state, tmp_path / "cancelled")
        pending.cancel()
        await pending.ended()
    names = {name for name, _ in seen}
    assert names >= {"open", "pwrite", "fsync", "rename", "mkdir", "preadv"}, "the operations are not seen any more"
    assert [name for name, on_loop in seen if on_loop] == []
    assert engine.threads
    assert loop_thread not in engine.threads
