"""Making the files of an output: what each rank checks and writes, and who gives the names."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt_storage.coordination.operation import Operation
from ckpt_storage.errors import CheckpointError, IntegrityError, StorageError
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.exports import Sealed
from ckpt_storage.inspect.checks import has_checksum
from ckpt_storage.store.backend import Part
from ckpt_storage.store.upload import Upload
from ckpt_storage.transfer.ranges import RangeReader

from .output import Made, Output, Taken
from .plan import Region
from .write import UNKNOWN_CRC, Portion, RegionWriter, Span, joined

if TYPE_CHECKING:
    from .run import Task

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

_WORD_S = 3.0
"""How long the reason may take to arrive for which a shared upload was discarded."""


@dataclass(slots=True)
class _Result:
    """What one rank did: portions; receipts of shared files; files it sealed or found sound."""

    portions: list[Portion] = field(default_factory=list)
    receipts: dict[int, list[Part]] = field(default_factory=dict)
    sealed: dict[int, Sealed] = field(default_factory=dict)


class Work:
    """One rank at work on all files of `output.plan`, of which `taken` are done or sealed.

    Whoever writes a file alone seals it; what several ranks wrote, and what gets its name with all
    others, the coordinator completes when all have reported, and the task is unchanged.
    """

    def __init__(
        self,
        operation: Operation,
        task: Task[Any],
        output: Output,
        taken: Taken,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._operation = operation
        self._task = task
        self._output = output
        self._taken = taken
        self._site = output.site
        self._plan = output.plan
        self._on_bytes = on_bytes
        able = self._site.target.capabilities
        self._is_together = output.is_together and able.tokens_travel and able.lists_uploads
        self._shared: dict[int, Upload] = {}
        self._tokens: Mapping[int, str] = {}
        self._open: list[Upload] = []
        self._lock = threading.Lock()
        self._result = _Result()

    def make(self) -> Made:
        """Make all files; the coordinator gets what was made.

        After an error no upload of this run stays open but those of sealed files.
        """
        files: Mapping[int, FileRef] = {}
        try:
            self._write()
            results = self._operation.gather(self._result)
            if self._operation.is_coordinator:
                files = self._finish(results)
        except BaseException as error:
            self._abort(error)
            raise
        portions = [portion for one in results for portion in one.portions]
        written = {portion.file for portion in portions}
        kept = frozenset({*self._taken.done, *self._taken.sealed} - written)
        return Made(files=files, portions=portions, kept=kept)

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, CheckpointError):
            # Others must hear why their parts are refused.
            self._site.deadline.watch.failed(error)
        for upload in [*self._open, *self._shared.values()]:
            try:
                upload.abort()
            except Exception as failure:  # noqa: BLE001  # the first failure is the one to raise
                error.add_note(f"Discarding an upload failed too: {failure}")

    def _write(self) -> None:
        """Check and write what is this rank's."""
        plan, site, rank, taken = self._plan, self._site, self._operation.rank, self._taken
        if shared := plan.shared():
            if self._operation.is_coordinator:
                site.at_once("begin uploads", [partial(self._share, at) for at in shared])
            tokens = {at: upload.token() for at, upload in self._shared.items()}
            self._tokens = self._operation.broadcast(tokens)
        regions = plan.regions_of(rank)
        checks = [
            partial(self._check, r, taken.done[r.file], regions) for r in plan.checks_of(rank)
        ]
        site.at_once("check files", checks)
        if self._operation.is_coordinator:
            for at, file in enumerate(plan.files):
                if not file.size_bytes and at not in taken.done:
                    site.target.put(file.name, b"")
                    self._seal(at, Sealed(file=self._reference(at, 0)))
            for at, sealed in taken.sealed.items():
                self._on_bytes(sealed.file.size_bytes)
                log.info("%s was sealed by an earlier run", plan.files[at].name)
        if not regions:
            return
        writer = RegionWriter(site, plan, self._task.source, self._on_bytes)
        try:
            writer.write(regions, self._begin, self._end)
        except StorageError as error:
            if error.kind == "not-found" and self._tokens:
                # The coordinator discarded the upload: it is about to say why.
                site.deadline.sleep(_WORD_S)
            raise

    def _share(self, at: int) -> None:
        """Begin an upload that several ranks share."""
        upload = self._site.target.upload(self._plan.files[at].name, copies=True)
        self._shared[at] = upload
        upload.token()

    def _check(self, whole: Region, file: FileRef, damaged: list[Region]) -> None:
        """Read a complete file back; add it to the damaged ones unless it is sound."""
        if not self._is_sound(file):
            log.warning("%s is damaged, and made again.", file.path)
            damaged.append(whole)
            return
        with self._lock:
            self._result.sealed[whole.file] = Sealed(file=file)
        self._on_bytes(file.size_bytes)

    def _is_sound(self, file: FileRef) -> bool:
        site = self._site
        ranges = RangeReader(site.target, site.options, site.deadline, pacer=site.target_pace)
        return has_checksum(ranges, file)

    def _begin(self, region: Region) -> Upload:
        if region.file in self._shared:
            return self._shared[region.file]
        path, token = self._plan.files[region.file].name, self._tokens.get(region.file)
        target = self._site.target
        upload = target.join(path, token) if token else target.upload(path, copies=True)
        self._open.append(upload)
        if self._is_together and not token:
            # Begun at once: a small file is not held in memory until the end.
            upload.token()
        return upload

    def _end(self, region: Region, upload: Upload, portion: Portion) -> None:
        """Take over a region that was written; seal its file if nobody else writes it."""
        at = region.file
        with self._lock:
            self._result.portions.append(portion)
        if at in self._shared:
            return
        if region.size_bytes < region.file_bytes:
            receipts = upload.receipts()
            with self._lock:
                self._result.receipts[at] = receipts
        else:
            file = self._reference(at, joined(portion.spans)[2])
            if self._is_together and file.crc32c != UNKNOWN_CRC:
                parts = [part.to_json() for part in upload.receipts()]
                token, write_id = upload.token(), upload.write_id
                self._seal(at, Sealed(file=file, token=token, write_id=write_id, parts=parts))
            else:
                upload.complete(region.file_bytes)
                self._seal(at, Sealed(file=file))
        with self._lock:
            self._open.remove(upload)

    def _finish(self, results: Sequence[_Result]) -> dict[int, FileRef]:
        """Give names to all files that have none, side by side; return all; coordinator only."""
        spans: dict[int, list[Span]] = {}
        sealed = dict(self._taken.sealed)
        for result in results:
            sealed |= result.sealed
            for portion in result.portions:
                spans.setdefault(portion.file, []).extend(portion.spans)
        for at in self._shared:
            parts = [part.to_json() for one in results for part in one.receipts.get(at, ())]
            sealed[at] = Sealed(file=self._reference(at, joined(spans[at])[2]), parts=parts)
        self._task.check_unchanged()
        self._output.check_held()

        def name(at: int, one: Sealed) -> None:
            file, own = one.file, self._shared.get(at)
            upload = own or self._site.target.join(file.path, one.token, write_id=one.write_id)
            upload.complete(file.size_bytes, receipts=[*map(Part.from_json, one.parts)])
            if own:
                self._seal(at, Sealed(file=file))
            elif at in self._taken.sealed and not self._is_sound(file):
                raise IntegrityError(
                    f"{file.path}, which an earlier run had written, is damaged.",
                    path=file.path,
                    offset=0,
                    next_step="Call it again: the file is made anew then.",
                )

        nameless = {at: one for at, one in sealed.items() if one.token or at in self._shared}
        jobs = [partial(name, *one) for one in nameless.items()]
        self._site.at_once("complete files", jobs)
        return {at: one.file for at, one in sealed.items()}

    def _reference(self, at: int, crc32c: int) -> FileRef:
        """Return what a file is; raise if it has to have another checksum."""
        file = self._plan.files[at]
        if file.crc32c not in {None, crc32c}:
            raise IntegrityError(
                f"{file.name} has other bytes than the checkpoint says: the source is damaged, or "
                "was copied wrongly.",
                path=file.name,
                offset=0,
                next_step="Run ckpt_storage.verify on the source; if it is sound, copy again with "
                "copies='never'. Else restore the file from another copy.",
            )
        return FileRef(path=file.name, size_bytes=file.size_bytes, crc32c=crc32c)

    def _seal(self, at: int, sealed: Sealed) -> None:
        if sealed.file.crc32c != UNKNOWN_CRC:
            self._output.seal(self._plan.files[at].number, sealed)
        with self._lock:
            self._result.sealed[at] = sealed
        self._site.deadline.watch.ended_file()
