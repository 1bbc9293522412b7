"""System calls: what becomes visible in a local directory and what goes, in which order, and whether it is durable.

Of the calls only that is kept, whatever they were: which files were not synced when they became visible, which new
names were not synced in the end, what was written in place, and which leases were held when something went.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

from _golden_calls import Call, Fault, Supervisor, available
from _golden_rank import tree
from _golden_sequence_cases import CASES
from _golden_table import Table, by_folder

_CHANGES = ("mkdir", "write", "pwrite", "ftruncate", "truncate", "fallocate", "sendfile", "copy_file_range")
_EXCHANGE = 2  # RENAME_EXCHANGE
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
_ATTEMPT = re.compile(r"(?<=\.partial/).*")  # how much of it has been written is free
_LEASE = re.compile(r"\.leases/(.*\.(?:read|delete))\d+\.")  # a lease also names how long it holds


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
                there = by_folder({_ATTEMPT.sub("", table.text(path)) for path in tree(folder / "root")})
                table.entries[name] |= {"there": there} if there else {}
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
    told = json.loads(result.read_text()) if watched == 0 else {"process": f"ended with {watched}"}
    return told | Told(str(root)).of(supervisor.log)


class Told:
    """What a log of calls comes to, of paths below ``root``. Hidden ones are not for others, not yet or no longer."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._contents: set[str] = set()
        self._names: set[str] = set()
        """Files that were written, and names that came to be, and were not synced since."""
        self._gone: dict[str, str] = {}
        self._steps: list[str] = []

    def of(self, log: list[Call]) -> dict[str, Any]:
        for call in log:
            self._note(call)
        unsynced = sorted(name for name in self._names if _visible(name))
        steps = [line for line, _ in groupby(self._steps)]
        return ({"steps": steps} if steps else {}) | ({"names not synced": unsynced} if unsynced else {})

    def _note(self, call: Call) -> None:
        path, target = self._short(call.path), self._short(call.target)
        new = call.name.startswith(("open", "creat")) and bool(call.flags & os.O_CREAT)
        if lease := _LEASE.search(path):
            if new or call.name.startswith("unlink"):
                self._steps.append(f"{'lease' if new else 'release'} {lease[1]}")
        elif call.name in ("fsync", "fdatasync"):
            self._contents.discard(path)
            self._names = {name for name in self._names if (os.path.dirname(name) or ".") != path}
        elif call.name.startswith("rename"):
            self._rename(path, target, exchange=call.name == "renameat2" and bool(call.flags & _EXCHANGE))
        elif call.name.startswith("link"):
            self._appears("appears", path, target)
        elif call.name.startswith(("unlink", "rmdir")):
            self._remove(path)
        elif new or call.name.startswith(_CHANGES):
            self._names |= {path} if new or call.name.startswith("mkdir") else set()
            self._contents |= set() if call.name.startswith("mkdir") else {path}
            if _visible(path) and not call.name.startswith("mkdir"):
                self._steps.append(f"writes {path} in place")

    def _rename(self, path: str, target: str, *, exchange: bool) -> None:
        if _visible(target):
            self._appears("replaces" if exchange else "appears", path, target)
        elif _visible(path):
            self._steps.append(f"goes {path}")
            self._gone[target] = path
        if not exchange:
            self._gone = {_moved(name, path, target): was for name, was in self._gone.items()}
        elif _visible(target):
            self._gone[path] = target
        self._contents = {_moved(name, path, target) for name in self._contents}
        self._names = {_moved(name, path, target) for name in self._names} | {target}

    def _appears(self, verb: str, path: str, target: str) -> None:
        unsynced = sorted(name for name in self._contents | self._names if _moved(name, path, "") != name != path)
        unsynced += [path] if path in self._contents else []
        self._steps.append(f"{verb} {target}" + (f", not synced: {' '.join(unsynced)}" if unsynced else ""))
        self._names.add(target)

    def _remove(self, path: str) -> None:
        self._contents.discard(path)
        self._names.discard(path)
        gone = next((name for name in self._gone if _moved(path, name, "") != path), None)
        if gone is not None:
            early = sorted(name for name in self._names if _visible(name))
            self._steps.append(f"deletes {self._gone.pop(gone)}" + (f", before a sync of {early}" if early else ""))
        elif _visible(path):
            self._steps.append(f"deletes {path}")

    def _short(self, path: str) -> str:
        return _ID.sub("{id}", path.removeprefix(self._root).removeprefix("/") or ".")


def _visible(path: str) -> bool:
    return all(not part.startswith(".") or part == ".metadata" for part in path.split("/"))


def _moved(name: str, source: str, target: str) -> str:
    return target + name[len(source) :] if name == source or name.startswith(source + "/") else name
