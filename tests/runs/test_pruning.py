"""Deleting: after a newer step was verified, marker first, never what is in use, never what is not ours."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _run import blank, ended, flip, is_state_of, leases_in, line_of, process, save_steps, state_of, until
from held import HeldStager
from phases import warned

import sidestream
from sidestream import KeepAll, KeepBest, KeepEvery, KeepLast, SavedStep
from sidestream._engine.calls import in_operation
from sidestream._engine.loop import operation_loop
from sidestream._load.open.steps import Step
from sidestream._run.leases import Kind, Lease, Leases, parse_lease
from sidestream._run.pruning import Pruner
from sidestream._run.retention import uses_only_numbers
from sidestream._runtime.threads import Deadline, Stop, time_limit
from sidestream._storage import Attempt, LocalStore, ReadRange
from sidestream._storage.bodies import BytesBody
from sidestream._storage.local.read import LocalFiles, LocalSource
from sidestream._storage.names import NOTE, attempt_name
from sidestream._storage.replacing import Use
from sidestream.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidOptionError, StorageError
from sidestream.options import Durability


def entries(run: Path) -> list[str]:
    return sorted(os.listdir(run))


async def test_steps_go_after_a_save(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3, 4)
    assert entries(tmp_path) == ["step-3", "step-4"], "closing waits for it"


async def test_a_metric_that_no_step_has_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A typo deletes nothing: the warning names the metrics that there are."""
    keep = KeepLast(1) | KeepBest("val.lsos", 2)
    async with sidestream.Checkpointer(tmp_path, keep=keep) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3, 4, 5, val={"loss": 0.5, "name": "x"}, epoch=1)
        assert (await checkpoints.prune(dry_run=True)).deleted == ()
    assert entries(tmp_path) == [f"step-{step}" for step in range(1, 6)]
    (warning,) = [record for record in warned(caplog) if "metric" in record.getMessage()]
    assert "'val.lsos'" in warning.getMessage()
    assert "(there are epoch, val.loss)" in warning.getMessage()


async def test_the_best_stay_by_metadata_of_other_processes(tmp_path: Path) -> None:
    for step, loss in enumerate((0.5, 0.1, 0.7, 0.8), 1):
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            await save_steps(checkpoints, step, loss=loss)
    async with sidestream.Checkpointer(
        tmp_path, keep=KeepLast(1) | KeepBest("loss") | KeepEvery(steps=3)
    ) as checkpoints:
        pruned = await checkpoints.prune()
        assert pruned.deleted == ()
        await save_steps(checkpoints, 5, loss=0.9)
    assert entries(tmp_path) == ["step-1", "step-2", "step-3", "step-5"]


@pytest.mark.parametrize("place", ["directory", "marker", "memory"])
async def test_directories_of_the_user_stay(place: str, tmp_path: Path) -> None:
    """Also those whose names look like names of what sidestream deletes."""
    url = f"memory://{uuid.uuid4().hex}" if place == "memory" else str(tmp_path)
    files = fsspec.filesystem("memory" if place == "memory" else "file", auto_mkdir=True)
    mine = [".retired-2025/thesis.txt", f".retired-{32 * 'x'}/a", "staff/retired", "staff/active", f"notes/{NOTE}"]
    for name in mine:
        files.pipe_file(f"{url}/{name}", b"mine")
    storage = sidestream.Storage(commit="marker") if place == "marker" else None
    options = sidestream.SaveOptions(writer="thread")  # another process has no part of memory://
    async with sidestream.Checkpointer(url, keep=KeepLast(1), save=options, storage=storage) as checkpoints:
        await save_steps(checkpoints, 1, 2)
        assert (await checkpoints.prune()).abandoned == ()
        assert await checkpoints.steps() == [2]
    with pytest.raises(CheckpointNotFoundError):
        await sidestream.remove(f"{url}/staff", storage=storage)
    assert [files.cat_file(f"{url}/{name}") for name in mine] == [b"mine"] * len(mine)


async def test_a_pass_over_many_steps_compares_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of steps that was searched for each step stopped the loop for seconds."""
    many, compared, equal = 120, [], Step.__eq__
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, *range(many))
    monkeypatch.setattr(Step, "__eq__", lambda one, other: (compared.append(1), equal(one, other))[1])
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        assert len((await checkpoints.prune(dry_run=True)).deleted) == many - 1
    assert len(compared) < 10 * many


async def test_nothing_goes_without_a_policy(tmp_path: Path) -> None:
    for keep in (None, KeepAll(), KeepLast(1) | KeepAll()):
        async with sidestream.Checkpointer(tmp_path, keep=keep) as checkpoints:
            await save_steps(checkpoints, 1, 2, 2)
    assert len(entries(tmp_path)) == 9
    for keep in (3, KeepLast, "last"):
        with pytest.raises(InvalidOptionError, match="KeepLast"):
            sidestream.Checkpointer(tmp_path, keep=keep)  # type: ignore[arg-type]


async def test_an_older_generation_goes_when_the_new_one_is_verified(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 2)
    flip(tmp_path / "step-2.g2")
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
        pruned = await checkpoints.prune()
        assert (pruned.deleted, pruned.damaged) == ((), ("step-2.g2",)), "the new one is damaged, the old one stays"
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
        await save_steps(checkpoints, 2)
    assert entries(tmp_path) == ["step-1", "step-2.g3"], "superseded by one that is good"


async def test_nothing_older_goes_while_the_newer_do_not_verify(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3)
    flip(tmp_path / "step-3")
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        pruned = await checkpoints.prune()
        assert pruned.damaged == ("step-3",)
        assert pruned.verified == "step-2"
        assert pruned.deleted == ("step-1",), "a damaged step does not count, and is not deleted"
        assert "step-3" in checkpoints.health().damaged
        assert not checkpoints.health().ok
        state = blank()
        assert await checkpoints.restore(state, fallback="older") == 2
        assert is_state_of(state, 2)
    flip(tmp_path / "step-2")
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        assert (await checkpoints.prune()).deleted == ()
    assert entries(tmp_path) == ["step-2", "step-3"]


async def test_damage_that_retention_finds_is_told_once(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 9)
    flip(tmp_path / "step-9")
    with pytest.raises(CorruptCheckpointError, match="step-9 does not verify"):
        async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
            await save_steps(checkpoints, 3)
            await until(lambda: bool(checkpoints.health().damaged), "retention to find it")
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
        await save_steps(checkpoints, 4)
        await until(lambda: checkpoints.health().retention is not None, "retention to find it")
        with pytest.raises(CorruptCheckpointError, match="step-9"):
            checkpoints.async_save(state_of(5), step=5)
        await save_steps(checkpoints, 5, 6)
    assert entries(tmp_path) == ["step-5", "step-6", "step-9"]


async def test_each_damage_is_told(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        await save_steps(checkpoints, 1)
        for step in (2, 3):
            await in_operation(checkpoints._pruning.acquire, "test")  # so that retention sees the step after the damage
            await save_steps(checkpoints, step)
            flip(tmp_path / f"step-{step}")
            operation_loop().call(checkpoints._pruning.release)
            await until(lambda step=step: f"step-{step}" in checkpoints.health().damaged, "retention to find it")
            with pytest.raises(CorruptCheckpointError, match=f"step-{step} does not verify"):
                await save_steps(checkpoints, 9)
    assert entries(tmp_path) == ["step-1", "step-2", "step-3"]


async def test_several_damages_of_one_pass_are_told_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 8, 9)
    for step in (8, 9):
        flip(tmp_path / f"step-{step}")
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        await save_steps(checkpoints, 2)
        await until(lambda: len(checkpoints.health().damaged) == 2, "retention to find them")
        await until(lambda: checkpoints.health().retention is not None, "the end of the pass")
        with pytest.raises(CorruptCheckpointError, match="step-9 does not verify") as told:
            await save_steps(checkpoints, 3)
        assert "step-8 does not verify" in told.value.__notes__[0]
        await save_steps(checkpoints, 3)
    assert [record.getMessage().count("does not verify") for record in warned(caplog)] == [1, 1], "and are logged once"
    with pytest.raises(ValueError, match="of the program") as failed:
        async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
            await save_steps(checkpoints, 4)
            await until(lambda: checkpoints.health().retention is not None, "the end of the pass")
            raise ValueError("of the program")
    notes = "".join(failed.value.__notes__)
    assert "step-8 does not verify" in notes
    assert "step-9 does not verify" in notes


async def test_damage_is_told_of_a_pass_that_fails_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: object, *args: object, **options: object) -> None:
        raise OSError(13, "no")

    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 9)
    flip(tmp_path / "step-9")
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "rmtree", failing)
            await save_steps(checkpoints, 3)
            await until(lambda: "removing" in str(checkpoints.health().retention), "the end of the pass")
            with pytest.raises(StorageError, match="removing") as told:
                await save_steps(checkpoints, 4)
            assert "step-9 does not verify" in told.value.__notes__[0]
        await save_steps(checkpoints, 4)


async def test_damage_that_was_told_keeps_nothing_of_the_caller(tmp_path: Path) -> None:
    async def told(checkpoints: sidestream.Checkpointer) -> weakref.ref[torch.Tensor]:
        tensor = torch.zeros(4)
        with pytest.raises(CorruptCheckpointError, match="step-9"):
            await checkpoints.save({"t": tensor}, step=2)
        return weakref.ref(tensor)

    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 9)
    flip(tmp_path / "step-9")
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        await save_steps(checkpoints, 2)
        await until(lambda: checkpoints.health().retention is not None, "the end of the pass")
        kept = await told(checkpoints)
        gc.collect()
        assert kept() is None
        assert list(checkpoints.health().damaged) == ["step-9"]


async def saved_again(run: Path, step: int, loss: float) -> None:
    """Another process has removed the step and saved it again."""
    await sidestream.remove(run / f"step-{step}")
    async with sidestream.Checkpointer(run) as other:
        await save_steps(other, step, loss=loss)


async def test_the_metadata_of_a_step_that_was_saved_again(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, loss=9.0)
        await save_steps(checkpoints, 2, loss=0.5)
    async with sidestream.Checkpointer(tmp_path, keep=KeepBest("loss") | KeepLast(1)) as checkpoints:
        assert (await checkpoints.prune(dry_run=True)).deleted == ("step-1",)
        await saved_again(tmp_path, 1, 0.1)
        await saved_again(tmp_path, 2, 0.2)
        await save_steps(checkpoints, 3, loss=0.3)
        assert (await checkpoints.prune()).deleted in ((), ("step-2",))
    assert entries(tmp_path) == ["step-1", "step-3"]


async def test_a_verified_step_that_was_saved_again_is_verified_again(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 3)
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        assert (await checkpoints.prune()).verified == "step-3"
        await saved_again(tmp_path, 3, 0.1)
        flip(tmp_path / "step-3")
        async with sidestream.Checkpointer(tmp_path) as other:
            await save_steps(other, 2)
        pruned = await checkpoints.prune()
        assert (pruned.deleted, pruned.damaged) == ((), ("step-3",))
        await saved_again(tmp_path, 3, 0.1)
        assert (await checkpoints.prune()).deleted == ("step-2",), "the damage is gone too"


@pytest.mark.parametrize("how", ["altered", "removed", "of another writer"])
async def test_a_verified_step_whose_marker_is_gone_protects_nothing(how: str, tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 3)
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        assert (await checkpoints.prune()).deleted == ("step-1",)
        marker = tmp_path / "step-3" / ".metadata"
        if how == "altered":
            marker.write_bytes(marker.read_bytes()[:-9])
        elif how == "removed":
            marker.unlink()
        else:
            shutil.rmtree(marker.parent)
            dcp.save({"t": torch.ones(3)}, checkpoint_id=marker.parent)
        async with sidestream.Checkpointer(tmp_path) as other:
            await save_steps(other, 2)
        assert (await checkpoints.prune()).deleted == ()
    assert "step-2" in entries(tmp_path)


async def test_the_marker_goes_first(tmp_path: Path) -> None:
    """A deletion that cannot go on leaves nothing that looks like a checkpoint, and the next pass finishes it."""
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2)
    real = shutil.rmtree
    seen: list[list[str]] = []

    def failing(path: object, *args: object, **options: object) -> None:
        seen.append([name for name in entries(tmp_path) if name.startswith("step-")])
        raise OSError(5, "the disk gave up")

    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        shutil.rmtree = failing  # type: ignore[assignment]
        try:
            with pytest.raises(StorageError):
                await checkpoints.prune()
        finally:
            shutil.rmtree = real
        assert seen == [["step-2"]], "invisible before the first byte of it is deleted"
        assert await checkpoints.steps() == [2]
        (left,) = [name for name in entries(tmp_path) if name.startswith(".retired-")]
        pruned = await checkpoints.prune()
        assert pruned.abandoned == (left,)
    assert entries(tmp_path) == ["step-2"]


async def test_a_failure_to_delete_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: object, *args: object, **options: object) -> None:
        raise OSError(13, "no")

    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        await save_steps(checkpoints, 1)
        monkeypatch.setattr(shutil, "rmtree", failing)
        await save_steps(checkpoints, 2)
        await until(lambda: checkpoints.health().retention is not None, "the failure")
        with pytest.raises(StorageError, match="removing"):
            await save_steps(checkpoints, 3)
        await save_steps(checkpoints, 3)  # the same failure is not told again and again
        monkeypatch.undo()
        await save_steps(checkpoints, 4)
        await until(lambda: checkpoints.health().retention is None, "a pass that succeeds")
        assert checkpoints.health().ok
    assert entries(tmp_path) == ["step-4"]


async def test_what_is_not_ours_is_neither_counted_nor_touched(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in (1, 9):
            dcp.save({"t": torch.ones(10)}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "notes").write_text("mine")
    (tmp_path / "best.pt").write_text("mine")
    (tmp_path / ".cache").mkdir()
    await sidestream.save(state_of(7), tmp_path / "other")
    mine = entries(tmp_path)
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
        await save_steps(checkpoints, 3, 4, 5)
        await checkpoints.prune()
        assert await checkpoints.steps() == [1, 4, 5, 9]
    assert entries(tmp_path) == sorted([*mine, "step-4", "step-5"])


async def test_what_was_saved_last_stays_after_going_back(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 100, 200, 300)
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(2)) as checkpoints:
        await save_steps(checkpoints, 150)
        assert (await checkpoints.prune()).deleted in ((), ("step-100",))
        assert await checkpoints.steps() == [150, 200, 300]


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_a_leased_step_stays_until_its_reader_is_done(tmp_path: Path) -> None:
    async with (
        sidestream.Checkpointer(tmp_path) as reader,
        sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as writer,
    ):
        await save_steps(reader, 1)
        async with reader.reading(1) as checkpoint:
            await save_steps(writer, 2)
            assert (await writer.prune()).leased == ("step-1",)
            assert (await checkpoint.tensor("t"))[0].item() == 1.0
        assert not any(".read" in lease for lease in leases_in(tmp_path)), "the pass after the save may have its own"
        await writer.prune()  # or the pass that follows the save does it first
        assert await writer.steps() == [2]
        with pytest.raises(CheckpointNotFoundError, match="no committed step 1; it has"):
            async with reader.reading(1):
                pass
    assert entries(tmp_path) == ["step-2"]


async def test_a_lease_goes_on_after_a_store_denies_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sidestream.Checkpointer(tmp_path, lease_s=0.4) as reader:
        await save_steps(reader, 1)
        async with reader.reading(1):
            before = leases_in(tmp_path)
            with monkeypatch.context() as patched:
                patched.setattr(LocalStore, "put", missing)
                await until(lambda: "could not be renewed" in str(reader.health().leases), "a renewal that fails")
            await until(lambda: leases_in(tmp_path) not in ([], before), "a renewal")
    assert leases_in(tmp_path) == []


async def missing(*_: object, **__: object) -> None:
    raise FileNotFoundError("404")


def test_the_name_of_the_longest_lease() -> None:
    seen = parse_lease(f"step-1.read{10**9}.{'a' * 32}", 0.0)
    assert seen is not None
    assert (seen.directory, seen.ttl_s) == ("step-1", 1e9)


async def test_a_lease_of_the_dead_expires(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1), lease_s=1) as writer:
        await save_steps(writer, 1)
        await writer.prune()
        (tmp_path / ".leases").mkdir(exist_ok=True)
        lease = tmp_path / ".leases" / f"step-1.read6.{'0' * 32}"
        lease.write_text("{}")
        await save_steps(writer, 2)
        os.utime(lease)  # it has 6 s from now on
        assert "step-1" in (await writer.prune()).leased
        os.utime(lease, (1, 1))  # it has expired; half of its time has to pass before this process believes it

        async def gone() -> bool:
            await writer.prune()
            return entries(tmp_path) == ["step-2"]

        await until(gone, "the lease to expire, and to be cleared away as well")


async def test_a_clock_that_was_set_forward_ends_no_lease_of_the_living(tmp_path: Path) -> None:
    """All files are old at once; a living reader has renewed its lease before anybody takes it for dead."""
    async with (
        sidestream.Checkpointer(tmp_path, lease_s=4) as reader,
        sidestream.Checkpointer(tmp_path, keep=KeepLast(1), lease_s=4) as writer,
    ):
        await save_steps(reader, 1, 2)
        async with reader.reading(1):
            (name,) = leases_in(tmp_path)
            os.utime(tmp_path / ".leases" / name, (1, 1))
            assert (await writer.prune()).leased == ("step-1",)
            await until(lambda: leases_in(tmp_path) != [name], "the renewal")
            assert (await writer.prune()).leased == ("step-1",)
        assert (await writer.prune()).deleted == ("step-1",)


async def test_a_reader_gives_way_to_a_deletion_that_has_begun(tmp_path: Path) -> None:
    """Its lease comes second, so it does not read what is about to go."""
    async with sidestream.Checkpointer(
        tmp_path, timeout_s=60, save=sidestream.SaveOptions(timeout_s=60), load=sidestream.LoadOptions(timeout_s=60)
    ) as reader:
        await save_steps(reader, 1, 2)
        (tmp_path / ".leases").mkdir()
        deleter = tmp_path / ".leases" / f"step-1.delete300.{'0' * 32}"
        deleter.write_text("{}")
        reading = asyncio.create_task(reader.restore(blank(), 1))
        await until(lambda: any("read" in name for name in leases_in(tmp_path)), "the reader's lease")
        await until(lambda: not any("read" in name for name in leases_in(tmp_path)), "it to give way")
        assert not reading.done()
        with time_limit(Deadline.after(60)):
            await LocalStore(tmp_path).remove_directory("step-1", durability="flush")
        deleter.unlink()
        with pytest.raises(CheckpointNotFoundError):
            await reading
        assert await reader.restore(blank()) == 2


READER = """
import asyncio, os, sys
import sidestream
from _run import blank

async def main():
    async with sidestream.Checkpointer(sys.argv[1]) as reader:
        await reader.restore(blank())  # imports and opens all that it needs
        print(reader.restored.leased)
        if os.geteuid() == 0:
            os.seteuid(65534)
        step = await reader.restore(blank())
        print(step, reader.restored.leased, (await reader.verify()).ok, await reader.read_metadata())

asyncio.run(main())
"""


async def test_without_the_right_to_write_a_reader_reads_without_a_lease() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        run = Path(folder) / "run"
        async with sidestream.Checkpointer(run) as writer:
            await save_steps(writer, 1, loss=0.5)
        Path(folder).chmod(0o755)
        if os.geteuid() != 0:
            run.chmod(0o555)
        with process(READER, run) as reader:
            assert await line_of(reader) == str(os.geteuid() == 0)
            assert await line_of(reader) == "1 False True {'loss': 0.5}"
            assert await ended(reader) == (0, "")
        run.chmod(0o755)


# --- attempts ---------------------------------------------------------------------------------------------------------


CALLED: tuple[Callable[[str, str], str], ...] = (attempt_name, lambda target, save_id: f".{target}.{save_id}.partial")


async def test_an_attempt_of_the_dead_is_collected_and_one_of_the_living_is_not(tmp_path: Path) -> None:
    """The living ones are as old, and as silent, as the dead ones: only their lease tells them apart."""
    held = HeldStager()
    dead = [tmp_path / called("step-1", "a" * 32) for called in CALLED]
    unleased = [tmp_path / called("step-8", "b" * 32) for called in CALLED]
    foreign = [tmp_path / called("weights", "c" * 32) for called in CALLED]
    async with (
        sidestream.Checkpointer(tmp_path, lease_s=30, stager=held) as slow,  # it has a lease after a quarter of that
        sidestream.Checkpointer(tmp_path, lease_s=1, abandoned_after_s=3600) as other,
    ):
        pending = slow.async_save(state_of(5), step=5)
        await until(lambda: any("save" in name for name in leases_in(tmp_path)), "its lease")
        living = [tmp_path / called("step-5", "d" * 32) for called in CALLED]  # more attempts at the leased step
        for path in (*dead, *living, *unleased, *foreign):
            path.mkdir()
            (path / "__0_1.distcp").write_bytes(b"x")
        (tmp_path / ".leases" / f"step-1.save1.{'e' * 32}").write_text("{}")
        for path in (*dead, *living, *foreign):
            for one in (path / "__0_1.distcp", path):
                os.utime(one, (1, 1))

        async def collected() -> bool:
            await other.prune()
            return not any(path.exists() for path in dead)

        try:
            await until(collected, "the dead ones to be collected")
            assert all(path.exists() for path in living)
            assert all(path.exists() for path in unleased), "nobody knows about its writer: it has to be much older"
            assert all(path.exists() for path in foreign), "it was to become no step"
        finally:
            held.let_go()
        assert (await pending).step == 5
    assert (tmp_path / "step-5").exists()


@pytest.mark.parametrize("name", [attempt_name("step-8.g2", "b" * 32), f".step-8.{'b' * 32}.partial"])
async def test_an_attempt_without_a_lease_is_collected_by_age(tmp_path: Path, name: str) -> None:
    attempt = tmp_path / name
    attempt.mkdir()
    os.utime(attempt, (1, 1))
    async with sidestream.Checkpointer(tmp_path, lease_s=1, abandoned_after_s=60) as checkpoints:
        assert (await checkpoints.prune()).abandoned == (), "not at first sight: the clock may have been set"

        async def collected() -> bool:
            return (await checkpoints.prune()).abandoned == (attempt.name,)

        await until(collected, "it to be collected")
    assert entries(tmp_path) == []


async def test_a_writer_whose_attempt_was_taken_away_publishes_nothing(tmp_path: Path) -> None:
    """As after a suspension that was longer than every lease: an error, and nothing torn."""
    writer, collector = LocalStore(tmp_path), LocalStore(tmp_path)
    transaction = writer.begin(Attempt("step-1", "directory", "a" * 32, "flush"))
    files = [("__0_1.distcp", BytesBody(b"x")), ("__0_2.distcp", BytesBody(b"y"))]
    await asyncio.to_thread(transaction.write, files)
    with time_limit(Deadline.after(60)):
        (left,) = await collector.leftovers()
        assert (left.name, left.kind) == (transaction.attempt.name, "attempt")
        await collector.discard(left.name)
    for name in ("manifest", ".metadata"):
        with pytest.raises(StorageError):
            transaction.put(name, b"z")
    with pytest.raises(StorageError):
        transaction._make_visible()
    transaction.discard()
    assert entries(tmp_path) == []


class Failing:
    """A policy of somebody's own."""

    def kept(self, steps: Sequence[SavedStep]) -> frozenset[int]:
        return frozenset(step.step for step in steps if step.metadata["loss"] < 1)


async def test_a_policy_that_fails_is_heard_of(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="loss"):
        async with sidestream.Checkpointer(tmp_path, keep=Failing()) as checkpoints:
            await save_steps(checkpoints, 1)
    assert entries(tmp_path) == ["step-1"]


async def test_after_going_back_what_was_saved_last_stays(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        await save_steps(checkpoints, 100, 51)
        last = [checkpoints.async_save(state_of(step), step=step) for step in (52, 53)]
        await asyncio.gather(*last)
    assert set(entries(tmp_path)) >= {"step-100", "step-53"}


async def test_a_step_whose_manifest_is_gone_is_told_and_not_deleted(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, loss=0.1)
        await save_steps(checkpoints, 2, 3, loss=0.5)
    next((tmp_path / "step-1").glob("manifest-*")).unlink()
    async with sidestream.Checkpointer(tmp_path, keep=KeepBest("loss") | KeepLast(1)) as checkpoints:
        pruned = await checkpoints.prune()
        assert "step-1" in pruned.damaged
    assert "step-1" in entries(tmp_path)


async def test_a_preview_says_what_would_go_and_changes_nothing(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3)
    async with sidestream.Checkpointer(tmp_path) as everything:
        assert await everything.prune(dry_run=True) == sidestream.Pruned()
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1)) as checkpoints:
        async with sidestream.Checkpointer(tmp_path) as reader, reader.reading(1):
            before = entries(tmp_path)
            assert await checkpoints.prune(dry_run=True) == sidestream.Pruned(("step-2",), ("step-1",))
            assert entries(tmp_path) == before
        assert (await checkpoints.prune(dry_run=True)).deleted == ("step-1", "step-2")
        assert (await checkpoints.prune()).deleted == ("step-1", "step-2")
        assert (await checkpoints.prune(dry_run=True)).deleted == ()


async def test_of_two_saves_that_overlap_the_one_begun_later_is_the_last(tmp_path: Path) -> None:
    """Whichever ends first: after going back neither may go while it is the newest of what this process wrote."""
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 100)
    held = HeldStager()
    async with sidestream.Checkpointer(tmp_path, keep=KeepLast(1), stager=held) as checkpoints:
        begun = [checkpoints.async_save(state_of(step), step=step) for step in (52, 53)]
        await until(lambda: len(held.held) == 2, "both stages")
        for at in (1, 0):
            held.let_go(at)
            await begun[at]
            await checkpoints.prune()
            assert "step-53" in entries(tmp_path)
        assert checkpoints.health().last_saved == 53
    assert set(entries(tmp_path)) >= {"step-100", "step-53"}


def replace_step(run: Path, name: str, other: Path) -> None:
    """Another process deletes the step, and publishes another save of it."""
    (run / name).rename(run / f".retired-{name}")
    shutil.rmtree(run / f".retired-{name}")
    (other / name).rename(run / name)


def pruner_of(store: LocalStore, leases: Leases | None = None, keep: sidestream.Retention | None = None) -> Pruner:
    return Pruner(
        store,
        str(store.root),
        keep or KeepLast(1),
        leases or Leases(store, 60.0),
        "flush",
        lease_s=60.0,
        abandoned_after_s=60.0,
    )


class DeletedMeanwhile(LocalStore):
    """Another process deletes a step as soon as its shard is read; ``how``: to the end, or as far as the rename that
    makes it invisible, or it publishes another save of the step, or it is ``older``, the step before, that goes."""

    def __init__(self, root: Path, how: str) -> None:
        super().__init__(root)
        self._how = how
        self._lock = threading.Lock()

    def source(self, directory: str) -> LocalSource:
        source = super().source(directory)
        files_of = source.files

        def files(waiting: Callable[[], None]) -> LocalFiles:
            found = files_of(waiting)
            read = found.read

            def delete_and_read(name: str, ranges: Sequence[ReadRange], stop: Stop) -> None:
                with self._lock:
                    if self._how == "replaced" and (self.root / "other" / directory).exists():
                        replace_step(self.root, directory, self.root / "other")
                    elif self._how == "older" and directory == "step-3":
                        shutil.rmtree(self.root / "step-2", ignore_errors=True)
                    elif (
                        self._how in ("deleted", "renamed")
                        and directory == "step-3"
                        and (self.root / directory).exists()
                    ):
                        (self.root / directory).rename(self.root / ".retired-step-3")
                        if self._how == "deleted":
                            shutil.rmtree(self.root / ".retired-step-3")
                read(name, ranges, stop)

            found.read = delete_and_read  # type: ignore[method-assign]
            return found

        source.files = files  # type: ignore[method-assign]
        return source


@pytest.mark.parametrize("how", ["deleted", "renamed"])
async def test_a_step_that_is_deleted_while_it_is_verified_is_not_counted(tmp_path: Path, how: str) -> None:
    """It is not damaged either. Its files may be read to the end, so that it verifies: older steps stay all the
    same."""
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3)
    with time_limit(Deadline.after(60)):
        pruned = await pruner_of(DeletedMeanwhile(tmp_path, how)).run(tuple)
    assert (pruned.verified, pruned.deleted, pruned.damaged) == ("step-2", ("step-1",), ())
    assert [name for name in entries(tmp_path) if not name.startswith(".")] == ["step-2"]


async def test_a_step_that_another_process_deletes_meanwhile_is_not_counted(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3)
    with time_limit(Deadline.after(60)):
        pruned = await pruner_of(DeletedMeanwhile(tmp_path, "older"), keep=KeepLast(2)).run(tuple)
    assert pruned.deleted == ()
    assert [name for name in entries(tmp_path) if not name.startswith(".")] == ["step-1", "step-3"]


async def test_a_reader_that_comes_while_the_step_is_looked_at(tmp_path: Path) -> None:
    """The lease of the deleter may have expired while the storage stalled, so that a reader does not wait for it."""
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2)

    class Stalling(LocalStore):
        def source(self, directory: str) -> LocalSource:
            if directory == "step-1" and any(".delete" in lease for lease in leases_in(tmp_path)):
                (tmp_path / ".leases" / f"step-1.read60.{'0' * 32}").write_text("{}")
            return super().source(directory)

    with time_limit(Deadline.after(60)):
        pruned = await pruner_of(Stalling(tmp_path)).run(tuple)
    assert (pruned.deleted, pruned.leased) == ((), ("step-1",))
    assert "step-1" in entries(tmp_path)


async def test_the_step_that_verified_goes_while_others_are_deleted(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3, 4)

    class Losing(LocalStore):
        async def remove_directory(self, directory: str, *, durability: Durability, use: Use = "remove") -> bool:
            done = await super().remove_directory(directory, durability=durability, use=use)
            shutil.rmtree(tmp_path / "step-4", ignore_errors=True)
            return done

    with time_limit(Deadline.after(60)):
        pruned = await pruner_of(Losing(tmp_path)).run(tuple)
    assert (pruned.deleted, pruned.verified) == (("step-1", "step-2"), "step-3"), "by the step that is there"
    assert [name for name in entries(tmp_path) if not name.startswith(".")] == ["step-3"]


async def test_a_step_that_is_replaced_while_it_is_verified_is_verified_again(tmp_path: Path) -> None:
    for run, steps in ((tmp_path, (1, 3)), (tmp_path / "other", (3,))):
        async with sidestream.Checkpointer(run) as checkpoints:
            await save_steps(checkpoints, *steps)
    flip(tmp_path / "other" / "step-3")
    pruner = pruner_of(DeletedMeanwhile(tmp_path, "replaced"))
    with time_limit(Deadline.after(60)):
        pruned = await pruner.run(tuple)
        assert (pruned.verified, pruned.deleted, pruned.damaged) == (None, (), ()), "the save that was read is gone"
        pruned = await pruner.run(tuple)
        assert (pruned.verified, pruned.deleted, pruned.damaged) == (None, (), ("step-3",))


async def test_a_step_that_is_replaced_before_it_is_deleted_stays(tmp_path: Path) -> None:
    """The pass judged the save that is gone."""
    for run, steps in ((tmp_path, (1, 2, 3)), (tmp_path / "other", (2,))):
        async with sidestream.Checkpointer(run) as checkpoints:
            await save_steps(checkpoints, *steps)
    there = (tmp_path / "other" / "step-2" / ".metadata").read_bytes()

    class Late(Leases):
        async def take(self, directory: str, kind: Kind) -> Lease:
            if kind == "delete" and directory == "step-2" and (tmp_path / "other" / directory).exists():
                replace_step(tmp_path, directory, tmp_path / "other")
            return await super().take(directory, kind)

    store = LocalStore(tmp_path)
    pruner = pruner_of(store, Late(store, 60.0))
    with time_limit(Deadline.after(60)):
        pruned = await pruner.run(tuple)
        assert (pruned.deleted, pruned.leased) == (("step-1",), ())
        assert (tmp_path / "step-2" / ".metadata").read_bytes() == there
        assert leases_in(tmp_path) == []
        assert (await pruner.run(tuple)).deleted == ("step-2",), "the next pass judges the save that is there"


@pytest.mark.parametrize(
    ("keep", "by_number"),
    [
        (KeepLast(2), True),
        (KeepEvery(steps=5) | KeepLast(2), True),
        (KeepEvery(seconds=5), False),
        (KeepLast(2) | KeepEvery(seconds=5), False),
        (KeepBest("loss") | KeepLast(2), False),
    ],
)
def test_policies_that_use_no_more_than_numbers(keep: sidestream.Retention, by_number: bool) -> None:
    assert uses_only_numbers(keep) is by_number
