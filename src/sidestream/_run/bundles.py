"""Objects to put into a state, beside those of the program: the random states of a process, and what belongs to one
rank."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from .._runtime.public import public
from .._runtime.torch_probes import Stateful
from ..errors import InvalidOptionError, StateMismatchError, UnsupportedCheckpointError
from ..options import check_choice

OnResize = Literal["error", "skip"]


@public
class RandomState:
    """Saves and restores the random states of this process: of ``random``, of ``numpy.random`` if the program has
    imported it, of torch, and of the devices of this process that are in use.

    It is an object with ``state_dict()`` and ``load_state_dict()``, for a place in a state: ``{"random":
    sidestream.RandomState()}``. With several ranks each has states of its own:
    ``sidestream.PerRank(sidestream.RandomState())``. Generators that the program has made itself are not included.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the random states as new tensors and plain values.

        Returns:
            A dict with the keys ``"python"``, ``"torch"``, ``"devices"`` and, if it is in use, ``"numpy"``.
        """
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "torch": torch.get_rng_state(),
            "devices": {f"{kind}{index}": state for kind, index, state in _device_states()},
        }
        if (numpy := sys.modules.get("numpy.random")) is not None:
            state["numpy"] = numpy.get_state(legacy=False)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the random states. Those of devices that this process does not have are left out. A device that is not in
        use yet gets its state when it is.

        Args:
            state_dict: What ``state_dict()`` has returned, here or in another process.

        Raises:
            UnsupportedCheckpointError: It has not the keys that ``state_dict()`` returns.
        """
        try:
            python, host, devices = state_dict["python"], state_dict["torch"], state_dict.get("devices", {})
            words = tuple(python["words"].tolist())
            random.setstate((python["version"], words, python["gauss"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnsupportedCheckpointError(
                f"not the random states of a RandomState ({type(error).__name__}: {error}): restore them with the "
                "object that has saved them"
            ) from error
        torch.set_rng_state(host.cpu())
        if "numpy" in state_dict:
            importlib.import_module("numpy.random").set_state(state_dict["numpy"])
        device = torch.accelerator.current_accelerator(check_available=True)
        for index in range(0 if device is None else torch.accelerator.device_count()):
            # Also of devices that the program has not used yet: torch sets their states when it does.
            if device is not None and (saved := devices.get(f"{device.type}{index}")) is not None:
                _set_device_state(device.type, index, saved.cpu())


def _device_states() -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield kind, index and random state of each device of this process, none if the program has used no device."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return
    module = torch.get_device_module(device)
    if not getattr(module, "is_initialized", lambda: True)():  # to ask for the state would initialize the device
        return
    all_states = getattr(module, "get_rng_state_all", None)  # mps has one device and no such function
    for index, state in enumerate(all_states() if all_states is not None else [module.get_rng_state()]):
        yield device.type, index, state


def _set_device_state(kind: str, index: int, state: torch.Tensor) -> None:
    module = torch.get_device_module(kind)
    if hasattr(module, "get_rng_state_all"):
        module.set_rng_state(state, index)
    else:
        module.set_rng_state(state)


@public
class PerRank:
    """Saves an object whose state is another one on each rank, such as random states or the position of a loader.

    Each rank saves under a name of its own, and gets its own state back. The numbers are those of the default process
    group; without one this process is rank 0 of 1. Each rank that loads reads the states of all ranks, so they should
    be small.

    Args:
        obj: An object with ``state_dict()`` and ``load_state_dict()``.
        on_resize: What a load does if another number of ranks has saved. ``"error"``: it fails. ``"skip"``: it leaves
            ``obj`` as it is.

    Raises:
        InvalidOptionError: ``obj`` has not both methods, or ``on_resize`` is none of these.
    """

    def __init__(self, obj: Stateful, on_resize: OnResize = "error") -> None:
        check_choice("on_resize", on_resize, OnResize)
        if not isinstance(obj, Stateful):
            raise InvalidOptionError(
                f"PerRank takes an object with state_dict() and load_state_dict(), and {type(obj).__name__} has not "
                "both: save a value under a name of the rank"
            )
        self.obj = obj
        self.on_resize = on_resize

    def state_dict(self) -> dict[str, Any]:
        """Return the state of ``obj`` under a name of this rank.

        Returns:
            A dict with one key, which has the number of this rank and the number of ranks: ``"rank0-of-2"``.
        """
        # The number of ranks is a part of the name, so that a load by another number of ranks reads nothing into the
        # tensors of ``obj``.
        return {_own_name(): self.obj.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give ``obj`` the state that this rank has saved, or leave it as it is.

        Args:
            state_dict: The states of all ranks, by the names that ``state_dict()`` gives them.

        Raises:
            StateMismatchError: Another number of ranks has saved, and ``on_resize`` is ``"error"``. Or this rank has
                not taken part in the save. ``obj`` is unchanged.
        """
        own = _own_name()
        if own in state_dict:
            self.obj.load_state_dict(state_dict[own])
            return
        saved = {name.rpartition("-")[2] for name in state_dict}
        if saved == {own.rpartition("-")[2]}:
            raise StateMismatchError(
                f"there is no {own}, because this rank took no part in the save: save on all ranks, or leave this "
                "object out of the load"
            )
        if self.on_resize == "error":
            raise StateMismatchError(
                f"saved by {', '.join(sorted(saved)) or 'no'} ranks, and this is {own}: load with as many ranks, or "
                "pass on_resize='skip' to leave the object as it is"
            )


def _own_name() -> str:
    together = dist.is_available() and dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    return f"rank{rank}-of-{world_size}"
