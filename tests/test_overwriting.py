"""``overwrite=True`` and ``remove``: the old checkpoint or the new one, never neither, never a mixture."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import sidestream
from sidestream import HF, load, remove, save
from sidestream._convert.safetensors import header_of
from sidestream._storage.local import publishing
from sidestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NotDurableError,
    StorageError,
)


def state_of(seed: int) -> dict[str, Any]:
    return {"a": torch.full((1000,), float(seed)), "b": torch.full((300, 300), seed), "step": seed}


async def loaded(url: Path | str) -> int:
    """The seed of the checkpoint, all parts of which have to say the same."""
    state = state_of(-1)
    await load(state, url)
    seeds = {int(value) for tensor in (state["a"], state["b"]) for value in tensor.unique()} | {state["step"]}
    (seed,) = seeds
    return int(seed)


@pytest.mark.parametrize("saver", ["thread", "process"])
async def test_a_checkpoint_is_replaced(saver: Any, tmp_path: Path) -> None:
    for seed in range(3):
        await save(state_of(seed), tmp_path / "last", overwrite=True, options=sidestream.SaveOptions(writer=saver))
        assert await loaded(tmp_path / "last") == seed
    assert os.listdir(tmp_path) == ["last"]


async def test_one_of_stock_dcp_is_replaced(tmp_path: Path) -> None:
    dcp.save(state_of(1), checkpoint_id=tmp_path / "last", no_dist=True)
    await save(state_of(2), tmp_path / "last", overwrite=True)
    assert await loaded(tmp_path / "last") == 2


async def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointExistsError, match="no checkpoint"):
        await save(state_of(1), tmp_path / "home", overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    assert os.listdir(tmp_path) == ["home"]


async def test_a_directory_that_is_replaced_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are deleted when their names have been read, and not their sizes."""
    await save(state_of(1), tmp_path / "last")
    real, replaced = os.scandir, []

    def scandir(path: Any) -> Any:
        if replaced or not isinstance(path, int):
            return real(path)
        with real(path) as entries:
            names = list(entries)
        replaced.append(path)
        sidestream.blocking.save(state_of(2), tmp_path / "last", overwrite=True)
        return nullcontext(iter(names))

    monkeypatch.setattr(os, "scandir", scandir)
    assert await loaded(tmp_path / "last") == 2
    assert replaced


@pytest.mark.parametrize("storage", [None, sidestream.Storage(commit="marker")], ids=["rename", "marker"])
@pytest.mark.parametrize("verb", ["load", "verify"])
@pytest.mark.parametrize("at", [".metadata", "manifest-", "__0_1"])
async def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged(
    at: str, verb: str, storage: sidestream.Storage | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(state_of(1), tmp_path / "last", storage=storage)
    removed = Once(
        monkeypatch,
        "open",
        lambda path, *_: Path(path).name.startswith(at),
        lambda: sidestream.blocking.remove(tmp_path / "last", storage=storage),
    )
    with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint"):
        if verb == "load":
            await load(state_of(0), tmp_path / "last", storage=storage)
        else:
            await sidestream.verify(tmp_path / "last", storage=storage)
    assert removed.done


@pytest.mark.parametrize("at", [".metadata", "__0_0.distcp", "__0_1.distcp", "config.json"])
async def test_verify_starts_over(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another checkpoint takes the place of the one that is verified, whose files are deleted: that is no damage."""
    await save(state_of(1), tmp_path / "last", files={"config.json": b"1"})
    opened = await sidestream.open_checkpoint(tmp_path / "last")

    def replace() -> sidestream.SaveInfo:
        return sidestream.blocking.save(state_of(2), tmp_path / "last", overwrite=True, files={"config.json": b"2"})

    other = Once(monkeypatch, "open", lambda path, *_: str(path).endswith(at), replace)
    report = await sidestream.verify(tmp_path / "last")
    assert other.done
    assert report.ok, report.damaged
    assert report.save_id != opened.save_id
    with pytest.raises(CheckpointNotFoundError, match="replaced"):
        await opened.verify()
    opened = await sidestream.open_checkpoint(tmp_path / "last")
    Once(monkeypatch, "open", lambda path, *_: str(path).endswith(at), replace)
    with pytest.raises(CheckpointNotFoundError):
        await opened.verify()


@pytest.mark.parametrize("at", [".metadata", "__0_0.distcp", "__0_1.distcp", "config.json"])
@pytest.mark.parametrize("verb", ["copy", "convert", "convert without verification"])
async def test_a_copy_of_what_is_removed_is_refused(
    verb: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file that it opens, until it meets none any more."""
    for number in range(1, 20):
        await save(state_of(1), tmp_path / "last", files={"config.json": b"1"}, overwrite=True)
        opened: list[Any] = []

        def nth(path: Any, *_: Any, opened: list[Any] = opened, number: int = number) -> bool:
            opened.extend([path] if str(path).endswith(at) else [])
            return len(opened) == number

        with monkeypatch.context() as patch:
            other = Once(patch, "open", nth, lambda: sidestream.blocking.remove(tmp_path / "last"))
            try:
                if verb == "copy":
                    await sidestream.copy(tmp_path / "last", tmp_path / "target")
                else:
                    options: dict[str, Any] = {}
                    if verb != "convert":
                        options["options"] = sidestream.ConvertOptions(verify="manifest")
                    await sidestream.convert(tmp_path / "last", tmp_path / "target", **options)
            except (CorruptCheckpointError, CheckpointNotFoundError):
                assert other.done
                assert not any(tmp_path.iterdir())
                continue
        assert await loaded(tmp_path / "target") == 1
        assert (await (await sidestream.open_checkpoint(tmp_path / "target")).file("config.json")) == b"1"
        await remove(tmp_path / "target")
        if not other.done:
            break
    assert not other.done


@pytest.mark.parametrize("at", [".metadata", "__0_0.distcp", "__0_1.distcp", "config.json"])
@pytest.mark.parametrize("verb", ["copy", "convert"])
async def test_a_copy_of_what_is_replaced_starts_over(
    verb: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file that it opens, until it meets none any more: it is the old checkpoint or the new one."""
    call, seen = getattr(sidestream, verb), set()
    for number in range(1, 20):
        await save(state_of(1), tmp_path / "last", files={"config.json": b"1"}, overwrite=True)
        opened: list[Any] = []

        def nth(path: Any, *_: Any, opened: list[Any] = opened, number: int = number) -> bool:
            opened.extend([path] if str(path).endswith(at) else [])
            return len(opened) == number

        def replace() -> None:
            sidestream.blocking.save(state_of(2), tmp_path / "last", overwrite=True, files={"config.json": b"2"})

        with monkeypatch.context() as patch:
            other = Once(patch, "open", nth, replace)
            await call(tmp_path / "last", tmp_path / "target")
        copied = await loaded(tmp_path / "target")
        seen.add(copied)
        assert (await (await sidestream.open_checkpoint(tmp_path / "target")).file("config.json")) == b"%d" % copied
        await remove(tmp_path / "target")
        if not other.done:
            break
    assert not other.done
    # A conversion need not open the file of the values, and holds that of the tensors open.
    assert seen == {1, 2} or (verb == "convert" and at.endswith(".distcp"))


@pytest.mark.parametrize("verb", ["copy", "convert"])
async def test_a_copy_of_what_is_replaced_again_and_again(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, and does not call the checkpoint damaged."""
    await save(state_of(1), tmp_path / "last")
    real, replaced = os.open, []

    def open_(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == "__0_1.distcp" and threading.current_thread() not in replaced:
            replaced.append(threading.current_thread())
            sidestream.blocking.save(state_of(2), tmp_path / "last", overwrite=True)
            replaced.pop()
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(CheckpointNotFoundError, match="is not there any more"):
        await getattr(sidestream, verb)(tmp_path / "last", tmp_path / "target")
    assert os.listdir(tmp_path) == ["last"]


async def test_what_is_removed_while_it_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await save(state_of(1), tmp_path / "last")
    Once(monkeypatch, "open", lambda path, *_: str(path).endswith("__0_0.distcp"),
         lambda: sidestream.blocking.remove(tmp_path / "last"))  # fmt: skip
    with pytest.raises(CheckpointNotFoundError):
        await sidestream.verify(tmp_path / "last")


async def test_several_overwrite_at_once(tmp_path: Path) -> None:
    """Each succeeds, and one of them stays; none deletes what another has committed."""
    await save(state_of(0), tmp_path / "last")
    for _ in range(5):
        saves = [
            save(state_of(seed), tmp_path / "last", overwrite=True, options=sidestream.SaveOptions(durability="flush"))
            for seed in range(1, 7)
        ]
        await asyncio.gather(*saves)
        assert await loaded(tmp_path / "last") in range(1, 7)
        assert os.listdir(tmp_path) == ["last"]


async def test_one_that_is_replaced_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the exchange and the look at what was published another save replaces it, and deletes it."""
    await save(state_of(0), tmp_path / "last")
    real, nested = publishing.exchange, []

    def exchange(attempt: Path, target: Path) -> None:
        real(attempt, target)
        if not nested:
            nested.append(attempt)
            sidestream.blocking.save(state_of(2), tmp_path / "last", overwrite=True)

    monkeypatch.setattr(publishing, "exchange", exchange)
    await save(state_of(1), tmp_path / "last", overwrite=True)
    assert nested
    assert await loaded(tmp_path / "last") == 2
    assert os.listdir(tmp_path) == ["last"]


class Once:
    """The first time that ``os.<name>`` is called with arguments for which ``when`` holds, ``work`` is done, before it
    or after it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        when: Callable[..., object],
        work: Callable[[], object],
        *,
        after: bool = False,
    ) -> None:
        real = getattr(os, name)
        self.done = False

        def call(*arguments: Any, **options: Any) -> Any:
            mine = not self.done and bool(when(*arguments))
            self.done = self.done or mine
            if mine and not after:
                work()
            result = real(*arguments, **options)
            if mine and after:
                work()
            return result

        monkeypatch.setattr(os, name, call)


def renames_to(target: Path) -> Callable[..., bool]:
    return lambda _, to: to == target


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
async def test_of_two_that_are_the_first_one_stays(
    overwrite: bool, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save with ``overwrite=True`` comes just before, or just after, the rename of another one."""
    target = tmp_path / "last"
    other = Once(
        monkeypatch,
        "rename",
        renames_to(target),
        lambda: sidestream.blocking.save(state_of(2), target, overwrite=True),
        after=after,
    )
    if after or overwrite:
        await save(state_of(1), target, overwrite=overwrite)
    else:
        with pytest.raises(CheckpointExistsError):
            await save(state_of(1), target)
    assert other.done
    assert await loaded(target) == (1 if overwrite and not after else 2)
    assert os.listdir(tmp_path) == ["last"]


async def test_a_removal_just_before_the_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await save(state_of(0), tmp_path / "last")
    real, removed = publishing.exchange, []

    def exchange(attempt: Path, target: Path) -> None:
        if not removed:
            removed.append(target)
            sidestream.blocking.remove(target)
        real(attempt, target)

    monkeypatch.setattr(publishing, "exchange", exchange)
    await save(state_of(1), tmp_path / "last", overwrite=True)
    assert removed
    assert await loaded(tmp_path / "last") == 1
    assert os.listdir(tmp_path) == ["last"]


@pytest.mark.parametrize("missing", [False, True])
def test_a_removal_just_after_the_exchange(missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one is in the attempt then. It is not published again, although its files have the same names. Not every
    file system lists a directory that was removed."""
    attempt, target = tmp_path / ".attempt", tmp_path / "last"
    for directory in (attempt, target):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(header_of([], {}) + directory.name.encode())
    real, removed = publishing.exchange, []

    def exchange(one: Path, other: Path) -> None:
        real(one, other)
        if not removed:
            removed.append(other)
            shutil.rmtree(other)

    monkeypatch.setattr(publishing, "exchange", exchange)
    if missing:
        Once(monkeypatch, "listdir", lambda _: removed, lambda: os.stat(target))
    publishing.replace(attempt, target, frozenset({"model.safetensors"}), None, use="export")
    assert removed == [target]
    assert not target.exists()
    assert (attempt / "model.safetensors").read_bytes().endswith(b"last")


@pytest.mark.parametrize("name", ["posix_fallocate", "rename"])
async def test_what_has_come_meanwhile_and_is_no_checkpoint_is_not_replaced(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write() -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.tex").write_text("years of work")

    when = renames_to(tmp_path / "home") if name == "rename" else lambda *_: True
    written = Once(monkeypatch, name, when, write)
    with pytest.raises(CheckpointExistsError, match="no checkpoint"):
        await save(state_of(1), tmp_path / "home", overwrite=True)
    assert written.done
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    assert os.listdir(tmp_path) == ["home"]


async def test_a_commit_that_may_not_be_durable_says_where_the_old_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(state_of(0), tmp_path / "last")
    real, exchanged = publishing.exchange, []

    def exchange(attempt: Path, target: Path) -> None:
        real(attempt, target)
        exchanged.append(attempt)

    def fsync(descriptor: int) -> None:
        if exchanged:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(publishing, "exchange", exchange)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NotDurableError) as raised:
        await save(state_of(1), tmp_path / "last", overwrite=True)
    assert str(exchanged[0]) in raised.value.__notes__[0]
    assert await loaded(tmp_path / "last") == 1
    assert await loaded(exchanged[0]) == 0


async def test_what_was_replaced_is_deleted_where_a_quota_refuses_to_rename_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(state_of(0), tmp_path / "last")

    def refuse() -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    refused = Once(monkeypatch, "rename", lambda source, _: str(source).endswith(".partial"), refuse)
    await save(state_of(1), tmp_path / "last", overwrite=True)
    assert refused.done
    assert await loaded(tmp_path / "last") == 1
    assert os.listdir(tmp_path) == ["last"]


async def test_one_that_is_removed_when_a_save_looks_at_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await save(state_of(0), tmp_path / "last")
    looks: list[Any] = []

    def second(path: Any, *_: Any) -> bool:
        looks.extend([path] if path == tmp_path / "last" else [])
        return len(looks) == 2

    names = ("stat", "lstat")  # whichever this Python calls
    either = [Once(monkeypatch, one, second, lambda: sidestream.blocking.remove(tmp_path / "last")) for one in names]
    await save(state_of(1), tmp_path / "last", overwrite=True)
    assert any(one.done for one in either)
    assert await loaded(tmp_path / "last") == 1
    assert os.listdir(tmp_path) == ["last"]


async def test_a_failed_save_leaves_the_old_one(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "last")
    with pytest.raises(sidestream.errors.UnsafeObjectError):
        await save({**state_of(2), "bad": object()}, tmp_path / "last", overwrite=True)
    assert await loaded(tmp_path / "last") == 1
    assert os.listdir(tmp_path) == ["last"]


# --- remove ---


async def test_remove(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "a")
    await remove(tmp_path / "a")
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointNotFoundError):
        await remove(tmp_path / "a")


@pytest.mark.parametrize("what", ["save", "export"])
async def test_a_cancel_after_the_exchange_leaves_nothing_behind(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cancelled when the new one is visible and the old one has a hidden name."""
    real, loop, exchanged = publishing.exchange, asyncio.get_running_loop(), []
    cancel: list[Callable[[], object]] = []

    def exchange(one: Path, other: Path) -> None:
        real(one, other)
        if cancel and one.parent.name == "root":
            exchanged.append(one)
            asyncio.run_coroutine_threadsafe(asyncio.to_thread(int), loop).result(60)  # the loop has a turn
            loop.call_soon_threadsafe(cancel[0])

    monkeypatch.setattr(publishing, "exchange", exchange)
    root = tmp_path / "root"
    async with sidestream.Checkpointer(tmp_path / "run", export=HF(root / "step-{step}")) as checkpoints:
        for seed in (1, 2):
            if what == "save":
                saving = asyncio.create_task(save(state_of(seed), root / "step-1", overwrite=True))
            else:
                pending = checkpoints.async_save({"a": torch.full((3,), float(seed))}, step=1)
                saving = asyncio.ensure_future(pending.exports[0])  # type: ignore[arg-type]
            if seed == 2:
                cancel.append(saving.cancel if what == "save" else pending.exports[0].cancel)
                with pytest.raises(asyncio.CancelledError):
                    await saving
            else:
                await saving
    assert exchanged
    assert os.listdir(root) == ["step-1"]


@pytest.mark.parametrize("verb", ["load", "convert"])
async def test_an_export_that_is_replaced_while_it_is_read_is_not_damaged(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        export = HF(tmp_path / f"hf-{seed}", select=["a", "b"], max_shard_bytes=1)
        info = await save(state_of(seed), tmp_path / f"step-{seed}", export=export)
        assert isinstance(info.exports[0], sidestream.ConvertReport)
    seen = set()
    for number in range(1, 20):  # at each opening of a file, until there is none any more
        place = tmp_path / str(number)
        for seed in (1, 2):
            shutil.copytree(tmp_path / f"hf-{seed}", place / f"hf-{seed}")
        target = {"a": torch.zeros(1000), "b": torch.zeros((300, 300), dtype=torch.int64)}
        opened: list[object] = []

        def nth(path: Any, *_: Any, opened: list[object] = opened, number: int = number) -> bool:
            opened.extend([path] * str(path).endswith("2-of-00002.safetensors"))
            return len(opened) == number

        def replace(place: Path = place) -> None:
            publishing.exchange(place / "hf-1", place / "hf-2")
            shutil.rmtree(place / "hf-2")

        with monkeypatch.context() as patch:
            replaced = Once(patch, "open", nth, replace)
            if verb == "load":
                await load(target, place / "hf-1", allow_cast=True)
            else:
                await sidestream.convert(place / "hf-1", place / "converted", format="dcp")
        if verb == "convert":
            await load(target, place / "converted", allow_cast=True)
        [value] = {int(value) for tensor in target.values() for value in tensor.unique()}
        seen.add(value)
        if not replaced.done:
            break
    assert not replaced.done
    assert seen == {1, 2}


async def test_an_open_export_that_is_replaced_or_removed_is_not_damaged(tmp_path: Path) -> None:
    """It has other files, one that ends earlier, one of the same size with the same or other places, or none."""
    large = {"a": torch.zeros(1000), "b": torch.zeros(300)}
    same = {name: tensor + 1 for name, tensor in large.items()}
    split = {"a": torch.ones(300), "b": torch.ones(1000)}
    others = ((large, 1), ({"a": torch.ones(3), "b": torch.ones(2)}, 1 << 20), (same, 1 << 20), (split, 1 << 20), None)
    for number, other in enumerate(others):
        place = tmp_path / f"hf-{number}"
        await save(large, tmp_path / f"old-{number}", export=HF(place))
        opened = await sidestream.open_checkpoint(place)
        await remove(place)
        if other is not None:
            await save(other[0], tmp_path / f"new-{number}", export=HF(place, max_shard_bytes=other[1]))
        for call in (opened.tensor("b"), opened.state_dict(), opened.verify()):
            with pytest.raises(CheckpointNotFoundError, match="that was opened is not there any more"):
                await call


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
@pytest.mark.parametrize("removed", [False, True])
async def test_an_open_file_that_is_replaced_or_removed_is_not_damaged(
    removed: bool, name: str, tmp_path: Path
) -> None:
    for number, state in enumerate(({"a": torch.zeros(1000)}, {"b": torch.ones(3)})):
        await save(state, tmp_path / f"saved-{number}")
        await sidestream.convert(tmp_path / f"saved-{number}", tmp_path / f"{number}-{name}")
    file, other = tmp_path / f"0-{name}", tmp_path / f"1-{name}"
    opened = await sidestream.open_checkpoint(file)
    if removed:
        file.unlink()
    else:
        other.replace(file)
    for call in (opened.tensor("a"), opened.verify()):
        with pytest.raises(CheckpointNotFoundError, match="that was opened is not there any more"):
            await call


async def test_an_open_checkpoint_of_ours_whose_place_another_writer_has_taken(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "last")
    opened = await sidestream.open_checkpoint(tmp_path / "last")
    await remove(tmp_path / "last")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "last", no_dist=True)
    for call in (opened.tensor("a"), opened.verify()):
        with pytest.raises(CheckpointNotFoundError, match="is not there any more"):
            await call


async def test_an_open_checkpoint_that_is_removed_names_its_save(tmp_path: Path) -> None:
    info = await save(state_of(1), tmp_path / "last")
    opened = await sidestream.open_checkpoint(tmp_path / "last")
    await remove(tmp_path / "last")
    for call in (opened.tensor("a"), opened.verify()):
        with pytest.raises(CheckpointNotFoundError, match=f"the save {info.save_id} is not there any more"):
            await call


async def test_an_open_checkpoint_that_lost_a_file_is_damaged(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "last")
    opened = await sidestream.open_checkpoint(tmp_path / "last")
    for file in (tmp_path / "last").glob("*.distcp"):
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        await opened.tensor("a")


async def test_a_link_is_not_removed(tmp_path: Path) -> None:
    await save(state_of(1), tmp_path / "a")
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(StorageError, match="symbolic link"):
        await remove(tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["a", "link"]
    assert await loaded(tmp_path / "link") == 1


async def test_an_export_is_removed(tmp_path: Path) -> None:
    await save({"a": torch.ones(3)}, tmp_path / "step", export=HF(tmp_path / "place", files={"config.json": b"{}"}))
    await remove(tmp_path / "place")
    assert os.listdir(tmp_path) == ["step"]


@pytest.mark.parametrize("what", ["a run", "a model", "a directory"])
async def test_only_a_checkpoint_is_removed(what: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if what == "a run":
        async with sidestream.Checkpointer(place) as checkpoints:
            await checkpoints.save(state_of(1), step=1)
    elif what == "a model":
        place.mkdir()
        safetensors.torch.save_file({"a": torch.ones(3)}, place / "model.safetensors", {"format": "pt"})
    else:
        place.mkdir()
        (place / "file").touch()
    before = sorted(path for path in place.rglob("*") if ".leases" not in path.parts)
    with pytest.raises(CheckpointNotFoundError, match="nothing was removed"):
        await remove(place)
    assert sorted(path for path in place.rglob("*") if ".leases" not in path.parts) == before


def test_blocking(tmp_path: Path) -> None:
    for seed in (1, 2):
        sidestream.blocking.save(state_of(seed), tmp_path / "a", overwrite=True)
    sidestream.blocking.remove(tmp_path / "a")
    assert os.listdir(tmp_path) == []
