"""What is saved comes back: every kind of value and tensor, with and without a template."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from states import SAVED_DTYPES, assert_same, filled, model_and_optimizer, values

import sidestream
from sidestream._layout import save_layout as save_plan

pytestmark = pytest.mark.filterwarnings("ignore:.*ComplexHalf support is experimental.*:UserWarning")


async def through_storage(state: dict[Any, Any], path: Path) -> dict[Any, Any]:
    await sidestream.save(state, path)
    return await (await sidestream.open_checkpoint(path)).state_dict()


VALUES: dict[Any, Any] = values() | {
    "text": "größer\n\ud800",
    "set": {1, 2},
    "list of lists": [[1, 2], [torch.ones(2)], []],
}


async def test_plain_values_keep_type_and_structure(tmp_path: Path) -> None:
    back = await through_storage(VALUES, tmp_path / "c")
    numpy_back, numpy_saved = back.pop("numpy"), VALUES["numpy"]
    assert_same({key: value for key, value in VALUES.items() if key != "numpy"}, back)
    assert [type(value) for value in numpy_back] == [type(value) for value in numpy_saved]
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(numpy_saved, numpy_back, strict=True))


@pytest.mark.parametrize("dtype", SAVED_DTYPES, ids=str)
async def test_every_dtype_and_layout(dtype: torch.dtype, tmp_path: Path) -> None:
    base = filled((6, 5, 4), dtype)
    state = {
        "dense": base,
        "scalar": filled((), dtype),
        "empty": filled((0, 3), dtype),
        "transposed": base.permute(2, 0, 1),
        "strided": base[::2, 1:, ::3],
        "expanded": base[:1].expand(3, 5, 4),
        "large": filled((70_001,), dtype),
    }
    back = await through_storage(state, tmp_path / "c")
    assert_same(state, back)
    target = {name: torch.empty_like(tensor, memory_format=torch.preserve_format) for name, tensor in state.items()}
    await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)


async def test_conjugated_negated_and_gradients(tmp_path: Path) -> None:
    numbers = torch.randn(4, 3, dtype=torch.complex64)
    state = {"conj": numbers.conj(), "neg": numbers.conj().imag, "parameter": torch.nn.Parameter(torch.randn(3))}
    back = await through_storage(state, tmp_path / "c")
    assert torch.equal(back["conj"], numbers.conj())
    assert torch.equal(back["neg"], -numbers.imag)
    target = {"conj": numbers.clone().conj(), "parameter": torch.nn.Parameter(torch.zeros(3))}
    await sidestream.load({**target, "neg": torch.empty(4, 3)}, tmp_path / "c")
    assert torch.equal(target["conj"], numbers.conj())
    assert torch.equal(target["parameter"], state["parameter"])


async def test_tied_tensors_are_one_item_and_tied_again(tmp_path: Path) -> None:
    weight = torch.randn(1000, 100)
    state = {"a": weight, "b": {"c": weight.view(1000, 100)}, "part": weight[10:20]}
    info = await sidestream.save(state, tmp_path / "c")
    assert info.nbytes < 1.2 * weight.nbytes
    back = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    assert back["a"] is back["b"]["c"]
    assert_same(state, back)


async def test_model_and_optimizer_into_fresh_ones(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(seed=1)
    await sidestream.save({"model": model, "optimizer": optimizer, "step": 3}, tmp_path / "c")
    fresh, _ = model_and_optimizer(seed=2)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters(), lr=5.0, amsgrad=True)
    state = {"model": fresh, "optimizer": fresh_optimizer, "step": 0}
    report = await sidestream.load(state, tmp_path / "c")
    assert state["step"] == 3
    assert_same(model.state_dict(), fresh.state_dict())
    assert_same(optimizer.state_dict(), fresh_optimizer.state_dict())
    assert list(fresh_optimizer.state_dict()["state"]) == [0, 1, 2, 3, 4, 5]
    assert "optimizer.state.0.exp_avg" in report.loaded
    assert fresh[3].weight is fresh[0].weight


async def test_stateful_anywhere_gets_its_whole_subtree(tmp_path: Path) -> None:
    class Counter:
        def __init__(self, count: int) -> None:
            self.saved: dict[str, Any] = {"count": count, "history": {"a": torch.arange(count)}, "none": {}}

        def state_dict(self) -> dict[str, Any]:
            return self.saved if self.saved["count"] else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.saved = state

    await sidestream.save({"deep": {"list": [1, Counter(4)]}}, tmp_path / "c")
    fresh = Counter(0)
    await sidestream.load({"deep": {"list": [0, fresh]}}, tmp_path / "c")
    assert_same(fresh.saved, {"count": 4, "history": {"a": torch.arange(4)}, "none": {}})


async def test_rows_read_only_what_they_need(tmp_path: Path) -> None:
    tensor = torch.randn(5000, 300)  # 6 MB: several checksum blocks
    await sidestream.save({"t": tensor, "s": torch.tensor(1)}, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    for rows in (slice(0, 1), slice(1234, 4321), slice(-5, None), slice(10, 10), slice(None)):
        assert torch.equal(await checkpoint.tensor("t", rows=rows), tensor[rows])
    assert checkpoint.info("t").shape == (5000, 300)
    assert checkpoint["s"].dtype == torch.int64
    with pytest.raises(sidestream.errors.InvalidOptionError, match="no step"):
        await checkpoint.tensor("t", rows=slice(0, 10, 2))
    with pytest.raises(sidestream.errors.InvalidOptionError, match="at least one dimension"):
        await checkpoint.tensor("s", rows=slice(0, 1))


async def test_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_plan, "SHARD_BYTES", 1 << 20)
    state = {f"t{index}": torch.randn(30_000 + index) for index in range(40)}
    async with sidestream.AsyncStager(budget_bytes=26 << 20) as stager:  # less than the state: it streams through
        await sidestream.save({**state, "more": torch.randn(6 << 20)}, tmp_path / "c", stager=stager)
    assert len(list((tmp_path / "c").glob("*.distcp"))) > 5
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    await sidestream.load(target, tmp_path / "c")
    assert_same(state, target)


async def test_empty_state(tmp_path: Path) -> None:
    assert await through_storage({}, tmp_path / "c") == {}


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any dtype, dense, permuted, strided or expanded, with any storage offset."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    tensor = filled(shape, draw(st.sampled_from(SAVED_DTYPES)), draw(st.integers(0, 99)))
    for dim, size in enumerate(shape):
        first, step = draw(st.integers(0, size)), draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(first, None, step),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(-1).expand(*tensor.shape, draw(st.integers(1, 3)))
    return tensor.permute(draw(st.permutations(range(tensor.dim()))))


keys = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=6) | st.integers()
states = st.recursive(
    scalars | tensors() | st.tuples(scalars, scalars),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=12,
)


@pytest.fixture(params=["disk", "tmpfs"])
def file_system(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """One that takes direct I/O where the machine has it, and one that never does."""
    if request.param == "disk":
        yield tmp_path
    elif not os.path.ismount("/dev/shm"):
        pytest.skip("no tmpfs at /dev/shm")
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield Path(folder)


# The directory is shared by all examples: each takes another name in it.
on_one_directory = settings(
    max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@on_one_directory
@given(state=st.dictionaries(keys, states, max_size=4))
async def test_random_nested_states(state: dict[Any, Any], file_system: Path) -> None:
    path = file_system / uuid.uuid4().hex
    try:
        await sidestream.save(state, path)
    except sidestream.errors.KeyCollisionError:
        return
    back = await (await sidestream.open_checkpoint(path)).state_dict()
    assert_same(state, back)


@on_one_directory
@given(saved=st.lists(tensors(), min_size=1, max_size=4), data=st.data())
async def test_random_tensors_in_place_and_by_rows(
    saved: list[torch.Tensor], data: st.DataObject, file_system: Path
) -> None:
    """Into targets with strides of their own, whose elements between keep what they have, and a few rows of each."""
    path = file_system / uuid.uuid4().hex
    await sidestream.save({"t": saved}, path)
    around = [filled((*tensor.shape, 2), tensor.dtype, 7) for tensor in saved]
    before = [tensor[..., 1].clone() for tensor in around]
    await sidestream.load({"t": [tensor[..., 0] for tensor in around]}, path)
    assert_same(saved, [tensor[..., 0] for tensor in around])
    assert_same(before, [tensor[..., 1] for tensor in around])
    checkpoint = await sidestream.open_checkpoint(path)
    for index, tensor in enumerate(saved):
        if tensor.dim():
            first = data.draw(st.integers(0, len(tensor)))
            rows = slice(first, data.draw(st.integers(first, len(tensor))))
            assert_same(tensor[rows], await checkpoint.tensor(f"t.{index}", rows=rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
async def test_a_tensor_of_one_element_keeps_its_stride(dtype: torch.dtype, tmp_path: Path) -> None:
    """It is contiguous whatever its stride is, so ``contiguous()`` and ``reshape()`` leave the stride as it is."""

    def one_of(values: torch.Tensor) -> torch.Tensor:
        one = values.to(dtype)[::3][:1]
        assert one.is_contiguous()
        assert one.stride() == (3,)
        return one

    saved, target = one_of(torch.ones(9)), one_of(torch.zeros(9))
    await sidestream.save({"a": saved, "tied": saved.clone(), "inside": (saved,)}, tmp_path / "c")
    state: dict[str, Any] = {"a": target, "tied": target, "inside": (target.clone(),)}
    await sidestream.load(state, tmp_path / "c")
    assert torch.equal(state["a"], saved)
    assert torch.equal(state["inside"][0], saved)


async def test_a_selection_of_a_list_is_a_dict(tmp_path: Path) -> None:
    layers = [{"w": torch.full((2,), float(number)), "n": number} for number in range(3)]
    await sidestream.save({"layers": layers, "more": [[torch.ones(1)]]}, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    found = await checkpoint.state_dict(select=["layers.[12].*", "more.*"])
    assert_same(found, {"layers": {1: layers[1], 2: layers[2]}, "more": [[torch.ones(1)]]})
    assert_same(await checkpoint.state_dict(select="layers.*"), {"layers": layers})
    assert_same(await checkpoint.state_dict(select="layers.[02].*"), {"layers": {0: layers[0], 2: layers[2]}})
    assert_same(await checkpoint.state_dict(select="layers.[01].*"), {"layers": layers[:2]})
