"""A pickle reader that builds nothing but inert values.

It imports nothing, calls nothing that the pickle names, and hashes nothing that the pickle holds: a
class or function becomes a `Global`, a call to it a `Record`, a dictionary a list of pairs. Memory
and time stay linear in the length of the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

Builder = Callable[[tuple[object, ...]], object]


Allowed = Mapping[str, Builder | None]


# Torch nests seven MARKs in `.metadata` and three in `data.pkl`.
_MAX_MARKS = 100


_MAX_GLOBAL_NAME_BYTES = 512


_MAX_FIELDS = 64


_U16 = struct.Struct("<H")


_I32 = struct.Struct("<i")


_U32 = struct.Struct("<I")


_U64 = struct.Struct("<Q")


_F64 = struct.Struct(">d")


class PickleTruncatedError(Exception):
    """The bytes end inside the pickle; at least `need_bytes` from their start are needed."""

    def __init__(self, need_bytes: int) -> None:
        self.need_bytes = need_bytes
        super().__init__(need_bytes)


class PickleMalformedError(Exception):
    """The bytes are no pickle that torch would write; the text says where and why."""


class ForbiddenGlobalError(Exception):
    """The pickle names a class or function outside the allow-list; `name` is dotted."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


class Global:
    """The name of a class or function, which was not looked up."""

    __slots__ = ("build", "name")

    def __init__(self, name: str, build: Builder | None) -> None:
        self.name = name
        self.build = build


class Record:
    """A call or object creation that did not take place.

    `name` is the callee, `args` its arguments, `state` what would have been given to
    `__setstate__` (None: nothing).
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name = name
        self.args = args
        self.state: object = None


class PersistentId:
    """A reference to something stored outside the pickle."""

    __slots__ = ("pid",)

    def __init__(self, pid: object) -> None:
        self.pid = pid


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
                raise PickleTruncatedError(pos + 1)
            code = data[pos]
            if code == _STOP:
                break
            entry = table[code]
            if entry is None:
                raise PickleMalformedError(f"torch does not write opcode {code:#04x} (byte {pos})")
            operand_bytes, operation = entry
            self.pos = pos + 1 + operand_bytes
            if self.pos > end:
                raise PickleTruncatedError(self.pos)
            operation(self, pos + 1)
        self.pos = pos + 1
        if self.marks or len(self.stack) != 1:
            raise PickleMalformedError(f"values are left over at byte {pos}")
        return self.stack[0]

    def take(self, length_bytes: int) -> bytes:
        """Return the next bytes, which follow an operand that gave their length."""
        start = self.pos
        self.pos = start + length_bytes
        if self.pos > len(self.data):
            raise PickleTruncatedError(self.pos)
        return self.data[start : self.pos]

    def take_line(self) -> str:
        start = self.pos
        stop = self.data.find(b"\n", start, start + _MAX_GLOBAL_NAME_BYTES)
        if stop < 0:
            if len(self.data) - start < _MAX_GLOBAL_NAME_BYTES:
                raise PickleTruncatedError(len(self.data) + 1)
            raise PickleMalformedError(f"the name at byte {start} has no end")
        self.pos = stop + 1
        return str(self.data[start:stop], "utf-8")

    def pop_mark(self) -> list[object]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def push_global(self, module: object, name: object) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleMalformedError(f"a global before byte {self.pos} has no name")
        dotted = f"{module}.{name}"
        if dotted not in self.allowed:
            raise ForbiddenGlobalError(dotted[:_MAX_GLOBAL_NAME_BYTES])
        self.stack.append(Global(dotted, self.allowed[dotted]))


Operation = Callable[[_Machine, int], None]


def _nothing(_machine: _Machine, _at: int) -> None:
    """Pass over PROTO and FRAME, whose operands change nothing here."""


def _constant(value: object) -> Operation:
    def push(machine: _Machine, _at: int) -> None:
        machine.stack.append(value)

    return push


def _number(layout: struct.Struct) -> tuple[int, Operation]:
    unpack_from = layout.unpack_from

    def push(machine: _Machine, at: int) -> None:
        machine.stack.append(unpack_from(machine.data, at)[0])

    return layout.size, push


def _text(layout: struct.Struct) -> tuple[int, Operation]:
    unpack_from = layout.unpack_from

    def push(machine: _Machine, at: int) -> None:
        machine.stack.append(str(machine.take(unpack_from(machine.data, at)[0]), "utf-8"))

    return layout.size, push


def _raw(layout: struct.Struct) -> tuple[int, Operation]:
    unpack_from = layout.unpack_from

    def push(machine: _Machine, at: int) -> None:
        machine.stack.append(machine.take(unpack_from(machine.data, at)[0]))

    return layout.size, push


def _byte(machine: _Machine, at: int) -> None:
    machine.stack.append(machine.data[at])


def _short_text(machine: _Machine, at: int) -> None:
    machine.stack.append(str(machine.take(machine.data[at]), "utf-8"))


def _short_raw(machine: _Machine, at: int) -> None:
    machine.stack.append(machine.take(machine.data[at]))


def _long(machine: _Machine, at: int) -> None:
    machine.stack.append(int.from_bytes(machine.take(machine.data[at]), "little", signed=True))


def _memoize(machine: _Machine, _at: int) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _put(machine: _Machine, at: int) -> None:
    machine.memo[machine.data[at]] = machine.stack[-1]


def _long_put(machine: _Machine, at: int) -> None:
    machine.memo[_U32.unpack_from(machine.data, at)[0]] = machine.stack[-1]


def _get(machine: _Machine, at: int) -> None:
    machine.stack.append(machine.memo[machine.data[at]])


def _long_get(machine: _Machine, at: int) -> None:
    machine.stack.append(machine.memo[_U32.unpack_from(machine.data, at)[0]])


def _mark(machine: _Machine, _at: int) -> None:
    if len(machine.marks) >= _MAX_MARKS:
        raise PickleMalformedError(f"it nests deeper than {_MAX_MARKS} levels")
    machine.marks.append(machine.stack)
    machine.stack = []


def _empty_dict(machine: _Machine, _at: int) -> None:
    machine.stack.append(Pairs())


def _empty_list(machine: _Machine, _at: int) -> None:
    machine.stack.append([])


def _tuple(machine: _Machine, _at: int) -> None:
    items = machine.pop_mark()
    machine.stack.append(tuple(items))


def _tuple_of(count: int) -> Operation:
    def push(machine: _Machine, _at: int) -> None:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        items = tuple(stack[-count:])
        del stack[-count:]
        stack.append(items)

    return push


def _append(machine: _Machine, _at: int) -> None:
    item = machine.stack.pop()
    _target_list(machine).append(item)


def _appends(machine: _Machine, _at: int) -> None:
    items = machine.pop_mark()
    _target_list(machine).extend(items)


def _target_list(machine: _Machine) -> list[object]:
    target = machine.stack[-1]
    if type(target) is not list:
        raise PickleMalformedError(f"something is appended to no list before byte {machine.pos}")
    return target


def _setitem(machine: _Machine, _at: int) -> None:
    value = machine.stack.pop()
    key = machine.stack.pop()
    _target_pairs(machine).append((key, value))


def _setitems(machine: _Machine, _at: int) -> None:
    items = machine.pop_mark()
    if len(items) % 2:
        raise PickleMalformedError(f"a key has no value before byte {machine.pos}")
    _target_pairs(machine).extend(zip(items[::2], items[1::2], strict=True))


def _target_pairs(machine: _Machine) -> Pairs:
    target = machine.stack[-1]
    if type(target) is not Pairs:
        raise PickleMalformedError(f"an item is set on no dict before byte {machine.pos}")
    return target


def _global(machine: _Machine, _at: int) -> None:
    module = machine.take_line()
    machine.push_global(module, machine.take_line())


def _stack_global(machine: _Machine, _at: int) -> None:
    name = machine.stack.pop()
    machine.push_global(machine.stack.pop(), name)


def _call(machine: _Machine, _at: int) -> None:
    args = machine.stack.pop()
    callee = machine.stack.pop()
    if type(callee) is not Global or type(args) is not tuple:
        raise PickleMalformedError(f"something uncallable is called before byte {machine.pos}")
    if callee.build is not None:
        machine.stack.append(callee.build(args))
    else:
        machine.stack.append(Record(callee.name, args))


def _build(machine: _Machine, _at: int) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is not Record or target.state is not None or state is None:
        raise PickleMalformedError(f"state is set on a finished value before byte {machine.pos}")
    target.state = state


def _persistent(machine: _Machine, _at: int) -> None:
    machine.stack.append(PersistentId(machine.stack.pop()))


def build_ordered_dict(args: tuple[object, ...]) -> object:
    """Return the stand-in of `collections.OrderedDict()`; torch never passes arguments."""
    if args:
        raise PickleMalformedError("an OrderedDict is given arguments")
    return Pairs()


_STOP = ord(".")


# The bytes of the fixed operand, and what to do; `_TABLE` is indexed by opcode.
_OPERATIONS: dict[bytes, tuple[int, Operation]] = {
    b"\x80": (1, _nothing),  # PROTO
    b"\x95": (8, _nothing),  # FRAME
    b"N": (0, _constant(None)),
    b"\x88": (0, _constant(value=True)),
    b"\x89": (0, _constant(value=False)),
    b")": (0, _constant(())),
    b"}": (0, _empty_dict),
    b"]": (0, _empty_list),
    b"\x8f": (0, _empty_list),  # EMPTY_SET: order kept, nothing hashed
    b"K": (1, _byte),  # BININT1
    b"M": _number(_U16),
    b"J": _number(_I32),
    b"G": _number(_F64),
    b"\x8a": (1, _long),  # LONG1
    b"\x8c": (1, _short_text),
    b"X": _text(_U32),
    b"\x8d": _text(_U64),
    b"C": (1, _short_raw),
    b"B": _raw(_U32),
    b"\x8e": _raw(_U64),
    b"\x94": (0, _memoize),
    b"q": (1, _put),
    b"r": (4, _long_put),
    b"h": (1, _get),
    b"j": (4, _long_get),
    b"(": (0, _mark),
    b"t": (0, _tuple),
    b"\x91": (0, _tuple),  # FROZENSET
    b"\x85": (0, _tuple_of(1)),
    b"\x86": (0, _tuple_of(2)),
    b"\x87": (0, _tuple_of(3)),
    b"a": (0, _append),
    b"e": (0, _appends),
    b"\x90": (0, _appends),  # ADDITEMS
    b"s": (0, _setitem),
    b"u": (0, _setitems),
    b"c": (0, _global),
    b"\x93": (0, _stack_global),
    b"R": (0, _call),  # REDUCE
    b"\x81": (0, _call),  # NEWOBJ
    b"b": (0, _build),
    b"Q": (0, _persistent),  # BINPERSID
}


_TABLE: list[tuple[int, Operation] | None] = [_OPERATIONS.get(bytes([code])) for code in range(256)]
