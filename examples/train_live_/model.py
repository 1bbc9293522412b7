"""A byte-level GPT, the text that it learns, and its training step.

Everything here is a pure function of the seed and of the step's number: batches are drawn by step, there is no
dropout, and one thread adds the numbers up in one order. So a run that continues from a checkpoint either ends
with exactly the weights of a run that was never stopped, or the checkpoint has lost something.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEED = 1234
BYTE_VALUES = 256


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of the model and of its batches."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int


FULL = Size(width=512, layers=8, heads=8, context=64, batch=2)
QUICK = Size(width=256, layers=3, heads=4, context=32, batch=2)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on its own residual branch."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.merge = nn.Linear(size.width, size.width)
        self.forward_norm = nn.LayerNorm(size.width)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.narrow(F.gelu(self.widen(self.forward_norm(x))))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.merge(attended.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Predicts the next byte. The embedding also serves as the output layer (tied weights)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTE_VALUES, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTE_VALUES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[-1])
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.positions(positions))))


class Training:
    """The model, its optimizer and one training step, cut in two where a checkpoint cares.

    `compute_gradients` only reads the weights, so it may run while they are being staged.
    `apply_update` changes them, so it has to wait until they have been.
    """

    def __init__(self, size: Size) -> None:
        torch.manual_seed(SEED)
        self.size = size
        self.text = torch.frombuffer(bytearray(english_text()), dtype=torch.uint8)
        self.model = GPT(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)

    def compute_gradients(self, step: int) -> float:
        """Run forward and backward on the batch of `step`; return the loss."""
        inputs, targets = self.batch(step)
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        return loss.item()

    def apply_update(self) -> None:
        self.optimizer.step()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of `step`, the same ones whenever it is asked for."""
        size = self.size
        generator = torch.Generator().manual_seed(SEED + step)
        starts = torch.randint(len(self.text) - size.context, (size.batch, 1), generator=generator)
        window = self.text[starts + torch.arange(size.context + 1)].long()
        return window[:, :-1], window[:, 1:]

    def allocate_optimizer_state(self) -> None:
        """Give a fresh optimizer the tensors that stock `dcp.load` needs as targets.

        An AdamW that has taken no step yet has no moments, and DCP loads only into what is there.
        """
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def digest(self) -> str:
        """Return one SHA-256 over every weight, every moment and every setting of the optimizer."""
        digest = hashlib.sha256()
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        for path, value in leaves(state):
            digest.update(path.encode())
            if isinstance(value, Tensor):
                digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.detach().contiguous().numpy())
            else:
                digest.update(repr(value).encode())
        return digest.hexdigest()


def english_text() -> bytes:
    """Return the text of Python's `help()` topics: real English that every CPython ships."""
    return "\n".join(topics.topics.values()).encode()


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of nested dicts and lists with its path, keys in sorted order."""
    if isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from leaves(tree[key], f"{path}/{key}")
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}/{index}")
    else:
        yield path, tree
