"""Values as one file of `torch.save`, written from front to back while they are read.

Lengths are known before, so every local header is exact but for the checksum, which follows the
bytes as zip allows and stands in the directory at the end.
"""

from __future__ import annotations

import collections
import io
import itertools
import pickle
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from ckpt_storage.errors import InvalidInputError, StorageError, UnsafeContentError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import TensorInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.writing import ObjectWriter

from .layout import Segment, Stored, elements_of
from .reads import SegmentStream
from .select import payload_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ALIGN_BYTES = 64
_PADDING_ID = 0x4246  # torch's own choice; nobody reads it
_ROOT = "archive"
_SMALL_BYTES = 64 << 10
"""Shorter pieces are gathered."""
_GATHER_BYTES = 1 << 20
_WIDE_BYTES = 1 << 30
"""Records from here on tell their length in 64 bits."""
_SHORT_LIST = 128
_ABSENT_PER_KEY = 16
_ABSENT_COUNT = 1 << 16

_Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchValues:
    """What goes into the file.

    blobs: FQNs of what is no tensor. held: those of them that are in memory as objects; the others
    are pickled in the source. paths: where each value sits in the nested state dict; a value that
    it does not name sits at the top. ties: alias to target, equal in all bytes.
    """

    tensors: Mapping[str, TensorInfo]
    blobs: Sequence[str]
    held: Mapping[str, object]
    paths: Mapping[str, tuple[str | int, ...]]
    ties: Mapping[str, str]


def write_torch_file(  # one call site, all named
    values: TorchValues,
    store: Store,
    path: str,
    *,
    stream: Callable[[Sequence[Segment]], SegmentStream],
    size_of: Callable[[str], int],
    options: TransferOptions,
    deadline: Deadline,
    on_bytes: Callable[[int], None],
    unsafe_pickle: bool,
    begin: Callable[[], None],
    check_unchanged: Callable[[], None],
) -> None:
    """Write all values as a nested state dict; visible only complete, durable on return.

    `stream` reads segments of the source, `size_of` tells the length of a stored value. `begin` is
    called once it is known that the values can be written, `check_unchanged` before they become
    visible. Tied tensors share their storage, as they did. Raises `UnsafeContentError` for a value
    that torch does not load with `weights_only`, unless `unsafe_pickle`.
    """
    stored_blobs = [fqn for fqn in values.blobs if fqn not in values.held]
    segments = [Stored(fqn=fqn, size_bytes=size_of(fqn)) for fqn in stored_blobs]
    data = stream(segments)
    objects = dict(values.held)
    for segment in segments:
        pickled = b"".join(data.take(segment.size_bytes))
        objects[segment.fqn] = _loaded(segment.fqn, pickled, unsafe_pickle=unsafe_pickle)
    pickler, main = _pickled(values, objects)
    begin()
    total_bytes = sum(map(payload_bytes, values.tensors.values()))
    writer = ObjectWriter(
        store,
        path,
        options=options,
        planned_bytes=total_bytes + len(main),
        deadline=deadline,
        on_bytes=on_bytes,
    )
    archive = _Zip(writer)
    whole = [values.tensors[fqn] for fqn in pickler.streamed]
    data = stream([elements_of(one) for one in whole])
    try:
        archive.record("data.pkl", len(main), [memoryview(main)])
        # No ".format_version": it would let torch compute where records lie, as its own zip
        # writer places them. Without it torch looks each one up.
        archive.record("byteorder", 6, [memoryview(b"little")])
        for key, (length, held) in pickler.stored.items():
            views = data.take(length) if held is None else [memoryview(held)]
            archive.record(f"data/{key}", length, views, is_aligned=True)
            deadline.check(f"Writing {path}")
        archive.record("version", 2, [memoryview(b"3\n")])
        archive.record(".data/serialization_id", 40, [memoryview(b"0" * 40)])
        check_unchanged()
        archive.finish()
    except BaseException as error:
        try:
            writer.abort()
        except StorageError as failure:
            error.add_note(f"Discarding the upload failed too: {failure}")
        raise


class _Stream:
    """What a zip is written to: it goes forward only, so checksums follow the bytes.

    Not of `io`: those close themselves, perhaps before the zip that was given up writes its end.
    """

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self._gathered = bytearray()
        self.position = 0

    def flush(self) -> None:
        """Do nothing: all goes out in the end."""

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        if view.nbytes < _SMALL_BYTES:
            self._gathered += view
        if view.nbytes >= _SMALL_BYTES or len(self._gathered) >= _GATHER_BYTES:
            self.hand_on()
        if view.nbytes >= _SMALL_BYTES:
            self._writer.write(view)
        self.position += view.nbytes
        return view.nbytes

    def hand_on(self) -> None:
        gathered, self._gathered = self._gathered, bytearray()
        self._writer.write(memoryview(gathered))


class _Zip:
    """A zip of stored records, written in one pass."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self._stream = _Stream(writer)
        self._file = zipfile.ZipFile(self._stream, "w")  # type: ignore[call-overload]  # it needs no more

    def record(
        self, name: str, length: int, views: Iterable[memoryview], *, is_aligned: bool = False
    ) -> None:
        """Append one record of `length` bytes."""
        info = zipfile.ZipInfo(f"{_ROOT}/{name}")
        is_wide = length >= _WIDE_BYTES
        if is_aligned:
            wide_bytes = 20 if is_wide else 0
            before = self._stream.position + 30 + len(info.filename.encode()) + 4 + wide_bytes
            padding = -before % _ALIGN_BYTES
            info.extra = struct.pack("<2H", _PADDING_ID, padding) + b"Z" * padding
        with self._file.open(info, "w", force_zip64=is_wide) as file:
            for view in views:
                file.write(view)

    def finish(self) -> None:
        """Append the directory and make the file visible."""
        self._file.close()
        self._stream.hand_on()
        self._writer.complete()


@dataclass(frozen=True, slots=True)
class _StorageStub:
    """The storage of the tensor `fqn`, still in the source."""

    fqn: str
    kind: object
    count: int
    length: int


class _TensorStub:
    """A tensor that is still in the source: it pickles as torch pickles a tensor."""

    def __init__(self, storage: _StorageStub, dtype: str, shape: tuple[int, ...]) -> None:
        self._storage = storage
        self._dtype = dtype
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        strides: list[int] = []
        step = 1
        for size in reversed(self._shape):
            strides.append(step)
            step *= max(size, 1)
        hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
        common = (self._storage, 0, self._shape, tuple(reversed(strides)), False, hooks)
        if DTYPES[self._dtype].storage_class is not None:
            return torch._utils._rebuild_tensor_v2, common  # noqa: SLF001  # what torch.save names
        return torch._utils._rebuild_tensor_v3, (*common, getattr(torch, self._dtype))  # noqa: SLF001


class _Pickler(pickle.Pickler):
    """Pickles a state dict whose tensors are stubs; storages of small values it keeps.

    Storages are numbered in the order in which the pickle names them, as in torch's own files.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        # The length of each storage, and its bytes where they are in memory.
        self.stored: dict[str, tuple[int, bytes | None]] = {}
        self.streamed: list[str] = []
        self._numbers: dict[int | str, str] = {}
        self._kept: list[object] = []

    def persistent_id(self, obj: Any) -> Any:  # noqa: ANN401  # whatever is in the state dict
        """Return what stands for a storage."""
        if isinstance(obj, _StorageStub):
            if obj.fqn not in self._numbers:
                self._number(obj.fqn, obj.length, None)
                self.streamed.append(obj.fqn)
            return ("storage", obj.kind, self._numbers[obj.fqn], "cpu", obj.count)
        if not (isinstance(obj, torch.storage.TypedStorage) or torch.is_storage(obj)):
            return None
        typed: Any = obj if isinstance(obj, torch.storage.TypedStorage) else None
        untyped: Any = obj if typed is None else typed._untyped_storage  # noqa: SLF001  # as torch.save
        address: int = untyped._cdata  # noqa: SLF001  # as above
        if address not in self._numbers:
            data = _bytes_of(untyped)
            self._number(address, len(data), data)
            self._kept.append(untyped)  # its address must not come again
        number = self._numbers[address]
        if typed is not None:
            kind: object = getattr(torch, typed._pickle_storage_type())  # noqa: SLF001  # as above
            return ("storage", kind, number, "cpu", typed._size())  # noqa: SLF001  # as above
        return ("storage", torch.UntypedStorage, number, "cpu", untyped.nbytes())

    def _number(self, key: int | str, length: int, data: bytes | None) -> None:
        number = self._numbers[key] = str(len(self.stored))
        self.stored[number] = length, data


def _bytes_of(storage: Any) -> bytes:  # noqa: ANN401  # torch's storages are half typed
    """Return the bytes of a small storage that is in memory."""
    if not storage.nbytes():
        return b""
    flat = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
    data: bytes = flat.numpy().tobytes()
    return data


def _pickled(values: TorchValues, objects: Mapping[str, object]) -> tuple[_Pickler, bytes]:
    """Return the pickle of the nested state dict, and what it says of storages."""
    storages: dict[str, _StorageStub] = {}
    flat: dict[str, object] = {}
    for fqn, info in values.tensors.items():
        target = values.ties.get(fqn, fqn)
        if target not in storages:
            storages[target] = _storage_of(target, values.tensors[target])
        flat[fqn] = _TensorStub(storages[target], info.dtype, info.shape)
    flat |= {fqn: objects[fqn] for fqn in values.blobs}
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(_nested(flat, values.paths))
    return pickler, file.getvalue()


def _storage_of(fqn: str, info: TensorInfo) -> _StorageStub:
    length = payload_bytes(info)
    kind = DTYPES[info.dtype]
    if kind.storage_class is None:
        return _StorageStub(fqn, torch.UntypedStorage, length, length)
    storage = getattr(torch, kind.storage_class)
    return _StorageStub(fqn, storage, length // kind.item_bytes, length)


def _loaded(fqn: str, pickled: bytes, *, unsafe_pickle: bool) -> object:
    """Return a value that is no tensor as the object that it is."""
    try:
        return torch.load(io.BytesIO(pickled), map_location="cpu", weights_only=not unsafe_pickle)
    except Exception as error:
        raise UnsafeContentError(
            f"{fqn} is not a value that torch loads with weights_only=True.",
            next_step="Leave it out with exclude=, or, if you trust who wrote it, pass "
            "unsafe_pickle=True.",
        ) from error


def lists_are_plausible(paths: Collection[_Path]) -> bool:
    """Return whether the lists that paths lead through are about as long as what is in them.

    Whoever nests values anew makes a list as long as its highest index, so one number could take
    all memory. Planners may leave out some values, but not nearly all.
    """
    indices = [key for key in itertools.chain.from_iterable(paths) if type(key) is int]
    if min(indices, default=0) < 0:
        return False
    if max(indices, default=0) <= _SHORT_LIST:
        return True
    longest: dict[_Path, int] = {}
    for path in paths:
        for at, key in enumerate(path):
            if isinstance(key, int):
                longest[path[:at]] = max(longest.get(path[:at], 0), key + 1)
    key_count = sum(map(len, paths))
    return sum(longest.values()) <= _ABSENT_PER_KEY * key_count + _ABSENT_COUNT


def _nested(flat: Mapping[str, object], known: Mapping[str, _Path]) -> object:
    """Return the nested state dict; lists of which a part was dropped would shift, so refuse."""
    paths = {fqn: known.get(fqn, (fqn,)) for fqn in flat}
    if not lists_are_plausible(paths.values()):
        raise InvalidInputError(
            "The values do not form a nested state dict: its lists would be far longer than what "
            "is in them.",
            next_step="Leave the names whose paths are wrong out with exclude=.",
        )
    try:
        return unflatten_state_dict(dict(flat), paths)
    except Exception as error:
        raise InvalidInputError(
            f"The values do not form a nested state dict: {error}.",
            next_step="Leave the names that contradict each other out with exclude=.",
        ) from error
