"""Several ranks, as real processes with one gloo group, that save and load through DCP with our storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import warm
from _dcp_rank import CASES, COLUMNS, LARGE, ROWS
from _s3_server import serving
from stock import stock_load

import sidestream

WORLD = 2


class Told(NamedTuple):
    """What each rank told of each case, and where they wrote."""

    ranks: list[dict[str, Any]]
    directory: Path
    objects: set[str]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    directory = tmp_path_factory.mktemp("ranks")
    target = directory / "saved"
    target.mkdir()
    with serving() as server:
        s3 = json.dumps({"base": f"s3://{server.bucket}/run", "options": server.options})
        _run(directory, target, {**os.environ, "DCP_TEST_S3": s3})
        objects = set(server.objects)
    lines = [(directory / f"{rank}.out").read_text().splitlines() for rank in range(WORLD)]
    told = [{case: what for line in each for case, what in json.loads(line).items()} for each in lines]
    return Told(told, target, objects)


def _run(directory: Path, target: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, str(Path(__file__).parent / "_dcp_rank.py")]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(WORLD):
            arguments = [str(rank), str(WORLD), str(directory / "store"), str(target)]
            with (directory / f"{rank}.out").open("wb") as out, (directory / f"{rank}.err").open("wb") as err:
                child = warm.Popen(
                    [*command, *arguments],
                    stdout=out,
                    stderr=err,
                    cwd=directory,
                    start_new_session=True,
                    env=environment,
                )
            children.append(child)
        codes = [child.wait(300) for child in children]
    finally:
        for child in children:
            with suppress(ProcessLookupError):  # with the process that DCP has started for it
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(60)
    words = [(directory / f"{rank}.err").read_text() for rank in range(WORLD)]
    assert codes == [0] * WORLD, words


@pytest.mark.parametrize("case", ["sync", "threads", "process", "caching", "zstd", "overwrite"])
def test_saved_sharded_and_loaded_resharded(case: str, told: Told) -> None:
    for rank in told.ranks:
        assert rank[case]
        assert all(rank[case]), rank[case]


def whole(plus: int) -> dict[str, Any]:
    return {
        "rows": ROWS + plus,
        "deep": {"columns": COLUMNS + plus, "plain": torch.arange(5) + plus},
        "large": LARGE + plus,
        "whole": ROWS + plus,
        "step": 7 + plus,
        "betas": (0.9, 0.99),
    }


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to load in a single process.*:UserWarning")
@pytest.mark.parametrize(
    ("name", "plus"), [("sync", 0), ("thread0", 0), ("thread1", 1), ("process", 1), ("cached2", 2), ("again", 1)]
)
async def test_one_process_reads_what_ranks_wrote(name: str, plus: int, told: Told) -> None:
    from states import assert_same
    from stock import blank

    target = blank(whole(plus))
    report = await sidestream.load(target, told.directory / name)
    assert_same(whole(plus), target)
    assert report.save_id
    assert report.unverified == ()
    assert_same(whole(plus), stock_load(blank(whole(plus)), told.directory / name))
    assert {path.name[:4] for path in (told.directory / name).glob("*.distcp")} == {"__0_", "__1_"}


def test_a_rank_that_fails_fails_all_and_nothing_is_visible(told: Told) -> None:
    for rank in told.ranks:
        assert rank["failing_rank"] == {"1": "RuntimeError", "visible": "False", "again": "True"}


def test_what_stands_in_the_way_is_told_to_all(told: Told) -> None:
    for rank in told.ranks:
        assert rank["conflict"] == {"0": "CheckpointExistsError"}
        assert rank["not_shared"] == {"1": "StorageNotSharedError"}
        assert rank["other_names"] == {"1": "InvalidOptionError"}
        assert rank["no_collectives"] == "InvalidOptionError"


def test_object_storage_with_credentials_of_its_own(told: Told) -> None:
    for rank in told.ranks:
        assert rank["object_store"] == {"same": [True, True], "told": {"1": "RuntimeError"}}
    assert {key.split("/")[1] for key in told.objects} == {"step-0", "step-1"}
    assert {"run/step-0/.metadata", "run/step-1/.metadata"} <= told.objects


def test_nothing_but_checkpoints_is_left(told: Told) -> None:
    saved = {"sync", "stock", "thread0", "thread1", "process0", "process", "cached0", "cached1", "cached2"}
    saved |= {"zstd", "failing", "again", "disk0"}
    assert {path.name for path in told.directory.iterdir()} == saved
    assert list((told.directory / "disk0").iterdir()) == []


def test_every_case_has_its_test() -> None:
    told_of = Path(__file__).read_text()
    assert [case for case in CASES if f'"{case}"' not in told_of] == []
