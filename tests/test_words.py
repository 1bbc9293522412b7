"""The words of the sources: a class name means one thing, and what has been retired does not come back, in the package
and in the pages and examples that show its interface.

Each check is a function over source text that returns what it objects to. The tests run it over the package, and over
small wrong snippets that it has to catch.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"

# --- the lists: extend them ----------------------------------------------------------------------------------------

RETIRED_NAMES = frozenset({
    "Coming", "Hub", "Ledger", "Noted", "Pace", "Remains", "Spoke", "Surroundings", "Watched", "accompany",
    "asked_in_order", "by_caller", "call_together", "give_notice", "hear", "hurry", "keep_from_children", "let_go",
    "look_for_abandoned", "no_more_turns", "politely", "refuse_on_a_loop", "send_what_waits", "supervised_here",
    "surroundings", "unheard", "went_on", "when_heard", "withdrawn_with_caller", "would_start_over",
})  # fmt: skip
"""Identifiers that no module of the package uses any more, whatever they name."""

RETIRED_PHRASES = ("as ever", "hear of", "hears", "in a hurry", "knows no more than that", "sits in")
"""Phrases that no docstring, comment or message of the package has any more."""

PLAIN_ROOMS = (
    "__init__", "_convert", "_format", "_group", "_layout", "_load", "_run", "_runtime", "_save", "_staging",
    "_storage", "_weights", "_worker", "blocking", "checkpointer", "dcp", "errors", "events", "integrations", "options",
    "sidestream_cli", "signing", "testing", "weights",
)  # fmt: skip
"""The rooms whose docstrings, comments and messages have none of ``RIDDLES``."""

RIDDLES = (
    *RETIRED_PHRASES, "affair", "anybody", "anyone", "are no", "became of", "becomes of", "everybody", "goes on",
    "had better", "heard", "in one go", "is no", "let go", "lets go", "nobody", "on its way", "on their way",
    "somebody", "to be had", "told", "what there is", "whichever", "whoever",
)  # fmt: skip
"""People in place of parts, and sentences that have to be read twice. Name the part and what it does. "There is no" is
allowed."""

PLAIN_PAGES = (
    "index", "quickstart", "setups", "saving", "loading", "runs", "staging", "ranks", "writer_process", "exports",
    "converting", "object_stores", "stores/s3", "stores/gcs", "stores/azure", "stores/others", "stores/own",
    "security", "reliability", "limits", "errors", "from_dcp", "glossary", "integrations/asyncio",
    "integrations/fsdp2", "integrations/transformers", "integrations/lightning", "integrations/ray",
    "integrations/servers", "integrations/torchtitan", "observability", "from_torch_save", "from_others", "state",
    "troubleshooting", "comparison", "versions", "gallery", "cli", "live_weights", "integrations/accelerate",
)  # fmt: skip
"""The pages of docs/ whose text has none of ``RIDDLES``. Code does not count."""

FORMER_INTERFACE = (
    r"(?<![\w-])(saver|overlap|apart|rename|allow|store_policy|target_options)=", r"\bstrict=\{", r"\bin_flight\b",
    r"\bsnapshot=(True|False)", r'"(snapshot|ignore_unexpected)"', r"\bApart\b", r"\bSaverProcess\b",
    r"\b(SaverGone|PromiseLost)\b", r"\b[Cc]heckpoint(er|s)\.(open|metadata)\b", r"\bprewarm\((nbytes|\d)",
    r"\bnot_asked_for\b", r"\breport\.ignored\b",
)  # fmt: skip
"""Names of the interface before the first release, in forms that mean nothing else."""


# --- the checks -----------------------------------------------------------------------------------------------------


def package_sources() -> dict[str, str]:
    """Source text of every module by its path below the package, such as ``_group/calls.py``, or
    ``sidestream_cli/app.py``."""
    paths = sorted(SOURCES.rglob("*.py"))
    return {str(path.relative_to(SOURCES)).removeprefix("sidestream/"): path.read_text() for path in paths}


def twice_used(sources: Mapping[str, str]) -> list[str]:
    """Class names that two modules define. Private names do not count, nor do the blocking twins of public classes."""
    places = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and path != "blocking.py":
                places[node.name].append(path)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def tokens_of(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)


def retired_names(sources: Mapping[str, str], retired: Collection[str]) -> list[str]:
    """Identifiers of the list, with or without an underscore before them."""
    return [
        f"{path}:{token.start[0]}: {token.string}"
        for path, source in sources.items()
        for token in tokens_of(source)
        if token.type == tokenize.NAME and token.string.removeprefix("_") in retired
    ]


def retired_phrases(sources: Mapping[str, str], phrases: Collection[str]) -> list[str]:
    """Phrases of the list in strings and comments, also across the end of a line. Names in ``code`` do not count."""
    wanted = re.compile(rf"(?<!there )\b(?:{'|'.join(map(re.escape, phrases))})\b", re.IGNORECASE)
    found = []
    for path, source in sources.items():
        for token in tokens_of(source):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                text = re.sub(r"\s+", " ", re.sub(r"``.*?``", "``", token.string, flags=re.DOTALL))
                found += [f"{path}:{token.start[0]}: {one!r}" for one in wanted.findall(text)]
    return found


def code_of(page: str) -> Iterator[tuple[int, str]]:
    """The code in a page of Markdown: line by line in blocks, and what stands between backticks elsewhere."""
    in_block = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_block = not in_block
        elif in_block:
            yield number, line
        else:
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line))


def former_names(pages: Mapping[str, str]) -> list[str]:
    """Names of the former interface in the code of pages, and in Python files."""
    wanted = re.compile("|".join(FORMER_INTERFACE))
    return [
        f"{path}:{number}: {found[0]}"
        for path, text in pages.items()
        for number, code in (code_of(text) if path.endswith(".md") else enumerate(text.splitlines(), 1))
        for found in wanted.finditer(code)
    ]


def page_riddles(page: str, phrases: Collection[str]) -> list[str]:
    """Phrases of the list in the text of a page of Markdown."""
    text = re.sub(r"^```.*?^```$|`[^`]+`", "``", page, flags=re.DOTALL | re.MULTILINE)
    wanted = re.compile(rf"(?<!there )\b(?:{'|'.join(map(re.escape, phrases))})\b", re.IGNORECASE)
    return wanted.findall(re.sub(r"\s+", " ", text))


# --- over the package -----------------------------------------------------------------------------------------------


def test_a_class_name_means_one_thing() -> None:
    assert twice_used(package_sources()) == []


def test_retired_names_do_not_come_back() -> None:
    assert retired_names(package_sources(), RETIRED_NAMES) == []


def test_retired_phrases_do_not_come_back() -> None:
    assert retired_phrases(package_sources(), RETIRED_PHRASES) == []


def test_the_plain_rooms_have_no_riddles() -> None:
    plain = {path: text for path, text in package_sources().items() if path.split("/")[0].split(".")[0] in PLAIN_ROOMS}
    assert {path.split("/")[0].split(".")[0] for path in plain} == set(PLAIN_ROOMS)
    assert retired_phrases(plain, RIDDLES) == []


@pytest.mark.parametrize("name", PLAIN_PAGES)
def test_the_plain_pages_have_no_riddles(name: str) -> None:
    assert page_riddles((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), RIDDLES) == []


def test_pages_and_examples_have_no_former_names() -> None:
    shown = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
    pages = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in shown}
    assert former_names(pages) == []


# --- over wrong snippets --------------------------------------------------------------------------------------------


def test_a_second_class_of_a_name_is_found() -> None:
    sources = {"a.py": "class Part: ...", "b.py": "def f():\n    class Part: ...", "c.py": "class _Part: ..."}
    assert twice_used(sources) == ["Part: a.py, b.py"]
    assert twice_used({"a.py": "class Checkpoint: ...", "blocking.py": "class Checkpoint: ..."}) == []


@pytest.mark.parametrize(
    "source", ["from x import politely", "x.let_go()", "def _unheard(): ...", "f(politely=1)", "class Ledger: ..."]
)
def test_a_retired_name_is_found(source: str) -> None:
    assert len(retired_names({"a.py": source}, RETIRED_NAMES)) == 1


@pytest.mark.parametrize(
    ("source", "riddles"),
    [
        ('"""Somebody said so: nobody knows."""', 2),
        ("x = 1  # whoever reads it", 1),
        ('"""It lets\n    go."""', 1),
        ('raise X(f"{a} is no key")', 1),
        ('"""Raise an error if there is no key and there are no others, in ``nobody``."""', 0),
        ("nobody = 1", 0),
    ],
)
def test_a_riddle_is_found(source: str, riddles: int) -> None:
    assert len(retired_phrases({"a.py": source}, RIDDLES)) == riddles


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Pass `overlap=` or `strict={...}`.", ["overlap=", "strict={"]),
        ("```python\nwith checkpoints.open(3): ...\n```", ["checkpoints.open"]),
        ("A Busy day: in_flight, `--rename`, `safe_globals=`, `StorageWriter(trust=)`, `checkpoint.metadata`.", []),
        ('`TooManySavesError`, `when_full=`, `Storage(commit="rename")`, `names=`', []),
    ],
)
def test_a_former_name_is_found(text: str, found: list[str]) -> None:
    assert [one.rpartition(": ")[2] for one in former_names({"a.md": text})] == found


def test_a_riddle_of_a_page_is_found() -> None:
    page = "Whoever waits is\ntold, if there is no `nobody`.\n```python\nnobody = 1\n```\n"
    assert page_riddles(page, RIDDLES) == ["Whoever", "told"]
