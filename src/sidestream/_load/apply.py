"""The end of a load: plain values are put into their places, and objects receive their new state."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .._format.records import DictKey, EmptyEntry, Key
from .._layout.assemble import assemble
from .._layout.flatten import CompositeLeaf, Leaf
from .._layout.match import LoadPlan, StatefulLoad, plain_path
from .._runtime.caller import run_in_calling_thread
from .._runtime.state_dict_calls import key_order, monitored
from .._runtime.threads import Steps, run_sliced, sliced
from ..errors import LoadStateDictError, indented

__all__ = ["Handover", "hand_over", "prepare"]

_SLICE = 1024
_INTEGER = re.compile("0|[1-9][0-9]*")  # what str() of an integer returns: "007" and digits of other scripts are names
_PLAIN = frozenset({dict, list, OrderedDict})


@dataclass(frozen=True, slots=True)
class Handover:
    """The plain values with the leaves that they replace, and the state dict for each object.

    ``assigned`` are the values that are put into containers of the caller's own classes. These values and the objects
    are in the same order on all ranks, because the code of the caller may run a collective."""

    values: tuple[tuple[Leaf, Any], ...]
    assigned: tuple[tuple[Leaf, Any], ...]
    statefuls: tuple[tuple[StatefulLoad, dict[Any, Any]], ...]


@sliced
def prepare(
    plan: LoadPlan, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, own: bool
) -> Steps[Handover]:
    """Return the values and state dicts to hand over. Called in a thread before anything is read into ``tensors``, and
    again if composite tensors were made from what was read. Raises ``CorruptCheckpointError`` for paths that contradict
    each other."""
    plain: list[tuple[Leaf, Any]] = []
    assigned: list[tuple[Leaf, Any]] = []
    for leaf, _ in plan.values:
        yield
        (plain if type(leaf.holder) in _PLAIN else assigned).append((leaf, values[leaf.fqn]))
    statefuls = [(stateful, _state_dict(stateful, values, tensors, own, plan.parts)) for stateful in plan.statefuls]
    assigned.sort(key=lambda one: _order(one[0].path))
    statefuls.sort(key=lambda one: _order(one[0].path))
    return Handover(tuple(plain), tuple(assigned), tuple(statefuls))


def _order(path: tuple[Key, ...]) -> tuple[str, ...]:
    """Return the sort key of a path. It gives the order in which ``state_dict()`` of objects is called."""
    keys = (key.value if isinstance(key, DictKey) else key for key in path)
    return tuple(key_order(key, index=type(place) is int) for key, place in zip(keys, path, strict=True))


async def hand_over(handover: Handover) -> None:
    """Put the values into their places, and call ``load_state_dict`` of the objects. Runs in the caller's thread,
    because containers and objects are those of the caller. May be repeated."""
    for number, (leaf, value) in enumerate(handover.values, 1):
        leaf.holder[leaf.slot] = value
        if number % _SLICE == 0:
            await asyncio.sleep(0)
    for leaf, value in handover.assigned:
        await asyncio.sleep(0)
        run_in_calling_thread(leaf.holder.__setitem__, leaf.slot, value)
    for stateful, state_dict in handover.statefuls:
        await asyncio.sleep(0)
        with monitored(stateful.fqn, stateful.instance, "load_state_dict"):
            run_in_calling_thread(_load_stateful, stateful, state_dict)


def _state_dict(
    stateful: StatefulLoad,
    values: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    own: bool,
    parts: frozenset[str],
) -> dict[Any, Any]:
    def leaves() -> Iterator[tuple[tuple[Key, ...], Any]]:
        for fqn, entry in stateful.entries.items():
            if fqn in parts:
                continue
            path = entry.path if own else _with_integer_keys(entry.path, stateful)
            yield path, {} if isinstance(entry, EmptyEntry) else tensors[fqn] if fqn in tensors else values[fqn]
        for leaf in stateful.kept:
            if leaf.whole is None:
                yield leaf.path, leaf.value.tensor if isinstance(leaf.value, CompositeLeaf) else leaf.value

    depth = len(stateful.path)
    # A Stateful whose own state dict is empty was saved as one empty entry at its own path.
    below = ((path[depth:], value) for path, value in leaves())
    state_dict = run_sliced(assemble((path, value) for path, value in below if path))
    if stateful.versions is not None:  # without them a module assumes a state dict of its first version
        state_dict = OrderedDict(state_dict)
        state_dict._metadata = stateful.versions  # type: ignore[attr-defined]
    return state_dict


def _load_stateful(stateful: StatefulLoad, state_dict: dict[Any, Any]) -> None:
    inference = isinstance(stateful.instance, torch.nn.Module) and any(
        parameter.is_inference() for parameter in stateful.instance.parameters()
    )
    # Entering a mode that is already active would turn gradients on.
    mode = nullcontext() if inference == torch.is_inference_mode_enabled() else torch.inference_mode(inference)
    try:
        with mode:
            stateful.instance.load_state_dict(state_dict)
    except Exception as error:
        raise LoadStateDictError(
            f"{stateful.fqn}: {type(stateful.instance).__name__}.load_state_dict raised {type(error).__name__}: "
            f"{indented(error)}"
        ) from error


def _with_integer_keys(path: tuple[Key, ...], stateful: StatefulLoad) -> tuple[Key, ...]:
    """Return ``path`` with integers for those keys that DCP has turned into strings, such as the keys of the state of
    an optimizer. The template, or the class of the object, shows which keys were integers."""
    plain = plain_path(path)
    in_optimizer = isinstance(stateful.instance, torch.optim.Optimizer)
    start = len(stateful.path)
    keys: list[Key] = []
    for depth, key in enumerate(path):
        known = plain[:depth] in stateful.integer_keys
        state = in_optimizer and depth == start + 1 and plain[depth - 1] == "state"
        integer = (known or state) and isinstance(key, str) and _INTEGER.fullmatch(key)
        keys.append(DictKey(int(str(key))) if integer else key)
    return tuple(keys)
