"""The documents of a checkpoint, each held against the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_storage.commit import slotlog, stockfooter
from ckpt_storage.errors import CheckpointError, FormatError, IntegrityError, StorageError
from ckpt_storage.format.boxes import covers_exactly
from ckpt_storage.format.commit_record import SlotRecord, split_footer, with_footer
from ckpt_storage.format.documents import MOST_SLOT_BYTES, FileRef, unseal
from ckpt_storage.format.manifest import Manifest, RankManifest
from ckpt_storage.format.names import STOCK_METADATA, markers_of
from ckpt_storage.format.stock_metadata import MOST_STOCK_BYTES
from ckpt_storage.source.model import CommittedSource, Source
from ckpt_storage.source.sourcekeys import value_keys
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.chunks import ChunkPlace


def check_foreign(store: Store, source: Source, findings: Findings) -> None:
    """Check that what another writer left can be read; it carries no checksums."""
    keys = value_keys(source)
    source.require(keys)
    ends: dict[str, ChunkPlace] = {}
    for key in keys:
        place = source.place(*key)
        end = ends.get(place.path)
        if end is None or place.start + place.size_bytes > end.start + end.size_bytes:
            ends[place.path] = place
    for path, place in ends.items():
        findings.file_count += 1
        needed = place.start + place.size_bytes
        try:
            size_bytes = store.stat(path).size_bytes
        except StorageError as error:
            if error.kind != "not-found":
                raise
            findings.note(_missing_of(source, place))
            continue
        if size_bytes < needed:
            findings.note(
                IntegrityError(
                    f"{path} has {size_bytes} bytes; {place.fqn} ends at byte {needed}.",
                    path=path,
                    fqn=place.fqn,
                    offset=size_bytes,
                    next_step="Restore the file from a copy, or load another checkpoint.",
                )
            )


def _missing_of(source: Source, place: ChunkPlace) -> CheckpointError:
    error = source.explain_missing(place)
    if not isinstance(error, CheckpointError):  # pragma: no cover  # sources return ours
        raise error
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, or to be known: in which file, of which rank, tensor and byte."""

    message: str
    next_step: str
    file: str | None = None
    rank: int | None = None
    fqn: str | None = None
    offset: int | None = None


class Findings:
    """Problems, collected instead of raised at the first, and what of a checkpoint was checked.

    `is_part`: of one of several processes, which ask together whether the checkpoint can be loaded.
    """

    def __init__(self, *, is_part: bool) -> None:
        self.problems: list[Problem] = []
        self.notes: list[Problem] = []
        self.file_count = 0
        self.checked_bytes = 0
        self._is_part = is_part

    @property
    def is_settled(self) -> bool:
        """Whether more problems would change nothing."""
        return self._is_part and bool(self.problems)

    def note(
        self, error: CheckpointError, *, rank: int | None = None, path: str | None = None
    ) -> None:
        """Add what `error` says to the problems; `path` if it names the file in another way."""
        text = str(error)
        step = error.next_step or "Load another checkpoint."
        self.problems.append(
            Problem(
                message=text.removesuffix(step).strip(),
                next_step=step,
                file=path or error.path,
                rank=rank if error.rank is None else error.rank,
                fqn=getattr(error, "fqn", None),
                offset=getattr(error, "offset", None),
            )
        )

    def note_or_raise(
        self, error: CheckpointError, rank: int | None = None, path: str | None = None
    ) -> None:
        """Damage and absence are findings; a storage that does not answer is not.

        To a part, neither is what this release is too old for: no other checkpoint is better.
        """
        if isinstance(error, StorageError) and error.kind != "not-found":
            raise error
        if self._is_part and not isinstance(error, IntegrityError | StorageError):
            raise error
        self.note(error, rank=rank, path=path)


def check_markers(store: Store, save_id: str, findings: Findings) -> None:
    """Check that the markers of a save, where there are any, are sealed as they were written."""
    for path in markers_of(save_id):
        try:
            found = slotlog.read_if_there(store, path, most_bytes=MOST_SLOT_BYTES)
            if found is not None:
                findings.file_count += 1
                unseal(found.data, path=path)
        except CheckpointError as error:
            findings.note_or_raise(error, path=path)


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
            findings.note(
                IntegrityError(
                    f"The chunks of {tensor.fqn} do not cover its shape {list(tensor.shape)} "
                    "exactly.",
                    fqn=tensor.fqn,
                    path=head.manifest.path if head.manifest else None,
                    offset=0,
                    next_step="Load another checkpoint.",
                )
            )


def check_rank(
    manifest: Manifest, document: RankManifest, *, rank: int, listed: Mapping[str, FileRef]
) -> None:
    """Check that a rank manifest is the one of `rank`, and names the files that are `listed`.

    Raises `IntegrityError` if the two documents do not say the same.
    """
    reference = manifest.ranks[rank]
    held = {file.path: file.ref() for file in document.files}
    inlined = document if manifest.inline_ranks is None else manifest.inline_ranks[rank]
    if (
        (document.rank, document.save_id) != (rank, manifest.save_id)
        or listed != held
        or document != inlined
    ):
        raise IntegrityError(
            f"{reference.path} and the manifest do not describe the same files.",
            path=reference.path,
            rank=rank,
            offset=0,
            next_step="Restore the file from a copy, or load another checkpoint.",
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


def check_places(source: CommittedSource, findings: Findings) -> None:
    """Check that the rank manifests hold every chunk and blob that the manifest promises."""
    for fqn, offsets in value_keys(source):
        try:
            source.place(fqn, offsets)
        except CheckpointError as error:
            findings.note_or_raise(error)


def check_stock(store: Store, head: SlotRecord, manifest: Manifest, findings: Findings) -> None:
    """Check `.metadata` and the copy that it is made from, byte by byte."""
    if manifest.stock is None:
        return
    findings.file_count += 2
    try:
        copy = slotlog.read_referenced(store, manifest.stock, most_bytes=MOST_STOCK_BYTES)
    except CheckpointError as error:
        findings.note_or_raise(error, path=manifest.stock.path)
        return
    try:
        current = slotlog.read_stock(store)
    except IntegrityError as error:
        findings.note_or_raise(error, path=STOCK_METADATA)
        return
    named = split_footer(current.data)[1] if current else None
    pickled = split_footer(copy)[0]
    expected = with_footer(pickled, slot=head.slot, save_id=manifest.save_id)
    if current is None:
        what = ".metadata is missing; torch's own readers find no checkpoint."
        step = "Load it once with the right to write, or save again: either publishes it."
    elif current.data == expected:
        return
    elif (newer := _newer(store, head, current.data)) is not None:
        step = newer.next_step or ""
        what = str(newer).removesuffix(step).strip()
    elif named is not None and named.save_id != manifest.save_id:
        what = f".metadata shows save {named.save_id}; the head is {manifest.save_id}."
        step = "Load it once with the right to write, or save again: either publishes it."
    else:
        what = ".metadata is damaged, or another program wrote it: it is not stock.metadata."
        step = "Delete .metadata and load the checkpoint once with the right to write."
    offset = 0 if current is None else _first_difference(current.data, expected)
    findings.problems.append(
        Problem(message=what, next_step=step, file=STOCK_METADATA, offset=offset)
    )


def _newer(store: Store, head: SlotRecord, stock: bytes) -> FormatError | None:
    try:
        stockfooter.check_newest(store, head, stock)
    except FormatError as error:
        return error
    return None


def _first_difference(found: bytes, expected: bytes) -> int:
    pairs = enumerate(zip(found, expected, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(found), len(expected)))
