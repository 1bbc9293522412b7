"""The tables of figures in pages are those of docs/figures/compare.json."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("compare")
    sys.modules.pop("compare")


def test_tables_are_those_of_the_file(compare: Any) -> None:
    figures = json.loads(compare.FIGURES.read_text(encoding="utf-8"))
    for name, (page, _) in compare.TABLES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"<!-- figures: {name} -->" in text, page
        assert compare.with_tables(text, figures) == text, f"{page}: run python benchmarks/compare.py tables"


def test_a_changed_figure_is_found(compare: Any) -> None:
    figures = json.loads(compare.FIGURES.read_text(encoding="utf-8"))
    figures["shapes"]["64x16MB"]["save"]["sidestream"]["seconds"] += 1.0
    for page, _ in compare.TABLES.values():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert compare.with_tables(text, figures) != text
