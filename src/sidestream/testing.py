"""Tests for storage that others provide: subclass ``StoreTests`` for a ``BlobStore`` of your own.

The module needs pytest, and nothing else of sidestream imports it. Every test is a plain function, so that pytest runs
it alone, with pytest-asyncio in any mode, and with the plugin of anyio. The coroutines of a store are called on the
event loop on which sidestream calls them, and saves and loads are made through ``sidestream.blocking``.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import pytest
import torch

import sidestream

from ._runtime.threads import Deadline, time_limit
from ._storage.clients.requests import LoopCall
from .errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    InvalidOptionError,
    SidestreamError,
    StorageError,
    UnsupportedError,
)
from .options import BlobInfo, BlobStore, Capabilities, Listing, SaveOptions, Storage, StorePolicy

__all__ = ["OperationTests", "StorePlace", "StoreTests", "run"]

P = ParamSpec("P")
T = TypeVar("T")

_LIMIT_S = 300.0  # of one test: a guard against a hang
_PART_BYTES = 5 << 20  # the smallest that a policy allows, and S3 takes
_FEW, _MANY = 4, 3 << 10  # rows of 4 KiB: a file that is put whole, and one of three parts
_OWN = "docs/stores/own.md"
_GUARANTEES = "docs/object_stores.md#guarantees"
_WHOLE = f"a blob becomes visible as a whole or not at all, and is there when the write returns ({_OWN}#rules)"
_ABSENT = f"read and size of a name without a blob raise FileNotFoundError ({_OWN}#errors)"
_RANGE = f"read(name, start, end) returns the bytes from start to end, fewer if the blob ends before ({_OWN}#rules)"
_CREATE = f'of several puts with mode="create" one succeeds, and the others raise FileExistsError ({_OWN}#capabilities)'
_LISTED = f"listing shows every completed write and no completed delete, with its size ({_OWN}#capabilities)"
_DIRECTLY = f"listing(prefix) has the names directly below prefix/, and is empty if there are none ({_OWN}#rules)"
_DELETED = f"delete removes this blob alone; without it, delete returns or raises FileNotFoundError ({_OWN}#errors)"
_UPLOADED = f"an upload is not a blob before complete(), takes its parts in any order, and again ({_OWN}#rules)"
_ABORTED = f"abort() removes the parts, and leaves a blob of this name as it is ({_OWN}#rules)"
_CANCELLED = f"a call that was cancelled changes nothing after it has ended ({_OWN}#rules)"
_VERSIONS = f"replace writes if the blob still has this version, else it raises FileExistsError ({_OWN}#capabilities)"
_MAPPED = f"map(name, nbytes) returns the content as an mmap with ACCESS_COPY ({_OWN}#capabilities)"
_NAMES = f"a name is any path without a leading slash ({_OWN}#rules)"
_VISIBLE = f"a checkpoint appears whole, or not at all ({_GUARANTEES})"
_NOTHING_LEFT = f"a save that fails or is cancelled leaves nothing ({_GUARANTEES})"
_ONE_WINS = f"of several saves to one target one commits, the others raise CheckpointExistsError ({_GUARANTEES})"
_UNCHANGED = "save without overwrite=True changes nothing that exists (docs/saving.md)"
_REPLACED = "overwrite=True replaces the checkpoint in one step (docs/saving.md#on-object-storage)"
_RUN = "retention keeps what its policy says, and restore takes the newest step (docs/runs.md)"


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function on the event loop on which sidestream calls stores, and wait for it.

    For fixtures and tests of your own: connections of a store belong to this loop.

    Args:
        work: The function, as in ``run(store.close)``.

    Returns:
        What the coroutine returns.

    Raises:
        DeadlineExceededError: It takes more than five minutes.
    """
    with time_limit(Deadline.after(_LIMIT_S)):
        return LoopCall(work).result("a test of a store")


def _on_store_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a test of a coroutine function, which ``run`` runs."""

    @wraps(test)
    def drive(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            run(lambda: test(*args, **kwargs))
        except Exception as error:
            if not isinstance(error, AssertionError):  # raised by the store where the contract has a result
                error.add_note(f"{test.__name__}: {test.__doc__} The contract: {_OWN}")
            raise

    return drive


def _require(held: object, found: str, contract: str) -> None:
    __tracebackhide__ = True
    if not held:
        raise AssertionError(f"{found}\nthe contract: {contract}")


def _require_refusal(wanted: type[Exception], call: Callable[[], object], contract: str) -> None:
    __tracebackhide__ = True
    try:
        found = call()
    except wanted:
        return
    raise AssertionError(f"no {wanted.__name__}, and the result {found!r}\nthe contract: {contract}")


async def _end(call: Awaitable[object]) -> Exception | None:
    """Wait for the call, and return what it raised."""
    try:
        await call
    except Exception as error:
        return error
    return None


def _ended(error: Exception | None) -> str:
    return "returned" if error is None else f"raised {error!r}"


def _prefix() -> str:
    """Return a prefix that no other test uses."""
    return f"sidestream-tests/{uuid.uuid4().hex}"


def _bytes(nbytes: int, seed: int = 0) -> bytes:
    """Return bytes of which no two ranges are equal."""
    return random.Random(seed).randbytes(nbytes)


# --- saves and loads ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """A place for the saves and loads of ``OperationTests``.

    Args:
        url: A URL or path below which nothing exists. Each test saves below it.
        storage: The way to it.
        capabilities: The promises that the tests hold it to: with ``create_only`` one of several saves wins, with
            ``versions`` ``overwrite=True`` replaces, with ``mapping`` ``memory="mapped"`` works. Without a flag they
            require that sidestream refuses.
    """

    url: str
    storage: Storage
    capabilities: Capabilities


def _save(place: StorePlace, seed: int, name: str = "ckpt", *, rows: int = _FEW, **options: Any) -> Any:
    return sidestream.blocking.save(_state(seed, rows), f"{place.url}/{name}", storage=place.storage, **options)


def _start(place: StorePlace, seed: int, *, rows: int = _FEW, **options: Any) -> sidestream.PendingSave:
    return sidestream.blocking.async_save(_state(seed, rows), f"{place.url}/ckpt", storage=place.storage, **options)


def _load(place: StorePlace, name: str = "ckpt", rows: int = _FEW) -> int:
    """Load and verify a checkpoint, and return its seed."""
    target = _state(-1, rows)
    sidestream.blocking.load(target, f"{place.url}/{name}", storage=place.storage)
    return _seed_of(target)


def _require_loads(
    place: StorePlace, seed: int, contract: str = _VISIBLE, name: str = "ckpt", rows: int = _FEW
) -> None:
    __tracebackhide__ = True
    found = _load(place, name, rows)
    _require(found == seed, f"a load of {name} found save {found} in place of {seed}", contract)


def _exists(place: StorePlace, name: str = "ckpt") -> bool:
    try:
        sidestream.blocking.open_checkpoint(f"{place.url}/{name}", storage=place.storage)
    except CheckpointNotFoundError:
        return False
    return True


def _state(seed: int, rows: int = _FEW) -> dict[str, Any]:
    """Return a state that tells its seed everywhere."""
    return {
        "rows": torch.arange(rows << 10, dtype=torch.int32).view(rows, -1) + seed,
        "half": torch.full((33,), float(seed), dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "optimizer": {"lr": seed / 7, "moments": torch.full((1000,), float(seed))},
        "step": seed,
    }


def _seed_of(state: Mapping[str, Any]) -> int:
    seed = int(state["step"])
    wanted = _state(seed, len(state["rows"]))
    same = all(torch.equal(state[name], wanted[name]) for name in ("rows", "half", "empty"))
    same = same and torch.equal(state["optimizer"]["moments"], wanted["optimizer"]["moments"])
    _require(same and state["optimizer"]["lr"] == seed / 7, f"step {seed} was loaded with tensors of another", _VISIBLE)
    return seed


def _failed(saves: Iterable[sidestream.PendingSave]) -> list[Exception | None]:
    """Wait for the saves, and return what each of them raised."""
    ends: list[Exception | None] = []
    for pending in saves:
        try:
            pending.result(_LIMIT_S)
        except Exception as error:
            ends.append(error)
        else:
            ends.append(None)
    return ends


class OperationTests:
    """Saves, loads and runs at one place, through sidestream's public functions.

    Subclass it for storage that is reached by a URL: an fsspec file system, a mount, a server with the protocol of S3.
    Override the fixture ``place``. For a ``BlobStore`` there is ``StoreTests``, which has these tests too.
    """

    @pytest.fixture
    def place(self) -> StorePlace:
        """A place at which nothing exists. Override it."""
        raise NotImplementedError("override the fixture place(): it returns a sidestream.testing.StorePlace")

    @pytest.fixture
    def writable(self, place: StorePlace) -> StorePlace:
        """The place. Skips the test where the store can only be read, and says so."""
        if not place.capabilities.listing:
            pytest.skip("capabilities.listing is off, so sidestream only reads: test_it_is_read_only has the rest")
        return place

    def test_a_checkpoint_comes_back(self, writable: StorePlace) -> None:
        """Whole, by rows, as files beside it, and verified."""
        info = _save(writable, 3, rows=_MANY, files={"config.json": b"{}"}, metadata={"run": "a"})
        _require_loads(writable, 3, rows=_MANY)
        opened = sidestream.blocking.open_checkpoint(f"{writable.url}/ckpt", storage=writable.storage)
        _require(opened.save_id == info.save_id, "another save was opened than was made", _VISIBLE)
        _require(opened.metadata == {"run": "a"}, f"its metadata is {opened.metadata}", _VISIBLE)
        _require(opened.file("config.json") == b"{}", "the file beside the state has another content", _VISIBLE)
        _require(_seed_of(opened.state_dict()) == 3, "state_dict() has the state of another save", _VISIBLE)
        rows = opened.tensor("rows", slice(100, 900))
        _require(torch.equal(rows, _state(3, _MANY)["rows"][100:900]), "rows 100 to 900 of a tensor are others", _RANGE)
        report = sidestream.blocking.verify(f"{writable.url}/ckpt", storage=writable.storage)
        _require(report.ok, f"verify has found damage: {report}", _VISIBLE)

    def test_a_streamed_checkpoint_comes_back(self, writable: StorePlace) -> None:
        """Windows and parts of uploads have different sizes."""
        _save(writable, 4, rows=_MANY, options=SaveOptions(streaming=True))
        _require_loads(writable, 4, rows=_MANY)

    def test_where_nothing_is(self, place: StorePlace) -> None:
        """No call takes it for an empty or a damaged checkpoint."""
        url = f"{place.url}/none"
        _require_refusal(CheckpointNotFoundError, lambda: _load(place, "none"), _ABSENT)
        _require_refusal(
            CheckpointNotFoundError, lambda: sidestream.blocking.verify(url, storage=place.storage), _ABSENT
        )
        _require(not _exists(place, "none"), "a checkpoint was opened where none is", _ABSENT)
        if place.capabilities.listing:
            _require_refusal(
                CheckpointNotFoundError, lambda: sidestream.blocking.remove(url, storage=place.storage), _ABSENT
            )

    def test_what_exists_stays(self, writable: StorePlace) -> None:
        """A second save to the same target is refused."""
        _save(writable, 1)
        (error,) = _failed([_start(writable, 2)])
        _require(isinstance(error, CheckpointExistsError), f"a second save {_ended(error)}", _UNCHANGED)
        _require_loads(writable, 1, _UNCHANGED)

    def test_overwriting(self, writable: StorePlace) -> None:
        """With ``versions`` the checkpoint is replaced; without it nothing is changed."""
        _save(writable, 0)
        if not writable.capabilities.versions:
            _require_refusal(UnsupportedError, lambda: _save(writable, 1, overwrite=True), _VERSIONS)
            _require_loads(writable, 0, _UNCHANGED)
            return
        for seed in (1, 2, 3):
            _save(writable, seed, overwrite=True)
            _require_loads(writable, seed, _REPLACED)

    def test_overwriting_at_once(self, writable: StorePlace) -> None:
        """A load finds one of several saves, whole, and it is one that has succeeded."""
        if not writable.capabilities.versions:
            pytest.skip("capabilities.versions is off: test_overwriting requires that overwrite=True is refused")
        _save(writable, 0)
        ends = _failed([_start(writable, seed, overwrite=True) for seed in (1, 2, 3)])
        lost = [error for error in ends if error is not None]
        _require(all(isinstance(one, CheckpointExistsError) for one in lost), f"saves at once: {ends}", _ONE_WINS)
        found = _load(writable)
        _require(found and ends[found - 1] is None, f"save {found} is there, of {ends}", _REPLACED)

    def test_readers_beside_one_that_overwrites(self, writable: StorePlace) -> None:
        """Each load finds one checkpoint, whole."""
        if not writable.capabilities.versions:
            pytest.skip("capabilities.versions is off: test_overwriting requires that overwrite=True is refused")
        _save(writable, 0)
        for seed in range(1, 6):
            pending = _start(writable, seed, overwrite=True)
            found = _load(writable)
            _require(found in (seed - 1, seed), f"save {found} was read beside save {seed}", _REPLACED)
            pending.result(_LIMIT_S)
        _require_loads(writable, 5)

    def test_saves_at_once(self, writable: StorePlace) -> None:
        """With ``create_only`` one of them succeeds. Without it several may, and a load finds one of these, whole."""
        ends = _failed([_start(writable, seed) for seed in range(3)])
        won = [seed for seed, error in enumerate(ends) if error is None]
        lost = [error for error in ends if error is not None]
        _require(all(isinstance(one, CheckpointExistsError) for one in lost), f"saves at once: {ends}", _ONE_WINS)
        _require(won, "no save has succeeded", _ONE_WINS)
        if writable.capabilities.create_only:
            _require(len(won) == 1, f"{len(won)} saves have succeeded", _ONE_WINS)
            _require_loads(writable, won[0], _ONE_WINS)

    @pytest.mark.parametrize("staged", [False, True], ids=["at once", "when it is staged"])
    def test_a_cancelled_save(self, writable: StorePlace, staged: bool) -> None:
        """It is there or absent, as it says, and does not stand in the way of the next one."""
        pending = _start(writable, 1, rows=_MANY)
        if staged:
            pending.staged.result(_LIMIT_S)
        pending.cancel()
        with suppress(CancelledError, SidestreamError):
            pending.result(_LIMIT_S)
        outcome = pending.outcome
        if outcome == "unknown":  # the marker was sent, and its put was cancelled with the save
            return
        _require(_exists(writable) == (outcome == "committed"), f"a cancelled save is {outcome}", _NOTHING_LEFT)
        if outcome == "absent":
            _save(writable, 2, rows=_MANY)
        _require_loads(writable, 1 if outcome == "committed" else 2, _NOTHING_LEFT, rows=_MANY)

    def test_what_is_removed_is_gone(self, writable: StorePlace) -> None:
        """And its name can be used again."""
        _save(writable, 1)
        _save(writable, 2, "ckpt-2")
        sidestream.blocking.remove(f"{writable.url}/ckpt", storage=writable.storage)
        _require(not _exists(writable), "a removed checkpoint can be opened", _DELETED)
        _require_loads(writable, 2, _DELETED, "ckpt-2")
        _save(writable, 3)
        _require_loads(writable, 3)

    def test_a_run(self, writable: StorePlace) -> None:
        """Steps, one of which is saved again; retention; a second program that continues from the newest."""
        url, keep = f"{writable.url}/run", sidestream.KeepLast(2)
        target = _state(-1)
        with sidestream.blocking.Checkpointer(url, keep=keep, storage=writable.storage) as checkpoints:
            _require(checkpoints.restore(target) is None, "a step was restored from a run without any", _RUN)
            for step in (1, 2, 3, 10):
                checkpoints.save(_state(step), step=step)
            checkpoints.save(_state(11), step=10)
        with sidestream.blocking.Checkpointer(url, keep=keep, storage=writable.storage) as checkpoints:
            _require(checkpoints.steps() == [3, 10], f"steps {checkpoints.steps()} of 1, 2, 3, 10 are left", _RUN)
            newest = checkpoints.restore(target)
            _require((newest, _seed_of(target)) == (10, 11), f"{_seed_of(target)}, step {newest}, was restored", _RUN)
            checkpoints.restore(target, step=3)
            _require(_seed_of(target) == 3 and checkpoints.verify(3).ok, "step 3 is another, or damaged", _RUN)

    def test_mapped_files(self, writable: StorePlace) -> None:
        """With ``mapping`` a state can be the pages of files, and its changes are private; else this is refused."""
        _save(writable, 1)
        opened = sidestream.blocking.open_checkpoint(f"{writable.url}/ckpt", storage=writable.storage)
        if not writable.capabilities.mapping:
            _require_refusal(InvalidOptionError, lambda: opened.state_dict(memory="mapped"), _MAPPED)
            return
        mapped = opened.state_dict(memory="mapped")
        _require(_seed_of(mapped) == 1, "mapped files have another state", _MAPPED)
        mapped["rows"].zero_()
        _require_loads(writable, 1, _MAPPED)


# --- the methods of a store -----------------------------------------------------------------------------------------


class StoreTests(OperationTests):
    """The contract of ``options.BlobStore``: its methods, and saves, loads and runs through them.

    Subclass it in a test file, and override the fixture ``store``::

        class TestMyStore(sidestream.testing.StoreTests):
            @pytest.fixture
            def store(self, tmp_path):
                return MyStore(tmp_path)

    Every test uses names of its own, so a fixture may return a client of one bucket for all of them, and delete what
    they leave. The flags of ``store.capabilities`` decide what is required. Where a flag is off, a test requires the
    refusal that the documentation promises, or is skipped with the name of the flag. A failure says what the store did,
    what the contract says, and on which page.

    Attributes:
        many_blobs: How many blobs a listing has to show; more than the storage returns in one answer.
        cancel_is_final: Whether a call that was cancelled writes nothing after it has ended. False: a server may carry
            out a request whose connection was closed.
    """

    many_blobs: int = 1_100
    cancel_is_final: bool = True

    @pytest.fixture
    def store(self) -> BlobStore:
        """A new store. Override it."""
        raise NotImplementedError("override the fixture store(): it returns an instance of your BlobStore")

    @pytest.fixture
    def place(self, store: BlobStore) -> StorePlace:
        """A place in the store."""
        storage = Storage(filesystem=store, policy=StorePolicy(part_bytes=_PART_BYTES))
        return StorePlace(url=_prefix(), storage=storage, capabilities=store.capabilities)

    async def fill(self, store: BlobStore, blobs: Mapping[str, bytes]) -> None:
        """Write blobs for tests that read. Override it for a store that cannot write: by other means.

        Args:
            store: What the fixture returned.
            blobs: The content of each blob by its name.
        """
        for name, content in blobs.items():
            await store.put(name, content, mode="overwrite")

    @pytest.fixture
    def writing(self, store: BlobStore) -> BlobStore:
        """The store. Skips the test where it can only be read, and says so."""
        if not store.capabilities.listing:
            pytest.skip("capabilities.listing is off, so sidestream calls read and size only")
        return store

    # --- flags ---

    def test_its_capabilities(self, store: BlobStore) -> None:
        """They are constant, the methods of each flag exist, and sidestream accepts the store."""
        can = store.capabilities
        contract = f"capabilities is a sidestream.options.Capabilities, and never changes ({_OWN}#capabilities)"
        _require(isinstance(can, Capabilities), f"capabilities is {can!r}", contract)
        _require(store.capabilities == can, f"capabilities has changed to {store.capabilities}", contract)
        Storage(filesystem=store)  # raises InvalidOptionError with the methods that are missing

    def test_it_is_read_only(self, store: BlobStore, place: StorePlace, tmp_path: Path) -> None:
        """Files of a checkpoint that another program wrote can be loaded; without ``listing`` a save is refused."""
        sidestream.blocking.save(_state(5), tmp_path / "source")
        files = {f"{place.url}/ckpt/{one.name}": one.read_bytes() for one in (tmp_path / "source").iterdir()}
        run(lambda: self.fill(store, files))
        _require_loads(place, 5)
        if not place.capabilities.listing:
            _require_refusal(InvalidOptionError, lambda: _save(place, 6, "other"), _LISTED)
            with sidestream.blocking.Checkpointer(place.url, storage=place.storage) as checkpoints:
                _require_refusal(StorageError, checkpoints.steps, _LISTED)

    def test_saves_leave_nothing_behind(self, writing: BlobStore, place: StorePlace) -> None:
        """Those that lost or were cancelled have no files, and what was replaced has none."""
        self._needs(writing, create_only=True)
        _failed([_start(place, seed, rows=_MANY) for seed in range(3)])
        self._is_alone(writing, place)
        overwrite = writing.capabilities.versions
        if not overwrite:
            sidestream.blocking.remove(f"{place.url}/ckpt", storage=place.storage)
        cancelled = _start(place, 3, rows=_MANY, overwrite=overwrite)
        cancelled.cancel()
        if cancelled.outcome == "absent":
            _save(place, 4, rows=_MANY, overwrite=overwrite)
            self._is_alone(writing, place)

    # --- read and size ---

    @_on_store_loop
    async def test_ranges(self, store: BlobStore) -> None:
        """Every range has exactly its bytes, and those of several reads at once are not mixed."""
        name, content = f"{_prefix()}/blob", _bytes(100_000)
        await self.fill(store, {name: content})
        size = await store.size(name)
        _require(size == len(content), f"size of a blob of {len(content)} bytes is {size}", _RANGE)
        ranges = [(0, 100_000), (0, 1), (5, 1005), (500, 1500), (99_999, 100_000), (50_000, 50_003), (7, 8)]
        found: list[Any] = await asyncio.gather(*(store.read(name, *one) for one in ranges))
        for (start, end), one in zip(ranges, found, strict=True):
            _require(
                isinstance(one, bytes | bytearray | memoryview) and bytes(one) == content[start:end],
                f"read({start}, {end}) of a blob of 100,000 bytes returned {len(one)} bytes: {bytes(one[:20])!r}...",
                _RANGE,
            )

    @_on_store_loop
    async def test_a_range_over_the_end(self, store: BlobStore) -> None:
        """It returns the bytes up to the end."""
        name, content = f"{_prefix()}/blob", _bytes(1000)
        await self.fill(store, {name: content})
        found = bytes(await store.read(name, 990, 1010))
        _require(found == content[990:], f"read(990, 1010) of 1,000 bytes returned {len(found)} bytes", _RANGE)

    @_on_store_loop
    async def test_an_empty_blob(self, store: BlobStore) -> None:
        """It exists and has no bytes."""
        name = f"{_prefix()}/blob"
        await self.fill(store, {name: b""})
        _require(await store.size(name) == 0, "the size of an empty blob is not 0", _RANGE)

    @_on_store_loop
    async def test_what_does_not_exist(self, store: BlobStore) -> None:
        """Neither do names that are a part of others."""
        prefix = _prefix()
        await self.fill(store, {f"{prefix}/run/blob-10": b"content"})
        for name in (f"{prefix}/none", f"{prefix}/run/none", f"{prefix}/run/blob-1"):
            for error in (await _end(store.size(name)), await _end(store.read(name, 0, 10))):
                _require(isinstance(error, FileNotFoundError), f"size or read of no blob {_ended(error)}", _ABSENT)
        error = await _end(store.size(f"{prefix}/run"))
        _require(isinstance(error, FileNotFoundError), f"size of a prefix of names {_ended(error)}", _ABSENT)

    @_on_store_loop
    async def test_odd_names(self, store: BlobStore) -> None:
        """Those of sidestream, and those that users may choose for a run or a file."""
        prefix, names = _prefix(), [".metadata", "__0_1.distcp", ".leases/a", "a b", "é", "100%", "%41", "a+b", "a=b&c"]
        blobs = {f"{prefix}/{name}": name.encode() for name in [*names, "step-1.g2/x", "a#b", "A", "a", "x" * 200]}
        await self.fill(store, blobs)
        for name, content in blobs.items():
            error = await _end(store.size(name))
            _require(error is None, f"size of {name!r} {_ended(error)}", _NAMES)
            found = bytes(await store.read(name, 0, 1000))
            _require(found == content, f"{name!r} has the content of {found!r}", _NAMES)

    # --- put ---

    @_on_store_loop
    async def test_a_put_replaces(self, writing: BlobStore) -> None:
        """By content of any length, and what was read before stays what it was."""
        name = f"{_prefix()}/blob"
        for content in (b"a longer content", b"short", b"", b"a longer content again"):
            await writing.put(name, content, mode="overwrite")
            size = await writing.size(name)
            _require(size == len(content), f"{len(content)} bytes were put, and {size} are there", _WHOLE)
            read = await writing.read(name, 0, 100) if content else b""
            _require(bytes(read) == content, f"{content!r} was put, and {bytes(read)!r} is there", _WHOLE)
            await writing.put(name, bytes(len(content)), mode="overwrite")
            _require(bytes(read) == content, "a buffer that read returned has changed", _RANGE)

    @_on_store_loop
    async def test_a_put_that_creates(self, writing: BlobStore) -> None:
        """It changes nothing that exists."""
        self._needs(writing, create_only=True)
        name = f"{_prefix()}/blob"
        await writing.put(name, b"first", mode="create")
        error = await _end(writing.put(name, b"second", mode="create"))
        _require(isinstance(error, FileExistsError), f"a second put in create mode {_ended(error)}", _CREATE)
        found = bytes(await writing.read(name, 0, 100))
        _require(found == b"first", f"a put in create mode that was refused left {found!r}", _CREATE)
        await writing.put(name, b"third", mode="overwrite")
        _require(bytes(await writing.read(name, 0, 100)) == b"third", "overwrite mode has not replaced it", _WHOLE)

    @_on_store_loop
    async def test_creations_at_once(self, writing: BlobStore) -> None:
        """One succeeds, and its content is there."""
        self._needs(writing, create_only=True)
        for _ in range(5):
            name, contents = f"{_prefix()}/blob", [_bytes(5000, seed) for seed in range(8)]
            ends = await asyncio.gather(*(_end(writing.put(name, one, mode="create")) for one in contents))
            won = [number for number, error in enumerate(ends) if error is None]
            _require(len(won) == 1, f"{len(won)} of 8 puts in create mode have succeeded", _CREATE)
            refused = sum(isinstance(error, FileExistsError) for error in ends)
            _require(refused == 7, f"of 8 puts in create mode the others raised {ends}", _CREATE)
            found = bytes(await writing.read(name, 0, 5000))
            _require(found == contents[won[0]], "the content is not that of the put that succeeded", _CREATE)

    @_on_store_loop
    async def test_a_put_is_seen_whole(self, writing: BlobStore) -> None:
        """Readers beside it find the blob before or after it."""
        name, first, second = f"{_prefix()}/blob", _bytes(1 << 20, 1), _bytes(1 << 20, 2)[:-9]
        put = asyncio.ensure_future(writing.put(name, first, mode="overwrite"))
        for known in ((b"", first), (first, second)):
            while not put.done():
                try:
                    size = await writing.size(name)
                    found = bytes(await writing.read(name, 0, 1 << 20))
                except FileNotFoundError:
                    size, found = 0, b""
                _require(found in known and size in map(len, known), f"{len(found)} bytes of a put were seen", _WHOLE)
                await asyncio.sleep(0)
            await put
            _require(await self._found(writing, name) == known[1], "a put that has returned is absent", _WHOLE)
            put = asyncio.ensure_future(writing.put(name, second, mode="overwrite"))
        await put

    @_on_store_loop
    async def test_many_calls_at_once(self, writing: BlobStore) -> None:
        """Puts, reads and deletes of different blobs do not disturb each other."""
        prefix = _prefix()

        async def one(number: int) -> None:
            name, content = f"{prefix}/{number}", _bytes(10_000 + number, number)
            await writing.put(name, content, mode="overwrite")
            found = bytes(await writing.read(name, 0, 20_000))
            _require(found == content, f"blob {number} of 40 written at once has another content", _WHOLE)
            if number % 2:
                await writing.delete(name)

        await asyncio.gather(*map(one, range(40)))
        found = sorted((await writing.listing(prefix)).files)
        _require(found == sorted(map(str, range(0, 40, 2))), f"20 of 40 blobs stay, {len(found)} are listed", _LISTED)

    @_on_store_loop
    async def test_a_cancelled_put(self, writing: BlobStore) -> None:
        """It has written everything or nothing, and nothing more comes after it."""
        prefix, content, seen = _prefix(), _bytes(4 << 20), dict[str, bytes | None]()
        for turns in range(16):
            name = f"{prefix}/{turns}"
            put = asyncio.ensure_future(writing.put(name, content, mode="overwrite"))
            for _ in range(turns):
                await asyncio.sleep(0)
            put.cancel()
            await asyncio.wait([put])
            if not put.cancelled():
                put.exception()
            seen[name] = await self._found(writing, name)
            _require(seen[name] in (None, content), "a cancelled put left a part of its content", _WHOLE)
        for name, found in seen.items() if self.cancel_is_final else ():
            _require(await self._found(writing, name) == found, "a cancelled put wrote after its end", _CANCELLED)

    # --- listing and delete ---

    @_on_store_loop
    async def test_a_listing(self, writing: BlobStore) -> None:
        """Names directly below, sizes, and no neighbours whose names begin alike."""
        prefix = _prefix()
        below = {"step-1/.metadata": 3, "step-1/a": 5, "step-1/sub/b": 7, "step-1/sub/c": 0, "step-10/d": 9, "note": 2}
        await self.fill(writing, {f"{prefix}/{name}": bytes(nbytes) for name, nbytes in below.items()})
        for directory, files, directories in (
            (prefix, {"note": 2}, {"step-1", "step-10"}),
            (f"{prefix}/step-1", {".metadata": 3, "a": 5}, {"sub"}),
            (f"{prefix}/step-1/sub", {"b": 7, "c": 0}, set[str]()),
            (f"{prefix}/step", {}, set[str]()),
            (f"{prefix}/none", {}, set[str]()),
        ):
            found = await writing.listing(directory)
            _require(isinstance(found, Listing), f"listing returned a {type(found).__name__}", _DIRECTLY)
            sizes = {name: info.nbytes for name, info in found.files.items()}
            _require(sizes == files, f"listing({directory!r}) has the files {sizes}, not {files}", _DIRECTLY)
            there = set(found.directories)
            _require(there == directories, f"listing({directory!r}) has the directories {there}", _DIRECTLY)
        top = set((await writing.listing("")).directories)
        _require(prefix.partition("/")[0] in top, f"listing('') has the directories {top}", _DIRECTLY)

    @_on_store_loop
    async def test_a_listing_is_current(self, writing: BlobStore) -> None:
        """After each put, upload and delete."""
        prefix = _prefix()
        for number in range(5):
            name = f"{prefix}/{number}"
            if number % 2:
                await writing.put(name, bytes(number + 1), mode="overwrite")
            else:
                await self._upload(writing, name, bytes(number + 1))
            await self._is_listed(writing, prefix, range(number + 1))
        await writing.put(f"{prefix}/0", bytes(50), mode="overwrite")
        found = (await writing.listing(prefix)).files["0"].nbytes
        _require(found == 50, f"a blob was replaced by 50 bytes, and {found} are listed", _LISTED)
        for number in range(5):
            await writing.delete(f"{prefix}/{number}")
            await self._is_listed(writing, prefix, range(number + 1, 5))
        listing = await writing.listing(prefix.rpartition("/")[0])
        _require(prefix.rpartition("/")[2] not in listing.directories, "a directory without blobs is listed", _DIRECTLY)

    @_on_store_loop
    async def test_a_long_listing(self, writing: BlobStore) -> None:
        """It has all names, also where the storage returns them in pages."""
        prefix, names = _prefix(), [f"{number:05}" for number in range(self.many_blobs)]
        for start in range(0, len(names), 50):
            some = names[start : start + 50]
            await asyncio.gather(*(writing.put(f"{prefix}/{one}", b"x", mode="overwrite") for one in some))
        found = (await writing.listing(prefix)).files
        _require(sorted(found) == names, f"{len(found)} of {len(names)} blobs are listed", _LISTED)

    @_on_store_loop
    async def test_times(self, writing: BlobStore) -> None:
        """The time of a blob is that of its last write, or None."""
        prefix = _prefix()
        times: list[datetime | None] = []
        for name in ("a", "b", "a"):
            await writing.put(f"{prefix}/{name}", b"x", mode="overwrite")
            info = (await writing.listing(prefix)).files[name]
            _require(isinstance(info, BlobInfo), f"listing has a {type(info).__name__}", _LISTED)
            times.append(info.modified)
        known = [one for one in times if isinstance(one, datetime)]
        contract = f"BlobInfo.modified is the time of the last write, and None where it is unknown ({_OWN}#rules)"
        _require(len(known) == 3 or times == [None] * 3, f"the times of three puts are {times}", contract)
        _require(known == sorted(known), f"the times of three puts, one after the other, are {times}", contract)

    @_on_store_loop
    async def test_a_delete(self, writing: BlobStore) -> None:
        """It deletes one blob, and nothing else; a second one raises nothing but ``FileNotFoundError``."""
        prefix = _prefix()
        others = [f"{prefix}/blob-10", f"{prefix}/blob.x", f"{prefix}/other/blob"]
        await self.fill(writing, dict.fromkeys([f"{prefix}/blob", *others], b"content"))
        await writing.delete(f"{prefix}/blob")
        error = await _end(writing.size(f"{prefix}/blob"))
        _require(isinstance(error, FileNotFoundError), f"size of a deleted blob {_ended(error)}", _DELETED)
        for name in (f"{prefix}/blob", f"{prefix}/none"):
            error = await _end(writing.delete(name))
            missing = error is None or isinstance(error, FileNotFoundError)
            _require(missing, f"delete of no blob {_ended(error)}", _DELETED)
        for name in others:
            error = await _end(writing.size(name))
            _require(error is None, f"delete of blob: size of {name.removeprefix(prefix)} {_ended(error)}", _DELETED)
        await writing.put(f"{prefix}/blob", b"again", mode="overwrite")
        again = await self._found(writing, f"{prefix}/blob")
        _require(again == b"again", "a name of a deleted blob cannot be used again", _DELETED)

    # --- uploads ---

    @_on_store_loop
    async def test_an_upload(self, writing: BlobStore) -> None:
        """Parts arrive at once, in any order, and one of them twice; only the end makes a blob."""
        prefix, content = _prefix(), _bytes(3 * _PART_BYTES + 7)
        name, upload = f"{prefix}/blob", await writing.upload(f"{prefix}/blob", _PART_BYTES)
        offsets = range(0, len(content), _PART_BYTES)
        parts = [(number, start, content[start : start + _PART_BYTES]) for number, start in enumerate(offsets)]
        await upload.part(*parts[1])
        await asyncio.gather(*(upload.part(*part) for part in reversed(parts)))
        seen = await self._found(writing, name) is not None or (await writing.listing(prefix)).files
        _require(not seen, "an upload is seen before complete()", _UPLOADED)
        await upload.complete()
        whole = await self._found(writing, name)
        _require(whole == content, f"an upload of {len(content)} bytes made a blob of {len(whole or b'')}", _UPLOADED)

    @_on_store_loop
    async def test_an_upload_replaces(self, writing: BlobStore) -> None:
        """Also when it is completed twice, as after an answer that was lost, and aborted after that."""
        name, content = f"{_prefix()}/blob", _bytes(_PART_BYTES + 9)
        await writing.put(name, b"an older blob", mode="overwrite")
        upload = await writing.upload(name, _PART_BYTES)
        await upload.part(0, 0, content[:_PART_BYTES])
        await upload.part(1, _PART_BYTES, content[_PART_BYTES:])
        older = await self._found(writing, name)
        _require(older == b"an older blob", "an upload has changed the older blob before complete()", _UPLOADED)
        await upload.complete()
        for again in (upload.complete, upload.abort):
            await _end(again())
            found = await self._found(writing, name)
            _require(found == content, f"the blob is gone after {again.__name__}() after complete()", _ABORTED)

    @_on_store_loop
    async def test_an_aborted_upload(self, writing: BlobStore) -> None:
        """It leaves no blob, and an older one as it was."""
        prefix = _prefix()
        await writing.put(f"{prefix}/old", b"old", mode="overwrite")
        for name, left in (("old", b"old"), ("new", None)):
            upload = await writing.upload(f"{prefix}/{name}", _PART_BYTES)
            await upload.part(0, 0, bytes(_PART_BYTES))
            part = asyncio.ensure_future(upload.part(1, _PART_BYTES, b"the last part"))
            await asyncio.sleep(0)
            part.cancel()
            await asyncio.wait([part])
            if not part.cancelled():
                part.exception()
            error = await _end(upload.abort())
            _require(error is None, f"abort {_ended(error)}", _ABORTED)
            _require(await self._found(writing, f"{prefix}/{name}") == left, "an aborted upload is seen", _ABORTED)
        found = sorted((await writing.listing(prefix)).files)
        _require(found == ["old"], f"after an aborted upload {found} are listed", _ABORTED)

    @_on_store_loop
    async def test_uploads_at_once(self, writing: BlobStore) -> None:
        """Each keeps its own parts."""
        prefix, contents = _prefix(), [_bytes(_PART_BYTES + 100, seed) for seed in range(3)]
        await asyncio.gather(*(self._upload(writing, f"{prefix}/{seed}", one) for seed, one in enumerate(contents)))
        for seed, content in enumerate(contents):
            _require(await self._found(writing, f"{prefix}/{seed}") == content, "uploads at once are mixed", _UPLOADED)

    # --- versions and mapping ---

    @_on_store_loop
    async def test_versions(self, writing: BlobStore) -> None:
        """``replace`` compares, and every content has a version of its own."""
        store, prefix = self._needs(writing, versions=True), _prefix()
        name, other = f"{prefix}/blob", f"{prefix}/other"
        await writing.put(other, b"another blob", mode="overwrite")
        version = await store.version(other)
        for error in (await _end(store.version(name)), await _end(store.replace(name, b"x", version))):
            refused = isinstance(error, FileNotFoundError | FileExistsError)  # servers answer with 404 or with 412
            _require(refused, f"version or replace of no blob {_ended(error)}", _VERSIONS)
        _require(await self._found(writing, name) is None, "replace has created a blob", _VERSIONS)
        known: list[str] = []
        for content in (b"first", b"second", b"third!"):
            await writing.put(name, content, mode="overwrite")
            known.append(await store.version(name))
        _require(len(set(known)) == 3, f"three contents have the versions {known}", _VERSIONS)
        _require(await store.version(name) == known[2], "a version has changed and the blob has not", _VERSIONS)
        error = await _end(store.replace(name, b"lost", known[0]))
        _require(isinstance(error, FileExistsError), f"replace of an older version {_ended(error)}", _VERSIONS)
        _require(await self._found(writing, name) == b"third!", "replace of an older version has written", _VERSIONS)
        await store.replace(name, b"fourth", known[2])
        _require(await self._found(writing, name) == b"fourth", "replace has returned and not written", _VERSIONS)

    @_on_store_loop
    async def test_replacing_at_once(self, writing: BlobStore) -> None:
        """Of several with one version, one succeeds."""
        store = self._needs(writing, versions=True)
        for _ in range(5):
            name, contents = f"{_prefix()}/blob", [b"content %d" % number for number in range(8)]
            await writing.put(name, b"the first", mode="overwrite")
            version = await store.version(name)
            ends = await asyncio.gather(*(_end(store.replace(name, one, version)) for one in contents))
            won = [number for number, error in enumerate(ends) if error is None]
            _require(len(won) == 1, f"{len(won)} of 8 replaces of one version have succeeded", _VERSIONS)
            refused = sum(isinstance(error, FileExistsError) for error in ends)
            _require(refused == 7, f"of 8 replaces the others raised {ends}", _VERSIONS)
            _require(await self._found(writing, name) == contents[won[0]], "another content is there", _VERSIONS)

    @_on_store_loop
    async def test_a_map(self, store: BlobStore) -> None:
        """It has the content, and what is written to it stays in this process."""
        mapping, name, content = self._needs(store, mapping=True), f"{_prefix()}/blob", _bytes(10_000)
        await self.fill(store, {name: content})
        mapped = await mapping.map(name, 10_000)
        _require(mapped[:] == content, "mapped memory has another content", _MAPPED)
        mapped[:4] = b"mine"
        _require(await self._found(store, name) == content, "a write to mapped memory has changed the blob", _MAPPED)
        mapped.close()

    # --- for the tests ---

    @staticmethod
    def _needs(store: BlobStore, **flags: bool) -> Any:
        """Return the store, with the methods of the flags. Skips the test where one is off, and says which."""
        for flag in flags:
            if not getattr(store.capabilities, flag):
                pytest.skip(f"capabilities.{flag} is off: sidestream does not use it, and the tests of saves say how")
        return store

    @staticmethod
    def _is_alone(store: BlobStore, place: StorePlace) -> None:
        """Require that the only files at the target are those of the save that a reader finds."""
        found = sidestream.blocking.open_checkpoint(f"{place.url}/ckpt", storage=place.storage).save_id
        files = run(lambda: store.listing(f"{place.url}/ckpt")).files
        others = sorted(name for name in files if name != ".metadata" and found not in name)
        _require(not others, f"beside those of {found} there are {others}", _NOTHING_LEFT)

    @staticmethod
    async def _found(store: BlobStore, name: str) -> bytes | None:
        """Return the content of a blob; None if there is none."""
        try:
            size = await store.size(name)
            return bytes(await store.read(name, 0, size)) if size else b""
        except FileNotFoundError:
            return None

    @staticmethod
    async def _upload(store: BlobStore, name: str, content: bytes) -> None:
        upload = await store.upload(name, _PART_BYTES)
        for number, start in enumerate(range(0, len(content), _PART_BYTES)):
            await upload.part(number, start, content[start : start + _PART_BYTES])
        await upload.complete()

    @staticmethod
    async def _is_listed(store: BlobStore, prefix: str, numbers: Iterable[int]) -> None:
        found = {name: info.nbytes for name, info in (await store.listing(prefix)).files.items()}
        wanted = {str(number): number + 1 for number in numbers}
        _require(found == wanted, f"blobs {sorted(wanted)} were written, and {found} are listed", _LISTED)
