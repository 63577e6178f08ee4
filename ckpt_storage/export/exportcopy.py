"""Exports that lie beside a checkpoint, copied after it: weight files first, the index last."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

from ckpt_storage.commit.slotlog import check_document, read_if_there
from ckpt_storage.errors import CheckpointError, CheckpointExistsError, StorageError
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES, FileRef
from ckpt_storage.format.exports import (
    DOCUMENTS,
    INDEX_NAME,
    NAMES_PATH,
    ExportRecord,
    IndexTag,
    Series,
    export_path,
    is_weight_file,
)
from ckpt_storage.format.file_checks import FileChecks
from ckpt_storage.format.names import BLOCKER, COMMITS, PROBE_PREFIX, SAVES, STOCK_METADATA
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store

from .attempt import damage_of
from .copied import CopiedFiles
from .folder import ExportFolder, claim, files_there, holder_of, listed
from .layout import FileToCopy, OutFile, lay_out_copies
from .output import Made, Sealed, Site, Taken
from .plan import Plan, WriteRules, plan
from .work import UNKNOWN_CRC, Alone, make

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
    source, target = setting.source.child(folder), setting.target.child(folder)
    site = Site(replace(setting, source=source, target=target, commits=None))
    try:
        site.begin(outer.deadline)
        export = _Export.read(site.source)
        if export is None or export.record.save_id != save_id:
            return False
        names = {file.path for file in export.record.files}
        entries = _listed(site.source)
        others = [entry for entry in entries if _is_other(entry.path, names)]
        known = [(one.path, one.size_bytes, one.crc32c) for one in export.record.files]
        files = [*known, *((one.path, one.size_bytes, None) for one in others)]
        layout = lay_out_copies(
            FileToCopy(path=path, target=path, size_bytes=size, crc32c=crc32c)
            for path, size, crc32c in files
        )
        rules = WriteRules.of(site.target.capabilities, part_bytes=site.options.part_bytes)
        first = plan(layout, world_size=1, rules=rules, source=None)
        output = _CopiedFolder(site, replace(first, identity=export.record.fingerprint), export)
        taken = output.take()
        output.plan = output.plan.leaving(taken.done)
        made = make(
            Alone(site.deadline),
            site,
            CopiedFiles(site, None),
            output,
            taken,
            on_bytes=lambda _: None,
        )
        found.made.append((first, made))
        output.publish(made)
    finally:
        site.close()
    # What people put into folders there stays behind.
    folders = [e.path for e in entries if e.path.endswith("/") and e.path != f"{DOCUMENTS}/"]
    found.left_out.extend(f"{folder}/{path}" for path in folders)
    return True


def _is_other(path: str, weight_files: set[str]) -> bool:
    """Return whether people put a file beside the weights: a configuration, a tokenizer."""
    is_ours = path.endswith("/") or path in {*weight_files, INDEX_NAME} or is_weight_file(path)
    return not is_ours and not path.startswith(PROBE_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Export:
    """The documents of a complete export, as they are stored, and what its record says."""

    index: bytes
    names: bytes
    record_bytes: bytes
    record: ExportRecord

    @classmethod
    def read(cls, store: Store) -> _Export | None:
        """Return what a folder holds, None for no export of ours."""
        index = read_if_there(store, INDEX_NAME)
        tag = IndexTag.of(index.data) if index else None
        if index is None or tag is None:
            return None
        path = export_path(tag.fingerprint)
        data = store.get(path, max_bytes=MOST_DOCUMENT_BYTES).data
        record = ExportRecord.decode(data, path=path)
        check_document(index.data, record.index)
        names = store.get(NAMES_PATH, max_bytes=MOST_DOCUMENT_BYTES).data
        return cls(index=index.data, names=names, record_bytes=data, record=record)


class _CopiedFolder(ExportFolder):
    """The folder of an export at the target: documents are those of the source, byte for byte.

    The checksums of its weight files are known, so a file that is there needs no record.
    """

    is_together = False

    def __init__(self, site: Site, plan: Plan, export: _Export) -> None:
        record = export.record
        super().__init__(site, plan, save_id=record.save_id, source_format=record.source_format)
        self._export = export

    def take(self) -> Taken:
        """Take the folder over. Raises `CheckpointExistsError` if another content has its place."""
        store, export = self.store, self._export
        self._index = read_if_there(store, INDEX_NAME)
        if self._index is not None and self._index.data not in {export.index, BLOCKER}:
            raise self._refused("another export")
        there = read_if_there(store, NAMES_PATH)
        if there is None:
            foreign = [entry.path for entry in listed(store, "") if is_weight_file(entry.path)]
            if foreign:
                raise self._refused(foreign[0])
            store.make_folders([DOCUMENTS])
            claim(store, NAMES_PATH, export.names)
            there = read_if_there(store, NAMES_PATH)
        if there is None or there.data != export.names:
            raise self._refused("names of another content")
        series = {one for file in self.plan.files if (one := Series.of(file.name)) is not None}
        self._hold(holder_of(store, ""), sorted(series))
        if self._index is None:
            self._put_index(BLOCKER)
            self._index = read_if_there(store, INDEX_NAME)
        # Nothing tells one content of a file from another that people put there, but the source.
        done = files_there(self.site, self.plan, Taken())
        same = {
            at: ref
            for at, ref in done.items()
            if ref.crc32c != UNKNOWN_CRC or store.get(ref.path).data == self._stored(ref.path)
        }
        return Taken(done=same)

    def _stored(self, path: str) -> bytes:
        return self.site.source.get(path).data

    def _refused(self, what: str) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{self.store.url} holds {what}.",
            path=self.store.url,
            phase=self.site.deadline.phase,
            next_step="Consolidate the copy instead.",
        )

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write nothing."""

    def publish(self, made: Made) -> None:
        """Put the record, then the index."""
        del made
        self.check_held()
        self.store.replace(export_path(self.plan.identity), self._export.record_bytes)
        if self._index is None or self._index.data != self._export.index:
            self._put_index(self._export.index)

    def damage(self, file: OutFile) -> CheckpointError:
        """Return what is wrong with a weight file."""
        reference = FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=file.crc32c or 0)
        return damage_of(self.site, file, FileChecks.of_file(reference, path=file.name))
