"""Readings in tasks and threads while versions are published, swapped and dropped. The same harness finds faults."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from _modules import TENSORS, Tell, version

from sidestream import Live, Publisher, Subscriber
from sidestream._weights import images
from sidestream._weights.live import ServedReading, ServedVersion

PATIENCE_S = 600.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is handed over on Linux only")


@dataclass
class Account:
    readings: int = 0
    wrong: list[str] = field(default_factory=list)
    stamps: set[str] = field(default_factory=set)

    def take(self, said: set[float], stamp: str | None, last: int) -> int:
        """Note a reading that came after version ``last`` in the same task or thread. Return its version."""
        self.readings += 1
        number = -1 if stamp is None else int(stamp.rpartition("v")[2])
        if said != {float(number)} or number < last:
            self.wrong.append(f"{stamp} has {sorted(said)} after {last}")
        self.stamps.add(str(stamp))
        return number


class Torture:
    """Readers of one ``Live``, and a publisher that gives it one version after the other."""

    def __init__(self, seed: int) -> None:
        self.live = Live(Tell())
        self.account = Account()
        self._chance = random.Random(seed)
        self._stop = threading.Event()

    async def _task(self, seed: int) -> None:
        chance, last = random.Random(seed), -1
        while not self._stop.is_set():
            with self.live.reading() as reading:
                said = reading.module()
                for _ in range(chance.choice((0, 0, 0, 1, 1, 20))):
                    await asyncio.sleep(0)
                    said |= {float(reading.tensors[f"t{chance.randrange(TENSORS)}"][chance.randrange(257)])}
                if said:
                    said |= reading.module() if chance.random() < 0.2 else set()
                last = self.account.take(said, reading.stamp, last)
            await asyncio.sleep(0)

    def _thread(self, seed: int) -> None:
        chance, last, account = random.Random(seed), -1, Account()
        while not self._stop.is_set():
            with self.live.reading() as reading:
                said = reading.module()
                if chance.random() < 0.02:
                    time.sleep(chance.random() * 0.01)
                    said |= reading.module()
                last = account.take(said, reading.stamp, last)
        self._accounts.append(account)

    async def run(self, home: Path, swaps: int, readings: int, after: Callable[[Publisher], object] = id) -> Account:
        """Publish until there were so many swaps and readings, or something is wrong."""
        self._accounts: list[Account] = []
        seeds = [self._chance.random() for _ in range(5)]
        threads = [threading.Thread(target=self._thread, args=(seed,)) for seed in seeds[:2]]
        number = 0
        async with (
            Publisher(home, keep=self._chance.choice((1, 2, 3))) as publisher,
            Subscriber(publisher.url) as weights,
            weights.following(self.live) as follower,
            asyncio.timeout(PATIENCE_S),
        ):
            await publisher.publish(version(number), version=number)
            await follower.ready()
            for thread in threads:
                thread.start()
            tasks = [asyncio.create_task(self._task(int(seed * 1e9))) for seed in seeds[2:]]
            try:
                while not self.account.wrong and (self.live.health().swaps < swaps or self.account.readings < readings):
                    number += 1
                    pending = publisher.publish(version(number), version=number, channel="stable")
                    await pending
                    after(publisher)
                    if self._chance.random() < 0.5:  # otherwise some are skipped
                        await pending.applied(count=1, timeout_s=PATIENCE_S)
                self.health = follower.health()
            finally:
                self._stop.set()
                await asyncio.gather(*tasks)
                for thread in threads:
                    await asyncio.to_thread(thread.join)
        for one in self._accounts:
            self.account.readings += one.readings
            self.account.wrong += one.wrong
            self.account.stamps |= one.stamps
        return self.account


@pytest.mark.parametrize(
    ("swaps", "readings"),
    [(60, 3_000), pytest.param(1_000, 1_000_000, marks=pytest.mark.long)],
    ids=["short", "long"],
)
async def test_no_reading_is_failed_mixed_or_mislabelled(swaps: int, readings: int, tmp_path: Path) -> None:
    torture = Torture(7)
    account = await torture.run(tmp_path / "home", swaps, readings)
    assert account.wrong == []
    assert account.readings >= readings
    assert torture.live.health().swaps >= swaps
    assert torture.live.health().readings == 0
    assert torture.health.problem is None
    print(f"{account.readings} readings of {len(account.stamps)} versions, {torture.live.health().swaps} swaps")


# --- faults that it has to find ---


def no_pin(monkeypatch: pytest.MonkeyPatch) -> Callable[[Publisher], object]:
    """A reading does not pin its copy, so that a later version is put into it."""

    def enter(live: Live, reading: ServedReading, wanted: int | None) -> ServedVersion:
        return live._served

    monkeypatch.setattr(Live, "_enter", enter)
    return id


def no_seal(monkeypatch: pytest.MonkeyPatch) -> Callable[[Publisher], object]:
    """Nothing is sealed, subscribers do not look, and the publisher uses the memory for something else."""

    def write(publisher: Publisher) -> None:
        held = publisher._versions.channels.held[max(publisher._versions.channels.held)].image
        end = torch.full((257,), -7.0).numpy().tobytes()
        os.pwrite(held.memory.fileno(), end, held.nbytes - len(end))

    monkeypatch.setattr(images, "_seal", lambda descriptor: None)
    monkeypatch.setattr(images, "_seals_of", lambda descriptor: ~0)
    return write


def a_late_stamp(monkeypatch: pytest.MonkeyPatch) -> Callable[[Publisher], object]:
    """The stamp of a reading is what is served when it is asked for."""
    monkeypatch.setattr(ServedReading, "stamp", property(lambda reading: reading._live.stamp))
    return id


@pytest.mark.parametrize("fault", [no_pin, no_seal, a_late_stamp])
async def test_it_finds(
    fault: Callable[[pytest.MonkeyPatch], Callable[[Publisher], object]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    account = await Torture(8).run(tmp_path / "home", 500, 0, fault(monkeypatch))
    assert account.wrong != []
    print(account.wrong[:3])
