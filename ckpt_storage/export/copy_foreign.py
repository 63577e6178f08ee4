"""Copies of checkpoints of other writers, and of exports of ours: of all files below a folder.

Nothing but an export carries checksums: files are compared by length, and the file that makes the
folder a checkpoint is copied last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import PurePosixPath

from ckpt_storage import errors
from ckpt_storage.format import exports, names
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES, unseal
from ckpt_storage.source.foreign import ForeignSource, StockSource, in_progress
from ckpt_storage.source.model import Source
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.objects import read_twice

from .copy_base import Copy, CopyReport, CopySource, whole_file
from .folder import PlainFolder
from .output import ExportContext, ResumeState, SourceVersion
from .plan import OutFile

_NAME_BYTES = 255
"""Longest name in a folder of common file systems."""

_PROTECTED = frozenset(
    {names.STOCK_METADATA, names.INDEX_NAME, names.COMMITS, names.SAVES, exports.DOCUMENTS}
)
"""What makes a folder a checkpoint or an export, wherever letter case does not count."""

_FOLDED = {name.casefold(): name for name in _PROTECTED}


def copy_of_foreign(context: ExportContext, version: CopySource) -> CopyOfFiles:
    """Return the copy of one rank; of an export that the target has, only the files beside it."""
    return (CopyOfFiles if version.was_there else CopyOfFolder)(context, version)


def open_foreign(
    context: ExportContext, source: Source, tag: exports.IndexTag | None = None
) -> CopyOfFiles:
    """List what is copied, and return the coordinator's copy; no file of the source may be missing.

    tag: the index's entry for the export that is copied; None for a checkpoint of another writer.
    """
    spec = context.spec
    objects = context.source.list("", unsafe_names="refuse")
    entries = {info.path: info for info in objects if _is_content(info.path)}
    if exports.GUARD_NAME in entries:
        raise in_progress(spec.source.url)
    if spec.target.is_local:
        _check_names(entries, spec.target.url)
    _check_whole(source, {path: info.size_bytes for path, info in entries.items()})
    documents = [path for path in entries if path.startswith(f"{exports.DOCUMENTS}/")]
    crcs, was_there = _exported(context, tag, documents) if tag else ({}, False)
    last = names.STOCK_METADATA if source.format == "dcp" else names.INDEX_NAME
    if was_there:
        # The export stays as it is. The files beside it have no checksums, so all are copied.
        entries = {path: info for path, info in entries.items() if path not in crcs}
    files = {
        path: (info.size_bytes, info.modified_s, crcs.get(path)) for path, info in entries.items()
    }
    last = last if last in files else ""
    version = CopySource(format=source.format, files=files, was_there=was_there, last=last)
    foreign_copy = copy_of_foreign(context, version)
    foreign_copy.watch = lambda: source.check_unchanged(context.source)
    return foreign_copy


def _exported(
    context: ExportContext, tag: exports.IndexTag, documents: Collection[str]
) -> tuple[dict[str, int], bool]:
    """Return checksums of an export's files by path, and whether the target's index is the same."""
    store, crcs = context.source, dict[str, int]()
    for path in documents:
        data = objects.read_decoded(store, path, partial(_sound_document, path))
        crcs |= {} if data is None else {path: crc32c_of(data)}
    path = exports.export_path(tag.fingerprint)

    def read_record() -> exports.ExportRecord:
        data = store.get(path, max_bytes=MAX_DOCUMENT_BYTES).data
        return exports.ExportRecord.decode(data, path)

    record = read_twice(store, path, read_record)
    index = objects.read_referenced(store, record.index)
    crcs |= {file.path: file.crc32c for file in (*record.files, record.index)}
    target_index = objects.read_or_none(context.target, names.INDEX_NAME)
    was_there = target_index is not None and target_index.data == index
    # The guard is still there if an earlier copy stopped just before its end.
    is_whole = was_there and not objects.is_there(context.target, exports.GUARD_NAME)
    return crcs, is_whole


def _sound_document(path: str, data: bytes) -> bytes:
    """Return the bytes of a document with a checksum of its own. Raises `IntegrityError`."""
    unseal(data, path=path)
    return data


class CopyOfFiles(Copy):
    """A copy of the files that people put beside an export whose copy is complete."""

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

    def claim(self) -> ResumeState:
        """Make the folders of the files; nothing is resumed."""
        folders = {file.name.rpartition("/")[0] for file in self.plan.files} - {""}
        self.context.target.make_folders(sorted(folders))
        return ResumeState()


class CopyOfFolder(PlainFolder[CopyReport], CopyOfFiles):
    """A copy of a checkpoint of another writer, or of an export of ours."""

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
