"""``report`` in runs of Ray Train with two workers."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.train")

import ray
import ray_program
from pyarrow.fs import LocalFileSystem, S3FileSystem
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer

from sidestream import blocking
from sidestream.errors import InvalidOptionError
from sidestream.integrations.ray import _checkpoint, _name_below

pytestmark = pytest.mark.filterwarnings("default")  # those of Ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "300", "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
    yield
    ray.shutdown()


def fit(work: Callable[[dict[str, Any]], None], folder: Path, name: str, *, workers: int = 2, **config: Any) -> Result:
    """Run ``work`` in workers, which are started again as often as they fail if the configuration has lives."""
    return TorchTrainer(
        work,
        train_loop_config={"result": str(folder / f"{name}.result"), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=str(folder),
            name=name,
            failure_config=FailureConfig(max_failures=-1 if "lives" in config else 0),
        ),
    ).fit()


def results(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}.result.{rank}").read_text() for rank in range(2)]


def lives(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_in_two_parts_ends_as_a_whole_one(tmp_path: Path) -> None:
    fit(ray_program.train, tmp_path, "whole", steps=5, lives=str(tmp_path / "whole.lives"))
    fit(ray_program.train, tmp_path, "parts", steps=2, lives=str(tmp_path / "parts.lives"))
    result = fit(ray_program.train, tmp_path, "parts", steps=5, lives=str(tmp_path / "parts.lives"))
    assert [life["start"] for life in lives(tmp_path / "parts.lives")] == [0, 2]
    assert results(tmp_path, "parts") == results(tmp_path, "whole")
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(tmp_path / "parts" / "step-5")
    assert result.metrics is not None
    assert result.metrics["step"] == 5
    reported = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    assert reported == ["step-1", "step-2", "step-3", "step-4", "step-5"]
    assert all(blocking.verify(tmp_path / "parts" / name).ok for name in reported)


def test_another_number_of_workers_continues(tmp_path: Path) -> None:
    for workers, steps in ((2, 2), (1, 3), (3, 4)):
        fit(ray_program.train, tmp_path, "run", workers=workers, steps=steps, lives=str(tmp_path / "lives"))
    assert [life["start"] for life in lives(tmp_path / "lives")] == [0, 2, 3]
    assert [len(life["pids"]) for life in lives(tmp_path / "lives")] == [2, 1, 3]


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.long)])
def test_killed_in_a_save(kills: int, tmp_path: Path) -> None:
    """Each life begins at the newest complete step, and in the end the state is that of a run that was not killed."""
    chance = random.Random(seed := int.from_bytes(os.urandom(4), "little"))
    print("seed", seed)
    noted, run, steps = tmp_path / "lives", tmp_path / "killed", 3 * kills + 3
    ended = threading.Event()
    killer = threading.Thread(target=kill_in_saves, args=(kills, noted, run, chance, ended))
    killer.start()
    try:
        result = fit(ray_program.train, tmp_path, "killed", steps=steps, lives=str(noted))
    finally:
        ended.set()
        killer.join()
    print(*lives(noted), sep="\n")
    assert len(lives(noted)) == kills + 1
    for life in lives(noted):
        assert life["start"] == max(life["there"], default=0)
    assert result.checkpoint is not None
    assert result.checkpoint.path == str(run / f"step-{steps}")
    for step in run.glob("step-*"):
        assert blocking.verify(step).ok
    fit(ray_program.train, tmp_path, "whole", steps=steps, lives=str(tmp_path / "whole.lives"))
    assert results(tmp_path, "killed") == results(tmp_path, "whole")


def kill_in_saves(kills: int, noted: Path, run: Path, chance: random.Random, ended: threading.Event) -> None:
    """Kill one worker or both in each life, in its first, second or third save."""
    for number in range(kills):
        while len(lives(noted)) <= number:
            if ended.wait(0.05):
                return
        seen: set[str] = set()
        before = {path.name for path in run.glob(".*.partial")}
        for _ in range(chance.randint(1, 3)):
            while not (found := {path.name for path in run.glob(".*.partial")} - before - seen):
                if ended.wait(0.0005):
                    return
            seen |= found
        time.sleep(chance.uniform(0, 0.1))  # a save takes about as long
        pids = lives(noted)[number]["pids"]
        for pid in chance.choice([pids, pids[:1], pids[1:]]):
            os.kill(pid, signal.SIGKILL)


def test_other_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match=r"Ray takes one checkpoint from all workers. Save once with all"):
        fit(ray_program.refused, tmp_path, "refused")
    for text in results(tmp_path, "refused"):
        assert "refused.result.elsewhere is not in the experiment directory of Ray Train" in text
        assert f"{tmp_path}/refused, and Ray takes no other checkpoint: save below" in text


def test_one_worker_saves(tmp_path: Path) -> None:
    result = fit(ray_program.one_worker_saves, tmp_path, "one", cancel=False)
    reported = [(Path(checkpoint.path).name, metrics["number"]) for checkpoint, metrics in result.best_checkpoints]
    assert reported == [("step-1", 0), ("step-1.g2", 1), ("last", 2)]


def test_a_save_that_fails_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(TrainingFailedError, match="CancelledError"):
        fit(ray_program.one_worker_saves, tmp_path, "fails", cancel=True)


def test_names_below_the_experiment_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    local = SimpleNamespace(storage_filesystem=LocalFileSystem(), experiment_fs_path=str(tmp_path / "link"))
    for url in (f"{tmp_path}/run/step-1", f"{tmp_path}/link/step-1", f"file://{tmp_path}/run/step-1"):
        assert _checkpoint(local, url).path == f"{tmp_path}/link/step-1"
    bucket = SimpleNamespace(
        storage_filesystem=S3FileSystem(anonymous=True, region="us-east-1"), experiment_fs_path="bucket/runs/run"
    )
    assert _name_below(bucket, "s3://bucket/runs/run/steps/step-1") == "steps/step-1"
    for storage, url in (
        (local, f"{tmp_path}/running/step-1"),
        (local, "s3://bucket/step-1"),
        (bucket, "s3://bucket/runs/step-1"),
        (bucket, "/bucket/runs/run/step-1"),
    ):
        with pytest.raises(InvalidOptionError, match="is not in the experiment directory"):
            _name_below(storage, url)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            "ray.train.report = lambda metrics, *, checkpoint=None, checkpoint_dir_name=None: None",
            "report takes (metrics, checkpoint, checkpoint_dir_name), and not",
        ),
        ("del ray.train.TrainContext.get_storage", "TrainContext has no get_storage"),
    ],
)
def test_another_release_is_refused(change: str, says: str) -> None:
    """In a process of its own, because modules are imported once."""
    code = f"import ray.train\n{change}\nimport sidestream.integrations.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "UnsupportedError: ray 2.60" in done.stderr
    assert says in done.stderr
    assert 'pip install "ray>=2.60,<2.61"' in done.stderr
