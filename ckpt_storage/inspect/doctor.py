"""`diagnose`: what a storage can do for checkpoints, tried out under names of its own."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ckpt_storage.commit import slotlog
from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.format.crc import crc32c_of
from ckpt_storage.format.documents import FileRef
from ckpt_storage.format.names import probe_path
from ckpt_storage.options import MIB, REMOTE_THREADS, RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import try_absence, try_creation, try_range, try_versions
from ckpt_storage.transfer.ranges import RangeReader, ignore
from ckpt_storage.transfer.writing import ObjectWriter, write_options

from .checks import has_checksum

DEFAULT_TIMEOUT_S = 120.0

Outcome = Literal["yes", "no", "skipped"]

_LACKS = {
    "exclusive create": "Use the native URL of the same place, if this is a mount of an object "
    "store; else let one job write: two that save to one id are not told apart.",
    "durable": "Use the native URL of the place behind this mount: a save that is reported as "
    "committed may be lost, or lose its shards, when the mount ends.",
    "list": "Grant the right to list: list_checkpoints, retention and cleaning up need it.",
    "delete": "Grant the right to delete: superseded and dead saves stay, and the storage fills.",
    "list uploads": "Grant the right to list uploads, or have a lifecycle rule abort them: parts "
    "of uploads that died stay and are paid for.",
}
"""What to do where a probe fails."""
_NEEDED = {"write", "absent name", "read", "range read", "upload", "download"}
"""Probes without which nothing can be saved or loaded."""

_NOT_NEEDED = "not needed here: replacing a file is one step"
_SMALL = bytes(4096)
_CLOCK_S = 5 * 60.0
_FAR_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One thing that was tried: whether it works, and what the storage said if it does not.

    `seconds` is the median of the times that it took; `size_bytes` is what it moved.
    """

    name: str
    outcome: Outcome
    detail: str = ""
    seconds: float | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found out about a storage.

    kind: family of storages. clock_offset_s: how far the storage's clock is ahead of this
    machine's; None if it was not told. advice: sentences. leftovers: what could not be removed.
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
    """Try out the storage below `url` and report what it can do, how fast, and what to set.

    Writes below a folder of a random name that starts as capability probes do, and removes it;
    moves about eight times `large_bytes`. Nothing else is looked at or changed. A thing that does
    not work is reported, not raised; raises `InvalidInputError` for a URL that cannot be used, and
    `StorageError` if the storage cannot be reached at all.
    """
    # Measured as it is, but one lost connection is no finding.
    policy = retry or RetryPolicy(attempt_count=2, first_delay_s=0.2, max_delay_s=1.0)
    location = Location.of(url, storage_options)
    visit = _Visit(location, Timeouts.of(timeout), policy, large_bytes)
    try:
        visit.run()
    finally:
        leftovers = visit.cleaned_up()
    return Diagnosis(
        url=location.url,
        kind=visit.store.capabilities.kind,
        probes=tuple(visit.probes),
        clock_offset_s=visit.clock_offset_s,
        advice=tuple(visit.advice()),
        leftovers=tuple(leftovers),
    )


class _Visit:
    """One run: asks in an order in which each answer helps to judge the next."""

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
        """Ask everything; raises `StorageError` only if nobody answers."""
        store, folder, small = self.store, self._folder, f"{self._folder}/small-0"
        asks: dict[str, tuple[Callable[[int], object], int]] = {
            # Not the root, where millions of objects may lie.
            "list": (lambda _: store.list(folder, recursive=False), 1),
            "write": (self._write, 9),
            "absent name": (lambda _: self._ask_absence(), 1),
            "read": (lambda _: store.get(small).data != _SMALL and "other bytes came back", 9),
            "range read": (lambda _: try_range(store, small, _SMALL), 9),
            "exclusive create": (lambda _: try_creation(store, self._new("created")), 1),
            "conditional replace": (lambda _: self._try_replacement(), 1),
            "durable": (lambda _: store.durability_problem(), 1),
            "clock": (lambda _: self._ask_clock(), 1),
            "upload": (self._put, 3),
            "download": (lambda _: self._get(), 3),
            "list uploads": (lambda _: store.abort_uploads(folder), 1),
            "delete": (lambda _: self._delete(small), 1),
        }
        for name, (ask, rounds) in asks.items():
            why = self._why_skipped(name)
            skipped = Probe(name=name, outcome="skipped", detail=why)
            self.probes.append(skipped if why else self._tried(name, ask, rounds))

    def _why_skipped(self, name: str) -> str:
        """Return why a probe would tell nothing, "" if it would."""
        failed = {probe.name for probe in self.probes if probe.outcome != "yes"}
        if "write" in failed:
            return "nothing can be written"
        if name == "download" and "upload" in failed:
            return "nothing was uploaded"
        if name == "list uploads" and not self.store.capabilities.lists_uploads:
            return "this kind of storage has none"
        is_rename = name == "conditional replace" and self.store.capabilities.kind == "posix"
        return _NOT_NEEDED if is_rename else ""

    def _tried(self, name: str, ask: Callable[[int], object], rounds: int) -> Probe:
        """Ask for one thing: what is raised, or returned as a text, says why it does not work."""
        times: list[float] = []
        for number in range(rounds):
            begin_s = time.perf_counter()
            try:
                self._deadline.check("Measuring")
                answer = ask(number)
            except CheckpointError as error:
                kind = error.kind if isinstance(error, StorageError) else ""
                if name in {"list", "write"} and kind in {"connection", "credentials", "timeout"}:
                    raise
                answer = None if name == "list" and kind == "not-found" else str(error)
            if answer and isinstance(answer, str):
                return Probe(name=name, outcome="no", detail=answer)
            times.append(time.perf_counter() - begin_s)
        size_bytes = self._large_bytes if name in {"upload", "download"} else 0
        seconds = statistics.median(times)
        return Probe(name=name, outcome="yes", seconds=seconds, size_bytes=size_bytes)

    def _new(self, name: str) -> str:
        """Return the path of something that is about to be made, and remember it."""
        self._objects.append(f"{self._folder}/{name}")
        return self._objects[-1]

    def _write(self, number: int) -> None:
        """Write a small object of a new name: some storages take one object only so often."""
        self.store.make_folders([self._folder])
        self.store.put(self._new(f"small-{number}"), _SMALL)

    def _ask_absence(self) -> None:
        """Ask for a name that nothing bears, as each save and load does."""
        try_absence(self.store, f"{self._folder}/absent")

    def _try_replacement(self) -> str:
        return try_versions(self.store, self._new("replaced"))[0]

    def _ask_clock(self) -> None:
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
        """Read the first large object as a load does, and compare it."""
        path = f"{self._folder}/large-0"
        sent = FileRef(path=path, size_bytes=self._large_bytes, crc32c=self._crc32c)
        ranges = RangeReader(self.store, self._options)
        return "" if has_checksum(ranges, sent) else "other bytes came back than were sent"

    def _delete(self, path: str) -> str:
        self.store.delete([path])
        is_there = slotlog.is_there(self.store, path)
        return "an object is still there after its deletion" if is_there else ""

    def cleaned_up(self) -> list[str]:
        """Remove what was made; return what stays. Never raises."""
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
        """Yield what to do; nothing where the defaults suit."""
        failed = {probe.name for probe in self.probes if probe.outcome == "no"}
        if "write" not in failed:
            yield from (advice for name, advice in _LACKS.items() if name in failed)
        if abs(self.clock_offset_s or 0) > _CLOCK_S:
            yield "Set this machine's clock: object stores refuse requests that it signs."
        get_s = next((one.seconds for one in self.probes if one.name == "read"), None) or 0.0
        if self.store.capabilities.is_remote and get_s > _FAR_S:
            yield (
                f"Set thread_count to {(2 if get_s < 2 * _FAR_S else 4) * REMOTE_THREADS}: a "
                f"request takes {get_s * 1000:.0f} ms; the default is {REMOTE_THREADS} in flight."
            )
