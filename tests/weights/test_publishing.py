"""Publishing in one process: what subscribers get, what is refused, channels, budgets, reports, seals."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import gc
import mmap
import os
import re
import socket
import stat
import sys
import threading
import weakref
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from _modules import Tell, Wrapped, version
from held import HeldStager
from leases import all_returned
from safetensors.torch import load_file
from torch import nn

import sidestream
from sidestream import HF, AsyncStager, Checkpointer, Live, Publisher, Subscriber, strip_prefix
from sidestream._engine.calls import in_operation
from sidestream._layout import save_layout
from sidestream._runtime import memory_maps
from sidestream._runtime.threads import Stop
from sidestream._weights import images
from sidestream._weights.channels import Channels, HeldVersion
from sidestream._weights.home import connect
from sidestream._weights.images import ImageMemory, SealedImage, VersionLayout
from sidestream._weights.links import LinkMessage, LinkMessageKind, encoded
from sidestream.errors import (
    ArenaExhaustedError,
    CheckpointExistsError,
    ClosedError,
    CorruptCheckpointError,
    DeadlineExceededError,
    InvalidOptionError,
    MissingKeysError,
    PublisherRunningError,
    SkippedError,
    SnapshotLostError,
    StaleVersionError,
    StateMismatchError,
    StorageError,
    VersionNotFoundError,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is handed over on Linux only")
SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")


def state_of(seed: int = 0) -> dict[str, Any]:
    """Tensors of many dtypes and of sizes that leave what follows unaligned, scalar, empty, tied and strided."""
    torch.manual_seed(seed)
    tied = torch.randn(33, 5)
    float8 = {"eight": torch.randn(7).to(torch.float8_e4m3fn)} if hasattr(torch, "float8_e4m3fn") else {}
    model = {
        "wide": torch.randn(64, 129),
        "half": torch.randn(1001).half(),
        "brain": torch.randn(31, 3).bfloat16(),
        "odd": torch.randint(0, 255, (777,), dtype=torch.uint8),
        "flag": torch.tensor(True),
        "step": torch.tensor(seed),
        "none": torch.empty(0, 3),
        "double": torch.randn(3, 5, 7, dtype=torch.float64),
        "complex": torch.randn(5, dtype=torch.complex64),
        "across": torch.randn(40, 30).t(),
        "tied": tied,
        "also": tied,
        **float8,
    }
    return {"model": model, "optimizer": {"moment": torch.randn(100)}, "step": seed}


def same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        bytes_of = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found[name], tensor)]
        assert torch.equal(*bytes_of), name


def bytes_in(image: sidestream.VersionImage) -> bytes:
    return bytes(memoryview(image._image._map))


def memfds(pid: int | str = "self") -> list[str]:
    found = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.append(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:  # that of the listing
            continue
    return [one for one in found if one.startswith("/memfd:sidestream version")]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


# --- from a state to readings ---


async def test_a_version_is_served_with_its_stamp(home: Path) -> None:
    live = Live(Tell())
    async with (
        Publisher(home) as publisher,
        Subscriber(publisher.url) as weights,
        weights.following(live) as follower,
    ):
        for number in (1, 2, 5):
            state = version(number)
            pending = publisher.publish(state, version=number, metadata={"loss": number / 2})
            await pending.staged
            for one in state.values():
                one.fill_(99)  # the version has what the state had
            published = await pending.published
            assert (published.stamp, published.epoch, published.version) == (f"e1.v{number}", 1, number)
            report = await pending.applied(count=1, timeout_s=60)
            assert (report.stamp, len(report.applied), report.refused) == (f"e1.v{number}", 1, {})
            async with live.reading(min_version=number) as reading:
                assert (reading.stamp, reading.version) == (f"e1.v{number}", number)
                assert reading.module() == {float(number)}
            with pytest.raises(StaleVersionError), live.reading(min_version=number + 1):
                pass
        await follower.ready()
        health = follower.health()
        assert (health.stamp, health.ok) == ("e1.v5", True)
        # The same subscriber with another connection is no second one.
        assert weights._link is not None
        weights._link.end()
        await until(lambda: weights._received == 4)
        await until(lambda: "sent e1.v5; applied e1.v5" in publisher.health().subscribers.values())
        with pytest.raises(DeadlineExceededError, match="1 of 2 subscribers"):
            await pending.applied(count=2, timeout_s=0.01)
        assert publisher.health().channels == {"stable": "e1.v5"}
        assert list(publisher.health().subscribers.values()) == ["sent e1.v5; applied e1.v5"]
    assert live.stamp == "e1.v5"  # what is served stays


async def test_every_newest_version_is_yielded_once_and_can_be_answered(home: Path) -> None:
    async with Publisher(home, keep=3) as publisher, Subscriber(publisher.url, name="one") as weights:
        first = publisher.publish(state_of(1)["model"], version=1, metadata={"a": [1, None, "é"]})
        await first
        image = await anext(weights)
        assert (image.stamp, image.version, image.epoch, image.save_id) == ("e1.v1", 1, 1, "")
        assert image.metadata == {"a": [1, None, "é"]}
        same(image.tensors, state_of(1)["model"])
        assert image.tensors["tied"] is image.tensors["also"]
        await image.verify()
        await image.refused("too\nold")
        report = await first.applied(count=1, timeout_s=60)
        assert (report.refused, report.applied) == ({"one": "too\\nold"}, ())
        await image.applied()
        await until(lambda: list(publisher.health().subscribers.values()) == ["sent e1.v1; applied e1.v1"])
        # A new connection sends the version again, which is no news.
        assert weights._link is not None
        weights._link.end()
        await until(lambda: weights._received == 2)
        second = publisher.publish(state_of(2)["model"], version=2)
        assert (await anext(weights)).stamp == "e1.v2"
        assert (
            len((await first.applied(count=1, timeout_s=60)).applied) == 1
        )  # one subscriber, whatever its connections
        await second


async def test_a_slow_subscriber_skips_to_the_newest(home: Path) -> None:
    async with Publisher(home, keep=9) as publisher, Subscriber(publisher.url, name="slow") as weights:
        first = publisher.publish(version(1), version=1)
        held = await first
        image = await anext(weights)
        others = []
        for number in range(2, 6):
            others.append(publisher.publish(version(number), version=number))
            await others[-1]
        await until(lambda: weights._announced is not None and weights._announced.stamp == "e1.v5")
        newest = await anext(weights)
        assert (image.stamp, newest.stamp, held.stamp) == ("e1.v1", "e1.v5", "e1.v1")
        await newest.applied()
        for one in [first, *others[:-1]]:
            report = await one.applied(count=1, timeout_s=60)
            assert (report.skipped, report.applied) == (("slow",), ())
        assert (await others[-1].applied(count=1, timeout_s=60)).applied == ("slow",)


async def test_only_subscribers_of_its_channel_answer_to_a_version(home: Path) -> None:
    async with (
        Publisher(home, keep=9) as publisher,
        Subscriber(publisher.url, name="stable") as stable,
        Subscriber(publisher.url, channel="canary", name="canary") as canary,
    ):
        for_canary = publisher.publish(version(1), version=1, channel="canary")
        for_nobody = publisher.publish(version(2), version=2, channel=None)
        for_stable = publisher.publish(version(3), version=3)
        await for_nobody
        await for_stable
        await (await anext(stable)).applied()
        assert (await for_stable.applied(count=1, timeout_s=60)).applied == ("stable",)
        for one in (for_canary, for_nobody):
            with pytest.raises(DeadlineExceededError, match=r"0 of 1 subscribers have answered within 0\.01 s"):
                await one.applied(count=1, timeout_s=0.01)
        await (await anext(canary)).applied()
        assert (await for_canary.applied(count=1, timeout_s=60)).applied == ("canary",)


async def test_subscribers_with_one_name_are_told_apart(home: Path) -> None:
    async with (
        Publisher(home) as publisher,
        Subscriber(publisher.url, name="server") as one,
        Subscriber(publisher.url, name="server") as other,
    ):
        pending = publisher.publish(version(1), version=1)
        await pending
        await (await anext(one)).refused("too old")
        await (image := await anext(other)).refused("too new")
        report = await pending.applied(count=2, timeout_s=60)
        assert sorted(report.refused) == ["server", "server (2)"]
        assert sorted(report.refused.values()) == ["too new", "too old"]
        assert sorted(publisher.health().subscribers) == ["server", "server (2)"]
        # The same one with another connection is no third one.
        assert other._link is not None
        other._link.end()
        await until(lambda: other._received == 2)
        assert len(publisher.health().subscribers) == 2
        await image.applied()
        await until(lambda: "sent e1.v1; applied e1.v1" in publisher.health().subscribers.values())
        report = await pending.applied(count=2, timeout_s=60)
        assert [len(report.applied), list(report.refused.values())] == [1, ["too old"]]


async def test_an_answer_about_the_version_of_an_earlier_publisher_decides_nothing(home: Path) -> None:
    async with Subscriber(f"unix:{home}", name="slow") as weights:
        async with Publisher(home) as publisher:
            await publisher.publish(version(5), version=5)
            old = await anext(weights)
        async with Publisher(home) as publisher:
            pending = publisher.publish(version(1), version=1)
            await pending
            image = await anext(weights)
            await old.applied()  # it serves it only now
            await until(lambda: "applied e1.v5" in publisher.health().subscribers["slow"])
            with pytest.raises(DeadlineExceededError, match="0 of 1 subscribers"):
                await pending.applied(count=1, timeout_s=0.01)
            await image.applied()
            assert (await pending.applied(count=1, timeout_s=60)).applied == ("slow",)


async def test_a_report_is_waited_for_until_the_publisher_ends(home: Path) -> None:
    async with Publisher(home) as publisher:
        pending = publisher.publish(version(1), version=1)
        waiting = asyncio.ensure_future(pending.applied(count=1))
        await pending
        with pytest.raises(InvalidOptionError):
            await pending.applied(count=0)
    with pytest.raises(ClosedError):
        await waiting


async def test_what_does_not_fit_is_refused_with_the_reason(home: Path) -> None:
    live = Live(Tell())
    async with (
        Publisher(home) as publisher,
        Subscriber(publisher.url, name="one") as weights,
        weights.following(live) as follower,
    ):
        pending = publisher.publish({"t0": torch.zeros(3), "other": torch.zeros(1)}, version=1)
        report = await pending.applied(count=1, timeout_s=60)
        assert "t0: shape" in report.refused["one"] or "it has shape" in report.refused["one"]
        assert "t1: missing" in report.refused["one"]
        with pytest.raises(StateMismatchError):
            await follower.ready()
        assert list(follower.health().passed_over) == ["e1.v1"]
    assert live.stamp is None


async def test_a_refused_version_is_asked_about_once_and_rollback_returns(home: Path) -> None:
    live, asked = Live(Tell()), []

    async def accept(candidate: sidestream.Candidate) -> bool:
        asked.append(candidate.stamp)
        return bool(candidate.metadata.get("good"))

    async with (
        Publisher(home, keep=3) as publisher,
        Subscriber(publisher.url, name="one") as weights,
        weights.following(live, accept=accept) as follower,
    ):
        good = publisher.publish(version(1), version=1, metadata={"good": True})
        assert (await good.applied(count=1, timeout_s=60)).applied == ("one",)
        bad = publisher.publish(version(2), version=2)
        assert "only True accepts" in (await bad.applied(count=1, timeout_s=60)).refused["one"]
        assert live.stamp == "e1.v1"
        for _ in range(3):
            assert (await publisher.rollback("stable")).stamp == "e1.v1"
            await until(lambda: publisher.health().subscribers["one"].startswith("sent e1.v1; applied e1.v1"))
            await publisher.promote("stable", 2)
            await until(lambda: publisher.health().subscribers["one"].startswith("sent e1.v2"))
            assert list(follower.health().passed_over) == ["e1.v2"]
        last = publisher.publish(version(3), version=3, metadata={"good": True})
        assert (await last.applied(count=1, timeout_s=60)).applied == ("one",)
        assert follower.health().ok
        assert asked == ["e1.v1", "e1.v2", "e1.v3"]
        with pytest.raises(InvalidOptionError, match="roll it back"):
            follower.accept_lower()


# --- channels ---


async def test_rollback_and_promote_lower_a_channel_and_the_next_version_raises_it(home: Path) -> None:
    live = Live(Tell())
    async with Publisher(home, keep=3) as publisher, Subscriber(publisher.url) as weights:
        with pytest.raises(VersionNotFoundError):
            await publisher.rollback("stable")
        with pytest.raises(VersionNotFoundError, match="none are"):
            await publisher.promote("stable", 1)
        async with weights.following(live):
            for number in (1, 2, 3):
                await publisher.publish(version(number), version=number).applied(count=1, timeout_s=60)
            for lowered in (2, 1):
                assert (await publisher.rollback("stable")).version == lowered
                await until(lambda lowered=lowered: live.stamp == f"e1.v{lowered}")
                with live.reading() as reading:
                    assert reading.module() == {float(lowered)}
            with pytest.raises(VersionNotFoundError, match="nothing that 'stable' pointed at before"):
                await publisher.rollback("stable")
            await publisher.promote("stable", 3)
            await until(lambda: live.stamp == "e1.v3")
            await publisher.promote("stable", 2)
            await publisher.publish(version(4), version=4)
            await until(lambda: live.stamp == "e1.v4")
            with pytest.raises(VersionNotFoundError, match=r"version 1 is not held: \[2, 3, 4\] are"):
                await publisher.promote("stable", 1)


async def test_what_channels_point_at_is_held_and_the_rest_is_dropped(home: Path) -> None:
    async with Publisher(home, keep=1) as publisher:
        await publisher.publish(version(1), version=1, channel="old")
        for number in (2, 3, 4):
            await publisher.publish(version(number), version=number)
        assert list(publisher.health().versions) == ["e1.v1", "e1.v4"]
        assert publisher.health().channels == {"old": "e1.v1", "stable": "e1.v4"}
        with pytest.raises(VersionNotFoundError):  # what it pointed at before is not held
            await publisher.rollback("stable")
        await publisher.promote("old", 4)
        assert list(publisher.health().versions) == ["e1.v4"]
        publisher._versions.memory.close()  # what is touched ahead
        await until(lambda: len(memfds()) == 2)


def test_a_rollback_forgets_only_what_came_after() -> None:
    channels = Channels(9)
    for number in (1, 2, 3):
        channels.publish(HeldVersion(1, number, fake_image(), "", {}), None)
    for number in (1, 2, 1, 3):
        channels.promote("a", number)
    assert [channels.roll_back("a").version for _ in range(3)] == [1, 2, 1]
    assert channels.revision == 7


def fake_image() -> SealedImage:
    layout = VersionLayout.of([], {})
    memory = ImageMemory(layout.nbytes, lambda: None)
    return memory.seal(memory.fill(layout, [], Stop()))


# --- refusals ---


async def test_what_is_wrong_with_the_call_is_raised_by_it_and_takes_no_number(home: Path) -> None:
    publisher = Publisher(home)
    with pytest.raises(ClosedError):
        publisher.publish(version(1), version=1)
    with pytest.raises(ClosedError):
        publisher.health()
    async with publisher:
        for wrong in (-1, 1.5, True, "1", 1 << 63):
            with pytest.raises(InvalidOptionError, match="has to be a number"):
                publisher.publish(version(1), version=wrong)  # type: ignore[arg-type]
        for metadata in ({"a": "x" * (33 << 10)}, {"a": object()}, {"a": {1, 2}}, 5):
            with pytest.raises(InvalidOptionError, match="metadata of a version"):
                publisher.publish(version(1), version=1, metadata=metadata)  # type: ignore[arg-type]
        for channel in ("", 5, "x" * 300):
            with pytest.raises(InvalidOptionError, match="channel"):
                publisher.publish(version(1), version=1, channel=channel)  # type: ignore[arg-type]
        with pytest.raises(InvalidOptionError):
            publisher.publish([torch.zeros(1)], version=1)  # type: ignore[arg-type]
        await publisher.publish(version(1), version=1, metadata={"a": "x" * (31 << 10)})
        for number in (0, 1):
            with pytest.raises(InvalidOptionError, match=f"version {number} is not higher than 1, the last one of ep"):
                publisher.publish(version(1), version=number)
        with pytest.raises(ClosedError, match="entered before"):
            await publisher.__aenter__()
    with pytest.raises(ClosedError):
        publisher.publish(version(2), version=2)
    for wrong in ({"serve": "tcp:"}, {"keep": 0}, {"budget_bytes": -1}, {"dtype": "float"}, {"timeout_s": 0}):
        with pytest.raises(InvalidOptionError):
            Publisher(home, **wrong)
    for url in (str(home), "unix:", 5):
        with pytest.raises(InvalidOptionError):
            Subscriber(url)  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="channel"):
        Subscriber(f"unix:{home}", channel="x" * 100_000)
    with pytest.raises(InvalidOptionError, match="name"):
        Subscriber(f"unix:{home}", name=5)  # type: ignore[arg-type]
    with pytest.raises(ClosedError, match="enter the subscriber first"):
        await anext(Subscriber(f"unix:{home}"))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"more": torch.zeros(1)}, "more: new"),
        ({"t0": None}, "t0: missing"),
        ({"t0": torch.zeros(3)}, r"t0: \('float32', \(3,\)\), and \('float32', \(257,\)\) before"),
        ({"t0": torch.zeros(257, dtype=torch.int8)}, "t0: "),
    ],
)
async def test_other_tensors_are_refused_before_anything_is_staged(home: Path, changed: Any, line: str) -> None:
    async with HeldStager() as stager, Publisher(home, stager=stager) as publisher:
        stager.holds = False
        await publisher.publish(version(1), version=1)
        other = {name: one for name, one in (version(2) | changed).items() if one is not None}
        pending = publisher.publish(other, version=2)
        with pytest.raises(StateMismatchError, match=line):
            await pending
        with pytest.raises(StateMismatchError):
            await pending.staged
        await all_returned(stager)
        await publisher.publish(version(2), version=2)  # the number is free again


async def test_a_version_that_fails_decides_nothing_for_those_after_it(home: Path) -> None:
    async with Publisher(home, budget_bytes=1 << 20) as publisher:
        with pytest.raises(ArenaExhaustedError):
            await publisher.publish({"other": torch.zeros(1 << 20)}, version=1)
        with pytest.raises(MissingKeysError):
            await Publisher.publish(reselect(publisher, "model.*"), version(1), version=1)
        reselect(publisher, None)
        assert (await publisher.publish(version(1), version=1)).stamp == "e1.v1"


def reselect(publisher: Publisher, select: str | None) -> Publisher:
    publisher._versions.select = select
    publisher._versions._laid = None
    return publisher


async def test_a_later_version_of_the_channel_that_is_complete_first_stays(home: Path) -> None:
    async with HeldStager() as stager, Publisher(home, keep=9, stager=stager) as publisher:
        first, for_canary, for_nobody, last = (
            publisher.publish(version(number), version=number, channel=channel)
            for number, channel in enumerate(("stable", "canary", None, "stable"))
        )
        stager.let_go(3)
        await last
        stager.let_go()
        with pytest.raises(SkippedError, match="version 3 was complete before it"):
            await first
        await for_canary
        await for_nobody
        assert publisher.health().channels == {"stable": "e1.v3", "canary": "e1.v1"}
        assert set(publisher.health().versions) == {"e1.v1", "e1.v2", "e1.v3"}
        with pytest.raises(InvalidOptionError, match="not higher than 3"):
            publisher.publish(version(3), version=3)


async def test_a_version_without_a_channel_that_later_ones_have_displaced(home: Path) -> None:
    async with HeldStager() as stager, Publisher(home, stager=stager, keep=1) as publisher:
        canary = publisher.publish(version(1), version=1, channel="canary")
        unseen = publisher.publish(version(2), version=2, channel=None)
        stable = publisher.publish(version(3), version=3)
        stager.let_go(2)
        await stable
        stager.let_go()
        assert (await canary).stamp == "e1.v1"
        with pytest.raises(SkippedError, match="1 later versions were complete before it"):
            await unseen
        assert set(publisher.health().versions) == {"e1.v1", "e1.v3"}


async def test_a_version_is_cancelled_or_ends_with_its_publisher(home: Path) -> None:
    async with HeldStager() as stager:
        async with Publisher(home, stager=stager) as publisher:
            pending = publisher.publish(version(1), version=1)
            assert pending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pending
            await pending.staged  # nothing reads the state any more
            await all_returned(stager)
            late = publisher.publish(version(1), version=1)
        stager.let_go()
        with pytest.raises(ClosedError):
            await late
        await late.staged
        assert memfds() == []


async def test_leaving_it_ends_a_version_that_is_staged(home: Path) -> None:
    async with Publisher(home) as publisher:
        pending = publisher.publish({"a": torch.ones(8 << 20)}, version=1)
    with suppress(ClosedError):
        await pending
    gc.collect()
    await until(lambda: memfds() == [])


# --- the same bytes as an export ---


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, {"wide": torch.float16}], ids=str)
@pytest.mark.parametrize("window", [4096, 1 << 20])
async def test_an_image_has_the_bytes_of_an_export(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, dtype: Any
) -> None:
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (window, window))
    taken: dict[str, Any] = {"select": "model.*", "names": strip_prefix("model."), "dtype": dtype}
    info = await sidestream.save(state_of(3), tmp_path / "a", export=HF(tmp_path / "hf", **taken))
    assert not isinstance(info.exports[0], BaseException)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    async with Publisher(home, **taken) as publisher, Subscriber(publisher.url) as weights:
        await publisher.publish(state_of(3), version=1)
        image = await anext(weights)
        assert bytes_in(image) == file.read_bytes()
        await image.verify()
        same({name: one for name, one in image.tensors.items() if name != "also"}, load_file(file))
        saved = await sidestream.save(state_of(3), tmp_path / "b", publish=publisher.version(2))
        assert not isinstance(saved.published, BaseException)
        image = await anext(weights)
        assert (image.stamp, image.save_id) == ("e1.v2", saved.save_id)
        assert bytes_in(image) == file.read_bytes()
        await image.verify()


async def test_names_leave_out_and_select_takes(home: Path) -> None:
    def named(name: str) -> str | None:
        return None if name.endswith("0") else f"x.{name}"

    async with Publisher(home, select=["t0", "t1"], names=named) as publisher, Subscriber(publisher.url) as weights:
        await publisher.publish(version(1), version=1)
        assert list((await anext(weights)).tensors) == ["x.t1"]


async def test_names_with_a_prefix_are_told_of_the_publisher(home: Path) -> None:
    live = Live(Tell())
    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights, weights.following(live) as follower:
        await publisher.publish({"model": version(1)}, version=1)
        said = r"pass names=sidestream\.strip_prefix\('model\.'\) to the Publisher"
        with pytest.raises(sidestream.errors.MissingKeysError, match=said):
            await follower.ready(timeout_s=60)


async def test_bf16_is_published_and_fp32_served(home: Path) -> None:
    live = Live(Tell())
    async with (
        Publisher(home, dtype=torch.bfloat16) as publisher,
        Subscriber(publisher.url) as weights,
        weights.following(live),
    ):
        await publisher.publish(version(3), version=3).applied(count=1, timeout_s=60)
        with live.reading() as reading:
            assert reading.module() == {3.0}
            assert {one.dtype for one in reading.tensors.values()} == {torch.float32}


async def test_a_module_that_is_not_tied_gets_tied_weights(home: Path) -> None:
    state = {"0.weight": (tied := torch.randn(3, 3)), "1.weight": tied}
    live = Live(nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)))
    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights, weights.following(live):
        report = await publisher.publish(state, version=1).applied(count=1, timeout_s=60)
        assert report.refused == {}
        with live.reading() as reading:
            same(reading.tensors, state)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
async def test_a_state_that_is_larger_than_the_memory_of_the_stager(
    home: Path, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (1 << 20, 1 << 20))
    state = {f"t{number}": torch.randn(1 << 18) for number in range(24)}
    async with (
        AsyncStager(budget_bytes=4 << 20, mode=mode) as stager,
        Publisher(home, stager=stager) as publisher,
        Subscriber(publisher.url) as weights,
    ):
        pending = publisher.publish(state, version=1)
        await pending.staged
        await pending
        same((await anext(weights)).tensors, state)
        await all_returned(stager)


# --- memory ---


async def test_versions_and_what_is_touched_ahead_share_the_budget(home: Path) -> None:
    state = {"a": torch.zeros(1 << 18)}
    async with Publisher(home, keep=2, budget_bytes=(7 << 20) // 2) as publisher:  # three images, and some bytes
        for number in range(1, 6):
            await publisher.publish(state, version=number)
            health = publisher.health()
            assert len(health.versions) == min(number, 2)
            assert (health.spare_bytes > 0) == (sum(health.versions.values()) < (5 << 20) // 2)
            assert sum(health.versions.values()) + health.spare_bytes <= (7 << 20) // 2
        await publisher.promote("other", 4)
        await publisher.publish(state, version=6)  # 4, 5 and 6 are held, and there is no room to touch ahead
        assert publisher.health().spare_bytes == 0
        with pytest.raises(ArenaExhaustedError, match=r"does not fit: \d+ of budget_bytes=3670016 are in use by"):
            await publisher.publish(state, version=7)
        await publisher.promote("other", 6)
        await publisher.publish(state, version=7)
        assert publisher._versions.memory.used_bytes == publisher.health().spare_bytes + sum(
            publisher.health().versions.values()
        )
    await until(lambda: publisher._versions.memory.used_bytes == 0)


async def test_the_budget_has_room_again_after_a_version_that_was_cancelled_when_its_image_was_complete(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, seal = {"a": torch.zeros(1 << 18)}, ImageMemory.seal
    reached, go_on = threading.Event(), threading.Event()

    def sealed(memory: ImageMemory, sums: Any) -> SealedImage:
        image = seal(memory, sums)
        reached.set()
        assert go_on.wait(60)
        return image

    async with Publisher(home, budget_bytes=3 << 20) as publisher:
        monkeypatch.setattr(ImageMemory, "seal", sealed)
        for number in range(1, 5):
            pending = publisher.publish(state, version=number)
            assert await asyncio.to_thread(reached.wait, 60)
            pending.cancel()
            await in_operation(nothing, "the cancel has arrived")
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await pending
            await until(lambda: gc.collect() >= 0 and publisher._versions.memory.used_bytes == 0)
            reached.clear()
            go_on.clear()


async def nothing() -> None:
    """For the operation loop."""


def test_memory_that_is_unmapped_is_left_alone() -> None:
    """Something else may lie at its addresses, when a version is discarded after its map is gone."""
    nbytes, anonymous = 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    for _ in range(20):  # another thread may be quicker
        memory = ImageMemory(nbytes, lambda: None)
        address = memory.address
        memory.seal(array("I"))
        there = memory_maps._mmap()(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, anonymous, -1, 0)
        if there == address:
            break
    assert there == address
    ctypes.memset(address, 1, nbytes)
    memory.discard()
    assert ctypes.string_at(address, nbytes) == b"\1" * nbytes
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


async def test_a_version_that_finds_no_descriptor_fails_by_itself(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, fails = os.memfd_create, True

    def no_descriptor(name: str, flags: int) -> int:
        if fails and name == "sidestream version sums":
            raise OSError(errno.EMFILE, "Too many open files")
        return make(name, flags)

    monkeypatch.setattr(os, "memfd_create", no_descriptor)
    async with Publisher(home) as publisher:
        with pytest.raises(ArenaExhaustedError, match="Too many open files"):
            await publisher.publish(version(1), version=1)
        assert publisher._versions.memory.used_bytes == 0
        fails = False
        await publisher.publish(version(1), version=1)


async def test_a_subscriber_keeps_what_it_uses_and_nothing_else(home: Path) -> None:
    async with Publisher(home, keep=1) as publisher, Subscriber(publisher.url) as weights:
        live = Live(Tell())
        async with weights.following(live):
            for number in range(1, 10):
                await publisher.publish(version(number), version=number).applied(count=1, timeout_s=60)
            publisher._versions.memory.close()

            def mapped() -> int:
                gc.collect()
                return len(
                    [line for line in Path("/proc/self/maps").read_text().splitlines() if "sidestream version" in line]
                )

            await until(lambda: mapped() == 1)
            await until(lambda: len(memfds()) == 4)  # of the publisher, and of the subscriber


# --- sealed ---


def attempts(number: int, nbytes: int) -> list[Callable[[], object]]:
    return [
        lambda: os.pwrite(number, b"x", 0),
        lambda: os.pwrite(number, b"x", nbytes),
        lambda: mmap.mmap(number, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.ftruncate(number, 0),
        lambda: os.ftruncate(number, nbytes + 4096),
        lambda: fcntl.fcntl(number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL),
        lambda: write_anew(f"/proc/self/fd/{number}"),
    ]


def write_anew(path: str) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(b"x")


async def test_a_follower_that_has_ended_keeps_no_memory_until_a_collection(home: Path) -> None:
    async def follows_for_a_while(weights: Subscriber, turns: int) -> weakref.ref[Live]:
        live = Live(version(0))
        async with weights.following(live) as follower:
            await follower.ready(timeout_s=60)
            for _ in range(turns):  # its end comes at another moment each time
                await asyncio.sleep(0)
        return weakref.ref(live)

    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights:
        await publisher.publish(version(1), version=1)
        gc.disable()
        try:
            for number in range(100):
                live = await follows_for_a_while(weights, number % 10)
                await until(lambda live=live: live() is None)
        finally:
            gc.enable()


async def test_a_follower_that_ends_while_it_serves_keeps_no_memory_until_a_collection(home: Path) -> None:
    async def ends(publisher: Publisher, weights: Subscriber, number: int, cancelled: bool) -> weakref.ref[Live]:
        live = Live(version(0))
        follower = weights.following(live)
        await follower.__aenter__()
        await follower.ready(timeout_s=60)
        pending = publisher.publish(version(number), version=number)
        while live.stamp != f"e1.v{number}":  # at once: the follower still answers then
            await asyncio.sleep(0)
        for _ in range(number % 10):  # its end comes at another moment each time
            await asyncio.sleep(0)
        leaving = asyncio.create_task(follower.__aexit__(None, None, None))
        if cancelled:
            await asyncio.sleep(0)
            leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving
        await pending
        return weakref.ref(live)

    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights:
        await publisher.publish(version(1), version=1)
        gc.disable()
        try:
            for number in range(2, 42):
                live = await ends(publisher, weights, number, cancelled=number % 3 == 0)
                await until(lambda live=live: live() is None)
        finally:
            gc.enable()


async def test_nobody_can_change_a_version(home: Path) -> None:
    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights:
        await publisher.publish(state_of(1)["model"], version=1)
        image = await anext(weights)
        announced = weights._announced
        assert announced is not None
        held = publisher._versions.channels.held[1].image
        for descriptor in (announced.memory, announced.sums, held.memory, held.sums):
            number = descriptor.fileno()
            for attempt in attempts(number, os.fstat(number).st_size):
                with pytest.raises(PermissionError):
                    attempt()
        await image.verify()


async def test_what_a_subscriber_writes_into_a_tensor_stays_with_it(home: Path) -> None:
    async with Publisher(home) as publisher, Subscriber(publisher.url) as one, Subscriber(publisher.url) as other:
        await publisher.publish(version(1), version=1)
        mine, theirs = await anext(one), await anext(other)
        for tensor in mine.tensors.values():
            tensor.fill_(7)
        same(theirs.tensors, version(1))
        await theirs.verify()
        with pytest.raises(CorruptCheckpointError, match="block 0"):
            await mine.verify()


@pytest.mark.parametrize("missing", SEALS)
def test_memory_that_may_change_is_not_taken(missing: str) -> None:
    good = fake_image()
    with images.no_fork():
        bad = images.Descriptor(os.memfd_create("bad", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.write(bad.fileno(), os.pread(good.memory.fileno(), good.nbytes, 0))
    for name in SEALS[1:] + SEALS[:1]:
        if name != missing:
            fcntl.fcntl(bad.fileno(), fcntl.F_ADD_SEALS, getattr(fcntl, name))
    for pair in ((bad, good.sums), (good.memory, bad)):
        with pytest.raises(CorruptCheckpointError, match=missing):
            images.MappedImage(*pair, good.nbytes)
    images.MappedImage(good.memory, good.sums, good.nbytes)
    with pytest.raises(CorruptCheckpointError, match="not the"):
        images.MappedImage(good.memory, good.sums, good.nbytes + 1)


async def test_verify_finds_the_block_that_differs() -> None:
    tensors = {"a": torch.arange(1 << 20, dtype=torch.float32)}
    layout = VersionLayout.of(images_of(tensors), {})
    memory = ImageMemory(layout.nbytes, lambda: None)
    memory.targets(layout, images_of(tensors))["a"].copy_(tensors["a"])
    sealed = memory.complete(layout)
    sums = array("I", os.pread(sealed.sums.fileno(), 1 << 10, 0))
    assert len(sums) == 5
    sums[3] ^= 1
    with images.no_fork():
        other = images.Descriptor(os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    os.write(other.fileno(), sums.tobytes())
    images._seal(other)
    images.MappedImage(sealed.memory, sealed.sums, sealed.nbytes).verify()
    with pytest.raises(CorruptCheckpointError, match="block 3"):
        images.MappedImage(sealed.memory, other, sealed.nbytes).verify()


def images_of(tensors: dict[str, torch.Tensor]) -> list[Any]:
    from sidestream._convert.targets import OutTensor

    return [
        OutTensor(name, str(one.dtype).removeprefix("torch."), tuple(one.shape), one.nbytes, (name,), name)
        for name, one in tensors.items()
    ]


# --- saves ---


async def test_a_save_publishes_its_snapshot(home: Path, tmp_path: Path) -> None:
    async with Publisher(home, keep=9) as publisher, Subscriber(publisher.url) as weights:
        async with Checkpointer(tmp_path / "run") as checkpoints:
            info = await checkpoints.save(version(1), step=1, publish=publisher, metadata={"loss": 1})
            assert info.published.stamp == "e1.v1"
            image = await anext(weights)
            assert (image.save_id, image.metadata, image.version) == (info.save_id, {"loss": 1}, 1)
            state = version(2)
            pending = checkpoints.async_save(state, step=2, publish=publisher)
            await pending.staged
            for one in state.values():
                one.fill_(99)
            published = await pending.published
            assert published.stamp == "e1.v2"
            same((await anext(weights)).tensors, version(2))
            await pending
            third = checkpoints.async_save(
                version(3), step=3, publish=publisher.version(30, metadata={"a": 1}, channel="canary")
            )
            assert (await third.published).stamp == "e1.v30"
            await third
            assert publisher.health().channels == {"stable": "e1.v2", "canary": "e1.v30"}
            with pytest.raises(InvalidOptionError, match="not higher than 30"):
                await checkpoints.save(version(4), step=4, publish=publisher)
            with pytest.raises(InvalidOptionError, match="publish="):
                await checkpoints.save(version(4), step=4, publish="publisher")  # type: ignore[arg-type]
            with pytest.raises(InvalidOptionError, match="publishes nothing"):
                _ = checkpoints.async_save(version(5), step=5).published
        with pytest.raises(InvalidOptionError, match="no step"):
            await sidestream.save(version(1), tmp_path / "a", publish=publisher)
        info = await sidestream.save(version(1), tmp_path / "a", publish=publisher.version(31))
        assert info.published.stamp == "e1.v31"
        alone = sidestream.async_save(version(1), tmp_path / "b", publish=publisher.version(32))
        assert (await alone.published).version == 32
        await alone


async def test_a_call_that_is_refused_takes_no_number(home: Path, tmp_path: Path) -> None:
    async with Publisher(home) as publisher:
        for _ in range(3):
            with pytest.raises(InvalidOptionError):
                sidestream.async_save(version(1), tmp_path / "a", publish=publisher.version(5), files={"../x": b""})
        async with Checkpointer(tmp_path / "run") as checkpoints:
            for _ in range(3):
                with pytest.raises(InvalidOptionError):
                    checkpoints.async_save(version(1), step=5, publish=publisher, files={"../x": b""})
            await checkpoints.save(version(1), step=5, publish=publisher)


async def test_a_save_that_fails_beside_its_version(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").touch()
    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights:
        pending = sidestream.async_save(version(1), tmp_path / "a", publish=publisher.version(1))
        with pytest.raises(CheckpointExistsError):
            await pending
        try:
            await pending.published
        except SnapshotLostError:
            assert publisher.health().versions == {}
        else:
            same((await anext(weights)).tensors, version(1))
        # The other way round: the version fails, and the save does not.
        reselect(publisher, "nothing.*")
        info = await sidestream.save(version(2), tmp_path / "b", publish=publisher.version(2))
        assert isinstance(info.published, MissingKeysError)
        reselect(publisher, None)
        # Both are cancelled.
        async with HeldStager() as stager:
            pending = sidestream.async_save(version(3), tmp_path / "c", publish=publisher.version(3), stager=stager)
            pending.cancel()
            for one in (pending, pending.published):
                with pytest.raises(asyncio.CancelledError):
                    await one
            # The version alone is cancelled.
            pending = sidestream.async_save(version(3), tmp_path / "c", publish=publisher.version(3), stager=stager)
            assert pending.published.cancel()
            stager.let_go()
            await pending
            with pytest.raises(asyncio.CancelledError):
                await pending.published
        await publisher.publish(version(3), version=3)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as saved", "converted"])
async def test_a_version_whose_snapshot_is_taken_back_is_made_from_the_checkpoint(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (1 << 20, 1 << 20))
    state = {**state_of(5), **{f"t{number}": torch.randn(1 << 18) for number in range(24)}}
    from_checkpoint: list[ImageMemory] = []
    complete = ImageMemory.complete

    def noted(memory: ImageMemory, layout: VersionLayout) -> SealedImage:
        from_checkpoint.append(memory)
        return complete(memory, layout)

    monkeypatch.setattr(ImageMemory, "complete", noted)
    taken: dict[str, Any] = {"select": ["model.*", "t*"], "dtype": dtype}
    async with (
        AsyncStager(budget_bytes=4 << 20) as stager,
        Publisher(home, **taken) as publisher,
        Subscriber(publisher.url) as weights,
    ):
        for number in (1, 2):  # the second one finds memory that is touched
            info = await sidestream.save(
                state, tmp_path / str(number), stager=stager, publish=publisher.version(number),
                export=HF(tmp_path / f"hf{number}", **taken),
            )  # fmt: skip
            assert (info.published.stamp, info.published.save_id) == (f"e1.v{number}", info.save_id)
            image = await anext(weights)
            (file,) = (tmp_path / f"hf{number}").glob("*.safetensors")
            same({name: one for name, one in image.tensors.items() if name != "model.also"}, load_file(file))
            await image.verify()
            assert len(from_checkpoint) == number
            assert publisher._versions.memory.used_bytes == publisher.health().spare_bytes + sum(
                publisher.health().versions.values()
            )
        await all_returned(stager)


# --- the home ---


async def test_one_publisher_at_a_time_and_each_raises_the_epoch(home: Path) -> None:
    for epoch in (1, 2, 3):
        async with Publisher(home) as publisher:
            assert publisher.epoch == epoch
            with pytest.raises(PublisherRunningError, match="another publisher uses"):
                async with Publisher(home):
                    pass
            assert (home / "epoch").read_text() == f"{epoch}\n"
            assert {name: stat.S_IMODE((home / name).stat().st_mode) & 0o077 for name in ("lock", "epoch")} == {
                "lock": 0,
                "epoch": 0,
            }
            assert stat.S_IMODE(home.stat().st_mode) == 0o700
            assert (await publisher.publish(version(1), version=1)).stamp == f"e{epoch}.v1"  # numbers begin anew
        assert not (home / "socket").exists()


async def test_a_home_that_others_can_enter_is_refused(home: Path) -> None:
    home.mkdir(mode=0o755)
    home.chmod(0o755)
    with pytest.raises(InvalidOptionError, match="chmod 700"):
        async with Publisher(home):
            pass
    home.chmod(0o700)
    async with Publisher(home):
        pass


@pytest.mark.parametrize("content", [b"", b"seven\n", b"\xff\xfe", b"1.5"])
async def test_a_damaged_epoch_is_not_guessed(home: Path, content: bytes) -> None:
    home.mkdir(mode=0o700)
    (home / "epoch").write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="higher than all epochs before"):
        async with Publisher(home):
            pass
    (home / "epoch").write_text("7")  # the lock is free
    async with Publisher(home) as publisher:
        assert publisher.epoch == 8


async def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "home"):
        with pytest.raises(StorageError, match="opening the home of a publisher"):
            async with Publisher(path):
                pass


async def test_a_home_with_a_long_path(tmp_path: Path) -> None:
    home = tmp_path.joinpath(*["directory" * 20] * 8)
    assert len(str(home)) > 1000
    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights:
        await publisher.publish(version(1), version=1)
        same((await anext(weights)).tensors, version(1))


async def test_subscribers_wait_for_a_publisher_and_take_up_its_successor(home: Path) -> None:
    live = Live(Tell())
    async with Subscriber(f"unix:{home}") as weights, weights.following(live) as follower:
        with pytest.raises(DeadlineExceededError):
            await follower.ready(timeout_s=0.01)
        await until(lambda: "has no publisher" in str(follower.health().problem))
        for epoch in (1, 2):
            async with Publisher(home) as publisher:
                await publisher.publish(version(10 - epoch), version=10 - epoch).applied(count=1, timeout_s=60)
                assert live.stamp == f"e{epoch}.v{10 - epoch}"
                assert follower.health().ok
            await until(lambda: "has no publisher, since" in str(follower.health().problem))
            assert live.stamp == f"e{epoch}.v{10 - epoch}"
        (home / "epoch").unlink()  # an order that cannot be trusted any more
        async with Publisher(home) as publisher:
            await publisher.publish(version(9), version=99)
            await until(lambda: "epoch 1, and one of epoch 2 came before" in str(follower.health().problem))
            assert live.stamp == "e2.v8"


# --- strangers ---

STRANGE = {
    "garbage": b"GET / HTTP/1.1\r\n\r\n" * 10,
    "a large message": b"\x01" + b"\xff" * 16,
    "no json": b"\x01" + (1).to_bytes(8, "big") + (2).to_bytes(8, "big") + b"{]",
    "a list": b"\x01" + (1).to_bytes(8, "big") + (2).to_bytes(8, "big") + b"[]",
    "nested": b"\x01" + (1).to_bytes(8, "big") + (60_000).to_bytes(8, "big") + b"[" * 60_000,
    "another protocol": b"\x01" + (9).to_bytes(8, "big") + (2).to_bytes(8, "big") + b"{}",
    "an unknown kind": b"\x63" + (1).to_bytes(8, "big") + (17).to_bytes(8, "big") + b'{"descriptors":0}',
    "descriptors that are not there": encoded(LinkMessage(LinkMessageKind.HELLO, {}))[:-2] + b"9}",
    "an empty hello": encoded(LinkMessage(LinkMessageKind.HELLO, {})),
    "no hello": encoded(LinkMessage(LinkMessageKind.RECEIVED, {})),
    "an answer with a text as its number": encoded(
        LinkMessage(LinkMessageKind.HELLO, {"name": "x", "id": "x", "channel": "stable"})
    )
    + encoded(LinkMessage(LinkMessageKind.APPLIED, {"version": "x", "stamp": "e1.v9"})),
}


async def test_strangers_are_disconnected_and_change_nothing(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    live = Live(Tell())
    async with Publisher(home) as publisher, Subscriber(publisher.url) as weights, weights.following(live):
        await publisher.publish(version(1), version=1).applied(count=1, timeout_s=60)
        for name, content in STRANGE.items():
            stranger = connect(home)
            stranger.setblocking(True)
            stranger.settimeout(60)
            stranger.sendall(content)
            try:
                while await asyncio.to_thread(stranger.recv, 1 << 16):
                    pass
            except ConnectionResetError:
                pass
            except TimeoutError:
                pytest.fail(f"{name}: the publisher waits for more")
            finally:
                stranger.close()
        await until(lambda: len(publisher.health().subscribers) == 1)
        await publisher.publish(version(2), version=2).applied(count=1, timeout_s=60)
    assert [record for record in caplog.records if record.levelname != "INFO"] == []


async def test_a_stranger_cannot_fill_the_publisher_with_descriptors(home: Path) -> None:
    async with Publisher(home):
        stranger = connect(home)
        stranger.setblocking(True)
        message = encoded(LinkMessage(LinkMessageKind.RECEIVED, {}))
        hello = encoded(LinkMessage(LinkMessageKind.HELLO, {"name": "x", "id": "x", "channel": "stable"}))
        before = len(os.listdir("/proc/self/fd"))
        stranger.sendall(hello)

        def send() -> None:
            with pytest.raises(OSError):  # noqa: PT011  (a broken pipe, or a reset)
                for _ in range(10_000):
                    socket.send_fds(stranger, [message], [0, 0])

        await asyncio.to_thread(send)
        stranger.close()
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_publisher_that_sends_garbage_is_asked_again(home: Path) -> None:
    home.mkdir(mode=0o700)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(home / "socket"))
    listener.listen()
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    version_of_nothing = encoded(LinkMessage(LinkMessageKind.VERSION, {"epoch": 1, "version": 1}))
    async with Subscriber(f"unix:{home}") as weights:
        for content in (b"x" * 100, version_of_nothing, b""):
            accepted, _ = await loop.sock_accept(listener)
            assert b"stable" in await loop.sock_recv(accepted, 1 << 16)
            await loop.sock_sendall(accepted, content)
            if content:
                assert await loop.sock_recv(accepted, 1 << 16) == b""  # the subscriber has ended the connection
            accepted.close()
        listener.close()
        (home / "socket").unlink()
        async with Publisher(home) as publisher:
            await publisher.publish(version(1), version=1)
            same((await anext(weights)).tensors, version(1))


async def test_only_processes_of_the_same_user_are_connected(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = Live(Tell())
    async with (
        Publisher(home) as publisher,
        Subscriber(publisher.url) as weights,
        weights.following(live) as follower,
    ):
        await publisher.publish(version(1), version=1).applied(count=1, timeout_s=60)
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        assert weights._link is not None
        weights._link.end()
        await until(lambda: "PermissionError" in str(weights._problem))
        assert re.search(r"has no publisher, since \d\d:\d\d:\d\d: PermissionError", str(follower.health().problem))
        monkeypatch.undo()
        await publisher.publish(version(2), version=2).applied(count=1, timeout_s=60)
        assert follower.health().ok


async def test_an_image_with_an_unknown_dtype_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published by a later version of sidestream, for example."""
    parse = images.parse_header

    def unknown(raw: bytes, *others: Any) -> Any:
        return parse(raw.replace(b'"F32"', b'"F99"'), *others)

    monkeypatch.setattr(images, "parse_header", unknown)
    images._parsed.cache_clear()  # of other tests, whose versions have this header
    async with (
        Publisher(home) as publisher,
        Subscriber(publisher.url, name="one") as weights,
        weights.following(Live(Tell())),
    ):
        report = await publisher.publish(version(1), version=1).applied(count=1, timeout_s=60)
        assert "'F99', which this version does not read" in report.refused["one"]


# --- compiled ---


async def test_compiled_copies_are_not_compiled_again_after_their_first_turn(home: Path) -> None:
    torch._dynamo.reset()
    model = Wrapped(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
    counter = torch._dynamo.testing.CompileCounter()
    live, compiled = Live(model, prepare=lambda copy: copy.compile(backend=counter)), []
    async with (
        Publisher(home) as publisher,
        Subscriber(publisher.url) as weights,
        weights.following(live),
    ):
        for number in range(1, 13):
            state = {name: torch.full_like(one, number) for name, one in model.state_dict().items()}
            await publisher.publish(state, version=number).applied(count=1, timeout_s=60)
            with live.reading() as reading, torch.no_grad():
                assert reading.module(torch.ones(1, 4)) == number * (8 * 5 * number + 1)
            compiled.append(counter.frame_count)
    assert 0 < compiled[2] == compiled[-1], compiled
    torch._dynamo.reset()
