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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

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
from .work import UNKNOWN_CRC, side_by_side

log = logging.getLogger("ckpt_storage")

_CLAIM_COUNT = 3
_UNLISTED = frozenset({"permission", "unsupported"})
"""Kinds of the error of a storage that does not tell which uploads are open."""


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

    def _is_held(self) -> bool:
        """Return whether nobody else has begun to work here since this run took the folder."""
        holder = holder_of(self.store, "")
        return holder is not None and holder.run_id == self._run_id

    def _hold(self, earlier: Holder | None, series: Sequence[Series] = ()) -> Taken:
        """Become the holder, and end the uploads that an earlier one left open.

        Return what it sealed of this very content; those uploads stay open.
        """
        store, plan = self.store, self.plan
        store.make_folders([DOCUMENTS, records_folder(plan.identity)])
        taken = self._found()
        holder = Holder(
            run_id=self._run_id, fingerprint=plan.identity, series=tuple(series), stamp=stamp()
        )
        store.replace(HOLDER_PATH, holder.after(earlier).encode())
        if earlier is not None:
            same = earlier.fingerprint == plan.identity
            mine = {file.name for file in plan.files} if same else set()
            kept = {one.file.path for one in taken.sealed.values()}
            abort_uploads(
                store, "", lambda path: (earlier.wrote(path) or path in mine) and path not in kept
            )
        return taken

    def check_held(self) -> None:
        """Raise `ConsolidationError` if another run took the folder over, or it was removed."""
        if self._is_held():
            return
        holder = holder_of(self.store, "")
        how = "it was removed"
        if holder is not None:
            host, pid = holder.stamp.get("host", "?"), holder.stamp.get("pid", "?")
            how = f"it was taken over by process {pid} on {host}"
        raise self._overtaken(how)

    def _overtaken(self, how: str) -> ConsolidationError:
        return ConsolidationError(
            f"Another consolidation worked in {self.store.url} at the same time: {how}. This one "
            "published nothing.",
            path=self.store.url,
            phase=self.site.deadline.phase,
            next_step="Let one at a time write to a folder; run this one again if its output is "
            "the one that should count.",
        )

    def _found(self) -> Taken:
        """Return what an earlier run sealed.

        Nothing is trusted but a record of this very content, and with it a file of that length or
        an upload that is still open.
        """
        files = {file.name: (at, file.size_bytes) for at, file in enumerate(self.plan.files)}
        recorded = {
            one.file.path: one
            for one in self._recorded()
            if files.get(one.file.path, (0, -1))[1] == one.file.size_bytes
        }
        open_uploads: set[tuple[str, str]] = set()
        if any(one.token for one in recorded.values()):
            try:
                open_uploads = self.store.open_uploads("")
            except StorageError as error:
                if error.kind not in _UNLISTED:
                    raise
                # What lacks its name is made again.
                log.info("%s: open uploads cannot be looked for: %s", self.store.url, error)
                self._end_uploads(recorded.values())
        done: dict[int, FileRef] = {}
        sealed: dict[int, Sealed] = {}

        def look(one: Sealed) -> None:
            at = files[one.file.path][0]
            if size_of(self.store, one.file.path) == one.file.size_bytes:
                done[at] = one.file
            elif one.token and (one.file.path, one.token) in open_uploads:
                sealed[at] = one

        jobs = [partial(look, one) for one in recorded.values()]
        side_by_side(jobs, "look for files", self.site.deadline)
        return Taken(done=dict(sorted(done.items())), sealed=dict(sorted(sealed.items())))

    def _recorded(self) -> list[Sealed]:
        """Return the files that records of this content say are sealed."""
        identity = self.plan.identity
        entries = listed(self.store, records_folder(identity))
        found = self._read_records(entry.path for entry in entries)
        return [sealed for fingerprint, sealed in found if fingerprint == identity]

    def _read_records(self, paths: Iterable[str]) -> list[tuple[str, Sealed]]:
        """Return what those of some paths that are records say, with their fingerprints."""
        found: list[tuple[str, Sealed]] = []

        def read(path: str) -> None:
            try:
                content = read_if_there(self.store, path)
                one = None if content is None else WeightFileRecord.decode(content.data, path=path)
                parts = [Part.from_json(part) for part in one.parts] if one else []
            except (IntegrityError, FormatError, ValueError) as error:
                log.warning("A record of %s is not trusted: %s", self.store.url, error)
                return
            if one is not None:
                sealed = Sealed(
                    file=one.file, token=one.token, write_id=one.write_id, parts=tuple(parts)
                )
                found.append((one.fingerprint, sealed))

        jobs = [partial(read, path) for path in paths if is_file_record(path)]
        side_by_side(jobs, "read records", self.site.deadline)
        return found

    def _end_uploads(self, files: Iterable[Sealed]) -> None:
        """Abort the uploads of sealed files that nobody goes on with; one that is over is none."""

        def end(one: Sealed) -> None:
            path, store = one.file.path, self.store
            try:
                store.take_over(path, one.token, one.write_id, one.parts).abort()
            except CheckpointError as error:
                # It takes room, but no part in this run.
                log.warning("%s: an upload of an earlier run stays: %s", store.shown(path), error)

        jobs = [partial(end, one) for one in files if one.token]
        side_by_side(jobs, "end uploads", self.site.deadline)


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
        identity = self.plan.identity
        self._index = read_if_there(self.store, INDEX_NAME)
        names = self._names() or self._claimed()
        suffix = "" if names.fingerprint == identity else suffix_of(identity)
        self.plan = self.plan.renamed(self.named(self.plan.layout, suffix))
        taken = self._hold(holder_of(self.store, ""), [Series(len(self.plan.files), suffix)])
        if self._index is None:
            # Else readers would take the first files of a run that died for the whole.
            self._put_index(BLOCKER)
            self._index = read_if_there(self.store, INDEX_NAME)
        return replace(taken, name=suffix)

    def named(self, layout: Layout, name: str) -> Layout:
        """Return the files with a suffix."""
        return with_suffix(layout, name)

    def _names(self) -> Names | None:
        """Return what lies there; a damaged one gives the names to nobody."""
        found = read_if_there(self.store, NAMES_PATH)
        if found is None:
            return None
        try:
            return Names.decode(found.data)
        except IntegrityError as error:
            log.warning("%s: names with a suffix are used from now on: %s", self.store.url, error)
            return Names(fingerprint="")

    def _claimed(self) -> Names:
        """Give names without a suffix to this content, unless another one was faster."""
        store = self.store
        here = [entry.path for entry in listed(store, "")]
        foreign = sorted(name for name in here if is_weight_file(name) or name == INDEX_NAME)
        if foreign or self._index is not None:
            raise CheckpointExistsError(
                f"{store.url} holds weight files that ckpt_storage did not export "
                f"({(foreign or [INDEX_NAME])[0]}).",
                path=store.url,
                phase="plan",
                next_step="Give an output folder of its own, or move those files away.",
            )
        store.make_folders([DOCUMENTS])
        claim(store, NAMES_PATH, Names(fingerprint=self.plan.identity, stamp=stamp()).encode())
        # Whatever was answered, what lies there counts.
        found = self._names()
        if found is not None:
            return found
        raise StorageError(
            f"{store.url}/{NAMES_PATH} is not there although it was created.",
            path=NAMES_PATH,
            next_step="Check the storage and consolidate again.",
        )

    def _recorded(self) -> list[Sealed]:
        record = self._record()
        return [*(Sealed(file=f) for f in (record.files if record else ())), *super()._recorded()]

    def _record(self) -> ExportRecord | None:
        """Return the record of this content if it was exported completely before."""
        path = export_path(self.plan.identity)
        try:
            found = read_if_there(self.store, path)
            record = None if found is None else ExportRecord.decode(found.data, path=path)
        except (IntegrityError, FormatError) as error:
            log.warning("A record of %s is not trusted: %s", self.store.url, error)
            return None
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
        if not is_mine and is_there(store, SINGLE_NAME) and self._is_held():
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
        conditional = store.capabilities.if_match
        try:
            if before is None and conditional:
                store.create(INDEX_NAME, index)
            elif before is None or not conditional:
                store.replace(INDEX_NAME, index)
            else:
                store.replace(INDEX_NAME, index, if_match=before.version)
        except StorageError as error:
            # An answer may have been lost; what lies there counts.
            now = read_if_there(store, INDEX_NAME)
            if now is not None and now.data == index:
                return
            if error.kind in {"exists", "precondition", "not-found"}:
                raise self._overtaken("another index was published") from error
            raise

    def collect(self) -> None:
        """Delete what the index that was just published superseded.

        Cut at any point, the next consolidation goes on. Deletes nothing once another one has taken
        the folder over: what is old to this one may be what counts by now.
        """
        store, plan = self.store, self.plan
        kept = {file.name for file in plan.files}
        here = [entry.path for entry in listed(store, "")]
        documents = listed(store, DOCUMENTS)
        # Whoever takes over says so before it writes, so what was listed before is not its own.
        if not self._is_held():
            log.info("%s: clearing up is left to the consolidation that runs there", store.url)
            return
        old = sorted(name for name in here if is_weight_file(name) and name not in kept)
        probes = [name for name in here if name.startswith(PROBE_PREFIX)]
        if old or probes:
            store.delete([*old, *probes])
        mine = records_folder(plan.identity)
        for entry in documents:
            folder = entry.path.rstrip("/")
            if entry.path.endswith("/") and folder != mine and is_records_folder(folder):
                store.delete_folder(folder)
        done = [entry.path for entry in listed(store, mine) if is_file_record(entry.path)]
        if done:
            store.delete(done)
        self.removed = sorted({*old, *self.removed})


def files_there(site: Site, plan: Plan, taken: Taken) -> dict[int, FileRef]:
    """Return the files of a plan that the target has in their length, by position.

    Their checksums are those of `taken`, or else of the plan, or else unknown.
    """
    found: dict[int, FileRef] = dict(taken.done)

    def look(at: int) -> None:
        file = plan.files[at]
        if size_of(site.target, file.name) == file.size_bytes:
            crc32c = UNKNOWN_CRC if file.crc32c is None else file.crc32c
            found[at] = FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=crc32c)

    rest = [at for at in range(len(plan.files)) if at not in {*taken.done, *taken.sealed}]
    side_by_side([partial(look, at) for at in rest], "look for files", site.deadline)
    return found


def size_of(store: Store, path: str) -> int | None:
    """Return the length of a file, None if it is not there."""
    try:
        return store.stat(path).size_bytes
    except StorageError as error:
        if error.kind != "not-found":
            raise
        return None


def claim(store: Store, path: str, data: bytes) -> None:
    """Create a file unless one is there, where the storage can tell; what lies there counts."""
    for attempt in range(_CLAIM_COUNT):
        try:
            store.create(path, data)
        except StorageError as error:
            if error.kind == "unsupported":
                store.replace(path, data)
            elif error.kind != "exists" and (not error.retryable or attempt == _CLAIM_COUNT - 1):
                raise
        if is_there(store, path):
            return


def holder_of(store: Store, folder: str) -> Holder | None:
    """Return who works in a folder; None for nobody, and for a note that is damaged."""
    path = f"{folder}/{HOLDER_PATH}".lstrip("/")
    try:
        found = read_if_there(store, path)
        return None if found is None else Holder.decode(found.data)
    except (IntegrityError, FormatError) as error:
        log.warning("%s: who works there is not known: %s", store.shown(folder), error)
        return None


def abort_uploads(store: Store, folder: str, only: Callable[[str], bool] | None = None) -> None:
    """Abort the uploads that a dead run left open, where that may be looked for."""
    try:
        count = store.abort_uploads(folder, only=only)
    except StorageError as error:
        if error.kind not in _UNLISTED:
            raise
        # They take room, but no part in this run.
        log.info("%s: uploads of an earlier run cannot be looked for: %s", store.url, error)
    else:
        if count:
            log.info("%s: %d uploads that were left open are gone", store.url, count)


def listed(store: Store, folder: str, *, recursive: bool = False) -> list[ObjectInfo]:
    """Return what lies in a folder, nothing if that is not there."""
    try:
        return store.list(folder, recursive=recursive)
    except StorageError as error:
        if error.kind == "not-found":
            return []
        raise


def is_records_folder(path: str) -> bool:
    """Return whether a path is that of the records of one export."""
    tag = path.removeprefix(f"{DOCUMENTS}/")
    return re.fullmatch(r"[0-9a-f]+", tag) is not None and tag == records_tag(tag)
