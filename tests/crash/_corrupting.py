"""Damage to the files of a checkpoint, done and undone, and what a reader makes of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _seeded import blank_state, files_of, make_state, same

import sidestream
from sidestream import errors

Damage = Callable[[Path, Any], str]


def bit_flip(checkpoint: Path, random: Any) -> str:
    path = _file(checkpoint, random)
    at, bit = random.randrange(path.stat().st_size), random.randrange(8)
    with path.open("r+b") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ (1 << bit)]))
    return f"bit {bit} of byte {at} of {path.name}"


def digit(checkpoint: Path, random: Any) -> str:
    """Another digit in what is said about the files: it still reads well."""
    path = random.choice([path for path in _files(checkpoint) if path.suffix != ".distcp"])
    content = bytearray(path.read_bytes())
    places = [at for at, byte in enumerate(content) if byte in b"0123456789"]
    at = random.choice(places)
    old, content[at] = content[at], random.choice(b"0123456789")
    path.write_bytes(content)
    return f"{chr(old)} became {chr(content[at])} at byte {at} of {path.name}"


def zeros(checkpoint: Path, random: Any) -> str:
    """A page, or part of one, that was never written."""
    path = _file(checkpoint, random)
    length = random.choice([1, 16, 512, 4096])
    at = random.randrange(path.stat().st_size) // length * length
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(length)
        file.seek(at)
        file.write(bytes(len(old)))
    return f"{len(old)} zeros at byte {at} of {path.name}"


def noise(checkpoint: Path, random: Any) -> str:
    path = _file(checkpoint, random)
    at = random.randrange(path.stat().st_size)
    length = min(random.choice([2, 8, 64, 600]), path.stat().st_size - at)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(random.randbytes(length))
    return f"{length} other bytes at byte {at} of {path.name}"


def truncated(checkpoint: Path, random: Any) -> str:
    path = _file(checkpoint, random)
    size = path.stat().st_size
    left = random.choice([0, size // 2, size - 1, random.randrange(size)])
    os.truncate(path, left)
    return f"{path.name} cut off at {left} of {size}"


def extended(checkpoint: Path, random: Any) -> str:
    path = _file(checkpoint, random)
    more = random.choice([1, 512, 4096])
    with path.open("ab") as file:
        file.write(random.choice([bytes(more), random.randbytes(more)]))
    return f"{path.name} longer by {more}"


def missing(checkpoint: Path, random: Any) -> str:
    path = _file(checkpoint, random)
    path.unlink()
    return f"{path.name} is missing"


def swapped(checkpoint: Path, random: Any) -> str:
    """Two files of one checkpoint."""
    one, other = random.sample(_files(checkpoint), 2)
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    return f"{one.name} and {other.name} swapped"


def duplicated(checkpoint: Path, random: Any) -> str:
    one, other = random.sample(_files(checkpoint), 2)
    other.write_bytes(one.read_bytes())
    return f"{one.name} also as {other.name}"


def foreign(checkpoint: Path, random: Any) -> str:
    """A file of the other step in the place of the one that it resembles."""
    other = checkpoint.with_name("step-2")
    path = _file(checkpoint, random)
    twins = [one for one in _files(other) if one.suffix == path.suffix and one.stem[:3] == path.stem[:3]]
    twin = random.choice(twins or _files(other))
    path.write_bytes(twin.read_bytes())
    return f"{path.name} from another save"


def renamed(checkpoint: Path, random: Any) -> str:
    path = _file(checkpoint, random)
    name = random.choice([path.name.upper() + "_", f"__{random.randrange(9)}_{random.randrange(9)}.distcp", "x"])
    path.rename(path.with_name(name))
    return f"{path.name} is called {name}"


DAMAGES: tuple[Damage, ...] = (
    digit, bit_flip, bit_flip, bit_flip, bit_flip, zeros, noise, truncated, extended, missing, swapped, duplicated,
    foreign, renamed,
)  # fmt: skip


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.iterdir() if path.is_file() and path.stat().st_size)


def _file(checkpoint: Path, random: Any) -> Path:
    """Any file; the large ones as often as all small ones."""
    files = _files(checkpoint)
    shards = [path for path in files if path.suffix == ".distcp"]
    chosen: Path = random.choice(shards if shards and random.random() < 0.5 else files)
    return chosen


@contextmanager
def damaged(checkpoint: Path, damage: Damage, random: Any) -> Iterator[str]:
    """What was done; undone at the end."""
    whole = checkpoint.with_name(f"whole-{checkpoint.name}")
    shutil.copytree(checkpoint, whole)
    try:
        yield damage(checkpoint, random)
    finally:
        shutil.rmtree(checkpoint)
        whole.rename(checkpoint)


# --- reading ----------------------------------------------------------------------------------------------------------


async def load(url: Path) -> dict[str, Any]:
    state = blank_state()
    await sidestream.load(state, url)
    return state


async def load_atomic(url: Path) -> dict[str, Any]:
    state = blank_state()
    await sidestream.load(state, url, options=sidestream.LoadOptions(atomic=True))
    return state


async def host(url: Path) -> dict[str, Any]:
    return await (await sidestream.open_checkpoint(url)).state_dict()


async def mapped(url: Path) -> dict[str, Any]:
    return await (await sidestream.open_checkpoint(url)).state_dict(memory="mapped")


async def pieces(url: Path) -> dict[str, Any]:
    """Rows and single values, put together."""
    checkpoint = await sidestream.open_checkpoint(url)
    state = blank_state()
    weight = state["model"]["weight"]
    for start in range(0, len(weight), 40):
        rows = slice(start, start + 40)
        weight[rows] = await checkpoint.tensor("model.weight", rows)
    for name in ("half", "scale", "mask"):
        state["model"][name] = await checkpoint.tensor(f"model.{name}")
    state["optimizer"]["state"][0]["moment"] = await checkpoint.tensor("optimizer.state.0.moment")
    state["optimizer"]["lr"] = await checkpoint.value("optimizer.lr")
    state["seed"] = await checkpoint.value("seed")
    return state


async def restore(url: Path) -> dict[str, Any]:
    state = blank_state()
    async with sidestream.Checkpointer(url.parent) as checkpoints:
        await checkpoints.restore(state, 1)
    return state


async def with_files(url: Path) -> dict[str, Any]:
    """The state, if the sidecar files are those that were saved with it."""
    checkpoint = await sidestream.open_checkpoint(url)
    state = await checkpoint.state_dict()
    files = {name: await checkpoint.file(name) for name in checkpoint.files}
    return state if files == files_of(11) else {"other files": files}


async def verified(url: Path) -> dict[str, Any]:
    """What is read once nothing is found to be wrong: that has to be right, the sidecar files too."""
    report = await sidestream.verify(url)
    if not report.ok:
        raise errors.CorruptCheckpointError(report.damaged[0].message)
    files = {path.name: path.read_bytes() for path in url.iterdir() if path.name in files_of(11)}
    return await host(url) if files == files_of(11) else {"other files": files}


OWN_READERS = (load, load_atomic, host, mapped, pieces, restore, with_files, verified)
STOCK_READERS = (load, load_atomic)


async def judged(url: Path, reader: Any, seed: int = 11) -> tuple[str, list[str]]:
    """How it ended, and what is wrong with that: a typed error and the saved values are both right."""
    try:
        state = await reader(url)
    except errors.SidestreamError as error:
        return type(error).__name__, []
    except Exception as error:
        return "untyped", [f"untyped: {type(error).__name__}: {error}"]
    return "harmless", [] if same(state, make_state(seed)) else ["silent: other values were read"]
