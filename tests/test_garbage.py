"""Full collections wait while a load holds many objects, and for nothing else."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sidestream
from sidestream import _garbage
from sidestream._garbage import collected_later, let_go


@pytest.fixture(autouse=True)
def enabled_again() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


async def test_put_off_within_and_only_there() -> None:
    with collected_later():
        assert not gc.isenabled()
        with collected_later():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


async def test_a_program_without_collection_keeps_it_off() -> None:
    gc.disable()
    with collected_later():
        pass
    assert not gc.isenabled()


async def test_put_off_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_garbage, "_LIMIT_S", 0.01)
    with collected_later():
        assert not gc.isenabled()
        while not gc.isenabled():
            await asyncio.sleep(0.001)
        with collected_later():
            assert not gc.isenabled()
        assert gc.isenabled()
    assert gc.isenabled()


async def test_not_put_off_in_a_forked_child() -> None:
    with collected_later():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0


async def test_loads_give_it_back_however_they_end(tmp_path: Path) -> None:
    state = {"t": torch.ones(1000)}
    await sidestream.save(state, tmp_path / "c")
    seen: list[bool] = []
    await sidestream.load(state, tmp_path / "c", progress=lambda *_: seen.append(gc.isenabled()))
    assert not any(seen)
    assert gc.isenabled()
    with pytest.raises(sidestream.errors.Mismatch):
        await sidestream.load({"t": torch.ones(3)}, tmp_path / "c")
    assert gc.isenabled()
    task = asyncio.ensure_future(sidestream.load(state, tmp_path / "c"))
    while gc.isenabled():
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert gc.isenabled()


def test_containers_are_emptied() -> None:
    numbers, names = list(range(100)), dict.fromkeys("abc")
    let_go(numbers, names)
    assert (numbers, names) == ([], {})
