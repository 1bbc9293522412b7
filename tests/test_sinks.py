"""One snapshot and several readers: the checkpoint, and sinks that must never delay it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GatedEngine
from leases import all_returned
from snapshots import payloads

import sidestream
from sidestream import AsyncStager, open_checkpoint
from sidestream._layout import save_layout
from sidestream._save.api import SaveRequest
from sidestream._save.pending import PendingSave
from sidestream._save.sinks import PendingExport, Sink
from sidestream._storage import locate_directory
from sidestream.errors import ArenaExhaustedError, SnapshotLostError, UnsafeObjectError

WINDOW = 4 << 20
STATE_BYTES = 16 * WINDOW


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (WINDOW, WINDOW))


def state_of(seed: int) -> dict[str, Any]:
    """About sixteen windows."""
    torch.manual_seed(seed)
    return {f"t{number}": torch.randint(0, 255, (STATE_BYTES // 8,), dtype=torch.uint8) for number in range(8)}


def same(found: dict[str, Any], state: dict[str, Any]) -> None:
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor), name


@dataclass
class Collecting:
    """Copies every payload. ``before(window)`` is called inside of each window."""

    before: Callable[[int], None] = lambda window: None
    read_from: str = ""
    url: str = "memory of the test"
    together: bool = True
    replaces: bool = True

    async def prepare(self, save: Any) -> None:
        """Nothing else is needed."""

    def read(self, snapshot: Any, save: Any, stop: Any) -> dict[str, torch.Tensor]:
        found = payloads(snapshot, stop, self.before)
        self.read_from = "snapshot"
        return {f"t{index}": torch.frombuffer(bytearray(raw), dtype=torch.uint8) for index, raw in enumerate(found)}

    async def finish(self, read: Any, save: Any) -> Any:
        return read

    async def undo(self, error: BaseException) -> None:
        """Nothing has been written."""

    async def read_checkpoint(self, save: Any, ranks: Any) -> dict[str, Any]:
        self.read_from = "checkpoint"
        return await (await open_checkpoint(save.location.url)).state_dict()


class Null:
    """Reads nothing."""

    url = "nowhere"
    together = replaces = True

    async def prepare(self, save: Any) -> None:
        """Nothing else is needed."""

    def read(self, snapshot: Any, save: Any, stop: Any) -> str:
        return "nothing"

    async def finish(self, read: str, save: Any) -> str:
        return read

    async def undo(self, error: BaseException) -> None:
        """Nothing has been written."""

    async def read_checkpoint(self, save: Any, ranks: Any) -> str:
        return "nothing of the checkpoint"


def save(
    state: dict[str, Any], target: Path, stager: AsyncStager | None, *sinks: Sink, **options: Any
) -> tuple[PendingSave, tuple[PendingExport, ...]]:
    known = {"durability": "flush", "timeout_s": 60.0}
    known |= {name: options.pop(name) for name in ("durability", "timeout_s", "streaming") if name in options}
    exports = tuple(PendingExport(sink) for sink in sinks)
    wanted = sidestream.SaveOptions(**known)
    request = SaveRequest(state=state, options=wanted, stager=stager, metadata=None, outcomes=exports, **options)
    work = request.launch(request.prepare(), locate_directory(target))
    pending = PendingSave(work, exports)
    return pending, pending.exports


@contextmanager
def stalled() -> Iterator[tuple[Callable[[int], None], threading.Event, threading.Event]]:
    """A system call that returns when the test says so, as ``before``; set once a sink is in it; and what ends it."""
    inside, over = threading.Event(), threading.Event()

    def stall(window: int) -> None:
        inside.set()
        assert over.wait(60)

    try:
        yield stall, inside, over
    finally:
        over.set()


@pytest.mark.parametrize("saver", ["thread", "process"])
async def test_two_sinks_read_what_the_checkpoint_has(saver: str, tmp_path: Path) -> None:
    from sidestream._worker.client import worker_for
    from sidestream.options import WriterProcess

    state = state_of(1)
    options: dict[str, Any] = {"worker": (worker_for(WriterProcess()), False)} if saver == "process" else {}
    async with AsyncStager(budget_bytes=2 * STATE_BYTES) as stager:
        one, two = Collecting(), Collecting()
        pending, sinks = save(state, tmp_path / "a", stager, one, two, Null(), **options)
        await pending
        for sink in sinks[:2]:
            same(await sink, state)
        assert await sinks[2] == "nothing"
        assert [one.read_from, two.read_from] == ["snapshot", "snapshot"]
        same(await (await open_checkpoint(tmp_path / "a")).state_dict(), state)
        del sink
        await all_returned(stager)


async def test_the_checkpoint_does_not_wait_for_a_sink(tmp_path: Path) -> None:
    state = state_of(2)
    with stalled() as (stall, inside, over):
        async with AsyncStager(budget_bytes=2 * STATE_BYTES) as stager:
            late = Collecting(stall)
            pending, (sink,) = save(state, tmp_path / "a", stager, late)
            await pending
            assert not sink.done()
            assert await asyncio.to_thread(inside.wait, 60)
            same(await (await open_checkpoint(tmp_path / "a")).state_dict(), state)
            over.set()
            same(await sink, state)
            assert late.read_from == "snapshot"  # no stage has needed the memory
            await all_returned(stager)


@pytest.mark.parametrize("what", ["stalled", "failing", "cancelled", "slow"])
async def test_two_saves_in_little_memory(what: str, tmp_path: Path) -> None:
    """Two sinks of each of two saves, in memory for 1.3 states."""
    states = [state_of(3), state_of(4)]
    with stalled() as (stall, _, over):

        def fail(window: int) -> None:
            raise OSError(5, "the sink fails")

        before = {"stalled": stall, "cancelled": stall, "failing": fail, "slow": lambda window: time.sleep(0.01)}[what]
        async with AsyncStager(budget_bytes=int(1.3 * STATE_BYTES)) as stager:
            saves = [
                save(state, tmp_path / str(number), stager, Collecting(before), Collecting())
                for number, state in enumerate(states)
            ]
            stopped = []  # one that read its checkpoint while the save before was compared may have ended
            for number, (pending, sinks) in enumerate(saves):
                stopped.append(what == "cancelled" and sinks[0].cancel())
                info = await pending
                assert info.nbytes > STATE_BYTES
                same(await (await open_checkpoint(tmp_path / str(number))).state_dict(), states[number])
            over.set()
            assert stopped[0] == (what == "cancelled")
            for (_, sinks), state, was_stopped in zip(saves, states, stopped, strict=True):
                same(await sinks[1], state)
                if was_stopped:
                    with pytest.raises(asyncio.CancelledError):
                        await sinks[0]
                elif what == "failing" and sinks[0]._sink.read_from != "checkpoint":
                    with pytest.raises(OSError, match="the sink fails"):
                        await sinks[0]
                else:
                    same(await sinks[0], state)
            await all_returned(stager)


async def test_memory_that_only_a_sink_needs_is_taken_back(tmp_path: Path) -> None:
    """The sink is inside of its first window, which stays as it was; the others go to the next stage."""
    state = state_of(5)
    with stalled() as (stall, inside, over):
        async with AsyncStager(budget_bytes=STATE_BYTES + 3 * WINDOW) as stager:
            late = Collecting(stall)
            pending, (sink,) = save(state, tmp_path / "a", stager, late)
            assert await asyncio.to_thread(inside.wait, 60)
            await pending
            more = {"more": torch.ones(4 * WINDOW // 4)}
            staged = await stager.stage(more)
            over.set()
            same(await sink, state)
            assert late.read_from == "checkpoint"
            same(staged, more)
            staged.release()
            del staged
            await all_returned(stager)


async def test_a_stalled_sink_in_memory_for_one_window(tmp_path: Path) -> None:
    """A window that a sink is inside of cannot be taken back, so it has to be more than the checkpoint needs."""
    state = {"t": torch.ones(1 << 18)}
    with stalled() as (stall, _, over):
        async with AsyncStager(budget_bytes=3 << 19) as stager:
            pending, (sink,) = save(state, tmp_path / "a", stager, Collecting(stall))
            await pending
            await sidestream.save(state, tmp_path / "b", stager=stager, options=sidestream.SaveOptions(timeout_s=60))
            over.set()
            assert torch.equal((await sink)["t"], state["t"])


async def test_a_state_that_only_passes_through(tmp_path: Path) -> None:
    state = state_of(7)
    async with AsyncStager(budget_bytes=2 * WINDOW + (1 << 20)) as stager:
        sink = Collecting()
        pending, (ended,) = save(state, tmp_path / "a", stager, sink)
        await pending
        same(await ended, state)
        assert sink.read_from == "checkpoint"


async def test_no_snapshot_and_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    async with AsyncStager(budget_bytes=2 * WINDOW + (1 << 20)) as stager:
        pending, (sink,) = save(state_of(8), tmp_path / "a", stager, Collecting())
        with pytest.raises(sidestream.errors.CheckpointExistsError):
            await pending
        with pytest.raises(SnapshotLostError, match="was not saved"):
            await sink


@pytest.mark.parametrize("round_", range(5))
async def test_a_save_that_fails_beside_its_sink(round_: int, tmp_path: Path) -> None:
    """The sink ends well if everything was staged by then, and with a typed error if the copies were stopped."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    state = state_of(9)
    async with AsyncStager(budget_bytes=2 * STATE_BYTES) as stager:
        pending, (sink,) = save(state, tmp_path / "a", stager, Collecting())
        with pytest.raises(sidestream.errors.CheckpointExistsError):
            await pending
        try:
            same(await sink, state)
        except SnapshotLostError as error:
            assert "was not saved" in str(error)  # noqa: PT017
        await all_returned(stager)


async def test_a_stage_that_fails_fails_its_sinks(tmp_path: Path) -> None:
    async with AsyncStager(budget_bytes=2 * STATE_BYTES) as stager:
        pending, (sink,) = save({"bad": object(), **state_of(10)}, tmp_path / "a", stager, Collecting())
        with pytest.raises(UnsafeObjectError):
            await pending
        with pytest.raises(UnsafeObjectError):
            await sink
        await all_returned(stager)


async def test_a_sink_is_cancelled_before_its_first_step(tmp_path: Path) -> None:
    engine = GatedEngine()
    async with AsyncStager(budget_bytes=2 * STATE_BYTES, engine=engine) as stager:
        pending, (sink,) = save(state_of(11), tmp_path / "a", stager, Collecting())
        sink.cancel()
        engine.gate.set()
        await pending
        with pytest.raises(asyncio.CancelledError):
            await sink
        await all_returned(stager)


async def test_other_stages_do_not_wait_for_a_sink(tmp_path: Path) -> None:
    """Also those that refuse to wait: what only sinks hold counts as free."""
    state = state_of(12)
    with stalled() as (stall, inside, over):
        async with AsyncStager(budget_bytes=STATE_BYTES + 3 * WINDOW, when_full="fail") as stager:
            pending, (sink,) = save(state, tmp_path / "a", stager, Collecting(stall))
            assert await asyncio.to_thread(inside.wait, 60)
            await pending
            staged = await stager.stage({f"more {number}": torch.ones(WINDOW // 4) for number in range(5)})
            staged.release()
            with pytest.raises(ArenaExhaustedError):
                await stager.stage({"more": torch.ones((STATE_BYTES + 3 * WINDOW) // 4)})
            over.set()
            same(await sink, state)


class Keeping:
    """Keeps a tensor over its first window."""

    url = "memory of the test"

    def __init__(self) -> None:
        self.kept: torch.Tensor | None = None

    async def prepare(self, save: Any) -> None:
        """Nothing else is needed."""

    def read(self, snapshot: Any, save: Any, stop: Any) -> bytes:
        snapshot.plan(stop)
        with snapshot.window(0, stop) as view, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the memory is not writable
            self.kept = torch.frombuffer(view, dtype=torch.uint8)
            return bytes(view)

    async def finish(self, read: bytes, save: Any) -> bytes:
        return read

    async def undo(self, error: BaseException) -> None:
        """Nothing has been written."""

    async def read_checkpoint(self, save: Any, ranks: Any) -> None:
        raise AssertionError("the snapshot was lost")


async def test_memory_is_not_used_again_while_a_tensor_refers_to_it(tmp_path: Path) -> None:
    async with AsyncStager(budget_bytes=2 * STATE_BYTES) as stager:
        sink = Keeping()
        pending, (ended,) = save(state_of(13), tmp_path / "a", stager, sink)
        await pending
        before = await ended
        payload = slice(WINDOW // 2, WINDOW)  # behind the frames, which are written beside the sink
        for number in range(3):
            await sidestream.save(
                state_of(14 + number),
                tmp_path / str(number),
                stager=stager,
                options=sidestream.SaveOptions(durability="flush"),
            )
        assert sink.kept is not None
        assert sink.kept.numpy().tobytes()[payload] == before[payload]
        sink.kept = None
        await all_returned(stager)


@pytest.mark.parametrize("raised", [ValueError, SystemExit])
async def test_the_error_of_a_sink_keeps_no_memory(raised: type[BaseException], tmp_path: Path) -> None:
    def fail(window: int) -> None:
        raise raised("the sink fails")

    gc.disable()
    try:
        async with AsyncStager(budget_bytes=2 * STATE_BYTES) as stager:
            pending, (sink,) = save(state_of(15), tmp_path / "a", stager, Collecting(fail))
            await pending
            with pytest.raises((ValueError, RuntimeError), match="the sink fails") as caught:
                await sink
            async with asyncio.timeout(60):
                while stager.statistics().leases:
                    await asyncio.sleep(0)
            assert caught.value is not None
    finally:
        gc.enable()


async def test_many_stalled_sinks_leave_enough_for_a_large_save(tmp_path: Path) -> None:
    """Each of five small saves has a sink that hangs in a window; then one needs nearly all of the budget."""
    with stalled() as (stall, _, over):
        async with AsyncStager(budget_bytes=40 << 20) as stager:
            fed = []
            for number in range(5):
                small = {"t": torch.full((1 << 20,), float(number))}
                pending, (sink,) = save(small, tmp_path / str(number), stager, Collecting(stall))
                await pending
                fed.append(sink)
            await sidestream.save(
                {"t": torch.ones(9 << 20)},
                tmp_path / "large",
                stager=stager,
                options=sidestream.SaveOptions(timeout_s=60),
            )
            over.set()
            for sink in fed:
                await sink
