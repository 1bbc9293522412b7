"""The verbs. Exit codes: 0; 1 for an answer that is no (damage, differences); 2 for an error; 130 for Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from .. import blocking, signing
from ..errors import InvalidOption, SidestreamError
from .look import differences, machine, rows, steps

__all__ = ["app"]

P = ParamSpec("P")

app = typer.Typer(
    name="sidestream",
    help="Look at checkpoints, check, compare and convert them: ours, stock DCP's, torch.save's and safetensors.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_WIDTH = None if sys.stdout.isatty() else 200  # what goes into a file or a pipe is not folded to a terminal's width
_out, _err = Console(soft_wrap=True, width=_WIDTH), Console(stderr=True, soft_wrap=True)

Url = Annotated[str, typer.Argument(help="A checkpoint: a directory, or where that is said a file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TimeoutS = Annotated[float, typer.Option("--timeout-s", help="Give up after so many seconds.")]


def _verb(function: Callable[P, int]) -> Callable[P, None]:
    """A command whose result is its exit code, and whose errors are one line."""

    @wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
        except SidestreamError as error:
            _err.print(f"{type(error).__name__}: {error}", markup=False, highlight=False)
            code = 2
        except KeyboardInterrupt:
            _err.print("interrupted; nothing half-done is left behind")
            code = 130
        raise typer.Exit(code)

    return command


def _print_json(content: object) -> None:
    sys.stdout.write(json.dumps(content, default=str) + "\n")


@contextmanager
def _bar(label: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Progress in bytes, on the terminal's error stream; nothing where that is no terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        f"{label}", *columns, console=_err, transient=True, disable=quiet or not _err.is_terminal
    ) as progress:
        task = progress.add_task(label)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("bytes", "tensors", "step") else "left", overflow="fold")
    return table


@app.command()
@_verb
def ls(url: Annotated[str, typer.Argument(help="The directory of a run.")], as_json: AsJson = False) -> int:
    """List the committed steps of a run."""
    found = steps(url)
    if as_json:
        _print_json([dataclasses.asdict(one) for one in found])
        return 0
    table = _table("step", "tensors", "bytes", "name")
    for one in found:
        table.add_row(str(one.step), str(one.tensors), _size(one.nbytes), one.damage or one.name)
    _out.print(table)
    return 0


@app.command()
@_verb
def info(
    url: Url,
    pattern: Annotated[str, typer.Argument(help="Names to show, as in 'model.*'.")] = "*",
    as_json: AsJson = False,
) -> int:
    """Show what is in a checkpoint, a torch.save file or safetensors: names, dtypes, shapes, bytes, files."""
    found = rows(url, pattern)
    if as_json:
        _print_json([dataclasses.asdict(one) for one in found])
        return 0
    table = _table("name", "dtype", "shape", "bytes", "file")
    for one in found:
        shape = "" if one.shape is None else "x".join(map(str, one.shape)) or "scalar"
        table.add_row(
            one.name, one.dtype or "value", shape, _size(one.nbytes) if one.dtype else "", ", ".join(one.files)
        )
    _out.print(table)
    tensors = [one for one in found if one.dtype]
    _out.print(
        f"{len(tensors)} tensors of {_size(sum(one.nbytes for one in tensors))}, {len(found) - len(tensors)} values"
    )
    return 0


@app.command()
@_verb
def verify(
    url: Url,
    key: Annotated[str | None, typer.Option(help="A public key (PEM): the checkpoint has to be signed by it.")] = None,
    as_json: AsJson = False,
    timeout_s: TimeoutS = 86400.0,
) -> int:
    """Read everything and compare it with all that is known. Exit code 1, and what is damaged, if something is."""
    with _bar("verifying", as_json) as progress:
        if key is not None:
            report = blocking.run(lambda: signing.verify(url, key, progress=progress, timeout_s=timeout_s))
        else:
            report = blocking.verify(url, progress=progress, timeout_s=timeout_s)
    if as_json:
        _print_json({"ok": report.ok, **dataclasses.asdict(report)})
        return 0 if report.ok else 1
    for damage in report.damaged:
        _out.print(f"damaged: {damage.message}", markup=False, highlight=False)
    _out.print(
        f"{len(report.verified)} verified, {len(report.damaged)} damaged, {len(report.unverified)} without checksum"
    )
    return 0 if report.ok else 1


@app.command()
@_verb
def diff(first: Url, second: Url, as_json: AsJson = False) -> int:
    """Compare two checkpoints. Exit code 1, and where and by how much they differ, if they do."""
    found = differences(first, second)
    if as_json:
        _print_json([dataclasses.asdict(one) for one in found])
        return 1 if found else 0
    table = _table("name", "what", "largest difference")
    for one in found:
        table.add_row(one.name, one.what, "" if one.largest is None else f"{one.largest:.6g}")
    if found:
        _out.print(table)
    else:
        _out.print("no differences")
    return 1 if found else 0


@app.command()
@_verb
def convert(
    source: Url,
    target: Annotated[str, typer.Argument(help="What to write: a new directory, or a .pt or .safetensors file.")],
    format: Annotated[str | None, typer.Option(help="dcp, torch or safetensors.")] = None,  # noqa: A002
    select: Annotated[list[str] | None, typer.Option(help="Take only names like this. May be repeated.")] = None,
    rename: Annotated[list[str] | None, typer.Option(help="REGEX=REPLACEMENT. May be repeated.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What floating-point tensors become, as in bfloat16.")] = None,
    shard_mib: Annotated[int, typer.Option(help="Begin the next file beyond this; 0 for one file.")] = 5 << 10,
    budget_mib: Annotated[int, typer.Option(help="Memory for payloads.")] = 256,
    as_json: AsJson = False,
    timeout_s: TimeoutS = 86400.0,
) -> int:
    """Write a checkpoint in another format, in pieces; the target appears as a whole or not at all."""
    options: dict[str, Any] = {"format": format, "select": select, "rename": _pairs(rename), "dtype": _dtype(dtype)}
    with _bar("converting", as_json) as progress:
        report = blocking.convert(
            source,
            target,
            **options,
            shard_bytes=shard_mib << 20 or None,
            budget_bytes=budget_mib << 20,
            progress=progress,
            timeout_s=timeout_s,
        )
    if as_json:
        _print_json(dataclasses.asdict(report))
        return 0
    _out.print(f"{report.url}: {len(report.tensors)} tensors, {len(report.values)} values, {_size(report.nbytes)}")
    if report.unverified:
        _out.print(f"{len(report.unverified)} of them could not be verified: the source has no checksums")
    return 0


def _pairs(rename: list[str] | None) -> dict[str, str] | None:
    if not rename:
        return None
    pairs = [one.partition("=") for one in rename]
    if not all(middle for _, middle, _ in pairs):
        raise InvalidOption("--rename takes REGEX=REPLACEMENT")
    return {old: new for old, _, new in pairs}


def _dtype(name: str | None) -> Any:
    import torch

    found = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(found, torch.dtype):
        raise InvalidOption(f"--dtype {name} is no dtype of torch")
    return found


@app.command()
@_verb
def doctor(
    directory: Annotated[str, typer.Argument(help="Where checkpoints are to go.")] = ".", as_json: AsJson = False
) -> int:
    """Say what this machine offers, and what follows from it."""
    found = machine(directory)
    if as_json:
        _print_json([dataclasses.asdict(one) for one in found])
        return 0
    table = _table("what", "here", "advice")
    for one in found:
        table.add_row(one.what, one.here, one.advice)
    _out.print(table)
    return 0
