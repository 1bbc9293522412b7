"""What a reader finds in a run. Rows of the campaign do this in another process (``_judge.py``)."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from _seeded import blank_state, files_of, make_state, same
from safetensors.torch import load_file

import sidestream
from sidestream import errors


@dataclass(slots=True)
class Found:
    """What a reader finds in a run: ``seeds`` by directory (each complete and bit-exact), the ``steps`` that are
    listed and the seed that each restores to, attempts that are left, what must not be, and the directories that have a
    sidecar file of their save."""

    seeds: dict[str, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    attempts: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    sidecars: list[str] = field(default_factory=list)


@lru_cache(maxsize=64)
def reference(seed: int) -> dict[str, Any]:
    """``make_state``, to compare with."""
    return make_state(seed)


async def seed_of(url: Path) -> int:
    """The seed of the checkpoint at ``url``; ``AssertionError`` if it is not exactly the state of that seed, or if a
    sidecar file is that of another save."""
    return (await seed_and_files(url))[0]


async def seed_and_files(url: Path) -> tuple[int, list[str]]:
    """``seed_of``, and the names of the sidecar files."""
    checkpoint = await sidestream.open_checkpoint(url)
    state = await checkpoint.state_dict()
    seed = state["seed"]
    assert same(state, reference(seed)), f"{url} is not the state of one save"
    files = {name: await checkpoint.file(name) for name in checkpoint.files}
    assert files in ({}, files_of(int(seed))), f"{url} has files of another save"
    return int(seed), list(files)


def look_at_exports(folder: Path) -> tuple[dict[str, int], list[str]]:
    """The seeds of the exports that are visible, by directory, and what is wrong with them."""
    seeds: dict[str, int] = {}
    wrong: list[str] = []
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        if path.name.startswith("."):
            continue
        try:
            tensors = {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}
            seed = int(tensors["model.scale"])
            expected = {f"model.{name}": one for name, one in reference(seed)["model"].items() if name != "tied"}
            assert same(dict(sorted(tensors.items())), dict(sorted(expected.items()))), "other tensors"
            files = {name: (path / name).read_bytes() for name in files_of(seed) if (path / name).exists()}
            assert files in ({}, files_of(seed)), "files of another export"
            seeds[path.name] = seed
        except (Exception, AssertionError) as error:
            wrong.append(f"the export {path.name} is visible and not good: {type(error).__name__}: {error}")
    return seeds, wrong


async def look(run: Path, *, marked: bool = False) -> Found:
    """Everything that a reader can see in ``run``. ``marked``: attempts lie in their targets."""
    found = Found()
    if not run.exists():
        return found
    for name in sorted(os.listdir(run)):
        if name == ".leases":  # of those that were killed: they expire
            continue
        if name.startswith("."):
            found.attempts.append(name)
            continue
        try:
            found.seeds[name], files = await seed_and_files(run / name)
            found.sidecars += [name] if files else []
        except (Exception, AssertionError) as error:
            if marked and isinstance(error, errors.CheckpointNotFoundError):
                found.attempts.append(name)
                continue
            found.violations.append(f"{name} is visible and not good: {type(error).__name__}: {error}")
    async with sidestream.Checkpointer(run) as checkpoints:
        generations: dict[int, list[tuple[int, int]]] = {}
        for name, seed in found.seeds.items():
            step, _, generation = name.removeprefix("step-").partition(".g")
            if name.startswith("step-"):
                generations.setdefault(int(step), []).append((int(generation or 1), seed))
        for step in await checkpoints.steps():
            found.steps[step] = max(generations.get(step, [(0, -1)]))[1]
        if set(found.steps) != set(generations):
            found.violations.append(f"{sorted(generations)} are there, and listed are {sorted(found.steps)}")
        state = blank_state()
        try:
            newest = await checkpoints.restore(state)
        except Exception as error:
            found.violations.append(f"the newest step is not good: {type(error).__name__}: {error}")
        else:
            if newest != max(found.steps, default=None):
                found.violations.append(f"of {sorted(found.steps)} the newest is {newest}")
            elif newest is not None and not same(state, reference(found.steps[newest])):
                found.violations.append(f"step {newest} restores to something else")
    return found


def attempts_in(folder: Path) -> list[str]:
    """Attempts, and deletions that were not finished, anywhere below ``folder``."""
    return [str(path) for pattern in ("*.partial", ".retired-*") for path in folder.rglob(pattern)]


def descriptors(folder: Path) -> list[str]:
    """What this process has open in ``folder``."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the one that listed the directory
    return [link for link in links if link.startswith(str(folder))]
