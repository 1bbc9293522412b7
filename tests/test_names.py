"""``names=`` of loads and conversions: the name in the checkpoint of a name in the state dict. And patterns of
names."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from late import late
from states import assert_same

import sidestream
from sidestream import errors
from sidestream._layout.names import new_dtypes, selected

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


@pytest.mark.parametrize("writer", ["sidestream", "dcp"])
@pytest.mark.parametrize(
    ("wrap", "prefix"), [(torch.nn.DataParallel, "module."), (torch.compile, "_orig_mod.")], ids=["parallel", "compile"]
)
@pytest.mark.parametrize("saved_wrapped", [True, False])
async def test_the_call_that_an_error_proposes_loads(
    writer: str, wrap: Any, prefix: str, saved_wrapped: bool, tmp_path: Path
) -> None:
    source, target = model(1), model(2)
    state = {"model": (wrap(source) if saved_wrapped else source).state_dict(), "epoch": 3}
    if writer == "dcp":
        dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    else:
        await sidestream.save(state, tmp_path / "c")
    for make in (lambda one: one, lambda one: one.state_dict()):
        asked = {"model": make(target if saved_wrapped else wrap(target)), "epoch": 0}
        with pytest.raises(errors.StateMismatchError) as refused:
            await sidestream.load(asked, tmp_path / "c")
        call = re.search(r"names=(sidestream\.\w+\(.*?\)) to the load", str(refused.value))
        assert call is not None, refused.value
        assert prefix in call[1]
        report = await sidestream.load(asked, tmp_path / "c", options=sidestream.LoadOptions(names=eval(call[1])))  # noqa: S307
        assert asked["epoch"] == 3
        assert_same(target.state_dict(), source.state_dict())
        assert (report.not_requested, report.missing, report.unexpected) == ((), (), ())
        assert set(report.loaded) >= {"epoch", f"model.{'' if saved_wrapped else prefix}0.weight"}
        with torch.no_grad():
            target[0].weight.zero_()


async def test_the_moments_of_a_fresh_optimizer_follow_its_names(tmp_path: Path) -> None:
    source = model(1)
    optimizer = torch.optim.AdamW(source.parameters())
    source(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    await sidestream.save({"run": {"model": source, "optimizer": optimizer}}, tmp_path / "c")
    target = model(2)
    fresh = torch.optim.AdamW(target.parameters())
    report = await sidestream.load(
        {"model": target, "optimizer": fresh},
        tmp_path / "c",
        options=sidestream.LoadOptions(names=sidestream.add_prefix("run.")),
    )
    assert_same(target.state_dict(), source.state_dict())
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert "optimizer.state.0.exp_avg" in report.loaded


async def test_tied_tensors_are_read_from_one_name(tmp_path: Path) -> None:
    await sidestream.save({"embed": torch.arange(6.0).reshape(2, 3)}, tmp_path / "c")
    weight = torch.zeros(2, 3)
    report = await sidestream.load(
        {"embed": weight, "head": weight}, tmp_path / "c", options=sidestream.LoadOptions(names={"head": "embed"})
    )
    assert torch.equal(weight, torch.arange(6.0).reshape(2, 3))
    assert report.loaded == ("embed", "head")
    other = {"embed": torch.zeros(2, 3), "head": torch.zeros(2, 3), "a": torch.zeros(1), "b": torch.zeros(1)}
    with pytest.raises(errors.KeyCollisionError, match=r"embed: the name of embed, head\n  x: the name of a, b"):
        await sidestream.load(
            other, tmp_path / "c", options=sidestream.LoadOptions(names={"head": "embed", "a": "x", "b": "x"})
        )
    assert not other["embed"].any()


async def test_names_that_change_places_and_names_that_are_not_there(tmp_path: Path) -> None:
    await sidestream.save({"m": {"a": torch.ones(2), "b": torch.zeros(2), "c": torch.ones(1)}}, tmp_path / "c")
    target = {"m": {"a": torch.full((2,), 5.0), "b": torch.full((2,), 5.0)}}
    swap = {"m.a": "m.b", "m.b": "m.a"}
    with pytest.raises(errors.UnexpectedKeysError, match=r"m\.c: in the checkpoint"):
        await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(names=swap))
    report = await sidestream.load(
        target, tmp_path / "c", allow_unexpected=True, options=sidestream.LoadOptions(names=swap)
    )
    assert (target["m"]["a"].sum(), target["m"]["b"].sum()) == (0, 2)
    assert report.unexpected == ("m.c",)
    with pytest.raises(errors.InvalidOptionError, match="nobody"):
        await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(names={"nobody": "m.a"}))
    with pytest.raises(errors.MissingKeysError, match=r"m\.a: in the target, not in the checkpoint as m\.x"):
        await sidestream.load(
            target, tmp_path / "c", allow_unexpected=True, options=sidestream.LoadOptions(names={"m.a": "m.x"})
        )
    report = await sidestream.load(
        target,
        tmp_path / "c",
        allow_missing=True,
        allow_unexpected=True,
        options=sidestream.LoadOptions(names={"m.a": "m.x"}),
    )
    assert report.missing == ("m.a",)


# --- patterns of names ---

PATTERNS = ["b.*", "a.10", "a.[12]", "c", "*.3", "a.10", "a.?"]


def test_a_selection_takes_what_one_of_its_patterns_matches() -> None:
    names = [f"{letter}.{number}" for letter in "dcba" for number in range(12)] + ["c", "a[1]", "*"]
    expected = [name for name in names if any(fnmatchcase(name, pattern) for pattern in PATTERNS)]
    assert selected(iter(names), PATTERNS, "url") == expected
    assert selected(names, "c", "url") == ["c"]
    with pytest.raises(errors.MissingKeysError, match=r"no name matches e, a\[1\], e\.\*; it has d\.0, "):
        selected(names, ["e", *PATTERNS, "a[1]", "e.*"], "url")


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_pattern_that_matches_gives_the_dtype(order: int) -> None:
    names = [f"{letter}.{number}" for letter in "dcba" for number in range(12)] + ["c"]
    dtypes = [torch.float16, torch.bfloat16, torch.float64]
    dtype = {pattern: dtypes[number % 3] for number, pattern in enumerate(PATTERNS[::order])}
    found = new_dtypes([(name, "float32", (2,)) for name in names], dtype, "url")
    for name in names:
        first = next((one for pattern, one in dtype.items() if fnmatchcase(name, pattern)), torch.float32)
        assert found.get(name, "float32") == str(first).removeprefix("torch.")


def test_names_are_not_compared_with_every_other_name() -> None:
    names = [f"model.layers.{number}.weight" for number in range(2000)]
    assert sum(1 for _ in selected(names, names, "url")) < 10 * len(names)


async def test_a_selection_ends_at_the_deadline(tmp_path: Path) -> None:
    state = {str(number): torch.ones(1) for number in range(2000)}
    await sidestream.save(state, tmp_path / "c")
    opened: list[object] = []

    async def select(timeout_s: float) -> None:
        opened.append(checkpoint := await sidestream.open_checkpoint(tmp_path / "c", timeout_s=timeout_s))
        await checkpoint.state_dict(select=[f"*x{number}" for number in range(100_000)])

    error = await late(select, lambda: opened)
    assert isinstance(error, errors.DeadlineExceededError)
    assert "a system call" not in str(error)  # no thread was left behind
