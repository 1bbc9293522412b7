"""The substitutes that ``nox -s dcp_suite`` installs for DCP's own names in every process that has them on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "torch_suite"

PROGRAM = """
import sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager
import sidestream
from sidestream.dcp import StorageReader, StorageWriter

assert issubclass(FileSystemWriter, StorageWriter) and dcp.FileSystemWriter is FileSystemWriter
assert issubclass(FileSystemReader, StorageReader) and dcp.FileSystemReader is FileSystemReader
assert BlockingAsyncStager is sidestream.BlockingAsyncStager and issubclass(DefaultStager, sidestream.AsyncStager)
state, path = {"w": torch.arange(5.0), "n": 3}, sys.argv[1]
for _ in range(2):  # the second overwrites, as with DCP's own
    metadata = dcp.save(state, checkpoint_id=path)
assert metadata.state_dict_metadata.keys() == state.keys()
dcp.save_state_dict(state, FileSystemWriter(path, True, True, 2), no_dist=True)
target = {"w": torch.zeros(5), "n": 0}
dcp.load(target, checkpoint_id=path)
assert torch.equal(target["w"], state["w"]) and target["n"] == 3
dcp.load_state_dict(target, FileSystemReader(path), no_dist=True)
dcp.save(state, FileSystemWriter(path))  # by position
target = {"w": torch.zeros(5), "n": 0}
dcp.load(target, FileSystemReader(path), planner=DefaultLoadPlanner())
assert torch.equal(target["w"], state["w"]) and target["n"] == 3
dcp.async_save(state, checkpoint_id=path, async_stager=DefaultStager()).upload_completion.result()
assert (dcp.save.__module__ == "_substitutes") is (sys.argv[2] == "verbs")
assert sidestream.open_checkpoint is not None
"""


@pytest.mark.parametrize("what", ["storage", "verbs"])
def test_ours_take_the_place_of_dcps(what: str, tmp_path: Path) -> None:
    paths = os.pathsep.join([str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    environment = os.environ | {"PYTHONPATH": paths, "SIDESTREAM_TORCH_SUITE": what, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "c"), what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "c").glob("manifest-*"))
