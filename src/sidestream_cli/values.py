"""Comparing two plain values of checkpoints, with the places of the first differences inside them.

Two values are the same if they have the same types and the same bits. So 1, 1.0 and True differ, 0.0 and -0.0 differ,
and a NaN is the same as a NaN with the same bits. The order of a dict's keys and of a set's elements does not count.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import math
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Inside", "short_repr", "value_differences"]

_SHOWN_CHARS = 60
_PATH_CHARS = 120
_SHOWN_DEPTH = 2
_SHOWN_ELEMENTS = 4
_HEX_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Inside:
    """A difference at ``path`` inside a value, as in ``['betas'][1]``; the path of the value itself is empty."""

    path: str
    what: str


def value_differences(one: Any, other: Any) -> Iterator[Inside]:
    """Yield all differences in the order of ``one``; for a tensor, an array or a text only the first one.

    Each description has a bounded length.
    """
    return (Inside(_short(found.path, _PATH_CHARS), found.what) for found in _compare(one, other, ""))


def _compare(one: Any, other: Any, path: str) -> Iterator[Inside]:
    kind = type(one)
    if kind is not type(other):
        yield Inside(path, f"{_typed(one)} against {_typed(other)}")
    elif isinstance(one, dict):
        yield from _dicts(one, other, path)
    elif isinstance(one, (list, tuple)) and kind is not torch.Size:
        yield from _sequences(one, other, path)
    elif isinstance(one, (set, frozenset)):
        yield from _sets(one, other, path)
    elif isinstance(one, torch.Tensor) or _is_array(one):
        yield from _arrays(one, other, path)
    elif isinstance(one, (str, bytes, bytearray)):
        yield from _texts(one, other, path)
    elif isinstance(one, io.BytesIO):
        yield from _texts(one.getvalue(), other.getvalue(), path)
        if one.tell() != other.tell():
            yield Inside(path, f"at position {one.tell()} against {other.tell()}")
    elif _exact(one) != _exact(other):
        yield Inside(path, _against(one, other))


def _dicts(one: dict[Any, Any], other: dict[Any, Any], path: str) -> Iterator[Inside]:
    # Looked up by their exact form: for a dict the keys 1 and True are equal, and a NaN is not equal to itself.
    mine = {_exact(key): (key, item) for key, item in one.items()}
    theirs = {_exact(key): (key, item) for key, item in other.items()}
    for form, (key, item) in mine.items():
        inner = f"{path}[{_shown(key)}]"
        if form in theirs:
            yield from _compare(item, theirs[form][1], inner)
        else:
            yield Inside(inner, "only in the first")
    for form, (key, _) in theirs.items():
        if form not in mine:
            yield Inside(f"{path}[{_shown(key)}]", "only in the second")


def _sequences(one: Any, other: Any, path: str) -> Iterator[Inside]:
    if len(one) != len(other):
        yield Inside(path, f"{len(one)} elements against {len(other)}")
    for position, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        yield from _compare(mine, theirs, f"{path}[{position}]")


def _sets(one: Any, other: Any, path: str) -> Iterator[Inside]:
    mine = {_exact(element): element for element in one}
    theirs = {_exact(element): element for element in other}
    yield from (Inside(path, f"{_shown(mine[form])} only in the first") for form in mine if form not in theirs)
    yield from (Inside(path, f"{_shown(theirs[form])} only in the second") for form in theirs if form not in mine)


def _arrays(one: Any, other: Any, path: str) -> Iterator[Inside]:
    """Compare tensors, or arrays and scalars of NumPy."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        what = f"{one.dtype} {list(one.shape)} against {other.dtype} {list(other.shape)}"
        yield Inside(path, what.replace("torch.", ""))
        return
    mine, theirs, itemsize = _raw(one), _raw(other), one.dtype.itemsize
    if mine == theirs:
        return
    element, number = _first_and_number(mine, theirs, itemsize)
    index = [int(each) for each in torch.unravel_index(torch.tensor(element), tuple(one.shape))]
    place = f"{path}{''.join(f'[{each}]' for each in index)}"
    what = _elements(_item(one, index), _item(other, index), mine, theirs, element, itemsize)
    yield Inside(place, what + _of_how_many(number, math.prod(one.shape)))


def _texts(one: Any, other: Any, path: str) -> Iterator[Inside]:
    if one == other:
        return
    pairs = enumerate(zip(one, other, strict=False))
    first = next((position for position, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
    start = max(0, first - _SHOWN_CHARS // 4)
    what = f"{_shown(one[start:])} against {_shown(other[start:])}"
    if start:
        what += f", from {'character' if isinstance(one, str) else 'byte'} {start} on"
    yield Inside(path, what)


# --- equality -------------------------------------------------------------------------------------------------------


def _exact(value: Any) -> bytes:
    """Return bytes that are equal only for the same values. Unlike the hash of a number, their hash is not
    predictable."""
    kind = type(value)
    if kind is int:
        content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    elif kind is float:
        content = struct.pack("<d", value)
    elif kind is complex:
        content = struct.pack("<dd", value.real, value.imag)
    elif kind is str:
        content = value.encode("utf-8", "surrogatepass")
    elif kind in (bytes, bytearray):
        content = bytes(value)
    elif isinstance(value, dict):
        content = _joined(sorted(_joined([_exact(key), _exact(item)]) for key, item in value.items()))
    elif isinstance(value, (set, frozenset)):
        content = _joined(sorted(map(_exact, value)))
    elif isinstance(value, (list, tuple)):
        content = _joined(map(_exact, value))
    elif isinstance(value, torch.Tensor) or _is_array(value):
        dtype = getattr(value.dtype, "str", value.dtype)  # NumPy's has the order of bytes
        content = _joined([f"{dtype} {list(value.shape)}".encode(), _raw(value)])
    elif isinstance(value, io.BytesIO):
        content = _joined([value.getvalue(), str(value.tell()).encode()])
    else:  # None, True, a dtype, a device ...: the repr is complete
        content = repr(value).encode("utf-8", "surrogatepass")
    return _joined([f"{kind.__module__}.{kind.__qualname__}".encode(), content])


def _joined(parts: Any) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def _raw(array: Any) -> bytes:
    """Return the bytes of a tensor, or of an array or scalar of NumPy."""
    if not isinstance(array, torch.Tensor):
        return bytes(array.tobytes())
    flat = array.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # without the import there are no arrays
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _first_and_number(one: bytes, other: bytes, itemsize: int) -> tuple[int, int]:
    """Return the first element that differs, and the number of those that do."""
    pair = (torch.frombuffer(bytearray(raw), dtype=torch.uint8).reshape(-1, itemsize) for raw in (one, other))
    differing = torch.ne(*pair).any(1).nonzero()
    return int(differing[0]), len(differing)


# --- representation ------------------------------------------------------------------------------------------------


def _item(array: Any, index: list[int]) -> str:
    """Return an element as text; empty for a dtype whose elements torch cannot read."""
    try:
        return _shown(array[tuple(index)].item())
    except (NotImplementedError, RuntimeError):
        return ""


def _elements(one: str, other: str, mine: bytes, theirs: bytes, element: int, itemsize: int) -> str:
    if one != other:
        return f"{one} against {other}"
    bits = (f"0x{raw[element * itemsize : (element + 1) * itemsize][::-1].hex()}" for raw in (mine, theirs))
    return " against ".join(f"{one} ({each})" if one else each for each in bits)


def _of_how_many(number: int, elements: int) -> str:
    return f", the first of {number} elements that differ" if number > 1 and elements > 1 else ""


def _against(one: Any, other: Any) -> str:
    if _shown(one) != _shown(other):
        return f"{_shown(one)} against {_shown(other)}"
    what = f"{_shown(one)} against {_shown(other)}"
    if type(one) is int:
        differing = one ^ other
        return f"{what}, the lowest bit that differs is bit {(differing & -differing).bit_length() - 1}"
    if type(one) is float:
        return " against ".join(f"{each!r} (0x{struct.pack('>d', each).hex()})" for each in (one, other))
    return f"{what}, with a difference in the part that is not shown"


def _typed(value: Any) -> str:
    return f"{type(value).__name__} {_shown(value)}"


def short_repr(value: Any) -> str:
    """Return a repr of bounded length."""
    return _shown(value)


def _shown(value: Any, depth: int = 0) -> str:
    """Return a repr of bounded length. The time it takes does not grow with the parts that it leaves out."""
    if type(value) is int and value.bit_length() > 4 * _SHOWN_CHARS:  # decimal takes quadratic time, or raises
        digits = f"{abs(value):x}"
        sign = "-" if value < 0 else ""
        return f"{sign}0x{digits[:_HEX_DIGITS]}...{digits[-_HEX_DIGITS:]} ({value.bit_length()} bits)"
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value) if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]!r}..."
    if isinstance(value, torch.Tensor) or _is_array(value):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {list(value.shape)}" if value.ndim else f"{dtype} {_shown(value.item())}"
    if isinstance(value, (dict, list, set, frozenset)) or type(value) is tuple:
        opening, closing = ("[", "]") if isinstance(value, list) else ("(", ")") if type(value) is tuple else ("{", "}")
        return _short(f"{opening}{_listed(value, depth)}{closing}")
    if isinstance(value, io.BytesIO):
        return f"{value.getbuffer().nbytes} bytes"
    return _short(repr(value))


def _listed(value: Any, depth: int) -> str:
    if depth == _SHOWN_DEPTH:
        return "..." if value else ""
    parts = itertools.islice(value, _SHOWN_ELEMENTS)
    if isinstance(value, dict):
        inner = [f"{_shown(key, depth + 1)}: {_shown(value[key], depth + 1)}" for key in parts]
    else:
        inner = [_shown(element, depth + 1) for element in parts]
    return ", ".join(inner) + (", ..." if len(value) > _SHOWN_ELEMENTS else "")


def _short(text: str, most: int = _SHOWN_CHARS) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-(most // 2) :]}"
