"""What the messages of the package name exists: calls, keywords and their values, commands, options and extras.

``tests/test_advice.py`` takes some of the ways out. This looks at all messages of the sources, without the calls that
raise them: ``wrong_names`` returns what it objects to.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import tomllib
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
import typer
from test_docstrings import MODULES
from test_words import ROOT, package_sources

import sidestream
from sidestream_cli.app import app

FOREIGN_KEYWORDS = {
    "async_stager": "dcp.async_save of torch",
    "asynchronous": "file systems of fsspec",
    "enable_jit_checkpoint": "TrainingArguments of transformers",
    "fsdp_version": "FullyShardedDataParallelPlugin of accelerate",
    "ignore": "save_hyperparameters of Lightning",
    "last_save_model_only": "the settings of TorchTitan",
    "map_location": "load_checkpoint of Lightning",
    "serialization_format": "FileSystemWriter of torch",
    "sync_files": "FileSystemWriter of torch",
    "use_collectives": "dcp.save of torch",
}
FOREIGN_CALLS = {
    "clone": "torch.Tensor",
    "dcp.async_save": "torch.distributed.checkpoint",
    "items": "dict",
    "load": "torch.distributed.checkpoint",
    "local_shards": "ShardedTensor of torch",
    "offsets": "nested tensors of torch",
    "on_save_checkpoint": "callbacks of Lightning",
    "ray.train.get_context": "Ray Train",
    "redistribute": "DTensor of torch",
    "register_buffer": "torch.nn.Module",
    "reshape": "torch.Tensor",
    "seek": "io.BytesIO",
    "self.save_hyperparameters": "modules of Lightning",
    "state_dict": "what the caller saves",
    "load_state_dict": "what the caller saves",
    "to_local": "DTensor of torch",
    "tensor.to_local": "DTensor of torch",
    "values": "nested tensors of torch",
    "value._asdict": "named tuples",
    "value.get_state": "torch.Generator",
    "value.getstate": "random.Random",
    "value.isoformat": "datetime",
    "value.model_dump": "pydantic",
    "value.to_dict": "configurations of transformers",
    "value.total_seconds": "timedelta",
}
OBJECTS: Mapping[str, object] = {
    "checkpoints": sidestream.Checkpointer,
    "copy": torch.nn.Module,
    "live": sidestream.Live,
    "module": torch.nn.Module,
    "publisher": sidestream.Publisher,
    "tensor": torch.Tensor,
}
"""What a message calls an object of the caller, and its type."""

CODE = ("_worker/process.py", "_storage/clients/requests.py")
"""Modules with strings that are code or patterns, and no messages with names of the interface."""


# --- what there is ---------------------------------------------------------------------------------------------------


@cache
def callables() -> Mapping[str, list[Any]]:
    """Public functions, classes and methods, by their names."""
    found = defaultdict(list)
    for module in map(importlib.import_module, MODULES):
        for name, one in vars(module).items():
            if is_ours(name, one):
                found[name].append(one)
                for method, function in inspect.getmembers(one) if isinstance(one, type) else ():
                    if is_ours(method, function):
                        found[method].append(function)
    return found


def is_ours(name: str, one: object) -> bool:
    """Whether this is public and a callable of the package."""
    return not name.startswith("_") and callable(one) and str(getattr(one, "__module__", "")).startswith("sidestream")


@cache
def keywords(name: str) -> set[str]:
    """The parameters of the public callables of this name."""
    found: set[str] = set()
    for one in callables()[name]:
        with suppress(ValueError):  # of a dict or an exception whose arguments are those of its builtin base
            found.update(inspect.signature(one).parameters)
    return found


@cache
def all_keywords() -> set[str]:
    return {parameter for name in callables() for parameter in keywords(name)}


@cache
def values() -> Mapping[str, set[object]]:
    """The values of parameters that take one of a few, by the name of the parameter."""
    found = defaultdict(set)
    for one in (one for several in callables().values() for one in several):
        function = inspect.unwrap(one.__init__ if isinstance(one, type) else one)
        names = vars(typing) | getattr(function, "__globals__", {})
        for name, hint in getattr(function, "__annotations__", {}).items():
            with suppress(NameError, TypeError):  # of a type that only type checkers import
                found[name].update(literals(eval(hint, names) if isinstance(hint, str) else hint))  # noqa: S307
    return found


def literals(hint: object) -> Iterator[object]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for one in get_args(hint):
            yield from literals(one)


@cache
def commands() -> Mapping[str, Any]:
    program: Any = typer.main.get_command(app)
    return program.commands


@cache
def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def resolves(path: str) -> bool:
    """Whether a dotted name leads to something."""
    first, *rest = path.split(".")
    if first in OBJECTS and hasattr(OBJECTS[first], rest[0]):
        return True
    for length in range(len(rest) + 1, 0, -1):
        try:
            one = importlib.import_module(".".join([first, *rest][:length]))
        except ImportError:
            continue
        for name in [first, *rest][length:]:
            if not hasattr(one, name):
                return False
            one = getattr(one, name)
        return True
    return False


# --- what the messages name ------------------------------------------------------------------------------------------


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The texts with at least two words that are no docstrings. ``{}`` stands for what a message puts in."""
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    inner |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        if " " in text:
            yield node.lineno, text


def wrong_names(path: str, source: str) -> list[str]:
    return [f"{path}:{line}: {wrong}" for line, text in messages(source) for wrong in wrong_in(text)]


def wrong_in(text: str) -> Iterator[str]:
    """The names in one message that name nothing."""
    for path in re.findall(r"(?<![\w./])sidestream(?:\.[A-Za-z_]\w*)+", text):
        if not resolves(path):
            yield path
    for path in re.findall(r"(?<![\w.])([A-Za-z_][\w.]+)\(", text):
        if not is_call(path):
            yield f"{path}()"
    for name in re.findall(r"(?<![\w.-])([a-z_]\w+)=(?!=)", text):
        if name not in FOREIGN_KEYWORDS and name not in all_keywords():
            yield f"{name}="
    for call, arguments in re.findall(r"(?<![\w.])(?:sidestream\.)?(\w+)\(([^()]*)", text):
        known = keywords(call) if call in callables() else set()
        for name in re.findall(r"(?<!\w)([a-z_]\w+)=", arguments):
            if known and name not in known:
                yield f"{call}({name}=)"
    for name, value in re.findall(r"""(?<![\w.])([a-z_]+)=["'](\w+)["']""", text):
        if values().get(name) and value not in values()[name] and "does not exist" not in text:
            yield f"{name}={value!r}"
    for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
        if not any(option in (*one.opts, *one.secondary_opts) for verb in commands().values() for one in verb.params):
            yield option
    for command in re.findall(r"(?:with:|run|`)\s*sidestream ([a-z]+)", text):
        if command not in commands():
            yield f"sidestream {command}"
    for extra in re.findall(r"sidestream\[(\w+)\]", text):
        if extra not in extras():
            yield f"sidestream[{extra}]"


def is_call(path: str) -> bool:
    if path in FOREIGN_CALLS:
        return True
    if "." in path:
        return resolves(path)
    return path in callables() or hasattr(builtins, path)


# --- the tests -------------------------------------------------------------------------------------------------------


def test_what_messages_name_exists() -> None:
    sources = package_sources()
    assert sum(len(list(messages(source))) for source in sources.values()) > 900
    assert [wrong for path, source in sources.items() if path not in CODE for wrong in wrong_names(path, source)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{name}: pass alow_missing=True to the load", ["alow_missing="]),
        ("pass save(streaming=True), or leave it out", ["save(streaming=)"]),
        ("make it with AsyncStager(bakcing='shared')", ["bakcing=", "AsyncStager(bakcing=)"]),
        ("call sidestream.blocking.lode(state, url)", ["sidestream.blocking.lode", "sidestream.blocking.lode()"]),
        ("call realese() of the state", ["realese()"]),
        ("save tensor.int_rep() with its scale", ["tensor.int_rep()"]),
        ("pass verify='nevr' to the load", ["verify='nevr'"]),
        ("write with writer=\"process\" or mode='lazy'", []),
        ("measure it with: sidestream benchmark", ["sidestream benchmark"]),
        ("pass --keep-lasst or --keep-every", ["--keep-lasst"]),
        ("pip install 'sidestream[clouds]'", ["sidestream[clouds]"]),
    ],
)
def test_a_misspelled_name_is_found(text: str, wrong: list[str]) -> None:
    assert wrong_names("x.py", f"raise ValueError({text!r})") == [f"x.py:1: {one}" for one in wrong]
