"""What the verbs find out, without a word of how it is shown."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .. import blocking
from .._threads import Deadline
from ..catalog import list_steps
from ..converting.source import SourceTensor, open_source
from ..errors import CheckpointNotFound, MissingKeys
from ..format.checksum import CRC_ENGINE
from ..format.dtypes import itemsize
from ..storage import locate_run

__all__ = ["Difference", "Finding", "Row", "StepRow", "differences", "machine", "rows", "steps"]

_PIECE_BYTES = 32 << 20
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class StepRow:
    step: int
    name: str
    tensors: int
    nbytes: int
    damage: str = ""


def steps(url: str) -> list[StepRow]:
    """Raises ``CheckpointNotFound`` where there is no committed step."""
    store, _ = locate_run(url)
    found = []
    for one in blocking.run(lambda: list_steps(store, Deadline.after(_TIMEOUT_S))):
        if one.damage is not None:
            found.append(StepRow(one.step, one.name, 0, 0, str(one.damage)))
            continue
        checkpoint = blocking.open_checkpoint(f"{url.rstrip('/')}/{one.name}")
        tensors = [info for info in checkpoint.values() if info is not None]
        found.append(StepRow(one.step, one.name, len(tensors), sum(info.nbytes for info in tensors)))
    if not found:
        raise CheckpointNotFound(f"{url} has no committed step")
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor, or where ``dtype`` is None a value."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    nbytes: int
    files: tuple[str, ...]


def rows(url: str, pattern: str) -> list[Row]:
    """Raises ``MissingKeys`` where nothing is named like ``pattern``."""
    source = blocking.run(lambda: open_source(url, Deadline.after(_TIMEOUT_S)))
    found = []
    for name, one in source.entries.items():
        if not fnmatchcase(name, pattern):
            continue
        if isinstance(one, SourceTensor):
            entry = one.entry
            nbytes = itemsize(entry.dtype) * torch.Size(entry.shape).numel()
            files = tuple(sorted({chunk.file for chunk in entry.chunks}))
            found.append(Row(name, entry.dtype, entry.shape, nbytes, files))
        elif not one.empty:
            found.append(Row(name, None, None, 0, ()))
    if not found and source.entries:
        raise MissingKeys(f"{url}: nothing is named like {pattern}", [pattern])
    return found


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    what: str
    largest: float | None = None


def differences(first: str, second: str) -> list[Difference]:
    """Of two checkpoint directories, in the order of the first; tensors are compared bit by bit, 32 MiB at a time."""
    one, other = blocking.open_checkpoint(first), blocking.open_checkpoint(second)
    found = [Difference(name, "only in the first") for name in one if name not in other]
    found += [Difference(name, "only in the second") for name in other if name not in one]
    for name in one:
        if name in other and (difference := _compare(name, one, other)) is not None:
            found.append(difference)
    return found


def _compare(name: str, one: blocking.Checkpoint, other: blocking.Checkpoint) -> Difference | None:
    mine, theirs = one[name], other[name]
    if mine is None or theirs is None:
        if mine is not theirs:
            return Difference(name, "a tensor in one, a value in the other")
        same = _equal(one.value(name), other.value(name))
        return None if same else Difference(name, "another value")
    if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
        told = f"{mine.dtype} {list(mine.shape)} against {theirs.dtype} {list(theirs.shape)}"
        return Difference(name, told.replace("torch.", ""))
    largest = _largest_difference(name, mine.shape, mine.nbytes, one, other)
    return None if largest is None else Difference(name, "changed", largest)


def _largest_difference(
    name: str, shape: torch.Size, nbytes: int, one: blocking.Checkpoint, other: blocking.Checkpoint
) -> float | None:
    """None if all bytes are the same."""
    largest = None
    step = max(1, shape[0] * _PIECE_BYTES // max(1, nbytes)) if shape else 1
    for start in range(0, shape[0] if shape else 1, step):
        piece = slice(start, start + step) if shape else None
        mine, theirs = one.tensor(name, piece), other.tensor(name, piece)
        if not torch.equal(_bits(mine), _bits(theirs)):
            apart = mine.to(torch.complex128 if mine.is_complex() else torch.float64)
            apart = (apart - theirs.to(apart.dtype)).abs().nan_to_num(nan=float("inf"))
            largest = max(largest or 0.0, float(apart.max()))
    return largest


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _equal(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    here: str
    advice: str = ""


def machine(directory: str) -> list[Finding]:
    found = [Finding("torch", torch.__version__), Finding("checksums", *_checksums())]
    found += [Finding(extra, *_package(package, extra)) for package, extra in _EXTRAS]
    found.append(Finding("accelerator", str(torch.accelerator.current_accelerator() or "none")))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small = soft != resource.RLIM_INFINITY
    advice = "raise it (ulimit -l) where large states are staged from a device" if small else ""
    found.append(Finding("locked memory", f"{soft >> 20} MiB" if small else "unlimited", advice))
    pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    found.append(Finding("huge pages", pages.read_text().split("[")[-1].split("]")[0] if pages.exists() else "unknown"))
    found.append(_direct_io(directory))
    status = os.statvfs(directory)
    found.append(Finding("free space", f"{status.f_bavail * status.f_frsize >> 30} GiB"))
    return found


_EXTRAS = (("zstandard", "zstd"), ("blake3", "digest"), ("model_signing", "signing"))


def _checksums() -> tuple[str, str]:
    return CRC_ENGINE, "" if CRC_ENGINE == "isal" else "pip install 'sidestream[fast]' for several times the speed"


def _package(package: str, extra: str) -> tuple[str, str]:
    if find_spec(package) is not None:
        return "installed", ""
    return "not installed", f"pip install 'sidestream[{extra}]'"


def _direct_io(directory: str) -> Finding:
    path = Path(directory, f".sidestream-doctor-{os.getpid()}")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        return Finding(
            "direct I/O", f"no ({error.strerror})", "buffered writes are used, which cost more processor time"
        )
    os.close(descriptor)
    path.unlink()
    return Finding("direct I/O", "yes" if hasattr(os, "O_DIRECT") else "no")
