"""Exports beside a save, from its snapshot and from its checkpoint, read by safetensors and by transformers."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from keywords import for_run
from late_export import Late
from phases import warned
from safetensors import safe_open
from safetensors.torch import load_file

import sidestream
from sidestream import HF, AsyncStager, Checkpointer, KeepLast, async_save, events, save, strip_prefix
from sidestream._convert.streamed import PayloadPiece, _StreamedFile
from sidestream._engine.calls import in_operation
from sidestream._layout import save_layout
from sidestream._runtime.threads import Stop
from sidestream._storage import LocalStore
from sidestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidOptionError,
    KeyCollisionError,
    MissingKeysError,
    SidestreamError,
    SkippedError,
    SnapshotLostError,
    UnsupportedTensorError,
)
from sidestream.options import WhenFull

WINDOW = 1 << 20


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (WINDOW, WINDOW))


def state_of(seed: int = 0) -> dict[str, Any]:
    """Tensors of all element sizes, of which some leave what follows unaligned, some lie across windows, and two are
    tied."""
    torch.manual_seed(seed)
    weight = torch.randn(700, 901)  # 2.5 MB, not a multiple of 8 bytes
    model = {
        "embed": torch.randn(1000, 512),
        "odd": torch.randn(3).to(torch.bfloat16),
        "mask": torch.rand(13) > 0.5,
        "weight": weight,
        "count": torch.arange(77),
        "half": torch.randn(600, 1001).to(torch.float16),
        "head": weight,
        "none": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    return {"model": model, "optimizer": {"moment": torch.randn(500, 500)}, "step": 3}


def exported(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors in all files of an export."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


MODEL = {"select": "model.*", "names": strip_prefix("model.")}


@pytest.mark.parametrize("saver", ["thread", "process"])
@pytest.mark.parametrize("road", ["snapshot", "checkpoint"])
@pytest.mark.parametrize("shard_bytes", [5 << 30, 3 << 20, 1])
async def test_what_is_exported(road: str, saver: Any, shard_bytes: int, tmp_path: Path) -> None:
    """Both ways give the same files, but for the place of a tensor whose first name is left out."""
    state = state_of()
    budget_bytes = 64 << 20 if road == "snapshot" else 4 << 20  # in the small one the state only passes through
    async with AsyncStager(budget_bytes=budget_bytes) as stager:
        export = HF(tmp_path / "hf", **MODEL, max_shard_bytes=shard_bytes, files={"config.json": b"{}"})
        pending = async_save(
            state, tmp_path / "step", stager=stager, export=export, options=sidestream.SaveOptions(writer=saver)
        )
        await pending
        report = await pending.exports[0]
    expected = {name: tensor for name, tensor in state["model"].items() if name != "head"}
    same(exported(tmp_path / "hf"), expected)
    assert (tmp_path / "hf" / "config.json").read_bytes() == b"{}"
    assert set(report.files) == set(os.listdir(tmp_path / "hf"))
    assert report.nbytes == sum(file.stat().st_size for file in (tmp_path / "hf").iterdir())
    assert set(report.tensors) == set(expected)
    assert report.left_out == ("optimizer.moment",)
    assert ("model.safetensors.index.json" in report.files) == (len(list((tmp_path / "hf").glob("*.safetensors"))) > 1)
    same((await (await sidestream.open_checkpoint(tmp_path / "step")).state_dict())["model"], state["model"])


async def test_both_roads_write_the_same_files(tmp_path: Path) -> None:
    state = state_of()
    for name, budget_bytes in (("snapshot", 64 << 20), ("checkpoint", 4 << 20)):
        async with AsyncStager(budget_bytes=budget_bytes) as stager:
            export = HF(tmp_path / name, **MODEL, dtype=torch.bfloat16, max_shard_bytes=2 << 20)
            await save(state, tmp_path / f"step of {name}", stager=stager, export=export)
    files = {file.name: file.read_bytes() for file in (tmp_path / "snapshot").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "checkpoint").iterdir()}
    assert len(files) > 2


async def test_tied_tensors_are_noted(tmp_path: Path) -> None:
    await save(state_of(), tmp_path / "step", export=HF(tmp_path / "hf", **MODEL))
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "written_by": "sidestream", "head": "weight"}


async def test_tensors_that_are_tied_to_one_that_is_left_out(tmp_path: Path) -> None:
    """The snapshot has it where the first of its names comes."""
    shared = torch.randn(400, 400)
    state = {"ema": {"w": shared}, "model": {"a": torch.randn(300, 300), "w": shared}}
    await save(state, tmp_path / "step", export=HF(tmp_path / "hf", **MODEL))
    same(exported(tmp_path / "hf"), state["model"])


async def test_dtypes_by_pattern(tmp_path: Path) -> None:
    state = {"norm": torch.randn(1001), "weight": torch.randn(1001, 301), "count": torch.arange(5)}
    dtype = {"norm": torch.float32, "*": torch.bfloat16}
    info = await save(state, tmp_path / "step", export=HF(tmp_path / "hf", dtype=dtype))
    same(exported(tmp_path / "hf"), {**state, "weight": state["weight"].to(torch.bfloat16)})
    assert info.exports[0].cast == ("weight",)
    await sidestream.convert(tmp_path / "step", tmp_path / "converted", format="safetensors", dtype=dtype)
    same(exported(tmp_path / "converted"), exported(tmp_path / "hf"))


async def test_names_by_mapping_and_function(tmp_path: Path) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(3), "c": torch.ones(1)}
    exports = [
        HF(tmp_path / "mapping", names={"a": "first"}),
        HF(tmp_path / "function", names=lambda name: None if name == "b" else name * 2),
    ]
    info = await save(state, tmp_path / "step", export=exports)
    assert exported(tmp_path / "mapping").keys() == {"first", "b", "c"}
    assert exported(tmp_path / "function").keys() == {"aa", "cc"}
    assert info.exports[1].left_out == ("b",)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"names": lambda name: "same"}, KeyCollisionError),
        ({"names": {"absent": "x"}}, InvalidOptionError),
        ({"names": lambda name: 3}, InvalidOptionError),
        ({"names": lambda name: ""}, InvalidOptionError),
        ({"select": "nothing.*"}, MissingKeysError),
        ({"files": {"config.json": "/no/such/file"}}, SidestreamError),
        ({"files": {"config.json": "/dev/zero"}}, InvalidOptionError),
    ],
)
async def test_a_failed_export_fails_alone(
    options: dict[str, Any], error: type[Exception], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"a": torch.ones(3), "b": torch.zeros(3)}
    with caplog.at_level(logging.ERROR, "sidestream"):
        info = await save(state, tmp_path / "step", export=HF(tmp_path / "hf", **options))
    assert isinstance(info.exports[0], error)
    assert "exporting" in caplog.text
    assert sorted(os.listdir(tmp_path)) == ["step"]  # nothing is left of the export


async def test_a_dtype_that_safetensors_lack(tmp_path: Path) -> None:
    state = {"a": torch.ones(3, dtype=torch.complex128)}
    info = await save(state, tmp_path / "step", export=HF(tmp_path / "hf"))
    assert isinstance(info.exports[0], UnsupportedTensorError)


async def test_a_target_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "kept").touch()
    info = await save(state_of(), tmp_path / "step", export=HF(tmp_path / "hf", **MODEL))
    assert isinstance(info.exports[0], CheckpointExistsError)
    assert os.listdir(tmp_path / "hf") == ["kept"]


@pytest.mark.parametrize(
    "export",
    [
        [{"url": "{base}/hf"}, {"url": "{base}/hf"}],
        [{"url": "{base}/step"}],
        [{"url": "{base}/step/hf"}],
        [{"url": "{base}"}],
        [{"url": "{base}/hf-{step}"}],
    ],
)
async def test_places_that_collide(export: list[dict[str, Any]], tmp_path: Path) -> None:
    wanted = [HF(one["url"].replace("{base}", str(tmp_path))) for one in export]
    with pytest.raises(InvalidOptionError):
        await save({"a": torch.ones(3)}, tmp_path / "step", export=wanted)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_shard_bytes": 0},
        {"dtype": torch.int8},
        {"dtype": {"*": "bf16"}},
        {"names": "model."},
        {"files": {"../config.json": b""}},
        {"files": {"model.safetensors": b""}},
        {"files": {".hidden": b""}},
        {"files": {"": b""}},
    ],
)
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        HF("somewhere", **options)


def test_each_thread_that_writes_a_file_raises_the_error_of_its_content() -> None:
    """Not ``StopIteration`` of the generator that has ended: an export starts over only after ``SnapshotLostError``."""

    def content() -> Generator[PayloadPiece]:
        raise SnapshotLostError("taken back")
        yield

    file = _StreamedFile(1 << 20, content(), threading.Lock())
    for _ in range(2):
        with pytest.raises(SnapshotLostError, match="taken back"):
            file.take(0, Stop())


async def test_a_cancelled_export_leaves_the_checkpoint(tmp_path: Path) -> None:
    pending = async_save(state_of(), tmp_path / "step", export=HF(tmp_path / "hf", **MODEL))
    pending.exports[0].cancel()
    await pending
    with pytest.raises(asyncio.CancelledError):
        await pending.exports[0]
    assert repr(pending.exports[0]) == f"<PendingExport {tmp_path / 'hf'}: cancelled>"
    assert os.listdir(tmp_path) == ["step"]


async def test_a_cancelled_save_leaves_nothing(tmp_path: Path) -> None:
    """Also no export that goes on in the background."""
    task = asyncio.create_task(save(state_of(), tmp_path / "step", export=HF(tmp_path / "hf", **MODEL)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(tmp_path) == []


@contextmanager
def choosing() -> Iterator[tuple[Callable[[str], str], threading.Event]]:
    """``names=`` of an export, which waits in a thread when it is first called, and the event that lets it go on."""
    gate, calls = threading.Event(), itertools.count()

    def names(name: str) -> str:
        if next(calls) == 0:
            assert gate.wait(60)
        return name

    try:
        yield names, gate
    finally:
        gate.set()


@pytest.mark.parametrize("budget_bytes", [64 << 20, 4 << 20])
async def test_a_cancel_of_a_save_cancels_its_exports(
    budget_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a log line for each of them."""
    with choosing() as (names, gate):
        async with AsyncStager(budget_bytes=budget_bytes) as stager:
            exports = [HF(tmp_path / "hf1", names=names), HF(tmp_path / "hf2")]
            pending = async_save(state_of(), tmp_path / "step", stager=stager, export=exports)
            await asyncio.sleep(0)
            pending.cancel()
            gate.set()
            for one in (pending, *pending.exports):
                with pytest.raises(asyncio.CancelledError):
                    await one
            for export in pending.exports:
                await export.ended()
    assert os.listdir(tmp_path) == []
    assert warned(caplog) == []


async def test_exports_outlive_a_cancel_after_the_commit(tmp_path: Path) -> None:
    with choosing() as (names, gate):
        pending = async_save(state_of(), tmp_path / "step", export=HF(tmp_path / "hf", names=names, select="model.*"))
        await pending
        assert not pending.cancel()
        gate.set()
        assert (await pending.exports[0]).url == str(tmp_path / "hf")


async def test_a_checkpoint_that_is_replaced_while_it_is_exported(tmp_path: Path) -> None:
    """It is not called damaged. Its files are deleted after the export has opened it."""
    replaced: list[threading.Thread] = []

    def replace(event: object) -> None:
        opened = isinstance(event, events.SaveStarted) and event.save.operation == "export"
        if opened and (tmp_path / "last" / ".metadata").exists() and not replaced:
            again = partial(sidestream.blocking.save, state_of(2), tmp_path / "last", overwrite=True)
            replaced.append(threading.Thread(target=again))
            replaced[0].start()
            replaced[0].join()

    async with AsyncStager(budget_bytes=4 << 20) as stager:
        with events.observe(replace):
            pending = async_save(state_of(1), tmp_path / "last", stager=stager, export=HF(tmp_path / "a", **MODEL))
            await pending
            with pytest.raises(CheckpointNotFoundError, match="another save has replaced it"):
                await pending.exports[0]
    assert replaced
    assert sorted(os.listdir(tmp_path)) == ["last"]


@pytest.mark.parametrize("after", ["replaced", "removed"])
async def test_a_checkpoint_that_is_gone_before_its_export_opens_it(after: str, tmp_path: Path) -> None:
    late: Any = Late(HF(tmp_path / "a"))
    async with AsyncStager(budget_bytes=4 << 20) as stager:
        pending = async_save(state_of(1), tmp_path / "last", stager=stager, export=late)
        await pending
        if after == "replaced":
            await save(state_of(2), tmp_path / "last", overwrite=True)
        else:
            await sidestream.remove(tmp_path / "last")
        late.begins.set()
        with pytest.raises(CheckpointNotFoundError, match="not at"):
            await pending.exports[0]
    assert not (tmp_path / "a").exists()


async def test_a_save_that_cannot_begin(tmp_path: Path) -> None:
    pending = async_save({"bad": object()}, tmp_path / "step", export=HF(tmp_path / "hf"))
    with pytest.raises(SidestreamError):
        await pending
    with pytest.raises(SidestreamError):
        await pending.exports[0]
    assert os.listdir(tmp_path) == []


async def test_memory_is_given_back_behind_the_last_tensor_that_is_exported(tmp_path: Path) -> None:
    """Without the help of the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        async with AsyncStager(budget_bytes=64 << 20) as stager:
            for number, options in enumerate([MODEL, {"select": "model.embed"}, {"select": "optimizer.*"}]):
                export = HF(tmp_path / f"hf{number}", **options)
                await save(state_of(), tmp_path / f"step{number}", stager=stager, export=export)
                async with asyncio.timeout(60):
                    while stager.statistics().leases:
                        await asyncio.sleep(0)
    finally:
        gc.enable()


@pytest.mark.parametrize("budget_bytes", [64 << 20, 4 << 20])
async def test_events(budget_bytes: int, tmp_path: Path) -> None:
    seen: list[events.SaveEvent] = []
    with events.observe(lambda event: isinstance(event, events.SaveEvent) and seen.append(event)):
        async with AsyncStager(budget_bytes=budget_bytes) as stager:
            info = await save(state_of(), tmp_path / "step", stager=stager, export=HF(tmp_path / "hf", **MODEL))
    of_export = [event for event in seen if event.save.operation == "export"]
    names = [type(event).__name__ for event in of_export]
    assert names[-4:] == ["SaveStarted", "SavePlanned", "SaveWritten", "SaveCommitted"]
    assert names[:-4] in ([], ["SaveStarted", "SavePlanned", "SaveSkipped"])  # the memory was lost meanwhile
    assert {event.save.url for event in of_export} == {str(tmp_path / "hf")}
    last = of_export[-1]
    assert isinstance(last, events.SaveCommitted)
    assert last.nbytes == info.exports[0].nbytes


async def test_the_event_of_a_failure(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "kept").touch()
    seen: list[events.SaveFailed] = []
    with events.observe(lambda event: isinstance(event, events.SaveFailed) and seen.append(event)):
        await save(state_of(), tmp_path / "step", export=HF(tmp_path / "hf", **MODEL))
    assert [(event.save.operation, event.error_type) for event in seen] == [("export", "CheckpointExistsError")]


# --- of a run ---


async def test_the_exports_of_a_run(tmp_path: Path) -> None:
    export = HF(tmp_path / "exports" / "step-{step}", **MODEL)
    async with Checkpointer(
        tmp_path / "run", keep=KeepLast(1), export=export, exports_every=2, exports_keep=2
    ) as checkpoints:
        for step in range(1, 9):
            pending = checkpoints.async_save(state_of(step), step=step)
            await pending
            assert len(pending.exports) == (step % 2 == 0)
            if pending.exports:
                await pending.exports[0]
    assert sorted(os.listdir(tmp_path / "exports")) == ["step-6", "step-8"]
    same(exported(tmp_path / "exports" / "step-8"), {k: v for k, v in state_of(8)["model"].items() if k != "head"})


@pytest.mark.parametrize("place", ["directory", "marker", "memory"])
@pytest.mark.parametrize("shard_bytes", [5 << 30, 1])
async def test_old_exports_are_deleted_everywhere(place: str, shard_bytes: int, tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}" if place == "memory" else str(tmp_path)
    storage = sidestream.Storage(commit="marker") if place == "marker" else None
    export = HF(f"{url}/step-{{step}}", max_shard_bytes=shard_bytes, files={"config.json": b"{}"}, storage=storage)
    options = sidestream.SaveOptions(writer="thread")  # another process has no part of memory://
    async with Checkpointer(tmp_path / "run", export=export, exports_keep=2, save=options) as checkpoints:
        for step in range(1, 5):
            await checkpoints.async_save({"a": torch.ones(3), "b": torch.ones(3)}, step=step).exports[0]
    left = fsspec.filesystem("memory" if place == "memory" else "file").find(url)
    directories = {path.rpartition("/")[0].rpartition("/")[2] for path in left if "/run/" not in path}
    assert directories == {"step-3", "step-4"}
    if place != "memory":
        assert sorted(os.listdir(tmp_path)) == ["run", "step-3", "step-4"]


async def test_old_exports_that_cannot_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save raises why, closing does, and ``health`` has it until a deletion succeeds."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("the exports are read-only")

    @contextmanager
    def refusing() -> Iterator[None]:
        with monkeypatch.context() as patched:
            for name in ("rm", "rm_file", "_rm", "delete"):
                patched.setattr(MemoryFileSystem, name, refused)
            yield

    url = f"memory://{uuid.uuid4().hex}"
    export = HF(f"{url}/step-{{step}}", files={"config.json": b"{}"})
    state = {"a": torch.ones(3)}
    with pytest.raises(SidestreamError, match="the exports are read-only"):
        async with Checkpointer(tmp_path / "run", export=export, exports_keep=1) as checkpoints:
            with refusing():
                for step in (1, 2):
                    await checkpoints.save(state, step=step)
                await in_operation(checkpoints._exports.ended, "test")
                assert "the exports are read-only" in (checkpoints.health().retention or "")
                assert not checkpoints.health().ok
                with pytest.raises(SidestreamError, match="the exports are read-only"):
                    await checkpoints.save(state, step=3)
                await checkpoints.save(state, step=3)
            await checkpoints.save(state, step=4)
            await in_operation(checkpoints._exports.ended, "test")
            assert checkpoints.health().ok
            with refusing():
                await checkpoints.save(state, step=5)
                await in_operation(checkpoints._exports.ended, "test")
    assert sorted(os.listdir(tmp_path / "run")) == [f"step-{step}" for step in range(1, 6)]


async def test_a_step_that_is_saved_again_replaces_its_export(tmp_path: Path) -> None:
    export = HF(tmp_path / "exports" / "step-{step}", **MODEL)
    async with Checkpointer(tmp_path / "run", export=export) as checkpoints:
        for seed in (1, 2):
            await checkpoints.async_save(state_of(seed), step=5).exports[0]
    same(exported(tmp_path / "exports" / "step-5"), {k: v for k, v in state_of(2)["model"].items() if k != "head"})
    assert os.listdir(tmp_path / "exports") == ["step-5"]


async def test_the_newest_generation_is_exported_also_if_an_older_export_ends_later(tmp_path: Path) -> None:
    """The older one is skipped, because its step was saved again meanwhile."""
    with choosing() as (names, gate):  # only the first export waits
        export = HF(tmp_path / "exports" / "step-{step}", **{**MODEL, "names": names})
        async with Checkpointer(tmp_path / "run", export=export) as checkpoints:
            older = checkpoints.async_save(state_of(1), step=5)
            newer = checkpoints.async_save(state_of(2), step=5)
            assert [(await one).generation for one in (older, newer)] == [1, 2]
            assert not newer.exports[0].done()
            gate.set()
            await newer.exports[0]
            with pytest.raises(SkippedError, match=re.escape("saved again meanwhile (step-5.g2)")):
                await older.exports[0]
    assert os.listdir(tmp_path / "exports") == ["step-5"]
    expected = {f"model.{k}": v for k, v in state_of(2)["model"].items() if k != "head"}
    same(exported(tmp_path / "exports" / "step-5"), expected)


async def test_a_newer_generation_of_another_process(tmp_path: Path) -> None:
    """The order is decided by the run at the commit, not by what this ``Checkpointer`` has saved."""
    export = HF(tmp_path / "exports" / "step-{step}", **MODEL)
    with choosing() as (names, gate):
        slow = HF(tmp_path / "exports" / "step-{step}", select="model.*", names=names)
        async with (
            Checkpointer(tmp_path / "run", export=slow) as one,
            Checkpointer(tmp_path / "run", export=export) as other,
        ):
            older = one.async_save(state_of(1), step=5)
            await older
            await other.async_save(state_of(2), step=5).exports[0]
            gate.set()
            with pytest.raises(SkippedError, match="saved again"):
                await older.exports[0]
    same(exported(tmp_path / "exports" / "step-5"), {k: v for k, v in state_of(2)["model"].items() if k != "head"})


async def test_a_generation_that_is_not_committed_replaces_no_export(tmp_path: Path) -> None:
    def occupy(event: object) -> None:
        """Make the commit of the save fail, when everything is staged."""
        if isinstance(event, events.SaveWritten) and event.save.operation == "save" and event.save.generation == 2:
            (tmp_path / "run" / "step-5.g2").mkdir()
            (tmp_path / "run" / "step-5.g2" / "taken").touch()

    export = HF(tmp_path / "exports" / "step-{step}", **MODEL)
    async with Checkpointer(tmp_path / "run", export=export) as checkpoints:
        await checkpoints.save(state_of(1), step=5)
        with events.observe(occupy):
            pending = checkpoints.async_save(state_of(2), step=5)
            with pytest.raises(CheckpointExistsError):
                await pending
        with pytest.raises(SnapshotLostError, match="was not saved"):
            await pending.exports[0]
    same(exported(tmp_path / "exports" / "step-5"), {k: v for k, v in state_of(1)["model"].items() if k != "head"})


async def test_a_target_without_the_step_keeps_the_export_of_the_first_save(tmp_path: Path) -> None:
    with choosing() as (names, gate):
        export = HF(tmp_path / "exported", **{**MODEL, "names": names})
        async with Checkpointer(tmp_path / "run", export=export) as checkpoints:
            saves = [checkpoints.async_save(state_of(step), step=step) for step in (1, 2)]
            for one in saves:
                await one
            gate.set()
            await saves[0].exports[0]
            with pytest.raises(CheckpointExistsError):
                await saves[1].exports[0]
    expected = {f"model.{k}": v for k, v in state_of(1)["model"].items() if k != "head"}
    same(exported(tmp_path / "exported"), expected)


@pytest.mark.parametrize("budget_bytes", [64 << 20, 4 << 20])
async def test_a_step_stays_until_it_is_exported(budget_bytes: int, tmp_path: Path) -> None:
    """Retention of this process and of another one deletes it after that."""
    with choosing() as (names, gate):
        export = HF(tmp_path / "exports" / "step-{step}", **{**MODEL, "names": names})
        async with (
            AsyncStager(budget_bytes=budget_bytes) as stager,
            Checkpointer(tmp_path / "run", export=export, keep=KeepLast(1), stager=stager) as checkpoints,
            Checkpointer(tmp_path / "run", keep=KeepLast(1)) as other,
        ):
            first = checkpoints.async_save(state_of(1), step=1)
            await first
            second = checkpoints.async_save(state_of(2), step=2)
            await second
            leased = [(await one.prune()).leased for one in (checkpoints, other)]
            gate.set()
            assert leased == [("step-1",)] * 2
            await first.exports[0]
    assert sorted(name for name in os.listdir(tmp_path / "run") if name.startswith("step-")) == ["step-2"]
    assert [path.name for path in (tmp_path / "run").glob(".leases/*")] == []
    assert len(exported(tmp_path / "exports" / "step-1")) == len(exported(tmp_path / "exports" / "step-2"))


async def test_an_export_that_another_process_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the listing and the look at it."""
    listed = LocalStore.directories

    async def directories(store: LocalStore, directory: str = ".") -> list[str]:
        found = await listed(store, directory)
        if store.root == tmp_path / "exports":
            shutil.rmtree(tmp_path / "exports" / "step-1", ignore_errors=True)
        return found

    monkeypatch.setattr(LocalStore, "directories", directories)
    export = HF(tmp_path / "exports" / "step-{step}", **MODEL)
    async with Checkpointer(tmp_path / "run", export=export, exports_keep=1) as checkpoints:
        for step in (1, 2, 3):
            await checkpoints.async_save(state_of(step), step=step).exports[0]
            await in_operation(checkpoints._exports.ended, "test")
        assert checkpoints.health().ok
    assert sorted(os.listdir(tmp_path / "exports")) == ["step-3"]
    assert sorted(name for name in os.listdir(tmp_path / "run") if name.startswith("step-")) == [
        "step-1", "step-2", "step-3",
    ]  # fmt: skip


@pytest.mark.parametrize("when_full", ["skip", "latest"])
async def test_the_exports_of_a_skipped_save_are_skipped(
    when_full: WhenFull, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exports = [HF(tmp_path / "a" / "{step}", **MODEL), HF(tmp_path / "b" / "{step}", **MODEL)]
    async with Checkpointer(tmp_path / "run", export=exports, slots=1, when_full=when_full) as checkpoints:
        # The first one keeps its slot until all have been called.
        called = threading.Event()
        held = sidestream.SaveOptions(names=lambda name: name if called.wait(60) else None)
        saves = [
            checkpoints.async_save(state_of(step), step=step, options=held if step == 1 else None) for step in (1, 2, 3)
        ]
        called.set()
        assert [len(one.exports) for one in saves] == [2, 2, 2]
        for pending in (saves[1], *saves[1].exports):
            with pytest.raises(SkippedError, match="step-2 was not saved"):
                await pending
    assert warned(caplog) == []


async def test_only_exports_are_pruned(tmp_path: Path) -> None:
    (tmp_path / "exports" / "step-1").mkdir(parents=True)
    (tmp_path / "exports" / "step-1" / "notes.txt").write_text("not an export")
    export = HF(tmp_path / "exports" / "step-{step}", **MODEL)
    async with Checkpointer(tmp_path / "run", export=export, exports_keep=1) as checkpoints:
        for step in (2, 3):
            await checkpoints.async_save(state_of(step), step=step).exports[0]
    assert sorted(os.listdir(tmp_path / "exports")) == ["step-1", "step-3"]


async def test_closing_waits_for_exports(tmp_path: Path) -> None:
    export = HF(tmp_path / "exports" / "{step}", **MODEL)
    async with Checkpointer(tmp_path / "run", export=export, when_full="latest") as checkpoints:
        saves = [checkpoints.async_save(state_of(step), step=step) for step in range(5)]
    assert all(one.done() for save_ in saves for one in save_.exports)
    ended = {one.exports[0].url: one.exports[0].report_or_error() for one in saves}
    done = {url for url, report in ended.items() if not isinstance(report, BaseException)}
    assert {str(path) for path in (tmp_path / "exports").iterdir()} == done
    lost = [error for error in ended.values() if isinstance(error, BaseException)]
    assert all(isinstance(error, SkippedError) for error in lost)  # of the saves that were skipped


@pytest.mark.parametrize(
    "options",
    [
        {"export": [HF("{base}/run/step-{step}")]},
        {"export": [HF("{base}/exports/latest")], "exports_keep": 2},
        {"export": [HF("{base}/exports/{step}")], "exports_every": 0},
        {"export": ["{base}/exports/{step}"]},
    ],
)
def test_wrong_arguments_of_a_run(options: dict[str, Any], tmp_path: Path) -> None:
    export = [
        HF(str(one.url).replace("{base}", str(tmp_path))) if isinstance(one, HF) else one for one in options["export"]
    ]
    with pytest.raises(InvalidOptionError):
        Checkpointer(tmp_path / "run", **for_run(**{**options, "export": export}))


def test_blocking(tmp_path: Path) -> None:
    state = state_of()
    info = sidestream.blocking.save(state, tmp_path / "a", export=HF(tmp_path / "hf-a", **MODEL))
    assert info.exports[0].files == ("model.safetensors",)
    pending = sidestream.blocking.async_save(state, tmp_path / "b", export=HF(tmp_path / "hf-b", **MODEL))
    assert pending.exports[0].result(60).files == ("model.safetensors",)
    assert pending.result(60).exports == ()
    same(exported(tmp_path / "hf-a"), exported(tmp_path / "hf-b"))


# --- read by transformers ---


async def test_transformers_reads_a_sharded_export_of_a_tied_model(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=501, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    export = HF(
        tmp_path / "hf",
        select="model.*",
        names=strip_prefix("model."),
        max_shard_bytes=100_000,
        files={"config.json": tmp_path / "config" / "config.json"},
    )
    info = await save({"model": model, "step": 1}, tmp_path / "step", export=export)
    assert len([file for file in info.exports[0].files if re.fullmatch(r"model-\d+-of-\d+\.safetensors", file)]) > 2
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf").eval()
    same(dict(again.state_dict()), dict(model.state_dict()))
