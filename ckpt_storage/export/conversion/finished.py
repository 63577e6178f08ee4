"""The files of a conversion that an earlier call completed before it died.

A file is kept only if a record of this very conversion has its length and CRC-32C, and the file
that lies there has both: every byte of it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt_storage.commit.slotlog import read_if_there
from ckpt_storage.errors import FormatError, IntegrityError, StorageError
from ckpt_storage.export.foreignfolder import RECORDS, ForeignFolder
from ckpt_storage.format import integrity
from ckpt_storage.format.documents import FileRef, ref_from_json
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.base import Store
from ckpt_storage.store.deadline import Deadline

__all__ = ["Finished"]


@dataclass(slots=True, kw_only=True)
class Finished:
    """Which of the files of one conversion are complete; used by one thread.

    `names` are those of all files but the one that makes them a checkpoint.
    """

    folder: ForeignFolder
    store: Store
    names: Sequence[str]
    options: TransferOptions
    deadline: Deadline
    kept_count: int = field(default=0, init=False)
    _identity: str = field(default="", init=False)
    _done: dict[str, Mapping[str, Any]] = field(default_factory=dict, init=False)

    def begin(self, identity: str, *, source: str, overwrite: bool) -> None:
        """Begin to fill the folder, as `ForeignFolder.begin`; what cannot be kept is deleted."""
        self._identity = identity
        is_resumed = self.folder.begin(identity, source=source, overwrite=overwrite)
        self.store.prepare([RECORDS])
        if not is_resumed:
            return
        for name in self.names:
            record = self._record(name)
            if record is not None and self._is_whole(record):
                self._done[name] = record
        unknown = [name for name in self.names if name not in self._done]
        if unknown:
            self.store.delete(unknown)

    def end(self) -> None:
        """Take back what vouched for single files, and then the note."""
        self.store.delete_folder(RECORDS)
        self.folder.end()

    def write(
        self, name: str, write: Callable[[], tuple[FileRef, Mapping[str, Any]]]
    ) -> Mapping[str, Any]:
        """Have a file written, unless it is there; return what its record has besides the file.

        `write` returns the file as it was written, and that.
        """
        known = self._done.get(name)
        if known is not None:
            self.kept_count += 1
        else:
            reference, more = write()
            known = {"identity": self._identity, "file": reference.as_json(), **more}
            head = {"format": "ckpt_storage.copy_record/1"}
            self.store.replace(_record_path(name), integrity.seal({**head, **known}))
        return known

    def is_kept(self, name: str) -> bool:
        """Return whether a file is there already."""
        return name in self._done

    def _record(self, name: str) -> Mapping[str, Any] | None:
        """Return what is known of a file, None unless it can be read and is of this conversion."""
        path = _record_path(name)
        found = read_if_there(self.store, path)
        if found is None:
            return None
        try:
            record = integrity.unseal(found.data, path=path)
        except (FormatError, IntegrityError):
            return None
        return record if record.get("identity") == self._identity else None

    def _is_whole(self, record: Mapping[str, Any]) -> bool:
        reference = ref_from_json(record["file"], where=RECORDS)
        window = memoryview(bytearray(min(self.options.part_bytes, reference.size_bytes)))
        crc = 0
        try:
            if self.store.stat(reference.path).size_bytes != reference.size_bytes:
                return False
            for start in range(0, reference.size_bytes, max(1, len(window))):
                part = window[: reference.size_bytes - start]
                self.store.read_into(reference.path, start, part, size_bytes=reference.size_bytes)
                crc = integrity.crc32c_of(part, crc)
                self.deadline.check(f"Checking {reference.path}")
        except IntegrityError:
            return False
        except StorageError as error:
            if error.kind != "not-found":
                raise
            return False
        return crc == reference.crc32c


def _record_path(name: str) -> str:
    return f"{RECORDS}/{name}.json"
