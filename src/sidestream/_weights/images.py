"""Images: versions of weights in memory, each a safetensors file in a memfd of its own.

An image is written through a shared map. Complete, it is unmapped and sealed, and from then on no process can change
it, the one that wrote it included. So readers need no copy and no checksum. The memory is never used for another
version: the kernel frees it when the last descriptor and the last map are gone.

A seal against writes fails as long as any process has a writable map. So forked children do not inherit these maps.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch

from .._convert.streamed import PayloadPiece
from .._convert.targets import OutTensor, safetensors_layout
from .._foreign.safetensors import header_bytes, parse_header
from .._format.checksum import crc32
from .._format.records import BLOCK_BYTES
from .._format.safetensors import PREFIX_BYTES, STAMP
from .._runtime.descriptors import Descriptor, no_fork
from .._runtime.memory_maps import MemoryMap, address_of, advise, pieces, populate_read
from .._runtime.pauses import paced
from .._runtime.threads import Stop, io_threads, pause_point
from .._runtime.torch_probes import dtype_from_name
from .._staging.arena import touch
from .._staging.host import move
from ..errors import ArenaExhaustedError, CorruptCheckpointError

_MEMFD = getattr(os, "MFD_CLOEXEC", 0) | getattr(os, "MFD_ALLOW_SEALING", 0)
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")
_GROUP_BYTES = 16 << 20
_LARGE_BYTES = 64 << 10
_BUSY_S = 10.0
"""How long a seal is tried again, because another process still has the writable map: one that was forked and has not
begun another program yet."""


class VersionLayout(NamedTuple):
    """The layout of an image: its header, and where each tensor begins."""

    header: bytes
    starts: Mapping[str, int]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[OutTensor], aliases: Mapping[str, str]) -> VersionLayout:
        """Lay out ``tensors``, with the further names in ``aliases``. Raises ``UnsupportedTensorError``."""
        (file,), _ = safetensors_layout(tensors, "image", None, aliases)
        ends = list(accumulate((one.nbytes for one in file.tensors), initial=len(file.header)))
        return cls(file.header, {one.fqn: start for one, start in zip(file.tensors, ends, strict=False)}, ends[-1])


@dataclass(frozen=True, slots=True)
class SealedImage:
    """A complete image that no process can change, and the CRC-32 of each of its blocks of 1 MiB (``uint32``)."""

    memory: Descriptor
    sums: Descriptor
    nbytes: int
    freed: Callable[[], object]

    def close(self) -> None:
        """Close the descriptors. Processes that have mapped the image keep it. Idempotent."""
        # The system frees the memory with the last reference to it, which takes 100 ms for a gigabyte. A descriptor is
        # closed while no thread can fork, and all others that open or close one wait for that. So the last reference is
        # a map of one page, which a child does not have.
        last: _ImageMap | None = None
        with suppress(ValueError, OSError), no_fork():  # it is closed already, or there is no memory for a map
            last = _ImageMap.of_file(self.memory.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE)
            advise(address_of(last), mmap.PAGESIZE, getattr(mmap, "MADV_DONTFORK", -1))
        self.memory.close()
        self.sums.close()
        self.freed()
        if last is not None:
            last.close()

    def drop(self) -> None:
        """Close it in a thread: to free a gigabyte takes the system some 100 ms."""
        self.freed()
        try:
            io_threads().submit(self.close)
        except RuntimeError:  # the system starts no thread
            self.close()


class _ImageMap(MemoryMap):
    """A map that is not inherited, and is unmapped by ``close()`` as a rule."""

    inherited = False

    def __del__(self) -> None:
        if not self.closed:
            super().__del__()


class ImageMemory:
    """The memory of an image that is not complete, mapped for writing. ``freed`` is called when its owner, or that of
    the sealed image, has closed or dropped it."""

    def __init__(self, nbytes: int, freed: Callable[[], object]) -> None:
        self.nbytes = nbytes
        try:
            with no_fork():  # a child would have the map, and the image could not be sealed
                self.descriptor = Descriptor(os.memfd_create("sidestream version", _MEMFD))
                os.ftruncate(self.descriptor.fileno(), nbytes)
                self._map = _ImageMap.of_file(self.descriptor.fileno(), nbytes, mmap.MAP_SHARED)
                self.address = address_of(self._map)
                advise(self.address, nbytes, getattr(mmap, "MADV_DONTFORK", -1))
        except OSError as error:
            raise ArenaExhaustedError(f"the system did not grant {nbytes} bytes for a version: {error}") from error
        advise(self.address, nbytes, getattr(mmap, "MADV_HUGEPAGE", -1))
        self._freed = weakref.finalize(self.descriptor, freed)  # however it ends: an error may drop it anywhere
        self._freed.atexit = False

    def touch(self, stop: Stop) -> None:
        """Fault all pages in, slowly, so that the program is not held up. Fresh pages cost ten times the copy."""
        touch(self.address, self.nbytes, busy=stop.is_set)

    def fill(self, layout: VersionLayout, parts: Iterable[PayloadPiece], stop: Stop) -> array[int]:
        """Copy the header and all pieces to their places. Returns the checksums of the blocks. Blocks."""
        blocks = _Blocks(self.address, layout.nbytes)
        ctypes.memmove(self.address, layout.header, len(layout.header))
        ends = dict(layout.starts)
        try:
            blocks.wrote(0, len(layout.header))
            for part in parts:
                stop.check()
                start, nbytes = ends[part.name], part.elements.numel() * part.dtype.itemsize
                if part.elements.dtype == part.dtype:
                    move(part.elements.data_ptr(), self.address + start, nbytes)
                elif nbytes:
                    count = part.elements.numel()
                    torch.frombuffer(self._map, dtype=part.dtype, count=count, offset=start).copy_(part.elements)
                ends[part.name] = start + nbytes
                blocks.wrote(start, nbytes)
                del part  # the window that it refers to can be released
                if nbytes < _LARGE_BYTES:  # a larger copy has released the GIL already
                    pause_point()
        finally:
            blocks.wait()
        return blocks.crcs

    def targets(self, layout: VersionLayout, tensors: Iterable[OutTensor]) -> dict[str, torch.Tensor]:
        """Return tensors over the places, for reads from a checkpoint. They must be gone before ``complete``."""
        return {
            one.fqn: _view(self._map, dtype_from_name(one.dtype), layout.starts[one.fqn], one.shape, one.nbytes)
            for one in tensors
        }

    def complete(self, layout: VersionLayout) -> SealedImage:
        """Seal an image whose tensors are in their places. Blocks."""
        ctypes.memmove(self.address, layout.header, len(layout.header))
        blocks = _Blocks(self.address, layout.nbytes)
        try:
            blocks.wrote(0, layout.nbytes)
        finally:
            blocks.wait()
        return self.seal(blocks.crcs)

    def seal(self, sums: array[int]) -> SealedImage:
        """Unmap the memory and seal it, together with the checksums. Blocks."""
        self._unmap()
        _seal(self.descriptor)
        try:
            with no_fork():
                beside = Descriptor(os.memfd_create("sidestream version sums", _MEMFD))
        except OSError as error:
            raise ArenaExhaustedError(f"the system did not grant memory for checksums: {error}") from error
        content = memoryview(sums).cast("B")
        while content:
            content = content[os.write(beside.fileno(), content) :]
        _seal(beside)
        return SealedImage(self.descriptor, beside, self.nbytes, self._freed)

    def discard(self) -> None:
        """Free the memory. Idempotent."""
        self._unmap()
        self.descriptor.close()
        self._freed()

    def _unmap(self) -> None:
        if self._map.closed:  # other memory may lie at its addresses by now
            return
        # Page by page first: unmapping a gigabyte at once holds up all threads that map memory, for some 25 ms.
        for start, nbytes in pieces(self.nbytes):
            _unmap(self.address + start, nbytes)
        with suppress(BufferError):  # an error refers to a tensor over it, and then the image is not sealed
            self._map.close()


class _Blocks:
    """The blocks of an image that is being written. When the last byte of a block is there its checksum is computed,
    and when a group of blocks is complete it is unmapped, in another thread: that takes twice as long as the copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes
        self._left = [min(BLOCK_BYTES, nbytes - start) for start in range(0, nbytes, BLOCK_BYTES)]
        self._left_in_group = [min(_GROUP_BYTES, nbytes - start) for start in range(0, nbytes, _GROUP_BYTES)]
        self._unmapping: list[Future[int]] = []
        self.crcs = array("I", bytes(4 * len(self._left)))

    def wrote(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        while start < end:
            number = start // BLOCK_BYTES
            size = min(end, (number + 1) * BLOCK_BYTES) - start
            self._left[number] -= size
            start += size
            if not self._left[number]:
                self._complete(number * BLOCK_BYTES, min(BLOCK_BYTES, self._nbytes - number * BLOCK_BYTES))

    def _complete(self, begin: int, nbytes: int) -> None:
        block = (ctypes.c_char * nbytes).from_address(self._address + begin)
        self.crcs[begin // BLOCK_BYTES] = crc32(memoryview(block).cast("B"))
        group = begin // _GROUP_BYTES
        self._left_in_group[group] -= nbytes
        if not self._left_in_group[group]:
            start = group * _GROUP_BYTES
            size = min(_GROUP_BYTES, self._nbytes - start)
            with suppress(RuntimeError):  # the system starts no thread: it is unmapped before the seal
                self._unmapping.append(io_threads().submit(_unmap, self._address + start, size))

    def wait(self) -> None:
        """Wait until no thread unmaps anything: other memory may lie at these addresses later."""
        wait(self._unmapping)


def _unmap(address: int, nbytes: int) -> int:
    return advise(address, nbytes, mmap.MADV_DONTNEED)  # the pages stay in the memfd


def _seal(descriptor: Descriptor) -> None:
    seals = 0
    for name in _SEALS:
        seals |= getattr(fcntl, name)
    limit = time.monotonic() + _BUSY_S
    while True:
        try:
            fcntl.fcntl(descriptor.fileno(), fcntl.F_ADD_SEALS, seals)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > limit:
                raise ArenaExhaustedError(
                    f"a version could not be sealed: {error}; another process has its memory mapped"
                ) from error
        time.sleep(0.01)


# --- the side of the reader ---


class MappedImage:
    """A sealed image, mapped privately: what a program writes into a tensor stays in its process.

    ``tensors`` are views of the map, by all names. Pages are read when they are touched. Images with the same header
    have one ``header``."""

    def __init__(self, memory: Descriptor, sums: Descriptor, nbytes: int) -> None:
        for descriptor in (memory, sums):
            missing = [name for name in _SEALS if not _seals_of(descriptor) & getattr(fcntl, name)]
            if missing:
                raise CorruptCheckpointError(f"a version whose memory lacks {', '.join(missing)}: it may still change")
        if os.fstat(memory.fileno()).st_size != nbytes or nbytes < PREFIX_BYTES:
            raise CorruptCheckpointError(f"a version has not the {nbytes} bytes that were announced")
        self.nbytes = nbytes
        self._sums = array("I", os.pread(sums.fileno(), os.fstat(sums.fileno()).st_size, 0))
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = MemoryMap.of_file(memory.fileno(), nbytes, flags)
        start = PREFIX_BYTES + header_bytes(self._map[:PREFIX_BYTES], nbytes - PREFIX_BYTES, "a version")
        self.header = _parsed(self._map[PREFIX_BYTES:start], nbytes)
        self.tensors = _views(self._map, self.header)

    def make_present(self) -> None:
        """Read all pages, without the GIL, so that no request waits for them."""
        address = address_of(self._map)
        for start, nbytes in pieces(self.nbytes):
            if populate_read(address + start, nbytes):
                return  # a system without this call: requests touch the pages

    def verify(self) -> None:
        """Compare all blocks with their checksums. Raises ``CorruptCheckpointError``."""
        view = memoryview(self._map)
        for number, expected in enumerate(self._sums):
            pause_point()
            if crc32(view[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]) != expected:
                raise CorruptCheckpointError(f"block {number} of a version differs from its checksum")


def _seals_of(descriptor: Descriptor) -> int:
    try:
        return int(fcntl.fcntl(descriptor.fileno(), fcntl.F_GET_SEALS))
    except OSError:  # not a memfd
        return 0


class ImageHeader(NamedTuple):
    """What the header of an image says: dtype, first byte, shape and bytes of each tensor, and for further names of
    tied ones the first."""

    tensors: Mapping[str, tuple[torch.dtype, int, Sequence[int], int]]
    ties: Mapping[str, str]


@lru_cache(maxsize=2)  # the versions of a publisher have one header, and parsing it makes Python collect its whole heap
def _parsed(raw: bytes, nbytes: int) -> ImageHeader:
    """Return the content of the header of an image of ``nbytes`` bytes."""
    header = parse_header(raw, PREFIX_BYTES + len(raw), nbytes, "a version")
    tensors = {
        name: (dtype_from_name(one.dtype), one.start, one.sizes, one.nbytes) for name, one in paced(header.items())
    }
    others = _first_value(raw).items()
    return ImageHeader(tensors, {other: name for other, name in others if name in tensors and other not in STAMP})


def _views(memory: MemoryMap, header: ImageHeader) -> dict[str, torch.Tensor]:
    found = {name: _view(memory, *one) for name, one in paced(header.tensors.items())}
    return {other: found[name] for other, name in header.ties.items()} | found


def _first_value(raw: bytes) -> Mapping[str, str]:
    """Return the metadata of a header, where ties are, without decoding all of it again."""
    text = raw.decode()
    metadata: Mapping[str, str] = json.JSONDecoder().raw_decode(text, len('{"__metadata__":'))[0]
    return metadata


def _view(memory: mmap.mmap, dtype: torch.dtype, start: int, shape: Sequence[int], nbytes: int) -> torch.Tensor:
    if not nbytes:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=start)
    return flat if len(shape) == 1 else flat.view(tuple(shape))
