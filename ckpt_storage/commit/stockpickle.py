"""The pickle of torch's `Metadata`, with its two tables written from columns and by opcode.

One table has an entry for each item of every rank, the other a chunk; pickled as objects an entry
takes some 30 us, most of it in making it.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_storage.format.documents import Counts

_PROTOCOL = 3
_Place = tuple[int, ...] | None


class StockEntry(NamedTuple):
    """Where an item lies: `offsets` None for a blob; bytes `[start, start + length)` of `path`."""

    fqn: str
    offsets: _Place
    path: str
    start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryTable:
    """Where all items lie, in columns of one length: positions in the three lists, and bytes.

    No list names anything twice. Of two entries of one name and place the first counts.
    """

    fqns: Sequence[str]
    places: Sequence[_Place]
    paths: Sequence[str]
    fqn: Counts
    place: Counts
    path: Counts
    start: Counts
    length: Counts

    @classmethod
    def of(cls, entries: Iterable[StockEntry]) -> Self:
        """Return the table of these entries."""
        fqns: dict[str, int] = {}
        places: dict[_Place, int] = {}
        paths: dict[str, int] = {}
        rows = [
            (
                fqns.setdefault(entry.fqn, len(fqns)),
                places.setdefault(entry.offsets, len(places)),
                paths.setdefault(entry.path, len(paths)),
                entry.start,
                entry.length,
            )
            for entry in entries
        ]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        return cls(
            fqns=list(fqns),
            places=list(places),
            paths=list(paths),
            fqn=columns[0],
            place=columns[1],
            path=columns[2],
            start=columns[3],
            length=columns[4],
        )

    def firsts(self) -> Counts:
        """Return the rows that count, in order."""
        _, rows = np.unique(self.fqn * len(self.places) + self.place, return_index=True)
        return np.sort(rows)

    def as_objects(self) -> dict[MetadataIndex, _StorageInfo]:
        """Return the table as torch has it."""
        table: dict[MetadataIndex, _StorageInfo] = {}
        for row in self.firsts().tolist():
            place = self.places[self.place[row]]
            index = MetadataIndex(
                self.fqns[self.fqn[row]], None if place is None else torch.Size(place)
            )
            table[index] = _StorageInfo(
                self.paths[self.path[row]], int(self.start[row]), int(self.length[row])
            )
        return table


def pickled(metadata: Metadata, table: EntryTable) -> bytes:
    """Return `metadata` as `pickle.load` gives it, with `table` as its `storage_data`."""
    if not _is_known():
        return pickle.dumps(dataclasses.replace(metadata, storage_data=table.as_objects()))
    # Texts that nothing else in the pickle can be.
    chunk_mark, entry_mark = secrets.token_hex(16), secrets.token_hex(16)
    tensors = metadata.state_dict_metadata
    is_plain = _are_plain(tensors)
    marked = dataclasses.replace(metadata, storage_data=entry_mark)
    if is_plain:
        marked.state_dict_metadata = chunk_mark  # type: ignore[assignment]  # replaced below
    around = io.BytesIO()
    pickler = pickle.Pickler(around, protocol=_PROTOCOL)
    pickler.dump(marked)
    memo = _Memo(_next_memo(pickler, around))
    pieces: list[bytes] = []
    rest = around.getvalue()
    if is_plain:
        before, rest = _split(rest, chunk_mark)
        pieces += (before, *_chunk_opcodes(tensors, memo))
    before, rest = _split(rest, entry_mark)
    pieces += (before, *_entry_opcodes(table, memo), rest)
    return b"".join(pieces)


def _next_memo(pickler: pickle.Pickler, out: io.BytesIO) -> int:
    """Return the first number under which a pickle of protocol 3 has remembered nothing.

    What is behind a table may refer to any before it. A copy of the memo would tell as well, in
    more time than the pickle took.
    """
    size_bytes = out.tell()
    pickler.dump("another text")
    put = out.getvalue()[size_bytes:].partition(b"another text")[2]
    out.truncate(size_bytes)
    # BINPUT or LONG_BINPUT, the number, STOP.
    return int.from_bytes(put[1:-1], "little")


def _is_known() -> bool:
    """Return whether torch's classes are as they were when this was written."""
    index = MetadataIndex("fqn", torch.Size([1]))
    info = _StorageInfo("path", 1, 2)
    state = info.__reduce_ex__(2)[2]
    size = torch.Size([1])
    chunk = ChunkStorageMetadata(size, size)
    properties = TensorProperties(torch.float32)
    tensor = TensorStorageMetadata(properties, size, [chunk])
    return (
        index.__reduce_ex__(2)[2] == {"fqn": "fqn", "offset": size, "index": None}
        and state == {"relative_path": "path", "offset": 1, "length": 2}
        and size.__reduce__() == (torch.Size, ((1,),))
        and chunk.__reduce_ex__(2)[2] == {"offsets": size, "sizes": size}
        and tensor.__reduce_ex__(2)[2]
        == {"properties": properties, "size": size, "chunks": [chunk]}
        and BytesStorageMetadata().__reduce_ex__(2)[2] is None
        and len(properties.__reduce_ex__(2)[2]) == len(_parts(properties))
    )


def _parts(properties: TensorProperties) -> tuple[object, ...]:
    """Return what torch pickles of the properties of a tensor."""
    state: tuple[object, ...] = properties.__getstate__()  # type: ignore[no-untyped-call]
    return state


def _are_plain(tensors: object) -> bool:
    """Return whether all entries are of torch's own classes, as its planner makes them."""
    size = torch.Size
    return type(tensors) is dict and all(
        type(entry) is BytesStorageMetadata
        or (
            type(entry) is TensorStorageMetadata
            and type(entry.properties) is TensorProperties
            and type(entry.size) is size
            and type(entry.chunks) is list
            and all(
                type(chunk) is ChunkStorageMetadata
                and type(chunk.offsets) is type(chunk.sizes) is size
                for chunk in entry.chunks
            )
        )
        for entry in tensors.values()
    )


def _split(data: bytes, mark: str) -> tuple[bytes, bytes]:
    """Return what comes before and behind a mark and the opcode that remembers it."""
    before, _, behind = data.partition(_text(mark))
    # BINPUT has one byte of number, LONG_BINPUT four; both leave the stack as it is.
    return before, behind[2:] if behind[:1] == b"q" else behind[5:]


class _Memo:
    """What the pickle remembers under numbers from `first` on; one opcode pushes it again."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._known: dict[object, int] = {}

    def number(self, key: object) -> int:
        """Return the number under which what `key` stands for is remembered."""
        return self._known[key]

    def has(self, key: object) -> bool:
        """Return whether it is remembered."""
        return key in self._known

    def get(self, key: object) -> bytes:
        """Return the opcode that pushes it."""
        return b"j" + self._known[key].to_bytes(4, "little")

    def keep(self, key: object) -> bytes:
        """Return the opcode that remembers what is on top of the stack."""
        number = self._known[key] = self._next
        self._next += 1
        return b"r" + number.to_bytes(4, "little")

    def put(self, key: object, opcodes: bytes) -> bytes:
        """Return what remembers what `opcodes` push, and leaves the stack as it was."""
        return b"" if key in self._known else opcodes + self.keep(key) + b"0"

    def class_(self, kind: type) -> bytes:
        """Return what remembers a class."""
        return self.put(kind, f"c{kind.__module__}\n{kind.__qualname__}\n".encode())

    def text(self, text: str) -> bytes:
        """Return what remembers a text."""
        return self.put(text, _text(text))

    def size(self, size: _Place) -> bytes:
        """Return what remembers a `torch.Size`, whose class is, or None."""
        if size is None:
            return self.put(None, b"N")
        key = tuple(size)
        if key in self._known:
            return b""
        numbers = b"".join(map(_integer, key))
        return self.put(key, self.get(torch.Size) + b"(" + numbers + b"t\x85R")

    def plain(self, value: object) -> bytes:
        """Return what remembers a value that pickles by itself, such as a dtype."""
        return self.put(("plain", value), _alone(value))


def _alone(value: object) -> bytes:
    """Return the opcodes that push a value, which remember nothing."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out, protocol=_PROTOCOL)
    pickler.fast = True
    pickler.dump(value)
    return out.getvalue()[2:-1]


def _chunk_opcodes(tensors: Mapping[str, STORAGE_TYPES], memo: _Memo) -> Iterator[bytes]:
    """Yield what pushes the table of tensors and their chunks; every entry is an object anew."""
    kinds = (TensorStorageMetadata, ChunkStorageMetadata, TensorProperties, BytesStorageMetadata)
    yield b"}" + b"".join(map(memo.class_, (*kinds, torch.Size)))
    yield b"".join(map(memo.text, ("properties", "size", "chunks", "offsets", "sizes"))) + b"("
    known: dict[object, bytes] = {}
    blob = memo.get(BytesStorageMetadata) + b")\x81"
    for fqn, entry in tensors.items():
        puts, body = b"", blob
        if isinstance(entry, TensorStorageMetadata):
            kept = entry.properties
            key = (
                *(kept.dtype, kept.layout, kept.requires_grad),
                *(kept.memory_format, kept.pin_memory, entry.size),
                tuple([(chunk.offsets, chunk.sizes) for chunk in entry.chunks]),
            )
            found = known.get(key)
            if found is None:
                puts = _remembered(entry, memo)
                found = known[key] = _tensor_body(entry, memo)
            body = found
        # A tensor may be called as one of the keys is.
        name = memo.get(fqn) if memo.has(fqn) else _text(fqn) + memo.keep(fqn)
        yield puts + name + body
    yield b"u"


def _remembered(entry: TensorStorageMetadata, memo: _Memo) -> bytes:
    """Return what remembers all that the body of an entry refers to."""
    sizes = [size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes)]
    values = [value for value in _parts(entry.properties) if type(value) is not bool]
    return b"".join((*map(memo.size, (entry.size, *sizes)), *map(memo.plain, values)))


def _tensor_body(entry: TensorStorageMetadata, memo: _Memo) -> bytes:
    get = memo.get
    parts = b"".join(
        (b"\x88" if value else b"\x89") if type(value) is bool else get(("plain", value))
        for value in _parts(entry.properties)
    )
    chunks = b"".join(
        b"".join(
            (
                get(ChunkStorageMetadata) + b")\x81}(",
                get("offsets") + get(tuple(chunk.offsets)),
                get("sizes") + get(tuple(chunk.sizes)),
                b"ub",
            )
        )
        for chunk in entry.chunks
    )
    return b"".join(
        (
            get(TensorStorageMetadata) + b")\x81}(",
            get("properties") + get(TensorProperties) + b")\x81(" + parts + b"tb",
            get("size") + get(tuple(entry.size)),
            get("chunks") + b"](" + chunks + b"e",
            b"ub",
        )
    )


def _entry_opcodes(table: EntryTable, memo: _Memo) -> Iterator[bytes]:
    """Yield what pushes the table of items: records of one width, filled in by columns."""
    yield b"}" + b"".join(map(memo.class_, (MetadataIndex, _StorageInfo, torch.Size)))
    keys = ("fqn", "offset", "index", "relative_path", "length")
    yield b"".join(map(memo.text, (*keys, *table.fqns, *table.paths)))
    yield b"".join(map(memo.size, table.places)) + b"("
    get, number, blank = memo.get, b"j" + bytes(4), b"\x8a\x08" + bytes(8)
    record = b""
    at: list[int] = []
    for literal, hole in (
        (get(MetadataIndex) + b")\x81}(" + get("fqn"), number),
        (get("offset"), number),
        (get("index") + b"Nub" + get(_StorageInfo) + b")\x81}(" + get("relative_path"), number),
        (get("offset"), blank),
        (get("length"), blank),
        (b"ub", b""),
    ):
        record += literal
        at.append(len(record))
        record += hole
    rows = table.firsts()
    records = np.empty((len(rows), len(record)), dtype=np.uint8)
    records[:] = np.frombuffer(record, dtype=np.uint8)
    columns = (
        *((table.fqn, table.fqns), (table.place, table.places), (table.path, table.paths)),
        *((table.start, None), (table.length, None)),
    )
    for start, (column, names) in zip(at, columns, strict=False):
        if names is None:
            # The opcode and the number of bytes stand before them.
            words = column[rows].astype("<i8")
            records[:, start + 2 : start + 10] = words.view(np.uint8).reshape(-1, 8)
        else:
            numbers = np.array(list(map(memo.number, names)), dtype="<u4")
            words = numbers[column[rows]]
            records[:, start + 1 : start + 5] = words.view(np.uint8).reshape(-1, 4)
    yield records.tobytes()
    yield b"u"


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
