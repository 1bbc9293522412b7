"""The safetensors format: its names, its dtypes, and the stamp in the files that sidestream writes."""

from __future__ import annotations

import json

INDEX_NAME = "model.safetensors.index.json"
SUFFIX = ".safetensors"
PREFIX_BYTES = 8

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",  # the header counts the halves of each element
}

STAMP = {"format": "pt", "written_by": "sidestream"}  # transformers requires the format
_START = json.dumps({"__metadata__": STAMP}, separators=(",", ":")).encode().rstrip(b"}")
STAMP_BYTES = PREFIX_BYTES + len(_START)
"""How many bytes at the start of a file ``is_stamped`` needs."""


def is_stamped(start: bytes) -> bool:
    """Return whether ``header_of`` wrote the file that begins with these bytes."""
    return start[PREFIX_BYTES:STAMP_BYTES] == _START
