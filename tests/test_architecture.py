"""The house: who may import whom, and where private torch names, loops and threads may stand.

Each check is a function over source text that returns what it objects to. The tests run it over the package, and over
small wrong snippets that it has to catch.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import pickle
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = "sidestream"
SOURCES = Path(__file__).parents[1] / "src" / PACKAGE

FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "events"}),
    frozenset({"_runtime", "options"}),
    frozenset({"_format", "_group", "_staging"}),
    frozenset({"_layout", "_storage"}),
    frozenset({"_load", "_save", "_worker"}),
    frozenset({"_convert", "_run", "blocking", "checkpointer", "signing", "weights"}),
    frozenset({"cli", "dcp", "integrations"}),
)
PUBLIC_MODULES = ("errors", "options", "events", "blocking", "signing", "dcp")
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

LOOP_MAKERS = frozenset({
    "asyncio.run", "asyncio.Runner", "asyncio.new_event_loop", "anyio.run", "anyio.from_thread.start_blocking_portal",
    "start_blocking_portal", "BlockingPortal", "run_until_complete", "run_forever", "new_event_loop",
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


def packages_of(modules: Mapping[str, str]) -> frozenset[str]:
    """The names among ``modules`` that are packages, as far as relative imports are concerned."""
    on_disk = {name for name in modules if (SOURCES.parent / Path(*name.split(".")) / "__init__.py").exists()}
    return frozenset(on_disk | {name for name in modules if any(other.startswith(name + ".") for other in modules)})


def imported(name: str, source: str, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Line and dotted target of each import in ``source``; type-only ones and those inside functions count too."""
    base = name.split(".") if name in packages_of(known) else name.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
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


def aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported local name stands for, e.g. ``F`` for ``torch.nn.functional``."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


# --- the checks -----------------------------------------------------------------------------------------------------


def unplaced(sources: Mapping[str, str]) -> list[str]:
    """Top-level modules that stand on no floor."""
    rooms = {room for name in sources if (room := room_of(name))}
    return [f"{room}: has no floor; place it in FLOORS" for room in sorted(rooms - FLOOR_OF.keys())]


def upward_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports from a higher floor."""
    found = []
    for name, source in sources.items():
        room = room_of(name)
        for line, target in imported(name, source, sources):
            other = room_of(target)
            if room is None or target.split(".")[0] != PACKAGE:
                continue
            if other is None:
                found.append(f"{name}:{line}: imports the package root, which stands above every floor")
            elif FLOOR_OF.get(other, 99) > FLOOR_OF.get(room, -1):
                found.append(
                    f"{name}:{line}: floor {FLOOR_OF.get(room)} imports {target} of floor {FLOOR_OF.get(other)}"
                )
    return found


def cycles(sources: Mapping[str, str]) -> list[str]:
    """Circles among modules, and among the rooms that they stand in."""
    modules: dict[str, set[str]] = {name: set() for name in sources}
    rooms: dict[str, set[str]] = {}
    for name, source in sources.items():
        for _, target in imported(name, source, sources):
            # A package's __init__ gathers its own modules, and they import each other through their own names:
            # only an import of the package by a module inside it would be a circle, and that is an edge here too.
            if target in modules and target != name and name != PACKAGE:
                modules[name].add(target)
            room, other = room_of(name), room_of(target)
            if room and other and room != other:
                rooms.setdefault(room, set()).add(other)
    found = []
    for kind, graph in (("modules", modules), ("rooms", rooms)):
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            found.append(f"a circle of {kind}: {' -> '.join(error.args[1])}")
    return found


def eager_root(source: str) -> list[str]:
    """Imports that ``sidestream/__init__`` would run when it is imported, and a missing ``__getattr__``."""
    tree = ast.parse(source)
    allowed = {"__future__", "typing", "importlib", "importlib.metadata", "importlib.util"}
    found = []
    for node in tree.body:  # what stands under `if TYPE_CHECKING:` or in a function does not run
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        found += [f"{PACKAGE}:{node.lineno}: imports {name} eagerly" for name in names if name not in allowed]
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        found.append(f"{PACKAGE}: has no module-level __getattr__ (PEP 562)")
    return found


def _private_torch(target: str) -> bool:
    first, *rest = target.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


def private_torch_names(name: str, source: str) -> list[str]:
    """Uses of torch's private names: imports, and attributes of torch modules and of what was imported from them."""
    if name == f"{PACKAGE}._runtime.torch_probes":
        return []
    tree = ast.parse(source)
    names = aliases(tree)
    found = []
    for node in ast.walk(tree):
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
    tree = ast.parse(source)
    names = aliases(tree)
    bare = {want for want in wanted if "." not in want}
    found = []
    for node in ast.walk(tree):
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


def test_every_module_is_placed(sources: dict[str, str]) -> None:
    assert unplaced(sources) == []


def test_imports_point_down(sources: dict[str, str]) -> None:
    assert upward_imports(sources) == []


def test_no_circles(sources: dict[str, str]) -> None:
    assert cycles(sources) == []


def test_root_is_lazy(sources: dict[str, str]) -> None:
    assert eager_root(sources[PACKAGE]) == []


def test_private_torch_names(sources: dict[str, str]) -> None:
    found = [hit for name, source in sources.items() for hit in private_torch_names(name, source)]
    assert found == []


def test_loops_start_in_blocking_only(sources: dict[str, str]) -> None:
    found = [hit for name, source in sources.items() for hit in misplaced_calls(name, source, LOOP_MAKERS, "blocking")]
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


@pytest.mark.parametrize("module", ["", ".errors", ".options", "._storage", "._format"])
def test_imports_no_torch(module: str) -> None:
    name = PACKAGE + module
    done = run_fresh(f"import sys, {name}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr or f"{name} imports torch"


def test_public_names_survive_the_import_of_their_modules() -> None:
    """A submodule sets itself as an attribute of its package: ``sidestream.save`` has to stay the function."""
    done = run_fresh(
        textwrap.dedent(f"""
        import importlib, pkgutil, types
        import {PACKAGE}
        for module in pkgutil.walk_packages({PACKAGE}.__path__, "{PACKAGE}."):
            if "__main__" not in module.name:
                importlib.import_module(module.name)
        for name in {PACKAGE}.__all__:
            value = getattr({PACKAGE}, name)
            if isinstance(value, types.ModuleType) and name not in {PUBLIC_MODULES}:
                raise SystemExit(f"{PACKAGE}.{{name}} is the module, not the public object")
        """)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["", ".blocking", ".dcp", ".errors", ".events", ".signing"])
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


def test_catches_an_unplaced_module() -> None:
    assert unplaced({"sidestream.helpers": ""}) == ["helpers: has no floor; place it in FLOORS"]


@pytest.mark.parametrize(
    "source",
    [
        "from ..save import save",
        "import sidestream.save",
        "from .. import save",
        "def f():\n    from ..save import save",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sidestream.save import save",
        "from .. import something_public",
        "import sidestream",
    ],
)
def test_catches_an_upward_import(source: str) -> None:
    house = {"sidestream": ROOT, "sidestream.save": "", "sidestream._layout": "", "sidestream._layout.flatten": source}
    assert len(upward_imports(house)) == 1


@pytest.mark.parametrize("source", ["from ..errors import Closed", "from .. import errors", "from . import layout"])
def test_lets_a_downward_import_pass(source: str) -> None:
    house = {"sidestream": ROOT, "sidestream.errors": "", "sidestream._layout": "", "sidestream._layout.layout": ""}
    assert upward_imports(house | {"sidestream._layout.flatten": source}) == []


@pytest.mark.parametrize(
    "house",
    [
        {"sidestream._layout.a": "from .b import x", "sidestream._layout.b": "def f():\n    from .a import y"},
        {"sidestream.save": "from .load import x", "sidestream.load": "from .save import y"},
        # No module imports its own importer, but the rooms do.
        {
            "sidestream._layout.a": "from .._format.b import x",
            "sidestream._layout.c": "",
            "sidestream._format.b": "",
            "sidestream._format.d": "from .._layout.c import y",
        },
        {"sidestream._layout": "from .a import x", "sidestream._layout.a": "from . import y"},
    ],
)
def test_catches_a_circle(house: dict[str, str]) -> None:
    assert len(cycles(house)) >= 1


@pytest.mark.parametrize(
    "source",
    ["import torch\n" + ROOT, "from .save import save\n" + ROOT, "from __future__ import annotations"],
)
def test_catches_an_eager_root(source: str) -> None:
    assert len(eager_root(source)) == 1


def test_lets_a_lazy_root_pass() -> None:
    source = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .save import save as save\n{ROOT}"
    assert eager_root(source) == []


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
    ],
)
def test_catches_a_loop_elsewhere(source: str) -> None:
    assert misplaced_calls("sidestream.save", source, LOOP_MAKERS, "blocking") != []
    assert misplaced_calls("sidestream.blocking", source, LOOP_MAKERS, "blocking") == []


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
