"""What is wrong with a checkpoint, as values; and the checks of all but its shard files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ckpt_storage.commit import publishing
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError, StorageError
from ckpt_storage.format.commit_record import SlotRecord, split_footer, with_footer
from ckpt_storage.format.crc import combine_many, crc32c_of
from ckpt_storage.format.documents import DAMAGED, RESTORE, FileRef
from ckpt_storage.format.exports import (
    DEFAULT_FOLDER,
    DOCUMENTS,
    GUARD_NAME,
    NAMES_PATH,
    ExportRecord,
    IndexTag,
    export_path,
)
from ckpt_storage.format.manifest import Manifest
from ckpt_storage.format.names import INDEX_NAME, STOCK_METADATA, slot_path
from ckpt_storage.format.stock_metadata import MAX_STOCK_BYTES
from ckpt_storage.source.foreign import in_progress
from ckpt_storage.source.model import Source, value_keys
from ckpt_storage.store.backend import Content
from ckpt_storage.store.store import Store
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.ranges import RangeRead, RangeReader, ignore

log = logging.getLogger("ckpt_storage")

_PUBLISH = "Load it once with the right to write, or save again: either publishes it."
_MAKE_ANEW = "Delete it if it is there, and consolidate again: it is made anew."
_NO_EXPORTS = {"commits", "saves", DOCUMENTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem or a note: its file, rank, value and byte, as far as they are known."""

    message: str
    next_step: str
    file: str | None = None
    rank: int | None = None
    fqn: str | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportStatus:
    """An export: its folder below the URL, "" for the URL itself.

    `is_stale`: it was made from another save than the head. `is_unfinished`: it is still being
    written, or its writer died, and readers ignore it; its save and files are unknown then.
    `file_count` and `size_bytes` are those of its weight files.
    """

    path: str
    save_id: str | None
    is_stale: bool = False
    is_unfinished: bool = False
    file_count: int
    size_bytes: int


@dataclass(slots=True)
class Findings:
    """The reader and the results of one check; thread-safe. If strict, the first problem raises."""

    ranges: RangeReader
    is_deep: bool
    is_strict: bool = False
    on_bytes: Callable[[int], None] = ignore
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    file_count: int = 0
    checked_bytes: int = 0
    link_counts: dict[str, int] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The store of the checkpoint."""
        return self.ranges.store

    def add(
        self, error: CheckpointError, *, path: str | None = None, rank: int | None = None
    ) -> None:
        """Add `error` to the problems; `path` and `rank` replace those of the error."""
        step = error.next_step or "Load another checkpoint."
        message = str(error).removesuffix(step).strip()
        if link_count := self.link_counts.get(path or error.path or ""):
            message += (
                f" The file has {link_count} names (hard links): other checkpoints that share it "
                "are damaged, too."
            )
        rank = rank if error.rank is None else error.rank
        fqn, offset = (getattr(error, name, None) for name in ("fqn", "offset"))
        place: dict[str, Any] = {"rank": rank, "fqn": fqn, "offset": offset, "next_step": step}
        if self.is_strict:
            raise IntegrityError(message, path=path or error.path, **place) from error
        self.problems.append(Problem(message=message, file=path or error.path, **place))

    def size_of(self, file: FileRef) -> int:
        """Return the length of a file; read twice if it differs from the written length."""
        info = self.store.stat(file.path)
        if info.size_bytes != file.size_bytes:
            self.store.drop_caches(file.path)
            info = self.store.stat(file.path)
        if info.link_count > 1:
            self.link_counts[file.path] = info.link_count
        return info.size_bytes

    @contextmanager
    def noting(
        self, path: str | None = None, rank: int | None = None, *, absent_step: str | None = None
    ) -> Iterator[None]:
        """Add an error of the block to the problems, and end the block.

        Other failures of the storage than absence are raised, and if strict, also everything that
        is not damage, such as a newer format.
        """
        try:
            yield
        except CheckpointError as error:
            is_problem = not self.is_strict or isinstance(error, IntegrityError)
            if isinstance(error, StorageError):
                is_problem = error.kind == "not-found"
                error.next_step = absent_step or error.next_step
            if not is_problem:
                raise
            self.add(error, path=path, rank=rank)


def check_stock(findings: Findings, head: SlotRecord, manifest: Manifest) -> None:
    """Check `stock.metadata`, and `.metadata` against it."""
    store = findings.store
    if (head.stock, head.stock_entries) != (manifest.stock, manifest.stock_entries):
        path, what = slot_path(head.slot), "record and manifest have different entries of stock."
        error = IntegrityError(f"{path}: {what}", path=path, offset=0, next_step=RESTORE)
        findings.add(error)
    if manifest.stock is None:
        tail = publishing.read_stock_tail(store)
        if tail is not None:
            what = f".metadata belongs to another save than {head.save_id}, which has none."
            findings.add(IntegrityError(what, path=STOCK_METADATA, offset=0, next_step=_PUBLISH))
        return
    findings.file_count += 2
    with findings.noting(manifest.stock.path):
        copy = objects.read_referenced(store, manifest.stock, max_bytes=MAX_STOCK_BYTES)
        pickled = split_footer(copy)[0]
        expected = with_footer(pickled, slot=head.slot, save_id=manifest.save_id)
        with findings.noting(STOCK_METADATA):
            published = publishing.read_stock(store)
            if published is None or published.data != expected:
                store.drop_caches(STOCK_METADATA)
                published = publishing.read_stock(store)
            data = b"" if published is None else published.data
            if data == expected:
                return
            what, step = ".metadata is missing; torch's own readers find no checkpoint.", _PUBLISH
            if published is not None:
                what, step = _other_stock(store, head, data)
            pairs = enumerate(zip(data, expected, strict=False))
            shorter = min(len(data), len(expected))
            offset = next((at for at, (a, b) in pairs if a != b), shorter)
            raise IntegrityError(what, path=STOCK_METADATA, offset=offset, next_step=step)


def _other_stock(store: Store, head: SlotRecord, data: bytes) -> tuple[str, str]:
    """Return a description of a `.metadata` that is not that of the head, and a next step."""
    try:
        publishing.check_newest(store, CommitLog.ending_with(head), Content(data=data))
    except FormatError as newer:
        step = newer.next_step or ""
        return str(newer).removesuffix(step).strip(), step
    named = split_footer(data)[1]
    if named is not None and named.save_id != head.save_id:
        return f".metadata names save {named.save_id}; the head is {head.save_id}.", _PUBLISH
    return (
        ".metadata is damaged, or another program wrote it: it differs from stock.metadata.",
        "Delete .metadata and load the checkpoint once with the right to write.",
    )


def check_foreign(findings: Findings, source: Source) -> None:
    """Check the files of another writer, which have no checksums, for existence and length."""
    places = source.places(value_keys(source.tensors, source.blobs))
    by_end = sorted(places, key=lambda place: place.start + place.size_bytes)
    for path, place in {place.path: place for place in by_end}.items():
        findings.file_count += 1
        end = place.start + place.size_bytes
        with findings.noting():
            info = objects.stat_or_none(findings.store, path)
            if info is None:
                raise source.explain_missing(place)
            if info.size_bytes < end:
                what = f"{path} has {info.size_bytes} bytes; {place.fqn} ends at byte {end}."
                raise IntegrityError(
                    what, path=path, fqn=place.fqn, offset=info.size_bytes, next_step=DAMAGED
                )


def check_exports(findings: Findings, head: str | None) -> list[ExportStatus]:
    """Check exports directly below a root, or in the root itself; `head` is its save id."""
    folders = [DEFAULT_FOLDER]
    try:
        entries = findings.store.list("", recursive=False)
    except StorageError as error:
        # Without a listing, only the default folder is known.
        if error.kind not in {"not-found", "permission", "unsupported"}:
            raise
    else:
        listed = (entry.path.rstrip("/") for entry in entries if entry.path.endswith("/"))
        folders = [folder for folder in listed if folder not in _NO_EXPORTS]
    problems, statuses = findings.problems, []
    for folder in ["", *folders]:
        before_count, index = len(problems), _index_in(findings.store, folder)
        status = _check_export(findings, folder, index, head)
        if len(problems) > before_count:
            # Another export was published meanwhile, or the response had a wrong byte.
            findings.store.drop_caches(f"{folder}/{INDEX_NAME}".lstrip("/"))
            now = _index_in(findings.store, folder)
            if now != index:
                del problems[before_count:]
                status = _check_export(findings, folder, now, head)
        if status is not None:
            # The weight files, the index and the record.
            findings.file_count += status.file_count + 2
            findings.checked_bytes += status.size_bytes if findings.is_deep else 0
            statuses.append(status)
    return statuses


def _index_in(store: Store, folder: str) -> bytes | None:
    try:
        content = objects.read_or_none(store, f"{folder}/{INDEX_NAME}".lstrip("/"))
    except StorageError as error:
        # Without the right to list, some storages answer 403 for absent files.
        if error.kind != "permission":
            raise
        log.info("It is not known whether %s holds an export: %s", folder or ".", error)
        return None
    return None if content is None else content.data


def _check_export(
    findings: Findings, folder: str, index: bytes | None, head: str | None
) -> ExportStatus | None:
    """Check an export by its index; None if it is another tool's, or incomplete."""
    store, noting = findings.store, partial(findings.noting, absent_step=_MAKE_ANEW)
    prefix = f"{folder}/" if folder else ""
    if index is None:
        return _unfinished(findings, folder) if _is_guarded(store, folder) else None
    path, tag, files = prefix + INDEX_NAME, IndexTag.of(index), list[FileRef]()
    with noting(path):
        if tag is None and objects.is_there(store, prefix + NAMES_PATH):
            what = "is damaged, or another program wrote it: it names no export of this package"
            raise _damage(path, what)
    if tag is None:
        return None
    if _is_guarded(store, folder):
        return _unfinished(findings, folder)
    _check_names(findings, folder, tag)
    record_path = prefix + export_path(tag.fingerprint)
    with noting(record_path):
        decode = partial(ExportRecord.decode, path=record_path)
        record = objects.read_decoded(store, record_path, decode)
        if record is None:
            raise _damage(record_path, "is missing: it is the record of the export")
        if record.fingerprint != tag.fingerprint:
            raise _damage(record_path, f"belongs to another export ({record.fingerprint})")
        files += (replace(file, path=prefix + file.path) for file in record.files)
        with noting(path):
            is_as_written = FileRef.of(record.index.path, index) == record.index
            if not is_as_written or tag.names - {file.path for file in record.files}:
                raise _damage(path, "is not the index in the record of the export")
        for file in files:
            with noting(file.path):
                _check_weights(findings, file)
    return ExportStatus(
        path=folder,
        save_id=tag.save_id,
        is_stale=None not in (head, tag.save_id) and head != tag.save_id,
        file_count=len(files) or len(tag.names),
        size_bytes=sum(file.size_bytes for file in files),
    )


def _unfinished(findings: Findings, folder: str) -> ExportStatus | None:
    """Return the status of an unfinished export; at the URL itself, it is a problem."""
    if not folder:
        findings.add(in_progress(findings.store.url))
        return None
    # The checkpoint above it may be sound.
    return ExportStatus(path=folder, save_id=None, file_count=0, size_bytes=0, is_unfinished=True)


def _is_guarded(store: Store, folder: str) -> bool:
    try:
        return objects.is_there(store, f"{folder}/{GUARD_NAME}".lstrip("/"))
    except StorageError as error:
        # As in `_index_in`.
        if error.kind != "permission":
            raise
        return False


def _check_names(findings: Findings, folder: str, tag: IndexTag) -> None:
    """Add weight files that the index does not name to the problems."""
    store = findings.store
    try:
        names = {entry.path.rpartition("/")[2] for entry in store.list(folder, recursive=False)}
    except StorageError as error:
        if error.kind not in {"not-found", "permission", "unsupported"}:
            raise
        log.info("The folder of the export %s cannot be listed: %s", folder or ".", error)
        return
    for name in sorted(names - tag.names - {GUARD_NAME}):
        if name.endswith(".safetensors"):
            path = f"{folder}/{name}".lstrip("/")
            what = f"{path} is a weight file that {INDEX_NAME} does not name; readers that load "
            what += "every *.safetensors, or prefer its name, load it too."
            step = "Delete it, or move it to another folder."
            findings.add(IntegrityError(what, path=path, offset=0, next_step=step))


def _check_weights(findings: Findings, file: FileRef) -> None:
    size_bytes = findings.size_of(file)
    if size_bytes != file.size_bytes:
        what = f"has {size_bytes} bytes; {file.size_bytes} were written"
        raise _damage(file.path, what, min(size_bytes, file.size_bytes))
    if findings.is_deep and not has_checksum(findings.ranges, file, findings.on_bytes):
        what = f"is damaged: it does not have the checksum {file.crc32c:08x} it was written with"
        raise _damage(file.path, what)


def _damage(path: str, what: str, offset: int = 0) -> IntegrityError:
    return IntegrityError(f"{path} {what}.", path=path, offset=offset, next_step=_MAKE_ANEW)


def has_checksum(
    ranges: RangeReader, file: FileRef, on_bytes: Callable[[int], None] = ignore
) -> bool:
    """Return whether a file of the length in `file` has the CRC-32C in it; read twice if not."""
    step, crcs = ranges.options.part_bytes, dict[int, int]()

    def take(start: int, view: memoryview) -> None:
        crcs[start] = crc32c_of(view)

    read = partial(RangeRead, path=file.path, file_bytes=file.size_bytes)
    starts = range(0, file.size_bytes, step)
    stops = [*starts[1:], file.size_bytes]
    reads = [
        read(start=start, stop=stop, done=partial(take, start))
        for start, stop in zip(starts, stops, strict=False)
    ]
    lengths = [read.stop - read.start for read in reads]

    def matches(note: Callable[[int], None]) -> bool:
        ranges.run(reads, on_bytes=note)
        return combine_many([crcs[read.start] for read in reads], lengths) == file.crc32c

    if matches(on_bytes):
        return True
    ranges.store.drop_caches(file.path)
    return matches(ignore)
