"""The checkpoints of a run for programs with a Hugging Face ``Accelerator``.

``save_accelerator`` and ``restore_accelerator`` do what ``Accelerator.save_state`` and ``load_state`` do, with a
``sidestream.Checkpointer``. ``accelerator_state`` is the state that they save, for other calls of sidestream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import sidestream
from sidestream import blocking

from ._hugging_face import ACCELERATE, check_supported, module_state, optimizer_state, plain_module

with ACCELERATE.importing():
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler

ACCELERATE.check_attributes(
    Accelerator, "_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects", "scaler", "step"
)
ACCELERATE.check(DataLoaderShard, set_epoch=("epoch",), get_sampler=())

__all__ = [
    "accelerator_state",
    "restore_accelerator",
    "restore_accelerator_blocking",
    "save_accelerator",
    "save_accelerator_blocking",
]


async def save_accelerator(
    checkpoints: sidestream.Checkpointer,
    accelerator: Accelerator,
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
) -> sidestream.SaveInfo:
    """Save what an ``Accelerator`` has prepared as ``step``, and return when the checkpoint is visible and durable.

    All processes of the ``Accelerator`` make the call. A cancel leaves what ``Checkpointer.save`` leaves. To train on
    while the files are written, call ``checkpoints.async_save(accelerator_state(accelerator), step=step)``.

    Args:
        checkpoints: The checkpoints of the run.
        accelerator: The accelerator, after ``prepare``.
        step: The number of the step, not negative.
        metadata: Plain data that can be read without the state, as for ``Checkpointer.save``.

    Returns:
        What was committed.

    Raises:
        UnsupportedError: The accelerator runs DeepSpeed, Megatron-LM, XLA or FSDP1.
        SidestreamError: The save failed as ``Checkpointer.save`` does.
    """
    return await checkpoints.save(accelerator_state(accelerator), step=step, metadata=metadata)


async def restore_accelerator(
    checkpoints: sidestream.Checkpointer,
    accelerator: Accelerator,
    step: int | Literal["latest"] = "latest",
    *,
    fallback: Literal["never", "older"] = "never",
) -> int | None:
    """Load the newest committed step, or ``step``, into what an ``Accelerator`` has prepared, and return its number.

    All processes of the ``Accelerator`` make the call, and there may be more or fewer of them than have saved. Random
    states are restored where as many have saved. What a cancel leaves is as for ``Checkpointer.restore``.

    Args:
        checkpoints: The checkpoints of the run.
        accelerator: The accelerator, after ``prepare`` and ``register_for_checkpointing``, with the same number of
            models, optimizers, schedulers, loaders and objects as saved.
        step: A number, or ``"latest"``.
        fallback: What happens if the step is damaged (``options.Fallback``).

    Returns:
        The number of the step, or None if the run has no step yet.

    Raises:
        UnsupportedError: The accelerator runs DeepSpeed, Megatron-LM, XLA or FSDP1.
        SidestreamError: The load failed as ``Checkpointer.restore`` does.
    """
    return await checkpoints.restore(accelerator_state(accelerator), step, fallback=fallback)


def save_accelerator_blocking(
    checkpoints: blocking.Checkpointer,
    accelerator: Accelerator,
    *,
    step: int,
    metadata: Mapping[str, Any] | None = None,
) -> sidestream.SaveInfo:
    """Do what ``save_accelerator`` does, and block until it has ended.

    Args:
        checkpoints: The checkpoints of the run.
        accelerator: The accelerator, after ``prepare``.
        step: The number of the step, not negative.
        metadata: Plain data that can be read without the state.

    Returns:
        What was committed.

    Raises:
        UnsupportedError: The accelerator runs DeepSpeed, Megatron-LM, XLA or FSDP1.
        WrongLoopError: An event loop runs in this thread.
        SidestreamError: The save failed as ``Checkpointer.save`` does.
    """
    info: sidestream.SaveInfo = checkpoints.save(accelerator_state(accelerator), step=step, metadata=metadata)
    return info


def restore_accelerator_blocking(
    checkpoints: blocking.Checkpointer,
    accelerator: Accelerator,
    step: int | Literal["latest"] = "latest",
    *,
    fallback: Literal["never", "older"] = "never",
) -> int | None:
    """Do what ``restore_accelerator`` does, and block until it has ended.

    Args:
        checkpoints: The checkpoints of the run.
        accelerator: The accelerator, after ``prepare`` and ``register_for_checkpointing``.
        step: A number, or ``"latest"``.
        fallback: What happens if the step is damaged.

    Returns:
        The number of the step, or None if the run has no step yet.

    Raises:
        UnsupportedError: The accelerator runs DeepSpeed, Megatron-LM, XLA or FSDP1.
        WrongLoopError: An event loop runs in this thread.
        SidestreamError: The load failed as ``Checkpointer.restore`` does.
    """
    number: int | None = checkpoints.restore(accelerator_state(accelerator), step, fallback=fallback)
    return number


def accelerator_state(accelerator: Accelerator) -> dict[str, Any]:
    """Return the state of an ``Accelerator``, for every call of sidestream that takes a state.

    Nothing is copied: the state refers to the live objects, and a load into it changes them.

    Args:
        accelerator: The accelerator, after ``prepare``.

    Returns:
        Models, optimizers, schedulers, loaders, registered objects, the gradient scaler if there is one, the counter
        of gradient accumulation, and the random states of each process.

    Raises:
        UnsupportedError: The accelerator runs DeepSpeed, Megatron-LM, XLA or FSDP1.
        InvalidOptionError: An optimizer has parameters of several sharded models.
    """
    check_supported(accelerator)
    models = [plain_module(accelerator, model) for model in accelerator._models]
    state: dict[str, Any] = {
        "models": _numbered(module_state(accelerator, one) for one in models),
        "optimizers": _numbered(optimizer_state(models, one) for one in accelerator._optimizers),
        "schedulers": _numbered(one.scheduler for one in accelerator._schedulers),
        "loaders": _numbered(_Loader(one) for one in accelerator._dataloaders),
        "objects": _numbered(accelerator._custom_objects),
        "counters": _Counters(accelerator),
        "random": sidestream.PerRank(sidestream.RandomState(), on_resize="skip"),
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return {name: part for name, part in state.items() if part != {}}


def _numbered(parts: Iterable[Any]) -> dict[str, Any]:
    return {str(number): part for number, part in enumerate(parts)}


class _Loader:
    """The epoch of a loader, what its shuffling begins from, and its position if it is a ``StatefulDataLoader``."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._sampler: Any = loader.get_sampler() if hasattr(loader, "get_sampler") else None
        self._position = sidestream.PerRank(loader) if getattr(loader, "use_stateful_dataloader", False) else None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": getattr(self._loader, "iteration", 0)}
        if isinstance(self._sampler, SeedableRandomSampler):
            state["seed"] = self._sampler.initial_seed
        elif getattr(self._sampler, "generator", None) is not None:
            state["generator"] = self._sampler.generator.get_state()
        if self._position is not None:
            state["position"] = self._position.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(state_dict["epoch"])
        if "seed" in state_dict:
            self._sampler.initial_seed = state_dict["seed"]
        if "generator" in state_dict:
            self._sampler.generator.set_state(state_dict["generator"])
        if self._position is not None:
            self._position.load_state_dict(state_dict["position"])


class _Counters:
    """The counter of gradient accumulation."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]
