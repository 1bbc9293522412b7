"""Plain values as data (``Node``), and as the pickle that stock DCP expects of the same value.

Kinds of a ``Node`` in addition to the bare scalars (None, bool, int, finite float, str)::

    {"list": [...]}  {"tuple": [...]}  {"set": [...]}  {"frozenset": [...]}  {"dict": [[key, value], ...]}
    {"ordered_dict": [[key, value], ...]}  {"bytes": base64}  {"bytearray": base64}  {"complex": [re, im]}
    {"int": hexadecimal}  (beyond 64 bits)      {"float": "nan" | "inf" | "-inf"}
    {"bytesio": [base64, position]}
    {"size": [int, ...]}  {"dtype": "float32"}  {"device": "cuda:0"}
    {"tensor": {"dtype", "shape", "data": base64 of the row-major bytes}}
    {"ndarray": {"dtype": "<u4", "shape", "data": base64}}   {"numpy": {"dtype": "<f8", "data": base64}}

    {"stored": "pickle" | "bytes"}  only the item has the value: a pickle of more than data, or bytes without a pickle

Kinds for other writers only, for types that the caller allowed by their qualified names::

    {"object": {"type", "new": by __new__ alone, "args": [...], and perhaps "elements", "items", "state"}}
    {"type": name}  {"member": [name of the enum, name of the member]}
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any

from .._runtime.pauses import pause_point
from ..errors import CorruptCheckpointError, UnsafeObjectError
from . import pickles as p
from .frame import frame_value, tensor_pickle
from .records import DTYPES, MAX_MANIFEST_BYTES, SLICE_BYTES, Node
from .shared import value_line_of


def node_kind(node: Node) -> tuple[str, Any]:
    """Return ``("scalar", node)``, or the kind and content of a tagged node. Raises ``CorruptCheckpointError`` for
    anything else."""
    if node is None or isinstance(node, (bool, int, float, str)):
        return "scalar", node
    if isinstance(node, dict) and len(node) == 1:
        return next(iter(node.items()))
    raise CorruptCheckpointError("a value of the manifest is not in a form that this version knows")


_SLICE_DIGITS = SLICE_BYTES // 3 * 4


def node_bytes(content: Any) -> bytes:
    """Decode a base64 string of a node, in slices."""
    try:
        starts = range(0, len(content), _SLICE_DIGITS)
        slices = [base64.b64decode(content[at : at + _SLICE_DIGITS], validate=True) for at in starts]
        if any(len(one) != SLICE_BYTES for one in slices[:-1]):
            raise ValueError("padding before the end")
        return b"".join(slices)
    except (binascii.Error, TypeError, ValueError):
        raise CorruptCheckpointError("a value of the manifest holds damaged base64") from None


def bytes_and_position(content: Any) -> tuple[bytes, int]:
    """Return the bytes and the position of an ``io.BytesIO``. The position must not be beyond the end, because a write
    there would fill the gap, however large."""
    data, position = content
    raw = node_bytes(data)
    if type(position) is not int or not 0 <= position <= len(raw):
        raise CorruptCheckpointError("a BytesIO whose position is beyond its bytes")
    return raw, position


def pickle_node(node: Node) -> tuple[bytes, list[bytes]]:
    """Return the value as ``torch.save`` would pickle it, and the storages of the tensors in it."""
    storages: list[bytes] = []
    return b"".join((b"\x80\x02", pickle_part(node, storages), b".")), storages


def value_item(node: Node) -> bytes:
    """Return the item of a value."""
    return frame_value(*pickle_node(node))


_MOST_TIMES = 16  # a node takes less than so many times the bytes of its pickle


class ValueItems:
    """The items of values, one after the other in a file of ``nbytes``."""

    def __init__(self) -> None:
        self._values: list[tuple[str, Node]] = []
        self._items: list[bytes] = []
        self.nbytes = 0

    def add(self, fqn: str, node: Node) -> tuple[int, int]:
        """Append the item of a value, and return its offset and size. Raises ``UnsafeObjectError`` for one that is too
        large for a pickle."""
        try:
            item, offset = value_item(node), self.nbytes
        except UnsafeObjectError as error:
            raise error.within(fqn) from None
        self._values.append((fqn, node))
        self._items.append(item)
        self.nbytes += len(item)
        return offset, len(item)

    def check(self) -> None:
        """Raise ``UnsafeObjectError`` if the values alone make a manifest that no reader accepts."""
        if _MOST_TIMES * self.nbytes <= MAX_MANIFEST_BYTES:
            return
        left = MAX_MANIFEST_BYTES
        for (fqn, node), item in zip(self._values, self._items, strict=True):
            pause_point()
            left -= len(value_line_of(node, len(item)))
            if left < 0:
                raise UnsafeObjectError(
                    f"{fqn}: with it, the plain values take more than the {MAX_MANIFEST_BYTES} bytes of the largest "
                    "manifest that is read; save large ones as tensors"
                )

    def content(self) -> bytes:
        """Return the file. A join of large items releases the GIL."""
        return b"".join(self._items)


def pickle_part(node: Node, storages: list[bytes]) -> bytes:
    """Return the opcodes that push the value. Appends the bytes of tensors in it to ``storages``. The index there is
    the key of the storage."""
    kind, content = node_kind(node)
    if kind == "scalar":
        return _pickle_scalar(content)
    if kind in ("list", "tuple", "set", "frozenset"):
        items = [pickle_part(item, storages) for item in content]
        if kind == "list":
            return p.list_of(items)
        if kind == "tuple":
            return p.tuple_of(*items)
        return p.call(p.global_("builtins", kind), p.list_of(items))
    if kind in ("dict", "ordered_dict"):
        pairs = [(pickle_part(key, storages), pickle_part(value, storages)) for key, value in content]
        if kind == "dict":
            return p.dict_of(pairs)
        return p.call(p.global_("collections", "OrderedDict"), p.list_of(p.tuple_of(*pair) for pair in pairs))
    return _pickle_leaf(kind, content, storages)


def _pickle_scalar(value: object) -> bytes:
    if value is None:
        return p.NONE
    if isinstance(value, bool):
        return p.TRUE if value else p.FALSE
    if isinstance(value, int):
        return p.integer(value)
    if isinstance(value, float):
        return p.real(value)
    return p.text(str(value))


def _pickle_leaf(kind: str, content: Any, storages: list[bytes]) -> bytes:
    match kind:
        case "int":
            return p.integer(int(content, 16))
        case "float":
            return p.real(float(content))
        case "complex":
            return p.call(p.global_("builtins", "complex"), *(pickle_part(part, storages) for part in content))
        case "bytes":
            return _pickle_bytes(node_bytes(content))
        case "bytearray":
            return p.call(p.global_("builtins", "bytearray"), _pickle_bytes(node_bytes(content)))
        case "bytesio":
            raw, position = bytes_and_position(content)
            return p.rebuilt(p.global_("_io", "BytesIO"), p.tuple_of(_pickle_bytes(raw), p.integer(position), p.NONE))
        case "size":
            return p.call(p.global_("torch", "Size"), p.tuple_of(*map(p.integer, content)))
        case "dtype":
            return p.global_("torch", content)
        case "device":
            return p.call(p.global_("torch", "device"), p.text(content))
        case "tensor":
            storages.append(node_bytes(content["data"]))
            return tensor_pickle(content["dtype"], tuple(content["shape"]), str(len(storages) - 1))
        case "ndarray":
            return _pickle_array(content["dtype"], content["shape"], content["data"])
        case "numpy":
            # An index into a 0-d array keeps the type. item() would lose it, and numpy.dtype(...).type is not a call.
            scalar = _pickle_array(content["dtype"], [], content["data"])
            return p.call(p.global_("_operator", "getitem"), scalar, b")")
    raise CorruptCheckpointError(f"a value of the manifest is of the unknown kind {kind!r}")


def _pickle_bytes(raw: bytes) -> bytes:
    """Pickle bytes with protocol 2, which has no opcode for them. The unpickler of torch supports only this
    protocol."""
    return p.call(p.global_("_codecs", "encode"), p.text(raw.decode("latin-1")), p.text("latin1"))


def _pickle_array(dtype: str, shape: list[int], data: str) -> bytes:
    """Pickle ``numpy.array(numpy.ndarray(shape, dtype, bytes))``. It has only public names, and the result owns its
    memory."""
    raw = node_bytes(data)
    over_bytes = p.call(
        p.global_("numpy", "ndarray"), p.tuple_of(*map(p.integer, shape)), p.text(dtype), _pickle_bytes(raw)
    )
    return p.call(p.global_("numpy", "array"), over_bytes)


def check_inline_tensor(content: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return the dtype, shape and bytes of a ``tensor`` node, after a check that they fit each other."""
    dtype, shape, raw = content["dtype"], tuple(content["shape"]), node_bytes(content["data"])
    if dtype not in DTYPES or math.prod(shape) * DTYPES[dtype][0] != len(raw):
        raise CorruptCheckpointError("a tensor inside a value has bytes that do not fit its shape")
    return dtype, shape, raw
