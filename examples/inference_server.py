"""A server that answers on the loop while a trainer writes checkpoints, and takes up new weights as they appear.

``Live`` holds copies of the model. A follower fetches each newest step in the background, verifies it, puts it into a
copy that no request uses, and lets the requests that come after it use that one: no request sees half of an update.
Until the first step the server refuses requests. A damaged step, or storage that fails, changes nothing but its health.

Everything runs in one process here, so that the example stands alone; trainer and server share nothing but the
directory.

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
            pending = checkpoints.async_save({"model": model}, step=step)
            await pending
            await asyncio.sleep(0.2)


class Server:
    """Newline-delimited JSON: four numbers in, stamp and prediction out; ``"health"`` in, stamp and problem out.

    The status is that of HTTP: 503 as long as there are no weights."""

    def __init__(self, live: sidestream.Live, follower: sidestream.Follower) -> None:
        self._live, self._follower = live, follower

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps(self.reply(json.loads(line))).encode() + b"\n")
            await writer.drain()
        writer.close()
        await writer.wait_closed()

    def reply(self, request: object) -> dict[str, object]:
        if request == "health":
            health = self._follower.health()
            problems = [f"{stamp}: {why}" for stamp, why in health.passed_over.items()] + [health.problem or ""]
            return {
                "status": 503 if health.stamp is None else 200,
                "stamp": health.stamp,
                "problems": [*filter(None, problems)],
            }
        with self._live.reading() as reading:
            if reading.stamp is None:
                return {"status": 503, "problems": ["no weights yet"]}
            with torch.no_grad():
                prediction = reading.module(torch.tensor(request, dtype=torch.float32)).item()
            return {"status": 200, "stamp": reading.stamp, "prediction": prediction}


async def ask_until(port: int, stamp: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered, seen = 0, None
    while seen != stamp:
        writer.write(b"[1, 1, 1, 1]\n")
        answer = json.loads(await reader.readline())
        answered += 1
        if answer["status"] == 503 and answered == 1:
            print("after 1 requests: no weights yet")
        elif answer["status"] == 200 and answer["stamp"] != seen:
            seen = answer["stamp"]
            print(f"after {answered} requests: {seen} answers {answer['prediction']:+.3f}")
            if answer["prediction"] != 4 * int(seen.removeprefix("step-")):
                raise SystemExit("the answer does not belong to the weights that the stamp names")
        await asyncio.sleep(0.002)
    writer.close()
    await writer.wait_closed()


async def main() -> None:
    steps = 4
    live = sidestream.Live(build())
    with tempfile.TemporaryDirectory() as directory:
        async with (
            sidestream.Checkpointer(directory) as checkpoints,
            checkpoints.following(live, names=sidestream.strip_prefix("model."), poll_s=0.1) as follower,
            await asyncio.start_server(Server(live, follower).answer, "127.0.0.1", 0) as listening,
            asyncio.timeout(60),
            asyncio.TaskGroup() as tasks,
        ):
            port = listening.sockets[0].getsockname()[1]
            tasks.create_task(train(directory, steps))
            tasks.create_task(ask_until(port, f"step-{steps}"))


if __name__ == "__main__":
    asyncio.run(main())
