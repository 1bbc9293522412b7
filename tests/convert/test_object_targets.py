"""Conversions and copies to and from object storage, and what a failure leaves there: nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from _places import Place, s3_place
from _s3_server import Fault, Request, serving
from hypothesis import given
from hypothesis import strategies as st
from keywords import for_convert
from states import assert_same

import sidestream
from sidestream import errors
from sidestream._convert.copy import _CopiedFile
from sidestream._load.checks import Piece
from sidestream._storage.object_store import transaction

MIB = 1 << 20
LEAST = 96 * MIB
TENSORS = {"large": torch.arange(3 * MIB // 2), "small": torch.arange(7, dtype=torch.int16), "none": torch.empty(0, 3)}
STATE: dict[str, Any] = {**TENSORS, "step": 7, "nested": [{"x": torch.ones(3)}, (1, "two")]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved") / "a"
    sidestream.blocking.save(STATE, directory)
    return directory


def to(place: Place) -> dict[str, Any]:
    """The keywords of a call whose target is there."""
    return {f"target_{name}": value for name, value in place.keywords.items()}


def from_(place: Place) -> dict[str, Any]:
    return dict(place.keywords)


def both(place: Place) -> dict[str, Any]:
    return {**from_(place), **to(place)}


def keys(place: Place) -> set[str]:
    """All objects there, of whatever kind, and open uploads. One that was cancelled before its begin was answered is
    left to the rule of the bucket: it has no parts, and nothing knows its id."""
    if place.server is not None:
        return {*place.server.objects, *(upload.key for upload in place.server.uploads.values() if upload.parts)}
    return set(fsspec.filesystem("memory").find(place.base.removeprefix("memory://").partition("/")[0]))


async def read(url: str, place: Place) -> dict[Any, Any]:
    return await (await sidestream.open_checkpoint(url, **from_(place))).state_dict()


async def test_every_format_goes_there_and_comes_back(place: Place, saved: Path, tmp_path: Path) -> None:
    url = place.url
    await sidestream.convert(saved, url("dcp"), options=sidestream.ConvertOptions(budget_bytes=LEAST), **to(place))
    await sidestream.convert(
        url("dcp"), url("file.pt"), options=sidestream.ConvertOptions(budget_bytes=LEAST), **both(place)
    )
    await sidestream.convert(
        url("file.pt"), tmp_path / "b.pt", options=sidestream.ConvertOptions(budget_bytes=LEAST), **from_(place)
    )
    assert_same(STATE, torch.load(tmp_path / "b.pt", weights_only=True))
    assert_same(STATE, await read(url("file.pt"), place))
    report = await sidestream.convert(
        url("file.pt"),
        url("hf"),
        format="safetensors",
        select=list(TENSORS),
        options=sidestream.ConvertOptions(max_shard_bytes=10 * MIB, budget_bytes=LEAST),
        **both(place),
    )
    assert report.files[-1] == "model.safetensors.index.json"
    assert_same(dict(sorted(TENSORS.items())), dict(sorted((await read(url("hf"), place)).items())))
    await sidestream.convert(
        url("hf"), url("one.safetensors"), options=sidestream.ConvertOptions(budget_bytes=LEAST), **both(place)
    )
    await sidestream.convert(
        url("one.safetensors"), tmp_path / "c", options=sidestream.ConvertOptions(budget_bytes=LEAST), **from_(place)
    )
    target = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    await sidestream.load(target, tmp_path / "c")
    assert_same(TENSORS, target)


async def test_copies_are_the_same_bytes(place: Place, saved: Path, tmp_path: Path) -> None:
    report = await sidestream.copy(saved, place.url("copied"), budget_bytes=LEAST, **to(place))
    assert report.files[-1] == ".metadata"
    assert set(report.verified) == {"large", "small", "none", "step", "nested.0.x", "nested.1"}
    assert (await sidestream.verify(place.url("copied"), **from_(place))).ok
    await sidestream.copy(place.url("copied"), place.url("again"), **both(place))
    await sidestream.copy(place.url("again"), tmp_path / "back", **from_(place))
    assert {one.name: one.read_bytes() for one in (tmp_path / "back").iterdir()} == {
        one.name: one.read_bytes() for one in saved.iterdir()
    }
    await sidestream.convert(saved, tmp_path / "file.pt")
    report = await sidestream.copy(tmp_path / "file.pt", place.url("copied.pt"), **to(place))
    assert set(report.verified) == {"large", "small", "none", "step", "nested.0.x", "nested.1"}
    await sidestream.copy(place.url("copied.pt"), tmp_path / "back.pt", **from_(place))
    assert (tmp_path / "back.pt").read_bytes() == (tmp_path / "file.pt").read_bytes()


async def test_what_is_there_is_not_replaced(place: Place, saved: Path) -> None:
    for name, options in (("t.pt", {}), ("t.safetensors", {"select": "small"}), ("t", {})):
        await sidestream.convert(saved, place.url(name), **options, **to(place))  # type: ignore[arg-type]
        before = keys(place)
        for other in ({"select": "small"}, {"select": "small", "format": "safetensors"}):
            if name == "t.pt" and "format" in other:
                continue
            with pytest.raises(errors.CheckpointExistsError):
                await sidestream.convert(saved, place.url(name), **other, **to(place))  # type: ignore[arg-type]
        if name == "t":
            with pytest.raises(errors.CheckpointExistsError):
                await sidestream.copy(saved, place.url(name), **to(place))
        assert keys(place) == before


@pytest.mark.parametrize("kind", ["convert file", "convert directory", "copy file", "copy directory"])
async def test_a_cancel_leaves_nothing(kind: str, place: Place, saved: Path, tmp_path: Path) -> None:
    verb, _, what = kind.partition(" ")
    source = saved
    if kind == "copy file":
        await sidestream.convert(saved, tmp_path / "source.pt")
        source = tmp_path / "source.pt"
    target = place.url(f"cancelled-{verb}{'.pt' if what == 'file' else ''}")
    options: dict[str, Any] = {"budget_bytes": LEAST, **to(place)}
    if kind == "convert directory":
        options |= {"format": "safetensors", "select": list(TENSORS), "max_shard_bytes": 10 * MIB}
    call = sidestream.copy if verb == "copy" else lambda *on, **flat: sidestream.convert(*on, **for_convert(**flat))
    before = keys(place)
    for fraction in (0.4, 1.0):

        def stop(done: int, total: int, fraction: float = fraction) -> None:
            if done >= fraction * total:
                raise RuntimeError("enough")

        with pytest.raises(RuntimeError, match="enough"):
            await call(source, target, progress=stop, **options)
        assert keys(place) == before

        reached = asyncio.Event()

        def tell(done: int, total: int, fraction: float = fraction, reached: asyncio.Event = reached) -> None:
            if done >= fraction * total:
                reached.set()

        task = asyncio.create_task(call(source, target, progress=tell, **options))
        waiting = asyncio.create_task(reached.wait())
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if keys(place) != before:  # the commit had been sent already: then it is finished
            assert (await sidestream.verify(target, **from_(place))).ok
            return
    await call(source, target, **options)
    assert keys(place) > before


async def test_a_put_that_arrives_after_the_cancel_leaves_nothing(
    place: Place, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server carries it out when the files of the conversion are being deleted, or a second later."""
    monkeypatch.setattr(transaction, "_SENT_S", 60.0)  # more than a busy machine needs for that second
    server = place.server
    if server is None:
        pytest.skip("the memory of this process answers at once")
    before, reached = keys(place), threading.Event()

    def hold(request: Request) -> Fault | None:
        if request.kind not in ("put", "create") or reached.is_set():
            return None
        reached.set()
        with server.seen:
            server.seen.wait_for(lambda: any(one.kind.startswith("delete") for one in server.log), 1.0)
        return None

    server.log.clear()
    server.fault = hold
    options = {"format": "safetensors", "select": ["small"], "budget_bytes": LEAST, **to(place)}
    task = asyncio.create_task(sidestream.convert(saved, place.url("late"), **for_convert(**options)))
    assert await asyncio.to_thread(reached.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert keys(place) == before


class _Forgetful(dict[str, bytes]):
    """Keeps another byte than it was given, once."""

    def __setitem__(self, key: str, content: bytes) -> None:
        altered = key.endswith(("__0_1.distcp", ".pt"))
        super().__setitem__(key, content[:5000] + bytes([content[5000] ^ 1]) + content[5001:] if altered else content)


async def test_a_copy_that_fails_leaves_what_another_one_has_committed(place: Place, saved: Path) -> None:
    """Both begin when nothing is there; the other one is done before this one fails."""
    target = f"{place.base}/twice"

    class Late(Exception):
        pass

    overtaken: list[threading.Thread] = []

    def overtake() -> None:
        sidestream.blocking.copy(saved, target, **to(place))

    def progress(done: int, total: int) -> None:
        if done > 0 and not overtaken:  # it has looked, and found nothing
            overtaken.append(threading.Thread(target=overtake))
            overtaken[0].start()
            overtaken[0].join()
        elif done > total // 2:
            raise Late

    with pytest.raises((Late, errors.CheckpointExistsError, ExceptionGroup)):
        await sidestream.copy(saved, target, progress=progress, **to(place))
    assert (await sidestream.verify(target, **from_(place))).ok


async def test_what_arrived_is_compared(tmp_path: Path, saved: Path) -> None:
    """Where the storage keeps something else, nothing becomes visible, and nothing stays."""
    await sidestream.convert(saved, tmp_path / "source.pt")
    with serving() as server:
        server.objects = _Forgetful()
        place = s3_place(server, "fsspec")
        for source, target in ((saved, "c"), (tmp_path / "source.pt", "c.pt")):
            with pytest.raises(errors.StorageError, match="other bytes were read back"):
                await sidestream.copy(source, place.url(target), budget_bytes=LEAST, **to(place))
            assert keys(place) == set()


async def test_damage_is_not_copied(saved: Path, tmp_path: Path) -> None:
    await sidestream.copy(saved, tmp_path / "broken")
    await sidestream.convert(saved, tmp_path / "broken.pt")
    before = {"broken", "broken.pt"}
    for file in ("broken/__0_1.distcp", "broken.pt"):
        raw = bytearray((tmp_path / file).read_bytes())
        raw[raw.index(TENSORS["large"][-1000:].numpy().tobytes())] ^= 4
        (tmp_path / file).write_bytes(raw)
        with pytest.raises(errors.CorruptCheckpointError, match="large: "):
            await sidestream.copy(tmp_path / file.partition("/")[0], tmp_path / "t")
        with pytest.raises(errors.CorruptCheckpointError, match="large: "):
            await sidestream.copy(tmp_path / file.partition("/")[0], "memory://damaged/t")
        assert {path.name for path in tmp_path.iterdir()} == before
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.copy(tmp_path / "nothing", tmp_path / "t")
    (tmp_path / "broken" / ".metadata").unlink()
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.copy(tmp_path / "broken", tmp_path / "t")


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 16 << 10)), max_size=30),
    st.integers(0, 9000),
    st.integers(16 << 10, 40 << 10),
)
def test_no_piece_lies_across_windows(gaps: list[tuple[int, int]], tail: int, window_bytes: int) -> None:
    pieces, position = [], 0
    for gap, nbytes in gaps:
        pieces.append(Piece("w", "f", position + gap, nbytes, bytes(nbytes)))
        position += gap + nbytes
    file = _CopiedFile("f", position + tail, pieces, window_bytes)
    assert [start for start, _ in file.windows] == [0, *(end for _, end in file.windows[:-1])][: len(file.windows)]
    assert sum(end - start for start, end in file.windows) == file.nbytes
    assert all(0 < end - start <= window_bytes for start, end in file.windows)
    for piece in pieces:
        assert any(start <= piece.offset and piece.offset + piece.nbytes <= end for start, end in file.windows)


async def test_options_are_of_one_side_each(saved: Path, tmp_path: Path) -> None:
    with serving() as first, serving() as second:
        one, other = s3_place(first, "obstore"), s3_place(second, "fsspec")
        words = {**from_(one), **to(other)}
        await sidestream.copy(saved, one.url("x"), **to(one))
        await sidestream.copy(one.url("x"), other.url("y"), **words)
        await sidestream.convert(one.url("x"), other.url("z.pt"), **words)
        assert not any("/y/" in key or key.endswith("z.pt") for key in first.objects)
        assert any("/y/" in key for key in second.objects)
        assert any(key.endswith("z.pt") for key in second.objects)
        assert (await sidestream.verify(other.url("y"), **from_(other))).ok


@pytest.mark.parametrize(
    ("max_shard_bytes", "last"), [(1 << 30, "model.safetensors"), (1 << 20, "model.safetensors.index.json")]
)
async def test_the_file_that_readers_look_for_is_the_last(max_shard_bytes: int, last: str) -> None:
    with serving() as server:
        url, files = f"s3://{server.bucket}", {"config.json": b"{}", "tokenizer.json": b"{}"}
        hf = sidestream.HF(f"{url}/hf", files=files, max_shard_bytes=max_shard_bytes, storage_options=server.options)
        pending = sidestream.async_save(TENSORS, f"{url}/checkpoint", storage_options=server.options, export=hf)
        await pending
        for export in pending.exports:
            await export
        await sidestream.copy(
            f"{url}/hf", f"{url}/copy", storage_options=server.options, target_storage_options=server.options
        )
        for directory in ("hf", "copy"):
            written = [
                one.key.partition("/")[2]
                for one in server.log
                if one.kind in ("create", "put", "complete") and one.key.startswith(f"{directory}/")
            ]
            assert set(files) < set(written)
            assert written[-1] == last
