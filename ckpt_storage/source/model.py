"""One view of checkpoints of every format: their tensors, and where the bytes lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Literal, TypeVar

from ckpt_storage.commit import publishing, slotlog
from ckpt_storage.commit.slotlog import CommitLog
from ckpt_storage.errors import CheckpointGoneError, FormatError, IntegrityError, StorageError
from ckpt_storage.format.boxes import Box, Grid
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.format.documents import MAX_DOCUMENT_BYTES, RESTORE, FileRef, unseal
from ckpt_storage.format.manifest import Manifest, TensorRecord
from ckpt_storage.format.rank_manifest import RankManifest
from ckpt_storage.options import TransferOptions
from ckpt_storage.store.store import Store
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.chunks import ChunkPlace, is_about
from ckpt_storage.transfer.workers import some_at_once

from .file_versions import FileVersions, changed_rather_than_damaged

Key = tuple[str, tuple[int, ...] | None]
"""FQN and offsets of a chunk; None for a blob."""

SourceFormat = Literal[
    "ckpt_storage", "dcp", "dcp_safetensors", "safetensors", "torch_save", "torch_checkpointing"
]


_M = TypeVar("_M", Manifest, RankManifest)


@dataclass(slots=True, kw_only=True)
class Source(ABC):
    """A checkpoint of any format, as readers see it.

    `save_id` is None where the format has none; `blobs` are the FQNs of values that are no tensors;
    `planner_data` has the path of each value in the nested state dict, None if unknown. `versions`
    are those of another writer's files before any of them was read. Our files are written once and
    have checksums, and need none.
    """

    store: Store
    format: SourceFormat
    tensors: Mapping[str, TensorRecord]
    blobs: frozenset[str] = frozenset()
    planner_data: Mapping[str, tuple[str | int, ...]] | None = None
    save_id: str | None = None
    versions: FileVersions = field(default_factory=FileVersions)

    @abstractmethod
    def places(self, keys: Sequence[Key]) -> Sequence[ChunkPlace]:
        """Return where chunks and blobs lie; reads the documents for that in parallel.

        Raises `FormatError` if documents disagree.
        """

    def check_unchanged(self, store: Store, paths: Collection[str] | None = None) -> None:
        """Raise `CheckpointGoneError` if another writer changed files, all or those of `paths`."""
        self.versions.check(store, paths)

    @property
    def paths(self) -> set[str]:
        """The files that hold the values, as far as another writer's metadata names them."""
        return set()

    @abstractmethod
    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return the error to raise if the file of `place` is absent."""


def value_keys(tensors: Mapping[str, TensorRecord], blobs: Iterable[str]) -> list[Key]:
    """Return the keys of all chunks with elements, then of all blobs."""
    chunks: list[Key] = [
        (fqn, box.offsets)
        for fqn, info in tensors.items()
        for box in info.boxes
        if not box.is_empty
    ]
    return [*chunks, *((fqn, None) for fqn in sorted(blobs))]


class _RankIndex:
    """The rank manifest of one rank, indexed by item.

    Of several chunks at the same offsets the first with elements counts.
    """

    def __init__(self, manifest: RankManifest) -> None:
        files, fqns = manifest.files, manifest.fqns
        # Blobs have the box number -1, the last.
        offsets = [*(box.offsets for box in manifest.boxes), None]
        is_empty = [*(box.is_empty for box in manifest.boxes), False]
        items: dict[Key, int] = {}
        empty: dict[Key, int] = {}
        columns = (zip(file.fqn, file.box, strict=True) for file in files)
        for number, (name, at) in enumerate(chain.from_iterable(columns)):
            kind = empty if is_empty[at] else items
            kind.setdefault((fqns[name], offsets[at]), number)
        self.manifest, self.items = manifest, empty | items
        self.item_starts = list(accumulate((len(file.fqn) for file in files[:-1]), initial=0))
        self.blocks = [memoryview(array("I", file.block_crcs)) for file in files]
        self.block_starts = [file.block_starts() for file in files]


_MAX_TUPLE = 4
"""Up to so many checksums are kept as a tuple, which the garbage collector stops tracking."""


class CommittedSource(Source):
    """A checkpoint of ours, by head and manifest; rank manifests are read when needed."""

    def __init__(
        self, store: Store, record: SlotRecord, manifest: Manifest, options: TransferOptions
    ) -> None:
        super().__init__(
            store=store,
            format="ckpt_storage",
            tensors=manifest.tensors,
            blobs=frozenset(manifest.blobs),
            planner_data=manifest.planner_data,
            save_id=manifest.save_id,
        )
        self.record, self.manifest, self.ties = record, manifest, manifest.ties
        self.options = options
        self._ranks: dict[int, RankManifest] = {}
        self._indexes: dict[int, _RankIndex] = {}
        self._chunks: dict[tuple[int, tuple[int, ...]], tuple[Box, int]] = {}

    def rank_manifest(self, rank: int) -> RankManifest:
        """Return the manifest of one rank, checked."""
        if rank not in self._ranks:
            self._ranks[rank] = read_rank_manifest(self.store, self.manifest, rank)
        return self._ranks[rank]

    def _chunk(self, fqn: str, offsets: tuple[int, ...] | None) -> tuple[Box | None, int]:
        """Return the chunk at `offsets`, None for a blob, and the rank that wrote it."""
        if offsets is None:
            return None, self.manifest.blobs[fqn]
        tensor = self.manifest.tensors[fqn]
        # Equal tensors share a record, and so its chunks.
        key = (id(tensor), offsets)
        if key not in self._chunks:
            self._index_chunks(tensor, offsets)
        if key not in self._chunks:
            raise FormatError(
                f"{fqn} has no chunk at {offsets}.",
                next_step="Load with the metadata that belongs to this checkpoint.",
            )
        return self._chunks[key]

    def _index_chunks(self, tensor: TensorRecord, offsets: tuple[int, ...]) -> None:
        boxes, owners = tensor.boxes, tensor.owners
        if not isinstance(boxes, Grid):
            # In reverse order, as of equal offsets the first counts.
            for box, rank in zip(reversed(boxes), reversed(owners), strict=True):
                self._chunks[id(tensor), box.offsets] = box, rank
        elif (cell := boxes.cell_at(offsets)) is not None:
            self._chunks[id(tensor), offsets] = boxes[cell], owners[cell]

    def places(self, keys: Sequence[Key]) -> list[ChunkPlace]:
        """Return where chunks and blobs lie; read the manifests of their ranks."""
        chunks = [self._chunk(*key) for key in keys]
        ranks = sorted({rank for _, rank in chunks} - self._ranks.keys())
        reads = [partial(self.rank_manifest, rank) for rank in ranks]
        if len(reads) == 1:
            # Starting a thread takes longer than a read from a disk.
            reads[0]()
        elif reads:
            what, deadline = "read rank manifests", self.store.deadline
            some_at_once(reads, self.options.thread_count, name=what, deadline=deadline)
        return [self._place(key, box, rank) for key, (box, rank) in zip(keys, chunks, strict=True)]

    def _place(self, key: Key, box: Box | None, rank: int) -> ChunkPlace:
        index = self._indexes.get(rank)
        if index is None:
            index = self._indexes[rank] = _RankIndex(self.rank_manifest(rank))
        at = index.items.get(key)
        if at is None:
            raise self._mismatch(f"{key[0]} has a chunk at {key[1]}", rank, "does not list it")
        number = bisect_right(index.item_starts, at) - 1
        item = at - index.item_starts[number]
        file = index.manifest.files[number]
        if box is not None:
            dtype, listed = file.dtype[item], index.manifest.box_of(file, item)
            actual = index.manifest.dtypes[dtype] if dtype >= 0 else "blob"
            expected = self.manifest.tensors[key[0]].dtype
            if actual != expected or listed != box:
                raise self._mismatch(
                    f"{key[0]} has a {expected} chunk of {list(box.sizes)} at {list(box.offsets)}",
                    rank,
                    f"lists {actual} of {list(listed.sizes if listed else ())}",
                )
        starts = index.block_starts[number]
        crcs = index.blocks[number][starts[item] : starts[item + 1]]
        return ChunkPlace(
            path=file.path,
            fqn=key[0],
            start=file.payload_start[item],
            size_bytes=file.payload_bytes[item],
            sizes=() if box is None else box.sizes,
            file_bytes=file.size_bytes,
            rank=rank,
            block_bytes=file.block_bytes,
            crcs=tuple(crcs) if len(crcs) <= _MAX_TUPLE else crcs,
        )

    def _mismatch(self, what: str, rank: int, instead: str) -> FormatError:
        text = f"The manifest says that {what}; the rank manifest of rank {rank} {instead}."
        return FormatError(text, path=self.manifest.ranks[rank].path, rank=rank, next_step=RESTORE)

    def explain_missing(self, place: ChunkPlace) -> Exception:
        """Return `CheckpointGoneError` if the head has moved, else `IntegrityError`."""
        by = f", which rank {place.rank} wrote and {place.fqn} needs," if place.fqn else ""
        return gone(self.store, self.manifest.save_id, place.path) or IntegrityError(
            f"{place.path}{by} is missing.",
            fqn=place.fqn or None,
            path=place.path,
            rank=place.rank,
            offset=0,
            next_step=RESTORE,
        )


def explained(
    error: StorageError | IntegrityError,
    places: Iterable[ChunkPlace],
    source: Source,
    *,
    effect: str = "",
) -> Exception:
    """Return the error to raise for `error`, which a read of `places` raised.

    For damage it names the value at that offset, its rank, and the `effect`.
    """
    mine = [place for place in places if is_about(error, place.path)]
    if not mine:
        return error
    if isinstance(error, StorageError):
        return source.explain_missing(mine[0]) if error.kind == "not-found" else error
    offset = error.offset or 0
    place = next((p for p in mine if p.start <= offset < p.start + p.size_bytes), mine[0])
    text = str(error).removesuffix(error.next_step or "").strip()
    if error.fqn is None and place.fqn:
        by = f", written by rank {place.rank}" if place.rank is not None else ""
        text += f" The file holds {place.fqn}{by}."
    return IntegrityError(
        f"{text} {effect}".strip(),
        fqn=error.fqn or place.fqn or None,
        offset=error.offset,
        path=place.path,
        rank=place.rank,
        phase=error.phase,
        next_step=error.next_step,
    )


@contextmanager
def adding_context(
    source: Source, store: Store, places: Sequence[ChunkPlace], *, effect: str = ""
) -> Iterator[None]:
    """Explain errors of the block, which reads `places` and may extend them.

    Raises `CheckpointGoneError`, instead of damage or at the end, if another writer changed files.
    """
    with changed_rather_than_damaged(partial(source.check_unchanged, store)):
        try:
            yield
        except (StorageError, IntegrityError) as error:
            explanation = explained(error, places, source, effect=effect)
            if explanation is error:
                raise
            raise explanation from error
    source.check_unchanged(store, {place.path for place in places})


def gone(store: Store, save_id: str, path: str) -> CheckpointGoneError | None:
    """Return the error for a save that is no longer the head, None while it is.

    `path` is the absent file.
    """
    head = slotlog.read_log(store).head
    if head is not None and head.save_id == save_id:
        return None
    now = "deleted" if head is None else f"overwritten by save {head.save_id}"
    return CheckpointGoneError(
        f"Save {save_id} of {store.url} is gone: it was {now} since it was opened.",
        path=path,
        phase="load",
        next_step="Load again, or open it again, to get what is there now.",
    )


def read_document(
    store: Store, reference: FileRef, *, save_id: str, max_bytes: int = MAX_DOCUMENT_BYTES
) -> bytes:
    """Return a document of `save_id`, checked by the length and checksum of its reference.

    Raises `IntegrityError` if it is missing, or `CheckpointGoneError` if `save_id` was superseded
    and freed. `max_bytes` and other errors are those of `objects.read_referenced`.
    """
    try:
        return objects.read_referenced(store, reference, max_bytes=max_bytes)
    except IntegrityError as error:
        raise (gone(store, save_id, reference.path) or error) from error.__cause__


def _read(store: Store, reference: FileRef, save_id: str, kind: type[_M]) -> _M:
    path = reference.path
    data = read_document(store, reference, save_id=save_id)
    document = kind.from_body(unseal(data, path=path), where=path)
    if document.save_id != save_id:
        what = f"{path} belongs to save {document.save_id}."
        raise FormatError(what, path=path, next_step=RESTORE)
    return document


def read_rank_manifest(store: Store, manifest: Manifest, rank: int) -> RankManifest:
    """Return the manifest of one rank, checked. Raises as `read_document`, and `FormatError`."""
    reference = manifest.ranks[rank]
    document = _read(store, reference, manifest.save_id, RankManifest)
    if (document.rank, document.world_size) != (rank, manifest.world_size):
        what = (
            f"{reference.path} is the manifest of rank {document.rank} of {document.world_size}, "
            f"and should be of rank {rank} of {manifest.world_size}."
        )
        raise FormatError(what, path=reference.path, next_step=RESTORE)
    return document


def read_manifest(store: Store, record: SlotRecord) -> Manifest:
    """Return the manifest that a commit record names, checked.

    Raises as `read_document`, and `FormatError` if it is missing because newer slots were lost.
    """
    assert record.manifest and record.save_id  # noqa: S101, PT018  # no other is a head
    try:
        return _read(store, record.manifest, record.save_id, Manifest)
    except IntegrityError:
        # The save may have been superseded and freed, and the newer slots lost.
        publishing.check_newest(store, CommitLog.ending_with(record))
        raise
