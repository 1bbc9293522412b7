"""Bad input gets a typed error that says what, where, and what to do, and changes nothing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from damages import DAMAGE, changed, flipped
from keywords import for_load, for_save
from states import assert_same, model_and_optimizer

import sidestream
from sidestream import errors
from sidestream._format import pickles as write
from sidestream._format import values
from sidestream._format.shared import value_line_of
from sidestream._layout.values import encode_value

STATE = {"model": {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3)}, "step": 5, "extra": {"k": 1}}


@pytest.fixture
async def saved(tmp_path: Path) -> Path:
    await sidestream.save(STATE, tmp_path / "c")
    return tmp_path / "c"


def template() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}, "step": 0}


async def refused(target: dict[str, Any], url: Path, kind: type[Exception], *lines: str, **options: Any) -> None:
    """The load raises ``kind`` with those lines, and ``target`` is as it was."""
    before = {"model": {key: value.clone() for key, value in target["model"].items()}, "step": target["step"]}
    with pytest.raises(kind) as raised:
        await sidestream.load(target, url, **for_load(**options))
    assert type(raised.value) is kind
    for line in lines:
        assert line in str(raised.value)
    assert_same(before["model"], target["model"])
    assert before["step"] == target["step"]


async def test_missing_key(saved: Path) -> None:
    target = template()
    target["model"]["v"] = torch.zeros(1)
    await refused(target, saved, errors.MissingKeysError, "model.v: in the target, not in the checkpoint")


async def test_unexpected_key_in_a_plain_subtree(saved: Path) -> None:
    target = template()
    del target["model"]["b"]
    await refused(target, saved, errors.UnexpectedKeysError, "model.b: in the checkpoint, not in the target")


async def test_a_module_with_fewer_layers_is_untouched(tmp_path: Path) -> None:
    await sidestream.save({"m": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))}, tmp_path / "c")
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = module[0].weight.clone()
    with pytest.raises(errors.UnexpectedKeysError, match=r"m\.1\.weight: in the checkpoint, not in the module"):
        await sidestream.load({"m": module}, tmp_path / "c")
    assert torch.equal(module[0].weight, before)


async def test_an_object_of_which_nothing_was_saved(saved: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    target = {**template(), "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 1), "optimizer": optimizer}
    await refused(target, saved, errors.MissingKeysError, "schedule: in the target", "optimizer: in the target")


async def test_an_object_that_refuses(saved: Path) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"w": torch.zeros(3, 4), "b": torch.zeros(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("not today")

    with pytest.raises(errors.LoadStateDictError, match=r"model: Picky\.load_state_dict raised KeyError") as raised:
        await sidestream.load({"model": Picky()}, saved)
    assert raised.value.written == ("model.w", "model.b")


async def test_targets_that_cannot_be_written_to(saved: Path) -> None:
    target = template()
    target["model"]["w"] = torch.zeros(1, 4).expand(3, 4)
    await refused(target, saved, errors.StateMismatchError, "model.w: expanded in the target")
    with pytest.raises(errors.StateMismatchError, match="mappingproxy in the target cannot be changed"):
        await sidestream.load({"extra": MappingProxyType({"k": 0})}, saved)


async def test_tied_in_the_target_but_saved_with_different_values(tmp_path: Path) -> None:
    await sidestream.save({"a": torch.ones(5), "b": torch.ones(5), "c": torch.zeros(5)}, tmp_path / "c")
    tied = torch.full((5,), 7.0)
    await sidestream.load({"a": tied, "b": tied}, tmp_path / "c")
    assert (tied == 1).all()
    base = torch.zeros(10)
    for atomic in (False, True):
        with pytest.raises(errors.StateMismatchError, match="c: shares its memory with a") as raised:
            await sidestream.load({"a": tied, "c": tied}, tmp_path / "c", options=sidestream.LoadOptions(atomic=atomic))
        assert raised.value.written == ()
        assert (tied == 1).all()
        with pytest.raises(errors.StateMismatchError, match="overlaps with"):
            await sidestream.load(
                {"a": base[:5], "c": base[4:9]}, tmp_path / "c", options=sidestream.LoadOptions(atomic=atomic)
            )
    await sidestream.load({"a": base[::2], "c": base[1::2]}, tmp_path / "c")
    assert base.tolist() == [1.0, 0.0] * 5


def transposed(base: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": base[:3, :3], "b": base[:3, :3].t()}


def columns(base: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": base[:, :3], "b": base[:, 1:]}


def conjugated(base: torch.Tensor) -> dict[str, torch.Tensor]:
    row = base[0].view(torch.complex64)
    return {"a": row, "b": row.conj(), "c": row.conj().imag}


def windows(base: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": base.reshape(-1).unfold(0, 3, 1)}


def of_one_matrix(base: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": base[:, 0], "b": base[:, 1], "c": base[1:3, 2:], "d": base[3:, 2:].t(), "e": base[0, 2:]}


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("views", [transposed, columns, conjugated, windows, of_one_matrix])
async def test_different_views_of_one_memory(
    views: Callable[[torch.Tensor], dict[str, torch.Tensor]], atomic: bool, tmp_path: Path
) -> None:
    options = sidestream.LoadOptions(atomic=atomic)
    saved, base = torch.arange(16.0).reshape(4, 4), torch.zeros(4, 4)
    saved[0, 0] = torch.nan
    await sidestream.save(views(saved), tmp_path / "c")
    await sidestream.load(views(base), tmp_path / "c", options=options)
    assert_same(views(saved), views(base))
    if views is of_one_matrix:  # no two of them have an element in common
        return
    others = {name: torch.empty(one.shape, dtype=one.dtype).copy_(one) for name, one in views(saved).items()}
    next(reversed(others.values())).view(-1)[1] += 1
    await sidestream.save(others, tmp_path / "d")
    base.zero_()
    with pytest.raises(errors.StateMismatchError, match="shares some of its memory with ") as raised:
        await sidestream.load(views(base), tmp_path / "d", options=options)
    assert raised.value.written == ()
    assert not base.any()


async def test_tied_in_the_target_but_saved_apart_by_another_writer(tmp_path: Path) -> None:
    apart = {"a": torch.ones(5), "b": torch.ones(5), "c": torch.full((5,), 2.0), "other": torch.ones(3)}
    dcp.save(apart, checkpoint_id=tmp_path / "c", no_dist=True)
    tied, other = torch.zeros(5), torch.zeros(3)
    for atomic in (False, True):
        options = sidestream.LoadOptions(atomic=atomic)
        with pytest.raises(errors.StateMismatchError, match="c shares its memory with a") as raised:
            await sidestream.load({"a": tied, "b": tied, "c": tied, "other": other}, tmp_path / "c", options=options)
        assert raised.value.written == ()
        assert not tied.any()
        assert not other.any()
        report = await sidestream.load({"a": tied, "b": tied, "other": other}, tmp_path / "c", options=options)
        assert report.unverified == ()
        assert report.nbytes == 3 * tied.nbytes + other.nbytes  # a and b for the comparison, and a again
        assert torch.equal(tied, apart["a"])
        assert torch.equal(other, apart["other"])
        tied.zero_()
        other.zero_()


async def test_inference_tensors_and_modules(tmp_path: Path) -> None:
    with torch.inference_mode():
        source, target = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        square = torch.zeros(3, 3).t()
    await sidestream.save({"m": source, "t": torch.arange(9.0).reshape(3, 3)}, tmp_path / "c")
    for atomic in (False, True):
        await sidestream.load({"m": target, "t": square}, tmp_path / "c", options=sidestream.LoadOptions(atomic=atomic))
        assert torch.equal(source.weight, target.weight)
        assert torch.equal(square, torch.arange(9.0).reshape(3, 3))


async def test_keys_that_are_not_asked_for_are_reported(saved: Path) -> None:
    report = await sidestream.load({"step": 0}, saved)
    assert report.not_requested == ("model.w", "model.b", "extra.k")
    assert report.loaded == ("step",)


async def test_shape_and_dtype(saved: Path) -> None:
    target = template()
    target["model"]["w"] = torch.zeros(4, 3)
    await refused(target, saved, errors.ShapeMismatchError, "model.w: shape (4, 3) in the target, (3, 4) saved")
    target = template()
    target["model"]["w"] = torch.zeros(3, 4, dtype=torch.float64)
    await refused(target, saved, errors.DtypeMismatchError, "model.w: dtype float64 in the target, float32 saved")


async def test_kinds(saved: Path) -> None:
    target = {**template(), "extra": {"k": torch.zeros(1)}}
    await refused(
        target, saved, errors.KindMismatchError, "extra.k: a tensor in the target, a plain value in the checkpoint"
    )
    target = template()
    target["model"]["w"] = torch.zeros(3, 4)
    target["step"] = 0
    with pytest.raises(
        errors.KindMismatchError, match=r"model\.b: a NoneType in the target, a tensor in the checkpoint"
    ):
        await sidestream.load({"model": {"w": torch.zeros(3, 4), "b": None}}, saved)


async def test_all_offenders_at_once(saved: Path) -> None:
    target = template()
    target["model"] = {"w": torch.zeros(1), "v": torch.zeros(1)}
    with pytest.raises(errors.StateMismatchError) as raised:
        await sidestream.load(target, saved)
    assert type(raised.value) is errors.StateMismatchError
    assert len(raised.value.offenders) == 3


async def test_a_module_of_another_shape_is_untouched(tmp_path: Path) -> None:
    model, _ = model_and_optimizer(width=32)
    await sidestream.save({"model": model}, tmp_path / "c")
    other, _ = model_and_optimizer(seed=5, width=16)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(errors.ShapeMismatchError):
        await sidestream.load({"model": other}, tmp_path / "c")
    assert_same(before, dict(other.state_dict()))


@dataclasses.dataclass
class Custom:
    x: int = 1


def nested(levels: int, leaf: Any) -> Any:
    """``leaf`` below so many keys."""
    for _ in range(levels):
        leaf = {"k": leaf}
    return leaf


ONE_HASH = {7 + number * ((1 << 61) - 1) for number in range(257)}


@pytest.mark.parametrize(
    ("state", "kind", "says"),
    [
        ({0: 1, "0": 2}, errors.KeyCollisionError, "'0' stands for two paths"),
        ({"a.b": 1, "a": {"b": 2}}, errors.KeyCollisionError, r"'a.b' stands for two paths, ['a.b'] and ['a']['b']"),
        ({"a": {"c": Custom()}}, errors.UnsafeObjectError, "a.c: a test_bad_input.Custom cannot be stored as data"),
        ({"a": (1, Custom())}, errors.UnsafeObjectError, "a: a test_bad_input.Custom"),
        ({"a": lambda: 1}, errors.UnsafeObjectError, "a: a builtins.function"),
        ({("t",): 1}, errors.UnsafeObjectError, "a dict key of type tuple"),
        ({"a": (torch.zeros(1 << 20),)}, errors.UnsafeObjectError, "put it into a dict or a list"),
        ({"m": torch.empty(1, device="meta")}, errors.UnsupportedTensorError, "m: cannot save a meta tensor"),
        (torch.nn.Linear(1, 1), errors.InvalidOptionError, 'write {"model": model}'),
        ([1, 2], errors.InvalidOptionError, "state is a mapping"),
        ({"a" * 4097: torch.ones(1)}, errors.InvalidOptionError, "aaa: a name of 4097 characters, and 4096"),
        ({"a": {"b" * 4095: 1}}, errors.InvalidOptionError, "bbb: a name of 4097 characters, and 4096"),
        (nested(65, torch.ones(1)), errors.InvalidOptionError, "k.k: nested deeper than 64 levels, the most"),
        (nested(63, [[torch.ones(1)]]), errors.InvalidOptionError, "k.0.0: nested deeper than 64 levels, the most"),
        (nested(64, torch.eye(2).to_sparse()), errors.InvalidOptionError, "k.indices: nested deeper than 64 levels"),
        ({"a": torch.ones((1,) * 65)}, errors.UnsupportedTensorError, "a: cannot save a tensor of the shape (1, 1,"),
        ({"a": torch.empty(0, 1 << 62)}, errors.UnsupportedTensorError, "a: cannot save a tensor of the shape (0, 4"),
        ({"a": {"b": [1 << 9000]}}, errors.UnsafeObjectError, "a.b: an integer of 1126 bytes, and 1024 are the most"),
        ({1 << 9000: torch.ones(1)}, errors.InvalidOptionError, ": an integer of more than 1024 bytes as a key"),
        ({"a": ({"b": ONE_HASH},)}, errors.UnsafeObjectError, "a: more than 256 keys of one set have the same hash"),
        ({"a": (dict.fromkeys(ONE_HASH),)}, errors.UnsafeObjectError, "a: more than 256 keys of one dict have"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
async def test_states_that_cannot_be_saved(state: Any, kind: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(kind) as raised:
        await sidestream.save(state, tmp_path / "deep" / "c")
    assert says in str(raised.value)
    assert list(tmp_path.iterdir()) == []


async def test_states_at_the_limits_are_read(tmp_path: Path) -> None:
    def state(leaf: torch.Tensor) -> dict[str, Any]:
        deepest = {"t": nested(63, leaf), "s": nested(62, torch.eye(2).to_sparse())}
        rows = {"a" * 4096: leaf, "d": leaf.clone().reshape((1,) * 64), "e": leaf.new_empty(0, 1 << 60)}
        return {**deepest, **rows, 1 << 8190: 1, "v": (set(list(ONE_HASH)[:256]), (1 << 8191) - 1)}

    await sidestream.save(state(torch.ones(1)), tmp_path / "c")
    target = state(torch.zeros(1))
    await sidestream.load(target, tmp_path / "c")
    assert torch.equal(target["a" * 4096], torch.ones(1))
    assert target["v"] == state(torch.ones(1))["v"]
    assert (await sidestream.verify(tmp_path / "c")).ok


async def test_a_state_that_contains_itself(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"a": 1}
    loop["loop"] = loop
    with pytest.raises(errors.InvalidOptionError, match="contains itself"):
        await sidestream.save(loop, tmp_path / "c")
    values: list[Any] = [1]
    values.append(values)
    with pytest.raises((errors.UnsafeObjectError, errors.InvalidOptionError), match="contains itself"):
        await sidestream.save({"v": (values,)}, tmp_path / "c")


@pytest.mark.parametrize(
    "options",
    [{"durability": "sync"}, {"timeout_s": 0}, {"timeout_s": "1"}, {"timeout_s": float("inf")}, {"stager": 3}],
)
async def test_options(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidOptionError):
        await sidestream.save(STATE, tmp_path / "c", **for_save(**options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["s3://bucket", "nowhere://bucket/run", "", "/", "a\0b"])
async def test_urls(url: str) -> None:
    with pytest.raises(errors.InvalidOptionError):
        await sidestream.save(STATE, url)
    with pytest.raises(errors.InvalidOptionError):
        await sidestream.load({}, url)


@pytest.mark.parametrize("select", [5, [5], b"w", {"w": 1}.values()])
async def test_selections_that_are_no_patterns(select: Any, saved: Path, tmp_path: Path) -> None:
    checkpoint = await sidestream.open_checkpoint(saved)
    with pytest.raises(errors.InvalidOptionError, match="select="):
        await checkpoint.state_dict(select=select)
    with pytest.raises(errors.InvalidOptionError, match="select="):
        await sidestream.convert(saved, tmp_path / "d", select=select)


async def test_arguments_of_a_checkpoint(saved: Path, tmp_path: Path) -> None:
    checkpoint = await sidestream.open_checkpoint(saved)
    for rows in (3, slice("a", None), slice(0, 2.5)):
        with pytest.raises(errors.InvalidOptionError, match=r"model\.w: rows="):
            await checkpoint.tensor("model.w", rows)  # type: ignore[arg-type]
    dtype: Any = {5: torch.float16}
    with pytest.raises(errors.InvalidOptionError, match="5 has to be a pattern"):
        await checkpoint.state_dict(dtype=dtype)
    with pytest.raises(errors.InvalidOptionError, match="5 has to be a pattern"):
        await sidestream.convert(saved, tmp_path / "d", dtype=dtype)


async def test_targets_that_exist(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "full")
    for name, says in (
        ("full", "is not empty"),
        ("file", "already exists and is a file"),
        ("link", "is a symbolic link"),
    ):
        with pytest.raises(errors.CheckpointExistsError, match=says):
            await sidestream.save(STATE, tmp_path / name)
    with pytest.raises(FileExistsError):
        await sidestream.save(STATE, tmp_path / "full")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"
    await sidestream.save(STATE, tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full", "link"]


async def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(errors.SidestreamError):
        await sidestream.save(STATE, tmp_path / "file" / "c")
    assert (tmp_path / "file").read_text() == "mine"


async def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "c", tmp_path):
        with pytest.raises(errors.CheckpointNotFoundError, match="no committed checkpoint"):
            await sidestream.load(template(), path)
    with pytest.raises(FileNotFoundError):
        await sidestream.open_checkpoint(tmp_path / "c")


LOOKED_AT_AT_ONCE = {
    name: damage
    for name, damage in DAMAGE.items()
    if name not in {"shard altered", "metadata altered", "metadata gone"}
} | {f"manifest flipped at {at}": changed("manifest-*", flipped(at)) for at in (0.0, 0.3, 0.6, 1.0)}


@pytest.mark.parametrize("damage", LOOKED_AT_AT_ONCE.values(), ids=LOOKED_AT_AT_ONCE)
async def test_damage_is_found_before_anything_is_changed(damage: Callable[[Path], None], saved: Path) -> None:
    damage(saved)
    await refused(template(), saved, errors.CorruptCheckpointError, str(saved))


@pytest.mark.parametrize("scheme", ["", "memory:/"])
@pytest.mark.parametrize("writer", ["sidestream", "dcp"])
async def test_what_could_not_be_read_is_not_verified(scheme: str, writer: str, tmp_path: Path) -> None:
    url = f"{scheme}{tmp_path}/c"
    files, _ = fsspec.core.url_to_fs(url)
    state = {f"t{number}": torch.full((300_000,), float(number)) for number in range(40)}
    state["tied"] = state["t39"]
    if writer == "sidestream":
        await sidestream.save({**state, "step": 3}, url)
    else:
        dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
        if scheme:
            files.put(f"{tmp_path}/c/", f"{tmp_path}/c/", recursive=True)
    gone: list[str] = []

    def remove(*_: int) -> None:
        if not gone:
            gone.extend(files.glob(f"{tmp_path}/c/*.distcp"))
            files.rm(gone)

    report = await sidestream.verify(url, progress=remove)
    assert {one.file for one in report.damaged} == {os.path.basename(one) for one in gone}
    assert report.verified == ()
    assert report.nbytes < 1 << 20


@pytest.mark.parametrize("writer", ["sidestream", "torch"])
async def test_a_tensor_tied_to_a_damaged_one_is_not_verified(writer: str, tmp_path: Path) -> None:
    tied = torch.ones(1 << 10)
    state = {"a": tied, "b": tied, "c": torch.zeros(3)}
    if writer == "torch":
        torch.save(state, tmp_path / "c")
        file = tmp_path / "c"
    else:
        await sidestream.save(state, tmp_path / "c")
        (file,) = (tmp_path / "c").glob("*.distcp")
    raw = bytearray(file.read_bytes())
    raw[raw.index(tied.numpy().tobytes())] ^= 1
    file.write_bytes(raw)
    report = await sidestream.verify(tmp_path / "c")
    assert [one.fqn for one in report.damaged] == ["a"]
    assert report.verified == ("c",)


async def test_an_altered_payload_is_found_and_told(tmp_path: Path) -> None:
    state = {"a": torch.zeros(1 << 19), "b": torch.zeros(1 << 19), "n": 1}  # two checksum blocks each
    await sidestream.save(state, tmp_path / "c")
    shard = tmp_path / "c" / "__0_1.distcp"
    entry = (await sidestream.open_checkpoint(tmp_path / "c"))._manifest.entries["b"]
    offset = entry.chunks[0].payload_offset + (1 << 20) + 17  # type: ignore[union-attr]
    with shard.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x01")
    target = {"a": torch.ones(1 << 19), "b": torch.ones(1 << 19), "n": 0}
    with pytest.raises(errors.CorruptCheckpointError, match=r"b: its bytes in __0_1\.distcp") as raised:
        await sidestream.load(target, tmp_path / "c")
    error = raised.value
    assert (error.fqn, error.file) == ("b", "__0_1.distcp")
    assert error.offset is not None
    assert error.offset <= offset < error.offset + (1 << 20)
    assert "b" in error.written
    assert target["n"] == 0
    for name in ("a", "b"):
        assert (target[name] == 1).all() or name in error.written

    target = {"a": torch.ones(1 << 19), "b": torch.ones(1 << 19), "n": 0}
    with pytest.raises(errors.CorruptCheckpointError) as raised:
        await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(atomic=True))
    assert raised.value.written == ()
    assert all((target[name] == 1).all() for name in ("a", "b"))  # type: ignore[attr-defined]
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(verify="manifest"))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert (await checkpoint.tensor("b", rows=slice(0, 1000))).count_nonzero() == 0, "another block"
    with pytest.raises(errors.CorruptCheckpointError):
        await checkpoint.tensor("b", rows=slice((1 << 18) + 2000, (1 << 18) + 2001))


async def test_every_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    """Bits of framing, padding, metadata and payload alike: never other values than those saved."""
    state = {"w": torch.arange(2000, dtype=torch.int32), "v": {"x": (1, 2.5), "s": "text"}}
    await sidestream.save(state, tmp_path / "c")
    found = 0
    for path in sorted((tmp_path / "c").iterdir()):
        raw = path.read_bytes()
        for at in range(0, len(raw), 97):
            path.write_bytes(raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :])
            try:
                back = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
            except errors.SidestreamError:
                found += 1
            else:
                assert_same(state, back)
        path.write_bytes(raw)
    assert found > 50


async def test_published_with_the_umask_and_private_until_then(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        await sidestream.save(STATE, tmp_path / "c")
    finally:
        os.umask(old)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()} == {0o640}


def test_every_error_is_ours_and_a_builtin() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        if kind is errors.RankFailure:  # the record of what one rank told, in RankFailuresError
            continue
        assert issubclass(kind, errors.SidestreamError)
        assert issubclass(kind, Exception)


def test_types_are_checked_where_the_options_are_made() -> None:
    for wrong in (int, ["int"], [type]):
        with pytest.raises(errors.InvalidOptionError, match="safe_globals="):
            sidestream.LoadOptions(safe_globals=wrong)  # type: ignore[arg-type]
    assert sidestream.LoadOptions(safe_globals=(kind for kind in (range,))).safe_globals == (range,)  # type: ignore[arg-type]


async def test_a_step_is_a_number_or_the_latest(tmp_path: Path) -> None:
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        assert repr(checkpoints) == f"<Checkpointer of {tmp_path / 'run'}>"
        for wrong in (None, "newest"):
            with pytest.raises(errors.InvalidOptionError, match=r'has to be "latest" or the number of a step'):
                await checkpoints.restore({}, wrong)  # type: ignore[arg-type]


async def test_a_save_below_a_file_left_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(errors.StorageError, match="Not a directory") as raised:
        await sidestream.save({"w": torch.ones(2)}, tmp_path / "file" / "c")
    assert not hasattr(raised.value, "__notes__")


async def test_an_object_that_the_checkpoint_does_not_have_names_those_it_has(tmp_path: Path) -> None:
    await sidestream.save({"model": torch.nn.Linear(2, 2), "n": 1}, tmp_path / "c")
    with pytest.raises(errors.StateMismatchError, match=r"nothing of it in the checkpoint, whose keys are model, n"):
        await sidestream.load({"net": torch.nn.Linear(2, 2)}, tmp_path / "c")


@pytest.mark.parametrize(
    "url",
    [
        "memory://",
        "memory:///",
        "http://",
        "https://",
        "s3://",
        "s3:///x",
        "simplecache::memory://",
        "data:,x",
        "file://",
    ],
)
async def test_urls_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.InvalidOptionError, match=r"has no (bucket|room)"):
        await sidestream.save(STATE, url)
    with pytest.raises(errors.InvalidOptionError, match=r"has no (bucket|room)"):
        await sidestream.load(template(), url)
    with pytest.raises(errors.InvalidOptionError, match=r"has no (bucket|room)"):
        sidestream.Checkpointer(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["\ud800", "memory://a/\ud800", "memory://a/" + os.fsdecode(b"\xff")])
async def test_urls_that_cannot_be_encoded(tmp_path: Path, url: str) -> None:
    where = url if "://" in url else f"{tmp_path}/{url}"
    with pytest.raises(errors.InvalidOptionError, match="surrogates not allowed"):
        await sidestream.save(STATE, where)
    with pytest.raises(errors.InvalidOptionError, match="surrogates not allowed"):
        await sidestream.load(template(), where)
    assert list(tmp_path.iterdir()) == []


async def test_a_path_that_is_not_utf8(tmp_path: Path) -> None:
    where = tmp_path / os.fsdecode(b"\xff")
    await sidestream.save(STATE, where)
    await sidestream.load(template(), where)


@pytest.mark.parametrize("source", ["x\0y", "x\ud800y"])
async def test_sources_that_are_no_paths(tmp_path: Path, source: str) -> None:
    with pytest.raises(errors.InvalidOptionError, match="is not a path"):
        await sidestream.save(STATE, tmp_path / "c", files={"a": source})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("dir://odd/k", errors.InvalidOptionError),
        ("github://a/b", errors.InvalidOptionError),
        ("ftp://127.0.0.1:1/a/b", errors.StorageError),
    ],
)
async def test_file_systems_that_cannot_be_made(url: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        await sidestream.save(STATE, url)
    with pytest.raises(kind):
        await sidestream.load(template(), url)


@pytest.mark.parametrize("part", [b"\0", "\0", "\u20ac", (), [], False, 0, -0.1], ids=repr)
async def test_values_that_are_too_large_for_a_manifest(
    part: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    value = part * 100_000 if isinstance(part, bytes | str) else [part] * 100_000
    nbytes = len(value_line_of(encode_value(value, "v"), 0))
    monkeypatch.setattr(values, "MAX_MANIFEST_BYTES", nbytes - 1)
    with pytest.raises(errors.UnsafeObjectError, match="v: with it, the plain values take more than"):
        await sidestream.save({"a": 1, "v": value}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(values, "MAX_MANIFEST_BYTES", nbytes + 1000)
    await sidestream.save({"a": 1, "v": value}, tmp_path / "c")


async def test_bytes_that_are_too_large_for_a_pickle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(write, "_MOST_TEXT_BYTES", 3 << 20)
    await sidestream.save({"v": bytes(3 << 20)}, tmp_path / "c")
    with pytest.raises(errors.UnsafeObjectError, match="v: text or bytes that take 6291456 bytes in a pickle"):
        await sidestream.save({"v": b"\xff" * (3 << 20)}, tmp_path / "d")
