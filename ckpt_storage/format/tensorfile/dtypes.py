"""The element types a checkpoint may hold, and what each format calls them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .inertpickle import (
    Allowed,
    ForbiddenGlobalError,
    Global,
    PickleMalformedError,
    PickleTruncatedError,
    Record,
    interpret,
)

_NUMBER = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)")
_DTYPE_STATES = tuple((3, order, None, None, None, -1, -1, 0) for order in "<>|=")
_ODD = "this is not how numbers and buffers are pickled"
_DTYPE = "numpy.dtype"
_ARRAY = "numpy.ndarray"
_BUFFER = "_io.BytesIO"


def is_inert_with_numpy(pickled: bytes) -> bool:
    """Return whether unpickling `pickled` makes only plain values, arrays and buffers."""
    made: list[Record] = []

    def dtype(args: tuple[object, ...]) -> Record:
        match args:
            case (str(name), False, True) if _NUMBER.fullmatch(name):
                return note(Record(_DTYPE, args))
        raise PickleMalformedError(_ODD)

    def array(args: tuple[object, ...]) -> Record:
        match args:
            case (Global(name="numpy.ndarray"), (0,), b"b"):
                return note(Record(_ARRAY, args))
        raise PickleMalformedError(_ODD)

    def scalar(args: tuple[object, ...]) -> tuple[object, ...]:
        match args:
            case (Record(name="numpy.dtype"), bytes()):
                return args
        raise PickleMalformedError(_ODD)

    def note(record: Record) -> Record:
        made.append(record)
        return record

    allowed: Allowed = {
        _DTYPE: dtype,
        _ARRAY: _refuse,
        _BUFFER: lambda args: note(Record(_BUFFER, args)),
        "_codecs.encode": _encoded,
        "__builtin__.bytes": _no_bytes,
        # The first is spelt by numpy 2, the second by numpy 1.
        "numpy._core.multiarray._reconstruct": array,
        "numpy.core.multiarray._reconstruct": array,
        "numpy._core.multiarray.scalar": scalar,
        "numpy.core.multiarray.scalar": scalar,
    }
    try:
        interpret(pickled, allowed=allowed)
    except (ForbiddenGlobalError, PickleMalformedError, PickleTruncatedError):
        return False
    return all(map(_is_finished, made))


def _is_finished(record: Record) -> bool:
    """Return whether an object was given the state that is written for its kind."""
    if record.name == _DTYPE:
        return record.state in _DTYPE_STATES
    match record.state:
        case (bytes(), int(), None | []):
            return record.name == _BUFFER and not record.args
        case (1, tuple(shape), Record(name="numpy.dtype"), bool(), bytes()):
            return record.name == _ARRAY and all(type(size) is int and size >= 0 for size in shape)
    return False


def _encoded(args: tuple[object, ...]) -> bytes:
    """Return bytes as protocol 2 writes them: as text of that many characters below 256."""
    match args:
        case (str(text), "latin1"):
            # Other characters make the real call fail, which runs nothing either.
            return text.encode("latin1", "replace")
    raise PickleMalformedError(_ODD)


def _no_bytes(args: tuple[object, ...]) -> bytes:
    """Return the empty bytes, which protocol 2 writes as a call."""
    if args:
        raise PickleMalformedError(_ODD)
    return b""


def _refuse(_args: tuple[object, ...]) -> object:
    raise PickleMalformedError(_ODD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type.

    `name` is torch's without `torch.`; `item_bytes` is the size of one torch element
    (`float4_e2m1fn_x2` holds two numbers in one element). None stands for a type that
    safetensors or numpy does not have. `storage_class` names the typed storage in
    torch.save's pickles, None where torch writes an untyped one.
    """

    name: str
    item_bytes: int
    safetensors: str | None
    numpy: str | None
    storage_class: str | None


def _dtype(
    name: str, item_bytes: int, safetensors: str | None, numpy: str | None, storage: str | None
) -> tuple[str, DType]:
    return name, DType(
        name=name,
        item_bytes=item_bytes,
        safetensors=safetensors,
        numpy=numpy,
        storage_class=storage,
    )


DTYPES: Mapping[str, DType] = MappingProxyType(
    dict(
        (
            _dtype("float64", 8, "F64", "float64", "DoubleStorage"),
            _dtype("float32", 4, "F32", "float32", "FloatStorage"),
            _dtype("float16", 2, "F16", "float16", "HalfStorage"),
            _dtype("bfloat16", 2, "BF16", None, "BFloat16Storage"),
            _dtype("float8_e4m3fn", 1, "F8_E4M3", None, None),
            _dtype("float8_e4m3fnuz", 1, "F8_E4M3FNUZ", None, None),
            _dtype("float8_e5m2", 1, "F8_E5M2", None, None),
            _dtype("float8_e5m2fnuz", 1, "F8_E5M2FNUZ", None, None),
            _dtype("float8_e8m0fnu", 1, "F8_E8M0", None, None),
            _dtype("float4_e2m1fn_x2", 1, "F4", None, None),
            _dtype("complex128", 16, None, "complex128", "ComplexDoubleStorage"),
            _dtype("complex64", 8, "C64", "complex64", "ComplexFloatStorage"),
            _dtype("complex32", 4, None, None, None),
            _dtype("bool", 1, "BOOL", "bool", "BoolStorage"),
            _dtype("uint8", 1, "U8", "uint8", "ByteStorage"),
            _dtype("uint16", 2, "U16", "uint16", None),
            _dtype("uint32", 4, "U32", "uint32", None),
            _dtype("uint64", 8, "U64", "uint64", None),
            _dtype("int8", 1, "I8", "int8", "CharStorage"),
            _dtype("int16", 2, "I16", "int16", "ShortStorage"),
            _dtype("int32", 4, "I32", "int32", "IntStorage"),
            _dtype("int64", 8, "I64", "int64", "LongStorage"),
            _dtype("bits8", 1, None, None, None),
            _dtype("bits16", 2, None, None, None),
            _dtype("bits1x8", 1, None, None, None),
            _dtype("bits2x4", 1, None, None, None),
            _dtype("bits4x2", 1, None, None, None),
        )
    )
)
"""Every dtype that torch 2.13 can copy and that survives torch.save and torch.load.

Left out: the quantised ones, whose values need parameters that the bytes do not hold, and
`int1` to `int7` and `uint1` to `uint7`, which torch.save refuses.
"""
