"""Random programs of stages and saves on the simulated CUDA runtime; each sabotaged version of the library is caught.

``CUDASIM_SEED`` chooses the programs and the schedules, ``CUDASIM_PROGRAMS`` how many there are for each driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

cudasim: Any = pytest.importorskip("cudasim", reason="needs the simulated CUDA runtime")
if not getattr(cudasim, "active", bool)():  # without it the name may stand for this folder
    pytest.skip("needs the simulated CUDA runtime", allow_module_level=True)

import _programs  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning"),
]

HERE = Path(__file__).parent
SEED = int(os.environ.get("CUDASIM_SEED", "0"))
PROGRAMS = int(os.environ.get("CUDASIM_PROGRAMS", "20"))
CAUGHT_WITHIN = 60  # programs; each sabotage is seen in far fewer


@pytest.mark.parametrize("driver", ["cuda", "torch"])
def test_random_programs(driver: str, record_property: Any) -> None:
    stages = 0
    for number in range(PROGRAMS):
        seed = SEED * 100_000 + number
        try:
            stages += _programs.program(seed, driver=driver)
        except Exception as error:
            error.add_note(f"python {HERE / '_programs.py'} --only {seed} --driver {driver}")
            raise
    record_property("stages", stages)
    print(f"{PROGRAMS} programs with the {driver} driver: {stages} stages and saves")


@pytest.mark.parametrize("sabotage", _programs.SABOTAGES)
def test_programs_detect_a_sabotaged_library(sabotage: str) -> None:
    command = [sys.executable, "-W", "ignore", str(HERE / "_programs.py"), "--driver=cuda", f"--sabotage={sabotage}"]
    ended = subprocess.run(
        [*command, f"--seed={SEED}", f"--programs={CAUGHT_WITHIN}"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Wrong: " in ended.stdout, ended.stdout
    print(sabotage, "was caught by program", ended.stdout)
