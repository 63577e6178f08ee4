"""`convert`: the values of a checkpoint of one format, written in another.

Nothing is held in memory but windows of tensors and the values that are none. Until its last write
the target looks like no checkpoint, or like the one that is being replaced where that is of ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from ckpt_storage.commit.slotlog import is_there
from ckpt_storage.errors import CheckpointNotFoundError, InvalidInputError, StorageError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, new_write_id
from ckpt_storage.options import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    LOCAL_READ_BYTES,
    MIB,
    PageCache,
    Progress,
    RetryPolicy,
    Timeouts,
    TransferOptions,
)
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import open_newest, told_from_damage, watch_file
from ckpt_storage.source.model import CommittedSource, Source, TensorInfo
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.stalling import stalling_deadline
from ckpt_storage.store.store import Store

from .conversion.stream import TensorStream
from .conversion.targets import FORMATS, Target, TargetFormat, split_file, write_target
from .conversion.values import Values, chosen
from .copying import destination_of
from .options import Selection, parse_bytes
from .places import is_within, place_within

if TYPE_CHECKING:
    from .conversion.torchfile import TorchFileSource

__all__ = ["FORMATS", "ConvertReport", "TargetFormat", "convert"]

DEFAULT_MAX_FILE_BYTES = "5GB"
_LOCAL_THREADS = 2
_LEAST_MEMORY_BYTES = 16 * MIB
_LAYOUT = 1
"""Changes with how values are laid out in files: those of another release are not gone on with."""

_KEYS_AT_ONCE = 4096
"""Of stock DCP's items the heads are read to find their values: some kilobytes each."""

_SAFETENSORS = frozenset({"dcp_safetensors", "safetensors"})
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_FOLDER_FILES = (".distcp", ".safetensors", ".json", STOCK_METADATA)
"""How the names end that a folder of some format may get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """What `convert` did; both URLs are without credentials.

    source_format, format: of what was read and of what was written. save_id: of the checkpoint
    that was made, if it is one of ours. kept_count: files that a call which died had completed, and
    that were found sound. total_bytes counts tensors only. dropped: FQNs that the
    target cannot hold and that were left out as asked; excluded: those that a selection left out.
    """

    source_url: str
    source_format: str
    url: str
    format: TargetFormat
    save_id: str | None
    kept_count: int
    tensor_count: int
    blob_count: int
    total_bytes: int
    dropped: Sequence[str]
    excluded: Sequence[str]
    seconds: float


def convert(  # the public surface, all keyword-only
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: TargetFormat,
    include: Selection | None = None,
    exclude: Selection | None = None,
    unsupported: Literal["error", "drop"] = "error",
    overwrite: bool = False,
    max_file_bytes: int | str = DEFAULT_MAX_FILE_BYTES,
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES,
    page_cache: PageCache = "keep",
    unsafe_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    destination_storage_options: Mapping[str, Any] | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> ConvertReport:
    """Write the values of the checkpoint at `src` to `dst` in the format `to`; one process calls.

    Reads checkpoints of ours, of stock DCP, torch's sharded safetensors, Hugging Face folders and
    files of `torch.save`. Every block that has a checksum is checked; of a torch file that is each
    record, by the CRC-32 that torch wrote. All values go over under
    their names: tensors bit by bit, and what is no tensor where the target can hold it. Names
    nested in dicts and lists keep their nesting in formats that have it. `dst` shows the result
    all at once, at the end. After a failure or a kill, call it again with the same arguments: it
    needs no `overwrite` for what the one before left. Files of "dcp", "dcp_safetensors" and
    "safetensors" that were complete, and are sound, are kept; so a smaller `max_file_bytes` makes
    less to be written again. A file of "torch_save" is one stream with its table at the end, and
    an attempt at a checkpoint of ours bears an id that no other may use: those begin anew.

    To make a model's weights of a training checkpoint, with its names and ties as `transformers`
    expects them, use `consolidate`.

    Args:
        src: what to convert: a folder or URL, or a file of `torch.save`.
        dst: the folder or URL to fill; for "torch_save" the file.
        to: "ckpt_storage", "dcp" (stock `FileSystemReader` loads it), "dcp_safetensors" (torch's
            sharded safetensors), "safetensors" (Hugging Face: files with an index), "torch_save".
        include: which values go over: FQNs and glob patterns, or a function of the FQN.
        exclude: which of them do not.
        unsupported: what happens to values that the format cannot hold: "error" names them,
            "drop" leaves them out and reports them. safetensors holds no objects, and not every
            dtype.
        overwrite: replace what is at `dst`. A file of `torch.save` on a storage that cannot replace
            one in a single step is deleted before the new one is written.
        max_file_bytes: about how large a file gets; a tensor is never cut for it.
        memory_limit_bytes: ceiling of buffers.
        page_cache: whether the kernel keeps a copy of local files of `dst` that are on the disk.
        unsafe_pickle: unpickle whatever the source holds: this runs code of whoever wrote it.
            Needed only to read or write "torch_save" with values of other than torch's types.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        timeout: seconds, `timedelta` or `Timeouts` (`write` and `commit` count); default an hour.
            `write` is how long nothing may move, however long the whole takes.
        retry: how failed storage requests are repeated.
        progress: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises:
        CheckpointError: `InvalidInputError` (naming what the format cannot hold, or saying that
            `dst` is `src` under another name),
            `CheckpointExistsError`, `IntegrityError`, `UnsafeContentError`, `FormatError`,
            `CheckpointGoneError` (also if another writer saved over `src` meanwhile),
            `StorageError`, `PhaseTimeoutError`, and what opening `src` raises.

    """
    if to not in FORMATS:
        raise InvalidInputError(
            f"The format {to!r} is not known.", next_step=f"Give one of {', '.join(FORMATS)}."
        )
    source = Location.of(src, storage_options)
    timeouts = Timeouts.of(timeout)
    job = _Conversion(
        source=source,
        target=destination_of(source, dst, destination_storage_options),
        to=to,
        overwrite=overwrite,
        max_file_bytes=parse_bytes(max_file_bytes, option="max_file_bytes"),
        memory_limit_bytes=memory_limit_bytes,
        page_cache=page_cache,
        unsafe_pickle=unsafe_pickle,
        timeouts=timeouts,
        retry=retry or RetryPolicy(),
        progress=progress,
    )
    with job.stores, job.deadline.governs(f"Converting {source.url} to {job.target.url}"):
        return job.run(include=include, exclude=exclude, unsupported=unsupported)


class _Conversion:
    """One call of `convert`."""

    def __init__(  # one call site, all named
        self,
        *,
        source: Location,
        target: Location,
        to: TargetFormat,
        overwrite: bool,
        max_file_bytes: int,
        memory_limit_bytes: int,
        page_cache: PageCache,
        unsafe_pickle: bool,
        timeouts: Timeouts,
        retry: RetryPolicy,
        progress: Progress,
    ) -> None:
        if type(memory_limit_bytes) is not int or memory_limit_bytes < _LEAST_MEMORY_BYTES:
            raise InvalidInputError(
                f"memory_limit_bytes is {memory_limit_bytes!r}.",
                next_step=f"Give an integer of {_LEAST_MEMORY_BYTES} or more.",
            )
        if is_within(source, target) and is_within(target, source):
            raise _onto_itself(source.url)
        self.source = source
        self.target = target
        what = f"Converting {source.url} to {target.url}"
        self.deadline, _ = stalling_deadline("write", timeouts.write, what)
        self._to = to
        self._overwrite = overwrite
        self._max_file_bytes = max_file_bytes
        self._memory_limit_bytes = memory_limit_bytes
        self._unsafe_pickle = unsafe_pickle
        self._timeouts = timeouts
        self._retry = retry
        self.stores = ExitStack()
        self._opened = partial(open_store, page_cache=page_cache, timeouts=timeouts, retry=retry)
        self._progress = progress
        self._start_s = time.monotonic()
        self._check_unchanged: Callable[[], None] = lambda: None
        self._source_state: object = None

    def _open(self, location: Location) -> Store:
        store = self._opened(location)
        self.stores.callback(store.close)
        return store.bounded(self.deadline)

    def _options(self, store: Store) -> TransferOptions:
        """Return what one side may use: reads, windows and writes share the memory."""
        share = self._memory_limit_bytes // 2
        is_remote = store.capabilities.is_remote
        threads = min(8 if is_remote else _LOCAL_THREADS, max(1, share // (4 * MIB)))
        part_bytes = min(LOCAL_READ_BYTES, max(MIB, share // (2 * threads)))
        part_bytes = max(part_bytes, store.capabilities.min_part_bytes)
        return TransferOptions(
            thread_count=threads,
            part_bytes=part_bytes,
            memory_limit_bytes=max(share, 2 * part_bytes),
        )

    def run(
        self,
        *,
        include: Selection | None,
        exclude: Selection | None,
        unsupported: Literal["error", "drop"],
    ) -> ConvertReport:
        source, store, source_format = self._source()
        if source_format == self._to:
            raise InvalidInputError(
                f"{self.source.url} is of the format {self._to} already.",
                next_step="Use ckpt_storage.copy to copy it.",
            )
        names, excluded = chosen(source, include=include, exclude=exclude)
        lacking = self._lacking(source, names)
        if lacking and unsupported == "error":
            raise _cannot_hold(self._to, lacking)
        kept = names - lacking.keys()
        if not kept:
            raise InvalidInputError(
                "Nothing is left to convert.", next_step="Leave less out with exclude=."
            )
        self._check_elsewhere(source, store, is_file=source_format == "torch_save")
        options = self._options(store)
        values = Values(
            tensors={fqn: info for fqn, info in source.tensors.items() if fqn in kept},
            blobs=frozenset(source.blobs & kept),
            held=getattr(source, "values", {}),
            paths=source.planner_data or {},
            ties={a: t for a, t in _ties_of(source).items() if a in kept and t in kept},
            stream=_stream_of(
                source,
                store,
                options=options,
                deadline=self.deadline,
                window_bytes=options.part_bytes,
            ),
            check_unchanged=self._check_unchanged,
        )
        with told_from_damage(self._check_unchanged):
            # A source of which something is missing leaves the target as it was.
            _find(source, values)
        with (
            told_from_damage(self._check_unchanged),
            reporting(
                self._progress,
                phase="write",
                rank=0,
                total_bytes=values.total_bytes,
                save_id=source.save_id,
                with_bar=True,
            ) as on_bytes,
        ):
            written = write_target(
                values,
                Target(
                    format=self._to,
                    location=self.target,
                    source_url=self.source.url,
                    identity=self._identity(kept),
                    overwrite=self._overwrite,
                    max_file_bytes=self._max_file_bytes,
                    unsafe_pickle=self._unsafe_pickle,
                    deadline=self.deadline,
                    commit_timeout_s=self._timeouts.commit,
                    retry=self._retry,
                    on_bytes=on_bytes,
                    open=self._open,
                    options_for=self._options,
                ),
            )
        return ConvertReport(
            source_url=self.source.url,
            source_format=source_format,
            url=self.target.url,
            format=self._to,
            save_id=written.save_id,
            kept_count=written.kept_count,
            tensor_count=len(values.tensors),
            blob_count=len(values.blobs),
            total_bytes=values.total_bytes,
            dropped=tuple(sorted(lacking)),
            excluded=tuple(sorted(excluded)),
            seconds=time.monotonic() - self._start_s,
        )

    def _identity(self, names: set[str]) -> str:
        """Return what stands for the files to come; a new one if the source may change unseen."""
        if self._source_state is None:
            return new_write_id()
        what = [
            _LAYOUT,
            self.source.url,
            self._source_state,
            self._to,
            self._max_file_bytes,
            sorted(names),
        ]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def _check_elsewhere(
        self, source: Source | TorchFileSource, store: Store, *, is_file: bool
    ) -> None:
        """Refuse a target that would replace files of the source; the storages are asked."""
        parent, name = split_file(self.target)
        to_file = self._to == "torch_save"
        if to_file and not (name and is_there(self._open(parent), name)):
            return
        target = self._open(parent if to_file else self.target)
        within = place_within(store, target, is_deep=not is_file)
        if within is None:
            return
        if to_file:
            if f"{within}/{name}".lstrip("/") in _paths_of(source):
                raise InvalidInputError(
                    f"{self.target.url} is part of {self.source.url}, which is to be converted.",
                    next_step="Give another name for the result.",
                )
            return
        if is_file:
            is_hit = split_file(self.source)[1].endswith(_FOLDER_FILES)
        else:
            is_hit = not within or any(path.startswith(f"{within}/") for path in _paths_of(source))
        if is_hit:
            raise _onto_itself(self.source.url)

    def _source(self) -> tuple[Source | TorchFileSource, Store, str]:
        """Open what is to be converted: a checkpoint, or a file, which its name may tell."""
        parent, name = split_file(self.source)
        if name.endswith(_TORCH_SUFFIXES) and is_there(self._open(parent), name):
            return self._torch_file(parent, name)
        store = self._open(self.source)
        try:
            opened, marks = open_newest(store, deadline=self.deadline, options=self._options(store))
        except (CheckpointNotFoundError, StorageError):
            if name and is_there(self._open(parent), name):
                return self._torch_file(parent, name)
            raise
        if marks is None:
            self._source_state = opened.save_id
        else:
            self._check_unchanged = partial(marks.check, store)
            if all(time_s is not None for _, time_s in marks.of.values()):
                self._source_state = sorted(marks.of.items())
        return opened, store, opened.format

    def _torch_file(self, parent: Location, name: str) -> tuple[TorchFileSource, Store, str]:
        from .conversion.torchfile import open_torch_file  # noqa: PLC0415  # imports torch

        store = self._open(parent)
        self._check_unchanged = watch_file(store, name)
        found = store.stat(name)
        if found.modified_s is not None:
            self._source_state = (found.size_bytes, found.modified_s)
        source = open_torch_file(store, name, unsafe_pickle=self._unsafe_pickle)
        return source, store, "torch_save"

    def _lacking(self, source: Source | TorchFileSource, names: set[str]) -> dict[str, str]:
        """Return the values that the format cannot hold, and why."""
        if self._to not in _SAFETENSORS:
            return {}
        why = dict.fromkeys(source.blobs & names, "an object, no tensor")
        for fqn in names & source.tensors.keys():
            info = source.tensors[fqn]
            reason = _no_safetensors(info)
            if reason:
                why[fqn] = reason
        return why


def _stream_of(
    source: Source | TorchFileSource,
    store: Store,
    *,
    options: TransferOptions,
    deadline: Deadline,
    window_bytes: int,
) -> TensorStream:
    records = getattr(source, "records", None)
    if records is None:
        return TensorStream(
            source, store, options=options, deadline=deadline, window_bytes=window_bytes
        )
    from .conversion.torchfile import RecordStream  # noqa: PLC0415  # imports torch

    return RecordStream(
        source,
        store,
        records,
        options=options,
        deadline=deadline,
        window_bytes=window_bytes,
    )


def _find(source: Source | TorchFileSource, values: Values) -> None:
    """Fetch what tells where the values lie, many at a time: each alone takes a round trip."""
    keys = iter(value_keys(values))
    while part := list(islice(keys, _KEYS_AT_ONCE)):
        source.require(part)


def _onto_itself(url: str) -> InvalidInputError:
    return InvalidInputError(
        f"{url} would be converted onto itself, or into its own files.",
        next_step="Give another folder for the result.",
    )


def _paths_of(source: Source | TorchFileSource) -> set[str]:
    """Return the files that hold the values of a source, and those that make it a checkpoint."""
    keys = value_keys(source)
    source.require(keys)
    return {STOCK_METADATA, INDEX_NAME, *(source.place(*key).path for key in keys)}


def _ties_of(source: Source | TorchFileSource) -> Mapping[str, str]:
    if isinstance(source, CommittedSource):
        return source.ties
    found: Mapping[str, str] = getattr(source, "ties", {})
    return found


def _no_safetensors(info: TensorInfo) -> str | None:
    """Return why safetensors cannot hold a tensor, None if it can."""
    if info.fqn == "__metadata__":
        return "a name that its header needs for itself"
    if DTYPES[info.dtype].safetensors is None:
        return f"dtype {info.dtype}"
    if info.dtype == "float4_e2m1fn_x2" and not info.shape:
        return "a single pair of 4-bit numbers"
    return None


def _cannot_hold(to: str, lacking: Mapping[str, str]) -> InvalidInputError:
    shown = ", ".join(f"{fqn} ({why})" for fqn, why in sorted(lacking.items())[:5])
    more = f" and {len(lacking) - 5} more" if len(lacking) > 5 else ""  # noqa: PLR2004  # as shown
    return InvalidInputError(
        f"{to} cannot hold {shown}{more}.",
        next_step='Pass unsupported="drop" to leave them out, or name what you want with '
        "include= and exclude=.",
    )
