"""Which classes are made anew from a checkpoint. A file names them, and imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ...errors import UnsafeObject

__all__ = ["KnownTypes", "type_of"]

_TYPES = frozenset(
    {
        *(
            f"torchao.quantization.{name}"
            for name in (
                "Float8Tensor",
                "Int4PlainInt32Tensor",
                "Int4PreshuffledTensor",
                "Int4Tensor",
                "Int4TilePackedTo4dTensor",
                "Int8Tensor",
                "IntxUnpackedToInt8Tensor",
            )
        ),
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
        "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
    }
)
"""The types that are made anew without ``allow=``, if the program has imported them: subclasses whose context is plain
data, and the enums in it."""


def type_of(fqn: str, name: str, allowed: Mapping[str, type]) -> type:
    """Return the class ``name`` for the tensor ``fqn``. Raises ``UnsafeObject`` if it is not allowed, or not known
    here."""
    if name in allowed:
        return allowed[name]
    module, _, attribute = name.rpartition(".")
    if name not in _TYPES:
        raise UnsafeObject(
            f"{fqn}: a {name} is only made anew if allow= names that class; or load into a tensor of this kind"
        )
    found = getattr(sys.modules.get(module), attribute, None)
    if not isinstance(found, type):
        raise UnsafeObject(f"{fqn}: a {name}, which this program does not know: import {module} first")
    return found


class KnownTypes(dict[str, type]):
    """The types that were allowed, and those of the fixed list."""

    def __init__(self, fqn: str, allowed: Mapping[str, type]) -> None:
        super().__init__(allowed)
        self._fqn = fqn

    def __missing__(self, name: str) -> type:
        if name not in _TYPES:
            raise KeyError(name)
        return type_of(self._fqn, name, {})
