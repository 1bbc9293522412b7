"""A server that answers on the loop while a trainer writes checkpoints, and takes up new weights as they appear.

It has two models that take turns. One answers; ``watch()`` names each new step, ``restore`` loads it into the other one
in the background, and one statement swaps the two between two requests: no request sees half of an update. Until the
first step it refuses requests. A damaged step, or storage that fails, changes nothing but its health. Both models
are built before the first request, in a thread. Building a model while the server answers would initialize its weights
on the loop, which then answers nobody.

Everything runs in one process here, so that the example stands alone; trainer and server share nothing but the
directory.

    python examples/inference_server.py
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile

import torch

import sidestream

log = logging.getLogger("server")


def build() -> torch.nn.Linear:
    return torch.nn.Linear(4, 1, bias=False)


async def train(directory: str, steps: int) -> None:
    model = build()
    async with sidestream.Checkpointer(directory) as checkpoints:
        for step in range(1, steps + 1):
            with torch.no_grad():
                model.weight.fill_(step)
            pending = checkpoints.async_save({"model": model}, step=step)
            await pending
            await asyncio.sleep(0.2)


class Server:
    """Newline-delimited JSON: four numbers in, step and prediction out; ``"health"`` in, step and problem out.

    The status is that of HTTP: 503 as long as there are no weights."""

    def __init__(self, directory: str, live: torch.nn.Module, spare: torch.nn.Module) -> None:
        self._directory = directory
        self._live, self._spare = live, spare
        self._step: int | None = None  # no weights yet
        self._problem: str | None = None

    async def follow(self) -> None:
        while True:
            try:
                async with sidestream.Checkpointer(self._directory) as checkpoints:
                    async for step in checkpoints.watch(newest=True, poll_s=0.1):
                        await self._take(checkpoints, step)
            except sidestream.errors.SidestreamError as error:
                # No step is good, retention deleted it, or the storage failed: keep the weights, and begin again.
                self._problem = f"{type(error).__name__}: {error}"
                log.warning("the weights stay those of step %s: %s", self._step, error)
                await asyncio.sleep(1)

    async def _take(self, checkpoints: sidestream.Checkpointer, step: int) -> None:
        # In the place of a damaged step this loads an older one that is good, and logs a warning.
        taken = await checkpoints.restore({"model": self._spare}, step=step, fallback="older")
        # One statement without an await: no request sees the weights of one step under the number of another.
        self._live, self._spare, self._step = self._spare, self._live, taken
        self._problem = None if taken == step else f"step {step} is damaged"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps(self.reply(json.loads(line))).encode() + b"\n")
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    def reply(self, request: object) -> dict[str, object]:
        if request == "health":
            return {"status": 503 if self._step is None else 200, "step": self._step, "problem": self._problem}
        if self._step is None:
            return {"status": 503, "problem": "no weights yet"}
        with torch.no_grad():
            # Without an await, so that no request still computes with a model when it becomes the spare one.
            prediction = self._live(torch.tensor(request, dtype=torch.float32)).item()
        return {"status": 200, "step": self._step, "prediction": prediction}


async def ask_until(port: int, step: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered, seen = 0, 0
    while seen < step:
        writer.write(b"[1, 1, 1, 1]\n")
        answer = json.loads(await reader.readline())
        answered += 1
        if answer["status"] == 503 and answered == 1:
            print("after 1 requests: no weights yet")
        elif answer["status"] == 200 and answer["step"] != seen:
            seen = answer["step"]
            print(f"after {answered} requests: step {seen} answers {answer['prediction']:+.3f}")
            if answer["prediction"] != 4 * seen:
                raise SystemExit("the answer does not belong to one step's weights")
        await asyncio.sleep(0.002)
    writer.close()
    await writer.wait_closed()


async def main() -> None:
    steps = 4
    with tempfile.TemporaryDirectory() as directory:
        server = Server(directory, await asyncio.to_thread(build), await asyncio.to_thread(build))
        listening = await asyncio.start_server(server.answer, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        async with listening:
            follower = asyncio.create_task(server.follow())
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                tasks.create_task(train(directory, steps))
                tasks.create_task(ask_until(port, steps))
            follower.cancel()
            await asyncio.wait([follower])


if __name__ == "__main__":
    asyncio.run(main())
