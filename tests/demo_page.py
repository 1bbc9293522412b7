"""The figures of the demo in the documentation, made from a run of `examples/train_live.py`.

    python tests/demo_page.py build/train_live

This copies ``train_live.json`` and ``train_live.png`` of that directory to ``docs/figures`` and ``docs/images``, and
writes the table into ``docs/comparison.md``. ``tests/test_examples.py`` compares the page with
``docs/figures/train_live.json``.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures" / "train_live.json"
IMAGE = ROOT / "docs" / "images" / "train_live.png"
PAGE = ROOT / "docs" / "comparison.md"

_TABLE = re.compile(r"(?<=<!-- demo table -->\n).*(?=<!-- /demo table -->)", re.DOTALL)


def with_figures(page: str, report: dict[str, Any]) -> str:
    """Return the page with the figures of a run in the place of those that it has."""
    if len(_TABLE.findall(page)) != 1:
        raise ValueError(f"{PAGE.name} has not exactly one part that matches {_TABLE.pattern!r}")
    return _TABLE.sub(lambda _: measured(report), page)


def measured(report: dict[str, Any]) -> str:
    sys.path.insert(0, str(ROOT / "examples"))
    from train_live_.report import Figures, table

    machine = report["machine"]
    taken = (
        f"Measured on {report['date']}, {machine['cores']} cores ({machine['processor']}), torch {machine['torch']}, "
        f"Python {machine['python']}."
    )
    rows = table([Figures(**row) for row in report["figures"]])
    return f"\n```text\n{rows}\n```\n\n{wrap(taken)}\n"


def wrap(text: str) -> str:
    lines = textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    PAGE.write_text(with_figures(PAGE.read_text("utf-8"), json.loads((folder / FIGURES.name).read_text())), "utf-8")
    shutil.copyfile(folder / FIGURES.name, FIGURES)
    shutil.copyfile(folder / IMAGE.name, IMAGE)
