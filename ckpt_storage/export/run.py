"""What all ranks do to make the files of one plan: checked, written, completed, recorded."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, Self

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.format.crc import combine_many
from ckpt_storage.format.documents import FileRef
from ckpt_storage.inspect.checks import has_checksum
from ckpt_storage.options import Phase, TransferOptions
from ckpt_storage.store.backend import Part
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.workers import Workers

from .layout import OutFile
from .plan import Plan, Region
from .reads import Readable
from .write import Copies, Paces, Portion, RegionWriter

log = logging.getLogger("ckpt_storage")

_THREADS = 8

_WORD_S = 3.0
"""How long the reason may take to arrive for which a shared upload was discarded."""


class Ranks(Protocol):
    """What an export needs of the operation that it runs in: an `operation.Operation`."""

    rank: int
    world_size: int
    is_coordinator: bool

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Send to the coordinator."""

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Receive from the coordinator."""

    def broadcast(self, payload: bytes) -> bytes:
        """Share the coordinator's payload."""


class Alone:
    """One process that needs no operation: its steps are its own, and all have one deadline."""

    rank = 0
    world_size = 1
    is_coordinator = True

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline

    def phase(
        self,
        phase: Phase,  # noqa: ARG002  # as `Ranks`
        timeout_s: float | None = None,  # noqa: ARG002  # as above
        *,
        total_bytes: int = 0,  # noqa: ARG002  # as above
    ) -> Deadline:
        """Return the deadline."""
        return self._deadline

    def gather(self, payload: bytes) -> list[bytes]:
        """Return one's own."""
        return [payload]

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Return one's own."""
        return payloads[0]

    def broadcast(self, payload: bytes) -> bytes:
        """Return one's own."""
        return payload


class Seal(Protocol):
    """What an output is told as its files become complete; any rank."""

    def __call__(self, number: int, file: FileRef) -> None:
        """Write down that file `number` is complete."""


def no_seal(number: int, file: FileRef) -> None:
    """Write nothing down: the file's name says it all."""
    del number, file


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What files are made with. Both stores end with the deadline.

    path_of: where a file lies in the target. seal: what is told of complete files.
    damage: for a copy of a file that came out otherwise than its checksum says, the error to raise;
    it may read the source.
    """

    source: Readable
    source_store: Store
    target: Store
    options: TransferOptions
    deadline: Deadline
    paces: Paces
    copies: Copies = "auto"
    on_bytes: Callable[[int], None] = lambda _: None
    path_of: Callable[[OutFile], str] = lambda file: file.name
    seal: Seal = no_seal
    damage: Callable[[OutFile], CheckpointError] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What came of a plan; only the coordinator has all of it.

    `kept` are the positions of files that an earlier run had completed, and that were sound.
    """

    files: Mapping[int, FileRef]
    portions: Sequence[Portion]
    kept: frozenset[int]

    def bytes_of(self, what: str) -> int:
        """Return the sum over all portions of `read_bytes`, `sent_bytes` or `copied_bytes`."""
        return sum(getattr(portion, what) for portion in self.portions)


@dataclass(slots=True, kw_only=True)
class _Result:
    """What one rank did: portions; receipts of shared files; files it completed, or kept."""

    portions: list[Portion] = field(default_factory=list)
    receipts: dict[int, Sequence[Part]] = field(default_factory=dict)
    completed: dict[int, FileRef] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


def make(ranks: Ranks, plan: Plan, means: Means, done: Mapping[int, FileRef]) -> Made:
    """Make all files of `plan`; all ranks call it, and the coordinator gets all that was made.

    `done` are the records of the files that the plan has in `checks`. Whoever writes a file alone
    completes it at once; files of several ranks the coordinator completes, when all have reported.
    Raises what the stores raise, naming tensor and rank, and `IntegrityError` for damage of the
    source; then no upload of this run stays open.
    """
    with _Work(ranks, plan, means) as work:
        result = work.write(done)
        results: list[_Result] = [
            pickle.loads(packed)  # noqa: S301  # our own ranks
            for packed in ranks.gather(pickle.dumps(result))
        ]
        files: dict[int, FileRef] = {}
        for one in results:
            files |= one.completed
        files |= work.complete_shared(results)
    return Made(
        files=files,
        portions=[portion for one in results for portion in one.portions],
        kept=frozenset(at for one in results for at in one.kept),
    )


def side_by_side(jobs: Collection[Callable[[], None]], name: str, deadline: Deadline) -> None:
    """Do some small jobs, several at a time; raise the first failure."""
    if jobs:
        with Workers(min(_THREADS, len(jobs)), name=name, deadline=deadline) as workers:
            for job in jobs:
                workers.submit(job)
            workers.drain()


class _Work:
    """One rank at work; a context manager that aborts what is still open when it is left."""

    def __init__(self, ranks: Ranks, plan: Plan, means: Means) -> None:
        self._ranks = ranks
        self._plan = plan
        self._means = means
        self._target = means.target.bounded(
            means.deadline, throttled=means.paces.target.slowed_down
        )
        self._shared: dict[int, Upload] = {}
        self._open: list[Upload] = []
        self._lock = threading.Lock()
        self._result = _Result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CheckpointError):
            # Others must hear why their parts are refused.
            self._means.deadline.failed(error)
        for upload in [*self._open, *self._shared.values()]:
            try:
                upload.abort()
            except Exception as failure:
                # The others have to be aborted, too, and the error that is on its way says more.
                if error is None:
                    raise
                error.add_note(f"Discarding an upload failed too: {failure}")

    def write(self, done: Mapping[int, FileRef]) -> _Result:
        """Check and write what is this rank's."""
        plan, rank, means = self._plan, self._ranks.rank, self._means
        tickets = self._tickets()
        regions = list(plan.regions_of(rank))
        regions += self._damaged({at: done[at] for at in plan.checks if plan.checks[at] == rank})
        if self._ranks.is_coordinator:
            self._write_empty()
        if regions:
            writer = RegionWriter(
                plan,
                source=means.source,
                source_store=means.source_store,
                target_store=self._target,
                options=means.options,
                deadline=means.deadline,
                copies=means.copies,
                on_bytes=means.on_bytes,
                paces=means.paces,
            )
            with self._while_shared(tickets):
                writer.write(regions, partial(self._begin, tickets), self._end)
        return self._result

    def _tickets(self) -> Mapping[int, str]:
        """Begin the uploads that several ranks share; return the tickets that this rank needs."""
        shared = self._plan.shared()
        if not shared:
            return {}
        answers: list[bytes] = []
        if self._ranks.is_coordinator:
            tickets: dict[int, str] = {}

            def begin(file: int) -> None:
                path = self._means.path_of(self._plan.files[file])
                upload = self._shared[file] = self._target.upload(path, copies=True)
                tickets[file] = upload.token()

            jobs = [partial(begin, file) for file in shared]
            side_by_side(jobs, "begin uploads", self._means.deadline)
            for rank in range(self._ranks.world_size):
                own = {file: tickets[file] for file, owners in shared.items() if rank in owners}
                answers.append(pickle.dumps(own))
        mine: dict[int, str] = pickle.loads(self._ranks.scatter(answers))  # noqa: S301  # our ranks
        return mine

    def _damaged(self, checks: Mapping[int, FileRef]) -> list[Region]:
        """Read complete files back; return the regions of those that are not sound any more."""
        means = self._means
        damaged: list[int] = []

        def check(at: int) -> None:
            reference = checks[at]
            path = means.path_of(self._plan.files[at])
            ranges = RangeReader(
                means.target, means.options, means.deadline, pacer=means.paces.target
            )
            is_known = reference.crc32c != UNKNOWN_CRC
            if is_known and not has_checksum(ranges, dataclasses.replace(reference, path=path)):
                log.warning("%s is damaged, and made again.", reference.path)
                damaged.append(at)
                return
            self._result.kept.add(at)
            self._result.completed[at] = reference
            means.on_bytes(reference.size_bytes)

        side_by_side([partial(check, at) for at in checks], "check files", means.deadline)
        return [self._plan.whole_region(at, self._ranks.rank) for at in sorted(damaged)]

    def _write_empty(self) -> None:
        for at, file in enumerate(self._plan.files):
            if not file.size_bytes and at not in self._plan.checks:
                self._target.put(self._means.path_of(file), b"")
                self._completed(at, 0)

    def _begin(self, tickets: Mapping[int, str], region: Region) -> Upload:
        if region.file in self._shared:
            return self._shared[region.file]
        path = self._means.path_of(self._plan.files[region.file])
        ticket = tickets.get(region.file)
        if ticket is None:
            upload = self._target.upload(path, copies=True)
        else:
            upload = self._target.join(path, ticket)
        self._open.append(upload)
        return upload

    def _end(self, region: Region, upload: Upload, portion: Portion) -> None:
        """Take over a region that was written; complete its file if nobody else writes it."""
        with self._lock:
            self._result.portions.append(portion)
        if region.file in self._shared:
            return
        if portion.stop - portion.start == region.file_bytes:
            self._check(region.file, portion.crc32c)
            upload.complete(region.file_bytes)
            self._completed(region.file, portion.crc32c)
        else:
            receipts = upload.receipts()
            with self._lock:
                self._result.receipts[region.file] = receipts
        with self._lock:
            self._open.remove(upload)

    @contextmanager
    def _while_shared(self, tickets: Mapping[int, str]) -> Iterator[None]:
        """Raise why the coordinator discarded a shared upload, where it did."""
        try:
            yield
        except StorageError as error:
            if error.kind == "not-found" and tickets:
                self._means.deadline.sleep(_WORD_S)
                self._means.deadline.check("Writing to a file of several ranks")
            raise

    def complete_shared(self, results: Sequence[_Result]) -> Mapping[int, FileRef]:
        """Complete the files that several ranks wrote, all of which have reported."""
        portions: dict[int, list[Portion]] = {}
        for one in results:
            for portion in one.portions:
                portions.setdefault(portion.file, []).append(portion)

        def complete(at: int, upload: Upload) -> None:
            parts = sorted(portions[at], key=lambda one: one.start)
            crcs = [one.crc32c for one in parts if one.crc32c is not None]
            crc32c = None
            if len(crcs) == len(parts):
                crc32c = combine_many(crcs, [one.stop - one.start for one in parts])
            self._check(at, crc32c)
            receipts = [part for one in results for part in one.receipts.get(at, ())]
            upload.complete(self._plan.files[at].size_bytes, receipts=receipts)
            self._completed(at, crc32c)

        jobs = [partial(complete, at, upload) for at, upload in self._shared.items()]
        side_by_side(jobs, "complete files", self._means.deadline)
        done = {at: self._result.completed[at] for at in self._shared}
        self._shared.clear()
        return done

    def _check(self, at: int, crc32c: int | None) -> None:
        """Raise if a file that has to have some checksum was not written with it."""
        file, damage = self._plan.files[at], self._means.damage
        if file.crc32c in {None, crc32c}:
            return
        if damage is not None:
            raise damage(file)
        raise IntegrityError(
            f"{file.name} does not have the checksum that it was written with.",
            path=file.name,
            offset=0,
            next_step="Restore the file from a copy.",
        )

    def _completed(self, at: int, crc32c: int | None) -> None:
        file = self._plan.files[at]
        reference = FileRef(
            path=file.name,
            size_bytes=file.size_bytes,
            crc32c=UNKNOWN_CRC if crc32c is None else crc32c,
        )
        if crc32c is not None:
            self._means.seal(file.number, reference)
        with self._lock:
            self._result.completed[at] = reference
        self._means.deadline.ended_file()


UNKNOWN_CRC = -1
"""Stands where nobody knows the checksum of a file that was copied."""
