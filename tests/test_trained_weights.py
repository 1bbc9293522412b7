"""Weights that others have trained and published, from the packages that bring them, through an export and back."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sidestream


def weights() -> list[Path]:
    """The files of lpips (``torch.save`` of 2018, by Python 2, from a GPU) and of silero-vad (safetensors)."""
    specs = [find_spec(name) for name in ("lpips", "silero_vad")]
    folders = [Path(spec.origin).parent for spec in specs if spec is not None and spec.origin]
    return [path for folder in folders for pattern in ("*.pth", "*.safetensors") for path in folder.rglob(pattern)]


def expected(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return load_file(path)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    return dict(loaded)


@pytest.mark.skipif(not weights(), reason="needs the packages lpips and silero-vad (pip install --no-deps)")
@pytest.mark.parametrize("path", weights(), ids=lambda path: "/".join(path.parts[-3:]))
async def test_through_a_checkpoint_and_an_export(path: Path, tmp_path: Path) -> None:
    state = expected(path)
    assert len(state) >= 5
    opened = await sidestream.open_checkpoint(path)
    assert opened.keys() == state.keys()
    found = {name: await opened.tensor(name) for name in opened}
    export = sidestream.HF(tmp_path / "export", files={"config.json": b"{}"})
    await sidestream.save(found, tmp_path / "checkpoint", export=export)
    target = {name: torch.zeros_like(one) for name, one in state.items()}
    await sidestream.load(target, tmp_path / "checkpoint")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    await sidestream.convert(tmp_path / "export", tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    for name, one in state.items():
        for other in (found[name], target[name], exported[name], again[name]):
            assert other.dtype == one.dtype
            assert torch.equal(other, one), name
