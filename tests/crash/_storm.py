"""A program that saves and loads while it is interrupted hundreds of times: see ``test_row_interrupts.py``."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from _look import attempts_in
from _seeded import blank_state, make_state, same
from _stepping import busy_threads

import sidestream

PATIENCE_S = 60.0


def once(way: str, run: Path, number: int) -> None:
    """One save and one load."""
    state = blank_state()
    if way == "blocking":
        sidestream.blocking.save(
            make_state(number), run / f"save-{number}", options=sidestream.SaveOptions(durability="flush")
        )
        sidestream.blocking.load(state, run / f"save-{number}")
    elif way == "blocking, by a process":
        sidestream.blocking.save(
            make_state(number),
            run / f"save-{number}",
            options=sidestream.SaveOptions(durability="flush", writer="process"),
        )
        sidestream.blocking.load(state, run / f"save-{number}")
    else:
        try:
            asyncio.run(both(run, number, state))
        finally:
            signal.signal(signal.SIGINT, interrupt)  # an interrupt may keep asyncio.run from doing it
    assert same(state, make_state(number))


async def both(run: Path, number: int, state: dict[str, Any]) -> None:
    async with sidestream.Checkpointer(run, save=sidestream.SaveOptions(durability="flush")) as checkpoints:
        await checkpoints.save(make_state(number), step=number)
        await checkpoints.restore(state, number)


def interrupt(_: int, frame: FrameType | None) -> None:
    """Raise ``KeyboardInterrupt`` if the signal interrupts the library; ignore it in the program around it."""
    while frame is not None:
        if frame.f_code is once.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


def go_on(way: str, run: Path, stop: Path, told: dict[str, Any]) -> None:
    """Save and load until the file ``stop`` exists, independent of interrupts."""
    while True:
        signal.signal(signal.SIGINT, interrupt)  # as above
        if stop.exists():
            return
        try:
            told["last"] += 1
            once(way, run, told["last"])
            told["done"] += 1
        except KeyboardInterrupt:
            told["interrupted"] += 1
        except BaseException as error:
            if way == "asyncio.run" and isinstance(error, asyncio.CancelledError) and before_its_first_step(error):
                told["interrupted"] += 1
            else:
                told["wrong"].append(f"{type(error).__name__}: {error}")


def before_its_first_step(error: BaseException) -> bool:
    """Whether the program was cancelled before it called the library. ``asyncio.run`` forgets a signal that comes just
    after it has installed its handler, and raises ``CancelledError`` then."""
    package = Path(sidestream.__file__).parent
    return not any(package in Path(frame.filename).parents for frame in traceback.extract_tb(error.__traceback__))


def main() -> None:
    way, run, stop = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    told: dict[str, Any] = {"interrupted": 0, "done": 0, "wrong": [], "last": 1}
    once(way, run, 1)
    signal.default_int_handler = interrupt  # asyncio.run takes the signal only from the default handler
    signal.signal(signal.SIGINT, interrupt)
    print("ready", flush=True)
    while not stop.exists():
        try:
            go_on(way, run, stop, told)
        except KeyboardInterrupt:  # one that found the handler of the one before
            continue
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    told["last"] += 1
    once(way, run, told["last"])
    # Under asyncio.run, the second signal interrupts asyncio too. A loop that could not be closed may be run again, as
    # far as anybody knows: what works on it goes on until this thread ends.
    end = time.monotonic() + (0 if way == "asyncio.run" else PATIENCE_S)
    while (attempts_in(run) or busy_threads()) and time.monotonic() < end:
        gc.collect()  # tasks that were cut off within an interrupt refer to themselves
        time.sleep(0.01)
    told["left"] = attempts_in(run) + busy_threads()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
