"""Docstrings of everything public: what they begin with, and that their sections match the signatures.

``docs/api/`` says what is public: every name there, with the members that its filters show. Each check is a function
that returns what it objects to. The tests run them over the package, and over small wrong examples.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_words import RIDDLES, retired_phrases

from sidestream import errors

ROOT = Path(__file__).parents[1]
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))
FRAMEWORKS = all(map(find_spec, ("accelerate", "lightning", "transformers")))
"""Whether the frameworks that the tests install are there."""
MODULES = (
    "sidestream",
    "sidestream.blocking",
    "sidestream.dcp",
    "sidestream.errors",
    "sidestream.events",
    *(f"sidestream.integrations.{name}" for name in ("accelerate", "lightning", "transformers") if FRAMEWORKS),
    "sidestream.observability",
    "sidestream.options",
    "sidestream.signing",
    "sidestream.testing",
    "sidestream.weights",
)

NOT_CONSTRUCTED = frozenset({
    "sidestream.Checkpoint", "sidestream.Follower", "sidestream.PendingExport", "sidestream.PendingSave",
    "sidestream.PendingVersion", "sidestream.VersionImage",
    "sidestream.ServedReading", "sidestream.StagedState", "sidestream.StagingFuture", "sidestream.Watch",
    "sidestream.blocking.Checkpoint",
    "sidestream.testing.OperationTests", "sidestream.testing.StoreTests",
})  # fmt: skip
"""Classes whose objects calls, or pytest, return. Programs do not make them, so their arguments are not documented."""

NO_BEGINNING = frozenset({
    "and", "as", "everything", "how", "if", "in", "is", "it", "none", "nothing", "some",
    "something", "that", "there", "these", "those", "what", "when", "where", "whether", "which", "who",
    "whoever", "why", "with",
})  # fmt: skip
"""First words with which neither a noun phrase nor a verb begins."""

NO_VERB = frozenset({"a", "all", "an", "any", "each", "its", "one", "that", "the", "their"})
"""First words of noun phrases. A function or method begins with a verb in place of one."""

SECTIONS = ("Args", "Attributes", "Raises", "Returns", "Yields")
MOST_PARAMETERS = 11
"""Of a public function or method, without ``self``."""

MORE_PARAMETERS: Mapping[str, int] = {
    # The settings of a run: made once in a program, and each is one line of its configuration. What a save and a load
    # take is in save=SaveOptions() and load=LoadOptions().
    "sidestream.Checkpointer": 16,
    "sidestream.blocking.Checkpointer": 16,
    # A save may produce two things beside the checkpoint, export= and publish=, and says for both where they go.
    "sidestream.async_save": 12,
    "sidestream.blocking.async_save": 12,
    "sidestream.blocking.save": 12,
    "sidestream.save": 12,
}
"""Where more are allowed, and why."""


# --- what is public -------------------------------------------------------------------------------------------------


def hidden(page: str) -> dict[str, frozenset[str]]:
    """Members that the filters of the page hide, by the path of the class. They are for other rooms of the package."""
    found = {}
    for path, options in re.findall(r"^::: (\S+)\n((?:    .*\n)*)", page, re.MULTILINE):
        found[path] = frozenset(re.findall(r'"!\^([a-z]\w*)\$"', options))
    return found


def listed(page: str) -> frozenset[str]:
    return frozenset(hidden(page))


def module_of(name: str) -> Any:
    return importlib.import_module(name)


def public_objects() -> dict[str, Any]:
    """Functions and classes by the path under which users import them; the same object only once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name in MODULES:
        for each in module_of(name).__all__:
            one = getattr(module_of(name), each)
            if (inspect.isclass(one) or inspect.isfunction(one)) and id(one) not in seen:
                seen.add(id(one))
                found[f"{name}.{each}"] = one
    return found


def members(path: str, kind: type) -> Iterator[tuple[str, Any]]:
    """The public members that the class defines, but for fields and plain attributes."""
    filters = hidden(PAGE)
    out = filters.get(path, frozenset()) | filters.get(path.rpartition(".")[0], frozenset())
    for name, member in vars(kind).items():
        if name.startswith(("_", "test_")) or name in out:
            continue
        one = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(one) or isinstance(one, property):
            yield f"{path}.{name}", one


def inherited_from_others(path: str) -> bool:
    """A method of DCP's, Python's or torch's interface: its arguments are documented there."""
    owner, _, name = path.rpartition(".")
    kind = public_objects()[owner]
    return any(
        name in vars(base) for base in kind.__mro__[1:] if base.__module__.partition(".")[0] not in ("sidestream",)
    )


def everything() -> dict[str, Any]:
    """All public functions, classes, methods and properties by path."""
    found = {}
    for path, one in public_objects().items():
        found[path] = one
        if inspect.isclass(one):
            found.update(members(path, one))
    return found


# --- the checks -----------------------------------------------------------------------------------------------------


def sections_of(doc: str) -> dict[str, list[str]]:
    """The entries of each section: for "Args" the names in order, for "Returns" its text."""
    found: dict[str, list[str]] = {}
    for title, body in re.findall(rf"^({'|'.join(SECTIONS)}):\n((?:    .*\n|\n)+)", doc + "\n", re.MULTILINE):
        lines = [line[4:] for line in body.splitlines() if line]
        if title in ("Returns", "Yields"):
            found[title] = [" ".join(lines)]
            continue
        entries = [line for line in lines if not line.startswith(" ")]
        heads = [entry.partition(":")[0] for entry in entries]
        if title == "Raises":  # an entry may have several names there, and nowhere else
            heads = [name.strip() for head in heads for name in head.split(",")]
        found[title] = [head.lstrip("*") for head in heads]
    return found


def parameters_of(one: Any) -> list[str]:
    return [
        name for name, each in inspect.signature(one).parameters.items() if (name not in ("self", "cls")
        and not name.startswith("_"))
        or (each.kind is each.VAR_POSITIONAL and name != "_")
    ]  # fmt: skip


def bad_beginning(doc: str | None, *, verb: bool) -> str | None:
    if not doc or not doc.strip():
        return "no docstring"
    word = re.match(r"[`\"']*([\w.]*)", doc)
    first = word[1].lower() if word is not None else ""
    if doc.startswith("``"):
        return None if not verb else f"begins with {doc.split()[0]}"
    if first in NO_BEGINNING or (verb and first in NO_VERB) or not first:
        return f"begins with {first!r}"
    return None


def bad_sections(one: Any, doc: str) -> list[str]:
    """What is wrong with the sections of the docstring of a function or method."""
    sections, asked = sections_of(doc), parameters_of(one)
    found = []
    if sorted(sections.get("Args", [])) != sorted(asked):
        found.append(f"Args: {sections.get('Args', [])}, parameters: {asked}")
    result = inspect.signature(one).return_annotation
    returns = result not in (None, "None", "Self", inspect.Signature.empty) and not str(result).endswith("[None]")
    if returns and not sections.keys() & {"Returns", "Yields"} and not doc.startswith("Return "):
        found.append(f"no Returns, but it returns {result}")
    return found + bad_text(doc)


def bad_text(doc: str) -> list[str]:
    sections = sections_of(doc)
    found = [
        f"raises {name!r}, which is no error"
        for name in sections.get("Raises", [])
        if not isinstance(getattr(errors, name, getattr(builtins, name, None)), type)
    ]
    found += retired_phrases({"": repr(" ".join(doc.split()))}, RIDDLES)
    if re.search(r"\bRaises (?:what|``)", doc):
        found.append("names errors in sentences: they belong to the section Raises")
    return found


def _is_protocol(kind: type) -> bool:
    return bool(vars(kind).get("_is_protocol"))


def fields_of(kind: type) -> list[str]:
    """What the section of a class has to list: fields of a record that it defines itself, or arguments."""
    if dataclasses.is_dataclass(kind):
        own = inspect.get_annotations(kind)
        return [
            field.name for field in dataclasses.fields(kind) if field.name in own and not field.name.startswith("_")
        ]
    if issubclass(kind, errors.SidestreamError):
        own = parameters_of(kind.__init__) if "__init__" in vars(kind) else []
        return [name for name in own if name not in ("message", "args", *vars(errors.SidestreamError))]
    if _is_protocol(kind):
        return [name for name in inspect.get_annotations(kind) if not name.startswith("_")]
    return parameters_of(kind.__init__) if "__init__" in vars(kind) else []


def bad_class(kind: type, doc: str, constructed: bool) -> list[str]:
    sections = sections_of(doc)
    named = sections.get("Args", []) + sections.get("Attributes", [])
    found = bad_text(doc)
    asked = fields_of(kind)
    if issubclass(kind, errors.SidestreamError):
        lacking = [name for name in asked if name not in named]
        return found + ([f"Attributes lacks {lacking}"] if lacking else [])
    if constructed and sorted(named) != sorted(asked):
        found.append(f"sections: {named}, fields: {asked}")
    return found


def objections(path: str, one: Any) -> list[str]:
    doc = inspect.getdoc(one) or ""
    if isinstance(one, property):
        wrong = bad_beginning(one.__doc__, verb=False)
        return [wrong] if wrong else []
    wrong = bad_beginning(doc if inspect.isclass(one) else one.__doc__ and doc, verb=not inspect.isclass(one))
    if wrong:
        return [wrong]
    if inspect.isclass(one):
        return bad_class(one, doc, path not in NOT_CONSTRUCTED)
    in_class = path.rpartition(".")[0] in public_objects()
    return [] if in_class and inherited_from_others(path) else bad_sections(one, doc)


def undocumented_aliases(source: str) -> list[str]:
    """Names of ``__all__`` that are assigned, and not followed by a docstring that begins well."""
    body = ast.parse(source).body
    names = {
        node.targets[0].id if isinstance(node, ast.Assign) else node.target.id: after  # type: ignore[union-attr]
        for node, after in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.targets[0] if isinstance(node, ast.Assign) else node.target, ast.Name)
    }
    public = set(ast.literal_eval(next(node.value for node in body if _is_all(node))))
    return sorted(
        name for name, after in names.items() if name in public and bad_beginning(_text_of(after), verb=False)
    )


def _text_of(node: ast.stmt | None) -> str | None:
    text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return text if isinstance(text, str) else None


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"


def too_many(things: Mapping[str, Callable[..., Any]], most: int, more: Mapping[str, int]) -> list[str]:
    """Functions with more parameters than ``most``, or than ``more`` allows them."""
    counts = {path: len(parameters_of(one)) for path, one in things.items()}
    return [f"{path}: {count}" for path, count in counts.items() if count > more.get(path, most)]


# --- over the package -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(everything()))
def test_docstring(path: str) -> None:
    assert objections(path, everything()[path]) == []


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_their_aliases_have_docstrings(name: str) -> None:
    module = module_of(name)
    assert bad_beginning(module.__doc__, verb=False) is None
    assert undocumented_aliases(Path(module.__file__).read_text(encoding="utf-8")) == []


def test_the_page_lists_every_public_path() -> None:
    whole = {name for name in listed(PAGE) if name in MODULES}
    lacking = []
    for name in MODULES:
        for each in module_of(name).__all__:
            one = getattr(module_of(name), each)
            own = f"{getattr(one, '__module__', name)}.{each}"
            path = f"{name}.{each}"
            found = {path, own} & listed(PAGE) or {name, own.rpartition(".")[0]} & whole
            if not found and path not in MODULES and not any(one.startswith(f"{path}.") for one in listed(PAGE)):
                lacking.append(path)
    assert lacking == []
    assert [path for path in listed(PAGE) if "._" in path] == []


def test_what_the_page_hides_is_there_and_says_so() -> None:
    """A filter of the page that hides nothing is a leftover."""
    objects = {**public_objects(), **{name: module_of(name) for name in MODULES}}
    for path, names in hidden(PAGE).items():
        for name in names:
            kinds = [objects[path]] if path not in MODULES else [objects["sidestream.errors.SidestreamError"]]
            assert any(hasattr(kind, name) or name in vars(kind) for kind in kinds), f"{path}: {name}"


def test_no_verb_has_more_than_about_ten_parameters() -> None:
    callables = {path: one for path, one in everything().items() if not isinstance(one, property)}
    verbs = {
        path: one for path, one in callables.items()
        if not dataclasses.is_dataclass(one) and path not in NOT_CONSTRUCTED
        and not (inspect.isclass(one) and issubclass(one, Exception))
        and not (inspect.isclass(one) and _is_protocol(one))
    }  # fmt: skip
    assert too_many(verbs, MOST_PARAMETERS, MORE_PARAMETERS) == []
    assert not too_many({path: verbs[path] for path in MORE_PARAMETERS}, 0, MORE_PARAMETERS), "an exception is over"
    assert all(len(parameters_of(verbs[path])) > MOST_PARAMETERS for path in MORE_PARAMETERS)


# --- over wrong examples --------------------------------------------------------------------------------------------


def right(state: int, *, limit: float = 1.0) -> int:
    """Return one.

    Args:
        state: A number.
        limit: The limit, in seconds.

    Raises:
        InvalidOptionError: Wrong.
    """
    return state


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        limit: The limit, in seconds.\n", ""),
        ("state: A number.", "state: A number. more: Another."),
        ("        limit: The limit, in seconds.\n", "            limit: The limit, in seconds.\n"),
        ("Return one.", "Make one."),
        ("InvalidOptionError: Wrong", "InvalidOptoinError: Wrong"),
        ("Return one.", "Return one. Raises ``InvalidOptionError``."),
    ],
)
def test_a_wrong_section_is_found(old: str, new: str) -> None:
    assert right.__doc__ is not None
    assert bad_sections(right, inspect.cleandoc(right.__doc__)) == []
    if new.startswith("state: A number. more"):
        new = "state: A number.\n        more: Another."
    changed = right.__doc__.replace(old, new)
    assert changed != right.__doc__
    assert bad_sections(right, inspect.cleandoc(changed)) != []


@pytest.mark.parametrize("doc", ["", None, "Whether it is.", "What it does.", "The bytes.", "As ``x``.", "``x`` it."])
def test_a_wrong_beginning_of_a_function_is_found(doc: str | None) -> None:
    assert bad_beginning(doc, verb=True) is not None


@pytest.mark.parametrize("doc", ["Whether it is.", "What it has.", "Everything there is.", "If it is."])
def test_a_wrong_beginning_of_a_class_is_found(doc: str) -> None:
    assert bad_beginning(doc, verb=False) is not None
    assert bad_beginning("The bytes of it.", verb=False) is None


def test_a_record_that_lacks_a_field_in_its_docstring_is_found() -> None:
    @dataclasses.dataclass(frozen=True)
    class Record:
        """A record.

        Attributes:
            one: The first.
        """

        one: int
        two: int

    assert bad_class(Record, inspect.getdoc(Record) or "", True) != []


def test_an_alias_without_a_docstring_is_found() -> None:
    source = '__all__ = ["A", "B", "C"]\nA = 1\n"""The first."""\nB = 2\nC = 3\n"""What it takes."""\n'
    assert undocumented_aliases(source) == ["B", "C"]


def test_too_many_parameters_are_found() -> None:
    assert too_many({"x": lambda a, b, c: None}, 2, {}) == ["x: 3"]
    assert too_many({"x": lambda a, b, c: None}, 2, {"x": 3}) == []
