"""The results of the commands, without their output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, TypeAlias

import torch

from sidestream import blocking
from sidestream._convert.source import Source, open_source
from sidestream._format.records import CompositeEntry, OpaqueEntry, TensorEntry, ValueEntry
from sidestream._run.steps import list_steps
from sidestream._runtime.threads import Deadline
from sidestream._storage import locate_directory, locate_run
from sidestream.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingKeysError,
    SidestreamError,
    UnsupportedCheckpointError,
    redacted,
)
from sidestream.options import Progress, Storage

from .values import Inside, short_repr, value_differences

__all__ = ["Difference", "EntryRow", "Head", "StepRow", "differences", "head", "rows", "steps", "value_texts"]

Options: TypeAlias = Mapping[str, Any] | None

_PIECE_BYTES = 32 << 20
_TIMEOUT_S = 600.0
_PLACES = 3
"""How many places inside a value are listed."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of a run, with the message of its damage. ``saved_at`` is in seconds since 1970, and 0 if it is unknown.
    ``files`` has the sizes of the sidecar files."""

    step: int
    name: str
    tensors: int
    nbytes: int
    damage: str = ""
    saved_at: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)


def steps(url: str, options: Options = None) -> list[StepRow]:
    """Return the committed steps of a run. Raises ``CheckpointNotFoundError`` if there are none."""
    store, _ = locate_run(url, Storage(options))
    found = []
    for one in blocking.run(lambda: list_steps(store), Deadline.after(_TIMEOUT_S)):
        if one.damage is not None:
            found.append(StepRow(one.step, one.name, 0, 0, str(one.damage)))
            continue
        try:
            checkpoint = blocking.open_checkpoint(f"{url.rstrip('/')}/{one.name}", storage_options=options)
            tensors = [info for info in checkpoint.values() if info is not None]
        except CheckpointNotFoundError:  # deleted since the run was listed
            continue
        except (CorruptCheckpointError, UnsupportedCheckpointError) as error:
            found.append(StepRow(one.step, one.name, 0, 0, str(error)))
            continue
        nbytes, saved_at = sum(info.nbytes for info in tensors), one.marker.saved_at if one.marker is not None else 0
        found.append(
            StepRow(
                one.step,
                one.name,
                len(tensors),
                nbytes,
                saved_at=saved_at,
                metadata=checkpoint.metadata,
                files=checkpoint.files,
            )
        )
    if not found:
        blocking.open_checkpoint(url, storage_options=options)  # its error says what is there in place of a run
        raise CheckpointNotFoundError(f"{redacted(url)} has no committed step")
    return found


@dataclass(frozen=True, slots=True)
class EntryRow:
    """An entry of a checkpoint: a tensor, or a value if ``dtype`` is None."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Head:
    """What a checkpoint says about itself. ``saved_at`` and ``files`` as in ``StepRow``."""

    step: int | None
    saved_at: int
    metadata: Mapping[str, Any]
    files: Mapping[str, int]


def head(url: str, options: Options = None) -> Head:
    """Return what the checkpoint says about itself."""
    checkpoint = blocking.open_checkpoint(url, storage_options=options)

    async def moment() -> int:
        async with aclosing(locate_directory(url, Storage(options)).source()) as source:
            marker = await source.marker()
        return 0 if marker is None else marker.saved_at

    saved_at = 0
    with suppress(FileNotFoundError, NotADirectoryError):  # a single file, or a checkpoint without a marker
        saved_at = blocking.run(moment, Deadline.after(_TIMEOUT_S))
    return Head(checkpoint.step, saved_at, checkpoint.metadata, checkpoint.files)


def value_texts(url: str, names: Iterable[str], options: Options = None) -> dict[str, str]:
    """Return the values with these names as text; the reason in the place of one that is not read."""
    checkpoint = blocking.open_checkpoint(url, storage_options=options)
    found = {}
    for name in names:
        try:
            found[name] = short_repr(checkpoint.value(name))
        except SidestreamError as error:
            found[name] = f"not read: {error}"
    return found


def rows(url: str, pattern: str, options: Options = None) -> list[EntryRow]:
    """Return the entries whose names match ``pattern``. Raises ``MissingKeysError`` if no name does."""
    source = blocking.run(lambda: _source(url, Storage(options)), Deadline.after(_TIMEOUT_S))
    entries, parts = source.entries, source.parts()
    found = []
    for name, one in entries.items():
        if not fnmatchcase(name, pattern) or name in parts:
            continue
        if isinstance(one, CompositeEntry):
            inside = [source.tensors[part].entry for part in source.manifest.parts_of(name) if part in source.tensors]
            files = tuple(sorted({chunk.file for part in inside for chunk in part.chunks}))
            found.append(EntryRow(name, one.dtype, one.shape, sum(part.nbytes for part in inside), files))
        elif isinstance(one, TensorEntry | OpaqueEntry):
            tensor = source.tensors.get(name)
            nbytes = sum(chunk.item_bytes for chunk in one.chunks) if tensor is None else tensor.entry.nbytes
            files = tuple(sorted({chunk.file for chunk in one.chunks}))
            found.append(EntryRow(name, one.dtype or None, one.shape, nbytes, files))
        elif isinstance(one, ValueEntry):
            found.append(EntryRow(name, None, None, 0, ()))
    if not found and entries:
        raise MissingKeysError(f"{redacted(url)}: nothing is named like {pattern}", [pattern])
    return found


async def _source(url: str, storage: Storage) -> Source:
    async with aclosing(await open_source(locate_directory(url, storage))) as source:
        return source


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two entries. ``largest`` is the largest difference between elements of a tensor. ``inside``
    has the first places inside a value, and ``more`` says whether there are others."""

    name: str
    what: str
    largest: float | None = None
    inside: tuple[Inside, ...] = ()
    more: bool = False

    @property
    def shown(self) -> str:
        """Return the difference as one line."""
        places = [f"{one.path}: {one.what}" if one.path else one.what for one in self.inside]
        return "; ".join([f"{self.what}: {places[0]}", *places[1:]] + ["..."] * self.more) if places else self.what


def differences(
    first: str,
    second: str,
    options: Options = None,
    second_options: Options = None,
    progress: Progress = lambda done, total: None,
) -> list[Difference]:
    """Return the differences between two checkpoints in the order of the first. Tensors are compared bit by bit, 32 MiB
    at a time."""
    one = blocking.open_checkpoint(first, storage_options=options)
    other = blocking.open_checkpoint(second, storage_options=second_options)
    found = [Difference(name, "only in the first") for name in one if name not in other]
    found += [Difference(name, "only in the second") for name in other if name not in one]
    sizes = {name: info.nbytes if info is not None else 0 for name, info in one.items() if name in other}
    done, total = 0, sum(sizes.values())
    for name, nbytes in sizes.items():
        progress(done, total)
        if (difference := _compare(name, one, other)) is not None:
            found.append(difference)
        done += nbytes
    return found


def _compare(name: str, one: blocking.Checkpoint, other: blocking.Checkpoint) -> Difference | None:
    mine, theirs = one[name], other[name]
    if mine is None or theirs is None:
        if mine is not theirs:
            return Difference(name, "a tensor in one, a value in the other")
        found = list(islice(value_differences(one.value(name), other.value(name)), _PLACES + 1))
        inside, more = tuple(found[:_PLACES]), len(found) > _PLACES
        return Difference(name, "another value", inside=inside, more=more) if found else None
    if mine.kind != theirs.kind:
        return Difference(name, f"{mine.kind or 'a plain tensor'} against {theirs.kind or 'a plain tensor'}")
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        what = f"{mine.dtype} {list(mine.shape)} against {theirs.dtype} {list(theirs.shape)}"
        return Difference(name, what.replace("torch.", ""))
    if mine.kind:
        return _compare_parts(name, one, other)
    largest = _largest_difference(name, mine.shape, mine.nbytes, one, other)
    return None if largest is None else Difference(name, "changed", largest)


def _compare_parts(name: str, one: blocking.Checkpoint, other: blocking.Checkpoint) -> Difference | None:
    """Return the first difference between two tensors that consist of others."""
    mine, theirs = one.info(name), other.info(name)
    if mine.parts != theirs.parts or json.dumps(mine.context) != json.dumps(theirs.context):
        return Difference(name, f"another {mine.kind.rpartition('.')[2]}")
    return next(filter(None, (_compare(part, one, other) for part in mine.parts)), None)


def _largest_difference(
    name: str, shape: torch.Size, nbytes: int, one: blocking.Checkpoint, other: blocking.Checkpoint
) -> float | None:
    """Return the largest difference between elements, or None if all bytes are the same."""
    largest = None
    step = max(1, shape[0] * _PIECE_BYTES // max(1, nbytes)) if shape else 1
    for start in range(0, shape[0] if shape else 1, step):
        piece = slice(start, start + step) if shape else None
        mine, theirs = one.tensor(name, piece).reshape(-1), other.tensor(name, piece).reshape(-1)
        if mine.numel() and not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            largest = max(largest or 0.0, _apart(mine, theirs))
    return largest


def _apart(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference between two elements; infinity if one of them or both are not numbers.

    Elements with the same bits are left out, because the difference of two infinities is NaN. Integers of 64 bits are
    subtracted as integers, because adjacent integers would be equal as floating-point numbers.
    """
    raw, other = (each.view(torch.uint8).reshape(each.numel(), -1) for each in (mine, theirs))
    differing = torch.ne(raw, other).any(1)
    try:
        return _largest(mine[differing], theirs[differing])
    except (NotImplementedError, RuntimeError):  # torch cannot index or convert dtypes such as bits8
        return math.inf


def _largest(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    if mine.dtype in (torch.int64, torch.uint64):
        if mine.dtype == torch.uint64:
            mine, theirs = (each.view(torch.int64) ^ torch.iinfo(torch.int64).min for each in (mine, theirs))
        apart = (torch.maximum(mine, theirs) - torch.minimum(mine, theirs)).to(torch.float64)
        return float(torch.where(apart < 0, apart + 2.0**64, apart).max())  # the difference wrapped around at 2**63
    wide = torch.complex128 if mine.is_complex() else torch.float64
    return float((mine.to(wide) - theirs.to(wide)).abs().nan_to_num(nan=math.inf).max())
