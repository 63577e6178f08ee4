"""Every tunable, with its unit, its default and where the default comes from.

Values only: no I/O.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from .errors import InvalidInputError

KIB = 1024
MIB = 1024 * KIB

DEFAULT_TIMEOUT_S = 3600.0
"""One hour: long enough for any save seen in the field, and never infinite."""

DEFAULT_PLAN_S = 240.0
"""Four minutes: ranks are seldom so far apart, and a rank that waits twice as long, for the others
and for the coordinator, still raises before NCCL's default of ten minutes ends the job."""

DEFAULT_SILENCE_S = 120.0
"""Longer than any pause in which a live process gets no processor time or no network."""

DEFAULT_BLOCK_BYTES = 64 * KIB
"""Unit of CRC: a ranged read is rounded out to it. 64 KiB costs 4 bytes per block."""

MIN_BLOCK_BYTES = KIB

DEFAULT_PART_BYTES = 16 * MIB
"""Unit of upload and of one ranged read. S3 wants 5 MiB at least, 10,000 parts at most."""

LOCAL_WRITE_BYTES = 8 * MIB
"""One local write request; the store itself writes smaller pieces."""

LOCAL_READ_BYTES = 8 * MIB
"""One local read request; the store itself reads and delivers smaller pieces."""

REMOTE_THREADS = 8
"""Requests in flight per rank where a request takes a network round trip."""

DEFAULT_MEMORY_LIMIT_BYTES = 256 * MIB
"""Ceiling of buffers that hold bytes in flight, per process."""

_NODE_MEMORY_BYTES = 1024 * MIB
"""Sum of the defaults of all ranks of a node: what 200 Gbit/s transfer in 40 ms. More bytes in
flight would wait for the link."""

_MIN_SHARE_BYTES = 64 * MIB
"""The minimum of a rank: a few parts of the size that S3 needs, each twice."""

STOCK_ENTRY_LIMIT = 200_000
"""Items of all ranks up to which "auto" writes `.metadata`: some 40 MB, read by every rank."""


DEFAULT_GROUPS = ("optim*",)
"""Names with shard files of their own: the optimizer's state, which is larger than the model."""


def default_memory_limit_bytes(environ: Mapping[str, str] = os.environ) -> int:
    """Return the default ceiling of buffers of this process, its share of the node's.

    torchrun and compatible launchers set `LOCAL_WORLD_SIZE`, the number of ranks per node.
    """
    local_size = environ.get("LOCAL_WORLD_SIZE", "")
    is_count = local_size.isascii() and local_size.isdigit()
    rank_count = max(1, int(local_size)) if is_count else 1
    share_bytes = max(_MIN_SHARE_BYTES, _NODE_MEMORY_BYTES // rank_count)
    return min(DEFAULT_MEMORY_LIMIT_BYTES, share_bytes)


StockMetadata = Literal["auto", "always", "never"]
UnsafeValues = Literal["warn", "refuse"]
Replicas = Literal["warn", "raise", "first"]
PageCache = Literal["keep", "drop"]
Casts = Literal["checked", "exact", "any"]
Shared = Literal["auto", "always", "never"]
Phase = Literal["plan", "stage", "write", "commit", "consolidate", "load"]


def check_choice(name: str, value: object, kind: object) -> None:
    """Raise `InvalidInputError` unless an argument is one of the values of `kind`, a `Literal`."""
    *others, last = map(repr, get_args(kind))
    if value not in get_args(kind):
        how = f"Give {', '.join(others)} or {last}."
        raise InvalidInputError(f"{name} is {value!r}.", next_step=how)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines in seconds, one per phase, one for a single storage request, one for silence.

    A phase that does not end in time raises `PhaseTimeoutError`. A rank without heartbeats for
    `silence` seconds counts as dead (`RankFailedError`); a thread of each rank sends them, however
    busy the rank is. Values must be positive and finite.
    """

    plan: float = DEFAULT_PLAN_S
    stage: float = DEFAULT_TIMEOUT_S
    write: float = DEFAULT_TIMEOUT_S
    commit: float = DEFAULT_TIMEOUT_S
    consolidate: float = DEFAULT_TIMEOUT_S
    load: float = DEFAULT_TIMEOUT_S
    request: float = 300.0
    silence: float = DEFAULT_SILENCE_S

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise InvalidInputError(
                    f"Timeouts.{field.name} is {value!r}.",
                    next_step="Give a positive, finite number of seconds.",
                )

    @classmethod
    def of(cls, value: float | timedelta | Timeouts | None) -> Timeouts:
        """Return the `Timeouts` for a user's `timeout=` argument. Raises `InvalidInputError`.

        A number of seconds or a `timedelta` sets every phase; `request` and `silence` are then the
        smaller of it and the default.
        """
        if value is None:
            return cls()
        if isinstance(value, Timeouts):
            return value
        try:
            seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"timeout is {value!r}.",
                next_step="Give seconds, a datetime.timedelta or a ckpt_storage.Timeouts.",
            ) from None
        maximum = {"request": 300.0, "silence": DEFAULT_SILENCE_S}
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: min(seconds, maximum.get(name, seconds)) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often and how long a failed, retryable storage request is retried.

    Delays grow exponentially with full jitter (Brooker, "Exponential Backoff And
    Jitter", AWS Architecture Blog, 2015). `attempt_count` counts the first try.
    """

    attempt_count: int = 6
    first_delay_s: float = 0.1
    max_delay_s: float = 20.0

    def __post_init__(self) -> None:
        if self.attempt_count < 1 or self.first_delay_s < 0 or self.max_delay_s < 0:
            raise InvalidInputError(
                f"{self!r} is invalid.",
                next_step="attempt_count is at least 1 and delays are not negative.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOptions:
    """Resources that a save or load may use in a process.

    `grown_part_bytes`: the maximum size of the parts of a large file.
    """

    thread_count: int = 1
    part_bytes: int = DEFAULT_PART_BYTES
    block_bytes: int = DEFAULT_BLOCK_BYTES
    memory_limit_bytes: int = DEFAULT_MEMORY_LIMIT_BYTES
    grown_part_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("thread_count", "part_bytes", "block_bytes", "memory_limit_bytes"):
            if type(getattr(self, name)) is not int:
                raise InvalidInputError(
                    f"{name} is {getattr(self, name)!r}.", next_step="Give an integer."
                )
        if self.thread_count < 1:
            raise InvalidInputError(
                f"thread_count is {self.thread_count}.", next_step="Give 1 or more."
            )
        if self.block_bytes < MIN_BLOCK_BYTES or self.block_bytes % 64:
            raise InvalidInputError(
                f"block_bytes is {self.block_bytes}.",
                next_step="Give a multiple of 64, 1 KiB or more.",
            )
        if self.part_bytes < self.block_bytes:
            raise InvalidInputError(
                f"part_bytes is {self.part_bytes}, less than block_bytes {self.block_bytes}.",
                next_step="Give at least one block; S3 needs 5 MiB or more.",
            )
        if self.memory_limit_bytes < self.part_bytes:
            raise InvalidInputError(
                f"memory_limit_bytes is {self.memory_limit_bytes}, less than one part of "
                f"{self.part_bytes} bytes.",
                next_step="Raise memory_limit_bytes or lower part_bytes.",
            )

    @classmethod
    def for_storage(
        cls,
        *,
        is_remote: bool,
        local_threads: int,
        local_part_bytes: int,
        thread_count: int | None,
        memory_limit_bytes: int | None,
        part_bytes: int | None = None,
    ) -> TransferOptions:
        """Return the user's options, with defaults for the kind of storage.

        More and larger requests make up for network round trips. The default part fits into the
        memory that the user allows.
        """
        memory = memory_limit_bytes
        if memory is None:
            memory = default_memory_limit_bytes()
        if thread_count is None:
            thread_count = REMOTE_THREADS if is_remote else local_threads
        if part_bytes is None:
            part_bytes = DEFAULT_PART_BYTES if is_remote else local_part_bytes
            # Twice: a client may join the views of a part.
            share = memory // (2 * max(1, thread_count))
            part_bytes = int(min(part_bytes, max(share, DEFAULT_BLOCK_BYTES)))
        return cls(thread_count=thread_count, part_bytes=part_bytes, memory_limit_bytes=memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """Progress of a phase in this process: bytes done, and bytes in all."""

    phase: Phase
    rank: int
    done_bytes: int = 0
    total_bytes: int
    save_id: str | None = None


Progress = bool | Callable[[ProgressEvent], None] | None
