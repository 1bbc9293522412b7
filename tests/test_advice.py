"""Errors for frequent mistakes say what failed, where, and what to do."""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import datetime as dt
import enum
import errno
import io
import os
import random
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from keywords import for_load, for_save
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
async def test_a_module_that_is_not_initialized_gets_its_shapes(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
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
        with pytest.raises(errors.UnsupportedTensorError, match=says):
            await sidestream.load({"m": target["m"].state_dict()}, tmp_path / "step-1")
        for load in (sidestream.load(target, tmp_path / "step-1", **for_load(**options)), checkpoints.restore(target)):
            await load
            assert target["step"] == 7
            assert torch.equal(target["other"], torch.ones(2))
            assert_same(saved.state_dict(), target["m"].state_dict())
            target |= {"m": LAZY[kind](), "step": 0, "other": torch.zeros(2)}


@pytest.mark.filterwarnings("ignore:.*lazy.*")
def test_a_blocking_load_into_one(tmp_path: Path) -> None:
    sidestream.blocking.save({"m": torch.nn.Linear(2, 3)}, tmp_path / "c")
    lazy = torch.nn.LazyLinear(3)
    sidestream.blocking.load({"m": lazy}, tmp_path / "c")
    assert lazy.weight.shape == (3, 2)


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


async def test_one_name_that_ends_like_another_gets_the_advice_for_a_missing_one(tmp_path: Path) -> None:
    net = model()
    state = {"model": net, "optimizer": torch.optim.Adam(net.parameters())}
    await sidestream.save(state, tmp_path / "c")
    with pytest.raises(errors.MissingKeysError) as refused:
        await sidestream.load({**state, "lr": 0.1}, tmp_path / "c")
    assert "all of these names" not in str(refused.value)  # optimizer.param_groups.0.lr is another value
    assert "allow_missing=True" in str(refused.value)
    with pytest.raises(errors.MissingKeysError) as refused:
        await sidestream.load({"bias": torch.zeros(3)}, tmp_path / "c")
    assert "pass names=sidestream.add_prefix" in str(refused.value)
    assert "allow_missing=True" in str(refused.value)


async def test_what_the_system_refuses_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(errors.StorageError, match="a part of this path is a file: choose another path") as refused:
        await sidestream.save({"w": torch.ones(1)}, tmp_path / "file" / "c")
    assert refused.value.errno == errno.ENOTDIR
    read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
    said = errors.from_os_error(read_only, "creating a directory", str(tmp_path))
    assert isinstance(said, errors.AccessDeniedError)
    assert "the file system is mounted read-only: write elsewhere" in str(said)


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


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("s3:/bucket/x", "s3://bucket/x"),
        ("S3:/bucket/x", "s3://bucket/x"),
        ("gs:/bucket/x", "gs://bucket/x"),
        ("az:/container/x", "az://container/x"),
        ("memory:/advice/x", "memory://advice/x"),
        ("file:/tmp/x", "file:///tmp/x"),
        (Path("s3://bucket/x"), "s3://bucket/x"),
    ],
)
async def test_a_url_with_one_slash(url: Any, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.ones(2)}
    for call in (sidestream.save(state, url), sidestream.load(state, url), sidestream.verify(url)):
        with pytest.raises(errors.InvalidOptionError, match=re.escape(f"pass the text {meant!r}, or './{url}'")):
            await call
    with pytest.raises(errors.InvalidOptionError, match=re.escape(repr(meant))):
        sidestream.Checkpointer(url)
    assert list(tmp_path.iterdir()) == []
    sidestream.Checkpointer(meant)  # is accepted
    await sidestream.save(state, f"./{url}")
    assert (tmp_path / Path(url) / ".metadata").exists()


async def test_a_protocol_in_capitals() -> None:
    with pytest.raises(errors.InvalidOptionError, match="unknown protocol MEMORY://; write memory://"):
        await sidestream.save({"w": torch.ones(2)}, "MEMORY://advice/y")
    await sidestream.save({"w": torch.ones(2)}, "memory://advice/y")


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


@pytest.mark.filterwarnings("ignore:.*nested tensors.*")
@pytest.mark.parametrize("options", [{}, {"dtype": torch.bfloat16}, {"streaming": True}])
async def test_a_nested_tensor_where_a_plain_one_was(options: dict[str, Any], tmp_path: Path) -> None:
    """It is compared with the plan of the save before. Torch's comparison of its sizes would end the process."""
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    async with sidestream.AsyncStager() as stager:
        how = for_save(**options) if options.get("streaming") else {"stager": stager, **for_save(**options)}
        for number in range(2):
            await sidestream.save({"n": torch.ones(3)}, tmp_path / f"plain-{number}", **how)
            with pytest.raises(errors.UnsupportedTensorError, match="n: cannot save a nested tensor"):
                await sidestream.save({"n": nested}, tmp_path / "c", **how)
    with pytest.raises(errors.UnsupportedTensorError, match="n: cannot load into a nested tensor"):
        await sidestream.load({"n": nested}, tmp_path / "plain-0")


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


# --- each way out that a message names, taken -------------------------------------------------------------------------


class Advised(NamedTuple):
    """A call that fails, what its error says of a way out, and the call that takes that way."""

    fails: Callable[[Path], Any]
    error: type[errors.SidestreamError]
    says: str
    way_out: Callable[[Path], Any]


SAVED = {"a": torch.ones(2), "m": {"w": torch.ones(3), "more": torch.ones(1)}, "step": 7}


def saved(at: Path) -> Path:
    sidestream.blocking.save(SAVED, at / "c")
    return at / "c"


def loads(target: Callable[[], dict[str, Any]], **keywords: Any) -> Callable[[Path], Any]:
    return lambda at: sidestream.blocking.load(target(), saved(at) if not (at / "c").exists() else at / "c", **keywords)


def saves(state: Callable[[], dict[str, Any]], **keywords: Any) -> Callable[[Path], Any]:
    return lambda at: sidestream.blocking.save(state(), at / f"s{len(list(at.iterdir()))}", **for_save(**keywords))


def converts(target: str, **keywords: Any) -> Callable[[Path], Any]:
    return lambda at: sidestream.blocking.convert(
        at / "c" if (at / "c").exists() else saved(at), at / target, **keywords
    )


def opened(at: Path) -> Any:
    return sidestream.blocking.open_checkpoint(at / "c" if (at / "c").exists() else saved(at))


def full_run(at: Path, slots: int, when_full: Any) -> None:
    async def run() -> None:
        async with sidestream.Checkpointer(at / f"run{slots}{when_full}", slots=slots, when_full=when_full) as steps:
            first = steps.async_save({"w": torch.ones(1 << 20)}, step=1)
            await steps.async_save({"w": torch.ones(2)}, step=2)
            await first

    asyncio.run(run())


def steps_of(at: Path) -> None:
    with sidestream.blocking.Checkpointer(at) as steps:
        steps.steps()


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def beside(at: Path, *, first: bool) -> None:
    (at / "taken").mkdir(exist_ok=True)
    (at / "taken" / "notes.txt").touch()
    sidestream.blocking.save(SAVED, at / ("taken" if first else "elsewhere"), overwrite=first)


def again(at: Path, **keywords: Any) -> None:
    if not (at / "c").exists():
        saved(at)
    sidestream.blocking.save(SAVED, at / "c", **keywords)


def damaged(at: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"q": quantized(), "w": torch.ones(2)}, checkpoint_id=at / "d", no_dist=True)
    return at / "d"


def stock_load(at: Path) -> None:
    target = {"q": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)}
    dcp.load(target, checkpoint_id=at / "d", no_dist=True)
    assert torch.equal(target["q"].dequantize(), torch.ones(2))


def in_stock(value: Any, **keywords: Any) -> Callable[[Path], Any]:
    def load(at: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"v": value}, checkpoint_id=at / "stock", no_dist=True)
        sidestream.blocking.load({"v": None}, at / "stock", **for_load(**keywords))

    return load


HERE = {"a": torch.zeros(2)}
ADVISED: dict[str, Advised] = {
    "missing": Advised(
        loads(lambda: {**HERE, "m": {"w": torch.zeros(3), "more": torch.zeros(1), "new": torch.zeros(1)}}),
        errors.MissingKeysError,
        "allow_missing=True, or patterns of names, leaves what the checkpoint lacks as it is",
        loads(
            lambda: {"m": {"w": torch.zeros(3), "more": torch.zeros(1), "new": torch.zeros(1)}}, allow_missing="m.new"
        ),
    ),
    "unexpected": Advised(
        loads(lambda: {"m": {"w": torch.zeros(3)}}),
        errors.UnexpectedKeysError,
        "allow_unexpected=True, or patterns of names, leaves out what the target lacks",
        loads(lambda: {"m": {"w": torch.zeros(3)}}, allow_unexpected=["m.more"]),
    ),
    "shape": Advised(
        loads(lambda: {"m": {"w": torch.zeros(4), "more": torch.zeros(1)}}),
        errors.ShapeMismatchError,
        "take their names out of the target and pass allow_unexpected=",
        loads(lambda: {"m": {"more": torch.zeros(1)}}, allow_unexpected=True),
    ),
    "dtype": Advised(
        loads(lambda: {"a": torch.zeros(2, dtype=torch.float64)}),
        errors.DtypeMismatchError,
        "allow_cast=True converts",
        loads(lambda: {"a": torch.zeros(2, dtype=torch.float64)}, allow_cast=True),
    ),
    "a dtype that is not converted": Advised(
        loads(lambda: {"a": torch.zeros(2, dtype=torch.int32)}),
        errors.DtypeMismatchError,
        "which torch does not convert into it: build it as float32",
        loads(lambda: {"a": torch.zeros(2, dtype=torch.float32)}),
    ),
    "an expanded target": Advised(
        loads(lambda: {"a": torch.zeros(1).expand(2)}),
        errors.StateMismatchError,
        "clone() it",
        loads(lambda: {"a": torch.zeros(1).expand(2).clone()}),
    ),
    "a selection of nothing": Advised(
        lambda at: opened(at).state_dict(select="wieght"),
        errors.MissingKeysError,
        "no name matches wieght; it has a, m.w, m.more, step",
        lambda at: opened(at).state_dict(select="m.w"),
    ),
    "a value that is asked for as a tensor": Advised(
        lambda at: opened(at).info("step"),
        errors.InvalidOptionError,
        "await value('step')",
        lambda at: opened(at).value("step"),
    ),
    "too few slots": Advised(
        lambda at: full_run(at, 1, "fail"), errors.TooManySavesError, "raise slots=", lambda at: full_run(at, 2, "fail")
    ),
    "no slot": Advised(
        lambda at: full_run(at, 1, "fail"),
        errors.TooManySavesError,
        "choose another when_full=",
        lambda at: full_run(at, 1, "wait"),
    ),
    "a checkpoint that exists": Advised(
        again, errors.CheckpointExistsError, "pass overwrite=True", lambda at: again(at, overwrite=True)
    ),
    "a directory of something else": Advised(
        lambda at: beside(at, first=True),
        errors.CheckpointExistsError,
        "save to a new directory",
        lambda at: beside(at, first=False),
    ),
    "a value as safetensors": Advised(
        converts("x.safetensors"),
        errors.InvalidOptionError,
        "leave them out with select=",
        converts("x.safetensors", select=["a", "m.*"]),
    ),
    "a tuple as a key": Advised(
        saves(lambda: {"d": {(1, 2): torch.ones(1)}}),
        errors.UnsafeObjectError,
        "save str(key), or the items as a list",
        saves(lambda: {"d": {str((1, 2)): torch.ones(1)}, "e": [[(1, 2), torch.ones(1)]]}),
    ),
    "names that collide": Advised(
        saves(lambda: {"a": {"b": 1}, "a.b": 2}),
        errors.KeyCollisionError,
        "rename one",
        saves(lambda: {"a": {"b": 1}, "a_b": 2}),
    ),
    "quantized": Advised(
        saves(lambda: {"q": quantized()}),
        errors.UnsupportedTensorError,
        "save tensor.int_repr() with its scale and zero point",
        saves(lambda: {"q": [quantized().int_repr(), quantized().q_scale(), quantized().q_zero_point()]}),
    ),
    "nested": Advised(
        saves(lambda: {"n": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}),
        errors.UnsupportedTensorError,
        "save its components",
        saves(lambda: {"n": list(torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]).unbind())}),
    ),
    "a large array in a tuple": Advised(
        saves(lambda: {"v": (np.zeros(1 << 18),)}),
        errors.UnsafeObjectError,
        "save torch.from_numpy(array)",
        saves(lambda: {"v": [torch.from_numpy(np.zeros(1 << 18))]}),
    ),
    "a long double": Advised(
        saves(lambda: {"v": np.longdouble(1)}),
        errors.UnsafeObjectError,
        "convert it to float64",
        saves(lambda: {"v": np.float64(np.longdouble(1))}),
    ),
    "a long complex": Advised(
        saves(lambda: {"v": np.clongdouble(1)}),
        errors.UnsafeObjectError,
        "convert it to complex128",
        saves(lambda: {"v": np.complex128(np.clongdouble(1))}),
    ),
    "a large tensor in a tuple": Advised(
        saves(lambda: {"v": (torch.zeros(1 << 19),)}),
        errors.UnsafeObjectError,
        "put it into a dict or a list",
        saves(lambda: {"v": [torch.zeros(1 << 19)]}),
    ),
    "a sparse tensor in a tuple": Advised(
        saves(lambda: {"v": (torch.eye(2).to_sparse(),)}),
        errors.UnsafeObjectError,
        "put it into a dict or a list",
        saves(lambda: {"v": [torch.eye(2).to_sparse()]}),
    ),
    "a BytesIO beyond its end": Advised(
        saves(lambda: {"v": sought(9)}), errors.UnsafeObjectError, "seek() back", saves(lambda: {"v": sought(1)})
    ),
    "a long integer": Advised(
        saves(lambda: {"v": 1 << 9000}),
        errors.UnsafeObjectError,
        "save it as bytes",
        saves(lambda: {"v": (1 << 9000).to_bytes(1200, "little")}),
    ),
    "metadata with a tensor": Advised(
        saves(lambda: {"a": 1}, metadata={"loss": torch.tensor(1.0)}),
        errors.InvalidOptionError,
        "item()",
        saves(lambda: {"a": 1}, metadata={"loss": torch.tensor(1.0).item()}),
    ),
    "an object of another writer": Advised(
        in_stock(dt.timedelta(1)),
        errors.UnsafeObjectError,
        "safe_globals=",
        in_stock(dt.timedelta(1), safe_globals=[dt.timedelta]),
    ),
    "an object that data cannot make": Advised(
        in_stock((Colour,)),
        errors.UnsafeObjectError,
        'or trust="pickle" if you trust the file',
        in_stock((Colour,), trust="pickle"),
    ),
    "what only its writer reads": Advised(
        lambda at: sidestream.blocking.open_checkpoint(damaged(at)).tensor("q"),
        errors.UnsupportedCheckpointError,
        "load it with torch.distributed.checkpoint",
        stock_load,
    ),
    "an expanded tensor in a file": Advised(
        lambda at: sidestream.blocking.open_checkpoint(torch_file(at, torch.ones(1).expand(4))),
        errors.UnsupportedCheckpointError,
        "save tensor.contiguous()",
        lambda at: sidestream.blocking.open_checkpoint(torch_file(at, torch.ones(1).expand(4).contiguous())),
    ),
    "a conjugated tensor in a file": Advised(
        lambda at: sidestream.blocking.open_checkpoint(torch_file(at, torch.ones(2, dtype=torch.complex64).conj())),
        errors.UnsupportedCheckpointError,
        "resolve it before saving",
        lambda at: sidestream.blocking.open_checkpoint(
            torch_file(at, torch.ones(2, dtype=torch.complex64).conj().resolve_conj())
        ),
    ),
    "a conversion of a dtype": Advised(
        converts("d", dtype={"*.w": torch.float32, "wieght": torch.bfloat16}),
        errors.InvalidOptionError,
        "names of no dense tensor: 'wieght'",
        converts("d", dtype={"*.w": torch.bfloat16}),
    ),
    "verify='never'": Advised(
        lambda at: sidestream.LoadOptions(verify="never"),  # type: ignore[arg-type]
        errors.InvalidOptionError,
        "pass verify='manifest'",
        lambda at: sidestream.LoadOptions(verify="manifest"),
    ),
    "a state that is a module": Advised(
        lambda at: sidestream.blocking.save(torch.nn.Linear(2, 2), at / "m"),  # type: ignore[arg-type]
        errors.InvalidOptionError,
        'write {"model": model}',
        lambda at: sidestream.blocking.save({"model": torch.nn.Linear(2, 2)}, at / "m"),
    ),
    "storage twice": Advised(
        lambda at: sidestream.blocking.save(SAVED, "memory://x/y", storage_options={}, storage=sidestream.Storage()),
        errors.InvalidOptionError,
        "pass storage=Storage(options=...)",
        lambda at: sidestream.blocking.save(SAVED, f"memory://{at}/y", storage=sidestream.Storage(options={})),
    ),
    "a run that is a checkpoint": Advised(
        lambda at: steps_of(saved(at)),
        errors.InvalidOptionError,
        "use that url, or read this checkpoint with sidestream.load",
        steps_of,
    ),
    "a step that is not there": Advised(
        lambda at: restored(at, 5),
        errors.CheckpointNotFoundError,
        "has no committed step 5; it has [3]",
        lambda at: restored(at, 3),
    ),
}


def sought(position: int) -> io.BytesIO:
    content = io.BytesIO(b"four")
    content.seek(position)
    return content


def torch_file(at: Path, tensor: torch.Tensor) -> Path:
    torch.save({"w": tensor}, at / "f.pt")
    return at / "f.pt"


def restored(at: Path, step: int) -> None:
    with sidestream.blocking.Checkpointer(at / "run") as steps:
        if not steps.steps():
            steps.save({"a": 1}, step=3)
        steps.restore({"a": 0}, step)


@pytest.mark.filterwarnings("ignore")  # torch deprecates quantized and nested tensors
@pytest.mark.parametrize("case", ADVISED)
def test_the_way_out_that_a_message_names(case: str, tmp_path: Path) -> None:
    one = ADVISED[case]
    with pytest.raises(one.error, match=re.escape(one.says)):
        one.fails(tmp_path)
    one.way_out(tmp_path)
