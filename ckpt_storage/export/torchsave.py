"""A file of `torch.save` as a target: written as a stream, while its values are read."""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from ckpt_storage import errors
from ckpt_storage.format.manifest import INT_KEY, int_keys_of
from ckpt_storage.inspect.torchload import refusal_of
from ckpt_storage.source.model import Source
from ckpt_storage.transfer.objects import is_there
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.writing import ObjectWriter

from .conversion import Conversion
from .layout import Files
from .output import ExportContext, ResumeState, WriteSummary
from .plan import ELEMENTS_BYTES, Elements, Fixed, OutFile, Stored, elements_of
from .reads import SegmentReader
from .select import Selected

_ALIGN_BYTES = 64

_Path = tuple[str | int, ...]


class TorchFile(Conversion):
    """One file that is written as a stream, visible only complete; tied tensors share a storage."""

    def lay_out(self) -> Files:
        """Return no file: `publish` writes the whole file, whose checksums follow its bytes."""
        self.stream_bytes = self.tensor_bytes
        return ()

    def claim(self) -> ResumeState:
        """Refuse a name that exists."""
        name, url = self.spec.target_file, self.spec.target_url
        if not name:
            raise errors.InvalidInputError(
                f"{url} names no file.", next_step="Give a file, such as model.pt."
            )
        if not self.spec.overwrite and is_there(self.context.target, name):
            what = f"{url} is there."
            step = "Give another name, or pass overwrite=True to replace it."
            raise errors.CheckpointExistsError(what, path=url, phase="plan", next_step=step)
        return ResumeState()

    def publish(self, made: WriteSummary) -> None:
        """Write the file; only where nothing can be replaced in one step, delete the old before."""
        del made
        context, store, name = self.context, self.context.target, self.spec.target_file
        main = io.BytesIO()
        pickler, (tensors, fqns) = _Pickler(main), _untouched(self.chosen)
        pickler.dump(_nested({**self._objects(), **tensors}, self.source.planner_data or {}))
        stored = [(data, fqns.get(key)) for key, (_, data) in pickler.stored.items()]
        streamed = [elements_of(fqn, self.chosen.tensors[fqn]) for _, fqn in stored if fqn]
        read = _reading(context, self.source, streamed)
        store.make_folders([])
        if not store.capabilities.atomic_replace:
            store.delete([name])
        writer = ObjectWriter(
            store,
            name,
            options=context.options,
            planned_bytes=self.stream_bytes + main.tell(),
            deadline=context.deadline,
            on_bytes=self.on_bytes,
        )

        def write(data: bytes | memoryview) -> int:
            view = memoryview(data)
            writer.write(view)
            return view.nbytes

        # The stream cannot seek, so checksums follow the bytes.
        archive: Any = zipfile.ZipFile(SimpleNamespace(write=write, flush=bool), "w")
        try:
            _append(archive, "data.pkl", [main.getvalue()])
            # No ".format_version": it would let torch compute where records lie, as its own zip
            # writer places them. Without it torch looks each one up.
            _append(archive, "byteorder", [b"little"])
            for number, (data, fqn) in enumerate(stored):
                held = torch.empty(0, dtype=torch.uint8, device="cpu").set_(data).numpy()
                _append(archive, f"data/{number}", read(fqn) if fqn else [held.data])
                context.deadline.check(f"Writing {name}")
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
            except errors.StorageError as failure:
                error.add_note(f"Discarding the upload failed too: {failure}")
            raise

    def _objects(self) -> dict[str, object]:
        """Return the values that are no tensors."""
        blobs, is_safe = self.stored_blobs(), not self.spec.unsafe_pickle
        read = _reading(self.context, self.source, blobs)
        objects: dict[str, object] = {}
        for fqn in self.chosen.blobs:
            file = io.BytesIO(b"".join(read(fqn)))
            try:
                refusal = refusal_of(file) if is_safe else None
                if refusal is not None:
                    raise refusal  # noqa: TRY301  # as what torch itself raises
                file.seek(0)
                objects[fqn] = torch.load(file, map_location="cpu", weights_only=False)
            except Exception as error:
                raise errors.UnsafeContentError(
                    f"{fqn} is not a value that torch loads with weights_only=True.",
                    next_step="Leave it out with exclude=, or, if you trust who wrote it, pass "
                    "unsafe_pickle=True.",
                ) from error
        return objects


def _reading(
    context: ExportContext, source: Source, segments: Sequence[Elements | Stored]
) -> Callable[[str], Iterator[memoryview]]:
    """Return a function that yields an FQN's bytes, read in windows; FQNs must come in order."""
    # Each begins where an element of any dtype may, so that no window cuts one.
    gaps = [Fixed(b"\0" * (-part.size_bytes % ELEMENTS_BYTES)) for part in segments]
    parts = [part for pair in zip(segments, gaps, strict=True) for part in pair]
    file = OutFile(name="", segments=parts)
    starts = {part.fqn: at for at, part in zip(file.starts[::2], segments, strict=False)}
    sizes = {part.fqn: part.size_bytes for part in segments}
    reader = SegmentReader([file], source, RangeReader(context.source, context.options))
    step = context.options.part_bytes - context.options.part_bytes % ELEMENTS_BYTES

    @lru_cache(maxsize=1)
    def window_at(begin: int) -> memoryview:
        window = memoryview(bytearray(min(step, file.size_bytes - begin)))
        reader.prepare(0, begin, begin + len(window))
        reader.fill(0, begin, begin + len(window), window)
        return window

    def read(fqn: str) -> Iterator[memoryview]:
        at = starts[fqn]
        end = at + sizes[fqn]
        while at < end:
            view = window_at(at - at % step)[at % step :][: end - at]
            at += len(view)
            yield view

    return read


def _append(archive: zipfile.ZipFile, name: str, views: Iterable[bytes | memoryview]) -> None:
    """Append one record to a zip, as it is; its bytes are aligned."""
    info, stream = zipfile.ZipInfo(f"archive/{name}"), archive.fp
    assert stream is not None  # noqa: S101  # it is open
    # The header, the name, the length in 64 bits, and the head of the padding.
    padding = -(stream.tell() + 30 + len(info.filename) + 20 + 4) % _ALIGN_BYTES
    # The id is the one that torch writes; no reader needs it.
    info.extra = struct.pack("<2H", 0x4246, padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as file:
        for view in views:
            file.write(view)


def _untouched(chosen: Selected) -> tuple[dict[str, torch.Tensor], dict[int, str]]:
    """Return tensors in memory that is never touched, and whose each storage is; ties share.

    All have one address; the reserved memory is as long as the largest.
    """
    sizes = {fqn: elements_of(fqn, info).size_bytes for fqn, info in chosen.tensors.items()}
    length = max(sizes.values(), default=0) + 1
    pool = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    whole: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():
        # Torch warns that it is not writable; therefore it takes no memory.
        warnings.simplefilter("ignore")
        for fqn in {chosen.ties.get(fqn, fqn): None for fqn in sizes}:
            whole[fqn] = torch.empty(0, dtype=torch.uint8, device="cpu")
            if count := sizes[fqn]:
                whole[fqn] = torch.frombuffer(pool, dtype=torch.uint8, count=count)
    tensors = {
        fqn: whole[chosen.ties.get(fqn, fqn)].view(getattr(torch, info.dtype)).reshape(info.shape)
        for fqn, info in chosen.tensors.items()
    }
    storages = {view.untyped_storage()._cdata: fqn for fqn, view in whole.items() if sizes[fqn]}  # noqa: SLF001  # as torch.save
    return tensors, storages


class _Pickler(pickle.Pickler):
    """Pickles as `torch.save` does; `stored` has the numbers of storages, and these, in order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.stored: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, obj: Any) -> Any:  # noqa: ANN401  # whatever is in the state dict
        """Return the persistent id of a storage."""
        if isinstance(obj, torch.storage.TypedStorage):
            typed: Any = obj
            data, name, count = typed._untyped_storage, typed._pickle_storage_type(), typed._size()  # noqa: SLF001
        elif torch.is_storage(obj):
            data, name, count = obj, "UntypedStorage", obj.nbytes()
        else:
            return None
        number, _ = self.stored.setdefault(data._cdata, (len(self.stored), data))  # noqa: SLF001  # as torch.save
        return ("storage", getattr(torch, name), str(number), "cpu", count)


def _nested(flat: Mapping[str, object], known: Mapping[str, _Path]) -> object:
    """Return the nested state dict; refuse lists without some of their items, which would shift.

    A list is made as long as its highest index, so one number could take all memory.
    """
    paths = {fqn: known.get(fqn, (fqn,)) for fqn in flat}
    longest: dict[_Path, int] = {}
    for path in paths.values():
        for at, key in enumerate(path):
            if isinstance(key, int):
                length = key + 1 if key >= 0 else 1 << 60
                longest[path[:at]] = max(longest.get(path[:at], 0), length)
    try:
        if sum(longest.values()) > 16 * sum(map(len, paths.values())) + (1 << 16):
            raise ValueError("its lists would be far longer than what is in them")  # noqa: TRY301
        nested = unflatten_state_dict(dict(flat), paths)
    except Exception as error:
        what = f"The values do not form a nested state dict: {error}."
        step = "Leave the names that contradict each other out with exclude=."
        raise errors.InvalidInputError(what, next_step=step) from error
    _restore_int_keys(nested, int_keys_of(known))
    return nested


def _restore_int_keys(nested: Any, int_keys: Iterable[_Path]) -> None:  # noqa: ANN401  # a state dict
    """Turn the keys of the dicts at these paths back into ints; inner dicts first."""
    for path in sorted(int_keys, key=len, reverse=True):
        container = nested
        try:
            for key in path:
                container = container[key]
        except (LookupError, TypeError):
            continue  # no value below it was chosen
        if isinstance(container, dict):
            items = [(int(k) if INT_KEY.fullmatch(k) else k, v) for k, v in container.items()]
            container.clear()
            container.update(items)
