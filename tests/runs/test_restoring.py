"""What is restored when not everything is good, and what can be known about a step without loading it."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _run import blank, flip, is_state_of, leases_in, save_steps, state_of
from phases import warned

import sidestream
from sidestream._run.leases import Leases
from sidestream._run.restore import StepSelector, choose
from sidestream._run.steps import list_steps
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import LocalStore
from sidestream._storage.local import read as local_read
from sidestream.errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidOptionError, MissingKeysError


async def test_a_fallback_is_asked_for_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2, 3, 4)
        flip(tmp_path / "step-4")
        (tmp_path / "step-3" / ".metadata").write_bytes(b"")
        for _ in range(2):
            state = blank()
            with pytest.raises(CorruptCheckpointError, match="checksum"):
                await checkpoints.restore(state)
            with pytest.raises(CorruptCheckpointError, match="checksum"):
                await checkpoints.restore(state, fallback="never")
        assert not warned(caplog)
        state = blank()
        with caplog.at_level(logging.WARNING):
            assert await checkpoints.restore(state, fallback="older") == 2
        assert is_state_of(state, 2)
        report = checkpoints.restored
        assert report is not None
        assert (report.step, report.leased) == (2, True)
        assert [(one.step, one.generation) for one in report.passed_over] == [(4, 1), (3, 1)]
        assert all(isinstance(one.error, CorruptCheckpointError) for one in report.passed_over)
        assert ["step-4" in record.message for record in warned(caplog)] == [True, False]
        health = checkpoints.health()
        assert list(health.passed_over) == ["step-4", "step-3"]
        assert not health.ok
        assert await checkpoints.restore(blank(), 1, fallback="older") == 1
        assert checkpoints.restored is not None
        assert checkpoints.restored.passed_over == ()
        assert checkpoints.health().ok
    assert leases_in(tmp_path) == []


async def test_an_older_generation_comes_before_an_older_step(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2)
        await checkpoints.save(state_of(2) | {"step": "again"}, step=2)
        flip(tmp_path / "step-2.g2")
        state = blank()
        assert await checkpoints.restore(state, 2, fallback="older") == 2
        assert is_state_of(state, 2)
        flip(tmp_path / "step-2")
        assert await checkpoints.restore(state, 2, fallback="older") == 1
        with pytest.raises(CorruptCheckpointError, match=r"step-2\.g2|checksum"):
            await checkpoints.restore(state, 2)


async def test_when_none_is_good(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2)
        flip(tmp_path / "step-1")
        flip(tmp_path / "step-2")
        with pytest.raises(CorruptCheckpointError) as raised:
            await checkpoints.restore(blank(), fallback="older")
        assert any("step-1 is damaged too" in note for note in raised.value.__notes__)
        assert raised.value.written == ("t",)
        with pytest.raises(CheckpointNotFoundError, match="no committed step 7"):
            await checkpoints.restore(blank(), 7)


async def test_a_fallback_never_mixes_two_steps(tmp_path: Path) -> None:
    """The older step lacks a tensor that was read of the damaged one before the damage was found."""
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save({"b": torch.ones(4096)}, step=1)
        await checkpoints.save({"a": torch.full((4096,), 2.0), "b": torch.full((1 << 20,), 2.0)}, step=2)
        flip(tmp_path / "step-2")
        state = {"a": torch.zeros(4096), "b": torch.zeros(4096)}
        with pytest.raises(sidestream.errors.StateMismatchError):
            await checkpoints.restore(state, fallback="older")  # nothing that is not damage leads to an older step
        await checkpoints.save({"a": torch.full((4096,), 3.0), "b": torch.full((4096,), 3.0)}, step=3)
        flip(tmp_path / "step-3")
        (tmp_path / "step-2" / ".metadata").write_bytes(b"")
        assert await checkpoints.restore(state, fallback="older", allow_missing=True) == 1
        assert checkpoints.restored is not None
        assert checkpoints.restored.missing == ("a",)
        assert (state["a"] == 0).all(), "nothing of the damaged step"
        assert (state["b"] == 1).all()


async def test_what_is_not_damage_is_raised(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save({"a": 1, "b": 2}, step=1)
        await checkpoints.save({"a": 1}, step=2)
        with pytest.raises(MissingKeysError):
            await checkpoints.restore({"a": 0, "b": 0}, fallback="older")
        for fallback in (True, "any", None):
            with pytest.raises(InvalidOptionError, match="fallback"):
                await checkpoints.restore({"a": 0}, fallback=fallback)  # type: ignore[arg-type]
        for step in ("newest", 1.0, -1):
            with pytest.raises(InvalidOptionError, match="step="):
                await checkpoints.restore({"a": 0}, step)  # type: ignore[arg-type]


# --- metadata ---------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "loss": 0.25,
    "diverged": math.inf,
    "ok": True,
    "name": "run Ω",
    "none": None,
    "big": 1 << 80,
    "config": {"layers": [1, 2, {"width": 3}], "": "empty key"},
}


async def test_metadata_comes_back_without_the_state(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        given = {**PLAIN, "tuple": (1, 2)}
        pending = checkpoints.async_save(state_of(1), step=1, metadata=given)
        given["loss"] = 7.0
        await pending
        await save_steps(checkpoints, 2)
        assert await checkpoints.read_metadata(1) == {**PLAIN, "tuple": [1, 2]}
        assert await checkpoints.read_metadata() == {}
        (tmp_path / "step-1" / "__0_1.distcp").unlink()
        assert (await checkpoints.read_metadata(1))["loss"] == 0.25, "nothing else of the step is read"
        with pytest.raises(CheckpointNotFoundError):
            await checkpoints.read_metadata(3)
    await sidestream.save(state_of(3), tmp_path / "alone", metadata=PLAIN)
    assert (await sidestream.open_checkpoint(tmp_path / "alone")).metadata == PLAIN


async def test_metadata_is_data_that_stock_dcp_ignores(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save({"t": torch.ones(10)}, step=1, metadata=PLAIN)
        assert (await checkpoints.verify(1)).ok
    target = {"t": torch.zeros(10)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert target["t"].tolist() == [1.0] * 10
    (manifest,) = (tmp_path / "step-1").glob("manifest-*")
    assert list(json.loads(manifest.read_text().splitlines()[-1])) == ["metadata"]


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        ({"loss": torch.tensor(1.0)}, r"'loss'.*\.item\(\)"),
        ({"config": {"f": print}}, r"\['config'\]\['f'\]"),
        ({"a": {1: 2}}, "the key 1"),
        ({"a": b"bytes"}, "bytes"),
        ({"a": {1, 2}}, "set"),
        ([1], "has to be a mapping"),
        ({"a": "x" * 300_000}, "262144 are the limit"),
    ],
)
async def test_metadata_is_checked_before_anything_is_written(tmp_path: Path, metadata: Any, what: str) -> None:
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        with pytest.raises(InvalidOptionError, match=what):
            checkpoints.async_save(state_of(1), step=1, metadata=metadata)
        with pytest.raises(InvalidOptionError, match=what):
            await sidestream.save(state_of(1), tmp_path / "one", metadata=metadata)
    assert list(tmp_path.iterdir()) == []
    nested: dict[str, Any] = {}
    nested["self"] = nested
    with pytest.raises(InvalidOptionError, match="deeper"):
        await sidestream.save({}, tmp_path / "two", metadata=nested)


async def test_altered_metadata_is_noticed(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, loss=0.5)
        (manifest,) = (tmp_path / "step-1").glob("manifest-*")
        manifest.write_bytes(manifest.read_bytes().replace(b"0.5", b"0.1"))
        with pytest.raises(CorruptCheckpointError, match="metadata"):
            await checkpoints.read_metadata()
        with pytest.raises(CorruptCheckpointError):
            await checkpoints.restore(blank())
        assert not (await checkpoints.verify()).ok


# --- a run that changes while it is looked at ---


class Overtaken(LocalStore):
    """Between the first listing and the first look another process commits step 10 and deletes step 9."""

    overtaken = False

    async def directories(self, directory: str = ".") -> list[str]:
        listed = await super().directories()
        if not self.overtaken:
            self.overtaken = True
            async with sidestream.Checkpointer(self.root) as other:
                await save_steps(other, 10)
            await self.remove_directory("step-9", durability="flush")
        return listed


@pytest.mark.parametrize("there", [(9,), (7, 9)], ids=["one", "two"])
async def test_a_listing_that_was_overtaken_leads_to_no_older_step_and_not_to_none(
    tmp_path: Path, there: tuple[int, ...]
) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, *there)
    (tmp_path / "step-99").mkdir()  # never was a checkpoint, and is in nobody's way
    with time_limit(Deadline.after(60)):
        chosen = await choose(Overtaken(tmp_path), Leases(LocalStore(tmp_path), 60.0), StepSelector(), ())
    assert chosen is not None
    step, lease = chosen
    assert step.step == 10
    assert lease is not None
    await lease.release()


@pytest.mark.parametrize("there", [(9,), (7, 9)], ids=["one", "two"])
async def test_a_listing_that_was_overtaken_is_made_again(tmp_path: Path, there: tuple[int, ...]) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, *there)
    (tmp_path / "step-99").mkdir()
    with time_limit(Deadline.after(60)):
        found = await list_steps(Overtaken(tmp_path))
    assert [step.step for step in found] == [*there[:-1], 10]


async def test_a_step_that_is_deleted_while_it_is_opened_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marker is deleted first: the reader sees a manifest without a marker."""
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await save_steps(checkpoints, 1, 2)
        place = local_read._place

        @contextmanager
        def placed(path: Path, within: Any) -> Iterator[Any]:
            with place(path, within) as found:  # the directory is open
                if path == tmp_path / "step-2" / ".metadata" and path.exists():
                    path.unlink()
                    path.parent.rename(tmp_path / ".retired-0")
                yield found

        monkeypatch.setattr(local_read, "_place", placed)
        with pytest.raises(CheckpointNotFoundError):
            await checkpoints.restore(blank(), step=2)
        assert await checkpoints.restore(blank()) == 1
