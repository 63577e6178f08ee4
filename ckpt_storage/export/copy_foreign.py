"""Copies of checkpoints of other writers, and of exports of ours: of all files below a folder.

Weight files, index and documents of an export are checked against the checksums in its record. All
other files are compared by length. The file that makes the folder a checkpoint is copied last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import PurePosixPath

from ckpt_storage import errors
from ckpt_storage.format import exports, names
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import unseal
from ckpt_storage.source.foreign import ForeignSource, StockSource, in_progress
from ckpt_storage.source.model import Source
from ckpt_storage.store.store import Store
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.objects import read_twice

from .copy_base import Copy, CopyReport, CopySource, whole_file
from .folder import PlainFolder
from .output import ExportContext, SourceVersion
from .plan import OutFile

_NAME_BYTES = 255
"""Longest name in a folder of common file systems."""

_PROTECTED = frozenset(
    {names.STOCK_METADATA, names.INDEX_NAME, names.COMMITS, names.SAVES, exports.DOCUMENTS}
)
"""What makes a folder a checkpoint or an export, wherever letter case does not count."""

_FOLDED = {name.casefold(): name for name in _PROTECTED}


def open_foreign(context: ExportContext, source: Source) -> CopyOfFolder:
    """List what is copied, and return the coordinator's copy; no file of the source may be missing.

    An export of ours is copied with the checksums in its record.
    """
    spec = context.spec
    listing = context.source.list("", unsafe_names="refuse")
    entries = {info.path: info for info in listing if _is_content(info.path)}
    if exports.GUARD_NAME in entries:
        raise in_progress(spec.source.url)
    if spec.target.is_local:
        _check_names(entries, spec.target.url)
    _check_whole(source, {path: info.size_bytes for path, info in entries.items()})
    crcs = dict[str, int]()
    documents = [path for path in entries if path.startswith(f"{exports.DOCUMENTS}/")]
    if any(map(exports.is_of_export, documents)):
        crcs = _checksums(context.source, _read_export(context.source), documents)
    files = {
        path: (info.size_bytes, info.modified_s, crcs.get(path)) for path, info in entries.items()
    }
    last = names.STOCK_METADATA if source.format == "dcp" else names.INDEX_NAME
    version = CopySource(format=source.format, files=files, last=last if last in files else "")
    foreign_copy = CopyOfFolder(context, version)
    foreign_copy.source.versions = source.versions
    return foreign_copy


def _read_export(store: Store) -> exports.ExportRecord:
    """Return the record of the export in a folder, whose index is as it was written.

    Raises `IntegrityError` unless the index names a record, which names the index.
    """
    path = names.INDEX_NAME

    def read() -> exports.ExportRecord:
        content = objects.read_or_none(store, path)
        if content is None:
            raise _not_whole(path, "is missing")
        tag = exports.IndexTag.of(content.data)
        if tag is None:
            what = "is damaged, or was written by another program: it names no export of ours"
            raise _not_whole(path, what)
        record_path = exports.export_path(tag.fingerprint)
        decode = partial(exports.ExportRecord.decode, path=record_path)
        record = objects.read_decoded(store, record_path, decode)
        if record is None:
            raise _not_whole(record_path, "is missing: it is the record of the export")
        objects.check_document(content.data, record.index)
        return record

    return read_twice(store, path, read)


def _not_whole(path: str, what: str) -> errors.IntegrityError:
    step = f"Export again; if another program wrote the weights, delete {exports.DOCUMENTS} there."
    return errors.IntegrityError(f"{path} {what}.", path=path, offset=0, next_step=step)


def _checksums(
    store: Store, record: exports.ExportRecord, documents: Collection[str]
) -> dict[str, int]:
    """Return the CRC-32C of the weight files, the index and the documents of an export by path."""
    crcs = {file.path: file.crc32c for file in (*record.files, record.index)}
    for path in documents:
        data = objects.read_decoded(store, path, partial(_sound_document, path))
        crcs |= {} if data is None else {path: crc32c_of(data)}
    return crcs


def _sound_document(path: str, data: bytes) -> bytes:
    """Return the bytes of a document with a checksum of its own. Raises `IntegrityError`."""
    unseal(data, path=path)
    return data


class CopyOfFolder(PlainFolder[CopyReport], Copy):
    """A copy of a checkpoint of another writer, or of an export of ours."""

    def open(self, version: SourceVersion) -> None:
        """Open the folder for reading by path."""
        del version
        self.source = ForeignSource(
            store=self.context.source, format=self.version.format, tensors={}
        )

    def lay_out(self) -> list[OutFile]:
        """Return all files but the last."""
        files = sorted(self.version.files.items())
        return [
            whole_file(p, p, size, crc) for p, (size, _, crc) in files if p != self.version.last
        ]

    @property
    def last(self) -> str:
        """The path of the file that is written last."""
        return self.version.last

    def document(self) -> bytes:
        """Return the content of the file that is written last."""
        store, path = self.context.source, self.last
        size_bytes, _, crc32c = self.version.files[path]

        def read() -> bytes:
            data = store.get(path, max_bytes=size_bytes).data
            if len(data) != size_bytes or crc32c not in {None, crc32c_of(data)}:
                what = f"{path} has {len(data)} bytes, or another checksum than it had before."
                raise errors.IntegrityError(what, path=path, offset=0, next_step="Copy again.")
            return data

        data = read_twice(store, path, read)
        self.check_unchanged()
        return data


def _check_whole(source: Source, sizes: Mapping[str, int]) -> None:
    """Refuse a stock checkpoint with a missing or truncated file; other formats are read by now."""
    items = source.items if isinstance(source, StockSource) else {}
    for (fqn, _), item in items.items():
        # The end of the whole item, behind the tensor's bytes.
        path, end = item.relative_path, item.offset + item.length
        size_bytes = sizes.get(path)
        if size_bytes is None or size_bytes < end:
            problem = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
            raise errors.IntegrityError(
                f"{path} {problem}; {fqn} ends at its byte {end}.",
                path=path,
                fqn=fqn,
                offset=size_bytes or 0,
                next_step="Restore the file from a copy, or copy another checkpoint.",
            )


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


def _is_content(path: str) -> bool:
    """Return whether a path is part of a checkpoint; slots, notes of runs and probes are none."""
    is_note = path == exports.HOLDER_PATH or exports.is_file_record(path)
    folder, _, name = path.rpartition("/")
    is_note |= folder == names.COMMITS and names.slot_number(name) > 0
    return bool(name) and not (is_note or name.startswith(names.PROBE_PREFIX))
