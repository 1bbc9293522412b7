"""Writer of a file of ``torch.save``, which holds nested dicts and lists of tensors and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import pickles as p
from .frame import Archive, tensor_pickle
from .records import Node
from .values import pickle_part


class _Leaf(NamedTuple):
    pickled: bytes


class TorchFile:
    """A file. ``tensor``, ``value`` and ``empty`` return its leaves, which ``archive`` takes in nested containers.
    ``sizes`` are the bytes of the payloads by number."""

    empty: object = _Leaf(p.EMPTY_DICT)
    """An empty dict."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._storages = [b""] * len(sizes)  # those of values have the numbers after the payloads

    def tensor(self, dtype: str, shape: tuple[int, ...], number: int) -> object:
        """Return a tensor over the payload ``number``."""
        return _Leaf(tensor_pickle(dtype, shape, str(number)))

    def value(self, node: Node) -> object:
        return _Leaf(pickle_part(node, self._storages))

    def archive(self, tree: dict[Any, Any], align: int) -> Archive:
        """Return the layout of the file. The content of every record begins at a multiple of ``align`` bytes."""
        pickled = b"\x80\x02" + _pickle_tree(tree) + b"."
        return Archive(pickled, self._storages[len(self._sizes) :], self._sizes, align)


def _pickle_tree(node: Any) -> bytes:
    if isinstance(node, _Leaf):
        return node.pickled
    if isinstance(node, dict):
        return p.dict_of((pickle_part(key, []), _pickle_tree(value)) for key, value in node.items())
    return p.list_of(_pickle_tree(value) for value in node)
