"""The user's metadata of a checkpoint (metrics, configuration). It is plain data of limited size, and can be read
without the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._format.manifest import metadata_line
from .._format.marker import MAX_METADATA_BYTES
from .._format.records import Manifest, Node
from .._runtime.steps import at_once
from ..errors import CorruptCheckpointError, InvalidOptionError
from .values import decode_value, encode_value

__all__ = ["decode_metadata", "encode_metadata"]

_MAX_DEPTH = 32


def encode_metadata(metadata: Mapping[str, Any] | None) -> Node:
    """Return a copy of ``metadata`` as a node.

    Supports the types of JSON: mappings with string keys, lists and tuples (which are read as lists), strings,
    booleans, None, and numbers, including NaN and infinities. Raises ``InvalidOptionError`` with the place for anything
    else, and for too much data.
    """
    if metadata is None:
        return None
    if not isinstance(metadata, Mapping):
        raise InvalidOptionError(f"metadata={metadata!r} has to be a mapping, such as {{'loss': 0.25}}")
    node = encode_value(_plain(metadata, "metadata", 0), "metadata")
    nbytes = len(metadata_line(Manifest("", {}, {}, metadata=node)))
    if nbytes > MAX_METADATA_BYTES:
        raise InvalidOptionError(
            f"metadata takes {nbytes} bytes, {MAX_METADATA_BYTES} are the limit: put what is larger into the state"
        )
    return node


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise InvalidOptionError(f"{where}: metadata is nested deeper than {_MAX_DEPTH} levels")
    if value is None or isinstance(value, (bool, str)):
        return value if not isinstance(value, str) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):  # also numpy's float64
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidOptionError(f"{where}: the key {key!r} of metadata has to be a string")
        return {str(key): _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    hint = "; call .item()" if hasattr(value, "item") else ""
    raise InvalidOptionError(
        f"{where}: a {type(value).__module__}.{type(value).__qualname__} cannot stand in metadata, which takes "
        f"numbers, strings, booleans, None, lists and mappings{hint}"
    )


def _check_keys(node: Node) -> None:
    """Raise ``CorruptCheckpointError`` for a key that is not a string, before any key is hashed. A file cannot choose
    the hash of a string."""
    todo: list[Any] = [node]
    while todo:
        one = todo.pop()
        if isinstance(one, dict) and isinstance(pairs := one.get("dict"), list):
            keys = [pair[0] for pair in pairs if isinstance(pair, list) and len(pair) == 2]
            if len(keys) != len(pairs) or not all(isinstance(key, str) for key in keys):
                raise CorruptCheckpointError("the metadata in the manifest is not a mapping with string keys")
            todo.extend(pair[1] for pair in pairs)
        elif isinstance(one, dict):
            if not one.keys() <= {"list", "float", "int"}:
                raise CorruptCheckpointError(
                    "the metadata in the manifest has a value that is not a number, a string or a container"
                )
            todo.extend(one.values())
        elif isinstance(one, list):
            todo.extend(one)


def decode_metadata(node: Node) -> dict[str, Any]:
    """Return the metadata of a node. Empty if there is none. Raises ``CorruptCheckpointError``."""
    if node is None:
        return {}
    _check_keys(node)
    metadata = at_once(decode_value(node, "metadata"))  # it has at most 256 KiB
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        raise CorruptCheckpointError("the metadata in the manifest is not a mapping with string keys")
    return metadata
