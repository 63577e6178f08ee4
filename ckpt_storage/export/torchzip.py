"""Values as one file of `torch.save`, written from front to back while they are read."""

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
from ckpt_storage.format.names import DTYPES
from ckpt_storage.source.model import Source
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.writing import ObjectWriter

from .convert import _Conversion
from .layout import Files
from .output import Made, Site, Taken
from .plan import ELEMENTS_BYTES, Elements, Fixed, OutFile, Stored, elements_of
from .reads import SegmentReader
from .select import Selected

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ALIGN_BYTES = 64
_PADDING_ID = 0x4246  # torch's own choice; nobody reads it
_ABSENT_PER_KEY = 16
_ABSENT_COUNT = 1 << 16
_MANY = 1 << 60

_Path = tuple[str | int, ...]


class TorchFile(_Conversion):
    """One file that is written as a stream, visible only complete; tied tensors share a storage."""

    def lay_out(self) -> Files:
        """Return nothing: checksums come last, and `publish` writes it all."""
        self.stream_bytes = sum(elements_of(*one).size_bytes for one in self.chosen.tensors.items())
        return ()

    def take(self) -> Taken:
        """Refuse a name that is taken."""
        name = self.setting.target_file
        url = f"{self.setting.target.url}/{name}"
        if not name:
            raise InvalidInputError(
                f"{url} names no file.", next_step="Give a file, such as model.pt."
            )
        if not self.setting.overwrite and is_there(self.site.target, name):
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
        site, store, source, chosen = self.site, self.site.target, self.source, self.chosen
        name = self.setting.target_file
        main = io.BytesIO()
        pickler = _Pickler(main, chosen)
        values = {**self._objects(), **{fqn: _Tensor(fqn) for fqn in chosen.tensors}}
        pickler.dump(_nested(values, source.planner_data or {}))
        stored = pickler.stored.items()
        streamed = [elements_of(k, chosen.tensors[k]) for k, _ in stored if isinstance(k, str)]
        read = _reading(site, source, streamed)
        store.make_folders([])
        if not store.capabilities.atomic_replace:
            store.delete([name])
        writer = ObjectWriter(
            store,
            name,
            options=site.options,
            planned_bytes=self.stream_bytes + main.tell(),
            deadline=site.deadline,
            on_bytes=self.on_bytes,
        )

        def write(data: Buffer) -> int:
            view = memoryview(data)
            writer.write(view)
            return view.nbytes

        # It goes forward only, so checksums follow the bytes.
        archive: Any = zipfile.ZipFile(SimpleNamespace(write=write, flush=bool), "w")
        try:
            _append(archive, "data.pkl", [main.getvalue()])
            # No ".format_version": it would let torch compute where records lie, as its own zip
            # writer places them. Without it torch looks each one up.
            _append(archive, "byteorder", [b"little"])
            for key, (number, data) in stored:
                if isinstance(key, str):
                    views: Iterable[Buffer] = read(key)
                else:
                    views = [torch.empty(0, dtype=torch.uint8).set_(data).numpy().data]
                _append(archive, f"data/{number}", views)
                site.deadline.check(f"Writing {name}")
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
        """Return the values that are no tensors."""
        source, blobs = self.source, self.chosen.blobs
        places = source.places([(fqn, None) for fqn in blobs])
        stored = [Stored(fqn=one.fqn, size_bytes=one.size_bytes) for one in places]
        read = _reading(self.site, source, stored)
        objects: dict[str, object] = {}
        for fqn in blobs:
            file = io.BytesIO(b"".join(read(fqn)))
            try:
                is_safe = not self.setting.unsafe_pickle
                objects[fqn] = torch.load(file, map_location="cpu", weights_only=is_safe)
            except Exception as error:
                raise UnsafeContentError(
                    f"{fqn} is not a value that torch loads with weights_only=True.",
                    next_step="Leave it out with exclude=, or, if you trust who wrote it, pass "
                    "unsafe_pickle=True.",
                ) from error
        return objects


def _reading(
    site: Site, source: Source, segments: Sequence[Elements | Stored]
) -> Callable[[str], Iterator[memoryview]]:
    """Return what yields an FQN's bytes; they are asked for in order, and read in windows."""
    # Each begins where an element of any dtype may, so that no window cuts one.
    gaps = [Fixed(b"\0" * (-one.size_bytes % ELEMENTS_BYTES)) for one in segments]
    parts = [part for pair in zip(segments, gaps, strict=True) for part in pair]
    file = OutFile(name="", segments=parts)
    places = {one.fqn: (at, one) for at, one in zip(file.starts[::2], segments, strict=False)}
    options = site.options
    ranges = RangeReader(site.source, options)
    reader = SegmentReader([file], source, ranges)
    step = options.part_bytes - options.part_bytes % ELEMENTS_BYTES
    begin, window = 0, memoryview(b"")

    def read(fqn: str) -> Iterator[memoryview]:
        nonlocal begin, window
        at, segment = places[fqn]
        end = at + segment.size_bytes
        while at < end:
            if at >= begin + len(window):
                begin = at - at % step
                window = memoryview(bytearray(min(step, file.size_bytes - begin)))
                reader.prepare(0, begin, begin + len(window))
                reader.fill(0, begin, begin + len(window), window)
            view = window[at - begin : end - begin]
            at += len(view)
            yield view

    return read


def _append(
    archive: Any,  # noqa: ANN401  # a `ZipFile`, and what it does not tell of itself
    name: str,
    views: Iterable[Buffer],
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
class _Tensor:
    """A tensor that is still in the source."""

    fqn: str


class _Storage(_Tensor):
    """The storage of such a tensor."""


class _Pickler(pickle.Pickler):
    """Pickles a state dict with a `_Tensor` for each tensor, as torch pickles the tensor.

    `stored` has, by FQN or else by address, the number of each storage and what it holds, in the
    order of the pickle.
    """

    def __init__(self, file: io.BytesIO, chosen: Selected) -> None:
        super().__init__(file, protocol=2)
        self._chosen = chosen
        # What is in memory is a storage.
        self.stored: dict[int | str, tuple[int, Any]] = {}

    def reducer_override(self, obj: object) -> Any:  # noqa: ANN401  # as pickle has it
        """Return how a tensor is made of its storage, which tied ones share."""
        if not isinstance(obj, _Tensor):
            return NotImplemented
        tensor = self._chosen.tensors[obj.fqn]
        strides = torch.empty(tensor.shape, device="meta").stride()
        hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
        storage = _Storage(self._chosen.ties.get(obj.fqn, obj.fqn))
        common = (storage, 0, tensor.shape, strides, False, hooks)
        if DTYPES[tensor.dtype].storage_class is not None:
            return torch._utils._rebuild_tensor_v2, common  # noqa: SLF001  # what torch.save names
        dtype = getattr(torch, tensor.dtype)
        return torch._utils._rebuild_tensor_v3, (*common, dtype)  # noqa: SLF001  # as above

    def persistent_id(self, obj: Any) -> Any:  # noqa: ANN401  # whatever is in the state dict
        """Return what stands for a storage."""
        data, name = obj, None
        if isinstance(obj, _Storage):
            tensor = self._chosen.tensors[obj.fqn]
            kind = DTYPES[tensor.dtype]
            key, name, count = obj.fqn, kind.storage_class, elements_of(obj.fqn, tensor).size_bytes
            count //= kind.item_bytes if name else 1
        elif isinstance(obj, torch.storage.TypedStorage) or torch.is_storage(obj):
            typed: Any = obj
            data = getattr(typed, "_untyped_storage", typed)
            key, count = data._cdata, data.nbytes()  # noqa: SLF001  # as torch.save
            if data is not obj:
                name, count = typed._pickle_storage_type(), typed._size()  # noqa: SLF001  # as above
        else:
            return None
        number, _ = self.stored.setdefault(key, (len(self.stored), data))
        return ("storage", getattr(torch, name or "UntypedStorage"), str(number), "cpu", count)


def _nested(flat: Mapping[str, object], known: Mapping[str, _Path]) -> object:
    """Return the nested state dict; lists of which a part was dropped would shift, so refuse.

    A list is made as long as its highest index, so one number could take all memory.
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
