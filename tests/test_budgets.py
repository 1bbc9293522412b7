"""A stage whose bytes fit into the budget never waits, independent of how memory is mapped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_device import FakeDriver
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leases import all_returned

from sidestream._runtime.threads import Deadline, Stop
from sidestream._staging import AsyncStager, DeviceEngine
from sidestream._staging import arena as arena_module
from sidestream._staging.arena import PAGE_BYTES, Allocation, Arena, whole_pages
from sidestream.errors import ArenaExhaustedError

MIB = 1 << 20
MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
SOME = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


# --- the arena, with small units of rounding ---


class Mapped(Arena):
    """Segments of 8 pages at least, rounded up to 2 pages, of which 64 are touched at a time."""

    def __init__(self, pages: int) -> None:
        super().__init__(pages * PAGE_BYTES + 100, segment_bytes=8 * PAGE_BYTES)

    def take(self, sizes: Sequence[int], behind: Sequence[int] = ()) -> list[Allocation]:
        """Leases of so many bytes each, without waiting for any."""
        leases = []
        for index, size in enumerate(sizes):
            coming = [*sizes[index + 1 :], *behind]
            deadline = Deadline.after(60)
            leases.append(self.lease(size, deadline=deadline, stop=Stop(), coming=coming.copy, at_once=True))
        return leases


small_units = patch.multiple(arena_module, _HUGE_PAGE_BYTES=2 * PAGE_BYTES, _GROWTH_BYTES=64 * PAGE_BYTES)
sizes = st.lists(st.integers(1, 60 * PAGE_BYTES), min_size=1, max_size=12)


@given(rounds=st.lists(sizes, min_size=1, max_size=6), extra=st.integers(0, 12))
@MANY
def test_leases_that_fit_together_are_had_together(rounds: list[list[int]], extra: int) -> None:
    needed = max(sum(map(whole_pages, one)) for one in rounds) // PAGE_BYTES
    with small_units:
        arena = Mapped(needed + extra)
        for one in rounds:
            arena.make_way(one)
            leases = arena.take(one)
            assert arena.statistics().reserved_bytes <= arena.budget_bytes
            for lease in leases:
                lease.release()


@given(stage=sizes, count=st.integers(2, 5), extra=st.integers(0, 12))
@MANY
def test_a_budget_for_several_stages_holds_them(stage: list[int], count: int, extra: int) -> None:
    """Stages of the same sizes, one after the other, all of which are held: no rounding takes the room of the next."""
    with small_units:
        arena = Mapped(count * sum(map(whole_pages, stage)) // PAGE_BYTES + extra)
        held = []
        for _ in range(count):
            arena.make_way(stage)
            held.append(arena.take(stage))
        for leases in held:
            for lease in leases:
                lease.release()


@given(
    rounds=st.lists(st.tuples(st.integers(1, 20 * PAGE_BYTES), sizes), min_size=1, max_size=5),
    extra=st.integers(0, 12),
    warm=st.integers(1, 60),
)
@MANY
def test_what_does_not_fit_passes_through_beside_the_scratch(
    rounds: list[tuple[int, list[int]]], extra: int, warm: int
) -> None:
    needed = max(whole_pages(scratch) + max(map(whole_pages, images)) for scratch, images in rounds) // PAGE_BYTES
    with small_units:
        arena = Mapped(needed + extra)
        arena.take([min(warm * PAGE_BYTES, needed * PAGE_BYTES)])[0].release()  # as by reserve()
        for scratch, images in rounds:
            behind = images
            if sum(map(whole_pages, (scratch, *images))) > arena.budget_bytes:
                behind = [max(images)]
            arena.make_way([scratch, *behind])
            held = arena.take([scratch], behind)
            for index in range(len(images)):
                arena.take(images[index : index + 1], images[index + 1 :])[0].release()
            held[0].release()


# --- stages ---


def need(stager: AsyncStager) -> int:
    return stager.statistics().peak_leased_bytes


async def stage(driver: FakeDriver | None, stager: AsyncStager, state: dict[str, Any]) -> None:
    future = stager.stage(state)
    (await (driver.drive(future) if driver is not None else future)).release()
    del future
    await all_returned(stager)


def stager_for(driver: FakeDriver | None, budget_bytes: int, **options: Any) -> AsyncStager:
    engine = None if driver is None else DeviceEngine(driver)
    return AsyncStager(budget_bytes=budget_bytes, engine=engine, **options)


def states_of(driver: FakeDriver | None, shapes: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    def tensor(nbytes: int) -> torch.Tensor:
        made = torch.zeros(nbytes, dtype=torch.uint8)
        return made if driver is None else driver.put(made)

    return [{str(index): tensor(nbytes) for index, nbytes in enumerate(shape)} for shape in shapes]


nbytes = st.one_of(st.integers(1, 5000), st.integers(1 * MIB, 12 * MIB))


@pytest.mark.parametrize("where", ["host", "device"])
@given(shapes=st.lists(st.lists(nbytes, min_size=1, max_size=4), min_size=1, max_size=3), extra=st.integers(0, 9 * MIB))
@SOME
def test_a_stage_that_fits_the_budget_does_not_wait(where: str, shapes: list[list[int]], extra: int) -> None:
    """``when_full="fail"`` raises where it would wait."""

    async def run() -> None:
        driver = FakeDriver() if where == "device" else None
        states = states_of(driver, shapes)
        async with stager_for(driver, 1 << 30) as large:
            for state in states:
                await stage(driver, large, state)
        async with stager_for(driver, need(large) + extra, when_full="fail") as stager:
            for state in states:
                await stage(driver, stager, state)
            assert stager.statistics().reserved_bytes <= stager.budget_bytes

    asyncio.run(run())


@pytest.mark.parametrize("extra", [1, 4, 8, 9])
async def test_a_large_tensor_and_a_small_one(extra: int) -> None:
    driver = FakeDriver()
    (state,) = states_of(driver, [[45 * MIB, 28]])
    async with stager_for(driver, (45 + extra) * MIB, timeout_s=60, when_full="fail") as stager:
        await stage(driver, stager, state)


@pytest.mark.parametrize("extra", [0, 3 * MIB])
async def test_memory_that_was_warmed_otherwise_is_no_hindrance(extra: int) -> None:
    driver = FakeDriver()
    small, large = states_of(driver, [[28], [28, 45 * MIB]])
    budget_bytes = 45 * MIB + 3 * PAGE_BYTES + extra
    async with stager_for(driver, budget_bytes, timeout_s=60, when_full="fail") as stager:
        await stager.reserve(44 * MIB)
        for state in (small, large, small, large):
            await stage(driver, stager, state)


async def test_what_cannot_fit_is_refused_at_once() -> None:
    """Also where it would fit but for the rounding to pages: waiting would not help."""
    driver = FakeDriver()
    (state,) = states_of(driver, [[3 * MIB, 28]])
    async with stager_for(driver, 3 * MIB + PAGE_BYTES, timeout_s=600) as stager:
        with pytest.raises(ArenaExhaustedError, match="are needed at once, the budget is"):
            async with asyncio.timeout(60):
                await driver.drive(stager.stage(state))
