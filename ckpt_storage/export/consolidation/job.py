"""What a consolidation is told, and what it needs of its ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from ckpt_storage._version import __version__
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.options import (
    DEFAULT_MEMORY_LIMIT_BYTES,
    DEFAULT_PART_BYTES,
    MIB,
    Phase,
    RetryPolicy,
    Timeouts,
    TransferOptions,
    default_memory_limit_bytes,
)
from ckpt_storage.source.model import SourceFormat
from ckpt_storage.store import Location, endpoint_of
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store

from .executors import Copies
from .options import ConsolidateOptions
from .plan import Skipped


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


_LOCAL_THREADS = 2
_REMOTE_THREADS = 8
_LOCAL_PART_BYTES = 16 * MIB

Track = Callable[[int, str | None], AbstractContextManager[Callable[[int], None]]]
"""Takes the bytes that this rank will write, and the save id; gives what takes bytes written."""


class Ranks(Protocol):
    """What a consolidation needs of the operation that it runs in: an `operation.Operation`."""

    rank: int
    world_size: int
    is_coordinator: bool

    def phase(
        self, phase: Phase, timeout_s: float | None = None, *, total_bytes: int = 0
    ) -> Deadline:
        """Begin a phase on this rank."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Send to the coordinator."""

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Receive from the coordinator."""

    def broadcast(self, payload: bytes) -> bytes:
        """Share the coordinator's payload."""


def _untracked(
    _total_bytes: int, _save_id: str | None
) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda _count: None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolidateJob:
    """What is consolidated, to where and how; the same on all ranks.

    `ties` are recorded ones, alias to target in FQNs; None: those that the save wrote down.
    For a save that goes on with it: `slot` is that of its commit (None: the head), and `commits` is
    where its commit records lie, if not in `source`.
    Pickles if `track` does.
    """

    source: Location
    output: Location
    options: ConsolidateOptions = field(default_factory=ConsolidateOptions)
    ties: Mapping[str, str] | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    copies: Copies = "auto"
    thread_count: int | None = None
    slot: int | None = None
    commits: Location | None = None
    track: Track = _untracked

    def __post_init__(self) -> None:
        source, output = self.source.url, self.output.url
        inner = (source, f"{source}/commits", f"{source}/saves")
        if output in inner or output.startswith(tuple(f"{one}/" for one in inner[1:])):
            raise InvalidInputError(
                f"The output {self.output.url} is where the checkpoint's own files lie.",
                next_step=f"Give a folder of its own, such as {self.source.url}/hf.",
            )

    def terms(self) -> dict[str, str]:
        """Return what all ranks must have in common, as `Operation.meet` wants it."""
        options = self.options
        return {
            "the checkpoint's URL": self.source.url,
            "the commit": str(self.slot),
            "the storage's endpoint": endpoint_of(self.source),
            "the output's URL": self.output.url,
            "the output storage's endpoint": endpoint_of(self.output),
            "max_file_bytes": str(options.file_limit_bytes),
            "fqn_to_index_mapping": _digest(options.fqn_to_index_mapping),
            "dtype": str(options.cast_to),
            "rename": _digest(options.rename),
            "include": _digest(options.include),
            "exclude": _digest(options.exclude),
            "tied": _digest(options.tied),
            "the version of ckpt_storage": __version__,
        }


def _digest(value: object) -> str:
    """Return a text that is the same for equal options on all ranks; functions are not compared.

    What functions answer is compared as part of the plan.
    """
    if callable(value):
        return "a function"
    if isinstance(value, Mapping):
        value = sorted((str(key), str(one)) for key, one in value.items())
    elif isinstance(value, set | frozenset | list | tuple):
        value = sorted(map(str, value))
    text = repr(value)
    return text if len(text) < 80 else hashlib.sha256(text.encode()).hexdigest()  # noqa: PLR2004


def transfer_options(job: ConsolidateJob, source: Store, target: Store) -> TransferOptions:
    """Return threads and sizes that suit both storages within the memory limit."""
    is_remote = source.capabilities.is_remote or target.capabilities.is_remote
    memory = job.options.memory_limit_bytes
    # All ranks plan alike, on nodes with more of them and with fewer.
    planned = DEFAULT_MEMORY_LIMIT_BYTES if memory is None else memory
    threads = job.thread_count or (_REMOTE_THREADS if is_remote else _LOCAL_THREADS)
    part_bytes = _LOCAL_PART_BYTES
    # A part in flight takes up to three times its bytes: read, put together, joined by a client.
    share_bytes = planned // (3 * threads)
    if is_remote:
        part_bytes = DEFAULT_PART_BYTES
        share_bytes -= share_bytes % MIB if share_bytes > MIB else 0
    return TransferOptions(
        thread_count=threads,
        part_bytes=max(min(part_bytes, share_bytes), MIB // 16),
        memory_limit_bytes=default_memory_limit_bytes() if memory is None else memory,
    )
