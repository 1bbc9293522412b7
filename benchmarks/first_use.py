"""What the first use of sidestream in a process takes: imports, the first save to a disk and to an object store.

    python benchmarks/first_use.py [--rounds N] [--mib N] [--only NAME ...] [--directory DIR] [--json FILE]

Each measurement is made in a process of its own, on an event loop with a 1 ms ticker. The rows take turns, and each row
shows the medians of the rounds. The columns:

``import ms``: ``import sidestream``, after ``import torch``.
``name ms``: the first attribute, ``sidestream.save``, which imports the modules of the package.
``first ms``: the first call, from its beginning to its acknowledgement; ``second ms``: the call after it.
``pause ms``: the longest delay of the ticker during the first call, and ``of 2nd``: during the second one.
``idle ms``: the longest delay of the ticker in the half second before.
``on loop``: how many modules the first call imported in the loop's thread; ``all``: in all threads.

The object store is a socket in another process that takes what is sent to it (S3). ``s3 small`` is a save that fits
into one request, ``s3 parts`` an upload in parts. In the rows ``prewarmed`` a ``Checkpointer`` has been entered, and
its ``prewarm(state)`` has been awaited, before the first save.

Modules are compiled before the first round, as they are in an installed package.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from _common import describe, headline, ticking, write_json

HERE = Path(__file__).resolve().parent
KINDS = ("local", "local prewarmed", "s3 small", "s3 parts", "s3 parts prewarmed")


class Imports:
    """A finder that finds nothing, and notes in which thread modules are looked for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.seen.append((name, threading.get_ident()))


async def measured(kind: str, mib: int, folder: str, port: int) -> NoReturn:
    before = time.perf_counter()
    import sidestream

    found: dict[str, Any] = {"import_ms": 1e3 * (time.perf_counter() - before)}
    state = {f"layer.{number}.weight": torch.full((256, 1024), float(number)) for number in range(mib)}
    small = {f"layer.{number}.weight": torch.full((1024,), float(number)) for number in range(64)}
    state = small if kind == "s3 small" else state
    before = time.perf_counter()
    sidestream.save  # noqa: B018
    found["name_ms"] = 1e3 * (time.perf_counter() - before)
    base, storage = folder, None
    if kind.startswith("s3"):
        base = f"s3://bucket/run-{os.getpid()}"
        storage = {
            "key": "key", "secret": "secret", "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }  # fmt: skip
    async with contextlib.AsyncExitStack() as stack:
        if kind.endswith("prewarmed"):
            run = await stack.enter_async_context(sidestream.Checkpointer(base, storage_options=storage))
            await run.prewarm(state)
        imports = Imports()
        sys.meta_path.insert(0, imports)
        async with ticking() as late:
            await asyncio.sleep(0.5)
        found["idle_ms"] = 1e3 * max(late)
        for number, name in enumerate(("first", "second")):
            async with ticking() as late:
                before = time.perf_counter()
                if kind.endswith("prewarmed"):
                    await run.save(state, step=number)
                else:
                    await sidestream.save(state, f"{base}/c{number}", storage_options=storage)
                found[f"{name}_ms"] = 1e3 * (time.perf_counter() - before)
            found[f"{name}_pause_ms"] = 1e3 * max(late)
            if number == 0:
                found["on_loop"] = sum(thread == threading.get_ident() for _, thread in imports.seen)
                found["imported"] = len(imports.seen)
        print(json.dumps(found), flush=True)
        os._exit(0)  # a run that is left reads what it has saved, which the socket has not kept


@contextlib.contextmanager
def null_store() -> Iterator[int]:
    command = [sys.executable, str(HERE / "_null_store.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline())  # type: ignore[union-attr]
    finally:
        process.kill()
        process.wait()


def one(kind: str, mib: int, directory: Path, port: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as folder:
        asked = json.dumps([kind, mib, folder, port])
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        command = [sys.executable, "-W", "ignore", __file__, "--one", asked]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        return json.loads(done.stdout.splitlines()[-1])


COLUMNS = {
    "import_ms": "import ms", "name_ms": "name ms", "first_ms": "first ms", "second_ms": "second ms",
    "first_pause_ms": "pause ms", "second_pause_ms": "of 2nd", "idle_ms": "idle ms", "on_loop": "on loop",
    "imported": "all",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--only", nargs="*", default=[], choices=KINDS, metavar="NAME")
    parser.add_argument("--directory", type=Path, default=Path("."))
    parser.add_argument("--json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        kind, mib, folder, port = json.loads(options.one)
        asyncio.run(measured(kind, mib, folder, port))
    run = describe("obstore", "s3fs")
    print(headline(run), flush=True)
    kinds = options.only or KINDS
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder, null_store() as port:
        for number in range(1 + options.rounds):
            for kind in kinds:
                found = one(kind, options.mib, Path(folder).absolute(), port)
                if number:  # the first round compiles the modules
                    rounds[kind].append(found)
    print(f"\n{'':20}" + "".join(f"{head:>11}" for head in COLUMNS.values()))
    for kind, runs in rounds.items():
        print(f"{kind:20}" + "".join(f"{statistics.median(run[key] for run in runs):11.1f}" for key in COLUMNS))
        print(f"{'  best':20}" + "".join(f"{min(run[key] for run in runs):11.1f}" for key in COLUMNS))
    write_json(options.json, {"run": run, "rounds": rounds})


if __name__ == "__main__":
    main()
