"""A pickle reader that builds nothing but inert values.

It imports nothing, calls nothing that the pickle names, and hashes nothing that the pickle holds: a
class or function becomes a `Global`, a call to it a `Record`, a dictionary a list of pairs. Memory
and time stay linear in the length of the pickle.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Builder = Callable[[tuple[object, ...]], object]
Allowed = Mapping[str, Builder | None]

# Torch nests seven MARKs in `.metadata` and three in `data.pkl`.
_MAX_MARKS = 100
_MAX_GLOBAL_NAME_BYTES = 512
_MAX_FIELDS = 64


class PickleTruncatedError(Exception):
    """The bytes end inside the pickle."""


class PickleMalformedError(Exception):
    """The bytes are no pickle that torch would write; the text says where and why."""


class ForbiddenGlobalError(Exception):
    """The pickle names a class or function outside the allow-list; the text is its dotted name."""


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """The name of a class or function, which was not looked up."""

    name: str
    build: Builder | None


@dataclass(slots=True, eq=False)
class Record:
    """A call or object creation that did not take place.

    `name` is the callee, `args` its arguments, `state` what would have been given to
    `__setstate__` (None: nothing).
    """

    name: str
    args: tuple[object, ...]
    state: object = None


@dataclass(frozen=True, slots=True, eq=False)
class PersistentId:
    """A reference to something stored outside the pickle."""

    pid: object


class Pairs(list[tuple[object, object]]):
    """A dictionary, unhashed: its pairs in the order written, duplicates included."""

    __slots__ = ()

    def fields(self) -> dict[str, object]:
        """Return the pairs as a dict of attributes.

        Raises `PickleMalformedError` for a key that is no string or occurs twice, and for
        more keys than any class has, so that the cost of one call stays small.
        """
        found: dict[str, object] = {}
        if len(self) > _MAX_FIELDS:
            raise PickleMalformedError(f"an object has more than {_MAX_FIELDS} attributes")
        for key, value in self:
            if type(key) is not str or key in found:
                raise PickleMalformedError("an attribute name is no string or occurs twice")
            found[key] = value
        return found


def interpret(data: bytes, *, start: int = 0, allowed: Allowed) -> tuple[object, int]:
    """Return the value of the pickle at `start` and the offset just behind its STOP.

    `allowed` maps dotted names to None, or to a builder that gets the arguments of a
    call and returns an inert value; a builder may raise `PickleMalformedError`.

    Raises `PickleTruncatedError`, `PickleMalformedError`, `ForbiddenGlobalError`.
    """
    machine = _Machine(data, start, allowed)
    try:
        value = machine.run()
    except IndexError:
        raise PickleMalformedError(f"the stack is empty at byte {machine.pos}") from None
    except KeyError:
        raise PickleMalformedError(f"the memo has no such entry at byte {machine.pos}") from None
    except UnicodeDecodeError:
        raise PickleMalformedError(f"a string before byte {machine.pos} is not UTF-8") from None
    return value, machine.pos


class _Machine:
    __slots__ = ("allowed", "data", "marks", "memo", "pos", "stack")

    def __init__(self, data: bytes, start: int, allowed: Allowed) -> None:
        self.data = data
        self.pos = start
        self.allowed = allowed
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        # A dict, not a list: a memo index of four billion then costs one entry.
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        data, end, table = self.data, len(self.data), _TABLE
        while True:
            pos = self.pos
            if pos >= end:
                raise PickleTruncatedError
            code = data[pos]
            if code == _STOP:
                break
            entry = table[code]
            if entry is None:
                raise PickleMalformedError(f"torch does not write opcode {code:#04x} (byte {pos})")
            is_value, operand_bytes, operation = entry
            self.pos = pos + 1 + operand_bytes
            if self.pos > end:
                raise PickleTruncatedError
            found = operation(self, pos + 1)
            if is_value:
                self.stack.append(found)
        self.pos = pos + 1
        if self.marks or len(self.stack) != 1:
            raise PickleMalformedError(f"values are left over at byte {pos}")
        return self.stack[0]

    def malformed(self, what: str) -> PickleMalformedError:
        return PickleMalformedError(f"{what} before byte {self.pos}")

    def take(self, length_bytes: int) -> bytes:
        """Return the next bytes, which follow an operand that gave their length."""
        start = self.pos
        self.pos = start + length_bytes
        if self.pos > len(self.data):
            raise PickleTruncatedError
        return self.data[start : self.pos]

    def take_line(self) -> str:
        start = self.pos
        stop = self.data.find(b"\n", start, start + _MAX_GLOBAL_NAME_BYTES)
        if stop < 0:
            if len(self.data) - start < _MAX_GLOBAL_NAME_BYTES:
                raise PickleTruncatedError
            raise PickleMalformedError(f"the name at byte {start} has no end")
        self.pos = stop + 1
        return str(self.data[start:stop], "utf-8")

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def target_list(self) -> list[object]:
        target = self.stack[-1]
        if type(target) is not list:
            raise self.malformed("something is appended to no list")
        return target

    def target_pairs(self) -> Pairs:
        target = self.stack[-1]
        if type(target) is not Pairs:
            raise self.malformed("an item is set on no dict")
        return target

    def named(self, module: object, name: object) -> Global:
        if type(module) is not str or type(name) is not str:
            raise self.malformed("a global has no name")
        dotted = f"{module}.{name}"
        if dotted not in self.allowed:
            raise ForbiddenGlobalError(dotted[:_MAX_GLOBAL_NAME_BYTES])
        return Global(dotted, self.allowed[dotted])


Operation = Callable[[_Machine, int], object]
"""Gets the machine and where its operand is; returns what is pushed, where something is."""


def _number(layout: str) -> tuple[int, Operation]:
    unpack_from = struct.Struct(layout).unpack_from
    return struct.calcsize(layout), lambda machine, at: unpack_from(machine.data, at)[0]


def _sized(layout: str, make: Callable[[bytes], object]) -> tuple[int, Operation]:
    """Return the operation that makes a value of bytes whose number stands before them."""
    size, length = _number(layout)
    return size, lambda machine, at: make(machine.take(length(machine, at)))


def _text(data: bytes) -> str:
    return str(data, "utf-8")


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _tuple_of(count: int) -> tuple[int, Operation]:
    def make(machine: _Machine, _at: int) -> object:
        items = tuple(machine.stack[-count:])
        if len(items) < count:
            raise IndexError
        del machine.stack[-count:]
        return items

    return 0, make


def _stack_global(machine: _Machine, _at: int) -> object:
    name = machine.stack.pop()
    return machine.named(machine.stack.pop(), name)


def _call(machine: _Machine, _at: int) -> object:
    args = machine.stack.pop()
    callee = machine.stack.pop()
    if type(callee) is not Global or type(args) is not tuple:
        raise machine.malformed("something uncallable is called")
    return Record(callee.name, args) if callee.build is None else callee.build(args)


def _put(layout: str) -> tuple[int, Operation]:
    size, index = _number(layout)

    def put(machine: _Machine, at: int) -> None:
        machine.memo[index(machine, at)] = machine.stack[-1]  # type: ignore[index]  # a number

    return size, put


def _get(layout: str) -> tuple[int, Operation]:
    size, index = _number(layout)
    return size, lambda machine, at: machine.memo[index(machine, at)]


def _memoize(machine: _Machine, _at: int) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _mark(machine: _Machine, _at: int) -> None:
    if len(machine.marks) >= _MAX_MARKS:
        raise PickleMalformedError(f"it nests deeper than {_MAX_MARKS} levels")
    machine.marks.append(machine.stack)
    machine.stack = []


def _append(machine: _Machine, _at: int) -> None:
    item = machine.stack.pop()
    machine.target_list().append(item)


def _appends(machine: _Machine, _at: int) -> None:
    items = machine.pop_mark()
    machine.target_list().extend(items)


def _setitem(machine: _Machine, _at: int) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    machine.target_pairs().append((key, value))


def _setitems(machine: _Machine, _at: int) -> None:
    items = machine.pop_mark()
    if len(items) % 2:
        raise machine.malformed("a key has no value")
    machine.target_pairs().extend(zip(items[::2], items[1::2], strict=True))


def _build(machine: _Machine, _at: int) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is not Record or target.state is not None or state is None:
        raise machine.malformed("state is set on a finished value")
    target.state = state


# The bytes of the fixed operand, and what to do.
_VALUES: dict[bytes, tuple[int, Operation]] = {
    b"N": (0, lambda _machine, _at: None),
    b"\x88": (0, lambda _machine, _at: True),
    b"\x89": (0, lambda _machine, _at: False),
    b")": (0, lambda _machine, _at: ()),
    b"}": (0, lambda _machine, _at: Pairs()),
    b"]": (0, lambda _machine, _at: []),
    b"\x8f": (0, lambda _machine, _at: []),  # EMPTY_SET: order kept, nothing hashed
    b"K": _number("<B"),
    b"M": _number("<H"),
    b"J": _number("<i"),
    b"G": _number(">d"),
    b"\x8a": _sized("<B", _long),
    b"\x8c": _sized("<B", _text),
    b"X": _sized("<I", _text),
    b"\x8d": _sized("<Q", _text),
    b"C": _sized("<B", bytes),
    b"B": _sized("<I", bytes),
    b"\x8e": _sized("<Q", bytes),
    b"h": _get("<B"),
    b"j": _get("<I"),
    b"t": (0, lambda machine, _at: tuple(machine.pop_mark())),
    b"\x91": (0, lambda machine, _at: tuple(machine.pop_mark())),  # FROZENSET
    b"\x85": _tuple_of(1),
    b"\x86": _tuple_of(2),
    b"\x87": _tuple_of(3),
    b"c": (0, lambda machine, _at: machine.named(machine.take_line(), machine.take_line())),
    b"\x93": (0, _stack_global),
    b"R": (0, _call),  # REDUCE
    b"\x81": (0, _call),  # NEWOBJ
    b"Q": (0, lambda machine, _at: PersistentId(machine.stack.pop())),  # BINPERSID
}
_ACTIONS: dict[bytes, tuple[int, Operation]] = {
    b"\x80": (1, lambda _machine, _at: None),  # PROTO
    b"\x95": (8, lambda _machine, _at: None),  # FRAME
    b"\x94": (0, _memoize),
    b"q": _put("<B"),
    b"r": _put("<I"),
    b"(": (0, _mark),
    b"a": (0, _append),
    b"e": (0, _appends),
    b"\x90": (0, _appends),  # ADDITEMS
    b"s": (0, _setitem),
    b"u": (0, _setitems),
    b"b": (0, _build),
}
_STOP = ord(".")
_TABLE: list[tuple[bool, int, Operation] | None] = [None] * 256
for _is_value, _operations in ((True, _VALUES), (False, _ACTIONS)):
    for _code, _operation in _operations.items():
        _TABLE[_code[0]] = (_is_value, *_operation)


def build_ordered_dict(args: tuple[object, ...]) -> object:
    """Return the stand-in of `collections.OrderedDict()`; torch never passes arguments."""
    if args:
        raise PickleMalformedError("an OrderedDict is given arguments")
    return Pairs()


_NUMBER = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)")
_DTYPE_STATES = tuple((3, order, None, None, None, -1, -1, 0) for order in "<>|=")
_DTYPE = "numpy.dtype"
_ARRAY = "numpy.ndarray"
_BUFFER = "_io.BytesIO"


def is_inert_with_numpy(pickled: bytes) -> bool:
    """Return whether unpickling `pickled` makes only plain values, numpy's too, and buffers."""
    made: list[Record] = []

    def kept(build: Builder) -> Builder:
        def call(args: tuple[object, ...]) -> object:
            found = build(args)
            if isinstance(found, Record):
                made.append(found)
            return found

        return call

    try:
        interpret(pickled, allowed={name: kept(build) for name, build in _NUMPY.items()})
    except (ForbiddenGlobalError, PickleMalformedError, PickleTruncatedError):
        return False
    return all(map(_is_finished, made))


def _called(name: str) -> Builder:
    """Return what accepts the calls by which one function is pickled with numbers and buffers."""

    def call(args: tuple[object, ...]) -> object:
        match name, args:
            case ("dtype", (str(kind), False, True)) if _NUMBER.fullmatch(kind):
                return Record(_DTYPE, args)
            case ("array", (Global(name="numpy.ndarray"), (0,), b"b")):
                return Record(_ARRAY, args)
            case ("scalar", (Record(name="numpy.dtype"), bytes())):
                return args
            case ("buffer", _):
                return Record(_BUFFER, args)
            case ("encode", (str(text), "latin1")):
                # Protocol 2 writes bytes as text of as many characters below 256. Others make the
                # real call fail, which runs nothing either.
                return text.encode("latin1", "replace")
            case ("bytes", ()):
                return b""
        raise PickleMalformedError("this is not how numbers and buffers are pickled")

    return call


_NUMPY: Mapping[str, Builder] = {
    _DTYPE: _called("dtype"),
    _ARRAY: _called("nothing"),
    _BUFFER: _called("buffer"),
    "_codecs.encode": _called("encode"),
    "__builtin__.bytes": _called("bytes"),
    # The first is spelt by numpy 2, the second by numpy 1.
    "numpy._core.multiarray._reconstruct": _called("array"),
    "numpy.core.multiarray._reconstruct": _called("array"),
    "numpy._core.multiarray.scalar": _called("scalar"),
    "numpy.core.multiarray.scalar": _called("scalar"),
}


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
