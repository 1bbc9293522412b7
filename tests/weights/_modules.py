"""Modules of many kinds, with what they are called with, and weights that tell their version."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TENSORS = 12
ELEMENTS = 257


class Tell(nn.Module):
    """Each tensor has its version in every element. The answer is what the tensors say."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(TENSORS):
            kept = torch.zeros(ELEMENTS)
            if number % 2:
                self.register_buffer(f"t{number}", kept)
            else:
                self.register_parameter(f"t{number}", nn.Parameter(kept))

    def forward(self) -> set[float]:
        said: set[float] = set()
        for one in (*self.parameters(), *self.buffers()):
            said.update(one.detach()[[0, -1]].tolist())
        return said


def version(number: int) -> dict[str, torch.Tensor]:
    return {f"t{one}": torch.full((ELEMENTS,), float(number)) for one in range(TENSORS)}


class Tied(nn.Module):
    """One tensor under two names, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.randn(16))
        self.register_buffer("scale", torch.full((16,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(x)) * self.scale + self.shift)


class Scattered(nn.Module):
    """Parameters in lists and dicts, a method of itself as a hook, and a reference to one parameter by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(8)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(8)), "b": nn.Parameter(torch.randn(8))})
        self.also = [self.several[0]]
        self.register_forward_hook(self.add)

    def add(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.named["b"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.also[0] + self.several[1] * self.several[2] + self.named["a"]


class Mixed(nn.Module):
    """Several dtypes, and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(8, 8).to(torch.bfloat16)
        self.wide = nn.Linear(8, 8).to(torch.float64)
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.register_buffer("steps", torch.tensor(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.wide(self.narrow(x.bfloat16()).double()) * self.turn).abs() * self.steps


class Wrapped(nn.Module):
    """A module of the program, which ``compile()`` compiles. It does nothing for the containers of torch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.inner(x)
        return answer


def _first(module: nn.Module, *given: Any) -> torch.Tensor:
    answer = module(*given)
    answer = answer[0] if isinstance(answer, tuple) else answer
    return getattr(answer, "logits", getattr(answer, "last_hidden_state", answer))


def _traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))


def _parametrized(of: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(of(nn.Linear(8, 8)), nn.ReLU(), of(nn.Linear(8, 4))).eval()


def _transformer(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = __import__("transformers")
        config = getattr(transformers, f"{name}Config")(**sizes)
        kind = next(
            f"{name}{end}" for end in ("LMHeadModel", "ForCausalLM", "Model") if hasattr(transformers, name + end)
        )
        return getattr(transformers, kind)(config).eval()

    return build


def floats() -> torch.Tensor:
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def tokens() -> torch.Tensor:
    return torch.arange(8).reshape(2, 4)


def images() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def sequences() -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * 5 * 8).reshape(3, 5, 8)


_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}

KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), floats),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), images),
    "batch norm in training": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train(), images),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 2, 3), nn.GroupNorm(1, 2)), images),
    "lstm": (lambda: nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True), sequences),
    "gru": (lambda: nn.GRU(8, 6, batch_first=True), sequences),
    "lstm with projection": (lambda: nn.LSTM(8, 6, proj_size=3, batch_first=True), sequences),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        ).eval(),
        sequences,
    ),
    "tied": (Tied, tokens),
    "scattered": (Scattered, floats),
    "mixed dtypes": (Mixed, floats),
    "embedding bag": (lambda: nn.EmbeddingBag(12, 8), tokens),
    "weight norm": (lambda: _parametrized(nn.utils.parametrizations.weight_norm), floats),
    "spectral norm": (lambda: _parametrized(nn.utils.parametrizations.spectral_norm), floats),
    "orthogonal": (lambda: _parametrized(nn.utils.parametrizations.orthogonal), floats),
    "traced": (_traced, floats),
    "instance norm with statistics": (
        lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True)).eval(), images,
    ),
    "prelu and bilinear": (lambda: nn.Sequential(nn.Linear(8, 8), nn.PReLU(8), nn.RMSNorm(8)), floats),
    "gpt2": (_transformer("GPT2", vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16), tokens),
    "llama": (_transformer("Llama", num_key_value_heads=1, **_SMALL), tokens),
    "mixtral": (
        _transformer("Mixtral", num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, **_SMALL), tokens,
    ),
    "bert": (_transformer("Bert", max_position_embeddings=16, **_SMALL), tokens),
    "mamba": (_transformer("Mamba", vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4), tokens),
}  # fmt: skip


def build(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = KINDS[kind][0]()
    with torch.no_grad():
        for one in {
            id(one): one for one in module.state_dict().values() if one.is_floating_point() or one.is_complex()
        }.values():
            one.add_(torch.rand_like(one.abs()) * 0.5)
    return module


def answer(module: nn.Module, kind: str) -> torch.Tensor:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _first(module, KINDS[kind][1]()).clone()


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}
