"""A warm process that forks one trainer after the other, each with a save in flight, for ``test_ends.py``.

A line of JSON says which, and where its standard streams are; the answers are its process id and how it ended. The
trainer ends as any program does: what it raises, and the end of the interpreter, are its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from typing import Any

import torch
from _run import state_of
from held import HeldStager

import sidestream


def say(what: str) -> None:
    print(what, flush=True)


def listen(held: HeldStager) -> None:
    """The stage in flight ends when the other side says so, also if the loop has ended."""

    def hear() -> None:
        os.read(0, 1)
        held.let_go()

    threading.Thread(target=hear, daemon=True).start()


async def main(run: str, way: str) -> None:
    held = HeldStager()
    async with sidestream.Checkpointer(run, stager=held, lease_s=2) as checkpoints:
        if way.startswith("preempt"):
            prepare(checkpoints, way)
        pending = checkpoints.async_save(state_of(2), step=2)
        while not held.held:
            await asyncio.sleep(0.01)
        listen(held)
        say("in flight")
        try:
            await go_on(way, checkpoints, pending)
        except asyncio.CancelledError:
            say("cancelled")
            asyncio.get_running_loop().call_soon(say, "leaving")  # when this task waits at the end of the block
            raise
        finally:
            say("finally")


def prepare(checkpoints: sidestream.Checkpointer, way: str) -> None:
    def last() -> tuple[dict[str, Any], int] | None:
        held.holds = False  # the last save is not held up
        held.let_go()
        return {"t": torch.ones(10), "step": 3}, 3

    def unsafe() -> tuple[dict[str, Any], int] | None:
        last()
        return {"t": print}, 3

    held: Any = checkpoints._saves._stager
    match way:
        case "preempt exit":
            checkpoints.on_preemption()
        case "preempt code":
            checkpoints.on_preemption(signal.SIGUSR1, exit_code=7)
        case "preempt signal":
            checkpoints.on_preemption(then="signal")
        case "preempt stay":
            checkpoints.on_preemption(then="stay")
        case "preempt save":
            checkpoints.on_preemption(save=last)
        case "preempt grace":
            checkpoints.on_preemption(grace_s=0.2)
        case "preempt twice":
            checkpoints.on_preemption(grace_s=3600)
        case "preempt failing":
            checkpoints.on_preemption(save=unsafe)


async def go_on(way: str, checkpoints: sidestream.Checkpointer, pending: sidestream.PendingSave) -> None:
    match way:
        case "return":
            return
        case "exception":
            raise RuntimeError("the training failed")
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(4)
        case "closing loop":
            asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
            await asyncio.Event().wait()
        case "preempt stay" | "preempt twice":
            while checkpoints.preempted is None:
                await asyncio.sleep(0.01)
            say(f"preempted by {checkpoints.preempted}")
            await asyncio.sleep(0 if way == "preempt stay" else 3600)
        case _:
            await asyncio.Event().wait()


def next_trainer() -> dict[str, str] | None:
    """In the child: what it is to do. In the server: None, when there are no more."""
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            ways = (os.O_RDWR, os.O_WRONLY, os.O_WRONLY)
            for number, (path, flags) in enumerate(zip(order["streams"], ways, strict=True)):
                os.dup2(os.open(path, flags), number)
            return order
        say(str(pid))
        _, status = os.waitpid(pid, 0)
        say(str(os.waitstatus_to_exitcode(status)))
    return None


if __name__ == "__main__":
    logging.basicConfig(format="log: %(message)s")
    torch.set_num_threads(1)
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))  # or the first threads of a fork race to do it
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it for its children
    assert callable(sidestream.save)  # imports what a save needs, once for all
    trainer = next_trainer()
    if trainer is not None:
        asyncio.run(main(trainer["run"], trainer["way"]))
