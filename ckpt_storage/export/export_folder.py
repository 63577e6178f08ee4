"""The folder of an export of ours, and its removal."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ckpt_storage.commit.cleaning import abort_uploads
from ckpt_storage.commit.slotlog import is_there, read_if_there, stamp
from ckpt_storage.errors import CheckpointExistsError, StorageError
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import (
    DOCUMENTS,
    HOLDER_PATH,
    NAMES_PATH,
    SINGLE_NAME,
    ExportRecord,
    Holder,
    Names,
    Sealed,
    export_path,
    is_file_record,
    is_output_file,
    is_weight_file,
    records_folder,
    records_tag,
    suffix_of,
)
from ckpt_storage.format.names import (
    BLOCKER,
    COMMITS,
    INDEX_NAME,
    PROBE_PREFIX,
    SAVES,
    new_write_id,
)
from ckpt_storage.source.filemarks import listed
from ckpt_storage.store.backend import Content
from ckpt_storage.store.store import Store

from .folder import FolderOutput, holder_of, trusted
from .layout import Layout
from .output import Made, Taken
from .weights import index_document, with_suffix

log = logging.getLogger("ckpt_storage")

_NOTHING = "0" * 64
"""The identity of what a removal makes: no output."""


@dataclass(kw_only=True)
class ExportFolder(FolderOutput):
    """The folder of an export of ours: an earlier one stays readable until the index is put.

    `save_id` and `source_format` are of what is exported. Raises on `take` `CheckpointExistsError`
    if the folder holds weight files that we did not write.
    """

    is_together: bool = field(init=False, default=True)
    save_id: str | None
    source_format: str
    removed: Sequence[str] = ()
    _index: Content | None = None

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
        self.rename(suffix)
        taken = self.hold(holder_of(store))
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
        record = trusted(self.store, export_path(identity), ExportRecord.decode)
        files = record.files if record and record.fingerprint == identity else ()
        return [*(Sealed(file=file) for file in files), *super().recorded()]

    def publish(self, made: Made) -> None:
        """Record the export and put the index; then delete what that superseded."""
        plan, store = self.plan, self.store
        files = [made.files[at] for at in range(len(plan.files))]
        self.check_held()
        index = index_document(plan.layout, save_id=self.save_id, fingerprint=plan.identity)
        record = ExportRecord(
            fingerprint=plan.identity,
            save_id=self.save_id,
            source_format=self.source_format,
            source=self.site.setting.source.url,
            files=files,
            index=FileRef.of(INDEX_NAME, index),
            ties=plan.layout.ties,
            stamp={**stamp(), "world_size": plan.world_size},
        )
        store.replace(export_path(plan.identity), record.encode())
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
        store, mine = self.store, records_folder(self.plan.identity)
        kept = {file.name for file in self.plan.files}
        here = [entry.path for entry in listed(store, "")]
        documents = [entry.path for entry in listed(store, DOCUMENTS)]
        # Whoever takes over says so before it writes, so what was listed before is not its own.
        holder = holder_of(store)
        if holder is None or holder.run_id != self._run_id:
            log.info("%s: clearing up is left to the consolidation that runs there", store.url)
            return
        old = sorted(name for name in here if is_weight_file(name) and name not in kept)
        # Libraries that prefer it to an index see the new export from here on.
        old.sort(key=lambda name: name != SINGLE_NAME)
        probes = [name for name in here if name.startswith(PROBE_PREFIX)]
        store.delete([*old, *probes])
        for folder in (path.rstrip("/") for path in documents if path.endswith("/")):
            tag = folder.removeprefix(f"{DOCUMENTS}/")
            if folder != mine and re.fullmatch(r"[0-9a-f]+", tag) and tag == records_tag(tag):
                store.delete_folder(folder)
        store.delete([one.path for one in listed(store, mine) if is_file_record(one.path)])
        self.removed = sorted(old)


def remove_exports(store: Store) -> list[str]:
    """Remove all exports directly below the root of `store`; return what else lies in them.

    The caller has made sure that what they were made of is gone. Works as a consolidation that
    makes nothing: it becomes the holder, so one under way publishes nothing, and it stops where
    another becomes it. The index goes first and the names last, so a removal that was cut is gone
    on with. Files and uploads of others stay. Idempotent. Raises `StorageError`.
    """
    paths = [entry.path for entry in listed(store) if entry.path.endswith("/")]
    own = {f"{COMMITS}/", f"{SAVES}/"}
    return [left for path in paths if path not in own for left in _remove(store, path[:-1])]


def _remove(store: Store, folder: str) -> list[str]:
    paths = _below(store, folder)
    if not any(path.startswith(f"{DOCUMENTS}/") for path in paths):
        return [f"{folder}/{path}" for path in paths]
    run_id = new_write_id()
    holder = Holder(run_id=run_id, fingerprint=_NOTHING, stamp=stamp())
    store.replace(f"{folder}/{HOLDER_PATH}", holder.encode())
    others: list[str] = []

    def is_ours(path: str) -> bool:
        is_known = is_output_file(path.removeprefix(f"{folder}/"))
        others.extend(() if is_known else (path,))
        return is_known

    abort_uploads(store, folder, is_ours)
    paths = _below(store, folder)
    weights = {path for path in paths if is_weight_file(path)}
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
            now = holder_of(store, folder)
            if now is None or now.run_id != run_id:
                log.info("%s: another consolidation works in %s; it stays", store.url, folder)
                return []
            store.delete([f"{folder}/{path}" for path in sorted(step)])
    gone = {INDEX_NAME, HOLDER_PATH, *weights, *documents}
    left = [f"{folder}/{path}" for path in paths if path not in gone]
    # Where folders are more than a prefix.
    for empty in (folder, f"{folder}/{DOCUMENTS}"):
        is_used = any(path.startswith(f"{empty}/") for path in (*left, *others))
        if not is_used and not _below(store, empty):
            store.delete_folder(empty)
            break
    return left


def _below(store: Store, folder: str) -> list[str]:
    entries = listed(store, folder, recursive=True)
    return [entry.path.removeprefix(f"{folder}/") for entry in entries if entry.path[-1:] != "/"]
