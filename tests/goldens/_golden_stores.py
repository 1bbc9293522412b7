"""Object stores: what each operation leaves in a bucket of an S3 server, and in which order it becomes visible and
goes, also where the server misbehaves. What is read, looked for and tried again is free.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _golden_states import counted
from _golden_table import Table, by_folder
from _places import Place, s3_place
from _s3_server import Fault, Request, S3Server, serving
from keywords import for_load, for_run, for_save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import sidestream
from sidestream import KeepLast
from sidestream.dcp import StorageWriter

LARGE = {"large": torch.arange(3 << 20, dtype=torch.float32), "step": 7}
SMALL = {"w": counted(3, 4), "step": 7}
ENGINES = ("obstore", "fsspec")
_SECONDS = re.compile(r"(?<=\.read)\d+|(?<=\.delete)\d+")  # a lease names how long it holds


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(item) if isinstance(item, torch.Tensor) else 0 for key, item in state.items()}


def steps(log: list[Request]) -> list[str]:
    """What ``log`` changes. What others see, a ``.metadata`` or a single file, and leases have their place, and so has
    the first look at a commit before something is deleted; other files are written or deleted between these in any
    order."""
    lines: list[str] = []
    group: set[tuple[str, str]] = set()
    committed: set[str] = set()
    for request in log:
        if request.kind in ("get", "head") and request.key in committed:
            committed.discard(request.key)
            lines += [*_sorted(group), f"read back {request.key}"]
            group = set()
        for verb, key in _changes(request):
            if key.rpartition("/")[2].startswith(("__", "manifest-")):
                group.add((verb, key))
                continue
            lines += [*_sorted(group), f"{verb} {_SECONDS.sub('', key)}"]
            group = set()
            if verb in ("create", "replace"):
                committed.add(key)
    lines += _sorted(group)
    deletes = [at for at, line in enumerate(lines) if line.startswith("delete ")]
    lines = [line for at, line in enumerate(lines) if not line.startswith("read back") or deletes[-1:] > [at]]
    return [line for line, _ in groupby(lines)]


def _changes(request: Request) -> list[tuple[str, str]]:
    """What a request does to which keys."""
    if request.kind in ("get", "head", "list", "uploads", "begin", "part", "abort") or "/clock-" in request.key:
        return []
    if request.kind == "delete_many":
        return [("delete", key) for key in request.keys if "/clock-" not in key]
    payload = request.kind in ("put", "complete") or request.key.rpartition("/")[2].startswith(("__", "manifest-"))
    verb = "write" if payload and request.kind != "delete" else request.kind
    return [(verb, request.key)]


def _sorted(group: set[tuple[str, str]]) -> list[str]:
    verbs = sorted({verb for verb, _ in group}, reverse=True)
    lines = {verb: by_folder(key for one, key in group if one == verb) for verb in verbs}
    return [f"{verb} {folder}: {names}" for verb, folders in lines.items() for folder, names in folders.items()]


class Stores:
    def __init__(self, table: Table, server: S3Server, engine: str) -> None:
        self.table, self.server, self.engine = table, server, engine

    async def tries(self, name: str, call: Callable[[], Any]) -> None:
        """Record a call with what it changes, and what is there afterwards."""
        self.server.log.clear()
        name = f"{self.engine}: {name}"
        await self.table.tries(name, call)
        self.server.fault = lambda request: None
        text = self.table.text
        told = {
            "steps": [text(line) for line in steps(list(self.server.log))],
            "objects": by_folder(text(key) for key in self.server.objects),
            "uploads": len(self.server.uploads),
        }
        self.table.entries[name] |= {what: found for what, found in told.items() if found}

    def fresh(self, **changes: Any) -> Place:
        self.server.reset()
        return s3_place(self.server, self.engine, **changes)


async def stores(table: Table) -> None:
    with serving() as server:
        for engine in ENGINES:
            one = Stores(table, server, engine)
            await _good(one)
            await _faults(one)
            await _other_writers(one)


async def _good(stores: Stores) -> None:
    place = stores.fresh()
    options = place.keywords
    url = place.url()
    await stores.tries("save", lambda: sidestream.save(SMALL, url, **for_save(**options)))
    await stores.tries("save, the target is there", lambda: sidestream.save(SMALL, url, **for_save(**options)))
    await stores.tries(
        "save, an object", lambda: sidestream.save({"a": object()}, place.url("other"), **for_save(**options))
    )
    await stores.tries("load", lambda: sidestream.load(_blank(SMALL), url, **for_load(**options)))
    await stores.tries("load, nothing there", lambda: sidestream.load({}, place.url("none"), **for_load(**options)))
    await stores.tries("verify", lambda: sidestream.verify(url, **options))
    copied = {"target_storage": options["storage"], **options}
    await stores.tries("copy", lambda: sidestream.copy(url, place.url("copy"), **copied))
    await stores.tries("convert", lambda: sidestream.convert(url, place.url("m.pt"), **copied))
    place = stores.fresh()
    await stores.tries("save, several parts", lambda: sidestream.save(LARGE, place.url(), **for_save(**place.keywords)))
    place = stores.fresh()
    await stores.tries("Checkpointer, save", lambda: _run_save(place, 1))
    await stores.tries("Checkpointer, restore", lambda: _run_restore(place))
    await stores.tries("Checkpointer, save and prune", lambda: _run_save(place, 2))


async def _run_save(place: Place, step: int, state: dict[str, Any] = SMALL) -> Any:
    async with sidestream.Checkpointer(place.base, keep=KeepLast(1), **for_run(**place.keywords)) as checkpoints:
        return await checkpoints.save(state, step=step)


async def _run_restore(place: Place) -> Any:
    async with sidestream.Checkpointer(place.base, **for_run(**place.keywords)) as checkpoints:
        return [await checkpoints.restore(_blank(SMALL)), await checkpoints.steps()]


async def _faults(stores: Stores) -> None:
    once: tuple[tuple[str, Fault], ...] = (
        ("list", 503), ("put", "lose"), ("create", 409), ("create", 503), ("create", "lose"),
    )  # fmt: skip
    for kind, fault in once:
        place = stores.fresh()
        stores.server.once(kind, fault, key="run/ckpt")
        name = f"save, {fault} once at {kind}"
        await stores.tries(name, lambda p=place: sidestream.save(SMALL, p.url(), **for_save(**p.keywords)))
    large: tuple[tuple[str, Fault], ...] = (("begin", "lose"), ("part", 503), ("complete", "lose"))
    for kind, fault in large:
        place = stores.fresh(concurrency=1)
        stores.server.once(kind, fault, key="run/ckpt")
        name = f"save, several parts, {fault} once at {kind}"
        await stores.tries(name, lambda p=place: sidestream.save(LARGE, p.url(), **for_save(**p.keywords)))
    for kind in ("put", "create"):
        for fault in (403, 500, "reset"):
            if fault == "reset" and stores.engine == "fsspec":
                continue  # its client words this in two ways
            place = stores.fresh(retries=1)
            stores.server.always(kind, fault)
            name = f"save, {fault} at every {kind}"
            await stores.tries(name, lambda p=place: sidestream.save(SMALL, p.url(), **for_save(**p.keywords)))
    for kind in ("part", "complete"):
        place = stores.fresh(retries=1, concurrency=1)
        stores.server.always(kind, 500)
        name = f"save, several parts, 500 at every {kind}"
        await stores.tries(name, lambda p=place: sidestream.save(LARGE, p.url(), **for_save(**p.keywords)))
    for fault in (500, "truncate", 403):
        place = stores.fresh(retries=1)
        await sidestream.save(SMALL, place.url(), **for_save(**place.keywords))
        stores.server.once("get", fault, key=".distcp")
        name = f"load, {fault} once at get"
        await stores.tries(name, lambda p=place: sidestream.load(_blank(SMALL), p.url(), **for_load(**p.keywords)))
    place = stores.fresh()
    await stores.tries("save, cancelled at a put", lambda: _cancelled(stores.server, place))


class _Raising(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise ArithmeticError("the data is bad")


async def _other_writers(stores: Stores) -> None:
    """The same storage, by the other ways to save."""
    ways: dict[str, dict[str, Any]] = {"streaming": {"streaming": True}}
    if stores.engine == "obstore":
        ways["writer process"] = {"writer": "process"}
    for name, options in ways.items():
        place = stores.fresh()
        await stores.tries(
            f"save, {name}", lambda p=place, o=options: sidestream.save(SMALL, p.url(), **for_save(**p.keywords, **o))
        )
    place = stores.fresh()
    await stores.tries("StorageWriter", lambda: _in_dcp(place))
    await stores.tries("StorageWriter, the target is there", lambda: _in_dcp(place))
    await stores.tries("StorageWriter, overwrite", lambda: _in_dcp(place, overwrite=True))
    await stores.tries("StorageWriter, a planner that raises", lambda: _in_dcp(place, "other", _Raising()))
    failing = stores.fresh(retries=1)
    stores.server.always("create", 500)
    await stores.tries("StorageWriter, 500 at every create", lambda: _in_dcp(failing))
    place = stores.fresh()
    await stores.tries("Checkpointer, a save that fails", lambda: _run_save(place, 1, {"a": object()}))


async def _in_dcp(place: Place, name: str = "ckpt", planner: Any = None, **options: Any) -> None:
    def work() -> None:
        with StorageWriter(place.url(name), **place.keywords, **options) as writer:
            dcp.save(dict(SMALL), storage_writer=writer, planner=planner, no_dist=True)

    await asyncio.to_thread(work)


async def _cancelled(server: S3Server, place: Place) -> Any:
    server.once("put", "stall", key="run/ckpt")
    pending = sidestream.async_save(SMALL, place.url(), **for_save(**place.keywords))
    await asyncio.to_thread(server.wait_for, "put")
    pending.cancel()
    await asyncio.wait_for(pending.ended(), 60)
    return pending.outcome
