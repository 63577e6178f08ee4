"""Is a checkpoint sound: every byte of it read and checked, every document held against the others.

Loads no tensor into anything and imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import (
    CheckpointError,
    CheckpointGoneError,
    CheckpointInProgressError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    UnsafeContentError,
)
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import INDEX_NAME
from ckpt_storage.options import LOCAL_READ_BYTES, Progress, RetryPolicy, Timeouts, TransferOptions
from ckpt_storage.progress import reporting
from ckpt_storage.source.filemarks import open_source
from ckpt_storage.source.model import (
    CommittedSource,
    Source,
    gone,
    read_manifest,
    read_rank_manifest,
)
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.stalling import Stalling, stalling_deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.pacing import Pacer

from .documentcheck import (
    Findings,
    Problem,
    check_coverage,
    check_foreign,
    check_markers,
    check_places,
    check_rank,
    check_stock,
    note_unsafe,
)
from .exportcheck import ExportStatus, check_exports
from .shardcheck import ShardCheck
from .shardspots import Part, Shard, total_bytes_of

_LOCAL_THREADS = 1
"""A second thread waits for Python's lock longer than it reads: checks hold that."""
_BATCH_COUNT = 64
_BATCH_BYTES = 4 << 30
"""Files that are read at a time; what is known of their blocks is in memory meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found. `ok` is whether nothing is wrong.

    `exports` are those directly below `url`, and one at `url` itself; a stale one is no problem.
    `notes` names values that are sound and that `load` refuses all the same.
    """

    url: str
    format: str | None
    save_id: str | None
    problems: Sequence[Problem]
    file_count: int
    checked_bytes: int
    exports: Sequence[ExportStatus] = ()
    notes: Sequence[Problem] = ()

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify(  # the public surface, all keyword-only
    url: str | os.PathLike[str],
    *,
    deep: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> VerifyReport:
    """Check a checkpoint and report everything that is wrong with it.

    `deep` reads every byte of every file and holds it against its checksum; otherwise only
    documents and file lengths are checked. Checkpoints of other writers carry no checksums:
    there only that the files can be read. Any rank; not collective; changes nothing.

    `timeout` (`Timeouts.load`) is how long nothing may arrive, however
    long the whole takes. `progress`: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises what opening raises if there is no checkpoint to check; damage is reported, not raised.
    """
    location = Location.of(url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline, watch = stalling_deadline("load", timeouts.load, f"Verifying {location.url}")
    opened = open_store(location, timeouts=timeouts, retry=retry or RetryPolicy())
    store = opened.bounded(deadline)

    options = _options_for(store, thread_count, memory_limit_bytes)
    pacer = Pacer(options.thread_count)

    def checked() -> Verification:
        one = Verification(store, options, deadline, deep=deep, pacer=pacer)
        with contextlib.ExitStack() as shown:
            one.run(lambda total, save_id: _show(shown, watch, progress, total, save_id))
        return one

    with deadline.governs(f"Verifying {location.url}"):
        check = checked()
        while check.save_id is not None and check.findings.problems:
            # What was superseded and freed while it was being checked is not damaged.
            if gone(store, check.save_id, location.url) is None:
                break
            deadline.check(f"Verifying {location.url}")
            check = checked()
    return VerifyReport(
        url=location.url,
        format=check.format,
        save_id=check.save_id,
        problems=check.findings.problems,
        file_count=check.findings.file_count,
        checked_bytes=check.findings.checked_bytes,
        exports=check.exports,
        notes=tuple(check.findings.notes),
    )


def verification_of(
    store: Store,
    deadline: Deadline,
    *,
    deep: bool,
    part: Part | None = None,
) -> Verification:
    """Return a verification of what lies in `store`, to be run; arguments as for `verify`."""
    return Verification(store, _options_for(store), deadline, deep=deep, part=part)


def _options_for(
    store: Store, thread_count: int | None = None, memory_limit_bytes: int | None = None
) -> TransferOptions:
    return TransferOptions.for_storage(
        is_remote=store.capabilities.is_remote,
        local_threads=_LOCAL_THREADS,
        local_part_bytes=LOCAL_READ_BYTES,
        thread_count=thread_count,
        part_bytes=None,
        memory_limit_bytes=memory_limit_bytes,
    )


def _show(
    shown: contextlib.ExitStack,
    watch: Stalling,
    progress: Progress,
    total_bytes: int,
    save_id: str | None,
) -> None:
    """Report what arrives from now on, until `shown` is closed."""
    watch.on_bytes = shown.enter_context(
        reporting(
            progress,
            phase="load",
            rank=0,
            total_bytes=total_bytes,
            save_id=save_id,
            with_bar=True,
        )
    )
    shown.callback(setattr, watch, "on_bytes", _nothing)


def _nothing(_: int) -> None:
    pass


class Verification:
    """One run of `verify`: what is to be checked, in order; `findings` has what came of it.

    With a `part`, of several processes each has one: together they check what loads need, and
    nothing that is made of it (exports, `.metadata`). Each ends soon after its first problem. All
    reads have one `pacer`, its own unless one is given.
    """

    def __init__(
        self,
        store: Store,
        options: TransferOptions,
        deadline: Deadline,
        *,
        deep: bool,
        part: Part | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.store = store
        self.options = options
        self.deadline = deadline
        self.deep = deep
        self.format: str | None = None
        self.save_id: str | None = None
        self.findings = Findings(is_part=part is not None)
        self.exports: Sequence[ExportStatus] = ()
        self._listed: dict[int, dict[str, FileRef]] = {}
        self._pacer = pacer or Pacer(options.thread_count)
        self._part = part
        self._stretches: Mapping[str, range] = {}

    def run(self, begins: Callable[[int, str | None], None]) -> None:
        """Check whatever is there. Raises what opening raises if there is nothing to check.

        `begins` is called with the bytes to read, once they are known, and the save id.
        """
        try:
            found = slotlog.read_log(self.store)
            if found.head is not None:
                self.committed(found.head, begins)
            elif self._leads:
                self.foreign(open_source(self.store, deadline=self.deadline, options=self.options))
        except (IntegrityError, InvalidInputError, FormatError, UnsafeContentError) as error:
            self.findings.note_or_raise(error)
        except CheckpointInProgressError as error:
            # The check of exports notes the folder of one that is not complete.
            if self._part is not None or not (error.path or "").endswith(INDEX_NAME):
                raise
        except CheckpointGoneError as error:
            if self.save_id is None:
                raise
            self.findings.note(error)
        if self._part is None:
            self._check_exports()

    @property
    def _leads(self) -> bool:
        return self._part is None or self._part.leads

    def _check_exports(self) -> None:
        """Check what was consolidated from the checkpoint into folders below it."""
        self.exports = check_exports(
            self.store,
            head=self.save_id,
            deep=self.deep,
            options=self.options,
            deadline=self.deadline,
            note=lambda error, path: self.findings.note(error, path=path),
            pacer=self._pacer,
        )
        for export in self.exports:
            # The weight files, the index and the record.
            self.findings.file_count += export.file_count + 2
            self.findings.checked_bytes += export.size_bytes if self.deep else 0

    def committed(self, head: SlotRecord, begins: Callable[[int, str | None], None]) -> None:
        """Check a checkpoint of ours: documents first, then every shard file."""
        self.format, self.save_id = "ckpt_storage", head.save_id
        manifest = read_manifest(self.store, head)
        self._stretches = (self._part or Part()).stretches(
            (ref.path, ref.size_bytes) for ref, _ in manifest.files
        )
        if self.deep:
            begins(sum(map(len, self._stretches.values())), self.save_id)
        self.findings.file_count += 1
        if self._part is None:
            check_markers(self.store, manifest.save_id, self.findings)
        if self._leads:
            check_coverage(head, manifest, self.findings)
        for ref, owner in manifest.files:
            self._listed.setdefault(owner, {})[ref.path] = ref
        sound = self._check_ranks(manifest)
        if sound and self._leads and not self.findings.is_settled:
            source = CommittedSource(self.store, head, manifest, self.deadline, self.options)
            check_places(source, self.findings)
        if self._part is None:
            # Last, because a saver that committed a moment ago is about to publish.
            check_stock(self.store, head, manifest, self.findings)

    def _check_ranks(self, manifest: Manifest) -> bool:
        """Check rank manifests and the files they describe; return whether all were as promised."""
        shards = ShardCheck(
            self.store,
            options=self.options,
            deadline=self.deadline,
            pacer=self._pacer,
            findings=self.findings,
            deep=self.deep,
            stretches=None if self._part is None else self._stretches,
        )
        sound, waiting = True, list[Shard]()
        for rank, reference in enumerate(manifest.ranks):
            if not self._has_something_of(rank):
                continue
            self.findings.file_count += 1
            try:
                document = read_rank_manifest(self.store, reference, save_id=manifest.save_id)
                check_rank(manifest, document, rank=rank, listed=self._listed.get(rank, {}))
                note_unsafe(document, path=reference.path, findings=self.findings)
            except CheckpointError as error:
                self.findings.note_or_raise(error, rank, reference.path)
                sound = False
                if manifest.inline_ranks is None:
                    continue
                # The inlined copy still tells what the files must hold.
                document = manifest.inline_ranks[rank]
            waiting += [
                Shard(rank, document, file)
                for file in document.files
                if file.path in self._stretches or self._part is None
            ]
            if len(waiting) >= _BATCH_COUNT or total_bytes_of(waiting) >= _BATCH_BYTES:
                shards.run(waiting)
                waiting = []
            if self.findings.is_settled:
                return False
        shards.run(waiting)
        return sound

    def _has_something_of(self, rank: int) -> bool:
        """Return whether a file of `rank` is looked at here; one without files is by who leads."""
        listed = self._listed.get(rank, {})
        if not listed:
            return self._leads
        return self._part is None or any(path in self._stretches for path in listed)

    def foreign(self, source: Source) -> None:
        """Check that what another writer left can be read; it carries no checksums."""
        self.format, self.save_id = source.format, source.save_id
        if isinstance(source, CommittedSource):  # pragma: no cover  # `committed` handles those
            return
        check_foreign(self.store, source, self.findings)
