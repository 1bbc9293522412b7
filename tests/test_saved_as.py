"""``names=`` and ``dtype=`` of saves: names and dtypes in the checkpoint, converted while the state is staged."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fake_device import FakeDriver
from keywords import for_save
from safetensors.torch import load_file
from states import assert_same, model_and_optimizer
from torch.distributed.checkpoint.staging import BlockingAsyncStager

import sidestream
from sidestream import AsyncStager, Checkpointer, errors
from sidestream._layout import save_layout
from sidestream._staging import DeviceEngine

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")

WINDOW = 1 << 20
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_layout, "_WINDOW_BYTES", (WINDOW, WINDOW))


def state_of(seed: int = 0) -> dict[str, Any]:
    """Tensors of many kinds, of which some lie across windows, and two are tied."""
    torch.manual_seed(seed)
    weight = torch.randn(700, 901)
    return {
        "large": torch.randn(3_000_001),
        "transposed": torch.randn(1100, 1300).t(),
        "rows": torch.randn(900, 4, 1000)[:, 1],
        "negative": torch._neg_view(torch.randn(700_001)),
        "weight": weight,
        "head": weight,
        "view": weight[3:5],
        "small": [torch.randn(number) for number in range(70)],
        "double": torch.randn(40, 3, dtype=torch.float64),
        "half": torch.randn(300).half(),
        "scalar": torch.tensor(2.5),
        "count": torch.arange(77),
        "mask": torch.rand(13) > 0.5,
        "complex": torch.randn(5, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "none": torch.zeros(0, 4),
        "value": {"lr": 0.1},
    }


def cast(value: Any, dtype: torch.dtype) -> Any:
    """What has become of ``value``, by torch's own conversion. A tensor without dimensions keeps its dtype."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(dtype) if value.is_floating_point() and value.dim() else value
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return [cast(item, dtype) for item in value] if isinstance(value, list) else value


async def back(url: Path, **options: Any) -> dict[str, Any]:
    return await (await sidestream.open_checkpoint(url)).state_dict(**options)


# --- dtype= ---


@pytest.mark.parametrize("dtype", [BF16, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("way", ["thread", "process", "streamed"])
async def test_every_tensor_is_converted_as_torch_does(way: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    state = state_of()
    options = {"streaming": True} if way == "streamed" else {"writer": way}
    await sidestream.save(state, tmp_path / "c", **for_save(dtype=dtype, digest="blake3", **options))
    found = await back(tmp_path / "c")
    assert_same(found, cast(state, dtype))
    assert found["weight"].data_ptr() == found["head"].data_ptr()
    report = await sidestream.verify(tmp_path / "c")
    assert report.ok
    assert not report.unverified
    target = cast(state_of(9), dtype)
    dcp.load(target, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_same(target, cast(state, dtype))


def trained(steps: int) -> dict[str, Any]:
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "used"])
@pytest.mark.parametrize("dtype", [BF16, {"*bias*": torch.float32, "*": BF16}, {"optimizer.*": BF16, "model.*": BF16}])
async def test_an_optimizer_counts_on_after_a_resume(dtype: Any, steps: int, tmp_path: Path) -> None:
    """In bfloat16, Adam's step would stand still at 256."""
    await sidestream.save(trained(256), tmp_path / "c", options=sidestream.SaveOptions(dtype=dtype))
    target = trained(steps)
    report = await sidestream.load(target, tmp_path / "c", allow_cast=True)
    assert not any(name.endswith(".step") for name in report.cast)
    assert "model.weight" in report.cast
    assert ("optimizer.state.0.exp_avg" in report.cast) == (steps > 0)  # new tensors have the saved dtype
    optimizer = target["optimizer"]
    target["model"](torch.ones(3)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"].tolist() == 257.0


async def test_counters_keep_their_dtype_wherever_a_dtype_is_given(tmp_path: Path) -> None:
    state = {"step": torch.tensor(257.0), "w": torch.ones(2)}
    export = sidestream.HF(tmp_path / "export", dtype=BF16)
    await sidestream.save(state, tmp_path / "plain", export=export)
    await sidestream.save(state, tmp_path / "saved", options=sidestream.SaveOptions(dtype=BF16))
    await sidestream.convert(tmp_path / "plain", tmp_path / "converted", dtype={"*": BF16})
    expected = {"step": torch.tensor(257.0), "w": torch.ones(2, dtype=BF16)}
    for written in ("export", "saved", "converted"):
        assert_same(await back(tmp_path / written), expected)
    assert_same(await back(tmp_path / "plain", dtype=BF16), expected)


@pytest.mark.parametrize("pattern", ["a.step", "*.step", "a*.step"])
async def test_a_pattern_that_names_a_counter_converts_it(pattern: str, tmp_path: Path) -> None:
    state = {"a": {"step": torch.tensor(7.0, dtype=BF16), "w": torch.ones(2)}}
    await sidestream.save(state, tmp_path / "c")
    dtypes = {"*": torch.float16, pattern: torch.float32}  # the first does not name it
    found = await back(tmp_path / "c", dtype=dtypes)
    assert_same(found, {"a": {"step": torch.tensor(7.0), "w": torch.ones(2, dtype=torch.float16)}})


async def test_a_name_that_is_not_there_is_refused(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "value": 1}
    for wrong in ("wieght", "value", "sparse"):
        patterns = {"weight": BF16, wrong: BF16, "*": torch.float32}
        says = re.escape(f"dtype= has names of no dense tensor: {wrong!r}")
        with pytest.raises(errors.InvalidOptionError, match=says):
            await sidestream.save(state, tmp_path / "c", options=sidestream.SaveOptions(dtype=patterns))
        assert list(tmp_path.iterdir()) == []
    await sidestream.save(state, tmp_path / "c", options=sidestream.SaveOptions(dtype={"w*": BF16, "weight": BF16}))
    says = "names of no dense tensor: 'wieght'"
    for refuses in (
        back(tmp_path / "c", dtype={"wieght": BF16}),
        sidestream.convert(tmp_path / "c", tmp_path / "d", dtype={"wieght": BF16}),
    ):
        with pytest.raises(errors.InvalidOptionError, match=says):
            await refuses
    export = sidestream.HF(tmp_path / "e", select="weight", dtype={"wieght": BF16})
    pending = sidestream.async_save({"weight": torch.ones(2)}, tmp_path / "f", export=export)
    await pending
    with pytest.raises(errors.InvalidOptionError, match=says):
        await pending.exports[0]
    assert {path.name for path in tmp_path.iterdir()} <= {"c", "f"}


async def test_a_pattern_that_matches_nothing_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"weight": torch.ones(2), "sparse": torch.eye(2).to_sparse(), "nrom": 1}
    dtypes = {"*nrom*": torch.float32, "spar*": torch.float32, "w*": BF16, "we*": BF16, "*": torch.float16}
    for number in range(2):
        await sidestream.save(state, tmp_path / str(number), options=sidestream.SaveOptions(dtype=dtypes))
    told = [record.getMessage() for record in caplog.records if "dtype=" in record.getMessage()]
    assert told == ["dtype= has patterns that match no dense tensor: '*nrom*', 'spar*'"]


async def test_a_tied_tensor_is_written_once_and_one_with_two_dtypes_twice(tmp_path: Path) -> None:
    weight = torch.randn(1000, 1000)
    state = {"a": weight, "b": weight, "c": weight}
    info = await sidestream.save(state, tmp_path / "one", options=sidestream.SaveOptions(dtype=BF16))
    assert 2_000_000 < info.nbytes < 2_100_000
    info = await sidestream.save(state, tmp_path / "two", options=sidestream.SaveOptions(dtype={"b": BF16}))
    assert 6_000_000 < info.nbytes < 6_100_000
    found = await back(tmp_path / "two")
    assert found["a"].data_ptr() == found["c"].data_ptr()
    assert_same(found, {"a": weight, "b": weight.to(BF16), "c": weight})


async def test_plans_of_saves_with_other_dtypes_are_not_confused(tmp_path: Path) -> None:
    state = {"norm": torch.randn(9), "weight": torch.randn(9)}
    choices: list[Any] = [None, BF16, {"norm": BF16}, {"*": torch.float16}, {"norm": torch.float16, "*": BF16}, None]
    async with AsyncStager() as stager:
        for number, dtype in enumerate(choices * 2):
            await sidestream.save(
                state, tmp_path / str(number), stager=stager, options=sidestream.SaveOptions(dtype=dtype)
            )
    for number, dtype in enumerate(choices * 2):
        patterns = dtype if isinstance(dtype, dict) else {"*": dtype}
        expected = {
            name: tensor.to(patterns.get(name, patterns.get("*")) or tensor.dtype) for name, tensor in state.items()
        }
        assert_same(await back(tmp_path / str(number)), expected)


async def test_the_budget_holds_what_is_converted_and_not_the_source(tmp_path: Path) -> None:
    state = {"weight": torch.randn(6 << 20)}
    async with AsyncStager(budget_bytes=13 << 20) as stager:  # 24 MiB become 12
        pending = sidestream.async_save(
            state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(dtype=BF16)
        )
        await pending
        assert stager.statistics().reserved_bytes <= 13 << 20
    assert_same(await back(tmp_path / "c"), cast(state, BF16))


async def test_conversions_that_torch_does_not_make_and_dtypes_that_are_none(tmp_path: Path) -> None:
    state = {"a": torch.randn(3)}
    for dtype in (torch.int8, "bfloat16", {"a": torch.int64}):
        with pytest.raises(errors.InvalidOptionError, match="floating-point"):
            await sidestream.save(state, tmp_path / "c", options=sidestream.SaveOptions(dtype=dtype))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("seed", range(6))
async def test_tensors_on_a_device(seed: int, mode: Any, tmp_path: Path) -> None:
    """Small ones are converted on the host, large ones on the device, by pieces."""
    driver = FakeDriver(seed)
    base = torch.randn(9000)
    state = {
        "large": driver.put(base.clone()),
        "small": driver.put(torch.randn(7)),
        "transposed": driver.put(torch.randn(60, 70)).t(),
        "long": driver.put(torch.randn(5 << 20)),
        "host": torch.randn(300),
        "count": driver.put(torch.arange(100)),
    }
    expected = {name: tensor.clone() for name, tensor in state.items()}
    async with AsyncStager(
        engine=DeviceEngine(driver, small_bytes=64, chunk_bytes=1 << 20), budget_bytes=1 << 26, mode=mode
    ) as stager:
        pending = sidestream.async_save(
            state, tmp_path / "c", stager=stager, options=sidestream.SaveOptions(dtype=BF16)
        )
        await driver.drive(pending.staged)
        for tensor in state.values():
            driver.launch(lambda tensor=tensor: tensor.zero_())
        await driver.drive(pending)
    assert_same(await back(tmp_path / "c"), cast(expected, BF16))
    bytes_of = sum(tensor.numel() * 2 for name, tensor in state.items() if name in ("large", "long", "transposed"))
    assert sum(driver.copies) <= bytes_of + 7 * 4 + 800 + 64  # converted before they cross the bus


# --- names= ---


async def test_a_save_and_a_load_with_the_same_names(tmp_path: Path) -> None:
    module, optimizer = model_and_optimizer(1)
    state = {"model": module, "optimizer": optimizer, "epoch": 3}
    names = sidestream.add_prefix("run.")
    await sidestream.save(state, tmp_path / "c", options=sidestream.SaveOptions(names=names))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert all(name.startswith("run.") for name in checkpoint)
    found = await checkpoint.state_dict()
    assert_same(found["run"]["optimizer"], optimizer.state_dict())  # integer keys and all

    target, _ = model_and_optimizer(2)
    fresh = torch.optim.AdamW(target.parameters())
    restored: dict[str, Any] = {"model": target, "optimizer": fresh, "epoch": 0}
    await sidestream.load(restored, tmp_path / "c", options=sidestream.LoadOptions(names=names))
    assert_same(target.state_dict(), module.state_dict())
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert restored["epoch"] == 3

    stock = {f"run.model.{name}": torch.zeros_like(one) for name, one in module.state_dict().items()}
    dcp.load(stock, checkpoint_id=tmp_path / "c", no_dist=True)
    assert_same(list(stock.values()), list(module.state_dict().values()))


async def test_what_is_left_out_and_tied_tensors_with_one_name(tmp_path: Path) -> None:
    weight = torch.randn(40, 50)
    state = {"embed": weight, "head": weight, "lora": torch.randn(3), "step": 3, "empty": {}}
    left_out = {"head": "embed", "lora": None, "step": "at"}
    await sidestream.save(
        state, tmp_path / "c", options=sidestream.SaveOptions(names=lambda name: left_out.get(name, name))
    )
    assert_same(await back(tmp_path / "c"), {"embed": weight, "at": 3, "empty": {}})


async def test_lists_keep_their_names(tmp_path: Path) -> None:
    state = {"layers": [{"w": torch.full((2,), float(n))} for n in range(3)]}
    await sidestream.save(
        state, tmp_path / "all", options=sidestream.SaveOptions(names=lambda name: name.replace("layers", "blocks"))
    )
    assert_same(await back(tmp_path / "all"), {"blocks": state["layers"]})
    await sidestream.save(state, tmp_path / "some", options=sidestream.SaveOptions(names={"layers.1.w": "blocks.1.w"}))
    found = await back(tmp_path / "some")
    expected = {"layers": {0: state["layers"][0], 2: state["layers"][2]}, "blocks": {1: state["layers"][1]}}
    assert_same(found, expected)
    await sidestream.convert(tmp_path / "all", tmp_path / "part", select="blocks.[02].*")
    assert_same(await back(tmp_path / "part"), {"blocks": expected["layers"]})


async def test_names_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = {"m": {"a": torch.ones(2), "b": torch.zeros(2)}, "n": 3}
    for names, kind, said in (
        ({"m.a": "m.b"}, errors.KeyCollisionError, r"m\.b: the name of m\.a, m\.b"),
        ({"m.a": "n"}, errors.KeyCollisionError, r"n: the name of m\.a, n"),
        ({"m.a": "m"}, errors.KeyCollisionError, "m is an entry and a container of others"),
        ({"x": "y"}, errors.InvalidOptionError, "names that are not among"),
        (lambda name: 3, errors.InvalidOptionError, "not a string"),
        ("m.", errors.InvalidOptionError, "has to be a function"),
    ):
        with pytest.raises(kind, match=said):
            await sidestream.save(state, tmp_path / "c", options=sidestream.SaveOptions(names=names))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


async def test_other_stagers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidOptionError, match=r"AsyncStager.*async_stager="):
        await sidestream.save({"a": torch.ones(2)}, tmp_path / "c", stager=BlockingAsyncStager())  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidOptionError, match="AsyncStager"):
        sidestream.Checkpointer(tmp_path, stager=BlockingAsyncStager())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# --- with everything else ---


async def test_an_export_has_the_names_and_dtypes_of_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = {"model": {"a": torch.randn(1000, 700), "b": torch.randn(5)}, "step": 1}
    export = [
        sidestream.HF(tmp_path / "same", select="weights.*"),
        sidestream.HF(
            tmp_path / "own", select="weights.*", names=sidestream.strip_prefix("weights."), dtype=torch.float32
        ),
    ]
    names = {"model.a": "weights.a", "model.b": "weights.b"}
    for number, options in enumerate(({}, {"streaming": True})):
        out = [replace(one, url=f"{one.url}{number}") for one in export]
        await sidestream.save(state, tmp_path / str(number), export=out, **for_save(names=names, dtype=BF16, **options))
        converted = cast(state["model"], BF16)
        found = load_file(tmp_path / f"same{number}" / "model.safetensors")
        assert_same(dict(sorted(found.items())), {"weights.a": converted["a"], "weights.b": converted["b"]})
        found = load_file(tmp_path / f"own{number}" / "model.safetensors")
        assert_same(dict(sorted(found.items())), cast(converted, torch.float32))


async def test_a_run_saves_and_restores_with_its_names(tmp_path: Path) -> None:
    module, _ = model_and_optimizer(1)
    names = sidestream.add_prefix("policy.")
    async with Checkpointer(tmp_path / "run", save=sidestream.SaveOptions(names=names, dtype=BF16)) as run:
        await run.prewarm({"model": module})
        await run.save({"model": module}, step=1, files={"a": b"b"})
        target, _ = model_and_optimizer(2)
        with pytest.raises(errors.DtypeMismatchError):
            await run.restore({"model": target})
        assert await run.restore({"model": target}, allow_cast=True) == 1
        assert_same(target.state_dict(), cast(cast(dict(module.state_dict()), BF16), torch.float32))
        with pytest.raises(errors.StateMismatchError):
            await run.restore({"model": target}, allow_cast=True, options=sidestream.LoadOptions(names={}))
        async with run.reading() as checkpoint:
            assert all(name.startswith("policy.model.") for name in checkpoint)
    with pytest.raises(errors.InvalidOptionError):
        Checkpointer(tmp_path / "run", save=sidestream.SaveOptions(dtype=torch.int8))


def test_blocking(tmp_path: Path) -> None:
    state = {"a": torch.randn(3)}
    sidestream.blocking.save(state, tmp_path / "c", options=sidestream.SaveOptions(names={"a": "b"}, dtype=BF16))
    assert_same(sidestream.blocking.open_checkpoint(tmp_path / "c").state_dict(), {"b": state["a"].to(BF16)})


# --- dtype= of state_dict() ---


@pytest.mark.parametrize("writer", ["sidestream", "dcp"])
@pytest.mark.parametrize("memory", ["host", "mapped"])
async def test_tensors_made_anew_in_another_dtype(memory: Any, writer: str, tmp_path: Path) -> None:
    state = {name: one for name, one in state_of().items() if name not in ("negative",)}
    if writer == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        await sidestream.save(state, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    expected = cast(state, BF16)
    found = await checkpoint.state_dict(memory=memory, dtype=BF16)
    assert_same(found, expected)
    found = await checkpoint.state_dict(
        memory=memory, dtype={"lar*": torch.float16}, select=["large", "weight", "head"]
    )
    assert_same(found, {"large": state["large"].half(), "weight": state["weight"], "head": state["weight"]})
    if writer == "sidestream":  # stock DCP writes tied tensors twice
        found = await checkpoint.state_dict(memory=memory, dtype=BF16, select=["weight", "head"])
        assert found["weight"].data_ptr() == found["head"].data_ptr()
    with pytest.raises(errors.InvalidOptionError, match="floating-point"):
        await checkpoint.state_dict(dtype=torch.int8)


async def test_plans_of_saves_with_other_names_are_not_confused(tmp_path: Path) -> None:
    """Saves that follow one another with and without names use plans of their own."""
    state = {"a": torch.randn(4), "b": torch.randn(4)}
    swap = {"a": "b", "b": "a"}
    async with AsyncStager() as stager:
        for number, names in enumerate(itertools.islice(itertools.cycle([None, swap]), 4)):
            await sidestream.save(
                state, tmp_path / str(number), stager=stager, options=sidestream.SaveOptions(names=names)
            )
    for number in range(4):
        found = await back(tmp_path / str(number))
        assert_same(found, state if number % 2 == 0 else {"b": state["a"], "a": state["b"]})


async def test_plans_of_saves_with_other_names_and_a_dtype_are_not_confused(tmp_path: Path) -> None:
    """The pattern is compared with the new names, so another tensor is converted."""
    state = {"a": torch.randn(4), "b": torch.randn(4)}
    async with AsyncStager() as stager:
        for number, names in enumerate((None, {"a": "b", "b": "a"})):
            await sidestream.save(
                state,
                tmp_path / str(number),
                stager=stager,
                options=sidestream.SaveOptions(names=names, dtype={"b": BF16}),
            )
    assert_same(await back(tmp_path / "0"), {"a": state["a"], "b": state["b"].to(BF16)})
    assert_same(await back(tmp_path / "1"), {"b": state["a"].to(BF16), "a": state["b"]})


@pytest.mark.parametrize("snapshot", [True, False])
async def test_parts_of_composite_tensors_follow_them_and_keep_their_dtype(snapshot: bool, tmp_path: Path) -> None:
    sparse = torch.eye(4).to_sparse()
    state = {"m": {"sparse": sparse, "dense": torch.randn(3)}, "list": [sparse, torch.ones(2)]}
    names = {"m.sparse": "m.renamed", "list.0": "first"}
    await sidestream.save(
        state, tmp_path / "c", options=sidestream.SaveOptions(names=names, dtype=BF16, streaming=not snapshot)
    )
    found = await back(tmp_path / "c", dtype=torch.float16)
    assert found["m"].keys() == {"renamed", "dense"}
    for one in (found["m"]["renamed"], found["first"]):
        assert one.dtype == torch.float32
        assert torch.equal(one.to_dense(), torch.eye(4))
    assert found["m"]["dense"].dtype == found["list"][1].dtype == torch.float16
    await sidestream.convert(tmp_path / "c", tmp_path / "d", select=["m.*", "first"], names={"first": "last.one"})
    found = await back(tmp_path / "d")
    assert torch.equal(found["last.one"].to_dense(), torch.eye(4))
    with pytest.raises(errors.KeyCollisionError):
        await sidestream.save(
            state, tmp_path / "e", options=sidestream.SaveOptions(names={"m.sparse": "a", "m.dense": "a.values"})
        )
