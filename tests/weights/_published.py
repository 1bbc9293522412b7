"""Programs for the tests that kill and stop them: a publisher, a subscriber, and a publisher that forks.

Every tensor of a version has its epoch and its number in every element.

    python _published.py publisher|subscriber|forker HOME
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

import sidestream

TENSORS, ELEMENTS, LARGE, CHILDREN = 6, 40_000, 4 << 20, 12


def value_of(epoch: int, number: int) -> float:
    return float(epoch * 20_000 + number)


def value_in(stamp: str | None) -> float:
    assert stamp is not None
    epoch, number = stamp.removeprefix("e").split(".v")
    return value_of(int(epoch), int(number))


def state_of(epoch: int, number: int, elements: int = ELEMENTS) -> dict[str, torch.Tensor]:
    return {f"t{one}": torch.full((elements + one,), value_of(epoch, number)) for one in range(TENSORS)}


def say(text: str) -> None:
    print(text, flush=True)


async def publisher(home: Path) -> None:
    """Publish without a pause, until it is killed."""
    async with sidestream.Publisher(home) as publishes:
        number = 0
        while True:
            number += 1
            published = await publishes.publish(state_of(publishes.epoch, number), version=number)
            say(published.stamp)


async def subscriber(home: Path) -> None:
    """Read without a pause, and say what is served for the first time, and everything that is wrong."""
    live = sidestream.Live(state_of(0, 0))
    last = (-1, -1)
    async with sidestream.Subscriber(f"unix:{home}") as weights, weights.following(live) as follower:
        say("follows")
        await follower.ready()
        while True:
            with live.reading() as reading:
                found = {one for tensor in reading.tensors.values() for one in tensor[[0, 777, -1]].tolist()}
                await asyncio.sleep(0)
                found |= {one for tensor in reading.tensors.values() for one in tensor[[0, -1]].tolist()}
                stamp = reading.stamp
            if found != {value_in(stamp)}:
                say(f"wrong: {stamp} has {sorted(found)}")
            assert stamp is not None
            epoch, number = map(int, stamp.removeprefix("e").split(".v"))
            if (epoch, number) < last:
                say(f"wrong: {stamp} after {last}")
            if (epoch, number) != last:
                last = epoch, number
                say(stamp)


def fork_again_and_again(count: int) -> None:
    """Make children that live on, at many moments: each says when it has found its memory in order."""
    for number in range(count):
        time.sleep(0.003 * (number % 5))  # other moments of a version each time
        if os.fork() == 0:
            others = [bytearray(1 << 20) for _ in range(20)]  # new maps, perhaps where the parent has an image
            gc.collect()
            for one in others:
                one[:: 1 << 12] = b"\1" * len(one[:: 1 << 12])
            os.write(1, f"child {os.getpid()}\n".encode())
            while True:
                signal.pause()


async def forker(home: Path) -> None:
    """Publish large versions while a thread forks."""
    async with sidestream.Publisher(home, keep=1) as publishes:
        forks = threading.Thread(target=fork_again_and_again, args=(CHILDREN,))
        forks.start()
        number = 0
        while True:
            number += 1
            state = state_of(publishes.epoch, number, LARGE // TENSORS)
            say((await publishes.publish(state, version=number)).stamp)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run({"publisher": publisher, "subscriber": subscriber, "forker": forker}[sys.argv[1]](Path(sys.argv[2])))
