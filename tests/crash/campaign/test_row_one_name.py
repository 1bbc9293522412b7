"""One name, again and again: a checkpoint that is replaced or removed, exports beside steps, and their sidecar files.

Whatever happens, old or new is there: never neither, never a mixture. Modelled power cuts of the same work are in
``test_row_model_cut.py``, writer processes that are killed in ``test_row_saver.py``.
"""

from __future__ import annotations

import errno
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _injecting import dead, forget_frames, late, late_and_dead, notes, once, short, sticky
from _judge import Oracle
from _look import Found
from _mounts import Disk, mounted
from _one_name import AFTER, BEFORE, GONE, WORK, Doing, judged, left_behind, prepare
from _operations import Intercept, Operation
from _quota import Quota, quota
from _rows import Row, Size, spread
from _trials import Told, Trials

import sidestream
from sidestream import errors

KILLS = (1_000, 20_000)
FAULTS = (1_200, 20_000)
CUTS = (200, 3_000)
DISKS = (60, 400)
QUOTAS = (60, 1_000)
RECOVERED = 4
"""Of so many kills, one is followed by the same work once more."""
HIDDEN = re.compile(r"(run|exports)/\.(retired-[0-9a-f]{32}|[a-z0-9.-]+\.[0-9a-f]{32}\.partial)")
"""What the documentation says a killed process leaves."""


# --- kills ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORK)
async def test_one_name_killed_at_every_operation(
    name: str, place: Path, children: Trials, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    counts, random = row("one name: kill -9", name), size.random("one name", name)
    base, root = place / "base", place / "root"
    await prepare(base)

    def trial(at: int, when: str, **options: Any) -> Told:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(base, root)
        return children.run(root=root, run=root / "run", work="one_name", what=name, at=at, when=when, **options)

    whole = trial(0, "before")
    operations = whole.get("operations")
    assert (whole.exit, whole.acked) == (0, AFTER[name])
    assert {"a removal": "rename", "an export": "rename"}.get(name, "exchange") in operations
    points = [(at, "before") for at in whole.points(size.quick)]
    points += [(at, "after") for at, one in enumerate(operations, 1) if one in ("rename", "exchange")]
    total = spread(size.of(*KILLS), WORK)[name]
    while len(points) < total:
        points.append((random.randint(1, len(operations)), random.choice(["before", "after"])))
    reached = 0
    for number, (at, when) in enumerate(points):
        told = trial(at, when, budget_bytes=random.choice([1 << 20, 1 << 26]))
        reached += told.exit == -signal.SIGKILL
        wrong = judged(judge.look(root / "run", stock=number % 8 == 0), root, told.acked, AFTER[name])
        wrong += [f"left behind: {one}" for one in left_behind(root) if not HIDDEN.fullmatch(one)]
        if number % RECOVERED == 0:
            wrong += recovered(name, root, children, judge)
            counts.note("done again after the kill")
        counts.trial((at, when, told.reports), wrong)
    counts.note("killed", reached)
    counts.end(at_least=max(total, len(points)))
    assert reached >= len(points) * 0.8


def recovered(name: str, root: Path, children: Trials, judge: Oracle) -> list[str]:
    """What is wrong after the same work has been done once more, which has to succeed."""
    again = children.run(root=root, run=root / "run", work="one_name", what=name)
    missing = name == "a removal" and (again.error or {}).get("error") == "CheckpointNotFoundError"
    if again.error is not None and not missing:
        return [f"done again, it failed: {again.error}"]
    found, after = judge.look(root / "run"), dict(AFTER[name])
    if name in ("an export", "an export over another"):  # a killed process may have committed a generation
        after.update({one: seed for one, seed in found.seeds.items() if one.startswith("step-") and one != "step-1"})
    return [f"done again: {one}" for one in judged(found, root, {**after, **again.acked}, after)]


# --- errors -----------------------------------------------------------------------------------------------------------

WAYS: list[tuple[Callable[[int, int], Any], int]] = [
    *((way, number) for way in (once, sticky) for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
    *((way, errno.EIO) for way in (dead, late, late_and_dead)),
    (once, errno.ENOENT),
    (short, 0),
    (short, 1),
]
UNTIDY = (sticky, dead, late_and_dead)
"""After these nothing can be removed any more."""


class Faulty:
    """One work with a hook in place, below ``intercepted``."""

    def __init__(self, name: str, place: Path, stager: sidestream.AsyncStager, judge: Oracle) -> None:
        self.name, self.place, self.stager, self.judge = name, place, stager, judge
        self.root = place / "root"
        self.exports = "export" in name
        self.acked: dict[str, int] = {}

    async def run(self, hook: Callable[[Operation], Any]) -> tuple[Exception | None, Intercept]:
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.place / "base", self.root)
        self.acked = {}
        intercept = Intercept(self.root / ("exports" if self.exports else "run"), hook)
        with intercept.installed():
            try:
                await WORK[self.name](self.root / "run", Doing(self.acked.__setitem__, self.stager))
            except Exception as error:
                return error, intercept
        return None, intercept

    def wrong(self, error: Exception | None, way: Any, logged: list[str]) -> list[str]:
        forget_frames(error)
        wrong = judged(self.judge.look(self.root / "run"), self.root, self.acked, AFTER[self.name])
        if error is not None and not isinstance(error, errors.SidestreamError):
            wrong.append(f"untyped: {error!r}")
        if error is None and self.acked != AFTER[self.name]:
            wrong.append(f"no error, and acknowledged are {self.acked}")
        step = next((one for one in AFTER[self.name] if one.startswith("step-")), None)
        if step is not None and self.acked.get(step) != AFTER[self.name][step]:
            wrong.append(f"an export that failed has failed the checkpoint: {error!r}")
        left = left_behind(self.root)
        told = [*notes(error), *logged] or ([str(error)] if self.name == "a removal" and error is not None else [])
        if left and way not in UNTIDY and not told:
            wrong.append(f"left behind, and nobody was told: {left} after {error!r}")
        return wrong


@pytest.mark.parametrize("name", WORK)
async def test_one_name_with_a_fault_at_every_operation(
    name: str, place: Path, judge: Oracle, row: Callable[..., Row], size: Size, caplog: pytest.LogCaptureFixture
) -> None:
    """Of an export only its own operations fail: that never fails the checkpoint."""
    counts = row("one name: faults", name)
    await prepare(place / "base")
    async with sidestream.AsyncStager(budget_bytes=1 << 24) as stager:
        bench = Faulty(name, place, stager, judge)
        error, whole = await bench.run(Operation.call)
        assert (error, bench.acked, left_behind(bench.root)) == (None, AFTER[name], [])
        every = [(way, number, at) for way, number in WAYS for at in range(1, len(whole.log) + 1)]
        # That what is to be removed is not there is no error.
        hiding = {at for at, one in enumerate(whole.log, 1) if "/.retired-" in one.target}
        every = [one for one in every if one[1] != errno.ENOENT or one[2] not in hiding]
        size.random("one name faults", name).shuffle(every)
        total = max(spread(size.of(*FAULTS), WORK)[name], len(whole.log))
        for way, number, at in (every * -(-total // len(every)))[:total]:
            caplog.clear()
            error, intercept = await bench.run(way(at, number))
            logged = [record.getMessage() for record in caplog.records if record.name == "sidestream"]
            wrong = bench.wrong(error, way, logged)
            hit = intercept.log[at - 1] if len(intercept.log) >= at else None
            if way in (once, sticky) and hit is not None and hit.changes and error is None and not logged:
                harmless = hit.path.endswith((".one", ".other", "/.writer.partial")) or "/.retired-" in hit.target
                # The exchange is repeated, because another process may have removed the target meanwhile.
                harmless |= hit.name == "exchange" and number == errno.ENOENT
                wrong += [] if harmless else ["a fault that nobody was told of"]
            if way is short and error is not None:
                wrong.append(f"a short transfer became {error!r}")
            operation = whole.log[at - 1]
            counts.trial((way.__name__, errno.errorcode.get(number, number), at, operation.name, operation.path), wrong)
            counts.note("acknowledged" if error is None else type(error).__name__)
        del error
    counts.end(at_least=total)


# --- power cuts on real file systems ----------------------------------------------------------------------------------


class Life:
    """One disk, used on from cut to cut: what is there, and what the work under way may have changed."""

    def __init__(self, disk: Disk, children: Trials, judge: Oracle, random: Any) -> None:
        self.disk, self.children, self.judge, self.random = disk, children, judge, random
        self.before: dict[str, int] = {}
        self.acked: dict[str, int] = {}
        self.after: dict[str, int] = {}
        self.seed = 20

    async def begin(self) -> None:
        self.disk.renew()
        self.before, self.acked, self.after = dict(BEFORE), {}, {}
        with self.disk.mount() as place:
            await prepare(place)

    def look(self, place: Path, stock: bool = False) -> list[str]:
        """What is wrong with what the last cut left, which is from now on what was there before."""
        found: Found = self.judge.look(place / "run", stock=stock)
        wrong = judged(found, place, self.acked, self.after, self.before)
        exports = {one for one in (*self.before, *self.after) if one.startswith("exports/")}
        there = dict(found.seeds)
        there.update({one: self.acked.get(one, self.before.get(one, GONE)) for one in exports if one not in self.after})
        there.update(seeds_of_exports(place, exports & self.after.keys()))
        self.before, self.acked, self.after = {one: seed for one, seed in there.items() if seed != GONE}, {}, {}
        return wrong

    def cut(self, number: int) -> tuple[Any, list[str]]:
        """What the last cut left is judged; then some work begins, and the power goes. Where, and what is wrong."""
        with self.disk.mount() as place:
            wrong = self.look(place, stock=number % 8 == 0)
            what, how, self.after = self.drawn()
            at = 0 if number % 3 == 0 else self.random.randint(1, 90)
            told = self.children.run(
                root=place, run=place / "run", work="one_name", what=what, how=how, at=at,
                when=self.random.choice(["before", "after"]), cut=str(place),
            )  # fmt: skip
            where = f"{what} cut at {told.get('killed_at') or 'the end'}, operation {at}"
            failed = told.error is not None and not told.get("killed_at")  # other threads fail when the disk is gone
            if told.exit != -signal.SIGKILL or failed:
                wrong.append(f"{where}: the child ended otherwise: {told}")
            self.acked = told.acked
        return where, wrong

    def drawn(self) -> tuple[str, dict[str, int], dict[str, int]]:
        """Some work, its arguments, and what it changes."""
        self.seed += 1
        names = [*WORK] if "last" in self.before else [name for name in WORK if name != "a removal"]
        what = self.random.choice(names)
        if what == "a removal":
            return what, {}, {"last": GONE}
        if what == "a save over another":
            return what, {"seed": self.seed}, {"last": self.seed}
        steps = {int(one[5:].partition(".")[0]) for one in self.before if one.startswith("step-")}
        step = max(steps) + 1 if what == "an export" else self.random.choice(sorted(steps))
        generations = [one for one in self.before if one.partition(".")[0] == f"step-{step}"]
        highest = max((int(one.partition(".g")[2] or 1) for one in generations), default=0)
        name = f"step-{step}.g{highest + 1}" if highest else f"step-{step}"
        how = {"step": step, "seed": self.seed}
        return what, how, {name: self.seed, f"exports/step-{step}": self.seed}


def seeds_of_exports(root: Path, names: set[str]) -> dict[str, int]:
    """What the exports say of themselves: ``judged`` has looked at them."""
    return {one: int((root / one / "seed").read_text()) for one in names if (root / one).exists()}


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
async def test_one_name_when_the_power_is_cut(
    kind: str, place: Path, children: Trials, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    counts = row("one name: power cuts", kind)
    total = size.of(*CUTS) // 2
    life = Life(Disk(kind, place), children, judge, size.random("one name", kind))
    await life.begin()
    while counts.trials < total:
        where, wrong = life.cut(counts.trials)
        counts.trial(where, wrong)
        if counts.trials % 12 == 0 or counts.trials == total:
            with life.disk.mount() as mount:  # what the last cut of this disk left
                counts.trial(where, life.look(mount), count=0)
            await life.begin()
    counts.end(at_least=total)


# --- full disks and quotas --------------------------------------------------------------------------------------------


async def refused(name: str, root: Path, doing: Doing, judge: Oracle, number: int) -> tuple[str, list[str]]:
    """``name`` where it may not fit: what was refused, and what is wrong."""
    acked: dict[str, int] = {}
    ended, wrong = "done", []
    try:
        await WORK[name](root / "run", Doing(acked.__setitem__, doing.stager, doing.saver))
    except errors.NoSpaceError as error:
        ended = "an export was refused" if acked else "refused"
        if error.errno != number or str(root) not in str(error):
            wrong.append(f"too little space is told as {error!r}")
    except Exception as error:
        wrong.append(f"too little space is told as {error!r}")
    wrong += judged(judge.look(root / "run"), root, acked, AFTER[name])
    return ended, wrong + [f"left behind: {one}" for one in left_behind(root)]


async def once_more(name: str, root: Path, doing: Doing, judge: Oracle) -> list[str]:
    """What is wrong when it is done again, now that there is space."""
    acked: dict[str, int] = {}
    before = judge.look(root / "run").seeds
    await WORK[name](root / "run", Doing(acked.__setitem__, doing.stager, doing.saver))
    wrong = judged(judge.look(root / "run"), root, {**before, **acked}, acked, {**BEFORE, **before})
    return wrong + [f"left behind, with space: {one}" for one in left_behind(root)]


GROWING = ("a save over another", "an export", "an export over another")


async def test_one_name_on_a_full_disk(place: Path, judge: Oracle, row: Callable[..., Row], size: Size) -> None:
    """Every size of a disk from what is there to more than enough; then room is made, and the same work is done."""
    counts = row("one name: full disks")
    total = size.of(*DISKS)
    await prepare(place / "base")
    used = sum(-(-path.stat().st_size // 4096) + 1 for path in (place / "base").rglob("*"))
    async with sidestream.AsyncStager(budget_bytes=1 << 22) as stager:
        for number in range(total):
            pages, name = used + number * 80 // total, GROWING[number % len(GROWING)]
            doing = Doing(lambda name, seed: None, stager)
            with mounted(place / "disk", "-t", "tmpfs", "-o", f"size={(used + 200) * 4096}", "tmpfs") as disk:
                shutil.copytree(place / "base", disk, dirs_exist_ok=True)
                subprocess.run(["mount", "-o", f"remount,size={pages * 4096}", str(disk)], check=True)
                ended, wrong = await refused(name, disk, doing, judge, errno.ENOSPC)
                subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
                counts.trial(f"{name}, {pages} pages", wrong + await once_more(name, disk, doing, judge))
            counts.note(ended)
    counts.end(at_least=total)


@pytest.fixture
async def limited(tmp_path: Path) -> AsyncIterator[Quota]:
    disk = Disk("btrfs", tmp_path)
    disk.renew()
    with disk.mount() as place, quota(place) as made:
        yield made


@pytest.fixture(params=["threads", "a writer process"])
def saver(request: pytest.FixtureRequest) -> Iterator[Any]:
    from sidestream._worker.client import worker_for

    if request.param == "threads":
        yield "thread"
        return
    options = sidestream.WriterProcess(retries=0)
    yield options
    worker_for(options).close()


async def test_one_name_when_a_quota_is_exhausted(
    limited: Quota, saver: Any, tmp_path: Path, judge: Oracle, row: Callable[..., Row], size: Size
) -> None:
    """At any operation. A removal is refused nothing, and nothing is exchanged that is not whole."""
    counts = row("one name: quotas", "threads" if saver == "thread" else "a writer process")
    root, total = limited.folder / "root", size.of(*QUOTAS) // 2
    await prepare(tmp_path / "base")
    async with sidestream.AsyncStager(budget_bytes=1 << 22) as stager:
        doing = Doing(lambda name, seed: None, stager, saver)
        for number in range(total):
            name = [*WORK][number % len(WORK)]
            limited.lift()
            shutil.rmtree(root, ignore_errors=True)
            limited.settle()
            shutil.copytree(tmp_path / "base", root)
            at = 1 + number * 90 // total

            def hook(operation: Operation, at: int = at) -> Any:
                if operation.index == at:
                    limited.exhaust()
                return operation.call()

            with Intercept(root, hook).installed():
                ended, wrong = await refused(name, root, doing, judge, errno.EDQUOT)
            limited.lift()
            if name != "a removal":
                wrong += await once_more(name, root, doing, judge)
            counts.trial(f"{name}, exhausted at operation {at}", wrong)
            counts.note(ended)
    counts.end(at_least=total)
