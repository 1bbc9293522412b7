"""Checks of what this machine supports."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
    found += [_huge_pages(_SYSFS, "huge pages", "enabled", "madvise", "staging memory")]
    found += [_huge_pages(_SYSFS, "huge pages, shared", "shmem_enabled", "advise", "memory for a writer process")]
    found += _nodes_and_devices(_SYSFS)
    found.append(_memory())
    found.append(_direct_io(directory))
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize >> 30
    found.append(Finding("free space", f"{free} GiB", "measure the disk with: sidestream bench"))
    return found


_SYSFS = Path("/sys")
_EXTRAS = (
    ("obstore", "cloud"),
    ("zstandard", "zstd"),
    ("blake3", "digest"),
    ("model_signing", "signing"),
    ("watchfiles", "watch"),
)


def _huge_pages(sysfs: Path, what: str, name: str, value: str, memory: str) -> Finding:
    path = sysfs / "kernel/mm/transparent_hugepage" / name
    try:
        here = path.read_text().split("[")[-1].split("]")[0]
    except OSError:
        return Finding(what, "unknown")
    advice = f"echo {value} > {path}: {memory} is mapped faster" if here in ("never", "deny") else ""
    return Finding(what, here, advice)


def _nodes_and_devices(sysfs: Path) -> list[Finding]:
    """Return the NUMA nodes, and for each CUDA device its node, and whether host memory can be registered with it."""
    nodes = len(list(sysfs.glob("devices/system/node/node[0-9]*")))
    found = [Finding("NUMA nodes", str(nodes or "unknown"))]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        node, advice = _node(index, sysfs), ""
        if node is None and nodes > 1:
            advice = "start each rank on the node of its device, with numactl (nvidia-smi shows the nodes)"
        error = _registration_error(index)
        if error:
            advice = "copies between it and host memory fail or are slow: look at the memory limit of the container"
        here = f"NUMA node {'unknown' if node is None else node}, "
        here += f"host memory cannot be registered ({error})" if error else "host memory can be registered"
        found.append(Finding(f"cuda:{index}", here, advice))
    return found


def _node(index: int, sysfs: Path) -> int | None:
    found: Any = torch.cuda.get_device_properties(index)  # torch does not declare these attributes
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


def _registration_error(index: int) -> str:
    """Register one page with a device, and unregister it. Returns the error of CUDA, or an empty text."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    try:
        with torch.cuda.device(index):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = runtime.cudaHostRegister(address, mmap.PAGESIZE, 0)
            if int(code) == 0:
                code = runtime.cudaHostUnregister(address)
            return str(runtime.cudaGetErrorString(code)) if int(code) else ""
    except RuntimeError as error:  # the device cannot be used at all
        return str(error).partition("\n")[0]


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
