"""Write a set of golden checkpoints: ``python tests/goldens/record_checkpoints.py DIRECTORY``, and that of composite
tensors: ``python tests/goldens/record_checkpoints.py composites DIRECTORY`` (``composites-of-ranks`` for what two ranks
wrote).

A recorded set is never written again: later versions have to read what this version wrote. A new kind of checkpoint
goes into a new directory beside the old ones. Identifiers, the clock and the key are fixed from outside, so the files
depend on nothing but the version that wrote them. Afterwards, write the checksums, in ``checkpoints``:
``find . -type f ! -name SHA256SUMS -printf '%P\n' | sort | xargs sha256sum > SHA256SUMS``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import time
import uuid
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the tests share, as pytest has it

from _golden_checkpoints import COLUMNS, METADATA, ROWS, floats, foreign
from _golden_composites import composites, two
from _golden_states import blocks, small, tensors, training
from states import values

import sidestream
from sidestream.dcp import StorageWriter

HERE = Path(__file__).parent
NOW = 1_790_000_000.0
_numbers = itertools.count(1)


def _id(rank: int = 0) -> uuid.UUID:
    return uuid.UUID(int=(0xA3C8103 << 96) + (rank << 32) + next(_numbers), version=4)


def made(target: Path) -> None:
    if target.exists():
        raise SystemExit(f"{target} exists: a recorded set is never written again")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    target.mkdir(parents=True)


def main(target: Path) -> None:
    made(target)
    with mock.patch.object(uuid, "uuid4", _id), mock.patch.object(time, "time", return_value=NOW):
        asyncio.run(native(target))
        foreign_ones(target)
    for case in ("ranks", "ranks-storage-writer", "stock-ranks"):
        ranks(case, target)
    for lease in target.rglob(".leases"):
        shutil.rmtree(lease)


def only_composites(target: Path) -> None:
    made(target)
    with mock.patch.object(uuid, "uuid4", _id), mock.patch.object(time, "time", return_value=NOW):
        asyncio.run(sidestream.save(composites(), target / "threads"))


def composites_of_ranks(target: Path) -> None:
    made(target)
    ranks("composites", target)


async def native(target: Path) -> None:
    await sidestream.save(tensors(), target / "tensors")
    await sidestream.save(values(), target / "values")
    await sidestream.save(training(), target / "training")
    await sidestream.save(blocks(), target / "blocks")
    await sidestream.save(small(), target / "metadata", metadata=METADATA)
    await sidestream.save(small(), target / "digest", options=sidestream.SaveOptions(digest="blake3"))
    await sidestream.save(small(), target / "signed", options=sidestream.SaveOptions(digest="blake3"))
    private, public = keys(target)
    await sidestream.signing.sign(target / "signed", private)
    await sidestream.signing.verify(target / "signed", public)
    private.unlink()
    await sidestream.save(small(), target / "writer-process", options=sidestream.SaveOptions(writer="process"))
    await sidestream.save({}, target / "empty")
    await asyncio.to_thread(dcp.save, foreign(), storage_writer=StorageWriter(target / "storage-writer"), no_dist=True)
    async with sidestream.Checkpointer(target / "run") as checkpoints:
        await checkpoints.save(small(), step=1, metadata={"loss": 1.5})
        await checkpoints.save(small(1.0), step=2)
        await checkpoints.save(small(), step=2)
    await sidestream.copy(target / "metadata", target / "copied")
    converted = target / "converted"
    taken: dict[str, Any] = {"select": "model.*", "names": sidestream.strip_prefix("model.")}
    await sidestream.convert(target / "metadata", converted / "dcp", **taken)
    await sidestream.convert(target / "metadata", converted / "directory", format="safetensors", **taken)
    await sidestream.convert(target / "metadata", converted / "model.safetensors", **taken)
    await sidestream.convert(target / "metadata", converted / "model.pt")


def foreign_ones(target: Path) -> None:
    from safetensors.torch import save_file
    from torch.distributed.checkpoint._extension import ZStandard
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    def stock(state: dict[str, Any], name: str, **options: Any) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(target / name, **options), no_dist=True)

    stock(foreign(), "stock")
    stock(floats(), "stock-safetensors", serialization_format=SerializationFormat.SAFETENSORS)
    stock(foreign(), "stock-zstd", _extensions=[ZStandard()])
    writer = dcp.HuggingFaceStorageWriter(
        str(target / "stock-hf"), fqn_to_index_mapping={"model.w": 1, "model.b": 1, "head": 2}
    )
    dcp.save(floats(), storage_writer=writer, no_dist=True)
    (target / "hf").mkdir()
    save_file(floats(), target / "hf" / "model.safetensors")
    torch.save(foreign(), target / "torch-save.pt")


def keys(target: Path) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.derive_private_key(0xA3C8103, ec.SECP256R1())
    private, public = target / "signed.key", target / "signed.pub"
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def ranks(case: str, target: Path) -> None:
    store = target / ".store"
    command = [sys.executable, __file__, case, str(target), str(store)]
    children = [subprocess.Popen([*command, str(rank)], env=os.environ) for rank in range(2)]
    if any(code != 0 for code in [child.wait(300) for child in children]):
        raise SystemExit(f"a rank of {case} failed")
    store.unlink(missing_ok=True)


def rank_main(case: str, target: Path, store: Path, rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(ROWS, mesh, [Shard(0)])
    columns = distribute_tensor(COLUMNS, mesh, [Shard(1)])
    whole = distribute_tensor(ROWS + 1, mesh, [Replicate()])
    together = {
        "rows": rows,
        "deep": {"columns": columns, "plain": torch.arange(5)},
        "whole": [whole, {"empty": {}}],
        "step": 7,
        "betas": (0.9, 0.99),
        3: torch.ones(2),
    }
    stock = {
        "rows": rows,
        "columns": columns,
        "deep": {"whole": whole, "plain": torch.arange(5)},
        "step": 7,
        "betas": (0.9, 0.99),
    }
    with (
        mock.patch.object(uuid, "uuid4", partial(_id, rank)),
        mock.patch.object(secrets, "token_hex", lambda nbytes: "a3c8103".rjust(2 * nbytes, "0")),
        mock.patch.object(time, "time", return_value=NOW),
    ):
        if case == "ranks":
            asyncio.run(sidestream.save(together, target / case))
        elif case == "composites":
            asyncio.run(sidestream.save({**composites(), "own": {f"rank{rank}": two(rank)}}, target / "ranks"))
        elif case == "ranks-storage-writer":
            dcp.save(stock, storage_writer=StorageWriter(target / case))
        else:
            dcp.save(stock, checkpoint_id=target / case)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]).absolute())
    elif len(sys.argv) == 3:
        record = {"composites": only_composites, "composites-of-ranks": composites_of_ranks}[sys.argv[1]]
        record(Path(sys.argv[2]).absolute())
    else:
        rank_main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
