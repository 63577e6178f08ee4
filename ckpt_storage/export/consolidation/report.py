"""What a consolidation tells its caller.

Values only. Made by `run`; read by users and the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_storage.source.model import SourceFormat

from .plan import Skipped

__all__ = ["ConsolidatedFile", "ConsolidationReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidatedFile:
    """One weight file. `ranks` wrote it; none did if an earlier run had completed it."""

    name: str
    size_bytes: int
    crc32c: int
    ranks: tuple[int, ...]

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier run had completed it."""
        return not self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidationReport:
    """An export that is complete and published; the same on all ranks.

    source_url, output_url: without credentials; `index_path` is below `output_url`.
    source_format, save_id: what was consolidated; None where the format has no save ids.
    files: in order of their number. `total_bytes` counts tensors only.
    read_bytes: came to the ranks, of the source. sent_bytes: went from them to the output.
        copied_bytes: the storage copied by itself. All three of this run, all ranks together.
    rank_bytes: bytes of weight files that each rank was responsible for, this run.
    skipped: what is in no weight file, and why. ties: alias to target, FQNs, of dropped aliases.
    removed: files of earlier exports and of runs that died that were deleted.
    stale_exports: folders directly below the checkpoint whose export is of another save.
    seconds: from the meeting of the ranks to the end.
    """

    source_url: str
    output_url: str
    source_format: SourceFormat
    save_id: str | None
    index_path: str
    fingerprint: str
    files: Sequence[ConsolidatedFile]
    tensor_count: int
    total_bytes: int
    read_bytes: int
    sent_bytes: int
    copied_bytes: int
    rank_bytes: Sequence[int]
    skipped: Sequence[Skipped]
    ties: Mapping[str, str]
    removed: Sequence[str]
    stale_exports: Sequence[str]
    seconds: float

    @property
    def resumed(self) -> tuple[str, ...]:
        """Names of the weight files that an earlier run had completed."""
        return tuple(file.name for file in self.files if file.is_resumed)
