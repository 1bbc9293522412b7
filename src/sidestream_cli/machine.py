"""Checks of what this machine supports, with advice where something could be better."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sidestream
from sidestream import AsyncStager
from sidestream._format.checksum import CRC_ENGINE
from sidestream._staging.placement import bind, pci_address, preferred_node

from .frame import size

__all__ = ["Finding", "machine"]

_ROOT = Path("/")
_NO_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)
_CANNOT_REGISTER = (304, 801)  # cudaErrorOperatingSystem, cudaErrorNotSupported: copies go without it
_REQUIREMENT = re.compile(r"([\w.-]+).*\bextra == ['\"]([\w-]+)['\"]")


@dataclass(frozen=True, slots=True)
class Finding:
    """A property of this machine, its value, and advice."""

    what: str
    here: str
    advice: str = ""


def machine(directory: str, root: Path = _ROOT) -> list[Finding]:
    """Return what this machine and the file system of ``directory``, which need not exist yet, support.

    ``root`` is where the files of the kernel are, below ``proc`` and ``sys``.
    """
    advice = "" if CRC_ENGINE == "isal" else "pip install isal: several times the speed"
    return [
        Finding("sidestream", sidestream.__version__),
        Finding("torch", torch.__version__),
        Finding("checksums", CRC_ENGINE, advice),
        _extras(),
        *_memory(root),
        _huge_pages(root, "huge pages", "enabled", "madvise", "staging memory"),
        _huge_pages(root, "huge pages, shared", "shmem_enabled", "advise", "memory for a writer process"),
        *_nodes_and_devices(root / "sys"),
        *_disk(Path(directory).absolute()),
    ]


def _extras() -> Finding:
    """Return which extras of sidestream have all the packages that they ask for."""
    missing: dict[str, bool] = {}
    for requirement in metadata.requires("sidestream") or ():
        if found := _REQUIREMENT.match(requirement):
            missing[found[2]] = missing.get(found[2], False) or not _is_installed(found[1])
    missing.pop("all", None)
    here = ", ".join(extra for extra in missing if not missing[extra])
    lacks = ",".join(extra for extra in missing if missing[extra])
    return Finding("extras", here or "none", lacks and f"for the others: pip install 'sidestream[{lacks}]'")


def _is_installed(package: str) -> bool:
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version(package))
    return False


# --- memory ---------------------------------------------------------------------------------------------------------


def _memory(root: Path) -> Iterator[Finding]:
    """Return the free host memory, and how much of it a stager takes at most."""
    advice = "a snapshot takes as much as the state; SaveOptions(streaming=True) takes 256 MiB whatever its size"
    try:
        free = _free_memory(root)
    except (OSError, KeyError, ValueError):
        yield Finding("free memory", "unknown", advice)
    else:
        yield Finding("free memory", size(free), advice)
    with closing(AsyncStager()) as stager:
        budget = size(stager.statistics().budget_bytes)
    yield Finding("staging budget", f"{budget} for each stager", "AsyncStager(budget_bytes=...) sets another one")


def _free_memory(root: Path) -> int:
    """Return the free bytes of the machine, or of the control group if that has less."""
    free = _table(root / "proc/meminfo")["MemAvailable:"] << 10
    group = root / "sys/fs/cgroup"
    with suppress(OSError, KeyError, ValueError):
        used = int((group / "memory.current").read_text()) - _table(group / "memory.stat")["inactive_file"]
        free = min(free, int((group / "memory.max").read_text()) - used)
    return max(free, 0)


def _table(path: Path) -> dict[str, int]:
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}


def _huge_pages(root: Path, what: str, name: str, value: str, memory: str) -> Finding:
    path = root / "sys/kernel/mm/transparent_hugepage" / name
    try:
        here = path.read_text().split("[")[-1].split("]")[0].strip()
    except OSError:
        return Finding(what, "unknown")
    advice = f"echo {value} > {path} (as root): {memory} is mapped faster" if here in ("never", "deny") else ""
    return Finding(what, here, advice)


# --- devices --------------------------------------------------------------------------------------------------------


def _nodes_and_devices(sysfs: Path) -> Iterator[Finding]:
    """Return the NUMA nodes, and what holds for each device."""
    nodes = len(list(sysfs.glob("devices/system/node/node[0-9]*")))
    yield Finding("NUMA nodes", str(nodes or "unknown"))
    yield Finding("accelerator", str(torch.accelerator.current_accelerator() or "none"))
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device("cuda", index)
        found = [_capacity(device), *([_near(device, sysfs)] if nodes > 1 else []), _registering(index)]
        advice = "; ".join(advice for _, advice in found if advice)
        yield Finding(f"cuda:{index}", ", ".join(here for here, _ in found), advice)


def _capacity(device: torch.device) -> tuple[str, str]:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {size(found.total_memory)}", ""


def _near(device: torch.device, sysfs: Path) -> tuple[str, str]:
    """Return the node of a device, and advice if sidestream cannot place memory there."""
    address = pci_address(device)
    node = None if address is None else preferred_node(address, sysfs)
    if node is None:
        return "NUMA node unknown", "start its rank on CPUs near it: taskset -c CPUS (nvidia-smi topo -m shows them)"
    page = mmap.mmap(-1, mmap.PAGESIZE)
    if bind(ctypes.addressof(ctypes.c_char.from_buffer(page)), mmap.PAGESIZE, node):
        return f"NUMA node {node}", ""
    cpus = (sysfs / f"devices/system/node/node{node}/cpulist").read_text().strip()
    return f"NUMA node {node}, to which memory cannot be bound", f"start its rank there: taskset -c {cpus}"


def _registering(index: int) -> tuple[str, str]:
    """Register one page with a device, and unregister it."""
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    try:
        with torch.cuda.device(index):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = int(runtime.cudaHostRegister(address, mmap.PAGESIZE, 0))
            if code == 0:
                code = int(runtime.cudaHostUnregister(address))
            error = str(runtime.cudaGetErrorString(code)) if code else ""
    except RuntimeError as failure:  # the device cannot be used at all
        code, error = -1, str(failure).partition("\n")[0]
    if not error:
        return "host memory can be registered", ""
    what = "copies go without it, more slowly" if code in _CANNOT_REGISTER else "staging from it fails"
    return f"host memory cannot be registered ({error})", what


# --- disk -----------------------------------------------------------------------------------------------------------


def _disk(directory: Path) -> Iterator[Finding]:
    place = next(one for one in (directory, *directory.parents) if one.exists())
    try:
        direct = _writes_directly(place / f".sidestream-doctor-{os.getpid()}")
    except OSError as error:
        yield Finding("directory", f"{place} cannot be written: {error.strerror}", "saves to it fail")
        return
    advice = "" if direct else "saves write through the page cache"
    yield Finding("direct I/O", "yes" if direct else "no", advice)
    advice = f"sidestream bench {shlex.quote(str(place))} measures the disk"
    yield Finding("free space", size(shutil.disk_usage(place).free), advice)


def _writes_directly(path: Path) -> bool:
    """Return whether a page can be written without the page cache. Raises ``OSError`` if no file can be made."""
    page, flags = mmap.mmap(-1, mmap.PAGESIZE), os.O_WRONLY | os.O_CREAT
    try:
        os.close(os.open(path, flags | os.O_EXCL, 0o600))
        descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        try:
            return os.pwrite(descriptor, page, 0) > 0 and hasattr(os, "O_DIRECT")
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _NO_DIRECT_IO:
            return False
        raise
    finally:
        path.unlink(missing_ok=True)
