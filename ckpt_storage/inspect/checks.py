"""The documents of a checkpoint and of its exports, each held against the others."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckpt_storage.commit import slotlog, stockfooter
from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError, StorageError
from ckpt_storage.format.commit_record import SlotRecord, split_footer, with_footer
from ckpt_storage.format.coverage import covers_exactly
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.format.documents import MOST_SLOT_BYTES, FileRef, unseal
from ckpt_storage.format.exports import (
    DEFAULT_FOLDER,
    DOCUMENTS,
    INDEX_NAME,
    NAMES_PATH,
    ExportRecord,
    IndexTag,
    export_path,
)
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import STOCK_METADATA, is_blocker, markers_of
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.source.foreign import in_progress
from ckpt_storage.source.model import Source
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace
from ckpt_storage.transfer.ranges import RangeRead, RangeReader

log = logging.getLogger("ckpt_storage")

RESTORE = "Restore the file from a copy, or load another checkpoint."

_PUBLISH = "Load it once with the right to write, or save again: either publishes it."
_MAKE_ANEW = "Delete the file and consolidate again; it is made anew."
_RECORD_ANEW = "Consolidate again: the record is written anew."
_OURS = {"commits", "saves", DOCUMENTS}
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, or to be known: in which file, of which rank, tensor and byte."""

    message: str
    next_step: str
    file: str | None = None
    rank: int | None = None
    fqn: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportStatus:
    """An export that was found: its folder below the URL, "" for the URL itself.

    `is_stale`: it is of another save than the checkpoint's head. `file_count` and `size_bytes`
    are of its weight files.
    """

    path: str
    save_id: str | None
    is_stale: bool
    file_count: int
    size_bytes: int


class Findings:
    """Problems, collected instead of raised at the first, and what of a checkpoint was checked.

    `is_part`: of one of several processes, which ask together whether the checkpoint can be loaded.
    """

    def __init__(self, *, is_part: bool = False) -> None:
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []
        self.file_count = 0
        self.checked_bytes = 0
        self._is_part = is_part

    @property
    def is_settled(self) -> bool:
        """Whether more problems would change nothing."""
        return self._is_part and bool(self.problems)

    def add(
        self, error: CheckpointError, *, path: str | None = None, rank: int | None = None
    ) -> None:
        """Add what `error` says to the problems; `path` if it names the file in another way."""
        step = error.next_step or "Load another checkpoint."
        problem = Problem(
            message=str(error).removesuffix(step).strip(),
            next_step=step,
            file=path or error.path,
            rank=rank if error.rank is None else error.rank,
            fqn=getattr(error, "fqn", None),
            offset=getattr(error, "offset", None),
        )
        self.problems.append(problem)

    @contextmanager
    def noting(self, path: str | None = None, rank: int | None = None) -> Iterator[None]:
        """End the block at damage and absence, and add them to the problems.

        Raises what is no finding: a storage that does not answer; and, to a part, what this
        release is too old for, because no other checkpoint is better.
        """
        try:
            yield
        except StorageError as error:
            if error.kind != "not-found":
                raise
            self.add(error, path=path, rank=rank)
        except CheckpointError as error:
            if self._is_part and not isinstance(error, IntegrityError):
                raise
            self.add(error, path=path, rank=rank)


def check_markers(store: Store, save_id: str, findings: Findings) -> None:
    """Check that the markers of a save, where there are any, are sealed as they were written."""
    for path in markers_of(save_id):
        with findings.noting(path):
            found = slotlog.read_if_there(store, path, most_bytes=MOST_SLOT_BYTES)
            if found is not None:
                findings.file_count += 1
                unseal(found.data, path=path)


def check_coverage(head: SlotRecord, manifest: Manifest, findings: Findings) -> None:
    """Check that chunks hold every element once; where they form a grid they do."""
    exact: dict[tuple[int, tuple[int, ...]], bool] = {}
    for tensor in manifest.tensors.values():
        # Tensors that are cut alike share one list.
        key = (id(tensor.chunks), tensor.shape)
        if key not in exact:
            boxes = [box for box, _ in tensor.chunks or ()]
            exact[key] = not boxes or covers_exactly(tensor.shape, boxes).is_exact
        if not exact[key]:
            error = IntegrityError(
                f"The chunks of {tensor.fqn} do not cover its shape {list(tensor.shape)} exactly.",
                fqn=tensor.fqn,
                path=head.manifest.path if head.manifest else None,
                offset=0,
            )
            findings.add(error)


def check_rank(
    manifest: Manifest, document: RankManifest, *, rank: int, listed: Mapping[str, FileRef]
) -> None:
    """Check that a rank manifest is the one of `rank`, and names the files that are `listed`.

    Raises `IntegrityError` if the two documents do not say the same.
    """
    held = {file.path: file.ref() for file in document.files}
    is_its_own = (document.rank, document.save_id) == (rank, manifest.save_id)
    if not is_its_own or listed != held:
        path = manifest.ranks[rank].path
        raise IntegrityError(
            f"{path} and the manifest do not describe the same files.",
            path=path,
            rank=rank,
            offset=0,
            next_step=RESTORE,
        )


def note_unsafe(document: RankManifest, *, path: str, findings: Findings) -> None:
    """Note the values that only pickle can hold, as the rank that saved them found."""
    findings.notes += [
        Problem(
            message=f"{fqn} is a value ({named:.200}) that only pickle can hold; load refuses it.",
            next_step="Allow its types by torch.serialization.add_safe_globals, or, if you trust "
            "who wrote it, load with unsafe_pickle=True.",
            file=path,
            rank=document.rank,
            fqn=fqn,
        )
        for fqn, named in document.unsafe.items()
    ]


def check_places(source: Source, findings: Findings) -> None:
    """Check that the rank manifests hold every chunk and blob that the manifest promises."""
    for key in value_keys(source):
        with findings.noting():
            source.place(*key)


def check_stock(store: Store, head: SlotRecord, manifest: Manifest, findings: Findings) -> None:
    """Check `.metadata` and the copy that it is made from, byte by byte."""
    if manifest.stock is None:
        return
    findings.file_count += 2
    with findings.noting(manifest.stock.path):
        copy = slotlog.read_referenced(store, manifest.stock, most_bytes=MOST_STOCK_BYTES)
        pickled = split_footer(copy)[0]
        expected = with_footer(pickled, slot=head.slot, save_id=manifest.save_id)
        with findings.noting(STOCK_METADATA):
            current = slotlog.read_stock(store)
            found = None if current is None else current.data
            _compare_stock(store, head, found, expected)


def _compare_stock(store: Store, head: SlotRecord, found: bytes | None, expected: bytes) -> None:
    """Raise `IntegrityError` if `.metadata` is not the one of the head."""
    if found == expected:
        return
    what = ".metadata is missing; torch's own readers find no checkpoint."
    step, offset = _PUBLISH, 0
    if found is not None:
        pairs = enumerate(zip(found, expected, strict=False))
        shorter = min(len(found), len(expected))
        offset = next((at for at, (a, b) in pairs if a != b), shorter)
        named = split_footer(found)[1]
        what = ".metadata is damaged, or another program wrote it: it is not stock.metadata."
        step = "Delete .metadata and load the checkpoint once with the right to write."
        try:
            stockfooter.check_newest(store, head, found)
        except FormatError as newer:
            step = newer.next_step or ""
            what = str(newer).removesuffix(step).strip()
        else:
            if named is not None and named.save_id != head.save_id:
                what = f".metadata shows save {named.save_id}; the head is {head.save_id}."
                step = _PUBLISH
    raise IntegrityError(what, path=STOCK_METADATA, offset=offset, next_step=step)


def check_foreign(store: Store, source: Source, findings: Findings) -> None:
    """Check that the files of another writer are there and long enough; they bear no checksums."""
    last: dict[str, ChunkPlace] = {}
    for place in source.places(value_keys(source)):
        known = last.setdefault(place.path, place)
        if place.start + place.size_bytes > known.start + known.size_bytes:
            last[place.path] = place
    for path, place in last.items():
        findings.file_count += 1
        end = place.start + place.size_bytes
        try:
            size_bytes = store.stat(path).size_bytes
        except StorageError as error:
            missing = source.explain_missing(place)
            if error.kind != "not-found" or not isinstance(missing, CheckpointError):
                raise
            findings.add(missing)
            continue
        if size_bytes < end:
            short = IntegrityError(
                f"{path} has {size_bytes} bytes; {place.fqn} ends at byte {end}.",
                path=path,
                fqn=place.fqn,
                offset=size_bytes,
                next_step=RESTORE,
            )
            findings.add(short)


class ExportCheck:
    """Checks what was consolidated into folders directly below a root, or into the root itself.

    `deep` reads every byte of the weight files; otherwise their lengths count.
    """

    def __init__(self, ranges: RangeReader, findings: Findings, *, deep: bool) -> None:
        self._ranges = ranges
        self._store = ranges.store
        self._findings = findings
        self._deep = deep

    def run(self, head: str | None) -> list[ExportStatus]:
        """Check all exports. `head` is the save id of the checkpoint, None without one.

        Raises `StorageError` for a storage that does not answer.
        """
        found = []
        for folder in self._folders():
            status = self._check(folder, head)
            if status is not None:
                found.append(status)
                # The weight files, the index and the record.
                self._findings.file_count += status.file_count + 2
                self._findings.checked_bytes += status.size_bytes if self._deep else 0
        return found

    def _folders(self) -> list[str]:
        try:
            entries = self._store.list("", recursive=False)
        except StorageError as error:
            # Without the right to list only the default place can be looked at.
            if error.kind not in {"not-found", "permission"}:
                raise
            return ["", DEFAULT_FOLDER]
        folders = [entry.path.rstrip("/") for entry in entries if entry.path.endswith("/")]
        return ["", *(folder for folder in folders if folder not in _OURS)]

    def _check(self, folder: str, head: str | None) -> ExportStatus | None:
        """Check one folder, once more if another export was published meanwhile."""
        problems, prefix = self._findings.problems, f"{folder}/" if folder else ""
        before_count, index = len(problems), self._index(prefix)
        for _ in range(_ROUNDS):
            del problems[before_count:]
            if index is None:
                return None
            with self._noting(f"{prefix}{INDEX_NAME}"):
                if is_blocker(index):
                    raise in_progress(f"{self._store.url}/{folder}".rstrip("/"))
                tag = IndexTag.of(index)
                if tag is None and slotlog.is_there(self._store, f"{prefix}{NAMES_PATH}"):
                    what = "is damaged, or another program wrote it: it names no export of ours"
                    raise _damage(f"{prefix}{INDEX_NAME}", what)
            if len(problems) > before_count or tag is None:
                return None
            files = self._files(prefix, tag, index)
            for file in files:
                self._check_file(f"{prefix}{file.path}", file)
            before, index = index, index if len(problems) == before_count else self._index(prefix)
            if index == before:
                return ExportStatus(
                    path=folder,
                    save_id=tag.save_id,
                    is_stale=None not in (head, tag.save_id) and head != tag.save_id,
                    file_count=len(files) or len(tag.names),
                    size_bytes=sum(file.size_bytes for file in files),
                )
        return None

    def _index(self, prefix: str) -> bytes | None:
        try:
            found = slotlog.read_if_there(self._store, f"{prefix}{INDEX_NAME}")
        except StorageError as error:
            # Some storages answer so for what is not there to those who may not list.
            if error.kind != "permission":
                raise
            log.info("Whether %s holds an export cannot be told: %s", prefix or ".", error)
            return None
        return None if found is None else found.data

    def _files(self, prefix: str, tag: IndexTag, index: bytes) -> Sequence[FileRef]:
        """Return the weight files that the record of an export names; none if it is damaged."""
        path = f"{prefix}{export_path(tag.fingerprint)}"
        record: ExportRecord | None = None
        with self._noting(path):
            found = slotlog.read_if_there(self._store, path)
            if found is None:
                raise _damage(path, "is missing: it is the record of the export", _RECORD_ANEW)
            read = ExportRecord.decode(found.data, path=path)
            if read.fingerprint != tag.fingerprint:
                what = f"is the record of another export ({read.fingerprint})"
                raise _damage(path, what, _RECORD_ANEW)
            record = read
        if record is None:
            return ()
        path = f"{prefix}{INDEX_NAME}"
        with self._noting(path):
            try:
                slotlog.check_document(index, record.index)
            except IntegrityError as error:
                error.next_step = _MAKE_ANEW
                raise
        with self._noting(path):
            if tag.names - {file.path for file in record.files}:
                raise _damage(path, "names files that the record of the export does not have")
        return record.files

    def _check_file(self, path: str, file: FileRef) -> None:
        with self._noting(path):
            size_bytes = self._store.stat(path).size_bytes
            if size_bytes != file.size_bytes:
                what = f"has {size_bytes} bytes; {file.size_bytes} were written"
                raise _damage(path, what, offset=min(size_bytes, file.size_bytes))
            at = FileRef(path=path, size_bytes=file.size_bytes, crc32c=file.crc32c)
            if self._deep and not has_checksum(self._ranges, at):
                what = f"is damaged: it does not have the checksum {file.crc32c:08x} of its writer"
                raise _damage(path, what)

    @contextmanager
    def _noting(self, path: str) -> Iterator[None]:
        """Do as `Findings.noting`; what is absent can be made anew."""
        with self._findings.noting(path):
            try:
                yield
            except StorageError as error:
                error.next_step = _MAKE_ANEW
                raise


def _damage(path: str, what: str, step: str = _MAKE_ANEW, offset: int = 0) -> IntegrityError:
    return IntegrityError(f"{path} {what}.", path=path, offset=offset, next_step=step)


def has_checksum(ranges: RangeReader, file: FileRef) -> bool:
    """Return whether a file of the length that `file` says has its CRC-32C; reads all of it."""
    step, size = ranges.options.part_bytes, file.size_bytes
    starts = range(0, size, step)
    crcs: dict[int, int] = {}

    def take(start: int, view: memoryview) -> None:
        crcs[start] = crc32c_of(view)

    reads = [
        RangeRead(
            path=file.path,
            start=start,
            stop=min(start + step, size),
            done=partial(take, start),
            file_bytes=size,
        )
        for start in starts
    ]
    ranges.run(reads)
    lengths = [min(step, size - start) for start in starts]
    return combine_many([crcs[start] for start in starts], lengths) == file.crc32c
