"""Advice for a place without a checkpoint: what is there, and which call reads it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ..._format.marker import METADATA_NAME
from ..._runtime.threads import io_threads, yielding_gil
from ..._storage import Store, parse_step, step_name
from ...errors import SidestreamError
from ..foreign.manifests import TORCH_SUFFIXES, is_foreign
from .steps import Step, newest_committed, steps_among

__all__ = ["what_is_there"]

_MOST_LOOKED_AT = 8


async def what_is_there(store: Store, name: str, url: str, files: Mapping[str, int]) -> str:
    """Return a description of a place without a checkpoint: a run, directories with checkpoints, or files. The result
    is empty if that is unknown. ``files`` are the files in the directory."""
    with suppress(SidestreamError, FileNotFoundError):  # the caller raises its own error, with or without this advice
        names = await store.directories(name)
        steps = await newest_committed(store, name, names)
        if steps:
            return (
                f"This is a run with {_steps(steps)}: load {url}/{step_name(*steps[-1].order)}, or restore with "
                f"sidestream.Checkpointer({url!r})"
            )
        visible = await io_threads().run(_first_visible, names)
        found = [one for one in visible if await _holds_checkpoint(store, f"{name}/{one}")]
        if found:
            return f"Use one of the checkpoints in {', '.join(f'{url}/{one}' for one in found)}"
        single = await io_threads().run(_first_files, files)
        if single:
            return f"It has files that are checkpoints by themselves: {', '.join(single)}; use the path of one"
        if parse_step(name) is not None:
            steps = await newest_committed(store, ".", await store.directories())
            return f"The run of this step has {_steps(steps)}" if steps else ""
    return ""


def _first_visible(names: Iterable[str]) -> list[str]:
    return heapq.nsmallest(_MOST_LOOKED_AT, (one for one in yielding_gil(names) if not one.startswith(".")))


def _first_files(names: Iterable[str]) -> list[str]:
    return heapq.nsmallest(_MOST_LOOKED_AT, (one for one in yielding_gil(names) if one.endswith(TORCH_SUFFIXES)))


def _steps(steps: Sequence[Step]) -> str:
    numbers = sorted({step.step for step in steps})
    return f"step {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} steps, from {numbers[0]} to {numbers[-1]}"


async def _holds_checkpoint(store: Store, directory: str) -> bool:
    """Return whether a directory is a checkpoint, or a run that has checkpoints."""
    with suppress(FileNotFoundError):
        files = await store.sizes(directory)
        if METADATA_NAME in files or await io_threads().run(is_foreign, files):
            return True
    names = await store.directories(directory)
    return bool(await io_threads().run(steps_among, names))
