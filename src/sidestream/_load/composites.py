"""The construction of tensors that consist of others from parts that were read."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._format.records import SPARSE_PARTS, CompositeEntry, Entry
from .._layout.values import decode_value
from .._runtime.pauses import pause_point
from .._runtime.torch_probes import dtype_from_name, dtype_name
from ..errors import (
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
    out_of_memory,
)

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


def check_types(entries: Mapping[str, Entry], fqns: Iterable[str], allowed: Mapping[str, type]) -> None:
    """Raise ``UnsafeObjectError`` for the first of the composite tensors ``fqns`` whose type must not be
    constructed."""
    for fqn in fqns:
        pause_point()
        entry = entries[fqn]
        assert isinstance(entry, CompositeEntry)
        if entry.type not in SPARSE_PARTS:
            _type_of(fqn, entry.type, allowed)


def build_composites(
    entries: Mapping[str, Entry], fqns: Iterable[str], tensors: Mapping[str, torch.Tensor], allowed: Mapping[str, type]
) -> dict[str, torch.Tensor]:
    """Return the composite tensors ``fqns`` over their parts, which are among ``tensors`` or among ``fqns`` themselves.

    Raises ``CorruptCheckpointError`` for parts that do not form a sparse tensor, ``UnsafeObjectError`` and
    ``UnsupportedCheckpointError``.
    """
    made: dict[str, torch.Tensor] = {}
    for fqn in sorted(fqns, key=len, reverse=True):  # parts of others come first
        pause_point()
        entry = entries[fqn]
        assert isinstance(entry, CompositeEntry)
        names = {part: f"{fqn}.{part}" for part in entry.parts}
        parts = {part: made[name] if name in made else tensors[name] for part, name in names.items()}
        # After its parts, because a wrapper may be made of other wrappers. The types of all of them were checked before
        # anything was read.
        context = decode_value(entry.context, fqn, _KnownTypes(fqn, allowed))
        if entry.type in SPARSE_PARTS:
            made[fqn] = _sparse(fqn, entry, parts, context)
        else:
            made[fqn] = _subclass(fqn, entry, parts, context, _type_of(fqn, entry.type, allowed))
    return made


def _sparse(fqn: str, entry: CompositeEntry, parts: Mapping[str, torch.Tensor], context: Any) -> torch.Tensor:
    make: Any = torch.sparse_coo_tensor if entry.type == "sparse_coo" else torch.sparse_compressed_tensor
    options: dict[str, Any] = {"layout": getattr(torch, entry.type)}
    if entry.type == "sparse_coo":
        if type(context) is not bool:
            raise CorruptCheckpointError(f"{fqn}: the manifest does not say whether it is coalesced", fqn=fqn)
        options = {"is_coalesced": context}
    try:
        # With indices outside of the shape, torch would read and write memory outside of the tensor.
        made: torch.Tensor = make(*parts.values(), entry.shape, check_invariants=True, **options)
        if made.dtype == dtype_from_name(entry.dtype):
            return made
        problem = f"values of dtype {dtype_name(made.dtype)}"
    except (RuntimeError, TypeError, ValueError) as error:
        problem = str(error).partition("\n")[0]
    raise CorruptCheckpointError(f"{fqn}: its parts do not form a tensor of layout {entry.type}: {problem}", fqn=fqn)


def _subclass(
    fqn: str, entry: CompositeEntry, parts: Mapping[str, torch.Tensor], context: Any, kind: Any
) -> torch.Tensor:
    try:
        made = kind.__tensor_unflatten__(dict(parts), context, torch.Size(entry.shape), entry.strides)
    except Exception as error:
        raise UnsupportedCheckpointError(
            f"{fqn}: {entry.type} does not take what was saved of it: {type(error).__name__}: {error}"
        ) from error
    # The code of the class has run on content of a file. What the file has announced was compared with the target, so
    # another result must not be used.
    if type(made) is not kind or tuple(made.shape) != entry.shape or made.dtype != dtype_from_name(entry.dtype):
        raise UnsupportedCheckpointError(
            f"{fqn}: {entry.type} makes another tensor of what was saved than {entry.dtype} of shape {entry.shape}"
        )
    plain: torch.Tensor = made.detach() if made.requires_grad else made
    return plain


def fill_sparse(fqn: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target``, a sparse tensor of the same layout and shape. The numbers of elements and of
    sparse dimensions may differ. Raises ``OutOfMemoryError`` and ``UnsupportedTensorError``."""
    try:
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            if target.layout is not torch.sparse_coo:
                target.resize_as_sparse_(source)
            elif target.sparse_dim() != source.sparse_dim():  # torch resizes only an empty tensor to other ones
                target.sparse_resize_and_clear_(source.shape, source.sparse_dim(), source.dense_dim())
            target.copy_(source)
    except RuntimeError as error:
        refused = f"{fqn}: this sparse tensor of the target does not take what was read; load into a new one: {error}"
        raise out_of_memory(error, f"{fqn}, a sparse tensor") or UnsupportedTensorError(refused) from error


def _type_of(fqn: str, name: str, allowed: Mapping[str, type], known: frozenset[str] = _TENSORS) -> type:
    """Return the class ``name`` for the tensor ``fqn``. The file names it, but nothing is imported for it. Raises
    ``UnsafeObjectError`` if it is neither ``allowed`` nor ``known``, or has not been imported."""
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


class _KnownTypes(dict[str, type]):
    """The types of what the tensor ``fqn`` has in addition to its tensors: allowed types, and those of a fixed list."""

    def __init__(self, fqn: str, allowed: Mapping[str, type]) -> None:
        super().__init__(allowed)
        self._fqn = fqn

    def __missing__(self, name: str) -> type:
        return _type_of(self._fqn, name, {}, _BESIDE)
