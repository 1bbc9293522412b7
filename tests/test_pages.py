"""What pages show is what happens: output of commands, parts of examples, the command line, the list of pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import cli_page
import pages
import pytest

DOCS = pages.ROOT / "docs"
ALL = sorted(DOCS.rglob("*.md"))
"""Every page. Those with commands of torchrun run in tests/ranks."""


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


def here(page: Path) -> bool:
    """Whether this is the quickstart, the command line or a page about an integration, with commands that run here."""
    wanted = page.parent != DOCS or page in (cli_page.PAGE, DOCS / "quickstart.md")
    found = pages.commands(page.read_text()) if wanted else []
    return bool(found) and not any("torchrun" in one.text for one in found)


@pytest.mark.parametrize("page", [page for page in ALL if here(page)], ids=name)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    printed = pages.run(text, tmp_path)
    for command, output in zip(pages.commands(text), printed, strict=True):
        assert pages.shape(output) == pages.shape(command.output), command.text


@pytest.mark.parametrize("page", [page for page in ALL if pages.titled(page.read_text())], ids=name)
def test_parts_of_examples_are_in_the_examples(page: Path) -> None:
    for title, blocks in pages.titled(page.read_text()).items():
        if "/" in title:
            source = (pages.ROOT / title).read_text()
            assert [block for block in blocks if not pages.is_part(block, source)] == []


def test_the_helpers_notice_differences(tmp_path: Path) -> None:
    shown = "```console\n$ echo 1 one\n2 one\n$ echo two\nthree\n```\n"
    text = shown + "<!-- skip: not here -->\n```console\n$ false\n```\n"
    printed = pages.run(text, tmp_path)
    same = [pages.shape(one.output) == pages.shape(two) for one, two in zip(pages.commands(text), printed, strict=True)]
    assert same == [True, False]
    assert "$ echo 1 one\n1 one\n$ echo two\ntwo\n```" in pages.refreshed(text, printed)
    assert pages.is_part("a\n", "if x:\n    a\n")
    assert not pages.is_part("a\nb\n", "if x:\n    a\n    c\n")


def test_the_page_of_the_command_line_is_what_the_program_says() -> None:
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.page(), "run: python tests/cli_page.py"


def test_llms_txt_lists_every_page() -> None:
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): .+$", (DOCS / "llms.txt").read_text(), re.M)
    assert sorted(listed) == sorted(name(page) for page in ALL)


def test_the_gallery_lists_every_example() -> None:
    listed = set(re.findall(r"examples/(\w+\.py)", (DOCS / "gallery.md").read_text()))
    assert listed == {path.name for path in (pages.ROOT / "examples").glob("*.py")}


def test_copy_buttons_copy_commands_and_names_of_the_reference_are_links() -> None:
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", pages.ROOT / "mkdocs_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)

    console = (
        '<div class="highlight"><pre><code><span class="gp">$ </span>ls<span class="w"> </span>&quot;a&quot;\n'
        '<span class="go">b</span>\n<span class="gp">$ </span>pwd\n</code></pre></div>'
    )
    config = SimpleNamespace(docs_dir=DOCS)
    page = SimpleNamespace(file=SimpleNamespace(src_uri="cli.md"))
    shown = hooks.on_page_content(console, page, config)
    assert shown.startswith('<div class="highlight" data-copy="ls &quot;a&quot;\npwd"><pre>')
    assert (
        hooks.on_page_content('<div class="highlight"><pre>x</pre>', page, config)
        == '<div class="highlight"><pre>x</pre>'
    )

    page.file.src_uri = "api/saving.md"
    text = (
        "<code>SaveOptions</code> <code>NoSpaceError</code> <code>pathlib</code> <code>docs/live_weights.md#runs</code>"
    )
    text += ' <code>(<autoref identifier="sidestream.errors.StorageError">StorageError</autoref>, NoSpaceError)</code>'
    assert hooks.on_page_content(text, page, config) == (
        '<autoref identifier="sidestream.SaveOptions" optional><code>SaveOptions</code></autoref> '
        '<autoref identifier="sidestream.errors.NoSpaceError" optional><code>NoSpaceError</code></autoref> '
        '<code>pathlib</code> <a href="../../live_weights/#runs">live weights</a> '
        '<code>(<autoref identifier="sidestream.errors.StorageError">StorageError</autoref>, '
        '<autoref identifier="sidestream.errors.NoSpaceError" optional>NoSpaceError</autoref>)</code>'
    )
