"""What lives on the trainer's event loop beside the training: a 1 ms ticker and an HTTP server."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

TICK_S = 0.001
CLIENT = Path(__file__).with_name("client.py")


@asynccontextmanager
async def ticking(ticks: list[tuple[float, float]]) -> AsyncIterator[None]:
    """Sleep for a millisecond again and again; note when the loop woke us, and how late."""
    ticker = asyncio.create_task(tick(ticks))
    try:
        yield
    finally:
        ticker.cancel()


async def tick(ticks: list[tuple[float, float]]) -> None:
    before = time.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        ticks.append((now, max(0.0, now - before - TICK_S)))
        before = now


@asynccontextmanager
async def serving(status: Callable[[], dict[str, Any]], answers: list[float]) -> AsyncIterator[None]:
    """Answer `GET /status` on a free port of 127.0.0.1 while a client process keeps asking.

    On leaving, the times at which the client received its answers are added to `answers`.
    """

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(status())

    app = web.Application()
    app.router.add_get("/status", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    client = await asyncio.create_subprocess_exec(sys.executable, CLIENT, str(port), stdout=asyncio.subprocess.PIPE)
    try:
        yield
    finally:
        await runner.cleanup()
        output, _ = await client.communicate()
        answers.extend(json.loads(output))
