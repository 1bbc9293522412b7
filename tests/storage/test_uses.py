"""What lies at a target, and what may be done with it: every pair, with real files and objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import fsspec
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import sidestream
from sidestream import HF, Checkpointer, KeepLast
from sidestream._storage.replacing import Found, Use, refusal
from sidestream.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError

STATE = {"a": torch.ones(3)}
PAGE = Path(__file__).parents[2] / "docs" / "saving.md"
MODEL = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]


async def put(kind: str, at: Path) -> None:
    if kind == "empty":
        at.mkdir(parents=True)
    elif kind == "checkpoint":
        async with Checkpointer(at.parent) as checkpoints:
            await checkpoints.save(STATE, step=1)
        assert at.is_dir()
    elif kind == "stock":
        dcp.save(STATE, checkpoint_id=at, no_dist=True)
    elif kind in ("export", "export in parts"):
        size = 8 if kind == "export in parts" else 1 << 30
        info = await sidestream.save(
            {"a": torch.ones(3), "b": torch.ones(3)},
            at.parent / "beside",
            export=HF(at, max_shard_bytes=size, files={"config.json": b"{}"}),
        )
        assert isinstance(info.exports[0], sidestream.ConvertReport)
    elif kind == "model":
        at.mkdir(parents=True)
        for name in MODEL:
            (at / name).write_text("precious")
    elif kind == "one file of a model":
        at.mkdir(parents=True)
        safetensors.torch.save_file(STATE, at / "model.safetensors", {"format": "pt"})
    elif kind == "links to a model":  # a snapshot in the cache of huggingface_hub
        at.mkdir(parents=True)
        (at / "model.safetensors").symlink_to("/etc/hostname")
    elif kind == "workspace":  # of Eclipse
        (at / ".metadata" / ".plugins").mkdir(parents=True)
        (at / "thesis.tex").write_text("precious")
    elif kind == "other .metadata":
        at.mkdir(parents=True)
        (at / ".metadata").write_text("title: precious. The end.")
        (at / "thesis.tex").write_text("precious")
    elif kind == "run":
        async with Checkpointer(at) as checkpoints:
            await checkpoints.save(STATE, step=1)
    elif kind == "file":
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text("precious")
    elif kind == "link":
        at.parent.mkdir(parents=True, exist_ok=True)
        await sidestream.save(STATE, at.parent / "beside")
        at.symlink_to("beside")


LAID: dict[str, Found] = {
    "nothing": "nothing",
    "empty": "empty",
    "checkpoint": "checkpoint",
    "stock": "stock",
    "export": "export",
    "export in parts": "export",
    "model": "safetensors",
    "one file of a model": "safetensors",
    "links to a model": "safetensors",
    "workspace": "directory",
    "other .metadata": "directory",
    "run": "directory",
    "file": "file",
    "link": "link",
}


async def overwrite(at: Path) -> None:
    await sidestream.save(STATE, at, overwrite=True)


async def overwrite_through_dcp(at: Path) -> None:
    dcp.save(STATE, storage_writer=sidestream.dcp.StorageWriter(at, overwrite=True), no_dist=True)


async def create(at: Path) -> None:
    await sidestream.save(STATE, at)


async def copy(at: Path) -> None:
    await sidestream.save(STATE, at.parent / "source")
    await sidestream.copy(at.parent / "source", at)


async def convert_to_a_file(at: Path) -> None:
    await sidestream.save(STATE, at.parent / "source")
    await sidestream.convert(at.parent / "source", at, format="torch")


async def export_a_step(at: Path) -> None:
    async with Checkpointer(at.parent / "run", export=HF(at.parent / "step-{step}")) as checkpoints:
        pending = checkpoints.async_save(STATE, step=1)
        await pending
        await pending.exports[0]


async def prune_exports(at: Path) -> None:
    async with Checkpointer(at.parent / "run", export=HF(at.parent / "step-{step}"), exports_keep=1) as checkpoints:
        await checkpoints.save(STATE, step=2)


async def retention(at: Path) -> None:
    async with Checkpointer(at.parent, keep=KeepLast(1)) as checkpoints:
        await checkpoints.save(STATE, step=2)
        await checkpoints.prune()


USES: list[tuple[Callable[[Path], Any], Use]] = [
    (create, "create"),
    (copy, "create"),
    (convert_to_a_file, "create file"),
    (overwrite, "overwrite"),
    (overwrite_through_dcp, "overwrite"),
    (export_a_step, "export"),
    (sidestream.remove, "remove"),
    (retention, "retention"),
    (prune_exports, "prune"),
]


def content(at: Path) -> object:
    if at.is_symlink() or not at.exists():
        return at.is_symlink()
    files = [at] if at.is_file() else [one for one in at.rglob("*") if one.is_file() and ".leases" not in one.parts]
    return {str(one): one.read_bytes() for one in files}


@pytest.mark.parametrize(("do", "use"), USES, ids=[do.__name__ for do, _ in USES])
@pytest.mark.parametrize("laid", LAID)
async def test_nothing_but_what_is_meant_is_replaced_or_deleted(
    laid: str, do: Callable[[Path], Any], use: Use, tmp_path: Path
) -> None:
    at = tmp_path / "root" / "step-1"
    await put(laid, at)
    before = content(at)
    refused = refusal(LAID[laid], use, at)
    if use in ("retention", "prune"):  # they choose what they delete, and pass over everything else
        await do(at)
        assert at.exists() == (refused is not None and laid != "nothing")
        if at.exists():
            assert content(at) == before
    elif refused is None:
        await do(at)
        assert content(at) != before or laid == "nothing"
    else:
        with pytest.raises((CheckpointExistsError, CheckpointNotFoundError, StorageError, dcp.CheckpointException)):
            await do(at)
        assert content(at) == before
    hidden = [one.name for one in at.parent.glob("*") if one.name.startswith(".") and one.name != ".leases"]
    assert hidden == []


async def test_the_ways_out_of_the_errors_work(tmp_path: Path) -> None:
    await put("export", tmp_path / "hf")
    with pytest.raises(CheckpointExistsError, match=r"an export.*remove\(\) the export"):
        await sidestream.save(STATE, tmp_path / "hf", overwrite=True)
    await sidestream.remove(tmp_path / "hf")
    await sidestream.save(STATE, tmp_path / "hf", overwrite=True)
    with pytest.raises(CheckpointExistsError, match="pass overwrite=True"):
        await sidestream.save(STATE, tmp_path / "hf")
    with pytest.raises(CheckpointExistsError, match=r"a checkpoint.*remove\(\) the checkpoint"):
        async with Checkpointer(tmp_path / "run", export=HF(tmp_path / "{step}")) as checkpoints:
            (tmp_path / "hf").rename(tmp_path / "1")
            await checkpoints.async_save(STATE, step=1).exports[0]
    await sidestream.remove(tmp_path / "1")


OBJECTS = "memory://uses"


@pytest.mark.parametrize("laid", ["checkpoint", "stock", "export", "export in parts", "model", "other .metadata"])
@pytest.mark.parametrize("use", ["create", "export", "remove", "prune", "retention"])
async def test_on_object_storage(laid: str, use: Use, tmp_path: Path) -> None:
    """``memory://`` has no conditional puts, so there nothing is overwritten."""
    files = fsspec.filesystem("memory")
    run = f"{OBJECTS}/{tmp_path.name}"
    await put(laid, tmp_path / "step-1")
    files.put(str(tmp_path / "step-1"), f"{run}/step-1", recursive=True)
    before = {path: files.cat_file(path) for path in files.find(f"{run}/step-1")}
    refused = refusal(LAID[laid], use, run)
    threads = sidestream.SaveOptions(writer="thread")
    if use == "create":
        with pytest.raises(CheckpointExistsError, match="is not empty"):
            await sidestream.save(STATE, f"{run}/step-1", options=threads)
    elif use == "export":
        async with Checkpointer(tmp_path / "run", export=HF(f"{run}/step-{{step}}"), save=threads) as checkpoints:
            pending = checkpoints.async_save(STATE, step=1)
            with nullcontext() if refused is None else pytest.raises(CheckpointExistsError, match="was not replaced"):
                await pending.exports[0]
    elif use == "remove":
        try:
            await sidestream.remove(f"{run}/step-1")
        except CheckpointNotFoundError:
            assert refused is not None
    elif use == "retention":
        async with Checkpointer(run, keep=KeepLast(1), save=threads) as checkpoints:
            await checkpoints.save(STATE, step=2)
            await checkpoints.prune()
    else:
        export = HF(f"{run}/step-{{step}}")
        async with Checkpointer(tmp_path / "run", export=export, exports_keep=1, save=threads) as checkpoints:
            await checkpoints.save(STATE, step=2)
    left = {path: files.cat_file(path) for path in files.find(f"{run}/step-1")}
    deleted = use in ("remove", "prune", "retention") and refused is None
    if use == "export" and refused is None:
        assert list(left) == [path for path in left if path.endswith("/model.safetensors")] != list(before)
    else:
        assert left == ({} if deleted else before)


def test_the_page_has_the_same_answers() -> None:
    """The table says for each pair whether it is allowed."""
    section = PAGE.read_text().partition("### What may be replaced or removed")[2].partition("\n#")[0]
    head, _, *rows = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *rows)]
    uses: list[Use] = ["create", "overwrite", "export", "remove", "retention", "prune"]
    kinds: list[Found] = [
        "nothing", "empty", "checkpoint", "stock", "export", "safetensors", "directory", "file", "link",
    ]  # fmt: skip
    assert len(cells[0]) == 1 + len(uses)
    assert len(cells) == 1 + len(kinds)
    for found, (_, *answers) in zip(kinds, cells[1:], strict=True):
        for use, answer in zip(uses, answers, strict=True):
            assert (answer == "yes") == (refusal(found, use, "x") is None), (found, use)


@pytest.mark.parametrize("use", get_args(Use))
@pytest.mark.parametrize("found", get_args(Found))
def test_every_refusal_says_what_is_there_and_a_way_out(found: Found, use: Use) -> None:
    text = refusal(found, use, "there")
    if text is not None and (found, use) != ("nothing", "collect"):
        assert re.fullmatch(r"there (is|has|already) .+: .+", text), text


async def test_a_stamp_is_what_safetensors_and_others_ignore(tmp_path: Path) -> None:
    await put("export", tmp_path / "hf")
    assert set(safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")) == {"a", "b"}
    opened = await sidestream.open_checkpoint(tmp_path / "hf")
    assert set(await opened.state_dict()) == {"a", "b"}
