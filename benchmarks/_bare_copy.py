"""The least that a save by another process needs: it reads the tensors of its parent, and computes, writes and syncs.

Reads lines of JSON from its input, each a path and a list of addresses and sizes in the memory of the parent, and
answers each with a line. Bytes are read with ``process_vm_readv``, have a CRC-32 per MiB, and are written with direct
I/O by four threads.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

MIB = 1 << 20
WRITE_BYTES = 16 * MIB
MOST = 1000  # pieces in a call


class Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def reader() -> Callable[[int, list[list[int]]], None]:
    """What reads pieces of the parent's memory, one behind the other, to an address."""
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    call.argtypes = (ctypes.c_int, *(2 * (ctypes.c_void_p, ctypes.c_ulong)), ctypes.c_ulong)
    parent = os.getppid()

    def read(into: int, pieces: list[list[int]]) -> None:
        nbytes = sum(size for _, size in pieces)
        here, there = Piece(into, nbytes), (Piece * len(pieces))(*(Piece(*piece) for piece in pieces))
        if call(parent, ctypes.byref(here), 1, there, len(pieces), 0) != nbytes:
            raise OSError(ctypes.get_errno(), "process_vm_readv")

    return read


def batches(pieces: list[list[int]]) -> list[list[list[int]]]:
    """Calls of 1 MiB at most, and of ``MOST`` pieces."""
    found: list[list[list[int]]] = [[]]
    room = MIB
    for address, nbytes in pieces:
        for start in range(0, nbytes, MIB):
            size = min(MIB, nbytes - start)
            if size > room or len(found[-1]) == MOST:
                found.append([])
                room = MIB
            found[-1].append([address + start, size])
            room -= size
    return found


def main() -> None:
    memory = mmap.mmap(-1, -(-int(sys.argv[1]) // WRITE_BYTES) * WRITE_BYTES, flags=mmap.MAP_PRIVATE)
    view = memoryview(memory)
    for start in range(0, len(view), mmap.PAGESIZE):
        view[start] = 0
    base, read = ctypes.addressof(ctypes.c_char.from_buffer(memory)), reader()
    print("ready", flush=True)
    with ThreadPoolExecutor(4) as pool:
        for line in sys.stdin:
            path, pieces = json.loads(line)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
            os.posix_fallocate(descriptor, 0, len(view))

            def put(start: int, descriptor: int = descriptor) -> None:
                for block in range(start, start + WRITE_BYTES, MIB):
                    crc32(view[block : block + MIB])
                os.pwrite(descriptor, view[start : start + WRITE_BYTES], start)

            writes: list[Future[None]] = []
            at = written = 0
            for batch in batches(pieces):
                read(base + at, batch)
                at += sum(size for _, size in batch)
                while at - written >= WRITE_BYTES:
                    writes.append(pool.submit(put, written))
                    written += WRITE_BYTES
            if written < at:
                writes.append(pool.submit(put, written))
            for write in writes:
                write.result()
            os.fsync(descriptor)
            os.close(descriptor)
            print("done", flush=True)


if __name__ == "__main__":
    main()
