"""Every storage operation of a whole save, cut and failed one by one.

A dry run counts the operations; then each is cut before, after and half-way, answered with an
error, and done with its answer lost. Afterwards there is the old checkpoint or the new one, for
torch's own reader and for ours, and the next save succeeds. The counts are in the properties
of the tests (`-rP` shows what was printed).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import spec_reader
import torch
import torch.distributed.checkpoint as dcp
from commit_tools import IN_TURN, take_in_turn
from fault_tools import each_fault
from local_stores import local_store
from posix_faults import FaultPosix
from s3_server import CrashWhen, FaultRule, S3Server, crash_rules
from torch.distributed.checkpoint.api import CheckpointException

import ckpt_storage.saves.session
from ckpt_storage import RetryPolicy, errors, verify
from ckpt_storage.dcp.reader import CheckpointStorageReader
from ckpt_storage.dcp.writer import CheckpointStorageWriter
from ckpt_storage.store import Location, abilities
from ckpt_storage.store.backends.s3 import S3Backend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Action

pytestmark = pytest.mark.usefixtures("one_core")

QUICK = RetryPolicy(attempt_count=3, first_delay_s=0.0, max_delay_s=0.0)
KINDS = ("fresh", "overwrite")

State = dict[str, Any]
Note = Callable[[str, object], None]


def state_of(number: int) -> State:
    """Return the state of the save of that number: two tensors and a blob."""
    return {
        "layer.weight": torch.arange(20_480, dtype=torch.float32).reshape(128, 160) + number,
        "layer.bias": torch.full((7,), number, dtype=torch.bfloat16),
        "step": number,
    }


def _blank() -> State:
    state = state_of(0)
    return {name: torch.full_like(state[name], -1) for name in list(state)[:2]} | {"step": None}


def number_of(state: State) -> int:
    """Return which save a state is of; fails for a mixture."""
    number = state["step"]
    expected = state_of(number)
    assert torch.equal(state["layer.weight"], expected["layer.weight"])
    assert torch.equal(state["layer.bias"], expected["layer.bias"])
    return int(number)


def save(
    number: int, url: str | Path, *, overwrite: bool, retry: RetryPolicy = QUICK, **options: Any
) -> None:
    """Save with our writer in this process alone, which knows nothing of the storage."""
    abilities.RECORDS.clear()
    writer = CheckpointStorageWriter(url, overwrite=overwrite, retry=retry, **options)
    dcp.save(state_of(number), storage_writer=writer, no_dist=True)


def seen_by_us(url: str | Path, **options: Any) -> int | None:
    """Return which save our reader loads; None if it says that there is none yet."""
    reader = CheckpointStorageReader(url, retry=QUICK, **options)
    try:
        reader.read_metadata()
    except (errors.CheckpointNotFoundError, errors.CheckpointInProgressError):
        return None
    state = _blank()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return number_of(state)


def seen_by_stock(folder: Path) -> int | None:
    """Return which save torch's own reader loads; None if there is no checkpoint for it."""
    if not (folder / ".metadata").exists():
        return None
    state = _blank()
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return number_of(state)


def _failure_of(error: BaseException) -> BaseException:
    assert isinstance(error, CheckpointException), repr(error)
    ((failure, _),) = error.failures.values()
    assert isinstance(failure, BaseException)
    return failure


class Died(BaseException):  # no error, but the end of a process
    """How a save ended whose process died."""


Outcome = BaseException | None
"""How a save with a fault ended: no error, an error of ours, or `Died`."""


def _said(outcome: Outcome) -> str:
    return "saved" if outcome is None else type(outcome).__name__


def check_views(kind: str, outcome: Outcome, ours: int | None, stock: int | None, at: str) -> None:
    """Check what the two readers see right after a save of number 2 that met a fault."""
    old = 1 if kind == "overwrite" else None
    # Stock readers may be behind us, never ahead.
    assert (ours, stock) in {(old, old), (2, old), (2, 2)}, f"{at}: {ours} {stock}"
    if isinstance(outcome, Died):
        return
    if outcome is not None:
        assert isinstance(outcome, errors.CheckpointError), f"{at}: {outcome!r}"
        assert outcome.next_step, f"{at}: {outcome}"
        assert outcome.path, f"{at}: {outcome!r}"
    if not isinstance(outcome, errors.CommitUnknownError):
        is_new = outcome is None or isinstance(outcome, errors.NotPublishedError)
        assert ours == (2 if is_new else old), f"{at}: {ours} after {outcome!r}"


_RANDOM = re.compile(
    rb"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{16}|[0-9a-f]{8,}|[0-9]{4}(?:-[0-9]{2}){2}T[0-9:+]{8,}|-[0-9]{6}/"
)


class Judged:
    """The states of a storage that were judged before, up to what is random in them.

    A crash before a read leaves what a crash before the next one leaves: judging it once is
    enough. Save ids that were there before the fault stay apart from the new one.
    """

    def __init__(self, before: Iterable[str]) -> None:
        ids = {match for path in before for match in re.findall(_RANDOM, path.encode())}
        self._known = {name: b"known %d" % i for i, name in enumerate(sorted(ids))}
        self._states: set[tuple[object, ...]] = set()

    def __len__(self) -> int:
        return len(self._states)

    def is_new(self, files: Mapping[str, bytes], outcome: Outcome) -> bool:
        """Note a state and how it came about; return whether it was not seen before."""
        parts = sorted(
            (self._fixed(path.encode()), data if path.endswith(".distcp") else self._fixed(data))
            for path, data in files.items()
        )
        key = (hashlib.sha256(repr(parts).encode()).digest(), _said(outcome))
        known = key in self._states
        self._states.add(key)
        return not known

    def _fixed(self, data: bytes) -> bytes:
        return _RANDOM.sub(lambda match: self._known.get(match.group(), b"#"), data)


def files_below(root: Path) -> dict[str, bytes]:
    """Return content by path, folders with a slash."""
    found = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        found[f"{name}/" if path.is_dir() else name] = b"" if path.is_dir() else path.read_bytes()
    return found


def check_sound(folder: Path, at: str) -> None:
    """Check that the save of number 3, made after a fault, is whole for everybody."""
    report = verify(folder)
    assert report.ok, f"{at}: {report.problems}"
    assert seen_by_stock(folder) == 3, at
    found = spec_reader.read(folder)
    assert spec_reader.plain(found.blobs["step"]) == 3, at
    weight = found.tensors["layer.weight"][1].tobytes()
    assert weight == state_of(3)["layer.weight"].numpy().tobytes(), at


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, memory_path: Path) -> Path:
    """A folder in memory where there is one: syncing is counted here, not measured.

    A thousand intended failures stay out of the report of one that is not.
    """
    for name in ("ckpt_storage", "c10d-NullHandler-dcp_logger"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    return memory_path


class Disks:
    """Saves to local folders through system calls that fail as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._posix: FaultPosix | None = None
        self._stores: list[Store] = []
        self._before = folder / "run-000000" / "id"
        # Two, so that the next one has something to free.
        save(0, self._before, overwrite=False)
        save(1, self._before, overwrite=True)
        self.before = files_below(self._before)
        monkeypatch.setattr(ckpt_storage.saves.session, "open_store", self._open)

    def _open(self, location: Location, **options: Any) -> Store:
        store = local_store(
            location.target, posix=self._posix, policy=QUICK, sync_files=options["sync_files"]
        )
        self._stores.append(store)
        return store

    def fresh(self, kind: str) -> Path:
        self._number += 1
        root = self._folder / f"run-{self._number:06}" / "id"
        if kind == "overwrite":
            shutil.copytree(self._before, root)
        return root

    def save(self, root: Path, posix: FaultPosix, kind: str) -> Outcome:
        self._posix = posix
        try:
            save(2, root, overwrite=kind == "overwrite")
        except BaseException as caught:  # noqa: BLE001  # the death of a process, too
            return Died() if posix.script.crashed else _failure_of(caught)
        finally:
            self._posix = None
            for store in self._stores:
                store.close()
            self._stores.clear()
        return Died() if posix.script.crashed else None


NAMING = {"link", "rename", "unlink"}
"""Calls whose lost answer can be told from a failure by looking; a failed fsync cannot."""

DISK_ACTIONS: dict[Action, str] = {
    "crash_before": "",
    "crash_after": "",
    "torn": "pwritev",
    "short": "pwritev|preadv",
    "error": "",
    "lost_answer": "",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_to_a_disk_survives_every_fault_at_every_system_call(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, record_property: Note
) -> None:
    """Old or new after each, no temporary file after an error, and the next save succeeds."""
    disks = Disks(monkeypatch, folder)
    dry = FaultPosix()
    assert disks.save(disks.fresh(kind), dry, kind) is None
    calls = dry.script.calls
    judged = Judged(disks.before)
    counts: Counter[str] = Counter()
    for at, rule in each_fault(calls, DISK_ACTIONS):
        action, call = rule.action, calls[rule.skip_count]
        root = disks.fresh(kind)
        posix = FaultPosix([rule])
        outcome = disks.save(root, posix, kind)
        has_died = isinstance(outcome, Died)
        counts[f"{action}: {_said(outcome)}"] += 1
        # A call that fails by itself, such as opening what is not there, has no after.
        assert has_died == (action in {"crash_before", "torn"}) or action == "crash_after", at
        if action == "short" or (action == "lost_answer" and call.operation in NAMING):
            assert outcome is None, f"{at}: {outcome!r}"
        if not has_died:
            left = [path for path in root.rglob("*") if ".tmp-" in path.name]
            # Only what the system itself refused to remove may stay.
            assert len(left) <= (action == "error" and call.operation == "unlink"), at
            assert posix.open_count == 0, at
        if not judged.is_new(files_below(root), outcome):
            shutil.rmtree(root, ignore_errors=True)
            continue
        stock = seen_by_stock(root)
        ours = seen_by_us(root)
        check_views(kind, outcome, ours, stock, at)
        assert seen_by_stock(root) == ours, f"{at}: .metadata was not brought up to date"
        save(3, root, overwrite=ours is not None)
        check_sound(root, at)
    assert len(judged) > 20
    _report(record_property, f"{kind} on a disk", calls, counts, judged)


class Buckets:
    """Saves to buckets of one S3 server that fails as told."""

    def __init__(self, server: S3Server, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._number = 0
        self.before: Mapping[str, bytes] = {}
        url = self.fresh("fresh")
        save(0, url, overwrite=False, **self.options)
        save(1, url, overwrite=True, **self.options)
        self.before = self.server.dump(self.bucket)

    @property
    def bucket(self) -> str:
        return f"bkt-{self._number:06}"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the writer; with one thread, requests come in the same order each time."""
        return {
            "storage_options": self.server.storage_options,
            "part_bytes": 64 * 1024,
            "thread_count": 1,
        }

    def fresh(self, kind: str) -> str:
        """Return the URL of a checkpoint in a new bucket with what is there before."""
        self._number += 1
        self.server.create_bucket(self.bucket)
        if kind == "overwrite":
            for key, data in self.before.items():
                self.server.put(self.bucket, key, data)
        self.server.reset_counters()
        return f"s3://{self.bucket}/run"

    def save(self, url: str, kind: str) -> BaseException | None:
        try:
            save(2, url, overwrite=kind == "overwrite", **self.options)
        except CheckpointException as error:
            return _failure_of(error)
        return None

    def local(self) -> Path:
        """Return a folder with what the checkpoint in the bucket consists of."""
        root = self._folder / self.bucket / "run"
        shutil.rmtree(root, ignore_errors=True)
        for key, data in self.server.dump(self.bucket).items():
            path = self._folder / self.bucket / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        root.mkdir(parents=True, exist_ok=True)
        return root


S3_CRASHES: tuple[CrashWhen, ...] = ("before", "after", "torn")
S3_FAULTS: dict[str, Callable[[int], list[FaultRule]]] = {
    **{when: partial(crash_rules, when=when) for when in S3_CRASHES},
    "error": lambda number: [
        FaultRule(after=number - 1, action="status", status=500, code="InternalError")
    ],
    "refused": lambda number: [
        FaultRule(after=number - 1, action="status", status=403, code="AccessDenied")
    ],
    "reset": lambda number: [FaultRule(after=number - 1, action="reset")],
    "lost_answer": lambda number: [FaultRule(after=number - 1, action="lost")],
}


@pytest.mark.parametrize("order", IN_TURN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_save_to_s3_survives_every_fault_at_every_request(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str, order: str, record_property: Note
) -> None:
    """Old or new after each, no open upload after an error, and the next save succeeds.

    Requests that go side by side are made in turn: a crash between them leaves either one.
    """
    take_in_turn(monkeypatch, order)
    small_parts = replace(S3Backend.capabilities, min_part_bytes=1)
    monkeypatch.setattr(S3Backend, "capabilities", small_parts)
    counts: Counter[str] = Counter()
    uploads_before = 0
    with S3Server(min_part_bytes=1) as server:
        buckets = Buckets(server, folder)
        assert buckets.save(buckets.fresh(kind), kind) is None
        requests = server.requests
        judged = Judged(buckets.before)
        assert {"create_upload", "part", "complete"} <= {request.op for request in requests}
        # In the other order what is left between two requests is new, and what comes of a refusal.
        names = S3_FAULTS if order == IN_TURN[0] else ("after", "refused")
        for name, (number, request) in itertools.product(names, enumerate(requests, start=1)):
            at = f"{kind} {name} at {number} ({request.op} {request.key})"
            url = buckets.fresh(kind)
            server.faults(S3_FAULTS[name](number))
            outcome = buckets.save(url, kind)
            reached = len(server.requests) >= number
            server.faults([])
            assert reached, at
            if name in S3_CRASHES:
                outcome = Died()
            counts[f"{name}: {_said(outcome)}"] += 1
            if name == "lost_answer":
                assert outcome is None, f"{at}: {outcome!r}"
            if name not in S3_CRASHES:
                # Nobody knows the name of an upload whose start got no answer.
                is_unknown = (name, request.op) == ("lost_answer", "create_upload")
                assert server.open_upload_count == uploads_before + is_unknown, at
            uploads_before = server.open_upload_count
            if not judged.is_new(server.dump(buckets.bucket), outcome):
                continue
            root = buckets.local()
            stock = seen_by_stock(root)
            ours = seen_by_us(root)
            check_views(kind, outcome, ours, stock, at)
            save(3, url, overwrite=ours is not None, **buckets.options)
            check_sound(buckets.local(), at)
    assert len(judged) > 10
    _report(record_property, f"{kind} on S3, side by side {order}", requests, counts, judged)


def _report(
    record_property: Note, what: str, calls: Sequence[object], counts: Counter[str], judged: Judged
) -> None:
    text = f"{what}: {len(calls)} operations; {counts.total()} faults {dict(counts)}; "
    text += f"{len(judged)} different states judged"
    record_property(what, text)
    print(text)  # noqa: T201  # shown by -rP; the counts are asked for
