"""Memory groups (cgroup v1 or v2) of our own. They need root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from _rows import cannot

__all__ = ["killed_in", "limit", "memory_group"]


@contextmanager
def memory_group() -> Iterator[Path]:
    """A new one, in which no process is left at the end."""
    for parent in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = parent / f"sidestream-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "memory.max").exists() or (group / "memory.limit_in_bytes").exists():
                yield group
                return
        finally:
            group.rmdir()
    cannot("there is no memory cgroup to make groups in")


def limit(group: Path, pid: int, nbytes: int) -> None:
    """From here on ``pid`` may take ``nbytes`` more: what it has stays on another account."""
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(nbytes))
    if (group / "memory.swap.max").exists():
        (group / "memory.swap.max").write_text("0")
    (group / "cgroup.procs").write_text(str(pid))


def killed_in(group: Path) -> int:
    """How many processes the kernel has ended there for want of memory."""
    name = "memory.events" if (group / "memory.events").exists() else "memory.oom_control"
    lines = dict(line.split() for line in (group / name).read_text().splitlines())
    return int(lines["oom_kill"])
