"""Readers of the pickle of a dense tensor by ``torch.save``: dtype, shape, strides, and the record of the storage."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from ..._format.records import DTYPES, MAX_RANK, STORAGE_DTYPES, itemsize, row_major_strides
from ...errors import CorruptCheckpointError, UnsupportedCheckpointError
from .machine import Global, Pairs, Persistent, PickledCall

_DTYPE = re.compile(
    r"torch\.(bool|b?float[0-9]+(_[a-z0-9_]+)?|complex[0-9]+|q?u?int[0-9]+(x[0-9]+)?|bits[0-9]+(x[0-9]+)?)"
)
_UNTYPED = "torch.storage.UntypedStorage"
_PARAMETER = "torch._utils._rebuild_parameter"
_MAX_ARGS = 16

_REBUILD = "torch._utils._rebuild_tensor"  # up to torch 0.3

TENSOR_REBUILDERS = frozenset({_REBUILD, f"{_REBUILD}_v2", f"{_REBUILD}_v3", _PARAMETER})


def is_dtype(name: str) -> bool:
    """Return whether a global has the form of a dtype of torch, even if checkpoints cannot hold it."""
    return _DTYPE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class DtypeNames:
    """An allow-list for ``unpickle.decode``: these names and all dtypes, so that errors can name an unknown dtype."""

    names: frozenset[str]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.names or is_dtype(name))


TENSOR_GLOBALS = DtypeNames(
    TENSOR_REBUILDERS | {f"torch.{storage}" for storage in STORAGE_DTYPES} | {_UNTYPED, "collections.OrderedDict"}
)
"""The names that the pickle of a tensor may have."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A view of a storage. ``key`` names the record of the storage. ``storage_bytes`` is the size that the record must
    have.

    ``strides`` and ``storage_offset`` count elements. Every element lies within the storage.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    key: str
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A storage as pickles refer to it: the name of its class, its key, and the number of its elements."""

    kind: str
    key: str
    count: int

    @property
    def nbytes(self) -> int:
        """The size in bytes. The elements of an untyped storage are bytes."""
        dtype = STORAGE_DTYPES.get(self.kind.removeprefix("torch."))
        return self.count if dtype is None else self.count * itemsize(dtype)


def read_tensor(value: object) -> StoredTensor:
    """Return the tensor that ``value`` (from ``unpickle.decode``) rebuilds. A parameter is read as its tensor.

    Raises ``CorruptCheckpointError`` if it is not a dense tensor or extends beyond its storage, and
    ``UnsupportedCheckpointError`` for dtypes that a checkpoint cannot hold and for lazily conjugated or negated
    tensors.
    """
    if isinstance(value, PickledCall) and value.function == _PARAMETER and value.args:
        value = value.args[0]
    if not isinstance(value, PickledCall) or len(value.args) > _MAX_ARGS:
        raise _malformed("the object is not a tensor")
    dtype: Global | None
    match value.function, value.args:
        case "torch._utils._rebuild_tensor_v2", (storage, int(offset), tuple(shape), tuple(strides), _, _, *rest):
            dtype = None
        case "torch._utils._rebuild_tensor", (storage, int(offset), tuple(shape), tuple(strides)):
            dtype, rest = None, []
        case (
            "torch._utils._rebuild_tensor_v3",
            (storage, int(offset), tuple(shape), tuple(strides), _, _, Global() as dtype, *rest),
        ):
            pass
        case _:
            raise _malformed("it does not rebuild a dense tensor")
    name, key, storage_bytes = _storage(storage, dtype)
    if any(not isinstance(extra, Pairs) or len(extra) for extra in rest):
        raise UnsupportedCheckpointError("a lazily conjugated or negated tensor; resolve it before saving")
    tensor = StoredTensor(name, _dims(shape), _dims(strides), offset, key, storage_bytes)
    _check_reach(tensor)
    first = offset if math.prod(tensor.shape) else 0
    return replace(tensor, strides=_significant(tensor.shape, tensor.strides), storage_offset=first)


def read_storage(value: object) -> PickledStorage:
    """Return the storage that a pickle refers to. Raises ``CorruptCheckpointError``, and ``UnsupportedCheckpointError``
    for a view of a storage, which torch 0.4 wrote."""
    match value:
        case Persistent(("storage", Global(kind), str(key), str(), int(count), *view)) if count >= 0:
            if view not in ([], [None]):
                raise UnsupportedCheckpointError(
                    "a view of a storage, as torch 0.4 wrote it; save it with a newer torch"
                )
            return PickledStorage(kind, key, count)
        case _:
            raise _malformed("its storage is not a reference to a storage")


def _storage(value: object, dtype: Global | None) -> tuple[str, str, int]:
    """Return the dtype, the record key and the size of a storage. ``dtype`` is the one that the pickle has for an
    untyped storage."""
    storage = read_storage(value)
    kind = storage.kind
    if dtype is None:
        name = STORAGE_DTYPES.get(kind.removeprefix("torch."), "")
    else:
        name = dtype.name.removeprefix("torch.")
        if is_dtype(dtype.name) and name not in DTYPES:
            raise UnsupportedCheckpointError(f"a tensor of dtype {name}, which checkpoints cannot hold")
    if name not in DTYPES or (dtype is not None) != (kind == _UNTYPED):
        raise _malformed("it has no dtype")
    return name, storage.key, storage.nbytes


def _dims(dims: tuple[object, ...]) -> tuple[int, ...]:
    checked = tuple(dim for dim in dims[: MAX_RANK + 1] if type(dim) is int and 0 <= dim < 1 << 63)
    if len(checked) != len(dims) or len(dims) > MAX_RANK:
        raise _malformed("its shape or strides are impossible")
    return checked


def _check_reach(tensor: StoredTensor) -> None:
    if len(tensor.shape) != len(tensor.strides) or tensor.storage_offset < 0:
        raise _malformed("its shape or strides are impossible")
    if not math.prod(tensor.shape):
        return
    reach = sum((dim - 1) * stride for dim, stride in zip(tensor.shape, tensor.strides, strict=True))
    if (tensor.storage_offset + reach + 1) * itemsize(tensor.dtype) > tensor.storage_bytes:
        raise _malformed("it extends beyond its storage")


def _significant(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides. Those that no element depends on are replaced by the strides of a row-major tensor, because
    they may be arbitrary, and equal tensors would compare as different."""
    dense = row_major_strides(shape)
    if not math.prod(shape):
        return dense
    return tuple(own if dim > 1 else row for dim, own, row in zip(shape, strides, dense, strict=True))


def _malformed(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"malformed tensor: {what}")
