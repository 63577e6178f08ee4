"""Every exception this package raises, grouped by what the caller does next.

Every error pickles and unpickles, because an exception that does not makes DCP's peer ranks hang in
a collective (`torch.distributed.checkpoint.utils._DistWrapper` gathers exceptions by pickle). A
message has three parts: what failed, on which object and rank, what to do next.
"""

from __future__ import annotations

import copyreg
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, ClassVar


@dataclass(eq=False, repr=False)
class CheckpointError(Exception):
    """Base of all errors of this package.

    `code` is stable across releases; `rank`, `phase` and `path` are None where they
    do not apply. `path` never carries credentials. `next_step` is one sentence and is
    the last part of the message.
    """

    code: ClassVar[str] = "checkpoint"
    message: InitVar[str]
    _: KW_ONLY
    next_step: str | None = None
    rank: int | None = None
    phase: str | None = None
    path: str | None = None

    def __post_init__(self, message: str) -> None:
        self.args = (f"{message} {self.next_step}" if self.next_step else message,)

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by `__init__`, which a derived class may have changed.
        return copyreg.__newobj__, (type(self),), {**vars(self), "args": self.args}  # type: ignore[attr-defined]

    def __str__(self) -> str:
        # OSError and its children print errno tuples; ours always print the sentence.
        return str(self.args[0]) if self.args else self.__class__.__name__


class InvalidInputError(CheckpointError, ValueError):
    """An argument, option, URL or target cannot be used; nothing was stored."""

    code = "invalid-input"


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the URL."""

    code = "not-found"


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a committed checkpoint at the URL, and `overwrite` was not set."""

    code = "exists"


class CheckpointGoneError(CheckpointError, FileNotFoundError):
    """The checkpoint was deleted or superseded while it was being read."""

    code = "gone"


class CheckpointInProgressError(CheckpointError):
    """A save has begun at the URL and not committed; there is nothing to read yet."""

    code = "in-progress"


@dataclass(eq=False, repr=False, kw_only=True)
class StorageError(CheckpointError, OSError):
    """The storage refused or failed an operation.

    `retryable`: whether the same call may succeed later. `kind` is one of
    "not-found", "exists", "precondition", "permission", "credentials", "no-space", "throttled",
    "timeout", "connection", "bad-response", "range", "refused", "unsupported", "not-begun",
    "unknown", "other". "refused": the storage rejects the request as such. "not-begun": nothing
    was sent. "unknown": the operation may have been done or not.
    """

    code = "storage"
    kind: str = "other"
    retryable: bool = False


@dataclass(eq=False, repr=False, kw_only=True)
class UnsupportedByStoreError(StorageError):
    """The storage does not support the operation."""

    code = "unsupported-by-store"
    kind: str = "unsupported"


@dataclass(eq=False, repr=False, kw_only=True)
class CommitConflictError(CheckpointError):
    """Another save won the slot, or this attempt was fenced; this save is not committed.

    `winner` describes the record in the slot (save id, host, process id, time).
    """

    code = "commit-conflict"
    winner: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False, kw_only=True)
class CommitUnknownError(CheckpointError):
    """Whether the save is committed is unknown; `save_id` and `slot` identify it."""

    code = "commit-unknown"
    save_id: str = ""
    slot: int | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class NotPublishedError(CheckpointError):
    """The save is committed (`info`), but `.metadata` could not be replaced after it.

    Readers of this package load it. torch's own readers find the previous save until `publish`,
    or the next save or load with write permission, updates `.metadata`.
    """

    code = "not-published"
    info: Any = None


@dataclass(eq=False, repr=False, kw_only=True)
class RankMismatchError(CheckpointError, ValueError):
    """Ranks have different values of something that must be equal; `values`: value to ranks."""

    code = "rank-mismatch"
    values: dict[str, list[int]] = field(default_factory=dict)


@dataclass(eq=False, repr=False, kw_only=True)
class RankFailedError(CheckpointError):
    """Another rank failed or died; `failures` maps each rank to its error or last sign of life.

    `is_silent`: it reported no error (killed, stopped or disconnected). `info` is the checkpoint
    if the save was already committed.
    """

    code = "rank-failed"
    failures: dict[int, str] = field(default_factory=dict)
    is_silent: bool = False
    info: Any = None


class SaveCancelledError(CheckpointError):
    """The save was aborted because `cancel` was called on a rank; it is not committed."""

    code = "cancelled"


@dataclass(eq=False, repr=False, kw_only=True)
class PhaseTimeoutError(CheckpointError, TimeoutError):
    """A phase did not end before its deadline of `timeout_s` seconds."""

    code = "phase-timeout"
    timeout_s: float | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class IntegrityError(CheckpointError):
    """Stored bytes are not the bytes that were written.

    `path` is the file, `fqn` the tensor or blob if known, `offset` the first byte of the file that
    may be damaged.
    """

    code = "integrity"
    fqn: str | None = None
    offset: int | None = None


class FormatError(CheckpointError, ValueError):
    """A file has another format, or a version that this release cannot read."""

    code = "format"


class UnsafeContentError(CheckpointError):
    """Reading would execute code, or a name leads out of the folder; nothing was executed."""

    code = "unsafe-content"


@dataclass(eq=False, repr=False, kw_only=True)
class ConsolidationError(CheckpointError):
    """Consolidation failed; `info` is the committed checkpoint, which stays valid."""

    code = "consolidation"
    info: Any = None
