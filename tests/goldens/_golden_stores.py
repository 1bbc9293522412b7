"""Object stores: the requests that each operation sends to an S3 server, also where the server misbehaves.

Requests that decide what others see keep their place: those for a ``.metadata`` or a single file, and the ends of
uploads. All others may be sent at the same time as their neighbours and are sorted between these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _golden_states import counted
from _golden_table import Table
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


def _blank(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(item) if isinstance(item, torch.Tensor) else 0 for key, item in state.items()}


def _decides(request: Request) -> bool:
    if request.kind in ("complete", "abort", "delete_many"):
        return True
    parts = request.key.rpartition("/")[2].startswith(("__", "manifest-")) or ".leases" in request.key
    return request.kind in ("create", "put", "delete") and not parts


def canonical(log: list[Request]) -> list[str]:
    lines: list[str] = []
    together: list[str] = []
    for request in log:
        end = "{end}" if request.key.endswith(".metadata") else request.asked and request.asked[1]
        asked = "" if request.asked is None else f" {request.asked[0]}-{end}"
        line = f"{request.kind} {request.key}{asked}"
        if _decides(request):
            lines += [*sorted(together), line]
            together = []
        else:
            together.append(line)
    return [*lines, *sorted(together)]


class Stores:
    def __init__(self, table: Table, server: S3Server, engine: str) -> None:
        self.table, self.server, self.engine = table, server, engine

    async def tries(self, name: str, call: Callable[[], Any]) -> None:
        """Record a call with the requests that it sends, and the objects that are there afterwards."""
        self.server.log.clear()
        name = f"{self.engine}: {name}"
        await self.table.tries(name, call)
        self.server.fault = lambda request: None
        text = self.table.text
        lines = [text(line) for line in canonical(list(self.server.log))]
        if name.endswith(
            ("every part", "at a part")
        ):  # how many are on their way when the first one fails depends on the client
            lines = [line for line in lines if not line.startswith("part ")]
        self.table.entries[name]["requests"] = lines
        sizes = {key: len(content) for key, content in self.server.objects.items()}
        objects = {text(key): "{size}" if key.endswith(".metadata") else size for key, size in sizes.items()}
        self.table.entries[name]["objects"] = dict(sorted(objects.items()))
        self.table.entries[name]["uploads"] = len(self.server.uploads)

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
    await stores.tries("load, a mismatch", lambda: sidestream.load({"w": torch.zeros(1)}, url, **for_load(**options)))
    await stores.tries("open_checkpoint", lambda: _names(url, options))
    await stores.tries("verify", lambda: sidestream.verify(url, **options))
    copied = {"target_storage": options["storage"], **options}
    await stores.tries("copy", lambda: sidestream.copy(url, place.url("copy"), **copied))
    await stores.tries("convert", lambda: sidestream.convert(url, place.url("m.pt"), **copied))
    place = stores.fresh()
    await stores.tries("save, several parts", lambda: sidestream.save(LARGE, place.url(), **for_save(**place.keywords)))
    await stores.tries(
        "load, several parts", lambda: sidestream.load(_blank(LARGE), place.url(), **for_load(**place.keywords))
    )
    place = stores.fresh()
    await stores.tries("Checkpointer, save", lambda: _run_save(place, 1))
    await stores.tries("Checkpointer, restore", lambda: _run_restore(place))
    await stores.tries("Checkpointer, save and prune", lambda: _run_save(place, 2))


async def _names(url: str, options: dict[str, Any]) -> list[str]:
    return list(await sidestream.open_checkpoint(url, **options))


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
    ways: dict[str, dict[str, Any]] = {
        "streaming": {"streaming": True},
        "metadata and digest": {"metadata": {"loss": 0.5}, "digest": "blake3"},
    }
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
