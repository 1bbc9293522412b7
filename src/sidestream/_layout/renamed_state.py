"""A captured state dict with the names and the dtypes of ``names=`` and ``dtype=`` of a save."""

from __future__ import annotations

from dataclasses import replace

import torch

from .._runtime.steps import Steps, collected
from .._runtime.torch_probes import dtype_name, view_key
from .._staging import Captured, Composite
from ..options import Dtypes, Names
from .assemble import assemble
from .flatten import CompositeLeaf, Leaf, leaves_of
from .names import consistent, new_names, renamed_path, target_dtype

__all__ = ["renamed_state"]


def renamed_state(
    captured: Captured, names: Names | None, dtype: Dtypes | None, url: str, *, others: bool
) -> Steps[Captured]:
    """Return ``captured`` with the new name of every leaf, and with the dtypes of tensors that are converted while they
    are staged. The parts of a tensor that consists of others stay below it, and keep their dtypes. ``others``: a
    mapping may contain names of other ranks.

    Raises ``KeyCollisionError``, ``InvalidOptionError``, ``UnsupportedTensorError``, and what ``leaves_of`` raises.
    """
    found = yield from collected(leaves_of(captured.root))
    leaves = {leaf.fqn: leaf for leaf in found if leaf.whole is None}
    root = captured.root
    if names is not None:
        named = yield from new_names(names, leaves, url, identity=lambda fqn: _identity(leaves[fqn]), others=others)
        first: dict[str, Leaf] = {}
        for fqn, new in named.items():
            if new is not None:
                first.setdefault(new, leaves[fqn])  # the first of tied tensors with one name
            yield
        moved = yield from collected(
            (new, renamed_path(leaf.path, leaf.fqn, new, nested=True)) for new, leaf in first.items()
        )
        paths = yield from consistent(dict(moved), url)
        root = yield from assemble((path, _captured(first[new].value)) for new, path in paths.items())
        leaves = first
    dtypes: dict[str, str] = {}
    for fqn, leaf in leaves.items():
        saved = _dtype(leaf.value) if dtype is not None else None
        if saved is not None and (wanted := target_dtype(fqn, saved, dtype)) != saved:
            dtypes[fqn] = wanted
        yield
    return replace(captured, root=root, dtypes=dtypes)


def _captured(value: object) -> object:
    return value.composite if isinstance(value, CompositeLeaf) else value


def _dtype(value: object) -> str | None:
    """Return the dtype of a tensor. None for a value that is not converted."""
    if isinstance(value, torch.Tensor):
        return dtype_name(value.dtype)
    if isinstance(value, Composite) and value.sharding is not None:
        return dtype_name(value.sharding.dtype)
    return None


def _identity(leaf: Leaf) -> object:
    """Return a key that is equal for tied tensors only."""
    value = leaf.value
    if isinstance(value, Composite) and value.sharding is not None:
        return (value.sharding.shape, tuple((part.dtype, *view_key(part)) for part in value.tensors()))
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return (value.dtype, *view_key(value))
    return leaf.fqn
