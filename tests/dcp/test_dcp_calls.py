"""DCP's calls from everywhere: a thread, a loop, neither; several at once; and what failing ones leave behind."""

from __future__ import annotations

import asyncio
import gc
import pickle
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _dcp_kinds import FILE, OURS
from states import assert_same
from stock import blank, nested_state, stock_save
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

import sidestream
from sidestream import errors
from sidestream.dcp import StorageReader, StorageWriter
from sidestream.errors import CheckpointExistsError, InvalidOptionError, SidestreamError, StorageNotSharedError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Past version 2.5 of PyTorch.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning"),
]


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.02)


async def test_inside_a_running_loop(tmp_path: Path) -> None:
    state = nested_state()
    OURS.save(state, tmp_path / "c")
    assert_same(state, OURS.load(blank(state), tmp_path / "c"))


@pytest.mark.parametrize("options", [{}, {"_extensions": [ZStandard()]}], ids=["marked", "with an extension"])
async def test_what_a_newer_torch_pickles_beside_five_properties(
    options: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 has strides as the sixth. Earlier versions read exactly five."""
    state = nested_state()
    five = TensorProperties.__getstate__
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda self: (*five(self)[:5], (1,)))
        OURS.save(state, tmp_path / "c", **options)
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    assert metadata.state_dict_metadata
    if not options:
        assert_same(state, FILE.load(blank(state), tmp_path / "c"))
    assert_same(state, OURS.load(blank(state), tmp_path / "c"))


async def test_in_a_thread_while_the_loop_turns(tmp_path: Path) -> None:
    state = nested_state()
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(turn())
    await asyncio.to_thread(OURS.save, state, tmp_path / "c")
    assert_same(state, await asyncio.to_thread(OURS.load, blank(state), tmp_path / "c"))
    task.cancel()
    assert turns > 10


def test_from_several_threads_with_one_writer_and_one_reader(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "unused"), StorageReader(tmp_path / "unused")
    outcomes: list[BaseException | None] = []

    def work(number: int) -> None:
        try:
            state = {"w": torch.full((1000,), float(number)), "n": number}
            target = str(tmp_path / f"c{number}")
            dcp.save(state, checkpoint_id=target, storage_writer=writer)
            loaded = blank(state)
            dcp.load(loaded, checkpoint_id=target, storage_reader=reader)
            assert_same(state, loaded)
            outcomes.append(None)
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [None] * 6


@pytest.mark.parametrize("stager", ["ours", "default", "blocking"])
async def test_async_save(stager: str, tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 16), "deep": {"n": 3, "t": torch.arange(9)}}
    saved = {"w": state["w"].clone(), "deep": {"n": 3, "t": torch.arange(9)}}
    async with sidestream.AsyncStager() as ours:
        stagers: dict[str, Any] = {"ours": ours, "default": None, "blocking": dcp.staging.BlockingAsyncStager()}
        answer = dcp.async_save(state, storage_writer=StorageWriter(tmp_path / "c"), async_stager=stagers[stager])
        if stager == "ours":
            assert isinstance(answer, AsyncSaveResponse)
            await asyncio.wrap_future(answer.staging_completion)
            state["w"].zero_()
        upload: Future[Any] = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
        metadata = await asyncio.wrap_future(upload)
        assert set(metadata.state_dict_metadata) == {"w", "deep.n", "deep.t"}
    assert_same(saved, OURS.load(blank(saved), tmp_path / "c"))
    target = blank(saved)
    assert (await sidestream.load(target, tmp_path / "c")).save_id
    assert_same(saved, target)


@pytest.mark.parametrize("kind", [OURS, FILE], ids=lambda kind: kind.name)
def test_two_saves_at_once_through_one_writer(kind: Any, tmp_path: Path) -> None:
    """The second begins while the first is writing. Stock's first one then goes on in the second's directory."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return super().resolve_data(write_item)

    writer = kind.writer(str(tmp_path / "unused"))
    states = [{"w": torch.full((10,), float(number))} for number in range(2)]
    ids = [str(tmp_path / "first"), str(tmp_path / "second")]
    first = dcp.async_save(states[0], checkpoint_id=ids[0], storage_writer=writer, planner=Slow())
    assert begun.wait(60)
    second = dcp.async_save(states[1], checkpoint_id=ids[1], storage_writer=writer)
    assert isinstance(first, Future)
    assert isinstance(second, Future)
    second.result(60)
    go_on.set()
    first.result(60)
    if kind.ours:
        for state, target in zip(states, ids, strict=True):
            assert_same(state, kind.load(blank(state), Path(target)))
    else:
        assert not (tmp_path / "first" / ".metadata").exists()


# --- one step after the other, as DCP takes them ----------------------------------------------------------------------


def begun(writer: StorageWriter, state: dict[str, Any], ranks: int = 1) -> tuple[Any, Any, Any]:
    """Everything before ``write_data``: planner, plans, metadata."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan] * ranks)
    return planner, writer.prepare_global_plan(plans), metadata


def test_nothing_is_visible_and_nothing_old_is_touched_before_finish(tmp_path: Path) -> None:
    OURS.save({"w": torch.ones(4)}, tmp_path / "c")
    writer = StorageWriter(tmp_path / "c", overwrite=True)
    planner, (plan,), metadata = begun(writer, {"w": torch.zeros(4)})
    results = writer.write_data(plan, planner).value()
    assert_same({"w": torch.ones(4)}, OURS.load({"w": torch.zeros(4)}, tmp_path / "c"))
    writer.finish(metadata, [results])
    assert_same({"w": torch.zeros(4)}, OURS.load({"w": torch.ones(4)}, tmp_path / "c"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("how", ["close", "with", "again", "collected"])
def test_what_another_ranks_failure_left_behind_goes(how: str, tmp_path: Path) -> None:
    """DCP tells a writer nothing of a failure elsewhere: it just never comes to finish()."""
    writer = StorageWriter(tmp_path / "c")
    state = {"w": torch.ones(4)}
    planner, plans, _ = begun(writer, state, ranks=2)
    writer.write_data(plans[0], planner)
    assert len(list(tmp_path.iterdir())) == 1
    if how == "close":
        writer.close()
    elif how == "with":
        with writer:
            pass
    elif how == "again":
        dcp.save(state, storage_writer=writer)
        assert_same(state, OURS.load(blank(state), tmp_path / "c"))
    del writer
    wait_until(lambda: [path.name for path in tmp_path.iterdir()] == (["c"] if how == "again" else []))


def test_ranks_that_do_not_share_a_directory(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    planner, (plan,), metadata = begun(writer, {"w": torch.ones(4)})
    results = writer.write_data(plan, planner).value()
    (attempt,) = tmp_path.iterdir()
    (shard,) = attempt.glob("*.distcp")
    shard.unlink()
    with pytest.raises(StorageNotSharedError, match=shard.name):
        writer.finish(metadata, [results])
    assert list(tmp_path.iterdir()) == []

    planner, (plan,), metadata = begun(writer, {"w": torch.ones(4)})
    (attempt,) = tmp_path.iterdir()
    shutil.rmtree(attempt)
    with pytest.raises(StorageNotSharedError):
        writer.write_data(plan, planner)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lost", ["w", "n"])
def test_a_result_that_is_missing_is_never_committed(lost: str, tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    planner, (plan,), metadata = begun(writer, {"w": torch.ones(4), "n": 1})
    results = [result for result in writer.write_data(plan, planner).value() if result.index.fqn != lost]
    with pytest.raises(InvalidOptionError, match="no rank wrote"):
        writer.finish(metadata, [results])
    assert list(tmp_path.iterdir()) == []


def test_somebody_else_was_faster(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    planner, (plan,), metadata = begun(writer, {"w": torch.ones(4)})
    results = writer.write_data(plan, planner).value()
    OURS.save({"w": torch.zeros(4)}, tmp_path / "c")
    with pytest.raises(CheckpointExistsError):
        writer.finish(metadata, [results])
    assert_same({"w": torch.zeros(4)}, OURS.load({"w": torch.ones(4)}, tmp_path / "c"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_steps_out_of_order(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "c"), StorageReader(tmp_path / "c")
    with pytest.raises(InvalidOptionError, match="comes first"):
        writer.prepare_global_plan([])
    with pytest.raises(InvalidOptionError, match="comes first"):
        reader.read_data(dcp.LoadPlan([]), dcp.DefaultLoadPlanner())


@pytest.mark.parametrize("lost", ["tensor", "value"])
def test_files_that_are_deleted_between_two_steps(lost: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"t": torch.arange(5.0)} if lost == "tensor" else {"v": {1, 2}}
    stock_save(state, tmp_path / "c")
    reader, planner = StorageReader(tmp_path / "c"), DefaultLoadPlanner()
    reader.reset()
    planner.set_up_planner(blank(state), reader.read_metadata(), True)
    (shard,) = (tmp_path / "c").glob("*.distcp")
    shard.unlink()
    with pytest.raises(errors.CorruptCheckpointError, match=rf"{tmp_path}/c: .*{shard.name} is missing"):
        reader.read_data(planner.create_local_plan(), planner)


def test_writer_and_reader_travel_to_another_process(tmp_path: Path) -> None:
    state = {"w": torch.ones(4)}
    writer = pickle.loads(pickle.dumps(StorageWriter(tmp_path / "c", durability="flush")))
    dcp.save(state, storage_writer=writer)
    dcp.load(target := blank(state), storage_reader=pickle.loads(pickle.dumps(StorageReader(tmp_path / "c"))))
    assert_same(state, target)


def error_of(kind: type[SidestreamError]) -> SidestreamError:
    if issubclass(kind, errors.RankFailuresError):
        told = errors.RankFailure(
            1, "writing", "NoSpaceError", "what was said", errors.NoSpaceError(28, "what was said", "/a/b")
        )
        return kind([told, errors.RankFailure(0, "planning", "RankDied", "its connection was closed")])
    return kind(2, "what was said", "/a/b") if issubclass(kind, OSError) else kind("what was said")


KINDS = [name for name in errors.__all__ if issubclass(getattr(errors, name), SidestreamError)]


@pytest.mark.parametrize("name", KINDS)
def test_errors_travel_between_ranks(name: str) -> None:
    """DCP sends the error of a rank to all others as a pickle; one that cannot be read there hangs them."""
    kind = getattr(errors, name)
    error = error_of(kind)
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert "what was said" in str(again)
    assert vars(again) == vars(error)
