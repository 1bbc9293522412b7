"""Look into any checkpoint, ours or stock DCP's, without a model and without an event loop.

python examples/inspect_checkpoint.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch

from sidestream import blocking


def show(url: str) -> None:
    checkpoint = blocking.open_checkpoint(url)
    for fqn, info in checkpoint.items():
        what = repr(checkpoint.value(fqn)) if info is None else f"{info.dtype} {tuple(info.shape)}"
        print(f"{fqn!r:32} {what}")  # as repr, because a name can hold control characters of a terminal


def main() -> None:
    if len(sys.argv) > 1:
        show(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as directory:
        model = torch.nn.Linear(8, 4)
        blocking.save({"model": model, "epoch": 3, "name": "small"}, f"{directory}/checkpoint")
        show(f"{directory}/checkpoint")
        rows = blocking.open_checkpoint(f"{directory}/checkpoint").tensor("model.weight", rows=slice(0, 2))
        print("first two rows equal:", torch.equal(rows, model.weight[:2]))


if __name__ == "__main__":
    main()
