"""An output folder: who works there, what of it is sealed, and the write that shows it.

The invariants are I14, I15 and I17. Who works in a folder says so in `.ckpt-storage/job.json`; the
later one counts, and the earlier one finds out before it publishes. Each sealed file has a record
of its own below the identity of its content. Files get their names together where the storage has
uploads that outlive their process.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ckpt_storage.commit.cleaning import abort_uploads
from ckpt_storage.commit.slotlog import (
    is_there,
    read_if_there,
    read_log,
    stamp,
    stat_if_there,
)
from ckpt_storage.errors import (
    CheckpointExistsError,
    ConsolidationError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    Holder,
    Sealed,
    is_file_record,
    is_output_file,
    is_weight_file,
    records_folder,
    weight_file_path,
)
from ckpt_storage.format.names import BLOCKER, INDEX_NAME, STOCK_METADATA, new_write_id
from ckpt_storage.source.filemarks import listed
from ckpt_storage.store.backend import Part
from ckpt_storage.store.store import Store

from .output import Made, Output, Taken

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")


@dataclass
class FolderOutput(Output):
    """A folder that one run holds at a time, with a record of each sealed file."""

    _run_id: str = field(init=False, default_factory=new_write_id)

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write the record of file `number`."""
        identity = self.plan.identity
        self.store.replace(weight_file_path(identity, number), sealed.encode(identity))

    def hold(self, earlier: Holder | None) -> Taken:
        """Become the holder, and end the uploads that an earlier one left open.

        Return what it sealed of this very content; those uploads stay open.
        """
        store, identity = self.store, self.plan.identity
        store.make_folders([DOCUMENTS, records_folder(identity)])
        taken = self._found()
        holder = Holder(run_id=self._run_id, fingerprint=identity, stamp=stamp())
        store.replace(HOLDER_PATH, holder.encode())
        if earlier is not None:
            kept = {one.file.path for one in taken.sealed.values()}
            abort_uploads(store, "", lambda path: path not in kept and self.may_end(path))
        return taken

    def may_end(self, path: str) -> bool:
        """Return whether an open upload to a path can only be one that an earlier run left."""
        return is_output_file(path)

    def check_held(self) -> None:
        """Raise `ConsolidationError` if another run took the folder over, or it was removed."""
        holder = holder_of(self.store)
        if holder is None:
            raise self.overtaken("it was removed")
        if holder.run_id != self._run_id:
            host, pid = holder.stamp.get("host", "?"), holder.stamp.get("pid", "?")
            raise self.overtaken(f"it was taken over by process {pid} on {host}")

    def overtaken(self, how: str) -> ConsolidationError:
        """Return the error for a run that is not the one whose output counts."""
        return ConsolidationError(
            f"Another consolidation worked in {self.store.url} at the same time: {how}. This one "
            "published nothing.",
            path=self.store.url,
            phase=self.site.deadline.phase,
            next_step="Let one at a time write to a folder; run this one again if its output is "
            "the one that should count.",
        )

    def recorded(self) -> list[Sealed]:
        """Return the files that records of this content say are sealed."""
        identity = self.plan.identity

        def decode(data: bytes, path: str) -> Sealed:
            found = Sealed.decode(data, path, fingerprint=identity)
            deque(map(Part.from_json, found.parts), maxlen=0)
            return found

        def read(path: str) -> Sealed | None:
            return trusted(self.store, path, decode)

        paths = [one.path for one in listed(self.store, records_folder(identity))]
        reads = [partial(read, path) for path in paths if is_file_record(path)]
        return [one for one in self.site.at_once("read records", reads) if one is not None]

    def _found(self) -> Taken:
        """Return what is sealed: of records, those with their file or an upload still open."""
        files = {(file.name, file.size_bytes): at for at, file in enumerate(self.plan.files)}
        keys = [(one, (one.file.path, one.file.size_bytes)) for one in self.recorded()]
        recorded = {files[key]: one for one, key in keys if key in files}
        open_uploads: set[tuple[str, str]] = set()
        if any(one.token for one in recorded.values()):
            try:
                open_uploads = self.store.open_uploads("")
            except StorageError as error:
                if error.kind not in {"permission", "unsupported"}:
                    raise
                # What lacks its name is made again.
                log.info("%s: open uploads cannot be looked for: %s", self.store.url, error)

        def look(one: Sealed) -> Sealed | None:
            there = stat_if_there(self.store, one.file.path)
            if there is not None and there.size_bytes == one.file.size_bytes:
                return Sealed(file=one.file)
            return one if (one.file.path, one.token) in open_uploads else None

        jobs = [partial(look, one) for one in recorded.values()]
        pairs = zip(recorded, self.site.at_once("look for files", jobs), strict=True)
        sealed = {at: one for at, one in sorted(pairs) if one is not None}
        done = {at: one.file for at, one in sealed.items() if not one.token}
        return Taken(done=done, sealed={at: one for at, one in sealed.items() if one.token})


@dataclass(kw_only=True)
class PlainFolder(FolderOutput):
    """A folder in which files of another format are being put, so that a part looks like no whole.

    What makes the files a checkpoint goes last: `.metadata`, or the index of the weight files. A
    folder of safetensors without an index has nothing of the kind; so while such a folder is being
    filled, a blocker index lies in it (`BLOCKER`). At the end nothing of ours stays.

    `last` is that file, "" for none, and `document` gives its bytes.
    """

    last: str = ""
    document: Callable[[], bytes] = bytes
    overwrite: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self._left: set[str] = set()
        self._names = frozenset({*(file.name for file in self.plan.files), self.last} - {""})
        self.is_together = self.last != STOCK_METADATA

    def take(self) -> Taken:
        """Make the folder look like no checkpoint; keep what an earlier run of this work sealed.

        Raises `CheckpointExistsError` if a checkpoint, or a file of one of the names, is there and
        is not to be overwritten, and `InvalidInputError` for the folder of a checkpoint of ours.
        What another run left that died may always be replaced; a complete checkpoint may not.
        """
        store, is_indexed = self.store, self.last != STOCK_METADATA
        if read_log(store).last is not None:
            raise InvalidInputError(
                f"{store.url} is, or was, a checkpoint of ckpt_storage; files of another format "
                "would lie between its own.",
                path=store.url,
                next_step="Give another folder.",
            )
        earlier = holder_of(store)
        is_resumed = earlier is not None and earlier.fingerprint == self.plan.identity
        entries = listed(store, "", recursive=True)
        here = {entry.path for entry in entries if not entry.path.endswith("/")}
        index = read_if_there(store, INDEX_NAME) if INDEX_NAME in here else None
        is_hidden = index is not None and index.data == BLOCKER
        in_the_way = {path for path in here if path in self._names or self._mixes(path)}
        # Readers take what would be replaced here for a checkpoint.
        is_whole = STOCK_METADATA in here or (
            is_indexed and not is_hidden and (index is not None or any(map(_is_weight, here)))
        )
        is_remains = not is_whole and is_there(store, HOLDER_PATH)
        blocking = sorted(in_the_way | here & {STOCK_METADATA})
        # A blocker alone: cut between hiding the folder and writing the note.
        is_free = not blocking or (is_hidden and blocking == [INDEX_NAME])
        if not (is_resumed or is_remains or self.overwrite or is_free):
            raise CheckpointExistsError(
                f"{store.url} holds {blocking[0]}.",
                path=store.url,
                phase="plan",
                next_step="Give another folder, or pass overwrite=True to replace what is there.",
            )
        store.make_folders([])
        if STOCK_METADATA in here:
            store.delete([STOCK_METADATA])
        if is_indexed and any(map(_is_weight, here | self._names)):
            store.replace(INDEX_NAME, BLOCKER)
        if not is_resumed:
            old = in_the_way - {INDEX_NAME}
            if is_remains and not is_indexed:
                # Shards of work that died: without its `.metadata` nobody can tell what is in them.
                old |= set(filter(_is_shard, here))
            store.delete(sorted(old))
            for path in filter(is_file_record, here):
                left = trusted(store, path, partial(Sealed.decode, fingerprint=None))
                self._left |= {left.file.path} if left else set()
            if any(path.startswith(f"{DOCUMENTS}/") for path in here):
                store.delete_folder(DOCUMENTS)
        store.make_folders(sorted({name.rpartition("/")[0] for name in self._names} - {""}))
        return self.hold(earlier)

    def may_end(self, path: str) -> bool:
        """Return also whether it is of a file that this run, or an earlier one, writes."""
        is_kind = _is_shard(path) or _is_weight(path)
        return is_kind or super().may_end(path) or path in self._names | self._left

    def publish(self, made: Made) -> None:
        """Put the file that shows all others, or take the index away that hid them."""
        del made
        self.check_held()
        if self.last:
            self.store.replace(self.last, self.document())
        else:
            self.store.delete([INDEX_NAME])
        # Whatever lies here now is a checkpoint like any other.
        self.store.delete_folder(records_folder(self.plan.identity))
        self.store.delete([HOLDER_PATH])
        if not listed(self.store, DOCUMENTS):
            self.store.delete_folder(DOCUMENTS)

    def _mixes(self, path: str) -> bool:
        """Return whether a file would mix with those to come.

        Where an index says what counts, those are weight files of an earlier export alone.
        """
        if self.last == STOCK_METADATA:
            return False
        is_old = is_weight_file if self.last else _is_weight
        return path == INDEX_NAME or is_old(path)


def trusted(store: Store, path: str, decode: Callable[[bytes, str], T]) -> T | None:
    """Return what a document says; None if it is not there, or damaged: nothing builds on it."""
    try:
        found = read_if_there(store, path)
        return None if found is None else decode(found.data, path)
    except (IntegrityError, FormatError, TypeError, ValueError) as error:
        log.warning("%s is not trusted: %s", store.shown(path), error)
        return None


def holder_of(store: Store, folder: str = "") -> Holder | None:
    """Return who works in a folder; None for nobody, and for a note that is damaged."""
    return trusted(store, f"{folder}/{HOLDER_PATH}".lstrip("/"), Holder.decode)


def _is_weight(path: str) -> bool:
    return "/" not in path and path.endswith(".safetensors")


def _is_shard(path: str) -> bool:
    return "/" not in path and path.startswith("__") and path.endswith(".distcp")
