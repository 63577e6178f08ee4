"""A pickle reader that builds nothing but inert values.

It imports nothing, calls nothing that the pickle names, and hashes nothing that the pickle holds: a
class or function becomes a `Global`, a call to it a `Record`, a dictionary a list of pairs. Memory
and time stay linear in the length of the pickle.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Builder = Callable[[tuple[object, ...]], object]
Allowed = Mapping[str, Builder | None]

# Torch nests seven MARKs in `.metadata` and three in `data.pkl`.
_MAX_MARKS = 100
_MAX_GLOBAL_NAME_BYTES = 512
_MAX_FIELDS = 64


class PickleMalformedError(Exception):
    """The bytes are no pickle that torch would write; the text says where and why."""


class PickleTruncatedError(PickleMalformedError):
    """The bytes end inside the pickle."""


class ForbiddenGlobalError(PickleMalformedError):
    """The pickle names a class or function outside the allow-list; the text is its dotted name."""


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """The name of a class or function, which was not looked up."""

    name: str
    build: Builder | None


@dataclass(slots=True, eq=False)
class Record:
    """A call of `name` that did not take place; `state` was for `__setstate__`."""

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
        """Return the pairs as a dict of attributes; of no more than any class has.

        Raises `PickleMalformedError`, also for a key that is no string or occurs twice.
        """
        found: dict[str, object] = {}
        if len(self) > _MAX_FIELDS:
            raise PickleMalformedError(f"an object has more than {_MAX_FIELDS} attributes")
        for key, value in self:
            if type(key) is not str or key in found:
                raise PickleMalformedError("an attribute name is no string or occurs twice")
            found[key] = value
        return found


def interpret(data: bytes, allowed: Allowed) -> object:
    """Return the value of a pickle; what lies behind its STOP is not looked at.

    `allowed` maps dotted names to None, or to a builder that gets the arguments of a
    call and returns an inert value; a builder may raise `PickleMalformedError`.

    Raises `PickleMalformedError`, also as `PickleTruncatedError` or `ForbiddenGlobalError`.
    """
    machine = _Machine(data, allowed)
    try:
        return machine.run()
    except IndexError:
        raise PickleMalformedError(f"the stack is empty at byte {machine.pos}") from None
    except KeyError:
        raise PickleMalformedError(f"the memo has no such entry at byte {machine.pos}") from None
    except UnicodeDecodeError:
        raise PickleMalformedError(f"a string before byte {machine.pos} is not UTF-8") from None


class _Machine:
    __slots__ = ("allowed", "data", "marks", "memo", "pos", "stack")

    def __init__(self, data: bytes, allowed: Allowed) -> None:
        self.data, self.allowed = data, allowed
        self.pos = 0
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
            is_value, operand_bytes, unpack_from, operation = entry
            self.pos = pos + 1 + operand_bytes
            if self.pos > end:
                raise PickleTruncatedError
            if operand_bytes:
                found = operation(self, unpack_from(data, pos + 1)[0])
            else:
                found = operation(self)
            if is_value:
                self.stack.append(found)
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

    def text(self, length_bytes: int) -> str:
        return str(self.take(length_bytes), "utf-8")

    def line(self) -> str:
        start = self.pos
        stop = self.data.find(b"\n", start, start + _MAX_GLOBAL_NAME_BYTES)
        if stop < 0:
            if len(self.data) - start < _MAX_GLOBAL_NAME_BYTES:
                raise PickleTruncatedError
            raise PickleMalformedError(f"the name at byte {start} has no end")
        self.pos = stop + 1
        return str(self.data[start:stop], "utf-8")

    def mark(self) -> None:
        if len(self.marks) >= _MAX_MARKS:
            raise PickleMalformedError(f"it nests deeper than {_MAX_MARKS} levels")
        self.marks.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def last(self, count: int) -> tuple[object, ...]:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise IndexError
        del self.stack[-count:]
        return items

    def append(self, items: Sequence[object]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise self.malformed("something is appended to no list")
        target.extend(items)

    def set_items(self, items: Sequence[object]) -> None:
        target = self.stack[-1]
        if type(target) is not Pairs or len(items) % 2:
            raise self.malformed("an item is set on no dict, or a key has no value")
        target.extend(zip(items[::2], items[1::2], strict=True))

    def put(self, at: int) -> None:
        self.memo[at] = self.stack[-1]

    def named(self, module: object, name: object) -> Global:
        if type(module) is not str or type(name) is not str:
            raise self.malformed("a global has no name")
        dotted = f"{module}.{name}"
        if dotted not in self.allowed:
            raise ForbiddenGlobalError(dotted[:_MAX_GLOBAL_NAME_BYTES])
        return Global(dotted, self.allowed[dotted])

    def call(self) -> object:
        callee, args = self.last(2)
        if type(callee) is not Global or type(args) is not tuple:
            raise self.malformed("something uncallable is called")
        return Record(callee.name, args) if callee.build is None else callee.build(args)

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if type(target) is not Record or target.state is not None or state is None:
            raise self.malformed("state is set on a finished value")
        target.state = state


# Gets the machine and the operand, if there is one.
Operation = Callable[..., object]


def _long(machine: _Machine, length_bytes: int) -> int:
    return int.from_bytes(machine.take(length_bytes), "little", signed=True)


# The layout of the operand, and what makes the value that is pushed.
_VALUES: dict[bytes, tuple[str, Operation]] = {
    b"N": ("", lambda _machine: None),
    b"\x88": ("", lambda _machine: True),
    b"\x89": ("", lambda _machine: False),
    b")": ("", lambda _machine: ()),
    b"}": ("", lambda _machine: Pairs()),
    b"]": ("", lambda _machine: []),
    b"\x8f": ("", lambda _machine: []),  # EMPTY_SET: order kept, nothing hashed
    b"K": ("<B", lambda _machine, number: number),
    b"M": ("<H", lambda _machine, number: number),
    b"J": ("<i", lambda _machine, number: number),
    b"G": (">d", lambda _machine, number: number),
    b"\x8a": ("<B", _long),
    b"\x8c": ("<B", _Machine.text),
    b"X": ("<I", _Machine.text),
    b"\x8d": ("<Q", _Machine.text),
    b"C": ("<B", _Machine.take),
    b"B": ("<I", _Machine.take),
    b"\x8e": ("<Q", _Machine.take),
    b"h": ("<B", lambda machine, at: machine.memo[at]),
    b"j": ("<I", lambda machine, at: machine.memo[at]),
    b"t": ("", lambda machine: tuple(machine.since_mark())),
    b"\x91": ("", lambda machine: tuple(machine.since_mark())),  # FROZENSET
    b"\x85": ("", lambda machine: machine.last(1)),
    b"\x86": ("", lambda machine: machine.last(2)),
    b"\x87": ("", lambda machine: machine.last(3)),
    b"c": ("", lambda machine: machine.named(machine.line(), machine.line())),
    b"\x93": ("", lambda machine: machine.named(*machine.last(2))),  # STACK_GLOBAL
    b"R": ("", _Machine.call),  # REDUCE
    b"\x81": ("", _Machine.call),  # NEWOBJ
    b"Q": ("", lambda machine: PersistentId(machine.stack.pop())),  # BINPERSID
}
_ACTIONS: dict[bytes, tuple[str, Operation]] = {
    b"\x80": ("<B", lambda _machine, _protocol: None),
    b"\x95": ("<Q", lambda _machine, _frame_bytes: None),
    b"\x94": ("", lambda machine: machine.put(len(machine.memo))),
    b"q": ("<B", _Machine.put),
    b"r": ("<I", _Machine.put),
    b"(": ("", _Machine.mark),
    b"a": ("", lambda machine: machine.append(machine.last(1))),
    b"e": ("", lambda machine: machine.append(machine.since_mark())),
    b"\x90": ("", lambda machine: machine.append(machine.since_mark())),  # ADDITEMS
    b"s": ("", lambda machine: machine.set_items(machine.last(2))),
    b"u": ("", lambda machine: machine.set_items(machine.since_mark())),
    b"b": ("", _Machine.build),
}
_STOP = ord(".")
_TABLE: list[tuple[bool, int, Callable[[bytes, int], tuple[Any, ...]], Operation] | None]
_TABLE = [None] * 256
for _is_value, _operations in ((True, _VALUES), (False, _ACTIONS)):
    for _code, (_layout, _operation) in _operations.items():
        _operand = struct.Struct(_layout)
        _TABLE[_code[0]] = (_is_value, _operand.size, _operand.unpack_from, _operation)


def build_ordered_dict(args: tuple[object, ...]) -> object:
    """Return the stand-in of `collections.OrderedDict()`; torch never passes arguments."""
    if args:
        raise PickleMalformedError("an OrderedDict is given arguments")
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


def is_inert_with_numpy(pickled: bytes) -> bool:
    """Return whether unpickling `pickled` makes only plain values, numpy's too, and buffers."""
    made: list[Record] = []

    def build(kind: str, args: tuple[object, ...]) -> object:
        found = _called(kind, args)
        if isinstance(found, Record):
            made.append(found)
        return found

    allowed = {name: partial(build, name.rpartition(".")[2]) for name in _NUMPY}
    try:
        interpret(pickled, allowed)
    except PickleMalformedError:
        return False
    return all(map(_is_finished, made))


def _called(kind: str, args: tuple[object, ...]) -> object:
    """Accept the calls by which numbers and buffers are pickled."""
    match kind, args:
        case ("dtype", (str(name), False, True)) if _NUMBER.fullmatch(name):
            return Record(kind, args)
        case ("_reconstruct", (Global(name="numpy.ndarray"), (0,), b"b")) | ("BytesIO", _):
            return Record(kind, args)
        case ("scalar", (Record(name="dtype"), bytes())):
            return args
        case ("encode", (str(text), "latin1")):
            # Protocol 2 writes bytes as text of as many characters below 256. Others make the
            # real call fail, which runs nothing either.
            return text.encode("latin1", "replace")
        case ("bytes", ()):
            return b""
    raise PickleMalformedError("this is not how numbers and buffers are pickled")


def _is_finished(record: Record) -> bool:
    """Return whether an object was given the state that is written for its kind."""
    match record.name, record.state:
        case ("dtype", state):
            return state in _DTYPE_STATES
        case ("BytesIO", (bytes(), int(), None | [])):
            return not record.args
        case ("_reconstruct", (1, tuple(shape), Record(name="dtype"), bool(), bytes())):
            return all(type(size) is int and size >= 0 for size in shape)
    return False
