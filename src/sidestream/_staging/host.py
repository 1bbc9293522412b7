"""Copies within host memory."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import TypeAlias

import torch

from .._runtime.gil import memmove_holding_gil
from .._runtime.rate import RateLimiter
from .._runtime.threads import Stop, TorchThreads, pause_if_due
from .._runtime.torch_probes import convert_all, copyable, extent_bytes, lazy_bits
from ..errors import ClosedError, UnsupportedTensorError
from .image import Copies, Copy
from .small import copy_run

_CHUNK_BYTES = 16 << 20
_HOLD_GIL_BYTES = 256 << 10  # up to some 25 us with the GIL; for larger copies ctypes releases it
_STRIDED_ELEMENTS = 1 << 15
_UNIT_COPIES = 64


class HostEngine:
    """Copies chunk by chunk in ``threads`` threads, including the caller's (None: one for every two cores, at most 4).

    OpenMP is not used. Its teams would start threads for every stage and occupy all cores (a loop lagged 147 ms).
    """

    def __init__(self, threads: int | None = None) -> None:
        count = threads or max(1, min(4, (os.cpu_count() or 1) // 2))
        self._helpers = TorchThreads("sidestream-copy", count - 1) if count > 1 else None
        self._helper_count = count - 1

    def fill(
        self, copies: Sequence[Copy], base: int, *, advance: Callable[[int], None], pace: RateLimiter, stop: Stop
    ) -> None:
        """Make all ``copies`` into the memory at address ``base``. Calls ``advance`` with the offset up to which the
        memory is filled.

        When this returns or raises, no thread writes into the memory any more. Raises ``ClosedError`` when ``stop`` is
        set.
        """
        # The calling thread works too, so a stage makes progress also if the system starts no thread. The threads take
        # units until none is left. ``advance`` is called only for what is complete without a gap, because the reader
        # sees an offset.
        crew = _Crew(_units(copies), advance)
        others: list[Future[None]] = []
        try:
            if self._helpers is not None:
                for _ in range(min(self._helper_count, len(crew.units) - 1)):
                    try:
                        others.append(self._helpers.submit(self._work, crew, base, pace, stop))
                    except ClosedError:
                        raise
                    except RuntimeError:  # the system starts no thread: this one makes the copies
                        break
            self._work(crew, base, pace, stop)
        except BaseException as error:
            crew.fail(error)  # the other threads stop after their current unit
            raise
        finally:
            # Also after an error: the caller releases the memory next, and no thread may write into it then. A thread
            # that has not begun is cancelled, and is not waited for.
            wait([other for other in others if not other.cancel()])
        crew.check()

    def close(self) -> None:
        """Close the threads. Each ends when its work has ended."""
        if self._helpers is not None:
            self._helpers.close()

    def _work(self, crew: _Crew, base: int, pace: RateLimiter, stop: Stop) -> None:
        while (index := crew.take()) is not None:
            try:
                stop.check()
                unit = crew.units[index]
                self._make(unit, base, pace, stop)
                if len(unit) > 1:  # a unit of one large copy has released the GIL already
                    pause_if_due()
            except BaseException as error:
                crew.fail(error)
                return
            crew.finish(index)

    def _make(self, unit: _Unit, base: int, pace: RateLimiter, stop: Stop) -> None:
        if isinstance(unit, _Run) and copy_run(unit.copies, unit.first, unit.last, base):
            pace.spend(unit.nbytes, stop)
            return
        for copy in unit:
            pace.spend(copy.nbytes, stop)
            if copy.dtype is None:
                self.copy(copy, base + copy.offset, stop=stop)
        converted = [copy for copy in unit if copy.dtype is not None]
        if converted:
            self.convert(converted, base)

    def copy(self, copy: Copy, address: int, *, stop: Stop) -> None:
        """Make ``copy`` into the host memory at ``address``.

        Raises ``UnsupportedTensorError`` if the memory of the source is gone, ``ClosedError`` when ``stop`` is set.
        """
        if copy.dtype is not None:
            self.convert([copy], address - copy.offset)
            return
        start = raw_start(copy)
        # A copy with a dtype is above. There are four other cases. The bytes lie in one run and are few: they are
        # copied with the GIL. They lie in one run: in chunks, without the GIL. All elements are strided: torch gathers
        # them. Some rows of a strided tensor: the rows are gathered into other memory, and the wanted bytes are copied
        # from there.
        if start is not None and copy.nbytes <= _HOLD_GIL_BYTES:  # as below, but faster for thousands of small tensors
            storage = copy.source.untyped_storage()
            check_extent(storage, start + copy.nbytes)
            memmove_holding_gil(address, storage.data_ptr() + start, copy.nbytes)
        elif start is not None:
            storage = copy.source.untyped_storage()
            for done, size in _chunks(copy.nbytes):
                stop.check()
                check_extent(storage, start + done + size)
                # The address is read again for each chunk: a resize moves a storage and frees its former memory.
                _memmove(address + done, storage.data_ptr() + start + done, size)
        elif copy.nbytes == copy.source.nbytes:
            self._gather(copy.source, address, copy.nbytes, stop)
        else:
            rows, skip = rows_with(copy.source, copy.skip, copy.nbytes)
            whole = torch.empty(rows.shape, dtype=rows.dtype)
            self._gather(rows, whole.data_ptr(), whole.nbytes, stop)
            move(whole.data_ptr() + skip, address, copy.nbytes)

    def convert(self, copies: Sequence[Copy], base: int) -> None:
        """Make ``copies``, all of which have a dtype, into the memory at address ``base``.

        One call of torch converts all of them, because beside a busy thread each call waits for the GIL. The copies are
        cut into pieces so small that torch converts them in this thread.

        Raises ``UnsupportedTensorError`` if the memory of a source is gone.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for copy in copies:
            assert copy.dtype is not None
            raw = (ctypes.c_char * copy.nbytes).from_address(base + copy.offset)
            target, (source, skip) = torch.frombuffer(raw, dtype=copy.dtype), elements_of(copy)
            check_extent(source.untyped_storage(), extent_bytes(source))
            if source.numel() > target.numel():  # the copy needs only a part of the rows
                rows = torch.empty(source.shape, dtype=copy.dtype)
                with torch.no_grad():
                    convert_all(*zip(*_pieces(rows, source), strict=True))
                source = rows.view(-1)[skip : skip + target.numel()]
            pairs = _pieces(target.view(source.shape), source)
            targets += [one for one, _ in pairs]
            sources += [one for _, one in pairs]
        with torch.no_grad():
            convert_all(targets, sources)

    @staticmethod
    def _gather(source: torch.Tensor, address: int, nbytes: int, stop: Stop) -> None:
        """Copy the elements of a strided tensor in row-major order, in pieces so small that torch copies them in this
        thread."""
        raw = (ctypes.c_char * nbytes).from_address(address)
        source = copyable(source)
        target = torch.frombuffer(raw, dtype=source.dtype).view(source.shape)
        with torch.no_grad():
            for destination, piece in _pieces(target, source):
                stop.check()
                check_extent(piece.untyped_storage(), extent_bytes(piece))
                destination.copy_(piece)


def move(source: int, target: int, nbytes: int) -> None:
    """Copy memory whose address does not change meanwhile."""
    if nbytes <= _HOLD_GIL_BYTES:  # the generator below is slow for thousands of small tensors
        memmove_holding_gil(target, source, nbytes)
        return
    for done, size in _chunks(nbytes):
        _memmove(target + done, source + done, size)


class _Buffer(ctypes.Structure):
    """The first field of ``Py_buffer``, and space for the rest. It has been the first one since CPython 3.0."""

    _fields_ = (("start", ctypes.c_void_p), ("rest", ctypes.c_void_p * 16))


def memory_behind(view: memoryview) -> ctypes.Array[ctypes.c_char]:
    """Return the memory of a view that may be read-only. Unlike the view, the result does not make
    ``torch.frombuffer`` warn. It refers to the view. The caller must not write to it."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    array = (ctypes.c_char * len(view)).from_address(buffer.start or 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    array.owner = view  # type: ignore[attr-defined]
    return array


def check_extent(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Raise ``UnsupportedTensorError`` if ``storage`` has fewer than ``nbytes`` now."""
    if storage.nbytes() < nbytes:
        raise UnsupportedTensorError("the storage of a tensor was freed or shrunk while it was staged: fence() first")


def _memmove(target: int, source: int, nbytes: int) -> None:
    if nbytes <= _HOLD_GIL_BYTES:
        memmove_holding_gil(target, source, nbytes)
    else:
        ctypes.memmove(target, source, nbytes)


def _chunks(nbytes: int) -> Iterator[tuple[int, int]]:
    for done in range(0, nbytes, _CHUNK_BYTES):
        yield done, min(_CHUNK_BYTES, nbytes - done)


def _pieces(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if source.numel() < _STRIDED_ELEMENTS or source.dim() == 0:
        return [(target, source)]
    rows = source.shape[0]
    per_piece = max(1, _STRIDED_ELEMENTS * rows // source.numel())
    if per_piece > 1 or source.dim() == 1:
        return list(zip(torch.split(target, per_piece), torch.split(source, per_piece), strict=True))
    return [pair for row in range(rows) for pair in _pieces(target[row], source[row])]


class _Run:
    """A run of small copies that are made with one call of ``copy_run``."""

    def __init__(self, copies: Copies, first: int, last: int) -> None:
        self.copies, self.first, self.last = copies, first, last
        self.nbytes = sum(copies.columns.sizes[first:last])

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[Copy]:
        return iter(self.copies[self.first : self.last])


_Unit: TypeAlias = tuple[Copy, ...] | _Run


def _end(unit: _Unit) -> int:
    last = unit.copies[unit.last - 1] if isinstance(unit, _Run) else unit[-1]
    return last.offset + last.nbytes


class _Crew:
    """Units of work for several threads, and the number of units that are complete without a gap."""

    def __init__(self, units: Sequence[_Unit], advance: Callable[[int], None]) -> None:
        self.units = units
        self._advance = advance
        self._lock = threading.Lock()
        self._next = self._complete = 0
        self._done = [False] * len(units)
        self._error: BaseException | None = None

    def take(self) -> int | None:
        """Return the index of the next unit. None when all are taken or one has failed."""
        with self._lock:
            if self._error is not None or self._next == len(self.units):
                return None
            self._next += 1
            return self._next - 1

    def finish(self, index: int) -> None:
        with self._lock:
            self._done[index] = True
            before = self._complete
            while self._complete < len(self.units) and self._done[self._complete]:
                self._complete += 1
            if self._complete > before:
                self._advance(_end(self.units[self._complete - 1]))

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._error = self._error or error

    def check(self) -> None:
        """Raise the first error of a thread."""
        if self._error is not None:
            raise self._error


def _units(copies: Sequence[Copy]) -> list[_Unit]:
    if not isinstance(copies, Copies):
        return [*_general_units(copies)]
    units: list[_Unit] = []
    done = 0
    for first, last in copies.columns.runs:
        units += _general_units(copies[done:first])
        units.append(_Run(copies, first, last))
        done = last
    return [*units, *_general_units(copies[done:])]


def _general_units(copies: Iterable[Copy]) -> list[tuple[Copy, ...]]:
    """Divide copies into units of up to 16 MiB: large copies are cut into pieces, small ones are joined."""
    units: list[tuple[Copy, ...]] = []
    group: list[Copy] = []
    held = 0
    for copy in copies:
        if held + copy.nbytes > _CHUNK_BYTES or len(group) == _UNIT_COPIES:
            units.append(tuple(group))
            group, held = [], 0
        if copy.nbytes > _CHUNK_BYTES and (raw_start(copy) is not None or _flat(copy.source)):
            units += [(piece,) for piece in pieces_in(copy, _CHUNK_BYTES)]
        else:
            group.append(copy)
            held += copy.nbytes
    units.append(tuple(group))
    return [unit for unit in units if unit]


def pieces_in(copy: Copy, nbytes: int) -> Iterator[Copy]:
    """Cut ``copy`` into pieces of at most ``nbytes``, a multiple of the size of every element."""
    start = raw_start(copy)
    for done in range(0, copy.nbytes, nbytes):
        size = min(nbytes, copy.nbytes - done)
        if start is None:
            yield Copy(copy.source, copy.offset + done, size, None, copy.skip + done, copy.dtype)
        else:
            yield Copy(copy.source, copy.offset + done, size, start + done)


def raw_start(copy: Copy) -> int | None:
    """Return the offset of the bytes in the storage of the source. None if they have to be gathered or converted
    element by element."""
    if copy.storage_start is not None:
        return copy.storage_start
    if copy.dtype is None and _flat(copy.source):
        return int(copy.source.storage_offset()) * copy.source.itemsize + copy.skip
    return None


def elements_of(copy: Copy) -> tuple[torch.Tensor, int]:
    """Return a part of the source that has all elements of a copy with a dtype, and how many elements of that part
    precede them."""
    assert copy.dtype is not None
    source = copy.source
    first, count = copy.skip // copy.dtype.itemsize, copy.nbytes // copy.dtype.itemsize
    if count == source.numel():
        return source, 0
    if _flat(source):
        return source.view(-1)[first : first + count], 0
    rows, skip = rows_with(source, first * source.itemsize, count * source.itemsize)
    return rows, skip // source.itemsize


def _flat(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie in memory one after the other, with their final values."""
    return tensor.is_contiguous() and not lazy_bits(tensor)


def rows_with(tensor: torch.Tensor, skip: int, nbytes: int) -> tuple[torch.Tensor, int]:
    """Return the rows of ``tensor`` that have the ``nbytes`` after the first ``skip`` of its row-major bytes, and how
    many bytes of these rows precede them."""
    while tensor.dim():
        row_bytes = tensor.nbytes // tensor.shape[0]
        first, last = skip // row_bytes, -(-(skip + nbytes) // row_bytes)
        skip -= first * row_bytes
        if last - first > 1 or tensor.dim() == 1:
            return tensor[first:last], skip
        tensor = tensor[first]
    return tensor, skip
