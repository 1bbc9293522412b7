"""``SidestreamCheckpointManager`` by itself, with optimizers and schedulers of TorchTitan, in one process."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from sidestream import blocking
from sidestream.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    StorageError,
    UnsafeObjectError,
    UnsupportedError,
)
from sidestream.integrations.torchtitan import SidestreamCheckpointManager

pytestmark = pytest.mark.filterwarnings("default")  # those of TorchTitan


@dataclass
class Trainer:
    """What TorchTitan's trainer gives its checkpoint manager."""

    folder: Path
    seed: int = 0
    kind: type[Any] = SidestreamCheckpointManager
    step: int = 0
    checkpointer: Any = field(init=False)

    def build(self, **config: Any) -> Trainer:
        torch.manual_seed(self.seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.optimizers = default_adamw(lr=1e-2).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config().build(optimizers=self.optimizers, training_steps=100)
        self.checkpointer = self.kind.Config(**{"enable": True, "interval": 1, **config}).build(
            dataloader=None, model_parts=[self.model], optimizers=self.optimizers, lr_schedulers=self.schedulers,
            states={"train_state": self}, sd_adapter=None, base_folder=str(self.folder),
        )  # fmt: skip
        return self

    def train(self, steps: int, *, last_step: bool = False) -> None:
        for _ in range(steps):
            self.step += 1
            self.model(torch.randn(4, 64)).pow(2).mean().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.checkpointer.save(self.step, last_step=last_step)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def weights(self) -> torch.Tensor:
        return torch.cat([weight.detach().flatten() for weight in self.model.parameters()])

    def steps(self) -> list[int]:
        with blocking.Checkpointer(self.folder / "checkpoint") as checkpoints:
            return checkpoints.steps()


@pytest.fixture
def trained(tmp_path: Path) -> Trainer:
    """A run of three steps."""
    trainer = Trainer(tmp_path).build()
    trainer.train(3)
    trainer.checkpointer.close()
    return trainer


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        (CheckpointManager, SidestreamCheckpointManager),
        (SidestreamCheckpointManager, CheckpointManager),
        (SidestreamCheckpointManager, SidestreamCheckpointManager),
    ],
)
def test_each_manager_reads_what_the_other_one_wrote(writer: type[Any], reader: type[Any], tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        first = Trainer(tmp_path, kind=writer).build()
        first.train(3)
        first.checkpointer.close()
        second = Trainer(tmp_path, seed=1, kind=reader).build()
        assert second.checkpointer.load()
        second.checkpointer.close()
    finally:
        torch.distributed.destroy_process_group()
    assert second.step == 3
    assert torch.equal(first.weights(), second.weights())
    for name, value in first.optimizers.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(second.optimizers.state_dict()[name])), name
    assert first.schedulers.state_dict() == second.schedulers.state_dict()


def test_an_empty_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says with what the training begins: a wrong folder would be noticed by nothing else."""
    trainer = Trainer(tmp_path).build()
    with caplog.at_level("INFO", "sidestream"):
        assert not trainer.checkpointer.load()
    assert f"{tmp_path}/checkpoint has no step: the training begins with new weights" in caplog.messages
    with pytest.raises(CheckpointNotFoundError):
        trainer.checkpointer.load(step=7)
    trainer.checkpointer.close()


def test_the_save_returns_before_the_commit_and_the_last_one_after_it(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path).build()
    trainer.train(1)
    saving = trainer.checkpointer.save_future
    trainer.checkpointer.maybe_wait_for_saving()
    assert saving.outcome == "committed"
    assert trainer.checkpointer.save_future is None
    trainer.train(1, last_step=True)
    assert trainer.steps() == [1, 2]
    trainer.checkpointer.close()


def test_a_damaged_step(trained: Trainer) -> None:
    """The newest step is passed over, unless it was asked for."""
    for path in (trained.folder / "checkpoint" / "step-3").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
    trainer = Trainer(trained.folder).build()
    assert trainer.checkpointer.load()
    assert trainer.step == 2
    with pytest.raises(CorruptCheckpointError):
        trainer.checkpointer.load(step=3)
    assert trainer.checkpointer.load(step=1)
    assert trainer.step == 1
    trainer.checkpointer.close()


def test_a_folder_with_damaged_steps_alone_is_not_an_empty_one(trained: Trainer, tmp_path: Path) -> None:
    """The run neither begins anew nor with ``initial_load_path``."""
    initial = tmp_path / "initial"
    shutil.copytree(trained.folder / "checkpoint" / "step-1", initial)
    for path in (trained.folder / "checkpoint").glob("step-*/.metadata"):
        path.write_bytes(b"")
    for config in ({}, {"initial_load_path": str(initial)}):
        trainer = Trainer(trained.folder).build(**config)
        with pytest.raises(CorruptCheckpointError):
            trainer.checkpointer.load()
        trainer.checkpointer.close()


def test_a_load_waits_for_the_saves_in_progress(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path).build()
    trainer.train(2)
    weights = trainer.weights()
    trainer.checkpointer.maybe_wait_for_staging()
    with torch.no_grad():
        trainer.model[0].weight.zero_()
    trainer.step = 0
    assert trainer.checkpointer.load()
    assert trainer.checkpointer.save_future is None
    assert trainer.step == 2
    assert torch.equal(trainer.weights(), weights)
    trainer.checkpointer.close()


def test_a_load_after_a_failed_save_waits_for_the_other_ones(trained: Trainer) -> None:
    trainer = Trainer(trained.folder).build()
    failing = blocking.async_save({"x": torch.ones(1)}, trained.folder / "checkpoint" / "step-1")
    trainer.step = 4
    trainer.checkpointer.save(4)
    trainer.checkpointer._saving.insert(0, failing)
    with pytest.raises(CheckpointExistsError):
        trainer.checkpointer.load()
    trainer.step = 0
    assert trainer.checkpointer.load()
    assert trainer.step == 4
    assert trainer.checkpointer._saving == []
    trainer.checkpointer.close()


def test_how_many_steps_stay(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path).build(keep_latest_k=2, interval=2, enable_first_step_checkpoint=True)
    trainer.train(8)
    trainer.checkpointer.close()
    assert trainer.steps() == [6, 8]


def test_nothing_is_saved_with_load_only(trained: Trainer) -> None:
    trainer = Trainer(trained.folder).build(load_only=True)
    assert trainer.checkpointer.load()
    trainer.train(2, last_step=True)
    trainer.checkpointer.close()
    assert trainer.steps() == [1, 2, 3]


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path).build(enable=False)
    assert not trainer.checkpointer.load()
    trainer.train(1)
    trainer.checkpointer.close()
    assert not any(tmp_path.iterdir())


def test_the_last_step_has_the_model_only(tmp_path: Path) -> None:
    """It can be what another run begins with, and not be resumed from."""
    trainer = Trainer(tmp_path).build(export_dtype="bfloat16")
    trainer.train(1, last_step=True)
    trainer.checkpointer.close()
    checkpoint = blocking.open_checkpoint(tmp_path / "checkpoint" / "step-1")
    assert {name: checkpoint.info(name).dtype for name in checkpoint} == dict.fromkeys(
        trainer.model.state_dict(), torch.bfloat16
    )
    again = Trainer(tmp_path, seed=1).build()
    with pytest.raises(StateMismatchError, match="optimizer") as raised:
        again.checkpointer.load()
    assert "initial_load_path" in raised.value.__notes__[0]
    again.checkpointer.close()
    other = Trainer(tmp_path / "other", seed=1).build(initial_load_path=str(tmp_path / "checkpoint" / "step-1"))
    assert other.checkpointer.load()
    other.checkpointer.close()
    assert torch.equal(other.weights(), trainer.weights().bfloat16().float())


def test_a_seed(tmp_path: Path) -> None:
    """Step 0 has the weights only, and training begins with them."""
    seed = Trainer(tmp_path, seed=5).build()
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    trainer = Trainer(tmp_path).build()
    assert trainer.checkpointer.load()
    assert trainer.step == 0
    assert torch.equal(trainer.weights(), seed.weights())
    trainer.checkpointer.close()


@pytest.mark.parametrize("model_only", [True, False])
def test_another_run_to_begin_with(
    model_only: bool, trained: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read if the folder has no step yet."""
    path = str(trained.folder / "checkpoint" / "step-2")
    initial = {"initial_load_path": path, "initial_load_model_only": model_only}
    trainer = Trainer(tmp_path / "other").build(**initial)
    with caplog.at_level("INFO", "sidestream"):
        assert trainer.checkpointer.load()
    assert caplog.messages[-1].endswith(f"has no step: the training begins with {path}")
    assert trainer.step == (0 if model_only else 2)
    trainer.train(1)
    trainer.checkpointer.close()
    again = Trainer(tmp_path / "other").build(**initial)
    assert again.checkpointer.load()
    assert again.step == trainer.step
    again.checkpointer.close()


def test_what_is_excluded(trained: Trainer) -> None:
    trainer = Trainer(trained.folder).build(exclude_from_loading=["optimizer", "lr_scheduler"])
    assert trainer.checkpointer.load()
    assert trainer.step == 3
    assert trainer.schedulers.state_dict() == {"last_epoch": 0}
    trainer.checkpointer.close()
    wrong = Trainer(trained.folder).build(exclude_from_loading=["optimisers"])
    with pytest.raises(ValueError, match="optimisers"):
        wrong.checkpointer.load()
    wrong.checkpointer.close()


def test_a_failed_save_is_raised_once(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path).build()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        trainer.checkpointer.save(1)
        with pytest.raises(StorageError):
            trainer.checkpointer.maybe_wait_for_saving()
        trainer.checkpointer.save(2)
        trainer.checkpointer.maybe_wait_for_staging()
        with pytest.raises(StorageError):
            trainer.checkpointer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert trainer.steps() == []


def test_a_state_that_cannot_be_saved_is_an_error_once(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path).build()
    trainer.checkpointer.states["other"] = {"not": object()}
    trainer.checkpointer.save(1)
    errors = []
    for call in (trainer.checkpointer.maybe_wait_for_staging, trainer.checkpointer.close):  # the first, if it is known
        try:
            call()
        except UnsafeObjectError as error:
            errors.append(error)
    assert len(errors) == 1
    assert trainer.steps() == []


async def test_on_a_loop(tmp_path: Path) -> None:
    """As in actors, whose methods are coroutines: the loop stops until a call returns."""
    trainer = Trainer(tmp_path).build()
    trainer.train(2)
    trainer.checkpointer.save(3, last_step=True)
    trainer.checkpointer.close()
    trainer = Trainer(tmp_path).build()
    assert trainer.checkpointer.load(step=2)
    trainer.checkpointer.close()


def test_the_flags_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is that of a function in a module of the user's own."""
    from torchtitan.config import ConfigManager
    from torchtitan.trainer import Trainer as TitanTrainer  # it imports compilers, and they warn

    config = TitanTrainer.Config(checkpoint=SidestreamCheckpointManager.Config(enable=True, interval=500))
    monkeypatch.setitem(sys.modules, "my_configs", SimpleNamespace(mine=lambda: config))
    flags = ["--checkpoint.interval=100", "--checkpoint.durability=flush", "--checkpoint.slots=3"]
    parsed = ConfigManager().parse_args(["--module", "my_configs", "--config", "mine", *flags])
    assert parsed.checkpoint == SidestreamCheckpointManager.Config(
        enable=True, interval=100, durability="flush", slots=3
    )


def test_huggingface_files_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"convert_to_hf\.py"):
        SidestreamCheckpointManager.Config(last_save_in_hf=True)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("Base._load = lambda self, step, model_only: None", "BaseCheckpointManager._load takes"),
        ("del Base._load", "BaseCheckpointManager has no _load"),
        ("Base.__abstractmethods__ |= {'_load_model'}", "other hooks (_load_model)"),
    ],
)
def test_a_release_with_other_hooks_is_refused(change: str, says: str) -> None:
    code = (
        "from torchtitan.components.checkpointer import BaseCheckpointManager as Base\n"
        f"{change}\n"
        "import sidestream.integrations.torchtitan"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "UnsupportedError: torchtitan 0.3.0" in done.stderr
    assert says in done.stderr
    assert 'pip install "torchtitan==0.3.0"' in done.stderr
