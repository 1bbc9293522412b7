"""Events, errors, messages, files, system calls and requests match the recorded sets. A failure means that behaviour
has changed, by mistake or on purpose. See "Goldens" in ``CONTRIBUTING.md``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _golden_areas import AREAS, record
from _golden_calls import available
from _golden_sets import BASE, SETS, changed, differences, expected, overlays, same, write


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
