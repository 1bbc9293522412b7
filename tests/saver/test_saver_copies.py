"""Host memory that the writer process copies: what it reads, when it lets go, and who copies when it cannot."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import threading
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from states import assert_same

import sidestream
from sidestream._layout.save_layout import plan_save
from sidestream._layout.values import copy_value
from sidestream._runtime.threads import (
    Deadline,
    Stop,
    run_sliced,
    time_limit,
)
from sidestream._staging import AsyncStager, FillPart, FillPiece, FillTable, Staging, capture
from sidestream._worker.client import LinkFiller, worker_for
from sidestream._worker.copying import Copier, read_pieces
from sidestream._worker.wire import PackedPiece, PackedTable, WorkerMessageKind, pack_fill, unpack_fill
from sidestream.errors import ClosedError, UnsupportedTensorError
from sidestream.options import WriterProcess

Until = Callable[[Callable[[], bool]], None]
Children = Callable[[], list[int]]
MIB = 1 << 20


def state_of(value: float) -> dict[str, object]:
    torch.manual_seed(5)
    base = torch.randn(3000, 700) + value
    return {
        "plain": base,
        "tail": base.view(-1)[1_000_001:],  # the same memory, from within
        "transposed": base.t(),
        "large": torch.arange(11 * MIB, dtype=torch.float32),  # several of its pieces, and several windows
        "small": [torch.full((number,), value) for number in range(1, 40)],
        "scalar": torch.tensor(value),
        "empty": torch.zeros(0, 3),
        "bytes": torch.arange(2 * MIB + 3).to(torch.uint8),
        "value": value,
    }


async def back(url: Path) -> object:
    return await (await sidestream.open_checkpoint(url)).state_dict()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool | None]:
    """What the process was asked to copy, and whether it did; None as long as it is at it."""
    answers: list[bool | None] = []
    fill = LinkFiller.fill

    def noted(self: LinkFiller, pieces: Sequence[FillPart], *, deadline: Deadline, stop: Stop) -> bool:
        number = len(answers)
        answers.append(None)
        answers[number] = fill(self, pieces, deadline=deadline, stop=stop)
        return bool(answers[number])

    monkeypatch.setattr(LinkFiller, "fill", noted)
    return answers


async def up(options: WriterProcess | None = None) -> None:
    with time_limit(Deadline.after(60)):
        await worker_for(options or WriterProcess()).up()


async def test_it_copies_what_lies_in_rows(tmp_path: Path, asked: list[bool | None]) -> None:
    await up()
    state = state_of(1.0)
    async with AsyncStager(backing="shared") as stager:
        await sidestream.save(state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer="process"))
        assert stager.statistics().leased_bytes == 0
    assert asked
    assert set(asked) == {True}
    assert_same(state, await back(tmp_path / "c"))
    assert (await sidestream.verify(tmp_path / "c")).ok


@pytest.mark.parametrize("budget_mib", [6, 24, 200])
async def test_within_any_budget(budget_mib: int, tmp_path: Path, asked: list[bool | None]) -> None:
    await up()
    state = state_of(2.0)
    async with AsyncStager(budget_bytes=budget_mib * MIB) as stager:
        await sidestream.save(state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer="process"))
        assert stager.statistics().peak_leased_bytes <= budget_mib * MIB
    assert set(asked) == {True}
    assert_same(state, await back(tmp_path / "c"))


async def test_the_sources_may_change_once_it_has_copied(tmp_path: Path, asked: list[bool | None]) -> None:
    await up()
    state = {"w": torch.ones(8 * MIB), "v": torch.ones(MIB)}
    pending = sidestream.async_save(state, tmp_path / "c", options=sidestream.SaveOptions(writer=WriterProcess()))
    await pending.staged
    for tensor in state.values():
        tensor.zero_()
    await pending
    assert set(asked) == {True}
    assert_same({"w": torch.ones(8 * MIB), "v": torch.ones(MIB)}, await back(tmp_path / "c"))


async def test_one_that_is_not_up_is_not_waited_for(tmp_path: Path, asked: list[bool | None]) -> None:
    assert worker_for(WriterProcess()).filler() is None
    await sidestream.save(state_of(1.0), tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
    assert asked == []


async def test_one_that_the_system_does_not_let_read(tmp_path: Path, asked: list[bool | None]) -> None:
    saver = worker_for(WriterProcess())
    await up()
    assert saver._current().reads_memory
    saver._current().reads_memory = False
    await sidestream.save(state_of(1.0), tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
    assert asked == []
    assert_same(state_of(1.0), await back(tmp_path / "c"))


async def test_paced_and_snapshot_stages_are_copied_here(tmp_path: Path, asked: list[bool | None]) -> None:
    await up()
    for name, options in {"paced": {"max_bytes_per_second": 1e9}, "eager": {"mode": "eager"}}.items():
        async with AsyncStager(**options) as stager:  # type: ignore[arg-type]
            await sidestream.save(
                state_of(1.0), tmp_path / name, stager=stager, options=sidestream.SaveOptions(writer="process")
            )
    assert asked == []


async def test_one_that_is_killed_while_it_copies(tmp_path: Path, asked: list[bool | None], children: Children) -> None:
    await up()
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    pending = sidestream.async_save(state_of(3.0), tmp_path / "c", options=sidestream.SaveOptions(writer="process"))
    async with asyncio.timeout(60):
        while not asked:
            await asyncio.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    await pending
    assert asked == [False], "from then on the trainer copies"
    assert_same(state_of(3.0), await back(tmp_path / "c"))


@pytest.mark.usefixtures("short_patience")
async def test_one_that_is_stopped_while_it_copies_and_a_cancel(
    tmp_path: Path, asked: list[bool | None], children: Children, until: Until
) -> None:
    """Memory comes back when the process cannot write into it any more: it is gone."""
    saver = WriterProcess(silence_s=3600)
    await up(saver)
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    async with AsyncStager(backing="shared") as stager:
        pending = sidestream.async_save(
            state_of(3.0), tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer=saver)
        )
        async with asyncio.timeout(60):
            while not asked:
                await asyncio.sleep(0.01)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await pending.ended()
        assert pid not in children()
        until(lambda: stager.statistics().leased_bytes == 0)
        assert list(tmp_path.iterdir()) == []
        await sidestream.save(
            state_of(4.0), tmp_path / "c", stager=stager, options=sidestream.SaveOptions(writer=saver)
        )
    assert_same(state_of(4.0), await back(tmp_path / "c"))


async def test_a_source_that_it_cannot_read(children: Children) -> None:
    """Whoever asked is told, nothing else happens, and the process goes on."""
    await up()
    saver = worker_for(WriterProcess())
    filler, source = saver.filler(), torch.arange(5 * MIB, dtype=torch.float32)
    assert filler is not None
    async with AsyncStager(backing="shared") as stager:
        staged = await stager.stage({"t": torch.zeros(6 * MIB)})
        target = staged["t"]
        (memory,) = stager.shared_memory()
        start = target.data_ptr() - ctypes.addressof(ctypes.c_char.from_buffer(memory))  # type: ignore[call-overload]
        good = FillPiece(memory, source.data_ptr(), start, source.nbytes)
        bad = FillPiece(memory, 16, start + source.nbytes, 4096)

        def fill(*pieces: FillPiece) -> bool:
            return filler.fill(pieces, deadline=Deadline.after(60), stop=Stop())

        assert await asyncio.to_thread(fill, good)
        assert torch.equal(target[: 5 * MIB], source)
        assert not await asyncio.to_thread(fill, good, bad)
        assert not target[5 * MIB :].any()
        assert await asyncio.to_thread(fill)
        del target
        staged.release()
    assert len(children()) == 1
    assert saver.filler() is not None


def test_a_cancel_is_answered_while_others_are_copied(until: Until) -> None:
    """Its chunks wait behind those of others, and nobody will copy them."""
    answers: dict[int, WorkerMessageKind] = {}
    held = threading.Event()

    def answer(kind: WorkerMessageKind, number: int, _: bytes) -> None:
        answers[number] = kind
        if number:
            held.wait(60)  # the thread that has copied: it takes nothing else meanwhile

    copier = Copier(os.getpid(), answer)
    memory, source = mmap.mmap(-1, MIB), ctypes.create_string_buffer(b"x" * 4096, 4096)
    body = pack_fill([(1, ctypes.addressof(source), 0, 4096)], [])
    others = range(1, len(copier._threads) + 1)
    for number in others:
        copier.fill(number, body, {1: memory})
    until(lambda: set(answers) == set(others))
    copier.fill(0, pack_fill([(1, ctypes.addressof(source), 8192, 4096)], []), {1: memory})
    assert copier.cancel(0)
    assert answers.pop(0) == WorkerMessageKind.UNFILLED
    assert not copier.cancel(0)
    assert set(answers.values()) == {WorkerMessageKind.FILLED}
    held.set()
    copier.fill(99, body, {1: memory})
    until(lambda: 99 in answers)
    assert memory[:4096] == b"x" * 4096
    assert memory[8192:12288] == bytes(4096), "nor was it copied later"


def test_a_system_without_the_call() -> None:
    code = """
    import ctypes, errno
    find = ctypes.CDLL.__getattr__
    def hidden(library, name):
        if name == "process_vm_readv":
            raise AttributeError(name)
        return find(library, name)
    ctypes.CDLL.__getattr__ = hidden
    import sidestream
    sidestream.save
    from sidestream._worker.copying import read_memory
    try:
        read_memory(1, 2, 3, 4)
    except OSError as error:
        assert error.errno == errno.ENOSYS
    else:
        raise AssertionError
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def of_table(table: FillTable) -> list[FillPiece]:
    """The pieces of a table, one by one."""
    columns = [table.packed[: 8 * table.rows], table.packed[8 * table.rows : 12 * table.rows]]
    addresses, offsets = array("Q", columns[0]), array("I", columns[1])
    sizes = array("I", table.packed[12 * table.rows :])
    rows = zip(addresses, offsets, sizes, strict=True)
    return [FillPiece(table.memory, address, table.offset + offset, size) for address, offset, size in rows]


class Moving:
    """A filler of this process: copies, and does what it is told before it answers."""

    def __init__(self, answer: Callable[[], bool]) -> None:
        self.answer = answer
        self.pieces: list[FillPiece] = []
        self.threads: set[str] = set()

    def fill(self, pieces: Sequence[FillPart], *, deadline: Deadline, stop: Stop) -> bool:
        self.threads.add(threading.current_thread().name)
        for one in pieces:
            self.pieces += [one] if isinstance(one, FillPiece) else of_table(one)
        for piece in self.pieces:
            target = ctypes.addressof(ctypes.c_char.from_buffer(piece.memory, piece.offset))  # type: ignore[call-overload]
            ctypes.memmove(target, piece.address, piece.nbytes)
        return self.answer()


def launched(stager: AsyncStager, state: dict[str, object], filler: Moving) -> Staging[object]:
    def lay_out(captured: object) -> object:
        return run_sliced(plan_save(stager.plans, stager.budget_bytes, captured))  # type: ignore[arg-type]

    deadline = Deadline.after(60)
    return stager.launch(capture(state, copy_value), lay_out, deadline, filler=filler)  # type: ignore[arg-type,type-var]


async def test_when_nobody_else_copies_the_stager_does() -> None:
    tensors = [torch.full((4 * MIB,), float(number)) for number in range(8)]
    async with AsyncStager(backing="shared") as stager:
        filler = Moving(lambda: False)
        staging = launched(stager, {f"t{number}": tensor for number, tensor in enumerate(tensors)}, filler)
        await staging.copied
        assert 0 < len(filler.pieces) < 8, "it was asked once"
        content = b"".join(bytes(image.lease().view) for image in staging.images)
        assert all(tensor.numpy().tobytes()[: 1 << 16] in content for tensor in tensors)
        staging.release()


async def test_a_source_that_moves_meanwhile_is_an_error() -> None:
    moved = torch.ones(MIB)

    def move() -> bool:
        moved.untyped_storage().resize_(64 * MIB)
        return True

    async with AsyncStager(backing="shared") as stager:
        staging = launched(stager, {"t": moved}, Moving(move))
        with pytest.raises(UnsupportedTensorError, match="resized"):
            await staging.copied
        staging.release()
        assert stager.statistics().leased_bytes == 0


async def test_what_it_raises_ends_the_stage_and_gives_memory_back() -> None:
    def stop() -> bool:
        raise ClosedError("stopped")

    async with AsyncStager(backing="shared") as stager:
        staging = launched(stager, {"t": torch.ones(MIB)}, Moving(stop))
        with pytest.raises(ClosedError):
            await staging.copied
        staging.release()
        assert stager.statistics().leased_bytes == 0


async def test_small_tensors_are_not_worth_the_asking() -> None:
    async with AsyncStager(backing="shared") as stager:
        filler = Moving(lambda: True)
        staging = launched(stager, {f"t{number}": torch.ones(64) for number in range(500)}, filler)
        await staging.copied
        assert filler.pieces == []
        staging.release()


def many(value: float) -> dict[str, torch.Tensor]:
    base = torch.arange(9000.0) + value
    state = {f"part{number}": base[number : number + 3] for number in range(0, 9000, 6)}
    state |= {f"t{number}": torch.full((number % 300 + 1,), value + number) for number in range(3000)}
    return state | {"larger": torch.arange(100_000.0) + value, "whole": base, "tied": base}


async def test_many_small_tensors_are_handed_over_in_one_table(tmp_path: Path, asked: list[bool | None]) -> None:
    await up()
    state = many(0.5)
    async with AsyncStager(backing="shared") as stager:
        for number in range(3):  # by a new plan, by the same plan, and with other numbers in the same tensors
            if number == 2:
                for tensor in state.values():
                    tensor.add_(1.0)
            wanted = {name: tensor.clone() for name, tensor in state.items()}
            await sidestream.save(
                state, tmp_path / f"{number}", stager=stager, options=sidestream.SaveOptions(writer="process")
            )
            assert_same(wanted, await back(tmp_path / f"{number}"))
        assert asked == [True] * 3
        await sidestream.save(
            many(7.0), tmp_path / "other", stager=stager, options=sidestream.SaveOptions(writer="process")
        )
        assert asked == [True] * 4
        assert stager.plans.made == 2
    assert_same(many(7.0), await back(tmp_path / "other"))
    assert (await sidestream.verify(tmp_path / "other")).ok


async def test_tables_beside_pieces_and_what_the_trainer_copies(tmp_path: Path, asked: list[bool | None]) -> None:
    """Each window is of one kind, and one request has several of them."""
    await up()
    small = {f"t{number}": torch.full((200,), float(number)) for number in range(2500)}
    state = {"large": torch.arange(9.0 * MIB), **small, "strided": torch.arange(12.0 * MIB).view(2, -1).t()}
    async with AsyncStager(budget_bytes=96 * MIB, backing="shared") as stager:
        for name in ("first", "second"):
            await sidestream.save(
                state, tmp_path / name, stager=stager, options=sidestream.SaveOptions(writer="process")
            )
            assert_same(state, await back(tmp_path / name))
    assert set(asked) == {True}


@pytest.mark.parametrize(("nbytes", "problem"), [(0, "freed or shrunk"), (64, "freed or shrunk"), (1 << 20, "resized")])
async def test_a_small_source_that_moves_meanwhile_is_an_error(nbytes: int, problem: str) -> None:
    moved = torch.ones(100)
    state: dict[str, object] = {**many(1.0), "moved": moved}

    def move() -> bool:
        moved.untyped_storage().resize_(nbytes)
        return True

    async with AsyncStager(backing="shared") as stager:
        for answer in (lambda: True, move):  # the second time by a plan that is known
            filler = Moving(answer)
            staging = launched(stager, state, filler)
            if answer is move:
                with pytest.raises(UnsupportedTensorError, match=problem):
                    await staging.copied
            else:
                await staging.copied
            assert len(filler.pieces) > 2000
            staging.release()
        assert stager.plans.made == 1
        assert stager.statistics().leased_bytes == 0


async def test_a_table_that_cannot_be_read_is_copied_here() -> None:
    state: dict[str, object] = dict(many(3.0))
    async with AsyncStager(backing="shared") as stager:
        staging = launched(stager, state, Moving(lambda: False))
        await staging.copied
        content = b"".join(bytes(image.lease().view) for image in staging.images)
        assert many(3.0)["t299"].numpy().tobytes() in content
        staging.release()


def test_pieces_of_a_process_are_read_in_few_calls() -> None:
    sources = [os.urandom(size) for size in [1, 4000, 7, 300_000, 200_000, *range(1, 1500)]]
    sizes = array("Q", map(len, sources))
    kept = [ctypes.create_string_buffer(source, len(source)) for source in sources]
    target = ctypes.create_string_buffer(sum(sizes))
    starts = array("Q", [ctypes.addressof(target) + sum(sizes[:number]) for number in range(len(sizes))])
    addresses = array("Q", map(ctypes.addressof, kept))
    read_pieces(os.getpid(), addresses, starts, sizes)
    assert target.raw == b"".join(sources)
    for wrong in (0, 900, len(sizes) - 1):
        bad = addresses[:wrong] + array("Q", [16]) + addresses[wrong + 1 :]
        with pytest.raises(OSError, match="Bad address"):
            read_pieces(os.getpid(), bad, starts, sizes)
    read_pieces(os.getpid(), array("Q"), array("Q"), array("Q"))


def test_a_request_has_pieces_and_tables() -> None:
    pieces: list[PackedPiece] = [(1, 2, 3, 4), (5, 6, 7, 1 << 40)]
    tables: list[PackedTable] = [(1, 9, 2, bytes(range(32))), (3, 4, 0, b""), (5, 6, 1, bytes(16))]
    for some in ((pieces, tables), (pieces, []), ([], tables), ([], [])):
        assert unpack_fill(pack_fill(*some)) == some


async def test_a_stage_that_skips_does_not_skip_once_it_has_begun(tmp_path: Path, asked: list[bool | None]) -> None:
    await up()
    for when in ("skip", "fail"):
        async with AsyncStager(budget_bytes=24 * MIB, when_full=when) as stager:  # type: ignore[arg-type]
            await sidestream.save(
                state_of(2.0), tmp_path / when, stager=stager, options=sidestream.SaveOptions(writer="process")
            )
    assert set(asked) == {True}
