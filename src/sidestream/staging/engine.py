"""The seam between what is staged and how bytes move.

``HostEngine`` copies host memory with ``memmove``; an accelerator's engine would order the copies on streams instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch

from .._threads import Stop
from ..errors import UnsupportedTensor
from .image import Copy

__all__ = ["Engine", "HostEngine"]

_CHUNK_BYTES = 16 << 20
_HOLD_GIL_BYTES = 256 << 10
_STRIDED_ELEMENTS = 1 << 15

# Below 256 KiB (some 25 us) the copy is made while the GIL is held: releasing it costs up to a switch interval (5 ms)
# to get it back from a busy thread, which 10,000 small tensors cannot afford. Above, ctypes releases it.
_memmove_holding_gil = ctypes.PyDLL(None).memmove
_memmove_holding_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove_holding_gil.restype = ctypes.c_void_p


class Engine(Protocol):
    """Moves bytes from tensors into host memory."""

    def copy(self, copy: Copy, address: int, *, stop: Stop, copied: Callable[[int], None]) -> None:
        """Put ``copy`` at host ``address``; ``copied`` is told the bytes done so far after each chunk.

        Runs in a thread of the stager's. Raises ``Closed`` when ``stop`` is set between two chunks.
        """


class HostEngine:
    """Copies in the calling thread, chunk by chunk, without OpenMP teams: they would start threads of their own for
    every stage, and hold all cores (a loop was seen to lag 147 ms)."""

    def copy(self, copy: Copy, address: int, *, stop: Stop, copied: Callable[[int], None]) -> None:
        source = copy.source
        start = copy.storage_start
        if start is None:
            start = int(source.storage_offset()) * source.itemsize
        if source.untyped_storage().nbytes() < start + (copy.nbytes if source.is_contiguous() else 1):
            raise UnsupportedTensor("the storage of a tensor was freed or shrunk while it was staged: fence() first")
        if copy.storage_start is not None:
            self._move(source.untyped_storage().data_ptr() + copy.storage_start, address, copy.nbytes, stop, copied)
        elif source.is_contiguous() and not source.is_conj() and not source.is_neg():
            self._move(source.data_ptr(), address, copy.nbytes, stop, copied)
        else:
            self._gather(source, address, copy.nbytes, stop)
            copied(copy.nbytes)

    @staticmethod
    def _move(source: int, target: int, nbytes: int, stop: Stop, copied: Callable[[int], None]) -> None:
        if nbytes <= _HOLD_GIL_BYTES:
            _memmove_holding_gil(target, source, nbytes)
            copied(nbytes)
            return
        for start in range(0, nbytes, _CHUNK_BYTES):
            stop.check()
            size = min(_CHUNK_BYTES, nbytes - start)
            ctypes.memmove(target + start, source + start, size)
            copied(start + size)

    @staticmethod
    def _gather(source: torch.Tensor, address: int, nbytes: int, stop: Stop) -> None:
        """Row-major elements of a strided tensor, in pieces small enough that torch copies them in this thread."""
        raw = (ctypes.c_char * nbytes).from_address(address)
        target = torch.frombuffer(raw, dtype=source.dtype).view(source.shape)
        with torch.no_grad():
            for destination, piece in _pieces(target, source):
                stop.check()
                destination.copy_(piece)


def _pieces(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if source.numel() < _STRIDED_ELEMENTS or source.dim() == 0:
        return [(target, source)]
    rows = source.shape[0]
    per_piece = max(1, _STRIDED_ELEMENTS * rows // source.numel())
    if per_piece > 1 or source.dim() == 1:
        return list(zip(torch.split(target, per_piece), torch.split(source, per_piece), strict=True))
    return [pair for row in range(rows) for pair in _pieces(target[row], source[row])]
