"""Errors at chosen operations, and what has to hold after a save that met one."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _judge import Oracle
from _look import Found, look, seed_of
from _operations import Intercept, Operation
from _seeded import make_state

import sidestream
from sidestream import errors


def fail(operation: Operation, number: int) -> None:
    if operation.name == "close":
        operation.call()  # what close() reports it reports of a descriptor that is gone
    raise OSError(number, os.strerror(number), operation.path)


def once(at: int, number: int) -> Callable[[Operation], Any]:
    """Operation ``at`` alone fails."""

    def hook(operation: Operation) -> Any:
        if operation.index == at:
            fail(operation, number)
        return operation.call()

    return hook


def sticky(at: int, number: int) -> Callable[[Operation], Any]:
    """From ``at`` on nothing can be written; reading and removing work, and what is the beginning of a removal."""

    def hook(operation: Operation) -> Any:
        removing = operation.name == "rename" and "/.retired-" in os.fsdecode(operation.args[1])
        if operation.index == at or (operation.index > at and operation.changes and not removing):
            fail(operation, number)
        return operation.call()

    return hook


def dead(at: int, number: int) -> Callable[[Operation], Any]:
    """From ``at`` on nothing works at all."""

    def hook(operation: Operation) -> Any:
        if operation.index >= at:
            fail(operation, number)
        return operation.call()

    return hook


def late(at: int, number: int) -> Callable[[Operation], Any]:
    """Operation ``at`` takes place and fails all the same, as where the answer of a server is lost."""

    def hook(operation: Operation) -> Any:
        if operation.index != at or operation.name == "close":
            return operation.call()
        if operation.name in ("open", "scandir"):
            return fail(operation, number)
        operation.call()
        raise OSError(number, os.strerror(number), operation.path)

    return hook


def late_and_dead(at: int, number: int) -> Callable[[Operation], Any]:
    """As ``late``, and from then on nothing works at all."""
    first = late(at, number)

    def hook(operation: Operation) -> Any:
        return fail(operation, number) if operation.index > at else first(operation)

    return hook


def short(at: int, number: int) -> Callable[[Operation], Any]:
    """Operation ``at``, and all after it if ``number``, moves fewer bytes than it was asked to."""

    def hook(operation: Operation) -> Any:
        if operation.index != at and not (number and operation.index > at):
            return operation.call()
        if operation.name == "pwrite":
            descriptor, buffer, position = operation.args
            return operation.real(descriptor, buffer[: max(1, len(buffer) // 2)], position)
        if operation.name == "preadv":
            descriptor, buffers, *where = operation.args
            if len(buffers) > 1:  # the first ones in full, and part of one
                part = buffers[len(buffers) // 2][:1]
                return operation.real(descriptor, [*buffers[: len(buffers) // 2], part], *where)
            return operation.real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 2)]], *where)
        return operation.call()

    return hook


class Bench:
    """One run with step 1, and trials of saving with a hook in place, judged here or by the ``oracle``."""

    def __init__(self, folder: Path, stager: sidestream.AsyncStager, oracle: Oracle | None = None) -> None:
        self.folder = folder
        self.stager = stager
        self.oracle = oracle
        self.run = folder / "trial" / "run"
        self.leased_before = 0
        self.saved = False

    async def prepare(self) -> None:
        async with sidestream.Checkpointer(self.folder / "base", stager=self.stager) as checkpoints:
            await checkpoints.save(make_state(11), step=1)

    async def save(
        self, hook: Callable[[Operation], Any], step: int = 2
    ) -> tuple[BaseException | None, str | None, Intercept]:
        """The error, the outcome (None: no save was started), and what was called."""
        shutil.rmtree(self.folder / "trial", ignore_errors=True)
        shutil.copytree(self.folder / "base", self.run)
        self.leased_before = self.stager.statistics().leased_bytes
        intercept = Intercept(self.run, hook)
        pending = None
        self.saved = False
        try:
            with intercept.installed():
                async with sidestream.Checkpointer(self.run, stager=self.stager) as checkpoints:
                    pending = checkpoints.async_save(make_state(12), step=step)
                    await pending
                    self.saved = True  # what is raised after this is told of the pass of retention that follows
        except BaseException as error:
            return error, pending.outcome if pending else None, intercept
        return None, pending.outcome, intercept

    async def judge(
        self, error: BaseException | None, outcome: str | None, *, removable: bool = True, step: int = 2
    ) -> list[str]:
        """What is wrong after a trial that ended like that."""
        forget_frames(error)
        found = await self.find()
        wrong = list(found.violations)
        if error is None:
            wrong += [] if outcome == "committed" else [f"succeeded, but its outcome is {outcome}"]
        elif not isinstance(error, errors.SidestreamError):
            wrong.append(f"an untyped error: {type(error).__name__}: {error}")
        elif self.saved:
            wrong += [] if outcome == "committed" else [f"succeeded, but its outcome is {outcome}"]
        elif (outcome == "committed", outcome == "unknown") != (
            isinstance(error, errors.NotDurableError),
            isinstance(error, errors.OutcomeUnknownError),
        ):
            wrong.append(f"{type(error).__name__} with outcome {outcome}")
        new = "step-1.g2" if step == 1 else f"step-{step}"
        seeds = {"step-1": 11, new: 12} if outcome == "committed" else {"step-1": 11}
        if found.seeds != seeds and outcome != "unknown":
            wrong.append(f"outcome {outcome}, but visible are {found.seeds}")
        if found.attempts and removable:
            wrong.append(f"left behind: {found.attempts}")
        if found.attempts and outcome == "absent" and not any("removed" in note for note in notes(error)):
            wrong.append("what was left behind is not told")
        gc.collect()
        leased = self.stager.statistics().leased_bytes - self.leased_before
        if leased > 0:
            wrong.append(f"{leased} bytes are still leased")
        async with sidestream.Checkpointer(
            self.run, stager=self.stager, save=sidestream.SaveOptions(durability="flush")
        ) as checkpoints:
            info = await checkpoints.save(make_state(22), step=2)
        if await seed_of(Path(info.url)) != 22:
            wrong.append("the next save did not work")
        return wrong

    async def find(self) -> Found:
        return self.oracle.look(self.run) if self.oracle is not None else await look(self.run)


def forget_frames(error: BaseException | None) -> None:
    """The frames of a traceback hold what they worked with, those of ``Intercept`` too."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.with_traceback(None)
        error = error.__cause__ or error.__context__


def notes(error: BaseException | None) -> list[str]:
    return getattr(error, "__notes__", [])
