"""Events, errors, files, system calls and requests match the recorded sets. A failure means that behaviour
has changed, by mistake or on purpose. See "Goldens" in ``CONTRIBUTING.md``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from _golden_areas import AREAS, record
from _golden_calls import Call, available
from _golden_sequences import Told
from _golden_sets import BASE, SETS, changed, differences, expected, overlays, same, write
from _golden_stores import steps
from _golden_table import Table
from _s3_server import Request


@pytest.mark.parametrize("area", AREAS)
async def test_nothing_has_changed(area: str, tmp_path: Path) -> None:
    if area == "system-calls" and not available():
        pytest.skip("system calls are recorded on Linux on x86-64")
    found = await record(area, tmp_path)
    told = differences(area, expected(area), found)
    remedy = (
        f"if this is intended: python tests/goldens/record.py --area {area} --overlay YYYY-MM-DD-topic --reason '...'"
    )
    assert not told, "\n".join([*told, remedy])


def test_every_set_gives_a_reason() -> None:
    for name in overlays():
        files = sorted((SETS / name).glob("*.json"))
        assert files, name
        for path in files:
            content = json.loads(path.read_text())
            assert content["reason"].strip(), path
            assert path.stem in AREAS, path


def test_overlays_change_and_remove_entries(tmp_path: Path) -> None:
    write(BASE, "a", {"kept": 1, "changed": {"returns": 1}, "gone": 2}, "base", tmp_path)
    found = {"kept": 1, "changed": {"returns": 2}, "new": 3}
    assert len(differences("a", expected("a", sets=tmp_path), found)) == 3
    write("2026-01-01-one", "a", changed(expected("a", sets=tmp_path), found), "why", tmp_path)
    assert differences("a", expected("a", sets=tmp_path), found) == []
    assert json.loads((tmp_path / "2026-01-01-one" / "a.json").read_text())["entries"] == {
        "changed": {"returns": 2},
        "gone": None,
        "new": 3,
    }


def test_events_may_be_added_and_nothing_else() -> None:
    one = {"returns": 1, "events": ["a", "b"]}
    assert same(one, {"returns": 1, "events": ["x", "a", "y", "b"]})
    assert not same(one, {"returns": 1, "events": ["b", "a"]})
    assert not same(one, {"returns": 1, "events": ["a"]})
    assert not same(one, {"returns": 2, "events": ["a", "b"]})


def test_of_a_text_its_names_are_kept(tmp_path: Path) -> None:
    text = f"w: verify='no' has to be one of 'always', \"manifest\" for {tmp_path}/a.b: pass trust=, or call dict(it)"
    assert Table(tmp_path).names(text) == ["always", "dict", "manifest", "trust=", "verify='no'", "w", "{folder}/a.b"]


def test_what_is_not_synced_when_it_appears_is_told() -> None:
    made = Call("openat", 1, "/root/.a.partial/f", flags=os.O_CREAT | os.O_WRONLY)
    synced = [Call("fsync", 1, "/root/.a.partial/f"), Call("fsync", 1, "/root/.a.partial")]
    appears, after = Call("rename", 1, "/root/.a.partial", "/root/c"), Call("fsync", 1, "/root")
    assert Told("/root").of([made, *synced, appears, after]) == {"steps": ["appears c"]}
    assert Told("/root").of([made, *synced[1:], appears, after]) == {"steps": ["appears c, not synced: .a.partial/f"]}
    assert Told("/root").of([made, *synced, appears]) == {"steps": ["appears c"], "names not synced": ["c"]}
    in_place = Told("/root").of([Call("pwrite64", 1, "/root/c/f"), Call("unlink", 1, "/root/c/f")])
    assert in_place == {"steps": ["writes c/f in place", "deletes c/f"]}


def test_a_deletion_has_its_place_after_the_commit_is_read_back() -> None:
    commit, look = Request("create", "c/.metadata"), Request("get", "c/.metadata")
    wrote, deleted = Request("put", "c/__0"), Request("delete_many", "", keys=("c/__0",))
    good = ["write c: __0", "create c/.metadata", "read back c/.metadata", "delete c: __0"]
    assert steps([wrote, commit, look, look, deleted]) == good
    assert steps([wrote, commit, deleted, look]) == [good[0], good[1], good[3]]
    assert steps([commit, wrote]) == [good[1], good[0]]
