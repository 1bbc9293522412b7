"""``Intercept`` sees every file operation of the package: whatever of ``os`` the package calls, it knows."""

from __future__ import annotations

import ast
from pathlib import Path

from _operations import OPERATIONS

import sidestream

SOURCES = Path(sidestream.__file__).parent
HARMLESS = frozenset({
    "PathLike", "fspath", "fsdecode", "fsencode", "getpid", "getppid", "cpu_count", "path", "environ", "strerror",
    "register_at_fork", "sched_getaffinity", "sched_getscheduler", "sched_param", "sched_setscheduler",
    "sysconf", "memfd_create", "sep", "name", "kill", "urandom", "uname",
    "posix_fadvise", "getcwd", "getuid", "geteuid", "umask", "supports_dir_fd", "_exit", "stat_result", "DirEntry",
    "fork", "statvfs", "nice", "sched_setaffinity", "major", "minor",
    "pipe", "pipe2", "set_blocking", "dup2", "devnull", "readlink",  # of /proc
})  # fmt: skip


def called(source: str) -> set[str]:
    """What is used of ``os``, but for constants and what touches no file by name or descriptor."""
    names = {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os"
    }
    return {name for name in names if not name.isupper() and not name.startswith("O_")} - HARMLESS


def test_no_operation_is_overlooked() -> None:
    found = {
        str(path.relative_to(SOURCES)): called(path.read_text()) - set(OPERATIONS) for path in SOURCES.rglob("*.py")
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_it_would_be_noticed() -> None:
    assert called("import os\nos.copy_file_range(1, 2, 3)\nos.getpid()\nos.O_RDONLY") == {"copy_file_range"}
