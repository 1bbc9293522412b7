"""Saves whose snapshots feed sinks too: no sink delays a checkpoint, reads wrong bytes, or keeps memory."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _rows import Row, Size
from snapshots import payloads

import sidestream
from sidestream import AsyncStager, open_checkpoint
from sidestream._layout import save_layout
from sidestream._save.api import SaveRequest
from sidestream._save.pending import PendingSave
from sidestream._save.sinks import PendingExport
from sidestream._storage import locate_directory
from sidestream._worker.client import choose_worker

SHORT, LONG = 60, 2_000
MIB = 1 << 20
WINDOWS = 40
BUDGET_BYTES = int(1.2 * WINDOWS * MIB)
WAYS = ("reads", "slow", "stalled", "fails", "cancelled", "nothing")


class Drawn:
    """A sink that copies all payloads, unless it does at a window what was drawn."""

    url = "memory of the row"
    together = replaces = True

    def __init__(self, way: str, at: int, over: threading.Event) -> None:
        self.way, self.at, self.over = way, at, over
        self.source = ""

    async def prepare(self, save: Any) -> None:
        """Nothing else is needed."""

    def read(self, snapshot: Any, save: Any, stop: Any) -> list[bytes] | None:
        if self.way == "nothing":
            return None
        found = payloads(snapshot, stop, self._meet)
        self.source = "snapshot"
        return found

    def _meet(self, number: int) -> None:
        if self.way == "slow":
            self.over.wait(0.002)
        elif number == self.at and self.way in ("stalled", "cancelled"):
            assert self.over.wait(120)
        elif number == self.at and self.way == "fails":
            raise OSError(5, "the sink fails")

    async def finish(self, read: Any, save: Any) -> Any:
        return read

    async def undo(self, error: BaseException) -> None:
        """Nothing has been written."""

    async def read_checkpoint(self, save: Any, ranks: Any) -> list[bytes]:
        self.source = "checkpoint"
        found = await (await open_checkpoint(save.location.url)).state_dict()
        return [tensor.numpy().tobytes() for tensor in found.values()]


def state_of(chance: random.Random) -> dict[str, torch.Tensor]:
    """As many tensors as windows, most of which lie across two of them."""
    return {
        f"t{number:02}": torch.frombuffer(bytearray(chance.randbytes(MIB)), dtype=torch.uint8)
        for number in range(WINDOWS)
    }


async def trial(chance: random.Random, place: Path, stager: AsyncStager, saver: Any) -> tuple[list[str], list[str]]:
    """Two saves with two sinks each. Returns what is wrong, and where the sinks read."""
    wrong: list[str] = []
    over = threading.Event()
    saves = []
    try:
        for number in range(2):
            state = state_of(chance)
            drawn = [Drawn(chance.choice(WAYS), chance.randrange(WINDOWS), over) for _ in range(2)]
            exports = tuple(PendingExport(sink) for sink in drawn)
            request = SaveRequest(
                state=state,
                options=sidestream.SaveOptions(durability="flush", timeout_s=60.0),
                stager=stager,
                worker=choose_worker(saver, locate_directory(place).store),
                metadata=None,
                outcomes=exports,
            )
            operation = request.launch(request.prepare(), locate_directory(place / str(number)))
            pending = PendingSave(operation, exports)
            saves.append((state, pending, list(zip(drawn, exports, strict=True))))
        for number, (state, pending, fed) in enumerate(saves):
            for drawn_sink, sink in fed:
                if drawn_sink.way == "cancelled":
                    sink.cancel()
            try:
                await pending
            except sidestream.errors.SidestreamError as error:
                wrong.append(f"a save failed: {error!r}")
                continue
            found = await (await open_checkpoint(place / str(number))).state_dict()
            wrong += [f"{number}: {name} differs" for name in state if not torch.equal(found[name], state[name])]
    finally:
        over.set()
    for state, _, fed in saves:
        for drawn_sink, sink in fed:
            wrong += await judged(drawn_sink, sink, [tensor.numpy().tobytes() for tensor in state.values()])
    return wrong, [drawn_sink.source for _, _, fed in saves for drawn_sink, _ in fed]


async def judged(drawn: Drawn, sink: PendingExport, expected: list[bytes]) -> list[str]:
    try:
        result = await sink
    except asyncio.CancelledError:
        return [] if drawn.way == "cancelled" else [f"{drawn.way}: cancelled"]
    except OSError as error:
        return [] if drawn.way == "fails" else [f"{drawn.way}: {error!r}"]
    except Exception as error:
        return [f"{drawn.way}: {error!r}"]
    return [] if result is None or result == expected else [f"{drawn.way}: other bytes, from the {drawn.source}"]


@pytest.mark.parametrize("saver", ["thread", "process"])
async def test_two_saves_with_two_sinks_each(
    saver: str, place: Path, row: Callable[..., Row], size: Size, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (MIB, MIB))
    counts = row("sinks beside a checkpoint", saver)
    trials = size.of(SHORT, LONG)
    chance = size.random("sinks", saver)
    for number in range(10 * trials):
        if number >= trials and counts.notes.get("read from the snapshot"):  # which depends on time
            break
        async with AsyncStager(budget_bytes=BUDGET_BYTES, backing="shared") as stager:
            wrong, sources = await trial(chance, place / str(number), stager, saver)
            async with asyncio.timeout(30):
                while stager.statistics().leases:
                    await asyncio.sleep(0)
        shutil.rmtree(place / str(number))  # 40 MB each, in memory
        counts.trial(f"trial {number}", wrong)
        for source in sources:
            counts.note(f"read from the {source}" if source else "did not read all")
    counts.end(at_least=trials)
    assert counts.notes.get("read from the snapshot")
    assert counts.notes.get("read from the checkpoint") or size.quick
