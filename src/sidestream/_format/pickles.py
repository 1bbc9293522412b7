"""Writers of pickle opcodes: the ones that ``torch.load`` and stock DCP need, without an object to pickle.

Strings below that look like private names of torch are part of torch's file format, not of its API.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from ..errors import UnsafeObjectError

_length = struct.Struct("<I").pack  # looked up once, because a checkpoint of 10,000 tensors has 50,000 texts

NONE, TRUE, FALSE, EMPTY_DICT = b"N", b"\x88", b"\x89", b"}"


def global_(module: str, name: str) -> bytes:
    return b"c%s\n%s\n" % (module.encode(), name.encode())


_MOST_TEXT_BYTES = (1 << 32) - 1
_SLICE = 1 << 20  # characters that are encoded at a time, because the GIL is held meanwhile; large joins release it


def text(value: str) -> bytes:
    if len(value) <= _SLICE:
        raw = value.encode("utf-8", "surrogatepass")
    else:
        slices = (value[at : at + _SLICE] for at in range(0, len(value), _SLICE))
        raw = b"".join([one.encode("utf-8", "surrogatepass") for one in slices])
        if len(raw) > _MOST_TEXT_BYTES:
            raise UnsafeObjectError(f"text or bytes that take {len(raw)} bytes in a pickle: save a tensor of bytes")
    return b"".join((b"X", _length(len(raw)), raw))


def integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) < 1 << 8:
        return b"\x8a%c" % len(raw) + raw
    return b"\x8b" + struct.pack("<i", len(raw)) + raw


def real(value: float) -> bytes:
    return b"G" + struct.pack(">d", value)


def tuple_of(*items: bytes) -> bytes:
    if not items:
        return b")"
    if len(items) <= 3:
        return b"".join((*items, b"\x85\x86\x87"[len(items) - 1 : len(items)]))
    return b"(" + b"".join(items) + b"t"


def list_of(items: Iterable[bytes]) -> bytes:
    return b"](" + b"".join(items) + b"e"


def dict_of(pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"}(" + b"".join(key + value for key, value in pairs) + b"u"


def call(function: bytes, *arguments: bytes) -> bytes:
    return b"".join((function, tuple_of(*arguments), b"R"))


def rebuilt(kind: bytes, state: bytes) -> bytes:
    """Pickle an object that is made by ``__new__`` without arguments and then by ``__setstate__``."""
    return b"".join((kind, b")\x81", state, b"b"))
