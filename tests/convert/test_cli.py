"""The command line as a user runs it: processes, exit codes, and what they print."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sidestream

COMMAND = [sys.executable, "-c", "from sidestream.cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run."""
    directory = tmp_path_factory.mktemp("cli") / "run"
    with sidestream.blocking.Checkpointer(directory) as checkpoints:
        for step in (1, 2):
            state = {"model": {"w": torch.arange(600.0).reshape(20, 30) * step, "b": torch.ones(3)}, "step": step}
            checkpoints.save(state, step=step).result()
    return directory


def sidestream_(*words: object, code: int = 0) -> str:
    """Run it and return what it prints."""
    done = subprocess.run(
        [*COMMAND, *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout if code < 2 else done.stderr


def test_ls_and_info(run: Path) -> None:
    steps = json.loads(sidestream_("ls", run, "--json"))
    assert [(one["step"], one["name"], one["tensors"]) for one in steps] == [(1, "step-1", 2), (2, "step-2", 2)]
    shown = sidestream_("info", run / "step-1")
    for word in ("model.w", "float32", "20x30", "2.3 KiB", "__0_1.distcp", "2 tensors", "1 values"):
        assert word in shown


def test_verify(tmp_path: Path) -> None:
    sidestream.blocking.save({"w": torch.arange(1000.0), "fine": torch.ones(2)}, tmp_path / "broken")
    shard = tmp_path / "broken" / "__0_1.distcp"
    raw = bytearray(shard.read_bytes())
    raw[raw.index(torch.arange(1000.0)[500:].numpy().tobytes())] ^= 1
    shard.write_bytes(raw)
    shown = sidestream_("verify", tmp_path / "broken", code=1)
    assert "damaged: w: " in shown
    assert "1 verified, 1 damaged" in shown
    assert "CheckpointNotFound" in sidestream_("verify", tmp_path / "nothing", code=2)


def test_diff(run: Path) -> None:
    found: list[dict[str, Any]] = json.loads(sidestream_("diff", run / "step-1", run / "step-2", "--json", code=1))
    assert found == [
        {"name": "model.w", "what": "changed", "largest": 599.0},
        {"name": "step", "what": "another value", "largest": None},
    ]


def test_convert(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "model.safetensors"
    words = ("--select", "model.*", "--rename", r"^model\.=", "--dtype", "bfloat16")
    report = json.loads(sidestream_("convert", run / "step-2", target, *words, "--json"))
    assert report["tensors"] == ["w", "b"]
    assert load_file(target)["w"].dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_doctor(tmp_path: Path) -> None:
    found = json.loads(sidestream_("doctor", tmp_path, "--json"))
    assert {"torch", "checksums", "direct I/O", "locked memory"} <= {one["what"] for one in found}
    assert list(tmp_path.iterdir()) == []


def test_interrupted_nothing_half_done_is_left(tmp_path: Path) -> None:
    sidestream.blocking.save({"w": torch.zeros(32 << 20)}, tmp_path / "a", durability="flush")
    child = subprocess.Popen(
        [*COMMAND, "convert", str(tmp_path / "a"), str(tmp_path / "b"), "--budget-mib", "96"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while child.poll() is None and len(list(tmp_path.iterdir())) == 1:
        time.sleep(0.001)  # until it has begun to write
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=300)
    assert child.returncode in (0, 130), told  # a fast disk may have been done before
    left = {path.name for path in tmp_path.iterdir()}
    assert left in ({"a"}, {"a", "b"})  # once the commit has been sent it is finished, whoever interrupts
    if "b" in left:
        assert sidestream.blocking.verify(tmp_path / "b").ok
