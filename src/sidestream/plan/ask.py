"""What only the caller's thread may ask of the objects in a state dict, so that the rest can be done in another one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..errors import InvalidOption
from .flatten import is_mapping, is_stateful

__all__ = ["Answers"]

_SLICE = 1024  # values: up to a few microseconds each
_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, bytes, complex, tuple, type(None)})


class Answers:
    """``state_dict()`` of the ``Stateful`` objects in a state, and the items of mappings that are not plain dicts."""

    def __init__(self) -> None:
        self._state_dicts: dict[int, Any] = {}
        self._items: dict[int, list[tuple[Any, Any]]] = {}
        self._seen: dict[int, Any] = {}  # they are kept, so that no other object gets their id

    def ask(self, state: object) -> Iterator[None]:
        """Ask every object in ``state`` and in what they answer; yields whenever others should get a turn.

        What contains itself is walked through once; ``leaves_of`` refuses it.
        """
        stack = [iter(self._contents(state))]
        count = 0
        while stack:
            for value in stack[-1]:
                count += 1
                if count % _SLICE == 0:
                    yield
                kind = type(value)
                if kind in _LEAVES:
                    continue
                inside = self._inside(value)
                if inside:
                    stack.append(iter(inside))
                    break
            else:
                stack.pop()

    def state_dict(self, instance: Any) -> Any:
        try:
            return self._state_dicts[id(instance)]
        except KeyError:
            raise self._changed() from None

    def items(self, mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
        if type(mapping) is dict or type(mapping) is OrderedDict:
            return list(mapping.items())
        try:
            return self._items[id(mapping)]
        except KeyError:
            raise self._changed() from None

    @staticmethod
    def _changed() -> InvalidOption:
        return InvalidOption("the target was changed while it was being loaded into; leave its structure alone")

    def _inside(self, value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor) or id(value) in self._seen:
            return []
        if is_stateful(value):
            self._seen[id(value)] = value
            self._state_dicts[id(value)] = value = value.state_dict()
        return self._contents(value)

    def _contents(self, value: Any) -> list[Any]:
        self._seen[id(value)] = value
        if isinstance(value, list):
            return list(value)
        if not is_mapping(value):
            return []
        if type(value) is dict or type(value) is OrderedDict:
            return list(value.values())
        self._items[id(value)] = items = list(value.items())
        return [item for _, item in items]
