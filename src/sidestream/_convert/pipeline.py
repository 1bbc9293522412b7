"""Payloads on their way from a source to the windows of a target's files, a bounded number of them at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from .._format.dtypes import itemsize
from .._layout.checks import Piece
from .._layout.ranges import Box
from .._load.reader import Reader, Scratch, Wanted, whole
from .._runtime.caller import call
from .._runtime.tasks import in_parallel
from .._runtime.threads import Deadline, io_threads, politely
from .._runtime.torch_probes import dtype_from_name
from .._storage import ReadRange, Transaction
from ..errors import allocating
from ..options import Progress, Verify
from .source import Source, SourceTensor
from .targets import Slice, TargetFile
from .windows import WindowedFile, Windows

__all__ = ["Pipeline"]


@dataclass(slots=True)
class Pipeline:
    """One conversion's data. ``origin`` says by the FQN in the target which tensor of the source it is."""

    source: Source
    origin: Mapping[str, tuple[str, SourceTensor]]
    verify: Verify
    deadline: Deadline
    progress: Progress | None
    total_bytes: int
    _done_bytes: int = 0
    _scratch: Scratch = field(default_factory=Scratch)
    _held: dict[str, torch.Tensor] = field(default_factory=dict)

    async def check(self, pieces: Sequence[Piece]) -> None:
        """Before anything is written: what has one checksum over more than is read at once."""
        queue = iter(pieces)

        async def work() -> None:
            for piece in queue:
                memory = self._scratch.take(piece.nbytes)
                view = memoryview(memory)[: piece.nbytes]
                read = ReadRange(piece.offset, view, partial(piece.check, view))
                await self.source.store.read(f"{self.source.directory}/{piece.file}", [read], deadline=self.deadline)
                self._scratch.give_back(memory)

        await in_parallel(work)

    async def write(self, files: Sequence[TargetFile], into: Transaction) -> None:
        """Write all of ``files``; when this returns or raises, no thread works on them any more."""
        self._tell(0)
        by_name = {file.name: file for file in files}

        async def fill(file: WindowedFile, index: int, view: memoryview) -> None:
            slices, nbytes = await io_threads().run(_slices_of, by_name[file.name], index, deadline=self.deadline)
            await self._fill(slices, view)
            self._tell(nbytes)

        await Windows(fill, self.deadline).write(files, into)

    async def _fill(self, slices: Sequence[Slice], view: memoryview) -> None:
        straight, others = await io_threads().run(self._targets, slices, view, deadline=self.deadline)
        for one, into in others:
            fqn, source = self.origin[one.tensor.fqn]
            if one.nbytes == one.tensor.nbytes:
                await self._read_whole(fqn, source, into.reshape(one.tensor.shape))
            else:
                await self._from_held(fqn, source, one, into)
        if straight:
            await self._reader().read(straight, own=True)

    def _targets(
        self, slices: Sequence[Slice], view: memoryview
    ) -> tuple[list[Wanted], list[tuple[Slice, torch.Tensor]]]:
        """Return the targets that can be read piece by piece, and the slices of tensors that are read whole. Called in
        a worker thread."""
        straight: list[Wanted] = []
        others: list[tuple[Slice, torch.Tensor]] = []
        for one in politely(slices):
            if not one.nbytes:
                continue
            fqn, source = self.origin[one.tensor.fqn]
            size = itemsize(one.tensor.dtype)
            count, first = one.nbytes // size, one.begin // size
            into = torch.frombuffer(view, dtype=dtype_from_name(one.tensor.dtype), count=count, offset=one.at)
            if source.straight is not None:
                straight.append(Wanted(fqn, source.straight, Box((first,), (count,)), into))
            else:
                others.append((one, into))
        return straight, others

    async def _from_held(self, fqn: str, source: SourceTensor, one: Slice, into: torch.Tensor) -> None:
        """A tensor that cannot be read piece by piece is held as a whole for as long as there are pieces to come."""
        held = self._held.get(fqn)
        if held is None:
            with allocating(f"converting {fqn}"):
                held = torch.empty(one.tensor.shape, dtype=dtype_from_name(one.tensor.dtype))
            await self._read_whole(fqn, source, held)
            self._held[fqn] = held
        first = one.begin // itemsize(one.tensor.dtype)
        flat = held.reshape(-1)[first : first + into.numel()]
        await io_threads().run(into.copy_, flat, deadline=self.deadline)
        if one.begin + one.nbytes == one.tensor.nbytes:
            del self._held[fqn]

    async def _read_whole(self, fqn: str, source: SourceTensor, into: torch.Tensor) -> None:
        located = None if source.located is None else {fqn: source.located}
        wanted = [Wanted(fqn, source.entry, whole(source.entry), into)]
        await self._reader().read(wanted, own=self.source.own, located=located)

    def _reader(self) -> Reader:
        source = self.source
        return Reader(source.store, source.directory, self.verify, self.deadline, scratch=self._scratch)

    def _tell(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self.progress is not None:
            call(self.progress, self._done_bytes, self.total_bytes)


def _slices_of(file: TargetFile, index: int) -> tuple[list[Slice], int]:
    """Return the slices that lie in a window of a file, and their size in bytes."""
    slices = list(politely(file.slices(index)))
    return slices, sum(one.nbytes for one in slices)
