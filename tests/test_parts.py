"""Reading checkpoints whose ranks saved their parts without messages to each other: the whole, or nothing.

``goldens/checkpoints`` has them, because sidestream does not write them any more: ``parts`` (save id "step 5") and
``second-try`` have three ranks and the same state; in ``unequal-*`` two ranks saved another content under one name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import sidestream
from sidestream.errors import CorruptCheckpointError, IncompleteCheckpointError

CHECKPOINTS = Path(__file__).parent / "goldens" / "checkpoints"
FIRST, SECOND = CHECKPOINTS / "a3c8103" / "parts", CHECKPOINTS / "parts" / "second-try"


def copied(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


async def state_of(path: Path) -> dict[str, object]:
    return dict(await (await sidestream.open_checkpoint(path)).state_dict())


async def test_a_missing_part(tmp_path: Path) -> None:
    path = copied(FIRST, tmp_path / "a")
    (path / "__1.metadata").unlink()
    for read in (sidestream.load({"rng": {}}, path), sidestream.verify(path), sidestream.open_checkpoint(path)):
        with pytest.raises(
            IncompleteCheckpointError, match=r"'step 5' of 3 ranks.*the parts of rank 1 are missing"
        ) as raised:
            await read
        assert (raised.value.missing, raised.value.others) == ((1,), {})


async def test_parts_of_two_saves(tmp_path: Path) -> None:
    """They come about when a save is retried and the ranks of the first try have not all ended."""
    path = copied(FIRST, tmp_path / "a")
    (path / "__1.metadata").unlink()
    for part in SECOND.glob("__1*"):
        shutil.copy(part, path)
    with pytest.raises(IncompleteCheckpointError, match=r"rank 1: a part of the save 'second try'") as raised:
        await sidestream.load({"rng": {}}, path)
    assert raised.value.save_id == "step 5"
    assert raised.value.others == {1: "second try"}
    with pytest.raises(IncompleteCheckpointError):
        await sidestream.verify(path)
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "stock", no_dist=True)
    shutil.copy(tmp_path / "stock" / ".metadata", path / "__1.metadata")
    with pytest.raises(IncompleteCheckpointError, match="another writer"):
        await sidestream.load({"rng": {}}, path)


@pytest.mark.parametrize("kind", ["tensor", "value"])
async def test_replicas_have_to_be_equal(kind: str) -> None:
    with pytest.raises(CorruptCheckpointError, match="mine: the ranks saved different values"):
        await sidestream.load({"own0": 0}, CHECKPOINTS / "parts" / f"unequal-{kind}")


@pytest.mark.parametrize("pattern", ["__1.metadata", "__1-*.manifest", "__1_*.distcp"])
async def test_damage_is_reported(pattern: str, tmp_path: Path) -> None:
    path = copied(FIRST, tmp_path / "a")
    for file in path.glob(pattern):
        content = bytearray(file.read_bytes())
        for at in range(len(content)) if file.suffix == ".distcp" else [len(content) // 2]:
            content[at] ^= 0x40
        file.write_bytes(content)
    assert not (await sidestream.verify(path)).ok
    if not pattern.startswith("__1.m"):  # only stock DCP reads the damaged half of that
        with pytest.raises(CorruptCheckpointError):
            await state_of(path)


@pytest.mark.parametrize("pattern", ["__1-*.manifest", "__1_*.distcp"])
async def test_a_file_that_is_gone(pattern: str, tmp_path: Path) -> None:
    path = copied(FIRST, tmp_path / "a")
    for file in path.glob(pattern):
        file.unlink()
    with pytest.raises(CorruptCheckpointError):
        await state_of(path)


async def test_a_renamed_marker(tmp_path: Path) -> None:
    path = copied(FIRST, tmp_path / "a")
    shutil.copy(path / "__1.metadata", path / "__2.metadata")
    with pytest.raises(CorruptCheckpointError, match="was it renamed"):
        await state_of(path)


async def test_a_run_has_the_step_while_it_is_whole(tmp_path: Path) -> None:
    copied(FIRST, tmp_path / "step-5")
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        assert await checkpoints.steps() == [5]
        await checkpoints.save({"x": 1}, step=6)
        assert (await checkpoints.verify(5)).ok
        (tmp_path / "step-5" / "__2.metadata").unlink()
        assert await checkpoints.steps() == [6]


async def test_copied_and_converted(tmp_path: Path) -> None:
    whole = await state_of(FIRST)
    await sidestream.copy(FIRST, tmp_path / "copy")
    await sidestream.convert(FIRST, tmp_path / "converted")
    for name in ("copy", "converted"):
        assert (await sidestream.verify(tmp_path / name)).ok
        assert str(await state_of(tmp_path / name)) == str(whole)
