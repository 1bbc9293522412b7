"""Programs that change from DCP's storage to sidestream's: their values, keywords and ids."""

from __future__ import annotations

import asyncio
import codecs
import collections
import datetime as dt
import enum
import io
import pickle
import warnings
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _dcp_kinds import FILE, OURS
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension, ZStandard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat

import sidestream
from sidestream._format.values import pickle_node
from sidestream._layout.values import decode_value, encode_value
from sidestream.dcp import StorageReader, StorageWriter
from sidestream.errors import CorruptCheckpointError, InvalidOptionError, UnsafeObjectError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled, )?unavailable.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning"),
]

CONTENT = bytes(range(256)) * 3


def stream(content: bytes = CONTENT, position: int = 7) -> io.BytesIO:
    made = io.BytesIO(content)
    made.seek(position)
    return made


def check_stream(found: Any, content: bytes = CONTENT, position: int = 7) -> None:
    assert type(found) is io.BytesIO
    assert (found.getvalue(), found.tell()) == (content, position)


# --- io.BytesIO is data ----------------------------------------------------------------------------------------------

SAVERS = {
    "sidestream": lambda state, path: sidestream.save(state, path),
    "StorageWriter": lambda state, path: asyncio.to_thread(OURS.save, state, path),
    "stock": lambda state, path: asyncio.to_thread(FILE.save, state, path),
}
LOADERS = {
    "sidestream": lambda state, path: sidestream.load(state, path),
    "StorageReader": lambda state, path: asyncio.to_thread(OURS.load, state, path),
    "stock": lambda state, path: asyncio.to_thread(FILE.load, state, path),
}


@pytest.mark.parametrize("saver", SAVERS)
async def test_a_bytes_io_comes_back_whoever_saves_and_loads(saver: str, tmp_path: Path) -> None:
    state = {"losses": stream(), "pair": (1, stream(b"", 0)), "large": stream(bytes(2 << 20), 1), "w": torch.ones(3)}
    await SAVERS[saver](state, tmp_path / "c")
    for load in LOADERS.values():
        target: dict[str, Any] = {"losses": io.BytesIO(), "pair": None, "large": None, "w": torch.zeros(3)}
        await load(target, tmp_path / "c")
        check_stream(target["losses"])
        check_stream(target["pair"][1], b"", 0)
        check_stream(target["large"], bytes(2 << 20), 1)
    found = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    check_stream(found["losses"])
    report = await sidestream.verify(tmp_path / "c")
    assert report.ok
    assert report.unverified == ()


async def test_a_bytes_io_is_saved_as_it_was_at_the_call(tmp_path: Path) -> None:
    state = {"losses": stream(), "w": torch.ones(3)}
    pending = sidestream.async_save(state, tmp_path / "c")
    state["losses"].write(b"later")
    await pending
    check_stream(await (await sidestream.open_checkpoint(tmp_path / "c")).value("losses"))
    assert vars(stream()) == {}


async def test_a_bytes_io_through_a_file_of_torch_save(tmp_path: Path) -> None:
    await sidestream.save({"losses": stream(), "w": torch.ones(3)}, tmp_path / "c")
    await sidestream.convert(tmp_path / "c", tmp_path / "c.pt")
    check_stream(torch.load(tmp_path / "c.pt", weights_only=False)["losses"])
    torch.save({"losses": stream()}, tmp_path / "d.pt")
    target = {"losses": None}
    await sidestream.load(target, tmp_path / "d.pt")
    check_stream(target["losses"])


class Named(io.BytesIO):
    pass


@pytest.mark.parametrize("what", ["attributes", "subclass", "beyond its end", "closed"])
async def test_a_bytes_io_that_is_more_than_data_is_refused(what: str, tmp_path: Path) -> None:
    value = Named(b"ab") if what == "subclass" else stream(b"ab", 9 if what == "beyond its end" else 0)
    if what == "attributes":
        value.name = "losses.bin"  # type: ignore[attr-defined]
    if what == "closed":
        value.close()
    with pytest.raises(UnsafeObjectError, match="losses"):
        await sidestream.save({"losses": value}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    if what != "closed":
        FILE.save({"losses": value}, tmp_path / "stock")
        with pytest.raises(UnsafeObjectError, match="losses"):
            await sidestream.load({"losses": None}, tmp_path / "stock")


@pytest.mark.parametrize(
    "content", [["YWI=", 3], ["YWI=", -1], ["YWI=", True], ["YWI=", 1.0], ["YWI="], "YWI=", ["?", 0]]
)
def test_a_bytes_io_that_no_writer_of_ours_makes(content: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_value({"bytesio": content}, "losses")
    with pytest.raises((CorruptCheckpointError, ValueError)):
        pickle_node({"bytesio": content})


def test_the_pickle_of_a_bytes_io_is_what_python_makes_of_it() -> None:
    raw, storages = pickle_node(encode_value(stream(), "losses"))
    assert storages == []
    check_stream(pickle.loads(raw))


# --- warnings at the save about values that are not plain data --------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int


MORE_THAN_DATA: dict[str, tuple[Any, list[type]]] = {
    "enum": (Colour.RED, [Colour]),
    "time": (dt.datetime(2026, 1, 2, tzinfo=dt.UTC), [dt.datetime, dt.timezone, dt.timedelta]),
    "path": (Path("a/b"), [type(Path())]),
    "named tuple": (Pair(1), [Pair]),
    "range": (range(3), [range]),
    "slice": (slice(1, 2), [slice]),
    "deque": (collections.deque([1]), [collections.deque]),
    "large": ([Pair(1), bytes(2 << 20)], [Pair]),
}


@pytest.mark.parametrize("kind", MORE_THAN_DATA)
def test_the_writer_says_by_name_what_its_reader_refuses(kind: str, tmp_path: Path) -> None:
    value, types = MORE_THAN_DATA[kind]
    state = {"deep": {"odd": (value,)}, "w": torch.ones(3)}
    with pytest.warns(UserWarning, match=r"refuses to load 1 of the values.*deep\.odd \(.*StorageWriter") as told:
        OURS.save(state, tmp_path / "c")
    assert sum("refuses to load" in str(one.message) for one in told) == 1
    with pytest.raises(CheckpointException, match="UnsafeObjectError"):
        OURS.load({"deep": {"odd": None}}, tmp_path / "c")
    target: dict[str, Any] = {"deep": {"odd": None}}
    assert OURS.load(target, tmp_path / "c", safe_globals=types)["deep"]["odd"] == (value,)
    OURS.save(state, tmp_path / "allowed", safe_globals=types)  # nothing to say: a warning would be an error
    OURS.save(state, tmp_path / "trusted", trust="pickle")


def test_the_writer_says_it_once_for_each_name(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "unused")
    for name in ("a", "b"):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            dcp.save({"p": Path("x")}, checkpoint_id=str(tmp_path / name), storage_writer=writer, no_dist=True)
        assert len([one for one in told if "refuses to load" in str(one.message)]) == (name == "a")


def test_values_that_went_through_an_extension_are_named_too(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"p \(.*PosixPath"):
        OURS.save({"p": Path("x")}, tmp_path / "c", extensions=[ZStandard()])


async def test_a_value_too_large_to_be_read(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"blob \(it has \d+ bytes, more than the 67108864 that are read\)"):
        OURS.save({"blob": bytes(65 << 20)}, tmp_path / "c")


# --- keywords of DCP's own storage -----------------------------------------------------------------------------------


def test_path_is_url(tmp_path: Path) -> None:
    dcp.save({"n": 1}, storage_writer=StorageWriter(path=tmp_path / "c"), no_dist=True)
    target = {"n": 0}
    dcp.load(target, storage_reader=StorageReader(path=str(tmp_path / "c")), no_dist=True)
    assert target == {"n": 1}
    for face in (StorageWriter, StorageReader):
        with pytest.raises(InvalidOptionError, match="the same option"):
            face(tmp_path / "c", path=tmp_path / "c")
        with pytest.raises(InvalidOptionError, match="pass url="):
            face()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"single_file_per_rank": True}, "decides how many files"),
        ({"thread_count": 2}, "four threads"),
        ({"per_thread_copy_ahead": 0}, "budget"),
        ({"cache_staged_state_dict": True}, "async_stager="),
    ],
)
def test_keywords_without_a_meaning_are_taken_with_a_warning(options: Any, word: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"StorageWriter ignores {next(iter(options))}= .*{word}") as told:
        writer = StorageWriter(tmp_path / "c", **options)
    assert told[0].filename == __file__
    dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
    with pytest.warns(UserWarning, match="StorageReader ignores thread_count="):
        reader = StorageReader(tmp_path / "c", thread_count=4)
    dcp.load(target := {"n": 0}, storage_reader=reader, no_dist=True)
    assert target == {"n": 1}


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        ({"fqn_to_index_mapping": {}}, "sidestream.convert"),
        ({"save_distributed": True}, "sidestream.convert"),
        ({"enable_consolidation": True}, "sidestream.convert"),
        ({"serialization_format": SerializationFormat.SAFETENSORS}, "sidestream.convert"),
        ({"key": "name"}, "storage_options="),
        ({"overwite": True}, "no option overwite="),
        ({"sync_files": False, "durability": "fsync"}, "contradicts"),
    ],
)
def test_keywords_that_ask_for_something_else_are_refused(options: Any, instead: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=instead):
        StorageWriter(tmp_path / "c", **options)


def test_keywords_of_the_reader_that_are_refused(tmp_path: Path) -> None:
    for options, instead in (({"target_dtype": torch.float32}, "quantized"), ({"token": "t"}, "storage_options=")):
        with pytest.raises(InvalidOptionError, match=instead):
            StorageReader(tmp_path / "c", **options)  # type: ignore[arg-type]


def test_keywords_with_a_meaning(tmp_path: Path) -> None:
    StorageWriter(tmp_path / "c", serialization_format=SerializationFormat.TORCH_SAVE, sync_files=True)
    assert StorageWriter(tmp_path / "c", sync_files=False)._durability == "flush"
    assert StorageWriter(tmp_path / "c", sync_files=True, durability="fsync")._durability == "fsync"
    writer = StorageWriter(tmp_path / "c", _extensions=[ZStandard()])
    dcp.save({"w": torch.zeros(1 << 16)}, storage_writer=writer, no_dist=True)
    target = {"w": torch.ones(1 << 16)}
    dcp.load(
        target, storage_reader=StorageReader(tmp_path / "c", _extension_registry=ExtensionRegistry()), no_dist=True
    )
    assert not target["w"].any()


# --- extensions ------------------------------------------------------------------------------------------------------


class Rot13(StreamTransformExtension):
    """An extension that rotates letters, which sidestream's readers cannot undo."""

    @staticmethod
    def registry_name() -> str:
        return "stream.rot13"

    @staticmethod
    def from_descriptor(version: str) -> Rot13:
        return Rot13()

    def get_descriptor(self) -> str:
        return "stream.rot13/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return codecs.getwriter("rot13")(output)  # type: ignore[return-value]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002
        return codecs.getreader("rot13")(input)  # type: ignore[return-value]


@pytest.mark.parametrize("extensions", [[Rot13()], [ZStandard(), Rot13()], [ZStandard(), ZStandard()]])
def test_an_extension_that_no_reader_of_ours_undoes_is_refused_by_name(extensions: Any, tmp_path: Path) -> None:
    for name in ("extensions", "_extensions"):
        with pytest.raises(InvalidOptionError, match=extensions[-1].get_descriptor()):
            StorageWriter(tmp_path / "c", **{name: extensions})
    registry = ExtensionRegistry()
    registry.register(Rot13)
    with pytest.warns(UserWarning, match=r"stream\.rot13"):
        StorageReader(tmp_path / "c", _extension_registry=registry)


# --- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OURS, FILE], ids=lambda kind: kind.name)
def test_the_ids_of_a_save_and_a_load(kind: Any, tmp_path: Path) -> None:
    writer, reader = kind.writer(str(tmp_path / "c")), kind.reader(str(tmp_path / "c"))
    before = writer.storage_meta()
    assert (str(before.checkpoint_id), before.save_id) == (str(tmp_path / "c"), writer.save_id)
    written = dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
    if kind.ours or written.storage_meta is not None:  # stock of torch 2.11 returns none
        assert written.storage_meta.save_id == writer.save_id
    metadata = reader.read_metadata()
    assert metadata.storage_meta.save_id == writer.save_id
    assert metadata.storage_meta.load_id == reader.load_id
    reader.reset()
    assert reader.load_id != metadata.storage_meta.load_id
    first = writer.save_id
    dcp.save({"n": 2}, checkpoint_id=str(tmp_path / "d"), storage_writer=writer, no_dist=True)
    assert writer.save_id != first


async def test_the_save_id_of_the_writer_is_the_checkpoints(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "c")
    dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
    assert (await sidestream.verify(tmp_path / "c")).save_id == writer.save_id


async def test_the_storage_meta_of_what_sidestream_saved(tmp_path: Path) -> None:
    info = await sidestream.save({"n": 1}, tmp_path / "c")
    meta = StorageReader(tmp_path / "c").read_metadata().storage_meta
    assert meta is not None
    assert (meta.checkpoint_id, meta.save_id) == (str(tmp_path / "c"), info.save_id)


# --- attributes of tensors -------------------------------------------------------------------------------------------


def marked(value: float, **attributes: Any) -> torch.Tensor:
    tensor = torch.full((4,), value)
    vars(tensor).update(attributes)
    return tensor


async def test_attributes_of_tensors_survive_a_stage() -> None:
    shards = {"rows": (0, 2)}
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    source = marked(1.0, mine=1, shards=shards, main_grad=torch.ones(4))
    state = {
        "plain": {"a": source, "b": torch.ones(3)},
        "mixed": {"n": 1, "p": parameter, "list": [marked(2.0, mine=2), torch.ones(1)], "pair": (marked(3.0, mine=3),)},
        "tied": source,
    }
    async with sidestream.AsyncStager() as stager:
        for _ in range(2):  # the second time from a plan that is known
            staged = await stager.stage(state)
            source.mine = "later"
            copied = staged["plain"]["a"]
            assert (copied.mine, copied.shards, vars(copied).keys()) == (1, shards, {"mine", "shards"})
            assert object.__getstate__(staged["plain"]["b"]) is None
            assert staged["mixed"]["p"].tensor_model_parallel is True
            assert (staged["mixed"]["list"][0].mine, staged["mixed"]["pair"][0].mine) == (2, 3)
            assert staged["tied"].mine == 1
            assert torch.equal(staged["tied"], torch.ones(4))
            source.mine = 1
            staged.release()
    blocking = sidestream.BlockingAsyncStager()
    assert blocking.stage(state)["tied"].shards is shards
    blocking.close()


async def test_attributes_beside_those_of_a_checkpointable_tensor() -> None:
    tensor = marked(
        1.0, global_shape=(8,), global_offsets=((4,),), local_offsets=((0,),), local_sizes=((4,),), owner="expert 1"
    )
    async with sidestream.AsyncStager() as stager:
        staged = await stager.stage({"t": tensor})
        assert (staged["t"].owner, staged["t"].global_shape) == ("expert 1", (8,))


class Thawed(DefaultSavePlanner):
    """A planner that leaves out tensors marked as frozen by an attribute."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        kept = {key: value for key, value in state_dict.items() if not getattr(value, "frozen", False)}
        super().set_up_planner(kept, storage_meta, is_coordinator)


async def test_a_planner_sees_the_attributes_of_the_staged_copy(tmp_path: Path) -> None:
    state = {"trained": marked(1.0, frozen=False), "fixed": marked(2.0, frozen=True), "n": 1}
    expected = {"trained", "n"}
    written = await asyncio.to_thread(FILE.save, state, tmp_path / "stock", Thawed())
    assert set(written.state_dict_metadata) == expected
    async with sidestream.AsyncStager() as stager:
        answer = dcp.async_save(
            state, storage_writer=StorageWriter(tmp_path / "inside"), planner=Thawed(), async_stager=stager
        )
        metadata = await asyncio.wrap_future(answer.upload_completion)
    assert set(metadata.state_dict_metadata) == expected
