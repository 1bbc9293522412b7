"""The inverse of what extensions of stock DCP did to the bytes of an item: compression with zstd, and no other so
far."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from .._format.records import Entry, TensorEntry
from .._runtime.pauses import pause_point
from ..errors import CorruptCheckpointError, MissingExtraError, UnsupportedCheckpointError

_RATIO = 64
TENSORS_ALWAYS_BYTES = 1 << 30
VALUES_ALWAYS_BYTES = 64 << 20

_ZSTD = "stream.zstd"
_PIECE_BYTES = 1 << 20
_WINDOW_BYTES = 8 << 20  # every decoder supports it (RFC 8878); a larger window is allowed for content of that size
_MOST_WINDOW_BYTES = 128 << 20


def check_transforms(descriptors: object, fqn: str) -> str | None:
    """Return the transform of an item, or None.

    Raises ``UnsupportedCheckpointError`` for several transforms, and for any but the first version of zstd.
    """
    if not descriptors:
        return None
    if not isinstance(descriptors, list) or not all(isinstance(one, str) for one in descriptors):
        raise CorruptCheckpointError(f".metadata: {fqn!r} has transforms that are not a list of names", fqn=fqn)
    names = [one.partition("/") for one in descriptors]
    if len(names) == 1 and names[0][0] == _ZSTD and names[0][2].partition(".")[0] == "1":
        return _ZSTD
    names_shown = ", ".join(ascii(one[:80])[1:-1] for one in descriptors[:4])
    raise UnsupportedCheckpointError(
        f"{fqn!r} was written through the transform {names_shown}, which this version cannot reverse; "
        "load it with torch.distributed.checkpoint"
    )


def may_expand(packed_bytes: int) -> int:
    """Return how many bytes all compressed tensors of a checkpoint may expand to, if their items have ``packed_bytes``
    together.

    One item may expand to 32 Ki times its size, as zeros do. A checkpoint that consists of such items is refused,
    because a few megabytes would require terabytes of memory.
    """
    return TENSORS_ALWAYS_BYTES + _RATIO * packed_bytes


def check_expansion(entries: Iterable[Entry]) -> None:
    """Raise ``UnsupportedCheckpointError`` if the compressed tensors would expand to more than ``may_expand``."""
    packed = expanded = 0
    for entry in entries:
        if isinstance(entry, TensorEntry):
            for chunk in entry.chunks:
                if chunk.transform:
                    packed += chunk.item_bytes
                    expanded += math.prod(chunk.sizes) * entry.itemsize
        pause_point()
    if expanded > may_expand(packed):
        raise UnsupportedCheckpointError(
            f"its compressed tensors have {packed} bytes and would expand to {expanded}, a ratio that this version "
            "does not accept; load it with torch.distributed.checkpoint"
        )


class UnpackBudget:
    """The size to which all compressed items of one call may expand together: ``always_bytes``, and more in proportion
    to their own sizes. Thread-safe."""

    def __init__(self, always_bytes: int) -> None:
        self._lock = threading.Lock()
        self._left = always_bytes

    def unpack(self, raw: bytes | bytearray, most_bytes: int) -> bytearray:
        """Call ``unpack`` within the limits of the budget."""
        with self._lock:
            self._left += _RATIO * len(raw)
            most_bytes = min(most_bytes, self._left)
        content = unpack(raw, most_bytes)
        with self._lock:
            self._left -= len(content)
        return content


def unpack(raw: bytes | bytearray, most_bytes: int) -> bytearray:
    """Decompress zstd frames. The allocated memory grows with the decompressed content, not with what a header claims.

    Raises ``CorruptCheckpointError`` if ``raw`` is not zstd or expands to more than ``most_bytes``, and
    ``MissingExtraError``.
    """
    window_bytes = max(_WINDOW_BYTES, min(most_bytes, _MOST_WINDOW_BYTES))
    frames, failure = require()
    content = bytearray()
    try:
        for piece in frames(raw, window_bytes):
            pause_point()
            content += piece
            if len(content) > most_bytes:
                raise CorruptCheckpointError(
                    f"malformed zstd: it expands to more than the {most_bytes} bytes that it may have"
                )
    except failure as error:
        raise CorruptCheckpointError(f"malformed zstd: {ascii(str(error)[:200])[1:-1]}") from None
    return content


def _with_zstandard(raw: bytes | bytearray, window_bytes: int) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=window_bytes)
    with decompressor.stream_reader(raw, read_across_frames=True) as reader:
        while piece := reader.read(_PIECE_BYTES):
            yield piece


def _with_pyzstd(raw: bytes | bytearray, window_bytes: int) -> Iterator[bytes]:
    import pyzstd

    option: dict[int, int] = {pyzstd.DParameter.windowLogMax: (window_bytes - 1).bit_length()}
    left: bytes | memoryview = memoryview(raw)
    while left:
        decompressor = pyzstd.ZstdDecompressor(option=option)
        yield decompressor.decompress(left, _PIECE_BYTES)
        while not decompressor.eof:
            if decompressor.needs_input:
                return  # the frame is cut off; the reader of the content finds that it is incomplete
            yield decompressor.decompress(b"", _PIECE_BYTES)
        left = decompressor.unused_data


def require() -> tuple[Callable[[bytes | bytearray, int], Iterator[bytes]], type[Exception]]:
    """Return the decoder of an installed package, and the error that it raises. Raises ``MissingExtraError``."""
    with suppress(ImportError):
        import zstandard

        return _with_zstandard, zstandard.ZstdError
    with suppress(ImportError):
        import pyzstd

        return _with_pyzstd, pyzstd.ZstdError
    raise MissingExtraError(
        "the checkpoint is compressed with zstd, and neither zstandard nor pyzstd is installed: "
        "pip install 'sidestream[zstd]'",
        extra="zstd",
    )
