"""The contract of a store, on every one that there is."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
from _own_stores import DirectoryStore, Wrapped, without
from _places import policy, s3_place

from sidestream import Storage, errors
from sidestream._runtime.threads import Deadline, Stop, Threads, time_limit
from sidestream._storage import Attempt, Kind, ReadRange, Store, Transaction, locate_run
from sidestream._storage.bodies import BytesBody

ID, OTHER_ID = "a" * 32, "b" * 32
MARKER = b"a marker that is long enough to be looked at"


@pytest.fixture(
    params=[
        "local",
        "local with a marker",
        "memory",
        "s3 by obstore",
        "s3 by fsspec",
        "one that delays",
        "one that fails",
        "one without create-only put",
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield locate_run(tmp_path / "run")[0]
    elif request.param == "local with a marker":
        yield locate_run(tmp_path / "run", Storage(commit="marker"))[0]
    elif request.param == "memory":
        yield locate_run(f"memory://{uuid.uuid4().hex}/run")[0]
    elif request.param == "one that delays":
        yield locate_run("run", Storage(filesystem=Wrapped(DirectoryStore(tmp_path)), policy=policy()))[0]
    elif request.param == "one without create-only put":
        plain = without(DirectoryStore(tmp_path), create_only=False)
        yield locate_run("run", Storage(filesystem=plain, policy=policy()))[0]
    elif request.param == "one that fails":
        yield locate_run("run", Storage(filesystem=Wrapped(DirectoryStore(tmp_path), flaky=True), policy=policy()))[0]
    else:
        place = s3_place(request.getfixturevalue("s3"), request.param.rpartition(" ")[2])
        yield locate_run(place.base, place.keywords["storage"])[0]


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """The deadline of calls that are made here without an operation around them."""
    with time_limit(Deadline.after(60)):
        yield


def begin(store: Store, save_id: str = ID) -> Transaction:
    return store.begin(Attempt("ckpt", "directory", save_id, "fsync"))


def write(transaction: Transaction, files: dict[str, bytes], stop: Stop | None = None) -> None:
    transaction.write(((name, BytesBody(content)) for name, content in files.items()), stop=stop)


def written(store: Store, files: dict[str, bytes], save_id: str = ID) -> Transaction:
    transaction = begin(store, save_id)
    write(transaction, files)
    return transaction


async def publish(transaction: Transaction, marker: bytes = MARKER) -> None:
    transaction.commit({".metadata": [marker]})


async def tail_of(store: Store, name: str, nbytes: int) -> bytes:
    directory, _, file = name.rpartition("/")
    async with aclosing(store.source(directory or ".")) as source:
        return await source.read_tail(file, nbytes)


async def size_of(store: Store, name: str) -> int:
    directory, _, file = name.rpartition("/")
    async with aclosing(store.source(directory)) as source:
        return await source.size(file)


async def read(store: Store, name: str, ranges: list[ReadRange]) -> None:
    directory, _, file = name.rpartition("/")
    async with aclosing(store.source(directory)) as source:
        await source.read(file, ranges)


async def test_an_attempt_is_published(store: Store) -> None:
    content = bytes(range(256)) * 100
    transaction = written(store, {"__0_0.distcp": content, "__0_1.distcp": b""})
    with pytest.raises(FileNotFoundError):
        await tail_of(store, "ckpt/.metadata", 10)
    await publish(transaction)
    name = transaction.committed_name("__0_0.distcp")
    empty = transaction.committed_name("__0_1.distcp")
    sizes = await store.sizes("ckpt")
    assert sizes == {name: len(content), empty: 0, ".metadata": len(MARKER)}
    assert await store.directories() == ["ckpt"]
    assert await size_of(store, f"ckpt/{name}") == len(content)
    assert await tail_of(store, "ckpt/.metadata", 8) == MARKER[-8:]
    assert await tail_of(store, "ckpt/.metadata", 4096) == MARKER
    assert await tail_of(store, f"ckpt/{empty}", 10) == b""


async def test_ranges(store: Store) -> None:
    content = bytes(index % 251 for index in range(100_000))
    transaction = written(store, {"__0_0.distcp": content})
    await publish(transaction)
    name = f"ckpt/{transaction.committed_name('__0_0.distcp')}"
    arrived: list[int] = []
    places = [(90_000, 10_000), (0, 1), (5, 1000), (500, 1000), (7, 0), (50_000, 3)]
    buffers = [bytearray(length) for _, length in places]
    ranges = [
        ReadRange(offset, memoryview(buffer), lambda offset=offset: arrived.append(offset))
        for (offset, _), buffer in zip(places, buffers, strict=True)
    ]
    await read(store, name, ranges)
    for (offset, length), buffer in zip(places, buffers, strict=True):
        assert buffer == content[offset : offset + length]
    assert sorted(arrived) == sorted(offset for offset, length in places if length)
    for offset in (99_999, 200_000):
        with pytest.raises(errors.CorruptCheckpointError):
            await read(store, name, [ReadRange(offset, memoryview(bytearray(2)))])
    with pytest.raises(FileNotFoundError):
        await read(store, "ckpt/none", [ReadRange(0, memoryview(bytearray(2)))])


async def test_a_source_has_the_files_of_its_directory(store: Store) -> None:
    content = bytes(index % 251 for index in range(100_000))
    transaction = written(store, {"__0_0.distcp": content})
    await publish(transaction)
    name = transaction.committed_name("__0_0.distcp")
    async with aclosing(store.source("ckpt")) as source:
        assert source.name == "ckpt"
        assert source.path_of(name) == f"ckpt/{name}"
        assert await source.sizes() == {name: len(content), ".metadata": len(MARKER)}
        assert await source.size(name) == len(content)
        assert await source.read_tail(".metadata", 8) == MARKER[-8:]
        whole, part = bytearray(len(content)), bytearray(10)
        await source.read(name, [ReadRange(0, memoryview(whole)), ReadRange(90_000, memoryview(part))])
        assert whole == content
        assert part == content[90_000:90_010]
        if store.capabilities.mapping:
            mapped = await source.map(name, 1000)
            assert mapped[:] == content[:1000]
        files = source.files(lambda: None)
        if files is not None:
            threads, again = Threads("test", 1), bytearray(len(content))
            try:
                await threads.run(files.read, name, [ReadRange(0, memoryview(again))], Stop())
            finally:
                threads.close()
            assert again == content
    await source.aclose()


async def test_what_a_source_refuses(store: Store) -> None:
    """Errors name the whole path, or the URL, of the file."""
    transaction = written(store, {"__0_0.distcp": b"content"})
    await publish(transaction)
    name = transaction.committed_name("__0_0.distcp")
    two = [ReadRange(6, memoryview(bytearray(2)))]
    async with aclosing(store.source("ckpt")) as source:
        with pytest.raises(errors.CorruptCheckpointError) as short:
            await source.read(name, two)
        assert f"{store.url}/ckpt/{name} ends at byte 7" in str(short.value)
        assert short.value.file == name
        for request in (source.read("none", two), source.read_tail("none", 8), source.size("none")):
            with pytest.raises(FileNotFoundError) as missing:
                await request
            assert missing.value.filename == f"{store.url}/ckpt/none"
            assert missing.value.__cause__ is not missing.value
    for directory in ("none", f"ckpt/{name}") if store.capabilities.rename else ("none",):  # nothing, and a file
        source = store.source(directory)
        for request in (source.sizes(), source.read_tail("a", 8), source.size("a"), source.read("a", two)):
            with pytest.raises(FileNotFoundError) as missing:
                await request
            assert str(missing.value.filename).startswith(f"{store.url}/{directory}")
        await source.aclose()


async def test_the_source_of_the_root(store: Store) -> None:
    """As a file that is a checkpoint by itself is read."""
    transaction = store.begin(Attempt("one.pt", "file", ID, "fsync"))
    write(transaction, {"one.pt": b"content"})
    transaction.commit({})
    async with aclosing(store.source(".")) as source:
        assert source.path_of("one.pt") == "one.pt"
        assert await source.size("one.pt") == 7
        assert await source.read_tail("one.pt", 3) == b"ent"


async def test_what_arrives_may_fail(store: Store) -> None:
    transaction = written(store, {"__0_0.distcp": b"content"})
    await publish(transaction)
    name = f"ckpt/{transaction.committed_name('__0_0.distcp')}"

    def refuse() -> None:
        raise errors.CorruptCheckpointError("not this")

    with pytest.raises(errors.CorruptCheckpointError, match="not this"):
        await read(store, name, [ReadRange(0, memoryview(bytearray(2)), refuse)])


async def test_what_is_discarded_is_gone(store: Store) -> None:
    transaction = written(store, {"__0_0.distcp": b"content"})
    transaction.discard()
    transaction.discard()
    other = written(store, {"__0_0.distcp": b"content"}, OTHER_ID)
    other.discard()
    with pytest.raises(FileNotFoundError):
        await store.sizes("ckpt")
    assert await store.directories() == []


@pytest.mark.parametrize("kind", ["directory", "replacement", "files", "file", "part"])
async def test_a_transaction_that_was_discarded_makes_no_attempt(kind: Kind, store: Store) -> None:
    """A thread may come to its first write after another one has ended the save."""
    transaction = store.begin(Attempt("ckpt", kind, ID, "fsync"))
    transaction.discard()
    with pytest.raises(errors.ClosedError, match="was discarded"):
        write(transaction, {"ckpt": b"content"})
    assert await store.leftovers() == []
    assert "ckpt" not in await store.directories()


async def test_a_forked_child_discards_nothing(store: Store) -> None:
    """As a finalizer that it has from its parent would."""
    transaction = written(store, {"__0_0.distcp": b"content"})
    transaction._pid += 1
    transaction.discard()
    transaction._pid -= 1
    await publish(transaction)
    assert transaction.committed_name("__0_0.distcp") in await store.sizes("ckpt")


async def test_a_transaction_that_has_committed_keeps_no_content(store: Store) -> None:
    """The result of a save refers to it, for as long as somebody keeps that."""
    transaction = written(store, {"__0_0.distcp": b"content"})
    marker = bytes(1 << 20) + MARKER
    await publish(transaction, marker)
    async with asyncio.timeout(60):
        while sys.getrefcount(marker) > 2:  # a thread that has just ended its work may still refer to it
            await asyncio.sleep(0.001)


async def test_a_small_file_is_made_once(store: Store) -> None:
    written(store, {})  # makes the root
    await store.put("note", b"mine, and nobody else's", durability="fsync")
    with pytest.raises(errors.CheckpointExistsError):
        await store.put("note", b"yours, as it seems to me", durability="fsync")
    assert await tail_of(store, "note", 100) == b"mine, and nobody else's"


async def test_files_are_removed(store: Store) -> None:
    written(store, {})
    for name in ("one", "two"):
        await store.put(f"notes/{name}", b"note", durability="fsync")
    await store.remove(["notes/one", "notes/none", "none/none"])
    assert set(await store.ages("notes")) == {"two"}


def test_a_stop_before_anything_is_written(store: Store) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(errors.ClosedError):
        write(begin(store), {"__0_0.distcp": b"content"}, stop)
