"""What several ranks wrote with stock DCP, together and each on its own, in every flavour that it has."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from states import assert_same
from stock import stock_load
from stock_ranks import COLUMNS, ROWS

import sidestream
from sidestream import errors

pytest.importorskip("safetensors")
pytest.importorskip("zstandard")

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")

WORLD = 2
WHOLE = ["collective", "collective-zstd", "collective-safetensors", "local", "local-zstd", "local-safetensors"]
HF = ["hf-only-tensors", "hf-floats", "hf-consolidated-floats"]
DIFFERENT = ["values", "tensors", "shapes", "kinds"]
KINDS = [
    *WHOLE,
    *HF,
    *(f"local-{what}-differ" for what in DIFFERENT),
    "local-safetensors-only-tensors-differ",
    "local-zstd-tensors-differ",
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for each kind, all written by one group of processes."""
    root = tmp_path_factory.mktemp("ranks")
    script = str(Path(__file__).with_name("stock_ranks.py"))
    ranks = [
        warm.Popen(
            [sys.executable, script, str(rank), str(WORLD), str(root / "store"), str(root), *KINDS],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    for rank in ranks:
        assert rank.wait(timeout=240) == 0, rank.stderr.read() if rank.stderr else ""
        rank.communicate()
    return root


def copied(written: Path, kind: str, tmp_path: Path) -> Path:
    shutil.copytree(written / kind, tmp_path / "c")
    return tmp_path / "c"


def expected(kind: str) -> dict[str, Any]:
    if "floats" in kind:
        return {"rows": ROWS, "deep": {"whole": ROWS + 1}}
    state: dict[str, Any] = {"rows": ROWS, "columns": COLUMNS, "deep": {"whole": ROWS + 1, "plain": torch.arange(5)}}
    return state if "only" in kind else {**state, "step": 7, "betas": (0.9, 0.99)}


def zeroed(state: dict[str, Any]) -> dict[str, Any]:
    def clear(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clear(inner) for key, inner in value.items()}
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    return {key: clear(value) for key, value in state.items()}


@pytest.mark.parametrize("kind", [*WHOLE, *HF])
async def test_the_whole_is_read(written: Path, kind: str) -> None:
    state = expected(kind)
    target = zeroed(state)
    report = await sidestream.load(target, written / kind)
    assert_same(state, target)
    bare = "safetensors" in kind or "hf" in kind
    tensors = {"rows", "columns", "deep.whole", "deep.plain"} & set(report.loaded)
    assert set(report.unverified) == (tensors if bare else set()), "safetensors has no checksums"
    checkpoint = await sidestream.open_checkpoint(written / kind)
    assert torch.equal(await checkpoint.tensor("rows", rows=slice(3, 8)), ROWS[3:8])
    if "hf" not in kind:
        everything = await checkpoint.state_dict()
        assert_same(state, {key: everything[key] for key in state})


@pytest.mark.parametrize("what", DIFFERENT)
async def test_ranks_that_disagree_are_no_whole(written: Path, what: str) -> None:
    says = {
        "values": "rank: the ranks saved different values",
        "tensors": r"deep\.plain: the ranks saved different values",
        "shapes": r"'deep\.plain' is a int64 of shape \(5,\).* a int64 of shape \(6,\).* for rank 1",
        "kinds": r"'deep\.plain' is a int64 .*, a value at .* for rank 1",
    }
    with pytest.raises(errors.CorruptCheckpointError, match=says[what]) as raised:
        await sidestream.open_checkpoint(written / f"local-{what}-differ")
    assert raised.value.fqn in ("rank", "deep.plain")


@pytest.mark.parametrize("kind", ["local-safetensors-only-tensors-differ", "local-zstd-tensors-differ"])
async def test_they_are_compared_in_every_flavour(written: Path, kind: str) -> None:
    with pytest.raises(errors.CorruptCheckpointError, match=r"deep\.plain: the ranks saved different values"):
        await sidestream.open_checkpoint(written / kind)


async def test_a_rank_is_missing(written: Path, tmp_path: Path) -> None:
    path = copied(written, "local", tmp_path)
    (path / "__1.metadata").rename(path / "__2.metadata")
    with pytest.raises(
        errors.CorruptCheckpointError, match=r"__1\.metadata is missing, although there is __2\.metadata"
    ):
        await sidestream.open_checkpoint(path)
    (path / "__2.metadata").unlink()
    with pytest.raises(errors.IncompleteTensorError) as raised:
        await sidestream.open_checkpoint(path)
    assert {line.split(":")[0] for line in raised.value.offenders} == {"rows", "columns"}
    (path / "__0.metadata").unlink()
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.open_checkpoint(path)


@pytest.mark.parametrize(
    "change",
    [
        {"relative_path": "../secret"},
        {"relative_path": "/etc/hostname"},
        {"relative_path": ".hidden"},
        {"offset": 1 << 40},
    ],
    ids=str,
)
async def test_what_is_compared_lies_in_the_checkpoint(written: Path, change: dict[str, Any], tmp_path: Path) -> None:
    path = copied(written, "local", tmp_path)
    shutil.copy(path / "__1_0.distcp", tmp_path / "secret")
    for fqn in ("step", "deep.plain"):
        raw = (written / "local" / "__1.metadata").read_bytes()
        metadata = pickle.loads(raw)
        for index, info in metadata.storage_data.items():
            if index.fqn == fqn:
                vars(info).update(change)
        (path / "__1.metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(errors.CorruptCheckpointError) as raised:
            await sidestream.open_checkpoint(path)
        assert raised.value.fqn == fqn or raised.value.file == change["relative_path"]


async def test_metadata_of_the_whole_goes_first(written: Path, tmp_path: Path) -> None:
    path = copied(written, "collective", tmp_path)
    shutil.copy(written / "local-kinds-differ" / "__1.metadata", path)
    assert (await sidestream.open_checkpoint(path)).keys() == (
        await sidestream.open_checkpoint(written / "local")
    ).keys()


async def test_shards_of_ranks_are_named_when_they_are_gone(written: Path, tmp_path: Path) -> None:
    for kind in ("local", "local-safetensors", "collective-safetensors"):
        path = copied(written, kind, tmp_path / kind)
        (path / "__1_0.distcp").unlink()
        with pytest.raises(errors.CorruptCheckpointError, match=r"__1_0\.distcp.* is missing") as raised:
            await sidestream.open_checkpoint(path)
        assert raised.value.file == "__1_0.distcp"


async def test_a_shard_of_a_directory_is_missing(written: Path, tmp_path: Path) -> None:
    path = copied(written, "hf-only-tensors", tmp_path)
    (path / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(errors.IncompleteTensorError, match="rows: 35 of 70 elements are in no chunk"):
        await sidestream.open_checkpoint(path)


async def test_rank_local_is_what_stock_reads_by_rank(written: Path) -> None:
    """The fixture is right: stock DCP finds rank 0's values in it."""
    assert stock_load({"step": 0}, written / "local")["step"] == 7
    assert json.loads((written / "hf-consolidated-floats" / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize("places", [30, pytest.param(150, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["collective-zstd", "collective-safetensors", "local", "hf-only-tensors"])
async def test_every_flipped_bit_is_told_or_read(written: Path, kind: str, places: int, tmp_path: Path) -> None:
    """An error of ours says what is wrong; where there are checksums no other value comes back."""
    path = copied(written, kind, tmp_path)
    state = await (await sidestream.open_checkpoint(path)).state_dict()
    checked = kind in ("collective-zstd", "local")
    found = tried = 0
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        for at in range(0, len(raw), max(7, len(raw) // places)):
            tried += 1
            file.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :])
            try:
                back = await (await sidestream.open_checkpoint(path)).state_dict()
            except errors.SidestreamError:
                found += 1
            else:
                if checked and file.suffix == ".distcp":
                    assert_same(state, back)
        file.write_bytes(raw)
    assert found > tried // 8, (found, tried)
