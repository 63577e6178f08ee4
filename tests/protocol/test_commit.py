"""Slots: how the head is found, who gets the next slot, and what a lost answer means.

And savers, pruners, openers and deleters interleaved: all schedules in order, some at random.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import commit_tools as tools
import pytest
from commit_model import SCENARIOS, Scenario, check_schedules
from local_stores import local_store
from posix_faults import FaultPosix

from ckpt_storage import errors
from ckpt_storage.commit import slotlog
from ckpt_storage.format.names import slot_path
from ckpt_storage.store.backend import Buffers, Capabilities
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Rule

pytestmark = pytest.mark.usefixtures("one_core")

SLOT_1 = "commits/00000001.json"


def test_the_head_is_found_in_logarithmic_reads() -> None:
    """For 1 to 40 slots of all types the oracle's head is found, in about 2 log2(n) reads."""
    most: dict[int, int] = {}
    paths: list[str] = []
    actions: list[Callable[[tools.DictStore], object]] = [
        lambda store: tools.committed(store, tools.attempted(store)),
        lambda store: tools.fenced(store, "20260101T000000Z-0123456789abcdef"),
        tools.deleted,
    ]
    for seed in range(12):
        disk, source = tools.Disk(), random.Random(seed)
        watched = tools.DictStore(disk, tools.CAS, lambda _, path: paths.append(path))
        tools.committed(tools.DictStore(disk), tools.attempted(tools.DictStore(disk)))
        for _ in range(45):
            now = tools.seen(disk.files)
            paths.clear()
            found, count = slotlog.read_log(watched), len(now.slots)
            assert found.last_slot == count
            assert (found.head.save_id if found.head else None) == now.head
            # Doubling up, halving down, and once to the commit that the last record names.
            assert len(paths) <= 2 * count.bit_length() + 1
            most[count] = max(most.get(count, 0), len(paths))
            source.choices(actions, (6, 3, 1))[0](tools.DictStore(disk))
    assert most[1] == 2
    assert most[40] <= 13


@pytest.mark.parametrize("named", ["a fence", "a commit of another save", "nothing"])
def test_a_head_that_leads_astray_is_refused(disk: tools.Disk, named: str) -> None:
    """A last record whose `head` is no commit of that save is a FormatError, never a guess."""
    store = tools.DictStore(disk)
    tools.fenced(store, tools.saved(store))
    tools.fenced(store, tools.saved(store))
    path = slot_path(4)
    slot, save_id = {
        "a fence": (2, tools.seen(disk.files).committed[0]),
        "a commit of another save": (1, tools.seen(disk.files).committed[1]),
        "nothing": (9, tools.seen(disk.files).committed[1]),
    }[named]
    body = tools.body_of(disk.files[path]) | {"head": {"slot": slot, "save_id": save_id}}
    disk.put(path, tools.sealed(body))
    with pytest.raises(errors.FormatError) as caught:
        slotlog.read_log(store)
    assert caught.value.path == path


def test_begin_goes_on_where_nothing_is_committed(store: tools.DictStore) -> None:
    """Other files, dead attempts, fences and a tombstone are no checkpoint."""
    store.put("notes.txt", b"mine")
    dead = tools.attempted(store)
    assert tools.begun(store, overwrite=False).last_slot == 0
    tools.fenced(store, dead.save_id)
    assert tools.begun(store, overwrite=False).last_slot == 1
    tools.saved(store)
    tools.deleted(store)
    ticket = tools.begun(store, overwrite=False)
    assert (ticket.last_slot, ticket.previous) == (3, None)


def _files_in(store: Store) -> dict[str, bytes]:
    return {entry.path: store.get(entry.path).data for entry in store.list("")}


def failed(action: Any, operation: str = "put_absent", **more: Any) -> Rule:
    """Return how an operation fails, every time if not told otherwise."""
    return Rule(action=action, operation=operation, **{"hit_count": None, **more})


REFUSALS = ("permission", "credentials", "no-space", "unsupported")
ANSWERS: dict[str, tuple[list[Rule], type[Exception] | None, bool, int]] = {
    "lost": ([failed("lost_answer", hit_count=1)], None, True, 1),
    "nothing was done, thrice": ([failed("error", hit_count=3)], None, True, 4),
    "never any": ([failed("error")], errors.CommitUnknownError, False, 4),
    "never any, nor a read": (
        [failed("error"), failed("error", "get")],
        errors.CommitUnknownError,
        False,
        4,
    ),
    "lost, and no read": (
        [failed("lost_answer"), failed("error", "get")],
        errors.CommitUnknownError,
        True,
        4,
    ),
    # The first request may still arrive, so the refusal of the second proves nothing.
    "refused after a timeout": (
        [failed("error", kind="timeout", hit_count=1), failed("error", kind="permission")],
        errors.CommitUnknownError,
        False,
        4,
    ),
} | {
    f"refused: {kind}": (
        [failed("error", kind=kind, retryable=False)],
        errors.StorageError,
        False,
        1,
    )
    for kind in REFUSALS
}
"""What a creation is answered, how the commit ends, if it is in the slot, and how often asked."""


@pytest.mark.parametrize(
    ("rules", "raised", "is_there", "put_count"), ANSWERS.values(), ids=ANSWERS
)
def test_a_commit_ends_as_its_answers_say(
    store: tools.DictStore,
    rules: list[Rule],
    raised: type[Exception] | None,
    is_there: bool,  # noqa: FBT001
    put_count: int,
) -> None:
    """Done, refused for sure, or unknown; asked as often as the policy says, in one slot."""
    attempt, faulty = tools.attempted(store), store.failing(*rules)
    if raised is None:
        write_id = tools.committed(faulty, attempt).write_id
        assert tools.seen(store.disk.files).slots[0]["write_id"] == write_id
    else:
        with pytest.raises(raised) as caught:
            tools.committed(faulty, attempt)
        error = caught.value
        if isinstance(error, errors.CommitUnknownError):
            assert (error.save_id, error.slot) == (attempt.save_id, 1)
            assert "ckpt-storage show" in (error.next_step or "")
        else:
            assert isinstance(error, errors.StorageError)
            assert error.kind == rules[0].kind
    assert tools.seen(store.disk.files).committed == [attempt.save_id] * is_there
    calls = [call.operation for call in faulty.script.calls]
    assert calls.count("put_absent") == put_count
    assert calls[:2] == ["put_absent", "get"]


@pytest.mark.parametrize("exclusive_create", [True, False])
def test_a_slot_that_another_holds_is_lost_to_it(*, exclusive_create: bool) -> None:
    """The error names slot, winner, process and a way; also where nobody creates exclusively."""
    store = tools.DictStore(tools.Disk(), replace(tools.CAS, exclusive_create=exclusive_create))
    mine, theirs = tools.attempted(store), tools.attempted(store)
    tools.committed(store, theirs)
    lost = [Rule(action="error", operation="put_absent")] * exclusive_create
    with pytest.raises(errors.CommitConflictError) as caught:
        tools.committed(store.failing(*lost), mine)
    error = caught.value
    assert error.winner["save_id"] == theirs.save_id
    assert tools.is_whole(store.disk.files, mine.save_id)
    assert (error.path, error.phase) == (slot_path(1), "commit")
    assert mine.save_id in str(error)
    assert str(os.getpid()) in str(error)
    assert error.next_step
    assert "overwrite" not in str(error), "nobody is told to replace the winner"


def test_of_two_equal_records_only_the_first_takes_the_slot(store: tools.DictStore) -> None:
    """A record without a save, as two cleaners write at once, is known by its write id."""
    (first, is_first), (second, is_second) = (
        slotlog.take_slot(store, "fence", 1, None) for _ in range(2)
    )
    assert (is_first, is_second) == (True, False)
    assert second.write_id == first.write_id


def test_a_torn_slot_is_unknown_not_failed(store: tools.DictStore) -> None:
    """A storage that tore the record apart leaves a slot that says nothing about the winner."""
    faulty = store.failing(Rule(action="short", operation="put_absent"))
    attempt = tools.attempted(store)
    assert tools.committed(faulty, attempt).slot == 1  # it reported success, which is its own fault
    with pytest.raises(errors.IntegrityError):
        slotlog.read_log(store)
    with pytest.raises(errors.CommitUnknownError):
        tools.committed(store, attempt)


@pytest.mark.parametrize(
    "act", [lambda store: tools.fenced(store, "20260101T000000Z-0123456789abcdef"), tools.deleted]
)
def test_a_record_that_is_no_commit_is_taken_again(
    store: tools.DictStore, act: Callable[[Store], object]
) -> None:
    """Where nobody can tell whether it was created, no save is in doubt: the call is repeated."""
    tools.committed(store, tools.attempted(store))
    faulty = store.failing(failed("error"))
    with pytest.raises(errors.StorageError) as caught:
        act(faulty)
    assert (caught.value.kind, caught.value.retryable) == ("unknown", True)
    act(store)


class Late(tools.DictBackend):
    """The first creation is reported as timed out, and arrives just before the second."""

    late: tuple[str, Buffers] | None = None
    is_first = True

    def put(self, path: str, data: Buffers, **conditions: Any) -> None:
        if self.is_first:
            self.is_first, self.late = False, (path, data)
            raise TimeoutError
        if self.late is not None:
            late, self.late = self.late, None
            super().put(*late, if_absent=True)
        super().put(path, data, **conditions)


def test_a_request_that_arrives_late_is_recognised(disk: tools.Disk) -> None:
    """The repeated create finds the slot taken, by its own earlier request: committed."""
    attempt = tools.attempted(tools.DictStore(disk))
    assert tools.committed(tools.DictStore(disk, backend=Late), attempt).save_id == attempt.save_id
    assert tools.seen(disk.files).committed == [attempt.save_id]


def test_an_expired_deadline_fails_before_anything_is_sent(store: tools.DictStore) -> None:
    """With no time left nothing is created, so that is no unknown outcome but a timeout."""
    attempt = tools.attempted(store)
    faulty = store.failing()
    with pytest.raises(errors.PhaseTimeoutError):
        tools.committed(faulty.bounded(Deadline("commit", 1e-9)), attempt)
    assert faulty.script.calls == []


@pytest.mark.parametrize("operation", ["link", "fsync_folder"])
def test_a_link_with_a_lost_answer_counts_an_unsynced_one_does_not(
    tmp_path: Path, operation: str
) -> None:
    """POSIX: a link that is there is a commit; if its folder cannot be synced, who knows."""
    attempt = tools.attempted(local_store(str(tmp_path), sync_files=False))
    rule = Rule(action="lost_answer", operation=operation, path="commits")
    faulty = local_store(str(tmp_path), posix=FaultPosix([rule]))
    if operation == "link":
        assert tools.committed(faulty, attempt).save_id == attempt.save_id
    else:
        with pytest.raises(errors.CommitUnknownError, match="it is there, but"):
            tools.committed(faulty, attempt)
    files = _files_in(local_store(str(tmp_path)))
    assert tools.seen(files).head == attempt.save_id
    assert not [path for path in tmp_path.rglob("*") if ".tmp-" in path.name]


@tools.BOTH
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_no_schedule_breaks_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities, scenario: Scenario
) -> None:
    """After every operation of every schedule both views of the checkpoint are whole."""
    tools.take_in_turn(monkeypatch, tools.IN_TURN[0])
    seeds = range(scenario.seeds // 10)
    print(check_schedules(capabilities, scenario, seeds, systematic=True))  # noqa: T201  # for -rP
