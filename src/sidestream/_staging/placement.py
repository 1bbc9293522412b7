"""Staging memory on the NUMA node of the device that copies from or to it.

A copy from or to another node passes through the link between the nodes, which may be slower than the bus of the
device, and which the program needs too. All of it is best effort: where something is unknown, or the system refuses,
the memory lies where the system puts it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .._runtime.memory_maps import address_of

_SYSFS = Path("/sys")
_MBIND = {"x86_64": 237, "aarch64": 235}  # system calls, for which the C library has no function
_PREFERRED = 1  # MPOL_PREFERRED: another node serves when this one has no memory left
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def place(memory: mmap.mmap, device: Hashable) -> None:
    """Bind ``memory`` to the node of ``device``. Pages that have been touched stay where they are."""
    address = pci_address(device)
    node = None if address is None else preferred_node(address, _SYSFS)
    if node is not None:
        bind(address_of(memory), len(memory), node)


def pci_address(device: Hashable) -> str | None:
    """Return the name of a CUDA device among the PCI devices of the system. None for others."""
    if not isinstance(device, torch.device) or device.type != "cuda":
        return None
    with suppress(RuntimeError, AttributeError):
        found: Any = torch.cuda.get_device_properties(device)  # torch does not declare these attributes
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return None


def preferred_node(address: str, sysfs: Path) -> int | None:
    """Return the node of the PCI device at ``address``. None if it is unknown, or the only one of the machine."""
    nodes = {path.name for path in sysfs.glob("devices/system/node/node[0-9]*")}
    with suppress(OSError, ValueError):
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        return node if len(nodes) > 1 and f"node{node}" in nodes else None
    return None


def bind(address: int, nbytes: int, node: int) -> bool:
    """Make pages that are touched from now on come from ``node``. Returns False if the system refuses: in a container
    without CAP_SYS_NICE, for example."""
    number = _MBIND.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        return False
    words = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
    words[node // _WORD_BITS] = 1 << node % _WORD_BITS
    bits = len(words) * _WORD_BITS + 1  # the kernel subtracts one
    return int(_syscall()(number, address, nbytes, _PREFERRED, ctypes.addressof(words), bits, 0)) == 0


@cache
def _syscall() -> Any:
    """Return ``syscall`` of the C library, with the types of ``mbind``. It is called without the GIL."""
    function = ctypes.CDLL(None).syscall
    function.restype = ctypes.c_long
    function.argtypes = (
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )
    return function
