"""Values as one file of `torch.save`, written from front to back while they are read.

Lengths are known before, so every local header is exact but for the checksum, which follows the
bytes as zip allows and stands in the directory at the end.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.errors import (
    CheckpointExistsError,
    InvalidInputError,
    StorageError,
    UnsafeContentError,
)
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.progress import reporting
from ckpt_storage.source.model import Source, TensorInfo
from ckpt_storage.transfer.writing import ObjectWriter

from .layout import Stored, elements_of
from .output import Made, Output, Site, Taken
from .plan import Plan
from .reads import SegmentStream
from .select import payload_bytes
from .torchfile import TorchFileSource

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ALIGN_BYTES = 64
_PADDING_ID = 0x4246  # torch's own choice; nobody reads it
_WIDE_BYTES = 1 << 30
"""Records from here on tell their length in 64 bits."""
_ABSENT_PER_KEY = 16
_ABSENT_COUNT = 1 << 16

_Path = tuple[str | int, ...]


class TorchFile(Output):
    """One file that is written as a stream, visible only complete.

    Tied tensors share their storage, as they did. `publish` raises `UnsafeContentError` for a value
    that torch does not load with `weights_only`, unless `unsafe_pickle`.
    """

    def __init__(
        self,
        site: Site,
        plan: Plan,
        *,
        name: str,
        source: Source | TorchFileSource,
        tensors: Mapping[str, TensorInfo],
        blobs: Sequence[str],
        ties: Mapping[str, str],
        overwrite: bool,
        unsafe_pickle: bool,
        check_unchanged: Callable[[], None],
    ) -> None:
        """`blobs` are objects; `check_unchanged` is called before the file becomes visible."""
        super().__init__(site, plan)
        self._name = name
        self._source = source
        self._tensors = tensors
        self._blobs = blobs
        self._ties = ties
        self._overwrite = overwrite
        self._unsafe_pickle = unsafe_pickle
        self._check_unchanged = check_unchanged
        self._is_taken = False

    def take(self) -> Taken:
        """Refuse a name that is taken."""
        url = f"{self.store.url}/{self._name}"
        if not self._name:
            raise InvalidInputError(
                f"{url} names no file.", next_step="Give a file, such as model.pt."
            )
        self._is_taken = is_there(self.store, self._name)
        if self._is_taken and not self._overwrite:
            raise CheckpointExistsError(
                f"{url} is there.",
                path=url,
                phase="plan",
                next_step="Give another name, or pass overwrite=True to replace it.",
            )
        return Taken()

    def publish(self, made: Made) -> None:
        """Write the file; only where nothing can be replaced in one step, delete the old before."""
        del made
        site, store = self.site, self.store
        stream = partial(
            SegmentStream,
            source=self._source,
            store=site.source,
            options=site.options,
            deadline=site.deadline,
        )
        pickler, main = self._pickled(self._objects(stream))
        store.make_folders([])
        if self._is_taken and not store.capabilities.atomic_replace:
            store.delete([self._name])
        total_bytes = sum(map(payload_bytes, self._tensors.values()))
        whole = [self._tensors[fqn] for fqn in pickler.streamed]
        data = stream([elements_of(one) for one in whole])
        with reporting(
            site.setting.progress,
            phase="write",
            rank=0,
            total_bytes=total_bytes,
            save_id=self._source.save_id,
            with_bar=True,
        ) as on_bytes:
            writer = ObjectWriter(
                store,
                self._name,
                options=site.options,
                planned_bytes=total_bytes + len(main),
                deadline=site.deadline,
                on_bytes=on_bytes,
            )
            archive = _Zip(writer)
            try:
                archive.record("data.pkl", len(main), [memoryview(main)])
                # No ".format_version": it would let torch compute where records lie, as its own zip
                # writer places them. Without it torch looks each one up.
                archive.record("byteorder", 6, [memoryview(b"little")])
                for key, (length, held) in pickler.stored.items():
                    views = data.take(length) if held is None else [memoryview(held)]
                    archive.record(f"data/{key}", length, views, is_aligned=True)
                    site.deadline.check(f"Writing {self._name}")
                archive.record("version", 2, [memoryview(b"3\n")])
                archive.record(".data/serialization_id", 40, [memoryview(b"0" * 40)])
                self._check_unchanged()
                archive.close()
                writer.complete()
            except BaseException as error:
                archive.stream.is_over = True
                try:
                    writer.abort()
                except StorageError as failure:
                    error.add_note(f"Discarding the upload failed too: {failure}")
                raise

    def _objects(self, stream: Callable[[Sequence[Stored]], SegmentStream]) -> dict[str, object]:
        """Return the values that are no tensors: those in memory, and those that are pickled."""
        source, is_unsafe = self._source, self._unsafe_pickle
        held = source.values if isinstance(source, TorchFileSource) else {}
        pickled = [fqn for fqn in self._blobs if fqn not in held]
        sizes = {fqn: source.place(fqn, None).size_bytes for fqn in pickled}
        data = stream([Stored(fqn=fqn, size_bytes=size) for fqn, size in sizes.items()])
        objects = dict(held)
        for fqn, size_bytes in sizes.items():
            file = io.BytesIO(b"".join(data.take(size_bytes)))
            try:
                objects[fqn] = torch.load(file, map_location="cpu", weights_only=not is_unsafe)
            except Exception as error:
                raise UnsafeContentError(
                    f"{fqn} is not a value that torch loads with weights_only=True.",
                    next_step="Leave it out with exclude=, or, if you trust who wrote it, pass "
                    "unsafe_pickle=True.",
                ) from error
        return objects

    def _pickled(self, objects: Mapping[str, object]) -> tuple[_Pickler, bytes]:
        """Return the pickle of the nested state dict, and what it says of storages."""
        storages: dict[str, _StorageStub] = {}
        flat: dict[str, object] = {fqn: objects[fqn] for fqn in self._blobs}
        for fqn, info in self._tensors.items():
            target = self._ties.get(fqn, fqn)
            if target not in storages:
                storages[target] = _StorageStub.of(self._tensors[target])
            flat[fqn] = _TensorStub(storages[target], info)
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(_nested(flat, self._source.planner_data or {}))
        return pickler, file.getvalue()


class _Stream:
    """What a zip is written to: it goes forward only, so checksums follow the bytes."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self.position = 0
        self.is_over = False

    def flush(self) -> None:
        """Do nothing: all goes out in the end."""

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        if not self.is_over:
            # A zip that is given up still writes its end.
            self._writer.write(view)
        self.position += view.nbytes
        return view.nbytes


class _Zip:
    """A zip of stored records, written in one pass."""

    def __init__(self, writer: ObjectWriter) -> None:
        self.stream = _Stream(writer)
        self._file = zipfile.ZipFile(self.stream, "w")  # type: ignore[call-overload]  # it needs no more
        self.close = self._file.close

    def record(
        self, name: str, length: int, views: Iterable[memoryview], *, is_aligned: bool = False
    ) -> None:
        """Append one record of `length` bytes."""
        info = zipfile.ZipInfo(f"archive/{name}")
        is_wide = length >= _WIDE_BYTES
        if is_aligned:
            wide_bytes = 20 if is_wide else 0
            before = self.stream.position + 30 + len(info.filename.encode()) + 4 + wide_bytes
            padding = -before % _ALIGN_BYTES
            info.extra = struct.pack("<2H", _PADDING_ID, padding) + b"Z" * padding
        with self._file.open(info, "w", force_zip64=is_wide) as file:
            for view in views:
                file.write(view)


@dataclass(frozen=True, slots=True)
class _StorageStub:
    """The storage of the tensor `fqn`, still in the source."""

    fqn: str
    kind: object
    count: int
    length: int

    @classmethod
    def of(cls, info: TensorInfo) -> _StorageStub:
        length, kind = payload_bytes(info), DTYPES[info.dtype]
        if kind.storage_class is None:
            return cls(info.fqn, torch.UntypedStorage, length, length)
        storage = getattr(torch, kind.storage_class)
        return cls(info.fqn, storage, length // kind.item_bytes, length)


class _TensorStub:
    """A tensor that is still in the source: it pickles as torch pickles a tensor."""

    def __init__(self, storage: _StorageStub, info: TensorInfo) -> None:
        self._storage = storage
        self._info = info

    def __reduce__(self) -> tuple[Any, ...]:
        shape, dtype = self._info.shape, self._info.dtype
        strides = torch.empty(shape, device="meta").stride()
        hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
        common = (self._storage, 0, shape, strides, False, hooks)
        if DTYPES[dtype].storage_class is not None:
            return torch._utils._rebuild_tensor_v2, common  # noqa: SLF001  # what torch.save names
        return torch._utils._rebuild_tensor_v3, (*common, getattr(torch, dtype))  # noqa: SLF001


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


def lists_are_plausible(paths: Collection[_Path]) -> bool:
    """Return whether the lists that paths lead through are about as long as what is in them.

    Whoever nests values anew makes a list as long as its highest index, so one number could take
    all memory. Planners may leave out some values, but not nearly all.
    """
    longest: dict[_Path, int] = {}
    for path in paths:
        for at, key in enumerate(path):
            if isinstance(key, int):
                if key < 0:
                    return False
                longest[path[:at]] = max(longest.get(path[:at], 0), key + 1)
    key_count = sum(map(len, paths))
    return sum(longest.values()) <= _ABSENT_PER_KEY * key_count + _ABSENT_COUNT


def _nested(flat: Mapping[str, object], known: Mapping[str, _Path]) -> object:
    """Return the nested state dict; lists of which a part was dropped would shift, so refuse."""
    paths = {fqn: known.get(fqn, (fqn,)) for fqn in flat}
    try:
        if not lists_are_plausible(paths.values()):
            raise ValueError("its lists would be far longer than what is in them")  # noqa: TRY301
        return unflatten_state_dict(dict(flat), paths)
    except Exception as error:
        raise InvalidInputError(
            f"The values do not form a nested state dict: {error}.",
            next_step="Leave the names that contradict each other out with exclude=.",
        ) from error
