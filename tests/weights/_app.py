"""An application for uvicorn: what the weights say, and their stamp. It computes on the loop, and in threads."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import AsyncExitStack
from typing import Any

from _modules import Tell

import sidestream

live = sidestream.Live(Tell())


def answer(reading: sidestream.ServedReading) -> set[float]:
    said: set[float] = reading.module()
    return said


async def lifespan(receive: Any, send: Any) -> None:
    async with AsyncExitStack() as stack:
        assert (await receive())["type"] == "lifespan.startup"
        checkpoints = await stack.enter_async_context(sidestream.Checkpointer(os.environ["RUN"]))
        names = sidestream.strip_prefix("model.")
        await stack.enter_async_context(checkpoints.following(live, names=names, poll_s=0.05))
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
    await send({"type": "lifespan.shutdown.complete"})


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
        return
    with live.reading() as reading:
        if scope["path"] == "/thread":
            said = await asyncio.to_thread(answer, reading) | answer(reading)
        else:
            said = answer(reading)
        found = {"said": sorted(said), "stamp": reading.stamp, "version": reading.version, "pid": os.getpid()}
    content = json.dumps(found).encode()
    status = 503 if found["stamp"] is None else 200
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-length", b"%d" % len(content))]}
    )
    await send({"type": "http.response.body", "body": content})
