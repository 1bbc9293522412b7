"""Saves over ranks that overlap, with ``when_full="latest"``."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _cases import ROWS, die, placed, run, same
from held import HeldStager
from keywords import for_run, for_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import sidestream
from sidestream.errors import RankFailuresError, SkippedError

PATIENCE_S = 60.0


class Held(HeldStager):
    """A stager whose stages end when the test says so."""

    @property
    def begun(self) -> list[int]:
        """The steps of the saves that this rank has begun."""
        return [state["step"] for state in self.held]

    def let_go(self, step: int | None = None) -> None:
        for number, begun in enumerate(self.begun):
            if step in (None, begun):
                super().let_go(number)


class Counted:
    """An object in a state, that knows how often it was asked for what it holds."""

    def __init__(self) -> None:
        self.asked = 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"n": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Rank:
    """One rank, which tells the others how far it has come."""

    def __init__(self, rank: int, world: int, directory: Path) -> None:
        self.rank = rank
        self.world = world
        self.mesh: DeviceMesh = init_device_mesh("cpu", (world,))
        self.held = Held()
        self._desk = directory

    def state(self, step: int) -> dict[str, Any]:
        return {"w": placed(ROWS + step, self.mesh, Shard(0)), "step": step}

    def run_in(self, directory: Path, **options: Any) -> sidestream.Checkpointer:
        self._desk, self.held = directory, Held()
        directory.mkdir(exist_ok=True)
        options = {"when_full": "latest", "slots": 1, "timeout_s": PATIENCE_S, "stager": self.held, **options}
        return sidestream.Checkpointer(directory / "run", **for_run(**options))

    async def save(self, checkpoints: sidestream.Checkpointer, step: int, **options: Any) -> sidestream.PendingSave:
        return checkpoints.async_save(self.state(step), step=step, **for_save(**options))

    def tell(self, word: str) -> None:
        (self._desk / f"{word}-{self.rank}").touch()

    async def heard(self, word: str, ranks: list[int] | None = None) -> None:
        expected = [self._desk / f"{word}-{rank}" for rank in (range(self.world) if ranks is None else ranks)]
        await until(lambda: all(path.exists() for path in expected), word)

    async def meet(self, word: str) -> None:
        self.tell(word)
        await self.heard(word)

    async def begun(self, *steps: int) -> None:
        await until(lambda: self.held.begun == list(steps), f"{steps}, and not {self.held.begun}")

    async def first_and_second(self, checkpoints: sidestream.Checkpointer) -> list[sidestream.PendingSave]:
        """One that is held back on all ranks, and one that waits for it."""
        first = await self.save(checkpoints, 1)
        await self.begun(1)
        second = await self.save(checkpoints, 2)
        await self.meet("queued")
        return [first, second]


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


async def outcome(pending: sidestream.PendingSave) -> Any:
    """How it ended, and that ``staged`` did."""
    told: Any
    try:
        told = (await pending).step
    except RankFailuresError as failures:
        told = [[one.rank, one.kind] for one in failures.failures]
    except (SkippedError, asyncio.CancelledError) as error:
        told = type(error).__name__
    try:
        await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(pending.staged)), PATIENCE_S)  # type: ignore[arg-type]
    except RankFailuresError:
        assert isinstance(told, list)
    assert (pending.outcome == "committed") == isinstance(told, int)
    return told


# --- which of them go -----------------------------------------------------------------------------------------------


def overtaken(rank: int, world: int, directory: Path) -> list[Any]:
    """Each rank is the slow one once: it calls its second save when the others have called four, and its last two when
    the second has begun."""
    one = Rank(rank, world, directory)

    async def save(slow: int) -> list[Any]:
        others = [other for other in range(world) if other != slow]
        counted = Counted()
        pendings: list[sidestream.PendingSave] = []
        async with one.run_in(directory / f"slow{slow}") as checkpoints:

            async def call(*steps: int) -> None:
                for step in steps:
                    state = {**one.state(step), **({"counted": counted} if step == 3 else {})}
                    pendings.append(checkpoints.async_save(state, step=step, metadata={"n": step}))

            await call(1)
            await one.begun(1)
            if rank == slow:
                await one.heard("called", others)
                await call(2)
            else:
                await call(2, 3, 4)  # and waits for nobody
                one.tell("called")
            one.held.let_go(1)
            told = [await outcome(pendings[0])]
            await one.begun(1, 2)  # on all: not every rank had called a newer one
            await one.meet("second")
            if rank == slow:
                await call(3, 4)
            told.append(await outcome(pendings[2]))
            assert counted.asked == 0
            one.held.let_go(2)
            told.append(await outcome(pendings[1]))
            await one.begun(1, 2, 4)
            one.held.let_go(4)
            told.append(await outcome(pendings[3]))
            target = one.state(9)
            await checkpoints.restore(target)
            same(target, one.state(4))
            return [*told, await checkpoints.steps(), await checkpoints.read_metadata()]

    return [run(save(slow)) for slow in range(world)]


def two_at_once(rank: int, world: int, directory: Path) -> list[Any]:
    """Through one stager of ours with little memory, without a word between the calls; the last one is always saved."""
    one = Rank(rank, world, directory)

    async def save() -> list[Any]:
        async with (
            sidestream.AsyncStager(budget_bytes=1 << 20) as stager,
            one.run_in(directory / "run", slots=2, stager=stager) as checkpoints,
        ):
            pendings = []
            for step in range(12):
                pendings.append(await one.save(checkpoints, step))
                if (step + rank) % 3 == 0:
                    await pendings[-1].staged
            told = [await outcome(pending) for pending in pendings]
            target = one.state(99)
            restored = await checkpoints.restore(target)
            same(target, one.state(11))
            assert await checkpoints.steps() == [step for step in told if step != "SkippedError"]
            return [told, restored]

    return list(run(save()))


def one_step(rank: int, world: int, directory: Path) -> list[int]:
    """Two saves of one step that go on at once are two generations of it."""
    one = Rank(rank, world, directory)

    async def save() -> list[int]:
        async with one.run_in(directory / "run", slots=2) as checkpoints:
            pendings = [await one.save(checkpoints, 1), await one.save(checkpoints, 1)]
            await one.begun(1, 1)
            one.held.let_go(1)
            return [(await pending).generation for pending in pendings]

    return list(run(save()))


# --- a save that waits, and what becomes of it otherwise -------------------------------------------------------------


def killed(rank: int, world: int, directory: Path, who: int) -> list[Any]:
    """While the second save waits, and the first one is held back. The others learn of it for both."""
    one = Rank(rank, world, directory)

    async def save() -> list[Any]:
        checkpoints = one.run_in(directory / "run")
        await checkpoints.__aenter__()
        first, second = await one.first_and_second(checkpoints)
        if rank == who:
            die()
        started = time.monotonic()
        told = [await outcome(second), time.monotonic() - started]
        one.held.let_go(1)
        told.append(await outcome(first))
        await checkpoints.aclose()
        return told

    return list(run(save()))


def in_the_queue(rank: int, world: int, directory: Path, who: int) -> dict[str, Any]:
    """What one rank does, or fails with, while the second save waits: the first is finished, and a third one too."""
    one = Rank(rank, world, directory)

    async def after(name: str, happens: Any) -> list[Any]:
        async with one.run_in(directory / name) as checkpoints:
            first, second = await one.first_and_second(checkpoints)
            told = [await happens(checkpoints, first, second)]
            one.held.let_go(1)
            told.append(await outcome(first))
            await one.meet("before the third")
            third = await one.save(checkpoints, 3)
            await until(lambda: one.held.begun[-1] == 3, "the third")
            one.held.let_go(3)
            return [*told, await outcome(third), await checkpoints.steps()]

    async def cancels(_: Any, first: sidestream.PendingSave, second: sidestream.PendingSave) -> Any:
        if rank == who:
            assert second.cancel()
        return await outcome(second)

    async def calls_badly(checkpoints: Any, first: Any, second: sidestream.PendingSave) -> Any:
        """The second goes on."""
        bad: dict[str, Any] = {"metadata": {"n": object()}} if rank == who else {}
        try:
            told = await outcome(await one.save(checkpoints, 5, **bad))
        except RankFailuresError as failures:
            assert rank == who
            told = [[one.rank, one.kind] for one in failures.failures]
        one.held.let_go(1)
        await until(lambda: one.held.begun == [1, 2], "the second")
        one.held.let_go(2)
        return [told, await outcome(second)]

    async def means_another(checkpoints: Any, first: Any, second: sidestream.PendingSave) -> Any:
        other = await outcome(await one.save(checkpoints, 6 if rank == who else 5))
        one.held.let_go(1)
        await until(lambda: one.held.begun == [1, 2], "the second")
        one.held.let_go(2)
        return [other, await outcome(second)]

    ways = {"cancels": cancels, "calls_badly": calls_badly, "means_another": means_another}
    return {name: run(after(name, happens)) for name, happens in ways.items()}


def cannot_begin(rank: int, world: int, directory: Path) -> list[Any]:
    """What one rank wants to save cannot be saved, as turns out when it is its turn. Closing waits for what waits."""
    one = Rank(rank, world, directory)

    async def save() -> list[Any]:
        async with one.run_in(directory / "run", stager=None) as checkpoints:
            await one.save(checkpoints, 1)
            bad = {**one.state(2), **({"x": object()} if rank == 1 else {})}
            failed = await outcome(checkpoints.async_save(bad, step=2))
            last = await one.save(checkpoints, 3)
        return [failed, await outcome(last)]

    return list(run(save()))


# --- a failure of which nobody has heard -----------------------------------------------------------------------------


def dropped(rank: int, world: int, directory: Path) -> dict[str, Any]:
    """By each policy: nobody awaits a save that fails on all ranks, in the background. The next one raises it, the one
    after that is made."""
    one = Rank(rank, world, directory)

    async def save(overlap: str) -> list[Any]:
        async with one.run_in(directory / overlap, when_full=overlap, stager=None) as checkpoints:
            bad = {**one.state(1), **({"x": object()} if rank == 1 else {})}
            await (checkpoints.async_save(bad, step=1)).ended()
            told: list[Any] = []
            try:
                await (await one.save(checkpoints, 2))
            except RankFailuresError as failures:
                told.extend({(one.step, one.kind, "UnsafeObjectError" in one.text) for one in failures.failures})
            return [*told, await outcome(await one.save(checkpoints, 3))]

    return {overlap: run(save(overlap)) for overlap in ("wait", "skip", "fail", "latest")}


def told_by_turns(rank: int, world: int, directory: Path) -> list[Any]:
    """The calls of rank 1 fail; nobody awaits anything."""
    one = Rank(rank, world, directory)
    told: list[Any] = []

    async def save() -> None:
        async with one.run_in(directory / "run", stager=None) as checkpoints:
            for step in range(1, 6):
                bad: dict[str, Any] = {"metadata": {"n": object()}} if rank == 1 and step in (1, 4) else {}
                pending = await one.save(checkpoints, step, **bad)
                await pending.ended()
                told.append(pending.outcome)
                del pending
                await one.meet(f"after {step}")
                told.append(len(checkpoints.health().failures))

    try:
        run(save())
    except RankFailuresError as failures:
        told.append(sorted({failure.step for failure in failures.failures}))
    return told


def loop_closes(rank: int, world: int, directory: Path) -> list[Any]:
    """On one rank, with a save that is held back and one that waits."""
    one = Rank(rank, world, directory)
    pendings: list[sidestream.PendingSave] = []

    async def save() -> list[Any]:
        checkpoints = one.run_in(directory / "run")
        await checkpoints.__aenter__()
        pendings.extend(await one.first_and_second(checkpoints))
        if rank == 1:
            return []
        one.held.let_go(1)
        told = [await outcome(pendings[0]), await outcome(pendings[1])]
        await checkpoints.aclose()
        return told

    told = run(save())
    if rank == 1:
        one.held.let_go(1)
        told = [run(outcome(pending)) for pending in pendings]
    return list(told)


def never_called(rank: int, world: int, directory: Path) -> list[Any]:
    """A rank that does not come to the call in time; it is told so when it does."""
    one = Rank(rank, world, directory)

    async def save() -> list[Any]:
        async with one.run_in(directory / "before", stager=None) as checkpoints:
            await one.save(checkpoints, 1)
        async with one.run_in(directory / "run", timeout_s=1.0, stager=None) as checkpoints:
            if rank == 1:
                await one.heard("know", [0, 2])
            told = await outcome(await one.save(checkpoints, 1))
            await one.meet("know")
            return list(told)

    return list(run(save()))


def told_to_end(rank: int, world: int, directory: Path) -> list[Any]:
    """With one save held back and one that waits: what is saved then is not skipped, whatever comes after it."""
    one = Rank(rank, world, directory)

    async def train() -> list[Any]:
        async with one.run_in(directory / "run") as checkpoints:
            asked: list[int] = []

            def last() -> tuple[dict[str, Any], int]:
                asked.append(7)
                return one.state(7), 7

            first, second = await one.first_and_second(checkpoints)
            checkpoints.on_preemption(save=last, then="stay", grace_s=PATIENCE_S)
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: bool(asked), "the signal")
            third = await one.save(checkpoints, 3)
            told = [await outcome(second)]
            for step in (1, 7, 3):
                await until(lambda step=step: step in one.held.begun, str(step))  # type: ignore[misc]
                one.held.let_go(step)
            return [*told, await outcome(first), await outcome(third), one.held.begun]

    async def steps() -> list[int]:
        async with sidestream.Checkpointer(directory / "run" / "run") as checkpoints:
            return await checkpoints.steps()

    return [*run(train()), run(steps())]
