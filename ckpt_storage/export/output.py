"""The folder of an output: who works there, what is complete, and the write that shows it.

Only the coordinator changes anything here; the invariants are I14, I15 and I17. Who works in a
folder says so in `.ckpt-storage/job.json`; the later one counts, and the earlier one finds out
before it publishes. Each complete file has a record of its own below the identity of its content.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from ckpt_storage.commit.slotlog import is_there, read_if_there, stamp
from ckpt_storage.errors import (
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

from .plan import Plan
from .run import side_by_side
from .weights import index_document

log = logging.getLogger("ckpt_storage")

_CLAIM_COUNT = 3
Shown = Literal["metadata", "index", "nothing"]
"""What makes files a checkpoint of others: `.metadata`, an index, or that they lie there."""


class OutputFolder:
    """One run's hold on a folder; used by one thread of the coordinator.

    `record` is told of each file that is complete, on any rank.
    """

    def __init__(self, store: Store, plan: Plan, deadline: Deadline) -> None:
        self._store = store
        self._plan = plan
        self._deadline = deadline
        self._run_id = os.urandom(16).hex()

    def renew(self, store: Store, plan: Plan, deadline: Deadline) -> None:
        """Take over the store and deadline of the phase that begins, and the plan's last form."""
        self._store, self._plan, self._deadline = store, plan, deadline

    def _holder(self) -> Holder | None:
        """Return who works here; None for nobody, and for a note that is damaged."""
        return holder_of(self._store, "")

    def _is_held(self) -> bool:
        """Return whether nobody else has begun to work here since this run took the folder."""
        holder = self._holder()
        return holder is not None and holder.run_id == self._run_id

    def _hold(self, earlier: Holder | None, series: Sequence[Series]) -> None:
        """Become the holder, and end the uploads that an earlier one left open."""
        store, identity = self._store, self._plan.identity
        store.make_folders([DOCUMENTS, records_folder(identity)])
        holder = Holder(
            run_id=self._run_id, fingerprint=identity, series=tuple(series), stamp=stamp()
        )
        store.replace(HOLDER_PATH, holder.after(earlier).encode())
        if earlier is not None:
            names = {file.name for file in self._plan.files}
            mine = names if earlier.fingerprint == identity else set()
            abort_uploads(store, "", lambda path: earlier.wrote(path) or path in mine)

    def _check_held(self) -> None:
        if self._is_held():
            return
        holder = self._holder()
        how = "it was removed"
        if holder is not None:
            host, pid = holder.stamp.get("host", "?"), holder.stamp.get("pid", "?")
            how = f"it was taken over by process {pid} on {host}"
        raise self._overtaken(how)

    def _overtaken(self, how: str) -> ConsolidationError:
        return ConsolidationError(
            f"Another consolidation worked in {self._store.url} at the same time: {how}. This one "
            "published nothing.",
            path=self._store.url,
            phase=self._deadline.phase,
            next_step="Let one at a time write to a folder; run this one again if its output is "
            "the one that should count.",
        )

    def complete_files(self, plan: Plan) -> dict[int, FileRef]:
        """Return what an earlier run completed of `plan`: position of the file to its record.

        Nothing is trusted but a record of this very content and a file of that length.
        """
        wanted = {file.name: (at, file.size_bytes) for at, file in enumerate(plan.files)}
        found: dict[int, FileRef] = {}

        def look(reference: FileRef) -> None:
            try:
                size_bytes = self._store.stat(reference.path).size_bytes
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                return
            if size_bytes == reference.size_bytes:
                found[wanted[reference.path][0]] = reference

        recorded = {
            one.path: one
            for one in self._recorded()
            if wanted.get(one.path, (0, -1))[1] == one.size_bytes
        }
        jobs = [partial(look, one) for one in recorded.values()]
        side_by_side(jobs, "look for files", self._deadline)
        return dict(sorted(found.items()))

    def _recorded(self) -> list[FileRef]:
        """Return the files that records of this content say are complete."""
        references: list[FileRef] = []
        entries = listed(self._store, records_folder(self._plan.identity))

        def read(path: str) -> None:
            try:
                found = read_if_there(self._store, path)
                one = None if found is None else WeightFileRecord.decode(found.data, path=path)
            except (IntegrityError, FormatError) as error:
                log.warning("A record of %s is not trusted: %s", self._store.url, error)
                return
            if one is not None and one.fingerprint == self._plan.identity:
                references.append(one.file)

        jobs = [partial(read, entry.path) for entry in entries if is_file_record(entry.path)]
        side_by_side(jobs, "read records", self._deadline)
        return references


def write_record(store: Store, identity: str, number: int, reference: FileRef) -> None:
    """Write down that file `number` (from 1) is complete; whoever completed it calls."""
    record = WeightFileRecord(fingerprint=identity, file=reference)
    store.replace(weight_file_path(identity, number), record.encode())


class ExportFolder(OutputFolder):
    """The folder of an export of ours: an earlier one stays readable until the index is put."""

    def __init__(self, store: Store, plan: Plan, deadline: Deadline) -> None:
        super().__init__(store, plan, deadline)
        self._index: Content | None = None
        self._removed: list[str] = []

    def take(self) -> str:
        """Take the folder over; return the suffix of the weight files' names, "" for none.

        Idempotent. Ends what another consolidation is doing here. Raises
        `CheckpointExistsError` if the folder holds weight files that we did not write.
        """
        identity = self._plan.identity
        self._index = read_if_there(self._store, INDEX_NAME)
        names = self._names() or self._claimed()
        suffix = "" if names.fingerprint == identity else suffix_of(identity)
        self._hold(self._holder(), [Series(len(self._plan.files), suffix)])
        if self._index is None:
            # Else readers would take the first files of a run that died for the whole.
            self._put_index(BLOCKER)
            self._index = read_if_there(self._store, INDEX_NAME)
        return suffix

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
        claim = Names(fingerprint=self._plan.identity, stamp=stamp()).encode()
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

    def _recorded(self) -> list[FileRef]:
        record = self.record()
        return [*(record.files if record else ()), *super()._recorded()]

    def record(self) -> ExportRecord | None:
        """Return the record of this content if it was exported completely before."""
        path = export_path(self._plan.identity)
        try:
            found = read_if_there(self._store, path)
            record = None if found is None else ExportRecord.decode(found.data, path=path)
        except (IntegrityError, FormatError) as error:
            log.warning("A record of %s is not trusted: %s", self._store.url, error)
            return None
        return record if record and record.fingerprint == self._plan.identity else None

    def publish(
        self, files: Sequence[FileRef], *, save_id: str | None, source_format: str, source: str
    ) -> None:
        """Record the export and make it the one that counts; all `files` are complete.

        Idempotent. Raises `ConsolidationError` if another consolidation took the folder over
        meanwhile, `StorageError`; the earlier export then still counts.
        """
        plan, store = self._plan, self._store
        self._check_held()
        index = index_document(plan.layout, save_id=save_id, fingerprint=plan.identity)
        reference = FileRef(path=INDEX_NAME, size_bytes=len(index), crc32c=crc32c_of(index))
        known = self.record()
        if known is None or (list(known.files), known.index) != (list(files), reference):
            record = ExportRecord(
                fingerprint=plan.identity,
                save_id=save_id,
                source_format=source_format,
                source=source,
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
            self._removed.append(SINGLE_NAME)

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

    def collect(self) -> list[str]:
        """Delete what the index that was just published superseded; return the weight files.

        Idempotent; cut at any point, the next consolidation goes on. Deletes nothing once another
        one has taken the folder over: what is old to this one may be what counts by now.
        """
        store, plan = self._store, self._plan
        kept = {file.name for file in plan.files}
        here = [entry.path for entry in listed(store, "")]
        documents = listed(store, DOCUMENTS)
        # Whoever takes over says so before it writes, so what was listed before is not its own.
        if not self._is_held():
            log.info("%s: clearing up is left to the consolidation that runs there", store.url)
            return sorted(self._removed)
        old = [name for name in here if is_weight_file(name) and name not in kept]
        if old:
            store.delete(sorted(old))
        mine = records_folder(plan.identity)
        for entry in documents:
            folder = entry.path.rstrip("/")
            if is_probe(folder):
                store.delete([folder])
            if entry.path.endswith("/") and folder != mine and _is_records_folder(folder):
                store.delete_folder(folder)
        done = [entry.path for entry in listed(store, mine) if is_file_record(entry.path)]
        if done:
            store.delete(done)
        return sorted({*old, *self._removed})


def is_weight(path: str) -> bool:
    """Return whether a path is that of a weight file."""
    return "/" not in path and path.endswith(".safetensors")


def is_shard(path: str) -> bool:
    """Return whether a path is that of a shard file of stock DCP."""
    return "/" not in path and path.startswith("__") and path.endswith(".distcp")


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
        if error.kind not in {"permission", "unsupported"}:
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


def _is_records_folder(path: str) -> bool:
    tag = path.removeprefix(f"{DOCUMENTS}/")
    return re.fullmatch(r"[0-9a-f]+", tag) is not None and tag == records_tag(tag)
