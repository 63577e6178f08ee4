"""The pickle of torch's `Metadata`, with its table of items written opcode by opcode.

Knows torch's metadata classes and pickle's opcodes (`pickletools` describes them); does no I/O.
Called by `stockwrite`. The table has one entry an item of every rank; pickled as objects it takes
some 30 us each, most of it in making them.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

__all__ = ["StockEntry", "pickled"]

_PROTOCOL = 3
_PLACE = "the table of items"
_Key = TypeVar("_Key")


class StockEntry(NamedTuple):
    """Where an item lies: `offsets` None for a blob; bytes `[start, start + length)` of `path`.

    There is one for each item of all ranks; a tuple is made in a third of a dataclass's time.
    """

    fqn: str
    offsets: tuple[int, ...] | None
    path: str
    start: int
    length: int


def pickled(metadata: Metadata, entries: Iterable[StockEntry]) -> bytes:
    """Return `metadata` as `pickle.load` gives it, with the table of `entries` in `storage_data`.

    Of two entries of one chunk the first counts.
    """
    if not _is_known():
        return pickle.dumps(dataclasses.replace(metadata, storage_data=_table(entries)))
    around = io.BytesIO()
    pickler = pickle.Pickler(around, protocol=_PROTOCOL)
    pickler.dump(dataclasses.replace(metadata, storage_data=_PLACE))
    before, behind = _split(around.getvalue())
    return b"".join((before, *_opcodes(entries, _next_memo(pickler, around)), behind))


def _next_memo(pickler: pickle.Pickler, out: io.BytesIO) -> int:
    """Return the first number under which a pickle of protocol 3 has remembered nothing.

    What is behind the table may refer to any before it. A copy of the memo would tell as well, in
    more time than the pickle took.
    """
    size_bytes = out.tell()
    pickler.dump("another text")
    put = out.getvalue()[size_bytes:].partition(b"another text")[2]
    # BINPUT or LONG_BINPUT, the number, STOP.
    return int.from_bytes(put[1:-1], "little")


def _is_known() -> bool:
    """Return whether torch's classes are as they were when this was written."""
    index = MetadataIndex("fqn", torch.Size([1]))
    info = _StorageInfo("path", 1, 2)
    state = info.__reduce_ex__(2)[2]
    return (
        index.__reduce_ex__(2)[2] == {"fqn": "fqn", "offset": torch.Size([1]), "index": None}
        and state == {"relative_path": "path", "offset": 1, "length": 2}
        and torch.Size([1]).__reduce__() == (torch.Size, ((1,),))
    )


def _table(entries: Iterable[StockEntry]) -> dict[MetadataIndex, _StorageInfo]:
    table: dict[MetadataIndex, _StorageInfo] = {}
    for entry in entries:
        offset = None if entry.offsets is None else torch.Size(entry.offsets)
        info = _StorageInfo(entry.path, entry.start, entry.length)
        table.setdefault(MetadataIndex(entry.fqn, offset), info)
    return table


def _split(around: bytes) -> tuple[bytes, bytes]:
    """Return what comes before and behind the placeholder and the opcode that remembers it."""
    text = _PLACE.encode()
    literal = b"X" + len(text).to_bytes(4, "little") + text
    before, _, behind = around.rpartition(literal)
    # BINPUT has one byte of number, LONG_BINPUT four; both leave the stack as it is.
    return before, behind[2:] if behind[:1] == b"q" else behind[5:]


_KNOWN: tuple[type | str, ...] = (
    *(MetadataIndex, _StorageInfo, torch.Size),
    *("fqn", "offset", "index", "relative_path", "length"),
)


class _Memo:
    """What the pickle remembers under numbers from `first` on; one opcode pushes it again."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._known: dict[type | str, bytes] = {}

    def put_all(self) -> bytes:
        """Return opcodes that remember the classes and keys, and leave the stack as it was."""
        return b"".join(
            (
                _text(value)
                if isinstance(value, str)
                else f"c{value.__module__}\n{value.__qualname__}\n".encode()
            )
            + self._put(self._known, value)
            + b"0"
            for value in _KNOWN
        )

    def get(self, value: type | str) -> bytes:
        """Return the opcode that pushes a class or key."""
        return self._known[value]

    def new(self, codes: dict[_Key, bytes], key: _Key, opcodes: bytes) -> bytes:
        """Return `opcodes` and one that remembers what they push; note in `codes` how to again."""
        return opcodes + self._put(codes, key)

    def _put(self, codes: dict[_Key, bytes], key: _Key) -> bytes:
        number = self._next.to_bytes(4, "little")
        self._next += 1
        codes[key] = b"j" + number
        return b"r" + number


def _opcodes(entries: Iterable[StockEntry], first_memo: int) -> Iterator[bytes]:
    memo = _Memo(first_memo)
    yield b"}" + memo.put_all() + b"("
    index, info, size = memo.get(MetadataIndex), memo.get(_StorageInfo), memo.get(torch.Size)
    fqn_key, offset_key = memo.get("fqn"), memo.get("offset")
    # What stands between the values of an entry: the same bytes every time.
    begin = index + b")\x81}(" + fqn_key
    behind_offset = memo.get("index") + b"Nub" + info + b")\x81}(" + memo.get("relative_path")
    length_key = memo.get("length")
    seen: set[tuple[str, tuple[int, ...] | None]] = set()
    texts: dict[str, bytes] = {}
    places: dict[tuple[int, ...] | None, bytes] = {None: b"N"}
    for entry in entries:
        key = (entry.fqn, entry.offsets)
        if key in seen:
            continue
        seen.add(key)
        fqn, offsets, path = texts.get(entry.fqn), places.get(entry.offsets), texts.get(entry.path)
        # What is new is written out where it is needed first, and referred to from then on.
        fqn_code = fqn or memo.new(texts, entry.fqn, _text(entry.fqn))
        offsets_code = offsets or memo.new(
            places,
            entry.offsets,
            size + b"(" + b"".join(map(_integer, entry.offsets or ())) + b"t\x85R",
        )
        path_code = path or memo.new(texts, entry.path, _text(entry.path))
        yield b"".join(
            (
                begin,
                fqn_code,
                offset_key,
                offsets_code,
                behind_offset,
                path_code,
                offset_key,
                _integer(entry.start),
                length_key,
                _integer(entry.length),
                b"ub",
            )
        )
    yield b"u"


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
