"""Files to copy, and the parts that each is cut into.

Pure: knows what a storage can do and where the checksums of a file have their edges; moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from ckpt_storage.format.shardspans import Spans
from ckpt_storage.options import MIB, TransferOptions
from ckpt_storage.store.base import Capabilities
from ckpt_storage.transfer.filewriter import part_bytes_for

__all__ = ["FilePart", "FileToCopy", "copied_parts", "streamed_parts"]

_LEAST_COPY_BYTES = MIB
"""Below this a copy by the storage takes more requests than reading and writing."""

_COPY_BYTES = 256 * MIB
"""Most of one copy: a storage takes seconds for it, and several go on at a time."""

_MOST_PARTS = 9_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToCopy:
    """One file: where it is, what it is called at the target, and how long it must be.

    `spans` holds its checksums; None: only the length is known. `is_compared`: one that is at the
    target already, of this length, is held against the source byte by byte, not believed.
    """

    path: str
    target: str
    size_bytes: int
    spans: Spans | None = None
    is_compared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """Bytes `[start, stop)` of a file; the parts of a file are numbered from 0."""

    number: int
    start: int
    stop: int
    is_last: bool


def streamed_parts(
    file: FileToCopy, capabilities: Capabilities, options: TransferOptions
) -> list[FilePart]:
    """Return the parts that a file is read and sent in.

    Raises `InvalidInputError` if the storage or the memory limit does not allow it.
    """
    size = part_bytes_for(capabilities, options, file.size_bytes)
    starts = range(0, file.size_bytes, size)
    return [
        FilePart(
            number=number,
            start=start,
            stop=min(start + size, file.size_bytes),
            is_last=start == starts[-1],
        )
        for number, start in enumerate(starts)
    ]


def copied_parts(file: FileToCopy, capabilities: Capabilities) -> list[FilePart]:
    """Return the parts that a storage copies a file in, of about equal length, cut between blocks.

    None where the file is too short for it or the storage cannot copy it so.
    """
    total = file.size_bytes
    if total < _LEAST_COPY_BYTES:
        return []
    most = capabilities.max_part_count or _MOST_PARTS
    size = max(_COPY_BYTES, -(-total // min(most, _MOST_PARTS)))
    least, limit = capabilities.copy_part_min_bytes or 1, capabilities.copy_part_max_bytes
    # A part that is moved to the edge of a block must not get too short.
    count = max(1, min(-(-total // size), total // (least + MIB)))
    cuts = [total * i // count for i in range(count + 1)]
    if file.spans is not None:
        cuts = sorted({file.spans.edge_before(cut) for cut in cuts})
    parts = [
        FilePart(number=number, start=start, stop=stop, is_last=stop == total)
        for number, (start, stop) in enumerate(pairwise(cuts))
    ]
    fits = all(
        (limit is None or part.stop - part.start <= limit)
        and (part.is_last or part.stop - part.start >= least)
        for part in parts
    )
    return parts if fits else []
