"""The outline of a captured state dict, without its tensors and values. To compare outlines takes a fraction of the
time of naming all leaves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._runtime.pauses import collected, pause_point
from .flatten import is_value, leaves_of

_KEYS = frozenset({str})
_NUMBERS = frozenset(
    {str, int, bool, type(None)}
)  # without float, because equal floats may have different names: 0.0 and -0.0
_TENSORS = frozenset({torch.Tensor})
_LEAVES = frozenset({bool, int, float, str, bytes, complex, tuple, type(None), torch.Size, torch.dtype, torch.device})
_TENSOR, _VALUE, _EMPTY, _DICT, _LIST = range(5)


@dataclass(frozen=True, slots=True)
class Outline:
    """The outline of a state dict. The ``key`` of two state dicts is equal only if they have the same leaves, by name,
    path and kind (a tensor, an empty dict, a value, a composite tensor), in the same order. ``tensors`` and ``values``
    are these leaves, in order. Composite tensors are among the values."""

    key: tuple[Any, ...]
    tensors: list[torch.Tensor]
    values: list[Any]


class _Unusual(Exception):
    """The state dict has a value that ``leaves_of`` has to handle."""


def outline_of(root: dict[Any, Any]) -> Outline:
    """Return the outline of a captured state dict. Raises what ``leaves_of`` raises, for a state dict that needs it."""
    key: list[Any] = []
    tensors: list[torch.Tensor] = []
    values: list[Any] = []
    try:
        _look(root, key, tensors, values)
    except _Unusual:
        leaves = collected(leaves_of(root))
        names = collected((leaf.fqn, leaf.path, leaf.kind) for leaf in leaves)
        return Outline(
            tuple(names),
            [leaf.value for leaf in leaves if leaf.kind == "tensor"],
            [leaf.value for leaf in leaves if leaf.kind in ("value", "composite")],
        )
    return Outline(tuple(key), tensors, values)


def _look(node: dict[Any, Any], key: list[Any], tensors: list[torch.Tensor], values: list[Any]) -> None:
    pause_point()
    kinds = set(map(type, node))
    key += (len(node), *node)
    if not kinds <= _KEYS:
        if not kinds <= _NUMBERS:
            raise _Unusual
        key += map(type, node)  # 1 and True are equal, and have different names
    if _TENSORS.issuperset(map(type, node.values())):
        key.append(_TENSORS)
        tensors += node.values()
    else:
        _look_at(node.values(), key, tensors, values)


def _look_at(items: Iterable[Any], key: list[Any], tensors: list[torch.Tensor], values: list[Any]) -> None:
    for item in items:
        kind = type(item)
        if kind is torch.Tensor:
            key.append(_TENSOR)
            tensors.append(item)
        elif kind is dict:
            key.append(_DICT if item else _EMPTY)
            if item:
                _look(item, key, tensors, values)
        elif kind is list and not is_value(item):
            key += (_LIST, len(item))
            pause_point()
            _look_at(item, key, tensors, values)
        elif kind is list or kind in _LEAVES:
            key.append(_VALUE)
            values.append(item)
        else:
            raise _Unusual
