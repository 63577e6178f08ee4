"""What is told of a committed checkpoint to whoever lists or saves it.

Values only. Called by `catalog`, `writer` and the front doors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from .slots import SlotRecord

__all__ = ["CheckpointInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint, as far as its commit record tells.

    `name` is the last part of `url`. `save_id`, `slot` and `created_at` (RFC 3339, the saver's
    clock) are None for a checkpoint that stock torch wrote (`format` "dcp"). `export` is the URL of
    the weight files that the same save made, if it was asked to.
    """

    url: str
    name: str
    format: str
    save_id: str | None = None
    slot: int | None = None
    created_at: str | None = None
    export: str | None = None

    @classmethod
    def of(cls, url: str, record: SlotRecord, *, name: str | None = None) -> Self:
        """Return what a commit record says of the checkpoint at `url`."""
        return cls(
            url=url,
            name=url.rstrip("/").rpartition("/")[2] if name is None else name,
            format="ckpt_storage",
            save_id=record.save_id,
            slot=record.slot,
            created_at=record.created_at,
        )
