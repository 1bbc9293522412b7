"""TorchTitan: ``SidestreamCheckpointManager``, a checkpoint manager for its trainer.

It writes the names that TorchTitan's own manager writes, so each of them reads what the other one has saved.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict_loader import load as stock_load

import sidestream
from sidestream import blocking
from sidestream.errors import SidestreamError, StateMismatchError, UnsupportedError

from ._checks import Framework

_TITAN = Framework("torchtitan", "==0.3.0", extra="torchtitan")
_HOOKS: dict[str, tuple[str, ...]] = {
    "_load": ("step",),
    "_save": ("curr_step", "last_step"),
    "_wait_for_saving": (),
    "_maybe_wait_for_staging": (),
    "_close": (),
}

with _TITAN.importing():
    from torchtitan.components.checkpointer import BaseCheckpointManager, ModelWrapper
    from torchtitan.components.checkpointer.base import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.tools import filesystem

_TITAN.check(BaseCheckpointManager, **_HOOKS)
_TITAN.check(ModelWrapper, state_dict=(), load_state_dict=("state_dict",))
if others := sorted(inspect.getattr_static(BaseCheckpointManager, "__abstractmethods__") ^ _HOOKS.keys()):
    raise _TITAN.unsupported(f"BaseCheckpointManager has other hooks ({', '.join(others)})")

__all__ = ["SidestreamCheckpointManager"]

_log = logging.getLogger("sidestream")

_RANDOM = "random_state"
_NOT_IN_OTHERS = (_RANDOM, f"{_RANDOM}.*")
"""What this manager saves and TorchTitan's own does not."""
_MODEL_ONLY = (
    "the last step of a run has the model only, unless last_save_model_only=False: take an older one with load_step, "
    "or name this one as initial_load_path of a run in another folder"
)


class _RestoredLast:
    """The random states of this process. A load keeps them, and they are set when everything else is restored."""

    def __init__(self) -> None:
        random = sidestream.RandomState()
        self.state_dict, self.set = random.state_dict, random.load_state_dict
        self.restored: Mapping[str, Any] | None = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if "torch" in state_dict:  # TorchTitan's own manager saves no random states
            self.restored = state_dict


class SidestreamCheckpointManager(BaseCheckpointManager):
    """Saves and restores the training state of TorchTitan's trainer with a ``sidestream.Checkpointer``.

    Name its ``Config`` as ``checkpoint=`` of the trainer's configuration, which builds it. A save returns when the
    copies are launched, and the trainer waits for them before it changes the weights. A step is visible when it is
    complete. The save of the last step, and ``close()``, return when everything is durable. A load waits for the saves
    in progress. The error of a failed save is raised once, by a later save or load or by ``close()``.

    Args:
        config: The settings.
        dataloader: The loader, whose position is saved. None: there is none.
        model_parts: The parts of the model that this rank has.
        optimizers: All optimizers.
        lr_schedulers: All schedulers of learning rates.
        states: What else is saved, by name: the trainer.
        sd_adapter: Translates the names of Hugging Face, for ``initial_load_in_hf``.
        base_folder: The directory or URL that ``config.folder`` is below.

    Raises:
        SidestreamError: The folder of the checkpoints cannot be read.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """The settings that TorchTitan has for all managers, and four of sidestream.

        Raises:
            UnsupportedError: ``last_save_in_hf`` is set.
        """

        slots: int = 2
        """How many saves may be in progress at the same time. Each has host memory for the whole state."""

        durability: Literal["fsync", "flush"] = "fsync"
        """Whether an acknowledged step survives a power cut ("fsync"), or only the death of the processes ("flush")."""

        writer: Literal["thread", "process"] = "thread"
        """What writes: threads of each rank, or one more process beside each rank."""

        timeout_s: float = 1800.0
        """The limit of a save, and of a load, in seconds."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.last_save_in_hf:
                raise UnsupportedError(
                    "SidestreamCheckpointManager writes no Hugging Face files, as last_save_in_hf asks: leave it out, "
                    "and convert the last step with TorchTitan's scripts/checkpoint_conversion/convert_to_hf.py"
                )

    @blocking.stopping_the_loop()
    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable: bool = config.enable
        if not self.enable:
            return
        self.config = config
        self.folder: str = filesystem.join(base_folder, config.folder)
        self._random = _RestoredLast()
        self.states: dict[str, Any] = {
            **states,
            MODEL: ModelWrapper(model_parts),
            OPTIMIZER: optimizers,
            DATALOADER: dataloader,
            LR_SCHEDULER: lr_schedulers,
            _RANDOM: sidestream.PerRank(self._random, on_resize="skip"),
        }
        self.sd_adapter = sd_adapter
        self.save_future: sidestream.PendingSave | None = None
        self._saving: list[sidestream.PendingSave] = []
        limit_s = config.timeout_s
        self._options = sidestream.SaveOptions(durability=config.durability, writer=config.writer, timeout_s=limit_s)
        self._stager = sidestream.AsyncStager(timeout_s=limit_s)
        self._checkpoints = blocking.Checkpointer(
            self.folder,
            keep=sidestream.KeepLast(config.keep_latest_k) if config.keep_latest_k else None,
            slots=config.slots,
            stager=self._stager,
            save=self._options,
            load=sidestream.LoadOptions(timeout_s=limit_s),
        )

    @torch.no_grad()
    @blocking.stopping_the_loop()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._is_due(curr_step, last_step):
            return False
        model_only = last_step and self.config.last_save_model_only
        state = self._state(model_only=model_only)
        if last_step:
            options = replace(self._options, dtype=TORCH_DTYPE_MAP[self.config.export_dtype]) if model_only else None
            self._checkpoints.save(state, step=curr_step, options=options)
        else:
            self.save_future = self._checkpoints.async_save(state, step=curr_step)
            self._saving = [*(one for one in self._saving if not one.done()), self.save_future]
        return True

    def _is_due(self, step: int, last_step: bool) -> bool:
        first = step == 1 and self.config.enable_first_step_checkpoint
        return not self.config.load_only and (last_step or first or step % self.config.interval == 0)

    def _state(self, *, model_only: bool = False, excluded: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return what is saved or loaded: the model's tensors by their names alone, the other states below theirs."""
        others = {} if model_only else {name: one for name, one in self.states.items() if name not in excluded}
        others.pop(MODEL, None)
        return {**others, **self.states[MODEL].state_dict()}

    def _maybe_wait_for_staging(self) -> None:
        try:
            self._stager.fence()
        except SidestreamError:
            self._wait_for_saving()  # the save has the same error, which is raised once
            raise

    def _wait_for_saving(self) -> None:
        self.save_future = None
        while self._saving:  # if one has failed, the others stay for the next call
            self._saving.pop(0).result()

    @torch.no_grad()
    @blocking.stopping_the_loop()
    def _load(self, step: int = -1) -> bool:
        if unknown := sorted(set(self.config.exclude_from_loading) - self.states.keys()):
            raise ValueError(f"exclude_from_loading names {', '.join(unknown)}, and there are {', '.join(self.states)}")
        self._wait_for_saving()  # it reads what is replaced now, and is one of the steps
        seed = (self._checkpoints.latest() if step == -1 else step) == 0  # it has the weights and nothing else
        state = self._state(model_only=seed, excluded=tuple(self.config.exclude_from_loading))
        which: Any = {"fallback": "older"} if step == -1 else {"step": step}
        try:
            # `latest` does not count a step whose metadata is damaged, for which `restore` raises an error.
            found = self._checkpoints.restore(state, **which, allow_missing=_NOT_IN_OTHERS, allow_cast=seed)
        except StateMismatchError as error:
            if any(one.startswith(TRAIN_STATE) for one in error.offenders):
                error.add_note(_MODEL_ONLY)
            raise
        if found is None:
            return self._load_initial()
        self._finish(state)
        return True

    def _finish(self, state: dict[str, Any]) -> None:
        """Do what follows when ``state`` has been loaded."""
        self.states[MODEL].load_state_dict(state)
        if self._random.restored is not None:
            if (loader := self.states[DATALOADER]) is not None:
                loader.state_dict()  # makes the iterator that the trainer will use, which draws a random number
            self._random.set(self._random.restored)

    def _load_initial(self) -> bool:
        """Load what a run without a step begins with. Return False if there is nothing to load."""
        path, model, model_only = self.config.initial_load_path, self.states[MODEL], self.config.initial_load_model_only
        if self.config.initial_load_in_hf:
            path = path or self.sd_adapter.hf_assets_path
            weights = self.sd_adapter.to_hf(model.state_dict())
            reader = self.sd_adapter.get_hf_storage_reader(path, self.config.initial_load_in_hf_quantized)
            stock_load(weights, storage_reader=reader)
            model.load_state_dict(self.sd_adapter.from_hf(weights))
        elif path:
            state = self._state(model_only=model_only, excluded=tuple(self.config.exclude_from_loading))
            options = sidestream.LoadOptions(timeout_s=self.config.timeout_s)
            blocking.load(state, path, allow_missing=_NOT_IN_OTHERS, allow_cast=model_only, options=options)
            self._finish(state)
        _log.info("%s has no step: the training begins with %s", self.folder, path or "new weights")
        return bool(path)

    @blocking.stopping_the_loop()
    def _close(self) -> None:
        try:
            self._checkpoints.close()
        finally:
            self._stager.close()
