"""What is left of the checkpoints of others, and of ours, after the same misfortunes.

Each writer saves a checkpoint and then, where it does that, the next one over it. A child process is killed (SIGKILL)
at every file that it opens, renames, makes or removes, as the interpreter's audit hook tells; bits of the files with
tensors are flipped; the disk is too small; the power is cut (``FS_IOC_SHUTDOWN`` on a loop-mounted ext4, needs root)
right after the save has returned. A reader of the same library says what it finds: the state of one save, a mix or
something else without an error (``silent``), or an error.

    python benchmarks/reliability.py            # the table
    python benchmarks/reliability.py --flips 300
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import sidestream

State = dict[str, torch.Tensor]
TENSORS, ELEMENTS = 4, 50_000
_HANG_S = 60
_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link")


def make(seed: int) -> State:
    return {f"w{number}": torch.full((ELEMENTS,), float(seed)) for number in range(TENSORS)}


def found(state: State) -> str:
    """Which save this is, or that it is none."""
    values = {float(one) for tensor in state.values() for one in tensor.unique()}
    return f"save {values.pop():.0f}" if len(values) == 1 else "silent"


class Ours:
    name = "sidestream"

    def save(self, run: Path, seed: int) -> None:
        async def save() -> None:
            async with sidestream.Checkpointer(run) as checkpoints:
                await checkpoints.save(make(seed), step=1)

        asyncio.run(save())

    def load(self, run: Path) -> State:
        state = make(-1)

        async def load() -> None:
            async with sidestream.Checkpointer(run) as checkpoints:
                if await checkpoints.restore(state) is None:
                    raise FileNotFoundError(run)

        asyncio.run(load())
        return state


class StockDcp:
    name = "DCP"

    def save(self, run: Path, seed: int) -> None:
        dcp.save(make(seed), checkpoint_id=run / "checkpoint", no_dist=True)

    def load(self, run: Path) -> State:
        state = make(-1)
        dcp.load(state, checkpoint_id=run / "checkpoint", no_dist=True)
        return state


class Torchsnapshot:
    name = "torchsnapshot"

    def save(self, run: Path, seed: int) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(run / "checkpoint"), {"state": StateDict(**make(seed))})

    def load(self, run: Path) -> State:
        from torchsnapshot import Snapshot, StateDict

        state = StateDict(**make(-1))
        Snapshot(str(run / "checkpoint")).restore({"state": state})
        return dict(state)


class TorchCheckpointing:
    """Refuses a directory that is there: the second save goes beside the first, and a reader takes the newer one."""

    name = "torch_checkpointing"

    def _storage(self) -> Any:
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        return LocalFileSystemStorageConfig(use_direct_io=False)  # which fails on unaligned tails

    def _checkpoint(self, state: State) -> Any:
        from torch_checkpointing import CheckpointBase, CheckpointItem

        class Checkpoint(CheckpointBase):
            def get_items(self) -> dict[str, CheckpointItem]:
                return {"state": CheckpointItem(state)}

            def load_state_dict(self, state_dict: Any) -> None: ...

        return Checkpoint()

    def save(self, run: Path, seed: int) -> None:
        from torch_checkpointing.builder import make_sync_checkpoint_saver
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        run.mkdir(exist_ok=True)
        writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
        saver = make_sync_checkpoint_saver(
            SyncCheckpointSaverConfig(writer_config=writer), storage_config=self._storage()
        )
        saver.save(str(run / f"checkpoint-{seed}"), self._checkpoint(make(seed)))
        saver.close()

    def load(self, run: Path) -> State:
        from torch_checkpointing import CheckpointLoader, CheckpointReader, RankInfo

        state = make(-1)
        rank = RankInfo(global_rank=0, global_world_size=1, role_rank=0, role_world_size=1)
        loader = CheckpointLoader(CheckpointReader(rank_info=rank, storage_config=self._storage()))
        loader.load(str(sorted(run.glob("checkpoint-*"))[-1]), self._checkpoint(state))
        return state


WRITERS = (Ours, StockDcp, Torchsnapshot, TorchCheckpointing)


# --- in children: the parent imports, and does nothing else --------------------------------------------------------


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Exit status (negative: the signal) and what ``work`` returned, or the name of what it raised."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.alarm(_HANG_S)
        try:
            told: Any = work()
        except BaseException as error:
            told = f"error: {type(error).__name__}"
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), json.loads(told) if told else None


def read(writer: Any, run: Path) -> str:
    told = in_child(lambda: found(writer.load(run)))[1]
    return "error" if told is None or told.startswith("error") else str(told)


def counted(root: Path, at: int, work: Callable[[], None]) -> int:
    """Do ``work`` and return the number of its file operations below ``root``; at the one numbered ``at`` it dies."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if (
            event in _EVENTS
            and isinstance(arguments[0], (str, bytes))
            and os.fsdecode(arguments[0]).startswith(str(root))
        ):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    work()
    return count


# --- the rows ---------------------------------------------------------------------------------------------------------


def kills(writer: Any, place: Path) -> str:
    run = place / "run"
    in_child(lambda: writer.save(run, 1))
    base = place / "base"
    shutil.copytree(run, base)
    total = in_child(lambda: counted(run, 0, lambda: writer.save(run, 2)))[1]
    if not isinstance(total, int):
        return f"the second save is refused ({total})"
    results: Counter[str] = Counter()
    for at in range(1, total + 1):
        shutil.rmtree(run)
        shutil.copytree(base, run)
        status, _ = in_child(lambda at=at: counted(run, at, lambda: writer.save(run, 2)))
        if status != -signal.SIGKILL:
            results["not killed"] += 1
            continue
        results[read(writer, run)] += 1
    lost = results["error"] + results["silent"]
    return f"{sum(results.values())} kills: {lost} lost ({results['silent']} silent)"


def flips(writer: Any, place: Path, trials: int) -> str:
    run, chance = place / "run", random.Random(0)
    in_child(lambda: writer.save(run, 1))
    files = [path for path in run.rglob("*") if path.is_file() and path.stat().st_size > 4 * ELEMENTS // 2]
    results: Counter[str] = Counter()
    for _ in range(trials):
        path = chance.choice(files)
        at, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        content = bytearray(path.read_bytes())
        content[at] ^= 1 << bit
        path.write_bytes(content)
        results[read(writer, run)] += 1
        content[at] ^= 1 << bit
        path.write_bytes(content)
    return f"{trials} flips: {results['silent']} silent, {results['error']} found, {results['save 1']} harmless"


def mount(place: Path, *arguments: str) -> None:
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", *arguments, str(place)], check=True, capture_output=True)


def full_disk(writer: Any, place: Path) -> str:
    if os.geteuid() != 0:
        return "needs root"
    disk, results = place / "disk", Counter[str]()
    for kib in range(200, 1000, 100):
        mount(disk, "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs")
        try:
            told = in_child(lambda: writer.save(disk / "run", 1))[1]
            if told is None:
                results["saved"] += 1
            else:
                left = sum(path.stat().st_size for path in disk.rglob("*") if path.is_file())
                results["raised and clean" if left == 0 else "raised, rubbish left"] += 1
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return ", ".join(f"{count} {what}" for what, count in sorted(results.items()))


def power_cuts(writer: Any, place: Path, trials: int = 5) -> str:
    if os.geteuid() != 0:
        return "needs root"
    image, disk, results = place / "ext4.img", place / "disk", Counter[str]()
    for _ in range(trials):
        with image.open("wb") as file:
            file.truncate(64 << 20)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
        mount(disk, "-o", "loop", str(image))
        try:

            def cut() -> None:
                writer.save(disk / "run", 1)
                descriptor = os.open(disk, os.O_RDONLY)
                fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 2))
                os.kill(os.getpid(), signal.SIGKILL)

            in_child(cut)
        finally:
            subprocess.run(["umount", str(disk)], check=True)
        mount(disk, "-o", "loop", str(image))
        try:
            results[read(writer, disk / "run")] += 1
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    return f"{trials} cuts: {trials - results['save 1']} lost"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--flips", type=int, default=200)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows: dict[str, Callable[[Any, Path], str]] = {
        "killed while saving the second time": kills,
        "bit flips in files with tensors": lambda writer, place: flips(writer, place, chosen.flips),
        "disks of 200 to 900 KiB, 800 KiB to save": full_disk,
        "power cut after the save returned (ext4)": power_cuts,
    }
    for writer in WRITERS:
        needs = {"Torchsnapshot": "torchsnapshot", "TorchCheckpointing": "torch_checkpointing"}.get(writer.__name__)
        if needs and not find_spec(needs):
            print(f"{writer.name}: not installed")
            continue
        for name, row in rows.items():
            with tempfile.TemporaryDirectory() as place:
                try:
                    told = row(writer(), Path(place))
                except Exception as error:
                    told = f"could not be run: {type(error).__name__}: {error}"
            print(f"{writer.name:20} {name:42} {told}", flush=True)


if __name__ == "__main__":
    main()
