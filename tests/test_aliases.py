"""Aliases of tensors are used again, because torch releases the GIL when it destroys a tensor."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sidestream import AsyncStager, save
from sidestream._runtime.steps import at_once
from sidestream._staging import aliases
from sidestream._staging.aliases import aliases_of, give_back_aliases
from sidestream._staging.captured import capture
from sidestream._staging.stage import Staging

COUNT = 300


@pytest.fixture(autouse=True)
def _none_yet() -> None:
    aliases._unused.clear()


def made(count: int = COUNT) -> list[torch.Tensor]:
    return [torch.full((3, 2), float(number)) for number in range(count)]


def given_back(count: int = COUNT) -> set[int]:
    mine, _ = aliases_of(made(count))
    kept = set(map(id, mine))
    at_once(give_back_aliases(mine))
    assert not mine
    assert len(aliases._unused) == count
    return kept


def test_aliases_are_used_again_for_tensors_of_any_shape_and_dtype() -> None:
    kept = given_back()
    sources = [torch.arange(number + 4, dtype=torch.int16)[2:].expand(2, -1).t() for number in range(COUNT)]
    sources[7] = torch.nn.Parameter(torch.ones(2, 3, dtype=torch.complex64)).conj()
    mine, _ = aliases_of(sources)
    assert set(map(id, mine)) == kept
    for alias, source in zip(mine, sources, strict=True):
        assert alias is not source
        assert not alias.requires_grad
        assert (alias.dtype, alias.stride(), alias.storage_offset()) == (
            source.dtype,
            source.stride(),
            source.storage_offset(),
        )
        assert torch.equal(alias, source)


def test_an_alias_keeps_the_memory_of_the_call() -> None:
    given_back(1 + COUNT)
    source = torch.nn.Parameter(torch.ones(4))
    (alias,), dense = aliases_of([source])
    assert dense
    source.data = torch.zeros(9)
    assert torch.equal(alias, torch.ones(4))


def test_an_unused_alias_keeps_no_memory() -> None:
    given_back()
    arrays = [np.ones(5, dtype=np.float32) for _ in range(COUNT)]
    ends = [weakref.ref(one) for one in arrays]
    mine, _ = aliases_of(list(map(torch.from_numpy, arrays)))
    arrays.clear()
    assert all(one() is not None for one in ends)
    at_once(give_back_aliases(mine))
    assert all(one() is None for one in ends)


def test_what_others_refer_to_is_not_used_again() -> None:
    sources = made(2 * COUNT)
    mine, _ = aliases_of(sources)
    borrowed = mine[5]
    marked = id(mine[-1])
    mine[-1].note = "mine"  # type: ignore[attr-defined]
    at_once(give_back_aliases(mine))
    unused = set(map(id, aliases._unused))
    assert id(borrowed) not in unused
    assert marked not in unused
    assert unused
    assert torch.equal(borrowed, sources[5])


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param(lambda: torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(lambda: torch.empty(3, device="meta"), id="meta"),
    ],
)
def test_tensors_of_other_kinds_get_an_alias_of_their_own(odd: object) -> None:
    given_back()
    sources = [*made(COUNT - 1), odd()]  # type: ignore[operator]
    mine, dense = aliases_of(sources)
    assert not dense
    assert [one.layout for one in mine] == [one.layout for one in sources]
    assert [one.device for one in mine] == [one.device for one in sources]
    assert torch.equal(mine[3], sources[3])


def test_sparse_tensors_are_not_kept() -> None:
    mine, _ = aliases_of([torch.eye(3).to_sparse() for _ in range(COUNT)])
    at_once(give_back_aliases(mine))
    assert not aliases._unused


def test_the_most_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_MOST", 256)
    mine, _ = aliases_of(made(1000))
    at_once(give_back_aliases(mine))
    assert len(aliases._unused) <= 256


def test_aliases_of_large_memory_are_not_kept() -> None:
    """It would be freed while the GIL is held, if they are the last ones that refer to it."""
    sources = [*made(COUNT - 1), torch.zeros(1 << 20)[:2]]
    mine, _ = aliases_of(sources)
    at_once(give_back_aliases(mine))
    assert not mine
    assert 0 < len(aliases._unused) < COUNT


def test_what_is_there_is_used_for_more_tensors_than_are_kept() -> None:
    kept = given_back()
    sources = made(3 * COUNT)
    mine, dense = aliases_of(sources)
    assert kept < set(map(id, mine))
    assert not dense
    assert all(map(torch.equal, mine, sources))


@pytest.mark.parametrize("count", [3, COUNT - 45, COUNT])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_stage_that_has_ended_refers_to_no_source(
    count: int, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    cleared = threading.Event()
    ended = Staging.part_done

    def look(staging: Staging[Any], error: BaseException | None) -> None:
        cleared.wait(60)
        alive.append(sum(one() is not None for one in owners))
        ended(staging, error)

    monkeypatch.setattr(Staging, "part_done", look)
    if fails:
        monkeypatch.setattr(AsyncStager, "_fill", refuse)
    arrays = [np.ones(5, dtype=np.float32) for _ in range(count)]
    owners = [weakref.ref(one) for one in arrays]
    state = {f"w{number}": torch.from_numpy(one) for number, one in enumerate(arrays)}
    arrays.clear()
    async with AsyncStager() as stager:
        staged = stager.stage(state)
        state.clear()
        cleared.set()
        if fails:
            with pytest.raises(AssertionError):
                await staged
        else:
            (await staged).release()
    assert alive == [0]


async def test_a_save_gives_its_aliases_back(tmp_path: Path) -> None:
    state = {f"w{number}": one for number, one in enumerate(made())}
    async with AsyncStager() as stager:
        await save(state, tmp_path / "a", stager=stager)
        kept = set(map(id, aliases._unused))
        assert len(kept) >= COUNT - 1
        await save(state, tmp_path / "b", stager=stager)
        assert len(kept & set(map(id, aliases._unused))) >= COUNT - 1
    assert all(one.untyped_storage().nbytes() == 0 for one in aliases._unused)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)


def refuse(*_: object) -> torch.Tensor:
    raise AssertionError("torch releases the GIL here")


def test_the_parameters_of_a_plain_module_are_not_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Block()
    monkeypatch.setattr(torch.Tensor, "detach", refuse)
    found = capture({"model": module}).root["model"]
    assert list(found) == list(dict(module.named_parameters()) | dict(module.named_buffers()))
    assert all(type(one) is torch.Tensor and not one.requires_grad for one in found.values())
    assert found["inner.weight"].data_ptr() == module.inner.weight.data_ptr()


class Own(torch.nn.Linear):
    def _save_to_state_dict(self, destination: dict[str, object], prefix: str, keep_vars: bool) -> None:
        assert not keep_vars
        destination[prefix + "own"] = self.weight.detach()


def of_an_own_class(module: Any) -> None:
    module.inner = Own(2, 2)


def with_a_hook(module: Any) -> None:
    module.norm.register_state_dict_pre_hook(lambda _module, _prefix, keep_vars: keep_vars and refuse(torch.ones(1)))


def with_a_method_of_its_own(module: Any) -> None:
    plain = module.inner.state_dict
    module.inner.state_dict = lambda *, keep_vars, **more: plain(keep_vars=keep_vars and refuse(torch.ones(1)), **more)


def with_an_attribute(module: Any) -> None:
    module.inner.weight.mine = 1


class Hiding(Block):
    def named_modules(self, *_: object, **__: object) -> Iterator[tuple[str, torch.nn.Module]]:
        return iter([("", self)])


def with_a_hidden_child(module: Any) -> None:
    module.inner = Hiding()
    module.inner.inner = Own(2, 2)


@pytest.mark.parametrize(
    "change", [of_an_own_class, with_a_hook, with_a_method_of_its_own, with_an_attribute, with_a_hidden_child]
)
def test_other_modules_return_what_they_always_have(change: Callable[[Any], None]) -> None:
    module = Block()
    change(module)
    found = capture({"model": module}).root["model"]
    assert set(found) == set(module.state_dict())
    assert not any(vars(one) for one in found.values())
