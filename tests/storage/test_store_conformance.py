"""The contract of a store, on every one that there is."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from _places import s3_place

from sidestream import errors
from sidestream._runtime.threads import Deadline, Stop, Threads
from sidestream._save.commit import BytesBody
from sidestream._storage import ReadRange, Store, Where, locate_run

ATTEMPT = f".ckpt.{'a' * 32}.partial"
OTHER = f".ckpt.{'b' * 32}.partial"
MARKER = b"a marker that is long enough to be looked at"


@pytest.fixture(params=["local", "memory", "s3 by obstore", "s3 by fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "local":
        yield locate_run(tmp_path / "run")[0]
    elif request.param == "memory":
        yield locate_run(f"memory://{uuid.uuid4().hex}/run")[0]
    else:
        place = s3_place(request.getfixturevalue("s3"), request.param.rpartition(" ")[2])
        options = place.keywords["storage_options"]
        yield locate_run(place.base, Where(options, policy=place.keywords["store_policy"]))[0]


def soon() -> Deadline:
    return Deadline.after(60)


def write(store: Store, attempt: str, files: dict[str, bytes], stop: Stop | None = None) -> None:
    threads = Threads("test", 2)
    bodies = ((name, BytesBody(content)) for name, content in files.items())
    try:
        store.write(attempt, "ckpt", bodies, threads=threads, durability="fsync", stop=stop or Stop(), deadline=soon())
    finally:
        threads.close()


async def publish(store: Store, attempt: str, marker: bytes = MARKER) -> None:
    await store.put(f"{attempt}/.metadata", BytesBody(marker), durability="fsync", deadline=soon())
    await store.publish(attempt, "ckpt", durability="fsync", deadline=soon())


async def test_an_attempt_is_published(store: Store) -> None:
    content = bytes(range(256)) * 100
    write(store, ATTEMPT, {"__0_0.distcp": content, "__0_1.distcp": b""})
    with pytest.raises(FileNotFoundError):
        await store.read_tail("ckpt/.metadata", 10, deadline=soon())
    await publish(store, ATTEMPT)
    name = store.published_name(ATTEMPT, "__0_0.distcp")
    empty = store.published_name(ATTEMPT, "__0_1.distcp")
    sizes = await store.sizes("ckpt", deadline=soon())
    assert sizes == {name: len(content), empty: 0, ".metadata": len(MARKER)}
    assert await store.directories(deadline=soon()) == ["ckpt"]
    assert await store.size(f"ckpt/{name}", deadline=soon()) == len(content)
    assert await store.read_tail("ckpt/.metadata", 8, deadline=soon()) == MARKER[-8:]
    assert await store.read_tail("ckpt/.metadata", 4096, deadline=soon()) == MARKER
    assert await store.read_tail(f"ckpt/{empty}", 10, deadline=soon()) == b""


async def test_ranges(store: Store) -> None:
    content = bytes(index % 251 for index in range(100_000))
    write(store, ATTEMPT, {"__0_0.distcp": content})
    await publish(store, ATTEMPT)
    name = f"ckpt/{store.published_name(ATTEMPT, '__0_0.distcp')}"
    arrived: list[int] = []
    places = [(90_000, 10_000), (0, 1), (5, 1000), (500, 1000), (7, 0), (50_000, 3)]
    buffers = [bytearray(length) for _, length in places]
    ranges = [
        ReadRange(offset, memoryview(buffer), lambda offset=offset: arrived.append(offset))
        for (offset, _), buffer in zip(places, buffers, strict=True)
    ]
    await store.read(name, ranges, deadline=soon())
    for (offset, length), buffer in zip(places, buffers, strict=True):
        assert buffer == content[offset : offset + length]
    assert sorted(arrived) == sorted(offset for offset, length in places if length)
    for offset in (99_999, 200_000):
        with pytest.raises(errors.Corrupt):
            await store.read(name, [ReadRange(offset, memoryview(bytearray(2)))], deadline=soon())
    with pytest.raises(FileNotFoundError):
        await store.read("ckpt/none", [ReadRange(0, memoryview(bytearray(2)))], deadline=soon())


async def test_what_arrives_may_fail(store: Store) -> None:
    write(store, ATTEMPT, {"__0_0.distcp": b"content"})
    await publish(store, ATTEMPT)
    name = f"ckpt/{store.published_name(ATTEMPT, '__0_0.distcp')}"

    def refuse() -> None:
        raise errors.Corrupt("not this")

    with pytest.raises(errors.Corrupt, match="not this"):
        await store.read(name, [ReadRange(0, memoryview(bytearray(2)), refuse)], deadline=soon())


async def test_a_target_belongs_to_the_first(store: Store) -> None:
    write(store, ATTEMPT, {"__0_0.distcp": b"first"})
    write(store, OTHER, {"__0_0.distcp": b"second"})
    await publish(store, ATTEMPT)
    with pytest.raises(errors.Conflict):
        await publish(store, OTHER, b"another marker, of the same length as it is")
    await store.discard(OTHER, deadline=soon())
    name = store.published_name(ATTEMPT, "__0_0.distcp")
    assert set(await store.sizes("ckpt", deadline=soon())) == {name, ".metadata"}
    assert await store.read_tail("ckpt/.metadata", 4096, deadline=soon()) == MARKER
    with pytest.raises(errors.Conflict):
        write(store, f".ckpt.{'c' * 32}.partial", {"__0_0.distcp": b"third"})


async def test_what_is_discarded_is_gone(store: Store) -> None:
    write(store, ATTEMPT, {"__0_0.distcp": b"content"})
    await store.discard(ATTEMPT, deadline=soon())
    await store.discard(ATTEMPT, deadline=soon())
    write(store, OTHER, {"__0_0.distcp": b"content"})
    store.discard_here(OTHER)
    with pytest.raises(FileNotFoundError):
        await store.sizes("ckpt", deadline=soon())
    assert await store.directories(deadline=soon()) == []


async def test_a_small_file_is_made_once(store: Store) -> None:
    write(store, ATTEMPT, {})  # makes the root
    await store.put("note", BytesBody(b"mine, and nobody else's"), durability="fsync", deadline=soon())
    with pytest.raises(errors.Conflict):
        await store.put("note", BytesBody(b"yours, as it seems to me"), durability="fsync", deadline=soon())
    assert await store.read_tail("note", 100, deadline=soon()) == b"mine, and nobody else's"


async def test_nothing_there(store: Store) -> None:
    assert await store.directories(deadline=soon()) == []
    with pytest.raises(FileNotFoundError):
        await store.sizes("ckpt", deadline=soon())
    with pytest.raises(FileNotFoundError):
        await store.size("ckpt/.metadata", deadline=soon())


def test_a_stop_before_anything_is_written(store: Store) -> None:
    stop = Stop()
    stop.set()
    with pytest.raises(errors.Closed):
        write(store, ATTEMPT, {"__0_0.distcp": b"content"}, stop)
