"""``verify`` of sidestream's checkpoints compares the content of ``.metadata`` and not its pickle, because another
version of the writer may pickle it differently."""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stock import stock_load
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

import sidestream
from sidestream._format import pickles as p
from sidestream._format.marker import find_marker, marker_attribute
from sidestream.dcp import StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")

Pickled = Callable[[Metadata], bytes]


def state() -> dict[str, Any]:
    shared = torch.arange(4.0)
    return {
        "tied": {"a": shared, "b": shared},
        "other": torch.ones(4),
        "half": torch.ones(4, 2, dtype=torch.float16),
        "layers": [{"w": torch.zeros(3)}, {"w": torch.ones(3)}],
        "keys": {1: "one", "empty": {}},
        "step": 7,
    }


def by_sidestream(path: Path) -> None:
    sidestream.blocking.save(state(), path)


def by_our_writer(path: Path) -> None:
    dcp.save(state(), storage_writer=StorageWriter(path), no_dist=True)


@pytest.fixture(params=[by_sidestream, by_our_writer])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    request.param(tmp_path / "c")
    return tmp_path / "c"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    by_sidestream(tmp_path / "c")
    return tmp_path / "c"


def with_protocol(protocol: int, *, fast: bool = False) -> Pickled:
    def pickled(metadata: Metadata) -> bytes:
        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer, protocol)
        pickler.fast = fast
        pickler.dump(metadata)
        raw = buffer.getvalue()
        if protocol >= 4:
            assert raw[2:3] == b"\x95", "one frame"
            raw = raw[:2] + raw[11:]  # its length would have to count the marker
        return raw

    return pickled


def rewrite(path: Path, change: Callable[[Metadata], None] = lambda _: None, how: Pickled | None = None) -> None:
    """``.metadata`` pickled by Python after ``change``; the marker is its last attribute, as it was."""
    raw = (path / ".metadata").read_bytes()
    marker = find_marker(raw)
    assert marker is not None
    metadata = pickle.loads(raw)
    del metadata.sidestream
    change(metadata)
    again = (how or with_protocol(2))(metadata)
    assert again.endswith(b"ub.")
    (path / ".metadata").write_bytes(again[: -len(b"ub.")] + marker_attribute(marker))


def more_attributes(metadata: Metadata) -> None:
    metadata.later = {"numbers": [1, 2.5, None], "text": "of a version that comes later"}  # type: ignore[attr-defined]


def other_order(metadata: Metadata) -> None:
    for name in ("state_dict_metadata", "storage_data", "planner_data"):
        entries = getattr(metadata, name)
        delattr(metadata, name)
        setattr(metadata, name, dict(reversed(entries.items())))


def no_version(metadata: Metadata) -> None:
    del metadata.version


def storage_meta(metadata: Metadata) -> None:
    metadata.storage_meta = StorageMeta(checkpoint_id="elsewhere", save_id=None)


SAME: dict[str, tuple[Callable[[Metadata], None], Pickled]] = {
    **{f"protocol {number}": (lambda _: None, with_protocol(number)) for number in (2, 3, 4, 5)},
    "no memo": (lambda _: None, with_protocol(3, fast=True)),
    "more attributes": (more_attributes, with_protocol(4)),
    "other order": (other_order, with_protocol(2)),
    "no version": (no_version, with_protocol(2)),
    "storage_meta": (storage_meta, with_protocol(2)),
}


@pytest.mark.parametrize("how", SAME)
async def test_the_same_pickled_in_another_way_is_good(how: str, saved: Path) -> None:
    before = await sidestream.verify(saved)
    rewrite(saved, *SAME[how])
    report = await sidestream.verify(saved)
    assert (report.ok, report.damaged) == (True, ())
    assert report.verified == before.verified
    assert stock_load({"other": torch.zeros(4)}, saved)["other"].sum() == 4


def place_of(metadata: Metadata, fqn: str) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == fqn)


def moved(fqn: str, **to: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index = place_of(metadata, fqn)
        info = metadata.storage_data[index]
        metadata.storage_data[index] = replace(info, **{name: by(info) for name, by in to.items()})

    return change


def as_other(metadata: Metadata) -> None:
    """A tied alias points to another tensor of its size."""
    metadata.storage_data[place_of(metadata, "tied.b")] = metadata.storage_data[place_of(metadata, "other")]


def renamed(metadata: Metadata) -> None:
    metadata.state_dict_metadata["othen"] = metadata.state_dict_metadata.pop("other")
    metadata.planner_data["othen"] = ("othen",)
    del metadata.planner_data["other"]
    index = place_of(metadata, "other")
    metadata.storage_data[replace(index, fqn="othen")] = metadata.storage_data.pop(index)


def with_dtype(dtype: torch.dtype) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["half"].properties.dtype = dtype

    return change


def reshaped(metadata: Metadata) -> None:
    half = metadata.state_dict_metadata["half"]
    half.size = half.chunks[0].sizes = torch.Size([2, 4])


def other_path(metadata: Metadata) -> None:
    metadata.planner_data["layers.0.w"] = ("layers", 1, "w")


def other_save(metadata: Metadata) -> None:
    metadata.storage_meta = StorageMeta(checkpoint_id=None, save_id="0" * 32)


def other_version(metadata: Metadata) -> None:
    metadata.version = "1.0.1"


CHANGED: dict[str, Callable[[Metadata], None]] = {
    "offset": moved("other", offset=lambda info: info.offset + 4096),
    "length": moved("other", length=lambda info: info.length - 1),
    "length of a value": moved("step", length=lambda info: info.length - 1),
    "file": moved("step", relative_path=lambda info: "__0_1.distcp"),
    "transform": moved("other", transform_descriptors=lambda info: ["stream.zstd/1"]),
    "tied alias": as_other,
    "fqn": renamed,
    "dtype": with_dtype(torch.bfloat16),
    "dtype that is not read": with_dtype(torch.qint8),
    "shape": reshaped,
    "path": other_path,
    "save id": other_save,
    "version": other_version,
}


@pytest.mark.parametrize("how", CHANGED)
async def test_another_meaning_is_damage(how: str, saved: Path) -> None:
    rewrite(saved, CHANGED[how])
    report = await sidestream.verify(saved)
    assert report.damaged
    assert {damage.file for damage in report.damaged} == {".metadata"}


def pathless(metadata: Metadata) -> None:
    del metadata.planner_data["other"]


def spare_path(metadata: Metadata) -> None:
    metadata.planner_data["more"] = ("more",)


def spare_place(metadata: Metadata) -> None:
    metadata.storage_data[MetadataIndex("more")] = metadata.storage_data[place_of(metadata, "step")]


def gradients(metadata: Metadata) -> None:
    metadata.state_dict_metadata["other"].properties.requires_grad = True


def hint(metadata: Metadata) -> None:
    index = place_of(metadata, "other")
    metadata.storage_data[replace(index, index=1)] = metadata.storage_data.pop(index)


def unknown_transform(metadata: Metadata) -> None:
    moved("other", transform_descriptors=lambda info: ["rot13/1"])(metadata)


@pytest.mark.parametrize("change", [pathless, spare_path, spare_place, gradients, hint, unknown_transform])
async def test_what_our_own_saves_never_say_is_damage(change: Callable[[Metadata], None], own: Path) -> None:
    rewrite(own, change)
    report = await sidestream.verify(own)
    assert report.damaged
    assert {damage.file for damage in report.damaged} == {".metadata"}


async def test_a_marker_inside_of_another_attribute_is_damage(own: Path) -> None:
    """Readers look at the tail alone, and find one there; the object that stock DCP makes has no such attribute."""
    raw = (own / ".metadata").read_bytes()
    marker = find_marker(raw)
    assert marker is not None
    end = marker_attribute(marker)
    hidden = end[: -len(b"ub.")]
    content = b"B" + struct.pack("<I", len(hidden)) + hidden  # BINBYTES
    (own / ".metadata").write_bytes(raw[: -len(end)] + p.text("later") + content + b"ub.")
    assert not hasattr(pickle.loads((own / ".metadata").read_bytes()), "sidestream")
    report = await sidestream.verify(own)
    assert [(damage.file, damage.fqn) for damage in report.damaged] == [(".metadata", None)]
    assert "point to this manifest" in report.damaged[0].message
