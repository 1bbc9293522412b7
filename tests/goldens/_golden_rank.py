"""One rank of a group: its calls, its records and its part of a state; and how ranks wait for each other."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import logging
import resource
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _golden_states import counted
from _golden_table import Table, by_folder
from keywords import for_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import sidestream
import sidestream.blocking
from sidestream.errors import RankFailuresError

_SHORT_BYTES = 200


class _RankTable(Table):
    """Records of ``RankFailuresError`` also who failed with what, and the cause on a rank that failed."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder)
        self._rank = rank

    def error(self, error: BaseException) -> dict[str, Any]:
        entry = super().error(error)
        if isinstance(error, RankFailuresError):
            entry["failures"] = [[one.rank, one.kind, one.error is not None] for one in error.failures]
            if error.__cause__ is not None and any(one.rank == self._rank for one in error.failures):
                entry["cause"] = super().error(error.__cause__)
        return entry


def _without_ranks(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_ranks(item) for key, item in value.items() if key != "cause"}
        failed = value.get("type") == "RankFailuresError"
        return kept | ({"failures": sorted({kind for _, kind, _ in value["failures"]})} if failed else {})
    return [_without_ranks(item) for item in value] if isinstance(value, list) else value


async def _and_collect(call: Callable[[], Any]) -> Any:
    """``call``, and what is logged of errors that nobody has retrieved."""
    try:
        result = call()
        return await result if inspect.isawaitable(result) else result
    finally:
        gc.collect()


class _Unretrieved(logging.Handler):
    """The errors that asyncio logs because nobody has retrieved them, and those that end a thread."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        logging.getLogger("asyncio").addHandler(self)
        threading.excepthook = lambda args: self.lines.append(f"a thread raised {args.exc_type.__name__}")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"asyncio: {record.getMessage().splitlines()[0]}")


@dataclass
class Rank:
    number: int
    world: int
    folder: Path
    path: Path
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.table = _RankTable(self.folder, self.number)
        self.unretrieved = _Unretrieved()
        self.mesh = init_device_mesh("cpu", (self.world,))
        self._known: frozenset[str] = frozenset()

    async def together(self) -> None:
        """Every rank has come to this point."""
        await asyncio.to_thread(dist.barrier)

    async def tries(self, name: str, call: Callable[[], Any], *, by_any: bool = False, files: bool = True) -> Any:
        """All ranks make a call together. Record what comes of it here. ``by_any``: several fail in one way, the first
        one stops the others, and which one that is is free. ``files``: also what has appeared and vanished."""
        await self.together()
        result = await self.tries_alone(name, call)
        if by_any:
            self.table.entries[name] = _without_ranks(self.table.entries[name])
            self._write()
        await self.together()
        if self.number == 0 and files:
            found = frozenset(tree(self.folder))
            text = self.table.text
            changes = {"appeared": found - self._known, "vanished": self._known - found}
            changed = {kind: by_folder(text(path) for path in paths) for kind, paths in changes.items() if paths}
            self.table.entries |= {f"{name}, files": changed} if changed else {}
            self._known = found
            self._write()
        return result

    async def tries_alone(self, name: str, call: Callable[[], Any]) -> Any:
        result = await self.table.tries(name, lambda: _and_collect(call))
        if self.unretrieved.lines:
            self.table.entries[name]["unretrieved"] = self.unretrieved.lines
            self.unretrieved.lines = []
        self._write()
        return result

    def note(self, name: str, value: Any) -> None:
        self.table.note(name, value)
        self._write()

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.table.entries))
        part.rename(self.path)

    # --- states ---

    def placed(self, whole: torch.Tensor, placement: Any) -> DTensor:
        """Without a collective: every rank has the whole."""
        return distribute_tensor(whole, self.mesh, [placement], src_data_rank=None)

    def state(self, plus: float = 0.0) -> dict[str, Any]:
        """Sharded, replicated and plain tensors, and values and a tensor that only this rank has."""
        return {
            "rows": self.placed(counted(7, 4, plus=plus), Shard(0)),
            "deep": {"columns": self.placed(counted(3, 5, plus=plus), Shard(1)), "plain": counted(5, plus=plus)},
            "whole": self.placed(counted(2, 2, plus=plus), Replicate()),
            "step": 7 + int(plus),
            "betas": (0.9, 0.99),
            f"of rank {self.number}": {"value": self.number + int(plus), "tensor": counted(3, plus=plus + self.number)},
        }

    def blank(self) -> dict[str, Any]:
        return self.state(90.0)

    def own(self) -> dict[str, Any]:
        """A target for what only this rank has saved."""
        key = f"of rank {self.number}"
        return {key: self.blank()[key]}


def tree(folder: Path) -> Iterator[str]:
    """All files and empty directories below ``folder``, but for leases and what cases use to wait for each other."""
    for path in folder.rglob("*"):
        kept = ".leases" not in path.parts and not path.name.startswith("gate-")
        if kept and not path.is_dir():
            yield str(path.relative_to(folder))
        elif kept and not any(path.iterdir()):
            yield f"{path.relative_to(folder)}/"


def local(state: Any) -> Any:
    """``state`` as this rank holds it."""
    if isinstance(state, Mapping):
        return {key: local(item) for key, item in state.items()}
    return state.to_local() if isinstance(state, DTensor) else state


@dataclass(frozen=True)
class Case:
    work: Callable[[Rank], Awaitable[None]]
    world: int = 2
    waits: bool = False
    """It waits more than it works: it runs beside others."""
    dies: Mapping[int, int] = field(default_factory=dict)
    """The exit status of ranks that do not end well."""
    stored: bool = False
    """It saves to an object store, whose requests are recorded."""


class Gate:
    """Opened once, by some rank, for all of them."""

    def __init__(self, rank: Rank, name: str) -> None:
        self._path = rank.folder / f"gate-{name}"

    def open(self) -> None:
        self._path.touch()

    def wait(self, seconds: float = 60.0) -> None:
        """Blocking."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.01)):
            if self._path.exists():
                return
            pause.wait(0.01)
        raise TimeoutError(str(self._path))


class GatedNames:
    """``names=`` of a save that waits, while it is planned, until the gate is open."""

    def __init__(self, gate: Gate, began: Gate) -> None:
        self._gate, self._began = gate, began

    def __call__(self, fqn: str) -> str:
        self._began.open()
        self._gate.wait()
        return fqn


@contextmanager
def short_files(*, here: bool) -> Iterator[None]:
    """The system lets this process write only short files, if ``here``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_SHORT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def awaited(pending: Any) -> Any:
    return await pending


def damaged(rank: Rank, source: Path, name: str, damage: Callable[[Path], object]) -> Path:
    """A copy with a damage, made by rank 0."""
    copy = rank.folder / "damaged" / name
    if rank.number == 0:
        shutil.copytree(source, copy)
        damage(copy)
    return copy


def altered(pattern: str) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (path,) = directory.glob(pattern)
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))

    return apply


def one_of(rank: Rank, number: int, here: Any, elsewhere: Any) -> Any:
    return here if rank.number == number else elsewhere


async def loaded(rank: Rank, url: Any, expected: dict[str, Any], **options: Any) -> Any:
    """The report, and whether the content is the expected one."""
    target = rank.blank()
    report = await sidestream.load(target, url, **for_load(**options))
    return [report, same(local(target), local(expected))]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)
