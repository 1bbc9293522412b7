"""The commands that write or delete."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .frame import (
    AsJson,
    CommitChoice,
    StorageOption,
    TargetOption,
    TimeoutS,
    Url,
    UsageError,
    app,
    bar,
    options_of,
    print_json,
    say,
    size,
    verb,
)

if TYPE_CHECKING:
    from sidestream import Storage

_BudgetMib = Annotated[int, typer.Option(min=96, help="Memory for payloads, at least 96.")]


@app.command()
@verb
def convert(
    source: Url,
    target: Annotated[str, typer.Argument(help="What to write: a new directory, or a .pt or .safetensors file.")],
    format: Annotated[str | None, typer.Option(help="dcp, torch or safetensors.")] = None,  # noqa: A002
    select: Annotated[
        list[str] | None, typer.Option(help="Select only names that match this pattern. May be repeated.")
    ] = None,
    rename: Annotated[list[str] | None, typer.Option(help="REGEX=REPLACEMENT. May be repeated.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Convert floating-point tensors to this dtype, as in bfloat16.")
    ] = None,
    shard_mib: Annotated[int, typer.Option(min=0, help="Begin a new file above this size; 0 for one file.")] = 5 << 10,
    budget_mib: _BudgetMib = 256,
    storage_option: StorageOption = None,
    target_option: TargetOption = None,
    commit: CommitChoice = "rename",
    as_json: AsJson = False,
    timeout_s: TimeoutS = 86400.0,
) -> int:
    """Write a checkpoint in another format, with bounded memory. The target becomes visible as a whole or not at
    all."""
    options: dict[str, Any] = {"format": format, "select": select, "names": _renaming(rename)}
    options |= {**_stores(storage_option, target_option, commit), "dtype": _dtype(dtype)}
    from sidestream import ConvertOptions, blocking
    from sidestream.errors import redacted

    with _named_as_options("select", "dtype", names="rename"), bar("converting", as_json) as progress:
        report = blocking.convert(
            source,
            target,
            **options,
            options=ConvertOptions(
                max_shard_bytes=shard_mib << 20 or None,
                budget_bytes=budget_mib << 20,
                progress=progress,
                timeout_s=timeout_s,
            ),
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return 0
    say(f"{redacted(target)}: {len(report.tensors)} tensors, {len(report.values)} values, {size(report.nbytes)}")
    if report.unverified:
        say(f"{len(report.unverified)} of them could not be verified: the source has no checksums")
    return 0


@app.command()
@verb
def copy(
    source: Url,
    target: Annotated[str, typer.Argument(help="What to write: a new directory or file; a path or any URL.")],
    budget_mib: _BudgetMib = 256,
    storage_option: StorageOption = None,
    target_option: TargetOption = None,
    commit: CommitChoice = "rename",
    as_json: AsJson = False,
    timeout_s: TimeoutS = 86400.0,
) -> int:
    """Copy a checkpoint between stores unchanged. It is verified while it is copied, and read back before it is
    visible."""
    stores = _stores(storage_option, target_option, commit)
    from sidestream import blocking
    from sidestream.errors import redacted

    with bar("copying", as_json) as progress:
        report = blocking.copy(
            source,
            target,
            budget_bytes=budget_mib << 20,
            progress=progress,
            timeout_s=timeout_s,
            storage=stores["storage"],
            target_storage=stores["target_storage"],
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return 0
    say(f"{redacted(target)}: {len(report.files)} files, {size(report.nbytes)}, read back and the same")
    say(f"{len(report.verified)} verified by their writer's checksums, {len(report.unverified)} without checksum")
    return 0


@app.command()
@verb
def prune(
    url: Annotated[str, typer.Argument(help="The directory of a run; a path or any URL.")],
    keep_last: Annotated[int | None, typer.Option(min=1, help="Keep this number of the highest steps.")] = None,
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Keep the first step in each span of this number of steps.")
    ] = None,
    keep_best: Annotated[
        list[str] | None, typer.Option(help="METRIC or METRIC=N: keep the N best by their metadata. May be repeated.")
    ] = None,
    best_is: Annotated[str, typer.Option(help="min or max: which values of a metric are good.")] = "min",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be deleted, and delete nothing.")] = False,
    storage_option: StorageOption = None,
    commit: CommitChoice = "rename",
    as_json: AsJson = False,
    timeout_s: TimeoutS = 86400.0,
) -> int:
    """Delete steps of a run, as its retention would.

    The newest step that stays is verified first, and no step in use is deleted. What killed writers left is deleted by
    a Checkpointer only."""
    if keep_last is None and keep_every is None and not keep_best:
        raise UsageError("choose which steps to keep: pass --keep-last, --keep-every or --keep-best")
    best = [_metric(word) for word in keep_best or ()]
    storage = _storage(storage_option, commit)
    from sidestream import KeepBest, KeepEvery, KeepLast, blocking

    policies: list[Any] = [] if keep_last is None else [KeepLast(keep_last)]
    policies += [] if keep_every is None else [KeepEvery(steps=keep_every)]
    mode: Any = best_is
    with _named_as_options(mode="best-is"):
        policies += [KeepBest(metric, count, mode) for metric, count in best]
    options: dict[str, Any] = {"keep": functools.reduce(or_, policies), "timeout_s": timeout_s}
    with blocking.Checkpointer(url, **options, storage=storage) as checkpoints:
        good = {metric: checkpoints.best(metric, mode) for metric, _ in best}  # refuses a metric that no step has
        done = checkpoints.prune(dry_run=dry_run)
        why = checkpoints.health().damaged
    if as_json:
        print_json({"dry_run": dry_run, "best": good, **dataclasses.asdict(done)})
        return 1 if done.damaged else 0
    for metric, step in good.items():
        say(f"best by {metric}: {'no step' if step is None else f'step {step}'}")
    for name in done.deleted:
        say(f"{'would delete' if dry_run else 'deleted'} {name}")
    for name in done.leased:
        say(f"in use, and stays for now: {name}")
    for name in done.damaged:
        say(f"damaged: {why.get(name, name)}")
    if not done.deleted:
        say("nothing to delete")
    return 1 if done.damaged else 0


def _stores(source: list[str] | None, target: list[str] | None, commit: str) -> dict[str, Storage]:
    options, storage = options_of(source), _storage(target, commit)
    from sidestream import Storage

    return {"storage": Storage(options), "target_storage": storage}


def _storage(words: list[str] | None, commit: str) -> Storage:
    options = options_of(words)
    from sidestream import Storage

    with _named_as_options("commit"):
        return Storage(options, commit=commit)  # type: ignore[arg-type]  # it is checked there


@contextmanager
def _named_as_options(*keywords: str, **others: str) -> Iterator[None]:
    """Replace the names of options in errors by those of the command line. ``others`` have another name there."""
    from sidestream.errors import SidestreamError

    spelled = {**{keyword: keyword for keyword in keywords}, **others}
    try:
        yield
    except SidestreamError as error:
        keyword = re.compile(rf"\b({'|'.join(spelled)})=")
        text = functools.partial(keyword.sub, lambda found: f"--{spelled[found[1]]} ")
        raise error.reworded(lambda one: text(one).rstrip()) from error.__cause__


def _metric(word: str) -> tuple[str, int]:
    metric, _, count = word.partition("=")
    if count and not (count.isascii() and count.isdigit() and int(count)):
        raise UsageError("--keep-best takes METRIC or METRIC=N")
    return metric, int(count or 1)


def _renaming(rename: list[str] | None) -> Callable[[str], str] | None:
    if not rename:
        return None
    pairs = [one.partition("=") for one in rename]
    if not all(middle for _, middle, _ in pairs):
        raise UsageError("--rename takes REGEX=REPLACEMENT")
    try:
        patterns = [(re.compile(old), new) for old, _, new in pairs]
        for pattern, new in patterns:
            pattern.sub(new, "")
    except re.error as error:
        raise UsageError(f"--rename takes REGEX=REPLACEMENT, of which one is not valid: {error}") from None
    return lambda name: functools.reduce(lambda found, one: one[0].sub(one[1], found), patterns, name)


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"--dtype {name} is not a torch dtype that a checkpoint can hold")
    return dtype
