"""``docs/from_dcp.md`` leaves no public name out, and shows each one in two lines (which ``test_docs.py`` runs)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "from_dcp.md").read_text(encoding="utf-8")
MODULES = ("", "format_utils", "hf_storage", "quantized_hf_storage", "state_dict", "stateful")
LATER = {"CheckpointableTensor", "FsspecReader", "FsspecWriter"}  # not in the torch that the page is written for
NOT_OURS_TO_MAP = {"StatefulT"} | LATER  # a type variable
BESIDE = {  # public as well, though no __all__ and no __init__ says so
    "AsyncCheckpointerType.PROCESS", "AsyncCheckpointerType.THREAD", "AsyncSaveResponse", "AsyncStager",
    "BlockingAsyncStager", "DefaultStager", "StagingOptions", "WriteResult", "logger", "logging_handlers",
}  # fmt: skip


def public_names() -> Iterator[str]:
    """What ``__init__`` imports, and what the modules that the documentation names list."""
    for name in MODULES:
        module = import_module("torch.distributed.checkpoint" + (f".{name}" if name else ""))
        found = getattr(module, "__all__", [each for each in vars(module) if not each.startswith("_")])
        for each in found:
            if each in NOT_OURS_TO_MAP:
                continue
            value = getattr(module, each)
            if name or ((inspect.isclass(value) or inspect.isfunction(value)) and "checkpoint" in value.__module__):
                if name and getattr(value, "__module__", "") != module.__name__:
                    continue
                yield each


def rows() -> list[str]:
    table = PAGE.partition("## Every public name")[2].partition("### ")[0]
    return re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)


def examples() -> dict[str, str]:
    parts = re.findall(r"^### `([\w.]+)`\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return {name: re.search(r"```python\n(.*?)```", text, re.DOTALL)[1] for name, text in parts}  # type: ignore[index]


def test_every_public_name_has_a_row() -> None:
    assert sorted(({*public_names()} | BESIDE) - set(rows())) == []


def test_names_of_later_releases_are_explained() -> None:
    assert sorted(name for name in LATER if f"`{name}`" not in PAGE) == []


def test_no_row_is_of_a_name_that_is_not_there() -> None:
    assert len(rows()) == len(set(rows()))
    assert sorted(set(rows()) - {*public_names()} - BESIDE) == []


@pytest.mark.parametrize("name", rows())
def test_every_name_has_an_example_of_two_lines(name: str) -> None:
    lines = [line for line in examples()[name].splitlines() if line.strip()]
    assert len(lines) == 2
