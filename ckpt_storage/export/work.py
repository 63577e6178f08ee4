"""What all ranks do to make the files of one plan: checked, written, sealed, named."""

from __future__ import annotations

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
from ckpt_storage.options import Phase
from ckpt_storage.store.backend import Part
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.ranges import RangeReader
from ckpt_storage.transfer.workers import Workers

from .output import Made, Output, Sealed, Site, Taken
from .plan import Region
from .reads import Readable
from .write import Portion, RegionWriter

log = logging.getLogger("ckpt_storage")

_THREADS = 8

_WORD_S = 3.0
"""How long the reason may take to arrive for which a shared upload was discarded."""

UNKNOWN_CRC = -1
"""Stands where nobody knows the checksum of a file that was copied."""


class Ranks(Protocol):
    """What an output needs of the operation that it is made in: an `operation.Operation`."""

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


@dataclass(slots=True, kw_only=True)
class _Result:
    """What one rank did: portions; receipts of shared files; files it sealed, named or kept."""

    portions: list[Portion] = field(default_factory=list)
    receipts: dict[int, Sequence[Part]] = field(default_factory=dict)
    sealed: dict[int, Sealed] = field(default_factory=dict)
    kept: set[int] = field(default_factory=set)


def make(
    ranks: Ranks,
    site: Site,
    source: Readable,
    output: Output,
    taken: Taken,
    *,
    on_bytes: Callable[[int], None],
    before_names: Callable[[], None] = lambda: None,
) -> Made:
    """Make all files of `output.plan`; all ranks call it, and the coordinator gets what was made.

    Whoever writes a file alone seals it; what several ranks wrote, and what gets its name with all
    others, the coordinator completes when all have reported, after `before_names`. Raises what the
    stores raise, naming tensor and rank, and `IntegrityError` for damage of the source; then no
    upload of this run stays open but those of sealed files.
    """
    with _Work(ranks, site, output, on_bytes) as work:
        result = work.write(source, taken)
        results: list[_Result] = [
            pickle.loads(packed)  # noqa: S301  # our own ranks
            for packed in ranks.gather(pickle.dumps(result))
        ]
        files: Mapping[int, FileRef] = {}
        if ranks.is_coordinator:
            files = work.finish(results, taken, before_names)
    return Made(
        files=files,
        portions=[portion for one in results for portion in one.portions],
        kept=frozenset(at for one in results for at in one.kept).union(taken.sealed),
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

    def __init__(
        self, ranks: Ranks, site: Site, output: Output, on_bytes: Callable[[int], None]
    ) -> None:
        self._ranks = ranks
        self._site = site
        self._output = output
        self._plan = output.plan
        self._on_bytes = on_bytes
        able = site.target.capabilities
        self._is_together = output.is_together and able.tokens_travel and able.lists_uploads
        self._shared: dict[int, Upload] = {}
        self._open: list[Upload] = []
        self._lock = threading.Lock()
        self._result = _Result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, CheckpointError):
            # Others must hear why their parts are refused.
            self._site.deadline.failed(error)
        for upload in [*self._open, *self._shared.values()]:
            try:
                upload.abort()
            except Exception as failure:
                # The others have to be aborted, too, and the error that is on its way says more.
                if error is None:
                    raise
                error.add_note(f"Discarding an upload failed too: {failure}")

    def write(self, source: Readable, taken: Taken) -> _Result:
        """Check and write what is this rank's."""
        plan, rank = self._plan, self._ranks.rank
        tokens = self._tokens()
        regions = list(plan.regions_of(rank))
        regions += self._damaged({at: taken.done[at] for at in plan.checks_of(rank)})
        if self._ranks.is_coordinator:
            for at, file in enumerate(plan.files):
                if not file.size_bytes and at not in taken.done:
                    self._site.target.put(file.name, b"")
                    self._sealed(Sealed(file=self._reference(at, 0)), at)
            for at, sealed in taken.sealed.items():
                self._on_bytes(sealed.file.size_bytes)
                log.info("%s was sealed by an earlier run", plan.files[at].name)
        if regions:
            writer = RegionWriter(
                plan,
                source=source,
                source_store=self._site.source,
                target_store=self._site.target,
                options=self._site.options,
                deadline=self._site.deadline,
                copies=self._site.setting.copies,
                on_bytes=self._on_bytes,
                paces=self._site.paces,
            )
            with self._while_shared(tokens):
                writer.write(regions, partial(self._begin, tokens), self._end)
        return self._result

    def _tokens(self) -> Mapping[int, str]:
        """Begin the uploads that several ranks share; return the tokens that this rank needs."""
        shared = self._plan.shared()
        if not shared:
            return {}
        answers: list[bytes] = []
        if self._ranks.is_coordinator:
            tokens: dict[int, str] = {}

            def begin(file: int) -> None:
                path = self._plan.files[file].name
                upload = self._shared[file] = self._site.target.upload(path, copies=True)
                tokens[file] = upload.token()

            side_by_side([partial(begin, at) for at in shared], "begin uploads", self._deadline)
            for rank in range(self._ranks.world_size):
                own = {file: tokens[file] for file, owners in shared.items() if rank in owners}
                answers.append(pickle.dumps(own))
        mine: dict[int, str] = pickle.loads(self._ranks.scatter(answers))  # noqa: S301  # our ranks
        return mine

    @property
    def _deadline(self) -> Deadline:
        return self._site.deadline

    def _damaged(self, checks: Mapping[int, FileRef]) -> list[Region]:
        """Read complete files back; return the regions of those that are not sound any more."""
        damaged: list[int] = []

        def check(at: int) -> None:
            reference = checks[at]
            if not self._is_sound(reference):
                log.warning("%s is damaged, and made again.", reference.path)
                damaged.append(at)
                return
            with self._lock:
                self._result.kept.add(at)
                self._result.sealed[at] = Sealed(file=reference)
            self._on_bytes(reference.size_bytes)

        side_by_side([partial(check, at) for at in checks], "check files", self._deadline)
        return [self._plan.whole_region(at, self._ranks.rank) for at in sorted(damaged)]

    def _is_sound(self, file: FileRef) -> bool:
        site = self._site
        ranges = RangeReader(site.target, site.options, site.deadline, pacer=site.paces.target)
        return file.crc32c == UNKNOWN_CRC or has_checksum(ranges, file)

    def _begin(self, tokens: Mapping[int, str], region: Region) -> Upload:
        if region.file in self._shared:
            return self._shared[region.file]
        path, target = self._plan.files[region.file].name, self._site.target
        token = tokens.get(region.file)
        upload = target.join(path, token) if token else target.upload(path, copies=True)
        self._open.append(upload)
        if self._is_together and not token:
            # Begun at once: a small file is not held in memory until the end.
            upload.token()
        return upload

    def _end(self, region: Region, upload: Upload, portion: Portion) -> None:
        """Take over a region that was written; seal its file if nobody else writes it."""
        with self._lock:
            self._result.portions.append(portion)
        at = region.file
        if at in self._shared:
            return
        if portion.stop - portion.start == region.file_bytes:
            self._check(at, portion.crc32c)
            reference = self._reference(at, portion.crc32c)
            if self._is_together and portion.crc32c is not None:
                sealed = Sealed(
                    file=reference,
                    token=upload.token(),
                    write_id=upload.write_id,
                    parts=upload.receipts(),
                )
                self._sealed(sealed, at)
                upload.hand_over()
            else:
                upload.complete(region.file_bytes)
                self._sealed(Sealed(file=reference), at)
        else:
            receipts = upload.receipts()
            with self._lock:
                self._result.receipts[at] = receipts
        with self._lock:
            self._open.remove(upload)

    @contextmanager
    def _while_shared(self, tokens: Mapping[int, str]) -> Iterator[None]:
        """Raise why the coordinator discarded a shared upload, where it did."""
        try:
            yield
        except StorageError as error:
            if error.kind == "not-found" and tokens:
                self._deadline.sleep(_WORD_S)
                self._deadline.check("Writing to a file of several ranks")
            raise

    def finish(
        self, results: Sequence[_Result], taken: Taken, before_names: Callable[[], None]
    ) -> dict[int, FileRef]:
        """Give names to all files that have none, side by side; return all; coordinator only."""
        sealed = {at: one for result in results for at, one in result.sealed.items()}
        portions: dict[int, list[Portion]] = {}
        for result in results:
            for portion in result.portions:
                portions.setdefault(portion.file, []).append(portion)
        crcs = {at: _combined(portions[at]) for at in self._shared}
        for at, crc32c in crcs.items():
            self._check(at, crc32c)
        before_names()

        def complete(at: int, upload: Upload) -> None:
            receipts = [part for one in results for part in one.receipts.get(at, ())]
            upload.complete(self._plan.files[at].size_bytes, receipts=receipts)
            self._sealed(Sealed(file=self._reference(at, crcs[at])), at)

        def name(at: int, one: Sealed) -> None:
            upload = self._site.target.take_over(one.file.path, one.token, one.write_id, one.parts)
            upload.complete(one.file.size_bytes)
            if at in taken.sealed and not self._is_sound(one.file):
                raise IntegrityError(
                    f"{one.file.path}, which an earlier run had written, is damaged.",
                    path=one.file.path,
                    offset=0,
                    next_step="Call it again: the file is made anew then.",
                )

        waiting = {at: one for at, one in sealed.items() if one.token} | dict(taken.sealed)
        jobs = [
            *(partial(complete, at, upload) for at, upload in self._shared.items()),
            *(partial(name, at, one) for at, one in waiting.items()),
        ]
        side_by_side(jobs, "complete files", self._deadline)
        self._shared.clear()
        return {at: one.file for at, one in {**sealed, **waiting, **self._result.sealed}.items()}

    def _check(self, at: int, crc32c: int | None) -> None:
        """Raise if a file that has to have some checksum was not written with it."""
        file = self._plan.files[at]
        if file.crc32c not in {None, crc32c}:
            raise self._output.damage(file)

    def _reference(self, at: int, crc32c: int | None) -> FileRef:
        file = self._plan.files[at]
        crc = UNKNOWN_CRC if crc32c is None else crc32c
        return FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=crc)

    def _sealed(self, sealed: Sealed, at: int) -> None:
        if sealed.file.crc32c != UNKNOWN_CRC:
            self._output.seal(self._plan.files[at].number, sealed)
        with self._lock:
            self._result.sealed[at] = sealed
        self._deadline.ended_file()


def _combined(portions: Sequence[Portion]) -> int | None:
    parts = sorted(portions, key=lambda one: one.start)
    crcs = [one.crc32c for one in parts if one.crc32c is not None]
    if len(crcs) < len(parts):
        return None
    return combine_many(crcs, [one.stop - one.start for one in parts])
