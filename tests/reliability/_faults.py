"""What the reliability tests share: states that can be told apart, an oracle, and a hand on every file operation.

Nothing of sidestream is replaced: ``Intercept`` stands between it and the functions of ``os``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import sidestream

# --- states, each made from a seed and recognised by it ---------------------------------------------------------------


def make_state(seed: int) -> dict[str, Any]:
    """A small state with tensors above and below a page, several dtypes, plain values. Every part tells the seed."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(96, 257, generator=generator)
    return {
        "seed": seed,
        "model": {
            "weight": weight,
            "tied": weight,
            "half": torch.randn(33, generator=generator).to(torch.bfloat16),
            "scale": torch.tensor(float(seed)),
            "mask": torch.randint(0, 255, (3, 5), generator=generator, dtype=torch.uint8),
        },
        "optimizer": {"state": {0: {"moment": torch.randn(1000, generator=generator)}}, "lr": seed / 7},
    }


def blank_state() -> dict[str, Any]:
    """A template for ``load`` that holds nothing of any seed."""
    state = make_state(-1)
    for part in (state["model"], state["optimizer"]["state"][0]):
        for tensor in part.values():
            tensor.zero_()
    return state


def same(left: Any, right: Any) -> bool:
    """Equal, and tensors bit for bit."""
    if isinstance(left, torch.Tensor):
        return (
            isinstance(right, torch.Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and torch.equal(_bits(left), _bits(right))
        )
    if isinstance(left, Mapping):
        return isinstance(right, Mapping) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    return type(left) is type(right) and bool(left == right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# --- the oracle -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """What a reader finds in a run: ``seeds`` by directory (each complete and bit-exact), the ``steps`` that are
    listed and the seed that each restores to, attempts that are left, and what must not be."""

    seeds: dict[str, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


async def seed_of(url: Path) -> int:
    """The seed of the checkpoint at ``url``; ``AssertionError`` if it is not exactly the state of that seed."""
    checkpoint = await sidestream.open_checkpoint(url)
    state = await checkpoint.state_dict()
    seed = state["seed"]
    assert same(state, make_state(seed)), f"{url} is not the state of one save"
    return int(seed)


async def look(run: Path) -> Found:
    """Everything that a reader can see in ``run``."""
    found = Found()
    if not run.exists():
        return found
    for name in sorted(os.listdir(run)):
        if name.endswith(".partial"):
            found.attempts.append(name)
            continue
        try:
            found.seeds[name] = await seed_of(run / name)
        except (Exception, AssertionError) as error:
            found.violations.append(f"{name} is visible and not good: {type(error).__name__}: {error}")
    async with sidestream.Checkpointer(run) as checkpoints:
        for step in await checkpoints.steps():
            state = blank_state()
            try:
                await checkpoints.restore(state, step)
            except Exception as error:
                found.violations.append(f"step {step} is listed and not good: {type(error).__name__}: {error}")
                continue
            if not same(state, make_state(state["seed"])):
                found.violations.append(f"step {step} restores to a mix")
            found.steps[step] = state["seed"]
    return found


def attempts_in(folder: Path) -> list[str]:
    """Attempts anywhere below ``folder``."""
    return [str(path) for path in folder.rglob("*.partial")]


def descriptors(folder: Path) -> list[str]:
    """What this process has open in ``folder``."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the one that listed the directory
    return [link for link in links if link.startswith(str(folder))]


# --- a hand on every file operation -----------------------------------------------------------------------------------

OPERATIONS = (
    "open", "close", "pwrite", "preadv", "fsync", "rename", "mkdir", "chmod", "posix_fallocate", "unlink", "rmdir",
    "scandir", "stat", "lstat", "fstat",
)  # fmt: skip


_real_stat = os.stat


def _exists(path: str) -> bool:
    try:
        _real_stat(path)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Operation:
    """The ``index``-th call (from 1) of ``os.<name>`` on ``path``. ``call()`` does it."""

    index: int
    name: str
    path: str
    real: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]

    def call(self) -> Any:
        return self.real(*self.args, **self.options)

    @property
    def changes(self) -> bool:
        """Whether it changes what is on disk, other than by removing."""
        if self.name == "open":
            return bool(self.args[1] & os.O_WRONLY)
        if self.name == "mkdir":
            return not _exists(self.path)
        return self.name in ("pwrite", "fsync", "rename", "chmod", "posix_fallocate")


@dataclass(frozen=True, slots=True)
class Called:
    """What is kept of an operation: nothing that would keep a buffer alive."""

    name: str
    path: str
    changes: bool
    target: str = ""


class Intercept:
    """Hands every operation on something at or below ``root`` to ``hook``, which does it with ``operation.call()``.

    Calls come from all threads. ``log`` has what was called, in order; ``running`` calls have not returned yet.
    """

    def __init__(self, root: Path, hook: Callable[[Operation], Any]) -> None:
        self._root = str(root)
        self._hook = hook
        self._lock = threading.Lock()
        self.log: list[Called] = []
        self.running = 0

    @contextmanager
    def installed(self) -> Iterator[Intercept]:
        real = {name: getattr(os, name) for name in OPERATIONS if hasattr(os, name)}
        for name, function in real.items():
            setattr(os, name, self._wrapped(name, function))
        try:
            yield self
        finally:
            for name, function in real.items():
                setattr(os, name, function)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def intercepted(*args: Any, **options: Any) -> Any:
            path = _path(args[0] if args else ".", options.get("dir_fd"))
            if path != self._root and not path.startswith(self._root + "/"):
                return real(*args, **options)
            with self._lock:
                operation = Operation(len(self.log) + 1, name, path, real, args, options)
                target = _path(args[1], options.get("dst_dir_fd")) if name == "rename" else ""
                self.log.append(Called(name, path, operation.changes, target))
                self.running += 1
            try:
                return self._hook(operation)
            finally:
                with self._lock:
                    self.running -= 1

        return intercepted


def _path(target: Any, dir_fd: int | None) -> str:
    if isinstance(target, int):
        try:
            return os.readlink(f"/proc/self/fd/{target}")
        except OSError:
            return ""
    text = os.fsdecode(target)
    if not text.startswith("/"):
        base = os.getcwd() if dir_fd is None else _path(dir_fd, None)
        return f"{base}/{text}"
    return text
