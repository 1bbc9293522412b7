"""What the transaction of rank 0 does about the files that other ranks have written."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest

from sidestream import Storage
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._save.running import Save, SaveOrder
from sidestream._storage import Attempt, BytesBody, Location, Transaction, locate_directory
from sidestream._storage.local import marking
from sidestream.errors import StorageError


def begin(where: Location, kind: Any, save_id: str) -> Transaction:
    return where.store.begin(Attempt(where.name, kind, save_id, "fsync"))


async def written(transaction: Transaction, **files: bytes) -> dict[str, int]:
    for name, content in files.items():
        await asyncio.to_thread(transaction.write, [(name, BytesBody(content))])
    return {name: len(content) for name, content in files.items()}


async def checked(where: Location, transaction: Transaction, *receipts: dict[str, int]) -> None:
    save = Save(where, Deadline.after(60), SaveOrder(durability="fsync"))
    save._transaction = transaction
    await save.check_shared({name: nbytes for receipt in receipts for name, nbytes in receipt.items()})


async def test_the_last_file_of_rank_0_is_the_last_to_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, save_id = locate_directory(str(tmp_path / "hf"), Storage(commit="marker")), uuid.uuid4().hex
    appeared: list[str] = []
    move_new = marking.move_new
    monkeypatch.setattr(marking, "move_new", lambda one, other: (appeared.append(other.name), move_new(one, other)))
    with time_limit(Deadline.after(60)):
        first, second = begin(where, "files", save_id), begin(where, "joined_files", save_id)
        await asyncio.to_thread(first.write, ())
        receipts = [await written(first, one=b"1", index=b"{}"), await written(second, two=b"2")]
        await checked(where, first, *receipts)
        first.commit({})
    assert sorted(appeared) == ["index", "one", "two"]
    assert appeared[-1] == "index"


async def test_a_failed_export_keeps_what_another_writer_committed() -> None:
    where = locate_directory(f"memory://{uuid.uuid4().hex}/hf")
    with time_limit(Deadline.after(60)):
        one, other = (begin(where, "files", uuid.uuid4().hex) for _ in range(2))
        for each in (one, other):
            await asyncio.to_thread(each.write, ())  # both find the target empty
        await written(one, model=b"content")
        receipt = await written(other, model=b"content")
        one.commit({})
        await checked(where, other, receipt)
        other.discard()
    assert fsspec.filesystem("memory").cat_file(f"{where.store.url}/hf/model") == b"content"


async def test_the_commit_checks_the_files_of_all_ranks() -> None:
    where, save_id = locate_directory(f"memory://{uuid.uuid4().hex}/checkpoint"), uuid.uuid4().hex
    with time_limit(Deadline.after(60)):
        first, second = begin(where, "directory", save_id), begin(where, "joined", save_id)
        await asyncio.to_thread(first.write, ())
        await written(second, data=b"2")
        name = second.committed_name("data")
        await checked(where, first, {name: 1})
        fsspec.filesystem("memory").rm(f"{where.store.url}/checkpoint/{name}")
        with pytest.raises(StorageError, match=r"is gone, 1 were written"):
            first.commit({"last": [b"x"]})
