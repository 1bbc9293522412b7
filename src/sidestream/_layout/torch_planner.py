"""A wrapper around the caller's planner, which converts its exceptions to ``PlannerError``."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from .._runtime.caller import calling_thread_state
from ..errors import InvalidOptionError, PlannerError, SidestreamError, indented

__all__ = ["Asked", "local_save_plan", "packed", "unpacked"]


_ANSWERS: dict[str, tuple[type, ...]] = {
    "create_local_plan": (SavePlan, LoadPlan),
    "create_global_plan": (list, tuple),
    "finish_plan": (SavePlan, LoadPlan),
    "resolve_tensor": (torch.Tensor,),
}


class Asked:
    """A wrapper with the methods of ``planner``. Their exceptions become ``PlannerError``, except errors of
    sidestream. They are called in worker threads, with the device and the modes of the thread that made the call.
    Raises ``InvalidOptionError`` if ``planner`` is not of the class ``kind``."""

    def __init__(self, planner: Any, kind: type) -> None:
        if not isinstance(planner, kind):
            raise InvalidOptionError(f"planner={planner!r} has to be a {kind.__name__} of torch.distributed.checkpoint")
        self.planner: Any = planner
        self._thread_state = calling_thread_state()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.planner, name)

        def ask(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = self._thread_state.run(partial(method, *args, **kwargs))
                if name in _ANSWERS and not isinstance(answer, _ANSWERS[name]):
                    raise PlannerError(f"{type(self.planner).__qualname__}.{name} returned a {type(answer).__name__}")
                return answer
            except SidestreamError:
                raise
            except Exception as error:
                raise PlannerError(
                    f"{type(self.planner).__qualname__}.{name} raised {type(error).__name__}: {indented(error)}"
                ) from error

        return ask


def local_save_plan(asked: Asked, state: Any, url: str, *, first: bool) -> SavePlan:
    """Return the local plan of this rank. ``first``: this rank merges the plans of all."""
    if "storage_meta" in inspect.signature(asked.planner.set_up_planner).parameters:
        asked.set_up_planner(state_dict=state, storage_meta=StorageMeta(checkpoint_id=url), is_coordinator=first)
    else:  # a planner for an early version of DCP
        asked.set_up_planner(state, first)
    plan: SavePlan = asked.create_local_plan()
    return plan


def packed(asked: Asked, plan: object) -> bytes:
    """Pickle a plan for another rank, as DCP does. Plans have classes of torch and of the author of the planner."""
    try:
        return pickle.dumps(plan)
    except Exception as error:
        raise PlannerError(
            f"a plan of {type(asked.planner).__qualname__} cannot be sent to another rank: {error}"
        ) from error


def unpacked(asked: Asked, raw: bytes) -> Any:
    """Unpickle a plan that a rank of this job has ``packed``. The rank has authenticated with the token of the group,
    so its pickle is trusted."""
    try:
        return pickle.loads(raw)
    except Exception as error:
        raise PlannerError(f"a plan of {type(asked.planner).__qualname__} cannot be read: {error}") from error
