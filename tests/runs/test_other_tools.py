"""What tools that look for checkpoints by name find in a directory that saves are writing to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import warm

from sidestream._storage import Attempt, LocalStore
from sidestream._storage.bodies import BytesBody
from sidestream._storage.names import attempt_name, target_of_attempt

_PATTERNS = (r"step-(\d+)", r"step_(\d+)", r"checkpoint-(\d+)", r"epoch=", r"global_step_(\d+)")
_NAMES = ("step-100", "checkpoint-500", "global_step_7", "step_9", "epoch=3-step=40.ckpt", "step-100.g2")

# Prints what is in the directory at every operation that Python reports; the first rename may kill it.
_SAVES = """
import asyncio, json, os, signal, sys, warnings
import torch, sidestream
import torch.distributed.checkpoint as dcp
from sidestream.dcp import StorageWriter

root, name, way = sys.argv[1:]
os.makedirs(root, exist_ok=True)

def look(event, arguments):
    if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "open"):
        entries = sorted(os.listdir(root))
        seen.add((os.path.exists(f"{root}/{name}/.metadata"), *entries))
        if event == "os.rename" and way == "killed":
            print(json.dumps([[False, *sorted(os.listdir(root))]]), file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

async def main():
    state = {"w": torch.arange(9.0)}
    if way == "run":
        async with sidestream.Checkpointer(root, keep=sidestream.KeepLast(1)) as checkpoints:
            for step in (100, 100, 200):
                await checkpoints.save(state, step=step)
    else:
        for _ in range(2):  # the second one replaces the first
            dcp.save(state, storage_writer=StorageWriter(f"{root}/{name}", overwrite=True))

seen = set()
warnings.simplefilter("ignore")  # DCP warns that there is no process group
sys.addaudithook(look)
asyncio.run(main())
print(json.dumps(sorted(seen)), file=sys.stderr, flush=True)
"""


def saves(*arguments: object) -> tuple[int, str]:
    """Return the exit status of the program and what it wrote to stderr."""
    done = warm.run(
        [sys.executable, "-W", "error", "-c", _SAVES, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


def taken(name: str) -> bool:
    """Whether one of the other tools takes a directory with this name for a checkpoint."""
    return (
        any(re.search(pattern, name) for pattern in _PATTERNS)
        or any(fnmatchcase(name, pattern) for pattern in ("step_*", "step-*", "checkpoint-*", "global_step_*"))
        or name.startswith(("step_", "step-"))
    )


@pytest.mark.parametrize("name", _NAMES[:3])
@pytest.mark.parametrize("way", ["whole", "killed"])
def test_only_what_is_committed_looks_like_a_checkpoint(tmp_path: Path, name: str, way: str) -> None:
    """While it is written, renamed, replaced by another, and after a kill just before the commit."""
    root = tmp_path / "root"
    code, errors = saves(root, name, way)
    assert code == (-signal.SIGKILL if way == "killed" else 0), errors
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("[[")]
    seen = lines[-1]
    hidden = {entry for _, *entries in seen for entry in entries if entry != name}
    assert any(entry.endswith(".partial") for entry in hidden)
    for committed, *entries in seen:
        found = [entry for entry in entries if taken(entry)]
        assert found == ([name] if name in entries else []), entries
        assert committed or name not in entries


def test_only_steps_of_a_run_look_like_checkpoints(tmp_path: Path) -> None:
    """Through retention too, which takes a step's name away before it deletes it."""
    code, errors = saves(tmp_path / "run", "", "run")
    assert code == 0, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("[[")]
    hidden = {entry for _, *entries in json.loads(line) for entry in entries if entry.startswith(".")}
    assert any(entry.startswith(".retired-") for entry in hidden)
    assert any(entry.endswith(".partial") for entry in hidden)
    assert [entry for entry in hidden if taken(entry)] == []


@pytest.mark.parametrize("name", _NAMES)
async def test_several_ranks_share_one_attempt(tmp_path: Path, name: str) -> None:
    store = LocalStore(tmp_path)
    first, second = (store.begin(Attempt(name, kind, "a" * 32, "flush")) for kind in ("directory", "joined"))
    for transaction, file in ((first, "__0_0.distcp"), (second, "__1_0.distcp")):
        transaction.write([(file, BytesBody(b"x"))])
    (hidden,) = tmp_path.iterdir()
    assert not taken(hidden.name)
    assert sorted(path.name for path in hidden.glob("__*")) == ["__0_0.distcp", "__1_0.distcp"]
    first.discard()


def test_names_of_attempts() -> None:
    """Each target has its own, and those of steps are told by theirs."""
    names = [*_NAMES, "step-100.pt", "step-100.txt", "weights", "x" * 255, "step-0", "step-999999999999999999"]
    called = {name: attempt_name(name, "b" * 32) for name in names}
    assert len(set(called.values())) == len(names)
    assert all(len(one) <= 255 and not taken(one) for one in called.values())
    for name, one in called.items():
        expected = "step-100" if name.startswith("step-100.") and name != "step-100.g2" else name
        assert target_of_attempt(one) == (expected if name.startswith("step-") else None), name
        assert target_of_attempt(f".{name}.{'b' * 32}.partial") == target_of_attempt(one), "as it was called before"
