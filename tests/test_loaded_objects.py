"""A loaded object behaves as the saved one: all that torch ships, and classes whose state follows its content. The
counterpart is ``torch.save`` and ``load_state_dict``."""

from __future__ import annotations

import asyncio
import io
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from keywords import for_load
from states import assert_same
from torch import nn
from torch.ao import quantization
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import sidestream
from sidestream import errors
from sidestream._runtime.containers import container_kind, empty_container

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*assuming the intent is to (save|load) in a single process.*"),
    pytest.mark.filterwarnings("ignore"),  # torch deprecates some of the classes
]

OPTIONS: dict[str, dict[str, Any]] = {
    "strict": {},
    "strict=False": {"strict": False},
    "missing": {"allow_missing": True},
    "unexpected": {"allow_unexpected": ["*"]},
    "all": {"allow_missing": "*", "allow_unexpected": True, "allow_cast": True},
    "atomic": {"atomic": True},
}


@dataclass
class Program:
    """Objects, and a step of the program that uses them. It returns what can be observed."""

    objects: dict[str, Any]
    advance: Callable[[int], Any]

    def state_dicts(self) -> dict[str, Any]:
        return {name: one.state_dict() for name, one in self.objects.items()}


def assert_alike(one: Any, other: Any) -> None:
    """As ``assert_same``, and all containers have the same types."""
    assert_same(one, other)
    assert types_in(one) == types_in(other)


def types_in(one: Any) -> Any:
    if isinstance(one, Mapping):
        return type(one), getattr(one, "default_factory", None), [types_in(inner) for inner in one.values()]
    return [types_in(inner) for inner in one] if isinstance(one, list | tuple) else type(one)


def batch(number: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return make()


# --- what torch ships ------------------------------------------------------------------------------------------------


def of_module(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Program]:
    """A module that is trained with plain steps."""

    def program() -> Program:
        module = seeded(make)

        def advance(number: int) -> Any:
            module.train()
            module.zero_grad()
            torch.manual_seed(number)
            out = module(batch(number, *(shape or (5, 4))))
            if out.requires_grad:
                out.square().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.01 * parameter.grad)
            module.eval()
            return out.detach(), module(batch(number + 1, *(shape or (5, 4)))).detach()

        return Program({"m": module}, advance)

    return program


def of_optimizer(make: Callable[[Any], torch.optim.Optimizer], *, sparse: bool = False) -> Callable[[], Program]:
    def program() -> Program:
        module = seeded(lambda: nn.Embedding(6, 4, sparse=True) if sparse else nn.Linear(4, 3, bias=False))
        optimizer = make(module.parameters())

        def advance(number: int) -> Any:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = module(torch.tensor([number % 6, 1]) if sparse else batch(number, 5, 4)).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)
            return module.weight.detach().clone()

        return Program({"model": module, "optimizer": optimizer}, advance)

    return program


def of_scheduler(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[], Program]:
    def program() -> Program:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        scheduler = make(optimizer)

        def advance(number: int) -> Any:
            optimizer.step()
            scheduler.step(*([float(number % 3)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            return optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]

        return Program({"optimizer": optimizer, "scheduler": scheduler}, advance)

    return program


class Doubling:
    """The function of a ``LambdaLR``, with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1.0 / (1 + self.calls)


def averaged() -> Program:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)

    def advance(number: int) -> Any:
        model(batch(number, 5, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        scheduler.step()
        return average.module[0].weight.clone(), int(average.n_averaged), optimizer.param_groups[0]["lr"]

    return Program({"model": model, "average": average, "optimizer": optimizer, "scheduler": scheduler}, advance)


def scaler() -> Program:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def advance(number: int) -> Any:
        scaler.scale((parameter * (float("inf") if number == 1 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return scaler.get_scale()

    return Program({"p": nn.ParameterList([parameter]), "scaler": scaler}, advance)


def of_observer(make: Callable[[], Any]) -> Callable[[], Program]:
    def program() -> Program:
        observer = make()

        def advance(number: int) -> Any:
            observer(batch(number, 5, 4) * (number + 1))
            return observer.calculate_qparams()

        return Program({"m": nn.Sequential(observer)}, advance)

    return program


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2))


OPTIMIZERS: dict[str, Callable[[], Program]] = {
    name: of_optimizer(kind)
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
}
OPTIMIZERS |= {
    "SparseAdam": of_optimizer(torch.optim.SparseAdam, sparse=True),
    "SGD, momentum": of_optimizer(lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9)),
    "Adam, amsgrad": of_optimizer(lambda own: torch.optim.Adam(own, amsgrad=True)),
    "RMSprop, centered": of_optimizer(lambda own: torch.optim.RMSprop(own, momentum=0.9, centered=True)),
    "LBFGS, strong Wolfe": of_optimizer(lambda own: torch.optim.LBFGS(own, line_search_fn="strong_wolfe")),
}

SCHEDULERS: dict[str, Callable[[], Program]] = {
    name: of_scheduler(make)
    for name, make in {
        "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, Doubling()),
        "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, Doubling()),
        "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
        "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 5]),
        "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
        "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
        "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=6, power=2.0),
        "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
        "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
        "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
        "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=12),
        "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.MultiStepLR(o, [4])]
        ),
        "SequentialLR": lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.MultiStepLR(o, [1, 2])], milestones=[4]
        ),
    }.items()
}

MODULES: dict[str, Callable[[], Program]] = {
    "BatchNorm": of_module(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))),
    "InstanceNorm": of_module(lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), 2, 4, 5),
    "Dropout": of_module(lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout())),
    "MultiheadAttention": of_module(lambda: nn.TransformerEncoderLayer(4, 2, 8), 2, 5, 4),
    "weight_norm": of_module(lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)))),
    "weight_norm, parametrized": of_module(lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)))),
    "spectral_norm": of_module(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 3)))),
    "spectral_norm, parametrized": of_module(lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)))),
    "orthogonal": of_module(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 3)))),
    "lazy": of_module(lazy),
    "ParameterDict": of_module(lambda: WithParameters()),
    "FakeQuantize": of_module(lambda: nn.Sequential(nn.Linear(4, 3), quantization.FakeQuantize())),
    "FusedMovingAvgObsFakeQuantize": of_module(lambda: nn.Sequential(quantization.FusedMovingAvgObsFakeQuantize())),
    "averaged": averaged,
    "GradScaler": scaler,
}
MODULES |= {
    name: of_observer(getattr(quantization, name))
    for name in (
        "HistogramObserver",
        "MinMaxObserver",
        "MovingAverageMinMaxObserver",
        "MovingAveragePerChannelMinMaxObserver",
        "PerChannelMinMaxObserver",
    )
}


class WithParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ParameterDict({"a": torch.ones(4), "b": torch.zeros(4)})
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * self.by_name["a"] + self.by_name["b"] * self.seen


# --- classes whose state follows its content -------------------------------------------------------------------------


class Extra(nn.Linear):
    """The extra state grows with each forward, as the scaling factors of FP8 do."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.extra = torch.empty(0, dtype=torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extra = torch.cat([self.extra, torch.tensor([len(self.extra)], dtype=torch.uint8)])
        return super().forward(x) + float(self.extra.sum())

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class ExtraDict(Extra):
    """Values and tensors in containers."""

    def get_extra_state(self) -> Any:
        return {"history": [{"amax": one} for one in self.extra], "counts": Counter(self.extra.tolist()), "none": None}

    def set_extra_state(self, state: Any) -> None:
        assert type(state["counts"]) is Counter or not state["counts"]
        assert sum(state["counts"].values()) == len(state["history"])
        self.extra = torch.tensor([int(one["amax"]) for one in state["history"]], dtype=torch.uint8)


class LazyBuffer(nn.Module):
    """A buffer that only exists after the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = x.detach().abs().amax(0)
        self.scale = most if self.scale is None else torch.maximum(self.scale, most)
        return x / self.scale

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if prefix + "scale" in state_dict:
            self.scale = torch.empty_like(state_dict[prefix + "scale"])
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Hooked(nn.Module):
    """A hook that transposes what was saved, by a name that the checkpoint always has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_state_dict_post_hook(lambda module, state, prefix, meta: self._turn(state, prefix))
        self.register_load_state_dict_pre_hook(lambda module, state, prefix, *rest: self._turn(state, prefix))

    def _turn(self, state: dict[str, Any], prefix: str) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Metric:
    """As a metric of torchmetrics: states that are tensors or growing lists, and counts by name."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"total": torch.tensor(0), "batches": [], "best": None}
        self.state["seen"] = Counter()
        self.state["groups"] = defaultdict(list)
        self.state["order"] = OrderedDict()

    def update(self, number: int) -> Any:
        state = self.state
        state["total"] = state["total"] + number
        state["batches"].append(batch(number, number % 3 + 1))
        state["best"] = max(state["best"] or 0.0, float(state["batches"][-1].max()))
        state["seen"].update([number % 2, "x"])
        state["groups"][str(number % 2)].append({"n": number})
        state["order"][f"k{number}"] = torch.tensor(number)
        if len(state["order"]) > 2:
            state["order"].move_to_end(next(iter(state["order"])))
        return (
            state["seen"].most_common(),
            torch.cat(state["batches"]),
            state["groups"]["new" if number > 3 else "0"],
            list(state["order"]),
        )

    def state_dict(self) -> Any:
        return dict(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.state = {**state}


class Replay:
    """A buffer that grows, inside the state of a trainer together with what uses it."""

    def __init__(self) -> None:
        self.model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.rows = torch.empty(0, 4)
        self.pair = (torch.zeros(1), {"n": 0})

    def update(self, number: int) -> Any:
        self.rows = torch.cat([self.rows, batch(number, 3, 4)])
        self.model(self.rows).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.pair = (self.pair[0] + 1, {"n": self.pair[1]["n"] + 1})
        return self.model(self.rows).detach(), self.pair

    def state_dict(self) -> Any:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rows": self.rows,
            "pair": self.pair,
        }

    def load_state_dict(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rows, self.pair = state["rows"], state["pair"]


def of_updates(make: Callable[[], Any]) -> Callable[[], Program]:
    def program() -> Program:
        one = seeded(make)
        return Program({"o": one}, one.update)

    return program


CONTENTS: dict[str, Callable[[], Program]] = {
    "extra state": of_module(lambda: nn.Sequential(nn.Linear(4, 4), Extra())),
    "extra state, containers": of_module(lambda: nn.Sequential(nn.Linear(4, 4), ExtraDict())),
    "lazy buffer": of_module(lambda: nn.Sequential(nn.Linear(4, 4), LazyBuffer())),
    "hook that transposes": of_module(lambda: nn.Sequential(nn.Linear(4, 4), Hooked())),
    "metric": of_updates(Metric),
    "replay": of_updates(Replay),
}

PROGRAMS = {**OPTIMIZERS, **SCHEDULERS, **MODULES, **CONTENTS}


def test_nothing_that_torch_ships_is_left_out() -> None:
    schedulers = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.endswith("LRScheduler")
    }
    assert schedulers <= SCHEDULERS.keys()
    assert {"AdamW", "LBFGS", "Adafactor"} <= OPTIMIZERS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_loaded_object_behaves_as_the_saved_one(name: str, tmp_path: Path) -> None:
    make = PROGRAMS[name]
    source = make()
    for number in range(3):
        source.advance(number)
    file = io.BytesIO()
    torch.save(source.state_dicts(), file)
    await sidestream.save(dict(source.objects), tmp_path / "c")
    targets = {f"fresh, {option}": (make(), keywords) for option, keywords in OPTIONS.items()}
    for option in ("strict", "strict=False"):
        used = make()
        for number in range(5, 9):
            used.advance(number)
        targets[f"used, {option}"] = (used, OPTIONS[option])
    for target, keywords in targets.values():
        report = await sidestream.load(dict(target.objects), tmp_path / "c", **for_load(**keywords))
        assert (report.missing, report.unexpected, report.cast) == ((), (), ())
    file.seek(0)
    expected = make()
    saved = torch.load(file, weights_only=False)
    for key, one in expected.objects.items():
        one.load_state_dict(saved[key])
    for target, _ in targets.values():
        assert_alike(expected.state_dicts(), target.state_dicts())
    for number in range(3, 8):
        seen = expected.advance(number)
        for target, _ in targets.values():
            assert_same(seen, target.advance(number), name)
    for target, _ in targets.values():
        assert_alike(expected.state_dicts(), target.state_dicts())


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SCHEDULERS, *MODULES, "extra state", "lazy buffer"])
async def test_from_a_checkpoint_of_stock_dcp(name: str, tmp_path: Path) -> None:
    """It has strings as keys, and no empty dicts. The types of containers are those of the target."""
    source, target = PROGRAMS[name](), PROGRAMS[name]()
    for number in range(3):
        source.advance(number)
    dcp.save(source.state_dicts(), checkpoint_id=tmp_path / "c", no_dist=True)
    await sidestream.load(dict(target.objects), tmp_path / "c", strict=False)
    for number in range(3, 6):
        assert_same(source.advance(number), target.advance(number), name)


async def test_restore_and_blocking_calls(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return PROGRAMS["AdamW"]().objects | {"scheduler": PROGRAMS["SequentialLR"]().objects["scheduler"]}

    source = PROGRAMS["AdamW"]()
    source.advance(0)
    state = source.objects | {"scheduler": make()["scheduler"]}
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        await checkpoints.save(state, step=1)
        target = make()
        assert await checkpoints.restore(target, strict=False) == 1
    assert_alike(source.objects["optimizer"].state_dict(), target["optimizer"].state_dict())
    target = make()
    await asyncio.to_thread(sidestream.blocking.load, target, tmp_path / "run" / "step-1", strict=False)
    assert_alike(source.objects["optimizer"].state_dict(), target["optimizer"].state_dict())
    assert_alike(state["scheduler"].state_dict(), target["scheduler"].state_dict())


# --- what is still compared, and what modules are given ---------------------------------------------------------------


def wide(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(width), Extra(), LazyBuffer())


@pytest.mark.parametrize("options", [{}, {"strict": False}])
async def test_the_shapes_of_a_module_are_compared_before_anything_is_changed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """Also in a module some parts of which take any size."""
    await sidestream.save({"m": wide(3)}, tmp_path / "c")
    target = wide(2)
    before = {name: one.clone() for name, one in target.state_dict().items()}
    with pytest.raises(errors.ShapeMismatchError) as raised:
        await sidestream.load({"m": target}, tmp_path / "c", **options)
    assert len(raised.value.offenders) == 4
    assert all(line.startswith("m.1.") for line in raised.value.offenders)
    assert_same(before, dict(target.state_dict()))


async def test_names_of_a_module_are_compared_before_anything_is_changed(tmp_path: Path) -> None:
    await sidestream.save({"m": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(1, 1))}, tmp_path / "c")
    target = nn.Sequential(nn.Linear(4, 4), Extra())
    before = target[0].weight.clone()
    with pytest.raises(errors.StateMismatchError) as raised:
        await sidestream.load({"m": target}, tmp_path / "c")
    assert sorted(line.split(":")[0] for line in raised.value.offenders) == [
        "m.1._extra_state",
        "m.2.bias",
        "m.2.weight",
    ]
    assert torch.equal(target[0].weight, before)
    target[1].extra = torch.ones(2, dtype=torch.uint8)
    report = await sidestream.load({"m": target}, tmp_path / "c", strict=False)
    assert (report.missing, report.unexpected) == (("m.1._extra_state",), ("m.2.weight", "m.2.bias"))
    assert target[1].extra.tolist() == [1, 1]


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"atomic": True}])
async def test_a_module_that_renames_what_was_saved(options: dict[str, Any], tmp_path: Path) -> None:
    source = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 3))
    await sidestream.save({"m": source}, tmp_path / "c")
    target = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 3))
    report = await sidestream.load({"m": target}, tmp_path / "c", **for_load(**options))
    assert (report.missing, report.unexpected) == ((), ())
    x = batch(1, 5, 4)
    assert torch.equal(source(x), target(x))


class Swapped(nn.Module):
    """Code of its own that exchanges what was saved of two parameters, in a version with other names for them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        a, b = f"{prefix}a", f"{prefix}b"
        state_dict[a], state_dict[b] = state_dict[b], state_dict[a]
        super()._load_from_state_dict(state_dict, prefix, *rest)


async def test_code_of_a_module_gets_other_memory_than_its_own(tmp_path: Path) -> None:
    source, target = nn.Sequential(Swapped()), nn.Sequential(Swapped())
    await sidestream.save({"m": source}, tmp_path / "c")
    await sidestream.load({"m": target}, tmp_path / "c")
    assert torch.equal(target[0].a, source[0].b)
    assert torch.equal(target[0].b, source[0].a)


async def test_names_that_code_of_a_module_leaves_are_compared_with_the_patterns(tmp_path: Path) -> None:
    await sidestream.save(
        {"m": {"0.scale": torch.ones(4), "0.more": torch.ones(1), "1.weight": torch.ones(1)}}, tmp_path
    )
    target = nn.Sequential(LazyBuffer())
    for options in ({"allow_unexpected": "m.1.*"}, {"allow_missing": True}):
        with pytest.raises(errors.SidestreamError, match=r"m\.0\.more|m\.1\.weight"):
            await sidestream.load({"m": target}, tmp_path, **options)
    report = await sidestream.load({"m": target}, tmp_path, allow_unexpected="m.*")
    assert set(report.unexpected) == {"m.0.more", "m.1.weight"}
    assert target[0].scale.tolist() == [1.0] * 4


class Fields:
    """An object that expects two keys."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def state_dict(self) -> Any:
        return dict(self.fields)

    def load_state_dict(self, state: Any) -> None:
        self.fields = {key: state[key] for key in self.fields}


async def test_a_key_of_an_object_of_which_nothing_was_saved_may_stay(tmp_path: Path) -> None:
    await sidestream.save({"o": Fields(a={"x": 1}, n=None)}, tmp_path / "c")
    with pytest.raises(errors.LoadStateDictError, match="KeyError: 'b'"):
        await sidestream.load({"o": Fields(a={}, b=torch.ones(2), n=1)}, tmp_path / "c")
    target = Fields(a={"x": 0, "y": 2}, b={"k": torch.ones(2)}, n=torch.ones(3))
    report = await sidestream.load({"o": target}, tmp_path / "c", allow_missing="o.*")
    assert report.missing == ("o.b.k",)
    assert_same(target.fields, {"a": {"x": 1}, "b": {"k": torch.ones(2)}, "n": None})


async def test_tensors_of_an_object_that_fit_are_read_in_place(tmp_path: Path) -> None:
    await sidestream.save({"o": Fields(fits=torch.ones(3), grown=torch.ones(4), cast=torch.ones(2))}, tmp_path / "c")
    fits, grown = torch.zeros(3), torch.zeros(2)
    target = Fields(fits=fits, grown=grown, cast=torch.zeros(2).double())
    with pytest.raises(errors.DtypeMismatchError, match=r"o\.cast: dtype float64 in the target, float32 saved"):
        await sidestream.load({"o": target}, tmp_path / "c")
    report = await sidestream.load({"o": target}, tmp_path / "c", allow_cast=True)
    assert report.cast == ("o.cast",)
    assert target.fields["fits"] is fits
    assert fits.tolist() == [1.0] * 3
    assert target.fields["grown"].tolist() == [1.0] * 4
    assert not grown.any()


async def test_parts_of_a_module_in_a_wrapper_that_is_not_in_the_names(tmp_path: Path) -> None:
    source, target = (checkpoint_wrapper(nn.Sequential(ExtraDict())) for _ in range(2))
    source(batch(1, 5, 4))
    await sidestream.save({"m": source}, tmp_path / "c")
    await sidestream.load({"m": target}, tmp_path / "c")
    assert_alike(target.state_dict(), source.state_dict())


@pytest.mark.parametrize("stock", [False, True])
async def test_tensors_of_an_object_that_share_memory_in_the_target_alone(stock: bool, tmp_path: Path) -> None:
    weight, window = torch.zeros(3), torch.zeros(8)
    state = {"weight": torch.ones(3), "object": Fields(a=torch.full((3,), 2.0), b=torch.full((3,), 3.0))}
    state["object"].fields |= {"first": torch.full((6,), 4.0), "last": torch.full((6,), 5.0)}
    saved = {"weight": state["weight"], "object": state["object"].state_dict()}
    if stock:
        await asyncio.to_thread(dcp.save, saved, checkpoint_id=tmp_path / "c")
    else:
        await sidestream.save(state, tmp_path / "c")
    target = Fields(a=weight, b=weight[:], first=window[:6], last=window[2:])
    await sidestream.load({"weight": weight, "object": target}, tmp_path / "c")
    assert weight.tolist() == [1.0] * 3
    assert_same(target.fields, state["object"].fields)


class Later:
    """An object whose state has the containers only later."""

    def __init__(self) -> None:
        self.content: Any = {}

    def state_dict(self) -> Any:
        return {"content": self.content}

    def load_state_dict(self, state: Any) -> None:
        self.content = state["content"]


CONTAINERS: dict[str, Any] = {
    "counts": Counter({1: 2, "y": 3}),
    "lists": defaultdict(list, {"k": [{"t": torch.ones(1)}], "tensors": [torch.ones(2)]}),
    "deep": [{"of counts": defaultdict(Counter, {"q": Counter({2: 1})})}],
    "empty": [defaultdict(int), {"o": OrderedDict()}],
    "order": OrderedDict(b=1, a=OrderedDict(x=torch.ones(1))),
    "plain": {"d": {1: 2}},
    "tuple": (1, OrderedDict(a=1)),
    "none": defaultdict(None, a=1),
}


@pytest.mark.parametrize("names", [None, lambda name: name])
async def test_containers_that_the_fresh_object_does_not_have(names: Any, tmp_path: Path) -> None:
    """Their types were saved. With other names they cannot be found again."""
    source, target = Later(), Later()
    source.content = CONTAINERS
    await sidestream.save({"list": [{"o": source}], "own": CONTAINERS}, tmp_path / "c")
    await sidestream.load({"list": [{"o": target}]}, tmp_path / "c", options=sidestream.LoadOptions(names=names))
    assert_same(CONTAINERS, target.content)
    if names is None:
        assert_alike(CONTAINERS, target.content)
        target.content["lists"]["new"].append(1)
        assert target.content["counts"].most_common(1) == [("y", 3)]
    read = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict()
    assert type(read["own"]["counts"]) is type(read["list"][0]["o"]["content"]["counts"]) is dict
    stock: dict[str, Any] = {"own": {"counts": Counter({1: 0, "y": 0})}}
    dcp.load(stock, checkpoint_id=tmp_path / "c", no_dist=True)
    assert stock["own"]["counts"] == Counter({1: 0, "1": 2, "y": 3}), "DCP has strings as keys"


async def test_containers_are_kept_by_a_conversion(tmp_path: Path) -> None:
    source, target = Later(), Later()
    source.content = CONTAINERS
    await sidestream.save({"o": source, "other": source}, tmp_path / "c")
    await sidestream.convert(tmp_path / "c", tmp_path / "d", select="o.*")
    await sidestream.load({"o": target}, tmp_path / "d")
    assert_alike(target.content, CONTAINERS)


@pytest.mark.parametrize(
    "kind", ["Counter.update", "defaultdict of object", "defaultdict of eval", "os.system", "", "defaultdict of "]
)
def test_a_file_names_no_other_container(kind: str) -> None:
    assert empty_container(kind) is None


def test_containers_that_only_code_can_make_are_not_named() -> None:
    with_metadata = nn.Linear(1, 1).state_dict()
    for value in ({}, with_metadata, defaultdict(lambda: 0), type("Own", (OrderedDict,), {})()):
        assert container_kind(value) is None


# --- the caller's own containers --------------------------------------------------------------------------------------


async def test_a_container_in_the_place_of_one_value(tmp_path: Path) -> None:
    await sidestream.save({"history": [{"loss": 1.0}, {"loss": 0.5}], "t": torch.ones(2), "n": 1}, tmp_path / "c")
    for start in ([], None, {}, torch.ones(2), 3):
        with pytest.raises(errors.KindMismatchError) as raised:
            await sidestream.load({"history": start}, tmp_path / "c")
        (line,) = raised.value.offenders
        assert "a container in the checkpoint (history.0.loss, history.1.loss)" in line
        assert 'open_checkpoint(url).state_dict(select="history.*") reads it' in line
    read = await (await sidestream.open_checkpoint(tmp_path / "c")).state_dict(select="history.*")
    assert read == {"history": [{"loss": 1.0}, {"loss": 0.5}]}
    report = await sidestream.load({"history": []}, tmp_path / "c", strict=False)
    assert report.missing == ("history",)
    with pytest.raises(errors.KindMismatchError, match=r"put torch\.empty\(\(2,\), dtype=torch\.float32\) there"):
        await sidestream.load({"t": None}, tmp_path / "c")
    with pytest.raises(errors.KindMismatchError, match="put None there"):
        await sidestream.load({"n": torch.ones(1)}, tmp_path / "c")
