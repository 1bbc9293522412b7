"""A server that answers on the loop while a trainer writes checkpoints, and takes up new weights as they appear.

It asks ``latest()`` now and then, restores into spare weights, and swaps them in between two requests: no request sees
half of an update. Everything runs in one process here, so that the example stands alone; trainer and server share
nothing but the directory.

    python examples/inference_server.py
"""

from __future__ import annotations

import asyncio
import json
import tempfile

import torch

import sidestream


def build() -> torch.nn.Linear:
    return torch.nn.Linear(4, 1, bias=False)


async def train(directory: str, steps: int) -> None:
    model = build()
    async with sidestream.Checkpointer(directory) as checkpoints:
        for step in range(1, steps + 1):
            with torch.no_grad():
                model.weight.fill_(step)
            pending = await checkpoints.save({"model": model}, step=step)
            await pending
            await asyncio.sleep(0.2)


class Server:
    """Newline-delimited JSON: a list of four numbers in, step and prediction out."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._model = build()
        self._step = 0

    async def follow(self) -> None:
        async with sidestream.Checkpointer(self._directory) as checkpoints:
            while True:
                latest = await checkpoints.latest()
                if latest is not None and latest != self._step:
                    spare = build()
                    await checkpoints.restore({"model": spare}, step=latest)
                    self._model, self._step = spare, latest  # no await in between: one request sees one model
                await asyncio.sleep(0.05)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            with torch.no_grad():
                prediction = self._model(torch.tensor(json.loads(line), dtype=torch.float32)).item()
            writer.write(json.dumps({"step": self._step, "prediction": prediction}).encode() + b"\n")
            await writer.drain()
        writer.close()
        await writer.wait_closed()


async def ask_until(port: int, step: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered, seen = 0, -1
    while seen < step:
        writer.write(b"[1, 1, 1, 1]\n")
        answer = json.loads(await reader.readline())
        answered += 1
        if answer["step"] != seen:
            seen = answer["step"]
            print(f"after {answered} requests: step {seen} answers {answer['prediction']:+.3f}")
            if seen and answer["prediction"] != 4 * seen:
                raise SystemExit("the answer does not belong to one step's weights")
        await asyncio.sleep(0.002)
    writer.close()
    await writer.wait_closed()


async def main() -> None:
    steps = 4
    with tempfile.TemporaryDirectory() as directory:
        server = Server(directory)
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
