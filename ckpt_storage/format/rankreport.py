"""What a rank tells the coordinator of its part of a save: small, columnar, bytes.

Made by `writer` on every rank, read by `reporttable` on the coordinator. Travels as a pickle in
DCP's write results between processes of one version; it is never stored.

Of N ranks that save one model most have the same names and the same pattern of items; those come
as equal bytes, which the coordinator decodes once. What differs is a few distinct boxes. Checksums
of blocks stay in the rank's own document.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .documents import Counts, FileRef
from .manifest import INLINE_LIMIT_BYTES, RankManifest
from .shardtable import BoxKey, BoxTable

Words = NDArray[np.int32]

Tied = tuple[str, BoxKey, int]
"""A chunk of a tensor that may be tied: FQN, box, checksum."""

_LEVEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The report of one rank: its document, its files, and what is in them.

    `vocabulary` and `pattern` (columns FQN, dtype, box of all items) are alike on ranks that hold
    the same tensors. `places` (file number, start, bytes of all items) is there if the coordinator
    asked for it, the `document` if it is small enough to be inlined. `tied` has the chunks with
    elements of tensors that may be tied.
    """

    save_id: str
    rank: int
    world_size: int
    ref: FileRef
    files: Sequence[FileRef]
    item_count: int
    vocabulary: bytes
    pattern: bytes
    boxes: bytes
    places: bytes | None
    document: bytes | None
    ties: Mapping[str, str]
    tied: Sequence[Tied]

    @classmethod
    def of(
        cls,
        manifest: RankManifest,
        ref: FileRef,
        document: bytes,
        *,
        with_places: bool,
        candidates: Iterable[str] = (),
    ) -> RankReport:
        """Return the report on `manifest`, whose sealed `document` is stored as `ref` says.

        `candidates` are the tensors that other ranks may tie.
        """
        table = BoxTable()
        columns = [
            np.array(
                [*file.items.fqn, *file.items.dtype, *table.refer(file.items)], dtype=np.int32
            ).reshape(3, -1)
            for file in manifest.files
        ]
        pattern = np.concatenate([np.empty((3, 0), dtype=np.int32), *columns], axis=1)
        limit_bytes = INLINE_LIMIT_BYTES // manifest.world_size
        return cls(
            save_id=manifest.save_id,
            rank=manifest.rank,
            world_size=manifest.world_size,
            ref=ref,
            files=[file.ref() for file in manifest.files],
            item_count=pattern.shape[1],
            vocabulary=_deflate(
                json.dumps([list(manifest.fqns), list(manifest.dtypes)]).encode("ascii")
            ),
            pattern=_deflate(pattern.tobytes()),
            boxes=_deflate(_flat(table.boxes)),
            places=_deflate(_places(manifest)) if with_places else None,
            document=_deflate(document) if len(document) <= limit_bytes else None,
            ties=dict(manifest.ties),
            tied=_tied(manifest, candidates),
        )

    def read_vocabulary(self) -> tuple[list[str], list[str]]:
        """Return FQNs and dtypes."""
        fqns, dtypes = json.loads(zlib.decompress(self.vocabulary))
        return fqns, dtypes

    def read_pattern(self) -> tuple[Words, Words, Words]:
        """Return the columns FQN, dtype (-1: blob) and box (-1: blob) of all items."""
        words = np.frombuffer(zlib.decompress(self.pattern), dtype=np.int32)
        fqn, dtype, box = words.reshape(3, -1)
        return fqn, dtype, box

    def read_boxes(self) -> tuple[Counts, Counts]:
        """Return the number of dimensions of each box; and offsets, then sizes, of each in turn."""
        words = np.frombuffer(zlib.decompress(self.boxes), dtype=np.int64)
        count = int(words[0])
        return words[1 : 1 + count], words[1 + count :]

    def empty_boxes(self) -> list[bool]:
        """Return, per box, whether it holds no element."""
        ndim, words = self.read_boxes()
        flat, found, at = words.tolist(), [], 0
        for count in ndim.tolist():
            found.append(0 in flat[at + count : at + 2 * count])
            at += 2 * count
        return found

    def read_places(self) -> Counts | None:
        """Return the columns file number, start and bytes of all items, if they were sent."""
        if self.places is None:
            return None
        return np.frombuffer(zlib.decompress(self.places), dtype=np.int64).reshape(3, -1)

    def read_document(self) -> bytes | None:
        """Return the sealed document, if it was sent."""
        return None if self.document is None else zlib.decompress(self.document)


def _deflate(data: bytes) -> bytes:
    return zlib.compress(data, _LEVEL)


def _flat(boxes: Sequence[BoxKey]) -> bytes:
    words = [len(boxes), *(len(offsets) for offsets, _ in boxes)]
    for offsets, sizes in boxes:
        words += offsets
        words += sizes
    return np.array(words, dtype=np.int64).tobytes()


def _places(manifest: RankManifest) -> bytes:
    columns = [
        np.array(
            [[number] * len(file.items), list(file.items.item_start), list(file.items.item_bytes)],
            dtype=np.int64,
        )
        for number, file in enumerate(manifest.files)
    ]
    return np.concatenate([np.empty((3, 0), dtype=np.int64), *columns], axis=1).tobytes()


def _tied(manifest: RankManifest, candidates: Iterable[str]) -> list[Tied]:
    """Return the chunks with elements of what this rank ties and of `candidates`."""
    wanted = {*manifest.ties, *manifest.ties.values(), *candidates}
    at = {i: fqn for i, fqn in enumerate(manifest.fqns) if fqn in wanted} if wanted else {}
    found: list[Tied] = []
    for items in (file.items for file in manifest.files if at):
        for item, number in enumerate(items.fqn):
            offsets, sizes = items.offsets[item], items.sizes[item]
            if number in at and offsets is not None and sizes is not None and all(sizes):
                box = (tuple(offsets), tuple(sizes))
                found.append((at[number], box, int(items.chunk_crcs[item])))
    return found
