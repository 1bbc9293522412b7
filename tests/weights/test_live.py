"""``Live``: readings keep their version, and what cannot be read or exchanged says so."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _modules import ELEMENTS, Tell, version
from torch import nn

import sidestream
from sidestream._weights.live import ServedVersion
from sidestream._weights.shells import Shell
from sidestream.errors import (
    ClosedError,
    DtypeMismatchError,
    InvalidOptionError,
    MissingKeysError,
    ShapeMismatchError,
    SkippedError,
    StaleVersionError,
    StateMismatchError,
    UnexpectedKeysError,
)


async def put(live: sidestream.Live, number: int) -> None:
    await live.install(version(number), stamp=str(number), version=number)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            gc.collect()
            await asyncio.sleep(0.005)


# --- what a reading has ---


async def test_before_the_first_version_the_weights_are_those_of_the_module_and_the_stamp_is_none() -> None:
    given = Tell()
    with torch.no_grad():
        given.t0.fill_(7)
    live = sidestream.Live(given)
    with torch.no_grad():
        given.t0.fill_(8)  # the copies are copies
    with live.reading() as reading:
        assert (reading.stamp, reading.version, reading.save_id) == (None, None, "")
        assert reading.module() == {7.0, 0.0}
    assert live.stamp is None


@pytest.mark.parametrize("of", [Tell, lambda: version(0)], ids=["module", "mapping"])
async def test_a_reading_keeps_its_version(of: Callable[[], Any]) -> None:
    live = sidestream.Live(of())
    await put(live, 1)
    with live.reading() as old:
        await put(live, 2)
        with live.reading() as new:
            assert (old.stamp, new.stamp, live.stamp) == ("1", "2", "2")
            assert {one[0].item() for one in old.tensors.values()} == {1.0}
            assert {one[0].item() for one in new.tensors.values()} == {2.0}
            assert live.health().old_versions == 1
            assert re.match(r"1 for \d+ s in MainThread, ", str(live.health().oldest_reading))
    assert (live.health().readings, live.health().old_versions, live.health().oldest_reading) == (0, 0, None)


async def test_nothing_is_copied_and_memory_falls_free() -> None:
    live = sidestream.Live(Tell())
    tensors = version(1)
    address = tensors["t0"].data_ptr()
    await live.install(tensors, stamp="1")
    memory = weakref.ref(tensors.pop("t0").untyped_storage())
    del tensors
    with live.reading() as reading:
        assert reading.module.t0.data_ptr() == address
    for number in range(2, 6):
        await put(live, number)
    gc.collect()
    assert memory() is None


async def test_an_old_version_is_freed_when_its_last_reading_ends_and_not_with_the_next_version() -> None:
    live = sidestream.Live(Tell())
    memories = []

    async def put_and_remember(number: int) -> None:
        tensors = version(number)
        memories.append(weakref.ref(tensors["t0"].untyped_storage()))
        await live.install(tensors, stamp=str(number))

    await put_and_remember(1)
    await put_and_remember(2)
    await until(lambda: memories[0]() is None)
    with live.reading() as reading:
        await put_and_remember(3)
        await put_and_remember(4)
        await until(lambda: memories[2]() is None)
        assert reading.module() == {2.0}
    await until(lambda: memories[1]() is None)
    assert memories[3]() is not None


async def test_tied_names_need_one_tensor_and_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    live = sidestream.Live(model)
    for name in ("0.weight", "1.weight"):
        await live.install({name: torch.eye(3)}, stamp=name)
        with live.reading() as reading:
            assert reading.module[0].weight is reading.module[1].weight
            assert set(reading.tensors) == {"0.weight", "1.weight"}
            assert torch.equal(reading.module[1].weight, torch.eye(3))


async def test_buffers_outside_of_the_state_dict_are_copied_once() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.tensor(3.0), persistent=False)
    live = sidestream.Live(model)
    model.scale.fill_(4)
    for turn in range(4):
        await live.install({"weight": torch.eye(2), "bias": torch.zeros(2)}, stamp=str(turn))
        with live.reading() as reading:
            assert reading.module.scale == 3


async def test_a_module_without_memory() -> None:
    with torch.device("meta"):
        model = Tell()
    live = sidestream.Live(model)
    with live.reading() as reading, pytest.raises(StaleVersionError, match="meta device"):
        reading.module()
    await put(live, 1)
    with live.reading() as reading:
        assert reading.module() == {1.0}


async def test_weights_do_not_record_gradients_and_inference_mode_works() -> None:
    with torch.inference_mode():
        live = sidestream.Live(Tell())
        await put(live, 1)
        with live.reading() as reading:
            assert reading.module() == {1.0}
            assert not any(one.requires_grad for one in reading.module.parameters())
        inside = version(2)
    await live.install(inside, stamp="2")
    await put(live, 3)
    with live.reading() as reading:
        assert reading.module() == {3.0}


# --- what a reading is not for ---


async def test_a_reading_is_used_inside_of_its_block_only() -> None:
    live = sidestream.Live(Tell())
    reading = live.reading()
    with pytest.raises(ClosedError, match="enter the reading first"):
        _ = reading.stamp
    with reading:
        pass
    assert reading.stamp is None
    with pytest.raises(ClosedError, match="has ended"):
        _ = reading.module
    with pytest.raises(ClosedError, match="has ended"):
        _ = reading.tensors
    with pytest.raises(ClosedError, match="entered before"), reading:
        pass
    mapping = sidestream.Live(version(0))
    with mapping.reading() as plain, pytest.raises(InvalidOptionError, match="mapping of tensors"):
        _ = plain.module


async def test_versions_that_are_too_old() -> None:
    live = sidestream.Live(Tell())
    with (
        pytest.raises(StaleVersionError, match="version 2 is not served yet, no version is") as stale,
        live.reading(min_version=2),
    ):
        pass
    assert (stale.value.served, stale.value.wanted) == (None, 2)

    async def wait() -> str | None:
        async with live.reading(min_version=2) as reading:
            return reading.stamp

    waiting = asyncio.create_task(wait())
    await put(live, 1)
    with pytest.raises(StaleVersionError, match="1 is"), live.reading(min_version=2):
        pass
    assert not waiting.done()
    cancelled = asyncio.create_task(wait())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await put(live, 3)
    async with asyncio.timeout(60):
        assert await waiting == "3"
    assert live.health().readings == 0
    assert live._changes == set()


async def test_what_stopped_waiting_for_a_version_leaves_nothing() -> None:
    live = sidestream.Live(Tell())
    waiting = [asyncio.create_task(live.reading(min_version=2).__aenter__()) for _ in range(8)]
    await asyncio.sleep(0)
    assert len(live._changes) == 8
    for one in waiting:
        one.cancel()
    await asyncio.wait(waiting)
    assert live._changes == set()


async def test_wrong_arguments() -> None:
    for wrong in (-1, True, 1.5, None):
        with pytest.raises(InvalidOptionError, match="max_old"):
            sidestream.Live(Tell(), max_old=wrong)  # type: ignore[arg-type]
    live = sidestream.Live(Tell())
    with pytest.raises(InvalidOptionError, match="min_version"):
        live.reading(min_version="2")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="stamp"):
        await live.install(version(1), stamp="")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"t3": None}, MissingKeysError, "t3: missing"),
        ({"x": torch.ones(1)}, UnexpectedKeysError, "x: unknown"),
        ({"t3": torch.ones(2)}, ShapeMismatchError, r"t3: shape \[2\], and \[257\]"),
        ({"t3": torch.ones(ELEMENTS).double()}, DtypeMismatchError, "t3: dtype torch.float64"),
        ({"t3": torch.ones(ELEMENTS, device="meta")}, StateMismatchError, "t3: on meta, and cpu"),
        ({"t3": torch.ones(ELEMENTS).to_sparse()}, StateMismatchError, "t3: is a torch.sparse_coo"),
        ({"t3": None, "t4": torch.ones(1)}, StateMismatchError, "t3: missing\n  t4: shape"),
    ],
)
async def test_weights_that_do_not_fit(change: dict[str, Any], error: type[StateMismatchError], text: str) -> None:
    live = sidestream.Live(Tell())
    await put(live, 1)
    wrong = {name: one for name, one in {**version(2), **change}.items() if one is not None}
    with pytest.raises(error, match=text) as raised:
        await live.install(wrong, stamp="2")
    assert type(raised.value) is error
    assert len(raised.value.offenders) == len(change)
    await put(live, 3)
    with live.reading() as reading:
        assert reading.module() == {3.0}


# --- waiting for readings ---


@pytest.mark.parametrize("max_old", [0, 1, 3])
async def test_a_version_waits_for_readings_and_a_newer_one_takes_its_place(max_old: int) -> None:
    live = sidestream.Live(Tell(), max_old=max_old)
    readings = []
    for number in range(1, max_old + 2):
        await put(live, number)
        readings.append(live.reading())
        readings[-1].__enter__()
    await put(live, 50)  # into the last copy
    first, second = asyncio.create_task(put(live, 51)), None
    while not live.health().waiting:
        await asyncio.sleep(0.001)
    health = live.health()
    assert health.old_versions == max_old + 1
    assert str(health.oldest_reading).startswith("1 for ")
    second = asyncio.create_task(put(live, 52))
    with pytest.raises(SkippedError, match="a newer version"):
        await first
    assert live.stamp == "50"
    assert not second.done()
    threading.Thread(target=readings[0].__exit__, args=(None, None, None)).start()  # of any thread
    async with asyncio.timeout(60):
        await second
    assert live.stamp == "52"
    for one in readings[1:]:
        one.__exit__(None, None, None)
    for number in range(60, 66):
        await put(live, number)


@pytest.mark.parametrize("moment", range(40))
async def test_a_cancel_leaves_a_whole_version_and_no_copy_is_lost(moment: int) -> None:
    live = sidestream.Live(Tell(), max_old=0)
    await put(live, 1)
    held = live.reading().__enter__()
    await put(live, 2)
    waiting = asyncio.create_task(put(live, 3))
    for _ in range(moment % 20):
        await asyncio.sleep(0)
    if moment >= 20:
        held.__exit__(None, None, None)
    for _ in range(moment % 5):
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    if moment < 20:
        held.__exit__(None, None, None)
    async with asyncio.timeout(60):
        for number in (4, 5, 6):
            await put(live, number)
            with live.reading() as last:
                assert last.module() == {float(number)}
                assert last.stamp == str(number)


# --- torture ---


async def torture(swaps: int, readers: int = 3) -> tuple[int, list[str]]:
    """Threads and tasks read while versions are exchanged. Return how many readings there were, and what was wrong."""
    live = sidestream.Live(Tell())
    await put(live, 0)
    wrong: list[str] = []
    counts = [0] * (readers + 1)
    done = threading.Event()

    def check(said: set[float], stamp: str | None) -> None:
        if said != {float(stamp or -1)}:
            wrong.append(f"{sorted(said)} with the stamp {stamp}")

    def read(number: int) -> None:
        while not done.is_set():
            with live.reading() as reading:
                said = reading.module()
                check(said | reading.module(), reading.stamp)
            counts[number] += 1

    async def read_in_a_task() -> None:
        while not done.is_set():
            async with live.reading() as reading:
                said = reading.module()
                await asyncio.sleep(0)
                check(said | reading.module(), reading.stamp)
            counts[readers] += 1

    threads = [threading.Thread(target=read, args=(number,)) for number in range(readers)]
    for one in threads:
        one.start()
    tasks = [asyncio.create_task(read_in_a_task()) for _ in range(8)]
    try:
        for number in range(1, swaps + 1):
            await put(live, number)
    finally:
        done.set()
        for one in threads:
            await asyncio.to_thread(one.join)
        await asyncio.gather(*tasks)
    assert live.health().swaps == swaps + 1
    assert (live.health().readings, live.health().waiting) == (0, False)
    return sum(counts), wrong


async def test_no_reading_is_mixed_or_mislabelled() -> None:
    count, wrong = await torture(200)
    assert wrong == []
    assert count > 200


@pytest.mark.long
async def test_no_reading_is_mixed_or_mislabelled_in_many() -> None:
    count, wrong = await torture(5000)
    assert wrong == []
    assert count > 5000


@contextmanager
def no_pin() -> Iterator[None]:
    """A shell counts as free although readings use it."""
    was = sidestream.Live._is_free
    free: Any = lambda live, shell: not shell.claimed and shell is not live._served.shell  # noqa: E731
    sidestream.Live._is_free = free  # type: ignore[method-assign]
    try:
        yield
    finally:
        sidestream.Live._is_free = was  # type: ignore[method-assign]


@contextmanager
def stamp_at_the_end() -> Iterator[None]:
    """The stamp is that of what is served when it is asked for."""
    was = sidestream.ServedReading.stamp
    sidestream.ServedReading.stamp = property(lambda reading: reading._live.stamp)  # type: ignore[assignment]
    try:
        yield
    finally:
        sidestream.ServedReading.stamp = was  # type: ignore[method-assign]


@contextmanager
def served_too_early() -> Iterator[None]:
    """The reference moves before the shell is filled."""
    was = sidestream.Live._serve

    async def serve(live: sidestream.Live, shell: Shell, tensors: Any, stamp: str, *rest: Any) -> None:
        with live._lock:
            live._served = ServedVersion(shell, stamp, rest[0], rest[1], 0.0)
        await was(live, shell, tensors, stamp, *rest)

    sidestream.Live._serve = serve  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        sidestream.Live._serve = was  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [no_pin, stamp_at_the_end, served_too_early])
async def test_the_torture_finds_a_fault(fault: Callable[[], Any]) -> None:
    with fault():
        for _ in range(50):
            _, wrong = await torture(100)
            if wrong:
                return
    raise AssertionError(f"{fault.__name__} was not found")
