"""``sidestream.blocking``, ``sidestream.dcp`` inside stock calls, and the command line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _golden_checkpoints import CHECKPOINTS
from _golden_states import blank, counted, small
from _golden_table import Table
from damages import DAMAGE
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import sidestream
from sidestream.dcp import StorageReader, StorageWriter


async def blocking(table: Table) -> None:
    """The same verbs in a thread without a loop."""
    folder = table.folder

    def template() -> dict[str, Any]:
        return {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3).double()}, "step": 0}

    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: sidestream.blocking.save(small(), folder / "c"),
        "save, the target is there": lambda: sidestream.blocking.save(small(), folder / "c"),
        "save, an object": lambda: sidestream.blocking.save({"a": object()}, folder / "d"),
        "async_save": lambda: sidestream.blocking.async_save(small(), folder / "a").result(),
        "async_save, staged": lambda: sidestream.blocking.async_save(small(), folder / "s").staged.result(),
        "async_save, an object": lambda: sidestream.blocking.async_save({"a": object()}, folder / "d").result(),
        "async_save, an object, staged": lambda: _staged_of_refused(folder / "d"),
        "load": lambda: sidestream.blocking.load(template(), folder / "c"),
        "load, a mismatch": lambda: sidestream.blocking.load({"v": torch.zeros(1)}, folder / "c"),
        "load, nothing there": lambda: sidestream.blocking.load({}, folder / "none"),
        "open_checkpoint": lambda: list(sidestream.blocking.open_checkpoint(folder / "c")),
        "tensor": lambda: sidestream.blocking.open_checkpoint(folder / "c").tensor("model.w"),
        "value": lambda: sidestream.blocking.open_checkpoint(folder / "c").value("step"),
        "state_dict": lambda: sidestream.blocking.open_checkpoint(folder / "c").state_dict(),
        "verify": lambda: sidestream.blocking.verify(folder / "c"),
        "copy": lambda: sidestream.blocking.copy(folder / "c", folder / "copy"),
        "convert": lambda: sidestream.blocking.convert(folder / "c", folder / "m.pt"),
        "Checkpointer": lambda: _blocking_run(folder / "run"),
        "Checkpointer, closed": lambda: _closed(folder / "run"),
        "Checkpointer, a failed save that nobody awaited": lambda: _failed_unheard(folder / "unheard"),
        "Checkpointer, the body raises": lambda: _body_raises(folder / "raises"),
    }
    for name, call in calls.items():
        await table.tries(name, asyncio.to_thread(call))
    for name in ("save", "load", "Checkpointer"):
        await table.tries(f"on a loop: {name}", calls[name])


def _blocking_run(run: Path) -> Any:
    with sidestream.blocking.Checkpointer(run) as checkpoints:
        saved = checkpoints.save(small(), step=1, metadata={"loss": 1.0})
        told = [checkpoints.steps(), checkpoints.latest(), checkpoints.read_metadata(), checkpoints.verify().ok]
        return [saved, *told, checkpoints.restore(blank(small())), checkpoints.prune(dry_run=True)]


def _staged_of_refused(path: Path) -> None:
    pending = sidestream.blocking.async_save({"a": object()}, path)
    try:
        pending.staged.result()
    finally:
        with suppress(TypeError):  # otherwise it is logged that nobody has retrieved it, whenever garbage is collected
            pending.result()


def _failed_unheard(run: Path) -> None:
    with sidestream.blocking.Checkpointer(run) as checkpoints:
        checkpoints.async_save({"a": object()}, step=1)


def _body_raises(run: Path) -> None:
    with sidestream.blocking.Checkpointer(run) as checkpoints:
        checkpoints.save(small(), step=1)
        raise KeyError("the body")


def _closed(run: Path) -> Any:
    with sidestream.blocking.Checkpointer(run) as checkpoints:
        pass
    return checkpoints.steps()


class _Failing(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ArithmeticError("the data is bad")


async def storages(table: Table) -> None:
    """``StorageWriter`` and ``StorageReader`` in ``dcp.save`` and ``dcp.load``, in one process."""
    folder = table.folder

    def save(state: dict[str, Any], writer: StorageWriter, **options: Any) -> None:
        dcp.save(state, storage_writer=writer, no_dist=True, **options)

    def load(state: dict[str, Any], reader: StorageReader) -> dict[str, Any]:
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state

    (folder / "full").mkdir()
    (folder / "full" / "a").write_text("mine")
    damaged = folder / "damaged"
    shutil.copytree(CHECKPOINTS / "storage-writer", damaged)
    DAMAGE["shard altered"](damaged)
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: save(small(), StorageWriter(folder / "c")),
        "save, the target is there": lambda: save(small(), StorageWriter(folder / "c")),
        "save, overwrite": lambda: save(small(1.0), StorageWriter(folder / "c", overwrite=True)),
        "save, overwrite a strange directory": lambda: save(small(), StorageWriter(folder / "full", overwrite=True)),
        "save, a planner that raises": lambda: save(small(), StorageWriter(folder / "f"), planner=_Failing()),
        "save, an object": lambda: save({"a": {1: object()}}, StorageWriter(folder / "o")),
        "load": lambda: load(blank(small()), StorageReader(folder / "c")),
        "load, stock": lambda: load({"bf16": torch.zeros(20, 3).bfloat16()}, StorageReader(CHECKPOINTS / "stock")),
        "load, a missing key": lambda: load({"v": torch.zeros(1)}, StorageReader(folder / "c")),
        "load, a shape": lambda: load({"model": {"w": torch.zeros(1)}}, StorageReader(folder / "c")),
        "load, nothing there": lambda: load({}, StorageReader(folder / "none")),
        "load, damaged": lambda: load({"bf16": torch.zeros(20, 3).bfloat16()}, StorageReader(damaged)),
        "load, an object": lambda: load({"a": {1: None}}, StorageReader(folder / "o")),
        "writer, durability": lambda: StorageWriter(folder / "x", durability="sync"),  # type: ignore[arg-type]
        "writer, timeout_s": lambda: StorageWriter(folder / "x", timeout_s=0),
        "writer, saver": lambda: StorageWriter(folder / "x", writer="fork"),  # type: ignore[arg-type]
        "writer, url": lambda: save(small(), StorageWriter("s3://bucket")),
        "reader, verify": lambda: StorageReader(folder / "x", verify="no"),  # type: ignore[arg-type]
        "reader, url": lambda: load({}, StorageReader("")),
    }
    for name, call in calls.items():
        await table.tries(name, asyncio.to_thread(call))
    table.note("left behind", sorted(path.name for path in folder.iterdir()))


async def command_line(table: Table) -> None:
    """What the commands name or print as JSON, and their exit codes. Usage errors are those of typer: left out."""
    folder = table.folder
    run = folder / "run"
    async with sidestream.Checkpointer(run) as checkpoints:
        for step in (1, 2):
            state = {"model": {"w": counted(20, 30) * step, "b": torch.ones(3)}, "step": step}
            await checkpoints.save(state, step=step, metadata={"loss": 1.0 / step})
    await sidestream.save({"odd [name]": torch.ones(2), "v": (1, 2)}, folder / "odd")
    shutil.copytree(run / "step-2", folder / "broken")
    DAMAGE["shard altered"](folder / "broken")
    first, second = str(run / "step-1"), str(run / "step-2")
    (folder / "options.json").write_text("[1]")
    commands = {
        "ls": ["ls", str(run)],
        "ls --json": ["ls", str(run), "--json"],
        "ls, nothing there": ["ls", str(folder / "none")],
        "info": ["info", first],
        "info, a pattern": ["info", first, "model.*"],
        "info --json": ["info", first, "--json"],
        "info, stock": ["info", str(CHECKPOINTS / "stock")],
        "info, safetensors": ["info", str(CHECKPOINTS / "hf")],
        "info, torch.save": ["info", str(CHECKPOINTS / "torch-save.pt")],
        "info, nothing there": ["info", str(folder / "none")],
        "info --json, nothing there": ["info", str(folder / "none"), "--json"],
        "verify": ["verify", first],
        "verify --json": ["verify", str(CHECKPOINTS / "metadata"), "--json"],
        "verify, damaged": ["verify", str(folder / "broken")],
        "verify, a key": ["verify", str(CHECKPOINTS / "signed"), "--key", str(CHECKPOINTS / "signed.pub")],
        "verify, not signed": ["verify", first, "--key", str(CHECKPOINTS / "signed.pub")],
        "verify, a run": ["verify", str(run)],
        "diff": ["diff", first, second],
        "diff --json": ["diff", first, second, "--json"],
        "diff, none": ["diff", first, first],
        "convert": ["convert", first, str(folder / "m.pt")],
        "convert --json": ["convert", first, str(folder / "n.pt"), "--json"],
        "convert, values": ["convert", first, str(folder / "m.safetensors")],
        "convert, safetensors": ["convert", first, str(folder / "m.safetensors"), "--select", "model.*"],
        "convert, a dtype": ["convert", first, str(folder / "o.pt"), "--dtype", "float7"],
        "convert, a rename": ["convert", first, str(folder / "o.pt"), "--rename", "a"],
        "convert, the target is there": ["convert", first, str(folder / "m.pt")],
        "copy": ["copy", first, str(folder / "copy")],
        "copy, the target is there": ["copy", first, str(folder / "copy")],
        "copy, damaged": ["copy", str(folder / "broken"), str(folder / "copy2")],
        "prune, no policy": ["prune", str(run)],
        "prune, a dry run": ["prune", str(run), "--keep-last", "1", "--dry-run"],
        "prune, best": ["prune", str(run), "--keep-best", "loss=1", "--dry-run"],
        "prune, best of letters": ["prune", str(run), "--keep-best", "loss=a", "--dry-run"],
        "prune": ["prune", str(run), "--keep-last", "1"],
        "prune, nothing left to do": ["prune", str(run), "--keep-last", "1"],
        "a storage option": ["info", first, "--storage-option", "a"],
        "a storage option from no file": ["info", first, "--storage-option", f"@{folder / 'none'}"],
        "a storage option from a list": ["info", first, "--storage-option", f"@{folder / 'options.json'}"],
    }
    for (name, _), answer in zip(commands.items(), await _answers(list(commands.values())), strict=True):
        code, output, errors = answer
        told = {"output": _printed(table, output), "errors": table.names(errors)}
        table.entries[name] = {"exit code": code} | {stream: found for stream, found in told.items() if found}


def _printed(table: Table, output: str) -> Any:
    """What ``--json`` prints whole; of other lines, what they name."""
    if not output.startswith(("[", "{")):
        return table.names(output)
    printed = json.loads(output)
    for one in printed if isinstance(printed, list) else [printed]:
        one.pop("save_id", None)
        if "message" in one:
            one["message"] = table.names(one["message"])
    return table.plain(printed)


async def _answers(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("FORCE_", "TTY_"))},
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "NO_COLOR": "1",
        "TERM": "dumb",
        "COLUMNS": "2000",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("_golden_cli_driver.py")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(300):
        output, _ = await process.communicate(json.dumps(commands).encode())
    answers: list[tuple[int, str, str]] = json.loads(output)
    return answers
