"""`copy`: a checkpoint from one storage to another, verified as it goes, committed there last.

A copy keeps the save id, so exports, logs and other copies that name it stay true. Whoever writes a
name below `saves/<save id>/` writes the same bytes (I2). But an id that a record at the target has
named, and that is not the head there, is never used again: a saver's fence or deletion allows
somebody to delete its files at any later time (I7). The copy then bears an id derived from it,
always the same one; its documents are written anew with that.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from ckpt_storage import errors
from ckpt_storage.commit import attempt, attempt_files, cleaning, deletion, publishing, slotlog
from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.format import exports, names
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES, FileRef, seal, unseal
from ckpt_storage.format.stock_metadata import MAX_STOCK_BYTES
from ckpt_storage.options import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    PageCache,
    Progress,
    RetryPolicy,
    Timeouts,
)
from ckpt_storage.source.file_versions import listed
from ckpt_storage.source.foreign import ForeignSource, StockSource, in_progress
from ckpt_storage.source.model import (
    CommittedSource,
    Source,
    SourceFormat,
    read_document,
    read_manifest,
)
from ckpt_storage.source.opening import open_source
from ckpt_storage.store import Location, redacted_url
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.rereading import read_twice

from .folder import PlainFolder
from .options import Selection, digest, is_within, location_beside
from .output import (
    Copies,
    Export,
    ExportContext,
    ExportSpec,
    ResumeState,
    SourceVersion,
    WriteSummary,
    place_within,
)
from .plan import OutFile, Stored
from .run import run_together

if TYPE_CHECKING:
    import torch.distributed as dist

log = logging.getLogger("ckpt_storage")

_COPY_PART_BYTES = 64 << 20

_NAME_BYTES = 255
"""Longest name in a folder of common file systems."""

_PROTECTED = frozenset(
    {names.STOCK_METADATA, names.INDEX_NAME, names.COMMITS, names.SAVES, exports.DOCUMENTS}
)
"""What makes a folder a checkpoint or an export, wherever letter case does not count."""

_FOLDED = {name.casefold(): name for name in _PROTECTED}
_OWN = frozenset({f"{names.COMMITS}/", f"{names.SAVES}/", names.STOCK_METADATA})
_SUMS = ("file_count", "read_bytes", "sent_bytes", "copied_bytes", "kept_count", "kept_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What `copy` did; both URLs are without credentials.

    format: of the source. save_id, slot: of the copy; None for formats of others.
    was_there: the target's newest checkpoint was this save before, and nothing of it was sent.
    file_count, total_bytes: of the checkpoint's files, documents not counted.
    sent_bytes: went through this process. copied_bytes: copied by the storage itself, or linked on
    a file system, where they take no space.
    kept_count, kept_bytes: files of an earlier, unfinished copy that were sound.
    exports: folders of exports that were copied. left_out: what else lies in the source's folder.
    failed_exports: those of `left_out` that an error kept from being copied, damage most often,
    and what it was; the copy of the checkpoint itself is whole.
    """

    source_url: str
    url: str
    format: SourceFormat
    save_id: str | None
    slot: int | None = None
    was_there: bool
    file_count: int
    total_bytes: int
    read_bytes: int
    sent_bytes: int
    copied_bytes: int
    kept_count: int
    kept_bytes: int
    exports: Sequence[str] = ()
    left_out: Sequence[str] = ()
    failed_exports: Mapping[str, str] = field(default_factory=dict)
    seconds: float


def copy(  # the public surface, all keyword-only
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    destination_storage_options: Mapping[str, Any] | None = None,
    include: Selection | None = None,
    exclude: Selection | None = None,
    overwrite: bool = False,
    copies: Copies = "auto",
    thread_count: int | None = None,
    memory_limit_bytes: int | None = None,
    page_cache: PageCache = "keep",
    process_group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | Timeouts | None = None,
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> CopyReport:
    """Copy the checkpoint at `src`, or chosen values of it, to `dst`, on any two storages.

    Every block is checked against the checkpoint's checksums, and nothing damaged is committed.
    `dst` shows the copy all at once, at the end, or not at all. Calling again after a failure or a
    kill sends only what is missing. Of two calls at the same time, the later one ends the earlier.
    Only the newest save is copied, and those exports directly below it that are of that save; one
    that is damaged does not undo the copy, see `CopyReport.failed_exports`.

    With `include` or `exclude` the copy is a checkpoint of a part, with a save id of its own. Shard
    files of which everything is wanted the storage copies by itself, in buckets, or they are linked
    in file systems: no byte of them is read, so `verify` the source if it may be damaged. Linked
    files take no space, and lose their write permissions.

    Checkpoints of other writers carry no checksums: their files, all that lie below `src`, are
    compared by length, and the one that makes them a checkpoint goes last.

    Args:
        src: what to copy.
        dst: the folder or URL that becomes the copy.
        storage_options: passed to the fsspec file system of `src`.
        destination_storage_options: passed to that of `dst`; default: `storage_options` where
            both are of one kind.
        include: which values go over: FQNs and glob patterns, or a function of the FQN. Of a
            checkpoint of ours only.
        exclude: which of them do not.
        overwrite: replace a checkpoint at `dst`. One of ours stays readable until the instant at
            which the copy takes its place; those of others cannot.
        copies: "auto" lets the storage itself copy where source and target share one that can;
            "never" reads and sends every byte, and links nothing.
        thread_count: requests in flight; default 2 between local disks, 8 elsewhere.
        memory_limit_bytes: ceiling of buffers.
        page_cache: whether the kernel keeps a copy of local files of `dst` that are on the disk.
        process_group: the ranks that share the work, all of which call; default: this process
            alone. Exports beside the checkpoint its first rank copies.
        timeout: seconds, `timedelta` or `Timeouts` (`write` and `commit` count); default an hour.
            `write` is how long nothing may move, however long the whole takes.
        retry: how failed storage requests are repeated.
        progress: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises:
        CheckpointError: `CheckpointExistsError` (there is another checkpoint and `overwrite` is
            False), `IntegrityError` naming the file, `CheckpointGoneError`
            (the source was replaced meanwhile), `CommitConflictError`, `CommitUnknownError`,
            `StorageError`, `PhaseTimeoutError`, `InvalidInputError` (`dst` is `src` under another
            name, or one lies inside the other), and what opening `src` raises. After
            `NotPublishedError` the copy is committed, after `CommitUnknownError` it may be.

    """
    what = f"the copy of {redacted_url(src)}"

    def job() -> ExportSpec:
        source = Location.to_read(src, storage_options)
        target = location_beside(source, dst, destination_storage_options)
        if is_within(source, target) or is_within(target, source):
            told = f"One of {source.url} and {target.url} lies inside the other, or is it."
            raise errors.InvalidInputError(told, next_step="Give a folder beside what is copied.")
        return CopySpec(
            source=source,
            target=target,
            include=include,
            exclude=exclude,
            timeouts=Timeouts.of(timeout),
            retry=retry,
            page_cache=page_cache,
            memory_limit_bytes=memory_limit_bytes,
            copies=copies,
            thread_count=thread_count,
            overwrite=overwrite,
            progress=progress,
        )

    return run_together(process_group, "copy", what, Timeouts.of(timeout), job, _copying)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpec(ExportSpec):
    """What is copied, and which values of it."""

    include: Selection | None = None
    exclude: Selection | None = None

    @property
    def selects(self) -> bool:
        """Whether values are chosen."""
        return self.include is not None or self.exclude is not None

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common, as `Operation.meet` wants it."""
        chosen = {name: digest(getattr(self, name)) for name in ("include", "exclude")}
        return ExportSpec.terms(self) | chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToCopy(SourceVersion):
    """A checkpoint that is copied; `was_there`: the target's newest is it.

    Of one of ours `save_id` is that of the copy; `there` are the target's slots. Of another
    writer's by path length, time and, of an export of ours, CRC-32C of each file; `last` goes last.
    """

    save_id: str | None = None
    was_there: bool = False
    is_part: bool = False
    there: CommitLog | None = None
    format: SourceFormat = "ckpt_storage"
    files: Mapping[str, tuple[int, float | None, int | None]] = field(default_factory=dict)
    last: str = ""


def _copying(
    context: ExportContext, found: SourceVersion | None, tag: exports.IndexTag | None = None
) -> _Copy:
    """Return the export of a copy; `tag`: what the index says of an export beside a checkpoint."""
    if found is None:
        return _find(context, tag)
    assert isinstance(found, _ToCopy)  # noqa: S101  # as `_find` finds
    if found.is_part:
        from .copy_part import CopyOfPart  # noqa: PLC0415  # it is made of this module's

        return CopyOfPart(context, found)
    if found.record is not None:
        return _CopyOfOurs(context, found)
    return (_CopyOfFiles if found.was_there else _CopyOfOthers)(context, found)


def _find(context: ExportContext, tag: exports.IndexTag | None) -> _Copy:
    """Look whose checkpoint it is; nothing may be missing of one of others."""
    spec, head = context.spec, slotlog.read_log(context.source).head
    if tag is None and place_within(context.source, context.target) is not None:
        raise errors.InvalidInputError(
            f"{spec.target.url} is the same place as {spec.source.url}, or "
            "lies inside it: what is written to the one is seen in the other.",
            next_step="Give a folder beside it.",
        )
    if head is not None:
        publishing.check_newest(context.source, CommitLog.ending_with(head))
        there = deletion.log_to_extend(context.target)
        wanted, is_part = _id_of_copy(context, head)
        save_id = _name_at_target(context, wanted, there)
        was_there = there.head is not None and there.head.save_id == save_id
        found = _ToCopy(
            record=head, save_id=save_id, was_there=was_there, is_part=is_part, there=there
        )
        return _copying(context, found)
    if isinstance(spec, CopySpec) and spec.selects:
        raise errors.InvalidInputError(
            f"{spec.source.url} holds no checkpoint of ours, so no part of it can be copied.",
            next_step="Use ckpt_storage.convert, which takes include= and exclude= too.",
        )
    source = open_source(context.source, context.options)
    if isinstance(source, CommittedSource):
        # Saved by us since the log was read.
        return _find(context, tag)
    objects = context.source.list("", unsafe_names="refuse")
    entries = {info.path: info for info in objects if _is_content(info.path)}
    if exports.GUARD_NAME in entries:
        raise in_progress(spec.source.url)
    if spec.target.is_local:
        _check_names(entries, spec.target.url)
    _check_whole(source, {path: one.size_bytes for path, one in entries.items()})
    crcs, was_there = _exported(context, tag) if tag else ({}, False)
    last = names.STOCK_METADATA if source.format == "dcp" else names.INDEX_NAME
    if was_there:
        # It stays as it is, but nothing tells one content of what lies beside it from another.
        own = [path for path in entries if path.startswith(f"{exports.DOCUMENTS}/")]
        entries = {k: one for k, one in entries.items() if k not in {names.INDEX_NAME, *own, *crcs}}
    files = {path: (e.size_bytes, e.modified_s, crcs.get(path)) for path, e in entries.items()}
    last = last if last in files else ""
    found = _ToCopy(format=source.format, files=files, was_there=was_there, last=last)
    export = _copying(context, found)
    export.watch = lambda: source.check_unchanged(context.source)
    return export


def _id_of_copy(context: ExportContext, head: SlotRecord) -> tuple[str, bool]:
    """Return the save id that a copy is to have, and whether it is one of a part."""
    spec, save_id = context.spec, head.save_id or ""
    assert isinstance(spec, CopySpec)  # noqa: S101  # as `copy` makes it
    if not spec.selects:
        return save_id, False
    from .copy_part import part_id, part_of  # noqa: PLC0415  # as above

    manifest = read_manifest(context.source, head)
    source = CommittedSource(context.source, head, manifest, context.options)
    chosen = part_of(source, spec)
    return (save_id, False) if chosen is None else (part_id(save_id, chosen), True)


def _name_at_target(context: ExportContext, save_id: str, there: CommitLog) -> str:
    """Return the id that the copy has at the target."""
    jobs = [partial(slotlog.read_slot, context.target, at + 1) for at in range(there.last_slot)]
    records = filter(None, context.at_once("read slots", jobs))
    named = {one for record in records for one in (*record.fenced, record.save_id)}
    head_id = there.head.save_id if there.head else None
    while save_id != head_id and save_id in named:
        digest = hashlib.sha256(f"copy of {save_id}".encode()).hexdigest()
        # The time of the save stays.
        save_id = f"{save_id[:17]}{digest[:16]}"
    return save_id


def _exported(context: ExportContext, tag: exports.IndexTag) -> tuple[dict[str, int], bool]:
    """Return the checksums of an export's files, and whether the target's index is the same."""
    path = exports.export_path(tag.fingerprint)

    def read() -> tuple[bytes, exports.ExportRecord]:
        index = context.source.get(names.INDEX_NAME).data
        data = context.source.get(path, max_bytes=MAX_DOCUMENT_BYTES).data
        record = exports.ExportRecord.decode(data, path)
        slotlog.check_document(index, record.index)
        return index, record

    index, record = read_twice(context.source, path, read)
    there = slotlog.read_or_none(context.target, names.INDEX_NAME)
    was_there = there is not None and there.data == index
    # With a guard beside it, a copy was cut just before its end.
    is_whole = was_there and not slotlog.is_there(context.target, exports.GUARD_NAME)
    return {one.path: one.crc32c for one in record.files}, is_whole


def whole_file(name: str, path: str, size_bytes: int, crc32c: int | None) -> OutFile:
    """Return a file that is all of a stored one."""
    segments = [Stored(path=path, size_bytes=size_bytes)]
    return OutFile(name=name, segments=segments, crc32c=crc32c)


class _Copy(Export[CopyReport]):
    """One copy on one rank."""

    found: _ToCopy
    spec: CopySpec

    @property
    def part_bytes(self) -> int:
        """Longer parts where the storage copies by itself: each costs a request."""
        limit_bytes = self.spec.memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES
        # Memory for a few of them, in case the storage refuses to copy.
        copied_bytes = min(_COPY_PART_BYTES, limit_bytes // 4) if self.context.can_copy else 0
        return max(super().part_bytes, copied_bytes)

    def content(self) -> object:
        marks = sorted((path, *mark) for path, mark in self.found.files.items())
        return [self.spec.source.url, self.save_id, marks]

    def report(self, made: WriteSummary, seconds: float) -> CopyReport:
        found, spec, files = self.found, self.spec, self.plan.files
        kept, moved = [files[at].size_bytes for at in made.kept], made.moved
        return CopyReport(
            source_url=spec.source.url,
            url=spec.target.url,
            format=found.format,
            save_id=self.save_id,
            was_there=found.was_there,
            file_count=len(files),
            total_bytes=sum(size_bytes for size_bytes, *_ in found.files.values()),
            **moved | {"read_bytes": moved["read_bytes"] + sum(kept)},
            kept_count=len(kept),
            kept_bytes=sum(kept),
            seconds=seconds,
        )


class _CopyOfFiles(_Copy):
    """A copy of files; as it is, of what people put beside an export that was copied before."""

    def open(self, found: SourceVersion) -> None:
        del found
        self.source = ForeignSource(store=self.context.source, format=self.found.format, tensors={})

    def lay_out(self) -> list[OutFile]:
        files = sorted(self.found.files.items())
        return [whole_file(p, p, size, crc) for p, (size, _, crc) in files if p != self.found.last]

    def take(self) -> ResumeState:
        folders = {file.name.rpartition("/")[0] for file in self.plan.files} - {""}
        self.context.target.make_folders(sorted(folders))
        return ResumeState()


class _CopyOfOthers(PlainFolder[CopyReport], _CopyOfFiles):
    """A copy of a whole folder of others, or of an export of ours."""

    @property
    def last(self) -> str:
        return self.found.last

    def document(self) -> bytes:
        size_bytes = self.found.files[self.last][0]
        data = self.context.source.get(self.last, max_bytes=size_bytes).data
        self.check_unchanged()
        if len(data) != size_bytes:
            what = f"{self.last} has {len(data)} bytes; {size_bytes} were listed."
            raise errors.IntegrityError(what, path=self.last, offset=0, next_step="Copy again.")
        return data


class _CopyOfOurs(_Copy):
    """A copy of a checkpoint of ours, with its save id or another one, and of its exports."""

    source: CommittedSource
    record: SlotRecord | None = None
    _ticket: SaveTicket | None = None
    _ranks: Sequence[FileRef] = ()

    @property
    def save_id(self) -> str:
        return self.found.save_id or ""

    def lay_out(self) -> list[OutFile]:
        files = [] if self.found.was_there else self.source.manifest.files
        return [whole_file(self._renamed(f.path), f.path, f.size_bytes, f.crc32c) for f, _ in files]

    def take(self) -> ResumeState:
        """Begin, send the rank manifests, and see which files an earlier copy has sent."""
        store, before, manifest = self.context.target, self.found.there, self.source.manifest
        assert before is not None  # noqa: S101  # the coordinator found it
        if self.found.was_there:
            self.record = before.head
            return ResumeState()
        is_resumed = slotlog.is_there(store, names.begun_path(self.save_id))
        ticket = attempt.begin(store, overwrite=self.spec.overwrite, save_id=self.save_id)
        # The id was chosen by these slots: whoever names it since has given it up.
        previous = before.head.head if before.head else None
        self._ticket = replace(ticket, last_slot=before.last_slot, previous=previous)
        sends = [partial(self._send_rank, one) for one in manifest.ranks]
        self._ranks = self.context.at_once("copy rank manifests", sends)
        if not is_resumed:
            return ResumeState()
        # Its process is dead, or is ended by this: the later copy goes on.
        attempt_files.abort_uploads(store, names.save_folder(self.save_id))
        named = {at: self._moved(one) for at, (one, _) in enumerate(manifest.files)}
        return ResumeState(done=self.context.there(named))

    def publish(self, made: WriteSummary) -> None:
        """Commit, and show it to stock readers; this is repeated for a copy that was cut there."""
        del made
        store, ticket = self.context.target, self._ticket
        publish: Callable[[], bool] = partial(publishing.roll_forward, store, self.save_id)
        if ticket is not None:
            publish = self._commit(ticket)
        record = self.record
        assert record is not None  # noqa: S101  # it is committed by now
        if record.stock is not None and not publishing.publish_commit(
            store, record, publish, is_needed=record.stock_entries != 0
        ):
            return
        try:
            if ticket is not None and ticket.previous is not None:
                cleaning.free_leftovers(store, known=record)
        except errors.CheckpointError as error:
            log.warning("the copy is committed; what it replaced is not deleted: %s", error)

    def _commit(self, ticket: SaveTicket) -> Callable[[], bool]:
        """Send the manifest and what `.metadata` is made from, and commit; return what shows it."""
        head, own, stock, stock_bytes = self.source.record, self.source.manifest, None, None
        assert head.manifest is not None  # noqa: S101  # a commit record names one; decode saw to it
        if own.stock is not None:
            # A save id has a fixed length, so the lengths that the pickle holds stay true.
            stock_bytes = self._read(own.stock, MAX_STOCK_BYTES)
            stock_bytes = stock_bytes.replace(own.save_id.encode(), self.save_id.encode())
            stock = self._put(own.stock, stock_bytes)
        data = self._read(head.manifest)
        if own.save_id != self.save_id:
            files = [(self._moved(file), rank) for file, rank in own.files]
            new = replace(own, save_id=self.save_id, files=files, ranks=self._ranks, stock=stock)
            data = seal(new.to_body())
        self.record = attempt.commit(
            self.context.target.bounded(Deadline("commit", self.spec.timeouts.commit)),
            ticket,
            manifest=self._put(head.manifest, data),
            stock=stock,
            stock_entries=head.stock_entries,
            user=head.user,
            part=head.part,
            stats=head.stats,
        )
        store = self.context.target
        return partial(publishing.publish_head, store, own=self.record, own_stock=stock_bytes)

    def _send_rank(self, one: FileRef) -> FileRef:
        data = self._read(one)
        if self.source.save_id != self.save_id:
            data = seal(unseal(data, path=one.path) | {"save_id": self.save_id})
        return self._put(one, data)

    def _read(self, one: FileRef, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return a document of the source, checked against what names it."""
        own_id = self.source.manifest.save_id
        return read_document(self.context.source, one, save_id=own_id, max_bytes=max_bytes)

    def _put(self, one: FileRef, data: bytes) -> FileRef:
        """Put a document down under the copy's id."""
        path = self._renamed(one.path)
        self.context.target.put(path, data)
        return FileRef.of(path, data)

    def _moved(self, one: FileRef) -> FileRef:
        return replace(one, path=self._renamed(one.path))

    def _renamed(self, path: str) -> str:
        return path.replace(self.source.manifest.save_id, self.save_id)

    def report(self, made: WriteSummary, seconds: float) -> CopyReport:
        """Copy the exports of this save, too; raises nothing: the copy is committed by now."""
        copied: dict[str, CopyReport] = {}
        left_out: list[str] = []
        failed: dict[str, str] = {}
        paths: list[str] = []
        try:
            paths = [entry.path for entry in listed(self.context.source, "")]
        except errors.CheckpointError as error:
            left_out, failed = ["."], {".": str(error)}
        for path in paths:
            if path in _OWN or path.startswith(names.PROBE_PREFIX):
                continue
            folder = path.rstrip("/")
            try:
                one = self._copy_export(folder) if path.endswith("/") else None
            except errors.CheckpointError as error:
                log.warning("the export %s is not copied: %s", folder, error)
                one = None
                if not isinstance(error, errors.CheckpointExistsError):
                    failed[folder] = str(error)
            if one is not None:
                copied[folder] = one
            else:
                left_out.append(folder if folder in failed else path)
        report = super().report(made, seconds)
        whole = [report, *copied.values()]
        return replace(
            report,
            **{name: sum(getattr(one, name) for one in whole) for name in _SUMS},
            slot=self.record.slot if self.record else None,
            total_bytes=self.total_bytes,
            exports=tuple(copied),
            left_out=tuple(left_out),
            failed_exports=failed,
        )

    @property
    def total_bytes(self) -> int:
        """The bytes of the shard files."""
        return sum(file.size_bytes for file, _ in self.source.manifest.files)

    def _copy_export(self, folder: str) -> CopyReport | None:
        """Copy a folder, or what is missing of it; None if it is no export of the save."""
        spec, tag = self.spec, self._tag_of(folder)
        if tag is None or not tag.save_id == self.save_id == self.source.save_id:
            return None
        source, target = spec.source.child(folder), spec.target.child(folder)
        if target.is_local:
            # It becomes a root, of which its own store takes a link.
            _check_below(target.path, spec.target.path)
        inner = replace(
            spec,
            source=source,
            target=target,
            include=None,
            exclude=None,
            overwrite=False,
            progress=None,
        )
        what, make_export = f"the copy of {source.url}", partial(_copying, tag=tag)
        return run_together(None, "copy", what, inner.timeouts, lambda: inner, make_export)

    def _tag_of(self, folder: str) -> exports.IndexTag | None:
        """Return what an index says; it has no checksum, so it is read twice unless it fits."""
        store, path = self.context.source, f"{folder}/{names.INDEX_NAME}"
        for _ in range(2):
            index = slotlog.read_or_none(store, path)
            tag = None if index is None else exports.IndexTag.of(index.data)
            if index is None or (tag is not None and tag.save_id == self.source.save_id):
                return tag
            store.drop_caches(path)
        return tag


def _check_whole(source: Source, sizes: Mapping[str, int]) -> None:
    """Refuse a stock checkpoint that lacks a file, or a part of one; others' were read by now."""
    items = source.items if isinstance(source, StockSource) else {}
    for (fqn, _), one in items.items():
        # The whole item, with what stands behind a tensor's bytes.
        path, end, found = one.relative_path, one.offset + one.length, sizes.get(one.relative_path)
        if found is None or found < end:
            what = "is missing" if found is None else f"has {found} bytes"
            told = f"{path} {what}; {fqn} ends at its byte {end}."
            step = "Restore the file from a copy, or copy another checkpoint."
            raise errors.IntegrityError(told, path=path, fqn=fqn, offset=found or 0, next_step=step)


def _check_names(paths: Collection[str], url: str) -> None:
    """Refuse names that a folder of a file system cannot hold, or would confuse with its own."""
    folders = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
    for path in paths:
        flaw, head = None, path.partition("/")[0]
        if path in folders:
            flaw = "is both a file and a folder"
        elif any(len(part.encode()) > _NAME_BYTES for part in path.split("/")):
            flaw = f"has a part of more than {_NAME_BYTES} bytes"
        elif head not in _PROTECTED and head.casefold() in _FOLDED:
            flaw = f"differs from {_FOLDED[head.casefold()]} in letter case alone"
        if flaw is not None:
            step = "Rename or delete it at the source, or copy to an object store."
            what = f"{path!r:.200} {flaw}, so it cannot be copied to {url}."
            raise errors.InvalidInputError(what, path=path, next_step=step)


def _check_below(folder: str, root: str) -> None:
    """Refuse a folder below a local root that a symbolic link moves out of it."""
    if not os.path.realpath(folder).startswith(f"{os.path.realpath(root).rstrip('/')}/"):
        raise errors.UnsafeContentError(
            f"{folder} is a symbolic link that leads out of {root}.",
            path=folder,
            next_step="Replace the link by a folder, or copy to what it leads to.",
        )


def _is_content(path: str) -> bool:
    """Return whether a path is part of a checkpoint; slots, notes of runs and probes are none."""
    is_note = path == exports.HOLDER_PATH or exports.is_file_record(path)
    folder, _, name = path.rpartition("/")
    is_note |= folder == names.COMMITS and names.slot_number(name) > 0
    return bool(name) and not (is_note or name.startswith(names.PROBE_PREFIX))
