"""Every ``python`` block of the README and of docs/ runs, page by page, in an empty directory."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FRAMEWORKS = ("accelerate", "lightning", "ray", "torchtitan", "transformers")
"""Pages of docs/integrations that are named as the module that they need."""

_BLOCK = re.compile(
    r"^(?P<skip><!--\s*skip(?P<reason>.*?)-->\s*\n)?```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    line: int
    code: str


def blocks(text: str) -> list[Block]:
    """The blocks to run. Raises ``ValueError`` for one that is skipped without a reason."""
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        if match["skip"] is None:
            found.append(Block(line, match["code"]))
        elif not match["reason"].strip(" :\n"):
            raise ValueError(f"line {line}: skipped without a reason")
    return found


def compiled(block: Block, page: str) -> CodeType:
    tree = ast.parse(block.code)
    ast.increment_lineno(tree, block.line)
    return compile(tree, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def run_page(found: list[Block], page: str) -> None:
    namespace: dict[str, object] = {"__name__": "__page__"}
    for block in found:
        result = eval(compiled(block, page), namespace)  # noqa: S307
        if inspect.iscoroutine(result):
            await result


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page.read_text())], ids=lambda page: page.name)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem in FRAMEWORKS:  # where it is not installed, `nox -s integrations-NAME` runs the page
        pytest.importorskip(page.stem)
        warnings.simplefilter("default")  # pytest restores the filters
    monkeypatch.chdir(tmp_path)
    found = blocks(page.read_text(encoding="utf-8"))
    if page.name in ("README.md", "ray.md"):  # programs: one starts its own loop, the other one has none
        namespace = {"__name__": "__main__"}
        for block in found:
            exec(compiled(block, page.name), namespace)
    else:
        asyncio.run(run_page(found, page.name))


def test_readme_example_runs_as_a_program_twice(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(blocks((ROOT / "README.md").read_text())[0].code)
    for last in (20, 40):
        done = subprocess.run(
            [sys.executable, "-W", "error", "example.py"],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"step-{last}" in done.stdout


def test_readme_shows_its_example_early() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```python") < 40


def anchors(page: str) -> set[str]:
    """The anchors that mkdocs gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])  # mkdocs reads those of the pages in docs/
def test_links_lead_to_headings(name: str) -> None:
    links = re.findall(r"\((docs/[\w/]+\.md)(?:#([\w-]+))?\)", (ROOT / name).read_text())
    assert len(links) > 10
    assert [link for link in links if link[1] and link[1] not in anchors((ROOT / link[0]).read_text())] == []


def test_the_figures_of_the_readme_stand_in_the_benchmarks() -> None:
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    tables = (ROOT / "docs" / "benchmarks.md").read_text()
    storage = tables[tables.index("\n64x16MB: ") :]
    tokens = tables[tables.index("\na save every 3 s") :]

    def figures(table: str, name: str) -> list[str]:
        found = re.search(rf"^ *{re.escape(name)}  +(.*)$", table, re.MULTILINE)
        assert found, name
        return found[1].split()

    ours, smooth, quick = (figures(storage, name) for name in ("sidestream", "torch_checkpointing", "safetensors"))
    assert f"{float(ours[1]):.1f} ms" in readme
    assert f"{float(ours[0]):.2f} s." in readme
    assert f"{float(smooth[1]):.1f} ms (torch_checkpointing, durable after {float(smooth[0]):.2f} s)" in readme
    assert f"{float(quick[0]):.2f} s (`safetensors`" in readme
    assert f"kept {100 * float(figures(tokens, 'sidestream thread')[1]):.1f} % of its tokens" in readme
    assert f"torch_checkpointing, kept {100 * float(figures(tokens, 'torch_checkpointing')[1]):.1f} %" in readme


def test_finds_and_skips_blocks() -> None:
    text = "a\n```python\nx = 1\n```\n<!-- skip: needs a GPU -->\n```python\nboom\n```\n```bash\nls\n```\n"
    assert blocks(text) == [Block(2, "x = 1\n")]
    with pytest.raises(ValueError, match="without a reason"):
        blocks("<!-- skip -->\n```python\nboom\n```\n")


def test_a_broken_block_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(
            run_page(blocks("```python\nimport asyncio\n```\n```python\nawait asyncio.sleep(0)\n1 / 0\n```\n"), "page")
        )


def test_every_error_is_in_the_table() -> None:
    from sidestream import errors

    page = (ROOT / "docs" / "errors.md").read_text()
    assert [name for name in errors.__all__ if f"`{name}`" not in page and f".{name}`" not in page] == []


def test_the_lifecycle_rule_is_what_s3_takes() -> None:
    """As ``aws s3api put-bucket-lifecycle-configuration`` checks it before it sends it."""
    import botocore.session
    from botocore.validate import ParamValidator

    found = re.search(r"```json\n(.*?)```", (ROOT / "docs" / "object_stores.md").read_text(), re.DOTALL)
    assert found is not None
    rule = json.loads(found[1])
    model = botocore.session.get_session().get_service_model("s3")
    takes = model.operation_model("PutBucketLifecycleConfiguration").input_shape.members["LifecycleConfiguration"]
    assert not (report := ParamValidator().validate(rule, takes)).has_errors(), report.generate_report()
    assert rule["Rules"][0]["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] == 2
