"""Making the files of an output: what each rank checks and writes, and who gives the names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from .write import UNKNOWN_CRC, RegionWriter, Result, joined, spans_of

if TYPE_CHECKING:
    from .run import Task

log = logging.getLogger("ckpt_storage")

T = TypeVar("T")

_WORD_S = 3.0
"""How long the reason may take to arrive for which a shared upload was discarded."""


@dataclass
class Work:
    """One rank at work on all files of `output.plan`, of which `taken` are done or sealed.

    Whoever writes a file alone seals it; what several ranks wrote, and what gets its name with all
    others, the coordinator completes when all have reported, and the task is unchanged.
    """

    operation: Operation
    task: Task[Any]
    output: Output
    taken: Taken
    on_bytes: Callable[[int], None]

    def __post_init__(self) -> None:
        self._site, self._plan = self.output.site, self.output.plan
        able = self._site.target.capabilities
        self._is_together = self.output.is_together and able.tokens_travel and able.lists_uploads
        # Those under way, by file; and the tokens of those that several ranks share.
        self._uploads: dict[int, Upload] = {}
        self._tokens: Mapping[int, str] = {}
        self._result = Result()

    def make(self) -> Made:
        """Make all files; the coordinator gets what was made.

        After an error no upload of this run stays open but those of sealed files.
        """
        files: Mapping[int, FileRef] = {}
        try:
            self._write()
            results = self.operation.gather(self._result)
            if self.operation.is_coordinator:
                files = self._finish(results)
        except BaseException as error:
            self._abort(error)
            raise
        written = {at for one in results for at in one.spans}
        kept = frozenset({*self.taken.done, *self.taken.sealed} - written)
        return Made(files=files, results=results, kept=kept)

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, CheckpointError):
            # Others must hear why their parts are refused.
            self._site.deadline.watch.failed(error)
        for upload in list(self._uploads.values()):
            try:
                upload.abort()
            except Exception as failure:  # noqa: BLE001  # the first failure is the one to raise
                error.add_note(f"Discarding an upload failed too: {failure}")

    def _write(self) -> None:
        """Check and write what is this rank's."""
        plan, site, rank, taken = self._plan, self._site, self.operation.rank, self.taken
        if shared := plan.shared():
            names = {at: plan.files[at].name for at in shared}
            tokens: list[str] = []
            if self.operation.is_coordinator:
                self._uploads = {at: site.target.upload(n, copies=True) for at, n in names.items()}
                begin = [upload.token for upload in self._uploads.values()]
                tokens = site.at_once("begin uploads", begin)
            self._tokens = self.operation.broadcast(dict(zip(names, tokens, strict=False)))
        own = plan.regions_of(rank)
        regions = [r for r in own if not r.is_done]
        checks = [partial(self._check, r, taken.done[r.file], regions) for r in own if r.is_done]
        site.at_once("check files", checks)
        if self.operation.is_coordinator:
            for at, file in enumerate(plan.files):
                if not file.size_bytes and at not in taken.done:
                    site.target.put(file.name, b"")
                    self._seal(at, Sealed(file=self._reference(at, 0)))
            for at, sealed in taken.sealed.items():
                self.on_bytes(sealed.file.size_bytes)
                log.info("%s was sealed by an earlier run", plan.files[at].name)
        if not regions:
            return
        writer = RegionWriter(
            site,
            plan,
            self.task.source,
            self._result,
            begin=self._begin,
            end=self._end,
            on_bytes=self.on_bytes,
        )
        try:
            writer.write(regions)
        except StorageError as error:
            if error.kind == "not-found" and self._tokens:
                # The coordinator discarded the upload: it is about to say why.
                site.deadline.sleep(_WORD_S)
            raise

    def _check(self, whole: Region, file: FileRef, damaged: list[Region]) -> None:
        """Read a complete file back; add it to the damaged ones unless it is sound."""
        if not self._is_sound(file):
            log.warning("%s is damaged, and made again.", file.path)
            damaged.append(whole)
            return
        self._result.sealed[whole.file] = Sealed(file=file)
        self.on_bytes(file.size_bytes)

    def _is_sound(self, file: FileRef) -> bool:
        site = self._site
        ranges = RangeReader(site.target, site.options, site.deadline, pacer=site.target_pace)
        return has_checksum(ranges, file)

    def _begin(self, region: Region) -> Upload:
        at, target = region.file, self._site.target
        if at not in self._uploads:
            path, token = self._plan.files[at].name, self._tokens.get(at)
            upload = target.join(path, token) if token else target.upload(path, copies=True)
            self._uploads[at] = upload
            if self._is_together and not token:
                # Begun at once: a small file is not held in memory until the end.
                upload.token()
        return self._uploads[at]

    def _end(self, region: Region, upload: Upload, crc32c: int) -> None:
        """Take over a region that was written; seal its file if nobody else writes it."""
        at = region.file
        if at not in self._tokens:
            file = self._reference(at, crc32c)
            if self._is_together and crc32c != UNKNOWN_CRC:
                parts = [part.to_json() for part in upload.receipts()]
                token, write_id = upload.token(), upload.write_id
                self._seal(at, Sealed(file=file, token=token, write_id=write_id, parts=parts))
            else:
                upload.complete(region.file_bytes)
                self._seal(at, Sealed(file=file))
        elif self.operation.is_coordinator:
            return
        else:
            self._result.receipts[at] = upload.receipts()
        del self._uploads[at]

    def _finish(self, results: Sequence[Result]) -> dict[int, FileRef]:
        """Give names to all files that have none, side by side; return all; coordinator only."""
        sealed = dict(self.taken.sealed)
        for one in results:
            sealed |= one.sealed
        for at in self._tokens:
            parts = [part.to_json() for one in results for part in one.receipts.get(at, ())]
            crc32c = joined(spans_of(results, at))[2]
            sealed[at] = Sealed(file=self._reference(at, crc32c), parts=parts)
        self.task.check_unchanged()
        self.output.check_held()

        def name(at: int, one: Sealed) -> None:
            file, own = one.file, self._uploads.get(at)
            upload = own or self._site.target.join(file.path, one.token, write_id=one.write_id)
            upload.complete(file.size_bytes, receipts=[*map(Part.from_json, one.parts)])
            if own:
                self._seal(at, Sealed(file=file))
            elif at in self.taken.sealed and not self._is_sound(file):
                raise IntegrityError(
                    f"{file.path}, which an earlier run had written, is damaged.",
                    path=file.path,
                    offset=0,
                    next_step="Call it again: the file is made anew then.",
                )

        nameless = {at: one for at, one in sealed.items() if one.token or at in self._tokens}
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
            self.output.seal(self._plan.files[at].number, sealed)
        self._result.sealed[at] = sealed
        self._site.deadline.watch.ended_file()
