"""Checks of what this machine supports."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import sidestream
from sidestream._format.checksum import CRC_ENGINE

__all__ = ["Finding", "machine"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A property of this machine, its value, and advice."""

    what: str
    here: str
    advice: str = ""


def machine(directory: str) -> list[Finding]:
    """Return what this machine and the file system of ``directory`` support."""
    advice = "" if CRC_ENGINE == "isal" else "pip install isal for several times the speed"
    found = [
        Finding("sidestream", sidestream.__version__),
        Finding("torch", torch.__version__),
        Finding("checksums", CRC_ENGINE, advice),
    ]
    found += [Finding(extra, *_package(package, extra)) for package, extra in _EXTRAS]
    found.append(Finding("accelerator", str(torch.accelerator.current_accelerator() or "none")))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small = soft != resource.RLIM_INFINITY
    advice = "raise it (ulimit -l) where large states are staged from a device" if small else ""
    found.append(Finding("locked memory", f"{soft >> 20} MiB" if small else "unlimited", advice))
    pages = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    found.append(Finding("huge pages", pages.read_text().split("[")[-1].split("]")[0] if pages.exists() else "unknown"))
    found.append(_memory())
    found.append(_direct_io(directory))
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize >> 30
    found.append(Finding("free space", f"{free} GiB", "measure the disk with: sidestream bench"))
    return found


_EXTRAS = (
    ("obstore", "cloud"),
    ("zstandard", "zstd"),
    ("blake3", "digest"),
    ("model_signing", "signing"),
    ("watchfiles", "watch"),
)


def _memory() -> Finding:
    """Return the free host memory: a snapshot needs as much as the state has bytes."""
    advice = "a snapshot takes as much as the state; SaveOptions(streaming=True) takes 256 MiB whatever its size"
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return Finding("free memory", "unknown", advice)
    return Finding("free memory", f"{free >> 30} GiB", advice)


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
