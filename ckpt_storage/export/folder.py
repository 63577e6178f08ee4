"""Output folders: who works there, what of it is sealed, and the write that shows it.

The invariants are I14, I15 and I17. Who works in a folder says so in `.ckpt-storage/job.json`; the
later one counts, and the earlier one finds out before it publishes. Each sealed file has a record
of its own below the identity of its content. Files get their names together where the storage has
uploads that outlive their process.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ckpt_storage.commit.cleaning import abort_uploads
from ckpt_storage.commit.slotlog import is_there, read_if_there, read_log, stamp, stat_if_there
from ckpt_storage.errors import (
    CheckpointExistsError,
    ConsolidationError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    StorageError,
)
from ckpt_storage.format import exports, names
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import DOCUMENTS, HOLDER_PATH, NAMES_PATH, SINGLE_NAME, Sealed
from ckpt_storage.format.names import BLOCKER, INDEX_NAME, STOCK_METADATA
from ckpt_storage.source.filemarks import listed
from ckpt_storage.store.backend import Content, Part
from ckpt_storage.store.store import Store

from .layout import Layout
from .output import Made, Output, Taken
from .weights import index_document, with_suffix

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

_NOTHING = "0" * 64
"""The identity of what a removal makes: no output."""

_SUFFIX_DIGITS = 8
_RECORDS = re.compile(rf"{re.escape(DOCUMENTS)}/[0-9a-f]{{1,16}}/")


@dataclass
class FolderOutput(Output):
    """A folder that one run holds at a time, with a record of each sealed file."""

    _run_id: str = field(init=False, default_factory=names.new_write_id)

    def seal(self, number: int, sealed: Sealed) -> None:
        """Write the record of file `number`."""
        identity = self.plan.identity
        record = replace(sealed, fingerprint=identity).encode()
        self.store.replace(exports.weight_file_path(identity, number), record)

    def hold(self, earlier: exports.Holder | None) -> Taken:
        """Become the holder; end what uploads an earlier one left open, but of what it sealed."""
        store, identity = self.store, self.plan.identity
        store.make_folders([DOCUMENTS, exports.records_folder(identity)])
        taken = self._found()
        holder = exports.Holder(run_id=self._run_id, fingerprint=identity, stamp=stamp())
        store.replace(HOLDER_PATH, holder.encode())
        if earlier is not None:
            kept = {one.file.path for one in taken.sealed.values()}
            abort_uploads(store, "", lambda path: path not in kept and self.may_end(path))
        return taken

    def may_end(self, path: str) -> bool:
        """Return whether an open upload to a path can only be one that an earlier run left."""
        return exports.is_output_file(path)

    def lost_how(self) -> str | None:
        """Return how this run lost the folder, None while it holds it."""
        holder = _holder_of(self.store)
        if holder is None:
            return "it was removed"
        if holder.run_id == self._run_id:
            return None
        host, pid = holder.stamp.get("host", "?"), holder.stamp.get("pid", "?")
        return f"it was taken over by process {pid} on {host}"

    def check_held(self) -> None:
        """Raise `ConsolidationError` if another run took the folder over, or it was removed."""
        if how := self.lost_how():
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
        store, identity = self.store, self.plan.identity

        def decode(data: bytes, path: str) -> Sealed:
            found = Sealed.decode(data, path)
            deque(map(Part.from_json, found.parts), maxlen=0)
            return found

        paths = [one.path for one in listed(store, exports.records_folder(identity))]
        reads = [
            partial(_trusted, store, path, decode) for path in paths if exports.is_file_record(path)
        ]
        found = self.site.at_once("read records", reads)
        return [one for one in found if one is not None and one.fingerprint == identity]

    def _found(self) -> Taken:
        """Return what is sealed: of records, those with their file or an upload still open."""
        store = self.store
        files = {(file.name, file.size_bytes): at for at, file in enumerate(self.plan.files)}
        keys = {(one.file.path, one.file.size_bytes): one for one in self.recorded()}
        recorded = {at: keys[key] for key, at in files.items() if key in keys}
        open_uploads: set[tuple[str, str]] = set()
        if any(one.token for one in recorded.values()):
            try:
                open_uploads = store.open_uploads("")
            except StorageError as error:
                if error.kind not in {"permission", "unsupported"}:
                    raise
                # What lacks its name is made again.
                log.info("%s: open uploads cannot be looked for: %s", store.url, error)
        looks = [partial(stat_if_there, store, one.file.path) for one in recorded.values()]
        done: dict[int, FileRef] = {}
        sealed: dict[int, Sealed] = {}
        for at, there in zip(recorded, self.site.at_once("look for files", looks), strict=True):
            one = recorded[at]
            if there is not None and there.size_bytes == one.file.size_bytes:
                done[at] = one.file
            elif (one.file.path, one.token) in open_uploads:
                sealed[at] = one
        return Taken(done=done, sealed=sealed)


@dataclass(kw_only=True)
class PlainFolder(FolderOutput):
    """A folder in which files of another format are being put, so that a part looks like no whole.

    What makes the files a checkpoint goes last: `last`, which is `.metadata` or the index of weight
    files, with the bytes of `document`. While a folder of safetensors is being filled, a blocker
    index lies in it (`BLOCKER`). At the end nothing of ours stays.
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
        earlier = _holder_of(store)
        is_resumed = earlier is not None and earlier.fingerprint == self.plan.identity
        here = set(_below(store, ""))
        index = read_if_there(store, INDEX_NAME) if INDEX_NAME in here else None
        is_hidden = index is not None and index.data == BLOCKER
        in_the_way = {path for path in here if path in self._names or self._mixes(path)}
        # Readers take what would be replaced here for a checkpoint.
        is_whole = STOCK_METADATA in here or (
            is_indexed and not is_hidden and (index is not None or any(map(_is_weight, here)))
        )
        is_remains = not is_whole and is_there(store, HOLDER_PATH)
        # A blocker alone: cut between hiding the folder and writing the note.
        free = {INDEX_NAME} if is_hidden else set()
        blocking = sorted((in_the_way | here & {STOCK_METADATA}) - free)
        if blocking and not (is_resumed or is_remains or self.overwrite):
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
            for path in filter(exports.is_file_record, here):
                left = _trusted(store, path, Sealed.decode)
                self._left |= {left.file.path} if left else set()
            if any(path.startswith(f"{DOCUMENTS}/") for path in here):
                store.delete_folder(DOCUMENTS)
        store.make_folders(sorted({name.rpartition("/")[0] for name in self._names} - {""}))
        return self.hold(earlier)

    def may_end(self, path: str) -> bool:
        """Return also whether it is of a file that this run, or an earlier one, writes."""
        is_own = _is_shard(path) or _is_weight(path) or path in self._names | self._left
        return is_own or super().may_end(path)

    def publish(self, made: Made) -> None:
        """Put the file that shows all others, or take the index away that hid them."""
        del made
        self.check_held()
        if self.last:
            self.store.replace(self.last, self.document())
        else:
            self.store.delete([INDEX_NAME])
        # Whatever lies here now is a checkpoint like any other.
        self.store.delete_folder(exports.records_folder(self.plan.identity))
        self.store.delete([HOLDER_PATH])
        if not listed(self.store, DOCUMENTS):
            self.store.delete_folder(DOCUMENTS)

    def _mixes(self, path: str) -> bool:
        """Return whether a file would mix with those to come; an index says which count."""
        if self.last == STOCK_METADATA:
            return False
        is_old = exports.is_weight_file if self.last else _is_weight
        return path == INDEX_NAME or is_old(path)


@dataclass(kw_only=True)
class ExportFolder(FolderOutput):
    """The folder of an export of ours: an earlier one stays readable until the index is put.

    Raises on `take` `CheckpointExistsError` if the folder holds weight files that we did not write.
    """

    is_together: bool = field(init=False, default=True)
    removed: Sequence[str] = ()
    _index: Content | None = None

    def take(self) -> Taken:
        """Take the folder over; the name is the suffix of the weight files' names, "" for none."""
        store, identity = self.store, self.plan.identity
        self._index = read_if_there(store, INDEX_NAME)
        if not is_there(store, NAMES_PATH):
            self._claim_names()
        # Whatever was answered, what lies there counts; a damaged one gives the names to nobody.
        owner = _trusted(store, NAMES_PATH, exports.Names.decode)
        is_mine = owner is not None and owner.fingerprint == identity
        suffix = "" if is_mine else identity[:_SUFFIX_DIGITS]
        self.rename(suffix)
        taken = self.hold(_holder_of(store))
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
        foreign = sorted(
            name for name in here if exports.is_weight_file(name) or name == INDEX_NAME
        )
        if foreign:
            raise CheckpointExistsError(
                f"{store.url} holds weight files that ckpt_storage did not export ({foreign[0]}).",
                path=store.url,
                phase="plan",
                next_step="Give an output folder of its own, or move those files away.",
            )
        store.make_folders([DOCUMENTS])
        data = exports.Names(fingerprint=self.plan.identity, stamp=stamp()).encode()
        try:
            store.create(NAMES_PATH, data)
        except StorageError as error:
            if error.kind == "unsupported":
                store.replace(NAMES_PATH, data)
            elif error.kind != "exists" and not is_there(store, NAMES_PATH):
                raise

    def recorded(self) -> list[Sealed]:
        """Return also the files of a complete export of this content."""
        identity = self.plan.identity
        record = _trusted(self.store, exports.export_path(identity), exports.ExportRecord.decode)
        files = record.files if record and record.fingerprint == identity else ()
        return [*(Sealed(file=file) for file in files), *super().recorded()]

    def publish(self, made: Made) -> None:
        """Record the export and put the index; then delete what that superseded."""
        plan, store, task = self.plan, self.store, self.task
        self.check_held()
        index = index_document(plan.layout, save_id=task.save_id, fingerprint=plan.identity)
        record = exports.ExportRecord(
            fingerprint=plan.identity,
            save_id=task.save_id,
            source_format=task.source.format,
            source=self.site.setting.source.url,
            files=[made.files[at] for at in range(len(plan.files))],
            index=FileRef.of(INDEX_NAME, index),
            ties=plan.layout.ties,
            stamp={**stamp(), "world_size": plan.world_size},
        )
        store.replace(exports.export_path(plan.identity), record.encode())
        if self._index is None or self._index.data != index:
            self._put_index(index)
        try:
            self.collect()
        except StorageError as error:
            # The export counts; what is left over, the next consolidation finds.
            log.warning("Clearing up after the export to %s failed: %s", store.url, error)

    def _put_index(self, index: bytes) -> None:
        """Put the index in place of the version that was there when the folder was taken."""
        try:
            self.store.replace_seen(INDEX_NAME, index, self._index)
        except StorageError as error:
            # An answer may have been lost; what lies there counts.
            now = read_if_there(self.store, INDEX_NAME)
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
        store, mine = self.store, exports.records_folder(self.plan.identity)
        kept = {file.name for file in self.plan.files}
        here = [entry.path for entry in listed(store, "")]
        documents = [entry.path for entry in listed(store, DOCUMENTS)]
        # Whoever takes over says so before it writes, so what was listed before is not its own.
        if self.lost_how():
            log.info("%s: clearing up is left to the consolidation that runs there", store.url)
            return
        old = sorted(name for name in here if exports.is_weight_file(name) and name not in kept)
        # Libraries that prefer it to an index see the new export from here on.
        old.sort(key=lambda name: name != SINGLE_NAME)
        store.delete([*old, *(name for name in here if name.startswith(names.PROBE_PREFIX))])
        for folder in filter(_RECORDS.fullmatch, documents):
            if folder != f"{mine}/":
                store.delete_folder(folder)
        store.delete([one.path for one in listed(store, mine) if exports.is_file_record(one.path)])
        self.removed = sorted(old)


def _trusted(store: Store, path: str, decode: Callable[[bytes, str], T]) -> T | None:
    """Return what a document says; None if it is not there, or damaged: nothing builds on it."""
    try:
        found = read_if_there(store, path)
        return None if found is None else decode(found.data, path)
    except (IntegrityError, FormatError, TypeError, ValueError) as error:
        log.warning("%s is not trusted: %s", store.shown(path), error)
        return None


def _holder_of(store: Store, folder: str = "") -> exports.Holder | None:
    """Return who works in a folder; None for nobody, and for a note that is damaged."""
    return _trusted(store, f"{folder}/{HOLDER_PATH}".lstrip("/"), exports.Holder.decode)


def _is_weight(path: str) -> bool:
    return "/" not in path and path.endswith(".safetensors")


def _is_shard(path: str) -> bool:
    return "/" not in path and path.startswith("__") and path.endswith(".distcp")


def remove_exports(store: Store) -> list[str]:
    """Remove all exports directly below the root of `store`; return what else lies in them.

    The caller has made sure that what they were made of is gone. Works as a consolidation that
    makes nothing: it becomes the holder, so one under way publishes nothing, and it stops where
    another becomes it. The index goes first and the names last, so a removal that was cut is gone
    on with. Files and uploads of others stay. Idempotent. Raises `StorageError`.
    """
    paths = [entry.path for entry in listed(store) if entry.path.endswith("/")]
    own = {f"{names.COMMITS}/", f"{names.SAVES}/"}
    return [left for path in paths if path not in own for left in _remove(store, path[:-1])]


def _remove(store: Store, folder: str) -> list[str]:
    paths = _below(store, folder)
    if not any(path.startswith(f"{DOCUMENTS}/") for path in paths):
        return [f"{folder}/{path}" for path in paths]
    run_id = names.new_write_id()
    holder = exports.Holder(run_id=run_id, fingerprint=_NOTHING, stamp=stamp())
    store.replace(f"{folder}/{HOLDER_PATH}", holder.encode())
    others: list[str] = []

    def is_ours(path: str) -> bool:
        is_known = exports.is_output_file(path.removeprefix(f"{folder}/"))
        others.extend(() if is_known else (path,))
        return is_known

    abort_uploads(store, folder, is_ours)
    paths = _below(store, folder)
    weights = {path for path in paths if exports.is_weight_file(path)}
    documents = {path for path in paths if path.startswith(f"{DOCUMENTS}/")}
    for step in (
        {INDEX_NAME}.intersection(paths),
        # Some libraries prefer it to an index, and to the other files.
        weights & {SINGLE_NAME},
        weights - {SINGLE_NAME},
        documents - {NAMES_PATH, HOLDER_PATH},
        # Then this removal is forgotten, too.
        {NAMES_PATH, HOLDER_PATH},
    ):
        if step:
            now = _holder_of(store, folder)
            if now is None or now.run_id != run_id:
                log.info("%s: another consolidation works in %s; it stays", store.url, folder)
                return []
            store.delete([f"{folder}/{path}" for path in sorted(step)])
    left = [f"{folder}/{path}" for path in paths if path not in {INDEX_NAME, *weights, *documents}]
    # Where folders are more than a prefix.
    for empty in (folder, f"{folder}/{DOCUMENTS}"):
        is_used = any(path.startswith(f"{empty}/") for path in (*left, *others))
        if not is_used and not _below(store, empty):
            store.delete_folder(empty)
            break
    return left


def _below(store: Store, folder: str) -> list[str]:
    paths = (entry.path for entry in listed(store, folder, recursive=True))
    return [path.removeprefix(f"{folder}/") for path in paths if not path.endswith("/")]
