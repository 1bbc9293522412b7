"""The bytes of safetensors files, made from the windows of a snapshot in their order."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._layout.save_layout import SavePlan
from .._runtime.memory_maps import MemoryMap
from .._runtime.threads import Stop
from .._runtime.torch_probes import dtype_from_name
from .._staging import FirstReader, SnapshotReader, memory_behind
from ..errors import (
    allocating,
    without_frames,
)
from .targets import OutTensor, SafetensorsFile

_PART_BYTES = 16 << 20


class PayloadPiece(NamedTuple):
    """The next elements of a tensor, which are converted to ``dtype`` when they are copied."""

    name: str
    elements: torch.Tensor
    dtype: torch.dtype


def pieces_of(
    snapshot: SnapshotReader[SavePlan] | FirstReader[SavePlan],
    plan: SavePlan,
    by_item: Mapping[int, OutTensor],
    stop: Stop,
) -> Generator[PayloadPiece]:
    """Yield the payloads of these items, window by window."""
    dtypes = {item: dtype for _, dtype, _, item in plan.named_tensors()}
    window_number = first_item = 0
    for layout in plan.shards:
        for window in layout.windows:
            with snapshot.window(window_number, stop) as view:  # also a window without exported tensors, to release it
                for number, at, nbytes, _ in layout.payloads_in(window):
                    one = by_item.get(first_item + number)
                    if one is not None:
                        yield _piece(one, dtypes[first_item + number], view[at : at + nbytes])
            window_number += 1
        first_item += len(layout.items)


def _piece(one: OutTensor, source: str, view: memoryview) -> PayloadPiece:
    if source == one.dtype:
        return PayloadPiece(one.fqn, torch.frombuffer(memory_behind(view), dtype=torch.uint8), torch.uint8)
    elements = torch.frombuffer(memory_behind(view), dtype=dtype_from_name(source))
    return PayloadPiece(one.fqn, elements, dtype_from_name(one.dtype))


class Stream:
    """The bytes of files, one after the other, made from pieces of tensors in the order of the snapshot."""

    def __init__(self, pieces: Generator[PayloadPiece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._files: list[_StreamedFile] = []

    def file(self, laid: SafetensorsFile) -> _StreamedFile:
        file = _StreamedFile(laid.nbytes, self._content(laid), self._lock)
        self._files.append(file)
        return file

    def close(self) -> None:
        """Release the window of the last piece. The files must not be read after that."""
        with self._lock:
            for file in self._files:
                file.close()
            self._pieces.close()

    def _content(self, laid: SafetensorsFile) -> Generator[PayloadPiece]:
        """Yield the pieces of a file. Pieces that belong at its end are copied and kept until then."""
        yield _bytes_of(laid.header)
        held: dict[str, list[PayloadPiece]] = {one.fqn: [] for one in laid.late}
        left = sum(one.nbytes for one in laid.tensors)
        while left:
            # Pieces arrive in the order of the snapshot, and one at a time: all threads that write parts take them
            # under one lock. Dropping the piece before the next one is asked for lets the snapshot release the window.
            piece = next(self._pieces)
            left -= piece.elements.numel() * piece.dtype.itemsize
            if piece.name in held:
                held[piece.name].append(piece._replace(elements=piece.elements.to(piece.dtype, copy=True)))
            else:
                yield piece
            del piece
        for pieces in held.values():
            yield from pieces


def _bytes_of(content: bytes) -> PayloadPiece:
    return PayloadPiece("", torch.frombuffer(bytearray(content), dtype=torch.uint8), torch.uint8)


class _StreamedFile:
    """A ``Body`` whose parts are made in their order. A thread that needs a part makes all parts before it."""

    aligned = False

    def __init__(self, nbytes: int, content: Generator[PayloadPiece], lock: threading.Lock) -> None:
        self.nbytes = nbytes
        self._content = content
        self._lock = lock
        self._left: PayloadPiece | None = None
        self._error: BaseException | None = None
        self._made: dict[int, memoryview] = {}
        self.parts: Sequence[_Part] = [
            _Part(self, number, start, min(_PART_BYTES, nbytes - start))
            for number, start in enumerate(range(0, nbytes, _PART_BYTES))
        ]
        self._next = 0

    def take(self, number: int, stop: Stop) -> memoryview:
        with self._lock:
            stop.check()
            # The parts of a file have to be made in order, because the snapshot is read once. A thread that needs a
            # later part makes those before it, and leaves them for the others.
            while self._next <= number:
                if self._error is not None:  # the thread that met it may not have set ``stop`` yet
                    raise self._error
                try:
                    self._make_next()
                except BaseException as error:
                    self._error = without_frames(error)
                    raise
            return self._made.pop(number)

    def _make_next(self) -> None:
        part = self.parts[self._next]
        with allocating("memory for a part of an export"):
            memory = MemoryMap(-1, part.nbytes)
        self._fill(memory, part.nbytes)
        self._made[self._next] = memoryview(memory)
        self._next += 1

    def close(self) -> None:
        """Drop the pieces that refer to staged memory. Parts and files refer to each other, so they are freed late."""
        self._content.close()
        self._left = self._error = None
        self._made.clear()

    def _fill(self, memory: MemoryMap, nbytes: int) -> None:
        """Fill a part with the next pieces. Torch copies without the GIL. The copies are aligned, because payloads are
        aligned in the file and parts begin at multiples of 8."""
        done = 0
        while done < nbytes:
            piece = self._left if self._left is not None else next(self._content)
            size = piece.dtype.itemsize
            count = min(piece.elements.numel(), (nbytes - done) // size)
            torch.frombuffer(memory, dtype=piece.dtype, count=count, offset=done).copy_(piece.elements[:count])
            done += count * size
            rest = piece.elements[count:]
            self._left = piece._replace(elements=rest) if rest.numel() else None
            del piece, rest


@dataclass(frozen=True, slots=True)
class _Part:
    file: _StreamedFile
    number: int
    offset: int
    nbytes: int

    def take(self, stop: Stop) -> memoryview:
        return self.file.take(self.number, stop)

    def release(self) -> None:
        """Do nothing: the memory is freed with the last view of it."""
