"""What the package says of itself is the same in every place."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import sidestream

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_one_version() -> None:
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == PYPROJECT["version"]
    assert sidestream.__version__


def test_all_has_every_extra_but_the_frameworks() -> None:
    extras = PYPROJECT["optional-dependencies"]
    frameworks = {name for name, needs in extras.items() if any("<" in one for one in needs)}  # only they are bounded
    assert "lightning" in frameworks
    (everything,) = extras["all"]
    assert set(re.findall(r"[a-z]+", everything.partition("[")[2])) == set(extras) - {"all"} - frameworks


def test_pages_are_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_the_wheel_has_both_packages_and_the_script() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {str(path.parent.relative_to(ROOT)) for path in ROOT.glob("src/*/__init__.py")}
    assert set(wheel["packages"]) == packages == {"src/sidestream", "src/sidestream_cli"}
    module, _, function = PYPROJECT["scripts"]["sidestream"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_command_line_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "sidestream_cli", "--version"], capture_output=True, check=True)
    assert done.stdout.decode().strip() == sidestream.__version__
