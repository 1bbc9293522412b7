"""async_save under pressure: budgets, deadlines, references, failures that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from engines import GatedEngine
from hypothesis import given
from hypothesis import strategies as st
from leases import all_returned
from states import assert_same
from torch import nn

import sidestream
from sidestream._engine.calls import in_operation
from sidestream._layout import save_layout as save_plan
from sidestream._runtime import threads
from sidestream._runtime.tasks import supervised_tasks
from sidestream._staging import stage as staging
from sidestream.errors import (
    ArenaExhaustedError,
    CheckpointExistsError,
    ClosedError,
    DeadlineExceededError,
    UnsupportedTensorError,
)


async def test_many_saves_share_a_small_budget_and_a_load_goes_on_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More saves than there are threads, none of which has room for two: each gets its turn, and nobody starves."""
    monkeypatch.setattr(save_plan, "SHARD_BYTES", 1 << 20)
    state = {f"t{index}": torch.full((1 << 18,), float(index)) for index in range(3)}
    await sidestream.save({"n": 1}, tmp_path / "small")
    async with sidestream.AsyncStager(budget_bytes=3 << 20) as stager:
        saves = [sidestream.async_save(state, tmp_path / f"c{number}", stager=stager) for number in range(40)]
        target = {"n": 0}
        await sidestream.load(target, tmp_path / "small")
        await asyncio.gather(*saves)
        await all_returned(stager)
    assert target["n"] == 1
    back = await (await sidestream.open_checkpoint(tmp_path / "c39")).state_dict()
    assert_same(state, back)


async def test_deadline_and_cancel_while_waiting_for_memory(tmp_path: Path) -> None:
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        staged = await stager.stage({"t": torch.zeros(200_000)})
        with pytest.raises((ArenaExhaustedError, DeadlineExceededError), match=r"0\.2"):
            await sidestream.save(
                {"t": torch.ones(200_000)}, tmp_path / "a", stager=stager, options=sidestream.SaveOptions(timeout_s=0.2)
            )
        pending = sidestream.async_save({"t": torch.ones(200_000)}, tmp_path / "b", stager=stager)
        while stager.statistics().waiters == 0:
            await asyncio.sleep(0)
        assert pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await pending.ended()
        assert pending.outcome == "absent"
        assert list(tmp_path.iterdir()) == []
        staged.release()
        await sidestream.save({"t": torch.ones(200_000)}, tmp_path / "c", stager=stager)


async def test_sources_are_let_go_though_the_pending_save_is_kept(tmp_path: Path) -> None:
    tensor = torch.zeros(1000)
    gone = weakref.ref(tensor)
    pending = sidestream.async_save({"t": tensor}, tmp_path / "c")
    del tensor
    await pending.staged
    await pending
    gc.collect()
    assert gone() is None
    assert pending.done()


async def test_a_timed_out_wait_is_not_hearing(tmp_path: Path) -> None:
    (tmp_path / "step-1").write_text("in the way")
    with pytest.raises(CheckpointExistsError):
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            pending = checkpoints.async_save({"n": 1}, step=1)
            waiter = asyncio.ensure_future(_await(pending))
            await asyncio.sleep(0)
            waiter.cancel()
            await asyncio.wait([waiter])
            await pending.ended()


async def _await(pending: sidestream.PendingSave) -> sidestream.SaveInfo:
    return await pending


def test_a_loop_that_closes_at_once(tmp_path: Path) -> None:
    """The save needs no loop of the caller."""
    kept: list[Any] = []

    async def main() -> None:
        kept.append(sidestream.AsyncStager(budget_bytes=1 << 20))
        kept.append(sidestream.async_save({"t": torch.ones(1000)}, tmp_path / "c", stager=kept[0]))

    asyncio.run(main())
    stager, pending = kept
    assert pending.result(60).url == str(tmp_path / "c")
    asyncio.run(all_returned(stager))
    stager.close()


async def test_cancelled_before_its_first_step(tmp_path: Path, stager: sidestream.AsyncStager) -> None:
    pending = sidestream.async_save({"t": torch.ones(1000)}, tmp_path / "c", stager=stager)
    assert pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    await pending.staged
    await pending.ended()
    assert list(tmp_path.iterdir()) == []


async def test_a_freed_storage_is_refused(tmp_path: Path, stager: sidestream.AsyncStager) -> None:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedTensorError, match=r"w: .*freed or shrunk"):
        await sidestream.async_save({"w": tensor}, tmp_path / "c", stager=stager)
    with pytest.raises(UnsupportedTensorError, match=r"w: .*freed or shrunk"):
        await stager.stage({"w": tensor})


async def test_rebinding_and_freeing_while_a_stage_is_under_way(tmp_path: Path) -> None:
    engine = GatedEngine()
    async with sidestream.AsyncStager(budget_bytes=1 << 24, engine=engine) as stager:
        parameter, freed = nn.Parameter(torch.ones(1 << 16)), torch.ones(1 << 16)
        first = sidestream.async_save({"w": parameter}, tmp_path / "a", stager=stager)
        second = sidestream.async_save({"w": freed}, tmp_path / "b", stager=stager)
        staged = stager.stage({"w": parameter})
        parameter.data = torch.zeros(1)
        freed.untyped_storage().resize_(0)
        engine.gate.set()
        await first
        with pytest.raises(UnsupportedTensorError, match="freed or shrunk"):
            await second
        assert ((await staged)["w"] == 1).all()
        (await staged).release()
    assert (await (await sidestream.open_checkpoint(tmp_path / "a")).tensor("w") == 1).all()


async def test_a_save_that_queues_behind_another_stage_keeps_its_deadline(tmp_path: Path) -> None:
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        staged = await stager.stage({"t": torch.zeros(200_000)})
        waiting = stager.stage({"t": torch.ones(200_000)})
        while stager.statistics().waiters == 0:
            await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError):
            await sidestream.save(
                {"t": torch.ones(10)}, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(timeout_s=0.2)
            )
        assert not waiting.done()
        staged.release()
        (await waiting).release()
    assert list(tmp_path.iterdir()) == []


class Versioned(nn.Module):
    """Its weights were transposed in version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


async def test_a_module_is_told_the_version_of_its_layout(tmp_path: Path) -> None:
    module, fresh = Versioned(), Versioned()
    await sidestream.save({"m": module}, tmp_path / "c")
    await sidestream.load({"m": fresh}, tmp_path / "c")
    assert torch.equal(module.weight, fresh.weight)


async def test_a_forked_child_keeps_what_it_saw(stager: sidestream.AsyncStager) -> None:
    staged = await stager.stage({"t": torch.ones(1000)})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0 if (staged["t"] == 1).all() else 3)
    staged["t"].fill_(7)
    os.write(write, b"x")
    _, status = os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    assert os.waitstatus_to_exitcode(status) == 0


views = st.tuples(
    st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex64]), st.integers(0, 60), st.integers(1, 60)
)


@given(st.lists(views, min_size=1, max_size=6))
async def test_overlapping_views_of_any_dtypes(parts: list[tuple[torch.dtype, int, int]]) -> None:
    raw = torch.arange(1024, dtype=torch.int32).to(torch.uint8)
    tensors = []
    for dtype, first, count in parts:
        start = first * dtype.itemsize
        tensors.append(raw[start : start + count * dtype.itemsize].view(dtype))
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        staged = await stager.stage({"views": tensors})
        assert_same(tensors, staged["views"])
        del staged


@contextlib.asynccontextmanager
async def own_write_threads() -> AsyncIterator[None]:
    """Make the saves in this context write in threads of their own, and wait until those have ended."""
    with mock.patch.dict(threads._pools):
        threads._pools.pop("write", None)
        yield
        used = threads.write_threads()
    used.close()
    assert await asyncio.to_thread(used.join, threads.Deadline.after(60))


async def until_ended() -> None:
    """Wait until no operation is in progress."""
    await in_operation(lambda: asyncio.sleep(0), "test")  # after what was posted before
    while supervised_tasks():
        await asyncio.sleep(0)


async def test_a_save_that_cannot_be_launched_leaves_nothing(tmp_path: Path) -> None:
    stager = sidestream.AsyncStager()
    await stager.aclose()
    async with own_write_threads():
        with pytest.raises(ClosedError):
            sidestream.async_save({"w": torch.zeros(4)}, tmp_path / "c", stager=stager)
    assert not list(tmp_path.iterdir())


async def test_a_save_that_is_interrupted_while_it_settles_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    async with sidestream.AsyncStager(mode="eager") as stager:
        monkeypatch.setattr(stager, "wait_if_eager", interrupted)  # a signal, while it blocks
        with pytest.raises(KeyboardInterrupt):
            sidestream.async_save({"w": torch.zeros(1 << 20)}, tmp_path / "c", stager=stager)
        await until_ended()
        assert not list(tmp_path.iterdir())
        await all_returned(stager)


async def test_a_second_interrupt_while_a_save_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the interpreter looks for signals while the stage, which is queued, gives way: its thread ends."""
    left = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "return", "c_return") and frame.f_code.co_filename == staging.__file__:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    def interrupted(*_: Any) -> None:
        sys.setprofile(profile)
        raise KeyboardInterrupt

    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        held = await stager.stage({"t": torch.zeros(200_000)})
        waiting = stager.stage({"t": torch.ones(200_000)})
        while stager.statistics().waiters == 0:
            await asyncio.sleep(0)
        with monkeypatch.context() as patched:
            patched.setattr(stager, "enqueue", interrupted)
            for step in itertools.count(1):
                left = step
                async with own_write_threads():
                    try:
                        with pytest.raises(KeyboardInterrupt):
                            sidestream.async_save({"w": torch.zeros(4)}, tmp_path / "queued", stager=stager)
                    finally:
                        sys.setprofile(None)
                if left > 0:
                    break
        assert step > 10
        held.release()
        (await waiting).release()
    assert list(tmp_path.iterdir()) == []


AT_THE_END = """
    import ctypes, sys, types
    # As an extension module can, keep modules alive to the end. They are cleared then, the newest first.
    helper = sys.modules["helper"] = types.ModuleType("helper")
    import asyncio, sidestream, torch
    async def main():
        good = sidestream.async_save({"a": torch.ones(3)}, "c")
        await good.ended()
        bad = sidestream.async_save({"a": torch.ones(3)}, "c")
        await bad.ended()
        opened = await sidestream.open_checkpoint("c")
        mapped = await opened.state_dict(memory="mapped")
        stager = sidestream.AsyncStager()
        staged = await stager.stage({"a": torch.ones(3)})
        return good, bad, opened, mapped, stager, staged
    helper.kept = asyncio.run(main())
    for name, one in list(sys.modules.items()):
        if name == "helper" or name.startswith("sidestream"):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
"""


def test_what_a_program_keeps_to_its_end_ends_quietly_there(tmp_path: Path) -> None:
    """Apart from the error of a save that nobody has retrieved."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(AT_THE_END)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"saving {tmp_path / 'c'} failed, and the error was not retrieved: CheckpointExistsError: ")
    assert done.returncode == 0
