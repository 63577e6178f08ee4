"""The report of `copy`, its options, the version that is copied, and the base class of copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.options import DEFAULT_MEMORY_LIMIT_BYTES
from ckpt_storage.source.model import SourceFormat

from .options import Selection, digest
from .output import Export, ExportSpec, SourceVersion, WriteSummary
from .plan import OutFile, Stored

_COPY_PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """What `copy` did; both URLs are without credentials.

    format: of the source. save_id, slot: of the copy; None for formats of others.
    was_there: the target's newest checkpoint was this save before, and nothing of it was sent.
    file_count, total_bytes: of the checkpoint's files, documents not counted.
    sent_bytes: sent by this process. copied_bytes: copied by the storage itself, or linked on a
    file system, where they take no space.
    kept_count, kept_bytes: sound files of an earlier, unfinished copy.
    left_out: entries of the source's folder that are not of the checkpoint, such as exports; "." if
    they cannot be listed. Empty for formats of others, of which all files are copied.
    """

    source_url: str
    url: str
    format: SourceFormat
    save_id: str | None
    slot: int | None = None
    was_there: bool
    file_count: int
    total_bytes: int
    read_bytes: int
    sent_bytes: int
    copied_bytes: int
    kept_count: int
    kept_bytes: int
    left_out: Sequence[str] = ()
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySpec(ExportSpec):
    """The options of a copy; `include` and `exclude` choose values."""

    include: Selection | None = None
    exclude: Selection | None = None

    @property
    def selects(self) -> bool:
        """Whether values are chosen."""
        return self.include is not None or self.exclude is not None

    def terms(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, for `Operation.meet`."""
        chosen = {name: digest(getattr(self, name)) for name in ("include", "exclude")}
        return ExportSpec.terms(self) | chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySource(SourceVersion):
    """The checkpoint that is copied; `was_there`: it is the newest of the target already.

    For a checkpoint of ours, `save_id` is the id of the copy, and `target_log` the target's slots.
    For a checkpoint of another writer, `files` maps each path to the length, the time and, in an
    export of ours, the CRC-32C of the file; the file `last` is copied last.
    """

    save_id: str | None = None
    was_there: bool = False
    is_part: bool = False
    target_log: CommitLog | None = None
    format: SourceFormat = "ckpt_storage"
    files: Mapping[str, tuple[int, float | None, int | None]] = field(default_factory=dict)
    last: str = ""


def whole_file(name: str, path: str, size_bytes: int, crc32c: int | None) -> OutFile:
    """Return an output file whose content is the whole stored file at `path`."""
    segments = [Stored(path=path, size_bytes=size_bytes)]
    return OutFile(name=name, segments=segments, crc32c=crc32c)


class Copy(Export[CopyReport]):
    """One copy on one rank."""

    version: CopySource
    spec: CopySpec

    @property
    def part_bytes(self) -> int:
        """Longer parts where the storage copies by itself: each costs a request."""
        limit_bytes = self.spec.memory_limit_bytes or DEFAULT_MEMORY_LIMIT_BYTES
        # Memory for a few of them, in case the storage refuses to copy.
        copied_bytes = min(_COPY_PART_BYTES, limit_bytes // 4) if self.context.can_copy else 0
        return max(super().part_bytes, copied_bytes)

    def content(self) -> object:
        """Return the paths of the files, with their lengths, times and checksums."""
        marks = sorted((path, *mark) for path, mark in self.version.files.items())
        return [self.spec.source.url, self.save_id, marks]

    @property
    def total_bytes(self) -> int:
        """The bytes of all files."""
        return sum(size_bytes for size_bytes, *_ in self.version.files.values())

    def report(self, made: WriteSummary, seconds: float) -> CopyReport:
        """Return the report of what was copied."""
        version, spec, files = self.version, self.spec, self.plan.files
        kept, moved = [files[at].size_bytes for at in made.kept], made.moved
        return CopyReport(
            source_url=spec.source.url,
            url=spec.target.url,
            format=version.format,
            save_id=self.save_id,
            was_there=version.was_there,
            file_count=len(files),
            total_bytes=self.total_bytes,
            **moved | {"read_bytes": moved["read_bytes"] + sum(kept)},
            kept_count=len(kept),
            kept_bytes=sum(kept),
            seconds=seconds,
        )
