"""The copy of a part of a checkpoint: chosen values, as a checkpoint of its own.

A shard file of which all items are chosen is copied or linked by the storage. Chosen items of other
files are read and written to new files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ckpt_storage.commit import cleaning, deletion, publishing
from ckpt_storage.commit.attempt import SaveTicket, find_conflict
from ckpt_storage.commit.report import RankReport
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import CommitConflictError, IntegrityError, StorageError
from ckpt_storage.format import names
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import FileRef, seal
from ckpt_storage.format.rank_manifest import RankManifest, ShardFile, Vocabulary
from ckpt_storage.options import DEFAULT_BLOCK_BYTES
from ckpt_storage.source.model import CommittedSource, read_manifest
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer import objects

from . import layout
from .copy_base import CopySource, CopySpec, whole_file
from .copy_committed import CopyOfCommitted, id_at_target
from .output import ExportContext, ResumeState, WriteSummary
from .plan import OutFile, Segment, Stored, elements_of
from .select import Selected, select


def part_of(source: CommittedSource, spec: CopySpec) -> Selected | None:
    """Return the values of a copy, None if these are all values of the source.

    Raises `InvalidInputError` for a pattern that matches nothing, and if no value is chosen.
    """
    if not spec.selects:
        return None
    chosen = select(source, spec.include, spec.exclude, to="ckpt_storage", drops=False)
    return chosen if chosen.excluded else None


def committed_version(
    context: ExportContext, spec: CopySpec, head: SlotRecord, target_log: CommitLog
) -> CopySource:
    """Return what is copied of a checkpoint of ours, and whether the target has it already."""
    store, source_id, chosen = context.source, head.save_id or "", None
    publishing.check_newest(store, CommitLog.ending_with(head))
    if spec.selects:
        source = CommittedSource(store, head, read_manifest(store, head), context.options)
        chosen = part_of(source, spec)
    if chosen is None:
        save_id = id_at_target(context, source_id, target_log)
    else:
        save_id = _part_id(context, source_id, chosen, target_log)
    return CopySource(
        record=head,
        save_id=save_id,
        was_there=target_log.head is not None and target_log.head.save_id == save_id,
        is_part=chosen is not None,
        target_log=target_log,
    )


def _part_id(context: ExportContext, save_id: str, chosen: Selected, target_log: CommitLog) -> str:
    """Return the id that the copy of a part has at the target; the time of the save stays.

    The same values have the same id, so that a copy that was interrupted is resumed. If it has
    written its manifest, which names its time and host, it is fenced and freed, and another id is
    derived.

    Raises:
        CommitConflictError: it is not dead, and has committed meanwhile.

    """
    fqns = [*sorted(chosen.tensors), *chosen.blobs]
    text = f"part of {save_id}: {json.dumps(fqns)}"
    derived = f"{save_id[:17]}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    part = id_at_target(context, derived, target_log)
    store, head = context.target, target_log.head
    is_committed = head is not None and head.save_id == part
    if is_committed or not objects.is_there(store, names.manifest_path(part)):
        return part
    if not cleaning.fence_and_free(store, [part]):
        raise CommitConflictError(
            f"Another process has committed the same part, {part}, to {store.url}.",
            winner={"save_id": part},
            path=names.manifest_path(part),
            phase="plan",
            next_step="Call again: it uses what is there.",
        )
    return id_at_target(context, part, deletion.log_to_extend(store))


@dataclass(slots=True, kw_only=True)
class _Shard:
    """One shard file of the copy.

    `file` describes it if it equals the file at `source_path`; else `table` has its items.
    """

    rank: int
    group: str
    file: ShardFile | None = None
    source_path: str = ""
    table: Mapping[str, Sequence[int]] = field(default_factory=dict)


class CopyOfPart(CopyOfCommitted):
    """A copy of chosen values of a checkpoint of ours."""

    @cached_property
    def chosen(self) -> Selected:
        """The values of the copy."""
        chosen = part_of(self.source, self.spec)
        assert chosen is not None  # noqa: S101  # else it is no copy of a part
        return chosen

    def lay_out(self) -> list[OutFile]:
        """Return the shard files, in order of rank; the rank manifests of the source are read."""
        self._shards: list[_Shard] = []
        self._known: list[Vocabulary] = []
        if self.version.was_there:
            return []
        source = self.source
        ranks = range(source.manifest.world_size)
        reads = [partial(source.rank_manifest, rank) for rank in ranks]
        documents = self.context.run_parallel("read rank manifests", reads)
        chosen_names = {*self.chosen.tensors, *self.chosen.blobs}
        blobs = source.manifest.blobs
        groups = iter(source.manifest.groups or [""] * len(source.manifest.files))
        files: list[OutFile] = []
        for document in documents:
            self._known.append(known := Vocabulary())
            count = 0
            for old in document.files:
                group = next(groups)
                fqns = map(document.fqns.__getitem__, old.fqn)
                # Of an object that several ranks hold, only the owner's copy can be read by name.
                wanted = [
                    item
                    for item, fqn in enumerate(fqns)
                    if fqn in chosen_names and blobs.get(fqn, document.rank) == document.rank
                ]
                if not wanted:
                    continue
                name = names.shard_path(self.save_id, document.rank, count)
                count += 1
                if len(wanted) == len(old.fqn):
                    file = document.renumbered(old, known, name)
                    shard = _Shard(rank=document.rank, group=group, file=file, source_path=old.path)
                    self._shards.append(shard)
                    files.append(whole_file(name, old.path, old.size_bytes, old.crc32c))
                    continue
                values = [self._value(document, old, item) for item in wanted]
                made, table = layout.lay_out_shard(name, values, known, DEFAULT_BLOCK_BYTES)
                files.append(made)
                self._shards.append(_Shard(rank=document.rank, group=group, table=table))
        return files

    def _value(self, document: RankManifest, file: ShardFile, item: int) -> tuple[str, Segment]:
        fqn, box = document.fqns[file.fqn[item]], document.box_of(file, item)
        if box is None:
            return fqn, Stored(fqn=fqn, size_bytes=file.payload_bytes[item])
        return fqn, elements_of(fqn, self.source.tensors[fqn], box)

    @property
    def total_bytes(self) -> int:
        """The bytes of the shard files."""
        return sum(file.size_bytes for file in self.plan.files)

    def claim(self) -> ResumeState:
        """Begin; name the files that the storage may copy, and those that an earlier copy sent."""
        context, is_resumed = self.context, self.begin()
        whole = {at: shard.file for at, shard in enumerate(self._shards) if shard.file is not None}
        if self.spec.copies == "auto" and context.target.can_copy_objects_of(context.source):
            return ResumeState(whole={at: self._shards[at].source_path for at in whole})
        sent = {at: file.ref() for at, file in whole.items()} if is_resumed else {}
        return ResumeState(done=context.find_complete(sent))

    def publish(self, made: WriteSummary) -> None:
        """Write the documents that describe the files, and commit as any save is committed.

        Raises `CommitConflictError` if other processes freed the files of this copy.
        """
        try:
            self._publish(made)
        except (IntegrityError, StorageError) as error:
            if isinstance(error, StorageError) and error.kind != "not-found":
                raise
            conflict = self._find_conflict()
            if conflict is None and isinstance(error, IntegrityError):
                raise
            raise conflict or CommitConflictError(
                f"Another process deleted files of {self.save_id}, which this process wrote to "
                f"{self.context.target.url}; it is not committed.",
                winner={},
                path=error.path,
                phase="commit",
                next_step="Look at what is there now, and call again if it is wanted.",
            ) from error

    def _find_conflict(self) -> CommitConflictError | None:
        """Return why this copy cannot commit, None if the commit log does not say so."""
        deadline = Deadline("commit", self.spec.timeouts.commit)
        store, ticket = self.context.target.bounded(deadline), self.ticket
        return None if ticket is None else find_conflict(store, ticket)

    def _publish(self, made: WriteSummary) -> None:
        from ckpt_storage.commit.assembly import commit_save  # noqa: PLC0415  # imports torch

        store, ticket = self.context.target, self.ticket
        if ticket is None:
            super().publish(made)
            return
        reports = self.context.run_parallel(
            "write rank manifests",
            [partial(self._report_of, rank, ticket, made) for rank in range(ticket.world_size)],
        )
        head = self.source.record
        self.record = commit_save(
            store.bounded(Deadline("commit", self.spec.timeouts.commit)),
            ticket,
            metadata=layout.metadata_of(self.source, self.chosen),
            reports=reports,
            user=head.user,
            part=self.part_record(),
        )

    def part_record(self) -> dict[str, Any]:
        """Return the `part` of the commit record; functions are recorded as None."""
        record: dict[str, Any] = {"of": self.source.save_id}
        for key in ("include", "exclude"):
            selection = getattr(self.spec, key)
            if isinstance(selection, str):
                record[key] = [selection]
            elif selection is not None:
                record[key] = None if callable(selection) else sorted(selection)
        return record

    def _report_of(self, rank: int, ticket: SaveTicket, made: WriteSummary) -> RankReport:
        """Write the manifest of a rank; return its report."""
        document, known = self.source.rank_manifest(rank), self._known[rank]
        shards = [(at, shard) for at, shard in enumerate(self._shards) if shard.rank == rank]
        files = [
            shard.file or layout.described(self.plan.files[at], shard.table, at, made)
            for at, shard in shards
        ]
        kept = known.fqns.keys()
        manifest = RankManifest(
            save_id=self.save_id,
            rank=rank,
            world_size=ticket.world_size,
            fqns=list(known.fqns),
            dtypes=list(known.dtypes),
            boxes=list(known.boxes),
            files=files,
            unsafe={fqn: name for fqn, name in document.unsafe.items() if fqn in kept},
            host=document.host,
            pid=document.pid,
        )
        path, data = names.rank_manifest_path(self.save_id, rank), seal(manifest.to_body())
        self.context.target.put(path, data)
        return RankReport.of(
            manifest,
            FileRef.of(path, data),
            with_places=ticket.with_places,
            ties=self.chosen.ties,
            groups=[shard.group for _, shard in shards] if self.source.manifest.groups else (),
        )
