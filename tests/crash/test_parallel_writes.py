"""Faults while several threads write one file: one error, no thread that goes on, nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from _look import attempts_in, descriptors
from _operations import Intercept, Operation
from _stepping import busy_threads
from leases import all_returned

import sidestream
from sidestream import errors
from sidestream._runtime.threads import Threads
from sidestream._staging import HostEngine

MIB = 1 << 20


def windowed_state() -> dict[str, torch.Tensor]:
    """A dozen windows of 1 MiB under a budget of 5 MiB."""
    torch.manual_seed(0)
    return {"large": torch.randn(9 * MIB // 4 + 3), "strided": torch.randn(700, 900).t(), "small": torch.randn(50)}


def writes_of(log: list[Operation]) -> int:
    return sum(operation.name == "pwrite" for operation in log)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_fault_at_every_write_of_a_window(number: int, tmp_path: Path) -> None:
    state = windowed_state()
    async with sidestream.AsyncStager(budget_bytes=5 * MIB) as stager:
        with Intercept(tmp_path, lambda operation: operation.call()).installed() as whole:
            await sidestream.save(state, tmp_path / "whole", stager=stager)
        total = writes_of(whole.log)
        assert total >= 12
        for at in range(1, total + 1):
            seen = [0]
            lock = threading.Lock()

            def hook(operation: Operation, at: int = at, seen: list[int] = seen, lock: Any = lock) -> Any:
                with lock:
                    seen[0] += operation.name == "pwrite"
                    fail = operation.name == "pwrite" and seen[0] == at
                if fail:
                    raise OSError(number, "injected")
                return operation.call()

            with Intercept(tmp_path, hook).installed() as intercept:
                with pytest.raises(errors.StorageError) as caught:
                    await sidestream.save(state, tmp_path / "c", stager=stager)
                assert caught.value.errno == number
                del caught
                assert busy_threads() == []
                ended = len(intercept.log)
                await asyncio.sleep(0)
                assert len(intercept.log) == ended, "a thread goes on writing"
            assert not (tmp_path / "c").exists()
            assert attempts_in(tmp_path) == []
            assert descriptors(tmp_path) == []
            await all_returned(stager)
        await sidestream.save(state, tmp_path / "c", stager=stager)
    loaded = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


class Reached:
    """Tells the loop when the n-th write begins."""

    def __init__(self, at: int) -> None:
        self.event = asyncio.Event()
        self._at = at
        self._loop = asyncio.get_running_loop()
        self._seen = 0
        self._lock = threading.Lock()

    def hook(self, operation: Operation) -> Any:
        with self._lock:
            self._seen += operation.name == "pwrite"
            if self._seen == self._at:
                self._loop.call_soon_threadsafe(self.event.set)
        return operation.call()


async def test_cancelled_while_several_threads_write(tmp_path: Path) -> None:
    state = windowed_state()
    async with sidestream.AsyncStager(budget_bytes=5 * MIB) as stager:
        for at in range(1, 12):
            reached = Reached(at)
            with Intercept(tmp_path, reached.hook).installed():
                saving = asyncio.create_task(sidestream.save(state, tmp_path / str(at), stager=stager))
                await reached.event.wait()
                saving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await saving
                assert busy_threads() == []
            assert attempts_in(tmp_path) == []
            assert descriptors(tmp_path) == []
            await all_returned(stager)


async def test_no_helper_writes_any_more_when_one_could_not_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The descriptor is closed then, and its number may be somebody else's."""
    real, submitted = Threads.submit, []
    inside, never, lock = threading.Event(), threading.Event(), threading.Lock()
    writing, at_close = [0], []

    def submit(self: Threads, fn: Any, *arguments: Any) -> Any:
        if getattr(fn, "__name__", "") == "_work":
            submitted.append(fn)
            if len(submitted) == 3:
                assert inside.wait(60)
                raise errors.ClosedError("these threads take no more work")
        return real(self, fn, *arguments)

    def hook(operation: Operation) -> Any:
        if operation.name == "close" and inside.is_set():
            at_close.append(writing[0])
        if operation.name != "pwrite":
            return operation.call()
        with lock:
            writing[0] += 1
        inside.set()
        never.wait(0.3)  # so that a close which does not wait for this write comes before its end
        try:
            return operation.call()
        finally:
            with lock:
                writing[0] -= 1

    monkeypatch.setattr(Threads, "submit", submit)
    with Intercept(tmp_path, hook).installed():
        async with sidestream.AsyncStager(budget_bytes=5 * MIB, engine=HostEngine(threads=1)) as stager:
            with pytest.raises(errors.ClosedError):
                await sidestream.save(windowed_state(), tmp_path / "c", stager=stager)
        assert busy_threads() == []
    assert at_close
    assert set(at_close) == {0}
    assert descriptors(tmp_path) == []
    assert attempts_in(tmp_path) == []
