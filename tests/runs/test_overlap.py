"""More saves than slots, by each policy; and that the loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
import torch
from _run import PATIENCE_S, leases_in, state_of, until
from held import HeldStager
from keywords import for_run

import sidestream
from sidestream._run.saves import EntryState, QueueEntry, SaveQueue, decide
from sidestream._runtime.threads import Deadline
from sidestream.errors import (
    CheckpointExistsError,
    DeadlineExceededError,
    InvalidOptionError,
    SidestreamError,
    SkippedError,
    TooManySavesError,
)
from sidestream.options import WhenFull


async def test_wait(tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, slots=1, stager=held) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        second = checkpoints.async_save(state_of(2), step=2)
        await until(lambda: bool(held.held), "the first stage")
        held.let_go(1)
        assert not second.staged.done()
        held.let_go(0)
        await first
        assert (await second).step == 2


async def test_what_happens_after_the_call_is_not_in_a_save_that_waits(tmp_path: Path) -> None:
    """The weights change right behind a guarded step, and plain values right behind the call, while all slots are
    taken."""
    held = HeldStager()
    weight = torch.nn.Parameter(torch.zeros(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    guard = held.guard(optimizer)
    state = {"weight": weight, "n": {"value": 1}}
    async with sidestream.Checkpointer(tmp_path, slots=1, stager=held) as checkpoints:
        saves = [checkpoints.async_save(state, step=step) for step in (1, 2)]
        state["n"]["value"] = 2
        stepping = asyncio.create_task(asyncio.to_thread(optimizer.step))
        held.let_go(0)
        await saves[0]
        assert not stepping.done()
        held.let_go(1)
        await stepping
        with torch.no_grad():
            weight.fill_(7.0)
        for save in saves:
            await save
        for step in (1, 2):
            found = {"weight": torch.ones(1000), "n": {"value": 0}}
            assert await checkpoints.restore(found, step) == step
            assert not found["weight"].any()
            assert found["n"]["value"] == 1
    guard.remove()


@pytest.mark.parametrize("end", ["skipped", "cancelled"])
async def test_the_fence_does_not_wait_for_a_save_that_never_copies(end: str, tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(
        tmp_path, slots=1, stager=held, when_full="skip" if end == "skipped" else "wait"
    ) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        await until(lambda: bool(held.held), "the first stage")
        second = checkpoints.async_save(state_of(2), step=2)
        if end == "cancelled":
            second.cancel()
        await second.ended()
        await second.staged
        held.let_go()
        await first
        await asyncio.to_thread(held.fence, 10.0)


async def test_skip(tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, slots=1, when_full="skip", stager=held) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        second = checkpoints.async_save(state_of(2), step=2)
        await second.staged
        with pytest.raises(SkippedError, match="1 save is in progress"):
            await second
        assert second.outcome == "absent"
        third = checkpoints.async_save(state_of(3), step=3)
        held.let_go()
        await first
        await third.ended()
        assert (await _saved(checkpoints, held, 4)).step == 4
        assert await checkpoints.steps() == [1, 4], "to be skipped is no failure: nobody has to hear of it"


async def test_fail(tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, slots=1, when_full="fail", stager=held) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        with pytest.raises(TooManySavesError, match="step-2 was not saved"):
            checkpoints.async_save(state_of(2), step=2)
        held.let_go()
        await first
        assert (await _saved(checkpoints, held, 3)).step == 3


async def test_latest(tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, slots=1, when_full="latest", stager=held) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        await until(lambda: bool(held.held), "the first stage")
        waiting = [checkpoints.async_save(state_of(step), step=step, metadata={"n": step}) for step in (2, 3, 4)]
        for superseded in waiting[:2]:
            await superseded.staged
            with pytest.raises(SkippedError, match="a newer save came"):
                await superseded
        assert not waiting[2].done()
        assert checkpoints.health().pending == 2
        held.let_go()
        await first
        await until(lambda: len(held.held) == 2, "the stage of the latest")
        held.let_go()
        assert (await waiting[2]).step == 4
        assert waiting[2].url.endswith("step-4")
        assert await checkpoints.steps() == [1, 4]
        assert await checkpoints.read_metadata() == {"n": 4}


def place(text: str) -> EntryState:
    """``W``, ``S``, ``F`` or ``L``: the policy; ``.``: it wants no slot yet; ``+``: it has a slot; ``!``: has begun."""
    when_full: WhenFull = {"W": "wait", "S": "skip", "F": "fail", "L": "latest"}[text[0]]  # type: ignore[assignment]
    return EntryState(when_full, wants_slot="." not in text, has_slot="+" in text or "!" in text, begun="!" in text)


@pytest.mark.parametrize(
    ("slots", "places", "decisions"),
    [
        (1, "", ""),
        (1, "W", "begin"),
        (2, "W W W", "begin slot wait"),
        (2, "W! W W", "begin begin wait"),
        (2, "W! W+ W", "begin begin wait"),
        (2, "W+ W+ W", "begin slot wait"),
        (1, "W! S", "begin full"),
        (1, "W! F", "begin full"),
        (2, "W! S F", "begin begin full"),
        (1, "W! S W", "begin full wait"),
        (1, "W! L", "begin wait"),
        (1, "W! L L", "begin overtaken wait"),
        (1, "L L", "begin wait"),
        (2, "L! L+ L L", "begin begin overtaken wait"),
        (1, "W! L W L", "begin overtaken wait wait"),
        (1, "W! W L", "begin wait wait"),
        (1, "W! L L.", "begin wait wait"),
        (1, "W! L L. L", "begin wait wait wait"),
        (1, "W. W", "wait wait"),
        (1, "W. S", "wait wait"),
        (2, "W+ W. W", "begin wait wait"),
        (3, "W! W+ W", "begin begin slot"),
    ],
)
def test_what_the_queue_decides(slots: int, places: str, decisions: str) -> None:
    assert decide(slots, [place(each) for each in places.split()]) == decisions.split()


@pytest.mark.parametrize("newer_first", [True, False], ids=["newer-first", "slot-first"])
async def test_a_newer_save_and_a_slot_come_before_the_queued_one_can_look(newer_first: bool) -> None:
    """What came first decides, so that only one of the two saves has the slot."""
    queue = SaveQueue(1)
    first, entry, newer = (QueueEntry(queue, "latest") for _ in range(3))
    for one in (first, entry, newer):
        one.join()
    assert first.request_slot()
    assert not entry.request_slot()
    first.mark_begun()
    coming = asyncio.create_task(entry.wait_to_begin())
    await asyncio.sleep(0)
    for happens in (newer.request_slot, first.release) if newer_first else (first.release, newer.request_slot):
        happens()
    assert newer.request_slot() is newer_first
    assert await coming is not newer_first
    entry.release()
    assert queue.slots_used == 1
    newer.release()
    assert queue.slots_used == 0


async def test_a_queued_save_has_its_place_from_its_call_on() -> None:
    queue = SaveQueue(1)
    first, unseen, seen, late = (QueueEntry(queue, "wait") for _ in range(4))
    for one in (first, unseen, seen, late):
        one.join()
    assert first.request_slot()
    assert not any(entry.request_slot() for entry in (unseen, seen, late))
    first.mark_begun()
    late.release()
    first.release()
    assert queue.slots_used == 1, "the slot goes to the one that called first, which does not look yet"
    coming = asyncio.create_task(seen.wait_to_begin())
    await asyncio.sleep(0)
    unseen.release()
    assert queue.slots_used == 1
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    seen.release()
    assert queue.slots_used == 0


async def test_a_queued_save_can_be_cancelled_and_gives_no_slot_away(tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, slots=1, when_full="latest", stager=held) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        second = checkpoints.async_save(state_of(2), step=2)
        await asyncio.sleep(0)
        assert second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.let_go()
        await first
        for step in (3, 4):
            assert (await _saved(checkpoints, held, step)).step == step
    assert leases_in(tmp_path) == []


async def test_a_queued_save_keeps_no_state_once_it_has_been_copied(tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, slots=1, when_full="latest", stager=held) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        state = state_of(2)
        tensor = weakref.ref(state["t"])
        second = checkpoints.async_save(state, step=2)
        del state
        held.let_go()
        await first
        await until(lambda: len(held.held) == 2, "the stage of the second")
        held.let_go()
        await second.staged
        gc.collect()
        assert tensor() is None
        await second


async def test_closing_waits_for_a_queued_save(tmp_path: Path) -> None:
    held = HeldStager()
    checkpoints = sidestream.Checkpointer(tmp_path, slots=1, when_full="latest", stager=held)
    async with checkpoints:
        checkpoints.async_save(state_of(1), step=1)
        second = checkpoints.async_save(state_of(2), step=2)
        await until(lambda: bool(held.held), "the first stage")
        closing = asyncio.create_task(checkpoints.aclose())
        await asyncio.sleep(0)
        held.let_go()
        await until(lambda: len(held.held) == 2, "the stage of the second")
        held.let_go()
        assert (await second).step == 2
        await closing
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        assert await checkpoints.steps() == [1, 2]


@pytest.mark.parametrize("cancelled", ["nobody", "first", "second"])
async def test_two_tasks_close_at_the_same_time(cancelled: str, tmp_path: Path) -> None:
    """Both wait for exports and for the deletions after them, also if the other one is cancelled."""
    gate, inside = threading.Event(), threading.Event()

    def names(name: str) -> str:
        inside.set()
        assert gate.wait(PATIENCE_S)
        return name

    export = sidestream.HF(tmp_path / "exports" / "{step}", names=names)
    keep = sidestream.KeepLast(1)
    async with sidestream.Checkpointer(tmp_path / "run", export=export, exports_keep=1, keep=keep) as checkpoints:
        saved = [checkpoints.async_save(state_of(step), step=step) for step in (1, 2)]
        for one in saved:
            await one
        assert await asyncio.to_thread(inside.wait, PATIENCE_S)
        closing = [asyncio.create_task(checkpoints.aclose()) for _ in range(2)]
        for _ in range(100):
            await asyncio.sleep(0)
        early = [one.done() for one in closing]
        if cancelled != "nobody":
            closing[cancelled == "second"].cancel()
        gate.set()
        done = await asyncio.gather(*closing, return_exceptions=True)
        assert early == [False, False]
    if cancelled == "nobody":
        assert done == [None, None]
        assert os.listdir(tmp_path / "exports") == ["2"]
        assert [name for name in os.listdir(tmp_path / "run") if name.startswith("step-")] == ["step-2"]
    else:
        assert isinstance(done[cancelled == "second"], asyncio.CancelledError)
    assert all(one.done() for each in saved for one in each.exports)


async def test_options_are_checked(tmp_path: Path) -> None:
    for overlap in ("block", None, True):
        with pytest.raises(InvalidOptionError, match="when_full"):
            sidestream.Checkpointer(tmp_path, when_full=overlap)  # type: ignore[arg-type]
    for seconds in (0, -1, "1"):
        for name in ("lease_s", "abandoned_after_s"):
            with pytest.raises(InvalidOptionError):
                sidestream.Checkpointer(tmp_path, **for_run(**{name: seconds}))  # type: ignore[arg-type]


async def test_two_writers_of_one_step(tmp_path: Path) -> None:
    """Both choose the first generation; one wins, the other is told, and both checkpoints are never mixed."""
    ours, theirs = HeldStager(), HeldStager()
    async with (
        sidestream.Checkpointer(tmp_path, stager=ours) as one,
        sidestream.Checkpointer(tmp_path, stager=theirs) as other,
    ):
        pendings = [one.async_save(state_of(1), step=5), other.async_save(state_of(2), step=5)]
        await until(lambda: bool(ours.held) and bool(theirs.held), "both stages")
        ours.let_go()
        theirs.let_go()
        for pending in pendings:
            await pending.ended()
        outcomes = sorted(str(pending.outcome) for pending in pendings)
        assert outcomes == ["absent", "committed"]
        loser, winner = sorted(pendings, key=lambda pending: str(pending.outcome))
        with pytest.raises(CheckpointExistsError):
            await loser
        assert (await winner).generation == 1
        state = state_of(0)
        await one.restore(state)
        assert state["step"] == (1 if winner is pendings[0] else 2)
        assert (state["t"] == state["step"]).all()
        ours.let_go()
        assert (await _saved(one, ours, 5)).generation == 2


async def _saved(checkpoints: sidestream.Checkpointer, held: HeldStager, step: int) -> sidestream.SaveInfo:
    before = len(held.held)
    pending = checkpoints.async_save(state_of(step), step=step)
    await until(lambda: len(held.held) > before, "the stage")
    held.let_go()
    return await pending


async def test_a_save_that_never_gets_its_slot_in_an_eager_call(tmp_path: Path) -> None:
    """The call returns at the deadline of the save, and the sources may change then: it is not saved later."""
    held = HeldStager(mode="eager")
    options = sidestream.SaveOptions(timeout_s=0.3)
    tensor = torch.ones(1000)
    async with sidestream.Checkpointer(tmp_path, slots=1, stager=held) as checkpoints:
        held.holds = False
        entry = QueueEntry(checkpoints._saves._queue, "wait")  # what has the slot
        entry.join()
        assert entry.request_slot()
        second = await asyncio.to_thread(checkpoints.async_save, {"t": tensor}, step=2, options=options)
        tensor.zero_()
        entry.mark_begun()
        entry.release()
        with pytest.raises(DeadlineExceededError):
            await second
        assert second.outcome == "absent"


async def test_a_call_that_is_interrupted_keeps_no_slot(tmp_path: Path) -> None:
    """Ctrl-C wherever the interpreter looks for signals in the call: the next save has its slot."""
    left = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_filename.endswith("_run/saves.py"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    async with sidestream.Checkpointer(tmp_path, slots=1) as checkpoints:
        for step in range(1, 100):
            left = step
            begun: list[sidestream.PendingSave] = []
            with suppress(KeyboardInterrupt):
                sys.setprofile(profile)
                try:
                    begun.append(checkpoints.async_save(state_of(step), step=step))
                finally:
                    sys.setprofile(None)
            if left > 0:
                break
            for one in begun:
                await one
        assert step > 10
        assert (await checkpoints.save(state_of(0), step=100)).step == 100
        assert checkpoints._saves._queue.slots_used == 0


async def test_closing_a_stager_ends_a_stage_that_waits_for_its_slot(tmp_path: Path) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, slots=1, stager=held) as checkpoints:
        first = checkpoints.async_save(state_of(1), step=1)
        second = checkpoints.async_save(state_of(2), step=2)
        with suppress(SidestreamError):
            await held.aclose_by(Deadline.after(0.1))
        for save in (first, second):
            with pytest.raises(SidestreamError):
                await save
        assert await checkpoints.steps() == []


async def test_latest_captures_behind_an_older_save_that_has_not_begun(tmp_path: Path) -> None:
    """Although a slot is free: the older one may have to capture on a loop that waits at the fence for this one."""
    held = HeldStager()
    held.holds = False
    async with sidestream.Checkpointer(tmp_path, slots=2, when_full="latest", stager=held) as checkpoints:
        older = QueueEntry(checkpoints._saves._queue, "wait")
        older.join()
        assert older.request_slot()
        pending = checkpoints.async_save(state_of(2), step=2)
        captured_in_the_call = len(held.held)
        older.mark_begun()
        assert (await pending).step == 2
        older.release()
    assert captured_in_the_call == 0


async def test_latest_needs_a_loop(tmp_path: Path) -> None:
    """Also where a slot is free, so that the call does not depend on the moment."""
    async with sidestream.Checkpointer(tmp_path, when_full="latest") as checkpoints:
        with pytest.raises(InvalidOptionError, match="when_full='latest' needs an event loop"):
            await asyncio.to_thread(checkpoints.async_save, state_of(1), step=1)
        assert (await checkpoints.save(state_of(2), step=2)).step == 2
