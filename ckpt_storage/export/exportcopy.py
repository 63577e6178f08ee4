"""Exports that lie beside a checkpoint, copied after it: weight files first, the index last."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field

from ckpt_storage.commit.slotlog import check_document, is_there, read_if_there, stamp
from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.documents import MOST_DOCUMENT_BYTES, FileRef
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    INDEX_NAME,
    NAMES_PATH,
    ExportRecord,
    Holder,
    IndexTag,
    Series,
    export_path,
    is_weight_file,
    records_folder,
)
from ckpt_storage.format.file_checks import FileChecks
from ckpt_storage.format.names import BLOCKER, COMMITS, PROBE_PREFIX, SAVES, STOCK_METADATA
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.store import Store

from .attempt import damage_of
from .folder import abort_uploads, claim, files_there
from .layout import FileToCopy, OutFile, lay_out_copies
from .output import Made, Output, Site, Taken
from .plan import Plan, WriteRules, plan
from .reads import Readable
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


def copy_exports(site: Site, files: Readable, save_id: str, *, as_save_id: str) -> CopiedExports:
    """Copy the exports of `save_id` directly below the source; return what became of each.

    A stale export, one whose place at the target is taken by another content, and one that is
    damaged or cannot be read or written, stays behind; so do all if the copy has another save id,
    `as_save_id`: they would be stale there. Raises nothing: the checkpoint is committed by now.
    Idempotent.
    """
    found = CopiedExports()
    try:
        entries = _listed(site.source, "")
    except CheckpointError as error:
        _failed(found, ".", error)
        return found
    for entry in entries:
        if entry.path in _OWN or entry.path.startswith(PROBE_PREFIX):
            continue
        folder = entry.path.rstrip("/")
        one = _Export(site, files, folder) if entry.path.endswith("/") else None
        try:
            is_wanted = one is not None and one.tag() and one.save_id == save_id == as_save_id
            is_copied = one is not None and is_wanted and one.copy()
        except CheckpointError as error:
            _failed(found, folder, error)
            continue
        if is_copied and one is not None:
            found.copied.append(folder)
            found.left_out.extend(one.left_out)
            found.made.extend(one.made)
        else:
            found.left_out.append(entry.path)
    return found


def _failed(found: CopiedExports, path: str, error: CheckpointError) -> None:
    log.warning("the export %s is not copied: %s", path, error)
    found.left_out.append(path)
    found.failed[path] = str(error)


def _listed(store: Store, prefix: str) -> list[ObjectInfo]:
    try:
        return store.list(prefix, recursive=False)
    except StorageError as error:
        # Who may read but not list has the checkpoint; what else lies there stays unknown.
        if error.kind not in {"not-found", "permission"}:
            raise
        log.info("What lies beside the checkpoint cannot be listed: %s", error)
        return []


class _Export:
    """One folder that may hold an export."""

    def __init__(self, site: Site, files: Readable, folder: str) -> None:
        self._site = site
        self._source = site.source
        self._target = site.target
        self._files = files
        self._folder = folder
        self._index = b""
        self._tag: IndexTag | None = None
        self.left_out: list[str] = []
        self.made: list[tuple[Plan, Made]] = []

    def _at(self, path: str) -> str:
        return f"{self._folder}/{path}"

    @property
    def save_id(self) -> str | None:
        """The save that it is of."""
        return self._tag.save_id if self._tag else None

    def tag(self) -> IndexTag | None:
        """Return what the index says, None if there is no export of ours."""
        found = read_if_there(self._source, self._at(INDEX_NAME))
        if found is not None:
            self._index, self._tag = found.data, IndexTag.of(found.data)
        return self._tag

    def copy(self) -> bool:
        """Copy it, or what is missing of it; return False if another export has its place."""
        tag = self._tag
        assert tag is not None  # noqa: S101  # the caller looked
        record_path = self._at(export_path(tag.fingerprint))
        record_bytes = self._source.get(record_path, max_bytes=MOST_DOCUMENT_BYTES).data
        record = ExportRecord.decode(record_bytes, path=record_path)
        check_document(self._index, record.index)
        names = self._source.get(self._at(NAMES_PATH), max_bytes=MOST_DOCUMENT_BYTES).data
        if not self._take_place(names):
            return False
        self._target.make_folders([self._at(DOCUMENTS), self._at(records_folder(tag.fingerprint))])
        self._hold(record)
        if not is_there(self._target, self._at(INDEX_NAME)):
            self._target.replace(self._at(INDEX_NAME), BLOCKER)
        self._copy_files(record)
        self._target.replace(record_path, record_bytes)
        # The index publishes it.
        self._target.replace(self._at(INDEX_NAME), self._index)
        return True

    def _take_place(self, names: bytes) -> bool:
        """Make the names of the weight files ours at the target; False if they are another's."""
        index = read_if_there(self._target, self._at(INDEX_NAME))
        there = read_if_there(self._target, self._at(NAMES_PATH))
        if index is not None and index.data not in {self._index, BLOCKER}:
            return self._refused("it holds another export")
        if there is None:
            foreign = [e.path for e in _listed(self._target, self._folder) if self._is_weight(e)]
            if foreign:
                return self._refused(f"it holds {foreign[0]}")
            self._target.make_folders([self._at(DOCUMENTS)])
            claim(self._target, self._at(NAMES_PATH), names)
            there = read_if_there(self._target, self._at(NAMES_PATH))
        if there is None or there.data != names:
            return self._refused("its names belong to another content")
        return True

    def _hold(self, record: ExportRecord) -> None:
        """Leave a note of the names that are written, and end the uploads of a copy that died.

        A consolidation that holds the folder keeps it: what it writes is the same, or lies beside.
        """
        path = self._at(HOLDER_PATH)
        run_id = hashlib.sha256(f"copy of {record.fingerprint}".encode()).hexdigest()[:32]
        found = read_if_there(self._target, path)
        if found is None:
            series = {Series.of(file.path) for file in record.files} - {None}
            holder = Holder(
                run_id=run_id,
                fingerprint=record.fingerprint,
                series=tuple(sorted(one for one in series if one is not None)),
                stamp=stamp(),
            )
            self._target.replace(path, holder.encode())
        elif Holder.decode(found.data).run_id == run_id:
            names = {self._at(file.path) for file in record.files}
            abort_uploads(self._target, self._folder, names.__contains__)

    def _refused(self, why: str) -> bool:
        log.warning(
            "the export %s is not copied: at the target, %s. Consolidate the copy instead.",
            self._folder,
            why,
        )
        return False

    def _is_weight(self, entry: ObjectInfo) -> bool:
        return is_weight_file(entry.path.rpartition("/")[2])

    def _copy_files(self, record: ExportRecord) -> None:
        """Copy what the target has not; what it has must be what it should be."""
        files = [
            FileToCopy(
                path=self._at(one.path),
                target=self._at(one.path),
                size_bytes=one.size_bytes,
                crc32c=one.crc32c,
            )
            for one in record.files
        ]
        others = self._others({one.path for one in record.files})
        site = self._site
        rules = WriteRules.of(site.target.capabilities, part_bytes=site.options.part_bytes)
        first = plan(
            lay_out_copies([*files, *others]), world_size=1, rules=rules, source=record.fingerprint
        )
        done = files_there(site, first, Taken())
        # Nothing tells one content of a file from another that people put there, but the source.
        same = {
            at: ref
            for at, ref in done.items()
            if ref.crc32c != UNKNOWN_CRC or self._is_same(ref.path)
        }
        output = _Files(site, first.leaving(same))
        taken = Taken(done=same)
        made = make(Alone(site.deadline), site, self._files, output, taken, on_bytes=lambda _: None)
        self.made.append((first, made))

    def _is_same(self, path: str) -> bool:
        return self._target.get(path).data == self._source.get(path).data

    def _others(self, weight_files: set[str]) -> list[FileToCopy]:
        """Return what people put beside the weights: a model's configuration, its tokenizer.

        Not what they put into folders there, which is noted.
        """
        known = {self._at(name) for name in (*weight_files, INDEX_NAME, NAMES_PATH, HOLDER_PATH)}
        entries = _listed(self._source, self._folder)
        own = self._at(f"{DOCUMENTS}/")
        self.left_out = [e.path for e in entries if e.path.endswith("/") and e.path != own]
        return [
            FileToCopy(path=entry.path, target=entry.path, size_bytes=entry.size_bytes)
            for entry in entries
            if not entry.path.endswith("/")
            and entry.path not in known
            and not self._is_weight(entry)
            and not entry.path.rpartition("/")[2].startswith(PROBE_PREFIX)
        ]


class _Files(Output):
    """The weight files of one export; what is named by its index is told from damage."""

    def damage(self, file: OutFile) -> CheckpointError:
        """Return what is wrong with a weight file."""
        reference = FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=file.crc32c or 0)
        return damage_of(self.site, file, FileChecks.of_file(reference, path=file.name))
