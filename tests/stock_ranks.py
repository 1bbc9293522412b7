"""One rank of a process group that saves with stock DCP: ``stock_ranks.py RANK WORLD STORE TARGET KIND...``.

Each kind is words joined by dashes; what it says is saved into ``TARGET/KIND``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

ROWS = torch.arange(70.0).reshape(10, 7)
COLUMNS = torch.arange(60, dtype=torch.int32).reshape(6, 10)


def state_of(rank: int, kind: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "rows": distribute_tensor(ROWS, mesh, [Shard(0)]),
        "columns": distribute_tensor(COLUMNS, mesh, [Shard(1)]),
        "deep": {"whole": distribute_tensor(ROWS + 1, mesh, [Replicate()]), "plain": torch.arange(5)},
    }
    if "floats" in kind:
        return {"rows": state["rows"], "deep": {"whole": state["deep"]["whole"]}}
    if "only" not in kind:
        state["step"] = 7
        state["betas"] = (0.9, 0.99)
    if "values-differ" in kind:
        state["rank"] = rank
    if "tensors-differ" in kind:
        state["deep"]["plain"] = torch.arange(5) + rank
    if "shapes-differ" in kind:
        state["deep"]["plain"] = torch.arange(5 + rank)
    if "kinds-differ" in kind:
        state["deep"]["plain"] = rank if rank else torch.arange(5)
    return state


def save(rank: int, target: str, kind: str) -> None:
    state = state_of(rank, kind)
    if "hf" in kind:
        consolidated = "consolidated" in kind
        writer: Any = dcp.HuggingFaceStorageWriter(target, save_distributed=True, enable_consolidation=consolidated)
        dcp.save(state, storage_writer=writer)
        return
    options: dict[str, Any] = {}
    if "safetensors" in kind:
        options["serialization_format"] = filesystem.SerializationFormat.SAFETENSORS
    if "zstd" in kind:
        from torch.distributed.checkpoint._extension import ZStandard

        options["_extensions"] = [ZStandard()]
    dcp.save(state, storage_writer=dcp.FileSystemWriter(target, **options), use_collectives="collective" in kind)


def main() -> None:
    rank, world, store, target, *kinds = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    for kind in kinds:
        save(rank, f"{target}/{kind}", kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
