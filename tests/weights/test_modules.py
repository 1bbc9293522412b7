"""Real modules of many kinds answer as a module of the version that the stamp names, and what cannot is refused by
name."""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed.tensor
from _modules import KINDS, Tied, Wrapped, answer, build, floats, weights_of
from torch import nn

import sidestream
from sidestream.errors import UnsupportedModuleError

VERSIONS = 4
pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.jit|deprecated).*")


@pytest.fixture(autouse=True, scope="module")
def _deterministic() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_kind_of_module(kind: str) -> None:
    """Threads read while versions are exchanged. Every answer is that of the version in its stamp."""
    sources = [build(kind, seed) for seed in range(VERSIONS)]
    expected = [answer(module, kind) for module in sources]
    assert not any(torch.allclose(expected[0], other) for other in expected[1:]), "versions could not be told apart"
    given = build(kind, 100)
    before = copy.deepcopy(given.state_dict())
    live = sidestream.Live(given, max_old=2)
    wrong: list[str] = []
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with live.reading() as reading:
                if reading.stamp is None:
                    continue
                found = answer(reading.module, kind)
            seen.add(str(reading.stamp))
            if not torch.allclose(found, expected[int(reading.stamp)], rtol=1e-4, atol=1e-5):
                wrong.append(f"{kind}: an answer with the stamp {reading.stamp}")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for one in readers:
        one.start()
    try:
        for turn in range(3 * VERSIONS):
            await live.install(weights_of(sources[turn % VERSIONS]), stamp=str(turn % VERSIONS), version=turn)
            with live.reading() as reading:
                found = answer(reading.module, kind)
                assert torch.allclose(found, expected[turn % VERSIONS], rtol=1e-4, atol=1e-5), turn
        while not seen:  # on a busy machine the threads may not have had a turn
            assert any(one.is_alive() for one in readers)
            await asyncio.sleep(0.001)
    finally:
        done.set()
        for one in readers:
            one.join()
    assert wrong == []
    assert seen
    for name, tensor in given.state_dict().items():
        assert torch.equal(tensor, before[name]), f"Live changed {name} of the module that it was given"


# --- what is refused ---


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def with_attribute(value: Callable[[nn.Module], Any], name: str = "hidden") -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module = linear()
        object.__setattr__(module[0], name, value(module))
        return module

    return made


def with_view() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("hidden", module.weight.detach().t(), persistent=False)
    return module


def with_hook(hook: Callable[[nn.Module], Callable[..., Any]]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module = linear()
        module[0].register_forward_hook(hook(module))
        return module

    return made


def closure(value: Any) -> Callable[..., Any]:
    def hook(*_: Any) -> None:
        assert value is not None

    return hook


def default(value: Any) -> Callable[..., Any]:
    def hook(*_: Any, kept: Any = value) -> None:
        assert kept is not None

    return hook


class Extra(nn.Linear):
    def get_extra_state(self) -> torch.Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class Shared(nn.Linear):
    def __deepcopy__(self, memo: object) -> Shared:
        return self


class Subclass(torch.Tensor):
    pass


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 8)))


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(linear(), {nn.Linear}, dtype=torch.qint8)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(torch.jit.script(nn.Linear(8, 8)))


def compiled() -> nn.Module:
    module = linear()
    module.compile(backend="eager")
    return module


def lost_buffer() -> nn.Module:
    with torch.device("meta"):
        return Tied()


def patched() -> nn.Module:
    module = linear()
    inner = module[0]
    inner.forward = lambda x: nn.functional.linear(x, inner.weight)  # type: ignore[method-assign]
    return module


def parameter(of: Callable[[], torch.Tensor]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        module = nn.Module()
        module.register_parameter("kept", nn.Parameter(of(), requires_grad=False))
        return nn.Sequential(module)

    return made


def distributed() -> nn.Module:
    tensor = torch.distributed.tensor
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    return tensor.distribute_module(nn.Sequential(nn.Linear(8, 8)), mesh)


class Left(nn.Module):
    """A parameter that the state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        pass


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "tensor as an attribute": (with_attribute(lambda _: torch.ones(3)), "0.hidden is a tensor"),
    "tensor in a list": (with_attribute(lambda _: {"a": [torch.ones(3)]}), "0.hidden['a'][0] is a tensor"),
    "view of a parameter": (with_attribute(lambda m: m[0].weight.detach()[:2]), "0.hidden is a tensor"),
    "weak reference to a parameter": (
        with_attribute(lambda m: weakref.ref(m[1].weight)), "0.hidden (weak) holds 1.weight",
    ),
    "module outside of the tree": (with_attribute(lambda _: [nn.Linear(2, 2)]), "0.hidden[0]"),
    "object that holds a tensor": (
        with_attribute(lambda _: _box(torch.ones(2))), "0.hidden.inside is a tensor",
    ),
    "hook, closure over a parameter": (with_hook(lambda m: closure(m[0].weight)), "closure: value) holds 0.weight"),
    "hook, closure over a module": (with_hook(lambda m: closure(m[1])), "closure: value) holds 1 "),
    "hook, closure over the whole": (with_hook(lambda m: closure(m)), "closure: value) holds the module itself"),
    "hook, closure over a tensor": (with_hook(lambda _: closure(torch.ones(2))), "closure: value) is a tensor"),
    "hook, default": (with_hook(lambda m: default(m[0].bias)), "holds 0.bias"),
    "hook, partial": (with_hook(lambda m: functools.partial(closure(1), closure(m[0]))), "holds 0 "),
    "patched forward": (patched, "0.forward (closure: inner) holds 0 "),
    "weight norm by a hook": (old_weight_norm, "0.weight is a tensor|cannot copy"),
    "quantized": (quantized, "state_dict\\(\\) makes"),
    "script": (scripted, "0 is a ScriptModule"),
    "view of weights": (with_view, "hidden is a view of weights"),
    "torch.compile": (lambda: torch.compile(linear(), backend="eager"), "prepare="),
    "compiled in place": (compiled, "prepare="),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight has no shape yet"),
    "extra state": (lambda: nn.Sequential(Extra(2, 2)), "0._extra_state"),
    "left out of the state dict": (lambda: nn.Sequential(Left()), "0.weight is a parameter that state_dict"),
    "its own deepcopy": (lambda: nn.Sequential(Shared(2, 2)), "0.weight is not copied"),
    "not copyable": (with_attribute(lambda _: threading.Lock()), "cannot copy"),
    "sparse": (parameter(lambda: torch.eye(3).to_sparse()), "0.kept is a torch.sparse_coo"),
    "subclass": (parameter(lambda: torch.ones(3).as_subclass(Subclass)), "0.kept is a "),
    "buffer without values": (lost_buffer, "scale has no values"),
}  # fmt: skip


def _box(inside: Any) -> Any:
    class Box:
        def __init__(self) -> None:
            self.inside = inside

    return Box()


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_exchanged_is_refused_by_name(kind: str) -> None:
    make, text = REFUSED[kind]
    module = make()
    with pytest.raises(
        UnsupportedModuleError, match=text if "|" in text or "\\" in text else _literal(text)
    ) as refused:
        sidestream.Live(module)
    assert refused.value.offenders or "copy" in str(refused.value)


def _literal(text: str) -> str:
    return "".join(f"\\{one}" if one in "()[]'." else one for one in text)


def test_distributed_tensors_are_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedModuleError, match="DTensor"):
            sidestream.Live(distributed())
    finally:
        torch.distributed.destroy_process_group()


async def test_copies_that_are_compiled_are_not_compiled_again() -> None:
    """After the first turn of the copies."""
    module = Wrapped(linear())
    counter = torch._dynamo.testing.CompileCounter()
    live = sidestream.Live(module, prepare=lambda copy: copy.compile(backend=counter))
    compilations = []
    for turn in range(10):
        await live.install({name: torch.full_like(t, turn) for name, t in module.state_dict().items()}, stamp=str(turn))
        with live.reading() as reading, torch.no_grad():
            found = reading.module(floats())
            assert torch.equal(found, linear_of(turn)(floats()))
        compilations.append(counter.frame_count)
    assert 0 < compilations[2] == compilations[-1], compilations
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "prepare",
    [lambda one: one.register_parameter("weight", nn.Parameter(torch.ones(1))), lambda one: one.double()],
    ids=["replaced", "converted"],
)
def test_code_that_prepares_copies_may_not_exchange_their_weights(prepare: Callable[[nn.Module], object]) -> None:
    with pytest.raises(UnsupportedModuleError, match=r"weight was .* prepare="):
        sidestream.Live(nn.Linear(2, 2), prepare=prepare)


def linear_of(value: float) -> nn.Module:
    module = linear()
    with torch.no_grad():
        for one in module.parameters():
            one.fill_(value)
    return module
