"""Byte items of stock DCP: data without being asked, objects of allowed types alone."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from states import assert_same
from stock import stock_load, stock_save

import sidestream
from sidestream import errors

pytestmark = pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*")


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    inner: Point


class Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slots) and (self.a, self.b) == (other.a, other.b)


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: Any


class Names(list[str]):
    def __init__(self, *names: str) -> None:
        super().__init__(names)
        self.note = "kept"

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and list(self) == list(other) and self.note == other.note


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value

    def __getstate__(self) -> int:
        return self.value

    def __setstate__(self, state: int) -> None:
        self.value = state

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value


class Outer:
    @dataclasses.dataclass
    class Inner:
        z: int


OBJECTS: dict[str, tuple[Any, list[type]]] = {
    "dataclass": (Point(1, [2, {"k": (3,)}]), [Point]),
    "inside containers": ({"a": [Point(1), (Point(2),)], ("k", 1): {Colour.RED: Point(3)}}, [Point, Colour]),
    "frozen with slots": (Frozen("f", Point(1)), [Frozen, Point]),
    "slots": (Slots(), [Slots]),
    "enum": ([Colour.RED], [Colour]),
    "named tuple": (Pair(1, "r"), [Pair]),
    "list with attributes": (Names("a", "b"), [Names]),
    "counter": (collections.Counter("abca"), [collections.Counter]),
    "default dict": (collections.defaultdict(list, {"a": [1]}), [collections.defaultdict, list]),
    "deque": (collections.deque([1, 2], maxlen=5), [collections.deque]),
    "setstate": (Custom(5), [Custom]),
    "class inside a class": (Outer.Inner(4), [Outer.Inner]),
    "time": (dt.datetime(2026, 1, 2, 3, tzinfo=dt.UTC), [dt.datetime, dt.timezone, dt.timedelta]),
    "path": (Path("a/b"), [type(Path())]),
    "range": (range(1, 9, 2), [range]),  # which protocol 2 calls xrange
    "ordered dict": (collections.OrderedDict(b=Point(1), a=2), [Point, collections.OrderedDict]),
    "the class itself": ([Point], [Point]),
}


@pytest.mark.parametrize(("value", "allow"), OBJECTS.values(), ids=OBJECTS.keys())
async def test_objects_of_allowed_types(value: Any, allow: list[type], tmp_path: Path) -> None:
    stock_save({"v": (value,), "t": torch.ones(2)}, tmp_path / "c")
    target: dict[str, Any] = {"v": None, "t": torch.zeros(2)}
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=allow))
    assert target["v"] == (value,)
    assert type(target["v"][0]) is type(value)
    assert_same(target["t"], torch.ones(2))
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=allow)
    assert await checkpoint.value("v") == (value,)
    assert (await checkpoint.state_dict())["v"] == (value,)


@pytest.mark.parametrize(("value", "allow"), OBJECTS.values(), ids=OBJECTS.keys())
async def test_refused_by_name_without_it(value: Any, allow: list[type], tmp_path: Path) -> None:
    stock_save({"deep": {"v": (value,)}, "t": torch.ones(2)}, tmp_path / "c")
    names = "|".join(kind.__qualname__.split(".")[0] for kind in allow) + "|getattr"
    for given in ([], [Exception]):
        target: dict[str, Any] = {"deep": {"v": None}, "t": torch.zeros(2)}
        with pytest.raises(errors.UnsafeObjectError, match=rf"deep\.v: .*({names})"):
            await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=given))
        assert target["deep"]["v"] is None
        assert target["t"].count_nonzero() == 0
        checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=given)
        assert torch.equal(await checkpoint.tensor("t"), torch.ones(2)), "what is not asked for does not matter"


async def test_tensors_inside_objects(tmp_path: Path) -> None:
    stock_save({"v": (Point(1, torch.arange(6.0).reshape(2, 3).t()),)}, tmp_path / "c")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c", safe_globals=[Point])
    ((point,),) = [await checkpoint.value("v")]
    assert torch.equal(point.y, torch.arange(6.0).reshape(2, 3).t())


class Evil:
    """Pickles as any call; the calls here leave a file behind when anything careless unpickles them."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


class Fake:
    """Pickles as an object of ``Point`` with whatever it is given."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return Point, *self.reduced


@pytest.mark.parametrize(
    "attack",
    [
        lambda path: Evil(open, (path, "w")),
        lambda path: Point(1, Evil(open, (path, "w"))),
        lambda path: Evil(getattr, (Evil(getattr, (Point, "__init__")), "__globals__")),
        lambda path: Evil(getattr, (Point, "__reduce__")),
        lambda path: Evil(getattr, (Colour, "__class__")),
        lambda path: Evil(Outer, ()),
        lambda path: Evil(eval, (f"open({path!r}, 'w')",)),
    ],
    ids=["open", "open inside", "globals", "method", "dunder of an enum", "another class of the module", "eval"],
)
async def test_an_allowed_type_opens_no_other_door(attack: Any, tmp_path: Path) -> None:
    stock_save({"v": (attack(str(tmp_path / "executed")),)}, tmp_path / "c")
    with pytest.raises(errors.UnsafeObjectError, match="v: "):
        await sidestream.load(
            {"v": None}, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=[Point, Colour, Outer.Inner])
        )
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("reduced", "says"),
    [
        (((),), "Point does not take"),
        (((1,), [1, 2]), "Point does not take"),
        (((1,), (None, {"__class__": 1})), "slot"),
    ],
    ids=["arguments", "state", "dunder slot"],
)
async def test_a_type_that_does_not_take_it(reduced: tuple[Any, ...], says: str, tmp_path: Path) -> None:
    stock_save({"v": (Fake(*reduced),)}, tmp_path / "c")
    with pytest.raises(errors.UnsupportedCheckpointError, match=says) as raised:
        await sidestream.load({"v": None}, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=[Point]))
    assert "v: " in str(raised.value)


async def test_unpickling_is_never_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock_save({"v": (Point(1),), "t": torch.ones(3)}, tmp_path / "c")

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    target: dict[str, Any] = {"v": None, "t": torch.zeros(3)}
    await sidestream.load(target, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=[Point]))
    assert target["v"] == (Point(1),)


@pytest.mark.parametrize("allow", [Point, ["Point"], [type], 3, [print]])
async def test_what_allow_takes(allow: Any, tmp_path: Path) -> None:
    stock_save({"t": torch.ones(3)}, tmp_path / "c")
    for call in (
        lambda: sidestream.load({}, tmp_path / "c", options=sidestream.LoadOptions(safe_globals=allow)),
        lambda: sidestream.open_checkpoint(tmp_path / "c", safe_globals=allow),
    ):
        with pytest.raises(errors.InvalidOptionError, match="safe_globals="):
            await call()


# --- integer keys ---------------------------------------------------------------------------------------------------


class Counts:
    """A ``Stateful`` whose state has integer keys at two levels."""

    def __init__(self, factor: int) -> None:
        self.state: dict[Any, Any] = {0: {1: torch.full((2,), float(factor)), "1x": factor}, 7: factor}

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


async def test_integer_keys_come_back_as_the_template_has_them(tmp_path: Path) -> None:
    state = {"plain": {0: torch.ones(2), 12: {3: 4, "s": 5}}, "stateful": Counts(3), 5: torch.arange(2)}
    stock_save(state, tmp_path / "c")
    target = {
        "plain": {0: torch.zeros(2), 12: {3: 0, "s": 0}},
        "stateful": Counts(1),
        5: torch.zeros(2, dtype=torch.int64),
    }
    await sidestream.load(target, tmp_path / "c")
    assert_same(state["plain"], target["plain"])
    assert_same(state["stateful"].state, target["stateful"].state)  # type: ignore[attr-defined]
    assert_same(state[5], target[5])
    strings = {"plain": {"0": torch.zeros(2), "12": {"3": 0, "s": 0}}}
    await sidestream.load(strings, tmp_path / "c")
    assert list(strings["plain"]) == ["0", "12"]
    assert strings["plain"]["12"] == stock_load({"plain": {"12": {"3": 0, "s": 0}}}, tmp_path / "c")["plain"]["12"]


async def test_restored_by_a_checkpointer(tmp_path: Path) -> None:
    stock_save({"elapsed": dt.timedelta(hours=3)}, tmp_path / "step-4")
    state = {"elapsed": None}
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(errors.UnsafeObjectError, match="timedelta"):
            await checkpoints.restore(state)
        with pytest.raises(errors.InvalidOptionError, match="safe_globals="):
            await checkpoints.restore(state, options=sidestream.LoadOptions(safe_globals=7))  # type: ignore[arg-type]
        assert await checkpoints.restore(state, options=sidestream.LoadOptions(safe_globals=[dt.timedelta])) == 4
    assert state == {"elapsed": dt.timedelta(hours=3)}
