"""Decoding and validating leave the GIL to others again and again."""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from sidestream._format.dcp.metadata import read_dcp_metadata
from sidestream._format.dcp.write import describe
from sidestream._format.manifest import parse_manifest, write_manifest
from sidestream._format.rank_files import merge_ranks
from sidestream._format.records import Chunk, Manifest, TensorEntry
from sidestream._format.safetensors.read import manifest_of_headers, parse_header, shards_of
from sidestream._format.validate import validate
from sidestream._runtime.threads import run_sliced

COUNT = 10_000


@pytest.fixture
def never_switching() -> Iterator[None]:
    """A thread keeps the GIL until it gives it away."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(interval)


def turns_of_others(work: Callable[[], object]) -> int:
    """How often another thread can run while ``work`` does."""
    thread = threading.Thread(target=work)
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(10e-6)  # comes back when the other thread gives the GIL away, or has ended
    thread.join()
    return turns


def large_manifest() -> Manifest:
    entries: dict[str, Any] = {}
    for index in range(COUNT):
        chunk = Chunk((0,), (16,), "f", 1024 * index, 1024, 1024 * index + 512, b"crc4")
        entries[f"t{index}"] = TensorEntry((f"t{index}",), "float32", (16,), (chunk,))
    return Manifest("5" * 32, entries, {"f": 1024 * COUNT})


def stock_metadata() -> bytes:
    zero, size = torch.Size((0,)), torch.Size((16,))
    chunks, properties = [ChunkStorageMetadata(zero, size)], TensorProperties(torch.float32)
    names = [f"t{index}" for index in range(COUNT)]
    return pickle.dumps(
        Metadata(
            {name: TensorStorageMetadata(properties, size, chunks) for name in names},
            {name: (name,) for name in names},
            {MetadataIndex(name, zero): _StorageInfo("f", 1024 * i, 1024) for i, name in enumerate(names)},
        )
    )


@pytest.mark.usefixtures("never_switching")
def test_others_get_their_turns() -> None:
    manifest = large_manifest()
    raw = b"".join(write_manifest(manifest, "2.13.0"))
    metadata = stock_metadata()
    foreign = run_sliced(read_dcp_metadata(metadata))
    foreign = replace(foreign, files=manifest.files)
    header = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [16], "data_offsets": [64 * i, 64 * i + 64]} for i in range(COUNT)}
    ).encode()
    slices = run_sliced(parse_header(header, 0, 64 * COUNT, "f"))
    works: dict[str, Callable[[], object]] = {
        "manifest": lambda: run_sliced(parse_manifest(raw)),
        "metadata": lambda: run_sliced(read_dcp_metadata(metadata)),
        "described": lambda: run_sliced(describe(manifest.entries)),
        "ours": lambda: run_sliced(validate(manifest)),
        "theirs": lambda: run_sliced(validate(foreign)),
        "ranks": lambda: run_sliced(merge_ranks([foreign, foreign])),
        "shards": lambda: run_sliced(shards_of(foreign, foreign.files)),
        "header": lambda: run_sliced(parse_header(header, 0, 64 * COUNT, "f")),
        "headers": lambda: run_sliced(manifest_of_headers({"f": slices}, None)),
    }
    turns = {name: turns_of_others(work) for name, work in works.items()}
    assert min(turns.values()) > 1, turns
