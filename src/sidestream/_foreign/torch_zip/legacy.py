"""A reader of files that ``torch.save`` wrote before torch 1.6, or with ``_use_new_zipfile_serialization=False``.

Such a file is a sequence of pickles (magic number, version of the protocol, a description of the machine, the object,
the keys of the storages), followed by the storages in the order of the keys: the number of elements, and the elements.
There are no checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

from ..._runtime.pauses import paced, pause_point
from ...errors import CorruptCheckpointError, UnsupportedCheckpointError
from ..pickles.tensors import PickledStorage, StoredTensor, read_storage
from ..pickles.unpickle import Pairs, decode_next, persistent_in
from ..pickles.values import FILE_GLOBALS

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_FIRST_BYTES = 1 << 20
_MOST_PICKLE_BYTES = 256 << 20
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """The object of a file, the bytes of its pickles, and the offset of each storage."""

    root: object
    pickle_bytes: int
    source: BinaryIO
    starts: Mapping[str, int]

    def locate(self, stored: StoredTensor) -> tuple[int, None]:
        """Return the offset of a storage, which has no checksum. Raises ``CorruptCheckpointError``."""
        if stored.key not in self.starts:
            raise CorruptCheckpointError(f"its storage {stored.key[:80]!r} is not in the file")
        return self.starts[stored.key], None

    def payload(self, stored: StoredTensor, most_bytes: int) -> bytes:
        """Return the bytes of a storage. Raises ``CorruptCheckpointError`` if it is larger than ``most_bytes``."""
        start, _ = self.locate(stored)
        if stored.storage_bytes > most_bytes:
            raise CorruptCheckpointError(
                f"its storage has {stored.storage_bytes} bytes, more than the limit of {most_bytes}"
            )
        self.source.seek(start)
        return self.source.read(stored.storage_bytes)


def read_legacy(source: BinaryIO, file_bytes: int) -> LegacyFile:
    """Read a file of ``file_bytes``. Of the storages only the sizes are read.

    Raises ``CorruptCheckpointError``, ``UnsafeObjectError`` for objects that are more than data, and
    ``UnsupportedCheckpointError`` for a file of a big-endian machine and for views of storages, which torch 0.4
    wrote."""
    root, keys, end = _read_pickles(source, min(file_bytes, _MOST_PICKLE_BYTES))
    storages: dict[str, PickledStorage] = {}
    for one in paced(persistent_in(root)):
        storage = read_storage(one)
        if storages.setdefault(storage.key, storage) != storage:
            raise CorruptCheckpointError(f"the storage {storage.key[:80]!r} has two sizes or types")
    starts = _starts(source, file_bytes, end, keys, storages)
    return LegacyFile(root, end, source, starts)


def _read_pickles(source: BinaryIO, most_bytes: int) -> tuple[object, list[str], int]:
    """Decode the pickles. Their length is not known before, so more of the file is read until they are complete."""
    nbytes = min(most_bytes, _FIRST_BYTES)
    while nbytes < most_bytes:
        source.seek(0)
        try:
            return _pickles(source.read(nbytes))
        except CorruptCheckpointError:
            nbytes = min(most_bytes, 16 * nbytes)
    source.seek(0)
    return _pickles(source.read(nbytes))


def _pickles(data: bytes) -> tuple[object, list[str], int]:
    """Return the object, the keys of the storages, and the end of the pickles."""
    end, parts = 0, []
    for _ in range(5):
        part, end = decode_next(data, end, FILE_GLOBALS)
        parts.append(part)
    magic, protocol, machine, root, keys = parts
    if magic != _MAGIC or protocol != _PROTOCOL:
        raise CorruptCheckpointError("it does not begin as torch.save begins a file")
    if not isinstance(machine, Pairs) or ("little_endian", True) not in list(machine):
        raise UnsupportedCheckpointError("it was written on a big-endian machine")
    if not isinstance(keys, list):
        raise CorruptCheckpointError("it has no list of storages")
    found = [key for key in keys if isinstance(key, str)]
    if len(found) != len(keys) or len(set(found)) != len(found):
        raise CorruptCheckpointError("its list of storages is malformed")
    return root, found, end


def _starts(
    source: BinaryIO, file_bytes: int, end: int, keys: list[str], storages: Mapping[str, PickledStorage]
) -> dict[str, int]:
    """Return the offset of each storage. The number of elements in the file has to be the one in the pickle."""
    starts: dict[str, int] = {}
    for key in keys:
        pause_point()
        storage = storages.get(key)
        if storage is None:
            raise CorruptCheckpointError(
                f"its pickle does not refer to the storage {key[:80]!r}, so the size is unknown"
            )
        source.seek(end)
        count = int.from_bytes(source.read(_COUNT_BYTES), "little")
        starts[key] = end + _COUNT_BYTES
        end = starts[key] + storage.nbytes
        if count != storage.count or end > file_bytes:
            raise CorruptCheckpointError(
                f"its storage {key[:80]!r} has {count} elements where {storage.count} belong, or is cut off"
            )
    return starts
