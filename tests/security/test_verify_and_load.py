"""``verify`` reports everything that a load reports as damaged: both read each checkpoint with one changed byte."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stock import stock_save
from torch.distributed.checkpoint._extension import ZStandard

import sidestream
from sidestream import errors
from sidestream.dcp import StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")

STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "flags": torch.tensor([True, False])},
    "step": 7,
    "betas": (0.9, {"deep": [1, "two"]}),
}
TRIALS = 160
"""Of each checkpoint; all of its bytes are some 8,000."""


def by_stock(path: Path) -> None:
    stock_save(STATE, path)


def compressed(path: Path) -> None:
    stock_save(STATE, path, _extensions=[ZStandard()])


def by_sidestream(path: Path) -> None:
    sidestream.blocking.save(STATE, path)


def by_our_writer(path: Path) -> None:
    dcp.save(STATE, storage_writer=StorageWriter(path), no_dist=True)


def changes(path: Path, count: int) -> Iterator[tuple[Path, int, int]]:
    """File, position and what is flipped: the ends of each file, where items begin and end, and places by chance."""
    chosen = random.Random(0)
    found: list[tuple[Path, int, int]] = []
    for file in sorted(path.iterdir()):
        nbytes = file.stat().st_size
        raw = file.read_bytes()
        begins = [at for at in range(nbytes) if raw[at : at + 4] in (b"PK\x03\x04", b"PK\x05\x06")][:6]
        positions = {0, 1, nbytes - 1, *(begin + k for begin in begins for k in range(4))}
        positions |= {chosen.randrange(nbytes) for _ in range(count)}
        found += [(file, at, 1 << chosen.randrange(8)) for at in sorted(positions)]
    chosen.shuffle(found)
    yield from found[:count]


async def damaged(path: Path) -> set[str]:
    """Return the FQNs that a reader reports as damaged."""
    found = set()
    for fqn in ("model.weight", "model.flags", "step", "betas"):
        try:
            await (await sidestream.open_checkpoint(path)).value(fqn)
        except (errors.CorruptCheckpointError, errors.IncompleteTensorError):
            found.add(fqn)
        except errors.SidestreamError:
            pass
    return found


async def said_to_be_good(path: Path) -> bool:
    try:
        return (await sidestream.verify(path)).ok
    except errors.SidestreamError:
        return False


async def compare(path: Path, count: int) -> int:
    """Return how many changes a reader reported as damage, after checking that a verification found every one of
    them."""
    found = 0
    for file, at, mask in changes(path, count):
        raw = file.read_bytes()
        changed = bytearray(raw)
        changed[at] ^= mask
        file.write_bytes(changed)
        try:
            by_load = await damaged(path)
            assert not (by_load and await said_to_be_good(path)), (file.name, at, mask, by_load)
            found += bool(by_load)
        finally:
            file.write_bytes(raw)
    assert await said_to_be_good(path)
    return found


@pytest.mark.parametrize("write", [by_stock, compressed, by_sidestream, by_our_writer])
async def test_changed_bytes(write: Callable[[Path], None], tmp_path: Path) -> None:
    if write is compressed:
        pytest.importorskip("zstandard")
    await asyncio.to_thread(write, tmp_path / "c")
    assert await compare(tmp_path / "c", TRIALS) > 20


def place(path: Path, fqn: str) -> tuple[Path, int, int]:
    reader = dcp.FileSystemReader(path)
    found = next(one for index, one in reader.read_metadata().storage_data.items() if index.fqn == fqn)
    return path / found.relative_path, found.offset, found.length


OTHERS: dict[str, Callable[[bytes], bytes]] = {
    "a flipped magic": lambda item: bytes([item[0] ^ 1]) + item[1:],
    "zeros": lambda item: bytes(len(item)),
    "text": lambda item: b"x" * len(item),
    "the end of a zip alone": lambda item: bytes(4) + item[4:],
    "half of the older format": lambda item: b"\x80\x02\x8a\x0a" + bytes(len(item) - 4),
}


@pytest.mark.parametrize("fqn", ["step", "betas", "model.weight"])
@pytest.mark.parametrize("how", OTHERS)
async def test_an_item_that_is_no_zip(how: str, fqn: str, tmp_path: Path) -> None:
    by_stock(tmp_path / "c")
    file, offset, nbytes = place(tmp_path / "c", fqn)
    raw = file.read_bytes()
    file.write_bytes(raw[:offset] + OTHERS[how](raw[offset : offset + nbytes]) + raw[offset + nbytes :])
    assert await damaged(tmp_path / "c") == {fqn}
    report = await sidestream.verify(tmp_path / "c")
    assert [damage.fqn for damage in report.damaged] == [fqn]
    assert report.unverified == ()
    if fqn != "model.weight":
        state = {fqn: None}
        with pytest.raises(errors.CorruptCheckpointError, match=f"{fqn}: malformed torch.save zip"):
            await sidestream.load(state, tmp_path / "c", options=sidestream.LoadOptions(trust="pickle"))


async def test_a_value_in_the_older_format_is_no_damage(tmp_path: Path) -> None:
    by_stock(tmp_path / "c")
    file, offset, nbytes = place(tmp_path / "c", "betas")
    buffer = io.BytesIO()
    torch.save(STATE["betas"], buffer, _use_new_zipfile_serialization=False)
    raw = file.read_bytes()
    assert len(buffer.getvalue()) <= nbytes
    file.write_bytes(raw[:offset] + buffer.getvalue().ljust(nbytes, b"\0") + raw[offset + nbytes :])
    with pytest.raises(errors.UnsupportedCheckpointError, match=r"betas: .*before zips"):
        await sidestream.load({"betas": None}, tmp_path / "c")
    report = await sidestream.verify(tmp_path / "c")
    assert (report.ok, report.unverified) == (True, ("betas",))


async def test_an_object_that_only_allow_lets_pass_is_no_damage(tmp_path: Path) -> None:
    stock_save({**STATE, "path": Path("x")}, tmp_path / "c")
    with pytest.raises(errors.UnsafeObjectError, match="path: "):
        await sidestream.load({"path": None}, tmp_path / "c")
    report = await sidestream.verify(tmp_path / "c")
    assert report.ok
    assert "path" in report.verified
