"""The folder of an export, as the coordinator keeps it: names, holder, resumption, publication.

Only the coordinator changes anything here; the invariants are I14, I15 and I17.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
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
    IndexTag,
    Names,
    Series,
    WeightFileRecord,
    export_path,
    is_probe,
    is_weight_file,
    records_folder,
    records_tag,
    suffix_of,
    weight_file_path,
)
from ckpt_storage.format.names import BLOCKER
from ckpt_storage.store.backend import Content, ObjectInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import Workers

from .plan import ExportPlan, index_document

log = logging.getLogger("ckpt_storage")

_THREADS = 8
_CLAIM_COUNT = 3
_RECORD = re.compile(r"exports/[0-9a-f]{16}/([0-9]{5,})\.json")


class ExportFolder:
    """One consolidation's hold on its output folder; used by one thread of the coordinator."""

    def __init__(self, store: Store, plan: ExportPlan, deadline: Deadline) -> None:
        self._store = store
        self._plan = plan
        self._deadline = deadline
        self._run_id = os.urandom(16).hex()
        self._index: Content | None = None
        self._removed: list[str] = []

    @property
    def _fingerprint(self) -> str:
        return self._plan.fingerprint

    def renew(self, store: Store, plan: ExportPlan, deadline: Deadline) -> None:
        """Take over the store and deadline of the phase that begins, and the plan's last form."""
        self._store, self._plan, self._deadline = store, plan, deadline

    def take(self) -> str:
        """Take the folder over; return the suffix of the weight files' names, "" for none.

        Idempotent. Ends what another consolidation is doing here. Raises
        `CheckpointExistsError` if the folder holds weight files that we did not write.
        """
        store = self._store
        self._index = read_if_there(store, INDEX_NAME)
        names = self._names() or self._claimed()
        suffix = "" if names.fingerprint == self._fingerprint else suffix_of(self._fingerprint)
        earlier = self._earlier()
        store.make_folders([DOCUMENTS, records_folder(self._fingerprint)])
        holder = Holder(
            run_id=self._run_id,
            fingerprint=self._fingerprint,
            series=(Series(len(self._plan.files), suffix),),
            stamp=stamp(),
        )
        store.replace(HOLDER_PATH, holder.after(earlier).encode())
        if earlier is not None:
            count = store.abort_uploads("", only=earlier.wrote)
            if count:
                log.info("%s: %d uploads that were left open are gone", store.url, count)
        if self._index is None:
            # Else readers would take the first files of a run that died for the whole.
            self._put_index(BLOCKER)
            self._index = read_if_there(store, INDEX_NAME)
        return suffix

    def _earlier(self) -> Holder | None:
        """Return the holder that lies there; None for a damaged one: what it wrote is not known."""
        try:
            return self._holder()
        except (IntegrityError, FormatError) as error:
            log.warning("%s: who worked there is not known: %s", self._store.url, error)
            return None

    def _names(self) -> Names | None:
        """Return what lies there; a damaged one gives the names to nobody."""
        found = read_if_there(self._store, NAMES_PATH)
        if found is None:
            return None
        try:
            return Names.decode(found.data)
        except IntegrityError as error:
            log.warning("%s: names with a suffix are used from now on: %s", self._store.url, error)
            return Names(fingerprint="")

    def _claimed(self) -> Names:
        """Give names without a suffix to this content, unless another one was faster."""
        store = self._store
        here = [entry.path for entry in _listed(store, "")]
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
        claim = Names(fingerprint=self._fingerprint, stamp=stamp()).encode()
        for attempt in range(_CLAIM_COUNT):
            try:
                store.create(NAMES_PATH, claim)
            except StorageError as error:
                if error.kind == "unsupported":
                    store.replace(NAMES_PATH, claim)
                elif error.kind != "exists" and (
                    not error.retryable or attempt == _CLAIM_COUNT - 1
                ):
                    raise
            # Whatever was answered, what lies there counts.
            found = self._names()
            if found is not None:
                return found
        raise StorageError(
            f"{store.url}/{NAMES_PATH} is not there although it was created.",
            path=NAMES_PATH,
            next_step="Check the storage and consolidate again.",
        )

    def complete_files(self, plan: ExportPlan) -> dict[int, FileRef]:
        """Return what an earlier run completed of `plan`: position of the file to its record.

        Nothing is trusted but a record of this very content and a file of that length.
        """
        recorded = self._recorded(plan)
        found: dict[int, FileRef] = {}

        def look(at: int, reference: FileRef) -> None:
            try:
                size_bytes = self._store.stat(reference.path).size_bytes
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                return
            if size_bytes == reference.size_bytes:
                found[at] = reference

        self._all(
            [partial(look, at, reference) for at, reference in recorded.items()], "look for files"
        )
        return dict(sorted(found.items()))

    def _recorded(self, plan: ExportPlan) -> dict[int, FileRef]:
        """Return the files of `plan` that records say are complete, by position."""
        wanted = {file.name: (at, file.size_bytes) for at, file in enumerate(plan.files)}
        references: list[FileRef] = []
        record = self.record()
        if record is not None:
            references += record.files
        entries = _listed(self._store, records_folder(self._fingerprint))
        paths = [entry.path for entry in entries if _RECORD.fullmatch(entry.path)]

        def read(path: str) -> None:
            try:
                found = read_if_there(self._store, path)
                if found is None:
                    return
                one = WeightFileRecord.decode(found.data, path=path)
            except (IntegrityError, FormatError) as error:
                log.warning("A record of %s is not trusted: %s", self._store.url, error)
                return
            if one.fingerprint == self._fingerprint:
                references.append(one.file)

        self._all([partial(read, path) for path in paths], "read records")
        return {
            wanted[reference.path][0]: reference
            for reference in references
            if reference.path in wanted and wanted[reference.path][1] == reference.size_bytes
        }

    def record(self) -> ExportRecord | None:
        """Return the record of this content if it was exported completely before."""
        path = export_path(self._fingerprint)
        try:
            found = read_if_there(self._store, path)
            record = None if found is None else ExportRecord.decode(found.data, path=path)
        except (IntegrityError, FormatError) as error:
            log.warning("A record of %s is not trusted: %s", self._store.url, error)
            return None
        return record if record and record.fingerprint == self._fingerprint else None

    def _all(self, jobs: Sequence[partial[None]], name: str) -> None:
        if not jobs:
            return
        count = min(_THREADS, len(jobs))
        with Workers(count, name=name, deadline=self._deadline) as workers:
            for job in jobs:
                workers.submit(job)
            workers.drain()

    def publish(self, files: Sequence[FileRef], *, source: str) -> None:
        """Record the export and make it the one that counts; all `files` are complete.

        Idempotent. Raises `ConsolidationError` if another consolidation took the folder over
        meanwhile, `StorageError`; the earlier export then still counts.
        """
        plan, store = self._plan, self._store
        self._check_holder()
        index = index_document(plan)
        reference = FileRef(path=INDEX_NAME, size_bytes=len(index), crc32c=crc32c_of(index))
        known = self.record()
        if known is None or (list(known.files), known.index) != (list(files), reference):
            record = ExportRecord(
                fingerprint=plan.fingerprint,
                save_id=plan.save_id,
                source_format=plan.source_format,
                source=source,
                files=files,
                index=reference,
                ties=plan.ties,
                stamp={**stamp(), "world_size": plan.world_size},
            )
            store.replace(export_path(plan.fingerprint), record.encode())
        if self._index is None or self._index.data != index:
            self._put_index(index)
        is_mine = SINGLE_NAME in {file.name for file in plan.files}
        if not is_mine and is_there(store, SINGLE_NAME) and self._is_held():
            # Libraries that prefer it to an index see the new export from here on.
            store.delete([SINGLE_NAME])
            self._removed.append(SINGLE_NAME)

    def _holder(self) -> Holder | None:
        found = read_if_there(self._store, HOLDER_PATH)
        return None if found is None else Holder.decode(found.data)

    def _is_held(self) -> bool:
        """Return whether no other consolidation has begun here since this one took the folder."""
        try:
            holder = self._holder()
        except (IntegrityError, FormatError) as error:
            log.warning("%s: who works there is not known: %s", self._store.url, error)
            return False
        return holder is not None and holder.run_id == self._run_id

    def _check_holder(self) -> None:
        holder = self._holder()
        if holder is not None and holder.run_id == self._run_id:
            return
        by = "was removed"
        if holder is not None:
            host, pid = holder.stamp.get("host", "?"), holder.stamp.get("pid", "?")
            by = f"was taken over by process {pid} on {host}"
        raise self._overtaken(f"it {by}")

    def _put_index(self, index: bytes) -> None:
        """Put the index in place of the version that was there when the folder was taken."""
        store, before = self._store, self._index
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

    def _overtaken(self, how: str) -> ConsolidationError:
        return ConsolidationError(
            f"Another consolidation worked in {self._store.url} at the same time: {how}. This one "
            "published nothing.",
            path=self._store.url,
            phase="consolidate",
            next_step="Let one consolidation at a time write to a folder; run this one again if "
            "its export is the one that should count.",
        )

    def collect(self) -> list[str]:
        """Delete what the index that was just published superseded; return the weight files.

        Idempotent; cut at any point, the next consolidation goes on. Deletes nothing once another
        one has taken the folder over: what is old to this one may be what counts by now.
        """
        store, plan = self._store, self._plan
        kept = {file.name for file in plan.files}
        here = [entry.path for entry in _listed(store, "")]
        documents = _listed(store, DOCUMENTS)
        # Whoever takes over says so before it writes, so what was listed before is not its own.
        if not self._is_held():
            log.info("%s: clearing up is left to the consolidation that runs there", store.url)
            return sorted(self._removed)
        old = [name for name in here if is_weight_file(name) and name not in kept]
        if old:
            store.delete(sorted(old))
        mine = records_folder(plan.fingerprint)
        for entry in documents:
            folder = entry.path.rstrip("/")
            if is_probe(folder):
                store.delete([folder])
            if entry.path.endswith("/") and folder != mine and _is_records_folder(folder):
                store.delete_folder(folder)
        done = [e.path for e in _listed(store, mine) if _RECORD.fullmatch(e.path)]
        if done:
            store.delete(done)
        return sorted({*old, *self._removed})


def write_record(store: Store, fingerprint: str, number: int, reference: FileRef) -> None:
    """Write down that weight file `number` (from 1) is complete; whoever completed it calls."""
    record = WeightFileRecord(fingerprint=fingerprint, file=reference)
    store.replace(weight_file_path(fingerprint, number), record.encode())


def stale_exports(store: Store, save_id: str) -> list[str]:
    """Return the folders directly below a checkpoint whose export is of another save.

    Asks one listing and one small read for each folder; a folder that may not be read counts
    as none.
    """
    found = []
    for entry in _listed(store, ""):
        folder = entry.path.rstrip("/")
        if not entry.path.endswith("/") or folder in {"commits", "saves"}:
            continue
        tag = index_of(store, folder)
        if tag is not None and tag.save_id not in {None, save_id}:
            found.append(folder)
    return found


def index_of(store: Store, folder: str) -> IndexTag | None:
    """Return what the index in a folder below a checkpoint says, None unless it is ours."""
    try:
        found = read_if_there(store, f"{folder}/{INDEX_NAME}")
    except CheckpointError as error:
        log.debug("%s/%s is passed over: %s", store.url, folder, error)
        return None
    return None if found is None else IndexTag.of(found.data)


def _is_records_folder(path: str) -> bool:
    tag = path.removeprefix(f"{DOCUMENTS}/")
    return re.fullmatch(r"[0-9a-f]+", tag) is not None and tag == records_tag(tag)


def _listed(store: Store, folder: str) -> list[ObjectInfo]:
    try:
        return store.list(folder, recursive=False)
    except StorageError as error:
        if error.kind == "not-found":
            return []
        raise
