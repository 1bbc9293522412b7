"""Shells: the places of a version while it is served. Each is a copy of a module with weights of its own, or a mapping.

On the host the tensors of a shell are views of memory that it was given, and exchanging them copies nothing. On a
device a shell has memory of its own, into which each version is copied.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._runtime.threads import io_threads, pause_point
from .._staging.streams import Streams, current_streams, streams_of
from ..errors import UnsupportedModuleError, listed
from .refusals import hidden_state, problems_of


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a tensor in each shell. ``names`` has more than one name if it is tied."""

    names: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def fits(self, tensor: torch.Tensor) -> bool:
        return (tensor.shape, tensor.dtype, tensor.device) == (self.shape, self.dtype, self.device)


@dataclass(slots=True, eq=False)
class Shell:
    """One copy. ``module`` is None for a mapping of tensors, which are then in ``tensors`` alone.

    ``readings`` are the ones that use it, the oldest first. A shell is claimed while it is changed. ``used`` are events
    of devices, the last of each stream: until then readings that have ended may still use its memory. ``filled``: it
    has the host memory of a version. ``changing`` is locked by the thread that changes its tensors."""

    module: torch.nn.Module | None
    tensors: dict[str, torch.Tensor]
    readings: dict[Any, None] = field(default_factory=dict)
    claimed: bool = False
    used: dict[Any, tuple[Hashable, Any]] = field(default_factory=dict)
    filled: bool = False
    changing: threading.Lock = field(default_factory=threading.Lock)


class Shells:
    """All shells of one ``Live``. ``prepare`` is called with each copy."""

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        count: int,
        prepare: Callable[[torch.nn.Module], object] | None,
    ) -> None:
        tensors = _checked(model)
        self.places = _places(tensors)
        """By the first name of each."""
        self.leaders = {name: place.names[0] for place in self.places.values() for name in place.names}
        devices = {place.device for place in self.places.values()}
        self._devices = sorted((one for one in devices if one.type != "cpu"), key=str)
        self._on_host = any(place.device.type == "cpu" for place in self.places.values())
        self.empty = any(tensor.is_meta for tensor in tensors.values())
        """Whether there are no weights before the first version, because the tensors had none."""
        with torch.inference_mode(False), torch.no_grad():
            self.all = [self._new(model, tensors, number == 0, prepare) for number in range(count)]

    @property
    def own_bytes(self) -> int:
        """The bytes of device memory that the shells have for themselves."""
        of_devices = [place for place in self.places.values() if place.device.type != "cpu"]
        return sum(place.shape.numel() * place.dtype.itemsize for place in of_devices) * len(self.all)

    def _new(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        first: bool,
        prepare: Callable[[torch.nn.Module], object] | None,
    ) -> Shell:
        """Return a shell. The first one has copies of the weights, which serve until there is a version."""
        made = {name: self._tensor(place, tensors[name], first) for name, place in self.places.items()}
        if not isinstance(model, torch.nn.Module):
            return Shell(None, {name: made[leader] for name, leader in self.leaders.items()})
        copied = _copy(model, {id(tensors[name]): one for name, one in made.items()})
        if prepare is not None:
            prepare(copied)
        inside = copied.state_dict(keep_vars=True)
        others = [name for name, leader in self.leaders.items() if inside.get(name) is not made[leader]]
        _refuse([f"{name} was replaced by copy.deepcopy() or prepare=: it would not be swapped" for name in others])
        moved = [name for name, place in self.places.items() if not place.fits(made[name])]
        _refuse([f"{name} was converted or moved by prepare=: do that with the module" for name in moved])
        return Shell(copied, dict(inside))

    def _tensor(self, place: Place, given: torch.Tensor, first: bool) -> torch.Tensor:
        if place.device.type != "cpu":
            made = given.detach().clone() if first else torch.empty_like(given.detach())
        elif first and not given.is_meta:
            made = given.detach().clone()
        else:
            made = _no_memory(place)
        return torch.nn.Parameter(made, requires_grad=False) if isinstance(given, torch.nn.Parameter) else made

    def clear(self, shell: Shell) -> None:
        """Drop the host memory of a shell that is claimed, or ``changing``. Called in a thread."""
        if not shell.filled:
            return
        for name, place in self.places.items():
            pause_point()
            if place.device.type == "cpu":
                self._set(shell, place, name, _no_memory(place))
        shell.filled = False

    async def fill(self, shell: Shell, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a version into a claimed shell: ``tensors`` by the first names of their places."""
        streams = await streams_of(self._devices)
        await io_threads().run(self._fill, shell, tensors, streams)

    def _fill(self, shell: Shell, tensors: Mapping[str, torch.Tensor], streams: Streams) -> None:
        own = streams.apart()
        own.wait_for(shell.used.values())
        shell.used.clear()
        with shell.changing, torch.inference_mode(False), torch.no_grad(), own.current("weights"):
            shell.filled = self._on_host
            for name, place in self.places.items():
                pause_point()
                if place.device.type == "cpu":
                    self._set(shell, place, name, tensors[name].detach())
                else:
                    shell.tensors[name].copy_(tensors[name], non_blocking=True)
        # Before any reading may begin, on whatever stream. Without a limit: a copy that was enqueued cannot be taken
        # back, so nothing else could be put into the shell after one. If the device stands still, so do the requests
        # on it, and the version before stays.
        own.finish()

    def _set(self, shell: Shell, place: Place, name: str, tensor: torch.Tensor) -> None:
        if shell.module is None:
            shell.tensors.update(dict.fromkeys(place.names, tensor))
        else:
            shell.tensors[name].data = tensor

    def mark_used(self, shell: Shell) -> None:
        """Note what the current streams of the devices still have to do with a shell when a reading of it ends."""
        if self._devices:
            shell.used.update(current_streams(self._devices).marks())


def _no_memory(place: Place) -> torch.Tensor:
    """Return a tensor of the right shape without memory of its own."""
    return torch.zeros((), dtype=place.dtype).expand(place.shape)


def _checked(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of ``model`` by name. Raises ``UnsupportedModuleError``."""
    if not isinstance(model, torch.nn.Module):
        given: Mapping[str, Any] = model
        _refuse([f"{name!r} is not a tensor" for name, one in given.items() if not isinstance(one, torch.Tensor)])
        return dict(model)
    _refuse(problems_of(model))
    return dict(model.state_dict(keep_vars=True))


def _refuse(problems: Collection[str]) -> None:
    if problems:
        lines = sorted(problems)
        raise UnsupportedModuleError(f"Live cannot swap all weights of this module:\n  {listed(lines)}", lines)


def _copy(model: torch.nn.Module, places: Mapping[int, torch.Tensor]) -> torch.nn.Module:
    """Return a deep copy of ``model`` in which ``places`` stand for its tensors, by their ids."""
    constant = [f"{name} has no values to copy" for name, one in model.named_buffers() if _lost(one, places)]
    _refuse(constant)
    try:
        copied = copy.deepcopy(model, dict(places))
    except Exception as error:
        raise UnsupportedModuleError(f"Live cannot copy this module: {type(error).__name__}: {error}") from error
    for parameter in copied.parameters():
        parameter.requires_grad_(False)
    _refuse(hidden_state(model, copied))
    return copied


def _lost(buffer: torch.Tensor, places: Mapping[int, torch.Tensor]) -> bool:
    return buffer.is_meta and id(buffer) not in places


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    found = {}
    for names in tied.values():
        tensor = tensors[names[0]]
        device = torch.device("cpu") if tensor.is_meta else tensor.device
        found[names[0]] = Place(tuple(names), tensor.shape, tensor.dtype, device)
    return found
