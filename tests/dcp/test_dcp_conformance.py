"""What DCP's own writers and readers do, asked of ours and of them; where they are wrong, the test says so."""

from __future__ import annotations

import os
import pickle
import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _dcp_kinds import (
    FILE,
    FSSPEC,
    KINDS,
    OURS,
    TELLS_WHY,
    ExtraDataLoadPlanner,
    ExtraDataPlanner,
    FailingPlanner,
    HalfPlanner,
    JsonLoadPlanner,
    JsonPlanner,
    Kind,
    RenamingLoadPlanner,
    SilentHalfPlanner,
)
from keywords import for_save
from states import SAVED_DTYPES, assert_same, filled
from stock import blank, nested_state
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlanner

import sidestream
from sidestream.dcp import StorageReader, StorageWriter
from sidestream.errors import (
    CheckpointExistsError,
    CorruptCheckpointError,
    DtypeMismatchError,
    InvalidOptionError,
    UnsafeObjectError,
    UnsupportedError,
    UnsupportedTensorError,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*Past version 2.5 of PyTorch.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning"),
]

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def only(failure: pytest.ExceptionInfo[CheckpointException]) -> BaseException:
    """The error of rank 0, the only one."""
    (wrapped,) = failure.value.failures.values()
    return wrapped[0]


def hidden(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


# --- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("writer", KINDS, ids=lambda kind: kind.name)
def test_each_reads_what_each_writes(writer: Kind, reader: Kind, tmp_path: Path) -> None:
    state = nested_state()
    writer.save(state, tmp_path / "c")
    assert_same(state, reader.load(blank(state), tmp_path / "c"))


async def test_sidestream_loads_what_the_writer_wrote_and_checks_every_byte(tmp_path: Path) -> None:
    state = nested_state()
    OURS.save(state, tmp_path / "c")
    target = blank(state)
    report = await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)
    assert report.unverified == ()
    assert report.save_id
    assert_same(state, await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict())


async def test_the_reader_loads_what_sidestream_saved(tmp_path: Path) -> None:
    state = nested_state()
    await sidestream.save(state, tmp_path / "c")
    assert_same(state, OURS.load(blank(state), tmp_path / "c"))


async def test_a_module_and_its_optimizer_go_through_the_writer_to_sidestream(tmp_path: Path) -> None:
    """DCP spells an optimizer's integer keys as strings, and saves tied weights twice."""
    from states import model_and_optimizer

    model, optimizer = model_and_optimizer(seed=1)
    OURS.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    other_model, other_optimizer = model_and_optimizer(seed=2)
    await sidestream.load({"model": other_model, "optimizer": other_optimizer}, tmp_path / "c")
    assert_same(dict(model.state_dict()), dict(other_model.state_dict()))
    assert_same(optimizer.state_dict(), other_optimizer.state_dict())


@every_kind
def test_every_dtype_layout_and_shape(kind: Kind, tmp_path: Path) -> None:
    # Stock DCP cannot plan the bits dtypes: it asks torch.iinfo for their size.
    state = {str(dtype): filled((5, 4), dtype) for dtype in SAVED_DTYPES if "bits" not in str(dtype)}
    state |= {"view": torch.arange(48.0).reshape(8, 6)[2:5, ::2], "scalar": torch.tensor(2.5)}
    state |= {"none": torch.empty(0, 3), "conj": torch.randn(3, dtype=torch.complex64).conj()}
    state |= {"parameter": torch.nn.Parameter(torch.randn(2)), "expanded": torch.ones(1).expand(4)}
    kind.save(state, tmp_path / "c")
    target = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in state.items()}
    assert_same({name: one.detach() for name, one in state.items()}, kind.load(target, tmp_path / "c"))


@every_kind
def test_tensors_beyond_a_window_and_a_group(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidestream.dcp import items as outgoing

    monkeypatch.setattr(outgoing, "_GROUP_BYTES", 16 << 20)
    monkeypatch.setattr(outgoing, "_BUDGET_BYTES", 8 << 20)
    state = {f"t{number}": torch.randn(size) for number, size in enumerate((5 << 20, 100, 3 << 20, 2 << 20, 7))}
    kind.save(state, tmp_path / "c")
    if kind.ours:
        assert len(list((tmp_path / "c").glob("*.distcp"))) == 3
    assert_same(state, kind.load(blank(state), tmp_path / "c"))


@every_kind
def test_returned_metadata_is_what_was_written(kind: Kind, tmp_path: Path) -> None:
    written = kind.save(nested_state(), tmp_path / "c")
    if not kind.ours and written.storage_data is None:
        pytest.skip("stock DCP of this torch returns the metadata without the places")
    read = kind.reader(str(tmp_path / "c")).read_metadata()
    assert written.state_dict_metadata.keys() == read.state_dict_metadata.keys()
    assert written.planner_data == read.planner_data
    for index, place in written.storage_data.items():
        found = read.storage_data[index]
        assert (found.relative_path, found.offset, found.length) == (place.relative_path, place.offset, place.length)
        assert type(place).__module__ == "torch.distributed.checkpoint.filesystem"
    assert read.storage_meta.save_id


@every_kind
def test_private_consumers_of_dcp_read_it(kind: Kind, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = {"a": {"x": torch.arange(4.0)}, "b": torch.ones(3), "n": 3}
    kind.save(state, tmp_path / "c")
    assert_same({"b": state["b"]}, _load_state_dict_from_keys("b", storage_reader=kind.reader(str(tmp_path / "c"))))
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    assert_same(state, torch.load(tmp_path / "c.pt", weights_only=True))


# --- planners --------------------------------------------------------------------------------------------------------


@every_kind
async def test_a_planner_that_converts(kind: Kind, tmp_path: Path) -> None:
    state = {"w": torch.randn(64, 3), "n": torch.arange(3), "step": 1}
    kind.save(state, tmp_path / "c", planner=HalfPlanner())
    target = {"w": torch.zeros(64, 3, dtype=torch.float16), "n": torch.zeros(3, dtype=torch.int64), "step": 0}
    assert_same(state | {"w": state["w"].half()}, kind.load(blank(target), tmp_path / "c"))
    assert_same(state | {"w": state["w"].half()}, OURS.load(blank(target), tmp_path / "c"))
    await sidestream.load(target, tmp_path / "c")
    assert_same(state | {"w": state["w"].half()}, target)


@every_kind
def test_a_planner_that_converts_and_does_not_say_so(kind: Kind, tmp_path: Path) -> None:
    """Stock's metadata then tells another dtype than the file has; ours tells what was written."""
    written = kind.save({"w": torch.randn(8)}, tmp_path / "c", planner=SilentHalfPlanner())
    saved = written.state_dict_metadata["w"].properties.dtype
    assert saved == (torch.float16 if kind.ours else torch.float32)


@every_kind
def test_a_planner_with_data_of_its_own(kind: Kind, tmp_path: Path) -> None:
    state = {"w": torch.randn(8)}
    kind.save(state, tmp_path / "c", planner=ExtraDataPlanner())
    planner = ExtraDataLoadPlanner()
    assert_same(state, kind.load({"w": torch.zeros(8)}, tmp_path / "c", planner=planner))
    assert ExtraDataLoadPlanner.seen == ["of one rank"]
    assert_same(state, FILE.load({"w": torch.zeros(8)}, tmp_path / "c"))


@every_kind
def test_a_planner_with_bytes_of_its_own(kind: Kind, tmp_path: Path) -> None:
    state = {"w": torch.randn(8), "config": {"a": [1, 2]}}
    planner = JsonPlanner(flatten_state_dict=False)
    options = {"trust": "pickle"} if kind.ours else {}
    kind.save(state, tmp_path / "c", planner=planner, **options)
    loaded = kind.load(blank(state), tmp_path / "c", JsonLoadPlanner(flatten_state_dict=False), **options)
    assert_same(state, loaded)


async def test_bytes_of_a_planner_are_handed_to_nobody_who_did_not_ask(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"config \(bytes in the planner's own format\)"):
        OURS.save({"w": torch.randn(8), "config": [1]}, tmp_path / "c", JsonPlanner())
    with pytest.raises(CheckpointException) as failure:
        OURS.load({"config": [2]}, tmp_path / "c")
    assert isinstance(only(failure), UnsafeObjectError)
    with pytest.raises(UnsafeObjectError, match="planner wrote it"):
        await sidestream.load({"config": [2]}, tmp_path / "c")
    await sidestream.load({"w": torch.zeros(8)}, tmp_path / "c")


@every_kind
def test_a_planner_that_renames(kind: Kind, tmp_path: Path) -> None:
    state = {"w": torch.randn(8), "n": 3}
    kind.save(state, tmp_path / "c")
    target = {"renamed_w": torch.zeros(8), "renamed_n": 0}
    kind.load(target, tmp_path / "c", planner=RenamingLoadPlanner(flatten_state_dict=False))
    assert_same({"renamed_w": state["w"], "renamed_n": 3}, target)


@every_kind
def test_a_planner_that_caches_its_plans(kind: Kind, tmp_path: Path) -> None:
    """It keeps the plan of the first save, and with it whatever the writer had put into that."""

    class CachingPlanner(DefaultSavePlanner):
        pass

    for cache in (SavePlanner._cached_save_plan, SavePlanner._cached_all_plans, SavePlanner._cached_final_save_plan):
        cache.pop("CachingPlanner", None)
    writer = kind.writer(str(tmp_path / "unused"))
    for step in range(3):
        state = {"w": torch.full((100,), float(step)), "n": step}
        target = str(tmp_path / f"c{step}")
        planner = CachingPlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=target, storage_writer=writer, planner=planner)
    for step in range(3):
        state = {"w": torch.full((100,), float(step)), "n": step}
        assert_same(state, kind.load(blank(state), tmp_path / f"c{step}"))
    assert "CachingPlanner" in SavePlanner._cached_final_save_plan


@every_kind
def test_a_planner_that_fails(kind: Kind, tmp_path: Path) -> None:
    state = {"good": torch.ones(8), "bad": torch.ones(8)}
    with pytest.raises(CheckpointException) as failure:
        kind.save(state, tmp_path / "c", planner=FailingPlanner())
    assert "cannot be had" in str(only(failure))
    if kind.ours:
        assert list(tmp_path.iterdir()) == []


@every_kind
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_in_a_thread_of_the_writers(kind: Kind, tmp_path: Path) -> None:
    """Stock prints it, and commits a checkpoint that lacks half of its items. Ours asks the planner in the caller's
    thread alone."""
    main, failed = threading.current_thread(), threading.Event()

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if threading.current_thread() is not main:
                failed.set()
                raise RuntimeError("not in this thread")
            assert kind.ours or failed.wait(60)
            return super().resolve_data(write_item)

    state = {f"t{number}": torch.ones(8) for number in range(8)}
    kind.save(state, tmp_path / "c", Planner(), **for_save(**{} if kind.ours else {"thread_count": 2}))
    if kind.ours:
        assert_same(state, kind.load(blank(state), tmp_path / "c"))
    else:
        with pytest.raises(CheckpointException):
            kind.load(blank(state), tmp_path / "c")


@every_kind
def test_plans_that_do_not_hold_are_refused(kind: Kind, tmp_path: Path) -> None:
    class Lying(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return super().resolve_data(write_item)[:2]

    if kind.ours:
        with pytest.raises(CheckpointException) as failure:
            kind.save({"w": torch.ones(8)}, tmp_path / "c", planner=Lying())
        assert isinstance(only(failure), InvalidOptionError)
        assert list(tmp_path.iterdir()) == []
    else:
        kind.save({"w": torch.ones(8)}, tmp_path / "c", planner=Lying())  # and nobody can load it
        with pytest.raises(CheckpointException):
            kind.load({"w": torch.ones(8)}, tmp_path / "c")


# --- targets ---------------------------------------------------------------------------------------------------------


@every_kind
def test_one_writer_and_one_reader_for_several_ids(kind: Kind, tmp_path: Path) -> None:
    writer, reader = kind.writer(str(tmp_path / "own")), kind.reader(str(tmp_path / "own"))
    for name in ("a", "b"):
        dcp.save({"n": name, "w": torch.ones(3)}, checkpoint_id=str(tmp_path / name), storage_writer=writer)
    if kind.ours:  # the id was for that call; stock writes to the last one again
        dcp.save({"n": "own", "w": torch.ones(3)}, storage_writer=writer)
    for name in ("b", "a"):
        target: dict[str, Any] = {"n": "", "w": torch.zeros(3)}
        dcp.load(target, checkpoint_id=str(tmp_path / name), storage_reader=reader)
        assert_same({"n": name, "w": torch.ones(3)}, target)
    if kind.ours:
        dcp.load(target, storage_reader=reader)
        assert target["n"] == "own"


@every_kind
def test_a_target_that_is_not_empty(kind: Kind, tmp_path: Path) -> None:
    """Stock overwrites in place unless it is told not to: what was there is torn until it has ended."""
    kind.save({"n": 1}, tmp_path / "c")
    if not kind.ours:
        kind.save({"n": 2}, tmp_path / "c")
        assert kind.load({"n": 0}, tmp_path / "c") == {"n": 2}
    before = {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    with pytest.raises(CheckpointException) as failure:
        kind.save({"n": 3}, tmp_path / "c", overwrite=False)
    assert isinstance(only(failure), CheckpointExistsError if kind.ours else RuntimeError)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()}
    assert hidden(tmp_path) == []


@every_kind
def test_overwriting(kind: Kind, tmp_path: Path) -> None:
    kind.save({"n": 1, "w": torch.ones(5)}, tmp_path / "c", overwrite=True)
    old = os.open(tmp_path / "c" / ".metadata", os.O_RDONLY)
    kind.save({"n": 2}, tmp_path / "c", overwrite=True)
    try:
        assert kind.load({"n": 0}, tmp_path / "c") == {"n": 2}
        if kind.ours:  # another directory: not a byte of the old one was touched, and all of it is gone
            assert os.fstat(old).st_nlink == 0
            assert hidden(tmp_path) == []
            assert len(list((tmp_path / "c").glob("*.distcp"))) == 1
    finally:
        os.close(old)


def test_a_reader_finds_one_or_the_other_while_it_is_overwritten(tmp_path: Path) -> None:
    OURS.save({"n": 0}, tmp_path / "c")
    stop, missed, looks = threading.Event(), [], 0

    def look() -> None:
        nonlocal looks
        while not stop.is_set():
            looks += 1
            if not (tmp_path / "c" / ".metadata").exists():
                missed.append(looks)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for number in range(8):
            OURS.save({"n": number}, tmp_path / "c", overwrite=True)
    finally:
        stop.set()
        watcher.join()
    assert missed == []
    assert looks > 8


def test_overwriting_where_directories_cannot_be_exchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidestream._storage.local import transaction

    OURS.save({"n": 1}, tmp_path / "c")
    monkeypatch.setattr(transaction, "exchanges", lambda directory: False)
    with pytest.raises(CheckpointException) as failure:
        OURS.save({"n": 2}, tmp_path / "c", overwrite=True)
    assert isinstance(only(failure), CheckpointExistsError)
    assert OURS.load({"n": 0}, tmp_path / "c") == {"n": 1}
    assert hidden(tmp_path) == []
    OURS.save({"n": 2}, tmp_path / "d", overwrite=True)  # nothing is there to exchange
    assert OURS.load({"n": 0}, tmp_path / "d") == {"n": 2}


@every_kind
def test_validate_checkpoint_id(kind: Kind, tmp_path: Path) -> None:
    local = kind.name == "file"
    for face in (kind.writer, kind.reader):
        assert face.validate_checkpoint_id(str(tmp_path / "c"))
        assert face.validate_checkpoint_id((tmp_path / "c").as_uri()) is not local
        assert not face.validate_checkpoint_id("nonsense://bucket/c")
        assert face(str(tmp_path / "c")).checkpoint_id in (str(tmp_path / "c"), tmp_path / "c")


def test_what_dcp_asks_by_isinstance(tmp_path: Path) -> None:
    writer, reader = StorageWriter(tmp_path / "c"), StorageReader(tmp_path / "c")
    assert isinstance(writer, dcp.StorageWriter)
    assert isinstance(reader, dcp.StorageReader)
    # A writer that passes for a stager is used as one: FileSystemWriter makes async_save copy on the caller's thread.
    assert isinstance(FILE.writer(tmp_path), dcp.staging.AsyncStager)
    assert not isinstance(writer, dcp.staging.AsyncStager)
    assert writer
    assert reader


def test_bad_options_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError):
        StorageWriter(tmp_path / "c", durability="maybe")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError):
        StorageReader(tmp_path / "c", trust="yes")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError):
        StorageWriter("/")


# --- loading what is not as it should be -----------------------------------------------------------------------------


@every_kind
def test_keys_and_shapes_that_differ(kind: Kind, tmp_path: Path) -> None:
    kind.save({"w": torch.ones(8), "n": 1}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Missing key"):
        kind.load({"w": torch.zeros(8), "other": torch.zeros(3)}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Size mismatch"):
        kind.load({"w": torch.zeros(9)}, tmp_path / "c")
    partial = DefaultLoadPlanner(allow_partial_load=True)
    target = {"w": torch.zeros(8), "other": torch.zeros(3)}
    assert_same({"w": torch.ones(8), "other": torch.zeros(3)}, kind.load(target, tmp_path / "c", planner=partial))


@every_kind
def test_dtypes_that_differ(kind: Kind, tmp_path: Path) -> None:
    kind.save({"w": torch.full((8,), 1.5)}, tmp_path / "c")
    loaded = kind.load({"w": torch.zeros(8, dtype=torch.bfloat16)}, tmp_path / "c")
    assert_same({"w": torch.full((8,), 1.5, dtype=torch.bfloat16)}, loaded)
    target = {"w": torch.zeros(8, dtype=torch.int8)}
    if kind.ours:
        with pytest.raises(CheckpointException) as failure:
            kind.load(target, tmp_path / "c")
        assert isinstance(only(failure), DtypeMismatchError)
        assert_same({"w": torch.zeros(8, dtype=torch.int8)}, target)
    else:  # stock cuts the fractions off, in silence
        assert_same({"w": torch.ones(8, dtype=torch.int8)}, kind.load(target, tmp_path / "c"))


@pytest.mark.parametrize("writer", [OURS, FILE], ids=lambda kind: kind.name)
@every_kind
def test_an_altered_byte(writer: Kind, kind: Kind, tmp_path: Path) -> None:
    state = {"w": torch.arange(1 << 16, dtype=torch.int32)}
    writer.save(state, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    target = {"w": torch.zeros(1 << 16, dtype=torch.int32)}
    if kind.ours:
        with pytest.raises(CheckpointException) as failure:
            kind.load(target, tmp_path / "c")
        error = only(failure)
        assert isinstance(error, CorruptCheckpointError)
        assert (error.file, error.fqn) == (shard.name, "w")
    else:  # stock loads it
        assert not torch.equal(kind.load(target, tmp_path / "c")["w"], state["w"])


def test_no_checkpoint_is_told_in_dcps_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no committed checkpoint" if TELLS_WHY else "metadata is None"):
        OURS.load({"n": 1}, tmp_path / "none")


def test_a_file_that_went_missing(tmp_path: Path) -> None:
    OURS.save({"w": torch.ones(8)}, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    shard.unlink()
    with pytest.raises(CheckpointException, match=r"__0_0\.distcp" if TELLS_WHY else "metadata is None"):
        OURS.load({"w": torch.zeros(8)}, tmp_path / "c")


class Config:
    def __init__(self) -> None:
        self.width = 3

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.width == other.width

    __hash__ = None  # type: ignore[assignment]


ran: list[str] = []


def run(what: str) -> int:
    ran.append(what)
    return 0


class Hostile:
    def __reduce__(self) -> Any:
        return run, ("code of the checkpoint",)


@every_kind
async def test_objects(kind: Kind, tmp_path: Path) -> None:
    """Stock unpickles whatever is there. Ours saves it all the same, and reads what the caller allows."""
    state = {"config": Config(), "w": torch.ones(3)}
    kind.save(state, tmp_path / "c", **for_save(**{"safe_globals": [Config]} if kind.ours else {}))
    if not kind.ours:
        assert_same(state, kind.load(blank(state), tmp_path / "c"))
    with pytest.raises(CheckpointException) as failure:
        OURS.load(blank(state), tmp_path / "c")
    assert isinstance(only(failure), UnsafeObjectError)
    assert_same(state, OURS.load(blank(state), tmp_path / "c", safe_globals=[Config]))
    assert_same(state, OURS.load(blank(state), tmp_path / "c", trust="pickle"))
    target = blank(state)
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=[Config]))
    assert_same(state, target)
    with pytest.raises(UnsafeObjectError, match="Config"):
        await sidestream.load(blank(state), tmp_path / "c")


@every_kind
def test_code_in_a_checkpoint(kind: Kind, tmp_path: Path) -> None:
    FILE.save({"n": Hostile()}, tmp_path / "c")
    ran.clear()
    if kind.ours:
        with pytest.raises(CheckpointException) as failure:
            kind.load({"n": 0}, tmp_path / "c")
        assert isinstance(only(failure), UnsafeObjectError)
        assert ran == []
    else:
        kind.load({"n": 0}, tmp_path / "c")
        assert ran == ["code of the checkpoint"]


def test_values_of_many_kinds_come_back(tmp_path: Path) -> None:
    import numpy as np

    state = {"od": (OrderedDict(b=1, a=2),), "np": np.arange(3), "f": float("inf"), "i": 1 << 80, "t": (torch.ones(2),)}
    OURS.save(state, tmp_path / "c")
    loaded = OURS.load(dict.fromkeys(state, 0), tmp_path / "c")
    assert type(loaded["od"][0]) is OrderedDict
    assert list(loaded["od"][0].items()) == [("b", 1), ("a", 2)]
    assert loaded["np"].tolist() == [0, 1, 2]
    assert (loaded["f"], loaded["i"]) == (float("inf"), 1 << 80)
    assert torch.equal(loaded["t"][0], torch.ones(2))


@pytest.mark.parametrize("layout", ["sparse", "meta"])
def test_tensors_that_have_no_bytes_are_refused_by_name(layout: str, tmp_path: Path) -> None:
    tensor = torch.eye(3).to_sparse() if layout == "sparse" else torch.empty(3, device="meta")
    with pytest.raises(CheckpointException) as failure:
        OURS.save({"deep": {"odd": tensor}}, tmp_path / "c")
    assert isinstance(only(failure), UnsupportedTensorError)
    assert "deep.odd" in str(only(failure))
    assert list(tmp_path.iterdir()) == []


# --- extensions ------------------------------------------------------------------------------------------------------


@every_kind
async def test_zstd(kind: Kind, tmp_path: Path) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"w": torch.zeros(1 << 18), "v": torch.randn(300)[::3], "n": {"a": 1}, "s": torch.tensor(3)}
    option = "extensions" if kind.ours else "_extensions"
    written = kind.save(state, tmp_path / "c", **for_save(**{option: [ZStandard()]}))
    places = written.storage_data if kind.ours else written.storage_data or {}  # stock of torch 2.11 returns none
    assert all(place.transform_descriptors == ["stream.zstd/1"] for place in places.values())
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 1 << 18
    for reader in (OURS, FILE):
        assert_same(state, reader.load(blank(state), tmp_path / "c"))
    target = blank(state)
    await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)


def test_sizes_that_nobody_knows_beforehand_are_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    from sidestream.dcp import items as outgoing

    monkeypatch.setattr(outgoing, "_VALUES_BYTES", 10_000)
    state = {f"t{number}": torch.randn(2_000) for number in range(6)} | {"n": 1}
    OURS.save(state, tmp_path / "c", extensions=[ZStandard()])
    assert len(list((tmp_path / "c").glob("*.distcp"))) > 2
    assert_same(state, FILE.load(blank(state), tmp_path / "c"))


# --- what sidestream says of it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("planner", [None, JsonPlanner, ExtraDataPlanner, HalfPlanner])
async def test_verify_knows_what_the_writer_wrote(planner: Any, tmp_path: Path) -> None:
    state = {"w": torch.randn(300, 300), "n": 1, "deep": {"t": torch.arange(3), "b": (1, 2)}}
    OURS.save(state, tmp_path / "c", planner=planner() if planner else None, trust="pickle")
    report = await sidestream.verify(tmp_path / "c")
    assert report.damaged == ()
    assert set(report.unverified) == ({"n", "deep.b"} if planner is JsonPlanner else set())
    assert set(report.verified) | set(report.unverified) == {"w", "n", "deep.t", "deep.b"}


@pytest.mark.parametrize("file", ["__0_0.distcp", "__0_1.distcp", ".metadata"])
async def test_verify_finds_what_was_altered(file: str, tmp_path: Path) -> None:
    OURS.save({"w": torch.randn(300, 300), "n": "a longer text " * 20}, tmp_path / "c")
    raw = bytearray((tmp_path / "c" / file).read_bytes())
    at = raw.index(b"w") if file == ".metadata" else raw.index(b"a longer text") if file == "__0_0.distcp" else 9999
    raw[at] ^= 1
    (tmp_path / "c" / file).write_bytes(raw)
    assert (await sidestream.verify(tmp_path / "c")).damaged


# --- stores ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket() -> Iterator[str]:
    name = uuid.uuid4().hex
    yield f"memory://{name}"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(f"/{name}"):
        filesystem.rm(f"/{name}", recursive=True)


async def test_object_storage(bucket: str) -> None:
    """Without a rename: the marker comes last, and stock reads it too."""
    state = nested_state()
    written = dcp.save(state, storage_writer=StorageWriter(f"{bucket}/c"))
    target = blank(state)
    dcp.load(target, storage_reader=StorageReader(f"{bucket}/c"))
    assert_same(state, target)
    dcp.load(target := blank(state), storage_reader=FSSPEC.reader(f"{bucket}/c"))
    assert_same(state, target)
    report = await sidestream.load(target := blank(state), f"{bucket}/c")
    assert report.unverified == ()
    assert_same(state, target)
    files = {Path(name).name for name in fsspec.filesystem("memory").ls(f"{bucket}/c", detail=False)}
    assert {place.relative_path for place in written.storage_data.values()} <= files
    for overwrite, error in (
        (False, CheckpointExistsError),
        (True, UnsupportedError),
    ):  # memory:// has no puts on a condition
        with pytest.raises(CheckpointException) as failure:
            dcp.save(state, storage_writer=StorageWriter(f"{bucket}/c", overwrite=overwrite))
        assert isinstance(only(failure), error)


def test_a_failure_on_object_storage_leaves_nothing(bucket: str) -> None:
    state = {"first": torch.ones(1 << 20), "bad": torch.ones(8)}
    with pytest.raises(CheckpointException):
        dcp.save(state, storage_writer=StorageWriter(f"{bucket}/c"), planner=FailingPlanner())
    filesystem = fsspec.filesystem("memory")
    assert not filesystem.exists(f"{bucket}/c") or filesystem.find(f"{bucket}/c") == []


async def test_zstd_on_object_storage(bucket: str) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"w": torch.zeros(1 << 16), "n": 1}
    dcp.save(state, storage_writer=StorageWriter(f"{bucket}/c", extensions=[ZStandard()]))
    await sidestream.load(target := blank(state), f"{bucket}/c")
    assert_same(state, target)


def test_credentials_stay_when_the_checkpoint_id_changes(tmp_path: Path) -> None:
    """Stock makes a new file system of the new URL alone."""
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "name", "secret": "hidden"}
    ours = StorageWriter("s3://box/a", storage_options=options), StorageReader("s3://box/a", storage_options=options)
    for face in ours:
        face.reset("s3://box/b")
        assert face.checkpoint_id.endswith("box/b")
        assert face._address._storage["options"] == options
        assert "hidden" not in repr(face) + str(vars(face._address.located("s3://box/b").store))
        again = pickle.loads(pickle.dumps(face))  # to the process that DCP starts
        assert again._address._storage["options"] == options
    stock = FSSPEC.writer("memory://box/a", auto_mkdir=False)
    assert stock.fs.fs.storage_options == {"auto_mkdir": False}
    stock.reset("memory://box/b")
    assert stock.fs.fs.storage_options == {}


class Forking(DefaultSavePlanner):
    """A child of ``fork`` ends in the middle of the save, as a worker of a data loader does."""

    forked = False

    def resolve_data(self, write_item: Any) -> Any:
        if not self.forked:
            self.forked = True
            child = os.fork()
            if child == 0:
                weakref.finalize._exitfunc()  # type: ignore[attr-defined]  # as at the end of the interpreter
                os._exit(0)
            os.waitpid(child, 0)
        return super().resolve_data(write_item)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_ends_leaves_the_save_of_its_parent_alone(tmp_path: Path) -> None:
    planner = Forking()
    with StorageWriter(tmp_path / "c") as writer:
        dcp.save({"a": torch.ones(4)}, storage_writer=writer, planner=planner, no_dist=True)
    assert planner.forked
    assert OURS.load({"a": torch.zeros(4)}, tmp_path / "c")["a"].tolist() == [1.0] * 4
