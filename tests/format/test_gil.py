"""Decoding and validating leave the GIL to others again and again."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
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

from sidestream._foreign.dcp_metadata import read_dcp_metadata
from sidestream._foreign.rank_files import merge_ranks
from sidestream._foreign.safetensors import manifest_of_headers, parse_header, shards_of
from sidestream._format.dcp import Described
from sidestream._format.manifest import parse_manifest, write_manifest
from sidestream._format.records import Chunk, Manifest, TensorEntry
from sidestream._format.validate import validate
from sidestream._runtime import threads
from sidestream._runtime.threads import Threads

COUNT = 10_000


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows whenever a thread may give the GIL away, as if all of its slices were over."""
    rests: list[None] = []
    monkeypatch.setattr(threads, "slice_s", lambda: 0.0)
    monkeypatch.setattr(threads, "yield_gil", lambda: rests.append(None))
    return rests


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


def test_others_get_their_turns(rests: list[None]) -> None:
    manifest = large_manifest()
    raw = b"".join(write_manifest(manifest, "2.13.0"))
    metadata = stock_metadata()
    foreign = read_dcp_metadata(metadata)
    foreign = replace(foreign, files=manifest.files)
    header = json.dumps(
        {f"t{i}": {"dtype": "F32", "shape": [16], "data_offsets": [64 * i, 64 * i + 64]} for i in range(COUNT)}
    ).encode()
    slices = parse_header(header, 0, 64 * COUNT, "f")
    works: dict[str, Callable[[], object]] = {
        "manifest": lambda: parse_manifest(raw),
        "metadata": lambda: read_dcp_metadata(metadata),
        "described": lambda: Described.of(manifest.entries),
        "ours": lambda: validate(manifest),
        "theirs": lambda: validate(foreign),
        "ranks": lambda: merge_ranks([foreign, foreign]),
        "shards": lambda: shards_of(foreign, foreign.files),
        "header": lambda: parse_header(header, 0, 64 * COUNT, "f"),
        "headers": lambda: manifest_of_headers({"f": slices}, None),
    }
    pool, turns = Threads("decode", 1), {}
    for name, work in works.items():
        rests.clear()
        pool.submit(work).result()
        turns[name] = len(rests)
    assert min(turns.values()) > 20, turns
