"""Digests: a checksum can be forged by whoever can write the file, a digest in a signed manifest cannot."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from _hostile import forged
from blake3 import blake3
from stock import stock_load

import sidestream
from sidestream import errors
from sidestream._format import checksum
from sidestream._format.frame import frame_tensor

MIB = 1 << 20
LARGE = torch.randint(0, 256, (5 * MIB + 77,), dtype=torch.uint8)


@pytest.fixture
def without_blake3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_blake3", None)


def digests_of(checkpoint: Path) -> dict[str, bytes]:
    (manifest,) = checkpoint.glob("manifest-*")
    head, *lines = map(json.loads, manifest.read_text().splitlines())
    assert head["digest"] == "blake3"
    return {line[2]: base64.b64decode(line[1][2][0][7]) for line in lines if line[0] == "tensor"}


@pytest.mark.parametrize("budget_bytes", [None, 8 * MIB])
async def test_one_for_each_block(budget_bytes: int | None, tmp_path: Path) -> None:
    """Also of tensors that are staged in several windows, which are sealed in any order."""
    state = {"large": LARGE, "many": [torch.full((n,), n) for n in range(50)], "none": torch.empty(0), "tied": LARGE}
    async with sidestream.AsyncStager(budget_bytes=budget_bytes or 1 << 30) as stager:
        await sidestream.save(state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(digest="blake3"))
    found = digests_of(tmp_path / "c")
    raw = LARGE.numpy().tobytes()
    expected = [blake3(raw[start : start + MIB]).digest() for start in range(0, len(raw), MIB)]
    assert found["large"] == found["tied"] == b"".join(expected)
    assert found["many.3"] == blake3(torch.full((3,), 3).numpy().tobytes()).digest()
    assert found["none"] == b""
    target = {"large": torch.zeros_like(LARGE)}
    report = await sidestream.load(target, tmp_path / "c")
    assert report.digest == "verified"
    assert torch.equal(target["large"], LARGE)
    assert torch.equal(stock_load({"large": torch.zeros_like(LARGE)}, tmp_path / "c")["large"], LARGE)
    report = await sidestream.verify(tmp_path / "c")
    assert (report.ok, report.digest) == (True, "verified")


def forge_checksums(checkpoint: Path, forgery: Path) -> torch.Tensor:
    """Other bytes in ``w``, and every checksum of them made to fit: what somebody who can write the files can do."""
    other = LARGE.clone()
    other[3 * MIB] ^= 1
    raw = other.numpy().tobytes()
    crcs = b"".join(crc32(raw[start : start + MIB]).to_bytes(4, "little") for start in range(0, len(raw), MIB))
    place: dict[str, Any] = {}

    def edit(head: dict[str, Any], lines: dict[str, list[Any]]) -> None:
        chunk = lines["w"][1][2][0]
        place.update(file=chunk[2], offset=chunk[5])
        chunk[6] = base64.b64encode(crcs).decode()

    forged(checkpoint, edit)(forgery)
    content = bytearray((forgery / place["file"]).read_bytes())
    trailer = frame_tensor("uint8", tuple(LARGE.shape)).trailer(crc32(raw))
    content[place["offset"] : place["offset"] + len(raw) + len(trailer)] = raw + trailer
    (forgery / place["file"]).write_bytes(content)
    return other


async def test_forged_checksums_are_found_by_digests_alone(tmp_path: Path) -> None:
    await sidestream.save({"w": LARGE}, tmp_path / "plain")
    other = forge_checksums(tmp_path / "plain", tmp_path / "forged-plain")
    target = {"w": torch.zeros_like(LARGE)}
    await sidestream.load(target, tmp_path / "forged-plain")
    assert torch.equal(target["w"], other)  # nothing tells this apart from a checkpoint of other weights
    assert (await sidestream.verify(tmp_path / "forged-plain")).ok

    await sidestream.save({"w": LARGE}, tmp_path / "c", options=sidestream.SaveOptions(digest="blake3"))
    forge_checksums(tmp_path / "c", tmp_path / "forged")
    with pytest.raises(errors.CorruptCheckpointError, match=r"w: .*the digest differs"):
        await sidestream.load(target, tmp_path / "forged")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "forged")
    assert torch.equal(await checkpoint.tensor("w", rows=slice(0, 3 * MIB)), LARGE[: 3 * MIB])
    with pytest.raises(errors.CorruptCheckpointError, match="the digest differs"):
        await checkpoint.tensor("w", rows=slice(3 * MIB - 1, 3 * MIB + 1))
    (damage,) = (await checkpoint.verify()).damaged
    assert damage.fqn == "w"


@pytest.mark.usefixtures("without_blake3")
async def test_without_the_extra_a_save_is_refused_and_a_load_tells(tmp_path: Path) -> None:
    with pytest.raises(errors.MissingExtraError) as raised:
        await sidestream.save({"w": LARGE}, tmp_path / "c", options=sidestream.SaveOptions(digest="blake3"))
    assert raised.value.extra == "digest"
    assert list(tmp_path.iterdir()) == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum, "_blake3", blake3)
        await sidestream.save({"w": LARGE}, tmp_path / "c", options=sidestream.SaveOptions(digest="blake3"))
    report = await sidestream.load({"w": torch.zeros_like(LARGE)}, tmp_path / "c")
    assert report.digest == "not installed"
    report = await sidestream.verify(tmp_path / "c")
    assert (report.ok, report.digest) == (True, "not installed")


async def test_a_checkpointer_passes_it_on(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path, save=sidestream.SaveOptions(digest="blake3")) as checkpoints:
        await checkpoints.save({"w": torch.ones(3)}, step=1)
        await checkpoints.restore({"w": torch.zeros(3)})
        assert checkpoints.restored is not None
        assert checkpoints.restored.digest == "verified"
    assert (
        await sidestream.load(
            {"w": torch.zeros(3)}, tmp_path / "step-1", options=sidestream.LoadOptions(verify="manifest")
        )
    ).digest is None
    for call in (
        lambda: sidestream.Checkpointer(tmp_path, save=sidestream.SaveOptions(digest="md5")),  # type: ignore[arg-type]
        lambda: sidestream.async_save({}, tmp_path / "x", options=sidestream.SaveOptions(digest="md5")),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.InvalidOptionError, match="digest="):
            call()
