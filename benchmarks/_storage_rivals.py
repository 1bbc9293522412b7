"""Who saves and loads in ``storage.py``, each the way its authors advise for one process without an accelerator."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import sidestream

State = dict[str, torch.Tensor]
Load = Callable[[Path, State], Awaitable[object] | None]
"""Reads what was saved at the path into the existing tensors."""


class Rival:
    """Saves one state again and again. ``save`` is what is measured as the call; ``saved`` waits until all is written.

    Everything is called on the event loop, unless ``threaded`` says that the library refuses to run where one runs.
    Paths are absolute: Orbax accepts no others.
    """

    name: str
    needs: str | None = None
    """A module that has to be installed."""

    keeps = False
    """Whether something is kept from call to call, so that the first call of a new rival differs from later ones."""

    syncs = False
    """Whether its files are durable when it says that it is done; for the others the benchmark syncs them."""

    threaded = False
    copies = 1
    """Of the state in memory while it saves, at most."""

    descriptors_per_tensor = 0
    """File descriptors that it has open in one process, at most."""

    def __init__(self, state: State) -> None:
        self.state = state

    def save(self, path: Path) -> Any:
        raise NotImplementedError

    async def saved(self, pending: Any) -> None: ...

    def loads(self) -> dict[str, Load]:
        """Rows of the table of loads that read what this rival saved."""
        return {}

    def saves_done(self) -> None:
        """Release what only saves need. Called before the loads."""

    def close(self) -> None: ...


class Sidestream(Rival):
    name = "sidestream"
    keeps = syncs = True

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._stager = sidestream.AsyncStager()

    def save(self, path: Path) -> Any:
        return sidestream.async_save(self.state, path, stager=self._stager)

    async def saved(self, pending: Any) -> None:
        await pending

    def loads(self) -> dict[str, Load]:
        return {
            'sidestream, verify="manifest"': lambda path, into: sidestream.load(
                into, path, options=sidestream.LoadOptions(verify="manifest")
            ),
            'sidestream, verify="always"': lambda path, into: sidestream.load(
                into, path, options=sidestream.LoadOptions(verify="always")
            ),
        }

    def saves_done(self) -> None:
        self._stager.close()  # after two saves of a state it prepares memory for the next one, beside the loads

    def close(self) -> None:
        self._stager.close()


class SidestreamStreaming(Rival):
    name = "sidestream, streaming=True"
    syncs = True

    def save(self, path: Path) -> Any:
        return sidestream.async_save(self.state, path, options=sidestream.SaveOptions(streaming=True))

    async def saved(self, pending: Any) -> None:
        await pending


class StockSave(Rival):
    name = "dcp.save"
    syncs = True

    def save(self, path: Path) -> None:
        dcp.save(self.state, checkpoint_id=path, no_dist=True)

    def loads(self) -> dict[str, Load]:
        return {"dcp.load": lambda path, into: dcp.load(into, checkpoint_id=path, no_dist=True)}


class StockAsyncSave(Rival):
    name = "dcp.async_save"
    syncs = True
    copies = 2

    def save(self, path: Path) -> Any:
        return dcp.async_save(self.state, checkpoint_id=path, no_dist=True)

    async def saved(self, pending: Any) -> None:
        await asyncio.wrap_future(pending)


class StockStagedSave(Rival):
    name = "dcp.async_save, DefaultStager"
    keeps = syncs = True
    copies = 2

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._stager = DefaultStager(StagingOptions(False, False, True, False))  # without what needs an accelerator

    def save(self, path: Path) -> Any:
        return dcp.async_save(self.state, checkpoint_id=path, async_stager=self._stager, no_dist=True)

    async def saved(self, pending: Any) -> None:
        await asyncio.wrap_future(pending.upload_completion)

    def close(self) -> None:
        self._stager.close()


class StockProcessSave(StockStagedSave):
    """The process that writes starts with the first call of all, and stays."""

    name = "dcp.async_save, process"
    copies = 3
    descriptors_per_tensor = 2

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._stager = DefaultStager(StagingOptions(False, True, True, False))
        self._directory = TemporaryDirectory()  # DCP demands a process group here
        method = f"file://{self._directory.name}/ranks"
        torch.distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)

    def save(self, path: Path) -> Any:
        kind = AsyncCheckpointerType.PROCESS
        return dcp.async_save(self.state, checkpoint_id=path, async_checkpointer_type=kind, async_stager=self._stager)

    def close(self) -> None:
        super().close()
        torch.distributed.destroy_process_group()
        self._directory.cleanup()


class TorchSave(Rival):
    name = "torch.save"

    def save(self, path: Path) -> None:
        path.mkdir()
        torch.save(self.state, path / "state.pt")

    def loads(self) -> dict[str, Load]:
        def load(path: Path, into: State) -> None:
            copy(torch.load(path / "state.pt", mmap=True), into)

        return {"torch.load(mmap=True)": load}


class Safetensors(Rival):
    name = "safetensors"
    needs = "safetensors"

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file

        path.mkdir()
        save_file(self.state, path / "state.safetensors")

    def loads(self) -> dict[str, Load]:
        found = {"safetensors": _load_safetensors}
        if find_spec("fastsafetensors"):
            found["fastsafetensors"] = _load_fastsafetensors
        if find_spec("runai_model_streamer"):
            found["runai-model-streamer"] = _load_runai
        return found


def _load_safetensors(path: Path, into: State) -> None:
    from safetensors import safe_open

    with safe_open(path / "state.safetensors", "pt") as file:
        for name, target in into.items():
            target.copy_(file.get_tensor(name))


def _load_fastsafetensors(path: Path, into: State) -> None:
    from fastsafetensors import fastsafe_open

    with fastsafe_open(str(path / "state.safetensors"), nogds=True) as file:
        for name, target in into.items():
            target.copy_(file.get_tensor(name))


def _load_runai(path: Path, into: State) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path / "state.safetensors"), owned=False)
        for name, tensor in streamer.get_tensors():
            into[name].copy_(tensor)


class TorchCheckpointing(Rival):
    """Its saver with a process of its own. Without a process group there is no barrier, and so no rename to publish."""

    name = needs = "torch_checkpointing"
    keeps = True
    copies = 2
    descriptors_per_tensor = 2
    """The shared memory of each tensor, and a duplicate until the other process has received it. A process that runs
    out of descriptors meanwhile keeps the duplicates open until it ends."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        from torch_checkpointing.builder import make_async_checkpoint_saver
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._storage = LocalFileSystemStorageConfig(use_direct_io=False)  # which fails on unaligned tails
        writer = CheckpointWriterConfig(barrier_config=None, write_to_temp_dir=False)
        self._saver = make_async_checkpoint_saver(
            AsyncCheckpointSaverConfig(writer_config=writer), storage_config=self._storage
        )

    def _checkpoint(self, state: State) -> Any:
        from torch_checkpointing import CheckpointBase, CheckpointItem

        class Checkpoint(CheckpointBase):
            def get_items(self) -> dict[str, CheckpointItem]:
                return {"state": CheckpointItem(state)}

            def load_state_dict(self, state_dict: Any) -> None: ...

        return Checkpoint()

    def save(self, path: Path) -> Any:
        return self._saver.save(str(path), self._checkpoint(self.state))

    async def saved(self, pending: Any) -> None:
        for future in pending:
            await asyncio.wrap_future(future)

    def loads(self) -> dict[str, Load]:
        def load(path: Path, into: State) -> None:
            from torch_checkpointing import CheckpointLoader, CheckpointReader, RankInfo

            rank = RankInfo(global_rank=0, global_world_size=1, role_rank=0, role_world_size=1)
            loader = CheckpointLoader(CheckpointReader(rank_info=rank, storage_config=self._storage))
            loader.load(str(path), self._checkpoint(into))

        return {"torch_checkpointing": load}

    def close(self) -> None:
        self._saver.close()


class TensorStore(Rival):
    """Zarr arrays of one chunk each in one OCDBT database, written in one transaction."""

    name = needs = "tensorstore"
    copies = 2

    def _open(self, path: Path, name: str, context: Any, **how: Any) -> Any:
        import tensorstore

        base = {"driver": "file", "path": f"{path}/"}  # a URL would have to be absolute and quoted
        database = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        return tensorstore.open({"driver": "zarr3", "kvstore": database}, context=context, **how)

    def save(self, path: Path) -> Any:
        import tensorstore

        context, transaction = tensorstore.Context(), tensorstore.Transaction(atomic=True)
        for name, tensor in self.state.items():
            array = tensor.numpy()
            how = {"create": True, "dtype": array.dtype, "shape": array.shape, "transaction": transaction}
            opened = self._open(path, name, context, **how).result()
            opened.write(array, can_reference_source_data_indefinitely=True).result()
        return transaction.commit_async()

    async def saved(self, pending: Any) -> None:
        await pending

    def loads(self) -> dict[str, Load]:
        async def load(path: Path, into: State) -> None:
            import tensorstore

            context = tensorstore.Context()
            opened = [self._open(path, name, context, open=True) for name in into]
            arrays = [tensorstore.array(target.numpy(), copy=False) for target in into.values()]
            for future in [array.write(await source) for array, source in zip(arrays, opened, strict=True)]:
                await future

        return {"tensorstore": load}


class TorchSnapshot(Rival):
    name = needs = "torchsnapshot"
    threaded = True  # it raises where an event loop runs

    def save(self, path: Path) -> None:
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(path), {"state": StateDict(self.state)})

    def loads(self) -> dict[str, Load]:
        def restore(path: Path, into: State) -> None:
            from torchsnapshot import Snapshot, StateDict

            Snapshot(str(path)).restore({"state": StateDict(into)})

        async def load(path: Path, into: State) -> None:
            await asyncio.to_thread(restore, path, into)

        return {"torchsnapshot": load}


class Orbax(Rival):
    name = "orbax"
    needs = "orbax.checkpoint"
    keeps = True
    copies = 2

    def __init__(self, state: State) -> None:
        super().__init__(state)
        import orbax.checkpoint

        self._checkpointer = orbax.checkpoint.AsyncCheckpointer(orbax.checkpoint.PyTreeCheckpointHandler())
        self._arrays = {name: tensor.numpy() for name, tensor in state.items()}

    def save(self, path: Path) -> None:
        self._checkpointer.save(path, self._arrays)

    async def saved(self, pending: None) -> None:
        await asyncio.to_thread(self._checkpointer.wait_until_finished)

    def loads(self) -> dict[str, Load]:
        def load(path: Path, into: State) -> None:
            found = self._checkpointer.restore(path)
            copy({name: torch.from_numpy(found[name]) for name in into}, into)

        return {"orbax": load}

    def close(self) -> None:
        self._checkpointer.close()


RIVALS: tuple[type[Rival], ...] = (
    Sidestream,
    SidestreamStreaming,
    StockSave,
    StockAsyncSave,
    StockStagedSave,
    StockProcessSave,
    TorchSave,
    Safetensors,
    TorchCheckpointing,
    TensorStore,
    TorchSnapshot,
    Orbax,
)


def copy(found: State, into: State) -> None:
    for name, target in into.items():
        target.copy_(found[name])


def sync_tree(path: Path) -> None:
    """Every file and directory at ``path``, and the directory that it is in."""
    for directory, _, files in os.walk(path):
        for entry in (*(os.path.join(directory, file) for file in files), directory):
            _sync(entry)
    _sync(path.parent)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
