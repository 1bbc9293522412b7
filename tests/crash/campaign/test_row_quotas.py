"""A quota of the kernel's that is exhausted before or during a save: a typed error, and nothing else has changed.

The quota is one of btrfs, which also refuses names: directories, files and the rename that publishes. ext4, xfs and
tmpfs have quotas in fewer kernels.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _judge import Oracle
from _look import attempts_in
from _mounts import Disk
from _operations import Intercept, Operation
from _quota import Quota, quota
from _rows import Row, Size, spread
from _seeded import make_state

import sidestream
from sidestream import errors
from sidestream._worker.client import worker_for
from sidestream.options import WriterChoice

SHORT, LONG = 120, 2_000
WRITERS = ("threads", "a writer process")
LIMITS = (1 << 15, 1 << 20)
"""Bytes: from less than the first step takes to more than two of them do."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    made = Disk("btrfs", tmp_path)
    made.renew()
    with made.mount() as place:
        yield place


@pytest.fixture(params=WRITERS)
def saver(request: pytest.FixtureRequest) -> Iterator[WriterChoice]:
    if request.param == "threads":
        yield "thread"
        return
    options = sidestream.WriterProcess(retries=0)
    yield options
    worker_for(options).close()


@dataclass
class Bench:
    """A run with step 1 on a disk with a quota; step 2 is saved when the quota is exhausted."""

    quota: Quota
    stager: sidestream.AsyncStager
    saver: WriterChoice
    judge: Oracle

    async def prepare(self) -> Path:
        run = self.quota.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        self.quota.lift()
        self.quota.settle()
        await self.save(run, 1)
        return run

    async def save(self, run: Path, step: int) -> None:
        async with sidestream.Checkpointer(
            run, stager=self.stager, save=sidestream.SaveOptions(writer=self.saver)
        ) as checkpoints:
            await checkpoints.save(make_state(10 + step), step=step)

    async def exhausted_at(self, at: int) -> tuple[str, list[Any]]:
        """At operation ``at`` of this process. Returns what the save was doing, "" if it was done."""
        run = await self.prepare()

        def hook(operation: Operation) -> Any:
            if operation.index == at:
                self.quota.exhaust()
            return operation.call()

        with Intercept(run, hook).installed():
            return await self.refused(run)

    async def limited_to(self, nbytes: int) -> tuple[str, list[Any]]:
        run = await self.prepare()
        self.quota.limit(nbytes)
        return await self.refused(run)

    async def refused(self, run: Path) -> tuple[str, list[Any]]:
        """Save step 2, which may be refused; see what stands there, before and after the quota is lifted."""
        wrong: list[Any] = []
        seeds, doing = {"step-1": 11, "step-2": 12}, ""
        try:
            await self.save(run, 2)
        except errors.NoSpaceError as error:
            del seeds["step-2"]
            doing = str(error).partition("] ")[2].partition(" failed")[0]
            if error.errno != errno.EDQUOT or str(run) not in str(error):
                wrong.append(f"a quota is told as {error!r}")
        except Exception as error:
            del seeds["step-2"]
            doing = "something else"
            wrong.append(f"a quota is told as {error!r}")
        wrong += [f"left behind: {one}" for one in attempts_in(run)]
        found = self.judge.look(run)
        wrong += found.violations + ([] if found.seeds == seeds else [f"found {found.seeds} instead of {seeds}"])
        self.quota.lift()
        try:
            await self.save(run, 3)
        except Exception as error:
            wrong.append(f"with more quota, the next save failed: {error!r}")
        found, seeds = self.judge.look(run), {**seeds, "step-3": 13}
        return doing, wrong + found.violations + ([] if found.seeds == seeds else [f"{found.seeds} are not {seeds}"])

    async def operations(self) -> int:
        run = await self.prepare()
        with Intercept(run, Operation.call).installed() as intercept:
            await self.save(run, 2)
        return len(intercept.log)


@pytest.fixture
async def bench(disk: Path, saver: WriterChoice, judge: Oracle) -> AsyncIterator[Bench]:
    with ExitStack() as stack:
        limited = stack.enter_context(quota(disk))
        async with sidestream.AsyncStager(budget_bytes=1 << 22) as stager:
            yield Bench(limited, stager, saver, judge)


async def test_a_quota_is_exhausted(bench: Bench, row: Callable[..., Row], size: Size) -> None:
    writer = WRITERS[bench.saver != "thread"]
    counts = row("quotas", writer)
    parts = spread(spread(size.of(SHORT, LONG), WRITERS)[writer], ("operation", "limit"))
    operations = await bench.operations()
    for number in range(parts["operation"]):
        at = 1 + number * operations // parts["operation"]
        doing, wrong = await bench.exhausted_at(at)
        counts.trial(f"exhausted at operation {at}", wrong)
        counts.note(doing or "saved")
    low, high = LIMITS
    for number in range(parts["limit"]):
        nbytes = low + (high - low) * number // parts["limit"]
        doing, wrong = await bench.limited_to(nbytes)
        counts.trial(f"limited to {nbytes} bytes", wrong)
        counts.note(doing or "saved")
    counts.end(at_least=sum(parts.values()))
