"""The calls of objects in a state dict, which only the caller's thread may make. Other threads use the results."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .._runtime.caller import run_in_calling_thread
from .._runtime.state_dict_calls import state_dicts_in_order
from ..errors import InvalidOptionError
from .flatten import is_mapping, is_stateful

__all__ = ["Answers"]


class Answers:
    """``state_dict()`` of the ``Stateful`` objects in a state, and the items of mappings that are not plain dicts."""

    def __init__(self) -> None:
        self._state_dicts: dict[int, tuple[Any, Any]] = {}
        self._items: dict[
            int, tuple[Any, list[tuple[Any, Any]]]
        ] = {}  # refers to the mappings, because the id of a freed object can be reused

    def ask(self, state: object) -> Iterator[None]:
        """Call ``state_dict()`` of every object in ``state`` and in the returned state dicts, in the same order on all
        ranks. Yields to let other tasks run.

        A container that contains itself is traversed once. ``leaves_of`` raises an error for it.
        """
        for level_done in state_dicts_in_order(state, self._look, self._state_dicts):
            if not level_done:
                yield

    def state_dict(self, instance: Any) -> Any:
        try:
            return self._state_dicts[id(instance)][1]
        except KeyError:
            raise self._changed() from None

    def items(self, mapping: Mapping[Any, Any]) -> Iterable[tuple[Any, Any]]:
        if type(mapping) is dict:
            return dict(mapping).items()  # the copy is one step, because the loop's thread may change the dict
        if type(mapping) is OrderedDict:
            return list(mapping.items())
        try:
            return self._items[id(mapping)][1]
        except KeyError:
            raise self._changed() from None

    @staticmethod
    def _changed() -> InvalidOptionError:
        return InvalidOptionError("the target was changed while it was being loaded into; leave its structure alone")

    def _look(self, value: Any) -> Iterable[tuple[Any, Any]] | None:
        if type(value) is tuple or isinstance(value, torch.Tensor):
            return ()
        if is_stateful(value):
            return None
        if isinstance(value, list):
            return enumerate(list(value))
        if not is_mapping(value):
            return ()
        if type(value) is dict or type(value) is OrderedDict:
            return zip(list(value), list(value.values()), strict=True)
        items = run_in_calling_thread(lambda: list(value.items()))
        self._items[id(value)] = (value, items)
        return items
