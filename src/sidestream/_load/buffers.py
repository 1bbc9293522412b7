"""The memory into which the bytes of a checkpoint are read, and the checks of these bytes while they are read."""

from __future__ import annotations

import ctypes
import mmap
from typing import TypeAlias

import torch

from .._format.checksum import crc32, unpack_crcs
from .._format.records import BLOCK_BYTES
from .._layout.checks import altered
from .._layout.ranges import Range
from .._runtime.threads import holding_gil
from ..errors import allocating

__all__ = ["Check", "Memory", "Scratch", "memory_of"]

Memory: TypeAlias = mmap.mmap | bytearray

_BURST_BYTES = 4 * BLOCK_BYTES


class Scratch:
    """Memory for bytes that cannot be read to their place directly. It is used again, because touching new pages costs
    more than reading."""

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []  # one for each batch in flight; list methods are atomic

    def take(self, nbytes: int) -> Memory:
        if nbytes <= 1 << 16:
            return bytearray(nbytes)  # only for few bytes: clearing the pages of a large one would hold the GIL
        try:
            spare: mmap.mmap | None = self._spare.pop()
        except IndexError:
            spare = None
        if spare is not None and len(spare) >= nbytes:
            return spare
        with allocating("memory to read into"):
            return mmap.mmap(-1, nbytes)

    def give_back(self, memory: Memory | None) -> None:
        """Give back memory into which no thread reads any more."""
        if isinstance(memory, mmap.mmap):
            self._spare.append(memory)


def memory_of(tensor: torch.Tensor, start: int, nbytes: int) -> memoryview:
    """Return ``nbytes`` of the memory of a tensor, from byte ``start`` on. The view keeps the tensor alive."""
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() + start)
    array.owner = tensor  # type: ignore[attr-defined]  # a thread that hangs in a read keeps its target alive
    return memoryview(array).cast("B")


class Check:
    """The comparison of a range with its checksums, if it has any, while it is read. Raises
    ``CorruptCheckpointError``."""

    __slots__ = ("_crc", "_done", "_end", "_expected", "_range", "_step")

    def __init__(self, one: Range) -> None:
        self._range = one
        self._done = self._crc = 0
        self._step = BLOCK_BYTES  # each checksum is that of so many bytes
        self._expected = unpack_crcs(one.crcs or b"")
        if one.crc is not None:
            self._step, self._expected = one.nbytes, (one.crc,)
        self._end = min(self._step, one.nbytes)  # of the bytes that the next checksum is for

    def __call__(self, piece: memoryview) -> None:
        """Take the next bytes of the range."""
        if not (self._expected and piece):
            return
        if len(piece) <= self._end - self._done:  # nearly always: readers read pieces of blocks
            self._take(piece)
        elif len(piece) <= _BURST_BYTES or self._step > BLOCK_BYTES:
            self._cut(piece)
        else:  # computing a CRC takes less time than getting the GIL back from a busy loop
            with holding_gil():
                self._cut(piece)

    def _cut(self, piece: memoryview) -> None:
        while piece:
            nbytes = self._end - self._done
            self._take(piece[:nbytes])
            piece = piece[nbytes:]

    def _take(self, piece: memoryview) -> None:
        self._crc = crc32(piece, self._crc)
        self._done += len(piece)
        if self._done < self._end:
            return
        one, number = self._range, (self._done - 1) // self._step
        if self._crc != self._expected[number]:
            raise altered(one.fqn, one.file, one.offset + number * self._step)
        self._crc = 0
        self._end = min(self._end + self._step, one.nbytes)
