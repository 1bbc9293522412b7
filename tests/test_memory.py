"""How much memory a save maps: little in the first one, all of the state after the second, none after some time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _own_stores import DirectoryStore
from leases import all_returned
from states import assert_same

import sidestream
from sidestream._layout import save_layout
from sidestream._runtime.memory_maps import wait_unmapped
from sidestream._runtime.threads import Deadline, Stop
from sidestream._staging import AsyncStager
from sidestream._staging import arena as arena_module
from sidestream._staging import drain as drain_module
from sidestream._staging import idle as idle_module
from sidestream._staging.arena import Arena
from sidestream._staging.drain import Drain
from sidestream._worker.client import worker_for

MIB = 1 << 20
STATE_MIB = 40


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thirtieth of what is usual."""
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (MIB, 512 * MIB))
    monkeypatch.setattr(drain_module, "_ENOUGH_BYTES", 6 * MIB)
    monkeypatch.setattr(arena_module, "_STEP_BYTES", MIB)
    monkeypatch.setattr(idle_module, "_GROW_S", 0.01)


@pytest.fixture
def very_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that took ten seconds to find the pages of a window, so that any disk is faster."""
    rate = property(lambda self: MIB / 10, lambda self, measured: None)
    assert Arena(MIB)._touched_bytes_per_s == 0, "objects have it, and the class gets it here"
    monkeypatch.setattr(Arena, "_touched_bytes_per_s", rate, raising=False)


@pytest.fixture
def slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes its time to find pages."""
    touch = arena_module._touch

    def slowly(memory: arena_module.MappedMemory, nbytes: int) -> None:
        time.sleep(nbytes / (32 * MIB))
        touch(memory, nbytes)

    monkeypatch.setattr(arena_module, "_touch", slowly)


def state_of(value: float) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full((MIB // 8,), float(value + number)) for number in range(2 * STATE_MIB)}


async def back(url: Path, **options: object) -> dict[object, object]:
    return await (await sidestream.open_checkpoint(url, **options)).state_dict()  # type: ignore[arg-type]


def reserved(stager: AsyncStager) -> int:
    return stager.statistics().reserved_bytes // MIB


async def reached(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def save(state: dict[str, torch.Tensor], url: Path, stager: AsyncStager) -> None:
    await sidestream.save(state, url, stager=stager)
    await all_returned(stager)


# --- the first save ---


@pytest.mark.usefixtures("very_slow_host")
async def test_a_first_save_uses_its_windows_again_where_memory_is_slow(tmp_path: Path) -> None:
    async with AsyncStager() as stager:
        await save(state_of(1), tmp_path / "c", stager)
        assert reserved(stager) < STATE_MIB
    assert_same(state_of(1), await back(tmp_path / "c"))


@pytest.mark.usefixtures("slow_host")
async def test_a_store_that_takes_nothing_does_not_keep_the_sources(tmp_path: Path) -> None:
    """All of the state is staged, in as much memory as that needs, before anything of it is written."""
    let_through = threading.Event()

    class Slow(DirectoryStore):
        async def upload(self, name: str, part_bytes: int) -> object:  # type: ignore[override]
            while not let_through.is_set():  # on a loop of its own
                await asyncio.sleep(0.005)
            return await super().upload(name, part_bytes)

    state, store = state_of(1), Slow(tmp_path)
    async with AsyncStager() as stager:
        pending = sidestream.async_save(state, "c", stager=stager, storage=sidestream.Storage(filesystem=store))
        await pending.staged
        assert not pending.done()
        assert stager.statistics().leased_bytes >= STATE_MIB * MIB
        for tensor in state.values():
            tensor.fill_(-1)
        let_through.set()
        await pending
    assert_same(state_of(1), await back("c", storage=sidestream.Storage(filesystem=store)))


def test_a_reader_that_releases_nothing_is_not_waited_for() -> None:
    arena = Arena(256 * MIB, segment_bytes=MIB)
    drain, leases = Drain(arena.given_back_bytes), []
    for _ in range(20):
        leases.append(arena.lease(MIB, deadline=Deadline.after(60), stop=Stop(), drain=drain))
    assert arena.statistics().leased_bytes == 20 * MIB


def test_a_stage_waits_for_memory_that_comes_back_soon() -> None:
    arena = Arena(256 * MIB, segment_bytes=MIB)
    drain = Drain(arena.given_back_bytes)

    def lease() -> arena_module.Allocation:
        return arena.lease(MIB, deadline=Deadline.after(60), stop=Stop(), drain=drain)

    leases = [lease() for _ in range(8)]
    arena._touched_bytes_per_s = MIB / 10  # to touch a window would take ten seconds
    writer = threading.Timer(0.05, leases.pop(3).release)
    writer.start()
    again = lease()
    assert arena.statistics().reserved_bytes == 8 * MIB
    again.release()
    writer.join()


def test_the_patience_of_a_stage() -> None:
    drain, rate = Drain(100), 1e3  # as if it took hours to touch so little: the time of this test does not count
    assert drain.patience_s(MIB, 100, rate) <= 0  # nothing is being written
    drain.leased(8 * MIB)
    assert drain.patience_s(3 * MIB, 100, rate) <= 0  # fewer windows than are written at a time
    assert drain.patience_s(MIB, 100 + 3 * MIB, rate) <= 0  # most of them are back
    assert drain.patience_s(MIB, 100, rate) == pytest.approx(8 * MIB / rate, abs=600)
    drain.leased(2 * MIB)
    earned = drain.patience_s(MIB, 100 + 2 * MIB, rate)
    assert earned == pytest.approx(10 * MIB / rate, abs=600)  # what came back earns as much again
    assert drain.patience_s(MIB, 100, 1e15) < 0  # it was waited for long enough


async def test_a_saver_that_is_killed_in_a_first_save_writes_all_of_it_again(tmp_path: Path) -> None:
    """Memory is not used again before the receipt, or it could not."""
    state, killed = state_of(1), []

    def kill(event: sidestream.events.Event) -> None:
        pid = worker_for(sidestream.WriterProcess()).pid
        if isinstance(event, sidestream.events.SaveStaged) and not killed and pid is not None:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    await sidestream.save({"n": 1}, tmp_path / "0", options=sidestream.SaveOptions(writer="process"))  # it is up
    async with AsyncStager(backing="shared") as stager:
        with sidestream.events.observe(kill):
            await sidestream.save(
                state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer="process")
            )
        assert stager.statistics().peak_leased_bytes >= STATE_MIB * MIB
    assert killed
    assert_same(state, await back(tmp_path / "c"))
    assert (await sidestream.verify(tmp_path / "c")).ok


# --- between saves ---


@pytest.mark.usefixtures("very_slow_host")
async def test_the_arena_grows_to_the_state_once_after_its_second_save(tmp_path: Path) -> None:
    state = state_of(1)
    async with AsyncStager() as stager:
        await save(state, tmp_path / "1", stager)
        assert stager._idle._wanted is None
        before = reserved(stager)
        assert before < STATE_MIB
        await save(state, tmp_path / "2", stager)
        await reached(lambda: reserved(stager) >= STATE_MIB)
        grown = reserved(stager)
        assert grown <= STATE_MIB + 12
        for turn in range(3):
            state["t1"].add_(1)
            await save(state, tmp_path / f"again {turn}", stager)
            assert stager._idle._wanted is None
        assert reserved(stager) == grown
    assert_same(state, await back(tmp_path / "again 2"))


@pytest.mark.usefixtures("very_slow_host")
async def test_where_there_is_no_time_between_saves_the_third_one_touches_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_module, "_GROW_S", 600.0)
    async with AsyncStager() as stager:
        for turn in range(2):
            await save(state_of(turn), tmp_path / str(turn), stager)
            assert reserved(stager) < STATE_MIB
        sizes = stager._idle._wanted
        assert sizes is not None
        assert stager._idle.will_grow_to(list(sizes))
        assert not stager._idle.will_grow_to(list(sizes[1:]))
        for turn in range(2, 4):
            await save(state_of(turn), tmp_path / str(turn), stager)
            assert stager._idle._wanted == sizes, "it is still to grow, when there is time"
    assert_same(state_of(3), await back(tmp_path / "3"))


async def test_it_grows_within_the_budget(tmp_path: Path) -> None:
    async with AsyncStager(budget_bytes=STATE_MIB * MIB // 2) as stager:
        for turn in range(3):
            await save(state_of(turn), tmp_path / str(turn), stager)
        await reached(lambda: stager._idle._wanted is None)
        assert reserved(stager) <= STATE_MIB // 2


async def test_memory_that_is_not_used_for_some_time_is_unmapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not mapped again before the next save."""
    monkeypatch.setattr(idle_module, "_TRIM_S", 0.3)
    state = state_of(1)
    async with AsyncStager() as stager:
        for turn in range(2):
            await save(state, tmp_path / str(turn), stager)
        await reached(lambda: reserved(stager) == 0)
        assert stager._idle.due_s() is None
        await save(state, tmp_path / "next", stager)
        assert stager._idle._wanted is None
    assert_same(state, await back(tmp_path / "next"))


async def test_staged_tensors_that_somebody_holds_stay_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_module, "_TRIM_S", 0.1)
    async with AsyncStager() as stager:
        staged = await stager.stage({"t": torch.arange(1000)})
        await sidestream.save(state_of(1), tmp_path / "c", stager=stager)
        await reached(lambda: stager._idle.due_s() is None)
        assert staged["t"].tolist() == list(range(1000))
        staged.release()


def lease_of(arena: Arena, mib: int) -> arena_module.Allocation:
    return arena.lease(mib * MIB, deadline=Deadline.after(60), stop=Stop())


def trim_idle(arena: Arena) -> None:
    """And wait until what was dropped is unmapped, which another thread does."""
    arena.trim_idle()
    arena.wait_unmapped(Deadline.after(60))


def test_growing_stops_where_the_thread_is_needed_or_memory_is_in_use() -> None:
    arena = Arena(64 * MIB, segment_bytes=MIB)
    assert not arena.grow_for([8 * MIB], lambda: True, 64 * MIB)
    assert arena.statistics().reserved_bytes == 0
    lease = lease_of(arena, 2)
    assert not arena.grow_for([8 * MIB], lambda: False, 64 * MIB)
    lease.release()
    assert arena.grow_for([8 * MIB, 2 * MIB], lambda: False, 64 * MIB)
    assert arena.statistics().reserved_bytes == 10 * MIB
    leases = [lease_of(arena, 8), lease_of(arena, 2)]
    assert arena.statistics().reserved_bytes == 10 * MIB
    trim_idle(arena)
    assert arena.statistics().reserved_bytes == 10 * MIB
    view = leases[0].view
    view[:3] = b"abc"
    leases.pop(1).release()
    trim_idle(arena)
    assert arena.statistics().reserved_bytes == 8 * MIB
    assert bytes(view[:3]) == b"abc"


@pytest.mark.parametrize("backing", ["private", "shared"])
def test_growth_that_is_interrupted_leaves_memory_for_the_stage_that_interrupts_it(
    backing: arena_module.Backing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmapping it would hold up the program just when the stage begins."""
    touched: list[int] = []
    advise = arena_module.advise

    def noted(address: int, nbytes: int, advice: int) -> int:
        if advice == arena_module._POPULATE_WRITE:
            touched.append(nbytes)
        return advise(address, nbytes, advice)

    monkeypatch.setattr(arena_module, "advise", noted)
    arena = Arena(64 * MIB, segment_bytes=MIB, backing=backing)
    assert not arena.grow_for([32 * MIB], lambda: len(touched) == 2, 64 * MIB)
    assert sum(touched) < 32 * MIB
    assert arena.statistics().reserved_bytes == 32 * MIB
    lease = lease_of(arena, 32)
    assert arena.statistics().reserved_bytes == 32 * MIB, "nothing is mapped again"
    lease.view[-3:] = b"end"
    assert not any(lease.view[:-3:4096])
    lease.release()
    assert arena.grow_for([32 * MIB], lambda: False, 64 * MIB)
    assert arena.statistics().reserved_bytes == 32 * MIB


@pytest.mark.parametrize("backing", ["private", "shared"])
def test_memory_that_was_given_back_is_mapped_anew(backing: arena_module.Backing) -> None:
    arena = Arena(64 * MIB, segment_bytes=MIB, backing=backing)
    lease = lease_of(arena, 4)
    lease.view[:] = b"x" * (4 * MIB)
    lease.release()
    trim_idle(arena)
    assert arena.statistics().reserved_bytes == 0
    assert not any(lease_of(arena, 4).view[: MIB // 4])


class Pinner:
    def register(self, device: object, address: int, nbytes: int) -> bool:
        return True

    def unregister(self, device: object, address: int) -> None: ...


def test_registered_memory_grows_and_shrinks_in_idle_time_like_any_other() -> None:
    arena = Arena(64 * MIB, segment_bytes=MIB)
    arena.pin(Pinner(), "device")
    lease = lease_of(arena, 2)
    assert lease.register(MIB) == 2 * MIB == arena.statistics().registered_bytes
    lease.release()
    assert arena.grow_for([8 * MIB], lambda: False, 64 * MIB)
    assert arena.statistics().reserved_bytes > arena.statistics().registered_bytes == 2 * MIB
    trim_idle(arena)
    assert arena.statistics().reserved_bytes == 0
    arena.close()


@pytest.mark.parametrize("aside", [False, True])
def test_a_stager_in_use_keeps_registered_memory(aside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits in the cache for the next save does not."""
    monkeypatch.setattr(idle_module, "_TRIM_S", 0.0)
    arena = Arena(64 * MIB, segment_bytes=MIB)
    arena.pin(Pinner(), "device")
    lease = lease_of(arena, 2)
    lease.register(0)
    lease.release()
    idle = idle_module.IdleMemory(arena)
    if aside:
        idle.set_aside(64 * MIB)
    else:
        idle.note_staged((2 * MIB,))
    idle.run(lambda: False)
    assert wait_unmapped(Deadline.after(60))
    assert arena.statistics().reserved_bytes == (0 if aside else 2 * MIB)
    assert idle.due_s() is None
    arena.close()


def test_memory_is_registered_in_pieces_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_PIECE_BYTES", MIB)
    registered: list[int] = []

    class Counted(Pinner):
        def register(self, device: object, address: int, nbytes: int) -> bool:
            registered.append(nbytes)
            return True

    arena = Arena(64 * MIB, segment_bytes=MIB)
    arena.pin(Counted(), "device")
    lease = lease_of(arena, 4)
    assert registered == []
    assert [lease.register(start) for start in (0, MIB - 1, 2 * MIB, 2 * MIB + 5)] == [MIB, MIB, 3 * MIB, 3 * MIB]
    assert registered == [MIB, MIB]
    assert arena.statistics().registered_bytes == 2 * MIB
    lease.release()
    arena.close()
