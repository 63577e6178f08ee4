"""The shard files of a checkpoint: whether each is there, of its length, every block as written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.pacing import Pacer
from ckpt_storage.transfer.ranges import RangeRead, RangeReader
from ckpt_storage.transfer.workers import Workers

from .documentcheck import Findings
from .shardspots import ArrivedSpans, Shard, Span, fqn_at, grouped, spans_of


class ShardCheck:
    """Checks shard files, a batch at a time; what is wrong with them goes to `findings`.

    `deep` reads every byte, or, with `stretches`, only what begins in those of a file's path;
    otherwise only lengths are looked at.
    """

    def __init__(  # all named
        self,
        store: Store,
        *,
        options: TransferOptions,
        deadline: Deadline,
        pacer: Pacer,
        findings: Findings,
        deep: bool,
        stretches: Mapping[str, range] | None = None,
    ) -> None:
        self._store = store
        self._options = options
        self._deadline = deadline
        self._pacer = pacer
        self._findings = findings
        self._deep = deep
        self._stretches = stretches

    def run(self, shards: Sequence[Shard]) -> None:
        """Check files together, so that small ones cost no round trip each."""
        self._findings.file_count += len(shards)
        problems = self._findings.problems
        begin = len(problems)
        there = self._of_known_size(shards)
        if self._deep:
            measured = len(problems)
            try:
                self._read_files(there)
            except CheckpointError:
                # One of them went away, or will not be read: each for itself, to say which.
                del problems[measured:]
                for shard, size_bytes in there:
                    self._read_alone(shard, size_bytes)
        order = {shard.file.path: at for at, shard in enumerate(shards)}
        problems[begin:] = sorted(
            problems[begin:],
            key=lambda one: (order.get(one.file or "", len(order)), one.offset or 0),
        )

    def _of_known_size(self, shards: Sequence[Shard]) -> list[tuple[Shard, int]]:
        """Return the files that are there, in order, with their lengths; note what is wrong."""
        sizes: dict[str, int | CheckpointError] = {}

        def look(path: str) -> None:
            try:
                sizes[path] = self._store.stat(path).size_bytes
            except StorageError as error:
                sizes[path] = error

        paths = [shard.file.path for shard in shards]
        count = min(self._options.thread_count, len(paths))
        if self._store.capabilities.is_remote and count > 1:
            with Workers(count, name="look for files", deadline=self._deadline) as workers:
                for path in paths:
                    workers.submit(partial(look, path))
                workers.drain()
        else:
            for path in paths:
                look(path)
        there: list[tuple[Shard, int]] = []
        for shard in shards:
            file, found = shard.file, sizes[shard.file.path]
            if isinstance(found, CheckpointError):
                self._findings.note_or_raise(found, shard.rank, file.path)
                continue
            there.append((shard, found))
            if found != file.size_bytes:
                end = min(found, file.size_bytes)
                self._findings.note(
                    IntegrityError(
                        f"{file.path} has {found} bytes; {file.size_bytes} were written.",
                        path=file.path,
                        rank=shard.rank,
                        offset=end,
                        fqn=fqn_at(shard.document, file, end),
                        next_step="Restore the file from a copy, or load another checkpoint.",
                    )
                )
        return there

    def _read_alone(self, shard: Shard, size_bytes: int) -> None:
        try:
            self._read_files([(shard, size_bytes)])
        except CheckpointError as error:
            self._findings.note_or_raise(error, shard.rank, shard.file.path)

    def _read_files(self, files: Sequence[tuple[Shard, int]]) -> None:
        part_bytes = self._options.part_bytes
        reads = [
            self._read(shard.file.path, group)
            for shard, size_bytes in files
            for group in grouped(
                [
                    span
                    for span in spans_of(shard, part_bytes)
                    if span.stop <= size_bytes and self._is_ours(span)
                ],
                part_bytes,
            )
        ]
        ranges = RangeReader(self._store, self._options, self._deadline, pacer=self._pacer)
        ranges.run(reads)
        self._findings.checked_bytes += sum(read.stop - read.start for read in reads)

    def _is_ours(self, span: Span) -> bool:
        """Return whether a span is of this part: the one that it begins in."""
        return self._stretches is None or span.start in self._stretches.get(span.place.path, ())

    def _read(self, path: str, group: Sequence[Span]) -> RangeRead:
        arrived = ArrivedSpans(group)

        def done(_: memoryview) -> None:
            for span, error in arrived.damaged:
                self._note_block(span, error)

        return RangeRead(
            path=path,
            start=group[0].start,
            stop=group[-1].stop,
            done=done,
            check=arrived.check,
            edge_before=arrived.edge_before,
        )

    def _note_block(self, span: Span, error: IntegrityError) -> None:
        self._findings.note(
            IntegrityError(
                f"{span.place.path} is damaged: {span.what} at byte {error.offset} does not "
                "have the checksum it was written with.",
                fqn=span.place.fqn or None,
                offset=error.offset,
                path=span.place.path,
                rank=span.place.rank,
                next_step=error.next_step,
            )
        )
