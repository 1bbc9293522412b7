"""Sequences of system calls: what each operation does to the files of a local directory, in which order.

Calls that write one file keep their order. Calls that change names (mkdir, rename, link, unlink, chmod) and the sync of
a directory also keep their place among all others; in between, files may be written at the same time and are sorted.
Of what is read the sum counts: how often each file was opened, and which bytes were read.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from _golden_calls import Call, Fault, Supervisor, available
from _golden_sequence_cases import CASES
from _golden_table import Table

_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
_NAMES = ("mkdir", "rename", "link", "symlink", "unlink", "rmdir", "chmod", "fchmod", "utimens")
_WRITES = ("write", "pwrite64", "writev", "pwritev", "pwritev2")
_NAMELESS = getattr(os, "O_TMPFILE", 0) or ~0
_VARYING = re.compile(r"\.metadata|\.leases/")
"""Files whose length varies: a .metadata of torch's planner is a pickle with sets, a lease names host and process."""
_LENGTH = re.compile(r"(?<= 0-)\d+")
_READS = ("read", "pread64", "readv", "preadv", "preadv2")


async def sequences(table: Table) -> None:
    assert available(), "system calls are recorded on Linux on x86-64"
    ours, theirs = socket.socketpair()
    with ours:
        host = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("_golden_sequence_host.py")), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        with host:
            for name, case in CASES.items():
                folder = table.folder / re.sub(r"\W+", "-", name)
                table.entries[name] = await asyncio.to_thread(_run, host, ours, name, folder, case.fault)
                if not case.reads:
                    del table.entries[name]["reads"]
            assert host.stdin is not None
            host.stdin.close()


def _run(host: subprocess.Popen[bytes], channel: socket.socket, name: str, folder: Path, fault: Fault | None) -> Any:
    root = folder / "root"
    root.mkdir(parents=True)
    assert host.stdin is not None
    assert host.stdout is not None
    host.stdin.write(json.dumps({"case": name, "folder": str(folder)}).encode() + b"\n")
    host.stdin.flush()
    supervisor = Supervisor(str(root), fault)
    supervisor.follow(channel)
    prepared, watched = json.loads(host.stdout.readline())
    assert prepared == 0, name
    result = folder / "result.json"
    told = json.loads(result.read_text()) if watched == 0 else {"process": f"ended with {watched}", "events": []}
    return told | canonical(supervisor.log, str(root))


def canonical(log: list[Call], root: str) -> dict[str, list[str]]:
    """What changes files, in order, and what is read, in none: see above."""
    log = _without_refused_direct_io([call for call in log if not _asks_for_the_time(call)])
    directories = {os.path.dirname(path) for call in log for path in (call.path, call.target)}
    directories |= {call.path for call in log if call.name.startswith("mkdir") or call.flags & os.O_DIRECTORY}
    directories |= {call.target for call in log if call.name.startswith("rename") and call.path in directories}
    lines: list[str] = []
    together: list[Call] = []
    reads = [call for call in log if _reads(call) and call.path not in directories]
    for call in log:
        synced = call.name in ("fsync", "fdatasync") and call.path in directories
        if call.name.startswith(_NAMES) or synced:
            lines += [*_by_file(together, root, _written), _line(call, root)]
            together = []
        elif not _reads(call):
            together.append(call)
    lines += _by_file(together, root, _written)
    return {"changes": _removals_sorted(lines), "reads": _by_file(reads, root, _read)}


def _removals_sorted(lines: list[str]) -> list[str]:
    """Files that are removed one after the other are so in the order in which the file system lists them."""
    runs = groupby(lines, key=lambda line: line.startswith("unlink "))
    return [line for removals, run in runs for line in (sorted(run) if removals else run)]


def _asks_for_the_time(call: Call) -> bool:
    """Whether it belongs to a nameless file, or a file that is removed at once, made to learn the storage's clock."""
    return call.flags & _NAMELESS == _NAMELESS or "/.clock-" in call.path


def _without_refused_direct_io(log: list[Call]) -> list[Call]:
    """Where the file system refuses ``O_DIRECT``, the file is opened once more; the sequence is that of others."""
    kept = list(log)
    for first, second in pairwise([call for call in log if call.name == "openat" and call.flags & os.O_CREAT]):
        if first.path == second.path and first.flags & os.O_DIRECT and not second.flags & os.O_DIRECT:
            start, end = kept.index(first), kept.index(second)
            kept[start:end] = [call for call in kept[start + 1 : end] if call.path != first.path]
    return kept


def _line(call: Call, root: str) -> str:
    name = call.name.removesuffix("2").removesuffix("at")
    name = "rmdir" if name == "unlink" and call.flags & 0x200 else name  # AT_REMOVEDIR
    name = "exchange" if call.name == "renameat2" and call.flags & 2 else name
    target = f" -> {_short(call.target, root)}" if call.target else ""
    return f"{name} {_short(call.path, root)}{target}"


def _short(path: str, root: str) -> str:
    return _ID.sub("{id}", path.removeprefix(root).removeprefix("/") or ".")


def _by_file(calls: list[Call], root: str, steps: Callable[[list[Call]], list[str]]) -> list[str]:
    """One line for each file, sorted."""
    by_path: dict[str, list[Call]] = {}
    for call in calls:
        by_path.setdefault(call.path, []).append(call)
    lines = (f"{_short(path, root)}: {'; '.join(steps(ops))}" for path, ops in by_path.items())
    return sorted(_LENGTH.sub("{end}", line) if _VARYING.search(line) else line for line in lines)


def _written(calls: list[Call]) -> list[str]:
    """The steps of one file. Several threads may write it at once, so writes between two other steps are one."""
    steps: list[str] = []
    written: list[tuple[int, int]] = []
    for call in calls:
        if call.name in _WRITES:
            written.append((call.start, call.start + call.nbytes))
            continue
        steps += _ranges("write", written)
        written = []
        if _opens(call):
            exclusive = ", exclusive" if call.flags & os.O_EXCL else ""
            steps.append(f"open {'new' if call.flags & os.O_CREAT else 'for writing'}{exclusive}")
        elif call.name in ("fallocate", "ftruncate"):
            steps.append(f"{call.name} {call.start}-{call.start + call.nbytes}")
        else:
            steps.append(call.name)
    return steps + _ranges("write", written)


def _read(calls: list[Call]) -> list[str]:
    opened = sum(_opens(call) for call in calls)
    ranges = [(call.start, call.start + call.nbytes) for call in calls if not _opens(call)]
    return [f"open {opened} time{'s' * (opened != 1)}", *_ranges("read", ranges)]


def _reads(call: Call) -> bool:
    return call.name in _READS or (_opens(call) and not call.flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _opens(call: Call) -> bool:
    return call.name in ("open", "openat", "openat2", "creat")


def _ranges(what: str, ranges: Iterable[tuple[int, int]]) -> list[str]:
    """The union of ``ranges`` as one step; those of calls without an offset as their name alone."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(set(ranges)):
        if start < 0:
            return [f"{what} in order"]
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return [f"{what} {', '.join(f'{start}-{end}' for start, end in merged)}"] if merged else []
