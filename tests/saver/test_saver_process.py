"""The writer process: how it starts, what it is handed, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import warm
from _saver_trial import alive, environment, happened, wait_until_gone
from late import late
from states import assert_same

import sidestream
from sidestream import events
from sidestream._format.records import BLOCK_BYTES
from sidestream._format.shard import PAGE_BYTES, ShardLayout
from sidestream._runtime.rate import RateLimiter
from sidestream._runtime.threads import Deadline, Stop, time_limit
from sidestream._storage import Attempt, Body, BytesBody, LocalStore, Transaction, locate_run
from sidestream._worker.client import close_all, worker_for
from sidestream._worker.job import Job, JobOrder
from sidestream._worker.link import WorkerLink
from sidestream._worker.process import _BOOT, _PACKAGE
from sidestream._worker.wire import READY, Channel, Outbox, WorkerMessage, WorkerMessageKind, pack
from sidestream._worker.work import Request, _WindowCounts
from sidestream.errors import (
    CheckpointExistsError,
    ClosedError,
    DeadlineExceededError,
    InvalidOptionError,
    NoSpaceError,
    WriterProcessError,
)
from sidestream.options import WriterProcess

Until = Callable[[Callable[[], bool]], None]
Children = Callable[[], list[int]]


def state_of(value: float, tensors: int = 8, elements: int = 1 << 18) -> dict[str, object]:
    return {f"t{number}": torch.full((elements,), value + number) for number in range(tensors)} | {"value": value}


async def back(url: Path) -> object:
    return await (await sidestream.open_checkpoint(url)).state_dict()


def test_what_it_imports_pulls_in_no_torch() -> None:
    end = "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    code = _BOOT.replace("main(descriptor, trainer)", end)
    assert code != _BOOT
    arguments = json.dumps([0, 0, str(_PACKAGE), []])
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_nor_does_the_process_that_runs(until: Until, children: Children, tmp_path: Path) -> None:
    sidestream.blocking.save(state_of(1.0), tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
    (pid,) = children()
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "sidestream" in maps, "the memory that it was handed"


def test_another_thread_starts_it(tmp_path: Path, children: Children) -> None:
    """Not that of the loop, nor one that the loop waits for: a process is a child of the thread that made it."""

    async def save() -> int:
        await sidestream.save(state_of(1.0), tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
        return threading.get_native_id()

    loop = asyncio.run(save())
    (pid,) = children()
    parents = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # threads of the ended loop end meanwhile
            if str(pid) in (task / "children").read_text().split():
                parents.append(int(task.name))
    assert parents != [loop]
    assert [thread.name for thread in threading.enumerate() if thread.native_id in parents] == ["sidestream-saver"]


def test_how_much_memory_it_has_for_itself(tmp_path: Path, children: Children) -> None:
    sidestream.blocking.save(state_of(1.0, 256), tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
    (pid,) = children()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert int(status["RssAnon"].split()[0]) < 128 << 10, "kB; what it was handed, 256 MiB, is RssShmem"


@pytest.mark.parametrize("saver", ["thread", "process"])
async def test_progress(saver: Literal["thread", "process"], tmp_path: Path) -> None:
    """In bytes, the same for both; it never goes back, and ends with everything."""
    seen: list[sidestream.SaveProgress] = []
    async with sidestream.AsyncStager(budget_bytes=6 << 20) as stager:  # several windows, one after the other
        pending = sidestream.async_save(
            state_of(1.0, 24), tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer=saver)
        )
        while not pending.done():
            seen.append(pending.progress)
            await asyncio.sleep(0)
        info = await pending
    last = pending.progress
    assert last.total_bytes == last.staged_bytes == last.written_bytes
    assert last.total_bytes == info.nbytes - (tmp_path / "c" / "__0_0.distcp").stat().st_size
    assert {one.total_bytes for one in seen} <= {0, last.total_bytes}
    for name in ("staged_bytes", "written_bytes"):
        course = [getattr(one, name) for one in seen]
        assert course == sorted(course)


@pytest.mark.parametrize("durability", ["fsync", "flush"])
async def test_the_same_files(durability: str, tmp_path: Path) -> None:
    """Byte for byte what threads write, but for what is different in every save."""
    state = state_of(3.0, tensors=3, elements=40_000) | {"nested": {"lr": 0.5, "empty": {}}, "big": torch.arange(9e6)}
    infos = [
        await sidestream.save(
            state, tmp_path / saver, options=sidestream.SaveOptions(writer=saver, durability=durability)
        )  # type: ignore[arg-type]
        for saver in ("thread", "process")
    ]
    names = [sorted(path.name for path in (tmp_path / saver).glob("*.distcp")) for saver in ("thread", "process")]
    assert names[0] == names[1]
    for name in names[0]:
        assert (tmp_path / "thread" / name).read_bytes() == (tmp_path / "process" / name).read_bytes()
    assert infos[0].nbytes == infos[1].nbytes
    assert (await sidestream.verify(tmp_path / "process")).ok
    assert_same(state, await back(tmp_path / "process"))


@pytest.mark.parametrize("commit", ["rename", "marker"])
async def test_a_directory_whose_name_looks_like_a_chain_of_urls(commit: Any, tmp_path: Path) -> None:
    storage = sidestream.Storage(commit=commit)
    for name in ("a::b", "s3::x", "c#d?e%20f"):
        url = f"file://{tmp_path}/{name}/c"
        await sidestream.save(state_of(1.0), url, storage=storage, options=sidestream.SaveOptions(writer="process"))
        checkpoint = await sidestream.open_checkpoint(url, storage=storage)
        assert_same(state_of(1.0), await checkpoint.state_dict())
        assert (tmp_path / name / "c" / ".metadata").exists()


async def test_digests_come_back(tmp_path: Path) -> None:
    states = {}
    for saver in ("thread", "process"):
        await sidestream.save(
            state_of(1.0), tmp_path / saver, options=sidestream.SaveOptions(writer=saver, digest="blake3")
        )  # type: ignore[arg-type]
        (manifest,) = (tmp_path / saver).glob("manifest-*")
        states[saver] = [line for line in manifest.read_text().splitlines() if line.startswith('["tensor"')]
    assert states["thread"] == states["process"] != []
    assert '"digest":"blake3"' in manifest.read_text()
    assert (await sidestream.verify(tmp_path / "process")).ok


async def test_one_process_and_few_descriptors_for_many_tensors(tmp_path: Path, children: Children) -> None:
    await sidestream.save({"n": 1}, tmp_path / "first", options=sidestream.SaveOptions(writer="process"))
    before = len(os.listdir("/proc/self/fd"))
    async with sidestream.AsyncStager(backing="shared") as stager:
        state = {f"t{number}": torch.full((16,), float(number)) for number in range(5000)}
        await sidestream.save(state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer="process"))
        (pid,) = children()
        assert len(os.listdir("/proc/self/fd")) - before <= 50, "loops and threads of this process may begin meanwhile"
        assert len(os.listdir(f"/proc/{pid}/fd")) <= 50
    assert_same(state, await back(tmp_path / "c"))


async def test_overlapping_saves_do_not_mix(tmp_path: Path, children: Children) -> None:
    urls = [tmp_path / f"c{number}" for number in range(12)]
    saves = [
        sidestream.async_save(state_of(float(n), 4), url, options=sidestream.SaveOptions(writer="process"))
        for n, url in enumerate(urls)
    ]
    taken = sidestream.async_save(state_of(99.0), urls[3], options=sidestream.SaveOptions(writer="process"))
    results = await asyncio.gather(*saves, taken, return_exceptions=True)
    wrong = [one for one in results if isinstance(one, BaseException)]
    assert len(children()) == 1
    assert len(wrong) == 1, wrong
    assert isinstance(wrong[0], CheckpointExistsError)
    for number, url in enumerate(urls):
        found = await back(url)
        assert isinstance(found, dict)
        if number != 3 or found["value"] != 99.0:
            assert_same(state_of(float(number), 4), found)


async def test_a_state_larger_than_its_memory(tmp_path: Path) -> None:
    state = state_of(5.0, 24)
    async with sidestream.AsyncStager(budget_bytes=6 << 20) as stager:
        await sidestream.save(state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer="process"))
        assert stager.statistics().reserved_bytes <= 6 << 20
    await sidestream.save(state, tmp_path / "d", options=sidestream.SaveOptions(writer="process", streaming=True))
    assert_same(state, await back(tmp_path / "c"))
    assert_same(state, await back(tmp_path / "d"))


@pytest.mark.parametrize(("handed", "told"), [(1, [1]), (2, [1, 2]), (3, [2, 3]), (8, [4, 6, 7, 8])])
def test_the_trainer_hears_of_memory_when_half_of_it_is_free(handed: int, told: list[int]) -> None:
    windows = _WindowCounts()
    windows.arrived = handed
    assert [number for number in range(1, handed + 1) if windows.count_returned()] == told


def test_memory_that_was_let_go_of_is_told_by_what_was_handed_over() -> None:
    noted: list[bool] = []

    class Noting(Outbox):
        def send_later(
            self, kind: WorkerMessageKind, number: int, body: bytes, *, urgent: Callable[[], bool] = lambda: False
        ) -> None:
            noted.append(urgent())

    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked = {"at": time.time(), "timeout_s": None, "save_id": "a" * 32, "target": "t", "durability": "fsync"}
        request = Request(1, asked, LocalStore, Noting(Channel(ours)), RateLimiter(None), lambda number: None)
        (layout,) = ShardLayout.lay_out([("uint8", (BLOCK_BYTES,))] * 4, 1 << 40, BLOCK_BYTES + PAGE_BYTES)
        said = pack(["file", None])
        shard = len(said).to_bytes(4, "little") + said + layout.pack()
        request.handle(WorkerMessage(WorkerMessageKind.SHARD_FILE, 1, shard), {})
        ready = b"".join(READY.pack(0, window, 7, 0, BLOCK_BYTES) for window in range(4))
        request.handle(WorkerMessage(WorkerMessageKind.READY, 1, ready), {7: mmap(-1, 2 * BLOCK_BYTES)})
        for image in request._images[0]:
            image.release()
    assert noted == [False, True, True, True]


def test_what_is_urgent_takes_along_what_could_wait() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox, trainer = Outbox(Channel(ours)), Channel(theirs)
        trainer.set_timeout(60)
        threading.Thread(target=outbox.flush, args=(60.0, 1e6), daemon=True).start()
        outbox.send_later(WorkerMessageKind.UNUSED, 1, b"a")
        outbox.send_later(WorkerMessageKind.UNUSED, 1, b"b", urgent=lambda: True)
        assert [frame.body for frame in trainer.receive() or []] == [b"a", b"b"]


def test_whether_it_is_urgent_is_asked_when_it_is_there() -> None:
    """Another thread may send in between: what it does not send has to be counted as not told."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(Channel(ours))

        def urgent() -> bool:
            outbox.send_now(WorkerMessageKind.BEAT, 0)  # as another thread would
            return True

        outbox.send_later(WorkerMessageKind.UNUSED, 1, b"unused", urgent=urgent)
        assert [frame.kind for frame in Channel(theirs).receive() or []] == [
            WorkerMessageKind.UNUSED,
            WorkerMessageKind.BEAT,
        ]


def test_the_trainer_hears_of_the_last_memory_whenever_it_comes() -> None:
    windows = _WindowCounts()
    for windows.arrived in range(1, 100):
        assert windows.count_returned(), "no other is in use"


async def test_memory_that_was_private_is_shared_from_then_on(tmp_path: Path) -> None:
    async with sidestream.AsyncStager(budget_bytes=64 << 20) as stager:
        await sidestream.save(state_of(1.0), tmp_path / "thread", stager=stager)
        await sidestream.save(
            state_of(2.0), tmp_path / "process", stager=stager, options=sidestream.SaveOptions(writer="process")
        )
        await sidestream.save(state_of(3.0), tmp_path / "again", stager=stager)
    for value, name in ((1.0, "thread"), (2.0, "process"), (3.0, "again")):
        assert_same(state_of(value), await back(tmp_path / name))


async def test_a_killed_one_is_replaced(tmp_path: Path, children: Children, until: Until) -> None:
    await sidestream.save(state_of(1.0), tmp_path / "a", options=sidestream.SaveOptions(writer="process"))
    (pid,) = children()
    os.kill(pid, signal.SIGKILL)
    await sidestream.save(state_of(2.0), tmp_path / "b", options=sidestream.SaveOptions(writer="process"))
    assert children() != [pid]
    assert_same(state_of(2.0), await back(tmp_path / "b"))


async def reach(condition: Callable[[], bool], pending: sidestream.PendingSave) -> None:
    """Wait while it is being saved, whatever the machine does meanwhile."""
    async with asyncio.timeout(60):
        while not condition():
            assert not pending.done(), "it had ended before"
            await asyncio.sleep(0.005)


async def test_a_killed_one_is_told_of_and_the_save_goes_on(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path / "notes", tmp_path / "run", "hang", "pwrite").items():
        monkeypatch.setenv(name, value)
    url = tmp_path / "run" / "a"
    heard: list[events.Event] = []
    with events.observe(heard.append):
        pending = sidestream.async_save(
            state_of(1.0, 64), url, options=sidestream.SaveOptions(writer="process")
        )  # 64 MiB in two windows
        await pending.staged
        await reach(lambda: happened(tmp_path / "notes"), pending)
        os.kill(children()[0], signal.SIGKILL)
        await pending
    (gone,) = [event for event in heard if isinstance(event, events.WriterProcessLost)]
    assert gone.again
    assert "signal 9" in gone.reason
    assert pending.progress.written_bytes == pending.progress.total_bytes
    assert_same(state_of(1.0, 64), await back(url))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["a"]


async def test_without_retries_it_is_a_typed_error(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path / "notes", tmp_path / "run", "hang", "pwrite").items():
        monkeypatch.setenv(name, value)
    url, once = tmp_path / "run" / "a", WriterProcess(retries=0)
    pending = sidestream.async_save(state_of(1.0, 64), url, options=sidestream.SaveOptions(writer=once))
    await pending.staged
    await reach(lambda: happened(tmp_path / "notes"), pending)
    os.kill(children()[0], signal.SIGKILL)
    with pytest.raises(WriterProcessError, match="signal 9"):
        await pending
    assert pending.outcome == "absent"
    assert list((tmp_path / "run").iterdir()) == []
    await sidestream.save(state_of(1.0), url, options=sidestream.SaveOptions(writer=once))


async def test_a_stopped_one_is_noticed(tmp_path: Path, children: Children) -> None:
    saver = WriterProcess(silence_s=2)
    await sidestream.save(state_of(1.0), tmp_path / "a", options=sidestream.SaveOptions(writer=saver))
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    await sidestream.save(state_of(2.0), tmp_path / "b", options=sidestream.SaveOptions(writer=saver))
    assert pid not in children()
    assert_same(state_of(2.0), await back(tmp_path / "b"))


async def test_memory_that_others_wanted_is_not_there_for_a_second_time(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in one write while the state passes through a small budget, and is killed then."""
    for name, value in environment(tmp_path / "notes", tmp_path / "run", "hang", "pwrite").items():
        monkeypatch.setenv(name, value)
    async with sidestream.AsyncStager(budget_bytes=6 << 20) as stager:
        url = tmp_path / "run" / "c"
        state = state_of(5.0, 24)
        del state["value"]  # its file would be the one that hangs, and everything behind it
        pending = sidestream.async_save(state, url, stager=stager, options=sidestream.SaveOptions(writer="process"))
        await pending.staged
        await reach(lambda: happened(tmp_path / "notes"), pending)
        os.kill(children()[0], signal.SIGKILL)
        with pytest.raises(WriterProcessError, match="in use again"):
            await pending
        assert list((tmp_path / "run").iterdir()) == []
        await sidestream.save(state_of(6.0, 24), url, stager=stager, options=sidestream.SaveOptions(writer="process"))
    assert_same(state_of(6.0, 24), await back(url))


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("where", ["pwrite", "fsync"])
async def test_one_that_hangs_is_ended_at_the_deadline(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path / "notes", tmp_path / "run", "hang", where).items():
        monkeypatch.setenv(name, value)
    with time_limit(Deadline.after(60)):
        await worker_for(WriterProcess()).up()  # so that most of the time is not over before it gets there

    async def save(timeout_s: float) -> None:
        options = sidestream.SaveOptions(writer="process", timeout_s=timeout_s)
        await sidestream.save(state_of(1.0), tmp_path / "run" / "c", options=options)

    assert isinstance(await late(save, lambda: happened(tmp_path / "notes")), DeadlineExceededError)
    assert wait_until_gone(tmp_path / "notes") == []
    assert list((tmp_path / "run").iterdir()) == []
    await sidestream.save(state_of(1.0), tmp_path / "run" / "c", options=sidestream.SaveOptions(writer="process"))


@pytest.mark.parametrize(("where", "whose"), [(1, ".partial"), ("pwrite", ".distcp")])
async def test_a_full_disk_there_is_a_full_disk_here(
    where: int | str, whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path / "notes", tmp_path / "run", "full", where).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoSpaceError, match="free some space") as raised:
        await sidestream.save(state_of(1.0), tmp_path / "run" / "c", options=sidestream.SaveOptions(writer="process"))
    assert raised.value.errno == errno.ENOSPC
    assert str(raised.value.filename).endswith(whose)
    assert list((tmp_path / "run").iterdir()) == []


async def test_a_cancel_reaches_it(tmp_path: Path, children: Children) -> None:
    slow = WriterProcess(max_bytes_per_second=1e6)
    # Small windows: it looks whether it was cancelled between two of them.
    async with sidestream.AsyncStager(budget_bytes=4 << 20, backing="shared") as stager:
        pending = sidestream.async_save(
            state_of(1.0, 64), tmp_path / "a", stager=stager, options=sidestream.SaveOptions(writer=slow)
        )
        await reach(lambda: any(tmp_path.glob(".*.partial/__0_1.distcp")), pending)
        (pid,) = children()
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await pending.ended()
        assert list(tmp_path.iterdir()) == []
        assert children() == [pid], "it was asked, and not killed"


async def ready(root: Path) -> tuple[WorkerLink, JobOrder, Transaction]:
    """Return a process that is up, and an attempt that it may join."""
    worker = worker_for(WriterProcess())
    with time_limit(Deadline.after(60)):
        await worker.up()
    store, _ = locate_run(root)
    assert isinstance(store, LocalStore)
    assert store.address is not None
    attempt = Attempt("a", "directory", "a" * 32, "fsync")
    order = JobOrder(store.address, replace(attempt, kind="joined"), "a", Deadline.after(60))
    return worker._current(), order, store.begin(attempt)


async def test_a_save_that_was_stopped_before_it_was_asked_for_ends_no_other(
    tmp_path: Path, children: Children
) -> None:
    link, order, transaction = await ready(tmp_path)
    (pid,) = children()
    stop = Stop()
    stop.set()
    with pytest.raises(ClosedError):
        Job(order, (), stop).run(transaction, lambda: link, 0)
    await sidestream.save(state_of(1.0), tmp_path / "a", options=sidestream.SaveOptions(writer="process"))
    assert children() == [pid]


@pytest.mark.usefixtures("short_patience")
async def test_a_stopped_one_does_not_hold_up_a_deadline(tmp_path: Path, children: Children) -> None:
    saver = WriterProcess(silence_s=3600)
    await sidestream.save(state_of(1.0), tmp_path / "a", options=sidestream.SaveOptions(writer=saver))
    os.kill(children()[0], signal.SIGSTOP)
    with pytest.raises(DeadlineExceededError):
        await sidestream.save(state_of(2.0), tmp_path / "b", options=sidestream.SaveOptions(writer=saver, timeout_s=1))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    await sidestream.save(state_of(2.0), tmp_path / "b", options=sidestream.SaveOptions(writer=saver))


@pytest.mark.usefixtures("short_patience")
async def test_nor_when_it_takes_nothing_any_more(tmp_path: Path, children: Children, until: Until) -> None:
    """More is sent than the socket has room for: neither a cancel nor a deadline reaches the thread that sends."""
    saver = WriterProcess(silence_s=3600)
    await sidestream.save(state_of(1.0), tmp_path / "a", options=sidestream.SaveOptions(writer=saver))
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceededError):
        await sidestream.save(
            {"blob": b"x" * (4 << 20)}, tmp_path / "b", options=sidestream.SaveOptions(writer=saver, timeout_s=2)
        )
    until(lambda: pid not in children())
    await sidestream.save(state_of(2.0), tmp_path / "b", options=sidestream.SaveOptions(writer=saver))
    assert_same(state_of(2.0), await back(tmp_path / "b"))


@pytest.mark.usefixtures("short_patience")
async def test_a_cancel_that_is_sent_late_does_not_end_it(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes the files may block for longer than a call of ``send`` may."""
    link, order, transaction = await ready(tmp_path)
    (pid,) = children()
    stop = Stop()
    send, stuck = link.send, []

    def looked(messages: Any) -> None:
        stuck.append(link._is_stuck())  # as the thread of the link may, during any call
        send(messages)

    def files() -> Iterator[tuple[str, Body]]:
        yield "one", BytesBody(b"1")
        stop.set()
        time.sleep(1)
        yield "two", BytesBody(b"2")

    monkeypatch.setattr(link, "send", looked)
    transaction.write(())
    with pytest.raises(ClosedError):
        Job(order, files(), stop).run(transaction, lambda: link, 0)
    assert len(stuck) > 1
    assert not any(stuck)
    transaction.discard()
    assert children() == [pid]


async def test_prewarm_starts_it_and_a_checkpointer_keeps_it(tmp_path: Path, children: Children, until: Until) -> None:
    saver = WriterProcess(idle_s=0.01)
    state = state_of(1.0)
    async with sidestream.Checkpointer(tmp_path, save=sidestream.SaveOptions(writer=saver)) as checkpoints:
        assert children() == []
        await checkpoints.prewarm(state)
        (pid,) = children()
        for step in (1, 2):
            await checkpoints.save(state, step=step)
            await asyncio.sleep(1.5)  # as often as it looks whether it is needed
        assert children() == [pid]
    until(lambda: children() == [])


async def test_it_ends_when_nobody_has_used_it(tmp_path: Path, children: Children, until: Until) -> None:
    saver = WriterProcess(idle_s=0.01)
    await sidestream.save(state_of(1.0), tmp_path / "a", options=sidestream.SaveOptions(writer=saver))
    until(lambda: children() == [])
    await sidestream.save(state_of(2.0), tmp_path / "b", options=sidestream.SaveOptions(writer=saver))
    assert_same(state_of(2.0), await back(tmp_path / "b"))


def test_where_it_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidOptionError, match="memory://"):
        sidestream.blocking.save({"n": 1}, "memory://saver/c", options=sidestream.SaveOptions(writer="process"))
    sidestream.blocking.save({"n": 1}, "memory://saver/c", options=sidestream.SaveOptions(writer="auto"))
    with pytest.raises(InvalidOptionError, match="'thread', 'process', 'auto'"):
        sidestream.blocking.save({"n": 1}, tmp_path / "c", options=sidestream.SaveOptions(writer="fork"))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(WriterProcessError, match="could not be started"):
        sidestream.blocking.save({"n": 1}, tmp_path / "c", options=sidestream.SaveOptions(writer=WriterProcess(nice=6)))
    sidestream.blocking.save({"n": 1}, tmp_path / "c", options=sidestream.SaveOptions(writer="auto"))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    "wrong", [{"nice": 20}, {"affinity": ()}, {"max_bytes_per_second": 0}, {"io_priority": "high"}, {"silence_s": 0}]
)
def test_wrong_options(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        WriterProcess(**wrong)  # type: ignore[arg-type]


async def test_its_priorities(tmp_path: Path, children: Children) -> None:
    one = min(os.sched_getaffinity(0))
    saver = WriterProcess(nice=7, io_priority="idle", affinity=frozenset({one}))
    await sidestream.save({"n": 1}, tmp_path / "c", options=sidestream.SaveOptions(writer=saver))
    (pid,) = children()
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 7)
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    assert all(os.sched_getaffinity(thread) == {one} for thread in threads)
    assert all(os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in threads)


TRAINER = """
import asyncio, os, signal, sys, torch, sidestream
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it for its children
sidestream.set_exit_timeout(0.5)  # otherwise the end of the program waits for the save
async def main():
    state = {"t": torch.ones(1 << 24)}
    slow = sidestream.SaveOptions(writer=sidestream.WriterProcess(max_bytes_per_second=1e6))
    await sidestream.save({"n": 1}, sys.argv[1] + "/warm", options=slow)
    sidestream.async_save(state, sys.argv[1] + "/c", options=slow)
    while not any(name.startswith(".c") for name in os.listdir(sys.argv[1])):
        await asyncio.sleep(0.01)
    print(sidestream._worker.client.worker_for(sidestream.WriterProcess(max_bytes_per_second=1e6)).pid, flush=True)
    await asyncio.sleep(3600)
import sidestream._worker.client
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_it_ends_with_its_trainer(how: str, tmp_path: Path, until: Until) -> None:
    with warm.Popen([sys.executable, "-c", TRAINER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        for process in (pid, trainer.pid):  # what was never there is not left there
            assert "/dev/shm/" not in Path(f"/proc/{process}/maps").read_text()
        trainer.send_signal(getattr(signal, how))
        trainer.wait(60)
        until(lambda: not alive(pid))
    assert not (tmp_path / "c").exists()
    if how == "SIGINT":  # the save was cancelled, and has cleaned up
        assert sorted(path.name for path in tmp_path.iterdir()) == ["warm"]


def test_nothing_of_main_runs_in_it(tmp_path: Path) -> None:
    """No guard is needed, and modules of the program's folder are not imported."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            import sys
            print("main runs")
            import sidestream.blocking
            sidestream.blocking.save({"n": 1}, sys.argv[1], options=sidestream.SaveOptions(writer="process"))
"""
        )
    )
    (tmp_path / "selectors.py").write_text('raise SystemExit("a module of the program was imported")')
    done = subprocess.run(
        [sys.executable, "-P", str(tmp_path / "program.py"), str(tmp_path / "c")],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "main runs\n"
    assert done.stderr == ""


def test_a_forked_child_has_its_own(tmp_path: Path, children: Children) -> None:
    sidestream.blocking.save({"n": 1}, tmp_path / "a", options=sidestream.SaveOptions(writer="process"))
    (parents,) = children()
    pid = os.fork()
    if pid == 0:
        try:

            async def save() -> None:
                await sidestream.save({"n": 2}, tmp_path / "b", options=sidestream.SaveOptions(writer="process"))

            asyncio.run(save())
            own = worker_for(WriterProcess()).pid
            close_all()
            os._exit(0 if own != parents else 1)
        finally:
            os._exit(70)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    sidestream.blocking.save({"n": 3}, tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
    assert children() == [parents]
