"""``SidestreamTrainer``: a ``Trainer`` of transformers that trains on while its checkpoints are written."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sidestream
from sidestream.errors import InvalidOptionError

from ._checks import Framework, check_options
from ._hugging_face import check_supported, module_state, optimizer_state, plain_module
from ._synchronous import SavesInProgress, is_checkpoint, load_parts, remove_all_but

_TRANSFORMERS = Framework("transformers", ">=5.3,<6", "transformers")

with _TRANSFORMERS.importing():
    import torch
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_callback import ExportableState, TrainerState
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints
    from transformers.utils import logging

_TRANSFORMERS.check(
    Trainer,
    # These are overridden:
    _save_checkpoint=("model", "trial"),
    _load_from_checkpoint=("resume_from_checkpoint", "model"),
    _load_optimizer_and_scheduler=("checkpoint",),
    _load_rng_state=("checkpoint",),
    _load_best_model=(),
    _finalize_training=("trial", "num_train_samples", "start_time"),
    # And these are called:
    _save=("output_dir", "state_dict"),
    _get_output_dir=("trial",),
    store_flos=(),
)
_TRANSFORMERS.check(TrainerCallback, on_pre_optimizer_step=("args", "state", "control", "kwargs"))
_TRANSFORMERS.check(TrainerState, save_to_json=("json_path",))

__all__ = ["SidestreamTrainer"]


class SidestreamTrainer(Trainer):
    """A ``Trainer`` whose checkpoints are those of sidestream: saved while it trains, complete or absent, checksummed.

    ``checkpoint-N`` holds the model, the optimizer, the scheduler, the gradient scaler and the random states of each
    process. Its sidecar files are ``trainer_state.json`` with the position in the data, ``config.json``, the files of
    the tokenizer, and what else ``Trainer`` writes beside the weights. A checkpoint of ``Trainer`` itself is resumed as
    ``Trainer`` does.

    For a trainer of your own put it first: ``class MyTrainer(SidestreamTrainer, Seq2SeqTrainer)``.

    Args:
        args: The positional arguments of ``Trainer``.
        options: How saves are done: durability, writer, limits. None: ``SaveOptions()``.
        slots: How many saves may be in progress at the same time. One more waits for the first of them.
        export: A ``sidestream.HF`` to write beside each checkpoint, for ``from_pretrained``. ``{step}`` in its URL
            stands for the step. Without ``select`` and ``names`` it has the weights of the model, and it gets the
            configuration and the tokenizer.
        kwargs: The other arguments of ``Trainer``.

    Raises:
        InvalidOptionError: An argument is wrong, or ``TrainingArguments`` ask for what needs the files of ``Trainer``.
        UnsupportedError: Training runs with DeepSpeed, FSDP1, or on XLA devices.
    """

    def __init__(
        self,
        *args: Any,
        options: sidestream.SaveOptions | None = None,
        slots: int = 2,
        export: sidestream.HF | None = None,
        **kwargs: Any,
    ) -> None:
        check_options(options, slots)
        self._saves = SavesInProgress(slots, self._committed)
        self._save_options = options
        self._export = export
        super().__init__(*args, **kwargs)
        if self.args.enable_jit_checkpoint:
            raise InvalidOptionError(
                "enable_jit_checkpoint=True makes the directory of a checkpoint before there is one: set should_save "
                "in a callback when the signal arrives (docs/integrations/transformers.md)"
            )
        if self.args.push_to_hub and self.args.hub_strategy != "end":
            raise InvalidOptionError("hub_strategy: a checkpoint has no model.safetensors to push: use 'end'")
        check_supported(self.accelerator)
        self.add_callback(_Steps(self._saves))

    def wait_for_saves(self) -> None:
        """Wait until every save in progress is committed, and its export has ended. ``train()`` does so at its end.

        Raises:
            SidestreamError: A save failed as ``sidestream.save`` does. Each error is raised once.
        """
        self._saves.wait()

    # --- saving ---

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = self._get_output_dir(trial=trial)
        path = _checkpoint(run, self.state.global_step)
        self._saves.make_room(path)
        self._note_best(run, path)
        files = self._sidecars() if self.is_world_process_zero() else {}
        export = self._exported(files)
        self._saves.start(self._saved_parts(), path, files=files, export=export, options=self._save_options)

    def _saved_parts(self) -> dict[str, Any]:
        model = {"model": self._module(self.model)}
        if self.args.save_only_model:
            return model
        return model | self._parts() | {"random": sidestream.PerRank(sidestream.RandomState(), on_resize="skip")}

    def _module(self, model: torch.nn.Module) -> Any:
        return module_state(self.accelerator, plain_module(self.accelerator, model))

    def _parts(self) -> dict[str, Any]:
        """What ``Trainer`` restores when everything has been prepared."""
        model = plain_module(self.accelerator, self.model)
        parts = {"optimizer": optimizer_state([model], self.optimizer), "scheduler": self.lr_scheduler}
        scaler = getattr(self.accelerator, "scaler", None)
        return parts if scaler is None else parts | {"scaler": scaler}

    def _note_best(self, run: str, path: str) -> None:
        """Record the best checkpoint in the state, which is saved with this one. It may not be committed yet."""
        if self.args.save_strategy != "no" and self.state.best_global_step:
            best = _checkpoint(run, self.state.best_global_step)
            if best in (path, *self._saves.paths) or os.path.exists(best):
                self.state.best_model_checkpoint = best

    def _sidecars(self) -> dict[str, bytes]:
        """Return what ``Trainer`` writes beside the weights, by name."""
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                name, saved = type(callback).__name__, self.state.stateful_callbacks
                if isinstance(saved.get(name), list):  # several callbacks of one type
                    saved[name].append(callback.state())
                else:
                    saved[name] = callback.state()
        with TemporaryDirectory() as folder, ExitStack() as restored:
            if logging.is_progress_bar_enabled():  # "Writing model shards: 0it"
                logging.disable_progress_bar()
                restored.callback(logging.enable_progress_bar)
            self._save(folder, state_dict={})
            self.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))
            found = [file for file in Path(folder).iterdir() if file.is_file() and file.suffix != ".safetensors"]
            return {file.name: file.read_bytes() for file in found}

    def _exported(self, files: dict[str, bytes]) -> Any:
        if self._export is None:
            return None
        export, weights = self._export, self._export.select is None and self._export.names is None
        if weights:
            export = replace(export, select="model.*", names=sidestream.strip_prefix("model."))
        others = {name: content for name, content in files.items() if name not in _OF_TRAINING}
        return _OfStep(replace(export, files=others | dict(export.files)), self.state.global_step)

    def _committed(self, path: str) -> None:
        if self.is_world_process_zero():
            bests = {self.state.best_model_checkpoint}  # which may not be committed yet
            with suppress(FileNotFoundError):  # moved or removed by others
                os.utime(path)  # rotation goes by the times, and the earlier one of two saves may be committed last
                bests |= {TrainerState.load_from_json(os.path.join(path, TRAINER_STATE_NAME)).best_model_checkpoint}
            if limit := max(self.args.save_total_limit or 0, 0):
                found = sort_checkpoints(os.path.dirname(path), use_mtime=True)
                # A save in progress may have replaced an older one of its name since ``found`` was sorted.
                kept = {*found[-1:], *(str(Path(one)) for one in (*bests, *self._saves.paths) if one)}
                remove_all_but(kept, found, limit)

    # --- loading ---

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not is_checkpoint(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        self.wait_for_saves()  # they read what is replaced now
        load_parts({"model": self._module(model or self.model)}, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if not is_checkpoint(self.state.best_model_checkpoint):
            super()._load_best_model()
            return
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_parts(self._parts(), checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not is_checkpoint(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        load_parts({"random": sidestream.PerRank(sidestream.RandomState(), on_resize="skip")}, checkpoint)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        self._saves.close()
        if self.args.should_save and self.args.save_total_limit == 1 and (best := self.state.best_model_checkpoint):
            found = sort_checkpoints(self._get_output_dir(trial))  # ``Trainer`` would do this next, file by file
            remove_all_but([path for path in found if os.path.samefile(path, best)], found, 1)
        return super()._finalize_training(trial, num_train_samples, start_time)


class _Steps(TrainerCallback):
    """What the saves in progress ask of each step."""

    def __init__(self, saves: SavesInProgress) -> None:
        self._saves = saves

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # In host memory nothing copies buffers ahead of a forward that changes them (BatchNorm). Optimizers that work
        # layer by layer write within backward, before ``on_pre_optimizer_step``.
        early = "layerwise" in str(args.optim) or any(one.device.type == "cpu" for one in kwargs["model"].buffers())
        if self._saves.paths and early:
            self._saves.fence()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves.fence()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves.collect()


_OF_TRAINING = frozenset({TRAINER_STATE_NAME, "training_args.bin"})
"""Sidecar files that say nothing about the model."""


@dataclass(frozen=True, slots=True)
class _OfStep:
    """An export of a step. A save that belongs to no run does not know the number of its step."""

    export: sidestream.HF
    step: int

    def sink(self, *, step: int | None, durability: Any) -> Any:
        return self.export.sink(step=self.step, durability=durability)


def _checkpoint(run: str, step: int) -> str:
    return os.path.join(run, f"{PREFIX_CHECKPOINT_DIR}-{step}")
