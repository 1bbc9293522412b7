"""A plan that is known is used for what looks the same, and for nothing else; what is said about a checkpoint is the
same either way."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from states import assert_same

import sidestream
from sidestream._format.dcp import Described
from sidestream._format.manifest import parse_manifest, write_manifest
from sidestream._format.records import Manifest
from sidestream._format.shard import BlockSums
from sidestream._layout.save_layout import SavePlan
from sidestream._layout.structure import outline_of
from sidestream._runtime.torch_probes import lazy_bits
from sidestream._staging import PlanCache, capture
from sidestream.options import Digest

ONE = torch.arange(6, dtype=torch.float32)
TWO = torch.arange(6, dtype=torch.float32) + 10
WAVE = torch.arange(6) * torch.tensor(1 + 2j)

# Side by side what is easily taken for the same.
STATES: dict[str, dict[Any, Any]] = {
    "flat": {"a": ONE, "b": TWO},
    "swapped": {"b": ONE, "a": TWO},
    "one key": {1: ONE, "b": TWO},
    "true key": {True: ONE, "b": TWO},
    "text key": {"1": ONE, "b": TWO},
    "none key": {None: ONE, "b": TWO},
    "zero": {0.0: ONE, "b": TWO},
    "minus zero": {-0.0: ONE, "b": TWO},
    "nested": {"a": {"b": ONE, "c": TWO}},
    "nested otherwise": {"a": {"b": ONE}, "c": TWO},
    "list": {"a": [ONE, TWO]},
    "dict like a list": {"a": {0: ONE, 1: TWO}},
    "list in a list": {"a": [[ONE], TWO]},
    "tuple": {"a": (ONE, TWO)},
    "named by numbers": {"a": OrderedDict([("0", ONE), ("1", TWO)])},
    "value first": {"v": 1, "a": ONE, "b": TWO},
    "value last": {"a": ONE, "b": TWO, "v": 1},
    "another value": {"a": ONE, "b": TWO, "v": "text"},
    "empty dict": {"a": ONE, "b": TWO, "v": {}},
    "empty list": {"a": ONE, "b": TWO, "v": []},
    "list of values": {"a": ONE, "b": TWO, "v": [1, [2, None]]},
    "values only": {"v": [1, 2], "w": {"x": 0.5}},
    "tied": {"a": ONE, "b": ONE, "v": {"x": 2}},
    "set": {"a": ONE, "v": {1, 2}},
    "complex": {"a": WAVE},
    "conjugated": {"a": WAVE.conj()},
    "negated": {"a": torch._neg_view(WAVE)},
    "both": {"a": torch._neg_view(WAVE).conj()},
    "next to each other": {"a": WAVE, "b": WAVE.conj(), "c": torch._neg_view(WAVE), "d": WAVE},
    "empty tensor": {"a": ONE[:0], "b": TWO},
    "strided": {"a": ONE[::2], "b": TWO},
    "part": {"a": ONE[:3], "b": TWO},
}


@pytest.mark.parametrize("digest", [None, "blake3"])
async def test_one_stager_for_states_that_look_alike(digest: Digest | None, tmp_path: Path) -> None:
    """Each is saved twice, the second time by the plan of the first, between all the others."""
    async with sidestream.AsyncStager() as stager:
        made = 0
        for turn in range(2):
            for number, (name, state) in enumerate(STATES.items()):
                url = tmp_path / f"{number}-{turn}"
                await sidestream.save(state, url, stager=stager, options=sidestream.SaveOptions(digest=digest))
                found = await (await sidestream.open_checkpoint(url)).state_dict()
                assert_same(state, found)
                assert list(map(repr, found)) == list(map(repr, state)), name
                assert (await sidestream.verify(url)).ok, name
            for state in list(STATES.values())[-2:]:  # the last few are known
                before = stager.plans.made
                await sidestream.save(state, tmp_path / f"again-{turn}-{made}", stager=stager)
                assert stager.plans.made == before
                made += 1


def test_no_two_of_them_have_one_outline() -> None:
    keys = {name: outline_of(capture(state).root).key for name, state in STATES.items()}
    same = {(a, b) for a in keys for b in keys if a < b and keys[a] == keys[b]}
    # These differ in what the fingerprint of the tensors tells, or in a value.
    assert same == {
        ("complex", "conjugated"), ("complex", "negated"), ("both", "complex"),
        ("conjugated", "negated"), ("both", "conjugated"), ("both", "negated"),
        ("another value", "value last"), ("another value", "empty list"), ("another value", "list of values"),
        ("empty list", "value last"), ("empty list", "list of values"), ("list of values", "value last"),
        ("empty tensor", "flat"), ("empty tensor", "part"), ("empty tensor", "strided"), ("flat", "part"),
        ("flat", "strided"), ("part", "strided"),
    }  # fmt: skip


async def test_values_change_and_the_plan_stays(tmp_path: Path) -> None:
    """Also when they take more bytes than before, and the places of all later values move."""
    tensors = {f"t{number}": torch.full((3,), float(number)) for number in range(5)}
    async with sidestream.AsyncStager() as stager:
        for turn, step in enumerate((1, 255, 70_000, 1 << 40, 3)):
            state = {"first": step, **tensors, "between": ["x" * (step % 1000), None], "last": {"lr": 1.0 / step}}
            state["t3"] = tensors["t3"].add_(1)  # in place
            url = tmp_path / str(turn)
            await sidestream.save(state, url, stager=stager)
            assert_same(state, await (await sidestream.open_checkpoint(url)).state_dict())
            assert (await sidestream.verify(url)).ok
        assert stager.plans.made == 1


async def test_values_get_other_names_and_the_plan_stays(tmp_path: Path) -> None:
    """A dict of measurements that grows: the tensors lie where they did, and all names are right."""
    tensors = {f"t{number}": torch.full((3,), float(number)) for number in range(5)}
    async with sidestream.AsyncStager() as stager:
        for turn in range(4):
            measured = {f"loss {number}": 1.0 / (number + 1) for number in range(turn)}
            state = {"measured": measured, **tensors} if turn % 2 else {**tensors, "measured": measured}
            await sidestream.save(state, tmp_path / str(turn), stager=stager)
            assert_same(state, await (await sidestream.open_checkpoint(tmp_path / str(turn))).state_dict())
        assert stager.plans.made == 1


@pytest.mark.parametrize("name", list(STATES))
async def test_the_text_is_that_of_the_entries(name: str, tmp_path: Path) -> None:
    """Line by line: what the template was filled to is what would be written of what is read back."""
    await sidestream.save(STATES[name], tmp_path / "c", metadata={"note": 1})
    (path,) = (tmp_path / "c").glob("manifest-*")
    raw = path.read_bytes()
    manifest = parse_manifest(raw)
    assert isinstance(manifest, Manifest)
    written = b"".join(write_manifest(manifest, torch.__version__))
    assert raw.splitlines()[1:] == written.splitlines()[1:]
    assert Described.of(manifest.entries).manifest(manifest, torch.__version__) == written


async def test_it_is_rendered_in_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    describe_it = SavePlan.describe

    def seen(self: SavePlan, *of: Any) -> Described:
        threads.append(threading.current_thread())
        return describe_it(self, *of)

    monkeypatch.setattr(SavePlan, "describe", seen)
    await sidestream.save(STATES["flat"], tmp_path / "c")
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_other_names_of_files_have_a_template_of_their_own() -> None:
    """On object storage they have the id of the save in them."""
    plan = SavePlan.of(PlanCache(), 1 << 30, capture(STATES["value first"]))
    sums = [BlockSums([b"crcs"] * len(shard.items), [], [0] * len(shard.windows)) for shard in plan.shards]
    texts = []
    for save_id in ("one", "two", "one"):
        described = plan.describe(sums, {name: f"{name}-{save_id}" for name in plan.files})
        texts.append((b"".join(described.lines), b"".join(described.places)))
    assert texts[0] == texts[2] != texts[1]
    assert [part.replace(b"-one", b"-two") for part in texts[0]] == list(texts[1])


def test_what_is_read_conjugated_or_negated_looks_different() -> None:
    plain = torch.arange(6).to(torch.complex64)
    conjugated, negated = plain.conj(), torch._neg_view(plain)
    bits = [lazy_bits(tensor) for tensor in (plain, conjugated, negated, negated.conj(), torch.nn.Parameter(ONE))]
    assert bits[0] == bits[4] == 0
    assert len(set(bits)) == 4
    assert lazy_bits(conjugated.resolve_conj()) == lazy_bits(negated.resolve_neg()) == 0
