"""What an open checkpoint tells of itself beside its values: files, ranks, history.

Values only. Made by `session` and `checkpoint`; users read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["HistoryEntry", "StoredFile", "StoredRank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file that holds values: its path below the checkpoint, length and CRC-32C.

    `rank` wrote it. None: the format does not tell.
    """

    path: str
    size_bytes: int
    rank: int | None = None
    crc32c: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRank:
    """What one rank wrote; `host` is None where telling it would cost another request."""

    rank: int
    file_count: int
    size_bytes: int
    host: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One commit slot: what was done to this checkpoint, by whom, when (RFC 3339, their clock).

    type: "commit": `save_id` became the checkpoint. "fence": the attempts `fenced` were given up.
        "deleted": the checkpoint was deleted.
    is_open: whether this is the save that the open checkpoint reads.
    """

    slot: int
    type: Literal["commit", "fence", "deleted"]
    created_at: str
    host: str
    pid: int
    save_id: str | None = None
    fenced: tuple[str, ...] = ()
    is_open: bool = False
