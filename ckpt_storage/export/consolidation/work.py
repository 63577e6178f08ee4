"""What one rank does with its regions: uploads begun, shared and joined, written, completed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.crc import combine_many
from ckpt_storage.format.documents import FileRef
from ckpt_storage.store.backend import Part
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.workers import Workers

from .executors import Portion, RegionWriter
from .folder import write_record
from .plan import ExportPlan, Region

_WAITING = 4
"""Files that may be waiting to become durable: each keeps its descriptor open."""

_WORD_S = 3.0
"""How long the reason may take to arrive for which a shared upload was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """What one rank wrote: portions; receipts of files kept by others; files it completed."""

    portions: tuple[Portion, ...]
    receipts: Mapping[int, Sequence[Part]]
    completed: Mapping[int, FileRef]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A file that its keeper may complete: all ranks reported, and this is its checksum."""

    file: int
    crc32c: int
    receipts: Sequence[Part]


def keepers(plan: ExportPlan) -> dict[int, int]:
    """Return, for each file that several ranks write, the rank that begins and completes it."""
    owners: dict[int, list[int]] = {}
    for region in plan.regions:
        owners.setdefault(region.file, []).append(region.owner)
    return {file: ranks[0] for file, ranks in owners.items() if len(ranks) > 1}


def completions(plan: ExportPlan, results: Sequence[RankResult]) -> dict[int, list[Completion]]:
    """Return what each keeper completes, given what all ranks wrote; coordinator only.

    Raises `CheckpointError` unless the portions are all of every such file.
    """
    portions: dict[int, list[Portion]] = {}
    receipts: dict[int, list[Part]] = {}
    for result in results:
        for portion in result.portions:
            portions.setdefault(portion.file, []).append(portion)
        for file, told in result.receipts.items():
            receipts.setdefault(file, []).extend(told)
    found: dict[int, list[Completion]] = {}
    for file, keeper in keepers(plan).items():
        crc32c = whole_crc(plan, file, portions.get(file, []))
        one = Completion(file=file, crc32c=crc32c, receipts=receipts.get(file, []))
        found.setdefault(keeper, []).append(one)
    return found


def whole_crc(plan: ExportPlan, file: int, portions: Sequence[Portion]) -> int:
    """Return the CRC-32C of a file, combined; raises unless `portions` are all of it once."""
    ordered = sorted(portions, key=lambda portion: portion.start)
    end = 0
    for portion in ordered:
        if portion.start != end:
            break
        end = portion.stop
    weight = plan.files[file]
    lengths = [portion.stop - portion.start for portion in ordered]
    if end != weight.size_bytes or sum(lengths) != weight.size_bytes:
        raise CheckpointError(
            f"The ranks wrote {weight.name} without a gap up to byte {end} of "
            f"{weight.size_bytes}; it was not completed.",
            path=weight.name,
            phase="consolidate",
            next_step="Consolidate again; this is a bug.",
        )
    return combine_many([portion.crc32c for portion in ordered], lengths)


class RankWork:
    """The uploads of one rank; a context manager that aborts what was not completed."""

    def __init__(self, plan: ExportPlan, rank: int, store: Store, deadline: Deadline) -> None:
        self._plan = plan
        self._rank = rank
        self._store = store
        self._deadline = deadline
        self._keepers = keepers(plan)
        self._kept: dict[int, Upload] = {}
        self._open: list[Upload] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, CheckpointError):
            # Before other ranks meet an upload that is gone, they must be able to know why.
            self._deadline.failed(error)
        left = [*self._open, *self._kept.values()]
        for upload in left:
            # The error that is on its way says more.
            with contextlib.suppress(CheckpointError):
                upload.abort()

    def tickets(self) -> dict[int, str]:
        """Begin the uploads that this rank keeps for several; return their tickets by file."""
        for file, keeper in self._keepers.items():
            if keeper == self._rank:
                self._kept[file] = self._store.upload(self._plan.files[file].name, copies=True)
        return {file: upload.ticket() for file, upload in self._kept.items()}

    def write(self, writer: RegionWriter, tickets: Mapping[int, str]) -> RankResult:
        """Write all regions of this rank; complete the files that it writes alone."""
        portions: list[Portion] = []
        receipts: dict[int, Sequence[Part]] = {}
        completed: dict[int, FileRef] = {}

        def complete(upload: Upload, region: Region, crc32c: int) -> None:
            upload.complete(region.file_bytes)
            self._open.remove(upload)
            completed[region.file] = self._record(region.file, crc32c)

        def leave(upload: Upload, region: Region) -> None:
            with self._while_kept(region):
                receipts[region.file] = upload.receipts()
            self._open.remove(upload)

        # What is written becomes durable while the next region is being written.
        with Workers(
            1, name="complete weight files", deadline=self._deadline, limit=_WAITING
        ) as ends:
            for region in self._plan.regions_of(self._rank):
                file = region.file
                if file in self._kept:
                    portions.append(writer.write(region, self._kept[file]))
                elif file in self._keepers:
                    with self._while_kept(region):
                        joined = self._join(region, tickets[file])
                        portions.append(writer.write(region, joined))
                    ends.submit(partial(leave, joined, region))
                else:
                    own = self._begin(region)
                    portion = writer.write(region, own)
                    portions.append(portion)
                    ends.submit(partial(complete, own, region, portion.crc32c))
            ends.drain()
        return RankResult(portions=tuple(portions), receipts=receipts, completed=completed)

    def _begin(self, region: Region) -> Upload:
        name = self._plan.files[region.file].name
        upload = self._store.upload(name, copies=True)
        self._open.append(upload)
        return upload

    def _join(self, region: Region, ticket: str) -> Upload:
        name = self._plan.files[region.file].name
        upload = self._store.join(name, ticket)
        self._open.append(upload)
        return upload

    @contextlib.contextmanager
    def _while_kept(self, region: Region) -> Iterator[None]:
        """Raise why the rank that keeps a shared upload discarded it, where it did."""
        try:
            yield
        except StorageError as error:
            if error.kind == "not-found":
                self._deadline.sleep(_WORD_S)
                self._deadline.check(f"Writing to {self._plan.files[region.file].name}")
            raise

    def complete(self, orders: Sequence[Completion]) -> dict[int, FileRef]:
        """Complete the files that this rank keeps, all ranks having reported."""
        completed = {}
        for order in orders:
            upload = self._kept[order.file]
            upload.complete(
                self._plan.files[order.file].size_bytes,
                receipts=order.receipts,
            )
            del self._kept[order.file]
            completed[order.file] = self._record(order.file, order.crc32c)
        return completed

    def _record(self, file: int, crc32c: int) -> FileRef:
        weight = self._plan.files[file]
        reference = FileRef(path=weight.name, size_bytes=weight.size_bytes, crc32c=crc32c)
        write_record(self._store, self._plan.fingerprint, weight.number, reference)
        return reference
