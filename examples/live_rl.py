"""A trainer and two processes that play with its policy, on one host: no version of the policy is a file.

The trainer publishes its policy after every step, in memory. A player takes up each newest version between two games,
and plays no game with a policy that is more than ``MOST_BEHIND`` steps old: it waits for a newer one. Every tenth step
is saved, and published from the same snapshot.

Both sides are killed once. A player that is killed is replaced. When the trainer is killed, the players keep the policy
that they have. The new trainer goes on from the last checkpoint, with a new epoch. Games that were played with a policy
which died with the old trainer are not used.

    python examples/live_rl.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

import sidestream

STEPS, GAMES, MOST_BEHIND = 120, 4, 2
WANTED = torch.tensor([[0.5, -1.0, 0.25, 2.0]])
"""What a player does best: the reward is how close it comes."""


def build() -> torch.nn.Linear:
    policy = torch.nn.Linear(1, 4, bias=False)
    torch.nn.init.zeros_(policy.weight)
    return policy


# --- the trainer ---


class Trainer:
    def __init__(self, publisher: sidestream.Publisher, checkpoints: sidestream.Checkpointer) -> None:
        self.publisher, self.checkpoints = publisher, checkpoints
        self.policy = build()
        self.optimizer = torch.optim.SGD(self.policy.parameters(), lr=0.05)
        self.step = 0
        self.games: asyncio.Queue[dict[str, object]] = asyncio.Queue(2 * GAMES)
        self.behind: Counter[int] = Counter()
        self.dropped = self.players = 0
        self.ended = False

    async def player(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Tell a player the lowest version that it may play with, and take its game, again and again."""
        self.players += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while not self.ended:
                writer.write(json.dumps({"min_version": self.step - MOST_BEHIND}).encode() + b"\n")
                await self.games.put(json.loads(await reader.readuntil()))
            writer.write(b'{"ended": true}\n')
            await writer.drain()
        self.players -= 1
        writer.close()

    async def batch(self) -> list[tuple[list[float], float]]:
        found = []
        while len(found) < GAMES:
            game = await self.games.get()
            behind = self.step - int(str(game["version"]))
            if game["epoch"] != self.publisher.epoch or behind > MOST_BEHIND:
                self.dropped += 1  # of a trainer that has died, or the step has moved on since it was asked for
                continue
            self.behind[behind] += 1
            found.append((game["noise"], game["reward"]))
        return found

    async def train(self) -> None:
        restored = await self.checkpoints.restore({"policy": self.policy})
        self.step = restored or 0
        print(f"epoch {self.publisher.epoch} begins at step {self.step}", flush=True)
        version = self.publisher.publish({"policy": self.policy}, version=self.step)
        await version
        while self.step < STEPS:
            games = await self.batch()
            baseline = sum(reward for _, reward in games) / len(games)
            steps = [(reward - baseline) * torch.tensor(noise) for noise, reward in games]
            self.policy.weight.grad = -torch.stack(steps).sum(0).reshape(4, 1)
            self.optimizer.step()
            self.step += 1
            if self.step % 10 == 0:
                pending = self.checkpoints.async_save(
                    {"policy": self.policy}, step=self.step, publish=self.publisher, metadata={"reward": baseline}
                )
                version = pending.published
                await pending
            else:
                version = self.publisher.publish({"policy": self.policy}, version=self.step)
                await version.staged  # the next step may change the policy now
            print(f"step {self.step} reward {baseline:.3f}", flush=True)
        await version
        self.ended = True
        while self.players:  # they play their last games
            with suppress(TimeoutError):
                await asyncio.wait_for(self.games.get(), 0.05)
        report = {"behind": dict(sorted(self.behind.items())), "dropped": self.dropped}
        print(f"ended {json.dumps(report)}", flush=True)


async def train(directory: Path) -> None:
    torch.manual_seed(0)
    names = sidestream.strip_prefix("policy.")
    (directory / "players").unlink(missing_ok=True)  # the socket of a trainer that has died
    async with (
        sidestream.Checkpointer(directory / "run") as checkpoints,
        sidestream.Publisher(directory / "home", names=names) as publisher,
    ):
        trainer = Trainer(publisher, checkpoints)
        async with await asyncio.start_unix_server(trainer.player, directory / "players"):
            await trainer.train()


# --- a player ---


async def play(directory: Path) -> None:
    live = sidestream.Live(build())
    async with (
        sidestream.Subscriber(f"unix:{directory / 'home'}") as weights,
        weights.following(live) as follower,
    ):
        await follower.ready()
        while True:
            with suppress(ConnectionError, FileNotFoundError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_unix_connection(directory / "players")
                while not (order := json.loads(await reader.readuntil())).get("ended"):
                    async with live.reading(min_version=order["min_version"]) as reading:
                        noise = 0.3 * torch.randn(1, 4)
                        action = reading.module(torch.ones(1, 1)) + noise
                        reward = -float((action - WANTED).square().sum())
                        stamp, version = str(reading.stamp), reading.version
                    epoch = int(stamp[1 : stamp.index(".")])
                    game = {"epoch": epoch, "version": version, "noise": noise[0].tolist(), "reward": reward}
                    writer.write(json.dumps(game).encode() + b"\n")
                writer.close()
                return
            await asyncio.sleep(0.02)  # there is no trainer at the moment


# --- what starts and kills them ---


async def start(role: str, directory: str) -> Process:
    return await asyncio.create_subprocess_exec(sys.executable, __file__, role, directory, stdout=PIPE)


async def until(trainer: Process, wanted: str) -> list[str]:
    """Read what the trainer says until it says what is wanted."""
    assert trainer.stdout is not None
    said: list[str] = []
    while not said or not said[-1].startswith(wanted):
        line = (await trainer.stdout.readline()).decode()
        if not line:
            raise SystemExit(f"the trainer has ended too early: {said[-3:]}")
        said.append(line.strip())
    return said


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        processes = [await start(role, directory) for role in ("train", "play", "play")]
        try:
            async with asyncio.timeout(60):
                trainer, player, _ = processes
                said = await until(trainer, "step 25 ")
                player.kill()
                processes.append(await start("play", directory))
                print(f"{said[1]}; at step 25 a player was killed, and another one begins")

                said = await until(trainer, "step 55 ")
                trainer.kill()
                await trainer.wait()
                processes.append(trainer := await start("train", directory))
                begins = (await until(trainer, "epoch"))[-1]
                print(f"at step 55 the trainer was killed; {begins}")

                said = await until(trainer, "ended")
                report = json.loads(said[-1].removeprefix("ended "))
                print(f"{said[-2]}: the end")
                behind = ", ".join(f"{count} with {steps}" for steps, count in report["behind"].items())
                print(f"games of this epoch by the steps that their policy was behind: {behind}")
                print(f"games that were too old or of the epoch before: {report['dropped']}")
                for one in processes:
                    await one.wait()
        finally:
            for one in processes:
                with suppress(ProcessLookupError):
                    one.kill()
                await one.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run({"train": train, "play": play}[sys.argv[1]](Path(sys.argv[2])))
    else:
        asyncio.run(main())
