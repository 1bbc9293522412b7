"""A store of the user's own: what it is used for, what its flags change, and what is true when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from _own_stores import DirectoryStore, Fault, Wrapped, without
from _places import policy
from keywords import for_load, for_save

import sidestream
from sidestream import errors, events
from sidestream.options import BlobStore, Capabilities

URL = "run/ckpt"


def state() -> dict[str, Any]:
    """Three parts, and a file of plain values."""
    return {"large": torch.arange(3 << 20, dtype=torch.float32), "step": 7}


def blank() -> dict[str, Any]:
    return {"large": torch.zeros(3 << 20), "step": 0}


def keywords(store: BlobStore, **changes: Any) -> dict[str, Any]:
    return {"storage": sidestream.Storage(filesystem=store, policy=policy(**changes))}


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


async def assert_loads(store: BlobStore) -> None:
    target = blank()
    await sidestream.load(target, URL, **for_load(**keywords(store)))
    assert target["step"] == 7
    assert torch.equal(target["large"], state()["large"])


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


async def test_a_large_file_is_sent_in_parts(store: DirectoryStore, tmp_path: Path) -> None:
    counting = Wrapped(store)
    info = await sidestream.save(state(), f"/{URL}", **for_save(**keywords(counting, concurrency=2)))
    assert info.url == f"/{URL}"
    assert (counting.counts["upload"], counting.counts["part"], counting.counts["complete"]) == (1, 3, 1)
    assert counting.counts["abort"] == 0
    await assert_loads(store)
    target = blank()
    dcp.load(target, checkpoint_id=tmp_path / "blobs" / URL, no_dist=True)  # stock DCP
    assert torch.equal(target["large"], state()["large"])
    report = await sidestream.verify(URL, **keywords(store))
    assert report.ok
    assert files(store.parts) == []


# --- flags ----------------------------------------------------------------------------------------------------------


ALWAYS = events.SaveEvent, events.CallerWaited


async def test_without_create_only_it_is_looked_first(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidestream._storage.object_store import transaction

    monkeypatch.setattr(transaction, "_warned", set())
    plain = without(store, create_only=False)
    seen: list[events.Event] = []
    with events.observe(seen.append):
        await sidestream.save(state(), URL, **for_save(**keywords(plain)))
        await sidestream.save(state(), "run/other", **for_save(**keywords(plain)))
    assert [type(one) for one in seen if not isinstance(one, ALWAYS)] == [events.GuaranteeLost]
    assert any("Wrapped has no conditional put" in str(one) for one in seen)
    assert plain.counts["create"] == 0
    await assert_loads(store)
    with pytest.raises(errors.CheckpointExistsError):
        await sidestream.save(state(), URL, **for_save(**keywords(plain)))


async def test_a_mapped_file_that_was_cut_short(store: DirectoryStore) -> None:
    await sidestream.save(state(), URL, **for_save(**keywords(store)))
    opened = await sidestream.open_checkpoint(URL, **keywords(store))

    class Short(DirectoryStore):
        async def map(self, name: str, nbytes: int) -> Any:
            return await super().map(name, nbytes - 1)

    opened = await sidestream.open_checkpoint(URL, **keywords(Short(store.blobs.parent)))
    with pytest.raises(errors.CorruptCheckpointError, match="shorter"):
        await opened.state_dict(memory="mapped")


class _Reader:
    capabilities = Capabilities()

    async def read(self, name: str, start: int, end: int) -> bytes:
        raise FileNotFoundError(name)

    async def size(self, name: str) -> int:
        raise FileNotFoundError(name)


class _Writer(_Reader):
    capabilities = Capabilities(listing=True)

    async def put(self, name: str, content: bytes, *, mode: str) -> None: ...


class _Renaming(_Reader):
    capabilities = Capabilities(rename=True)


class _Mapping(_Reader):
    capabilities = Capabilities(mapping=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            object(),
            "object is neither an fsspec file system nor a sidestream.options.BlobStore: it has no capabilities",
        ),
        (_Writer(), r"_Writer lacks .*: upload\(\), listing\(\), delete\(\)"),
        (_Mapping(), r"_Mapping lacks .*: map\(\)"),
        (_Renaming(), "capabilities.rename"),
        (DirectoryStore, "DirectoryStore is a class"),
    ],
)
async def test_what_is_no_store_is_refused(given: Any, message: str) -> None:
    with pytest.raises(errors.InvalidOptionError, match=message):
        await sidestream.load(blank(), URL, storage=sidestream.Storage(filesystem=given))


async def test_a_store_that_only_reads_needs_two_methods() -> None:
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.load(blank(), URL, storage=sidestream.Storage(filesystem=_Reader()))


async def test_a_cache_is_refused(store: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidOptionError, match="cache_dir= needs an fsspec file system"):
        await sidestream.load(blank(), URL, **for_load(**keywords(store, cache_dir=str(tmp_path / "cache"))))


# --- failures -------------------------------------------------------------------------------------------------------


async def points_of_failure(root: Path) -> list[tuple[str, int]]:
    """Every operation of a save, by its kind and number."""
    counting = Wrapped(DirectoryStore(root / "counting"))
    await sidestream.save(state(), URL, **for_save(**keywords(counting)))
    return [(kind, nth) for kind, count in counting.counts.items() for nth in range(1, count + 1)]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", [OSError, ConnectionError])
async def test_every_operation_that_fails(
    error: type[OSError], when: Literal["before", "after"], tmp_path: Path
) -> None:
    """Whatever is raised: ``outcome`` is true, what is absent leaves nothing, and what is acknowledged can be read."""
    points = await points_of_failure(tmp_path)
    assert {kind for kind, _ in points} >= {"listing", "upload", "part", "complete", "put", "create"}
    outcomes = set()
    for number, (kind, nth) in enumerate(points):
        store = DirectoryStore(tmp_path / str(number))
        fault = Fault(kind, nth, error, when)
        pending = sidestream.async_save(
            state(), URL, **for_save(**keywords(Wrapped(store, fault, seed=number), retries=0))
        )
        failure = (await asyncio.gather(pending, return_exceptions=True))[0]
        assert fault.reached.is_set()
        assert isinstance(
            failure, (sidestream.SaveInfo, errors.StorageError, errors.OutcomeUnknownError, errors.NotDurableError)
        )
        outcomes.add(pending.outcome)
        assert files(store.parts) == [] or (kind, when) == ("upload", "after"), fault
        if isinstance(failure, errors.OutcomeUnknownError):  # the request may still be on its way
            assert (kind, when, error, pending.outcome) == ("create", "before", ConnectionError, "unknown")
            assert not any(name.endswith(".metadata") for name in files(store.blobs))
        elif isinstance(failure, errors.StorageError):
            assert pending.outcome == "absent"
            assert f"{kind} {nth} fails" in str(failure)
            assert files(store.blobs) == [], fault
        else:
            assert pending.outcome == "committed"
            await assert_loads(store)
    sent = {"committed"} if when == "after" else {"unknown"} if error is ConnectionError else set()
    assert outcomes == {"absent"} | sent


@pytest.mark.parametrize("when", ["before", "after"])
async def test_every_operation_is_repeated(when: Literal["before", "after"], tmp_path: Path) -> None:
    for number, (kind, nth) in enumerate(await points_of_failure(tmp_path)):
        store = DirectoryStore(tmp_path / str(number))
        fault = Fault(kind, nth, TimeoutError, when)
        seen: list[events.Event] = []
        with events.observe(seen.append):
            await sidestream.save(state(), URL, **for_save(**keywords(Wrapped(store, fault, seed=number), retries=1)))
        assert [type(one) for one in seen if not isinstance(one, ALWAYS)] == [events.Retried]
        await assert_loads(store)


async def test_an_upload_that_cannot_be_aborted(store: DirectoryStore) -> None:
    """It is the store's to remove; no blob comes of it."""
    faults = Fault("part", 2, OSError), Fault("abort", 1, OSError)
    with pytest.raises(errors.StorageError, match=r"part 2 fails .*run/ckpt/__0_1"):
        await sidestream.save(state(), URL, **for_save(**keywords(Wrapped(store, *faults))))
    assert faults[1].reached.is_set()
    assert files(store.blobs) == []
    assert len(files(store.parts)) == 1


@pytest.mark.parametrize("kind", ["listing", "upload", "part", "complete", "put", "create"])
async def test_cancelling_in_the_middle(kind: str, store: DirectoryStore) -> None:
    fault = Fault(kind)
    for timeout_s in (1.0, 4.0, 16.0, 64.0):  # no request before it may take as long
        policy = {"request_timeout_s": timeout_s, "retries": 0}
        pending = sidestream.async_save(state(), URL, **for_save(**keywords(Wrapped(store, fault), **policy)))
        while not fault.reached.is_set() and not pending.done():
            await asyncio.sleep(0.005)
        if fault.reached.is_set():
            break
        await asyncio.wait([asyncio.ensure_future(pending.ended())])
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert files(store.parts) == []
    if kind == "create":  # it was sent, and may still be on its way
        assert pending.outcome == "unknown"
        assert not any(name.endswith(".metadata") for name in files(store.blobs))
    else:
        assert pending.outcome == "absent"
        assert files(store.blobs) == []


async def test_an_upload_is_aborted_when_its_parts_have_ended(store: DirectoryStore) -> None:
    """A client that closes a connection takes a while when it is cancelled."""
    ended: list[str] = []

    class Slow(Wrapped):
        async def operate(self, kind: str, work: Callable[[], Awaitable[Any]]) -> Any:
            try:
                return await super().operate(kind, work)
            finally:
                for _ in range(50 if kind == "part" else 0):
                    await asyncio.sleep(0)
                ended.append(kind)

    faults = [Fault("part", nth) for nth in (1, 2, 3)]
    pending = sidestream.async_save(state(), URL, **for_save(**keywords(Slow(store, *faults))))
    for fault in faults:
        assert await asyncio.to_thread(fault.reached.wait, 60)
    pending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pending
    assert [kind for kind in ended if kind in ("part", "abort")] == ["part", "part", "part", "abort"]


async def test_what_hangs_ends_with_the_deadline(store: DirectoryStore) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        await sidestream.save(state(), URL, **for_save(timeout_s=1.0, **keywords(Wrapped(store, Fault("part", 3)))))
    assert files(store.blobs) == []
    assert files(store.parts) == []


@pytest.mark.parametrize("kind", ["size", "read"])
async def test_a_load_that_fails(kind: str, store: DirectoryStore) -> None:
    await sidestream.save(state(), URL, **for_save(**keywords(store)))
    await assert_loads(Wrapped(store, flaky=True))
    with pytest.raises(errors.StorageError, match=f"{kind} 1 fails"):
        await sidestream.load(blank(), URL, **for_load(**keywords(Wrapped(store, Fault(kind, 1, OSError)))))


async def test_a_refusal_is_access_denied(store: DirectoryStore) -> None:
    with pytest.raises(errors.AccessDeniedError):
        await sidestream.save(state(), URL, **for_save(**keywords(Wrapped(store, Fault("put", 1, PermissionError)))))
    assert files(store.blobs) == []
