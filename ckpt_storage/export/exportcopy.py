"""Exports that lie beside a checkpoint, copied after it: weight files first, the index last."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from ckpt_storage.commit.slotlog import check_document, read_if_there
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.errors import CheckpointError, CheckpointExistsError, StorageError
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES
from ckpt_storage.format.exports import (
    DOCUMENTS,
    INDEX_NAME,
    NAMES_PATH,
    ExportRecord,
    IndexTag,
    export_path,
    is_weight_file,
    records_folder,
)
from ckpt_storage.format.names import COMMITS, PROBE_PREFIX, SAVES, STOCK_METADATA, is_blocker
from ckpt_storage.store.backend import Content, ObjectInfo
from ckpt_storage.store.deadline import stalling_deadline
from ckpt_storage.store.store import Store

from .copied import CopiedFiles, lay_out_copies
from .folder import listed
from .output import Made, Output, Site
from .plain_folder import PlainFolder
from .plan import Plan, plan
from .work import make

log = logging.getLogger("ckpt_storage")

_OWN = frozenset({f"{COMMITS}/", f"{SAVES}/", STOCK_METADATA})


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedExports:
    """What became of all that lies beside a checkpoint.

    copied: folders of exports. left_out: paths that stay behind. failed: those of them that an
    error kept from being copied, and what it says; "." if it could not be listed what is there.
    made: what was written for each.
    """

    copied: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    made: list[tuple[Plan, Made]] = field(default_factory=list)


def copy_exports(site: Site, save_id: str, *, as_save_id: str) -> CopiedExports:
    """Copy the exports of `save_id` directly below the source; return what became of each.

    A stale export, one whose place at the target is taken by another content, and one that is
    damaged or cannot be read or written, stays behind; so do all if the copy has another save id,
    `as_save_id`: they would be stale there. Raises nothing: the checkpoint is committed by now.
    Idempotent.
    """
    found = CopiedExports()
    try:
        entries = _listed(site.source)
    except CheckpointError as error:
        _failed(found, ".", error)
        return found
    for entry in entries:
        if entry.path in _OWN or entry.path.startswith(PROBE_PREFIX):
            continue
        folder = entry.path.rstrip("/")
        is_copied = False
        try:
            if entry.path.endswith("/") and save_id == as_save_id:
                is_copied = _copy(site, folder, save_id, found)
        except CheckpointExistsError as error:
            log.warning("the export %s is not copied: %s", folder, error)
        except CheckpointError as error:
            _failed(found, folder, error)
            continue
        if is_copied:
            found.copied.append(folder)
        else:
            found.left_out.append(entry.path)
    return found


def _failed(found: CopiedExports, path: str, error: CheckpointError) -> None:
    log.warning("the export %s is not copied: %s", path, error)
    found.left_out.append(path)
    found.failed[path] = str(error)


def _listed(store: Store) -> list[ObjectInfo]:
    try:
        return store.list("", recursive=False)
    except StorageError as error:
        # Who may read but not list has the checkpoint; what else lies there stays unknown.
        if error.kind not in {"not-found", "permission"}:
            raise
        log.info("What lies beside the checkpoint cannot be listed: %s", error)
        return []


def _copy(outer: Site, folder: str, save_id: str, found: CopiedExports) -> bool:
    """Copy a folder, or what is missing of it; return False if it is no export of the save."""
    setting = outer.setting
    what = f"The copy of {setting.source.url}/{folder}"
    source, target = setting.source.child(folder), setting.target.child(folder)
    site = Site(replace(setting, source=source, target=target, commits=None))
    try:
        # Of its own: the checkpoint is committed, whatever becomes of this.
        site.begin(stalling_deadline("write", setting.timeouts.write, what)[0])
        index = read_if_there(site.source, INDEX_NAME)
        tag = IndexTag.of(index.data) if index else None
        if index is None or tag is None or tag.save_id != save_id:
            return False
        path = export_path(tag.fingerprint)
        documents = {
            one: site.source.get(one, max_bytes=MOST_DOCUMENT_BYTES).data
            for one in (NAMES_PATH, path)
        }
        record = ExportRecord.decode(documents[path], path=path)
        check_document(index.data, record.index)
        there = read_if_there(site.target, INDEX_NAME)
        is_there = there is not None and there.data == index.data
        entries = _listed(site.source)
        others = [one for one in entries if _is_other(one.path)]
        files: list[tuple[str, str, int, int | None]] = []
        if not is_there:
            _check_free(site, there)
            files += [(one.path, one.path, one.size_bytes, one.crc32c) for one in record.files]
        # Nothing tells one content of a file that people put there from another.
        files += [(one.path, one.path, one.size_bytes, None) for one in others]
        first = plan(
            lay_out_copies(files),
            world_size=1,
            able=site.target.capabilities,
            part_bytes=site.options.part_bytes,
            source=[tag.fingerprint, [[one.path, one.modified_s] for one in others]],
        )

        def document() -> bytes:
            site.target.make_folders([DOCUMENTS, records_folder(record.fingerprint)])
            for one, data in documents.items():
                site.target.replace(one, data)
            return index.data

        output = Output(site, first)
        if not is_there:
            output = PlainFolder(
                site, first, shown="index", last=INDEX_NAME, document=document, overwrite=True
            )
        with (
            site.deadline.governs(what),
            RankGroup.alone().operation(what, timeouts=setting.timeouts) as one,
        ):
            one.meet({})
            taken = output.take()
            output.follow(taken)
            made = make(one, CopiedFiles(site, None), output, taken, on_bytes=lambda _: None)
            output.publish(made)
        found.made.append((output.plan, made))
    finally:
        site.close()
    # What people put into folders there stays behind.
    folders = [e.path for e in entries if e.path.endswith("/") and e.path != f"{DOCUMENTS}/"]
    found.left_out.extend(f"{folder}/{path}" for path in folders)
    return True


def _check_free(site: Site, index: Content | None) -> None:
    """Raise `CheckpointExistsError` if another content is at the target, whole."""
    here = [entry.path for entry in listed(site.target, "") if is_weight_file(entry.path)]
    if is_blocker(index.data) if index else not here:
        return
    raise CheckpointExistsError(
        f"{site.target.url} holds {'another export' if index else here[0]}.",
        path=site.target.url,
        phase=site.deadline.phase,
        next_step="Consolidate the copy instead.",
    )


def _is_other(path: str) -> bool:
    """Return whether people put a file beside the weights: a configuration, a tokenizer."""
    is_ours = path.endswith("/") or path == INDEX_NAME or is_weight_file(path)
    return not is_ours and not path.startswith(PROBE_PREFIX)
