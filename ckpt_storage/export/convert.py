"""`convert`: the values of a checkpoint of one format, written in another.

Nothing is held in memory but windows of tensors and the values that are none. Until its last write
the target looks like no checkpoint, or like the one that is being replaced where that is of ours.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal

from ckpt_storage.errors import (
    InvalidInputError,
)
from ckpt_storage.options import PageCache, Progress, RetryPolicy, Timeouts
from ckpt_storage.store import Location

from .conversion import Conversion
from .options import (
    DEFAULT_MAX_FILE_BYTES,
    FORMATS,
    ConvertReport,
    Selection,
    TargetFormat,
    parse_bytes,
)
from .places import location_beside


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
    memory_limit_bytes: int | None = None,
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
    job = Conversion(
        source=source,
        target=location_beside(source, dst, destination_storage_options),
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
