"""`diagnose`: what a storage can do for checkpoints, tried out under names of its own.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ckpt_storage.errors import CheckpointError, IntegrityError, InvalidInputError, StorageError
from ckpt_storage.format import layout
from ckpt_storage.options import MIB, REMOTE_THREADS, RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.base import Capabilities, Store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.workers import Workers, bounded

from .advice import Advice, advise

Outcome = Literal["yes", "no", "skipped"]

_SMALL_BYTES = 4096
_SMALL_ROUNDS = 9
_LARGE_ROUNDS = 3
_LARGE_BYTES = 16 * MIB
DEFAULT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One thing that was tried: whether it works, and what the storage said if it does not."""

    name: str
    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """How long one operation takes: the median of `count` times, in seconds, and the extremes.

    `size_bytes` is what each moved; `bytes_per_s` follows from the median.
    """

    name: str
    count: int
    median_s: float
    least_s: float
    most_s: float
    size_bytes: int = 0

    @property
    def bytes_per_s(self) -> float | None:
        """Throughput, None where nothing to speak of was moved."""
        return self.size_bytes / self.median_s if self.size_bytes and self.median_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found out about a storage.

    kind: family of storages. capabilities: what it declares, by name. clock_offset_s: how far the
    storage's clock is ahead of this machine's, true to `clock_doubt_s`; None if it was not told.
    advice: options by name, what to set them to and why. leftovers: what could not be removed.
    """

    url: str
    kind: str
    capabilities: Mapping[str, Any]
    probes: Sequence[Probe]
    measures: Sequence[Measure]
    clock_offset_s: float | None
    clock_doubt_s: float | None
    advice: Sequence[Advice]
    leftovers: Sequence[str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether checkpoints can be saved to and loaded from here."""
        needed = {"write", "read", "upload"}
        return needed <= {probe.name for probe in self.probes if probe.outcome == "yes"}


def diagnose(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    large_bytes: int = _LARGE_BYTES,
    timeout: float | Timeouts | Any = DEFAULT_TIMEOUT_S,  # noqa: ANN401  # timedelta too
    retry: RetryPolicy | None = None,
) -> Diagnosis:
    """Try out the storage below `url` and report what it can do, how fast, and what to set.

    Writes below a folder of a random name that starts as capability probes do, and removes it;
    moves about eight times `large_bytes`. Nothing else is looked at or changed. A thing that does
    not work is reported, not raised; raises `InvalidInputError` for a URL that cannot be used, and
    `StorageError` if the storage cannot be reached at all.
    """
    if type(large_bytes) is not int or large_bytes < 1:
        raise InvalidInputError(
            f"large_bytes is {large_bytes!r:.80}.", next_step="Give 1 or more bytes."
        )
    location = Location.of(url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline = Deadline("write", timeouts.write)
    # Measured as it is, but one lost connection is no finding.
    policy = retry or RetryPolicy(attempt_count=2, first_delay_s=0.2, max_delay_s=1.0)
    store = bounded(open_store(location, timeouts=timeouts, retry=policy), deadline)
    made = _missing_folders(location)
    visit = _Visit(store, deadline, large_bytes)
    try:
        visit.run()
    finally:
        visit.clean_up()
        visit.leftovers += _remove_folders(made)
    return visit.diagnosis(location.url)


def _missing_folders(location: Location) -> list[Path]:
    """Return the folders of a local path that are not there yet, outermost first."""
    if not location.is_local:
        return []
    path = Path(location.target)
    return [folder for folder in (*reversed(path.parents), path) if not folder.exists()]


def _remove_folders(folders: Sequence[Path]) -> list[str]:
    """Remove folders that this call made, if they are empty; return those that stay."""
    left = []
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            left.append(f"file://{folder}")
    return left


@dataclass(slots=True)
class _Visit:
    """One run: asks in an order in which each answer helps to judge the next."""

    store: Store
    deadline: Deadline
    large_bytes: int
    probes: list[Probe] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    clock: tuple[float, float] | None = None
    start_s: float = field(default_factory=time.monotonic)
    folder: str = field(default_factory=layout.probe_path)
    _made: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Ask everything; raises `StorageError` only if nobody answers."""
        # Not the root, where millions of objects may lie.
        self._try("list", lambda: self.store.list(self.folder, recursive=False), fatal=True)
        if not self._try("write", self._write, fatal=True):
            self._skip("nothing can be written", *_AFTER_WRITE)
            return
        self._try("read", self._read)
        self._try("stat", lambda: self.store.stat(self._path("small")))
        self._try("replace", lambda: self.store.replace(self._path("small"), b"replaced\n"))
        self._try("exclusive create", self._create)
        self._try("conditional replace", self._replace_if_match)
        self._try("clock", self._clock)
        self._try("upload", self._upload)
        if self.store.capabilities.can_list_uploads:
            self._try("list uploads", lambda: self.store.abort_uploads(self.folder))
        else:
            self._skip("this kind of storage has none", "list uploads")
        self._measure()
        # Last, because what follows has nothing to ask of any more.
        self._try("delete", self._delete)

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def _new(self, name: str) -> str:
        """Return the path of something that is about to be made, and remember it."""
        path = self._path(name)
        if path not in self._made:
            self._made.append(path)
        return path

    def _try(self, name: str, ask: Callable[[], object], *, fatal: bool = False) -> bool:
        """Ask one thing and note the answer. Raises only if `fatal` and nobody answers."""
        try:
            answer = ask()
        except StorageError as error:
            if fatal and error.kind in {"connection", "credentials", "timeout"}:
                raise
            absent = name == "list" and error.kind == "not-found"
            outcome: Outcome = "yes" if absent else "no"
            detail = "nothing is there yet" if absent else str(error)
            self.probes.append(Probe(name=name, outcome=outcome, detail=detail))
            return absent
        except CheckpointError as error:
            self.probes.append(Probe(name=name, outcome="no", detail=str(error)))
            return False
        refusal = answer if isinstance(answer, str) else ""
        self.probes.append(Probe(name=name, outcome="no" if refusal else "yes", detail=refusal))
        return not refusal

    def _skip(self, why: str, *names: str) -> None:
        self.probes += [Probe(name=name, outcome="skipped", detail=why) for name in names]

    def _write(self) -> None:
        self.store.prepare([self.folder])
        self.store.write(self._new("small"), b"small\n")

    def _read(self) -> str:
        found = self.store.read(self._path("small"))
        return "" if found == b"small\n" else "other bytes came back than were written"

    def _create(self) -> str:
        """Create a name twice; return why that cannot be relied on, "" if it can."""
        if not self.store.capabilities.exclusive_create:
            return "this kind of storage has no exclusive creation"
        path = self._new("created")
        self.store.create(path, b"first\n")
        try:
            self.store.create(path, b"second\n")
        except StorageError as error:
            if error.kind != "exists":
                raise
            kept = self.store.read(path) == b"first\n"
            return "" if kept else "a second creation was refused, but done"
        return "a name was created twice: the condition is ignored"

    def _replace_if_match(self) -> str:
        if not self.store.capabilities.replace_if_match:
            return "this kind of storage has no conditional replacement"
        path = self._new("replaced")
        self.store.write(path, b"one\n")
        old = self.store.read_version(path).token
        if old is None:
            return "objects have no version tokens"
        self.store.replace(path, b"two\n", if_match=old)
        try:
            self.store.replace(path, b"three\n", if_match=old)
        except StorageError as error:
            if error.kind != "precondition":
                raise
            return ""
        return "an object was replaced although it had changed: the condition is ignored"

    def _clock(self) -> None:
        before = time.time()
        there = self.store.now_s(self._new("clock"))
        after = time.time()
        # Servers tell whole seconds.
        grain_s = 1.0 if self.store.capabilities.is_remote else 0.0
        self.clock = there - (before + after) / 2, (after - before) / 2 + grain_s

    def _upload(self) -> str:
        """Send a file in parts and compare what came back."""
        data = os.urandom(self._part_bytes())
        self._put_large("large-0", data)
        is_same = self._get_large("large-0", data)
        return "" if is_same else "other bytes came back than were sent"

    def _part_bytes(self) -> int:
        capabilities = self.store.capabilities
        size = max(MIB, capabilities.min_part_bytes)
        multiple = capabilities.part_multiple_bytes
        return -(-size // multiple) * multiple

    def _put_large(self, name: str, part: bytes) -> None:
        path, total = self._new(name), self.large_bytes
        upload = self.store.start_upload(path, part_bytes=len(part))
        try:
            starts = range(0, total, len(part))
            jobs = [
                partial(
                    upload.write_part,
                    number,
                    start,
                    [memoryview(part)[: min(len(part), total - start)]],
                    last=start == starts[-1],
                )
                for number, start in enumerate(starts)
            ]
            self._all(jobs, parallel=self.store.capabilities.parallel_parts)
            upload.complete(total)
        except BaseException:
            with contextlib.suppress(CheckpointError):
                upload.abort()
            raise

    def _get_large(self, name: str, part: bytes) -> bool:
        """Read a file in parts; return whether each is `part`. Holds one part a thread."""
        path, total = self._path(name), self.large_bytes
        others: list[int] = []

        def get(start: int) -> None:
            buffer = bytearray(min(len(part), total - start))
            self.store.read_into(path, start, memoryview(buffer), size_bytes=total)
            if not part.startswith(buffer):
                others.append(start)

        self._all([partial(get, start) for start in range(0, total, len(part))])
        return not others

    def _all(self, jobs: Sequence[Callable[[], None]], *, parallel: bool = True) -> None:
        is_remote = self.store.capabilities.is_remote
        count = min(len(jobs), REMOTE_THREADS if is_remote and parallel else 1)
        with Workers(count, name="doctor", deadline=self.deadline) as workers:
            for job in jobs:
                workers.submit(job)
            workers.drain()

    def _measure(self) -> None:
        """Time what a save and a load are made of."""
        small = os.urandom(_SMALL_BYTES)
        self._time(
            "small put",
            _SMALL_ROUNDS,
            lambda round_: self.store.write(self._new(f"put-{round_}"), small),
        )
        self._time("small get", _SMALL_ROUNDS, lambda _: self.store.read(self._path("put-0")))
        self._time("list", _SMALL_ROUNDS, lambda _: self.store.list(self.folder, recursive=False))
        if any(probe.name == "upload" and probe.outcome == "yes" for probe in self.probes):
            part = os.urandom(self._part_bytes())
            size = self.large_bytes
            self._time(
                "large put",
                _LARGE_ROUNDS,
                lambda round_: self._put_large(f"large-{round_}", part),
                size,
            )
            self._time("large get", _LARGE_ROUNDS, lambda _: self._get_large("large-0", part), size)

    def _time(
        self, name: str, count: int, run: Callable[[int], object], size_bytes: int = 0
    ) -> None:
        """Measure one operation; what fails was reported by its probe, or is now."""
        times: list[float] = []
        try:
            for round_ in range(count):
                self.deadline.check("Measuring")
                begin = time.perf_counter()
                run(round_)
                times.append(time.perf_counter() - begin)
        except CheckpointError as error:
            self.probes.append(Probe(name=f"measuring of {name}", outcome="no", detail=str(error)))
        if times:
            self.measures.append(
                Measure(
                    name=name,
                    count=len(times),
                    median_s=statistics.median(times),
                    least_s=min(times),
                    most_s=max(times),
                    size_bytes=size_bytes,
                )
            )

    def _delete(self) -> str:
        self.store.delete([self._path("small")])
        try:
            self.store.stat(self._path("small"))
        except StorageError as error:
            if error.kind != "not-found":
                raise
            self._made.remove(self._path("small"))
            return ""
        return "an object is still there after its deletion"

    def clean_up(self) -> None:
        """Remove what was made; note what stays. Never raises."""
        store = getattr(self.store, "cleaning_up", lambda: self.store)()
        with contextlib.suppress(CheckpointError, IntegrityError):
            store.delete_folder(self.folder)
            return
        for path in self._made:
            try:
                store.delete([path])
            except CheckpointError:
                self.leftovers.append(f"{self.store.url}/{path}")

    def diagnosis(self, url: str) -> Diagnosis:
        """Return what was found."""
        capabilities = self.store.capabilities
        measures = {one.name: one for one in self.measures}
        return Diagnosis(
            url=url,
            kind=capabilities.kind,
            capabilities=_as_data(capabilities),
            probes=tuple(self.probes),
            measures=tuple(self.measures),
            clock_offset_s=self.clock[0] if self.clock else None,
            clock_doubt_s=self.clock[1] if self.clock else None,
            advice=tuple(
                advise(
                    capabilities,
                    working={probe.name: probe.outcome == "yes" for probe in self.probes},
                    medians_s={name: one.median_s for name, one in measures.items()},
                    large_bytes=self.large_bytes,
                    clock_offset_s=self.clock[0] if self.clock else None,
                )
            ),
            leftovers=tuple(self.leftovers),
            seconds=time.monotonic() - self.start_s,
        )


_AFTER_WRITE = (
    "read",
    "stat",
    "replace",
    "exclusive create",
    "conditional replace",
    "clock",
    "upload",
    "list uploads",
    "delete",
)


def _as_data(capabilities: Capabilities) -> dict[str, Any]:
    return dict(_fields(capabilities))


def _fields(capabilities: Capabilities) -> Iterator[tuple[str, Any]]:
    for one in dataclasses.fields(capabilities):
        yield one.name, getattr(capabilities, one.name)
