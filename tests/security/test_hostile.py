"""A checkpoint is data: whatever stands in it, nothing is imported, called, connected to or opened outside of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _hostile import STATE, colliding_cases, file_system_cases, own_cases, safetensors_cases, stock, stock_cases

import sidestream

HERE = Path(__file__).parent
_GROWTH_MIB = 300  # some of the cases, believed, would take terabytes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process saw that opened all of them, one after the other."""
    root = tmp_path_factory.mktemp("hostile")
    sound = root / "sound"
    sound.mkdir()
    (root / "hostile").mkdir()
    sidestream.blocking.save(STATE, sound / "own")
    stock(sound / "stock")
    victim = root / "victim"
    groups = (
        stock_cases(str(victim)),
        file_system_cases(root),
        safetensors_cases(),
        own_cases(sound / "own"),
        colliding_cases(sound / "own"),
    )
    for name, make in (case for group in groups for case in group):
        make(root / "hostile" / name.replace("/", "_"))
    child = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(HERE / "_victim.py"), str(root)],
        env={**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    told: dict[str, Any] = json.loads(child.stdout)
    assert not victim.exists()
    return told


def test_nothing_happens(outcomes: dict[str, Any]) -> None:
    assert {name: one["seen"] for name, one in outcomes["results"].items() if one["seen"]} == {}


def test_every_error_is_typed(outcomes: dict[str, Any]) -> None:
    for name, one in outcomes["results"].items():
        assert "FOREIGN" not in str(one), (name, one)


def test_everything_hostile_is_refused(outcomes: dict[str, Any]) -> None:
    results = dict(outcomes["results"])
    sound = results.pop("sound again")
    assert (sound["state_dict"], sound["load"], sound["verify"]) == ("returned",) * 3
    believed = [name for name, one in results.items() if one["state_dict"] == "returned"]
    assert believed == []
    loaded = {name for name, one in results.items() if one["load"] == "returned"}
    goes_by_name_alone = {"colliding keys of paths", "own list with a hole", "own same path"}
    assert loaded == goes_by_name_alone
    assert len(results) > 150


def test_memory_stays_small(outcomes: dict[str, Any]) -> None:
    assert outcomes["grown_kib"] < _GROWTH_MIB << 10
