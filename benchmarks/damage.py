"""One flipped bit in a checkpoint, and a second save under the same name: what does each library do?

    python benchmarks/damage.py [--directory DIR]

Every library that is installed saves four random tensors. One bit of a tensor in its largest file is flipped, and the
checkpoint is loaded. Then the library saves once more to the same path, with its defaults. The exit status says whether
sidestream noticed the flipped bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import io
import logging
import os
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from _storage_rivals import Orbax, Rival, Sidestream, State, StockSave, TorchCheckpointing, TorchSnapshot
from torch.distributed.checkpoint import CheckpointException

KINDS: tuple[type[Rival], ...] = (Sidestream, StockSave, TorchCheckpointing, TorchSnapshot, Orbax)


async def save(rival: Rival, path: Path) -> None:
    pending = await asyncio.to_thread(rival.save, path) if rival.threaded else rival.save(path)
    await rival.saved(pending)


def flip_a_bit(path: Path) -> None:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size * 3 // 8)  # the middle is where one of four tensors in a file ends
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


async def after_damage(rival: Rival, name: str, path: Path) -> str:
    into = {key: torch.zeros_like(tensor) for key, tensor in rival.state.items()}
    try:
        loading = rival.loads()[name](path, into)
        if inspect.isawaitable(loading):
            await loading
    except (Exception, CheckpointException) as error:
        return f"raises {type(error).__name__}"
    same = all(torch.equal(into[key], tensor) for key, tensor in rival.state.items())
    return "loads the right values" if same else "loads wrong values"


async def second_save(rival: Rival, path: Path) -> str:
    try:
        await save(rival, path)
    except (Exception, CheckpointException) as error:
        return f"raises {type(error).__name__}"
    return "replaces the first"


async def row(kind: type[Rival], state: State, folder: Path) -> list[str]:
    rival = kind(state)
    try:
        path = folder / "checkpoint"
        await save(rival, path)
        flip_a_bit(path)
        found = [f"{name}: {await after_damage(rival, name, path)}" for name in rival.loads()]
        return [kind.name, "; ".join(found), await second_save(rival, path)]
    finally:
        rival.close()


async def main(directory: Path) -> int:
    torch.manual_seed(0)
    state = {f"layer{number}": torch.randn(1 << 20) for number in range(4)}
    ours = ""
    for kind in KINDS:
        if kind.needs is not None and find_spec(kind.needs.partition(".")[0]) is None:
            print(f"{kind.name}: not installed")
            continue
        with tempfile.TemporaryDirectory(dir=directory) as folder, contextlib.redirect_stderr(io.StringIO()):
            name, damaged, again = await row(kind, state, Path(folder))
        ours = ours or damaged
        print(f"{name}\n  one bit flipped:   {damaged}\n  saved once more:   {again}", flush=True)
    return 0 if ours.endswith('verify="always": raises CorruptCheckpointError') else 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    sys.exit(asyncio.run(main(parser.parse_args().directory.resolve())))
