"""A power cut on a real file system: what was acknowledged is there afterwards, and nothing is there in part."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from _faults import look, make_state
from _mounts import mounted
from _trials import Told, Trials

import sidestream

FILE_SYSTEMS = {"ext4": "64M", "xfs": "300M"}
CUTS = 16


class Disk:
    """An image with a file system and a run with step 1; every trial starts with a copy."""

    def __init__(self, kind: str, folder: Path) -> None:
        make = shutil.which(f"mkfs.{kind}")
        if make is None:
            pytest.skip(f"mkfs.{kind} is not installed")
        self._base, self._image, self._place = folder / "base.img", folder / "trial.img", folder / "disk"
        with self._base.open("wb") as image:
            image.truncate(int(FILE_SYSTEMS[kind][:-1]) << 20)
        subprocess.run([make, "-q", str(self._base)], check=True, capture_output=True)

    def mount(self, *, base: bool = False) -> Any:
        return mounted(self._place, "-o", "loop", str(self._base if base else self._image))

    def renew(self) -> None:
        subprocess.run(["cp", "--sparse=always", str(self._base), str(self._image)], check=True)


@pytest.fixture(params=FILE_SYSTEMS)
async def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    disk = Disk(request.param, tmp_path)
    with disk.mount(base=True) as place:
        async with sidestream.Checkpointer(place / "run") as checkpoints:
            await (await checkpoints.save(make_state(11), step=1))
    return disk


def cut(disk: Disk, children: Trials, at: int, run: str = "run", **options: Any) -> Told:
    """Save step 2; the power goes at operation ``at``, or, if there is none, as soon as the save is acknowledged."""
    disk.renew()
    with disk.mount() as place:
        told = children.run(root=place, run=place / run, saves=[(2, 12)], at=at, cut=str(place), **options)
    assert told.exit == -signal.SIGKILL, told
    return told


@pytest.mark.parametrize("run", ["run", "new/run/below"])
async def test_an_acknowledged_save_survives(run: str, disk: Disk, children: Trials) -> None:
    told = cut(disk, children, 0, run)
    assert told.acked == {"step-2": 12}
    with disk.mount() as place:
        found = await look(place / run)
        first = await look(place / "run")
    assert found.violations + first.violations == []
    assert found.seeds["step-2"] == 12
    assert first.seeds["step-1"] == 11


async def test_a_cut_during_a_save(disk: Disk, children: Trials) -> None:
    """The older step survives, the newer one is there whole or not at all, and the next save works."""
    operations = cut(disk, children, 0).get("operations")
    renamed = operations.index("rename") + 1
    points = [*random.Random(7).sample(range(1, renamed), CUTS), renamed, renamed + 1, len(operations)]
    for at in points:
        told = cut(disk, children, at)
        assert told.get("killed_at") == operations[at - 1]
        with disk.mount() as place:
            found = await look(place / "run")
            assert found.violations == [], at
            assert found.seeds in ({"step-1": 11}, {"step-1": 11, "step-2": 12}), at
            async with sidestream.Checkpointer(place / "run") as checkpoints:
                await (await checkpoints.save(make_state(99), step=3))
            assert (await look(place / "run")).seeds == {**found.seeds, "step-3": 99}
