"""Which weight files of an output folder are ours to replace: those that records of ours name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpt_storage import errors
from ckpt_storage.commit.slotlog import read_or_none
from ckpt_storage.format import exports
from ckpt_storage.format.exports import DOCUMENTS
from ckpt_storage.source.file_versions import listed
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store

T = TypeVar("T")

_RECORDS = re.compile(rf"{re.escape(DOCUMENTS)}/([0-9a-f]{{16}})/")
_SUFFIXED = re.compile(r".*-([0-9a-f]{8})\.safetensors")


def check_owned(store: Store, here: Sequence[ObjectInfo], identity: str) -> None:
    """Raise `CheckpointExistsError` if a weight file is from another program.

    Ours are files of a name and a size that a record says, those that a run may have left which
    died before it wrote its record, and of this content, `identity`, any that a record names.
    """
    folders = (_RECORDS.fullmatch(one.path) for one in listed(store, DOCUMENTS))
    known = set[tuple[str, int]]()
    again, unfinished = set[str](), set[str]()
    for tag in (match[1] for match in folders if match):
        records = [one.path for one in listed(store, exports.records_folder(tag))]
        seals = (
            _decoded(store, path, exports.Sealed.decode)
            for path in filter(exports.is_file_record, records)
        )
        files = [sealed.file for sealed in seals if sealed]
        export = _decoded(store, exports.export_path(tag), exports.ExportRecord.decode)
        if export is None:
            unfinished.add(tag[:8])
        else:
            files += export.files
        known |= {(file.path, file.size_bytes) for file in files}
        if identity.startswith(tag):
            again |= {file.path for file in files}
    for one in here:
        is_known = (one.path, one.size_bytes) in known or one.path in again
        if is_known or not exports.is_weight_file(one.path):
            continue
        suffix = _SUFFIXED.fullmatch(one.path)
        if unfinished and (suffix is None or suffix[1] in unfinished):
            continue
        raise errors.CheckpointExistsError(
            f"{store.url} holds {one.path}, which no record of an export by ckpt_storage names; "
            "the export would delete it.",
            path=store.url,
            phase="plan",
            next_step="Move that file away, or give another output folder.",
        )


def _decoded(store: Store, path: str, decode: Callable[[bytes, str], T]) -> T | None:
    try:
        found = read_or_none(store, path)
        return None if found is None else decode(found.data, path)
    except (errors.IntegrityError, errors.FormatError, TypeError, ValueError):
        return None
