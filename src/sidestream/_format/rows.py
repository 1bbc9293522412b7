"""Lines of a manifest as rows: ordinary tensors, checked while they are parsed.

What is no row is left to the general code (``manifest.py``, ``validate.py``), which says what is wrong with it, if
anything is. So a row is something that the general code accepts: ``tests/format/test_rows.py`` compares the two.
"""

from __future__ import annotations

import math
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from typing import Any

from .digest import DIGEST_BYTES
from .records import BLOCK_BYTES, DTYPES, Key, Row, itemsize
from .validate import MAX_FQN_CHARS, check_path, check_shape

__all__ = ["Rows"]


class Rows:
    """Makes rows of the lines of one manifest, whose data files are ``files``. ``key_of`` parses a step of a path."""

    def __init__(self, files: Mapping[str, int], *, digests: bool, key_of: Callable[[Any], Key]) -> None:
        self._files = files
        self._digests = digests
        self._key_of = key_of
        self._layouts: dict[str, tuple[str, tuple[int, ...], int] | None] = {}

    def read(self, line: Any) -> tuple[str, Row] | None:
        """Return the FQN and the row of a parsed line; None if it is not that of an ordinary tensor."""
        try:
            kind, (dtype, shape, (chunk,)), fqn, raw_path = line
            offsets, sizes, file, start, nbytes, payload, raw_crcs, *raw_digests = chunk
            # By text, whose hash depends on a secret, and in which 1, 1.0 and true are different.
            name = f"{dtype!r}{shape!r}{offsets!r}{sizes!r}"
            if name not in self._layouts:
                self._layouts[name] = _layout(dtype, shape, offsets, sizes)
            layout = self._layouts[name]
            if layout is None or kind != "tensor" or type(fqn) is not str or len(fqn) > MAX_FQN_CHARS:
                return None
            dtype, shape, payload_bytes = layout
            if not (type(start) is type(nbytes) is type(payload) is int and type(raw_crcs) is str):
                return None
            if not (0 <= start <= payload and payload + payload_bytes <= start + nbytes <= self._files[file]):
                return None
            crcs, digests = a2b_base64(raw_crcs, strict_mode=True), None
            if raw_digests:
                (raw,) = raw_digests
                if type(raw) is not str:
                    return None
                digests = a2b_base64(raw, strict_mode=True)
            blocks = -(-payload_bytes // BLOCK_BYTES)
            if len(crcs) != 4 * blocks or len(digests or b"") != (DIGEST_BYTES * blocks if raw_digests else 0):
                return None
            if self._digests and digests is None:
                return None
            path: tuple[Key, ...] = (fqn,)
            if raw_path != [fqn]:
                path = tuple([self._key_of(key) for key in raw_path])
                check_path(fqn, path)
        except (ValueError, TypeError, KeyError, AttributeError):  # Corrupt is a ValueError
            return None
        return fqn, (dtype, shape, payload_bytes, file, start, nbytes, payload, crcs, digests, path)


def _layout(dtype: Any, raw_shape: Any, offsets: Any, sizes: Any) -> tuple[str, tuple[int, ...], int] | None:
    """Dtype, shape and bytes of a tensor whose only chunk is all of it. Raises as ``check_shape``."""
    if type(dtype) is not str or dtype not in DTYPES or not type(raw_shape) is type(offsets) is type(sizes) is list:
        return None
    if any(type(dim) is not int for dims in (raw_shape, offsets, sizes) for dim in dims):
        return None
    if sizes != raw_shape or offsets != [0] * len(raw_shape):
        return None
    shape = tuple(raw_shape)
    check_shape("", dtype, shape)
    return dtype, shape, math.prod(shape) * itemsize(dtype)
