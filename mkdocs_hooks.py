"""Hooks of mkdocs: some pages have fewer columns, and each page has its Markdown beside it.

``docs/llms.txt`` links to the Markdown.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

HIDDEN = {"index.md": ["navigation"], "comparison.md": ["toc"]}
"""Columns that pages do without."""


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    page.meta.setdefault("hide", HIDDEN.get(page.file.src_uri, []))
    return markdown


def on_post_build(config: Any) -> None:
    for page in Path(config.docs_dir).rglob("*.md"):
        target = Path(config.site_dir, page.relative_to(config.docs_dir))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)
