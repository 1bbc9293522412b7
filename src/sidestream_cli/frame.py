"""The frame of all commands: exit codes, output, and common options."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from .complete import checkpoints

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "AsJson",
    "CommitChoice",
    "StorageOption",
    "TargetOption",
    "TimeoutS",
    "Url",
    "UsageError",
    "app",
    "bar",
    "moment",
    "options_of",
    "print_json",
    "say",
    "show",
    "size",
    "verb",
]

P = ParamSpec("P")


class UsageError(Exception):
    """A wrong option that is found before the library is imported, which takes seconds. Shown as an
    ``InvalidOptionError``."""


app: typer.Typer = typer.Typer(
    name="sidestream",
    help="List, verify, compare, copy and convert checkpoints of sidestream, DCP, torch.save and safetensors.",
    epilog="Exit codes: 0 for success; 1 for damage or differences; 2 for an error; 1 or 2 if the reader of the output "
    "has gone (`| head`); 130 after Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Url = Annotated[
    str,
    typer.Argument(
        help="A checkpoint: a directory, a .pt or a .safetensors file; a path or any URL.", autocompletion=checkpoints
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Give up after so many seconds.")]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        help="An entry of storage_options= as KEY=VALUE (VALUE is JSON or text), or @FILE with a JSON object, which no "
        "list of processes shows. Never printed. May be repeated.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option("--target-option", help="The same, for the second URL.", show_default=False),
]
CommitChoice = Annotated[
    str,
    typer.Option("--commit", help="marker: for a file system that renames no directory, such as a mount of a bucket."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(metadata.version("sidestream"))
        raise typer.Exit


@app.callback()
def _every_verb(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Accept the options that precede a command."""


def verb(function: Callable[P, int]) -> Callable[P, None]:
    """Make a command from a function that returns its exit code. Its errors are printed as one message."""

    @wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        code = 2
        try:
            code = function(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader has gone; not 0, because damage may not have been printed
            code = max(code, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at its end
        except KeyboardInterrupt:
            sys.stderr.write("interrupted; nothing incomplete is left behind\n")
            code = 130
        except Exception as error:
            _report(error, as_json=bool(kwargs.get("as_json")))
            code = 2
        raise typer.Exit(code)

    paragraphs = (function.__doc__ or "").split("\n\n")
    command.__doc__ = "\n\n".join(" ".join(one.split()) for one in paragraphs)  # --help keeps the ends of lines
    return command


def _report(error: Exception, *, as_json: bool) -> None:
    """Print an error as one message; an unexpected error is printed with its traceback."""
    if as_json:
        name = "InvalidOptionError" if isinstance(error, UsageError) else type(error).__name__
        print_json({"error": name, "message": str(error)})
        return
    if isinstance(error, UsageError):
        shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(error))
        sys.stderr.write(f"InvalidOptionError: {shown}\n")
        return
    from sidestream.errors import SidestreamError, printable, printable_lines

    if not isinstance(error, (SidestreamError, OSError)):
        lines = "".join(traceback.format_tb(error.__traceback__)).splitlines()
        sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
    sys.stderr.write(printable_lines(f"{type(error).__name__}: {error}") + "\n")


def options_of(words: list[str] | None) -> dict[str, Any] | None:
    """Return the options from ``--storage-option``. Raises ``UsageError``, whose message has no values."""
    if not words:
        return None
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("@"):
            found.update(_from_file(word[1:]))
            continue
        key, middle, value = word.partition("=")
        if not middle or not key:
            raise UsageError("--storage-option takes KEY=VALUE, or @FILE")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _from_file(path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"--storage-option @{path} cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise UsageError(f"--storage-option @{path} holds no JSON object")
    return found


# --- output ---------------------------------------------------------------------------------------------------------
# Everything that the commands print passes through the functions below. Names and messages come from untrusted
# checkpoints: control characters of terminals are escaped, and nothing is interpreted as markup of rich.

_NUMBERS = ("bytes", "tensors", "step", "seconds", "GiB/s", "of the disk")
_PIPE_WIDTH = 200  # output to a file or a pipe is not folded to the width of a terminal


def print_json(content: object) -> None:
    """Print JSON in ASCII, with names unchanged. A number that JSON cannot represent becomes a string: ``"inf"``,
    ``"nan"``."""
    sys.stdout.write(json.dumps(_finite(content), default=str, allow_nan=False) + "\n")


def _finite(content: object) -> object:
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, Mapping):
        return {key: _finite(item) for key, item in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(item) for item in content]
    return content


def say(text: str) -> None:
    """Print a message, with escaped control characters."""
    from sidestream.errors import printable_lines

    sys.stdout.write(printable_lines(text) + "\n")


def show(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. A cell that does not fit is folded and not cut off."""
    from rich.table import Table
    from rich.text import Text

    from sidestream.errors import printable

    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    _console(error=False).print(table)


@contextmanager
def bar(label: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show the progress in bytes on stderr, if that is a terminal and ``quiet`` is not set."""
    if quiet or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(label, *columns, console=_console(error=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _console(*, error: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if error else sys.stdout
    return Console(file=stream, soft_wrap=True, width=None if stream.isatty() else _PIPE_WIDTH)


def moment(at_s: float) -> str:
    """Return seconds since 1970 as date and time in UTC; nothing for 0."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if at_s else ""


def size(nbytes: float) -> str:
    """Return a number of bytes in binary units, as in ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
