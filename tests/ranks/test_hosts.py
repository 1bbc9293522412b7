"""Ranks of one machine read what several of them need once, and hand it to each other through memory."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes share memory on Linux only")

WORLD = 4
ROW_BYTES = 512 * 4
ALL = (32 << 20) + 64 * ROW_BYTES + 700 * ROW_BYTES // 2 + 20 * 33 * 7 * 4
DESCRIPTION = 0.6e6  # of metadata for each rank, about: markers, manifests, ends of zips
NOTHING = ["0 bytes"]
KINDS = ["ours", "ranks", "stock", "file.pt", "safetensors"]


@pytest.fixture(scope="module")
def written(groups: Groups, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hosts")
    groups.run("write_kinds", WORLD, directory)
    return directory


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_a_host_read_once(kind: str, groups: Groups, written: Path) -> None:
    layouts = ["plain", "replicated", "columns", "rows"]
    results = groups.run("load_kind", WORLD, written, kind=kind, layouts=layouts).results
    for layout in layouts:
        read = [told[layout]["read"] for told in results]
        print(f"{kind} {layout}: {sum(read) / ALL:.3f} of the bytes were read in all, by rank {read}")
        assert ALL <= sum(read) <= 1.01 * ALL + WORLD * DESCRIPTION
    for told in results:
        for layout in ("plain", "replicated"):
            assert told[layout]["read"] <= 1.01 * ALL / WORLD + (2 << 20) + DESCRIPTION  # a window too much at most
            assert told[layout]["reported"] >= 0.98 * ALL
            assert 0 < told[layout]["shared"] <= (16 << 20) + (1 << 20)  # and a list of what each needs


def test_a_larger_budget(groups: Groups, written: Path) -> None:
    results = groups.run("load_kind", 3, written, kind="ours", layouts=["plain"], memory_bytes=100 << 20).results
    assert sum(told["plain"]["read"] for told in results) <= 1.01 * ALL + 3 * DESCRIPTION


@pytest.mark.parametrize("kind", ["safetensors", "stock", "file.pt"])
def test_ranks_that_read_different_places_get_their_own(kind: str, groups: Groups, tmp_path: Path) -> None:
    assert groups.run("each_its_own", 3, tmp_path, kind=kind).results == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_is_killed_while_others_wait_for_it(who: int, groups: Groups, written: Path) -> None:
    (written / "told").unlink(missing_ok=True)
    ended = groups.run_any("fail_while_sharing", 3, written, how="die", who=who)
    assert ended.codes[who] == -signal.SIGKILL, ended.said
    for rank in {0, 1, 2} - {who}:
        assert ended.codes[rank] == 0, ended.said[rank]
        assert ended.results[rank] == {"failures": [[who, "RankDied"]], "left": NOTHING}


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_fails_while_others_wait_for_it(who: int, groups: Groups, written: Path) -> None:
    (written / "told").unlink(missing_ok=True)
    for told in groups.run("fail_while_sharing", 3, written, how="raise", who=who).results:
        assert told == {"failures": [[who, "OSError"]], "left": NOTHING}


def test_a_rank_that_fails_before_others_have_opened_its_memory(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("fail_before_sharing", 2, tmp_path).results:
        assert told == [[0, "RuntimeError"]]


def test_a_rank_that_does_nothing_any_more(groups: Groups, written: Path) -> None:
    (written / "told").unlink(missing_ok=True)
    for told in groups.run("fail_while_sharing", 3, written, how="hang", who=1).results:
        assert {kind for _, kind in told["failures"]} == {"DeadlineExceeded"}
        assert told["left"] == NOTHING


@pytest.mark.parametrize("kind", ["ours", "file.pt"])
def test_damage_is_found_by_all(kind: str, groups: Groups, written: Path, tmp_path: Path) -> None:
    source = written / kind
    place = tmp_path / kind
    if source.is_dir():
        place.mkdir()
    for path in [source] if source.is_file() else list(source.iterdir()):
        raw = bytearray(path.read_bytes())
        if len(raw) > 1 << 20:
            raw[len(raw) // 2] ^= 1
        (place / path.name if source.is_dir() else place).write_bytes(raw)
    for failures in groups.run("damaged", 2, tmp_path, kind=kind).results:
        assert failures
        assert {name for _, name in failures} == {"Corrupt"}


@pytest.mark.parametrize("why", ["file_size", "address_space", "memory_files", "seals", "loop"])
def test_where_memory_cannot_be_shared(why: str, groups: Groups, written: Path) -> None:
    for reasons in groups.run("cannot_share", 3, written, why=why).results:
        assert len(reasons) == 1
        assert "cannot" in reasons[0]


def test_a_child_keeps_nothing_of_it(groups: Groups, written: Path) -> None:
    for told in groups.run("children", 3, written).results:
        assert told == [[0, 0, 0]]


def test_ranks_that_mean_different_things(groups: Groups, written: Path) -> None:
    for told in groups.run("differing", 2, written).results:
        assert told == [[[0, "InvalidOption"]], [[0, "InvalidOption"]]]


def test_runs_and_groups(groups: Groups, tmp_path: Path) -> None:
    results = groups.run("restored", 4, tmp_path).results
    assert results == [600 * ROW_BYTES] * 4
