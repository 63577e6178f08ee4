"""Copies of the exports that lie directly below a checkpoint, once its copy is committed."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial

from ckpt_storage import errors
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.format import exports, names
from ckpt_storage.source.file_versions import listed
from ckpt_storage.source.opening import open_source
from ckpt_storage.transfer import objects

from .copy_base import Copy, CopyReport, CopySpec
from .copy_foreign import open_foreign
from .output import ExportContext, SourceVersion
from .run import run_together

log = logging.getLogger("ckpt_storage")

_CHECKPOINT_ENTRIES = frozenset({f"{names.COMMITS}/", f"{names.SAVES}/", names.STOCK_METADATA})
_SUMS = ("file_count", "read_bytes", "sent_bytes", "copied_bytes", "kept_count", "kept_bytes")


def copy_exports(
    context: ExportContext, spec: CopySpec, save_id: str | None, report: CopyReport
) -> CopyReport:
    """Copy the exports of a save; return the report of its copy with theirs added.

    Raises nothing. With `save_id` None, as for a copy with another id, nothing is copied.
    """
    copied: dict[str, CopyReport] = {}
    left_out: list[str] = []
    failed: dict[str, str] = {}
    paths: list[str] = []
    try:
        paths = [entry.path for entry in listed(context.source, "")]
    except errors.CheckpointError as error:
        left_out, failed = ["."], {".": str(error)}
    for path in paths:
        if path in _CHECKPOINT_ENTRIES or path.startswith(names.PROBE_PREFIX):
            continue
        folder = path.rstrip("/")
        try:
            tag = _tag_of(context, folder, save_id) if path.endswith("/") and save_id else None
            export_report = _copy_export(spec, folder, tag) if tag else None
        except errors.CheckpointError as error:
            log.warning("the export %s is not copied: %s", folder, error)
            export_report = None
            if not isinstance(error, errors.CheckpointExistsError):
                failed[folder] = str(error)
        if export_report is not None:
            copied[folder] = export_report
        else:
            left_out.append(folder if folder in failed else path)
    reports = [report, *copied.values()]
    return replace(
        report,
        **{name: sum(getattr(each, name) for each in reports) for name in _SUMS},
        exports=tuple(copied),
        left_out=tuple(left_out),
        failed_exports=failed,
    )


def _tag_of(context: ExportContext, folder: str, save_id: str) -> exports.IndexTag | None:
    """Return the tag of an index; None if two reads of it do not name the save."""
    store, path = context.source, f"{folder}/{names.INDEX_NAME}"
    for _ in range(2):
        index = objects.read_or_none(store, path)
        tag = None if index is None else exports.IndexTag.of(index.data)
        if tag is not None and tag.save_id == save_id:
            return tag
        if index is None:
            break
        store.drop_caches(path)
    return None


def _copy_export(spec: CopySpec, folder: str, tag: exports.IndexTag) -> CopyReport:
    """Copy a folder on this rank alone, or what is missing of it."""
    source, target = spec.source.child(folder), spec.target.child(folder)
    if target.is_local:
        # The folder becomes the root of a store, and a store follows the link of its root.
        _check_below(target.path, spec.target.path)
    export_spec = replace(
        spec,
        source=source,
        target=target,
        include=None,
        exclude=None,
        overwrite=False,
        progress=None,
    )
    what, make_copy = f"the copy of {source.url}", partial(_make_copy, tag)
    alone, timeouts = RankGroup.alone(), spec.timeouts
    return run_together(alone, "copy", what, timeouts, lambda: export_spec, make_copy)


def _make_copy(
    tag: exports.IndexTag, context: ExportContext, version: SourceVersion | None
) -> Copy:
    """Return the copy of an export; this rank, which is alone, has no version of it."""
    assert version is None  # noqa: S101  # only other ranks have one
    return open_foreign(context, open_source(context.source, context.options), tag)


def _check_below(folder: str, root: str) -> None:
    """Refuse a folder below a local root that a symbolic link moves out of it."""
    if not os.path.realpath(folder).startswith(f"{os.path.realpath(root).rstrip('/')}/"):
        raise errors.UnsafeContentError(
            f"{folder} is a symbolic link that leads out of {root}.",
            path=folder,
            next_step="Replace the link by a folder, or copy to what it leads to.",
        )
