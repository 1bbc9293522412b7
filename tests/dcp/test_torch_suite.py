"""The substitutes that ``nox -s dcp_suite`` installs for DCP's own names in every process that has them on its path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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


SUITE = """
import os
from unittest import TestCase

OURS = os.environ["OURS"] == "yes"


def skip_if_lt_x_gpu(number):
    return lambda test: test


class TestOne(TestCase):
    def test_passes(self):
        pass

    def test_fails_with_both(self):
        assert False

    @skip_if_lt_x_gpu(2)
    def test_is_skipped(self):
        self.skipTest("skipped at last")

    def test_differs(self):
        assert not OURS

    def test_fails_at_its_end(self):
        self.addCleanup(self.fail)
"""


def _run_suite(folder: Path, ours: str, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(folder), "-p", "suite_outcomes"]
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "SIDESTREAM_TORCH_SUITE": "", "OURS": ours}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # which takes longer than these tests
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", *options, str(folder / "test_one.py")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def _last(text: str) -> str:
    return text.splitlines()[-1].rpartition(" in ")[0]


def test_only_what_passes_with_dcps_own_is_asked_of_ours(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(SUITE)
    passed, differs = tmp_path / "passed.txt", "--suite-differs=test_one.py::TestOne::test_differs"

    code, text = _run_suite(tmp_path, "no", "-rs", f"--suite-passed={passed}")
    assert (code, _last(text)) == (1, "2 failed, 2 passed, 1 skipped")
    assert "test_one.py: 2 of 5" in text
    assert ("needs GPUs" in text) is (torch.accelerator.device_count() == 0)  # and no process has been started for it
    assert passed.read_text() == "test_one.py::TestOne::test_differs\ntest_one.py::TestOne::test_passes\n"

    code, text = _run_suite(tmp_path, "yes", f"--suite-chosen={passed}")
    assert (code, _last(text)) == (1, "1 failed, 1 passed, 3 deselected")
    assert "test_one.py: 1 of 2" in text
    code, text = _run_suite(tmp_path, "yes", f"--suite-chosen={passed}", differs)
    assert (code, _last(text)) == (0, "1 passed, 3 deselected, 1 xfailed")
    code, text = _run_suite(tmp_path, "no", f"--suite-chosen={passed}", differs)
    assert (code, _last(text)) == (1, "1 failed, 1 passed, 3 deselected")  # what differs no more has to leave the list
    assert "XPASS(strict)" in text
