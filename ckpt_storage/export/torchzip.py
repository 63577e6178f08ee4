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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
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
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.writing import ObjectWriter

from .layout import Fixed, OutFile, Segment, Stored, elements_of
from .output import Made, Output, Site, Taken
from .plan import ELEMENTS_BYTES
from .reads import SegmentReader
from .select import Selected, payload_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ALIGN_BYTES = 64
_PADDING_ID = 0x4246  # torch's own choice; nobody reads it
_ABSENT_PER_KEY = 16
_ABSENT_COUNT = 1 << 16
_MANY = 1 << 60

_Path = tuple[str | int, ...]


@dataclass(kw_only=True)
class TorchFile(Output):
    """One file that is written as a stream, visible only complete.

    Tied tensors share their storage, as they did. `publish` raises `UnsafeContentError` for a value
    that torch does not load with `weights_only`, unless `unsafe_pickle`. Before the file becomes
    visible it calls `check_unchanged`.
    """

    name: str
    source: Source
    chosen: Selected
    overwrite: bool
    unsafe_pickle: bool
    check_unchanged: Callable[[], None]
    _is_taken: bool = False

    def take(self) -> Taken:
        """Refuse a name that is taken."""
        url = f"{self.store.url}/{self.name}"
        if not self.name:
            raise InvalidInputError(
                f"{url} names no file.", next_step="Give a file, such as model.pt."
            )
        self._is_taken = is_there(self.store, self.name)
        if self._is_taken and not self.overwrite:
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
        site, store, tensors = self.site, self.store, self.chosen.tensors
        pickler, main = self._pickled(self._objects())
        store.make_folders([])
        if self._is_taken and not store.capabilities.atomic_replace:
            store.delete([self.name])
        total_bytes = sum(map(payload_bytes, tensors.values()))
        streamed = (fqn for _, fqn, data in pickler.stored if data is None)
        take = _reading(site, self.source, [elements_of(tensors[fqn]) for fqn in streamed])
        with reporting(
            site.setting.progress,
            phase="write",
            rank=0,
            total_bytes=total_bytes,
            save_id=self.source.save_id,
            with_bar=True,
        ) as on_bytes:
            writer = ObjectWriter(
                store,
                self.name,
                options=site.options,
                planned_bytes=total_bytes + len(main),
                deadline=site.deadline,
                on_bytes=on_bytes,
            )

            def write(data: Buffer) -> int:
                view = memoryview(data)
                writer.write(view)
                return view.nbytes

            # It goes forward only, so checksums follow the bytes.
            archive: Any = zipfile.ZipFile(SimpleNamespace(write=write, flush=bool), "w")
            try:
                _append(archive, "data.pkl", [main])
                # No ".format_version": it would let torch compute where records lie, as its own zip
                # writer places them. Without it torch looks each one up.
                _append(archive, "byteorder", [b"little"])
                for number, (length, _, data) in enumerate(pickler.stored):
                    views = take(length) if data is None else [data]
                    _append(archive, f"data/{number}", views)
                    site.deadline.check(f"Writing {self.name}")
                _append(archive, "version", [b"3\n"])
                _append(archive, ".data/serialization_id", [b"0" * 40])
                self.check_unchanged()
                archive.close()
                writer.complete()
            except BaseException as error:
                # Else it writes its end when it is forgotten.
                archive.fp = None
                try:
                    writer.abort()
                except StorageError as failure:
                    error.add_note(f"Discarding the upload failed too: {failure}")
                raise

    def _objects(self) -> dict[str, object]:
        """Return the values that are no tensors: those in memory, and those that are pickled."""
        source = self.source
        held: Mapping[str, object] = getattr(source, "values", {})
        pickled = [fqn for fqn in self.chosen.blobs if fqn not in held]
        places = source.places([(fqn, None) for fqn in pickled])
        pairs = [(fqn, place.size_bytes) for fqn, place in zip(pickled, places, strict=True)]
        take = _reading(self.site, source, [Stored(fqn=f, size_bytes=size) for f, size in pairs])
        objects = {fqn: held[fqn] for fqn in self.chosen.blobs if fqn in held}
        for fqn, size in pairs:
            file = io.BytesIO(b"".join(take(size)))
            try:
                objects[fqn] = torch.load(
                    file, map_location="cpu", weights_only=not self.unsafe_pickle
                )
            except Exception as error:
                raise UnsafeContentError(
                    f"{fqn} is not a value that torch loads with weights_only=True.",
                    next_step="Leave it out with exclude=, or, if you trust who wrote it, pass "
                    "unsafe_pickle=True.",
                ) from error
        return objects

    def _pickled(self, objects: dict[str, object]) -> tuple[_Pickler, bytes]:
        """Return the pickle of the nested state dict, and what it says of storages."""
        tensors, ties = self.chosen.tensors, self.chosen.ties
        flat = {fqn: objects[fqn] for fqn in self.chosen.blobs}
        for fqn, info in tensors.items():
            flat[fqn] = _Tensor(info, _Storage(tensors[ties.get(fqn, fqn)]))
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(_nested(flat, self.source.planner_data or {}))
        return pickler, file.getvalue()


def _reading(
    site: Site, source: Source, segments: Sequence[Segment]
) -> Callable[[int], Iterator[memoryview]]:
    """Return what yields so many bytes, those of the next segment, in views that stay as they are.

    Segments are read one after another, in bounded windows.
    """
    # Each begins where an element of any dtype may, so that no window cuts one.
    gaps = [Fixed(b"\0" * (-one.size_bytes % ELEMENTS_BYTES)) for one in segments]
    parts = [part for pair in zip(segments, gaps, strict=True) for part in pair]
    file = OutFile(number=1, name="", segments=parts)
    options = site.options
    reader = SegmentReader(
        [file],
        source=source,
        store=site.source,
        options=options,
        deadline=site.deadline,
        pacer=Pacer(options.thread_count),
    )
    step = options.part_bytes - options.part_bytes % ELEMENTS_BYTES
    at, left = 0, memoryview(b"")

    def read(count: int) -> Iterator[memoryview]:
        nonlocal at, left
        while count:
            if not left:
                left = memoryview(bytearray(min(step, file.size_bytes - at)))
                reader.prepare(0, at, at + len(left))
                reader.fill(0, at, at + len(left), left)
                at += len(left)
            view, left = left[:count], left[count:]
            count -= len(view)
            yield view

    def take(count: int) -> Iterator[memoryview]:
        yield from read(count)
        list(read(-count % ELEMENTS_BYTES))

    return take


def _append(
    archive: Any,  # noqa: ANN401  # a `ZipFile`, and what it does not tell of itself
    name: str,
    views: Iterable[bytes | memoryview],
) -> None:
    """Append one record to a zip, as it is; its bytes are aligned."""
    info = zipfile.ZipInfo(f"archive/{name}")
    # The header, the name, the length in 64 bits, and the head of the padding.
    before = archive.fp.tell() + 30 + len(info.filename) + 20 + 4
    padding = -before % _ALIGN_BYTES
    info.extra = struct.pack("<2H", _PADDING_ID, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as file:
        for view in views:
            file.write(view)


@dataclass(frozen=True, slots=True)
class _Storage:
    """The storage of a tensor that is still in the source."""

    info: TensorInfo


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor that is still in the source: it pickles as torch pickles a tensor."""

    info: TensorInfo
    storage: _Storage

    def __reduce__(self) -> tuple[Any, ...]:
        shape, dtype = self.info.shape, self.info.dtype
        strides = torch.empty(shape, device="meta").stride()
        hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
        common = (self.storage, 0, shape, strides, False, hooks)
        if DTYPES[dtype].storage_class is not None:
            return torch._utils._rebuild_tensor_v2, common  # noqa: SLF001  # what torch.save names
        return torch._utils._rebuild_tensor_v3, (*common, getattr(torch, dtype))  # noqa: SLF001


class _Pickler(pickle.Pickler):
    """Pickles a state dict whose tensors are stubs; storages of small values it keeps.

    Storages are numbered in the order in which the pickle names them, as in torch's own files.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        # The length of each storage, its tensor, and its bytes where they are in memory.
        self.stored: list[tuple[int, str, bytes | None]] = []
        self._numbers: dict[int | str, str] = {}
        self._kept: list[object] = []

    def persistent_id(self, obj: Any) -> Any:  # noqa: ANN401  # whatever is in the state dict
        """Return what stands for a storage."""
        key: int | str
        if isinstance(obj, _Storage):
            key, count = obj.info.fqn, payload_bytes(obj.info)
            if key not in self._numbers:
                self.stored.append((count, key, None))
            name, item_bytes = (
                DTYPES[obj.info.dtype].storage_class,
                DTYPES[obj.info.dtype].item_bytes,
            )
            count //= 1 if name is None else item_bytes
        elif isinstance(obj, torch.storage.TypedStorage) or torch.is_storage(obj):
            stored: Any = obj
            untyped = getattr(stored, "_untyped_storage", stored)
            key, count, name = untyped._cdata, untyped.nbytes(), None  # noqa: SLF001  # as torch.save
            if key not in self._numbers:
                flat = torch.empty(0, dtype=torch.uint8).set_(untyped.cpu())
                self.stored.append((count, "", flat.numpy().tobytes()))
                self._kept.append(untyped)  # its address must not come again
            if untyped is not stored:
                name, count = stored._pickle_storage_type(), stored._size()  # noqa: SLF001  # as above
        else:
            return None
        number = self._numbers.setdefault(key, str(len(self.stored) - 1))
        return ("storage", getattr(torch, name or "UntypedStorage"), number, "cpu", count)


def _nested(flat: Mapping[str, object], known: Mapping[str, _Path]) -> object:
    """Return the nested state dict; lists of which a part was dropped would shift, so refuse.

    A list is made as long as its highest index, so one number could take all memory. Planners may
    leave out some values, but not nearly all.
    """
    paths = {fqn: known.get(fqn, (fqn,)) for fqn in flat}
    longest: dict[_Path, int] = {}
    for path in paths.values():
        for at, key in enumerate(path):
            if isinstance(key, int):
                longest[path[:at]] = max(longest.get(path[:at], 0), key + 1 if key >= 0 else _MANY)
    try:
        if sum(longest.values()) > _ABSENT_PER_KEY * sum(map(len, paths.values())) + _ABSENT_COUNT:
            raise ValueError("its lists would be far longer than what is in them")  # noqa: TRY301
        return unflatten_state_dict(dict(flat), paths)
    except Exception as error:
        raise InvalidInputError(
            f"The values do not form a nested state dict: {error}.",
            next_step="Leave the names that contradict each other out with exclude=.",
        ) from error
