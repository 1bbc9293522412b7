"""Hooks of mkdocs: columns of pages, what copy buttons copy, links in the reference, and the Markdown beside each page.

``docs/llms.txt`` links to the Markdown.
"""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from typing import Any

HIDDEN = {"index.md": ["navigation"], "comparison.md": ["toc"]}
"""Columns that pages do without."""

_BLOCK = re.compile(r'<div class="highlight">(<pre>.*?</pre>)', re.DOTALL)
_PROMPT = re.compile(r'<span class="gp">\$ </span>(.*?)$', re.MULTILINE)
_NAME = re.compile(r"<code>([A-Za-z_][\w.]*)</code>")
_SEVERAL = re.compile(r"<code>\(.*?\)</code>")
_ERROR = re.compile(r"(?<=[( ])[A-Z]\w+Error\b")
_PAGE = re.compile(r"<code>docs/([\w/]+)\.md(#[\w-]+)?</code>")


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    page.meta.setdefault("hide", HIDDEN.get(page.file.src_uri, []))
    return markdown


def on_page_content(content: str, page: Any, config: Any, **others: Any) -> str:
    content = _BLOCK.sub(with_commands, content)
    if page.file.src_uri.startswith("api/"):
        content = with_links(content, public_names(Path(config.docs_dir)))
    return content


def with_commands(block: re.Match[str]) -> str:
    """Let the copy button of a console block copy its commands, without prompts and output."""
    commands = [html.unescape(re.sub(r"<[^>]+>", "", found)) for found in _PROMPT.findall(block[1])]
    if not commands:
        return block[0]
    return f'<div class="highlight" data-copy="{html.escape(chr(10).join(commands))}">{block[1]}'


def public_names(docs: Path) -> dict[str, str]:
    """Return the identifier of each name that a page of the reference shows, by the names that docstrings use."""
    found: dict[str, str] = {}
    for page in sorted(docs.glob("api/*.md")):
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
            found |= {path: path, path.removeprefix("sidestream."): path}
            if path.rpartition(".")[2][0].isupper():
                found.setdefault(path.rpartition(".")[2], path)
    for name in re.findall(r"^class (\w+)\(", (docs.parent / "src/sidestream/errors.py").read_text(), re.MULTILINE):
        found.setdefault(name, f"sidestream.errors.{name}")
    return found


def with_links(content: str, names: dict[str, str]) -> str:
    """Make names and pages that docstrings mention links. Code in blocks has no ``<code>`` of one name."""

    def link(name: str, shown: str) -> str:
        return f'<autoref identifier="{names[name]}" optional>{shown}</autoref>' if name in names else shown

    def page(found: re.Match[str]) -> str:
        return f'<a href="../../{found[1]}/{found[2] or ""}">{found[1].replace("_", " ")}</a>'

    content = _PAGE.sub(page, content)
    content = _SEVERAL.sub(lambda several: _ERROR.sub(lambda found: link(found[0], found[0]), several[0]), content)
    return _NAME.sub(lambda found: link(found[1], found[0]), content)


def on_post_build(config: Any) -> None:
    for page in Path(config.docs_dir).rglob("*.md"):
        target = Path(config.site_dir, page.relative_to(config.docs_dir))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)
