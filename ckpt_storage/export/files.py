"""Files of one store put into another as they are: many at a time, checked on their way.

A file becomes visible at the target only complete, so one that is there after a crash is whole.
Where the target's storage can copy from the source by itself, no byte travels through this
process, except to be checked where the storage tells no checksum of what it copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.file_checks import FileChecks
from ckpt_storage.options import TransferOptions
from ckpt_storage.source.model import Key, TensorInfo
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace

from .layout import Layout, OutFile, Stored, out_file
from .plan import Plan, WriteRules, plan
from .run import UNKNOWN_CRC, Alone, Means, Seal, make, no_seal, side_by_side
from .write import Copies, Paces


@dataclass(slots=True)
class Tally:
    """What was moved so far.

    read_bytes: came to this process, re-reads included. sent_bytes: went from it to the target.
    copied_bytes: copied by the storage itself. kept_count, kept_bytes: files that were found
    complete at the target.
    """

    read_bytes: int = 0
    sent_bytes: int = 0
    copied_bytes: int = 0
    file_count: int = 0
    kept_count: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToCopy:
    """One file: where it is, what it is called at the target, and how long it must be.

    `crc32c` is its checksum; None: only the length is known.
    """

    path: str
    target: str
    size_bytes: int
    crc32c: int | None = None


class _Files:
    """Files as a source: there are no tensors, only paths."""

    def __init__(self, explain_missing: Callable[[str], Exception | None]) -> None:
        self.tensors: Mapping[str, TensorInfo] = {}
        self._explain = explain_missing

    def require(self, chunks: Iterable[Key]) -> None:
        """Fetch nothing."""

    def place(self, fqn: str, offsets: tuple[int, ...] | None) -> ChunkPlace:
        """Raise: there are no values."""
        raise KeyError((fqn, offsets))

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error to raise when a file is not there."""
        return self._explain(place.path) or IntegrityError(
            f"{place.path} is missing.",
            path=place.path,
            offset=0,
            next_step="Restore the file from a copy.",
        )


@dataclass(slots=True, kw_only=True)
class FileCopier:
    """Copies files between two stores, and counts what moved; one thread calls it.

    Both stores end with the deadline. `explain_missing` is asked for the error to raise where the
    source's file of a path is not there.
    """

    source: Store
    target: Store
    options: TransferOptions
    deadline: Deadline
    copies: Copies
    on_bytes: Callable[[int], None]
    explain_missing: Callable[[str], Exception | None] = lambda _: None
    tally: Tally = field(default_factory=Tally)
    paces: Paces = field(init=False)

    def __post_init__(self) -> None:
        self.paces = Paces(self.options)

    def plan(self, files: Sequence[FileToCopy], source: object = None) -> Plan:
        """Return the plan of copying files; `source` (JSON) stands for their content."""
        rules = WriteRules.of(self.target.capabilities, part_bytes=self.options.part_bytes)
        layout = Layout(
            files=tuple(
                out_file(
                    number,
                    file.target,
                    [Stored(path=file.path, size_bytes=file.size_bytes)],
                    crc32c=file.crc32c,
                )
                for number, file in enumerate(files, 1)
            )
        )
        return plan(layout, world_size=1, rules=rules, source=source)

    def copy(
        self,
        whole: Plan,
        *,
        done: Mapping[int, FileRef] | None = None,
        damage: Callable[[OutFile], CheckpointError] | None = None,
        seal: Seal = no_seal,
    ) -> None:
        """Copy all files of a plan but those of `done` that are sound.

        Raises what `damage` returns for a file that came out otherwise than its checksum says; it
        may read the source.
        """
        known = done or {}
        made = make(
            Alone(self.deadline),
            whole.leaving(known),
            Means(
                source=_Files(self.explain_missing),
                source_store=self.source,
                target=self.target,
                options=self.options,
                deadline=self.deadline,
                paces=self.paces,
                copies=self.copies,
                on_bytes=self.on_bytes,
                seal=seal,
                damage=damage,
            ),
            known,
        )
        kept_bytes = sum(whole.files[at].size_bytes for at in made.kept)
        tally = self.tally
        tally.read_bytes += made.bytes_of("read_bytes") + kept_bytes
        tally.sent_bytes += made.bytes_of("sent_bytes")
        tally.copied_bytes += made.bytes_of("copied_bytes")
        tally.file_count += len(whole.files)
        tally.kept_count += len(made.kept)
        tally.kept_bytes += kept_bytes

    def there(self, whole: Plan, known: Mapping[int, FileRef] | None = None) -> dict[int, FileRef]:
        """Return the files of a plan that the target has, in their length, with their checksums.

        `known` tells some; without it and without one in the plan, a file counts by its length.
        """
        found: dict[int, FileRef] = {}

        def look(at: int, file: OutFile) -> None:
            try:
                size_bytes = self.target.stat(file.name).size_bytes
            except StorageError as error:
                if error.kind != "not-found":
                    raise
                return
            if size_bytes == file.size_bytes:
                crc32c = UNKNOWN_CRC if file.crc32c is None else file.crc32c
                one = FileRef(path=file.name, size_bytes=size_bytes, crc32c=crc32c)
                found[at] = (known or {}).get(at, one)

        jobs = [partial(look, at, file) for at, file in enumerate(whole.files)]
        side_by_side(jobs, "look for files", self.deadline)
        return found

    def damage_of(self, file: OutFile, checks: FileChecks) -> CheckpointError:
        """Return what is wrong with the source of a copy, or with how it was copied."""
        path = self._path_of(file)
        return checks.first_damage(self._pieces_of(path, file.size_bytes)) or IntegrityError(
            f"The storage copied {path} to other bytes, while the source reads as it was written.",
            path=file.name,
            offset=0,
            next_step="Copy again, with copies='never' so that every byte is read and sent.",
        )

    def _pieces_of(self, path: str, size_bytes: int) -> Iterator[memoryview]:
        window = memoryview(bytearray(min(self.options.part_bytes, max(1, size_bytes))))
        for start in range(0, size_bytes, len(window)):
            view = window[: size_bytes - start]
            self.source.read(path, [(start, view)], size_bytes=size_bytes)
            self.deadline.advanced(len(view))
            yield view

    @staticmethod
    def _path_of(file: OutFile) -> str:
        segment = file.segments[0]
        assert isinstance(segment, Stored)  # noqa: S101  # `plan` made it
        return segment.path
