"""``verify``: every flipped bit that a reader looks at is found, in our checkpoints and in stock DCP's."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from states import model_and_optimizer
from stock import nested_state, stock_save
from torch.distributed.checkpoint._extension import ZStandard

import sidestream
from sidestream import errors
from sidestream._load.verification import Verification

STATE: dict[str, Any] = {
    "small": torch.arange(100.0),
    "large": torch.randn(700_000),
    "flags": torch.tensor([True, False]),
    "none": torch.empty(0, 4),
    "step": 7,
    "betas": (0.9, 0.999),
}


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    await sidestream.save(STATE, tmp_path / "c")
    return tmp_path / "c"


def flips(nbytes: int, count: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    chosen = random.Random(seed)
    for _ in range(count):
        yield chosen.randrange(nbytes), 1 << chosen.randrange(8)


async def found(path: Path, at: int, bit: int, checkpoint: Path) -> bool:
    """Whether a verification notices one flipped bit, which is undone afterwards."""
    with path.open("r+b") as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(bytes([before[0] ^ bit]))
    try:
        return not (await sidestream.verify(checkpoint)).ok
    except errors.SidestreamError:
        return True
    finally:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(before)


def items(checkpoint: Path) -> dict[str, list[tuple[int, int]]]:
    """Where items lie, by file: what is between them nobody reads."""
    (manifest,) = checkpoint.glob("manifest-*")
    places: dict[str, list[tuple[int, int]]] = {}
    for line in manifest.read_text().splitlines()[1:]:
        kind, content, _, _ = json.loads(line)
        if kind == "tensor":
            for _, _, file, start, nbytes, *_ in content[2]:
                places.setdefault(file, []).append((start, start + nbytes))
        elif kind == "value":
            places.setdefault(content[0], []).append((content[1], content[1] + content[2]))
    return places


async def test_sound_checkpoints(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    own = {"model": model, "optimizer": optimizer, "keys": {1: 2, None: 3, "x": {}}, **STATE}
    await sidestream.save(own, tmp_path / "own")
    report = await sidestream.verify(tmp_path / "own")
    assert (report.ok, report.unverified, report.digest) == (True, (), None)
    assert {"model.0.weight", "model.3.weight", "step", "keys.1"} <= set(report.verified)
    assert report.nbytes > sum(tensor.nbytes for tensor in model.state_dict().values())

    stock_save(nested_state(), tmp_path / "stock")
    stock_save(nested_state(), tmp_path / "packed", _extensions=[ZStandard()])
    for name in ("stock", "packed"):
        report = await sidestream.verify(tmp_path / name)
        assert (report.ok, report.unverified, report.save_id) == (True, (), "")
        assert set(report.verified) == set(await sidestream.open_checkpoint(tmp_path / name))


async def test_what_has_no_checksum_is_told(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    report = await sidestream.verify(tmp_path)
    assert (report.ok, report.verified, report.unverified) == (True, (), ("w",))


async def test_every_flipped_bit_of_ours(saved: Path) -> None:
    places = items(saved)
    for path in sorted(saved.iterdir()):
        count = 150 if path.name in places else 100
        for at, bit in flips(path.stat().st_size, count):
            inside = path.name not in places or any(start <= at < end for start, end in places[path.name])
            assert await found(path, at, bit, saved) == inside, (path.name, at, bit)
    assert (await sidestream.verify(saved)).ok


async def test_every_flipped_bit_of_a_header_or_trailer(saved: Path) -> None:
    """The few bytes around a payload, which a random flip hardly ever hits; stock DCP unpickles what is in them."""
    places = items(saved)["__0_1.distcp"]
    start, end = min(places, key=lambda place: place[1] - place[0])
    for at in range(start, end, 13):
        assert await found(saved / "__0_1.distcp", at, 0x20, saved)


async def test_every_flipped_bit_of_a_stock_payload(tmp_path: Path) -> None:
    """torch compares none of these checksums: ``dcp.load`` returns every one of them as weights."""
    stock_save(STATE, tmp_path / "c")
    (shard,) = (tmp_path / "c").glob("*.distcp")
    raw = shard.read_bytes()
    payload = STATE["large"].numpy().tobytes()
    start = raw.index(payload)
    for at, bit in flips(len(payload), 100):
        assert await found(shard, start + at, bit, tmp_path / "c")
    value = raw.index(b"\x80\x02K\x07.")  # the pickle of step
    for at in range(5):
        assert await found(shard, value + at, 1, tmp_path / "c")

    with shard.open("r+b") as file:
        file.seek(start + 1000)
        file.write(b"\xff" if raw[start + 1000] != 255 else b"\0")
    target = {"large": torch.zeros(700_000)}
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert not torch.equal(target["large"], STATE["large"])
    report = await sidestream.verify(tmp_path / "c")
    assert [damage.fqn for damage in report.damaged] == ["large"]
    assert "large" not in report.verified


async def test_all_damage_is_listed_and_named(saved: Path) -> None:
    checkpoint = await sidestream.open_checkpoint(saved)
    for tensor in ("small", "large"):
        raw = bytearray((saved / "__0_1.distcp").read_bytes())
        at = raw.index(STATE[tensor].numpy().tobytes())
        raw[at] ^= 1
        (saved / "__0_1.distcp").write_bytes(raw)
    shown: list[tuple[int, int]] = []
    report = await checkpoint.verify(progress=lambda done, total: shown.append((done, total)))
    assert {damage.fqn for damage in report.damaged} == {"small", "large"}
    assert all(damage.file == "__0_1.distcp" and damage.offset for damage in report.damaged)
    assert set(report.verified) == {"flags", "none", "step", "betas"}
    assert shown[-1][0] == shown[-1][1] == report.nbytes


async def test_metadata_that_tells_stock_dcp_something_else(saved: Path) -> None:
    """Nobody but DCP reads all of ``.metadata``, so only a verification finds this."""
    raw = (saved / ".metadata").read_bytes()
    other = raw.replace(b"small", b"smell")
    assert len(other) == len(raw)
    (saved / ".metadata").write_bytes(other)
    await sidestream.load({"small": torch.zeros(100)}, saved)
    report = await sidestream.verify(saved)
    assert {damage.fqn for damage in report.damaged} == {"small", "smell"}
    assert {damage.file for damage in report.damaged} == {".metadata"}


async def test_files_of_another_save(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        await sidestream.save({"w": torch.randn(1000), "s": seed}, tmp_path / name)
    for file in ("__0_0.distcp", "__0_1.distcp"):
        shutil.copytree(tmp_path / "a", tmp_path / "mixed")
        shutil.copy(tmp_path / "b" / file, tmp_path / "mixed" / file)
        report = await sidestream.verify(tmp_path / "mixed")
        assert [damage.fqn for damage in report.damaged] == ["s" if file == "__0_0.distcp" else "w"]
        shutil.rmtree(tmp_path / "mixed")


async def test_what_cannot_be_verified_raises(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.verify(tmp_path / "nothing")
    with pytest.raises(errors.InvalidOptionError):
        await sidestream.verify(tmp_path, timeout_s=0)


async def test_missing_and_short_files_are_damage(saved: Path) -> None:
    raw = (saved / "__0_1.distcp").read_bytes()
    (saved / "__0_1.distcp").write_bytes(raw[:-1])
    (damage,) = (await sidestream.verify(saved)).damaged
    assert damage.file == "__0_1.distcp"
    (saved / "__0_1.distcp").unlink()
    assert not (await sidestream.verify(saved)).ok


def test_blocking(tmp_path: Path) -> None:
    sidestream.blocking.save(STATE, tmp_path / "c")
    assert sidestream.blocking.verify(tmp_path / "c").ok
    assert sidestream.blocking.open_checkpoint(tmp_path / "c").verify().ok


async def test_a_small_tensor_is_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, payload and trailer of its item are read together, as in a load."""
    await sidestream.save({f"t{number}": torch.full((64,), number) for number in range(500)}, tmp_path / "c")
    counts: list[int] = []
    reads = Verification._reads

    def counted(*args: Any) -> Any:
        found = reads(*args)
        counts.append(len(found.ranges))
        return found

    monkeypatch.setattr(Verification, "_reads", counted)
    report = await sidestream.verify(tmp_path / "c")
    assert report.ok
    assert len(report.verified) == 500
    assert sum(counts) == 500
