"""A training task that saves while other tasks of the loop have their turn; run it twice to see it resume.

python examples/quickstart.py [DIRECTORY [STEPS]]
"""

from __future__ import annotations

import asyncio
import sys
import time

import torch

import sidestream


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    inputs = torch.randn(64, 256)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sin()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


async def train(directory: str, steps: int, every: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "loss": float("inf")}

    async with sidestream.Checkpointer(directory) as checkpoints:
        start = await checkpoints.restore(state)
        print("starting anew" if start is None else f"going on after step {start}, loss {state['loss']:.4f}")
        first = (start or 0) + 1
        for step in range(first, first + steps):
            state["loss"] = await asyncio.to_thread(train_step, model, optimizer)
            if step % every == 0:
                pending = checkpoints.async_save(state, step=step)
                await pending.staged  # the next step may change the weights; writing goes on beside it
                print(f"step {step}: loss {state['loss']:.4f}, staged")
    # Leaving the block has waited for the saves in flight.


async def tick(pauses: list[float]) -> None:
    """What else the loop has to do. Its longest pause is how long the loop was held up."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        pauses.append(time.perf_counter() - before)


async def main(directory: str = "checkpoints", steps: str = "60") -> None:
    torch.set_num_threads(1)  # leave a core to the loop
    pauses: list[float] = []
    ticker = asyncio.create_task(tick(pauses))
    await train(directory, int(steps), every=20)
    ticker.cancel()
    print(f"the ticker ran {len(pauses)} times; its longest pause was {max(pauses) * 1e3:.1f} ms")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
