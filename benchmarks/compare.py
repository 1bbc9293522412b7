"""One run of all libraries that save and load on a local disk, in turns, and the tables of pages that are made of it.

    python benchmarks/compare.py measure [--rounds N] [--seconds N] [--directory DIR]
    python benchmarks/compare.py tables

``measure`` runs three shapes of ``storage.py`` with every rival that is installed (the group ``bench`` of
pyproject.toml), and writes docs/figures/compare.json: date, hardware, versions, load, and for each row the medians.
``tables`` writes the tables between ``<!-- figures: NAME -->`` and ``<!-- end -->`` in README.md, docs/comparison.md
and docs/benchmarks.md. tests/test_figures.py fails if a table and the file differ.
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
_KEPT = ("n", "seconds", "of ceiling", "cold GB/s", "GB/s", "blocked warm", "longest pause", "memory")
_CEILINGS = ("write + fsync", "direct I/O, 4 threads", "preadv", "preadv, 4 threads", "idle loop")
_OURS = ("sidestream", "sidestream, streaming=True")
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)

Figures = Mapping[str, Any]


# --- tables ---


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def number(figure: Mapping[str, float], key: str, factor: float = 1, form: str = ".2f", unit: str = "") -> str:
    return f"{figure[key] * factor:{form}}{unit}" if key in figure else "-"


def rivals_of(found: Figures, what: str = "save") -> dict[str, Any]:
    return {name: figure for name, figure in found[what].items() if name not in _CEILINGS and figure["n"]}


def best_rivals(found: Figures, key: str, count: int) -> list[str]:
    rivals = {name: figure for name, figure in rivals_of(found).items() if name not in _OURS and key in figure}
    return sorted(rivals, key=lambda name: rivals[name][key])[:count]


def readme(figures: Figures) -> str:
    """The best three rivals of each figure, for 64 tensors."""
    found = figures["shapes"]["64x16MB"]
    saves, rows = found["save"], []
    for what, key, factor, form, unit in (
        ("durable after", "seconds", 1, ".2f", " s"),
        ("longest pause of the loop until then", "longest pause", 1e3, ".0f", " ms"),
    ):
        rivals = best_rivals(found, key, 3)
        others = ", ".join(f"{name} {number(saves[name], key, factor, form, unit)}" for name in rivals)
        rows.append([what, number(saves["sidestream"], key, factor, form, unit), others])
    size = f"{found['bytes'] / 1e9:.2f} GB in {found['tensors']} tensors"
    return table([size, "sidestream", "the best others"], rows)


def comparison(figures: Figures) -> str:
    """All rivals, for 64 tensors and for a transformer with its optimizer."""
    parts = []
    for shape in ("64x16MB", "transformer"):
        found = figures["shapes"][shape]
        rows = [
            [
                name,
                number(figure, "seconds", 1, ".2f", " s"),
                number(figure, "blocked warm", 1e3, ".1f", " ms"),
                number(figure, "longest pause", 1e3, ".0f", " ms"),
                number(figure, "memory", 1, ".2f"),
                str(figure["n"]),
            ]
            for name, figure in rivals_of(found).items()
        ]
        head = [
            f"{found['bytes'] / 1e9:.2f} GB in {found['tensors']} tensors",
            "durable after",
            "call",
            "longest pause",
        ]
        parts.append(table([*head, "memory, of the state", "rounds"], rows))
    return "\n".join(parts)


def benchmarks(figures: Figures) -> str:
    """All rows of all shapes."""
    parts = [f"```text\n{headline(figures)}\n```\n"]
    for shape in SHAPES:
        found = figures["shapes"][shape]
        parts.append(f"\n{shape}: {found['tensors']:,} tensors, {found['bytes'] / 1e9:.3f} GB\n\n")
        for what in ("save", "load"):
            rows = [
                [
                    name,
                    number(figure, "seconds", 1, ".3f"),
                    number(figure, "GB/s"),
                    number(figure, "of ceiling", 100, ".0f"),
                    number(figure, "longest pause", 1e3, ".1f"),
                    number(figure, "memory"),
                    str(figure["n"]),
                ]
                for name, figure in found[what].items()
            ]
            head = [what, "s", "GB/s", "% of the ceiling", "pause ms", "memory, of the state", "rounds"]
            parts.append(table(head, rows) + ("\n" if what == "save" else ""))
    return "".join(parts)


TABLES: Mapping[str, tuple[str, Callable[[Figures], str]]] = {
    "readme": ("README.md", readme),
    "comparison": ("docs/comparison.md", comparison),
    "benchmarks": ("docs/benchmarks.md", benchmarks),
}


def with_tables(text: str, figures: Figures) -> str:
    """Return a page with the tables of these figures."""

    def made(block: re.Match[str]) -> str:
        return f"{block[1]}\n{TABLES[block[2]][1](figures)}\n{block[4]}"

    return _BLOCK.sub(made, text)


def write_tables(figures: Figures) -> None:
    for page, _ in TABLES.values():
        path = ROOT / page
        path.write_text(with_tables(path.read_text(encoding="utf-8"), figures), encoding="utf-8")


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
