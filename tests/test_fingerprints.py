"""A plan is used again for tensors with the same fingerprint, found in one pass. Small tensors are copied in runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from states import assert_same

import sidestream
from sidestream._runtime.pauses import pause_point
from sidestream._runtime.rate import RateLimiter
from sidestream._runtime.threads import Stop
from sidestream._runtime.torch_probes import guard_of
from sidestream._staging import AsyncStager, Copies, HostEngine, PlanCache, columns_of, plans
from sidestream.errors import UnsupportedTensorError

MEMORY = bytearray(range(240))


def over(start: int, nbytes: int) -> torch.Tensor:
    """A tensor with a storage of its own at this place of one memory."""
    return torch.frombuffer(MEMORY, dtype=torch.uint8, count=nbytes, offset=start)


WHOLE, SQUARE, WAVE = over(0, 64), over(0, 64).view(torch.float32).view(4, 4), over(0, 64).view(torch.complex64)

# All of the first tensors begin at one address, and most have the same bytes.
LOOKS: dict[str, list[torch.Tensor]] = {
    "bytes": [WHOLE],
    "square": [SQUARE],
    "transposed": [SQUARE.t()],
    "integers": [SQUARE.view(torch.int32)],
    "flat": [SQUARE.view(16)],
    "rows": [SQUARE[:3]],
    "negated": [torch._neg_view(SQUARE)],
    "wave": [WAVE],
    "conjugated": [WAVE.conj()],
    "conjugated and negated": [torch._neg_view(WAVE.conj())],
    "smaller storage": [over(0, 32)],
    "the same bytes of a larger storage": [WHOLE[:32]],
    "behind the beginning": [over(0, 64)[32:]],
    "at the beginning of one as large": [over(32, 64)[:32]],
    "twice": [WHOLE, WHOLE.view(64)],
    "two storages at one address": [WHOLE, over(0, 64)],
    "three, the last two tied": [WHOLE, (other := over(0, 64)), other.view(64)],
    "three, the outer ones tied": [WHOLE, over(0, 64), WHOLE.view(64)],
    "meta": [torch.empty(64, dtype=torch.uint8, device="meta")],
    "none": [],
}


def planned(cache: PlanCache, tensors: Sequence[torch.Tensor], plan: str) -> str:
    def make() -> str:
        pause_point()
        return plan

    return cache.get_for([tensor.data for tensor in tensors], "key", make)


@pytest.fixture(params=["guards", "no guards"])
def compared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no guards":  # as in a version of torch whose guards are not known to work
        monkeypatch.setattr(plans, "guard_of", lambda tensors: None)


def test_this_torch_has_guards() -> None:
    assert guard_of([WHOLE]) is not None


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize("name", LOOKS)
def test_a_plan_is_used_for_what_looks_the_same_and_for_nothing_else(name: str) -> None:
    for other, tensors in LOOKS.items():
        cache = PlanCache()
        assert planned(cache, LOOKS[name], name) == name
        assert planned(cache, tensors, other) == other, f"{other} was taken for {name}"
        assert planned(cache, LOOKS[name], "made anew") == name
        assert cache.made == 1 + (name != other)


@pytest.mark.usefixtures("compared")
def test_a_difference_far_behind_is_found() -> None:
    many = [torch.full((2,), float(number)) for number in range(1000)]
    for place in (0, 255, 256, 511, 999):
        cache, others = PlanCache(), list(many)
        others[place] = torch.zeros(2)
        assert planned(cache, many, "first") == "first"
        assert planned(cache, others, "second") == "second"
        assert planned(cache, many[:place], "third") == "third"
        assert planned(cache, many, "made anew") == "first"


@pytest.mark.usefixtures("compared")
def test_a_storage_that_has_grown_or_moved_is_found() -> None:
    tensor, cache = torch.arange(100.0)[:10], PlanCache()
    assert planned(cache, [tensor], "first") == "first"
    tensor.untyped_storage().resize_(50 * 4)
    assert planned(cache, [tensor], "second") == "second"
    tensor.untyped_storage().resize_(0)
    assert planned(cache, [tensor], "third") == "third"


@pytest.mark.parametrize(
    ("tensors", "numbered"),
    [
        ([WHOLE, over(64, 64)], False),
        ([WHOLE, WHOLE.view(64)], True),
        ([WHOLE, over(0, 64)], True),
        ([WHOLE[:8], over(8, 8), over(64, 9)], False),
        ([WHOLE, torch.zeros(0), over(64, 9)], True),
    ],
    ids=["apart", "tied", "two at one address", "next to each other", "empty"],
)
def test_storages_are_numbered_where_two_may_be_one(tensors: list[torch.Tensor], numbered: bool) -> None:
    quick = plans._QuickFingerprint.of(tensors)
    assert quick is not None
    assert quick.numbered == numbered
    assert quick.matches(tensors)


@pytest.mark.usefixtures("compared")
def test_the_last_few_plans_are_known_and_no_tensor_is_kept() -> None:
    tensors, cache = [torch.zeros(number + 1) for number in range(5)], PlanCache()
    for number, tensor in enumerate(tensors):
        planned(cache, [tensor], str(number))
    assert planned(cache, [tensors[1]], "made anew") == "1"  # and it is the newest now
    planned(cache, [torch.zeros(9)], "another")
    assert planned(cache, [tensors[1]], "made anew") == "1"
    assert planned(cache, [tensors[2]], "made anew") == "made anew"
    gone = [weakref.ref(tensor) for tensor in tensors]
    del tensors, tensor
    gc.collect()
    assert not any(ref() is not None for ref in gone)


# --- copies in runs ---


def filled(sources: list[torch.Tensor], engine: HostEngine, before: Callable[[], object] = lambda: None) -> bytes:
    """The memory that the engine fills with ``sources``, 16 bytes apart."""
    offsets, at = [], 0
    for source in sources:
        offsets.append(at)
        at += source.nbytes + 16
    starts = [s.storage_offset() * s.itemsize if s.is_contiguous() else None for s in sources]
    columns = columns_of(
        offsets, [source.nbytes for source in sources], starts, [0] * len(sources), [None] * len(sources)
    )
    target, reached = torch.full((at + 16,), 7, dtype=torch.uint8), [0]
    before()
    copies = Copies(columns, sources)
    engine.fill(copies, target.data_ptr(), advance=reached.append, pace=RateLimiter(None), stop=Stop())
    assert reached == sorted(reached)
    assert reached[-1] == at - 16
    return bytes(target.tolist())


def expected(sources: list[torch.Tensor]) -> bytes:
    gap = bytes([7] * 16)
    return b"".join(bytes(s.contiguous().view(-1).view(torch.uint8).tolist()) + gap for s in sources) + gap


@pytest.mark.parametrize("threads", [1, 3])
def test_runs_of_small_tensors_beside_others(threads: int) -> None:
    base = torch.randn(1000)
    small = [torch.randn(number % 40 + 1) for number in range(700)]
    tied = [base[number : number + 5] for number in range(100)]
    strided = [torch.randn(6, 5).t(), torch.randn(3, 4).t()]
    large = [torch.randn(100_000), torch.randn(20_000)]
    engine = HostEngine(threads)
    for sources in (small, tied, [*small[:300], *large, *tied, *strided, *small[300:]], [*strided, *large], small[:2]):
        assert filled(sources, engine) == expected(sources)
    engine.close()


def test_a_run_is_not_copied_from_a_storage_that_has_shrunk() -> None:
    sources, engine = [torch.full((8,), float(number)) for number in range(300)], HostEngine(1)
    with pytest.raises(UnsupportedTensorError, match="freed or shrunk"):
        filled(sources, engine, lambda: sources[170].untyped_storage().resize_(16))


def test_a_run_is_copied_from_where_a_storage_has_moved_to() -> None:
    sources, engine = [torch.full((8,), float(number)) for number in range(300)], HostEngine(1)
    data = filled(sources, engine, lambda: sources[170].untyped_storage().resize_(1 << 20))
    assert data == expected(sources)


async def test_small_tensors_that_change_from_save_to_save(tmp_path: Path) -> None:
    """In place, replaced, resized, strided otherwise: each save has what is there."""
    state = {f"t{number}": torch.full((4, 4), float(number)) for number in range(400)}
    async with AsyncStager() as stager:
        for turn in range(6):
            state["t3"].add_(1)
            if turn == 2:
                state["t5"] = torch.full((4, 4), -1.0)
            if turn == 3:
                state["t7"] = state["t8"].t()
            if turn == 4:
                state["t9"] = state["t9"].view(torch.int32)
            if turn == 5:
                state["t8"].resize_(300, 300).fill_(5)
            await sidestream.save(state, tmp_path / str(turn), stager=stager)
            assert_same(state, await (await sidestream.open_checkpoint(tmp_path / str(turn))).state_dict())
        assert stager.plans.made == 5  # only the second save is like the first
