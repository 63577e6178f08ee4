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

from ckpt_storage.errors import CheckpointError, InvalidInputError, StorageError
from ckpt_storage.format.names import probe_path
from ckpt_storage.options import DEFAULT_PART_BYTES, MIB, REMOTE_THREADS, RetryPolicy, Timeouts
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import try_exclusive_create
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.workers import Workers

DEFAULT_TIMEOUT_S = 120.0

_LACKS = {
    "exclusive create": (
        "commit_url",
        "the native URL of the same place, if this is a mount of an object store",
        "two jobs that save to one id at the same time are not told apart: let one job write",
    ),
    "list": (
        "",
        "grant the right to list",
        "list_checkpoints, retention and the cleaning up of dead saves need to list",
    ),
    "delete": (
        "",
        "grant the right to delete",
        "superseded and dead saves stay, and the storage fills, without the right to delete",
    ),
    "list uploads": (
        "",
        "grant the right to list uploads",
        "parts of uploads that died stay and are paid for; have a lifecycle rule abort them",
    ),
}
"""What to set, to what and why, where a probe fails."""
_SMALL = os.urandom(4096)
_CLOCK_S = 5 * 60.0
_FAR_S = 0.05
_SLOW_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One thing that was tried: whether it works, and what the storage said if it does not."""

    name: str
    outcome: Literal["yes", "no", "skipped"]
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
class Advice:
    """One thing to set, or to see to where `option` is empty."""

    option: str
    value: str
    why: str


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
    if type(large_bytes) is not int or large_bytes < 1:
        raise InvalidInputError(
            f"large_bytes is {large_bytes!r:.80}.", next_step="Give 1 or more bytes."
        )
    location = Location.of(url, storage_options)
    timeouts = Timeouts.of(timeout)
    deadline = Deadline("write", timeouts.write)
    # Measured as it is, but one lost connection is no finding.
    policy = retry or RetryPolicy(attempt_count=2, first_delay_s=0.2, max_delay_s=1.0)
    store = open_store(location, timeouts=timeouts, retry=policy).bounded(deadline)
    visit = _Visit(store, location, deadline, large_bytes)
    try:
        visit.run()
    finally:
        visit.clean_up()
    return visit.diagnosis()


@dataclass(slots=True)
class _Visit:
    """One run: asks in an order in which each answer helps to judge the next."""

    store: Store
    location: Location
    deadline: Deadline
    large_bytes: int
    probes: list[Probe] = field(default_factory=list)
    measures: list[Measure] = field(default_factory=list)
    clock: tuple[float, float] | None = None
    start_s: float = field(default_factory=time.monotonic)
    folder: str = field(default_factory=probe_path)
    objects: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Ask everything; raises `StorageError` only if nobody answers."""
        store, small, able = self.store, f"{self.folder}/small", self.store.capabilities
        # Not the root, where millions of objects may lie.
        self._ask("list", lambda: store.list(self.folder, recursive=False), is_fatal=True)
        if self.location.is_local:
            path = Path(self.location.target)
            self.folders = [one for one in (path, *path.parents) if not one.exists()]
        can_write = self._ask("write", self._write, is_fatal=True)
        step = able.part_multiple_bytes
        part = os.urandom(-(-max(MIB, able.min_part_bytes) // step) * step)
        asks: dict[str, Callable[[], object]] = {
            "read": lambda: _unless(store.get(small).data == b"small\n", "other bytes came back"),
            "stat": lambda: store.stat(small),
            "replace": lambda: store.replace(small, b"replaced\n"),
            "exclusive create": self._create,
            "conditional replace": self._replace_if_match,
            "clock": self._ask_clock,
            "upload": lambda: self._upload(part),
            "list uploads": lambda: store.abort_uploads(self.folder),
            "delete": lambda: self._delete(small),
        }
        for name, ask in asks.items():
            why = "" if can_write else "nothing can be written"
            if name == "list uploads" and not able.lists_uploads:
                why = "this kind of storage has none"
            if why:
                self.probes.append(Probe(name=name, outcome="skipped", detail=why))
            elif self._ask(name, ask) and name == "upload":
                self._time("large put", lambda at: self._put(at, part), self.large_bytes)
                self._time("large get", lambda _: self._get(part), self.large_bytes)
        if can_write:
            # New names: some storages take one object only so often.
            self._time("small put", lambda at: store.put(self._new(f"put-{at}"), _SMALL))
            self._time("small get", lambda _: store.get(f"{self.folder}/put-0").data)
            self._time("list", lambda _: store.list(self.folder, recursive=False))

    def _new(self, name: str) -> str:
        """Return the path of something that is about to be made, and remember it."""
        self.objects.append(f"{self.folder}/{name}")
        return self.objects[-1]

    def _ask(self, name: str, ask: Callable[[], object], *, is_fatal: bool = False) -> bool:
        """Note whether one thing works: what is raised, or returned as a text, says why not."""
        try:
            answer = ask()
        except CheckpointError as error:
            kind = error.kind if isinstance(error, StorageError) else ""
            if is_fatal and kind in {"connection", "credentials", "timeout"}:
                raise
            is_absent = name == "list" and kind == "not-found"
            answer = "" if is_absent else str(error)
        refusal = answer if isinstance(answer, str) else ""
        self.probes.append(Probe(name=name, outcome="no" if refusal else "yes", detail=refusal))
        return not refusal

    def _write(self) -> None:
        self.store.make_folders([self.folder])
        self.store.put(self._new("small"), b"small\n")

    def _create(self) -> str:
        if not self.store.capabilities.exclusive_create:
            return "this kind of storage has no exclusive creation"
        found = try_exclusive_create(self.store, self._new("created"))
        return "" if found.exclusive else found.reason

    def _replace_if_match(self) -> str:
        if not self.store.capabilities.if_match:
            return "this kind of storage has no conditional replacement"
        path = self._new("replaced")
        self.store.put(path, b"one\n")
        old = self.store.get(path).version
        if old is None:
            return "objects have no version tokens"
        self.store.replace(path, b"two\n", if_match=old)
        return _unless(
            _is_refused("precondition", lambda: self.store.replace(path, b"3\n", if_match=old)),
            "an object was replaced although it had changed: the condition is ignored",
        )

    def _ask_clock(self) -> None:
        before_s = time.time()
        there_s = self.store.server_time(self._new("clock"))
        doubt_s = (time.time() - before_s) / 2
        # Servers tell whole seconds.
        grain_s = 1.0 if self.store.capabilities.is_remote else 0.0
        self.clock = there_s - before_s - doubt_s, doubt_s + grain_s

    def _upload(self, part: bytes) -> str:
        self._put(0, part)
        return self._get(part)

    def _put(self, number: int, part: bytes) -> None:
        upload = self.store.upload(self._new(f"large-{number}"))

        def put(at: int, start: int, size: int) -> None:
            is_last = start + size == self.large_bytes
            upload.write_part(at, start, [memoryview(part)[:size]], last=is_last)

        try:
            self._each(put, len(part), is_parallel=self.store.capabilities.parallel_parts)
            upload.complete(self.large_bytes)
        except BaseException:
            with contextlib.suppress(CheckpointError):
                upload.abort()
            raise

    def _get(self, part: bytes) -> str:
        """Read the first large object and compare it; holds one part a thread."""
        others: list[int] = []

        def get(number: int, start: int, size: int) -> None:
            buffer, path = bytearray(size), f"{self.folder}/large-0"
            self.store.read(path, [(start, memoryview(buffer))], size_bytes=self.large_bytes)
            if not part.startswith(buffer):
                others.append(number)

        self._each(get, len(part))
        return _unless(not others, "other bytes came back than were sent")

    def _each(
        self, run: Callable[[int, int, int], None], part_bytes: int, *, is_parallel: bool = True
    ) -> None:
        """Run a job for number, offset and length of each part of a large object."""
        count = REMOTE_THREADS if self.store.capabilities.is_remote and is_parallel else 1
        with Workers(count, name="doctor", deadline=self.deadline) as workers:
            for number, start in enumerate(range(0, self.large_bytes, part_bytes)):
                size = min(part_bytes, self.large_bytes - start)
                workers.submit(partial(run, number, start, size))
            workers.drain()

    def _time(self, name: str, run: Callable[[int], object], size_bytes: int = 0) -> None:
        """Measure one operation; what fails was reported by its probe, or is now."""
        times: list[float] = []
        try:
            for round_ in range(3 if size_bytes else 9):
                self.deadline.check("Measuring")
                begin_s = time.perf_counter()
                run(round_)
                times.append(time.perf_counter() - begin_s)
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

    def _delete(self, path: str) -> str:
        self.store.delete([path])
        is_gone = _is_refused("not-found", lambda: self.store.stat(path))
        return _unless(is_gone, "an object is still there after its deletion")

    def clean_up(self) -> None:
        """Remove what was made; note what stays. Never raises."""
        store = self.store.cleaning_up()
        try:
            store.delete_folder(self.folder)
        except CheckpointError:
            for path in dict.fromkeys(self.objects):
                try:
                    store.delete([path])
                except CheckpointError:
                    self.leftovers.append(f"{self.store.url}/{path}")
        for folder in self.folders:
            with contextlib.suppress(OSError):
                folder.rmdir()
            if folder.exists():
                self.leftovers.append(f"file://{folder}")

    def diagnosis(self) -> Diagnosis:
        """Return what was found."""
        able = self.store.capabilities
        return Diagnosis(
            url=self.location.url,
            kind=able.kind,
            capabilities=dataclasses.asdict(able),
            probes=tuple(self.probes),
            measures=tuple(self.measures),
            clock_offset_s=self.clock[0] if self.clock else None,
            clock_doubt_s=self.clock[1] if self.clock else None,
            advice=tuple(self._advise()),
            leftovers=tuple(self.leftovers),
            seconds=time.monotonic() - self.start_s,
        )

    def _advise(self) -> Iterator[Advice]:
        """Yield what to set; nothing where the defaults suit."""
        failed = {probe.name for probe in self.probes if probe.outcome == "no"}
        if "write" not in failed:
            for name, (option, value, why) in _LACKS.items():
                if name in failed:
                    yield Advice(option=option, value=value, why=why)
        if self.clock and abs(self.clock[0]) > _CLOCK_S:
            side = "behind" if self.clock[0] > 0 else "ahead of"
            why = f"it is {abs(self.clock[0]):.0f} s {side} the storage's; object stores refuse "
            why += "requests signed so, and retention by age would be surprising"
            yield Advice(option="", value="set this machine's clock", why=why)
        seconds = {one.name: one.median_s for one in self.measures}
        is_remote = self.store.capabilities.is_remote
        get_s, put_s = seconds.get("small get", 0.0), seconds.get("small put", 0.0)
        part_s = seconds.get("large put", 0.0) * DEFAULT_PART_BYTES / self.large_bytes
        if is_remote and get_s > _FAR_S:
            count = (2 if get_s < 2 * _FAR_S else 4) * REMOTE_THREADS
            why = f"a request takes {get_s * 1000:.0f} ms before its first byte; the default is "
            why += f"{REMOTE_THREADS} in flight"
            yield Advice(option="thread_count", value=str(count), why=why)
        if is_remote and part_s and put_s > _SLOW_SHARE * part_s:
            why = f"a request costs {put_s * 1000:.0f} ms beside {part_s * 1000:.0f} ms for the "
            why += f"bytes of a part of {DEFAULT_PART_BYTES // MIB} MiB; memory_limit_bytes must "
            why += "hold two parts for each thread"
            yield Advice(option="part_bytes", value=str(64 * MIB), why=why)
        all_s, limit_s = part_s * REMOTE_THREADS, Timeouts().request
        if all_s > limit_s / 4:
            why = f"a part takes {part_s:.1f} s alone, and a request is given up after "
            why += f"{limit_s:.0f} s"
            value = f"Timeouts(request={round(all_s * 4)})"
            yield Advice(option="timeout", value=value, why=why)


def _unless(is_right: bool, refusal: str) -> str:  # noqa: FBT001  # reads as a sentence
    return "" if is_right else refusal


def _is_refused(kind: str, call: Callable[[], object]) -> bool:
    """Return whether a call is refused with an error of that kind; raises any other."""
    try:
        call()
    except StorageError as error:
        if error.kind != kind:
            raise
        return True
    return False
