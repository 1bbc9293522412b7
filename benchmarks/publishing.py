"""What publishing weights from memory costs, beside a copy of the same bytes and beside a save and a load.

    python benchmarks/publishing.py [--rounds N] [--json FILE]

A trainer publishes, and a server in a process of its own serves each version (``Live``). In each round: ``copy`` is
one copy of the bytes by one thread of numpy, between touched pages. ``staged`` and ``published`` are the times from the
call of ``publish``, and ``image`` is from the one to the other, with the checksums. ``first reading`` is the time until
a reading in the server has the new version. ``attach`` maps an image and makes its views, ``present`` reads its pages.
``save + load`` is a durable save to tmpfs and a load into existing tensors. ``pause`` is the latest tick of a 1 ms
ticker on the trainer's loop from the call to the publication, ``idle`` that of a loop that does nothing. The next
version's memory has been touched before each publication; ``touching`` is how long that took after the version before,
and ``pause, touching`` the latest tick meanwhile. ``image, not touched`` is the first version, whose memory is fresh.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from _common import describe, headline, ticking, write_json

import sidestream
from sidestream._weights.images import MappedImage

SHAPES = {"1,000 x 1 MiB": (1000, 1 << 18), "10,000 x 1 KiB": (10_000, 1 << 8)}


def serve(url: str, count: int, elements: int, pipe: Connection) -> None:
    """The server: says when a reading has had a version for the first time."""

    async def main() -> None:
        live = sidestream.Live({f"t{index}": torch.empty(elements, device="meta") for index in range(count)})

        def swapped(_: object) -> None:
            with live.reading() as reading:
                float(reading.tensors["t0"][0])
                pipe.send((reading.version, time.monotonic()))

        async with sidestream.Subscriber(url) as weights, weights.following(live, after_swap=swapped):
            await asyncio.to_thread(pipe.recv)

    asyncio.run(main())


async def idle_pause() -> float:
    async with ticking() as late:
        await asyncio.sleep(0.3)
        return max(late)


async def measure(count: int, elements: int, rounds: int) -> list[dict[str, float]]:
    state = {f"t{index}": torch.ones(elements) for index in range(count)}
    nbytes = count * elements * 4
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    ones, others = np.ones(nbytes // 4, np.float32), np.ones(nbytes // 4, np.float32)
    here, there = multiprocessing.get_context("spawn").Pipe()
    found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        async with sidestream.Publisher(f"{directory}/home") as publisher:
            arguments = (publisher.url, count, elements, there)
            server = multiprocessing.get_context("spawn").Process(target=serve, args=arguments)
            server.start()
            for number in range(rounds + 2):
                line: dict[str, float] = {"idle": await idle_pause()}
                start = time.perf_counter()
                np.copyto(others, ones)
                line["copy"] = time.perf_counter() - start
                fresh = number == 0
                async with ticking() as late:
                    start = time.monotonic()
                    pending = publisher.publish(state, version=number)
                    await pending.staged
                    line["staged"] = time.monotonic() - start
                    await pending
                    line["published"] = time.monotonic() - start
                line["pause"] = max(late, default=0.0)
                line["image"] = line["published"] - line["staged"]
                version, at = await asyncio.to_thread(here.recv)
                assert version == number
                line["first reading"] = at - start
                async with ticking() as late:
                    start = time.monotonic()
                    if (spare := publisher._versions.memory._spare) is not None:
                        await asyncio.wrap_future(spare.touched)
                    line["touching"] = time.monotonic() - start
                line["pause, touching"] = max(late, default=0.0)
                image = publisher._versions.channels.held[number].image
                start = time.perf_counter()
                mapped = MappedImage(image.memory, image.sums, image.nbytes)
                line["attach"] = time.perf_counter() - start
                start = time.perf_counter()
                mapped.make_present()
                line["present"] = time.perf_counter() - start
                del mapped
                start = time.perf_counter()
                await sidestream.save(state, f"{directory}/step-{number}")
                await sidestream.load(into, f"{directory}/step-{number}")
                line["save + load"] = time.perf_counter() - start
                await sidestream.remove(f"{directory}/step-{number}")
                if fresh:
                    found.append({"image, not touched": line["image"]})
                elif number > 1:
                    found.append(line)
            here.send(None)
            await asyncio.to_thread(server.join)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    run = describe()
    print(headline(run))
    results: dict[str, Any] = {"run": run, "shapes": {}}
    for name, (count, elements) in SHAPES.items():
        first, *rounds = asyncio.run(measure(count, elements, options.rounds))
        results["shapes"][name] = {"first": first, "rounds": rounds}
        print(f"{name}: milliseconds, median (best), and of one copy in the same round")
        for key in rounds[0]:
            values = [one[key] for one in rounds]
            ratio = statistics.median(one[key] / one["copy"] for one in rounds)
            print(f"  {key:16} {1e3 * statistics.median(values):9.2f} ({1e3 * min(values):8.2f}) {ratio:6.2f}")
        print(f"  image, not touched {1e3 * first['image, not touched']:.1f}")
        ratios = {
            "image / copy": lambda one: one["image"] / one["copy"],
            "first reading / (published + present)": lambda one: (
                one["first reading"] / (one["published"] + one["present"])
            ),
            "save + load / first reading": lambda one: one["save + load"] / one["first reading"],
        }
        for what, ratio_of in ratios.items():
            print(f"  {what}: {statistics.median(map(ratio_of, rounds)):.2f}")
    write_json(options.json, results)


if __name__ == "__main__":
    main()
