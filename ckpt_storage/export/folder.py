"""An output folder: who works there, what of it is sealed, and the write that shows it.

The invariants are I14, I15 and I17. Who works in a folder says so in `.ckpt-storage/job.json`; the
later one counts, and the earlier one finds out before it publishes. Each sealed file has a record
of its own below the identity of its content. Files get their names together where the storage has
uploads that outlive their process.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ckpt_storage.commit.delete import abort_uploads
from ckpt_storage.commit.slotlog import is_there, read_if_there, stamp
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointExistsError,
    ConsolidationError,
    FormatError,
    IntegrityError,
    StorageError,
)
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    INDEX_NAME,
    NAMES_PATH,
    SINGLE_NAME,
    ExportRecord,
    Holder,
    Names,
    Series,
    WeightFileRecord,
    export_path,
    is_file_record,
    is_weight_file,
    records_folder,
    records_tag,
    suffix_of,
    weight_file_path,
)
from ckpt_storage.format.names import BLOCKER, PROBE_PREFIX
from ckpt_storage.store.backend import Content, ObjectInfo, Part
from ckpt_storage.store.store import Store

from .layout import Layout
from .output import Made, Output, Sealed, Site, Taken
from .plan import Plan
from .weights import index_document, with_suffix

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

_CLAIM_COUNT = 3


class FolderOutput(Output):
    """A folder that one run holds at a time, with a record of each sealed file."""

    def __init__(self, site: Site, plan: Plan) -> None:
        super().__init__(site, plan)
        self._run_id = os.urandom(16).hex()

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write the record of file `number`."""
        identity = self.plan.identity
        record = WeightFileRecord(
            fingerprint=identity,
            file=sealed.file,
            token=sealed.token,
            write_id=sealed.write_id,
            parts=[part.to_json() for part in sealed.parts],
        )
        self.store.replace(weight_file_path(identity, number), record.encode())

    def hold(self, earlier: Holder | None, *series: Series) -> Taken:
        """Become the holder, and end the uploads that an earlier one left open.

        Return what it sealed of this very content; those uploads stay open.
        """
        store, identity = self.store, self.plan.identity
        store.make_folders([DOCUMENTS, records_folder(identity)])
        taken = self._found()
        holder = Holder(run_id=self._run_id, fingerprint=identity, series=series, stamp=stamp())
        store.replace(HOLDER_PATH, holder.after(earlier).encode())
        if earlier is not None:
            kept = {one.file.path for one in taken.sealed.values()}
            abort_uploads(store, "", lambda path: path not in kept and self.may_end(path, earlier))
        return taken

    def may_end(self, path: str, earlier: Holder) -> bool:
        """Return whether an open upload to a path is one that the earlier holder left."""
        is_mine = earlier.fingerprint == self.plan.identity
        return earlier.wrote(path) or (is_mine and path in {file.name for file in self.plan.files})

    def is_held(self) -> bool:
        """Return whether nobody else has begun to work here since this run took the folder."""
        holder = holder_of(self.store, "")
        return holder is not None and holder.run_id == self._run_id

    def check_held(self) -> None:
        """Raise `ConsolidationError` if another run took the folder over, or it was removed."""
        if self.is_held():
            return
        holder = holder_of(self.store, "")
        how = "it was removed"
        if holder is not None:
            host, pid = holder.stamp.get("host", "?"), holder.stamp.get("pid", "?")
            how = f"it was taken over by process {pid} on {host}"
        raise self.overtaken(how)

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
        entries = listed(self.store, records_folder(identity))
        found = self.read_records(entry.path for entry in entries)
        return [sealed for fingerprint, sealed in found if fingerprint == identity]

    def _found(self) -> Taken:
        """Return what an earlier run sealed.

        Nothing is trusted but a record of this very content, and with it a file of that length or
        an upload that is still open.
        """
        files = {(file.name, file.size_bytes): at for at, file in enumerate(self.plan.files)}
        recorded = {
            files[key]: one
            for one in self.recorded()
            if (key := (one.file.path, one.file.size_bytes)) in files
        }
        open_uploads: set[tuple[str, str]] = set()
        if any(one.token for one in recorded.values()):
            try:
                open_uploads = self.store.open_uploads("")
            except StorageError as error:
                if error.kind not in {"permission", "unsupported"}:
                    raise
                # What lacks its name is made again.
                log.info("%s: open uploads cannot be looked for: %s", self.store.url, error)
                self.end_uploads(recorded.values())
        done: dict[int, FileRef] = {}
        sealed: dict[int, Sealed] = {}

        def look(at: int, one: Sealed) -> None:
            if size_of(self.store, one.file.path) == one.file.size_bytes:
                done[at] = one.file
            elif one.token and (one.file.path, one.token) in open_uploads:
                sealed[at] = one

        self.site.at_once("look for files", [partial(look, *one) for one in recorded.items()])
        return Taken(done=dict(sorted(done.items())), sealed=dict(sorted(sealed.items())))

    def read_records(self, paths: Iterable[str]) -> list[tuple[str, Sealed]]:
        """Return what those of some paths that are records say, with their fingerprints."""
        found: list[tuple[str, Sealed]] = []

        def decode(data: bytes, path: str) -> tuple[str, Sealed]:
            one = WeightFileRecord.decode(data, path=path)
            parts = tuple(Part.from_json(part) for part in one.parts)
            sealed = Sealed(file=one.file, token=one.token, write_id=one.write_id, parts=parts)
            return one.fingerprint, sealed

        def read(path: str) -> None:
            one = trusted(self.store, path, partial(decode, path=path))
            if one is not None:
                found.append(one)

        self.site.at_once("read records", [partial(read, p) for p in paths if is_file_record(p)])
        return found

    def end_uploads(self, files: Iterable[Sealed]) -> None:
        """Abort the uploads of sealed files that nobody goes on with; one that is over is none."""

        def end(one: Sealed) -> None:
            path, store = one.file.path, self.store
            try:
                store.take_over(path, one.token, one.write_id, one.parts).abort()
            except CheckpointError as error:
                # It takes room, but no part in this run.
                log.warning("%s: an upload of an earlier run stays: %s", store.shown(path), error)

        self.site.at_once("end uploads", [partial(end, one) for one in files if one.token])


class ExportFolder(FolderOutput):
    """The folder of an export of ours: an earlier one stays readable until the index is put.

    Raises on `take` `CheckpointExistsError` if the folder holds weight files that we did not write.
    """

    is_together = True

    def __init__(self, site: Site, plan: Plan, *, save_id: str | None, source_format: str) -> None:
        """`save_id` and `source_format` are of what is exported."""
        super().__init__(site, plan)
        self._save_id = save_id
        self._source_format = source_format
        self._index: Content | None = None
        self.removed: list[str] = []

    def take(self) -> Taken:
        """Take the folder over; the name is the suffix of the weight files' names, "" for none."""
        store, identity = self.store, self.plan.identity
        self._index = read_if_there(store, INDEX_NAME)
        if not is_there(store, NAMES_PATH):
            self._claim_names()
        # Whatever was answered, what lies there counts; a damaged one gives the names to nobody.
        names = trusted(store, NAMES_PATH, Names.decode)
        is_mine = names is not None and names.fingerprint == identity
        suffix = "" if is_mine else suffix_of(identity)
        self.plan = self.plan.renamed(self.named(self.plan.layout, suffix))
        taken = self.hold(holder_of(store, ""), Series(len(self.plan.files), suffix))
        if self._index is None:
            # Else readers would take the first files of a run that died for the whole.
            self._put_index(BLOCKER)
            self._index = read_if_there(store, INDEX_NAME)
        return replace(taken, name=suffix)

    def named(self, layout: Layout, name: str) -> Layout:
        """Return the files with a suffix."""
        return with_suffix(layout, name)

    def _claim_names(self) -> None:
        """Give names without a suffix to this content, unless another one is faster."""
        store = self.store
        here = [entry.path for entry in listed(store, "")]
        foreign = sorted(name for name in here if is_weight_file(name) or name == INDEX_NAME)
        if foreign:
            raise CheckpointExistsError(
                f"{store.url} holds weight files that ckpt_storage did not export ({foreign[0]}).",
                path=store.url,
                phase="plan",
                next_step="Give an output folder of its own, or move those files away.",
            )
        store.make_folders([DOCUMENTS])
        data = Names(fingerprint=self.plan.identity, stamp=stamp()).encode()
        for attempt in range(_CLAIM_COUNT):
            try:
                store.create(NAMES_PATH, data)
            except StorageError as error:
                if error.kind == "unsupported":
                    store.replace(NAMES_PATH, data)
                elif error.kind != "exists" and (
                    not error.retryable or attempt == _CLAIM_COUNT - 1
                ):
                    raise
            if is_there(store, NAMES_PATH):
                return

    def recorded(self) -> list[Sealed]:
        """Return also the files of a complete export of this content."""
        record = self._record()
        return [*(Sealed(file=f) for f in (record.files if record else ())), *super().recorded()]

    def _record(self) -> ExportRecord | None:
        """Return the record of this content if it was exported completely before."""
        path = export_path(self.plan.identity)
        record = trusted(self.store, path, partial(ExportRecord.decode, path=path))
        return record if record and record.fingerprint == self.plan.identity else None

    def publish(self, made: Made) -> None:
        """Record the export and put the index; then delete what that superseded."""
        plan, store = self.plan, self.store
        files = [made.files[at] for at in range(len(plan.files))]
        self.check_held()
        index = index_document(plan.layout, save_id=self._save_id, fingerprint=plan.identity)
        reference = FileRef(path=INDEX_NAME, size_bytes=len(index), crc32c=crc32c_of(index))
        known = self._record()
        if known is None or (list(known.files), known.index) != (files, reference):
            record = ExportRecord(
                fingerprint=plan.identity,
                save_id=self._save_id,
                source_format=self._source_format,
                source=self.site.setting.source.url,
                files=files,
                index=reference,
                ties=plan.layout.ties,
                stamp={**stamp(), "world_size": plan.world_size},
            )
            store.replace(export_path(plan.identity), record.encode())
        if self._index is None or self._index.data != index:
            self._put_index(index)
        is_mine = SINGLE_NAME in {file.name for file in plan.files}
        if not is_mine and is_there(store, SINGLE_NAME) and self.is_held():
            # Libraries that prefer it to an index see the new export from here on.
            store.delete([SINGLE_NAME])
            self.removed.append(SINGLE_NAME)
        try:
            self.collect()
        except StorageError as error:
            # The export counts; what is left over, the next consolidation finds.
            log.warning("Clearing up after the export to %s failed: %s", store.url, error)

    def _put_index(self, index: bytes) -> None:
        """Put the index in place of the version that was there when the folder was taken."""
        store, before = self.store, self._index
        try:
            if not store.capabilities.if_match:
                store.replace(INDEX_NAME, index)
            elif before is None:
                store.create(INDEX_NAME, index)
            else:
                store.replace(INDEX_NAME, index, if_match=before.version)
        except StorageError as error:
            # An answer may have been lost; what lies there counts.
            now = read_if_there(store, INDEX_NAME)
            if now is not None and now.data == index:
                return
            if error.kind in {"exists", "precondition", "not-found"}:
                raise self.overtaken("another index was published") from error
            raise

    def collect(self) -> None:
        """Delete what the index that was just published superseded.

        Cut at any point, the next consolidation goes on. Deletes nothing once another one has taken
        the folder over: what is old to this one may be what counts by now.
        """
        store, mine = self.store, records_folder(self.plan.identity)
        kept = {file.name for file in self.plan.files}
        here = [entry.path for entry in listed(store, "")]
        documents = [entry.path for entry in listed(store, DOCUMENTS)]
        # Whoever takes over says so before it writes, so what was listed before is not its own.
        if not self.is_held():
            log.info("%s: clearing up is left to the consolidation that runs there", store.url)
            return
        old = sorted(name for name in here if is_weight_file(name) and name not in kept)
        probes = [name for name in here if name.startswith(PROBE_PREFIX)]
        if old or probes:
            store.delete([*old, *probes])
        for path in documents:
            folder = path.rstrip("/")
            if path.endswith("/") and folder != mine and _is_records_folder(folder):
                store.delete_folder(folder)
        done = [entry.path for entry in listed(store, mine) if is_file_record(entry.path)]
        if done:
            store.delete(done)
        self.removed = sorted({*old, *self.removed})


def trusted(store: Store, path: str, decode: Callable[[bytes], T]) -> T | None:
    """Return what a document says; None if it is not there, or damaged: nothing builds on it."""
    try:
        found = read_if_there(store, path)
        return None if found is None else decode(found.data)
    except (IntegrityError, FormatError, ValueError) as error:
        log.warning("%s is not trusted: %s", store.shown(path), error)
        return None


def holder_of(store: Store, folder: str) -> Holder | None:
    """Return who works in a folder; None for nobody, and for a note that is damaged."""
    return trusted(store, f"{folder}/{HOLDER_PATH}".lstrip("/"), Holder.decode)


def size_of(store: Store, path: str) -> int | None:
    """Return the length of a file, None if it is not there."""
    try:
        return store.stat(path).size_bytes
    except StorageError as error:
        if error.kind != "not-found":
            raise
        return None


def listed(store: Store, folder: str, *, recursive: bool = False) -> list[ObjectInfo]:
    """Return what lies in a folder, nothing if that is not there."""
    try:
        return store.list(folder, recursive=recursive)
    except StorageError as error:
        if error.kind == "not-found":
            return []
        raise


def _is_records_folder(path: str) -> bool:
    """Return whether a path is that of the records of one export."""
    tag = path.removeprefix(f"{DOCUMENTS}/")
    return re.fullmatch(r"[0-9a-f]+", tag) is not None and tag == records_tag(tag)
