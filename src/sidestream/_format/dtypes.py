"""The dtypes that a checkpoint may hold, by torch's names: element size in bytes and the storage class, if it has one.

``torch.save`` writes a dtype that once had a typed storage under that storage's name (``_rebuild_tensor_v2``), and the
later ones as untyped storage with the dtype beside it (``_rebuild_tensor_v3``). Left out are those that torch itself
cannot serialize (``int1`` ... ``int7``, ``uint1`` ... ``uint7``) and the quantized ones, which carry more than bytes.
"""

from __future__ import annotations

__all__ = ["DTYPES", "STORAGE_DTYPES", "itemsize"]

DTYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BoolStorage"),
    "uint8": (1, "ByteStorage"),
    "int8": (1, "CharStorage"),
    "int16": (2, "ShortStorage"),
    "int32": (4, "IntStorage"),
    "int64": (8, "LongStorage"),
    "float16": (2, "HalfStorage"),
    "bfloat16": (2, "BFloat16Storage"),
    "float32": (4, "FloatStorage"),
    "float64": (8, "DoubleStorage"),
    "complex64": (8, "ComplexFloatStorage"),
    "complex128": (16, "ComplexDoubleStorage"),
    "complex32": (4, None),
    "uint16": (2, None),
    "uint32": (4, None),
    "uint64": (8, None),
    "float8_e4m3fn": (1, None),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2": (1, None),
    "float8_e5m2fnuz": (1, None),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
    "bits8": (1, None),
    "bits16": (2, None),
    "bits1x8": (1, None),
    "bits2x4": (1, None),
    "bits4x2": (1, None),
}

STORAGE_DTYPES = {storage: name for name, (_, storage) in DTYPES.items() if storage is not None}


def itemsize(dtype: str) -> int:
    """Bytes per element. Raises ``KeyError`` for a dtype that a checkpoint cannot hold."""
    return DTYPES[dtype][0]
