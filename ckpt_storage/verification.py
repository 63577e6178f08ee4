"""Is a checkpoint sound: every byte of it read and checked, every document held against the others.

Knows sources and stores; loads no tensor into anything and imports no torch. Called by users,
the command line and the manager.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import integrity, layout, slotlog, stockfooter
from .ceilings import MOST_SLOT_BYTES, MOST_STOCK_BYTES
from .consolidation.exportcheck import ExportStatus, check_exports
from .deadline import Deadline
from .documents import FileRef
from .errors import (
    CheckpointError,
    CheckpointGoneError,
    FormatError,
    IntegrityError,
    InvalidInputError,
    StorageError,
    UnsafeContentError,
)
from .fetching import Fetch, run_fetches
from .manifest import Manifest, RankManifest
from .opening import open_source
from .options import LOCAL_READ_BYTES, Engine, Progress, RetryPolicy, Timeouts, TransferOptions
from .pacing import Pacer
from .progress import reporting
from .regions import covers_exactly
from .shardspots import (
    ArrivedSpans,
    Part,
    Shard,
    Span,
    fqn_at,
    grouped,
    spans_of,
    total_bytes_of,
)
from .slots import SlotRecord
from .source import CommittedSource, Place, Source, gone, read_manifest, read_rank_manifest
from .stalling import Stalling, stalling_deadline
from .store import Location, open_store
from .store.base import Store
from .workers import Workers, bounded

_THREADS = 8
_LOCAL_THREADS = 1
"""A second thread waits for Python's lock longer than it reads: checks hold that."""
_BATCH_COUNT = 64
_BATCH_BYTES = 4 << 30
"""Files that are read at a time; what is known of their blocks is in memory meanwhile."""

log = logging.getLogger("ckpt_storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: in which file, of which rank, in which tensor, at which byte."""

    message: str
    next_step: str
    file: str | None = None
    rank: int | None = None
    fqn: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What `verify` found. `ok` is whether nothing is wrong.

    `exports` are those directly below `url`, and one at `url` itself; a stale one is no problem.
    """

    url: str
    format: str | None
    save_id: str | None
    problems: Sequence[Problem]
    file_count: int
    checked_bytes: int
    exports: Sequence[ExportStatus] = ()

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
    engine: Engine = "auto",
    timeout: float | Timeouts | Any = None,  # noqa: ANN401  # timedelta too; Timeouts.of checks
    retry: RetryPolicy | None = None,
    progress: Progress = None,
) -> VerifyReport:
    """Check a checkpoint and report everything that is wrong with it.

    `deep` reads every byte of every file and holds it against its checksum; otherwise only
    documents and file lengths are checked. Checkpoints of other writers carry no checksums:
    there only that the files can be read. Any rank; not collective; changes nothing.

    `engine` is the data plane. `timeout` (`Timeouts.load`) is how long nothing may arrive, however
    long the whole takes. `progress`: True: a bar; or a callable that takes each `ProgressEvent`.

    Raises what opening raises if there is no checkpoint to check; damage is reported, not raised.
    """
    location = Location.of(url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline, watch = stalling_deadline("load", timeouts.load, f"Verifying {location.url}")
    opened = open_store(location, engine=engine, timeouts=timeouts, retry=retry or RetryPolicy())
    store = bounded(opened, deadline)

    options = _options_for(store, thread_count, memory_limit_bytes)
    pacer = Pacer(options.thread_count)

    def checked() -> Verification:
        one = Verification(store, options, deadline, deep=deep, pacer=pacer)
        with contextlib.ExitStack() as shown:
            one.run(lambda total, save_id: _show(shown, watch, progress, total, save_id))
        return one

    with deadline.governs(f"Verifying {location.url}"):
        check = checked()
        while check.save_id is not None and check.problems:
            # What was superseded and freed while it was being checked is not damaged.
            if gone(store, check.save_id, location.url) is None:
                break
            deadline.check(f"Verifying {location.url}")
            check = checked()
    return VerifyReport(
        url=location.url,
        format=check.format,
        save_id=check.save_id,
        problems=check.problems,
        file_count=check.file_count,
        checked_bytes=check.checked_bytes,
        exports=check.exports,
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
    """One run of `verify`: collects problems instead of raising at the first.

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
        self.problems: list[Problem] = []
        self.file_count = 0
        self.checked_bytes = 0
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
            self._note_or_raise(error)
        except CheckpointGoneError as error:
            if self.save_id is None:
                raise
            self.note(error)
        if self._part is None:
            self._check_exports()

    @property
    def _leads(self) -> bool:
        return self._part is None or self._part.leads

    @property
    def _is_settled(self) -> bool:
        """Whether more problems would change nothing."""
        return self._part is not None and bool(self.problems)

    def _check_exports(self) -> None:
        """Check what was consolidated from the checkpoint into folders below it."""
        self.exports = check_exports(
            self.store,
            head=self.save_id,
            deep=self.deep,
            options=self.options,
            deadline=self.deadline,
            note=lambda error, path: self.note(error, path=path),
            pacer=self._pacer,
        )
        for export in self.exports:
            # The weight files, the index and the record.
            self.file_count += export.file_count + 2
            self.checked_bytes += export.size_bytes if self.deep else 0

    def note(
        self, error: CheckpointError, *, rank: int | None = None, path: str | None = None
    ) -> None:
        """Add what `error` says to the problems; `path` if it names the file in another way."""
        text = str(error)
        step = error.next_step or "Load another checkpoint."
        self.problems.append(
            Problem(
                message=text.removesuffix(step).strip(),
                next_step=step,
                file=path or error.path,
                rank=rank if error.rank is None else error.rank,
                fqn=getattr(error, "fqn", None),
                offset=getattr(error, "offset", None),
            )
        )

    def committed(self, head: SlotRecord, begins: Callable[[int, str | None], None]) -> None:
        """Check a checkpoint of ours: documents first, then every shard file."""
        self.format, self.save_id = "ckpt_storage", head.save_id
        manifest = read_manifest(self.store, head)
        self._stretches = (self._part or Part()).stretches(
            (ref.path, ref.size_bytes) for ref, _ in manifest.files
        )
        if self.deep:
            begins(sum(map(len, self._stretches.values())), self.save_id)
        self.file_count += 1
        if self._part is None:
            self._check_markers(manifest.save_id)
        if self._leads:
            self._check_coverage(head, manifest)
        for ref, owner in manifest.files:
            self._listed.setdefault(owner, {})[ref.path] = ref
        sound = self._check_ranks(manifest)
        if sound and self._leads and not self._is_settled:
            source = CommittedSource(self.store, head, manifest, self.deadline, self.options)
            self._check_places(source)
        if self._part is None:
            # Last, because a saver that committed a moment ago is about to publish.
            self._check_stock(head, manifest)

    def _check_ranks(self, manifest: Manifest) -> bool:
        """Check rank manifests and the files they describe; return whether all were as promised."""
        sound, waiting = True, list[Shard]()
        for rank, reference in enumerate(manifest.ranks):
            if not self._has_something_of(rank):
                continue
            self.file_count += 1
            try:
                document = read_rank_manifest(self.store, reference, save_id=manifest.save_id)
                self._check_rank(manifest, rank, document)
            except CheckpointError as error:
                self._note_or_raise(error, rank, reference.path)
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
                self._check_files(waiting)
                waiting = []
            if self._is_settled:
                return False
        self._check_files(waiting)
        return sound

    def _has_something_of(self, rank: int) -> bool:
        """Return whether a file of `rank` is looked at here; one without files is by who leads."""
        listed = self._listed.get(rank, {})
        if not listed:
            return self._leads
        return self._part is None or any(path in self._stretches for path in listed)

    def _note_or_raise(
        self, error: CheckpointError, rank: int | None = None, path: str | None = None
    ) -> None:
        """Damage and absence are findings; a storage that does not answer is not.

        To a part, neither is what this release is too old for: no other checkpoint is better.
        """
        if isinstance(error, StorageError) and error.kind != "not-found":
            raise error
        if self._part is not None and not isinstance(error, IntegrityError | StorageError):
            raise error
        self.note(error, rank=rank, path=path)

    def _check_stock(self, head: SlotRecord, manifest: Manifest) -> None:
        """Check `.metadata` and the copy that it is made from, byte by byte."""
        if manifest.stock is None:
            return
        self.file_count += 2
        try:
            copy = slotlog.read_referenced(self.store, manifest.stock, most_bytes=MOST_STOCK_BYTES)
        except CheckpointError as error:
            self._note_or_raise(error, path=manifest.stock.path)
            return
        try:
            current = slotlog.read_stock(self.store)
        except IntegrityError as error:
            self._note_or_raise(error, path=layout.STOCK_METADATA)
            return
        named = stockfooter.split_footer(current.data)[1] if current else None
        pickled = stockfooter.split_footer(copy)[0]
        expected = stockfooter.with_footer(pickled, slot=head.slot, save_id=manifest.save_id)
        if current is None:
            what = ".metadata is missing; torch's own readers find no checkpoint."
            step = "Load it once with the right to write, or save again: either publishes it."
        elif current.data == expected:
            return
        elif named is not None and named.save_id != manifest.save_id:
            what = f".metadata shows save {named.save_id}; the head is {manifest.save_id}."
            step = "Load it once with the right to write, or save again: either publishes it."
        else:
            what = ".metadata is damaged, or another program wrote it: it is not stock.metadata."
            step = "Delete .metadata and load the checkpoint once with the right to write."
        offset = 0 if current is None else _first_difference(current.data, expected)
        self.problems.append(
            Problem(message=what, next_step=step, file=layout.STOCK_METADATA, offset=offset)
        )

    def _check_markers(self, save_id: str) -> None:
        for path in layout.markers_of(save_id):
            try:
                found = slotlog.read_if_there(self.store, path, most_bytes=MOST_SLOT_BYTES)
                if found is not None:
                    self.file_count += 1
                    integrity.unseal(found.data, path=path)
            except CheckpointError as error:
                self._note_or_raise(error, path=path)

    def _check_coverage(self, head: SlotRecord, manifest: Manifest) -> None:
        """Check that chunks hold every element once; where they form a grid they do."""
        exact: dict[tuple[int, tuple[int, ...]], bool] = {}
        for tensor in manifest.tensors.values():
            # Tensors that are cut alike share one list.
            key = (id(tensor.chunks), tensor.shape)
            if key not in exact:
                boxes = [box for box, _ in tensor.chunks or ()]
                exact[key] = not boxes or covers_exactly(tensor.shape, boxes).is_exact
            if not exact[key]:
                self.note(
                    IntegrityError(
                        f"The chunks of {tensor.fqn} do not cover its shape {list(tensor.shape)} "
                        "exactly.",
                        fqn=tensor.fqn,
                        path=head.manifest.path if head.manifest else None,
                        offset=0,
                        next_step="Load another checkpoint.",
                    )
                )

    def _check_places(self, source: CommittedSource) -> None:
        """Check that the rank manifests hold every chunk and blob that the manifest promises."""
        keys: list[tuple[str, tuple[int, ...] | None]] = [
            (info.fqn, box.offsets)
            for info in source.tensors.values()
            for box in info.boxes
            if not box.is_empty
        ]
        for fqn, offsets in [*keys, *((fqn, None) for fqn in sorted(source.blobs))]:
            try:
                source.place(fqn, offsets)
            except CheckpointError as error:
                self._note_or_raise(error)

    def _check_rank(self, manifest: Manifest, rank: int, document: RankManifest) -> None:
        reference = manifest.ranks[rank]
        listed = self._listed.get(rank, {})
        held = {file.path: file.ref() for file in document.files}
        inlined = document if manifest.inline_ranks is None else manifest.inline_ranks[rank]
        if (
            (document.rank, document.save_id) != (rank, manifest.save_id)
            or listed != held
            or document != inlined
        ):
            raise IntegrityError(
                f"{reference.path} and the manifest do not describe the same files.",
                path=reference.path,
                rank=rank,
                offset=0,
                next_step="Restore the file from a copy, or load another checkpoint.",
            )

    def _check_files(self, shards: Sequence[Shard]) -> None:
        """Check files together, so that small ones cost no round trip each."""
        self.file_count += len(shards)
        begin = len(self.problems)
        there = self._of_known_size(shards)
        if self.deep:
            measured = len(self.problems)
            try:
                self._read_files(there)
            except CheckpointError:
                # One of them went away, or will not be read: each for itself, to say which.
                del self.problems[measured:]
                for shard, size_bytes in there:
                    self._read_alone(shard, size_bytes)
        order = {shard.file.path: at for at, shard in enumerate(shards)}
        self.problems[begin:] = sorted(
            self.problems[begin:],
            key=lambda one: (order.get(one.file or "", len(order)), one.offset or 0),
        )

    def _of_known_size(self, shards: Sequence[Shard]) -> list[tuple[Shard, int]]:
        """Return the files that are there, in order, with their lengths; note what is wrong."""
        sizes: dict[str, int | CheckpointError] = {}

        def look(path: str) -> None:
            try:
                sizes[path] = self.store.stat(path).size_bytes
            except StorageError as error:
                sizes[path] = error

        paths = [shard.file.path for shard in shards]
        count = min(self.options.thread_count, len(paths))
        if self.store.capabilities.is_remote and count > 1:
            with Workers(count, name="look for files", deadline=self.deadline) as workers:
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
                self._note_or_raise(found, shard.rank, file.path)
                continue
            there.append((shard, found))
            if found != file.size_bytes:
                end = min(found, file.size_bytes)
                self.note(
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
            self._note_or_raise(error, shard.rank, shard.file.path)

    def _read_files(self, files: Sequence[tuple[Shard, int]]) -> None:
        part_bytes = self.options.part_bytes
        fetches = [
            self._fetch(shard.file.path, group)
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
        run_fetches(
            self.store,
            fetches,
            options=self.options,
            deadline=self.deadline,
            pacer=self._pacer,
        )
        self.checked_bytes += sum(fetch.stop - fetch.start for fetch in fetches)

    def _is_ours(self, span: Span) -> bool:
        """Return whether a span is of this part: the one that it begins in."""
        return self._part is None or span.start in self._stretches.get(span.place.path, ())

    def _fetch(self, path: str, group: Sequence[Span]) -> Fetch:
        arrived = ArrivedSpans(group)

        def done(_: memoryview) -> None:
            for span, error in arrived.damaged:
                self._note_block(span, error)

        return Fetch(
            path=path,
            start=group[0].start,
            stop=group[-1].stop,
            done=done,
            check=arrived.check,
            edge_before=arrived.edge_before,
        )

    def _note_block(self, span: Span, error: IntegrityError) -> None:
        self.note(
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

    def foreign(self, source: Source) -> None:
        """Check that what another writer left can be read; it carries no checksums."""
        self.format, self.save_id = source.format, source.save_id
        if isinstance(source, CommittedSource):  # pragma: no cover  # `committed` handles those
            return
        keys: list[tuple[str, tuple[int, ...] | None]] = [
            (info.fqn, box.offsets)
            for info in source.tensors.values()
            for box in info.boxes
            if not box.is_empty
        ]
        keys += [(fqn, None) for fqn in sorted(source.blobs)]
        source.require(keys)
        ends: dict[str, Place] = {}
        for key in keys:
            place = source.place(*key)
            end = ends.get(place.path)
            if end is None or place.start + place.size_bytes > end.start + end.size_bytes:
                ends[place.path] = place
        for path, place in ends.items():
            self.file_count += 1
            needed = place.start + place.size_bytes
            try:
                size_bytes = self.store.stat(path).size_bytes
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                self.note(_missing_of(source, place))
                continue
            if size_bytes < needed:
                self.note(
                    IntegrityError(
                        f"{path} has {size_bytes} bytes; {place.fqn} ends at byte {needed}.",
                        path=path,
                        fqn=place.fqn,
                        offset=size_bytes,
                        next_step="Restore the file from a copy, or load another checkpoint.",
                    )
                )


def _missing_of(source: Source, place: Place) -> CheckpointError:
    error = source.explain_missing(place)
    if not isinstance(error, CheckpointError):  # pragma: no cover  # sources return ours
        raise error
    return error


def _first_difference(found: bytes, expected: bytes) -> int:
    pairs = enumerate(zip(found, expected, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(found), len(expected)))
