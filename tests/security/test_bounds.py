"""The cost of a hostile checkpoint is bounded: time in proportion to its names, memory in proportion to its bytes, and
no time on the event loop. Every function that works on a listing or on metadata is given 20,000 names here."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from _hostile import STATE, colliding, described, forged, item, opcodes, scattered, stock, with_records
from between_pauses import calls_between_pauses
from hangs import processor_budget
from late import late
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import sidestream
from sidestream import errors
from sidestream._foreign.dcp_metadata import read_dcp_description
from sidestream._foreign.rank_files import merge_ranks, rank_files
from sidestream._foreign.torch_zip.file import read_torch_file
from sidestream._foreign.torch_zip.zip import TorchZip
from sidestream._format.marker import attribute_of
from sidestream._format.records import Chunk, DictKey, Manifest, TensorEntry
from sidestream._format.shared import RankPart
from sidestream._layout.assemble import assemble
from sidestream._layout.hashed import check_hashes, fill, set_of
from sidestream._layout.names import consistent
from sidestream._layout.values import decode_value
from sidestream._load.open.parts import PART_ATTRIBUTE, PartMarker, missing_ranks, whole
from sidestream._run.steps import Generations, list_generations, list_steps, named_steps
from sidestream._runtime.pauses import pause_point
from sidestream._runtime.threads import Deadline, io_threads, paced, time_limit
from sidestream._storage import locate_run
from sidestream.errors import (
    CorruptCheckpointError,
    DeadlineExceededError,
    IncompleteCheckpointError,
    KeyCollisionError,
    OutOfMemoryError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
)

MANY = 20_000
MODULUS = (1 << 61) - 1
SECONDS = 60.0  # of processor time: a bound against what is quadratic, which takes minutes


# --- keys that share a hash ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", colliding())
def test_keys_that_share_a_hash_are_refused_before_a_container_has_them(kind: str) -> None:
    keys = (colliding()[kind] * 17)[:MANY]
    assert len({hash(key) for key in keys}) <= 4
    with processor_budget(SECONDS):
        for check in (check_hashes, set_of, lambda keys: fill({}, [(key, None) for key in keys])):
            with pytest.raises(CorruptCheckpointError, match="same hash"):
                check(keys)


def test_numbers_that_nobody_chose_are_taken() -> None:
    powers = [2.0**exponent for exponent in range(-1000, 1000)]  # some 34 share a hash
    keys = [*range(-MANY, MANY), *powers, *(complex(number, 1) for number in range(MANY)), *map(str, range(MANY))]
    keys += list(itertools.product(range(20), repeat=3))
    assert set_of(keys) == set(keys)
    assert list(fill({}, [(key, str(key)) for key in keys]).items()) == list({key: str(key) for key in keys}.items())


def test_an_object_that_was_allowed_gets_no_colliding_items() -> None:
    node = {
        "object": {"type": "x", "new": False, "args": [], "items": [[{"int": hex(n * MODULUS)}, 1] for n in range(999)]}
    }
    with pytest.raises(CorruptCheckpointError, match="same hash"):
        decode_value(node, "v", {"x": dict})


async def test_colliding_keys_of_an_allowed_type_are_refused(tmp_path: Path) -> None:
    fraction = b"cfractions\nFraction\n("
    pushed = b"".join(fraction + opcodes(str(number * MODULUS)) + b"tRN" for number in range(2_000))
    bomb = with_records(item(1), lambda name, raw: b"\x80\x02}(" + pushed + b"u." if name.endswith("data.pkl") else raw)
    described(tmp_path / "c", item(STATE["w"]), bomb)
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=[Fraction])
    with processor_budget(SECONDS), pytest.raises(CorruptCheckpointError, match="same hash"):
        await checkpoint.state_dict()


def test_paths_of_colliding_keys_are_refused() -> None:
    leaves = [(("p", DictKey(number * MODULUS)), number) for number in range(MANY)]
    with processor_budget(SECONDS), pytest.raises(CorruptCheckpointError, match="same hash"):
        assemble(leaves)
    large = [(("p", DictKey(number + (1 << 100)), "x"), number) for number in range(MANY)]
    assert len(assemble(large)["p"]) == MANY
    one = [(("p", DictKey(1 << 100), str(number)), number) for number in range(MANY)]
    assert len(assemble(one)["p"][1 << 100]) == MANY


async def test_colliding_offsets_in_metadata_cost_nothing(tmp_path: Path) -> None:
    offsets = [tuple((number >> bit & 1) * MODULUS for bit in range(15)) for number in range(MANY)]
    assert len(set(map(hash, offsets))) == 1
    scattered(tmp_path / "c", offsets)
    with processor_budget(SECONDS):
        checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
        assert (await checkpoint.state_dict())["w"].tolist() == STATE["w"].tolist()


def test_colliding_offsets_in_a_metadata_that_is_compared_cost_nothing(tmp_path: Path) -> None:
    offsets = [tuple((number >> bit & 1) * MODULUS for bit in range(15)) for number in range(MANY)]
    scattered(tmp_path / "c", offsets)
    with processor_budget(SECONDS / 6):
        described = read_dcp_description((tmp_path / "c" / ".metadata").read_bytes())
    assert len(described.hints) == MANY + 1
    assert described.spare == {"w"}


def test_colliding_places_of_ranks_cost_nothing() -> None:
    bits = [tuple((number >> bit & 1) * MODULUS for bit in range(15)) for number in range(MANY)]
    chunks = tuple(Chunk(one, (1,) * 15, "f", at, 1) for at, one in enumerate(bits))
    entry = TensorEntry(("t",), "uint8", (1,) * 15, chunks)
    part = b"".join(json.dumps([0, one, [1] * 15, "f", 0, 1, 0, ""]).encode() + b"\n" for one in bits)
    with processor_budget(SECONDS):
        again = replace(entry, chunks=tuple(replace(chunk) for chunk in chunks))
        _, replicas = merge_ranks([Manifest("", {"t": one}, {}) for one in (entry, again)])
        assert len(replicas) == MANY
        assert len(RankPart.parse(part).chunks) == MANY
    with pytest.raises(CorruptCheckpointError):
        RankPart.parse(json.dumps([1 << 80, [0], [1], "f", 0, 1, 0, ""]).encode() + b"\n")


def test_new_names_of_colliding_paths_cost_nothing() -> None:
    paths = {str(n): tuple(DictKey((n >> bit & 1) * MODULUS) for bit in range(10)) for n in range(1 << 10)}
    assert len(set(map(hash, paths.values()))) == 1

    def refused() -> None:
        with suppress(KeyCollisionError):
            consistent(paths, "c")

    with processor_budget(SECONDS):
        assert max(calls_between_pauses(refused)) < 200


async def test_a_selection_of_colliding_paths_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[Any, Any] = {"a": 1}
    for _ in range(9):
        state = {0: state, MODULUS: state}
    await sidestream.save(state, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    compared = 0
    same = DictKey.__eq__

    def count(first: DictKey, second: object) -> bool:
        nonlocal compared
        compared += 1
        return same(first, second)

    with processor_budget(SECONDS):
        monkeypatch.setattr(DictKey, "__eq__", count)
        assert await checkpoint.state_dict(select="*") == state
        assert compared == 0
        await sidestream.convert(tmp_path / "c", tmp_path / "d", select="*")
    assert compared < 50 << 9


def test_a_storage_that_many_small_tensors_share_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_storage = torch.arange(1 << 20, dtype=torch.uint8)
    state = {"a": [(whole_storage[:1], whole_storage[1:2])] * 100, "b": (torch.ones(1),)}
    torch.save(state, tmp_path / "c.pt")
    reads: list[str] = []
    read = TorchZip.read

    def noted(archive: TorchZip, name: str, most_bytes: int) -> bytes:
        reads.append(name)
        return read(archive, name, most_bytes)

    monkeypatch.setattr(TorchZip, "read", noted)
    raw = (tmp_path / "c.pt").read_bytes()
    assert len(read_torch_file(io.BytesIO(raw), len(raw), "c.pt").entries) == 2
    assert sorted(reads) == ["data.pkl", "data/0", "data/1"]


async def test_metadata_of_a_user_has_no_keys_but_strings(tmp_path: Path) -> None:
    await sidestream.save(STATE, tmp_path / "sound")
    node = {"dict": [[number * MODULUS, None] for number in range(MANY)]}

    def edit(head: dict[str, Any], lines: dict[str, list[Any]]) -> None:
        head["metadata"] = True
        lines["metadata"] = {"metadata": node}  # type: ignore[assignment]

    forged(tmp_path / "sound", edit)(tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    with processor_budget(SECONDS), pytest.raises(CorruptCheckpointError, match="string keys"):
        _ = checkpoint.metadata


@pytest.mark.parametrize("last", [b"](K\x01K\x01e", b"K\x01"], ids=["of Python 2", "malformed"])
@pytest.mark.parametrize("holder", [b"]", b""], ids=["list", "tuple"])
def test_a_dict_of_pairs_that_is_shared_is_not_walked_for_each_reference(last: bytes, holder: bytes) -> None:
    count = 1000
    pairs = b"](](K\x01K\x01eq\x00" + b"h\x00" * (count - 2) + last + b"e"
    shared = b"(ccollections\nOrderedDict\n" + pairs + b"\x85Rq\x01" + b"h\x01" * (count - 1)
    pickled = b"\x80\x02}X\x01\x00\x00\x00a" + (holder + shared + b"e" if holder else shared + b"t") + b"s."
    raw = with_records(item(1), lambda name, old: pickled if name.endswith("data.pkl") else old)

    def read() -> None:
        with suppress(CorruptCheckpointError, KeyCollisionError, UnsafeObjectError):
            read_torch_file(io.BytesIO(raw), len(raw), "c.pt")

    with processor_budget(SECONDS):
        assert max(calls_between_pauses(read)) < 20 * count


# --- 20,000 names ----------------------------------------------------------------------------------------------------


@contextmanager
def short_turns(most_calls: int = MANY // 2) -> Iterator[None]:
    """Within, no turn of the running loop does something for each of the names: what is called in its thread is counted
    from turn to turn, because time says more about the machine."""
    calls = most = 0

    def count(frame: Any, event: str, _: object) -> None:
        nonlocal calls, most
        if event == "call" and frame.f_code.co_name == "_run_once":
            calls = 0
        elif event in ("call", "c_call"):
            calls += 1
            most = max(most, calls)

    with processor_budget(SECONDS):
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)
    assert most < most_calls


def header(names: int) -> dict[str, Any]:
    return {
        f"t.{number}": {"dtype": "U8", "shape": [1], "data_offsets": [number, number + 1]} for number in range(names)
    }


def write_safetensors(path: Path, names: int = MANY) -> None:
    raw = json.dumps(header(names)).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(names))


def one_file(path: Path, names: int = MANY) -> None:
    path.mkdir()
    write_safetensors(path / "model.safetensors", names)


def indexed(path: Path, names: int = MANY) -> None:
    one_file(path, names)
    index = {"weight_map": dict.fromkeys(header(names), "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def of_torch(path: Path, names: int = MANY) -> None:
    path.mkdir()
    torch.save({f"t.{number}": number for number in range(names)}, path / "model.pt")


def of_dcp(path: Path, names: int = MANY) -> None:
    """Tensors without elements, so that no writer has to write as many items."""
    described(path, item(STATE["w"]), item(STATE["v"]), more=names)


def own(path: Path, names: int = MANY) -> None:
    state = {f"v{number}": number for number in range(names)}
    saving = threading.Thread(target=sidestream.blocking.save, args=(state, path))  # no loop runs there
    saving.start()
    saving.join()


KINDS: dict[str, Callable[[Path, int], None]] = {
    "safetensors": one_file, "index": indexed, "torch.save": of_torch, "stock DCP": of_dcp, "ours": own,
}  # fmt: skip


Make = Callable[[str], Path]


def _maker(root: Path, names: int) -> Make:
    def made(kind: str) -> Path:
        path = root / kind
        if not path.exists():
            KINDS[kind](path, names)
        return path / "model.pt" if kind == "torch.save" else path

    return made


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return _maker(tmp_path_factory.mktemp("large"), MANY)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The same with a few names. It is read first, because the first call of a kind imports what it needs."""
    return _maker(tmp_path_factory.mktemp("small"), 3)


@pytest.mark.parametrize("kind", KINDS)
async def test_opening_and_reading_20_000_names(kind: str, large: Make, small: Make) -> None:
    checkpoint = await sidestream.open_checkpoint(small(kind))
    if kind != "stock DCP":
        await checkpoint.state_dict()
    path = large(kind)
    with short_turns():
        checkpoint = await sidestream.open_checkpoint(path)
    assert len(checkpoint) >= MANY
    if kind != "stock DCP":
        with short_turns():
            state = await checkpoint.state_dict()
        assert len(state) == MANY or len(state["t"]) == MANY


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"stock DCP"}))  # whose items are read one by one
async def test_verifying_20_000_names(kind: str, large: Make, small: Make) -> None:
    await sidestream.verify(small(kind))
    path = large(kind)
    with short_turns():
        report = await sidestream.verify(path)
    assert len(report.verified) + len(report.unverified) + len(report.damaged) >= MANY


@pytest.mark.parametrize("kind", ["safetensors", "torch.save", "ours"])
async def test_converting_20_000_names(kind: str, large: Make, small: Make, tmp_path: Path) -> None:
    await sidestream.convert(small(kind), tmp_path / "imports.pt", select="*1")
    path = large(kind)
    with short_turns():
        report = await sidestream.convert(path, tmp_path / "out.pt")
    assert len(report.tensors) + len(report.values) == MANY


def test_what_the_command_line_makes_of_20_000_names(large: Make) -> None:
    from sidestream_cli.look import rows

    with processor_budget(SECONDS):
        assert len(rows(str(large("safetensors")), "*")) == MANY


async def test_20_000_files_of_one_checkpoint(tmp_path: Path, small: Make) -> None:
    for number in range(1, MANY):
        (tmp_path / f"m-{number:05d}-of-{MANY:05d}.safetensors").touch()
    await sidestream.open_checkpoint(small("index"))
    with (
        short_turns(),
        pytest.raises(CorruptCheckpointError, match=f"-{MANY:05d}-of-{MANY:05d}.safetensors is missing"),
    ):
        await sidestream.open_checkpoint(tmp_path)
    (tmp_path / f"m-{MANY:05d}-of-{MANY:05d}.safetensors").touch()
    with short_turns(), pytest.raises(CorruptCheckpointError, match="too few"):
        await sidestream.open_checkpoint(tmp_path)
    index = {"weight_map": {f"t{number}": f"n{number}" for number in range(MANY)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with short_turns(), pytest.raises(CorruptCheckpointError, match="is missing from the directory"):
        await sidestream.open_checkpoint(tmp_path)


async def test_20_000_steps(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for number in range(MANY):
        (run / f"step-{number}").mkdir(parents=True)
    (other / "step-1").mkdir(parents=True)
    store = locate_run(run)[0]
    with time_limit(Deadline.after(600)):
        await named_steps(locate_run(other)[0])
    with short_turns(), time_limit(Deadline.after(600)):
        assert len(await named_steps(store)) == MANY
        assert await Generations(store, 1).next(7) == 2


async def test_steps_that_hold_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every directory is opened, so there are fewer of them. None of them causes another listing of the run."""
    names = 500
    for number in range(names):
        (tmp_path / f"step-{number}").mkdir()
    listed: list[str] = []
    scandir = os.scandir

    def listing(path: Path | int) -> Any:
        listed.append(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", listing)
    store = locate_run(tmp_path)[0]
    with short_turns(5 * names), time_limit(Deadline.after(600)):
        assert await list_steps(store) == await list_generations(store, {}) == []
    assert 3 <= listed.count(str(tmp_path)) < 10
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        with short_turns(5 * names):
            assert await checkpoints.restore({"w": torch.zeros(1)}) is None
    assert listed.count(str(tmp_path)) < 20
    assert listed.count(str(tmp_path / "step-7")) >= 3


async def test_20_000_ranks(tmp_path: Path) -> None:
    part = attribute_of(PART_ATTRIBUTE, asdict(PartMarker("save", 0, MANY + 1, "0" * 16, 10, 0)))
    run = tmp_path / "run" / "step-1"
    run.mkdir(parents=True)
    for rank in range(MANY):
        (run / f"__{rank}.metadata").touch()
    (run / "__0.metadata").write_bytes(b"\x80\x04" + part)
    other = tmp_path / "other" / "step-1"
    other.mkdir(parents=True)
    shutil.copy(run / "__0.metadata", other)
    async with sidestream.Checkpointer(other.parent) as checkpoints:
        assert await checkpoints.steps() == []
    async with sidestream.Checkpointer(run.parent) as checkpoints:
        with short_turns():
            assert await checkpoints.steps() == []
    names = [one.name for one in run.iterdir()]
    with short_turns():
        assert len(await io_threads().run(rank_files, names)) == MANY


def test_20_000_ranks_of_as_many_saves() -> None:
    markers = {rank: PartMarker(f"save {rank}", rank, MANY, "0" * 16, 1, 0) for rank in range(MANY)}
    with processor_budget(SECONDS), pytest.raises(IncompleteCheckpointError) as raised:
        whole(markers)
    assert len(raised.value.others) == MANY - 1
    assert len(str(raised.value)) < 10_000


def test_the_missing_ranks_of_ten_million() -> None:
    with processor_budget(5), pytest.raises(IncompleteCheckpointError) as raised:
        whole({0: PartMarker("save", 0, 10_000_000, "0" * 16, 1, 0)})
    assert raised.value.missing == tuple(range(1, (1 << 16) + 1))
    assert "and 9999979 more" in str(raised.value)
    assert missing_ranks({1, 2}, 5) == [0, 3, 4]


def for_ever_paced() -> None:
    for _ in paced(itertools.count()):
        pass


def for_ever_with_points() -> None:
    while True:
        pause_point()


@pytest.mark.parametrize("work", [for_ever_paced, for_ever_with_points])
async def test_work_in_a_thread_ends_at_its_deadline(work: Callable[[], None]) -> None:
    """The thread itself, not only the wait for it."""
    begun, ended = threading.Event(), threading.Event()

    def endless() -> None:
        begun.set()
        try:
            work()
        finally:
            ended.set()

    async def run(timeout_s: float) -> None:
        with time_limit(Deadline.after(timeout_s)):
            await io_threads().run(endless)

    error = await late(run, begun.is_set)
    assert isinstance(error, DeadlineExceededError)
    assert "endless" in str(error)
    assert ended.wait(60)


# --- memory ----------------------------------------------------------------------------------------------------------

_LIMITED = """
import asyncio, json, re, resource, sys
from pathlib import Path
import numpy, torch, zstandard, sidestream
from sidestream.errors import SidestreamError

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

def read():
    return int(re.search(r"rchar: (\\d+)", Path("/proc/self/io").read_text())[1]) >> 20

async def ends(call):
    try:
        await call
    except SidestreamError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException as error:
        return f"FOREIGN {type(error).__name__}: {error}"
    return "returned"

async def everything(url):
    return await (await sidestream.open_checkpoint(url)).state_dict()

async def main(limit_mib, sound, *urls):
    await everything(sound)  # imports, threads
    if limit_mib:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (limit_mib << 20),) * 2)
    print(json.dumps([await told_of(url) for url in urls]))

async def told_of(url):
    calls = {"state_dict": everything(url), "verify": sidestream.verify(url)}
    calls["load"] = sidestream.load({"w": torch.zeros(4)}, url, allow_missing=True)
    calls["convert"] = sidestream.convert(url, str(url) + ".out")
    found = {}
    for name, call in calls.items():
        before, read_before = peak(), read()
        found[name] = await ends(call)
        found[name + " MiB"], found[name + " MiB read"] = peak() - before, read() - read_before
    return found

asyncio.run(main(int(sys.argv[1]), *sys.argv[2:]))
"""


def in_a_process(sound: Path, *urls: Path, limit_mib: int = 0) -> list[dict[str, Any]]:
    """What one process is told of each url, by how much each call raises the peak of its memory, and what it reads."""
    done = warm.run(
        [sys.executable, "-c", _LIMITED, str(limit_mib), str(sound), *map(str, urls)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


def many_values(path: Path, count: int, content: bytes, transforms: list[str] | None = None) -> None:
    """Stock DCP's, with as many values of the same bytes, one after the other."""
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(content * count)
    names = [f"v{number}" for number in range(count)]
    metadata = Metadata(
        {name: BytesStorageMetadata() for name in names},
        {name: (name,) for name in names},
        {
            MetadataIndex(name): _StorageInfo(
                "__0_0.distcp", number * len(content), len(content), transform_descriptors=transforms
            )
            for number, name in enumerate(names)
        },
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def expanding() -> bytes:
    """A value of 62,000 parts in a few hundred bytes."""
    shared = b"](" + b"](" + b"]" * 250 + b"e" + b"q\x00" + b"h\x00" * 249 + b"e"
    return with_records(item(1), lambda name, raw: b"\x80\x02" + shared + b"." if name.endswith("data.pkl") else raw)


def zeros(nbytes: int) -> bytes:
    import zstandard

    packed: bytes = zstandard.ZstdCompressor().compress(item(torch.zeros(nbytes, dtype=torch.uint8)))
    return packed


def packed_tensors(path: Path, count: int, nbytes: int) -> None:
    content = zeros(nbytes)
    path.mkdir()
    (path / "__0_0.distcp").write_bytes(content * count)
    names = [f"t{number}" for number in range(count)]
    size = torch.Size([nbytes])
    chunk = ChunkStorageMetadata(torch.Size([0]), size)
    metadata = Metadata(
        {name: TensorStorageMetadata(TensorProperties(torch.uint8), size, [chunk]) for name in names},
        {name: (name,) for name in names},
        {
            MetadataIndex(name, torch.Size([0]), 0): _StorageInfo(
                "__0_0.distcp", at * len(content), len(content), transform_descriptors=["stream.zstd/1"]
            )
            for at, name in enumerate(names)
        },
    )
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def holed(path: Path, file: str, nbytes: int) -> None:
    os.truncate(path / file, nbytes)
    with (path / file).open("r+b") as stream:
        stream.seek(nbytes - 1)
        stream.write(b".")


def test_values_that_expand_share_one_budget(tmp_path: Path) -> None:
    stock(tmp_path / "sound")
    many_values(tmp_path / "c", 100, expanding())
    (told,) = in_a_process(tmp_path / "sound", tmp_path / "c")
    assert "far more parts" in told["state_dict"]
    assert "far more parts" in told["convert"]
    assert max(told["state_dict MiB"], told["convert MiB"], told["verify MiB"]) < 200


def test_compressed_values_share_one_budget(tmp_path: Path) -> None:
    stock(tmp_path / "sound")
    many_values(tmp_path / "c", 30, zeros(60 << 20), ["stream.zstd/1"])
    (told,) = in_a_process(tmp_path / "sound", tmp_path / "c")
    assert "expands to more" in told["state_dict"]
    assert "expands to more" in told["convert"]
    assert told["verify"] == "returned"  # and detects damage
    assert max(told["state_dict MiB"], told["convert MiB"], told["verify MiB"]) < 900, "all of them have 1,800 MiB"


async def test_compressed_tensors_of_a_checkpoint_have_one_ratio(tmp_path: Path) -> None:
    packed_tensors(tmp_path / "c", 20, 64 << 20)
    with pytest.raises(UnsupportedCheckpointError, match="expand to 1342177280"):
        await sidestream.open_checkpoint(tmp_path / "c")
    packed_tensors(tmp_path / "few", 2, 1 << 20)  # zeros, as an optimizer has them at first
    state = await (await sidestream.open_checkpoint(tmp_path / "few")).state_dict()
    assert not any(tensor.any() for tensor in state.values())


def test_sparse_metadata_and_indexes_are_not_read(tmp_path: Path) -> None:
    stock(tmp_path / "sound")
    paths = []
    for nbytes in (900 << 20, 3 << 29, 1 << 32, 1 << 40):
        paths.append(tmp_path / f"metadata of {nbytes}")
        stock(paths[-1])
        holed(paths[-1], ".metadata", nbytes)
    for nbytes in (90_000_000, 1 << 32):
        paths.append(tmp_path / f"index of {nbytes}")
        one_file(paths[-1], 100)
        (paths[-1] / "model.safetensors.index.json").touch()
        holed(paths[-1], "model.safetensors.index.json", nbytes)
    found = dict(zip(paths, in_a_process(tmp_path / "sound", *paths), strict=True))
    for path, told in found.items():
        assert told["state_dict"].startswith("CorruptCheckpointError"), (path, told)
        assert path.name.startswith("index") or told["load"].startswith("CorruptCheckpointError"), (path, told)
        assert told["state_dict MiB read"] <= 48, "the smallest has 86 MiB"


def test_views_of_one_storage_take_its_memory_once(tmp_path: Path) -> None:
    stock(tmp_path / "sound")
    base = torch.arange(1 << 20, dtype=torch.float32)
    torch.save({f"k{number}": base[number:] for number in range(300)}, tmp_path / "v.pt")
    (told,) = in_a_process(tmp_path / "sound", tmp_path / "v.pt")
    assert told["state_dict"] == "returned"
    assert told["state_dict MiB"] < 100
    assert "views of the same storages" in told["convert"]


async def test_views_are_what_was_saved(tmp_path: Path) -> None:
    base = torch.arange(120, dtype=torch.float32)
    state = {
        "whole": base, "rows": base.view(10, 12), "turned": base.view(10, 12).t(), "tail": base[100:],
        "again": base[100:], "none": base[:0], "alone": torch.ones(7)[2:],
    }  # fmt: skip
    torch.save(state, tmp_path / "v.pt")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "v.pt")
    found = await checkpoint.state_dict()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    found["whole"][110] = -1.0
    assert found["tail"][10] == found["again"][10] == found["rows"][9, 2] == found["turned"][2, 9] == -1.0
    mapped = await checkpoint.state_dict(memory="mapped")
    assert all(torch.equal(mapped[name], tensor) for name, tensor in state.items())


def test_memory_that_is_refused_is_a_typed_error(tmp_path: Path) -> None:
    """Run with less address space than a sound checkpoint needs."""
    stock(tmp_path / "sound")
    stock(tmp_path / "stock", {"w": torch.zeros(100 << 20)})
    sidestream.blocking.save({"w": torch.zeros(100 << 20)}, tmp_path / "own")
    for kind in ("stock", "own"):
        (told,) = in_a_process(tmp_path / "sound", tmp_path / kind, limit_mib=300)
        assert told["state_dict"].startswith("OutOfMemoryError"), (kind, told)
        foreign = [end for end in map(str, told.values()) if "FOREIGN" in end]
        assert not [end for end in foreign if "can't start new thread" not in end], (kind, told)
    assert issubclass(OutOfMemoryError, MemoryError)
    assert issubclass(OutOfMemoryError, errors.SidestreamError)


# --- names ----------------------------------------------------------------------------------------------------------


async def test_a_path_of_stock_dcp_makes_its_fqn(tmp_path: Path) -> None:
    weight, value = item(STATE["w"]), item(STATE["v"])
    for number, path in enumerate([("u",), ("v", "x"), ("v", 0), ("", "v")]):
        described(tmp_path / str(number), weight, value, value_path=path)
        with pytest.raises(CorruptCheckpointError, match="the path of 'v' in planner_data does not match") as raised:
            await sidestream.open_checkpoint(tmp_path / str(number))
        assert raised.value.fqn == "v"


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")
async def test_paths_that_contradict_each_other_are_damage_also_in_a_selection(tmp_path: Path) -> None:
    described(tmp_path / "c", item(STATE["w"]), item(STATE["v"]))
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.planner_data = {"w": ("w",), "w.v": ("w", "v")}
    metadata.state_dict_metadata["w.v"] = metadata.state_dict_metadata.pop("v")
    metadata.storage_data[MetadataIndex("w.v")] = metadata.storage_data.pop(MetadataIndex("v"))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    for select in (None, "*"):
        with pytest.raises(CorruptCheckpointError, match="a container at"):
            await checkpoint.state_dict(select=select)


async def test_every_path_that_stock_dcp_makes_is_read(tmp_path: Path) -> None:
    one = torch.ones(1)
    state = {
        "a.b": {"c.d": one, "": one}, 7: {1: one, -3: one, 2.5: one, None: one}, "l": [one, [one, {"x": 1}]],
        "t": (1, 2), "..": one, "e": {"f": {"g": "."}}, "é": {"\ud800": one},
    }  # fmt: skip
    stock(tmp_path / "c", state)
    found = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    assert found["a.b"]["c.d"].tolist() == [1.0]
    assert found["l"][1][1]["x"] == 1
    assert found["7"]["None"].tolist() == [1.0]


@pytest.mark.parametrize(
    "name", ["step-007", "step-\u0667", "step-7.g\u0662", "step-7.g01", "step-7.g1", "step-+7", "step- 7", "step-1_0"]
)
async def test_a_step_has_one_name(name: str, tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save({"w": torch.ones(2)}, step=7)
        os.rename(tmp_path / "step-7", tmp_path / name)
        assert await checkpoints.steps() == []
        assert await checkpoints.restore({"w": torch.zeros(2)}) is None


async def test_a_rank_has_one_name(tmp_path: Path) -> None:
    for name in ("__00.metadata", "__\u0660.metadata", "__-0.metadata"):
        (tmp_path / name).touch()
        with pytest.raises(errors.CheckpointNotFoundError):
            await sidestream.open_checkpoint(tmp_path)
