"""A full disk on one rank, ranks that are told to end, and other ways to stage over ranks."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Groups


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("limit_bytes", [1, 64 << 10])
def test_a_disk_that_is_full_for_one_rank(limit_bytes: int, who: int, groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("full_disk", 3, tmp_path, who=who, limit_bytes=limit_bytes).results:
        ((rank, text),) = told["failures"]
        assert rank == who
        assert os.strerror(errno.EFBIG) in text, text
        assert (told["outcome"], told["visible"]) == ("absent", False)
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".group")) == ["after", "before"]


def test_ranks_that_are_told_to_end(groups: Groups, tmp_path: Path) -> None:
    for told in groups.run("preempted", 3, tmp_path).results:
        assert told == [None, 7, [1, 7]]


def test_other_ways_to_stage(groups: Groups, tmp_path: Path) -> None:
    groups.run("other_stagers", 2, tmp_path)


@pytest.mark.parametrize("turns", [0, 20])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_closes_its_loop(who: int, turns: int, groups: Groups, tmp_path: Path) -> None:
    """The other ranks are notified, although the process lives and makes no other call."""
    ended = groups.run("closed_loop", 2, tmp_path, who=who, turns=turns)
    for rank, told in enumerate(ended.results):
        assert told["outcome"] == ("committed" if told["visible"] else "absent"), told
        if rank != who and not told["visible"]:
            ((one, kind),) = told["failures"]
            assert one == who, told
            assert kind != "DeadlineExceededError", "they were not told: they waited in vain"
    assert not list(tmp_path.glob("*.partial"))
