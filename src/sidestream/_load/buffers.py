"""The memory into which the bytes of a checkpoint are read, and the checks of these bytes while they are read."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import nullcontext
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

    __slots__ = ("_crc", "_done", "_range")

    def __init__(self, one: Range) -> None:
        self._range = one
        self._done = self._crc = 0

    def __call__(self, piece: memoryview) -> None:
        """Take the next bytes of the range."""
        if self._range.crc is not None:
            self._take(piece, self._range.crc, self._range.nbytes, 0)
        elif self._range.crcs is not None:
            # Computing a CRC takes less time than getting the GIL back from a busy loop.
            with holding_gil() if len(piece) > _BURST_BYTES else nullcontext():
                self._blocks(piece, self._range.crcs)

    def _blocks(self, piece: memoryview, crcs: bytes) -> None:
        while piece:
            block = self._done // BLOCK_BYTES
            end = min((block + 1) * BLOCK_BYTES, self._range.nbytes)
            (expected,) = unpack_crcs(crcs[4 * block : 4 * block + 4])
            some, piece = piece[: end - self._done], piece[end - self._done :]
            self._take(some, expected, end, block * BLOCK_BYTES)

    def _take(self, piece: memoryview, expected: int, end: int, start: int) -> None:
        self._crc = crc32(piece, self._crc)
        self._done += len(piece)
        if self._done == end:
            if self._crc != expected:
                raise altered(self._range.fqn, self._range.file, self._range.offset + start)
            self._crc = 0
