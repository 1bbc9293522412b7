"""The figures of the demo in the README, made from a run of `examples/train_live.py`.

    python tests/demo_page.py build/train_live

This copies ``train_live.json`` and ``train_live.png`` of that directory to ``docs/figures`` and ``docs/images``, and
writes the table and the sentence about it into the README. ``tests/test_examples.py`` compares the README with
``docs/figures/train_live.json``.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures" / "train_live.json"
IMAGE = ROOT / "docs" / "images" / "train_live.png"
README = ROOT / "README.md"

_CLAIM = re.compile(r"- \*\*The loop keeps turning\.\*\*.*?(?=^- )", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"(?<=<!-- demo table -->\n).*(?=<!-- /demo table -->)", re.DOTALL)


def with_figures(page: str, report: dict[str, Any]) -> str:
    """Return the README with the figures of a run in the place of those that it has."""
    for part, text in ((_CLAIM, claim(report)), (_TABLE, measured(report))):
        if len(part.findall(page)) != 1:
            raise ValueError(f"README.md has not exactly one part that matches {part.pattern!r}")
        page = part.sub(lambda _, text=text: text, page)
    return page


def claim(report: dict[str, Any]) -> str:
    rows = {row["name"]: row for row in report["figures"]}
    ours, theirs = rows["sidestream"], rows["dcp.async_save"]
    return wrap(
        f"- **The loop keeps turning.** While {ours['checkpoint_bytes'] / 1e6:.0f} MB were saved, the longest pause of "
        f"the loop was {1e3 * ours['longest_pause_s']:.0f} ms (99 % of the pauses below "
        f"{math.ceil(1e3 * ours['p99_pause_s'])} ms), and {1e3 * theirs['longest_pause_s']:.0f} ms with "
        f"`dcp.async_save`. The checkpoint was durable after {ours['durable_s']:.2f} s instead of "
        f"{theirs['durable_s']:.1f} s. `nox -s demo` repeats [this measurement](#measured).",
        "  ",
    )


def measured(report: dict[str, Any]) -> str:
    sys.path.insert(0, str(ROOT / "examples"))
    from train_live_.report import Figures, table

    machine = report["machine"]
    taken = (
        f"Measured on {report['date']}, {machine['cores']} cores ({machine['processor']}), torch {machine['torch']}, "
        f"Python {machine['python']}. {report['notes']}"
    )
    rows = table([Figures(**row) for row in report["figures"]])
    return f"\n```text\n{rows}\n```\n\n{wrap(taken)}\n"


def wrap(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    README.write_text(with_figures(README.read_text("utf-8"), json.loads((folder / FIGURES.name).read_text())), "utf-8")
    shutil.copyfile(folder / FIGURES.name, FIGURES)
    shutil.copyfile(folder / IMAGE.name, IMAGE)
