"""Checkpoints that stock DCP compressed with its zstd extension."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import assert_same
from stock import blank, nested_state, stock_load, stock_save

import sidestream
from sidestream import errors
from sidestream._foreign.transforms import unpack

zstandard = pytest.importorskip("zstandard")

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")


def packed_save(state: dict[str, Any], path: Path, **options: Any) -> None:
    from torch.distributed.checkpoint._extension import ZStandard

    stock_save(state, path, _extensions=[ZStandard()], **options)


@pytest.fixture(params=["zstandard", "pyzstd"])
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The only package that can decompress."""
    pytest.importorskip(request.param)
    monkeypatch.setitem(sys.modules, "pyzstd" if request.param == "zstandard" else "zstandard", None)
    return str(request.param)


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zstandard", "pyzstd"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
async def test_everything_comes_back(options: dict[str, Any], package: str, tmp_path: Path) -> None:
    state = nested_state()
    packed_save(state, tmp_path / "c", **options)
    target = blank(state)
    report = await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)
    assert report.unverified == ()
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert_same(state, await checkpoint.state_dict())
    assert torch.equal(await checkpoint.tensor("large", rows=slice(5, 700)), state["large"][5:700])
    assert await checkpoint.value("betas") == (0.9, 0.999)


async def test_progress_counts_them_and_mapping_reads_them(package: str, tmp_path: Path) -> None:
    state = nested_state()
    packed_save(state, tmp_path / "c")
    told: list[tuple[int, int]] = []
    report = await sidestream.load(
        blank(state), tmp_path / "c", options=sidestream.LoadOptions(progress=lambda *bytes_: told.append(bytes_))
    )
    assert told[0][0] == 0
    assert told == sorted(told)
    assert told[-1] == (report.nbytes, report.nbytes)
    assert {total for _, total in told} == {report.nbytes}
    told.clear()
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert_same(state, await checkpoint.state_dict(memory="mapped", progress=lambda *bytes_: told.append(bytes_)))
    assert told[-1] == (report.nbytes, report.nbytes)


async def test_into_another_dtype(package: str, tmp_path: Path) -> None:
    state = {"t": torch.randn(50, 20)}
    packed_save(state, tmp_path / "c")
    for atomic in (False, True):
        target = {"t": torch.zeros(20, 50, dtype=torch.float64).t()}
        await sidestream.load(target, tmp_path / "c", allow_cast=True, options=sidestream.LoadOptions(atomic=atomic))
        assert torch.equal(target["t"], state["t"].double())


async def test_a_tensor_far_larger_than_its_file(package: str, tmp_path: Path) -> None:
    packed_save({"zeros": torch.zeros(1 << 24), "n": 1}, tmp_path / "c")
    assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 1 << 15
    target = {"zeros": torch.ones(1 << 24), "n": 0}
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(atomic=True))
    assert target["zeros"].count_nonzero() == 0
    assert target["n"] == 1


async def test_tells_which_extra_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_save({"t": torch.ones(4), "n": 1}, tmp_path / "c")
    without_packages(monkeypatch)
    for target in ({"t": torch.zeros(4)}, {"n": 0}):
        with pytest.raises(errors.MissingExtraError, match=r"pip install 'sidestream\[zstd\]'") as raised:
            await sidestream.load(target, tmp_path / "c")
        assert raised.value.extra == "zstd"
        assert isinstance(raised.value, ImportError)
        assert not any(map(bool, (target.get("n"), target.get("t", torch.zeros(1)).any())))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert checkpoint.info("t").shape == (4,)


def edit_metadata(path: Path, fqn: str, **changes: Any) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == fqn:
            vars(info).update(changes)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def recompressed(path: Path, fqn: str, item: bytes) -> None:
    """Put ``item`` where the item of ``fqn`` is, which is told in ``.metadata``."""
    with (path / "__0_0.distcp").open("r+b") as shard:
        offset = shard.seek(0, 2)
        shard.write(item)
    edit_metadata(path, fqn, offset=offset, length=len(item))


def bomb(nbytes: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(nbytes))


async def refused(path: Path, kind: type[errors.SidestreamError], says: str) -> None:
    target = {"t": torch.zeros(1000), "n": 0}
    with pytest.raises(kind, match=says) as raised:
        await sidestream.load(target, path)
    assert target["n"] == 0
    assert target["t"].count_nonzero() == 0
    if isinstance(raised.value, errors.CorruptCheckpointError):
        assert (raised.value.file, raised.value.fqn is None) == ("__0_0.distcp", False)


@pytest.mark.parametrize(
    ("fqn", "item", "says"),
    [
        ("t", b"no zstd at all " * 300, "t: malformed zstd"),
        ("n", b"no zstd at all " * 300, "n: malformed zstd"),
        ("t", bomb(1 << 28), "t: malformed zstd: it expands to more than"),
        ("n", bomb(1 << 28), "n: malformed zstd: it expands to more than"),
        ("t", bomb(5000) * 4, "t: malformed torch.save zip"),
        ("t", bomb(1000)[:-5], "t: malformed"),
    ],
    ids=["garbage", "garbage for a value", "bomb", "bomb for a value", "zeros", "cut off"],
)
async def test_damage(package: str, fqn: str, item: bytes, says: str, tmp_path: Path) -> None:
    packed_save({"t": torch.ones(1000), "n": 1}, tmp_path / "c")
    recompressed(tmp_path / "c", fqn, item)
    await refused(tmp_path / "c", errors.CorruptCheckpointError, says)


async def test_altered_bytes_inside_the_frames_are_found(package: str, tmp_path: Path) -> None:
    packed_save({"t": torch.ones(1000), "n": 1}, tmp_path / "c")
    stock_save({"t": torch.ones(1000)}, tmp_path / "plain")
    (item,) = [file.read_bytes() for file in (tmp_path / "plain").glob("*.distcp")]
    altered = bytearray(item)
    altered[altered.index(torch.ones(20).numpy().tobytes()) + 40] ^= 1
    recompressed(tmp_path / "c", "t", zstandard.ZstdCompressor().compress(bytes(altered)))
    assert stock_load({"t": torch.zeros(1000)}, tmp_path / "c")["t"][10] != 1, "stock DCP notices nothing"
    await refused(tmp_path / "c", errors.CorruptCheckpointError, "t: its bytes .* were altered")


async def test_a_shape_that_no_file_of_that_size_can_hold(tmp_path: Path) -> None:
    packed_save({"t": torch.ones(1000), "n": 1}, tmp_path / "c")
    metadata = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    metadata.state_dict_metadata["t"].size = torch.Size([1 << 40])
    metadata.state_dict_metadata["t"].chunks[0].sizes = torch.Size([1 << 40])
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(errors.CorruptCheckpointError, match="do not fit into its item"):
        await sidestream.open_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    ("descriptors", "kind", "says"),
    [
        (["stream.zstd/2"], errors.UnsupportedCheckpointError, "stream.zstd/2"),
        (["stream.xor@mine/1"], errors.UnsupportedCheckpointError, "stream.xor@mine/1"),
        (["stream.zstd/1", "stream.zstd/1"], errors.UnsupportedCheckpointError, "stream.zstd/1, stream.zstd/1"),
        ([["nested"]], errors.CorruptCheckpointError, "transforms that are not a list of names"),
        ("stream.zstd/1", errors.CorruptCheckpointError, "transforms that are not a list of names"),
    ],
    ids=str,
)
async def test_other_transforms(
    descriptors: Any, kind: type[errors.SidestreamError], says: str, tmp_path: Path
) -> None:
    packed_save({"t": torch.ones(1000), "n": 1}, tmp_path / "c")
    edit_metadata(tmp_path / "c", "t", transform_descriptors=descriptors)
    with pytest.raises(kind, match=says):
        await sidestream.open_checkpoint(tmp_path / "c")


def test_a_frame_that_asks_for_a_huge_window(package: str) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(b"x" * 100) + compressor.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 27
    with pytest.raises(errors.CorruptCheckpointError, match="malformed zstd"):
        unpack(frame, 1000)


def test_several_frames(package: str) -> None:
    assert unpack(bomb(10) + bomb(0) + zstandard.compress(b"end"), 13) == bytes(10) + b"end"
    assert unpack(b"", 0) == b""
    with pytest.raises(errors.CorruptCheckpointError):
        unpack(bomb(10) + b"rest", 100)


async def test_stock_reads_what_the_fixture_wrote(tmp_path: Path) -> None:
    packed_save({"t": torch.ones(1000)}, tmp_path / "c")
    metadata = dcp.FileSystemReader(tmp_path / "c").read_metadata()
    assert [info.transform_descriptors for info in metadata.storage_data.values()] == [["stream.zstd/1"]]
    assert (stock_load({"t": torch.zeros(1000)}, tmp_path / "c")["t"] == 1).all()
