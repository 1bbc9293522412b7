"""``load`` and ``open_checkpoint``: targets that do not fit, damage, files of other programs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _golden_checkpoints import CHECKPOINTS
from _golden_states import blank, counted
from _golden_table import Table
from damages import DAMAGE
from keywords import for_load

import sidestream

STATE = {"model": {"w": counted(3, 4), "b": counted(3)}, "step": 7, "extra": {"k": "v"}}


def template(**changes: Any) -> dict[str, Any]:
    return {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, "step": 0} | changes


class Picky:
    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.zeros(3, 4), "b": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("not today")


async def load(table: Table) -> None:
    folder = table.folder
    saved = folder / "saved"
    await sidestream.save(STATE, saved)
    await _targets(table, saved)
    for name, options in {
        "strict": {"strict": {"loosely"}},
        "strict=False": {"strict": False},
        "verify": {"verify": "sometimes"},
        "trust": {"trust": True},
        "timeout_s": {"timeout_s": 0},
        "allow": {"safe_globals": [3]},
    }.items():
        await table.tries(f"option: {name}", lambda o=options: sidestream.load(template(), saved, **for_load(**o)))
    for url in ("s3://bucket", "nowhere://bucket/run", "", "/", "a\0b", "abc://abc.abc"):
        await table.tries(f"url: {url!r}", lambda url=url: sidestream.load({}, url))
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("text")
    for name in ("no/c", "empty", "notes.txt", "notes.txt/c"):
        await table.tries(f"nothing there: {name}", sidestream.load(template(), folder / name))
    for name, damage in DAMAGE.items():
        copy = folder / "damaged" / name
        shutil.copytree(saved, copy)
        damage(copy)
        await table.tries(f"damage: {name}", sidestream.load(template(), copy))
        await table.tries(
            f"damage, atomic: {name}", sidestream.load(template(), copy, options=sidestream.LoadOptions(atomic=True))
        )
    for name, options in {
        "good": {},
        "good, atomic": {"atomic": True},
        "good, unverified": {"verify": "manifest"},
    }.items():
        await table.tries(name, lambda o=options: sidestream.load(template(), saved, **for_load(**o)))
    for name in ("parts", "stock", "stock-zstd", "stock-safetensors", "hf", "torch-save.pt", "run/step-2.g2"):
        content = await (await sidestream.open_checkpoint(CHECKPOINTS / name)).state_dict()
        await table.tries(f"good, {name}", sidestream.load(blank(content), CHECKPOINTS / name))
    await _foreign(table)


async def _targets(table: Table, saved: Path) -> None:
    wide = {"w": torch.zeros(3, 4), "b": torch.zeros(3), "v": torch.zeros(1)}
    linear = torch.nn.Linear(4, 3)
    targets: dict[str, Callable[[], Any]] = {
        "missing": lambda: template(model=dict(wide)),
        "unexpected": lambda: template(model={"w": torch.zeros(3, 4)}),
        "shape": lambda: template(model={"w": torch.zeros(4, 3), "b": torch.zeros(3)}),
        "dtype": lambda: template(model={"w": torch.zeros(3, 4).double(), "b": torch.zeros(3)}),
        "tensor for a value": lambda: template(step=torch.zeros(1)),
        "value for a tensor": lambda: template(model={"w": 3, "b": torch.zeros(3)}),
        "everything": lambda: {"model": {"w": torch.zeros(1), "v": torch.zeros(1)}, "more": 1},
        "expanded": lambda: template(model={"w": torch.zeros(1, 4).expand(3, 4), "b": torch.zeros(3)}),
        "meta": lambda: template(model={"w": torch.zeros(3, 4, device="meta"), "b": torch.zeros(3)}),
        "frozen": lambda: {"extra": MappingProxyType({"k": 0})},
        "picky": lambda: {"model": Picky()},
        "module": lambda: {"model": linear},
        "lazy module": lambda: {"model": torch.nn.LazyLinear(3)},
        "an object that was not saved": lambda: {"optimizer": torch.optim.SGD(linear.parameters())},
        "shared memory": lambda: _tied(),
        "requires grad": lambda: template(model={"w": torch.zeros(3, 4, requires_grad=True) * 1, "b": torch.zeros(3)}),
        "no mapping": lambda: [torch.zeros(3)],
        "a part": lambda: {"step": 0},
        "nothing": dict,
    }
    for name, make in targets.items():
        await table.tries(f"target: {name}", lambda make=make: sidestream.load(make(), saved))
    loose = {
        "partial": lambda: template(model=dict(wide)),
        "cast": lambda: template(model={"w": torch.zeros(3, 4).double(), "b": torch.zeros(3)}),
        "ignore_unexpected": lambda: template(model={"w": torch.zeros(3, 4)}),
    }
    keywords = {"partial": "allow_missing", "cast": "allow_cast", "ignore_unexpected": "allow_unexpected"}
    for name, make in loose.items():
        await table.tries(
            f"strict: {name}", lambda n=name, make=make: sidestream.load(make(), saved, **{keywords[n]: True})
        )


def _tied() -> dict[str, Any]:
    one = torch.zeros(12)
    return template(model={"w": one.view(3, 4), "b": one[:3]})


async def _foreign(table: Table) -> None:
    """Files of other programs that are refused, or read with ``trust=`` or ``safe_globals=`` only."""
    folder = table.folder / "foreign"
    folder.mkdir()
    dcp.save({"v": timedelta(hours=1)}, storage_writer=dcp.FileSystemWriter(folder / "object"), no_dist=True)
    for name, options in {"data": {}, "pickle": {"trust": "pickle"}, "allowed": {"safe_globals": [timedelta]}}.items():
        await table.tries(
            f"an object, {name}", lambda o=options: sidestream.load({"v": None}, folder / "object", **for_load(**o))
        )
    state = {"w": counted(3, 4)}
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save([1, 2], folder / "list.pt")
    torch.save(torch.nn.Linear(1, 1), folder / "module.pt")
    torch.save(state, folder / "cut.pt")
    raw = (folder / "cut.pt").read_bytes()
    (folder / "cut.pt").write_bytes(raw[:-30])
    (folder / "text.pt").write_text("not a checkpoint\n" * 20)
    (folder / "text.safetensors").write_text("not a checkpoint\n" * 20)
    (folder / "hf").mkdir()
    (folder / "hf" / "model-00001-of-00002.safetensors").write_bytes(
        (CHECKPOINTS / "hf/model.safetensors").read_bytes()
    )
    names = ("old.pth", "list.pt", "module.pt", "cut.pt", "text.pt", "text.safetensors", "hf")
    for name in names:
        await table.tries(f"foreign: {name}", sidestream.load({"w": torch.zeros(3, 4)}, folder / name))
    shutil.copytree(CHECKPOINTS / "stock", folder / "stock")
    (shard,) = (folder / "stock").glob("*.distcp")
    shard.write_bytes(bytes(byte ^ 1 for byte in shard.read_bytes()))
    await table.tries("foreign: altered", sidestream.load({"bf16": torch.zeros(20, 3).bfloat16()}, folder / "stock"))
    shutil.copytree(CHECKPOINTS / "parts", folder / "parts")
    for path in (folder / "parts").glob("__2*"):
        path.unlink()
    await table.tries("a part is missing", sidestream.load({"layer0": torch.zeros(6, 10)}, folder / "parts"))
    (folder / "parts" / "__1.metadata").unlink()
    await table.tries(
        "a marker of a part is missing", sidestream.load({"layer0": torch.zeros(6, 10)}, folder / "parts")
    )
    await table.tries("a run", sidestream.load({}, CHECKPOINTS / "run"))


async def open_checkpoint(table: Table) -> None:
    folder = table.folder
    saved = folder / "saved"
    await sidestream.save(STATE, saved, metadata={"loss": 0.5})
    for name, options in {
        "verify": {"verify": "sometimes"},
        "trust": {"trust": "yes"},
        "timeout_s": {"timeout_s": None},
    }.items():
        await table.tries(f"option: {name}", lambda o=options: sidestream.open_checkpoint(saved, **o))
    await table.tries("nothing there", sidestream.open_checkpoint(folder / "none"))
    checkpoint = await sidestream.open_checkpoint(saved)
    table.note("good", {"names": list(checkpoint), "step": checkpoint.step, "metadata": checkpoint.metadata})
    table.note("infos", {name: checkpoint[name] for name in checkpoint})
    calls: dict[str, Callable[[], Any]] = {
        "tensor": lambda: checkpoint.tensor("model.w"),
        "tensor, rows": lambda: checkpoint.tensor("model.w", rows=slice(1, 3)),
        "tensor, a step": lambda: checkpoint.tensor("model.w", rows=slice(0, 3, 2)),
        "tensor, missing": lambda: checkpoint.tensor("model.v"),
        "tensor, a value": lambda: checkpoint.tensor("step"),
        "tensor, device": lambda: checkpoint.tensor("model.w", device="nowhere"),
        "value": lambda: checkpoint.value("step"),
        "value, a tensor": lambda: checkpoint.value("model.w"),
        "value, missing": lambda: checkpoint.value("steps"),
        "info, a value": lambda: checkpoint.info("step"),
        "info, missing": lambda: checkpoint.info("none"),
        "getitem, missing": lambda: checkpoint["none"],
        "state_dict": lambda: checkpoint.state_dict(),
        "state_dict, mapped": lambda: checkpoint.state_dict(memory="mapped"),
        "state_dict, memory": lambda: checkpoint.state_dict(memory="disk"),
        "verify": lambda: checkpoint.verify(),
    }
    for name, call in calls.items():
        await table.tries(name, call)
    for name, damage in DAMAGE.items():
        copy = folder / "damaged" / name
        shutil.copytree(saved, copy)
        damage(copy)
        await table.tries(f"damage: {name}", _read_all(copy))
    shutil.rmtree(saved)
    for name in ("tensor", "state_dict"):
        await table.tries(f"deleted meanwhile: {name}", calls[name])


async def _read_all(path: Path) -> Any:
    return await (await sidestream.open_checkpoint(path)).state_dict()
