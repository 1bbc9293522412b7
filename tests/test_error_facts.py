"""Errors say which phase of what has failed, also on other ranks and from the writer process."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestream
from sidestream import errors
from sidestream._group import failure
from sidestream._group.failure import pack_all, unpack_all
from sidestream._runtime.error_data import data_of, error_from
from sidestream._worker.wire import pack, unpack


async def test_a_save_names_its_phase_and_its_place(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(errors.CheckpointExistsError) as taken:
        await sidestream.save({"w": torch.ones(3)}, tmp_path / "taken")
    assert (taken.value.phase, taken.value.url) == ("write", str(tmp_path / "taken"))
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        with pytest.raises(errors.UnsafeObjectError) as unsafe:
            await checkpoints.save({"w": object()}, step=3)
    assert (unsafe.value.phase, unsafe.value.step) == ("plan", 3)
    assert unsafe.value.left_behind is None


async def test_a_load_names_its_phase_and_its_place(tmp_path: Path) -> None:
    await sidestream.save({"w": torch.ones(300)}, tmp_path / "c")
    with pytest.raises(errors.CheckpointNotFoundError) as absent:
        await sidestream.load({"w": torch.zeros(300)}, tmp_path / "none")
    assert (absent.value.phase, absent.value.url) == ("open", str(tmp_path / "none"))
    with pytest.raises(errors.ShapeMismatchError) as shape:
        await sidestream.load({"w": torch.zeros(4)}, tmp_path / "c")
    assert shape.value.phase == "plan"
    (shard,) = (tmp_path / "c").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[content.index(b"\0\0\x80\x3f" * 100)] ^= 1
    shard.write_bytes(content)
    with pytest.raises(errors.CorruptCheckpointError) as altered:
        await sidestream.load({"w": torch.zeros(300)}, tmp_path / "c")
    assert (altered.value.phase, altered.value.fqn, altered.value.file) == ("read", "w", shard.name)


def fully_known() -> errors.SidestreamError:
    error = errors.CorruptCheckpointError("altered", file="__0_0.distcp", fqn="w", offset=7)
    return error.within("w").within("/c", " (nothing was changed)").about(phase="read", url="/c", step=4)


@pytest.mark.parametrize("through", ["copy", "pickle", "ranks", "writer process"])
def test_facts_travel(through: str) -> None:
    error = fully_known()
    assert str(error) == "/c: w: altered (nothing was changed)"
    again: Any = {
        "copy": lambda: copy.copy(error),
        "pickle": lambda: pickle.loads(pickle.dumps(error)),
        "ranks": lambda: unpack_all(pack_all([failure.unpack(failure.pack(2, "read", error))])).failures[0].error,
        "writer process": lambda: error_from(unpack(pack(data_of(error, "the writer process")))),
    }[through]()
    assert type(again) is errors.CorruptCheckpointError
    assert str(again) == str(error)
    facts = ("phase", "url", "step", "fqn", "file", "offset", "written", "left_behind")
    assert [getattr(again, name) for name in facts] == ["read", "/c", 4, "w", "__0_0.distcp", 7, (), None]


@pytest.mark.parametrize("through", ["ranks", "writer process"])
def test_notes_and_causes_travel(through: str) -> None:
    error = fully_known()
    error.add_note("seen twice")
    error.__cause__ = OSError(5, "Input/output error", "/c/__0_0.distcp")
    error.__cause__.__cause__ = RuntimeError("from s3://user:secret@bucket/key?signature=secret")
    again: Any = {
        "ranks": lambda: unpack_all(pack_all([failure.unpack(failure.pack(2, "read", error))])).failures[0].error,
        "writer process": lambda: error_from(unpack(pack(data_of(error, "the writer process")))),
    }[through]()
    assert again.__notes__ == ["seen twice"]
    assert (type(again.__cause__), str(again.__cause__)) == (OSError, str(error.__cause__))
    assert (type(again.__cause__.__cause__), str(again.__cause__.__cause__)) == (RuntimeError, "from s3://bucket/key")


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("cause", [FileNotFoundError(Path("/data/vocab"), "gone"), Unreadable(), OSError(Unreadable())])
def test_any_cause_travels(cause: Exception) -> None:
    error = fully_known()
    error.__cause__ = cause
    (again,) = unpack_all(pack_all([failure.unpack(failure.pack(1, "plan", error))])).failures
    assert (again.text, type(again.error)) == (str(error), errors.CorruptCheckpointError)
    assert str(error_from(unpack(pack(data_of(error, "the writer process"))))) == str(error)


def test_no_secret_reaches_other_ranks() -> None:
    error = errors.CorruptCheckpointError("s3://user:secret@bucket/key?sig=secret is altered")
    error.add_note("read from s3://user:secret@bucket/key")
    error.__cause__ = RuntimeError("s3://user:secret@bucket")
    assert b"secret" not in pack_all([failure.unpack(failure.pack(1, "read", error))])
    assert b"secret" not in pack(data_of(error, "the writer process"))


def test_an_error_that_needs_more_than_data_travels_as_text() -> None:
    before = errors.RankFailuresError([failure.unpack(failure.pack(1, "read", fully_known()))])
    (again,) = unpack_all(pack_all([failure.unpack(failure.pack(0, "start", before))])).failures
    assert (again.kind, again.text, again.error) == ("RankFailuresError", str(before), None)
    assert type(error_from(data_of(before, "here"))) is RuntimeError


def test_what_is_known_stays() -> None:
    error = fully_known().about(phase="open", fqn="other", left_behind="attempt")
    assert (error.phase, error.fqn, error.left_behind) == ("read", "w", "attempt")
