"""The classes that are constructed for a checkpoint. The file names them, but nothing is imported for it."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from ...errors import UnsafeObjectError

__all__ = ["KnownTypes", "type_of"]

_TENSORS = frozenset(
    {
        "torchao.optim.subclass_4bit.OptimState4bit",
        "torchao.optim.subclass_8bit.OptimState8bit",
        "torchao.optim.subclass_fp8.OptimStateFp8",
        "torchao.quantization.Float8Tensor",
        "torchao.quantization.Int4PlainInt32Tensor",
        "torchao.quantization.Int4PreshuffledTensor",
        "torchao.quantization.Int4Tensor",
        "torchao.quantization.Int4TilePackedTo4dTensor",
        "torchao.quantization.Int8Tensor",
        "torchao.quantization.IntxUnpackedToInt8Tensor",
        "torchao.quantization.granularity.PerTensor",
    }
)
"""The subclasses of tensors that are constructed without ``safe_globals=``, if the program has imported them."""

_BESIDE = frozenset(
    {
        "torchao.float8.inference.Float8MMConfig",
        "torchao.quantization.granularity.PerAxis",
        "torchao.quantization.granularity.PerBlock",
        "torchao.quantization.granularity.PerGroup",
        "torchao.quantization.granularity.PerRow",
        "torchao.quantization.granularity.PerToken",
        "torchao.quantization.quant_primitives.MappingType",
        "torchao.quantization.quantize_.common.kernel_preference.KernelPreference",
        "torchao.quantization.quantize_.workflows.float8.float8_tensor.QuantizeTensorToFloat8Kwargs",
        "torchao.quantization.quantize_.workflows.int8.int8_tensor.QuantizeTensorToInt8Kwargs",
    }
)
"""The enums and dataclasses that these subclasses have in addition to their tensors."""


def type_of(fqn: str, name: str, allowed: Mapping[str, type]) -> type:
    """Return the class ``name`` for the tensor ``fqn``. Raises ``UnsafeObjectError`` if it is not allowed, or has not
    been imported."""
    return _found(fqn, name, allowed, _TENSORS)


def _found(fqn: str, name: str, allowed: Mapping[str, type], known: frozenset[str]) -> type:
    if name in allowed:
        return allowed[name]
    if name not in known:
        raise UnsafeObjectError(
            f"{fqn}: a {name} is made anew only if safe_globals= names that class; or load into a tensor of this kind"
        )
    module, _, attribute = name.rpartition(".")
    found = getattr(sys.modules.get(module), attribute, None)
    if not isinstance(found, type):
        raise UnsafeObjectError(f"{fqn}: a {name}, which this program has not imported: import {module} first")
    return found


class KnownTypes(dict[str, type]):
    """The types of what the tensor ``fqn`` has in addition to its tensors: allowed types, and those of a fixed list."""

    def __init__(self, fqn: str, allowed: Mapping[str, type]) -> None:
        super().__init__(allowed)
        self._fqn = fqn

    def __missing__(self, name: str) -> type:
        return _found(self._fqn, name, {}, _BESIDE)
