"""The house: which room may import which, and where private torch names, loops and threads may stand.

A room is a module or a package directly below ``sidestream``. CONTRIBUTING.md lists the rooms, row by row; this file
reads that table. ``names_between_rooms.toml`` has how many names each room takes from each other room. Each check is a
function over source text that returns what it objects to. The tests run it over the package, and over small wrong
snippets that it has to catch.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import pickle
import re
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

PACKAGE = "sidestream"
ROOT_FOLDER = Path(__file__).parents[1]
SOURCES = ROOT_FOLDER / "src" / PACKAGE
PUBLIC_MODULES = (
    "errors",
    "options",
    "events",
    "blocking",
    "signing",
    "dcp",
    "integrations",
    "observability",
    "weights",
)

COMMAND_LINE = ROOT_FOLDER / "src" / "sidestream_cli"
PRIVATE_IN_THE_COMMAND_LINE = {  # this only gets shorter
    "sidestream._convert.source", "sidestream._format.checksum", "sidestream._format.records", "sidestream._run.steps",
    "sidestream._runtime.threads", "sidestream._staging.placement", "sidestream._storage",
}  # fmt: skip

MOST_ROOMS = 26  # with __init__
DEEPEST = 11  # the rooms of frameworks, above a Checkpointer that has weights followed
MOST_NAMES = 579  # that rooms take from each other: the sum of names_between_rooms.toml
MOST_NAMES_OF_A_MODULE = 47  # that one module takes from other rooms, those of every room in ``BASE`` included
MOST_ROOMS_OF_A_MODULE = 6  # other rooms that one module takes names from, those in ``BASE`` left out
MOST_DEADLINES = 33  # functions with a parameter of this name: all others work under ``time_limit``

BASE = frozenset({"errors", "options", "events", "_runtime", "_engine"})
"""What every room takes names from: words of the whole package, which are no sign that two rooms know too much of each
other. They are left out of the counts of rooms."""
NAMES_BETWEEN_ROOMS = Path(__file__).parent / "names_between_rooms.toml"
TAKES_MODULES = frozenset({f"{PACKAGE}.blocking"})  # the twin of what they define, whose docstrings it takes

USERS = frozenset({"integrations", "testing"})  # rooms that nothing imports, and that use the package as its users do
PURE_ROOMS = frozenset({"_format", "_layout"})
SCHEDULING = frozenset({f"{PACKAGE}._runtime.threads", f"{PACKAGE}._runtime.gil"})

Rows = Sequence[frozenset[str]]

LOOP_MAKERS = frozenset({
    "asyncio.run", "asyncio.Runner", "asyncio.new_event_loop", "anyio.run", "anyio.from_thread.start_blocking_portal",
    "start_blocking_portal", "BlockingPortal", "run_until_complete", "run_forever", "new_event_loop",
    "asyncio.SelectorEventLoop",
})  # fmt: skip
THREAD_HOPS = frozenset({
    "asyncio.to_thread", "anyio.to_thread", "anyio.to_thread.run_sync", "to_thread", "run_in_executor",
})  # fmt: skip


# --- reading sources ------------------------------------------------------------------------------------------------


def package_sources() -> dict[str, str]:
    """Source text of every module, by dotted name; ``sidestream`` itself and packages stand under their own name."""
    found = {}
    for path in sorted(SOURCES.rglob("*.py")):
        parts = path.relative_to(SOURCES.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def is_package(name: str, modules: Mapping[str, str]) -> bool:
    """Whether relative imports of the module ``name`` start at its own name."""
    on_disk = (SOURCES.parent / Path(*name.split(".")) / "__init__.py").exists()
    return on_disk or any(other.startswith(name + ".") for other in modules)


@functools.cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All nodes of ``source``. Cached, because each check reads every module of the package."""
    return tuple(ast.walk(ast.parse(source)))


def imported(name: str, source: str, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Line and dotted target of each import in ``source``; type-only ones and those inside functions count too."""
    base = name.split(".") if is_package(name, known) else name.split(".")[:-1]
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                stem = base[: len(base) - node.level + 1]
                origin = ".".join([*stem, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{origin}.{alias.name}"
                yield node.lineno, whole if whole in known else origin


def rows_of(text: str) -> list[frozenset[str]]:
    """The rows of the first table in ``text`` whose first column is headed "rooms", from the lowest to the highest."""
    head = re.search(r"^\| rooms \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert head is not None, "no table of rooms"
    return [frozenset(re.findall(r"`(\w+)`", row.split("|")[1])) for row in reversed(head[1].splitlines())]


def room_of(name: str) -> str | None:
    """``staging`` for ``sidestream._staging.arena``; None for the package itself and for foreign modules."""
    parts = name.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def dotted(node: ast.expr) -> str | None:
    """``a.b.c`` for an attribute chain over a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([node.id, *reversed(parts)])


@functools.cache
def aliases(source: str) -> Mapping[str, str]:
    """What each imported local name stands for, e.g. ``F`` for ``torch.nn.functional``."""
    names: dict[str, str] = {}
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


# --- the checks -----------------------------------------------------------------------------------------------------


def misplaced(sources: Mapping[str, str], rows: Rows) -> list[str]:
    """Rooms without a place in the table, rooms of the table that do not exist, and too many rooms."""
    rooms = {room for name in sources if (room := room_of(name))}
    placed = {room for row in rows for room in row}
    found = [f"{room}: has no place; add it to the table in CONTRIBUTING.md" for room in sorted(rooms - placed)]
    found += [f"{room}: stands in the table and does not exist" for room in sorted(placed - rooms)]
    if len(rooms) + 1 > MOST_ROOMS:
        found.append(f"{len(rooms) + 1} rooms with __init__, more than {MOST_ROOMS}")
    return found


def upward_imports(sources: Mapping[str, str], rows: Rows) -> list[str]:
    """Imports from a higher row, and from another room of the same row."""
    row_of = {room: number for number, rooms in enumerate(rows) for room in rooms}
    found = []
    for name, source in sources.items():
        room = room_of(name)
        for line, target in imported(name, source, sources):
            other = room_of(target)
            if room is None or target.split(".")[0] != PACKAGE or other == room:
                continue
            if other is None and room in USERS:
                continue
            if other is None:
                found.append(f"{name}:{line}: imports the package root, which stands above every room")
            elif row_of.get(other, 99) >= row_of.get(room, -1):
                found.append(f"{name}:{line}: imports {target}, which does not stand in a lower row of the table")
    return found


def impure(sources: Mapping[str, str]) -> list[str]:
    """Imports of threads and of GIL scheduling into rooms that know nothing of threads but the points for pauses."""
    return [
        f"{name}:{line}: imports {target}; call pause_point(), or take a callback"
        for name, source in sources.items()
        if room_of(name) in PURE_ROOMS
        for line, target in imported(name, source, sources)
        if target in SCHEDULING
    ]


def edges(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For each module the other modules of the package that it imports. What ``__init__`` re-exports is left out."""
    graph: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        if name != PACKAGE:
            graph[name] = {target for _, target in imported(name, source, sources) if target in graph} - {name}
    return graph


def too_deep(sources: Mapping[str, str]) -> list[str]:
    """The longest chain of rooms, each of which imports the next, if it has more than ``DEEPEST`` rooms."""
    below: dict[str, set[str]] = {room: set() for name in sources if (room := room_of(name))}
    for name, targets in edges(sources).items():
        if room := room_of(name):
            below[room] |= {other for target in targets if (other := room_of(target))} - {room}
    chain: dict[str, list[str]] = {}
    for room in graphlib.TopologicalSorter(below).static_order():
        chain[room] = [room, *max((chain[other] for other in below[room]), key=len, default=[])]
    longest: list[str] = max(chain.values(), key=len, default=[])
    return [f"{len(longest)} rooms deep: {' -> '.join(longest)}"] if len(longest) > DEEPEST else []


def names_taken(name: str, source: str, known: Mapping[str, str]) -> set[tuple[str, str]]:
    """Each name that the module ``name`` takes from another room, as the module that it is taken from, and the name.
    A module that is imported as a whole is one name."""
    base = name.split(".") if is_package(name, known) else name.split(".")[:-1]
    found: set[tuple[str, str]] = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found |= {(alias.name, alias.name.rpartition(".")[2]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            stem = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*stem, *([node.module] if node.module else [])])
            wholes = ((f"{origin}.{alias.name}", alias.name) for alias in node.names)
            found |= {(whole if whole in known else origin, one) for whole, one in wholes}
    room = room_of(name)
    return {(origin, one) for origin, one in found if room_of(origin) not in (None, room)}


def names_between(sources: Mapping[str, str]) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """The names that each room takes from each other room. The package itself and the rooms in ``BASE`` are left
    out."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for name, source in sources.items():
        for origin, one in names_taken(name, source, sources) if name != PACKAGE else ():
            room, other = room_of(name), room_of(origin)
            assert room is not None
            assert other is not None
            if other not in BASE:
                found.setdefault((room, other), set()).add((origin, one))
    return found


def wrong_counts(sources: Mapping[str, str], table: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Pairs of rooms whose number of names is not that in the table, and a sum of more than ``MOST_NAMES``."""
    counts = {pair: len(names) for pair, names in names_between(sources).items()}
    written = {(room, other): count for room, others in table.items() for other, count in others.items()}
    found = []
    for room, other in sorted(counts.keys() | written.keys()):
        count, before = counts.get((room, other), 0), written.get((room, other), 0)
        pair = f"{room} takes {count} names from {other}, and {NAMES_BETWEEN_ROOMS.name} says {before}"
        if count > before:
            advice = "move code to its only user, or make a function a method" if before else "a new pair needs a line"
            found.append(f"{pair}: {advice}")
        elif count < before:
            found.append(f"{pair}: write the lower number, so that it stays low")
    total = sum(written.values())
    if total > MOST_NAMES:
        found.append(f"rooms take {total} names from each other, more than {MOST_NAMES}")
    return found


def too_curious(sources: Mapping[str, str]) -> list[str]:
    """Modules that take too many names from other rooms, or names from too many rooms. The package itself, which takes
    all public names, is left out."""
    found = []
    for name, source in sources.items():
        names = names_taken(name, source, sources) if name != PACKAGE else set()
        rooms = {room for origin, _ in names if (room := room_of(origin))} - BASE
        if len(names) > MOST_NAMES_OF_A_MODULE:
            found.append(f"{name} takes {len(names)} names from other rooms, more than {MOST_NAMES_OF_A_MODULE}")
        if len(rooms) > MOST_ROOMS_OF_A_MODULE:
            found.append(
                f"{name} takes names from {', '.join(sorted(rooms))}: more than {MOST_ROOMS_OF_A_MODULE} rooms"
            )
    return found


def whole_modules(sources: Mapping[str, str]) -> list[str]:
    """Modules of another private room that are imported as a whole, which hides the names that are taken from them."""
    return [
        f"{name}: imports the module {origin}: import names from it"
        for name, source in sources.items()
        if name not in TAKES_MODULES
        for origin, one in names_taken(name, source, sources)
        if origin in sources and origin.rpartition(".")[2] == one and (room_of(origin) or "").startswith("_")
        if not _defines(sources[origin], one)  # ``verify`` of ``verify.py``
    ]


def _defines(source: str, name: str) -> bool:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) and node.name == name for node in nodes_of(source))


def with_parameter(wanted: str, sources: Mapping[str, str]) -> list[tuple[str, str]]:
    """Functions with a parameter of this name, and its annotation."""
    found = []
    for name, source in sources.items():
        for node in nodes_of(source):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                    if one.arg == wanted:
                        found.append((f"{name}.{node.name}", ast.unparse(one.annotation) if one.annotation else ""))
    return found


def cycles(sources: Mapping[str, str]) -> list[str]:
    """A circle among modules. The rows of the table exclude one among rooms.

    A package's ``__init__`` gathers its own modules, which import each other by their own names: an import of the
    package by a module inside it is a circle.
    """
    try:
        graphlib.TopologicalSorter(edges(sources)).prepare()
    except graphlib.CycleError as error:
        return [f"a circle of modules: {' -> '.join(error.args[1])}"]
    return []


def _private_torch(target: str) -> bool:
    first, *rest = target.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def private_torch_names(name: str, source: str) -> list[str]:
    """Uses of torch's private names: imports, and attributes of torch modules and of what was imported from them."""
    if name == f"{PACKAGE}._runtime.torch_probes":
        return []
    names = aliases(source)
    found = []
    for node in nodes_of(source):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and (chain := dotted(node)):
            first, *rest = chain.split(".")
            targets = [".".join([names.get(first, ""), *rest])]
        elif isinstance(
            node, ast.Call
        ):  # import_module("torch._x"); a string elsewhere is data, e.g. a pickled class name
            targets = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            targets = targets if _imports(node.func) else []
        found += [f"{name}:{node.lineno}: private torch name {target}" for target in targets if _private_torch(target)]
    return found


def _imports(function: ast.expr) -> bool:
    return (dotted(function) or "").rpartition(".")[2] in {"import_module", "__import__"}


def misplaced_calls(name: str, source: str, wanted: frozenset[str], home: str) -> list[str]:
    """Uses of the names ``wanted`` outside the module ``home``, by attribute or by import."""
    if name == f"{PACKAGE}.{home}":
        return []
    names = aliases(source)
    bare = {want for want in wanted if "." not in want}
    found = []
    for node in nodes_of(source):
        hits: set[str] = set()
        if isinstance(node, ast.Attribute):
            chain = dotted(node) or node.attr
            first, *rest = chain.split(".")
            hits = {".".join([names.get(first, first), *rest])} & wanted or {node.attr} & bare
        elif isinstance(node, ast.ImportFrom) and not node.level:
            hits = {f"{node.module}.{alias.name}" for alias in node.names} & wanted
            hits |= {alias.name for alias in node.names} & bare
        elif isinstance(node, ast.Import):
            hits = {alias.name for alias in node.names} & wanted
        found += [f"{name}:{node.lineno}: {hit} belongs in {home}.py" for hit in sorted(hits)]
    return found


# --- the package ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return package_sources()


@pytest.fixture(scope="module")
def rows() -> Rows:
    return rows_of((ROOT_FOLDER / "CONTRIBUTING.md").read_text(encoding="utf-8"))


def test_every_room_has_its_place(sources: dict[str, str], rows: Rows) -> None:
    assert misplaced(sources, rows) == []


def test_imports_point_down(sources: dict[str, str], rows: Rows) -> None:
    assert upward_imports(sources, rows) == []


def test_formats_and_layouts_are_pure(sources: dict[str, str]) -> None:
    assert impure(sources) == []


def test_depth(sources: dict[str, str]) -> None:
    assert too_deep(sources) == []


def test_names_between_rooms(sources: dict[str, str]) -> None:
    assert wrong_counts(sources, tomllib.loads(NAMES_BETWEEN_ROOMS.read_text(encoding="utf-8"))) == []


def test_names_that_a_module_takes(sources: dict[str, str]) -> None:
    assert too_curious(sources) == []


def test_modules_are_not_taken_as_a_whole(sources: dict[str, str]) -> None:
    assert whole_modules(sources) == []


def test_no_circles(sources: dict[str, str]) -> None:
    assert cycles(sources) == []


def test_deadlines_are_not_handed_down(sources: dict[str, str]) -> None:
    assert len(with_parameter("deadline", sources)) <= MOST_DEADLINES


def test_an_attempt_is_described_and_not_named(sources: dict[str, str]) -> None:
    """No function takes the name or the directory of an attempt under this name: a transaction owns it."""
    assert {annotation for _, annotation in with_parameter("attempt", sources)} == {"Attempt"}


def test_words_for_ends(sources: dict[str, str]) -> None:
    """Ends are called close, aclose, cancel, release and discard, and nothing else."""
    other = "abandon|leave|settle|withdraw|forsake|give_up|give_way|retire|look_back|put_back"
    found = {name for source in sources.values() for name in re.findall(rf"def _*((?:{other})(?:_\w+)?)\(", source)}
    assert found == {"leave_captures_alone", "leave_direct_io", "leave_transaction"}, "these end nothing"


def test_names_that_scripts_import_exist() -> None:
    root, missing = Path(__file__).parents[1], []
    for path in [*root.glob("benchmarks/*.py"), *root.glob("examples/*.py")]:
        for node in nodes_of(path.read_text()):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
                try:
                    module = importlib.import_module(str(node.module))
                except ImportError:  # a framework is not installed
                    assert str(node.module).startswith(f"{PACKAGE}.integrations."), node.module
                    continue
                missing += [f"{path.name}: {one.name}" for one in node.names if not hasattr(module, one.name)]
    assert missing == []


def test_private_names_in_the_command_line() -> None:
    """A module of the command line that uses another private module of the library needs a public function instead."""
    found = {
        target
        for path in COMMAND_LINE.glob("*.py")
        for _, target in imported(f"{COMMAND_LINE.name}.{path.stem}", path.read_text(encoding="utf-8"), {})
        if target.startswith(f"{PACKAGE}._")
    }
    assert found == PRIVATE_IN_THE_COMMAND_LINE


def test_private_torch_names(sources: dict[str, str]) -> None:
    found = [hit for name, source in sources.items() for hit in private_torch_names(name, source)]
    assert found == []


def test_loops_start_in_the_engine_only(sources: dict[str, str]) -> None:
    found = [
        hit for name, source in sources.items() for hit in misplaced_calls(name, source, LOOP_MAKERS, "_engine.loop")
    ]
    assert found == []


def test_threads_hop_in_threads_only(sources: dict[str, str]) -> None:
    found = [
        hit
        for name, source in sources.items()
        for hit in misplaced_calls(name, source, THREAD_HOPS, "_runtime.threads")
    ]
    assert found == []


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_public_names_survive_the_import_of_their_modules() -> None:
    """A submodule sets itself as an attribute of its package: ``sidestream.save`` has to stay the function."""
    done = run_fresh(
        textwrap.dedent(f"""
        import importlib, pkgutil, types
        import {PACKAGE}
        for module in pkgutil.walk_packages({PACKAGE}.__path__, "{PACKAGE}."):
            if "__main__" not in module.name:
                try:
                    importlib.import_module(module.name)
                except {PACKAGE}.errors.MissingExtraError:  # a framework is not installed
                    assert module.name.startswith("{PACKAGE}.integrations."), module.name
        for name in {PACKAGE}.__all__:
            value = getattr({PACKAGE}, name)
            if isinstance(value, types.ModuleType) and name not in {PUBLIC_MODULES}:
                raise SystemExit(f"{PACKAGE}.{{name}} is the module, not the public object")
        """)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["", ".blocking", ".dcp", ".errors", ".events", ".signing", ".testing"])
def test_public_names_carry_their_public_path(module: str) -> None:
    """In tracebacks, ``repr`` and pickles. A pickle of a name stays readable when the module that defines it moves."""
    public = importlib.import_module(PACKAGE + module)
    defined = [
        value
        for name in public.__all__
        if isinstance(value := getattr(public, name), type | types.FunctionType) and value.__module__ != "typing"
    ]
    assert defined
    assert [value for value in defined if value.__module__ != public.__name__] == []
    assert [value for value in defined if pickle.loads(pickle.dumps(value)) is not value] == []


# --- the checks catch what they are for -----------------------------------------------------------------------------

ROOT = "def __getattr__(name): ..."
THREE_ROWS: Rows = (frozenset({"errors"}), frozenset({"_format", "_group"}), frozenset({"_save"}))


def test_reads_the_table() -> None:
    other = "| a |\n|---|\n| `no` |\n\n"
    text = "| rooms | what |\n|---|---|\n| `_save` | x `y` |\n| `_format`, `_group` | |\n| `errors` | |\n\nz\n"
    assert rows_of(other + text) == list(THREE_ROWS)


def test_catches_a_room_without_a_place() -> None:
    house = dict.fromkeys(("sidestream", "sidestream.errors", "sidestream._format.a", "sidestream._save"), "")
    assert misplaced(house | {"sidestream._group": ""}, THREE_ROWS) == []
    assert len(misplaced(house, THREE_ROWS)) == 1  # no _group
    assert len(misplaced(house | {"sidestream._group": "", "sidestream.helpers": ""}, THREE_ROWS)) == 1
    more = tuple(frozenset({f"r{number}"}) for number in range(MOST_ROOMS))
    assert len(misplaced({f"sidestream.r{number}": "" for number in range(MOST_ROOMS)}, more)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from .._save import save",
        "import sidestream._save",
        "from .. import _save",
        "def f():\n    from .._save import save",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sidestream._save import save",
        "from .._group import x",  # a room of the same row
        "from .._unknown import x",
        "from .. import something_public",
        "import sidestream",
    ],
)
def test_catches_an_upward_import(source: str) -> None:
    house = {"sidestream": ROOT, **dict.fromkeys(("sidestream._save", "sidestream._group", "sidestream._unknown"), "")}
    house |= {"sidestream._format": "", "sidestream._format.frame": source}
    assert len(upward_imports(house, THREE_ROWS)) == 1


@pytest.mark.parametrize("source", ["from ..errors import Closed", "from .. import errors", "from . import layout"])
def test_lets_a_downward_import_pass(source: str) -> None:
    house = {"sidestream": ROOT, "sidestream.errors": "", "sidestream._format": "", "sidestream._format.layout": ""}
    assert upward_imports(house | {"sidestream._format.frame": source}, THREE_ROWS) == []


@pytest.mark.parametrize(
    "source",
    [
        "from .._runtime.threads import io_threads",
        "from .._runtime import gil",
        "def f():\n    from sidestream._runtime.gil import holding_gil",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .._runtime.threads import Deadline",
    ],
)
def test_catches_scheduling_in_a_pure_room(source: str) -> None:
    house = dict.fromkeys(("sidestream._runtime", *SCHEDULING), "")
    assert len(impure(house | {"sidestream._format.frame": source})) == 1
    assert impure(house | {"sidestream._load.frame": source}) == []


@pytest.mark.parametrize(
    "house",
    [
        {"sidestream._layout.a": "from .b import x", "sidestream._layout.b": "def f():\n    from .a import y"},
        {"sidestream.one": "from .two import x", "sidestream.two": "from .one import y"},
        {"sidestream._layout": "from .a import x", "sidestream._layout.a": "from . import y"},
    ],
)
def test_catches_a_circle(house: dict[str, str]) -> None:
    assert len(cycles(house)) >= 1


def test_catches_a_deep_house() -> None:
    house = {f"sidestream.r{number}": f"from .r{number + 1} import x" for number in range(DEEPEST)}
    assert too_deep(house | {f"sidestream.r{DEEPEST}": ""}) != []
    assert too_deep(house | {f"sidestream.r{DEEPEST - 1}": ""}) == []


HOUSE = {
    "sidestream": "from ._save import save",
    "sidestream.errors": "",
    "sidestream._format": "",
    "sidestream._format.records": "",
    "sidestream._save": "",
    "sidestream._save.running": "from .._format.records import A, B\nfrom ..errors import C\nfrom . import running",
    "sidestream._save.sinks": "def f():\n    from sidestream._format.records import B",
}


def test_counts_names() -> None:
    assert names_between(HOUSE) == {
        ("_save", "_format"): {("sidestream._format.records", "A"), ("sidestream._format.records", "B")}
    }
    assert len(names_taken("sidestream._save.running", HOUSE["sidestream._save.running"], HOUSE)) == 3  # with errors


def test_catches_a_wrong_count() -> None:
    assert wrong_counts(HOUSE, {"_save": {"_format": 2}}) == []
    assert len(wrong_counts(HOUSE, {"_save": {"_format": 1}})) == 1
    assert len(wrong_counts(HOUSE, {"_save": {"_format": 3}})) == 1  # it has fallen
    assert len(wrong_counts(HOUSE, {})) == 1  # a new pair
    assert len(wrong_counts(HOUSE, {"_save": {"_format": 2, "_group": 1}})) == 1  # a pair that has gone
    many = ", ".join(f"n{number}" for number in range(MOST_NAMES + 1))
    house = HOUSE | {"sidestream._save.sinks": "", "sidestream._save.running": f"from .._format.records import {many}"}
    assert len(wrong_counts(house, {"_save": {"_format": MOST_NAMES + 1}})) == 1


def test_catches_a_curious_module() -> None:
    many = ", ".join(f"n{number}" for number in range(MOST_NAMES_OF_A_MODULE))
    assert too_curious(HOUSE | {"sidestream._save.many": f"from .._format.records import {many}"}) == []
    one_more = f"from .._format.records import {many}\nfrom ..errors import C"
    assert len(too_curious(HOUSE | {"sidestream._save.many": one_more})) == 1
    rooms = [f"from .._r{number} import x" for number in range(MOST_ROOMS_OF_A_MODULE)]
    house = HOUSE | {f"sidestream._r{number}": "" for number in range(MOST_ROOMS_OF_A_MODULE + 1)}
    assert too_curious(house | {"sidestream._save.many": "\n".join([*rooms, "from .. import errors"])}) == []
    rooms.append(f"from .._r{MOST_ROOMS_OF_A_MODULE} import x")
    assert len(too_curious(house | {"sidestream._save.many": "\n".join(rooms)})) == 1


@pytest.mark.parametrize(
    "source",
    ["from .._format import records", "from .._format import records as r", "import sidestream._format.records"],
)
def test_catches_a_module_as_a_name(source: str) -> None:
    assert len(whole_modules(HOUSE | {"sidestream._save.running": source})) == 1
    assert whole_modules(HOUSE | {"sidestream._format.frame": "from . import records"}) == []
    defines = {
        "sidestream._format.records": "def records(): ...",
        "sidestream._save.running": "from .._format.records import records",
    }
    assert whole_modules(HOUSE | defines) == []


def test_counts_a_deadline() -> None:
    source = "class A:\n    async def a(self, *, deadline): ...\ndef b(timeout_s): ..."
    assert with_parameter("deadline", {"m": source}) == [("m.a", "")]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch import _utils",
        "from torch._utils import x",
        "from torch.distributed import _tensor",
        "from torch.distributed.checkpoint._nested_dict import flatten",
        "import torch\ntorch._C.x()",
        "import torch as t\nt.distributed._x",
        "import torch.distributed.checkpoint as dcp\ndcp._x",
        "from torch.distributed import checkpoint\ncheckpoint.metadata._x",
        "import importlib\nimportlib.import_module('torch.storage._x')",
    ],
)
def test_catches_a_private_torch_name(source: str) -> None:
    assert private_torch_names("sidestream._layout", source) != []
    assert private_torch_names("sidestream._runtime.torch_probes", source) == []


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.float32", "self._torch = 1", "x = torch.__version__", "known = ['torch._utils']"]
)
def test_lets_public_torch_names_pass(source: str) -> None:
    assert private_torch_names("sidestream._layout", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasyncio.run(f())",
        "import asyncio as a\na.run(f())",
        "from asyncio import run",
        "import anyio\nanyio.run(f)",
        "from anyio import run as go",
        "from anyio.from_thread import start_blocking_portal",
        "import anyio.from_thread\nanyio.from_thread.start_blocking_portal()",
        "loop.run_until_complete(f())",
        "self.loop.run_until_complete(f())",
        "get()().run_until_complete(f())",
        "import asyncio\nasyncio.new_event_loop()",
        "import asyncio\nasyncio.SelectorEventLoop()",
    ],
)
def test_catches_a_loop_elsewhere(source: str) -> None:
    assert misplaced_calls("sidestream.save", source, LOOP_MAKERS, "_engine.loop") != []
    assert misplaced_calls("sidestream._engine.loop", source, LOOP_MAKERS, "_engine.loop") == []


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio\nasyncio.to_thread(f)",
        "from asyncio import to_thread",
        "from anyio import to_thread",
        "import anyio\nanyio.to_thread.run_sync(f)",
        "import anyio.to_thread as t\nt.run_sync(f)",
        "asyncio.get_running_loop().run_in_executor(None, f)",
    ],
)
def test_catches_a_thread_hop_elsewhere(source: str) -> None:
    assert misplaced_calls("sidestream.save", source, THREAD_HOPS, "_runtime.threads") != []
    assert misplaced_calls("sidestream._runtime.threads", source, THREAD_HOPS, "_runtime.threads") == []
