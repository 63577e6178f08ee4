"""A file that `torch.save` wrote, as a source: its tensors are found without reading them."""

from __future__ import annotations

import bisect
import functools
import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError, UnsafeContentError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.source.model import TensorInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace

if TYPE_CHECKING:
    from typing_extensions import Buffer


_TENSORS = "data"
_CENTRAL_BYTES = 46


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes of the file that have one checksum: a storage, of which tensors are views."""

    start: int
    size_bytes: int
    crc32: int


class ZipRecords:
    """The records of one file, as its directory tells them; those of tensors are not read.

    Raises `FormatError` for what is no zip, `IntegrityError` for a record that is no tensor's and
    does not have its checksum: the pickle is checked before anything is made of it.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._infos: list[zipfile.ZipInfo] = []
        self._path = path
        try:
            with zipfile.ZipFile(file) as archive:
                self._names = dict(_name_positions(archive))
                found = sorted(archive.infolist(), key=lambda info: info.header_offset)
                for info in found:
                    self._check_stored(info)
                # torch can be told to write none: then it writes zeros.
                if any(info.CRC for info in found):
                    self._infos = found
                for info in self._infos:
                    if info.filename.split("/")[1:2] != [_TENSORS]:
                        self._check(archive, info)
        except CheckpointError:
            raise
        except Exception as error:
            raise FormatError(
                f"{path} cannot be read ({type(error).__name__}): it is damaged, cut short, or no "
                "file of torch.save.",
                path=path,
                next_step=_RESTORE,
            ) from error
        self._offsets = [info.header_offset for info in self._infos]

    def _check_stored(self, info: zipfile.ZipInfo) -> None:
        """Refuse a compressed record: torch.save makes none, and it may be a zip bomb."""
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise FormatError(
                f"{self._path} holds the compressed record {info.filename:.80}, as no file of "
                "torch.save does.",
                path=self._path,
                next_step="If you trust who made it, load it with torch.load and save it anew.",
            )

    def _check(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
        try:
            archive.read(info)
        except zipfile.BadZipFile as error:
            raise IntegrityError(
                f"{self._path} is damaged: its record {info.filename} does not have the checksum "
                "it was written with.",
                path=self._path,
                offset=info.header_offset,
                next_step=_RESTORE,
            ) from error

    def name_position(self, name: str) -> int | None:
        """Return where the last byte of a record's name is in the directory; None if absent."""
        return self._names.get(name)

    def at(self, start: int) -> Record | None:
        """Return the record whose bytes begin at `start`; None where there is no checksum."""
        number = bisect.bisect_left(self._offsets, start) - 1
        if number < 0 or self._infos[number].compress_type != zipfile.ZIP_STORED:
            return None
        info = self._infos[number]
        return Record(start, info.file_size, info.CRC)


def _name_positions(archive: zipfile.ZipFile) -> Iterator[tuple[str, int]]:
    """Yield each record's name below the archive's root, and where its last byte is."""
    at = archive.start_dir
    for info in archive.infolist():
        stop = at + _CENTRAL_BYTES + len(info.orig_filename.encode())
        yield info.orig_filename.partition("/")[2], stop - 1
        at = stop + len(info.extra) + len(info.comment)


_READ_AHEAD_BYTES = 64 * 1024
_WINDOW_BYTES = 4 << 20
_MAGIC = b"PK\x03\x04"
_RESTORE = "Restore the file from a copy."

Key = tuple[str, tuple[int, ...] | None]


class _StoreFile(io.RawIOBase):
    """A file of a store as Python's file protocol has it, for reading.

    `hidden`: the position of a byte that reads as `?`, if any.
    """

    def __init__(self, store: Store, path: str, size_bytes: int, hidden: int | None) -> None:
        super().__init__()
        self._hidden = hidden
        self._store = store
        self._path = path
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; return it."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        """Fill a buffer as far as the file goes; return how many bytes that are."""
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size_bytes - self._at))
        if count:
            self._store.read(self._path, [(self._at, view[:count])], size_bytes=self._size_bytes)
            if self._hidden is not None and self._at <= self._hidden < self._at + count:
                view[self._hidden - self._at] = ord("?")
            self._at += count
        return count


@dataclass(slots=True)
class TorchFileSource:
    """What a `torch.save` file offers.

    `ties` maps a tensor to an earlier one of the same bytes, `records` to what has a checksum.
    """

    store: Store
    path: str
    tensors: Mapping[str, TensorInfo]
    places: Mapping[Key, ChunkPlace]
    values: Mapping[str, object]
    planner_data: Mapping[str, tuple[str | int, ...]] | None
    ties: Mapping[str, str] = field(default_factory=dict)
    records: Mapping[str, Record] = field(default_factory=dict)
    size_bytes: int = 0
    save_id: str | None = None
    format: Literal["torch_save"] = "torch_save"
    _sound: set[Record] = field(default_factory=set)

    @property
    def blobs(self) -> frozenset[str]:
        """FQNs of the values that are no tensors."""
        return frozenset(self.values)

    def require(self, chunks: Iterable[Key]) -> None:
        """Read the records in which these tensors lie, each once, and check them.

        Raises `IntegrityError` for one that does not have the checksum that torch wrote.
        """
        for fqn, _ in chunks:
            record = self.records.get(fqn)
            if record is not None and record not in self._sound:
                self._check(fqn, record)
                self._sound.add(record)

    def _check(self, fqn: str, record: Record) -> None:
        crc, end = 0, record.start + record.size_bytes
        window = memoryview(bytearray(min(_WINDOW_BYTES, record.size_bytes)))
        for start in range(record.start, end, _WINDOW_BYTES):
            view = window[: end - start]
            self.store.read(self.path, [(start, view)], size_bytes=self.size_bytes)
            crc = zlib.crc32(view, crc)
        if crc != record.crc32:
            raise IntegrityError(
                f"{self.path} is damaged: the {record.size_bytes} bytes at byte "
                f"{record.start}, which hold {fqn}, do not have the checksum that they were "
                "written with.",
                path=self.path,
                fqn=fqn,
                offset=record.start,
                next_step=_RESTORE,
            )

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over the store of the step that begins."""
        del deadline
        self.store = store

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Return where a tensor lies."""
        return self.places[fqn, offsets]

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error for a file that is gone."""
        return IntegrityError(
            f"{self.store.url}/{self.path}, which holds {place.fqn}, is missing.",
            fqn=place.fqn,
            path=self.path,
            offset=0,
            next_step=_RESTORE,
        )


def open_torch_file(store: Store, path: str, *, unsafe_pickle: bool) -> TorchFileSource:
    """Return the source that a `torch.save` file is; reads its directory, pickle and headers.

    Raises `FormatError` for what is no such file, or of the format before torch 1.6, or holds what
    cannot be named or streamed, `UnsafeContentError` for what `weights_only` refuses,
    `IntegrityError` for a damaged pickle, `StorageError`.
    """
    size_bytes = store.stat(path).size_bytes
    shown = f"{store.url}/{path}"
    head = bytearray(min(len(_MAGIC), size_bytes))
    if head:
        store.read(path, [(0, memoryview(head))], size_bytes=size_bytes)
    if bytes(head) != _MAGIC:
        raise FormatError(
            f"{shown} is no file of torch.save, or one of the format before torch 1.6.",
            path=path,
            next_step="Load it with torch.load and save it anew with torch.save.",
        )
    records = ZipRecords(_buffered(store, path, size_bytes), path)
    # Else torch would compute where records lie, which is wrong for some writers' files.
    file = _buffered(store, path, size_bytes, records.name_position(".format_version"))
    state = _loaded(file, path, shown, unsafe_pickle=unsafe_pickle)
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise FormatError(
            f"{shown} holds a {type(state).__name__}, not a state dict with names as keys.",
            path=path,
            next_step="Save a dict that maps names to tensors, such as model.state_dict().",
        )
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        raise FormatError(
            f"{shown} holds two values of one name: {str(error).rstrip('.')}.",
            path=path,
            next_step="Load it with torch.load, rename one, and save it anew.",
        ) from error
    return _source_of(store, path, size_bytes, flat, paths, records)


def _buffered(
    store: Store, path: str, size_bytes: int, hidden: int | None = None
) -> io.BufferedReader:
    return io.BufferedReader(_StoreFile(store, path, size_bytes, hidden), _READ_AHEAD_BYTES)


@functools.cache
def _telling_places() -> Callable[[], AbstractContextManager[object]]:
    """Return in what torch tells where storages lie: older releases do for fake tensors only."""
    file = io.BytesIO()
    torch.save(torch.zeros(1), file)
    file.seek(0)
    storage = torch.load(file, map_location="meta").untyped_storage()
    is_told = getattr(storage, "_checkpoint_offset", None) is not None
    return nullcontext if is_told else FakeTensorMode


def _loaded(file: io.BufferedReader, path: str, shown: str, *, unsafe_pickle: bool) -> object:
    try:
        with _telling_places()():
            return torch.load(file, map_location="meta", weights_only=not unsafe_pickle)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise UnsafeContentError(
            f"{shown} is not a file that torch loads with weights_only=True.",
            path=path,
            phase="load",
            next_step="If you trust who wrote it, allow its types by "
            "torch.serialization.add_safe_globals, or pass unsafe_pickle=True.",
        ) from error
    except Exception as error:
        raise FormatError(
            f"{shown} cannot be read ({type(error).__name__}): it is damaged, cut short, or no "
            "file of torch.save.",
            path=path,
            next_step=_RESTORE,
        ) from error


def _source_of(
    store: Store,
    path: str,
    size_bytes: int,
    flat: Mapping[str, object],
    paths: Mapping[str, tuple[str | int, ...]],
    zipped: ZipRecords,
) -> TorchFileSource:
    tensors: dict[str, TensorInfo] = {}
    places: dict[Key, ChunkPlace] = {}
    records: dict[str, Record] = {}
    values: dict[str, object] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[int, str, tuple[int, ...]], str] = {}
    for fqn, value in flat.items():
        if not isinstance(value, torch.Tensor):
            values[fqn] = value
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        shape = tuple(value.shape)
        if dtype not in DTYPES:
            raise FormatError(
                f"{fqn} has dtype {dtype}, which this release does not read.",
                path=path,
                next_step="Convert it with torch first.",
            )
        _check_plain(fqn, value, path)
        storage_start = _storage_start(value, path)
        start = storage_start + int(value.storage_offset()) * value.element_size()
        place = ChunkPlace(
            path=path,
            fqn=fqn,
            start=start,
            size_bytes=math.prod(shape) * DTYPES[dtype].item_bytes,
            file_bytes=size_bytes,
        )
        zeros = (0,) * len(shape)
        places[fqn, zeros] = place
        tensors[fqn] = TensorInfo(fqn=fqn, dtype=dtype, shape=shape, boxes=[Box(zeros, shape)])
        if place.size_bytes:
            record = zipped.at(storage_start)
            if record is not None:
                records[fqn] = record
            target = first.setdefault((start, dtype, shape), fqn)
            if target != fqn:
                ties[fqn] = target
    return TorchFileSource(
        store, path, tensors, places, values, dict(paths), ties, records, size_bytes
    )


def _storage_start(tensor: torch.Tensor, path: str) -> int:
    """Return where the storage of a tensor lies in the file."""
    if not tensor.numel():
        return 0
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if start is None:
        raise FormatError(
            f"This release of torch does not tell where the tensors of {path} lie.",
            path=path,
            next_step="Use the torch that ckpt_storage is tested with, 2.13.",
        )
    return int(start)


def _check_plain(fqn: str, tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor whose bytes in the file are not its elements in C order."""
    if tensor.layout != torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise FormatError(
            f"{fqn} in {path} is {layout}: it has no elements in a row.",
            path=path,
            next_step="Save it as tensor.to_dense(), or leave it out with exclude=.",
        )
    if tensor.is_quantized:
        raise FormatError(
            f"{fqn} in {path} is quantized: its bytes are not its elements.",
            path=path,
            next_step="Save it as tensor.dequantize(), or leave it out with exclude=.",
        )
    if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return
    raise FormatError(
        f"{fqn} in {path} is stored with strides {tuple(tensor.stride())}, not in C order.",
        path=path,
        next_step="Save it as tensor.contiguous(), or leave it out with exclude=.",
    )
