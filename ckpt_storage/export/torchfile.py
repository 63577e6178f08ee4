"""A file that `torch.save` wrote, as a source: its tensors are found without reading them."""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Literal

import torch
from torch import _weights_only_unpickler
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError, UnsafeContentError
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.source.model import Key, TensorInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace

if TYPE_CHECKING:
    from typing_extensions import Buffer

_torch: Any = torch
"""For what is not typed there."""

_READ_AHEAD_BYTES = 64 * 1024
_WINDOW_BYTES = 4 << 20
_LOCAL = struct.Struct("<26x2H")
_RESTORE = "Restore the file from a copy."
_AGAIN = "If you trust who made it, load it with torch.load and save it anew with torch.save."


@dataclass(frozen=True, slots=True)
class _Record:
    """Bytes of the file that have one checksum, if any: a storage, of which tensors are views."""

    start: int
    size_bytes: int
    crc32: int | None


@dataclass(slots=True, kw_only=True)
class TorchFileSource:
    """What a `torch.save` file offers; `ties` maps a tensor to an earlier one of the same bytes."""

    store: Store
    path: str
    size_bytes: int
    planner_data: Mapping[str, tuple[str | int, ...]]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    save_id: str | None = None
    format: Literal["torch_save"] = "torch_save"
    _places: dict[Key, ChunkPlace] = field(default_factory=dict)
    _records: dict[str, _Record] = field(default_factory=dict)
    _sound: set[_Record] = field(default_factory=set)
    _first: dict[tuple[int, str, tuple[int, ...]], str] = field(default_factory=dict)

    @property
    def blobs(self) -> frozenset[str]:
        """FQNs of the values that are no tensors."""
        return frozenset(self.values)

    def add(self, fqn: str, tensor: torch.Tensor, record: _Record) -> None:
        """Take a tensor over whose storage lies in `record`. Raises `FormatError`."""
        _check_plain(fqn, tensor, self.path)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        start = record.start + int(tensor.storage_offset()) * tensor.element_size()
        zeros = (0,) * len(shape)
        place = self._places[fqn, zeros] = ChunkPlace(
            path=self.path,
            fqn=fqn,
            start=start,
            size_bytes=math.prod(shape) * DTYPES[dtype].item_bytes,
            file_bytes=self.size_bytes,
        )
        self.tensors[fqn] = TensorInfo(fqn=fqn, dtype=dtype, shape=shape, boxes=[Box(zeros, shape)])
        if place.size_bytes:
            self._records[fqn] = record
            target = self._first.setdefault((start, dtype, shape), fqn)
            if target != fqn:
                self.ties[fqn] = target

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return where tensors lie. Their records are read, each once, and checked.

        Raises `IntegrityError` for one that does not have the checksum that torch wrote.
        """
        for fqn, _ in keys:
            record = self._records.get(fqn)
            if record is not None and record not in self._sound:
                self._check(fqn, record)
                self._sound.add(record)
        return [self._places[key] for key in keys if key in self._places]

    def _check(self, fqn: str, record: _Record) -> None:
        if record.crc32 is None:
            return
        crc, end = 0, record.start + record.size_bytes
        window = memoryview(bytearray(min(_WINDOW_BYTES, record.size_bytes)))
        for start in range(record.start, end, _WINDOW_BYTES):
            view = window[: end - start]
            self.store.read(self.path, [(start, view)], size_bytes=self.size_bytes)
            crc = zlib.crc32(view, crc)
        if crc != record.crc32:
            what = f"the {record.size_bytes} bytes at byte {record.start}, which hold {fqn}, do"
            raise _damaged(self.path, what, record.start, fqn)

    def renew(self, store: Store, deadline: Deadline) -> None:
        """Take over the store of the step that begins."""
        del deadline
        self.store = store

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Return where a tensor lies."""
        return self._places[fqn, offsets]

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
    file = io.BufferedReader(_StoreFile(store, path, size_bytes), _READ_AHEAD_BYTES)
    if file.read(4) != b"PK\x03\x04":
        raise _refused(shown, "is no file of torch.save, or one from before torch 1.6", _AGAIN)
    try:
        archive = _Archive(file, path)
        state = archive.unpickled(unsafe_pickle=unsafe_pickle)
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
        what = f"cannot be read ({type(error).__name__}): it is damaged, cut short, or no file of "
        raise _refused(shown, f"{what}torch.save", _RESTORE) from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        what = f"holds a {type(state).__name__}, not a state dict with names as keys"
        step = "Save a dict that maps names to tensors, such as model.state_dict()."
        raise _refused(shown, what, step)
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        what = f"holds two values of one name: {str(error).rstrip('.')}"
        raise _refused(shown, what, "Load it with torch.load, rename one, save it anew.") from error
    source = TorchFileSource(
        store=store, path=path, size_bytes=size_bytes, planner_data=dict(paths)
    )
    for fqn, value in flat.items():
        if isinstance(value, torch.Tensor):
            source.add(fqn, value, archive.record_of(value))
        else:
            source.values[fqn] = value
    return source


def _refused(path: str, what: str, next_step: str) -> FormatError:
    return FormatError(f"{path} {what}.", path=path, next_step=next_step)


def _damaged(path: str, what: str, offset: int, fqn: str | None = None) -> IntegrityError:
    return IntegrityError(
        f"{path} is damaged: {what} not have the checksum that torch wrote.",
        path=path,
        fqn=fqn,
        offset=offset,
        next_step=_RESTORE,
    )


class _StoreFile(io.RawIOBase):
    """A file of a store as Python's file protocol has it, for reading."""

    def __init__(self, store: Store, path: str, size_bytes: int) -> None:
        super().__init__()
        self._store = store
        self._path = path
        self._size_bytes = size_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size_bytes)[whence])
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size_bytes - self._at))
        if count:
            self._store.read(self._path, [(self._at, view[:count])], size_bytes=self._size_bytes)
            self._at += count
        return count


class _Archive:
    """The zip that `torch.save` makes: small records, which are checked here, and storages.

    Raises `FormatError` for a compressed record, which torch never makes and which may be a bomb,
    `IntegrityError` for a small one that does not have its checksum, `zipfile.BadZipFile`.
    """

    def __init__(self, file: IO[bytes], path: str) -> None:
        self._file = file
        self._path = path
        self._infos: dict[str, zipfile.ZipInfo] = {}
        self._small: dict[str, bytes] = {}
        # A storage must not be freed while its address stands for it.
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._records: dict[int, _Record] = {}
        with zipfile.ZipFile(file) as archive:
            # torch can be told to write none: then it writes zeros.
            has_crcs = any(info.CRC for info in archive.infolist())
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                    what = f"holds the compressed record {info.filename:.80}, as no file of torch"
                    raise _refused(path, f"{what}.save does", _AGAIN)
                if not has_crcs:
                    info.CRC = None  # type: ignore[assignment]  # zipfile then checks none
                name = info.filename.partition("/")[2]
                self._infos[name] = info
                if not name.startswith("data/"):
                    self._small[name] = self._read(archive, info)

    def _read(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
        try:
            return archive.read(info)
        except zipfile.BadZipFile as error:
            what = f"its record {info.filename} does"
            raise _damaged(self._path, what, info.header_offset) from error

    def unpickled(self, *, unsafe_pickle: bool) -> object:
        """Return what was saved; tensors have no bytes, but `record_of` tells where they are."""
        if self._small.get("byteorder", b"little") != b"little":
            raise _refused(self._path, "was written on a big-endian machine", _AGAIN)
        data = io.BytesIO(self._small["data.pkl"])
        kind: Any = _Unpickler if unsafe_pickle else _weights_only_unpickler.Unpickler
        unpickler = kind(data, encoding="utf-8")
        unpickler.persistent_load = self._storage
        try:
            return unpickler.load()
        finally:
            _torch._utils._validate_loaded_sparse_tensors()  # noqa: SLF001  # as torch.load

    def _storage(self, saved: tuple[Any, ...]) -> object:
        """Return a storage without memory for what the pickle says of one."""
        _, kind, key, _, count = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        size_bytes = count * dtype.itemsize
        storage = self._storages.get(key)
        if storage is None:
            info = self._infos[f"data/{key}"]
            if size_bytes > info.file_size:
                raise EOFError(key)
            self._file.seek(info.header_offset)
            gap_bytes = _LOCAL.size + sum(_LOCAL.unpack(self._file.read(_LOCAL.size)))
            storage = self._storages[key] = _torch.UntypedStorage(size_bytes, device="meta")
            record = _Record(info.header_offset + gap_bytes, info.file_size, info.CRC)
            self._records[_address(storage)] = record
        return _torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)

    def record_of(self, tensor: torch.Tensor) -> _Record:
        """Return where the storage of a tensor lies; anywhere, if it has none or no elements."""
        if tensor.layout != torch.strided or not tensor.numel():
            return _Record(0, 0, None)
        return self._records[_address(tensor.untyped_storage())]


class _Unpickler(pickle.Unpickler):
    """Unpickles anything; names of old kinds of storages become what tells their dtype."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401  # whatever it names
        try:
            return _torch.serialization.StorageType(name)
        except KeyError:
            return super().find_class(module, name)


def _address(storage: torch.UntypedStorage) -> int:
    address: int = storage._cdata  # noqa: SLF001  # as torch.save tells storages apart
    return address


def _check_plain(fqn: str, tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor whose bytes in the file are not its elements in C order."""
    kind, layout = (str(one).removeprefix("torch.") for one in (tensor.dtype, tensor.layout))
    is_strided = layout == "strided" and not tensor.is_quantized
    if is_strided and not tensor.is_contiguous():
        layout = f"stored with strides {tuple(tensor.stride())}"
    is_changed = layout != "strided" or tensor.is_conj() or tensor.is_neg()
    if is_changed or kind not in DTYPES:
        what = f"holds {fqn} ({kind}, {layout}), whose bytes are not its elements in C order"
        step = "Save it dense, contiguous and of a plain dtype, or leave it out with exclude=."
        raise _refused(path, what, step)
