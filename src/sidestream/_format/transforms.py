"""What stock DCP's extensions did to the bytes of an item, undone: compression with zstd, and nothing else yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from .._runtime.steps import Steps
from ..errors import CorruptCheckpointError, MissingExtraError, UnsupportedCheckpointError

__all__ = ["MOST_EXPANSION", "UnpackBudget", "check_transforms", "may_expand", "require", "unpack"]

MOST_EXPANSION = 1 << 15
"""How many bytes one byte of zstd can stand for: a block of 128 KiB takes four bytes at least."""

_RATIO = 64
_ANYHOW_BYTES = 1 << 30
_VALUES_ANYHOW_BYTES = 64 << 20

_ZSTD = "stream.zstd"
_PIECE_BYTES = 1 << 20
_WINDOW_BYTES = 8 << 20  # what every decoder has to have (RFC 8878); a frame that wants more has to be that large
_MOST_WINDOW_BYTES = 128 << 20


def check_transforms(descriptors: object, fqn: str) -> str | None:
    """The one transform that an item was written through, if any.

    Raises ``UnsupportedCheckpointError`` for another one than zstd in its first version, or several.
    """
    if not descriptors:
        return None
    if not isinstance(descriptors, list) or not all(isinstance(one, str) for one in descriptors):
        raise CorruptCheckpointError(f".metadata: {fqn!r} has transforms that are none", fqn=fqn)
    names = [one.partition("/") for one in descriptors]
    if len(names) == 1 and names[0][0] == _ZSTD and names[0][2].partition(".")[0] == "1":
        return _ZSTD
    told = ", ".join(ascii(one[:80])[1:-1] for one in descriptors[:4])
    raise UnsupportedCheckpointError(
        f"{fqn!r} was written through the transform {told}, which this version does not undo; "
        "load it with torch.distributed.checkpoint"
    )


def may_expand(packed_bytes: int) -> int:
    """Return how many bytes all compressed tensors of a checkpoint may expand to, if their items have ``packed_bytes``
    together.

    One item may expand to 32 Ki times its size, as zeros do. A checkpoint that consists of such items is refused,
    because a few megabytes would require terabytes of memory.
    """
    return _ANYHOW_BYTES + _RATIO * packed_bytes


class UnpackBudget:
    """The size that all compressed values read by one call may expand to together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = _VALUES_ANYHOW_BYTES

    def unpack(self, raw: bytes | bytearray, most_bytes: int) -> Steps[bytearray]:
        """Call ``unpack`` within the limits of the budget."""
        with self._lock:
            self._left += _RATIO * len(raw)
            most_bytes = min(most_bytes, self._left)
        content = yield from unpack(raw, most_bytes)
        with self._lock:
            self._left -= len(content)
        return content


def require() -> None:
    """Raise ``MissingExtraError`` unless there is a package that can decompress."""
    _zstandard() or _pyzstd()


def unpack(raw: bytes | bytearray, most_bytes: int) -> Steps[bytearray]:
    """The content of zstd frames. What is allocated grows with what really comes out of them.

    Raises ``CorruptCheckpointError`` for what is no zstd or expands to more than ``most_bytes``, ``MissingExtraError``.
    """
    window_bytes = max(_WINDOW_BYTES, min(most_bytes, _MOST_WINDOW_BYTES))
    frames = _with_zstandard if _zstandard() else _with_pyzstd
    content = bytearray()
    try:
        for piece in frames(raw, window_bytes):
            yield
            content += piece
            if len(content) > most_bytes:
                raise CorruptCheckpointError(
                    f"malformed zstd: it expands to more than the {most_bytes} bytes that it stands for"
                )
    except _errors() as error:
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
                return  # cut off: what was wrapped is found incomplete
            yield decompressor.decompress(b"", _PIECE_BYTES)
        left = decompressor.unused_data


def _zstandard() -> bool:
    try:
        import zstandard  # noqa: F401
    except ImportError:
        return False
    return True


def _pyzstd() -> bool:
    try:
        import pyzstd  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "the checkpoint is compressed with zstd, and neither zstandard nor pyzstd is installed: "
            "pip install 'sidestream[zstd]'",
            extra="zstd",
        ) from None
    return True


def _errors() -> tuple[type[Exception], ...]:
    """What the package in use complains with."""
    if _zstandard():
        import zstandard

        return (zstandard.ZstdError,)
    import pyzstd

    return (pyzstd.ZstdError,)
