"""Several ranks: what each of them gets from a call that all of them make, also where one of them fails, differs from
the others, does not come, or dies.

Every case is a group of processes of its own. An entry is named after the case, the call and the rank, or stands for
every rank. Rank 0 also records which files and directories have appeared and vanished since the call before, once all
ranks have returned.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from _golden_rank import Case, tree
from _golden_rank_cases import CASES
from _golden_stores import steps
from _golden_table import Table, by_folder
from _places import s3_place
from _s3_server import S3Server, serving

_ATTEMPT = re.compile(r"(\.partial/).*")  # how much of it has been written when a rank dies is free
HOST = Path(__file__).with_name("_golden_rank_host.py")


async def ranks(table: Table) -> None:
    await asyncio.to_thread(_all, table)


def _all(table: Table) -> None:
    paths = os.pathsep.join(filter(None, sys.path))
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    host = subprocess.Popen(
        [sys.executable, str(HOST)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **loopback, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    with serving() as server, host:
        cases = _Cases(table, host, server)
        waiting = [name for name, case in CASES.items() if case.waits]
        for name in waiting:
            cases.start(name)
        for name, case in CASES.items():
            if not case.waits:
                cases.start(name)
                cases.finish(name)
        for name in waiting:
            cases.finish(name)
        assert host.stdin is not None
        host.stdin.close()


def _without_chance(entry: Any, rank: int) -> Any:
    """How much a rank has read when another one fails is free."""
    if isinstance(entry, list):
        return [_without_chance(one, rank) for one in entry]
    if not isinstance(entry, dict):
        return entry
    stopped = entry.get("type") == "RankFailuresError" and all(failure[0] != rank for failure in entry["failures"])
    return {key: _without_chance(one, rank) for key, one in entry.items() if not (stopped and key == "written")}


class _Cases:
    def __init__(self, table: Table, host: subprocess.Popen[str], server: S3Server) -> None:
        self._table, self._host, self._server = table, host, server

    def start(self, name: str) -> None:
        folder = self._folder(name)
        folder.mkdir()
        self._ask({"start": name, "folder": str(folder), "desk": f"{folder}.desk", "options": self._options(name)})

    def finish(self, name: str) -> None:
        case = CASES[name]
        self._ask({"finish": name, "desk": f"{self._folder(name)}.desk"})
        assert self._host.stdout is not None
        ended = json.loads(self._host.stdout.readline())
        by_rank: dict[str, dict[int, Any]] = {}
        for number, (code, entries, output) in enumerate(ended):
            assert code == case.dies.get(number, 0), f"{name}, rank {number}: ended with {code}\n{output}"
            for key, entry in entries.items():
                by_rank.setdefault(key, {})[number] = _without_chance(entry, number)
            if code:
                self._table.entries[f"{name}: rank {number}"] = {"process": f"ended with {code}"}
        for key, entries in by_rank.items():
            first, *others = entries.values()
            together = len(entries) == case.world and all(entry == first for entry in others)
            told = {"every rank": first} if together else {f"rank {number}": one for number, one in entries.items()}
            self._table.entries |= {f"{name}: {key}, {who}": entry for who, entry in told.items()}
        if case.stored:
            self._note_requests(name)
        elif case.dies:
            paths = {_ATTEMPT.sub(r"\1", path) for path in tree(self._folder(name))}
            self._table.note(f"{name}: left behind", by_folder(paths))

    def _folder(self, name: str) -> Path:
        return self._table.folder / re.sub(r"\W+", "-", name)

    def _ask(self, request: dict[str, Any]) -> None:
        assert self._host.stdin is not None
        self._host.stdin.write(json.dumps(request) + "\n")
        self._host.stdin.flush()

    def _options(self, name: str) -> dict[str, Any]:
        case: Case = CASES[name]
        if not case.stored:
            return {}
        self._server.reset()
        self._server.log.clear()
        place = s3_place(self._server, "obstore")
        return {"url": place.base, "storage_options": self._server.options}

    def _note_requests(self, name: str) -> None:
        text = self._table.text
        lines = [text(line) for line in steps(list(self._server.log))]
        self._table.note(name, {"steps": lines, "objects": by_folder(text(key) for key in self._server.objects)})
