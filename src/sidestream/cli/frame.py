"""What the verbs share: how they end, what they print, and the options that many of them take."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from ..errors import InvalidOption, SidestreamError

__all__ = [
    "AsJson",
    "StorageOption",
    "TargetOption",
    "TimeoutS",
    "Url",
    "app",
    "bar",
    "options_of",
    "print_json",
    "say",
    "show",
    "size",
    "table",
    "verb",
]

P = ParamSpec("P")

app = typer.Typer(
    name="sidestream",
    help="Look at checkpoints, check, compare, copy and convert them: ours, stock DCP's, torch.save's and safetensors.",
    epilog="Exit codes: 0; 1 for an answer that is no (damage, differences); 2 for an error; 130 after Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_WIDTH = None if sys.stdout.isatty() else 200  # what goes into a file or a pipe is not folded to a terminal's width
_out, _err = Console(soft_wrap=True, width=_WIDTH), Console(stderr=True, soft_wrap=True)

Url = Annotated[str, typer.Argument(help="A checkpoint: a directory, a .pt or a .safetensors file; a path or any URL.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Give up after so many seconds.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        help="KEY=VALUE of what the fsspec file system takes (VALUE as JSON or as it is), or @FILE with a JSON object, "
        "which no list of processes shows. Never printed. May be repeated.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option("--target-option", help="The same, for the second URL.", show_default=False),
]


def verb(function: Callable[P, int]) -> Callable[P, None]:
    """A command whose result is its exit code, and whose errors are one line."""

    @wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever read it has seen enough
            sys.stderr.close()
            code = 0
        except (SidestreamError, OSError) as error:
            code = 2
            if kwargs.get("as_json"):
                print_json({"error": type(error).__name__, "message": str(error)})
            else:
                _err.print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
        except KeyboardInterrupt:
            _err.print("interrupted; nothing half-done is left behind")
            code = 130
        raise typer.Exit(code)

    return command


def options_of(words: list[str] | None) -> dict[str, Any] | None:
    """What ``--storage-option`` gave. Raises ``InvalidOption``, which shows no value."""
    if not words:
        return None
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("@"):
            found.update(_from_file(word[1:]))
            continue
        key, middle, value = word.partition("=")
        if not middle or not key:
            raise InvalidOption("--storage-option takes KEY=VALUE, or @FILE")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _from_file(path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InvalidOption(f"--storage-option @{path} cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise InvalidOption(f"--storage-option @{path} holds no JSON object")
    return found


# --- what is shown --------------------------------------------------------------------------------------------------


def print_json(content: object) -> None:
    sys.stdout.write(json.dumps(content, default=str) + "\n")


def say(text: str) -> None:
    _out.print(text, markup=False, highlight=False)


def show(rows: Table) -> None:
    _out.print(rows)


@contextmanager
def bar(label: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Progress in bytes, on the terminal's error stream; nothing where that is no terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    hidden = quiet or not _err.is_terminal
    with Progress(label, *columns, console=_err, transient=True, disable=hidden) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def table(*columns: str) -> Table:
    found = Table(box=None, pad_edge=False)
    numbers = ("bytes", "tensors", "step", "seconds", "GiB/s", "of the disk")
    for column in columns:
        found.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return found
