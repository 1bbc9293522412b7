"""Writers of safetensors: header, index, and the division of tensors among files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .._format.safetensors import DTYPES, PREFIX_BYTES, STAMP
from ..errors import UnsupportedTensorError

ALIGN_BYTES = 8

_DTYPE_NAMES = {dtype: spelled for spelled, dtype in DTYPES.items()}
"""The names of the dtypes of torch in the format."""


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor to write. ``dtype`` is the name in torch."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


N = TypeVar("N", bound=Named)


def header_of(tensors: Sequence[Named], aliases: Mapping[str, str]) -> bytes:
    """Return everything before the first payload. Payloads follow without gaps. ``aliases`` are further names of
    tensors. They are written as the safetensors package writes tied tensors that it leaves out. Raises
    ``UnsupportedTensorError``."""
    here = {one.fqn for one in tensors} if aliases else ()
    others = {other: name for other, name in aliases.items() if name in here}
    content: dict[str, object] = {"__metadata__": {**STAMP, **others, **STAMP}}  # the stamp comes first
    position = 0
    for one in tensors:
        spelled = _DTYPE_NAMES.get(one.dtype)
        if spelled is None:
            raise UnsupportedTensorError(f"{one.fqn}: safetensors have no dtype {one.dtype}; leave it out with select=")
        shape = list(one.shape)
        if spelled == "F4" and shape:
            shape[-1] *= 2  # the header counts the halves of each element
        content[one.fqn] = {"dtype": spelled, "shape": shape, "data_offsets": [position, position + one.nbytes]}
        position += one.nbytes
    raw = json.dumps(content, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % ALIGN_BYTES)
    return len(raw).to_bytes(PREFIX_BYTES, "little") + raw


def shards_of_sizes(tensors: Iterable[N], shard_bytes: int | None) -> list[list[N]]:
    """Divide the tensors among files, in their order. In a file, tensors whose size would leave the payloads after them
    unaligned come last."""
    shards: list[list[N]] = [[]]
    nbytes = 0
    for one in tensors:
        if shard_bytes is not None and shards[-1] and nbytes + one.nbytes > shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(one)
        nbytes += one.nbytes
    for shard in shards:
        shard.sort(key=lambda one: -alignment(one.nbytes))
    return shards


def alignment(nbytes: int) -> int:
    """Return the largest power of two, 8 at most, that divides ``nbytes``.

    The size of a payload is a multiple of its element size. So if the payloads of a file are ordered by falling
    ``alignment``, each begins at a multiple of its element size.
    """
    return math.gcd(nbytes, ALIGN_BYTES)


def file_names(count: int) -> list[str]:
    """Return the names that transformers uses."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def index_of(shards: Sequence[Sequence[Named]], names: Sequence[str]) -> bytes:
    total = sum(one.nbytes for shard in shards for one in shard)
    weight_map = {one.fqn: name for shard, name in zip(shards, names, strict=True) for one in shard}
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(content, indent=2).encode() + b"\n"
