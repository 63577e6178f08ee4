"""A pickle reader that builds only inert values.

It imports nothing, calls nothing that the pickle names, and hashes nothing in the pickle: a class
or function becomes a `Global`, a call of it a `Record`, and a dictionary a list of pairs. Memory
and time are linear in the length of the pickle.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from .dtypes import DTYPES

Builder = Callable[[tuple[object, ...]], object]
Allowed = Mapping[str, Builder | None]

# Torch nests seven MARKs in `.metadata` and three in `data.pkl`.
_MAX_MARKS = 100
_MAX_GLOBAL_NAME_BYTES = 512


class PickleMalformedError(Exception):
    """The bytes are not a pickle as torch writes it; the text says where and why."""


class PickleTruncatedError(PickleMalformedError):
    """The bytes end inside the pickle."""


class ForbiddenGlobalError(PickleMalformedError):
    """The pickle names a class or function outside the allow-list; the text is its dotted name."""


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """The name of a class or function, which is not imported."""

    name: str
    build: Builder | None


@dataclass(slots=True, eq=False)
class Record:
    """A call of `name` that was not made; `state` is the argument for `__setstate__`."""

    name: str
    args: tuple[object, ...]
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class PersistentId:
    """A reference to data outside the pickle."""

    pid: object


class Pairs(list[tuple[object, object]]):
    """The pairs of a dictionary in their order, with duplicates: nothing is hashed."""

    __slots__ = ()


def interpret(data: bytes, allowed: Allowed) -> object:
    """Return the value of a pickle; bytes after its STOP are ignored.

    `allowed` maps dotted names to None, or to a builder that gets the arguments of a call and
    returns an inert value; a builder may raise `PickleMalformedError`.

    Raises `PickleMalformedError`, also as `PickleTruncatedError` or `ForbiddenGlobalError`.
    """
    file = _WholeReads(data)
    machine = _Machine(file, allowed)
    try:
        value: object = machine.load()
    except KeyError as error:
        raise PickleMalformedError(f"torch does not write opcode {error.args[0]:#04x}") from None
    except (IndexError, ValueError, pickle.UnpicklingError) as error:
        raise PickleMalformedError(f"{error} before byte {file.tell()}") from None
    if machine.metastack or machine.stack:
        raise PickleMalformedError(f"values are left over at byte {file.tell()}")
    return value


class _WholeReads(io.BytesIO):
    """The bytes of a pickle; a read past their end raises `PickleTruncatedError`."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if size is not None and len(data) < size:
            raise PickleTruncatedError
        return data

    def readline(self, size: int | None = -1) -> bytes:
        del size  # the unpickler reads whole lines
        line = super().readline(_MAX_GLOBAL_NAME_BYTES)
        if line.endswith(b"\n"):
            return line
        if len(line) < _MAX_GLOBAL_NAME_BYTES:
            raise PickleTruncatedError
        raise PickleMalformedError(f"the name before byte {self.tell()} has no end")


_OPCODES = (
    "proto frame stop mark none true false binint binint1 binint2 long1 binfloat binunicode "
    "binunicode8 short_binunicode binbytes binbytes8 short_binbytes empty_tuple tuple tuple1 "
    "tuple2 tuple3 empty_list append appends empty_dictionary setitem setitems empty_set additems "
    "frozenset binget long_binget binput long_binput memoize global stack_global binpersid reduce "
    "newobj build"
)
"""The opcodes that torch writes: plain values, containers, the memo, names and calls."""


_Unpickler: Any = pickle._Unpickler  # noqa: SLF001  # as torch.package does


class _Machine(_Unpickler):  # type: ignore[misc]  # its parts have no types
    """Python's own unpickler, without the steps that import, call or hash."""

    def __init__(self, file: _WholeReads, allowed: Allowed) -> None:
        super().__init__(file)
        self.allowed = allowed

    def find_class(self, module: str, name: str) -> Global:
        dotted = f"{module}.{name}"
        if dotted not in self.allowed:
            raise ForbiddenGlobalError(dotted[:_MAX_GLOBAL_NAME_BYTES])
        return Global(dotted, self.allowed[dotted])

    def persistent_load(self, pid: object) -> PersistentId:
        return PersistentId(pid)

    def load_mark(self) -> None:
        if len(self.metastack) >= _MAX_MARKS:
            raise PickleMalformedError(f"it nests deeper than {_MAX_MARKS} levels")
        super().load_mark()

    def load_appends(self) -> None:
        self._extend(list, self.pop_mark())

    def load_append(self) -> None:
        self._extend(list, [self.stack.pop()])

    def load_setitems(self) -> None:
        items = self.pop_mark()
        self._extend(Pairs, zip(items[::2], items[1::2], strict=True))

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._extend(Pairs, [(key, value)])

    def _extend(self, kind: type[list[Any]], items: Iterable[object]) -> None:
        target = self.stack[-1]
        if type(target) is not kind:
            raise PickleMalformedError("an item is added to a value that is no list or dict")
        target.extend(items)

    def load_empty_dictionary(self) -> None:
        self.append(Pairs())

    # A set becomes a list, so that nothing is hashed.
    def load_empty_set(self) -> None:
        self.append([])

    load_additems = load_appends

    def load_frozenset(self) -> None:
        self.load_tuple()

    def load_reduce(self) -> None:
        args, callee = self.stack.pop(), self.stack.pop()
        if type(callee) is not Global or type(args) is not tuple:
            raise PickleMalformedError("a value that is no class or function is called")
        self.append(Record(callee.name, args) if callee.build is None else callee.build(args))

    load_newobj = load_reduce

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not Record or target.state is not None or state is None:
            raise PickleMalformedError("state is set on a finished value")
        target.state = state

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {}


def _load_text(load: Callable[[_Machine], None], machine: _Machine) -> None:
    load(machine)
    machine.stack[-1].encode()  # raises for half of a surrogate pair


for _code, _load in _Unpickler.dispatch.items():
    _name = _load.__name__
    if _name.removeprefix("load_") in _OPCODES.split():
        _own = getattr(_Machine, _name)
        _Machine.dispatch[_code] = partial(_load_text, _own) if "unicode" in _name else _own


def build_ordered_dict(args: tuple[object, ...]) -> object:
    """Return the pairs of a new `collections.OrderedDict()`; torch passes no arguments."""
    if args:
        raise PickleMalformedError("an OrderedDict has arguments")
    return Pairs()


_NUMBER = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)")
_DTYPE_STATES = tuple((3, order, None, None, None, -1, -1, 0) for order in "<>|=")

# Numpy 2 calls a module `numpy._core`, numpy 1 `numpy.core`.
_NUMPY = (
    *("numpy.dtype", "numpy.ndarray", "_io.BytesIO", "_codecs.encode", "__builtin__.bytes"),
    *(
        f"numpy.{c}.multiarray.{name}"
        for c in ("_core", "core")
        for name in ("_reconstruct", "scalar")
    ),
)
_TENSORS = (
    *(f"torch._utils._rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter")),
    *(f"torch.{kind.storage_class}" for kind in DTYPES.values() if kind.storage_class),
    *(f"torch.{name}" for name in DTYPES),
    "torch.storage.UntypedStorage",
)
"""Names in pickles of plain tensors and parameters; storage classes and dtypes are not called."""


def is_inert_with_numpy(pickled: bytes) -> bool:
    """Return whether unpickling makes only plain values, numpy arrays, buffers and tensors.

    A tensor with hooks or of a subclass is not inert.
    """
    made: list[Record] = []

    def build(kind: str, args: tuple[object, ...]) -> object:
        value = _called(kind, args)
        if isinstance(value, Record):
            made.append(value)
        return value

    allowed: dict[str, Builder] = {
        name: partial(build, name.rpartition(".")[2]) for name in (*_NUMPY, *_TENSORS)
    }
    allowed["collections.OrderedDict"] = build_ordered_dict
    try:
        interpret(pickled, allowed)
    except PickleMalformedError:
        return False
    return all(map(_is_finished, made))


def _called(kind: str, args: tuple[object, ...]) -> object:
    """Return an inert value for a call by which numbers, buffers or tensors are pickled."""
    match kind, args:
        case ("dtype", (str(name), False, True)) if _NUMBER.fullmatch(name):
            return Record(kind, args)
        case ("scalar", (Record(name="dtype"), bytes())):
            return args
        case ("encode", (str(text), "latin1")):
            # Protocol 2 writes bytes as text with characters below 256. Other characters make the
            # real call fail, which runs no code either.
            return text.encode("latin1", "replace")
        case ("bytes", ()):
            return b""
        case (
            "_rebuild_tensor_v2",
            (PersistentId(), int(), tuple(), tuple(), bool(), Pairs(), *bits),
        ) | (
            "_rebuild_tensor_v3",
            (PersistentId(), int(), tuple(), tuple(), bool(), Pairs(), Global(), *bits),
        ) if _are_bits(bits):
            return Record(kind, args)
        case (
            ("_reconstruct", (Global(name="numpy.ndarray"), (0,), b"b"))
            | ("BytesIO", _)
            | ("_rebuild_parameter", (Record(), bool(), Pairs()))
        ):
            return Record(kind, args)
    raise PickleMalformedError("this is not how numbers, buffers and tensors are pickled")


def _are_bits(args: list[object]) -> bool:
    """Return whether the last arguments of a tensor at most have torch conjugate or negate it."""
    match args:
        case []:
            return True
        case [Pairs() as bits]:
            return all(name in ("conj", "neg") and type(value) is bool for name, value in bits)
    return False


def _is_finished(record: Record) -> bool:
    """Return whether an object has a state as torch and numpy write it."""
    match record.name, record.state:
        case ("dtype", state):
            return state in _DTYPE_STATES
        case ("BytesIO", (bytes(), int(), None | [])):
            return not record.args
        case ("_reconstruct", (1, tuple(shape), Record(name="dtype"), bool(), bytes())):
            return all(type(size) is int and size >= 0 for size in shape)
        case ("_rebuild_tensor_v2" | "_rebuild_tensor_v3", None):
            return not record.args[5] and _is_storage(record.args[0])
        case ("_rebuild_parameter", None):
            data, _, hooks = record.args
            return (
                not hooks and isinstance(data, Record) and data.name.startswith("_rebuild_tensor")
            )
    return False


def _is_storage(value: object) -> bool:
    match value:
        case PersistentId(pid=("storage", Global(name=name), str(), str(), int())):
            return name.endswith("Storage")
    return False
