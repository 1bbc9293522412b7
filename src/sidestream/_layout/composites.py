"""Tensors that consist of others: what is saved of one besides its parts, and one made of parts that were read."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch

from .._format.records import SPARSE_PARTS, CompositeEntry, Entry, Key, Node
from .._format.validate import MAX_FQN_CHARS, MAX_PARTS
from .._runtime.steps import Steps
from .._runtime.torch_probes import dtype_from_name, dtype_name
from .._staging import Form
from ..errors import Corrupt, UnsafeObject, UnsupportedCheckpoint, UnsupportedTensor
from .objects import Allowed
from .values import decode_value, encode_value

__all__ = ["build_composites", "check_types", "composite_entry", "differences", "fill_sparse"]

_MAX_DEPTH = 16
_TOLD = 160

_TYPES = frozenset(
    {
        *(
            f"torchao.quantization.{name}"
            for name in (
                "Float8Tensor",
                "Int4PlainInt32Tensor",
                "Int4PreshuffledTensor",
                "Int4Tensor",
                "Int4TilePackedTo4dTensor",
                "Int8Tensor",
                "IntxUnpackedToInt8Tensor",
            )
        ),
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
        "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
    }
)
"""The types that are made anew without ``allow=``, if the program has imported them: subclasses whose context is plain
data, and the enums in it."""


def composite_entry(fqn: str, path: tuple[Key, ...], form: Form) -> CompositeEntry:
    """Return what the manifest says of a composite tensor. Raises ``UnsupportedTensor`` and ``UnsafeObject``."""

    def unsupported(what: str) -> UnsupportedTensor:
        return UnsupportedTensor(f"{fqn}: cannot save a {form.type} {what}")

    if form.attributes:
        raise unsupported(
            f"that names {', '.join(form.attributes)} among its tensors, which is none: save the tensors that it wraps"
        )
    if not 0 < len(set(form.names)) == len(form.names) <= MAX_PARTS or "" in form.names:
        raise unsupported(f"that wraps {len(form.names)} tensors: save the tensors that it wraps by themselves")
    if len(form.type) > MAX_FQN_CHARS or any(type(size) is not int for size in form.shape + (form.strides or ())):
        raise unsupported("whose shape is not fixed: save its components, such as values() and offsets()")
    context = _encode(form.context, f"{fqn} (what {form.type} keeps beside its tensors)", 0)
    return CompositeEntry(path, form.type, dtype_name(form.dtype), form.shape, form.strides, form.names, context)


def _encode(value: Any, fqn: str, depth: int) -> Node:
    """As ``encode_value``, and members of enums. No tensors: nothing has copied them."""
    if isinstance(value, torch.Tensor):
        raise UnsafeObject(f"{fqn}: a tensor cannot be stored as data; its __tensor_flatten__ has to name it")
    if isinstance(value, Enum):
        return {"member": [_name(type(value)), value.name]}
    if depth > _MAX_DEPTH:
        raise UnsafeObject(f"{fqn}: nested deeper than {_MAX_DEPTH} levels, or a container that contains itself")
    kind = type(value)
    if kind in (list, tuple):
        return {kind.__name__: [_encode(item, fqn, depth + 1) for item in value]}
    if kind in (dict, OrderedDict):
        pairs: list[Node] = [
            [_encode(key, fqn, depth + 1), _encode(item, fqn, depth + 1)] for key, item in value.items()
        ]
        return {"dict" if kind is dict else "ordered_dict": pairs}
    return encode_value(value, fqn)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def differences(here: CompositeEntry, saved: CompositeEntry) -> str:
    """Return in which way a tensor of the target differs from the saved one of the same type, shape and dtype, apart
    from its parts; an empty text if it does not."""
    if here.parts != saved.parts:
        return f"it wraps {', '.join(here.parts)} in the target, {', '.join(saved.parts)} were saved"
    if here.strides is None:
        return ""
    if here.strides != saved.strides:
        return f"strides {here.strides} in the target, {saved.strides} saved"
    one, other = json.dumps(here.context), json.dumps(saved.context)  # 1 and True are equal
    return "" if one == other else f"{one[:_TOLD]} beside its tensors in the target, {other[:_TOLD]} saved"


# --- made anew ---


def check_types(entries: Mapping[str, Entry], fqns: Iterable[str], allowed: Allowed) -> Steps[None]:
    """Raise ``UnsafeObject`` for the first of the composite tensors ``fqns`` whose type may not be made anew."""
    for fqn in fqns:
        yield
        entry = entries[fqn]
        assert isinstance(entry, CompositeEntry)
        if entry.type not in SPARSE_PARTS:
            _type(fqn, entry.type, allowed)


def _type(fqn: str, name: str, allowed: Allowed) -> type:
    if name in allowed:
        return allowed[name]
    module, _, attribute = name.rpartition(".")
    if name not in _TYPES:
        raise UnsafeObject(
            f"{fqn}: a {name} is only made anew if allow= names that class; or load into a tensor of this kind"
        )
    found = getattr(sys.modules.get(module), attribute, None)
    if not isinstance(found, type):
        raise UnsafeObject(f"{fqn}: a {name}, which this program does not know: import {module} first")
    return found


class _Known(dict[str, type]):
    """The types that were allowed, and those of the fixed list."""

    def __init__(self, fqn: str, allowed: Allowed) -> None:
        super().__init__(allowed)
        self._fqn = fqn

    def __missing__(self, name: str) -> type:
        if name not in _TYPES:
            raise KeyError(name)
        return _type(self._fqn, name, {})


def build_composites(
    entries: Mapping[str, Entry], fqns: Iterable[str], tensors: Mapping[str, torch.Tensor], allowed: Allowed
) -> Steps[dict[str, torch.Tensor]]:
    """Return the composite tensors ``fqns`` over their parts, which are among ``tensors`` or among ``fqns`` themselves.

    Raises ``Corrupt`` for parts that are no sparse tensor, ``UnsafeObject`` and ``UnsupportedCheckpoint``.
    """
    made: dict[str, torch.Tensor] = {}
    for fqn in sorted(fqns, key=len, reverse=True):  # those that are parts of others first
        yield
        entry = entries[fqn]
        assert isinstance(entry, CompositeEntry)
        names = {part: f"{fqn}.{part}" for part in entry.parts}
        parts = {part: made[name] if name in made else tensors[name] for part, name in names.items()}
        context = yield from decode_value(entry.context, fqn, _Known(fqn, allowed))
        if entry.type in SPARSE_PARTS:
            made[fqn] = _sparse(fqn, entry, parts, context)
        else:
            made[fqn] = _subclass(fqn, entry, parts, context, _type(fqn, entry.type, allowed))
    return made


def _sparse(fqn: str, entry: CompositeEntry, parts: Mapping[str, torch.Tensor], context: Any) -> torch.Tensor:
    make: Any = torch.sparse_coo_tensor if entry.type == "sparse_coo" else torch.sparse_compressed_tensor
    options: dict[str, Any] = {"layout": getattr(torch, entry.type)}
    if entry.type == "sparse_coo":
        if type(context) is not bool:
            raise Corrupt(f"{fqn}: the manifest does not say whether it is coalesced", fqn=fqn)
        options = {"is_coalesced": context}
    try:
        # Indices outside of the shape would make torch read and write memory that is not the tensor's.
        made: torch.Tensor = make(*parts.values(), entry.shape, check_invariants=True, **options)
        if made.dtype == dtype_from_name(entry.dtype):
            return made
        problem = f"values of dtype {dtype_name(made.dtype)}"
    except (RuntimeError, TypeError, ValueError) as error:
        problem = str(error).partition("\n")[0]
    raise Corrupt(f"{fqn}: its parts are no tensor of layout {entry.type}: {problem}", fqn=fqn)


def _subclass(
    fqn: str, entry: CompositeEntry, parts: Mapping[str, torch.Tensor], context: Any, kind: Any
) -> torch.Tensor:
    try:
        made = kind.__tensor_unflatten__(dict(parts), context, torch.Size(entry.shape), entry.strides)
    except Exception as error:
        raise UnsupportedCheckpoint(
            f"{fqn}: {entry.type} does not take what was saved of it: {type(error).__name__}: {error}"
        ) from error
    if type(made) is not kind or tuple(made.shape) != entry.shape or made.dtype != dtype_from_name(entry.dtype):
        raise UnsupportedCheckpoint(
            f"{fqn}: {entry.type} makes another tensor of what was saved than {entry.dtype} of shape {entry.shape}"
        )
    plain: torch.Tensor = made.detach() if made.requires_grad else made
    return plain


def fill_sparse(target: torch.Tensor, source: torch.Tensor) -> None:
    """Make ``target`` equal to ``source``, a sparse tensor of its layout and shape, however many elements each has."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.layout is not torch.sparse_coo:
            target.resize_as_sparse_(source)
        target.copy_(source)
