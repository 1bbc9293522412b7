"""The conversion of decoded pickles to ``Node`` data, without the classes that they name.

``_format/values.py`` lists the kinds. Numbers, strings, bytes, ``io.BytesIO``, containers, ``torch.Size``, dtypes,
devices, dense tensors, and numpy's scalars and arrays of plain numbers are data. Everything else raises an error,
except objects of types that the caller allowed: a ``Node`` records the arguments of such an object and does not
construct it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence, Set
from itertools import chain
from typing import Any

from ..._format.records import MAX_RANK, SLICE_BYTES, Node, itemsize, node_of_bytes
from ..._runtime.pauses import pause_point
from ...errors import CorruptCheckpointError, UnsafeObjectError
from .machine import Global, Pairs, Persistent, PickledCall
from .tensors import TENSOR_GLOBALS, TENSOR_REBUILDERS, DtypeNames, StoredTensor, is_dtype, read_tensor

_PARTS_PER_PAUSE = 64
_NUMPY_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")
_NUMPY_KINDS = re.compile("b1|[iu][1248]|f[248]|c8|c16")
_DEVICE_TYPE = re.compile("[a-z0-9_]{1,32}")
_DEVICE = re.compile(f"{_DEVICE_TYPE.pattern}(:[0-9]{{1,5}})?")
_RECONSTRUCT = frozenset(f"{core}._reconstruct" for core in _NUMPY_CORES)
_BYTES_IO = frozenset({"_io.BytesIO", "io.BytesIO"})
_SCALAR = frozenset(f"{core}.scalar" for core in _NUMPY_CORES)

VALUE_GLOBALS = DtypeNames(
    TENSOR_GLOBALS.names
    | _RECONSTRUCT
    | _SCALAR
    | _BYTES_IO
    | {f"builtins.{name}" for name in ("set", "frozenset", "complex", "bytes", "bytearray")}
    | {"_codecs.encode", "torch.Size", "torch.device", "numpy.ndarray", "numpy.dtype"}
    | {"numpy.array", "_operator.getitem"}  # as ``values.pickle_node`` writes arrays and scalars of numpy
)
"""The names that the pickle of a value may have."""

DICTS = frozenset({"collections.OrderedDict", "collections.Counter", "collections.defaultdict"})
"""The mappings that are read as containers, like a dict."""

FILE_GLOBALS = DtypeNames(
    VALUE_GLOBALS.names
    | DICTS
    | {f"builtins.{factory}" for factory in ("bool", "dict", "float", "int", "list", "str", "tuple")}  # of defaultdicts
    | {"torch._utils._rebuild_sparse_tensor", "torch.serialization._get_layout"}
    | {"torch._utils._rebuild_parameter_with_state", "torch._tensor._rebuild_from_type_v2"}
    | {"torch.Tensor", "torch.nn.parameter.Parameter"}
)
"""The names that the pickle of a file of ``torch.save`` may have."""

_HASHABLE_KINDS = frozenset(
    {"int", "float", "frozenset", "bytes", "complex", "size", "dtype", "device", "numpy", "bytesio"}
)
_ALLOWED_KINDS = frozenset({"object", "type", "member"})  # such an object is hashed by its type when it is made


def value_globals(allow: Set[str]) -> DtypeNames:
    """Return the names that the pickle of a value may have if the types ``allow`` are allowed.

    The pickle of a class inside a class also names the outer class, so every prefix of a qualified name is included.
    """
    if not allow:
        return VALUE_GLOBALS
    parts = (name.split(".") for name in allow)
    beginnings = {".".join(name[: end + 1]) for name in parts for end in range(len(name))}
    return DtypeNames(VALUE_GLOBALS.names | beginnings | {"builtins.getattr"})


class ValueBudget:
    """The size to which all values of one call may expand together.

    A pickle shares parts and a ``Node`` does not, so a small pickle can expand to a very large ``Node``. Each value
    adds an amount in proportion to its own bytes to the budget; the rest is shared by all values.
    """

    __slots__ = ("_bytes_left", "parts_left")

    def __init__(self) -> None:
        self.parts_left = 1 << 16
        self._bytes_left = 1 << 20

    def grant(self, pickle_bytes: int, item_bytes: int) -> None:
        """Increase the budget for a value in an item of ``item_bytes`` with a pickle of ``pickle_bytes``."""
        self.parts_left += pickle_bytes
        self._bytes_left += 4 * item_bytes

    def spend_part(self) -> None:
        """Take one part from the budget. Raises ``CorruptCheckpointError`` if it is exhausted."""
        self.parts_left -= 1
        if self.parts_left < 0:
            raise CorruptCheckpointError("the values expand to far more parts than their pickles have bytes")

    def spend_bytes(self, count: int) -> None:
        """Take bytes from the budget. Raises ``CorruptCheckpointError`` if it has fewer left."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise CorruptCheckpointError("the values expand to far more bytes than their items have")


def node_of(
    value: object,
    budget: ValueBudget,
    read_payload: Callable[[StoredTensor], bytes],
    allow: Set[str] = frozenset(),
) -> Node:
    """Convert ``value``, a result of ``unpickle.decode``, to a ``Node``. Its size is taken from ``budget``.

    ``read_payload`` returns the bytes of the storage of a tensor inside the value. Types are allowed by their qualified
    names; types that are data remain data.

    Raises ``UnsafeObjectError`` with the name of the type for an object that is not data, and
    ``CorruptCheckpointError`` for calls with invalid arguments.
    """
    return _Translator(budget, read_payload, allow - VALUE_GLOBALS.names).node(value)


class _Translator:
    def __init__(self, budget: ValueBudget, read_payload: Callable[[StoredTensor], bytes], allow: Set[str]) -> None:
        self._budget = budget
        self._spend = budget.spend_bytes
        self._read_payload = read_payload
        self._allow = allow

    def node(self, value: object) -> Node:
        self._budget.spend_part()
        if not self._budget.parts_left % _PARTS_PER_PAUSE:
            pause_point()
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            self._spend(len(value))
            return value
        if isinstance(value, int):
            return value if abs(value) < 1 << 63 else self._long(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, list):
            return {"list": self._nodes(value)}
        if isinstance(value, tuple):
            return {"tuple": self._nodes(value)}
        if isinstance(value, Pairs):
            return {"dict": self._pairs(value)}
        if isinstance(value, bytes | bytearray):
            return {"bytes" if isinstance(value, bytes) else "bytearray": self._base64(value)}
        if isinstance(value, Global) and is_dtype(value.name):
            return {"dtype": value.name.removeprefix("torch.")}
        if isinstance(value, PickledCall):
            return self._call(value)
        if isinstance(value, Global):
            if value.name in self._allow:
                return {"type": value.name}
            raise UnsafeObjectError(f"the value holds {value.name} itself, which is not read as data")
        raise _malformed("a storage outside of a tensor" if isinstance(value, Persistent) else "an unknown object")

    def _call(self, call: PickledCall) -> Node:
        name = call.function
        if name in self._allow:
            return self._object(call)
        if call.elements is not None:
            raise _malformed(f"{name} with elements")
        if name in TENSOR_REBUILDERS:
            return self._tensor(read_tensor(call))
        if name in _RECONSTRUCT:
            return self._ndarray(call)
        if name == "collections.OrderedDict":
            return self._ordered_dict(call)
        if name in DICTS and (pairs := pairs_of(call)) is not None:
            return {"dict": self._pairs(pairs)}
        if name in _BYTES_IO:
            return self._bytes_io(call)
        if name == "numpy.dtype":
            raise UnsafeObjectError("the value holds a numpy.dtype itself, which is not read as data")
        if call.state is not None or call.items is not None:
            raise _malformed(f"{name} with a state")
        if name in _SCALAR:
            return self._numpy_scalar(call)
        match name.removeprefix("builtins."), call.args:
            case ("set" | "frozenset") as kind, (list(elements),):
                return {kind: self._hashable_nodes(elements)}
            case "complex", (float(real), float(imaginary)):
                return {"complex": self._nodes((real, imaginary))}
            case (("_codecs.encode" | "bytes"), _):
                return {"bytes": self._base64(_bytes_of(call))}
            case "bytearray", ():
                return {"bytearray": ""}
            case "bytearray", (content,):
                return {"bytearray": self._base64(_bytes_of(content))}
            case "bytearray", (str(content), str(encoding)):
                return {"bytearray": self._base64(_encode(content, encoding))}
            case "torch.Size", (tuple(sizes),) if all(type(size) is int and abs(size) < 1 << 63 for size in sizes):
                return {"size": self._nodes(sizes)}
            case "torch.device", (str(device),) if _DEVICE.fullmatch(device):
                return {"device": device}
            case "numpy.array", (PickledCall("numpy.ndarray", (tuple(shape), str(dtype), content), None, None, None),):
                return self._array(shape, *_checked_dtype(dtype), _bytes_of(content))
            case "_operator.getitem", (PickledCall("numpy.array", (array,), None, None, None), ()):
                match array:
                    case PickledCall("numpy.ndarray", ((), str(dtype), content), None, None, None):
                        return self._scalar(*_checked_dtype(dtype), _bytes_of(content))
            case "getattr", (Global(enum), str(member)) if enum in self._allow:
                return {"member": [enum, member]}
            case "torch.device", (str(kind), int(index)) if _DEVICE_TYPE.fullmatch(kind) and 0 <= index < 1 << 16:
                return {"device": f"{kind}:{index}"}
        if name not in VALUE_GLOBALS:
            raise UnsafeObjectError(f"the value asks for {name}, which is not among the types read as data")
        raise _malformed(f"{name} with arguments that it does not take")

    def _object(self, call: PickledCall) -> Node:
        """Return the arguments and the state from which pickle would make an object of an allowed type."""
        content: dict[str, Node] = {"type": call.function, "new": call.new}
        content["args"] = self._nodes(call.args)
        if call.elements is not None:
            content["elements"] = self._nodes(call.elements)
        if call.items is not None:
            content["items"] = self._pairs(call.items)
        if call.state is not None:
            content["state"] = self.node(call.state)
        return {"object": content}

    def _long(self, value: int) -> Node:
        digits = hex(value)
        self._spend(len(digits))
        return {"int": digits}

    def _ordered_dict(self, call: PickledCall) -> Node:
        # the state dict of a module has the versions of its parts in an attribute, which a value does not need
        match call.args, call.state:
            case (), None | Pairs(["_metadata", _]):
                return {"ordered_dict": self._pairs(call.items or Pairs())}
            case (list(pairs),), None if call.items is None and all(map(_is_pair, pairs)):
                return {"ordered_dict": self._pairs(Pairs(list(chain.from_iterable(pairs))))}
        raise UnsafeObjectError("the value holds a collections.OrderedDict with attributes, which is not read as data")

    def _bytes_io(self, call: PickledCall) -> Node:
        match call.args, call.state, call.items:
            case (), (content, int(position), None | Pairs([])), None if type(position) is int:
                data = _bytes_of(content)
            case _:
                raise UnsafeObjectError("the value holds an io.BytesIO with attributes, which is not read as data")
        if not 0 <= position <= len(data):
            raise UnsafeObjectError(
                "the value holds an io.BytesIO with a position beyond its end, which is not read as data"
            )
        return {"bytesio": [self._base64(data), position]}

    def _tensor(self, tensor: StoredTensor) -> Node:
        size = itemsize(tensor.dtype)
        self._spend(math.prod(tensor.shape) * size)
        data = _row_major(self._read_payload(tensor), size, tensor.shape, tensor.strides, tensor.storage_offset)
        return {"tensor": {"dtype": tensor.dtype, "shape": list(tensor.shape), "data": node_of_bytes(data)}}

    def _ndarray(self, call: PickledCall) -> Node:
        match call.args, call.state:
            case (Global("numpy.ndarray"), (0,), _), (int(), tuple(shape), dtype, bool(fortran), content):
                pass
            case _:
                raise UnsafeObjectError("the value holds a numpy.ndarray of a subclass or unknown layout")
        return self._array(shape, *_numpy_dtype(dtype), _bytes_of(content), fortran=fortran)

    def _array(self, shape: tuple[Any, ...], spelled: str, size: int, data: bytes, *, fortran: bool = False) -> Node:
        if len(shape) > MAX_RANK or not all(type(dim) is int and 0 <= dim < 1 << 63 for dim in shape):
            raise _malformed("a numpy.ndarray of an impossible shape")
        if math.prod(shape) * size != len(data):
            raise _malformed(f"a numpy.ndarray of {len(data)} bytes that do not match its shape")
        self._spend(len(data))
        if fortran:
            strides = [math.prod(shape[:dim]) for dim in range(len(shape))]
            data = _row_major(data, size, shape, strides, 0)
        return {"ndarray": {"dtype": spelled, "shape": list(shape), "data": node_of_bytes(data)}}

    def _numpy_scalar(self, call: PickledCall) -> Node:
        if len(call.args) != 2:
            raise _malformed("a numpy scalar without content")
        return self._scalar(*_numpy_dtype(call.args[0]), _bytes_of(call.args[1]))

    def _scalar(self, spelled: str, size: int, data: bytes) -> Node:
        if len(data) != size:
            raise _malformed(f"a numpy scalar of {len(data)} bytes")
        return {"numpy": {"dtype": spelled, "data": self._base64(data)}}

    def _nodes(self, values: Sequence[object]) -> list[Node]:
        return [self.node(value) for value in values]

    def _hashable_nodes(self, values: Sequence[object]) -> list[Node]:
        nodes = self._nodes(values)
        if not all(map(_hashable, nodes)):
            raise _malformed("a dict key or set element that cannot be hashed")
        return nodes

    def _pairs(self, pairs: Pairs) -> list[Node]:
        keys = self._hashable_nodes(pairs.flat[::2])
        values = self._nodes(pairs.flat[1::2])
        return [[key, value] for key, value in zip(keys, values, strict=True)]

    def _base64(self, content: bytes | bytearray) -> str:
        self._spend(len(content))
        return node_of_bytes(content)


def pairs_of(value: object) -> Pairs | None:
    """Return the content of a dict, or of one of ``DICTS`` without its attributes. None for other objects."""
    if isinstance(value, Pairs):
        return value
    match value:
        case PickledCall("collections.OrderedDict" | "collections.Counter", ()):
            return value.items or Pairs()
        case PickledCall("collections.defaultdict", () | (None | Global(),)):
            return value.items or Pairs()
        case PickledCall("collections.Counter", (Pairs() as counts,)):
            return counts
        case PickledCall("collections.OrderedDict", (list(pairs),)) if all(map(_is_pair, pairs)):  # of Python 2
            return Pairs(list(chain.from_iterable(pairs)))
    return None


def _malformed(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"malformed value: {what}")


def _hashable(node: Node) -> bool:
    if not isinstance(node, dict):
        return not isinstance(node, list)
    ((kind, content),) = node.items()
    if kind == "tuple" and isinstance(content, list):
        return all(map(_hashable, content))
    return kind in _HASHABLE_KINDS or kind in _ALLOWED_KINDS


def _bytes_of(value: object) -> bytes:
    """Return the bytes of a decoded object. Protocol 2 has no opcode for bytes and encodes a string."""
    match value:
        case bytes():
            return value
        case PickledCall("_codecs.encode", (str(text), str(encoding))):
            return _encode(text, encoding)
        case PickledCall("builtins.bytes", ()):
            return b""
    raise _malformed("another object in place of bytes")


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise _malformed("bytes in an encoding other than latin-1")
    try:
        slices = (text[at : at + SLICE_BYTES] for at in range(0, len(text), SLICE_BYTES))
        return b"".join([one.encode("latin-1") for one in slices])
    except UnicodeEncodeError:
        raise _malformed("bytes that are not latin-1") from None


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def _checked_dtype(spelled: str) -> tuple[str, int]:
    """Return a dtype of plain numbers as numpy writes it (``"<f4"``), and its size."""
    if spelled[:1] not in ("<", ">", "|") or not _NUMPY_KINDS.fullmatch(spelled[1:]):
        raise UnsafeObjectError(f"the value holds numpy data of dtype {spelled[:20]!a}, not plain numbers")
    return spelled, int(spelled[2:])


def _numpy_dtype(value: object) -> tuple[str, int]:
    """Return a dtype of plain numbers as numpy writes it (``"<f4"``), and its size."""
    match value:
        case PickledCall("numpy.dtype", (str(code), *_), (_, ("<" | ">" | "|" | "=") as order, None, None, None, *_)):
            if not _NUMPY_KINDS.fullmatch(code):
                raise UnsafeObjectError(f"the value holds numpy data of dtype {code[:20]!a}, not plain numbers")
            size = int(code[1:])
            return ("|" if size == 1 else "<" if order == "=" else order) + code, size
        case PickledCall("numpy.dtype", (str(code), *_), _):
            raise UnsafeObjectError(f"the value holds numpy data of dtype {code[:20]!a}, not plain numbers")
    raise _malformed("another object in place of a numpy dtype")


def _row_major(data: bytes, size: int, shape: Sequence[int], strides: Sequence[int], first: int) -> bytes:
    """Return the elements in row-major order. ``strides`` and ``first`` count elements. All lie within ``data``."""
    if math.prod(shape) == 0:
        return b""
    expected = 1
    for dim, stride in zip(reversed(shape), reversed(strides), strict=True):
        if dim > 1 and stride != expected:
            break
        expected *= dim
    else:
        return data[first * size : (first + expected) * size]
    starts = [first]
    for dim, stride in zip(shape, strides, strict=True):
        starts = [start + index * stride for start in starts for index in range(dim)]
    return b"".join(data[start * size : (start + 1) * size] for start in starts)
