"""A file of `torch.save` as a source of tensors, and of the other values in it."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, Any, NamedTuple

import torch
from torch import _weights_only_unpickler
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from ckpt_storage import errors
from ckpt_storage.format.boxes import Box
from ckpt_storage.format.crc import BlockHasher
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.manifest import PlannerData, TensorRecord, find_int_keys
from ckpt_storage.options import DEFAULT_BLOCK_BYTES
from ckpt_storage.source.file_versions import FileVersions
from ckpt_storage.source.foreign import ForeignSource
from ckpt_storage.source.model import Key
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace
from ckpt_storage.transfer.objects import read_twice

_torch: Any = torch  # for what is not typed there
_WINDOW_BYTES = 4 << 20
_LOCAL = struct.Struct("<26x2H")
_RESTORE = "Restore the file from a copy."
_AGAIN = "If you trust who made it, load it with torch.load and save it anew with torch.save."
_Crcs = dict[Key, "array[int]"]


class _Record(NamedTuple):
    """A storage, of which tensors are views: bytes of the file with one checksum, if any.

    The storage, according to the pickle, are the first `storage_bytes` of them.
    """

    start: int
    size_bytes: int
    crc32: int | None
    storage_bytes: int


@dataclass(slots=True, kw_only=True)
class UnpickledSource(ForeignSource):
    """A checkpoint in files of `torch.save`: `values` are those that are no tensors."""

    values: dict[str, object] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> set[str]:
        """All files of the checkpoint."""
        return set(self.versions.of)

    def pickled(self, fqn: str) -> bytes:
        """Return a value that is no tensor as `torch.save` stores it; none may be inside."""
        buffer = io.BytesIO()
        try:
            _NoTensors(io.BytesIO()).dump(self.values[fqn])
        except pickle.PicklingError as error:
            step = "Save them under names of their own, or leave it out with exclude=."
            raise _refused(self.store.url, f"holds {error} inside {fqn}", step) from None
        torch.save(self.values[fqn], buffer)
        return buffer.getvalue()


@dataclass(slots=True, kw_only=True)
class TorchFileSource(UnpickledSource):
    """The values of a `torch.save` file; the bytes of its tensors are in `records`.

    `views` are the tensors, or parts of these, in each record; `reopen` reads the directory of the
    file again. `content` has the length and the checksum of each record, by name.
    """

    records: dict[Key, _Record] = field(default_factory=dict)
    views: dict[_Record, list[Key]] = field(default_factory=dict)
    content: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    reopen: Callable[[Store], TorchFileSource]
    _cuts: dict[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    _sound: set[_Record] = field(default_factory=set)

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return the places of tensors; check each record once, by torch's own checksum.

        The places have checksums of blocks: later reads of parts of a record are checked by these.
        """
        for key in keys:
            record = self.records.get(key)
            if record and record.crc32 is not None and record not in self._sound:
                for view, crcs in self._checked(key).items():
                    place = self.held[view]
                    self.held[view] = replace(place, crcs=crcs, block_bytes=DEFAULT_BLOCK_BYTES)
                self._sound.add(self.records[key])
        return [self.held[key] for key in keys if key in self.held]

    def cut(self, fqn: str, runs: Sequence[tuple[int, int]]) -> list[Key]:
        """Cut a tensor into parts of adjacent rows, by first row and count; return their keys."""
        shape = self.tensors[fqn].shape
        whole = fqn, (0,) * len(shape)
        place, record = self.held.pop(whole), self.records.pop(whole)
        self.views[record].remove(whole)
        row_bytes = place.size_bytes // shape[0]
        keys: list[Key] = [(fqn, (first, *whole[1][1:])) for first, _ in runs]
        for key, (first, count) in zip(keys, runs, strict=True):
            self.held[key] = replace(
                place,
                start=place.start + first * row_bytes,
                size_bytes=count * row_bytes,
                sizes=(count, *shape[1:]),
            )
            self.records[key] = record
            self.views[record].append(key)
        self._cuts[fqn] = runs
        return keys

    def _checked(self, key: Key) -> _Crcs:
        """Check the record of a tensor, twice if it has a wrong byte."""
        check, again = partial(self._check, key), partial(self._check_anew, key)
        return read_twice(self.store, self.held[key].path, check, again)

    def _check_anew(self, key: Key) -> _Crcs:
        """Check the record of a tensor after reading again where in the file it is."""
        fresh = self.reopen(self.store)
        for fqn, runs in self._cuts.items():
            fresh.cut(fqn, runs)
        sound = {view: place for view, place in self.held.items() if place.crcs is not None}
        self.held, self.records, self.views = fresh.held | sound, fresh.records, fresh.views
        return self._check(key)

    def _check(self, key: Key) -> _Crcs:
        """Read the record of a tensor; return the CRC-32C of all blocks of the tensors in it."""
        record = self.records[key]
        hashers = {view: BlockHasher(DEFAULT_BLOCK_BYTES) for view in self.views[record]}
        path, file_bytes, fqn = self.held[key].path, self.held[key].file_bytes, key[0]
        crc, end = 0, record.start + record.size_bytes
        window = memoryview(bytearray(min(_WINDOW_BYTES, record.size_bytes)))
        for start in range(record.start, end, _WINDOW_BYTES):
            piece = window[: end - start]
            self.store.read(path, [(start, piece)], size_bytes=file_bytes)
            crc = zlib.crc32(piece, crc)
            for place, hasher in ((self.held[view], hasher) for view, hasher in hashers.items()):
                first = max(place.start - start, 0)
                hasher.update(piece[first : max(place.start + place.size_bytes - start, first)])
        if crc != record.crc32:
            what = f"the record at byte {record.start}, which holds {fqn},"
            raise _damaged(path, what, record.start, fqn)
        return {view: hasher.finish() for view, hasher in hashers.items()}


class _NoTensors(pickle.Pickler):
    """Raises for tensors and storages inside an object, which have no name to be read by."""

    def persistent_id(self, obj: object) -> None:
        if isinstance(obj, torch.Tensor | torch.TypedStorage | torch.UntypedStorage):
            raise pickle.PicklingError("tensors")


def open_torch_file(
    store: Store, path: str, *, unsafe_pickle: bool, item: str | None = None
) -> TorchFileSource:
    """Open a `torch.save` file; reads its directory, its pickle and the headers of records.

    With an `item` the file holds the value of that name on one rank, and a `DTensor` is read as the
    part of that rank.
    """
    info, shown = store.stat(path), f"{store.url}/{path}"
    file_bytes = info.size_bytes

    def read() -> tuple[dict[str, Any], PlannerData, Mapping[str, tuple[int, int | None]]]:
        file = io.BufferedReader(_StoreFile(store, path, file_bytes), 64 * 1024)
        return _read_state(file, path, shown, unsafe_pickle=unsafe_pickle, item=item)

    flat, paths, content = read_twice(store, path, read)
    tensors: dict[str, TensorRecord] = {}
    source = TorchFileSource(
        store=store,
        format="torch_save",
        tensors=tensors,
        planner_data=paths,
        versions=FileVersions(of={path: (file_bytes, info.modified_s)}, is_listed=False),
        content=content,
        reopen=partial(open_torch_file, path=path, unsafe_pickle=unsafe_pickle, item=item),
    )
    first: dict[tuple[object, ...], str] = {}
    for fqn, named in flat.items():
        value = named
        if not isinstance(value, torch.Tensor):
            source.values[fqn] = value
            continue
        if isinstance(value, DTensor):
            if item is None:
                what = f"holds {fqn} as a DTensor, of which it has the part of one rank"
                step = "Load it on all ranks with the library that saved it, and save it anew; for "
                step += "torch_checkpointing, convert the folder of the checkpoint."
                raise _refused(shown, what, step)
            value = value._local_tensor  # noqa: SLF001  # its bytes; no mesh is needed
        dtype, shape, start = _plain_dtype(fqn, value, path), tuple(value.shape), 0
        whole, size = Box((0,) * len(shape), shape), value.nbytes
        key = fqn, whole.offsets
        if value.numel():
            record: _Record | None = getattr(value.untyped_storage(), "record", None)
            if record is None:
                raise _refused(shown, f"holds no bytes of {fqn}", "Save it from where it has some.")
            offset = int(value.storage_offset()) * value.element_size()
            if not 0 <= offset <= record.storage_bytes - value.nbytes:
                raise _refused(shown, f"holds {fqn}, which reaches beyond its storage", _RESTORE)
            start = record.start + offset
            target = first.setdefault((start, dtype, shape), fqn)
            source.ties |= {fqn: target} if target != fqn else {}
            source.records[key] = record
            source.views.setdefault(record, []).append(key)
        tensors[fqn] = TensorRecord(dtype=dtype, shape=shape, boxes=[whole])
        source.held[key] = ChunkPlace(
            path=path, fqn=fqn, start=start, size_bytes=size, sizes=shape, file_bytes=file_bytes
        )
    source.blobs = frozenset(source.values)
    return source


def _read_state(
    file: IO[bytes], path: str, shown: str, *, unsafe_pickle: bool, item: str | None
) -> tuple[dict[str, Any], PlannerData, Mapping[str, tuple[int, int | None]]]:
    """Return values by FQN, the path of each in the nested state dict, and the records' content."""
    if file.read(4) != b"PK\x03\x04":
        raise _refused(shown, "is no file of torch.save, or a file from before torch 1.6", _AGAIN)
    try:
        state, content = _unpickled(file, path, unsafe_pickle=unsafe_pickle)
    except errors.CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise errors.UnsafeContentError(
            f"{shown} is not a file that torch loads with weights_only=True.",
            path=path,
            phase="load",
            next_step="If you trust who wrote it, allow its types by "
            "torch.serialization.add_safe_globals, or pass unsafe_pickle=True.",
        ) from error
    except Exception as error:
        what = f"cannot be read ({type(error).__name__}): it is damaged, cut short, or no file of "
        raise _refused(shown, f"{what}torch.save", _RESTORE) from error
    if item is not None:
        state = {item: state}
    if not isinstance(state, dict) or not {*map(type, state)} <= {str, int}:
        what = f"holds a {type(state).__name__}, not a state dict with names as keys"
        step = "Save a dict that maps names to tensors, such as model.state_dict()."
        raise _refused(shown, what, step)
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError as error:
        what = f"holds two values of one name: {str(error).rstrip('.')}"
        raise _refused(shown, what, "Load it with torch.load, rename one, save it anew.") from error
    return flat, PlannerData(paths, int_keys=find_int_keys(state)), content


def _refused(path: str, what: str, next_step: str) -> errors.FormatError:
    return errors.FormatError(f"{path} {what}.", path=path, next_step=next_step)


def _damaged(path: str, what: str, offset: int, fqn: str | None = None) -> errors.IntegrityError:
    text = f"{path} is damaged: {what} has another checksum than torch wrote."
    return errors.IntegrityError(text, path=path, fqn=fqn, offset=offset, next_step=_RESTORE)


@dataclass(eq=False)
class _StoreFile(io.RawIOBase):
    """A file of a store as Python's file protocol has it, for reading."""

    store: Store
    path: str
    size_bytes: int
    _at: int = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self.size_bytes)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401  # as `io` has it
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.size_bytes - self._at))
        if count:
            self.store.read(self.path, [(self._at, view[:count])], size_bytes=self.size_bytes)
            self._at += count
        return count


def _read_records(
    file: IO[bytes], path: str
) -> tuple[dict[str, zipfile.ZipInfo], dict[str, bytes], int]:
    """Return the records of the zip, the content of those that are no storages, and its end.

    A compressed record, which torch never makes, may be a bomb, and is refused.
    """
    small: dict[str, bytes] = {}
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "constants.pkl" in infos:
            raise _refused(path, "is a TorchScript archive", _AGAIN)
        # An option of torch turns checksums off: then it writes zeros.
        has_crcs = any(info.CRC for info in infos.values())
        for name, info in infos.items():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
                what = f"holds the compressed record {info.filename:.80}, as no file of torch"
                raise _refused(path, f"{what}.save does", _AGAIN)
            if not has_crcs:
                info.CRC = None  # type: ignore[assignment]  # zipfile then checks none
            try:
                if not name.startswith("data/"):
                    small[name] = archive.read(info)
            except zipfile.BadZipFile as error:
                what = f"its record {info.filename}"
                raise _damaged(path, what, info.header_offset) from error
    return infos, small, archive.start_dir


def _unpickled(
    file: IO[bytes], path: str, *, unsafe_pickle: bool
) -> tuple[object, Mapping[str, tuple[int, int | None]]]:
    """Return the saved object, and length and checksum of each record.

    Its storages have no memory, but a `record` of their bytes.
    """
    infos, small, directory = _read_records(file, path)
    if small.get("byteorder", b"little") != b"little":
        raise _refused(path, "was written on a big-endian machine", _AGAIN)
    storages: dict[str, Any] = {}
    # Each record ends where the next begins, or the directory of the zip.
    limits = sorted([directory, *(info.header_offset for info in infos.values())])

    def load_storage(saved: tuple[Any, ...]) -> object:
        _, kind, key, _, count = saved
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind._dtype  # noqa: SLF001  # as torch.load
        if key not in storages:
            info, size_bytes = infos[f"data/{key}"], count * dtype.itemsize
            if size_bytes > info.file_size:
                raise EOFError(key)
            file.seek(info.header_offset)
            gap_bytes = _LOCAL.size + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
            start = info.header_offset + gap_bytes
            if start + info.file_size > limits[bisect_right(limits, info.header_offset)]:
                raise EOFError(key)
            storages[key] = storage = _torch.UntypedStorage(size_bytes, device="meta")
            storage.record = _Record(start, info.file_size, info.CRC, size_bytes)
        return _torch.storage.TypedStorage(wrap_storage=storages[key], dtype=dtype, _internal=True)

    module: Any = pickle if unsafe_pickle else _weights_only_unpickler
    unpickler = module.Unpickler(io.BytesIO(small["data.pkl"]), encoding="utf-8")
    unpickler.persistent_load = load_storage
    try:
        state = unpickler.load()
    finally:
        _torch._utils._validate_loaded_sparse_tensors()  # noqa: SLF001  # as torch.load
    return state, {name: (info.file_size, info.CRC) for name, info in infos.items()}


def _plain_dtype(fqn: str, tensor: torch.Tensor, path: str) -> str:
    """Return the dtype; refuse a tensor whose bytes in the file are not its elements in C order."""
    dtype, layout = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, tensor.layout))
    is_strided = layout == "strided" and not tensor.is_quantized
    if is_strided and not tensor.is_contiguous():
        layout = f"stored with strides {tuple(tensor.stride())}"
    is_changed = layout != "strided" or tensor.is_conj() or tensor.is_neg()
    if is_changed or dtype not in DTYPES:
        what = f"holds {fqn} ({dtype}, {layout}), whose bytes are not its elements in C order"
        step = "Save it dense, contiguous and of a plain dtype, or leave it out with exclude=."
        raise _refused(path, what, step)
    return dtype
