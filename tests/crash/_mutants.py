"""The commit protocol with one thing wrong in it, once for each thing: every one has to be caught by a row.

``python _mutants.py`` waits for lines ``{"source": DIR, "catcher": NAME, "first": PART, "place": DIR, "seed": N}``. For
each it forks, takes sidestream from that source, and runs the row's own trials until one of them finds a violation.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import json
import os
import random
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio.abc
import anyio.lowlevel
import fsspec.asyn  # noqa: F401 - so that children need not; what follows too
import pytest  # noqa: F401
import safetensors.torch  # noqa: F401
import torch
import torch.distributed.checkpoint


@dataclass(frozen=True)
class Mutant:
    """``old``, which stands in ``file`` exactly once, becomes ``new``; the row ``catcher`` has to notice. The trials of
    its part ``first`` run first: a kind of work, an error and an operation, or a pattern of what is damaged."""

    name: str
    file: str
    old: str
    new: str
    catcher: str
    first: str = ""


_SYNC_NEW = """            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # its errors count"""
_SYNC_DIRECTORY = """        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree"""
_SUPPRESSED = "with suppress(OSError):\n                    os.fsync(descriptor)"
_IN_USE = (
    '        return any(one.directory == name and one.kind == "read" and not self.leases.dead(one) for one in seen)\n'
)
_DELETABLE = "                    deletable = [step for step in chosen.values() if step.order < newest.order]\n"
_LOCAL = "_storage/local/publishing.py"
_REMOVE_TREE = "from .directories import remove_tree"  # a mutant needs more than its module imports
_DIRECTORIES = "_storage/local/directories.py"
_STORE = "_storage/local/store.py"
_WRITE = "_storage/local/transaction.py"
_TRANSACTION = "_storage/transaction.py"
_RUNNING = "_save/running.py"
_RENAME = "    os.rename(hidden, target)\n    try:\n"
_TRY = "    try:\n"
_MOVE = "        move(hidden, target, names, made)\n"
_SYNC_AND_MOVE = (
    """        if durability == "fsync":
            sync_directory(hidden)
"""
    + _MOVE
)
_EXCHANGE = "                _exchange(hidden, target, names)\n"
_EXCHANGED = "        exchange(hidden, target)\n        try:\n"
_SYNC_NEW_DIRECTORY = """        made.append(path)
        if durability == "fsync":
            sync(path.parent)
"""
_SYNC_PARENT = '        sync_visible(target.parent, target, "the checkpoint is committed'
_TRANSLATED = """        raise from_os_error(error, "publishing", str(target)) from error
    if durability"""
_PRUNING = "_run/pruning.py"
_OBJECTS = "_storage/object_store/transaction.py"
_OVER = "a save over another"
_SIDECARS = '    """Every byte of a sidecar file."""\n'
_FOUND = "_Replaced(version, frozenset(ids - {save_id})"
_READ_FILE = "            await self._read(files, NewTensors({}, wanted), Streams())\n"

MUTANTS = (
    # syncs left out, or in the wrong place
    Mutant("files are not synced", _WRITE, _SYNC_NEW, _SYNC_NEW.replace("os.fsync(descriptor)", "pass"), "cuts"),
    Mutant("the attempt's directory is not synced", _LOCAL, "            sync_directory(hidden)\n",
           "            pass\n", "cuts"),
    Mutant("the parent is not synced after the rename", _LOCAL, _SYNC_PARENT, _SYNC_PARENT.replace(
           "sync_visible", "None and sync_visible"), "cuts"),
    Mutant("new directories are not synced", _DIRECTORIES, _SYNC_NEW_DIRECTORY,
           _SYNC_NEW_DIRECTORY.replace("sync(path.parent)", "pass"), "cuts", "a new run"),
    Mutant("directories are opened and not synced", _DIRECTORIES, _SYNC_DIRECTORY,
           _SYNC_DIRECTORY.replace("os.fsync(descriptor)", "pass"), "cuts"),
    Mutant("the rename comes before the sync of what it moves", _LOCAL, _SYNC_AND_MOVE,
           _MOVE + "        if durability == 'fsync':\n            sync_directory(target)\n", "cuts"),
    Mutant("the parent is synced before the rename", _LOCAL, _SYNC_AND_MOVE,
           "        sync_directory(hidden)\n        sync_directory(target.parent)\n" + _MOVE + "        return\n",
           "cuts"),
    Mutant("the parent is not synced after an exchange", _LOCAL, _SYNC_PARENT, _SYNC_PARENT.replace(
           "sync_visible", "move is move_there and sync_visible"), "cuts", _OVER),
    Mutant("what is replaced is deleted before the exchange is synced", _LOCAL, _EXCHANGED,
           f"        exchange(hidden, target)\n        {_REMOVE_TREE}; remove_tree(hidden)\n        try:\n",
           "cuts", _OVER),
    Mutant("a removal is not synced", _STORE, "            sync_directory(root)\n",
           "            pass\n", "cuts", "a removal"),
    Mutant("an export is not synced", "_convert/export.py", 'SaveOrder(durability=self.durability, verb',
           'SaveOrder(durability="flush", verb', "cuts", "an export"),
    Mutant("files are synced before they are written", _WRITE,
           "            _Parts(descriptor, direct, body).write(stop, threads)\n",
           "            os.fsync(descriptor)\n            durability = 'flush'\n"
           "            _Parts(descriptor, direct, body).write(stop, threads)\n", "cuts"),
    Mutant("a deletion is not synced before it goes on", _STORE, "            sync_directory(root)\n",
           "            pass\n", "cuts", "a retention pass"),
    Mutant("a writer process syncs nothing", "_worker/work.py", 'order["save_id"], order["durability"])',
           'order["save_id"], "flush")', "saver_cuts"),
    # what is visible when
    Mutant("a step is written in place", _LOCAL, _RENAME,
           "    import shutil\n    shutil.copytree(hidden, target)\n    shutil.rmtree(hidden)\n" + _TRY, "kills"),
    Mutant("a deletion begins with the files", _STORE, "    hidden = take_away(root, directory)\n",
           "    remove_tree(root / directory)\n    hidden = take_away(root, directory)\n", "kills",
           "a retention pass"),
    Mutant("the marker is written first and published alone", _LOCAL, _RENAME,
           "    target.mkdir()\n    for one in sorted(hidden.iterdir()):\n"
           "        os.rename(one, target / one.name)\n    hidden.rmdir()\n" + _TRY, "kills"),
    Mutant("an occupied target is replaced", _LOCAL, _RENAME,
           "    import shutil\n    shutil.rmtree(target, ignore_errors=True)\n" + _RENAME, "conflicts"),
    Mutant("a generation that is there is taken again", "_run/steps.py",
           "        return max(self._started.get(step, 0), *(found.generation for found in found), 0) + 1",
           "        return 1", "conflicts"),
    Mutant("what is replaced is deleted before the exchange", _LOCAL, _EXCHANGE,
           f"                {_REMOVE_TREE}; remove_tree(target)\n                os.rename(hidden, target)\n",
           "kills", _OVER),
    Mutant("what is replaced is written over", _LOCAL, _EXCHANGE,
           "                import shutil; shutil.copytree(hidden, target, dirs_exist_ok=True)\n", "kills", _OVER),
    Mutant("an export is replaced in two steps", _LOCAL, _EXCHANGE,
           "                os.rename(target, target.with_name('.old.partial'))\n"
           "                os.rename(hidden, target)\n", "kills", "an export over another"),
    # others come between the look and the step
    Mutant("a save that is faster fails another one that overwrites", _LOCAL,
           "            if not left or not lost or not os.path.isdir(hidden):\n", "            if True:\n", "rivals"),
    Mutant("a save that came after the rename is taken away", _LOCAL, "if made is None or _is(made, target):  #",
           "if True:  #", "rivals"),
    Mutant("whatever has come meanwhile is replaced", _LOCAL, "                check_use(target, use)\n",
           "", "rivals", "thesis"),
    # overwriting on object storage
    Mutant("a put on a condition has no condition", "_storage/object_store/bucket.py",
           "_is_refused_as(engine.replace(key, memoryview(content), version), ",
           '_is_refused_as(engine.put(key, memoryview(content), mode="overwrite"), ', "object_store", "races"),
    Mutant("old objects are deleted before the commit", _OBJECTS, "            if self._replaced is None:\n",
           "            if self._replaced:\n                await self._collect(self._replaced)\n"
           "            if self._replaced is None:\n", "object_store"),
    Mutant("old objects are not deleted", _OBJECTS, "        await bucket.delete(target, old)\n", "", "object_store"),
    Mutant("what a dead save has left is not deleted", _OBJECTS, _FOUND,
           _FOUND.replace("ids - {save_id}", "{marked_id} - {None}"), "object_store"),
    Mutant("a lost answer is a lost race", "_storage/object_store/bucket.py",
           "            if refused and not await _has_replaced(engine, key, content[-4096:], version):\n",
           "            if refused:\n", "object_store", "lost answers"),
    Mutant("a removal begins with the files", "_storage/object_store/store.py",
           "                await bucket.delete(directory, [MARKER])\n",
           "                await bucket.delete(directory, [one for one in files if one not in (MARKER, NOTE)])\n"
           "                await bucket.delete(directory, [MARKER])\n", "object_store", "a removal"),
    Mutant("a load does not start over", "_load/operation.py",
           "            return lost and await self.target.replaced()\n", "            return False\n", "object_store",
           "overtaken"),
    Mutant("a verification does not start over", "_load/verify.py",
           "                    if found.ok or not await source.moved():\n", "                    if True:\n",
           "object_store", "overtaken"),
    # failures
    Mutant("a short write counts as a whole one", _WRITE,
           "            done += os.pwrite(descriptor, buffer[done : done + _MAX_TRANSFER_BYTES], position + done)\n",
           "            os.pwrite(descriptor, buffer[done : done + _MAX_TRANSFER_BYTES], position + done)\n"
           "            done = len(buffer)\n", "faults", "short pwrite"),
    Mutant("an error of a writer's thread is forgotten", _WRITE,
           "        if self._error is not None:\n            raise self._error\n", "", "faults", "pwrite"),
    Mutant("a failed sync of a file is passed over", _WRITE, _SYNC_NEW,
           _SYNC_NEW.replace("os.fsync(descriptor)", _SUPPRESSED), "faults", "fsync"),
    Mutant("a failed sync of the parent is passed over", _LOCAL,
           "        raise NotDurableError(error.errno, failed, str(path)) from error\n", "        return\n", "faults",
           "fsync"),
    Mutant("a failed save leaves its attempt", _RUNNING,
           '        if transaction.outcome != "absent":\n            return\n',
           "        if transaction.outcome:\n            return\n", "faults"),
    Mutant("a commit that was sent counts as absent", _TRANSACTION,
           'has not been looked at.\n            self.outcome = "unknown"\n',
           'has not been looked at.\n            self.outcome = "absent"\n',
           "faults", "late_and_dead rename"),
    Mutant("a sent commit is not read back", _RUNNING, "        await run_shielded(_read_back, transaction)\n",
           '        transaction.outcome = "absent"\n', "faults", "late rename"),
    Mutant("foreign errors are not translated", _LOCAL, _TRANSLATED, "        raise\n    if durability", "faults",
           "rename"),
    Mutant("a short read counts as a whole one", "_storage/local/read.py", "            done += count\n",
           "            done += len(piece)\n", "reads"),
    # checks left out
    Mutant("blocks are not verified", "_load/reader.py",
           '        self._expected = unpack_crcs(one.crcs or b"")\n', "        self._expected = ()\n", "corruption"),
    Mutant("small tensors are not verified", "_load/reader.py",
           "                    if crc != saved:\n", "                    if False:\n", "corruption"),
    Mutant("the manifest is not verified", "_load/open/parts.py",
           "        if crc32(raw) != marker.manifest_crc:\n", "        if False:\n", "corruption",
           "became .* of manifest-"),
    Mutant("stock DCP's checksums are not looked at", "_load/reader.py",
           "            self._step, self._expected = one.nbytes, (one.crc,)\n", "            pass\n", "stock"),
    Mutant("sidecar files are not verified", "_load/checkpoint.py", _READ_FILE,
           "            await Reader(files.source, 'manifest').read(wanted, own=True)\n",
           "corruption"),
    Mutant("verify passes sidecar files over", "_load/checks.py", _SIDECARS,
           _SIDECARS + "    return\n", "corruption", "of (seed|log)$"),
    # retention
    Mutant("nothing is verified before older steps go", _PRUNING, "        if step in self._verified:\n",
           "        if True:\n", "retention"),
    Mutant("a reader's lease is not looked for", _PRUNING, _IN_USE, "        return False\n", "retention"),
    Mutant("damaged steps are deleted like others", _PRUNING, _DELETABLE,
           _DELETABLE + "                    deletable += [self._known[name] for name in self._damaged]\n",
           "retention"),
    # cancelling
    Mutant("a cancelled save is left to itself", "_save/api.py",
           "        pending.cancel()\n        await run_shielded(pending.ended)\n", "", "cancels"),
    Mutant("a cancelled thread is left behind", "_runtime/threads.py",
           "                    cancelled = cancelled or cancel\n                    _stop_work(future, stop)\n",
           "                    raise\n", "cancels"),
)  # fmt: skip


def mutate(mutant: Mutant, source: Path, to: Path) -> None:
    """A copy of the package with the mutant in it. The copies of its other modules have their bytecode."""
    unfinished = shutil.ignore_patterns("*.pyc.*")  # which another process is about to rename
    shutil.copytree(source / "sidestream", to / "sidestream", ignore=unfinished)
    path = to / "sidestream" / mutant.file
    for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
        stale.unlink()
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.name}: found {text.count(mutant.old)} times in {mutant.file}"
    mutated = text.replace(mutant.old, mutant.new)
    compile(mutated, path, "exec")  # one that cannot be imported would count as caught
    path.write_text(mutated)


# --- the rows, one violation at a time --------------------------------------------------------------------------------


CUTS = ("nothing", "names", "chance", "chance", "chance")


async def cuts(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    """Modelled power cuts."""
    async for wrong in modelled(place, chance, first, CUTS, "threads"):
        yield wrong


async def saver_cuts(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    """Modelled power cuts, where a writer process writes."""
    async for wrong in modelled(place, chance, first, CUTS, "a writer process"):
        yield wrong


async def kills(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    """What a kill leaves: all that was done until then."""
    async for wrong in modelled(place, chance, first, ("everything",), "threads", backwards=False):
        yield wrong


async def modelled(
    place: Path, chance: random.Random, first: str, keeps: tuple[Any, ...], writer: Any, *, backwards: bool = True
) -> AsyncIterator[list[str]]:
    """``backwards``: from the last moment on, because most syncs that are missing are missed there."""
    from _cutting import WORK, judged, recorded, runs
    from _look import look

    for number, name in enumerate(sorted(WORK, key=lambda name: name != first)):
        cut = place / f"cut-{number}"
        recording = await recorded(place / str(number), name, writer)
        last = len(recording.events)
        telling = ("rename", "exchange", "fsync", "unlink", "rmdir", "mkdir")
        moments = [0, *(at for at in range(1, last) if recording.events[at - 1].operation in telling), last]
        judged_before = set()  # what a cut left, and what was acknowledged then: most cuts leave what another one left
        for at in reversed(moments) if backwards else moments:
            model, acked = recording.model(at), recording.acknowledged(at)
            for keep in keeps:
                left = model.write_to(cut, keep, chance), frozenset(acked.items())
                if left not in judged_before:
                    judged_before.add(left)
                    found = {run: await look(cut / run) for run in runs(name)}
                    yield judged(cut, [found[run] for run in runs(name)], acked, name)


async def faults(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _injecting import Bench, late, late_and_dead, once, short, sticky
    from _operations import Operation

    import sidestream

    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        bench = Bench(place, stager)
        await bench.prepare()
        _, _, whole = await bench.save(Operation.call)
        ways = ((once, errno.EIO), (late, errno.EIO), (late_and_dead, errno.EIO), (short, 1), (sticky, errno.ENOSPC))
        for way, number in sorted(ways, key=lambda way: way[0].__name__ not in first.split()):
            for at in sorted(range(len(whole.log), 0, -1), key=lambda at: whole.log[at - 1].name not in first.split()):
                error, outcome, intercept = await bench.save(way(at, number))
                wrong = await bench.judge(error, outcome, removable=way is not late_and_dead)
                hit = intercept.log[at - 1] if len(intercept.log) >= at else None
                changed = way in (once, sticky) and hit is not None and hit.changes
                changed = changed and not hit.path.endswith("/.writer.partial")  # without its lock its age decides
                yield [*wrong, *(["a fault that nobody was told of"] if changed and error is None else [])]


async def reads(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _injecting import short
    from _operations import Intercept
    from _seeded import blank_state, make_state, same

    import sidestream

    await sidestream.save(make_state(11), place / "target")
    for at in range(1, 20):
        state = blank_state()
        with Intercept(place, short(at, 1)).installed():
            try:
                await sidestream.load(state, place / "target", options=sidestream.LoadOptions(verify="manifest"))
                yield [] if same(state, make_state(11)) else ["a silent failure"]
            except sidestream.errors.SidestreamError as error:
                yield [f"a short transfer became {error!r}"]


async def corruption(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _corrupting import DAMAGES, OWN_READERS, damaged, judged
    from _seeded import files_of, make_state

    import sidestream

    async with sidestream.Checkpointer(place / "run") as checkpoints:
        for step, seed in ((1, 11), (2, 12)):
            await checkpoints.save(make_state(seed), step=step, files=files_of(seed))
    for kind in (first, "") if first else ("",):
        for _ in range(1500):
            with damaged(place / "run" / "step-1", chance.choice(DAMAGES), chance) as what:
                if not re.search(kind, what):
                    continue
                _, wrong = await judged(place / "run" / "step-1", chance.choice(OWN_READERS))
            yield wrong


async def stock(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _corrupting import STOCK_READERS, bit_flip, damaged, judged
    from _seeded import make_state

    torch.distributed.checkpoint.save(make_state(11), checkpoint_id=place / "stock", no_dist=True)
    for _ in range(300):
        with damaged(place / "stock", bit_flip, chance):
            _, wrong = await judged(place / "stock", STOCK_READERS[0])
        yield wrong


async def conflicts(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _look import look
    from _seeded import make_state

    import sidestream

    run = place / "run"
    for number in range(20):
        async with sidestream.Checkpointer(run) as one, sidestream.Checkpointer(run) as other:
            pending = [each.async_save(make_state(2 * number + me), step=1) for me, each in enumerate((one, other))]
            won = await asyncio.gather(*pending, return_exceptions=True)
        names = [Path(info.url).name for info in won if isinstance(info, sidestream.SaveInfo)]
        found = await look(run)
        wrong = list(found.violations)
        for me, info in enumerate(won):
            if isinstance(info, sidestream.SaveInfo) and found.seeds.get(Path(info.url).name) != 2 * number + me:
                wrong.append("an acknowledged save was replaced")
            elif isinstance(info, BaseException) and not isinstance(info, sidestream.errors.CheckpointExistsError):
                wrong.append(f"the loser got {info!r}")
        if not names:
            wrong.append("nobody won")
        yield wrong


async def rivals(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    """At every operation of a save to one name, or of a load of it, another save does all that it does."""
    from _look import look
    from _operations import Intercept, Operation, exists
    from _seeded import blank_state, make_state, same

    import sidestream

    def overwrite(seed: int) -> None:
        sidestream.blocking.save(
            make_state(seed), place / "run" / "last", overwrite=True, options=sidestream.SaveOptions(durability="flush")
        )

    def thesis() -> None:
        (place / "run" / "last").mkdir(parents=True)
        (place / "run" / "last" / "thesis.tex").write_text("years of work")

    for what in sorted(("new", "old", "load", "thesis"), key=lambda what: what != first):
        at = called = 0
        while called >= at:
            at += 1
            shutil.rmtree(place / "run", ignore_errors=True)
            if what in ("old", "load"):
                await sidestream.save(
                    make_state(11), place / "run" / "last", options=sidestream.SaveOptions(durability="flush")
                )
            come: list[int] = []

            def between(operation: Operation, at: int = at, what: str = what, come: list[int] = come) -> Any:
                vacant = what != "thesis" or not exists(str(place / "run" / "last"))
                if operation.index == at and not come and vacant:
                    come.append(at)
                    thesis() if what == "thesis" else overwrite(12)
                return operation.call()

            wrong: list[str] = []
            ours = True
            with Intercept(place / "run", between).installed() as intercept:
                try:
                    if what == "load":
                        state = blank_state()
                        await sidestream.load(state, place / "run" / "last")
                        wrong += [] if same(state, make_state(state["seed"])) else ["a mixture"]
                    else:
                        state = make_state(13)
                        await sidestream.save(
                            state,
                            place / "run" / "last",
                            overwrite=True,
                            options=sidestream.SaveOptions(durability="flush"),
                        )
                except sidestream.errors.CheckpointExistsError as error:
                    ours = False
                    wrong += [] if what == "thesis" else [repr(error)]
                except sidestream.errors.SidestreamError as error:
                    wrong.append(repr(error))
            called = len(intercept.log)
            if what == "thesis":
                kept = (place / "run" / "last" / "thesis.tex").exists()
                wrong += ["years of work are lost"] if come and not kept else []
            else:
                found = await look(place / "run")
                last = found.seeds.get("last")
                allowed = {12, 13} if come and ours else {12} if come else {11, 13}
                wrong += [*found.violations, *([] if last in allowed else [f"{last} is there"])]
            yield wrong


async def object_store(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _object_store import WORK, kills, lost_answers, overtaken, races

    parts: dict[str, list[Callable[[], AsyncIterator[tuple[str, list[str]]]]]] = {
        "": [lambda: kills("a save over another")],
        "a removal": [lambda: kills("a removal")],
        "races": [races],
        "overtaken": [overtaken],
        "lost answers": [lambda name=name: lost_answers(name) for name in WORK],  # type: ignore[misc]
    }
    for part in sorted(parts, key=lambda part: part != first):
        for trials in parts[part]:
            async for _, wrong in trials():
                yield wrong


async def retention(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _retaining import trial

    for number in range(60):
        yield await trial(place / str(number), chance)


async def cancels(place: Path, chance: random.Random, first: str) -> AsyncIterator[list[str]]:
    from _cancelling import OPERATIONS, cancelled, made, sweep
    from _operations import Intercept, Operation

    async with made(place) as bench:
        late: list[str] = []

        def slowly(operation: Operation) -> Any:
            if operation.name in ("pwrite", "fsync", "rename"):
                time.sleep(0.01)  # a thread that is left behind is still at work when the operation has ended
            if bench.judging and operation.changes:
                late.append(f"a thread goes on: {operation.name} {operation.path}")
            return operation.call()

        for name in ("save", "Checkpointer.save and aclose"):
            with Intercept(place, slowly).installed():
                _, violations = await sweep(bench, OPERATIONS[name], cancelled, lambda at: {at})
            yield [str(one) for one in violations] + late
        bench.begin()
        loop, task = asyncio.get_running_loop(), asyncio.create_task(OPERATIONS["save"](bench))
        reached, ended, left = threading.Event(), threading.Event(), threading.Event()

        def within(operation: Operation) -> Any:
            if operation.name == "pwrite" and not reached.is_set():
                reached.set()
                loop.call_soon_threadsafe(task.cancel)
                if ended.wait(1):
                    late.append("the save has ended while its thread is in a system call")
                left.set()
            return operation.call()

        with Intercept(place, within).installed():
            await asyncio.wait([task])
            ended.set()
            await asyncio.to_thread(left.wait)
        yield late


CATCHERS: dict[str, Callable[[Path, random.Random, str], AsyncIterator[list[str]]]] = {
    each.__name__: each
    for each in (
        cuts,
        saver_cuts,
        kills,
        faults,
        reads,
        corruption,
        stock,
        conflicts,
        rivals,
        object_store,
        retention,
        cancels,
    )
}


# --- the process ------------------------------------------------------------------------------------------------------


async def catch(catcher: str, first: str, place: Path, seed: int) -> dict[str, Any]:
    trials = 0
    async for wrong in CATCHERS[catcher](place, random.Random(f"{seed} {catcher}"), first):
        trials += 1
        if wrong:
            return {"caught": wrong[0][:300], "trials": trials}
    return {"caught": None, "trials": trials}


def in_child(asked: dict[str, Any], out: int) -> None:
    sys.path.insert(0, asked["source"])
    importlib.import_module("sidestream")
    told = asyncio.run(catch(asked["catcher"], asked["first"], Path(asked["place"]), asked["seed"]))
    os.write(out, json.dumps(told).encode())


def serve() -> None:
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # or the first threads of a fork race to do it
    warnings.simplefilter("error", ResourceWarning)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    async def warm() -> None:
        await anyio.lowlevel.checkpoint()

    asyncio.run(warm())
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(reading)
                in_child(json.loads(line), writing)
            except BaseException as error:  # a mutant that cannot even run is caught too, and told apart
                os.write(writing, json.dumps({"caught": f"it ended: {error!r}"[:300], "trials": 1}).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            told = pipe.read()
        os.waitpid(pid, 0)
        print(told.decode() or '{"caught": "it died", "trials": 1}', flush=True)


if __name__ == "__main__":
    serve()
