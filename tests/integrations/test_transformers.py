"""``SidestreamTrainer``: what it saves, how it resumes, what it removes, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint
from transformers_program import SidestreamTrainer, Tokens, arguments, small_model

import sidestream
from sidestream import blocking
from sidestream.errors import CheckpointExistsError, InvalidOptionError, UnsafeObjectError, UnsupportedError


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The sums of two runs are the same, and many small steps are fast."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained(
    out: Path, kind: type[transformers.Trainer] = SidestreamTrainer, *, resume: Any = None, **changed: Any
) -> transformers.Trainer:
    data = changed.pop("data", None) or Tokens()
    given = {name: changed.pop(name) for name in ("callbacks", "export", "eval_dataset", "slots") if name in changed}
    trainer = kind(model=small_model(), args=arguments(str(out), **changed), train_dataset=data, **given)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: transformers.Trainer) -> dict[str, torch.Tensor]:
    return dict(trainer.model.state_dict())


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def steps(out: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in out.glob("checkpoint-*"))


# --- saving and resuming ---


def test_resume_is_exact(tmp_path: Path) -> None:
    """GPT-2 has dropout, so this needs the random states, the moments, the schedule and the position in the data."""
    whole = weights(trained(tmp_path / "whole", transformers.Trainer, save_strategy="no"))
    assert_same(whole, weights(trained(tmp_path / "run", max_steps=12)))
    assert steps(tmp_path / "run") == [3, 6, 9, 12]
    for step in (3, 9):
        resumed = trained(tmp_path / "resumed", resume=str(tmp_path / "run" / f"checkpoint-{step}"))
        assert resumed._initial_global_step == step
        assert_same(whole, weights(resumed))


def test_a_save_shows_no_progress_bar_of_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``Trainer`` writes the weights with one, and they are not written there."""
    trained(tmp_path / "stock", transformers.Trainer, max_steps=3)
    shown = capfd.readouterr().err
    trained(tmp_path / "run", max_steps=3)
    assert "Writing model shards" in shown
    assert "Writing model shards" not in capfd.readouterr().err
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_a_checkpoint_is_one_of_sidestream(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_steps=3)
    path = tmp_path / "checkpoint-3"
    assert blocking.verify(path).ok
    opened = blocking.open_checkpoint(path)
    assert {name.partition(".")[0] for name in opened} == {"model", "optimizer", "scheduler", "random"}
    assert sorted(opened.files) == ["config.json", "generation_config.json", "trainer_state.json", "training_args.bin"]
    assert json.loads(opened.file("trainer_state.json"))["global_step"] == 3
    fresh = small_model()
    blocking.load({"model": fresh}, path)
    assert_same(dict(fresh.state_dict()), weights(trainer))
    assert transformers.AutoConfig.from_pretrained(path).n_embd == 32


def test_a_checkpoint_of_the_trainer_itself_is_resumed(tmp_path: Path) -> None:
    whole = weights(trained(tmp_path, transformers.Trainer, max_steps=12, save_steps=6))
    resumed = trained(tmp_path, resume=str(tmp_path / "checkpoint-6"), save_strategy="no")
    assert_same(whole, weights(resumed))


def test_epochs_and_accumulation(tmp_path: Path) -> None:
    changed = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 3, "save_steps": 4}
    whole = weights(trained(tmp_path / "whole", transformers.Trainer, **changed))
    trained(tmp_path / "run", **changed)
    for step in steps(tmp_path / "run"):
        resumed = trained(tmp_path / "resumed", resume=str(tmp_path / "run" / f"checkpoint-{step}"), **changed)
        assert_same(whole, weights(resumed))


def test_batches_that_are_drawn_when_they_are_read(tmp_path: Path) -> None:
    """A resume reads the first batches before it restores the random states, so the noise in them is another one: with
    the checkpoints of the Trainer itself as with those of sidestream, and the same in both."""
    kinds = {"stock": transformers.Trainer, "own": SidestreamTrainer}
    wholes, resumes = {}, {}
    for name, kind in kinds.items():
        wholes[name] = weights(trained(tmp_path / name, kind, data=Tokens(noise=True)))
        path = str(tmp_path / name / "checkpoint-6")
        resumes[name] = weights(trained(tmp_path / name, kind, data=Tokens(noise=True), resume=path))
    assert_same(wholes["stock"], wholes["own"])
    assert_same(resumes["stock"], resumes["own"])
    assert not torch.equal(wholes["stock"]["lm_head.weight"], resumes["stock"]["lm_head.weight"])


def test_only_the_model(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=6, save_only_model=True)
    assert {name.partition(".")[0] for name in blocking.open_checkpoint(tmp_path / "checkpoint-3")} == {"model"}
    resumed = trained(tmp_path, max_steps=6, resume=str(tmp_path / "checkpoint-3"))  # with a new optimizer
    assert resumed.state.global_step == 6


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    export = sidestream.HF(tmp_path / "weights" / "step-{step}")
    trained(tmp_path / "run", max_steps=6, export=export)
    before = blocking.open_checkpoint(tmp_path / "run" / "checkpoint-6").save_id
    trained(tmp_path / "run", max_steps=6, export=export, resume=str(tmp_path / "run" / "checkpoint-3"))
    assert blocking.open_checkpoint(tmp_path / "run" / "checkpoint-6").save_id != before
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["step-3", "step-6"]


def test_export(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", max_steps=3, export=sidestream.HF(tmp_path / "weights" / "step-{step}"))
    files = sorted(path.name for path in (tmp_path / "weights" / "step-3").iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors"]
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / "step-3")
    assert_same(dict(read.state_dict()), weights(trainer))


def test_an_export_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "file").touch()
    trained(tmp_path / "run", max_steps=3, export=sidestream.HF(tmp_path / "occupied"))
    assert steps(tmp_path / "run") == [3]
    assert "an export failed" in caplog.text


# --- while it trains ---


class _Slow(transformers.TrainerCallback):
    """Copies a few kilobytes in a second, if no fence asks for more: each save still copies in the next step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.saved: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._saves._stager = sidestream.AsyncStager(max_bytes_per_second=4096)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved[state.global_step] = {name: one.clone() for name, one in kwargs["model"].state_dict().items()}


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.out(self.norm(input_ids.float()))
        return {"loss": out.square().mean(), "logits": out}


def test_a_save_has_the_state_at_its_step(tmp_path: Path) -> None:
    """Weights change in the next step, and buffers already in its forward."""
    torch.manual_seed(0)
    slow = _Slow()
    trainer = SidestreamTrainer(
        model=_Normed(),
        args=arguments(str(tmp_path), save_steps=1, max_steps=4),
        train_dataset=Tokens(),
        callbacks=[slow],
    )
    slow.trainer = trainer
    trainer.train()
    assert sorted(slow.saved) == steps(tmp_path) == [1, 2, 3, 4]
    for step, saved in slow.saved.items():
        model = _Normed()
        blocking.load({"model": model}, tmp_path / f"checkpoint-{step}")
        assert_same(dict(model.state_dict()), saved)


def test_a_save_that_fails_ends_the_training_once(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "file").touch()
    args = arguments(str(tmp_path), max_steps=12)
    trainer = SidestreamTrainer(model=small_model(), args=args, train_dataset=Tokens())
    with pytest.raises(CheckpointExistsError, match="checkpoint-3"):
        trainer.train()
    trainer.wait_for_saves()


class _Unsafe(transformers.TrainerCallback):
    """Puts into the optimizer what is not data."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["optimizer"].param_groups[0]["note"] = object()


def test_a_state_that_cannot_be_saved_is_an_error_once(tmp_path: Path) -> None:
    trainer = SidestreamTrainer(
        model=small_model(), args=arguments(str(tmp_path)), train_dataset=Tokens(), callbacks=[_Unsafe()]
    )
    with pytest.raises(UnsafeObjectError, match="note"):
        trainer.train()
    trainer.wait_for_saves()
    assert steps(tmp_path) == []


def test_in_a_notebook(tmp_path: Path) -> None:
    async def cell() -> None:
        trained(tmp_path, max_steps=6, save_steps=1, slots=1, save_total_limit=1)
        trained(tmp_path, max_steps=9, resume=True)

    asyncio.run(cell())
    assert 9 in steps(tmp_path)


# --- rotation and the best checkpoint ---


@pytest.mark.parametrize("limit", [1, 2])
def test_rotation_follows_the_commit(limit: int, tmp_path: Path) -> None:
    trained(tmp_path, save_steps=1, max_steps=7, save_total_limit=limit)
    assert steps(tmp_path) == list(range(8 - limit, 8))
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-7")


def test_rotation_goes_by_time(tmp_path: Path) -> None:
    """The checkpoints of an earlier run in the same directory go first, though their numbers are higher."""
    trained(tmp_path, save_steps=2, max_steps=8)
    for path in tmp_path.glob("checkpoint-*"):
        os.utime(path, (1e9, 1e9))
    trained(tmp_path, save_steps=1, max_steps=3, save_total_limit=2)
    assert steps(tmp_path) == [2, 3]


def test_rotation_leaves_what_is_being_saved(tmp_path: Path) -> None:
    """A save replaces the step of an earlier run, and is committed while the rotation looks at the old one."""
    run = trained(tmp_path, save_steps=1, max_steps=4, save_total_limit=2)
    run._saves.start({"x": torch.ones(1)}, str(tmp_path / "checkpoint-3"))
    run._saves._saves[0].pending.result()
    os.utime(tmp_path / "checkpoint-3", (1e9, 1e9))
    trained(tmp_path / "other", save_steps=1, max_steps=1)
    (tmp_path / "other" / "checkpoint-1").rename(tmp_path / "checkpoint-5")
    run._committed(str(tmp_path / "checkpoint-5"))
    assert steps(tmp_path) == [3, 5]
    run.wait_for_saves()


class _Best(transformers.TrainerCallback):
    """Makes the evaluation of step 2 the best one."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["metrics"]["eval_loss"] = abs(state.global_step - 2)


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_checkpoint_stays_and_is_loaded(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the others goes in one step: ``Trainer`` deletes none of them, file by file."""
    deleted: list[str] = []
    delete = shutil.rmtree
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, *a, **k: (deleted.append(Path(path).name), delete(path, *a, **k))
    )
    changed = {"save_steps": 1, "eval_steps": 1, "eval_strategy": "steps", "metric_for_best_model": "loss"}
    run = trained(
        tmp_path / "run",
        max_steps=5,
        load_best_model_at_end=True,
        save_total_limit=limit,
        eval_dataset=Tokens(),
        callbacks=[_Best()],
        **changed,
    )
    assert steps(tmp_path / "run") == ([2] if limit == 1 else [2, 5])
    assert not [name for name in deleted if name.startswith("checkpoint-")]
    assert run.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-2")
    best, last = small_model(), small_model()
    blocking.load({"model": best}, tmp_path / "run" / "checkpoint-2")
    assert_same(weights(run), dict(best.state_dict()))
    if limit == 2:
        blocking.load({"model": last}, tmp_path / "run" / "checkpoint-5")
        assert not torch.equal(last.lm_head.weight, best.lm_head.weight)


def test_the_best_checkpoint_stays_until_a_better_one_is_committed(tmp_path: Path) -> None:
    """A run that is killed now resumes from step 5, whose best one is 2."""
    run = trained(
        tmp_path, max_steps=5, save_steps=1, eval_steps=1, eval_strategy="steps", metric_for_best_model="loss",
        load_best_model_at_end=True, save_total_limit=2, eval_dataset=Tokens(), callbacks=[_Best()],
    )  # fmt: skip
    run.args.save_total_limit = 1
    run.state.best_model_checkpoint = str(tmp_path / "checkpoint-6")
    run._committed(str(tmp_path / "checkpoint-5"))
    assert steps(tmp_path) == [2, 5]


# --- what is refused ---


def test_refused_arguments(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="slots=0"):
        trained(tmp_path, slots=0)
    with pytest.raises(InvalidOptionError, match="enable_jit_checkpoint"):
        trained(tmp_path, enable_jit_checkpoint=True)
    assert list(tmp_path.iterdir()) == []


def test_another_release_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    from sidestream.integrations import transformers as module

    monkeypatch.setattr(transformers.Trainer, "_load_rng_state", lambda self, checkpoint, strict: None)
    with pytest.raises(UnsupportedError, match=r"_load_rng_state takes \(checkpoint, strict\).*pip install"):
        importlib.reload(module)
