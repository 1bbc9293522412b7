"""Which process a rank is, so that others on its machine can tell for certain that it has ended.

A closed connection alone does not say so: the process may live and carry on with what it was doing.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["has_ended", "this_process"]


def this_process() -> dict[str, Any]:
    """As JSON can carry it."""
    return {"pid": os.getpid(), "scope": _scope()}


def has_ended(process: Any) -> bool:
    """No thread of it does anything any more. False where that is not known: on another machine, in another
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
    return _only_waits_to_be_reaped(pid)


def _only_waits_to_be_reaped(pid: int) -> bool:
    """The first thread of a killed process may have ended while another is in a system call, so that is no sign yet."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        return state in "ZX" and os.listdir(f"/proc/{pid}/task") == [str(pid)]
    return False


def _scope() -> str:
    """Where the number of a process means the same one; empty if that cannot be told."""
    if sys.platform != "linux":
        return ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""
