"""Is an export sound: its record held against its index, every weight file against its checksum."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ckpt_storage.commit.slotlog import check_document, is_there, read_if_there
from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import (
    DEFAULT_FOLDER,
    INDEX_NAME,
    NAMES_PATH,
    ExportRecord,
    IndexTag,
    export_path,
)
from ckpt_storage.format.names import is_blocker
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.foreign import in_progress
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

log = logging.getLogger("ckpt_storage")

_REMEDY = "Delete the file and consolidate again; it is made anew."
_ROUNDS = 3

Note = Callable[[CheckpointError, str], None]
"""Takes what is wrong and the path of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportStatus:
    """An export that was found: its folder below the URL, "" for the URL itself.

    `is_stale`: it is of another save than the checkpoint's head. `file_count` and `size_bytes`
    are of its weight files.
    """

    path: str
    save_id: str | None
    is_stale: bool
    file_count: int
    size_bytes: int


def check_exports(
    store: Store,
    *,
    head: str | None,
    deep: bool,
    options: TransferOptions,
    deadline: Deadline,
    note: Note,
    pacer: Pacer,
) -> list[ExportStatus]:
    """Check all exports directly below the root of `store`, and one at the root itself.

    `head` is the save id of the checkpoint's head, None if it has none. `deep` reads every byte.
    Damage and absence go to `note`; raises `StorageError` for a storage that does not answer.
    """
    found = []
    for folder in _folders(store):
        check = _Check(store, folder, deep=deep, options=options, deadline=deadline, pacer=pacer)
        status = check.run(head)
        if status is not None:
            found.append(status)
        for error, path in check.problems:
            note(error, path)
    return found


def _folders(store: Store) -> list[str]:
    try:
        entries = store.list("", recursive=False)
    except StorageError as error:
        # Who may read but not list sees the export that lies where it does by default.
        if error.kind not in {"not-found", "permission"}:
            raise
        return ["", DEFAULT_FOLDER]
    folders = [entry.path.rstrip("/") for entry in entries if entry.path.endswith("/")]
    return ["", *(folder for folder in folders if folder not in {"commits", "saves", "exports"})]


class _Check:
    """The check of one folder."""

    def __init__(
        self,
        store: Store,
        folder: str,
        *,
        deep: bool,
        options: TransferOptions,
        deadline: Deadline,
        pacer: Pacer,
    ) -> None:
        self._store = store
        self._prefix = f"{folder}/" if folder else ""
        self._folder = folder
        self._deep = deep
        self._options = options
        self._deadline = deadline
        self._pacer = pacer
        self.problems: list[tuple[CheckpointError, str]] = []

    def run(self, head: str | None) -> ExportStatus | None:
        """Check, once more if another export was published meanwhile; None: none of ours."""
        index = self._index()
        for _ in range(_ROUNDS):
            self.problems.clear()
            if index is None:
                return None
            if is_blocker(index):
                url = f"{self._store.url}/{self._folder}".rstrip("/")
                self._note(in_progress(url), f"{self._prefix}{INDEX_NAME}")
                return None
            tag = IndexTag.of(index)
            if tag is None:
                self._check_is_foreign()
                return None
            record = self._record(tag, index)
            for file in record.files if record else ():
                self._file(file)
            before, index = index, self._index() if self.problems else index
            if index == before:
                return ExportStatus(
                    path=self._folder,
                    save_id=tag.save_id,
                    is_stale=None not in (head, tag.save_id) and head != tag.save_id,
                    file_count=len(record.files) if record else len(tag.names),
                    size_bytes=sum(file.size_bytes for file in record.files) if record else 0,
                )
        return None

    def _index(self) -> bytes | None:
        try:
            found = read_if_there(self._store, f"{self._prefix}{INDEX_NAME}")
        except StorageError as error:
            # Some storages answer so for what is not there to those who may not list.
            if error.kind != "permission":
                raise
            log.info("Whether %s holds an export cannot be told: %s", self._folder or ".", error)
            return None
        return None if found is None else found.data

    def _check_is_foreign(self) -> None:
        """Note damage if an index that names no fingerprint lies where only ours are put."""
        path = f"{self._prefix}{INDEX_NAME}"
        if is_there(self._store, f"{self._prefix}{NAMES_PATH}"):
            error = IntegrityError(
                f"{path} is damaged, or another program wrote it: it names no export of ours.",
                path=path,
                offset=0,
                next_step=_REMEDY,
            )
            self._note(error, path)

    def _record(self, tag: IndexTag, index: bytes) -> ExportRecord | None:
        path = f"{self._prefix}{export_path(tag.fingerprint)}"
        step = "Consolidate again: the record is written anew."
        try:
            found = read_if_there(self._store, path)
            if found is None:
                raise IntegrityError(
                    f"{path}, the record of the export, is missing.",
                    path=path,
                    offset=0,
                    next_step=step,
                )
            record = ExportRecord.decode(found.data, path=path)
            if record.fingerprint != tag.fingerprint:
                raise IntegrityError(
                    f"{path} is the record of another export ({record.fingerprint}).",
                    path=path,
                    offset=0,
                    next_step=step,
                )
        except CheckpointError as error:
            self._note(error, path)
            return None
        path = f"{self._prefix}{INDEX_NAME}"
        try:
            check_document(index, record.index)
        except IntegrityError as error:
            error.next_step = _REMEDY
            self._note(error, path)
        if tag.names - {file.path for file in record.files}:
            self._note(
                IntegrityError(
                    f"{path} names files that the record of the export does not have.",
                    path=path,
                    offset=0,
                    next_step=_REMEDY,
                ),
                path,
            )
        return record

    def _file(self, file: FileRef) -> None:
        path = f"{self._prefix}{file.path}"
        try:
            size_bytes = self._store.stat(path).size_bytes
            if size_bytes != file.size_bytes:
                raise IntegrityError(
                    f"{path} has {size_bytes} bytes; {file.size_bytes} were written.",
                    path=path,
                    offset=min(size_bytes, file.size_bytes),
                    next_step=_REMEDY,
                )
            if self._deep and not self._is_sound(path, file):
                raise IntegrityError(
                    f"{path} is damaged: it does not have the checksum {file.crc32c:08x} that it "
                    "was written with.",
                    path=path,
                    offset=0,
                    next_step=_REMEDY,
                )
        except CheckpointError as error:
            self._note(error, path)

    def _is_sound(self, path: str, file: FileRef) -> bool:
        at = FileRef(path=path, size_bytes=file.size_bytes, crc32c=file.crc32c)
        return has_checksum(
            self._store,
            at,
            options=self._options,
            deadline=self._deadline,
            pacer=self._pacer,
        )

    def _note(self, error: CheckpointError, path: str) -> None:
        """Note damage and absence; a storage that does not answer is no finding."""
        if isinstance(error, StorageError):
            if error.kind != "not-found":
                raise error
            error.next_step = _REMEDY
        self.problems.append((error, path))


def has_checksum(
    store: Store,
    file: FileRef,
    *,
    options: TransferOptions,
    deadline: Deadline,
    pacer: Pacer | None = None,
) -> bool:
    """Return whether a file of the length that `file` says has its CRC-32C; reads all of it."""
    step = options.part_bytes
    starts = range(0, file.size_bytes, step)
    crcs: dict[int, int] = {}

    def take(start: int, view: memoryview) -> None:
        crcs[start] = crc32c_of(view)

    reads = [
        RangeRead(
            path=file.path,
            start=start,
            stop=min(start + step, file.size_bytes),
            done=partial(take, start),
            file_bytes=file.size_bytes,
        )
        for start in starts
    ]
    RangeReader(store, options, deadline, pacer=pacer).run(reads)
    lengths = [min(step, file.size_bytes - start) for start in starts]
    return combine_many([crcs[start] for start in starts], lengths) == file.crc32c
