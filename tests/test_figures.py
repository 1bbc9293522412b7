"""The figures of all rivals in pages are those of docs/figures/compare.json."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("compare")
    sys.modules.pop("compare")


def test_tables_are_those_of_the_file(compare: Any) -> None:
    figures = json.loads(compare.FIGURES.read_text(encoding="utf-8"))
    for page in compare.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert compare.with_tables(page, text, figures) == text, f"{page}: run python benchmarks/compare.py tables"
    assert "<!-- figures -->" in (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_a_changed_figure_is_found(compare: Any) -> None:
    figures = json.loads(compare.FIGURES.read_text(encoding="utf-8"))
    figures["shapes"]["64x16MB"]["save"]["sidestream"]["seconds"] += 1.0
    for page in compare.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert compare.with_tables(page, text, figures) != text
