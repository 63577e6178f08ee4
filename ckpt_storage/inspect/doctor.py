"""`diagnose`: probes of a storage, under new names, that show what checkpoints can do there."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.names import probe_path
from ckpt_storage.options import MIB, REMOTE_THREADS, RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import try_absence, try_creation, try_range, try_versions
from ckpt_storage.transfer import objects
from ckpt_storage.transfer.ranges import RangeReader, ignore
from ckpt_storage.transfer.writing import ObjectWriter, write_options

from .checks import has_checksum

DEFAULT_TIMEOUT_S = 120.0

Outcome = Literal["yes", "no", "skipped"]

_LACKS = {
    "exclusive create": "Use the native URL of the same place, if this is a mount of an object "
    "store; else let one job write: two jobs that save to one id get no error.",
    "durable": "Use the native URL of the place behind this mount: a save that is reported as "
    "committed may be lost, or lose its shards, when the mount ends.",
    "list": "Grant the right to list: list_checkpoints, retention and cleaning up need it.",
    "delete": "Grant the right to delete: superseded saves and leftovers stay, and use space.",
    "list uploads": "Grant the right to list uploads, or have a lifecycle rule abort them: parts "
    "of uploads that died stay and are paid for.",
}
"""The advice for a probe that fails."""
_NEEDED = {"write", "absent name", "read", "range read", "upload", "download"}
"""Probes without which nothing can be saved or loaded."""

_NOT_NEEDED = "not needed here: replacing a file is one step"
_SMALL = bytes(4096)
_CLOCK_S = 5 * 60.0
_FAR_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The result of one probe; `detail` is the message of the storage if it failed.

    `seconds` is the median of its durations; `size_bytes` is the size that it transferred.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    seconds: float | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`.

    kind: family of storages. clock_offset_s: how far the storage's clock is ahead of this
    machine's; None if unknown. advice: sentences. leftovers: files that could not be removed.
    """

    url: str
    kind: str
    probes: Sequence[Probe]
    clock_offset_s: float | None
    advice: Sequence[str]
    leftovers: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether checkpoints can be saved to and loaded from here."""
        return {probe.name for probe in self.probes if probe.outcome == "yes"} >= _NEEDED


def diagnose(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    large_bytes: int = 16 * MIB,
    timeout: float | Timeouts | Any = DEFAULT_TIMEOUT_S,  # noqa: ANN401  # timedelta too
    retry: RetryPolicy | None = None,
) -> Diagnosis:
    """Probe the storage below `url`: what it can do, how fast it is, and which options to set.

    Writes below a folder with a random name that begins as those of probes, and removes it;
    transfers about eight times `large_bytes`. Reads and changes nothing else. A failed probe is
    reported, not raised. Raises `InvalidInputError` for a URL that cannot be used, and
    `StorageError` if the storage cannot be reached.
    """
    # Few retries, so that they do not hide the times; one lost connection is no failure.
    policy = retry or RetryPolicy(attempt_count=2, first_delay_s=0.2, max_delay_s=1.0)
    location = Location.of(url, storage_options)
    visit = _Visit(location, Timeouts.of(timeout), policy, large_bytes)
    try:
        visit.run()
    finally:
        leftovers = visit.clean_up()
    return Diagnosis(
        url=location.url,
        kind=visit.store.capabilities.kind,
        probes=tuple(visit.probes),
        clock_offset_s=visit.clock_offset_s,
        advice=tuple(visit.advice()),
        leftovers=tuple(leftovers),
    )


class _Visit:
    """One run of all probes, in an order in which a failure decides which probes are skipped."""

    def __init__(
        self, location: Location, timeouts: Timeouts, policy: RetryPolicy, large_bytes: int
    ) -> None:
        self._deadline = Deadline("write", timeouts.write)
        self.store = open_store(location, timeouts=timeouts, retry=policy).bounded(self._deadline)
        self._large_bytes = large_bytes
        # As small parts as the storage takes, so that there are several.
        self._options = write_options(
            self.store.capabilities, thread_count=None, part_bytes=MIB, memory_limit_bytes=None
        )
        self._folder = probe_path()
        self._objects: list[str] = []
        self._crc32c = 0
        self.probes: list[Probe] = []
        self.clock_offset_s: float | None = None

    def run(self) -> None:
        """Run all probes. Raises `StorageError` only if the storage cannot be reached."""
        store, folder, small = self.store, self._folder, f"{self._folder}/small-0"
        probes: dict[str, tuple[Callable[[int], object], int]] = {
            # Not the root, where millions of objects may lie.
            "list": (lambda _: store.list(folder, recursive=False), 1),
            "write": (self._write, 9),
            "absent name": (lambda _: self._try_absence(), 1),
            "read": (lambda _: store.get(small).data != _SMALL and "other bytes came back", 9),
            "range read": (lambda _: try_range(store, small, _SMALL), 9),
            "exclusive create": (lambda _: try_creation(store, self._new("created")), 1),
            "conditional replace": (lambda _: self._try_replacement(), 1),
            "durable": (lambda _: store.durability_problem(), 1),
            "clock": (lambda _: self._read_clock(), 1),
            "upload": (self._put, 3),
            "download": (lambda _: self._get(), 3),
            "list uploads": (lambda _: store.abort_uploads(folder), 1),
            "delete": (lambda _: self._delete(small), 1),
        }
        for name, (call, rounds) in probes.items():
            reason = self._skip_reason(name)
            skipped = Probe(name=name, outcome="skipped", detail=reason)
            self.probes.append(skipped if reason else self._try(name, call, rounds))

    def _skip_reason(self, name: str) -> str:
        """Return why a probe is of no use, "" if it is."""
        failed = {probe.name for probe in self.probes if probe.outcome != "yes"}
        if "write" in failed:
            return "nothing can be written"
        if name == "download" and "upload" in failed:
            return "nothing was uploaded"
        if name == "list uploads" and not self.store.capabilities.lists_uploads:
            return "this kind of storage lists no uploads"
        is_rename = name == "conditional replace" and self.store.capabilities.kind == "posix"
        return _NOT_NEEDED if is_rename else ""

    def _try(self, name: str, call: Callable[[int], object], rounds: int) -> Probe:
        """Run one probe, which fails if `call` raises or returns a text."""
        times: list[float] = []
        for number in range(rounds):
            begin_s = time.perf_counter()
            try:
                self._deadline.check("Measuring")
                problem = call(number)
            except CheckpointError as error:
                kind = error.kind if isinstance(error, StorageError) else ""
                if name in {"list", "write"} and kind in {"connection", "credentials", "timeout"}:
                    raise
                problem = None if name == "list" and kind == "not-found" else str(error)
            if problem and isinstance(problem, str):
                return Probe(name=name, outcome="no", detail=problem)
            times.append(time.perf_counter() - begin_s)
        size_bytes = self._large_bytes if name in {"upload", "download"} else 0
        seconds = statistics.median(times)
        return Probe(name=name, outcome="yes", seconds=seconds, size_bytes=size_bytes)

    def _new(self, name: str) -> str:
        """Return the path of a new file, which `clean_up` removes."""
        self._objects.append(f"{self._folder}/{name}")
        return self._objects[-1]

    def _write(self, number: int) -> None:
        """Write a small object under a new name: some storages limit writes to one name."""
        self.store.make_folders([self._folder])
        self.store.put(self._new(f"small-{number}"), _SMALL)

    def _try_absence(self) -> None:
        """Read an absent name, as each save and load does."""
        try_absence(self.store, f"{self._folder}/absent")

    def _try_replacement(self) -> str:
        return try_versions(self.store, self._new("replaced"))[0]

    def _read_clock(self) -> None:
        before_s = time.time()
        there_s = self.store.server_time(self._new("clock"))
        self.clock_offset_s = there_s - (before_s + time.time()) / 2

    def _put(self, number: int) -> None:
        """Write a large object as a save does."""
        writer = ObjectWriter(
            self.store,
            self._new(f"large-{number}"),
            planned_bytes=self._large_bytes,
            options=self._options,
            deadline=self._deadline,
            on_bytes=ignore,
        )
        self._crc32c = 0
        try:
            for start in range(0, self._large_bytes, MIB):
                size = min(MIB, self._large_bytes - start)
                piece = memoryview(start.to_bytes(8, "little") * (MIB // 8))[:size]
                self._crc32c = crc32c_of(piece, self._crc32c)
                writer.write(piece)
            writer.complete()
        except BaseException:
            with contextlib.suppress(CheckpointError):
                writer.abort()
            raise

    def _get(self) -> str:
        """Read the first large object as a load does, and check its bytes."""
        path = f"{self._folder}/large-0"
        sent = FileRef(path=path, size_bytes=self._large_bytes, crc32c=self._crc32c)
        ranges = RangeReader(self.store, self._options)
        return "" if has_checksum(ranges, sent) else "other bytes came back than were sent"

    def _delete(self, path: str) -> str:
        self.store.delete([path])
        is_there = objects.is_there(self.store, path)
        return "an object is still there after its deletion" if is_there else ""

    def clean_up(self) -> list[str]:
        """Remove the files of this run; return those that stay. Never raises."""
        store = self.store.cleaning_up()
        for remove in (
            partial(store.delete_folder, self._folder),
            partial(store.delete, self._objects),
        ):
            with contextlib.suppress(CheckpointError):
                remove()
                return []
        return [f"{store.url}/{self._folder}"]

    def advice(self) -> Iterator[str]:
        """Yield advice; none if the defaults are suitable."""
        failed = {probe.name for probe in self.probes if probe.outcome == "no"}
        if "write" not in failed:
            yield from (advice for name, advice in _LACKS.items() if name in failed)
        if abs(self.clock_offset_s or 0) > _CLOCK_S:
            yield "Set this machine's clock: object stores refuse requests that it signs."
        get_s = next((probe.seconds for probe in self.probes if probe.name == "read"), None) or 0.0
        if self.store.capabilities.is_remote and get_s > _FAR_S:
            yield (
                f"Set thread_count to {(2 if get_s < 2 * _FAR_S else 4) * REMOTE_THREADS}: a "
                f"request takes {get_s * 1000:.0f} ms; the default is {REMOTE_THREADS} in flight."
            )
