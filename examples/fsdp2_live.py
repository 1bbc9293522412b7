"""Train a sharded model on CPU ranks, checkpoint while it trains, lose a rank, and go on with another world size.

    torchrun --nproc-per-node 4 examples/fsdp2_live.py --into /tmp/run --lose 2 --at 25     # rank 2 kills itself
    torchrun --nproc-per-node 3 examples/fsdp2_live.py --into /tmp/run                      # goes on where it was
    python examples/fsdp2_live.py                                                          # both, beside a run that
                                                                                           # nobody has disturbed

Each rank has an asyncio loop of its own: it trains in steps, and the saves go on beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sidestream

BATCH = 12  # of all ranks together: divides by 2, 3, 4 and 6
WIDTH = 50  # divides by none of them: shards are uneven


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    sizes = [16, WIDTH, WIDTH, 1]
    layers = [torch.nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]
    model = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """The batch of a step is the same whoever works on it; each rank takes its share."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 16, generator=generator)
    share = BATCH // dist.get_world_size()
    mine = inputs[dist.get_rank() * share : (dist.get_rank() + 1) * share]
    loss = (model(mine) - mine.square().sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    whole = loss.detach().clone()
    dist.all_reduce(whole)
    return float(whole) / dist.get_world_size()


async def train(arguments: argparse.Namespace) -> None:
    model, optimizer = build()
    async with (
        sidestream.AsyncStager() as stager,
        sidestream.Checkpointer(
            arguments.into,
            stager=stager,
            keep=sidestream.KeepLast(2),
            timeout_s=60,
            save=sidestream.SaveOptions(timeout_s=60),
            load=sidestream.LoadOptions(timeout_s=60),
        ) as checkpoints,
    ):
        weights, moments = get_state_dict(model, optimizer)  # moments that are not there yet are made by torch
        state = {"model": weights, "optimizer": moments}
        last = await checkpoints.restore(state)
        if last is not None:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        say(f"{dist.get_world_size()} ranks begin at step {0 if last is None else last + 1}")
        losses, pending = {}, None
        with stager.guard(optimizer):  # a step waits until the copies of its weights have been made
            for step in range(0 if last is None else last + 1, arguments.steps):
                losses[step] = train_step(model, optimizer, step)
                if step == arguments.at:
                    if pending is not None:
                        await pending  # on every rank, so that there is a checkpoint to go on from
                    if dist.get_rank() == arguments.lose:
                        os.kill(os.getpid(), signal.SIGKILL)
                if step % 10 == 9:
                    weights, moments = get_state_dict(model, optimizer)
                    pending = checkpoints.async_save({"model": weights, "optimizer": moments}, step=step)
                    pending.when_done(lambda step=step: say(f"step {step} is on storage, loss {losses[step]:.6f}"))
                await asyncio.sleep(0)
    say(json.dumps({"loss": losses[arguments.steps - 1]}))


def say(what: str) -> None:
    if dist.get_rank() == 0:
        print(what, flush=True)


def launch(ranks: int, run: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    return subprocess.run(
        [*command, "--into", str(run), *more], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def demonstrate(steps: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        wanted = ["--steps", str(steps)]
        undisturbed = launch(4, Path(directory, "undisturbed"), *wanted)
        lost = launch(4, Path(directory, "run"), *wanted, "--lose", "2", "--at", "25")
        resumed = launch(3, Path(directory, "run"), *wanted)
    print("4 ranks, undisturbed:\n" + undisturbed.stdout)
    print(f"4 ranks, of which one was killed (torchrun ended with {lost.returncode}):\n" + lost.stdout)
    print("3 ranks went on:\n" + resumed.stdout)
    for ended in (undisturbed, resumed):
        if ended.returncode:
            raise SystemExit(ended.stderr)
    if not lost.returncode:
        raise SystemExit("nobody was lost")
    one, other = (json.loads(ended.stdout.splitlines()[-1])["loss"] for ended in (undisturbed, resumed))
    print(f"last loss, undisturbed and resumed: {one:.7f} and {other:.7f}")
    if abs(one - other) > 1e-4 * abs(one):
        raise SystemExit("the losses differ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path("run"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lose", type=int, default=-1, help="a rank that is to kill itself")
    parser.add_argument("--at", type=int, default=-1, help="the step at which it does")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        demonstrate(arguments.steps)
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    asyncio.run(train(arguments))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
