"""Owners in an output folder: the run that holds it, and the records that name its files."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckpt_storage import errors
from ckpt_storage.format import exports
from ckpt_storage.format.exports import DOCUMENTS, HOLDER_PATH
from ckpt_storage.source.file_versions import listed
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import read_decoded

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

_RECORDS = re.compile(rf"{re.escape(DOCUMENTS)}/([0-9a-f]{{16}})/")
_SUFFIXED = re.compile(r".*-([0-9a-f]{8})\.safetensors")


def check_owned(store: Store, here: Sequence[ObjectInfo], identity: str) -> None:
    """Raise `CheckpointExistsError` if a weight file is from another program.

    A file is from an export by this package if a record has its name and size. Also accepted are
    files with names that an unfinished run may have used, since a run can die before it writes a
    record, and all files that a record of this content (`identity`) names, whatever their size.
    """
    folders = (_RECORDS.fullmatch(entry.path) for entry in listed(store, DOCUMENTS))
    known = set[tuple[str, int]]()
    again, unfinished = set[str](), set[str]()
    for tag in (match[1] for match in folders if match):
        records = [entry.path for entry in listed(store, exports.records_folder(tag))]
        seals = (
            read_trusted(store, path, exports.Sealed.decode)
            for path in filter(exports.is_file_record, records)
        )
        files = [sealed.file for sealed in seals if sealed]
        export = read_trusted(store, exports.export_path(tag), exports.ExportRecord.decode)
        if export is None:
            unfinished.add(tag[:8])
        else:
            files += export.files
        known |= {(file.path, file.size_bytes) for file in files}
        if identity.startswith(tag):
            again |= {file.path for file in files}
    for entry in here:
        is_known = (entry.path, entry.size_bytes) in known or entry.path in again
        if is_known or not exports.is_weight_file(entry.path):
            continue
        suffix = _SUFFIXED.fullmatch(entry.path)
        if unfinished and (suffix is None or suffix[1] in unfinished):
            continue
        raise errors.CheckpointExistsError(
            f"{store.url} holds {entry.path}, which no record of an export by ckpt_storage names; "
            "the export would delete it.",
            path=store.url,
            phase="plan",
            next_step="Move that file away, or give another output folder.",
        )


def read_trusted(store: Store, path: str, decode: Callable[[bytes, str], T]) -> T | None:
    """Return a document; None if it is absent or damaged: no run relies on a damaged document."""
    try:
        return read_decoded(store, path, lambda data: decode(data, path))
    except (errors.IntegrityError, errors.FormatError, TypeError, ValueError) as error:
        log.warning("%s is not trusted: %s", store.shown(path), error)
        return None


def holder_of(store: Store, folder: str = "") -> exports.Holder | None:
    """Return the run that holds a folder; None if no run does, or its document is damaged."""
    return read_trusted(store, f"{folder}/{HOLDER_PATH}".lstrip("/"), exports.Holder.decode)
