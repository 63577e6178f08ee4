"""Pickles of plain numpy values and buffers, which run nothing when they are loaded."""

from __future__ import annotations

import re

from .inert_pickle import (
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
