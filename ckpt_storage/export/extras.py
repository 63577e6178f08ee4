"""Files beside the weights of an export: those that the checkpoint holds, and those of a caller."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial

from ckpt_storage.errors import InvalidInputError, UnsafeContentError
from ckpt_storage.format.exports import DOCUMENTS, LIBRARY_INDEXES
from ckpt_storage.format.names import FILES_PREFIX, PROBE_PREFIX, checked_path, path_flaw
from ckpt_storage.source.model import Source
from ckpt_storage.store import Location, open_store
from ckpt_storage.transfer.ranges import RangeReader

from .options import ExtraFiles, split_file
from .output import ExportContext
from .plan import elements_of
from .reads import values_reader


def read_extra_files(
    context: ExportContext, source: Source, fqns: Collection[str], extra_files: ExtraFiles | None
) -> dict[str, bytes]:
    """Return the content of all files by name; a file of the caller replaces an entry.

    Raises `UnsafeContentError` for an entry whose name leads out of the folder, or is a name of the
    export itself, and what reading raises.
    """
    files: dict[str, bytes] = {}
    for fqn in sorted(fqns):
        name = checked_path(fqn.removeprefix(FILES_PREFIX), where=fqn)
        if flaw := name_flaw(name):
            what = f"{fqn} is no file of an export: {flaw}."
            step = f"Leave it out with exclude=[{fqn!r}]."
            raise UnsafeContentError(what, path=name, next_step=step)
        files[name] = _entry(context, source, fqn)
    for name, content in named_files(extra_files).items():
        files[name] = content if isinstance(content, bytes) else _read(context, content)
    return files


def named_files(extra_files: ExtraFiles | None) -> dict[str, bytes | str | os.PathLike[str]]:
    """Return the files of a caller by name in the export. Raises `InvalidInputError`."""
    if extra_files is None:
        return {}
    files: dict[str, bytes | str | os.PathLike[str]]
    if isinstance(extra_files, Mapping):
        files = dict(extra_files)
    else:
        paths = [extra_files] if isinstance(extra_files, str | os.PathLike) else list(extra_files)
        files = {os.fspath(path).rstrip("/").rpartition("/")[2]: path for path in paths}
    for name in files:
        if flaw := name_flaw(name):
            step = "Give names of files beside the weights, such as config.json."
            raise InvalidInputError(f"extra_files names {name!r:.80}: {flaw}.", next_step=step)
    return files


def name_flaw(name: str) -> str | None:
    """Return why a file beside weights may not have a name, None if it may."""
    if flaw := path_flaw(name):
        return flaw
    is_own = name in LIBRARY_INDEXES or name.lower().endswith(".safetensors")
    if is_own or name.startswith((f"{DOCUMENTS}/", PROBE_PREFIX)) or name == DOCUMENTS:
        return "an export has files of this name"
    return None


def _entry(context: ExportContext, source: Source, fqn: str) -> bytes:
    value, limit_bytes = elements_of(fqn, source.tensors[fqn]), context.options.memory_limit_bytes
    if value.size_bytes > limit_bytes:
        raise InvalidInputError(
            f"{fqn} has {value.size_bytes} bytes; memory_limit_bytes is {limit_bytes}.",
            next_step=f"Raise memory_limit_bytes, or leave it out with exclude=[{fqn!r}].",
        )
    ranges = RangeReader(context.source, context.options)
    return b"".join(values_reader(ranges, source, [value])(fqn))


def _read(context: ExportContext, path: str | os.PathLike[str]) -> bytes:
    folder, name = split_file(Location.of(path))
    opened = partial(open_store, timeouts=context.spec.timeouts, retry=context.spec.retry)
    with closing(opened(folder)) as store:
        limit_bytes = context.options.memory_limit_bytes
        return store.bounded(context.deadline).get(name, max_bytes=limit_bytes).data
