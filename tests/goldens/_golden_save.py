"""``save``, ``async_save``, stagers, and the files that a save writes."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime as dt
import enum
import gc
import hashlib
import io
import shutil
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _golden_states import blocks, counted, small, tensors, training
from _golden_table import Table, fixed
from _golden_users import Holder
from keywords import for_save

import sidestream
import sidestream.blocking

SMALL = small()


@dataclasses.dataclass
class Custom:
    x: int = 1


class Point(NamedTuple):
    x: int = 1


class Color(enum.Enum):
    RED = 1


class Refusing:
    def state_dict(self) -> dict[str, Any]:
        raise KeyError("not today")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoMapping(Refusing):
    def state_dict(self) -> Any:
        return [1]


def looped() -> dict[str, Any]:
    state: dict[str, Any] = {"a": 1}
    state["loop"] = state
    return state


def states() -> dict[str, Callable[[], Any]]:
    """States that cannot be saved."""
    dense = torch.eye(3)
    return {
        "two keys with one name": lambda: {0: 1, "0": 2},
        "a key with a dot": lambda: {"a.b": 1, "a": {"b": 2}},
        "an object": lambda: {"a": {"c": Custom()}},
        "an object in a tuple": lambda: {"a": (1, Custom())},
        "a function": lambda: {"a": lambda: 1},
        "a key that is a tuple": lambda: {("t",): 1},
        "a large tensor in a tuple": lambda: {"a": (torch.zeros(1 << 20),)},
        "a meta tensor": lambda: {"m": torch.empty(1, device="meta")},
        "a sparse tensor": lambda: {"s": dense.to_sparse()},
        "a quantized tensor": lambda: {"q": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8)},
        "a lazy module": lambda: {"m": torch.nn.LazyLinear(3)},
        "a module": lambda: torch.nn.Linear(1, 1),
        "a tensor": lambda: torch.ones(2),
        "a list": lambda: [1, 2],
        "a state that contains itself": looped,
        "a namespace": lambda: {"args": argparse.Namespace(lr=1)},
        "a path": lambda: {"path": Path("a")},
        "a member of an enum": lambda: {"color": Color.RED},
        "a date": lambda: {"when": dt.date(2026, 1, 1)},
        "a named tuple": lambda: {"point": Point()},
        "a deque": lambda: {"deque": deque([1])},
        "a range": lambda: {"range": range(3)},
        "a BytesIO": lambda: {"losses": io.BytesIO(b"abc")},
        "a generator of torch": lambda: {"rng": torch.Generator()},
        "a wide number of numpy": lambda: {"n": np.longdouble(1)},
        "a text of numpy": lambda: {"n": np.array(["a"])},
        "an object that raises": lambda: {"object": Refusing()},
        "an object without a mapping": lambda: {"object": NoMapping()},
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "durability": {"durability": "sync"},
    "timeout_s of 0": {"timeout_s": 0},
    "timeout_s as text": {"timeout_s": "1"},
    "timeout_s without end": {"timeout_s": float("inf")},
    "stager": {"stager": 3},
    "digest": {"digest": "md5"},
    "saver": {"writer": "fork"},
    "metadata with a tensor": {"metadata": {"loss": torch.tensor(1.0)}},
    "metadata that is a list": {"metadata": [1]},
    "process_group": {"process_group": "all"},
    "storage": {"storage": {"retries": 1}},
    "storage and storage_options": {"storage": sidestream.Storage(), "storage_options": {"key": "a"}},
    "storage_options": {"storage_options": {"key": "a"}},
}
URLS = ("s3://bucket", "nowhere://bucket/run", "", "/", "a\0b", "https://example.org/c", "abc://abc.abc")


async def save(table: Table) -> None:
    folder = table.folder
    for name, make in states().items():
        await table.tries(f"state: {name}", lambda make=make: sidestream.save(make(), folder / "deep" / "c"))
        await asyncio.to_thread(shutil.rmtree, folder / "deep" / "c", ignore_errors=True)  # the next state is saved too
    for name, options in OPTIONS.items():
        await table.tries(f"option: {name}", lambda o=options: sidestream.save(SMALL, folder / "c", **for_save(**o)))
    for url in URLS:
        await table.tries(f"url: {url!r}", lambda url=url: sidestream.save(SMALL, url))
    table.note("left behind by all of these", sorted(path.name for path in folder.iterdir()))
    await _targets(table)
    await table.tries("without a loop", asyncio.to_thread(_without_a_loop, folder / "c"))
    await table.tries("streaming=True with a stager", _streaming_with_stager(folder / "c"))
    for name, options in {
        "good": {},
        "good, flushed": {"durability": "flush"},
        "good, streaming": {"streaming": True},
        "good, metadata": {"metadata": {"loss": 0.5}},
        "good, digest": {"digest": "blake3"},
        "good, writer process": {"writer": "process"},
    }.items():
        await table.tries(name, lambda n=name, o=options: sidestream.save(SMALL, folder / n, **for_save(**o)))
    for name, options in {
        "nice": {"nice": -1},
        "io_priority": {"io_priority": "high"},
        "rate": {"max_bytes_per_second": 0},
        "affinity": {"affinity": {-1}},
        "retries": {"retries": -1},
    }.items():
        await table.tries(f"WriterProcess: {name}", lambda o=options: sidestream.WriterProcess(**o))
    for name, options in {
        "engine": {"engine": "boto"},
        "retries": {"retries": -1},
        "part_bytes": {"part_bytes": 1},
        "in_flight": {"concurrency": 0},
    }.items():
        await table.tries(f"StorePolicy: {name}", lambda o=options: sidestream.StorePolicy(**o))
    await _pending(table)
    await _users_code(table)
    await _ends(table)


async def _streaming_with_stager(path: Path) -> None:
    async with sidestream.AsyncStager() as stager:
        await sidestream.save(SMALL, path, stager=stager, options=sidestream.SaveOptions(streaming=True))


async def _targets(table: Table) -> None:
    folder = table.folder
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    (folder / "file").write_text("mine")
    (folder / "empty").mkdir()
    (folder / "link").symlink_to(folder / "full")
    for name in ("full", "file", "link", "empty", "file/c"):
        await table.tries(f"target: {name}", sidestream.save(SMALL, folder / name))
    table.note("targets after that", sorted(path.name for path in folder.iterdir()))


async def _pending(table: Table) -> None:
    folder = table.folder
    pending = sidestream.async_save(SMALL, folder / "pending")
    await table.tries("async_save: staged", pending.staged)
    await table.tries("async_save: saved", _awaited(pending))
    table.note("async_save: outcome", [pending.outcome, pending.done(), pending.progress])
    cancelled = sidestream.async_save(SMALL, folder / "cancelled")
    table.note("async_save: cancel", cancelled.cancel())
    await table.tries("async_save: cancelled before it began", _awaited(cancelled))
    await cancelled.ended()
    table.note("async_save: outcome when cancelled", [cancelled.outcome, (folder / "cancelled").exists()])


async def _awaited(pending: Any) -> Any:
    return await pending


async def _users_code(table: Table) -> None:
    """What a save calls of its user's code, and in which thread."""
    holder = Holder(1.0)
    await sidestream.save({"o": holder, "deep": [{"o": holder}]}, table.folder / "users")
    held = Holder(1.0)
    await asyncio.to_thread(sidestream.blocking.save, {"o": held}, table.folder / "users, blocking")
    table.note("threads of user code", {"object": holder.threads, "blocking, made in another thread": held.threads})


async def _ends(table: Table) -> None:
    """How a save ends for those who hold it, or do not."""
    folder = table.folder / "ends"
    failed = sidestream.async_save({"a": Custom()}, folder / "failed")
    await table.tries("fails: staged", failed.staged)
    for word in ("once", "twice"):
        await table.tries(f"fails: awaited {word}", _awaited(failed))
    table.note("fails: outcome", [failed.outcome, failed.done(), failed.cancel()])
    await table.tries("fails: nobody awaits it", lambda: dropped({"a": Custom()}, folder / "dropped"))
    good = sidestream.async_save(SMALL, folder / "good")
    await good
    table.note("has ended: cancel", [good.cancel(), good.outcome])
    async with sidestream.AsyncStager(budget_bytes=1 << 20) as stager:
        held = await stager.stage({"t": torch.zeros(200_000)})  # the next one waits for memory
        waiting = sidestream.async_save({"t": torch.zeros(200_000)}, folder / "waiting", stager=stager)
        await asyncio.sleep(0)
        table.note("waits for memory: cancel", waiting.cancel())
        await table.tries("waits for memory: staged", waiting.staged)
        await table.tries("waits for memory: cancelled", _awaited(waiting))
        table.note("waits for memory: outcome", waiting.outcome)
        task = asyncio.ensure_future(sidestream.save({"t": torch.zeros(200_000)}, folder / "task", stager=stager))
        await asyncio.sleep(0)
        task.cancel()
        await table.tries("waits for memory: its task is cancelled", task)
        held.release()
        await table.tries("waits for memory: the next one", sidestream.save(SMALL, folder / "next", stager=stager))
    await table.tries("its loop ends before it begins", lambda: asyncio.to_thread(_left_to_a_loop, folder / "loop"))
    table.note("ends: left behind", sorted(path.name for path in folder.iterdir()))


async def dropped(state: dict[str, Any], path: Path) -> None:
    """A failed save that nobody awaits. Its error has been logged when this returns."""
    pending = sidestream.async_save(state, path)
    await pending.ended()
    alive = weakref.ref(pending)
    del pending
    async with asyncio.timeout(30):
        while alive() is not None:  # a task or a thread of the save refers to it for a moment longer
            gc.collect()
            await asyncio.sleep(0.001)


def _without_a_loop(path: Path) -> Any:
    return sidestream.async_save(SMALL, path).result(60).url


def _left_to_a_loop(path: Path) -> Any:
    """What becomes of a save whose loop has been closed. In a thread."""

    async def main() -> Any:
        return sidestream.async_save(SMALL, path)

    pending = asyncio.run(main())
    pending.result(60)
    return [pending.done(), pending.outcome, pending.cancel()]


async def staging(table: Table) -> None:
    """``AsyncStager`` and its options."""
    for name, options in {
        "budget_bytes": {"budget_bytes": 0},
        "when_full": {"when_full": "drop"},
        "mode": {"mode": "fast"},
        "backing": {"backing": "disk"},
        "timeout_s": {"timeout_s": -1},
    }.items():
        await table.tries(f"option: {name}", lambda o=options: sidestream.AsyncStager(**o))
    async with sidestream.AsyncStager(budget_bytes=2 << 20) as stager:
        await table.tries("too large", stager.stage({"t": torch.zeros(1 << 20)}))
        for name, make in states().items():
            if "tensor" in name or "module" in name or "itself" in name:
                await table.tries(f"state: {name}", lambda make=make: stager.stage(make()))
        staged = await table.tries("good", stager.stage({"t": torch.zeros(200_000), "n": 1}))
        staged.release()
    await table.tries("closed", lambda: stager.stage({"t": torch.zeros(3)}))
    for policy in ("skip", "fail"):
        async with sidestream.AsyncStager(budget_bytes=1 << 20, when_full=policy) as stager:
            first = await stager.stage({"t": torch.zeros(200_000)})
            await table.tries(f"full, when_full={policy}", lambda s=stager: s.stage({"t": torch.zeros(200_000)}))
            first.release()
    await table.tries("save with a closed stager", lambda: sidestream.save(SMALL, table.folder / "c", stager=stager))


async def files(table: Table) -> None:
    """The bytes that a save writes: names, sizes and contents of all files, the manifest in clear."""
    folder = table.folder
    calls: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: sidestream.save(SMALL, folder / "small"),
        lambda: sidestream.save(SMALL, folder / "metadata", metadata={"loss": 0.25, "tags": ["a"]}),
        lambda: sidestream.save(SMALL, folder / "digest", options=sidestream.SaveOptions(digest="blake3")),
        lambda: sidestream.save(SMALL, folder / "writer process", options=sidestream.SaveOptions(writer="process")),
        lambda: sidestream.save(SMALL, folder / "streamed", options=sidestream.SaveOptions(streaming=True)),
        lambda: sidestream.save(blocks(), folder / "blocks"),
        lambda: sidestream.save(tensors(), folder / "tensors"),
        lambda: sidestream.save(training(), folder / "training"),
        lambda: sidestream.save({"a": counted(5), "values": {"n": 1}}, folder / "values"),
        lambda: _step(folder / "run", {"loss": 1.5}),
        lambda: _step(folder / "run", None),
        lambda: sidestream.convert(folder / "small", folder / "converted"),
        lambda: sidestream.convert(folder / "small", folder / "converted.pt"),
        lambda: sidestream.convert(folder / "small", folder / "safetensors", format="safetensors", select="model.*"),
        lambda: sidestream.copy(folder / "metadata", folder / "copy"),
    )
    for number, call in enumerate(calls, 1):
        with fixed(number, one=True):
            await call()
    shutil.rmtree(folder / "run" / ".leases", ignore_errors=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            table.entries[str(path.relative_to(folder))] = _described(path)


async def _step(run: Path, metadata: dict[str, Any] | None) -> None:
    async with sidestream.Checkpointer(run) as checkpoints:
        await checkpoints.save(SMALL, step=3, metadata=metadata)


def _described(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    told: dict[str, Any] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    if path.name.startswith("manifest-") or path.name.endswith(".manifest"):
        told = {"lines": raw.decode().splitlines()}
    return told
