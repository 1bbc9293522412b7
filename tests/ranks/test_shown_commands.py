"""The commands of torchrun that pages show print what the pages say."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest

DOCS = pages.ROOT / "docs"
WITH_RANKS = [page for page in sorted(DOCS.rglob("*.md")) if "$ torchrun" in page.read_text()]


@pytest.mark.parametrize("page", WITH_RANKS, ids=lambda page: str(page.relative_to(DOCS)))
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    printed = pages.run(text, tmp_path)
    for command, output in zip(pages.commands(text), printed, strict=True):
        assert pages.shape(output) == pages.shape(command.output), command.text
