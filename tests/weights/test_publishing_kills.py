"""Publishers and subscribers as processes that are killed and stopped, and children that live on after a fork."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from _programs import PATIENCE_S, Program, alive, lock, memory_of, parts, programs, stamp_above, until
from _published import CHILDREN, LARGE, state_of, value_in

import sidestream
from sidestream.errors import PublisherRunningError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is handed over on Linux only")

# --- kills and stops ---


@pytest.mark.parametrize(
    ("rounds", "seed"), [(12, 0), *(pytest.param(80, seed, marks=pytest.mark.long) for seed in range(1, 5))]
)
async def test_kills_and_stops_at_many_moments(rounds: int, seed: int, tmp_path: Path) -> None:
    chance, home = random.Random(seed), tmp_path / "home"
    with programs() as start:
        publisher, subscribers = start("publisher", home), [start("subscriber", home) for _ in range(2)]
        epoch, ended = 1, list[Program]()
        for one in subscribers:
            await one.until(stamp_above(0))
        actions = ["kill the publisher", "stop the publisher", "kill a subscriber", "stop a subscriber"]
        for turn in range(rounds):
            at = chance.randrange(2)
            await asyncio.sleep(chance.random() * 0.05)  # another moment each time
            match actions[turn % 4]:
                case "kill the publisher":
                    publisher.kill()
                    publisher, epoch = start("publisher", home), epoch + 1
                case "kill a subscriber":
                    subscribers[at].kill()
                    ended.append(subscribers[at])
                    subscribers[at] = start("subscriber", home)
                case action:
                    stopped = publisher if action == "stop the publisher" else subscribers[at]
                    stopped.signal(signal.SIGSTOP)
                    await asyncio.sleep(chance.random() * 0.1)
                    stopped.signal(signal.SIGCONT)
            newest = parts(await publisher.until(stamp_above(epoch - 1)))
            for one in subscribers:  # all of them serve what came after it
                await one.until(stamp_above(*newest))
        publisher.kill()
        # What they have left, and then nothing: the socket of a dead publisher is in nobody's way.
        async with sidestream.Publisher(home) as last:
            assert last.epoch == epoch + 1
            await last.publish(state_of(last.epoch, 1), version=1)
            for one in subscribers:
                await one.until(f"e{last.epoch}.v1".__eq__)
                await until(lambda one=one: len(memory_of(one.pid)) == 2)  # an image and its checksums
        assert [line for one in (*subscribers, *ended) for line in one.wrong] == []


async def test_a_publisher_that_stands_still_holds_up_no_answer_and_no_follower(tmp_path: Path) -> None:
    home = tmp_path / "home"
    live = sidestream.Live(state_of(0, 0))
    with programs() as start:
        publisher = start("publisher", home)
        async with sidestream.Subscriber(f"unix:{home}") as weights:
            image = await anext(weights)
            publisher.signal(signal.SIGSTOP)
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(600):  # twice as many as a socket has room for
                    await image.applied()
                await image.refused("the last one")
            async with weights.following(live) as follower:
                await follower.ready(timeout_s=PATIENCE_S)
                stamp = live.stamp
                assert stamp is not None
                with live.reading() as reading:
                    assert {float(one[0]) for one in reading.tensors.values()} == {value_in(stamp)}
                publisher.signal(signal.SIGCONT)
                await until(lambda: live.stamp is not None and stamp_above(*parts(stamp))(live.stamp))


async def test_a_subscriber_is_left_although_that_is_cancelled_while_answers_wait(tmp_path: Path) -> None:
    of_others = memory_of(os.getpid())
    with programs() as start:
        publisher = start("publisher", tmp_path / "home")
        weights = sidestream.Subscriber(f"unix:{tmp_path / 'home'}")
        await weights.__aenter__()
        image = await anext(weights)
        publisher.signal(signal.SIGSTOP)
        for _ in range(600):  # twice as many as a socket has room for
            await image.applied()
        del image
        leaving = asyncio.create_task(weights.__aexit__(None, None, None))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await until(lambda: memory_of(os.getpid()) <= of_others)


# --- memory ---


async def test_a_subscriber_that_stands_still_holds_two_versions_and_one_that_dies_none(tmp_path: Path) -> None:
    home, inodes = tmp_path / "home", dict[str, str]()
    with programs() as start:
        async with sidestream.Publisher(home, keep=1) as publisher:

            async def publish(number: int) -> sidestream.PendingVersion:
                pending = publisher.publish(state_of(publisher.epoch, number), version=number)
                stamp = (await pending).stamp
                inodes[lock(publisher._versions.channels.held[number].image)] = stamp
                return pending

            one = start("subscriber", home)
            for number in range(1, 6):
                await (await publish(number)).applied(count=1, timeout_s=PATIENCE_S)
            await until(lambda: alive(inodes) == {"e1.v5"})
            one.signal(signal.SIGSTOP)
            for number in range(6, 20):
                await publish(number)
            await until(
                lambda: alive(inodes) == {"e1.v5", "e1.v6", "e1.v19"}
            )  # served, on its way, and the publisher's
            one.signal(signal.SIGCONT)
            await one.until("e1.v19".__eq__)
            await until(lambda: alive(inodes) == {"e1.v19"})
            one.signal(signal.SIGSTOP)
            for number in range(20, 24):
                await publish(number)
            await until(lambda: alive(inodes) == {"e1.v19", "e1.v20", "e1.v23"})
            one.kill()
            await until(lambda: alive(inodes) == {"e1.v23"})
            await until(lambda: not publisher.health().subscribers)
            assert one.wrong == []
        await until(lambda: not alive(inodes))


# --- forks ---


async def test_children_that_live_on_keep_nothing(tmp_path: Path) -> None:
    home, each = tmp_path / "home", LARGE // len(state_of(0, 0))
    live, children, stamp = sidestream.Live(state_of(0, 0, each)), list[int](), ""
    with programs() as start:
        forker = start("forker", home)
        async with sidestream.Subscriber(f"unix:{home}") as weights, weights.following(live) as follower:
            try:
                while len(children) < CHILDREN or not stamp:
                    line = await forker.until(lambda line: line.startswith(("e", "child")))
                    if line.startswith("child"):
                        children.append(int(line.split()[1]))
                    else:
                        stamp = line
                await forker.until(stamp_above(*parts(stamp)))  # seals still succeed
                await until(lambda: live.stamp is not None and stamp_above(*parts(stamp))(live.stamp))
                with pytest.raises(PublisherRunningError):
                    async with sidestream.Publisher(home):
                        pass
                forker.kill()
                await until(lambda: "has no publisher" in str(follower.health().problem))  # the connection has ended
                assert [memory_of(pid) for pid in children] == [set()] * CHILDREN
                async with sidestream.Publisher(home) as publisher:  # the lock is free
                    state = state_of(publisher.epoch, 1, each)
                    await publisher.publish(state, version=1).applied(count=1, timeout_s=PATIENCE_S)
                    with live.reading() as reading:
                        assert reading.stamp == "e2.v1"
                        assert {float(one[0]) for one in reading.tensors.values()} == {value_in("e2.v1")}
            finally:
                for pid in children:
                    os.kill(pid, signal.SIGKILL)


def test_the_programs_tell_versions_apart() -> None:
    assert {value_in(f"e{epoch}.v{number}") for epoch in (1, 2) for number in (1, 2)} == {20001, 20002, 40001, 40002}
