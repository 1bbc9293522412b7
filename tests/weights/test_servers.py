"""Two workers of uvicorn follow a run while they answer requests over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _modules import version
from warm import Popen

import sidestream

pytest.importorskip("uvicorn")

PATIENCE_S = 600.0
HERE = Path(__file__).parent
SOURCE = Path(sidestream.__file__).parents[1]


@asynccontextmanager
async def uvicorn(app: str, folder: Path, run: Path, log: Path) -> AsyncIterator[int]:
    """Two workers, and their port."""
    with log.open("w") as out:
        server = Popen(
            [sys.executable, "-m", "uvicorn", app, "--workers", "2", "--port", "0", "--no-access-log"],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=run.parent,
            env={**os.environ, "RUN": str(run), "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, folder, HERE)))},
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                while (found := re.search(r"running on http://127.0.0.1:(\d+)", log.read_text())) is None:
                    assert server.poll() is None, log.read_text()
                    await asyncio.sleep(0.05)
                while not await listens(int(found[1])):
                    await asyncio.sleep(0.05)
            yield int(found[1])
        finally:
            server.terminate()
            code = await asyncio.to_thread(server.wait)
        assert code in (0, -15, 143), log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()


async def listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


class Client:
    """Connections that ask again and again, and what was wrong with the answers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.answered = 0
        self.wrong: list[str] = []
        self.newest: dict[int, int] = {}
        """The highest version that each worker has answered with."""

    async def ask(self, stop: asyncio.Event, path: str) -> None:
        while not stop.is_set():
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                last = -1  # of this connection, which is to one worker
                for _ in range(50):  # and then another connection, perhaps to the other worker
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                    assert length is not None
                    last = self.take(int(head.split()[1]), json.loads(await reader.readexactly(int(length[1]))), last)
            finally:
                writer.close()
                await writer.wait_closed()

    def take(self, status: int, answer: dict[str, Any], last: int) -> int:
        """Check an answer that came after version ``last`` on its connection. Return its version."""
        number, pid = answer["version"], answer["pid"]
        if status == 503 and answer["stamp"] is None and last == -1:
            return last
        self.answered += 1
        if (status, answer["said"], answer["stamp"]) != (200, [float(number)], f"step-{number}") or number < last:
            self.wrong.append(f"{status} {answer} after {last}")
        self.newest[pid] = max(self.newest.get(pid, 0), number)
        return int(number)


async def train(run: Path, steps: int, client: Client) -> None:
    """Save a step when all workers serve the one before it."""
    async with sidestream.Checkpointer(run, keep=sidestream.KeepLast(2)) as checkpoints:
        for step in range(1, steps + 1):
            await checkpoints.save({"model": version(step), "step": step}, step=step)
            async with asyncio.timeout(PATIENCE_S):
                while len(client.newest) < 2 or min(client.newest.values()) < step:
                    await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("swaps", "requests"), [(10, 1_000), pytest.param(200, 20_000, marks=pytest.mark.long)], ids=["short", "long"]
)
async def test_no_answer_is_mixed_or_mislabelled(swaps: int, requests: int, tmp_path: Path) -> None:
    async with uvicorn("_app:app", HERE, tmp_path / "run", tmp_path / "log") as port:
        client, stop = Client(port), asyncio.Event()
        asking = [asyncio.create_task(client.ask(stop, path)) for path in ("/", "/thread") * 4]
        try:
            await train(tmp_path / "run", swaps, client)
            async with asyncio.timeout(PATIENCE_S):
                while client.answered < requests:
                    await asyncio.sleep(0.01)
        finally:
            stop.set()
            await asyncio.gather(*asking)
    assert client.wrong == []
    assert client.answered >= requests
    assert list(client.newest.values()) == [swaps, swaps]
    print(f"{client.answered} answers, {swaps} versions in each of two workers")


async def test_the_example(tmp_path: Path) -> None:
    """With FastAPI: an answer of each worker, from one step."""
    pytest.importorskip("fastapi")
    folder = HERE.parents[1] / "examples" / "servers"
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        await checkpoints.save({"model": {"weight": torch.full((1, 4), 3.0)}}, step=3)
    async with (
        uvicorn("fastapi_server:app", folder, tmp_path / "run", tmp_path / "log") as port,
        asyncio.timeout(PATIENCE_S),
    ):
        for path in (b"POST /predict", b"GET /health"):
            head = b""
            while b" 200 " not in head:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                body = b"[1, 1, 1, 1]" if path.startswith(b"POST") else b""
                lines = [path + b" HTTP/1.1", b"Host: x", b"Connection: close", b"Content-Type: application/json"]
                writer.write(b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body]))
                head, _, content = (await reader.read()).partition(b"\r\n\r\n")
                assert head.split()[1] in (b"200", b"503"), head
                writer.close()
                await writer.wait_closed()
                await asyncio.sleep(0.02)
            answer = json.loads(content)
            if path.startswith(b"POST"):
                assert answer == {"prediction": 12.0}
                assert b"x-weights: step-3" in head.lower()
            else:
                assert answer == {"weights": "step-3", "problem": None, "passed_over": {}}
