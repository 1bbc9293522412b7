"""Trainers of Lightning that a test starts, kills and compares, in a forked process for each request."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import importlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from lives import say, serve

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from _own_stores import VersionedStore, in_thread

import sidestream
from sidestream import blocking
from sidestream.errors import CheckpointNotFoundError, InvalidOptionError, StorageError, UnsafeObjectError
from sidestream.integrations.lightning import SidestreamCheckpointIO

ROOTS = {name: importlib.import_module(name) for name in ("lightning.pytorch", "pytorch_lightning")}
importlib.import_module("torch._dynamo")  # which the first optimizer of every child would import
torch.set_num_threads(1)
WIDTH = 256


def digest(value: Any) -> str:
    """The bytes of all tensors in ``value``, and its other values."""
    found = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, dict):
            for key in sorted(one, key=str):
                found.update(str(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for item in one:
                add(item)
        elif isinstance(one, torch.Tensor):
            found.update(one.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()


def module_of(pl: Any, kind: str) -> Any:
    """A module whose batches depend on the step alone (``"steps"``, or ``"constant rate"`` without a scheduler), or
    on a shuffled loader and on dropout."""
    by_step = kind in ("steps", "constant rate")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int, note: str = "a.b") -> None:
            super().__init__()
            self.save_hyperparameters()
            drop = torch.nn.Dropout(0.0 if by_step else 0.2)
            layers = (torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), drop, torch.nn.Linear(width, width))
            self.net = torch.nn.Sequential(*layers)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            if by_step:
                seed = 1000 * self.global_step + self.global_rank
                batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = self.net(batch).square().mean()
            self.log("train.loss", loss, sync_dist=True)
            return loss

        def test_step(self, batch: torch.Tensor, index: int) -> None: ...

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            if kind == "constant rate":
                return optimizer
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

        def train_dataloader(self) -> Any:
            rows: Any = torch.randn(80, WIDTH, generator=torch.Generator().manual_seed(0))
            return torch.utils.data.DataLoader(rows, batch_size=8, shuffle=not by_step)

        if kind == "random states":

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["random"] = sidestream.RandomState().state_dict()

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                sidestream.RandomState().load_state_dict(checkpoint["random"])

    torch.manual_seed(0)
    return Module(WIDTH)


def trainer_of(pl: Any, plugin: str, steps: int, every: int, **more: Any) -> Any:
    class Reports(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_end(self, *_: Any) -> None:
            say("step")

    plugins = [SidestreamCheckpointIO()] if plugin == "sidestream" else []
    saves = {"every_n_train_steps": every} if every else {}
    keep = pl.callbacks.ModelCheckpoint("saved", monitor="train.loss", save_top_k=2, save_last=True, **saves)
    return pl.Trainer(
        plugins=plugins, callbacks=[keep, Reports()], max_steps=steps, logger=False, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **more,
    )  # fmt: skip


def train(
    root: str = "lightning.pytorch", plugin: str = "sidestream", kind: str = "steps", steps: int = 24, every: int = 2
) -> list[str]:
    """Train, from the last checkpoint if there is one. Returns digests of the weights and of the optimizer."""
    pl = ROOTS[root]
    pl.seed_everything(7, verbose=False)
    model, trainer = module_of(pl, kind), trainer_of(pl, plugin, steps, every)
    trainer.fit(model, ckpt_path="last", weights_only=False)
    assert trainer.global_step == steps
    return [digest(model.state_dict()), digest(trainer.optimizers[0].state_dict())]


def good() -> list[str]:
    """The names of all checkpoints, each of which has to be complete."""
    names = sorted(path.name for path in Path("saved").glob("*.ckpt"))
    for name in names:
        assert blocking.verify(f"saved/{name}").ok, name
        assert set(blocking.open_checkpoint(f"saved/{name}").state_dict()) >= {
            "state_dict",
            "optimizer_states",
            "loops",
        }
    return names


def resumed(plugin: str, kind: str, every: int, root: str = "lightning.pytorch") -> bool:
    """Whether a run that is stopped in the middle ends as one that is not."""
    ends = []
    for name, stops in (("whole", [30]), ("parts", [20 if not every else 14, 30])):
        os.mkdir(name)
        os.chdir(name)
        for steps in stops:
            end = train(root, plugin, kind, steps, every)
        ends.append(end)
        os.chdir("..")
    return ends[0] == ends[1]


def in_a_loop() -> list[str]:
    """As in a notebook, whose code runs on an event loop."""

    async def main() -> list[str]:
        return train()

    return asyncio.run(main())


def rank(plugin: str) -> list[str]:
    """What each of several ranks does: train, test the best checkpoint, and resume."""
    pl = ROOTS["lightning.pytorch"]
    found = []
    for steps in (6, 12):
        model = module_of(pl, "steps")
        model.test_dataloader = model.train_dataloader
        trainer = trainer_of(pl, plugin, steps, 2, strategy="ddp", devices=2)
        trainer.fit(model, ckpt_path="last")
        assert trainer.global_step == steps
        # without the statistics of BatchNorm, which each rank has of its own batches
        found += [digest(dict(model.named_parameters())), digest(trainer.optimizers[0].state_dict())]
        trainer.test(model, ckpt_path="best", verbose=False)  # rank 1 reads what rank 0 has just saved
        found.append(Path(trainer.checkpoint_callback.best_model_path).name)
    return found


STATE = {"state_dict": {"w": torch.arange(6.0)}, "loops": {"a{'b.c'}": [1, None]}, "epoch": 1}


class HeldStore(VersionedStore):  # type: ignore[misc]
    """A store in which no checkpoint is committed while it is held, and none at all while it is full."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.reached, self.full = threading.Event(), threading.Semaphore(0), False
        self.open.set()

    async def put(self, name: str, content: bytes, *, mode: Any) -> None:
        if name.endswith(".metadata"):
            self.reached.release()
            await in_thread(self.open.wait)
            if self.full:
                raise OSError(errno.ENOSPC, "full")
        await super().put(name, content, mode=mode)


def io_of(store: Any, **more: Any) -> SidestreamCheckpointIO:
    return SidestreamCheckpointIO(storage=sidestream.Storage(filesystem=store), **more)


def there(store: Any, *names: str) -> list[bool]:
    found = []
    for name in names:
        try:
            blocking.open_checkpoint(os.path.abspath(name), storage=sidestream.Storage(filesystem=store))
            found.append(True)
        except CheckpointNotFoundError:
            found.append(False)
    return found


def removals_wait_for_commits() -> None:
    store = HeldStore()
    io = io_of(store)
    io.save_checkpoint(STATE, "a")
    io.teardown()
    store.reached.acquire()
    store.open.clear()
    io.save_checkpoint(STATE, "b")  # returns before it is committed
    io.remove_checkpoint("a")
    store.reached.acquire()
    assert there(store, "a", "b") == [True, False]
    store.open.set()
    io.teardown()
    assert there(store, "a", "b") == [False, True]
    io.save_checkpoint(STATE, "c")  # it works again
    io.teardown()
    assert there(store, "b", "c") == [True, True]


def a_failed_save_keeps_what_is_there() -> None:
    store = HeldStore()
    io = io_of(store)
    io.save_checkpoint(STATE, "a")
    io.teardown()
    store.full = True
    io.save_checkpoint(STATE, "b")
    io.remove_checkpoint("a")
    with pytest.raises(StorageError, match="full"):
        io.teardown()
    assert there(store, "a", "b") == [True, False]
    store.full = False
    io.save_checkpoint(STATE, "c")  # an error is raised once
    io.teardown()
    store.full = True
    io.save_checkpoint(STATE, "d")
    wait(io._jobs)
    with pytest.raises(StorageError, match="full"):
        io.save_checkpoint(STATE, "e")
    io.teardown()
    assert there(store, "a", "c", "d", "e") == [True, True, False, False]


def calls_wait_for_what_is_in_progress() -> None:
    store = HeldStore()
    io = io_of(store)
    store.open.clear()
    io.save_checkpoint(STATE, "a")
    io.save_checkpoint({**STATE, "epoch": 2}, "b")
    calls: list[Callable[[], Any]] = [
        lambda: io.save_checkpoint(STATE, "c"),  # both slots are taken
        lambda: io.load_checkpoint("b"),
    ]
    results: list[Any] = [None, None]

    def call(number: int) -> None:
        results[number] = calls[number]()

    waiting = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join(0.3)
        assert thread.is_alive()
    store.open.set()
    for thread in waiting:
        thread.join(60)
    assert results[1]["epoch"] == 2
    io.save_checkpoint({**STATE, "epoch": 3}, "b")  # the name of one that may be in progress
    io.remove_checkpoint("b")
    io.save_checkpoint({**STATE, "epoch": 4}, "b")  # after the removal
    assert io_of(store).load_checkpoint("b")["epoch"] == 4  # as another trainer of this process
    io.teardown()
    assert there(store, "a", "b", "c") == [True, True, True]


def what_cannot_be_saved() -> str:
    io = SidestreamCheckpointIO()
    with pytest.raises(UnsafeObjectError, match=r"hyper_parameters\.net") as error:
        io.save_checkpoint({**STATE, "hyper_parameters": {"net": object()}}, "a.ckpt")
        io.teardown()  # it may be known here only
    io.save_checkpoint(STATE, "b.ckpt")
    io.teardown()
    loaded = io.load_checkpoint("b.ckpt")
    assert digest(loaded) == digest(STATE)
    assert type(loaded["loops"]["a{'b.c'}"]) is list
    assert io.load_checkpoint("b.ckpt", map_location="cpu")["epoch"] == 1
    with pytest.raises(InvalidOptionError, match="has to be a device"):
        io.load_checkpoint("b.ckpt", map_location=lambda storage, where: storage)
    with pytest.raises(CheckpointNotFoundError):
        io.load_checkpoint("a.ckpt")
    with pytest.raises(InvalidOptionError, match="slots=0"):
        SidestreamCheckpointIO(slots=0)
    assert pickle.loads(pickle.dumps(SidestreamCheckpointIO(slots=3)))._slots == 3  # a launcher that spawns
    return "\n".join(error.value.__notes__)


def what_cannot_be_replaced() -> None:
    """A file of Lightning's own, a link, and a mount that renames no directory."""
    torch.save({**STATE, "epoch": 0}, "last.ckpt")
    io = SidestreamCheckpointIO()
    assert io.load_checkpoint("last.ckpt", weights_only=True)["epoch"] == 0
    for epoch in (1, 2):
        io.save_checkpoint({**STATE, "epoch": epoch}, "last.ckpt")
        assert io.load_checkpoint("last.ckpt")["epoch"] == epoch
        io.teardown()
        assert sorted(os.listdir()) == ["last-r1.ckpt"]
    io.remove_checkpoint("last.ckpt")
    io.teardown()
    assert os.listdir() == []
    io = SidestreamCheckpointIO(storage=sidestream.Storage(commit="marker"))
    for epoch in range(3):
        io.save_checkpoint({**STATE, "epoch": epoch}, "last.ckpt")
        assert io.load_checkpoint("last.ckpt")["epoch"] == epoch
    io.teardown()
    assert sorted(os.listdir()) == ["last-r2.ckpt"]
    os.mkdir("last-r3.ckpt")  # a kill leaves this of a save
    Path("last-r3.ckpt", "part").touch()
    for name in ("last.ckpt", "last-r3.ckpt"):  # Lightning takes the newer one for the last
        assert io.load_checkpoint(name)["epoch"] == 2
    io.save_checkpoint(STATE, "last.ckpt")
    io.teardown()
    assert sorted(os.listdir()) == ["last-r4.ckpt"]
    os.symlink("last-r4.ckpt", "link.ckpt")
    io.save_checkpoint(STATE, "link.ckpt")
    io.teardown()
    assert sorted(os.listdir()) == ["last-r4.ckpt", "link-r1.ckpt"]
    torch.save(STATE, "file.ckpt")
    io.remove_checkpoint("file.ckpt")
    io.remove_checkpoint("not there.ckpt")
    io.teardown()
    assert "file.ckpt" not in os.listdir()


def with_fabric() -> None:
    from lightning.fabric import Fabric

    io = SidestreamCheckpointIO()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[io])
    model, optimizer = fabric.setup(net := torch.nn.Linear(4, 4), torch.optim.Adam(net.parameters()))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 3}
    fabric.save("saved.ckpt", state)
    before = digest(model.state_dict())
    with torch.no_grad():
        net.weight.zero_()
    state["step"] = 0
    fabric.load("saved.ckpt", state)
    assert (digest(model.state_dict()), state["step"]) == (before, 3)
    io.teardown()


def with_a_tuner() -> bool:
    """It saves, trains, loads and removes."""
    pl = ROOTS["lightning.pytorch"]
    model = module_of(pl, "steps")
    model.lr = 0.1
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=model.lr)
    trainer = trainer_of(pl, "sidestream", 10, 0)
    before = digest(model.state_dict())
    importlib.import_module("lightning.pytorch.tuner").Tuner(trainer).lr_find(model, num_training=10)
    trainer.strategy.checkpoint_io.teardown()
    return digest(model.state_dict()) == before and not list(Path().rglob("*.ckpt"))


def work(request: dict[str, Any]) -> object:
    os.chdir(request["directory"])
    return globals()[request["case"]](**request["options"])


if __name__ == "__main__":
    serve(work)
