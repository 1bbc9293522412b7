"""One run of all libraries that save and load on a local disk, in turns, and the tables of pages that are made of it.

    python benchmarks/compare.py measure [--rounds N] [--seconds N] [--directory DIR]
    python benchmarks/compare.py tables

``measure`` runs three shapes of ``storage.py`` with every rival that is installed (the group ``bench`` of
pyproject.toml), and writes docs/figures/compare.json: date, hardware, versions, load, and for each row the medians.
``tables`` writes the table of docs/benchmarks.md between ``<!-- figures -->`` and ``<!-- end -->``, and the rows of
README.md and docs/comparison.md. tests/test_figures.py fails if they and the file differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _common import headline

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures" / "compare.json"
SHAPES = ("64x16MB", "transformer", "10000x1KiB")
_KEPT = ("n", "seconds", "of ceiling", "cold GB/s", "longest pause", "memory bytes")

Figures = Mapping[str, Any]


# --- tables ---


def number(figure: Mapping[str, float], key: str, factor: float = 1, form: str = ".2f") -> str:
    return f"{figure[key] * factor:{form}}" if key in figure else ""


def whole_table(figures: Figures) -> str:
    """All rows of all shapes, as ``storage.py`` prints them."""
    parts = [headline(figures)]
    for shape in SHAPES:
        found = figures["shapes"][shape]
        parts.append(f"\n{shape}: {found['tensors']:,} tensors, {found['bytes'] / 1e9:.3f} GB")
        for what in ("save", "load"):
            parts.append(f"  {what:30}{'s':>9}{'pause ms':>10}{'memory MB':>11}")
            parts += [
                f"  {name:30}{number(row, 'seconds', 1, '.3f'):>9}{number(row, 'longest pause', 1e3, '.1f'):>10}"
                f"{number(row, 'memory bytes', 1e-6, '.0f'):>11}".rstrip()
                for name, row in found[what].items()
            ]
    return "```text\n" + "\n".join(parts) + "\n```\n"


def row_of(figures: Figures, key: str, factor: float, form: str, unit: str, rivals: Sequence[str]) -> list[str]:
    saves = figures["shapes"]["64x16MB"]["save"]
    return [f"{number(saves[name], key, factor, form)}{unit}" for name in rivals]


_BESIDE = ("sidestream", "dcp.async_save, DefaultStager", "torch_checkpointing", "orbax", "torchsnapshot")

ROWS: Mapping[tuple[str, str], Callable[[Figures], list[str]]] = {
    ("README.md", "1.02 GB in 64 tensors, acknowledged"): lambda figures: row_of(
        figures, "seconds", 1, ".2f", " s", _BESIDE[:4]
    ),
    ("docs/comparison.md", "1.02 GB in 64 tensors until acknowledged"): lambda figures: [
        *row_of(figures, "seconds", 1, ".2f", " s", _BESIDE),
        "[8](#sources)",
    ],
    ("docs/comparison.md", "the loop stands still during such a save"): lambda figures: [
        *row_of(figures, "longest pause", 1e3, ".0f", " ms", _BESIDE),
        "[8](#sources)",
    ],
}
"""Rows of tables that say other things too: the page, the first cell, and the cells behind it."""
PAGES = ("README.md", "docs/comparison.md", "docs/benchmarks.md")
_WHOLE = re.compile(r"(<!-- figures -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def with_tables(page: str, text: str, figures: Figures) -> str:
    """Return a page with these figures."""
    text = _WHOLE.sub(lambda block: f"{block[1]}\n{whole_table(figures)}\n{block[3]}", text)
    for (of, first), cells in ROWS.items():
        if of == page:
            row = f"| {' | '.join([first, *cells(figures)])} |"
            text, count = re.subn(rf"^\| {re.escape(first)} \|.*$", row, text, flags=re.MULTILINE)
            assert count == 1, f"{page} has no row {first!r}"
    return text


def write_tables(figures: Figures) -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(with_tables(page, path.read_text(encoding="utf-8"), figures), encoding="utf-8")


# --- the run ---


def measure(arguments: argparse.Namespace) -> Figures:
    import storage

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    arguments.shapes, arguments.rivals = list(SHAPES), None
    with tempfile.TemporaryDirectory(dir=os.path.abspath(arguments.directory)) as scratch:
        results = asyncio.run(storage.run(arguments, Path(scratch)))
    for shape in results["shapes"].values():
        for what in ("save", "load"):
            rows = shape[what].items()
            shape[what] = {name: {key: round(row[key], 4) for key in _KEPT if key in row} for name, row in rows}
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "tables"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=280, help="for all shapes together, roughly")
    parser.add_argument("--directory", default=".", help="where to write, on the disk that is to be measured")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        FIGURES.write_text(json.dumps(measure(arguments), indent=1) + "\n", encoding="utf-8")
    write_tables(json.loads(FIGURES.read_text(encoding="utf-8")))
