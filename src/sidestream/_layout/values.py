"""The conversion between Python values and ``Node``, for types that are safe as data.

The user's metadata of a checkpoint is such data, of limited size. Objects are made from data that another writer
pickled, for types that the caller allowed. Only code of these types runs, as an unpickler would run it: ``__new__`` or
the call, ``__setstate__`` or plain attributes, ``append`` and item assignment. No name is looked up in a module.
"""

from __future__ import annotations

import copy
import io
import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from itertools import chain
from typing import Any

import torch

from .._format.manifest import metadata_line
from .._format.marker import MAX_METADATA_BYTES
from .._format.records import DTYPES, MAX_INTEGER_BYTES, Manifest, Node, node_of_bytes
from .._format.values import bytes_and_position, check_inline_tensor, node_bytes, node_kind
from .._runtime.pauses import pause_point
from .._runtime.torch_probes import check_tensor, dtype_from_name, dtype_name, plain_bytes
from .._staging import Composite
from ..errors import CorruptCheckpointError, InvalidOptionError, UnsafeObjectError, UnsupportedCheckpointError
from ..options import check_types
from .hashed import MOST_ALIKE, check_hashes, fill, set_of
from .remedies import remedy_for

Allowed = Mapping[str, type]
"""Types by their qualified names, as a pickle has them."""

_NOTHING: Allowed = {}


def allowed_types(safe_globals: Iterable[type]) -> Allowed:
    """Return types by their qualified names. Raises ``InvalidOptionError`` as ``check_types`` does."""
    kinds = check_types("safe_globals", safe_globals)
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


def _rebuild(content: Any, allow: Allowed) -> Any:
    """Make the object of an ``object`` node.

    Raises ``UnsafeObjectError`` if its type is not allowed. Raises ``UnsupportedCheckpointError`` if the type does not
    accept what was saved. Its own exception is the cause.
    """
    # Looked up before anything else is decoded: a type that is not allowed is refused before its arguments are made.
    kind = lookup(content["type"], allow)
    args = _decode_all(content["args"], allow)
    elements = _decode_all(content.get("elements", ()), allow)
    flat = _decode_all(chain.from_iterable((key, value) for key, value in content.get("items", ())), allow)
    items = list(zip(flat[::2], flat[1::2], strict=True))
    # Before a dict is filled: a file may choose integers that all have one hash, and filling the dict would then take
    # hours.
    check_hashes(flat[::2])
    (state,) = _decode_all([content.get("state")], allow)
    try:
        # The types are those that the caller allowed. Their code runs, as an unpickler would run it, and nothing else:
        # no name is looked up in a module, and no other callable is called.
        instance = kind.__new__(kind, *args) if content["new"] else kind(*args)
        for element in elements:
            instance.append(element)
        for key, value in items:
            instance[key] = value
        if state is not None:
            _set_state(instance, state)
    except Exception as error:
        raise UnsupportedCheckpointError(
            f"{content['type']} does not take what was saved of it: {type(error).__name__}: {error}"
        ) from error
    return instance


def lookup(name: str, allow: Allowed) -> type:
    """Return the type with this name. Raises ``UnsafeObjectError`` if it is not allowed."""
    try:
        return allow[name]
    except KeyError:
        raise UnsafeObjectError(f"the value holds a {name}, which is not among the types that were allowed") from None


def rebuild_member(enum: str, member: str, allow: Allowed) -> Any:
    """Return a member of an enum, as some releases of Python pickle it. No other attribute of a class can be named."""
    kind = lookup(enum, allow)
    if not issubclass(kind, Enum) or member not in kind.__members__:
        raise UnsafeObjectError(f"the value names {enum}.{member}, which is not a member of an enum")
    return kind.__members__[member]


def _set_state(instance: Any, state: Any) -> None:
    set_state = getattr(instance, "__setstate__", None)
    if set_state is not None:
        set_state(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if attributes:
        vars(instance).update(attributes)
    for name, value in (slots or {}).items():
        if name.startswith("__"):
            raise TypeError(f"a slot named {name}")
        setattr(instance, name, value)


_INLINE_BYTES = 1 << 20
_MAX_DEPTH = 64
_JSON_INT = 1 << 63
_NODES_IN_A_STEP = 64
_HASHED = frozenset({dict, OrderedDict, set, frozenset})
_SCALARS = frozenset({bool, int, float, str, type(None)})
_NUMPY_KINDS = "biufc"
_NUMPY_DTYPE = re.compile(r"[<>|=]?[biufc][0-9]{1,2}")


def copy_value(value: Any) -> Any:
    """Return a copy of a value that can be changed in place. Other values are returned as they are, also those for
    which ``encode_value`` raises an error."""
    numpy = sys.modules.get("numpy")
    if type(value) in (set, frozenset, bytearray, io.BytesIO) or (
        numpy is not None and isinstance(value, numpy.ndarray)
    ):
        return copy.deepcopy(value)
    return value


def encode_value(value: Any, fqn: str, depth: int = 0) -> Node:
    """Convert ``value`` to data. The caller may change it afterwards.

    Raises ``UnsafeObjectError`` with ``fqn`` and the type for anything but numbers, strings, bytes, None, tuples,
    lists, dicts, sets, ``io.BytesIO``, ``torch.Size``, dtypes, devices, numpy numbers and arrays, and tensors of at
    most 1 MiB inside those. The same for what no reader accepts: integers of more than 1024 bytes, and dicts and sets
    of more than 256 keys with one hash.
    """
    kind = type(value)
    # Exact types, here and below: a subclass has behaviour that plain data would lose. ``bool`` comes before ``int``,
    # whose subclass it is.
    if value is None or kind is bool or kind is str:
        return value  # type: ignore[no-any-return]
    if kind is int:
        return value if -_JSON_INT <= value < _JSON_INT else _encode_long(value, fqn)
    if kind is float:
        # JSON has neither NaN nor infinities.
        return value if math.isfinite(value) else {"float": repr(value)}
    if depth > _MAX_DEPTH:
        raise UnsafeObjectError(f"{fqn}: nested deeper than {_MAX_DEPTH} levels, or a container that contains itself")
    # Readers refuse such a dict, because a file could be made so that filling it takes hours. So it is refused at the
    # save, while it can still be changed.
    if kind in _HASHED and len(value) > MOST_ALIKE and max(Counter(map(hash, value)).values()) > MOST_ALIKE:
        raise UnsafeObjectError(
            f"{fqn}: more than {MOST_ALIKE} keys of one {kind.__name__} have the same hash, which no reader accepts; "
            "save them as a list"
        )
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [encode_value(item, fqn, depth + 1) for item in value]}
    if kind is dict or kind is OrderedDict:
        name = "dict" if kind is dict else "ordered_dict"
        pairs: list[Node] = [
            [encode_value(key, fqn, depth + 1), encode_value(item, fqn, depth + 1)] for key, item in value.items()
        ]
        return {name: pairs}
    return _encode_leaf(value, fqn)


def _encode_long(value: int, fqn: str) -> Node:
    nbytes = value.bit_length() // 8 + 1
    if nbytes > MAX_INTEGER_BYTES:
        raise UnsafeObjectError(
            f"{fqn}: an integer of {nbytes} bytes, and {MAX_INTEGER_BYTES} are the most that are read; save it as bytes"
        )
    return {"int": hex(value)}


def _encode_leaf(value: Any, fqn: str) -> Node:
    kind = type(value)
    if kind is complex:
        return {"complex": [encode_value(value.real, fqn), encode_value(value.imag, fqn)]}
    if kind is bytes or kind is bytearray:
        return {kind.__name__: node_of_bytes(value)}
    if kind is io.BytesIO:
        return _encode_bytes_io(value, fqn)
    if kind is torch.Size:
        return {"size": list(value)}
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is torch.device:
        return {"device": str(value)}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, fqn)
    if isinstance(value, Composite):
        raise UnsafeObjectError(f"{fqn}: {value.kind} inside a tuple; put it into a dict or a list")
    # Never imported here: this runs on the loop.
    numpy = sys.modules.get("numpy")  # a program that has not imported it has no arrays
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in _NUMPY_KINDS:
        return _encode_numpy(value, fqn, numpy)
    raise UnsafeObjectError(
        f"{fqn}: a {kind.__module__}.{kind.__qualname__} cannot be stored as data; {remedy_for(value)}"
    )


def _encode_bytes_io(value: io.BytesIO, fqn: str) -> Node:
    """Encode the bytes and the position. A subclass or an object with attributes cannot be encoded."""
    state: Any = value.__getstate__()  # vars() would create a dict
    content, position, attributes = state
    if attributes:
        raise UnsafeObjectError(f"{fqn}: an io.BytesIO with attributes cannot be stored as data; save them separately")
    if position > len(content):
        raise UnsafeObjectError(
            f"{fqn}: the position {position} of an io.BytesIO is beyond its {len(content)} bytes; seek() back"
        )
    return {"bytesio": [node_of_bytes(content), position]}


def _encode_tensor(tensor: torch.Tensor, fqn: str) -> Node:
    """Encode a tensor inside a tuple or set, which DCP stores as one value. The tensor has to be small, because it is
    copied here."""
    check_tensor(tensor, fqn)
    if not tensor.is_cpu:
        raise UnsafeObjectError(
            f"{fqn}: a tensor on {tensor.device} inside a tuple or set; put it into a dict or a list"
        )
    name = dtype_name(tensor.dtype)
    if name not in DTYPES:
        raise UnsafeObjectError(f"{fqn}: torch cannot serialize a tensor of dtype {name}")
    if tensor.nbytes > _INLINE_BYTES:
        raise UnsafeObjectError(
            f"{fqn}: a tensor of {tensor.nbytes} bytes inside a tuple or set; put it into a dict or a list, where "
            f"it is streamed (inside values {_INLINE_BYTES} bytes are the limit)"
        )
    data = node_of_bytes(bytes(plain_bytes(tensor).tolist()))
    return {"tensor": {"dtype": name, "shape": list(tensor.shape), "data": data}}


def _encode_numpy(value: Any, fqn: str, numpy: Any) -> Node:
    if value.nbytes > _INLINE_BYTES:
        raise UnsafeObjectError(f"{fqn}: a numpy array of {value.nbytes} bytes; save torch.from_numpy(array)")
    # ``longdouble`` has other bytes on other machines, with the same name.
    if value.dtype.itemsize > 16 or value.dtype.char in "gG":
        to = "complex128" if value.dtype.kind == "c" else "float64"
        raise UnsafeObjectError(f"{fqn}: numpy's {value.dtype} differs between machines; convert it to {to}")
    data = node_of_bytes(numpy.ascontiguousarray(value).tobytes())
    if isinstance(value, numpy.ndarray):
        return {"ndarray": {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}}
    return {"numpy": {"dtype": value.dtype.str, "data": data}}


def decode_value(node: Node, fqn: str, allow: Allowed = _NOTHING) -> Any:
    """Make a new value from a node, equal to the encoded one and of the same type. Raises ``CorruptCheckpointError``
    for an invalid node, and ``UnsafeObjectError`` and ``UnsupportedCheckpointError`` for objects (see ``_rebuild``)."""
    try:
        return _decode(node, allow)
    except (UnsafeObjectError, UnsupportedCheckpointError) as error:
        error.within(fqn).about(fqn=fqn)
        raise
    except (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise CorruptCheckpointError(f"{fqn}: {error}", fqn=fqn) from None
        raise CorruptCheckpointError(
            f"{fqn}: its value in the manifest is damaged ({type(error).__name__}: {error})", fqn=fqn
        ) from None


def _decode(node: Node, allow: Allowed) -> Any:
    kind, content = node_kind(node)
    if kind == "scalar":
        return content
    match kind:
        case "list" | "tuple":
            items = _decode_all(content, allow)
            return items if kind == "list" else tuple(items)
        case "set" | "frozenset":
            elements = set_of(_decode_all(content, allow))
            return elements if kind == "set" else frozenset(elements)
        case "dict" | "ordered_dict":
            flat = _decode_all(chain.from_iterable((key, value) for key, value in content), allow)
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            return fill({} if kind == "dict" else OrderedDict(), pairs)
        case "complex":
            real, imaginary = _decode_all(content, allow)
            return complex(real, imaginary)
        case "object":
            return _rebuild(content, allow)
        case "type":
            return lookup(content, allow)
        case "member":
            enum, member = content
            return rebuild_member(enum, member, allow)
    decode = _DECODERS.get(kind)
    if decode is None:
        raise CorruptCheckpointError(f"a value of the unknown kind {kind!r}")
    return decode(content)


def _decode_all(nodes: Iterable[Node], allow: Allowed) -> list[Any]:
    found: list[Any] = []
    for number, node in enumerate(nodes, 1):
        found.append(node if type(node) in _SCALARS else _decode(node, allow))
        if not number % _NODES_IN_A_STEP:
            pause_point()
    return found


def _decode_tensor(content: Any) -> torch.Tensor:
    dtype, shape, raw = check_inline_tensor(content)
    if not raw:
        return torch.empty(shape, dtype=dtype_from_name(dtype))
    # A ``bytearray``, because a tensor over ``bytes`` would be one that must not be written to.
    return torch.frombuffer(bytearray(raw), dtype=dtype_from_name(dtype)).reshape(shape)


def _decode_numpy(dtype: str, shape: list[int], data: str) -> Any:
    import numpy as np  # an optional dependency: only a checkpoint that holds arrays needs it

    # The text is compared before numpy sees it: ``np.dtype`` takes many other spellings, structured types among them.
    if type(dtype) is not str or _NUMPY_DTYPE.fullmatch(dtype) is None:
        raise CorruptCheckpointError(f"a numpy array of the kind {dtype!a:.40}")
    kind = np.dtype(dtype)
    if kind.kind not in _NUMPY_KINDS:
        raise CorruptCheckpointError(f"a numpy array of the kind {dtype!r}")
    return np.frombuffer(node_bytes(data), dtype=kind).reshape(shape).copy()


def _decode_bytes_io(content: Any) -> io.BytesIO:
    raw, position = bytes_and_position(content)
    stream = io.BytesIO(raw)
    stream.seek(position)
    return stream


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "bytes": node_bytes,
    "bytearray": lambda content: bytearray(node_bytes(content)),
    "bytesio": _decode_bytes_io,
    "size": torch.Size,
    "dtype": dtype_from_name,
    "device": torch.device,
    "tensor": _decode_tensor,
    "ndarray": lambda content: _decode_numpy(content["dtype"], content["shape"], content["data"]),
    "numpy": lambda content: _decode_numpy(content["dtype"], [], content["data"])[()],
}
"""By kind, for the kinds that hold no other values."""

_MAX_METADATA_DEPTH = 32


def encode_metadata(metadata: Mapping[str, Any] | None) -> Node:
    """Return a copy of ``metadata`` as a node.

    Supports the types of JSON: mappings with string keys, lists and tuples (which are read as lists), strings,
    booleans, None, and numbers, including NaN and infinities. Raises ``InvalidOptionError`` with the place for anything
    else, and for too much data.
    """
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise InvalidOptionError(f"metadata={metadata!r} has to be a mapping, such as {{'loss': 0.25}}")
    node = encode_value(_plain(metadata, "metadata", 0), "metadata")
    nbytes = len(metadata_line(Manifest("", {}, {}, metadata=node)))
    if nbytes > MAX_METADATA_BYTES:
        raise InvalidOptionError(
            f"metadata takes {nbytes} bytes, {MAX_METADATA_BYTES} are the limit: put what is larger into the state"
        )
    return node


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _MAX_METADATA_DEPTH:
        raise InvalidOptionError(f"{where}: metadata is nested deeper than {_MAX_METADATA_DEPTH} levels")
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, str) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):  # also numpy's float64
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidOptionError(f"{where}: the key {key!r} of metadata has to be a string")
        return {str(key): _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    hint = "; call .item()" if hasattr(value, "item") else ""
    raise InvalidOptionError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot stand in metadata, which takes "
        f"numbers, strings, booleans, None, lists and mappings{hint}"
    )


def _check_keys(node: Node) -> None:
    """Raise ``CorruptCheckpointError`` for a key that is not a string, before any key is hashed. A file cannot choose
    the hash of a string."""
    todo: list[Any] = [node]
    while todo:
        one = todo.pop()
        if isinstance(one, dict) and isinstance(pairs := one.get("dict"), list):
            keys = [pair[0] for pair in pairs if isinstance(pair, list) and len(pair) == 2]
            if len(keys) != len(pairs) or not all(isinstance(key, str) for key in keys):
                raise CorruptCheckpointError("the metadata in the manifest is not a mapping with string keys")
            todo.extend(pair[1] for pair in pairs)
        elif isinstance(one, dict):
            if not one.keys() <= {"list", "float", "int"}:
                raise CorruptCheckpointError(
                    "the metadata in the manifest has a value that is not a number, a string or a container"
                )
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)


def decode_metadata(node: Node) -> dict[str, Any]:
    """Return the metadata of a node. Empty if there is none. Raises ``CorruptCheckpointError``."""
    if node is None:
        return {}
    _check_keys(node)
    metadata = decode_value(node, "metadata")  # it has at most 256 KiB
    if not isinstance(metadata, dict):
        raise CorruptCheckpointError("the metadata in the manifest is not a mapping with string keys")
    return metadata
