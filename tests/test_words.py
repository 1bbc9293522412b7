"""The words of the sources: a class name means one thing, and what has been retired does not come back.

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

SOURCES = Path(__file__).parents[1] / "src" / "sidestream"

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
    "__init__", "_group", "_load", "_run", "_runtime", "_save", "_storage", "_worker", "blocking", "checkpointer",
    "cli", "dcp", "errors", "events", "options", "signing",
)  # fmt: skip
"""The rooms whose docstrings, comments and messages have none of ``RIDDLES``."""

RIDDLES = (
    *RETIRED_PHRASES, "affair", "anybody", "became of", "becomes of", "goes on", "heard", "is no", "are no", "let go",
    "lets go", "nobody", "somebody", "to be had", "told", "whoever",
)  # fmt: skip
"""People in place of parts, and sentences that have to be read twice. Name the part and what it does. "There is no" is
allowed."""


# --- the checks -----------------------------------------------------------------------------------------------------


def package_sources() -> dict[str, str]:
    """Source text of every module by its path below the package, such as ``_group/calls.py``."""
    return {str(path.relative_to(SOURCES)): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}


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
