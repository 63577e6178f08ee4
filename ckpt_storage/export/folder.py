"""Output folders: the run that holds one, its sealed files, and the write that publishes them.

A run becomes the holder of a folder by writing `.ckpt-storage/job.json`. The last run that wrote it
counts; an earlier run reads it before it publishes, and raises. The invariants are I14, I15, I17.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType

from ckpt_storage import errors
from ckpt_storage.commit.attempt_files import abort_uploads
from ckpt_storage.commit.slotlog import read_log, stamp
from ckpt_storage.format import exports, names
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import (
    DOCUMENTS,
    GUARD,
    GUARD_NAME,
    HOLDER_PATH,
    LIBRARY_INDEXES,
    NAMES_PATH,
    Sealed,
)
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA
from ckpt_storage.source.file_versions import listed
from ckpt_storage.store.backend import Content, Part
from ckpt_storage.store.probe import compare_and_swap
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.objects import is_there, read_or_none

from .layout import index_document, with_suffix
from .output import Export, R, ResumeState, WriteSummary
from .owners import check_owned, holder_of, read_trusted

log = logging.getLogger("ckpt_storage")

_SUFFIX_DIGITS = 8
_RECORDS = re.compile(rf"{re.escape(DOCUMENTS)}/[0-9a-f]{{1,16}}/")


class Folder(Export[R]):
    """A folder that one run holds at a time, with a record of each sealed file."""

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write the record of file `number`."""
        identity = self.plan.identity
        record = replace(sealed, fingerprint=identity).encode()
        self.context.target.replace(exports.weight_file_path(identity, number), record)

    def hold(self, earlier: exports.Holder | None) -> ResumeState:
        """Become the holder; abort uploads that an earlier run left open, unless it sealed them.

        Returns the sealed files: those of records whose file or open upload is still there.
        """
        store, identity = self.context.target, self.plan.identity
        store.make_folders([DOCUMENTS, exports.records_folder(identity)])
        files = {(file.name, file.size_bytes): at for at, file in enumerate(self.plan.files)}
        keys = {(seal.file.path, seal.file.size_bytes): seal for seal in self.recorded()}
        recorded = {at: keys[key] for key, at in files.items() if key in keys}
        open_uploads: set[tuple[str | None, str]] = set()
        # A single file replaces one of the same name, so it is not completed before it is checked.
        is_resumable = self.is_together and len(files) > 1
        if is_resumable and any(seal.token for seal in recorded.values()):
            try:
                open_uploads = {(upload.path, upload.token) for upload in store.open_uploads("")}
            except errors.StorageError as error:
                if error.kind not in {"permission", "unsupported"}:
                    raise
                # Files that lack their names are made again.
                log.info("%s: open uploads cannot be looked for: %s", store.url, error)
        done = self.context.find_complete({at: seal.file for at, seal in recorded.items()})
        uploads = {at: (seal.file.path, seal.token) for at, seal in recorded.items()}
        is_open = {at for at, upload in uploads.items() if upload in open_uploads}
        sealed = {at: recorded[at] for at in sorted(is_open - done.keys())}
        run_id = names.new_write_id()
        holder = exports.Holder(run_id=run_id, fingerprint=identity, stamp=stamp())
        store.replace(HOLDER_PATH, holder.encode())
        if earlier is not None:
            kept = {seal.file.path for seal in sealed.values()}
            abort_uploads(
                store, "", lambda path: path not in kept and self.may_end(uploaded_file(path))
            )
        run_ids = (run_id, *([earlier.run_id] if earlier else []))
        return ResumeState(run_ids=run_ids, done=done, sealed=sealed)

    def may_end(self, path: str) -> bool:
        """Return whether only an earlier run can have left an upload to a path open."""
        return exports.is_output_file(path)

    def check_held(self) -> None:
        """Raise `ConsolidationError` if another run took the folder over, or it was removed."""
        holder = holder_of(self.context.target)
        if holder is None:
            raise self.overtaken("it was removed")
        if holder.run_id not in self.run_ids:
            host, pid = holder.stamp.get("host", "?"), holder.stamp.get("pid", "?")
            raise self.overtaken(f"it was taken over by process {pid} on {host}")

    def overtaken(self, how: str) -> errors.ConsolidationError:
        """Return the error for a run whose output does not count, because of another run."""
        url = self.spec.target.url
        return errors.ConsolidationError(
            f"Another run wrote to {url} at the same time: {how}. This one published nothing.",
            path=url,
            phase=self.context.deadline.phase,
            next_step="Let one run at a time write to a folder; call this one again if its output "
            "is the one you want.",
        )

    def recorded(self) -> list[Sealed]:
        """Return the files that are sealed according to the records of this content."""
        store, identity = self.context.target, self.plan.identity

        def decode(data: bytes, path: str) -> Sealed:
            sealed = Sealed.decode(data, path)
            _ = [*map(Part.from_json, sealed.parts)]
            return sealed

        paths = (entry.path for entry in listed(store, exports.records_folder(identity)))
        records = filter(exports.is_file_record, paths)
        reads = [partial(read_trusted, store, path, decode) for path in records]
        seals = self.context.run_parallel("read records", reads)
        return [seal for seal in seals if seal is not None and seal.fingerprint == identity]


class PlainFolder(Folder[R]):
    """A folder of files of another format; readers must not load a part of them as the whole.

    The file that makes the others a checkpoint is written last. While a folder of safetensors is
    being filled, it holds a guard (`GUARD`). At the end our records are deleted.
    """

    @property
    def last(self) -> str:
        """The file that is written last: `.metadata`, the index of weight files, or "" for none."""
        return ""

    def document(self) -> bytes:
        """Return the bytes of the last file."""
        return b""

    @property
    def is_together(self) -> bool:
        """Whether neither a last file nor a guard makes readers notice that files are missing."""
        return not self.last and not self._is_guarded

    @property
    def _is_guarded(self) -> bool:
        """Whether weight files are written: some readers load all that are in a folder."""
        return any(map(_is_weight, self._names))

    @cached_property
    def _names(self) -> set[str]:
        return {*(file.name for file in self.plan.files), self.last} - {""}

    def claim(self) -> ResumeState:
        """Make the folder look like no checkpoint; keep the files that an earlier run sealed.

        Files of another run that died may always be replaced; a complete checkpoint, or a file
        that has a name of this output, only with `overwrite`.
        """
        store, is_indexed = self.context.target, self._is_guarded
        if read_log(store).last is not None:
            raise errors.InvalidInputError(
                f"{store.url} is, or was, a checkpoint of ckpt_storage; files of another format "
                "would lie between its own.",
                path=store.url,
                next_step="Give another folder.",
            )
        earlier = holder_of(store)
        is_resumed = earlier is not None and earlier.fingerprint == self.plan.identity
        here = set(paths_below(store, ""))
        # An index names the files that count; without an index all of them do.
        mixes = exports.is_weight_file if self.last else _is_weight
        in_the_way = here & self._names
        if is_indexed:
            in_the_way |= {path for path in here if path == INDEX_NAME or mixes(path)}
        # To readers, the files that would be replaced are a checkpoint.
        is_whole = STOCK_METADATA in here or (
            is_indexed
            and GUARD_NAME not in here
            and (INDEX_NAME in here or any(map(_is_weight, here)))
        )
        is_remains = not is_whole and is_there(store, HOLDER_PATH)
        blocking = sorted(in_the_way | here & {STOCK_METADATA})
        if blocking and not (is_resumed or is_remains or self.spec.overwrite):
            what = f"{store.url} holds {blocking[0]}."
            step = "Give another folder, or pass overwrite=True to replace what is there."
            raise errors.CheckpointExistsError(what, path=store.url, phase="plan", next_step=step)
        store.make_folders([])
        if STOCK_METADATA in here:
            store.delete([STOCK_METADATA])
        if is_indexed:
            store.replace(GUARD_NAME, GUARD)
        if not is_resumed:
            old = set(in_the_way)
            if STOCK_METADATA in here or (is_remains and not is_indexed):
                # Without `.metadata` no reader knows what is in shards.
                old |= set(filter(_is_shard, here))
            # Files that an earlier run completed, of whatever names.
            records = filter(exports.is_file_record, here)
            seals = [read_trusted(store, path, Sealed.decode) for path in records]
            old |= here & {seal.file.path for seal in seals if seal}
            store.delete(sorted(old))
            if any(path.startswith(f"{DOCUMENTS}/") for path in here):
                store.delete_folder(DOCUMENTS)
        store.make_folders(sorted({name.rpartition("/")[0] for name in self._names} - {""}))
        return self.hold(earlier)

    def may_end(self, path: str) -> bool:
        """Return also whether a shard, a weight file or a file of this run has the path."""
        is_own = _is_shard(path) or _is_weight(path) or path in self._names
        return is_own or super().may_end(path)

    def publish(self, made: WriteSummary) -> None:
        """Write the file that makes all others a checkpoint, and delete the guard."""
        del made
        self.check_held()
        if self.last:
            self.context.target.replace(self.last, self.document())
        if self._is_guarded:
            self.context.target.delete([GUARD_NAME])
        # The folder is now a checkpoint like that of any other writer.
        self.context.target.delete_folder(exports.records_folder(self.plan.identity))
        self.context.target.delete([HOLDER_PATH])
        if not listed(self.context.target, DOCUMENTS):
            self.context.target.delete_folder(DOCUMENTS)


class ExportFolder(Folder[R]):
    """The folder of an export of ours; an earlier export counts until the index is replaced.

    Whatever interrupts the export, and however slow a reader is, it reads a whole export or fails:

    1. A guard is put, unless a single file replaces a file of the same name.
    2. Of several files: an earlier `model.safetensors`, which some readers prefer, is deleted.
    3. The new files get their names; of a storage that shows files early, the guard comes before.
    4. The record of the export and the index are put.
    5. Files of earlier exports are deleted, and last the guard. A failure to do so is raised.

    The name of one of several files is never used for another content. The next call continues
    from any of these steps.
    """

    ties: Mapping[str, str]
    extra_files: Mapping[str, bytes] = MappingProxyType({})
    """Files beside the weights, by name; only on the coordinator."""

    removed: Sequence[str] = ()
    _index: Content | None = None
    _before: frozenset[str] = frozenset()

    @property
    def is_together(self) -> bool:
        """True: an earlier export stays readable until the end."""
        return True

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset(file.name for file in self.plan.files)

    @cached_property
    def _library_index(self) -> str:
        """Where the library that reads these files looks for their index; "" for a single file."""
        indexes = (name for name in LIBRARY_INDEXES if len(self.plan.files) > 1)
        stem = self.plan.files[0].name.partition("-")[0]
        return next((name for name in indexes if name.partition(".")[0] == stem), "")

    @property
    def _needs_guard(self) -> bool:
        """Whether readers could load old and new files, or only some, while they are replaced."""
        mixes = self._before != self._own if len(self._own) > 1 else self._before - self._own
        return self._index is None or bool(mixes)

    def claim(self) -> ResumeState:
        """Claim the folder; the name is the suffix of the weight files' names, "" for none."""
        store, identity = self.context.target, self.plan.identity
        self._index = read_or_none(store, INDEX_NAME)
        here = {entry.path for entry in listed(store, "")}
        is_first = not is_there(store, NAMES_PATH)
        if is_first:
            self._claim_names(here)
        # The stored document decides, whatever the response was; if it is damaged, no content owns
        # the names.
        owner = read_trusted(store, NAMES_PATH, exports.Names.decode)
        is_mine = owner is not None and owner.fingerprint == identity
        check_owned(store, listed(store, ""), identity)
        suffix = "" if is_mine else identity[:_SUFFIX_DIGITS]
        self.rename(suffix)
        self._before = frozenset(
            path for path in here if path == GUARD_NAME or exports.is_weight_file(path)
        )
        if self._needs_guard and not is_first:
            self._check_may_delete()
        resume = self.hold(holder_of(store))
        able = store.capabilities
        shows_early = not (able.tokens_travel and able.lists_uploads)
        if self._needs_guard and (self._index is None or shows_early):
            store.replace(GUARD_NAME, GUARD)
        return replace(resume, name=suffix)

    def rename(self, name: str) -> None:
        """Give the files a suffix."""
        self.plan = replace(self.plan, files=with_suffix(self.plan.files, name))

    def _claim_names(self, here: Collection[str]) -> None:
        """Claim the names without a suffix for this content, unless another run is faster."""
        store = self.context.target
        foreign = sorted(name for name in here if _is_weight(name) or name == INDEX_NAME)
        if foreign:
            raise errors.CheckpointExistsError(
                f"{store.url} holds weight files that ckpt_storage did not export ({foreign[0]}).",
                path=store.url,
                phase="plan",
                next_step="Give an output folder of its own, or move those files away.",
            )
        self._check_may_delete()
        store.make_folders([DOCUMENTS])
        data = exports.Names(fingerprint=self.plan.identity, stamp=stamp()).encode()
        try:
            store.create(NAMES_PATH, data)
        except errors.StorageError as error:
            if error.kind == "unsupported":
                store.replace(NAMES_PATH, data)
            elif error.kind != "exists" and not is_there(store, NAMES_PATH):
                raise

    def _check_may_delete(self) -> None:
        """Raise `StorageError` if the storage refuses to delete a probe; nothing is changed."""
        store, path = self.context.target, names.probe_path()
        store.make_folders([])
        store.put(path, b"May this be deleted?")
        try:
            store.delete([path])
        except errors.StorageError as error:
            if error.kind not in {"permission", "unsupported"}:
                raise
            raise errors.StorageError(
                f"Nothing may be deleted in {store.url}, so an export cannot replace files there: "
                f"{error}",
                kind=error.kind,
                path=store.url,
                next_step="Grant the right to delete below the output, or export elsewhere.",
            ) from error

    def recorded(self) -> list[Sealed]:
        """Return the files of a complete export of this content, too."""
        identity = self.plan.identity
        path = exports.export_path(identity)
        record = read_trusted(self.context.target, path, exports.ExportRecord.decode)
        files = record.files if record and record.fingerprint == identity else ()
        return [*(Sealed(file=file) for file in files), *super().recorded()]

    def prepare_names(self) -> None:
        """Put the guard; of several files, delete the file that some readers would prefer."""
        store = self.context.target
        if not self._needs_guard:
            return
        store.replace(GUARD_NAME, GUARD)
        if singles := sorted(filter(exports.is_single_file, self._before - self._own)):
            try:
                store.delete(singles)
            except errors.StorageError:
                if GUARD_NAME not in self._before:
                    # The earlier export is whole.
                    with contextlib.suppress(errors.CheckpointError):
                        store.delete([GUARD_NAME])
                raise

    def publish(self, made: WriteSummary) -> None:
        """Record the export and put the index; then delete what that superseded."""
        plan, store = self.plan, self.context.target
        self.check_held()
        index = index_document(plan.files, save_id=self.save_id, fingerprint=plan.identity)
        record = exports.ExportRecord(
            fingerprint=plan.identity,
            save_id=self.save_id,
            source_format=self.source.format,
            source=self.spec.source.url,
            files=[made.files[at] for at in range(len(plan.files))],
            index=FileRef.of(INDEX_NAME, index),
            ties=self.ties,
            stamp={**stamp(), "world_size": plan.world_size},
        )
        store.make_folders(sorted({name.rpartition("/")[0] for name in self.extra_files} - {""}))
        for name, data in self.extra_files.items():
            store.replace(name, data)
        store.replace(exports.export_path(plan.identity), record.encode())
        if self._library_index not in {"", INDEX_NAME}:
            store.replace(self._library_index, index)
        if self._index is None or self._index.data != index:
            self._put_index(index)
        self.collect()

    def _put_index(self, index: bytes) -> None:
        """Put the index in place of the version that was there when the folder was taken."""
        try:
            compare_and_swap(self.context.target, INDEX_NAME, index, self._index)
        except errors.StorageError as error:
            # The response may have been lost; the stored index counts.
            now = read_or_none(self.context.target, INDEX_NAME)
            if now is not None and now.data == index:
                return
            if error.kind in {"exists", "precondition", "not-found"}:
                raise self.overtaken("another index was published") from error
            raise

    def collect(self) -> None:
        """Delete files that the new index superseded, and the guard.

        Delete nothing once another run holds the folder: the files may be those of its export.
        """
        store = self.context.target
        here = [entry.path for entry in listed(store, "")]
        documents = [entry.path for entry in listed(store, DOCUMENTS)]
        # Another run becomes the holder before it writes: the files listed above are not its own.
        try:
            self.check_held()
        except errors.ConsolidationError:
            log.info("%s: the consolidation that runs there deletes superseded files", store.url)
            return
        old = sorted(
            name for name in here if exports.is_weight_file(name) and name not in self._own
        )
        indexes = LIBRARY_INDEXES - {INDEX_NAME, self._library_index}
        try:
            store.delete(sorted(indexes.intersection(here)))
            store.delete(old)
            # A removal at the same time may have put the guard, too.
            if self._needs_guard or GUARD_NAME in here:
                store.delete([GUARD_NAME])
        except errors.StorageError as error:
            raise errors.ConsolidationError(
                f"The export to {store.url} is complete, but weight files of an earlier one could "
                f"not be deleted: {error}",
                path=store.url,
                phase=self.context.deadline.phase,
                next_step="Call it again. Until then readers that load every *.safetensors of the "
                "folder refuse it.",
            ) from error
        self.removed = sorted({*old, *self._before} - self._own - {GUARD_NAME})
        try:
            self._delete_documents(here, documents)
        except errors.StorageError as error:
            # The export counts; the next consolidation deletes the rest.
            log.warning("Clearing up after the export to %s failed: %s", store.url, error)

    def _delete_documents(self, here: Sequence[str], documents: Sequence[str]) -> None:
        """Delete records of superseded exports, and probes of runs that died."""
        store, own = self.context.target, exports.records_folder(self.plan.identity)
        store.delete([name for name in here if name.startswith(names.PROBE_PREFIX)])
        for folder in filter(_RECORDS.fullmatch, documents):
            if folder != f"{own}/":
                store.delete_folder(folder)
        paths = (entry.path for entry in listed(store, own))
        store.delete([*filter(exports.is_file_record, paths)])


def _is_weight(path: str) -> bool:
    return "/" not in path and path.endswith(".safetensors") and path != GUARD_NAME


def _is_shard(path: str) -> bool:
    return "/" not in path and path.startswith("__") and path.endswith(".distcp")


def uploaded_file(path: str) -> str:
    """Return the file for which an upload was begun, also if it was to try a copy beside it."""
    return path.partition(names.PROBE_PREFIX)[0]


def paths_below(store: Store, folder: str) -> list[str]:
    """Return the paths of all files below `folder`, relative to it."""
    paths = (entry.path for entry in listed(store, folder, recursive=True))
    return [path.removeprefix(f"{folder}/") for path in paths if not path.endswith("/")]
