"""The identity of a rank's process, so that other processes on its machine can tell for certain that it has ended.

A closed connection is not a proof: the process may still live and continue its work.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """Return the identity of this process as JSON data."""
    return {"pid": os.getpid(), "scope": _scope()}


def has_ended(process: Any) -> bool:
    """Return whether all threads of ``process`` have ended. False if that is unknown: on another machine or in another
    container."""
    scope = _scope()
    if not scope or process["scope"] != scope:
        return False
    pid = int(process["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Return whether the process has no thread left and only waits to be reaped. The state of the main thread alone is
    not enough: it may have ended while another thread of a killed process is still in a system call."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state in "ZX" and os.listdir(f"/proc/{pid}/task") == [str(pid)]
    return False


def _scope() -> str:
    """Return an identifier of the boot and PID namespace in which a PID is unique; empty if it is unknown."""
    if sys.platform != "linux":
        return ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""
