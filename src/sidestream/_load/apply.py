"""The end of a load: values into their places, and objects given their new state."""

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
_INTEGER = re.compile("0|[1-9][0-9]*")  # as str() formats an integer: "007" and digits of other scripts are names
_PLAIN = frozenset({dict, list, OrderedDict})


@dataclass(frozen=True, slots=True)
class Handover:
    """Plain values by the leaf that they replace, and the state dict of each object, ready to be handed to it.

    ``assigned`` are the values that are put into containers of the caller's own classes. These and the objects are in
    the same order on all ranks, because their code may run a collective."""

    values: tuple[tuple[Leaf, Any], ...]
    assigned: tuple[tuple[Leaf, Any], ...]
    statefuls: tuple[tuple[StatefulLoad, dict[Any, Any]], ...]


@sliced
def prepare(
    plan: LoadPlan, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], *, own: bool
) -> Steps[Handover]:
    """In a thread, before anything is read into ``tensors``, and once more if composite tensors had to be made of what
    was read. Raises ``CorruptCheckpointError`` for paths that do not fit together."""
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
    """The sort key of a path, in the order in which ``state_dict()`` of objects is called."""
    keys = (key.value if isinstance(key, DictKey) else key for key in path)
    return tuple(key_order(key, index=type(place) is int) for key, place in zip(keys, path, strict=True))


async def hand_over(handover: Handover) -> None:
    """On the caller's thread: the holders of values and ``load_state_dict`` are the user's own. Safe to repeat."""
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
    # A Stateful whose own state dict is empty stands as one empty entry at its own path.
    below = ((path[depth:], value) for path, value in leaves())
    state_dict = run_sliced(assemble((path, value) for path, value in below if path))
    if stateful.versions is not None:  # without it a module takes its state dict for one of its first version
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
    """DCP turns the integer keys of an optimizer's state into strings; the template, or the class, says where."""
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
