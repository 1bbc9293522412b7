"""The manifest entry of a tensor that consists of others, without its parts."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch

from ..._format.records import MAX_PARTS, SAVED_DTYPES, CompositeEntry, Key, Node, shape_problem
from ..._runtime.torch_probes import dtype_name
from ..._staging import Form
from ...errors import UnsafeObjectError, UnsupportedTensorError
from ..values import encode_value

_MAX_DEPTH = 16
_MAX_NAME = 4096
_SHOWN_CHARS = 160


def composite_entry(fqn: str, path: tuple[Key, ...], form: Form) -> CompositeEntry:
    """Return the entry of a composite tensor. Raises ``UnsupportedTensorError`` and ``UnsafeObjectError``."""

    def unsupported(what: str) -> UnsupportedTensorError:
        return UnsupportedTensorError(f"{fqn}: cannot save a {form.type} {what}")

    if form.attributes:
        raise unsupported(
            f"that lists {', '.join(form.attributes)}, which is not a tensor, among its tensors: save the tensors that "
            "it wraps"
        )
    if not 0 < len(set(form.names)) == len(form.names) <= MAX_PARTS or "" in form.names:
        raise unsupported(f"that wraps {len(form.names)} tensors: save the tensors that it wraps by themselves")
    if len(form.type) > _MAX_NAME or any(type(size) is not int for size in form.shape + (form.strides or ())):
        raise unsupported("whose shape is not fixed: save its components, such as values() and offsets()")
    dtype = dtype_name(form.dtype)
    if dtype not in SAVED_DTYPES:
        raise unsupported(f"of dtype {dtype}, which is not read: save the tensors that it wraps by themselves")
    if problem := shape_problem(dtype, form.shape):
        raise unsupported(f"of {problem}")
    context = _encode(form.context, f"{fqn}: a {form.type} keeps", 0)
    return CompositeEntry(path, form.type, dtype, form.shape, form.strides, form.names, context)


def _encode(value: Any, owner: str, depth: int) -> Node:
    """Encode what ``encode_value`` encodes, and members of enums, dataclasses and named tuples by the names of their
    classes. Tensors raise an error, because they have not been copied."""
    kind: Any = type(value)
    if isinstance(value, torch.Tensor):
        raise UnsafeObjectError(f"{owner} a tensor that its __tensor_flatten__ does not name")
    if isinstance(value, Enum):
        return {"member": [_name(kind), value.name]}
    if depth > _MAX_DEPTH:
        raise UnsafeObjectError(f"{owner} containers deeper than {_MAX_DEPTH} levels, or one that contains itself")
    if kind in (list, tuple):
        return {kind.__name__: [_encode(item, owner, depth + 1) for item in value]}
    if kind in (dict, OrderedDict):
        return {"dict" if kind is dict else "ordered_dict": _pairs(value, owner, depth)}
    # Only a dataclass that pickles in the default way: its attributes are then all of it. Code of its own could save
    # and restore it in any other way, which data cannot repeat.
    if is_dataclass(kind) and kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__:
        state = object.__getstate__(value)
        if kind.__getstate__ is object.__getstate__ and not hasattr(kind, "__setstate__") and type(state) is dict:
            return _object(kind, [], {"dict": _pairs(state, owner, depth)})
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _object(kind, [_encode(item, owner, depth + 1) for item in value])
    try:
        return encode_value(value, "")
    except UnsafeObjectError:
        raise UnsafeObjectError(
            f"{owner} a {_name(kind)} beside its tensors, which is not plain data: save the tensors that it wraps by "
            "themselves, and make it from them after a load"
        ) from None


def _pairs(mapping: Mapping[Any, Any], owner: str, depth: int) -> list[Node]:
    return [[_encode(key, owner, depth + 1), _encode(item, owner, depth + 1)] for key, item in mapping.items()]


def _object(kind: type, args: list[Node], state: Node = None) -> Node:
    return {"object": {"type": _name(kind), "new": True, "args": args, "state": state}}


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def differences(here: CompositeEntry, saved: CompositeEntry) -> str:
    """Return text about the difference between a tensor of the target and the saved one of the same type, shape and
    dtype, apart from its parts. Empty if there is none."""
    if here.parts != saved.parts:
        return f"it wraps {', '.join(here.parts)} in the target, {', '.join(saved.parts)} were saved"
    if here.strides is None:
        return ""
    if here.strides != saved.strides:
        return f"strides {here.strides} in the target, {saved.strides} saved"
    one, other = json.dumps(here.context), json.dumps(saved.context)  # 1 and True are equal
    return (
        "" if one == other else f"{one[:_SHOWN_CHARS]} beside its tensors in the target, {other[:_SHOWN_CHARS]} saved"
    )
