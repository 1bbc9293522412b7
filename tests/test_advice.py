"""Errors for frequent mistakes say what failed, where, and what to do."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from keywords import for_load
from states import assert_same

import sidestream
from sidestream import errors
from sidestream.dcp import StorageReader, StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")


# --- modules that have no shapes yet ---------------------------------------------------------------------------------


LAZY: dict[str, Callable[[], torch.nn.Module]] = {
    "LazyLinear": lambda: torch.nn.LazyLinear(3),
    "LazyBatchNorm1d": torch.nn.LazyBatchNorm1d,
    "nested": lambda: torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LazyLinear(3)),
}


@pytest.mark.filterwarnings("ignore:.*lazy.*")
@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"allow_missing": True, "allow_unexpected": True}])
async def test_a_target_that_is_not_initialized(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    saved = {
        "LazyLinear": torch.nn.Linear(2, 3),
        "LazyBatchNorm1d": torch.nn.BatchNorm1d(3),
        "nested": torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 3)),
    }[kind]
    state = {"other": torch.ones(2), "m": saved, "step": 7}
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        await checkpoints.save(state, step=1)
        target: dict[str, Any] = {"other": torch.zeros(2), "m": LAZY[kind](), "step": 0}
        says = r"[\w.]+: cannot load into an uninitialized Uninitialized(Parameter|Buffer): run the module once first"
        for refuses in (
            sidestream.load(target, tmp_path / "step-1", **for_load(**options)),
            sidestream.load(target["m"].state_dict(), tmp_path / "step-1", allow_missing=True),
            checkpoints.restore(target, **for_load(**options)),
        ):
            with pytest.raises(errors.UnsupportedTensorError, match=says):
                await refuses
    assert not target["other"].any()
    assert target["step"] == 0


@pytest.mark.filterwarnings("ignore:.*lazy.*")
def test_a_blocking_load_into_one(tmp_path: Path) -> None:
    sidestream.blocking.save({"m": torch.nn.Linear(2, 3)}, tmp_path / "c")
    with pytest.raises(errors.UnsupportedTensorError, match=r"m\.weight: .*run the module once first"):
        sidestream.blocking.load({"m": torch.nn.LazyLinear(3)}, tmp_path / "c")


async def test_a_meta_target_is_told_of_to_empty(tmp_path: Path) -> None:
    await sidestream.save({"m": torch.nn.Linear(2, 3)}, tmp_path / "c")
    model = torch.nn.Linear(2, 3, device="meta")
    with pytest.raises(errors.UnsupportedTensorError, match=r'm\.weight: .*meta.*to_empty\(device="cpu"\)'):
        await sidestream.load({"m": model}, tmp_path / "c")
    model.to_empty(device="cpu")
    await sidestream.load({"m": model}, tmp_path / "c")
    with pytest.raises(errors.UnsupportedTensorError, match="materialize it first"):
        await sidestream.save({"m": torch.nn.Linear(2, 3, device="meta")}, tmp_path / "d")


# --- strict, and names with a prefix ---------------------------------------------------------------------------------


async def test_strict_of_torch(tmp_path: Path) -> None:
    await sidestream.save({"m": {"a": torch.ones(2), "more": torch.ones(2)}}, tmp_path / "c")
    target = {"m": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    with pytest.raises(errors.StateMismatchError):
        await sidestream.load(target, tmp_path / "c")
    report = await sidestream.load(target, tmp_path / "c", strict=False)
    assert (report.missing, report.unexpected) == (("m.b",), ("m.more",))
    assert torch.equal(target["m"]["a"], torch.ones(2))
    target["m"]["a"] = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(errors.DtypeMismatchError):  # as elsewhere, dtypes are converted only on request
        await sidestream.load(target, tmp_path / "c", strict=False)


class Wrapper(torch.nn.Module):
    """Puts ``module.`` before every name, as DataParallel does."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


async def test_a_checkpoint_of_a_wrapped_module(tmp_path: Path) -> None:
    wrapped = model()
    await sidestream.save({"model": Wrapper(wrapped)}, tmp_path / "c")
    plain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    says = (
        r"has all of these names with the prefix 'module\.' \('model\.module\.0\.weight'\)(.|\n)*"
        r'pass names=sidestream\.add_prefix\("module\.", after="model\."\) to the load'
    )
    for target in ({"model": plain}, {"model": plain.state_dict()}):
        with pytest.raises(errors.StateMismatchError, match=says):
            await sidestream.load(target, tmp_path / "c")
    await sidestream.load({"model": {"module." + key: one for key, one in plain.state_dict().items()}}, tmp_path / "c")
    assert_same(plain.state_dict(), wrapped.state_dict())


async def test_a_target_that_is_wrapped(tmp_path: Path) -> None:
    await sidestream.save({"model": model()}, tmp_path / "c")
    wrapped = Wrapper(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)))
    says = (
        r"without the prefix 'module\.' \('model\.0\.weight'\).*unwrap the module before state_dict.., as model\.module"
    )
    for target in ({"model": wrapped}, {"model": wrapped.state_dict()}):
        with pytest.raises(errors.StateMismatchError, match=says):
            await sidestream.load(target, tmp_path / "c")
    await sidestream.load({"model": wrapped.module}, tmp_path / "c")
    assert_same(wrapped.module.state_dict(), model().state_dict())


async def test_prefixes_of_other_tools(tmp_path: Path) -> None:
    torch.save(
        {"state_dict": {f"model._orig_mod.{key}": one for key, one in model().state_dict().items()}}, tmp_path / "l.pt"
    )
    with pytest.raises(errors.StateMismatchError, match=r"with the prefix 'state_dict\.model\._orig_mod\.'"):
        await sidestream.load(model().state_dict(), tmp_path / "l.pt")


async def test_a_prefix_that_no_wrapper_adds(tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "flat.pt")
    plain = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(errors.MissingKeysError) as refused:
        await sidestream.load({"model": plain}, tmp_path / "flat.pt")
    *_, advice = str(refused.value).splitlines()  # a line of its own
    assert advice == (
        "  the checkpoint has all of these names without the prefix 'model.' ('0.weight'): "
        'pass names=sidestream.strip_prefix("model.") to the load'
    )
    options = sidestream.LoadOptions(names=sidestream.strip_prefix("model."))
    await sidestream.load({"model": plain}, tmp_path / "flat.pt", options=options)
    assert_same(plain.state_dict(), model().state_dict())


async def test_other_names_get_no_advice_on_prefixes(tmp_path: Path) -> None:
    await sidestream.save({"model": model()}, tmp_path / "c")
    for target in ({"model": {"x": torch.ones(2)}}, {"model": {"0.bias": torch.zeros(3), "0.biases": torch.zeros(3)}}):
        with pytest.raises(errors.StateMismatchError) as refused:
            await sidestream.load(target, tmp_path / "c")
        assert "has all of these names" not in str(refused.value)


# --- values that are not plain data -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int = 1
    right: int = 2


class Dumps:
    def to_dict(self) -> dict[str, int]:
        return {"a": 1}


VALUES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "Namespace": (argparse.Namespace(lr=0.1), "vars(value)", vars),
    "SimpleNamespace": (types.SimpleNamespace(lr=0.1), "vars(value)", vars),
    "dataclass": (Config(), "dataclasses.asdict(value)", dataclasses.asdict),
    "Path": (PurePosixPath("x"), "str(value)", str),
    "enum": (Colour.RED, "value.value", lambda value: value.value),
    "datetime": (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "value.isoformat()", lambda value: value.isoformat()),
    "date": (dt.date(2026, 1, 1), "value.isoformat()", lambda value: value.isoformat()),
    "timedelta": (dt.timedelta(1), "value.total_seconds()", lambda value: value.total_seconds()),
    "namedtuple": (Pair(), "value._asdict()", lambda value: value._asdict()),
    "Generator": (torch.Generator(), "value.get_state()", lambda value: value.get_state()),
    "Random": (random.Random(), "value.getstate()", lambda value: value.getstate()),
    "deque": (collections.deque([1]), "list(value)", list),
    "range": (range(3), "list(value)", list),
    "config": (Dumps(), "value.to_dict()", lambda value: value.to_dict()),
}


@pytest.mark.parametrize("kind", VALUES)
async def test_an_object_is_told_what_to_save_in_its_place(kind: str, tmp_path: Path) -> None:
    value, remedy, instead = VALUES[kind]
    for state in ({"args": value}, {"args": (value,)}):
        with pytest.raises(errors.UnsafeObjectError) as refused:
            await sidestream.save(state, tmp_path / "c")
        assert str(refused.value).startswith("args: ")
        assert f"save {remedy}, and construct the object" in str(refused.value)
    await sidestream.save({"args": instead(value)}, tmp_path / "c")


async def test_any_other_object(tmp_path: Path) -> None:
    for value in (object(), Config, lambda: 1):
        with pytest.raises(errors.UnsafeObjectError, match=r"args: .*give it state_dict\(\) and load_state_dict\(\)"):
            await sidestream.save({"args": value}, tmp_path / "c")


# --- addresses and targets -------------------------------------------------------------------------------------------


async def test_an_address_that_begins_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    says = r"'~/ckpt' begins with ~.*os\.path\.expanduser\('~/ckpt'\), or './~/ckpt'"
    state = {"w": torch.ones(2)}
    for refuses in (
        sidestream.save(state, "~/ckpt"),
        sidestream.load(state, "~/ckpt"),
        sidestream.open_checkpoint("~/ckpt"),
        sidestream.verify("~/ckpt"),
        sidestream.convert(tmp_path, "~/ckpt"),
        sidestream.copy("~/ckpt", tmp_path / "x"),
    ):
        with pytest.raises(errors.InvalidOptionError, match=says):
            await refuses
    for make in (sidestream.Checkpointer, lambda url: sidestream.async_save(state, url)):
        with pytest.raises(errors.InvalidOptionError, match=says):
            make("~/ckpt")
    for call in (
        lambda: dcp.save(state, storage_writer=StorageWriter("~/ckpt"), no_dist=True),
        lambda: dcp.load(state, storage_reader=StorageReader("~/ckpt"), no_dist=True),
    ):
        with pytest.raises(BaseException, match=says):  # DCP's own is no Exception
            call()
    assert list(tmp_path.iterdir()) == []
    await sidestream.save(state, "./~/ckpt")
    assert (tmp_path / "~" / "ckpt" / ".metadata").exists()


async def test_an_unknown_protocol() -> None:
    for url in ("abc://abc.abc", "abc://abc.abc/x/y"):
        with pytest.raises(errors.InvalidOptionError, match=r"has the unknown protocol abc://"):
            await sidestream.save({"w": torch.ones(2)}, url)
        with pytest.raises(errors.InvalidOptionError, match=r"has the unknown protocol abc://"):
            sidestream.Checkpointer(url)


async def test_a_conversion_onto_a_file_that_exists(tmp_path: Path) -> None:
    await sidestream.save({"w": torch.ones(2)}, tmp_path / "c")
    (tmp_path / "m.pt").write_bytes(b"mine")
    for convert in (sidestream.convert, sidestream.copy):
        with pytest.raises(
            errors.CheckpointExistsError, match=r"m\.pt already exists and is a file: choose another name"
        ):
            await convert(tmp_path / "c", tmp_path / "m.pt")
    with pytest.raises(errors.CheckpointExistsError, match=r"c is not empty: save to a new directory"):
        await sidestream.save({"w": torch.ones(2)}, tmp_path / "c")


def test_the_command_line_names_its_own_option(tmp_path: Path) -> None:
    sidestream.blocking.save({"w": torch.ones(2), "step": 1}, tmp_path / "c")
    command = [sys.executable, "-c", "from sidestream_cli import main; main()", "convert"]
    done = warm.run(
        [*command, str(tmp_path / "c"), str(tmp_path / "m.safetensors")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert "leave them out with --select" in " ".join(done.stderr.split())


# --- with instead of async with ----------------------------------------------------------------------------------


async def test_a_plain_with(tmp_path: Path) -> None:
    checkpoints: Any = sidestream.Checkpointer(tmp_path)
    says = r"async with sidestream\.Checkpointer.*blocking\.Checkpointer"
    with pytest.raises(errors.AsyncOnlyError, match=says), checkpoints:
        pass
    async with sidestream.AsyncStager() as entered:
        stager: Any = entered
        with pytest.raises(TypeError, match=r"async with sidestream\.AsyncStager"), stager:
            pass


async def test_arguments_in_the_order_of_another_library(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidOptionError, match="a dict is not a path or URL: the state comes first"):
        await sidestream.save(str(tmp_path / "c"), {"w": torch.ones(2)})  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidOptionError, match=r"a dict was passed in place of a sidestream\.LoadOptions\("):
        await sidestream.load({"w": torch.ones(2)}, tmp_path / "c", options={"names": None})  # type: ignore[arg-type]


async def test_an_object_in_a_file_of_torch_save(tmp_path: Path) -> None:
    torch.save({"model": model()}, tmp_path / "whole.pt")
    options = sidestream.LoadOptions(trust="pickle")
    with pytest.raises(errors.UnsafeObjectError, match=r"load it with torch\.load, and save its tensors"):
        await sidestream.load({"model": model()}, tmp_path / "whole.pt", options=options)
