"""Element types of tensors, by torch's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    `name` is torch's without `torch.`. `item_bytes` is the size of one torch element; an element of
    `float4_e2m1fn_x2` has two numbers. `safetensors` and `numpy` are None if they lack the type.
    `storage_class` names the typed storage in pickles of `torch.save`; None: it is untyped.
    """

    name: str
    item_bytes: int
    safetensors: str | None
    numpy: str | None
    storage_class: str | None


_ALL = (
    DType("float64", 8, "F64", "float64", "DoubleStorage"),
    DType("float32", 4, "F32", "float32", "FloatStorage"),
    DType("float16", 2, "F16", "float16", "HalfStorage"),
    DType("bfloat16", 2, "BF16", None, "BFloat16Storage"),
    DType("float8_e4m3fn", 1, "F8_E4M3", None, None),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None, None),
    DType("float8_e5m2", 1, "F8_E5M2", None, None),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None, None),
    DType("float8_e8m0fnu", 1, "F8_E8M0", None, None),
    DType("float4_e2m1fn_x2", 1, "F4", None, None),
    DType("complex128", 16, None, "complex128", "ComplexDoubleStorage"),
    DType("complex64", 8, "C64", "complex64", "ComplexFloatStorage"),
    DType("complex32", 4, None, None, None),
    DType("bool", 1, "BOOL", "bool", "BoolStorage"),
    DType("uint8", 1, "U8", "uint8", "ByteStorage"),
    DType("uint16", 2, "U16", "uint16", None),
    DType("uint32", 4, "U32", "uint32", None),
    DType("uint64", 8, "U64", "uint64", None),
    DType("int8", 1, "I8", "int8", "CharStorage"),
    DType("int16", 2, "I16", "int16", "ShortStorage"),
    DType("int32", 4, "I32", "int32", "IntStorage"),
    DType("int64", 8, "I64", "int64", "LongStorage"),
    DType("bits8", 1, None, None, None),
    DType("bits16", 2, None, None, None),
    DType("bits1x8", 1, None, None, None),
    DType("bits2x4", 1, None, None, None),
    DType("bits4x2", 1, None, None, None),
)

DTYPES: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _ALL})
"""Every dtype that torch 2.13 can copy, save and load.

Not quantised dtypes, whose values need parameters beside the bytes, and not `int1` to `int7` and
`uint1` to `uint7`, which torch.save refuses.
"""
