"""Lines of a manifest as rows: ordinary tensors, which are checked while they are parsed.

All other lines are left to the general code (``manifest.py``, ``validate.py``), which raises an error for invalid ones.
This module accepts only lines that the general code also accepts. ``tests/format/test_rows.py`` compares the two.
"""

from __future__ import annotations

import json
import math
import re
from binascii import a2b_base64
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .checksum import DIGEST_BYTES, block_count
from .records import MAX_FQN_CHARS, SAVED_DTYPES, Key, Row, itemsize
from .validate import check_path, check_shape

_Layout: TypeAlias = tuple[str, tuple[int, ...], int, int]
"""Dtype, shape, bytes of the payload, blocks of the payload."""

# JSON text without quotes, backslashes and control characters needs no decoding. To match such a line takes half of the
# time that a parser takes.
_INTEGER = "(0|[1-9][0-9]{0,17})"
_TEXT = r'"([^"\\\x00-\x1f]*)"'
_LINE = re.compile(
    r'(\["tensor",\["[a-z0-9_]+",\[[0-9,]*\],\[\[\[[0-9,]*\],\[[0-9,]*\],)'  # up to the sizes of the chunk
    rf'{_TEXT},{_INTEGER},{_INTEGER},{_INTEGER},"([A-Za-z0-9+/=]*)"(?:,"([A-Za-z0-9+/=]*)")?\]\]\],{_TEXT},(\[.*\])\]'
)
_REST_OF_LAYOUT = "0]]]]"
_UNKNOWN: _Layout = ("", (), -1, -1)


class Rows:
    """A parser of rows for one manifest with the data files ``files``. ``key_of`` parses a step of a path."""

    def __init__(self, files: Mapping[str, int], *, digests: bool, key_of: Callable[[Any], Key]) -> None:
        self._files = files
        self._digests = digests
        self._key_of = key_of
        self._layouts: dict[str, _Layout | None] = {}

    def read(self, line: str) -> tuple[str, Row] | None:
        """Return the FQN and the row of a line. None if it is not the line of an ordinary tensor."""
        found = _LINE.fullmatch(line)
        if found is None:
            return None
        raw_layout, file, raw_start, raw_nbytes, raw_payload, raw_crcs, raw_digests, fqn, raw_path = found.groups()
        try:
            # The text of dtype and shape is the key, not yet parsed: a training run has few distinct ones, and each is
            # parsed and checked once.
            layout = self._layouts.get(raw_layout, _UNKNOWN)
            if layout is _UNKNOWN:
                layout = self._read_layout(raw_layout)
            if layout is None or len(fqn) > MAX_FQN_CHARS:
                return None
            dtype, shape, payload_bytes, blocks = layout
            start, nbytes, payload = int(raw_start), int(raw_nbytes), int(raw_payload)
            # All that ``validate`` checks of such a tensor, except overlaps with other items. A line that fails is not
            # refused here: the general code reads it again, and raises the error.
            if not start <= payload <= payload + payload_bytes <= start + nbytes <= self._files[file]:
                return None
            crcs, digests = a2b_base64(raw_crcs, strict_mode=True), None
            if len(crcs) != 4 * blocks:
                return None
            if raw_digests is not None:
                digests = a2b_base64(raw_digests, strict_mode=True)
                if len(digests) != DIGEST_BYTES * blocks:
                    return None
            elif self._digests:
                return None
            path: tuple[Key, ...] = (fqn,)
            if raw_path != f'["{fqn}"]':
                path = tuple([self._key_of(key) for key in json.loads(raw_path)])
                check_path(fqn, path)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ):  # CorruptCheckpointError is a ValueError
            return None
        return fqn, (dtype, shape, payload_bytes, file, start, nbytes, payload, crcs, digests, path)

    def _read_layout(self, text: str) -> _Layout | None:
        _, (dtype, shape, ((offsets, sizes, _),)) = json.loads(text + _REST_OF_LAYOUT)
        self._layouts[text] = layout = _layout(dtype, shape, offsets, sizes)
        return layout


def _layout(dtype: str, raw_shape: list[int], offsets: list[int], sizes: list[int]) -> _Layout | None:
    """Return the dtype, shape and bytes of a tensor whose only chunk covers it, or None. Raises what ``check_shape``
    raises."""
    if dtype not in SAVED_DTYPES or sizes != raw_shape or offsets != [0] * len(raw_shape):
        return None
    shape = tuple(raw_shape)
    check_shape("", dtype, shape)
    nbytes = math.prod(shape) * itemsize(dtype)
    return dtype, shape, nbytes, block_count(nbytes)
