"""One rank that saves and loads through DCP: ``_dcp_rank.py RANK WORLD STORE DIRECTORY``. Prints JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import sidestream
from sidestream.dcp import StorageReader, StorageWriter

ROWS = torch.arange(70.0).reshape(10, 7)
COLUMNS = torch.arange(60, dtype=torch.int32).reshape(6, 10)
LARGE = torch.arange(3 << 19).reshape(-1, 3)


def state_of(mesh: DeviceMesh, plus: int = 0, *, turned: bool = False) -> dict[str, Any]:
    """``turned``: the other placements."""
    first, second = (Shard(1), Shard(0)) if turned else (Shard(0), Shard(1))
    return {
        "rows": distribute_tensor(ROWS + plus, mesh, [first]),
        "deep": {"columns": distribute_tensor(COLUMNS + plus, mesh, [second]), "plain": torch.arange(5) + plus},
        "large": distribute_tensor(LARGE + plus, mesh, [Replicate() if turned else Shard(0)]),
        "whole": distribute_tensor(ROWS + plus, mesh, [Shard(0) if turned else Replicate()]),
        "step": 7 + plus,
        "betas": (0.9, 0.99),
    }


def full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


class Rank:
    def __init__(self, rank: int, mesh: DeviceMesh, directory: Path) -> None:
        self.rank, self.mesh, self.directory = rank, mesh, directory

    def check(self, name: str, reader: Any, plus: int = 0) -> bool:
        """Loaded into the other placements, it is what was saved."""
        target = state_of(self.mesh, 100, turned=True)
        dcp.load(target, storage_reader=reader(str(self.directory / name)))
        return equal(full(target), full(state_of(self.mesh, plus, turned=True)))

    def failure(self, work: Callable[[], object]) -> dict[str, str]:
        """What each rank said, as this one was told."""
        try:
            work()
        except CheckpointException as error:
            return {str(rank): type(wrapped[0]).__name__ for rank, wrapped in error.failures.items()}
        return {}

    # --- the cases ---

    def sync(self) -> list[bool]:
        dcp.save(state_of(self.mesh), storage_writer=StorageWriter(self.directory / "sync"))
        dcp.save(state_of(self.mesh), storage_writer=dcp.FileSystemWriter(self.directory / "stock"))
        ours, stock = StorageReader, dcp.FileSystemReader
        return [self.check("sync", ours), self.check("sync", stock), self.check("stock", ours)]

    def threads(self) -> list[bool]:
        """Two saves, the second begun while the first is under way, through one writer and one stager."""
        writer, stager = StorageWriter(self.directory / "unused"), sidestream.AsyncStager()
        groups = [dist.new_group(backend="gloo") for _ in range(2)]  # collectives of two threads need one each
        answers = []
        for number, group in enumerate(groups):
            target, state = str(self.directory / f"thread{number}"), state_of(self.mesh, number)
            answers.append(
                dcp.async_save(
                    state, checkpoint_id=target, storage_writer=writer, async_stager=stager, process_group=group
                )
            )
            answers[-1].staging_completion.result(120)
        for answer in answers:
            answer.upload_completion.result(120)
        stager.close()
        return [self.check(f"thread{number}", dcp.FileSystemReader, number) for number in range(2)]

    def process(self) -> list[bool]:
        """In the process that DCP starts for it; the second save as the documentation writes it."""
        stager = sidestream.AsyncStager()
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        answer = dcp.async_save(
            state_of(self.mesh),
            checkpoint_id=str(self.directory / "process0"),
            storage_writer=StorageWriter(self.directory / "unused"),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        answer.upload_completion.result(180)
        stager.close()
        os.chdir(self.directory)
        page = (Path(__file__).parents[2] / "docs" / "from_dcp.md").read_text()
        section = page.partition("### `AsyncCheckpointerType.PROCESS`")[2].partition("\n### ")[0]
        blocks = section.split("```python\n")[1:]
        (example,) = [block.partition("```")[0] for block in blocks if "async_checkpointer_type" in block]
        exec(example, {"dcp": dcp, "StorageWriter": StorageWriter, "state": state_of(self.mesh, 1)})
        return [self.check("process0", dcp.FileSystemReader), self.check("process", dcp.FileSystemReader, 1)]

    def caching(self) -> list[bool]:
        for number in range(3):
            planner = DefaultSavePlanner(enable_plan_caching=True)
            writer = StorageWriter(self.directory / f"cached{number}")
            dcp.save(state_of(self.mesh, number), storage_writer=writer, planner=planner)
        return [self.check(f"cached{number}", StorageReader, number) for number in range(3)]

    def zstd(self) -> list[bool]:
        from torch.distributed.checkpoint._extension import ZStandard

        writer = StorageWriter(self.directory / "zstd", extensions=[ZStandard()])
        dcp.save(state_of(self.mesh), storage_writer=writer)
        return [self.check("zstd", StorageReader), self.check("zstd", dcp.FileSystemReader)]

    def failing_rank(self) -> dict[str, str]:
        """Rank 1's planner fails while rank 0 writes; the same writer then succeeds."""

        class Failing(DefaultSavePlanner):
            def resolve_data(self, write_item: Any) -> Any:
                if dist.get_rank() == 1:
                    raise RuntimeError("this rank has lost its data")
                return super().resolve_data(write_item)

        writer = StorageWriter(self.directory / "failing")
        told = self.failure(lambda: dcp.save(state_of(self.mesh), storage_writer=writer, planner=Failing()))
        told["visible"] = str((self.directory / "failing").exists())
        dist.barrier()
        dcp.save(state_of(self.mesh), storage_writer=writer)
        told["again"] = str(self.check("failing", StorageReader))
        return told

    def conflict(self) -> dict[str, str]:
        return self.failure(
            lambda: dcp.save(state_of(self.mesh), storage_writer=StorageWriter(self.directory / "sync"))
        )

    def overwrite(self) -> list[bool]:
        for number in range(2):
            writer = StorageWriter(self.directory / "again", overwrite=True)
            dcp.save(state_of(self.mesh, number), storage_writer=writer)
        return [self.check("again", StorageReader, 1)]

    def not_shared(self) -> dict[str, str]:
        """Rank 1 has another disk under the same name."""
        mine = self.directory / f"disk{self.rank}" / "c"
        with StorageWriter(mine) as writer:
            return self.failure(lambda: dcp.save(state_of(self.mesh), storage_writer=writer))

    def other_names(self) -> dict[str, str]:
        with StorageWriter(self.directory / f"name{self.rank}") as writer:
            return self.failure(lambda: dcp.save(state_of(self.mesh), storage_writer=writer))

    def object_store(self) -> dict[str, Any]:
        """Two checkpoints through one writer, whose credentials stay; then a rank fails, and leaves nothing."""
        server = json.loads(os.environ["DCP_TEST_S3"])
        base, words = server["base"], {"storage_options": server["options"]}
        writer, reader = StorageWriter(f"{base}/unused", **words), StorageReader(f"{base}/unused", **words)
        for number in range(2):
            name = f"{base}/step-{number}"
            dcp.save(state_of(self.mesh, number), checkpoint_id=name, storage_writer=writer)
        same = []
        for number in range(2):
            target = state_of(self.mesh, 100, turned=True)
            dcp.load(target, checkpoint_id=f"{base}/step-{number}", storage_reader=reader)
            same.append(equal(full(target), full(state_of(self.mesh, number, turned=True))))

        class Failing(DefaultSavePlanner):
            def resolve_data(self, write_item: Any) -> Any:
                if dist.get_rank() == 1:
                    raise RuntimeError("this rank has lost its data")
                return super().resolve_data(write_item)

        state, target_name = state_of(self.mesh), f"{base}/failed"
        told = self.failure(
            lambda: dcp.save(state, checkpoint_id=target_name, storage_writer=writer, planner=Failing())
        )
        dist.barrier()
        writer.close()
        return {"same": same, "told": told}

    def no_collectives(self) -> str:
        try:
            writer = StorageWriter(self.directory / "alone")
            dcp.save(state_of(self.mesh), storage_writer=writer, use_collectives=False)
        except sidestream.errors.InvalidOptionError as error:
            return type(error).__name__
        return ""


CASES = (
    *("sync", "threads", "caching", "zstd", "failing_rank", "conflict", "overwrite", "not_shared", "other_names"),
    *("object_store", "no_collectives", "process"),
)


def main() -> None:
    rank, world, store, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    cases = Rank(rank, init_device_mesh("cpu", (world,)), directory)
    for case in CASES:
        print(json.dumps({case: getattr(cases, case)()}), flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
