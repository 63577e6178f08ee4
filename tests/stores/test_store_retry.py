"""Retries, deadlines, abandoned threads and the probe, over a local store that fails to order."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpt_storage.errors import IntegrityError, StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store.base import Capabilities, Copied, Entry, Store
from ckpt_storage.store.local import LocalStore
from ckpt_storage.store.probe import probe_exclusive_create
from ckpt_storage.store.retry import RetryStore, abandoned_thread_count
from ckpt_storage.store.timed import AbandonedError, moved
from ckpt_storage.testing.fault_store import FaultStore
from ckpt_storage.testing.faults import Action, Rule

SHORT_S = 0.2
AMPLE_S = 1.0
"""Where another operation must end in the time in which one that hangs is given up."""

WAIT_S = 30.0

REPEATED: dict[str, Callable[[RetryStore], object]] = {
    "prepare": lambda store: store.prepare(["saves"]),
    "read": lambda store: store.read("x"),
    "read_version": lambda store: store.read_version("x"),
    "read_into": lambda store: store.read_into("x", 0, memoryview(bytearray(4))),
    "stat": lambda store: store.stat("x"),
    "write": lambda store: store.write("x", b"data"),
    "replace": lambda store: store.replace("x", b"data"),
    "start_upload": lambda store: store.start_upload("y", part_bytes=1),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete(["x"]),
    "delete_folder": lambda store: store.delete_folder("saves"),
    "abort_uploads": lambda store: store.abort_uploads(""),
    "now_s": lambda store: store.now_s(".probe"),
}
EACH_OPERATION = pytest.mark.parametrize("operation", sorted(REPEATED))


class Time:
    """A clock that only sleeping moves, and what was slept."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def clock(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def sleep(self, delay_s: float) -> None:
        """Let the time pass at once."""
        self.slept.append(delay_s)
        self.now_s += delay_s


class Bench:
    """A local store with one object, a fault wrapper around it, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.local = LocalStore(str(folder), sync_files=False)
        self.local.prepare(["saves", "commits"])
        self.local.write("x", b"data")
        self.time = Time()
        self.opened: list[tuple[RetryStore, FaultStore]] = []

    def store(
        self,
        *rules: Rule,
        policy: RetryPolicy | None = None,
        request_timeout_s: float = WAIT_S,
        random: Callable[[], float] = lambda: 0.5,
    ) -> RetryStore:
        """Return a retrying store over faults; `faults` and `calls` then speak of it."""
        self.faults = FaultStore(self.local, rules)
        store = RetryStore(
            self.faults,
            policy=policy or RetryPolicy(attempt_count=4, first_delay_s=1.0, max_delay_s=3.0),
            request_timeout_s=request_timeout_s,
            clock=self.time.clock,
            sleep=self.time.sleep,
            random=random,
        )
        self.opened.append((store, self.faults))
        return store

    @property
    def calls(self) -> list[str]:
        """Return the operations that reached the faults."""
        return [call.operation for call in self.faults.script.calls]

    def close(self) -> None:
        """Let what hangs go on, and wait until nothing abandoned is left."""
        for store, faults in self.opened:
            faults.script.release()
            store.close()
        wait_until(lambda: abandoned_thread_count() == 0)


def wait_until(true: Callable[[], bool]) -> None:
    """Wait for what another thread will soon make true; fail if it does not."""
    turn = threading.Event()
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s
        turn.wait(0.001)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A fresh bench, closed at the end."""
    wait_until(lambda: abandoned_thread_count() == 0)  # those of other files' tests
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def error_of(call: Callable[[], object]) -> StorageError:
    """Return the storage error that a call raises."""
    with pytest.raises(StorageError) as caught:
        call()
    return caught.value


def fault(operation: str, **how: object) -> Rule:
    """Return a rule that fails an operation with a retryable error, unless told otherwise."""
    return dataclasses.replace(Rule(action="error", operation=operation), **how)  # type: ignore[arg-type]


@EACH_OPERATION
def test_idempotent_operations_are_repeated(bench: Bench, operation: str) -> None:
    """Three retryable failures in a row are survived, whether or not the work was done."""
    for action in ("error", "lost_answer"):
        store = bench.store(fault(operation, action=action, hit_count=3))
        REPEATED[operation](store)
        assert bench.calls.count(operation) == 4


@EACH_OPERATION
def test_what_cannot_succeed_is_not_repeated(bench: Bench, operation: str) -> None:
    """Errors that are not retryable come back after one attempt."""
    for kind in ("permission", "no-space", "not-found", "exists", "precondition"):
        store = bench.store(fault(operation, kind=kind, retryable=False))
        assert error_of(lambda: REPEATED[operation](store)).kind == kind  # noqa: B023
        assert bench.calls.count(operation) == 1


@pytest.mark.parametrize("kind", ["exists", "precondition", "not-found", "unsupported"])
def test_answers_are_never_repeated(bench: Bench, kind: str) -> None:
    """An answer of the storage is one, even if it is wrongly marked as retryable."""
    store = bench.store(fault("read", kind=kind, retryable=True))
    assert error_of(lambda: store.read("x")).kind == kind
    assert bench.calls == ["read"]


def test_damage_is_never_repeated(bench: Bench) -> None:
    """Integrity errors pass through at once."""
    store = bench.store()
    with pytest.raises(IntegrityError):
        store.read_into("x", 0, memoryview(bytearray(9)))
    assert bench.calls == ["read_into"]


def test_the_last_failure_is_raised_with_the_count(bench: Bench) -> None:
    """When attempts run out, the storage's own error comes back, noting the attempts."""
    store = bench.store(fault("read", hit_count=None))
    error = error_of(lambda: store.read("x"))
    assert error.kind == "connection"
    assert bench.calls.count("read") == 4
    assert "4 times" in error.__notes__[0]
    copy: StorageError = pickle.loads(pickle.dumps(error))
    assert copy.__notes__ == error.__notes__


def test_delays_grow_with_full_jitter(bench: Bench) -> None:
    """Each delay is the random fraction of a ceiling that doubles up to the maximum."""
    fractions = iter([0.5, 0.25, 1.0, 0.0, 0.5])
    store = bench.store(
        fault("read", hit_count=5),
        policy=RetryPolicy(attempt_count=6, first_delay_s=1.0, max_delay_s=5.0),
        random=lambda: next(fractions),
    )
    store.read("x")
    assert bench.time.slept == [0.5 * 1, 0.25 * 2, 1.0 * 4, 0.0 * 5, 0.5 * 5]


def test_no_attempt_begins_after_the_deadline(bench: Bench) -> None:
    """A delay that would pass the deadline is not slept; the failure comes back at once."""
    store = bench.store(
        fault("read", hit_count=None),
        policy=RetryPolicy(attempt_count=100, first_delay_s=1.0, max_delay_s=1.0),
    ).with_deadline(bench.time.now_s + 2.25)
    error = error_of(lambda: store.read("x"))
    assert error.kind == "connection"
    assert bench.time.slept == [0.5] * 4
    assert bench.calls.count("read") == 5


@pytest.mark.parametrize(
    ("kind", "attempt_count"), [("throttled", 2), ("connection", 1), ("timeout", 1), ("other", 1)]
)
@pytest.mark.parametrize("operation", ["create", "replace"])
def test_exclusive_operations_are_repeated_only_if_nothing_was_done(
    bench: Bench, operation: str, kind: str, attempt_count: int
) -> None:
    """A create whose fate is unknown is reported, not repeated: the second might be refused."""
    store = bench.store(fault(operation, kind=kind))

    def call() -> None:
        if operation == "create":
            store.create("commits/1", b"one")
        else:
            store.replace("x", b"one", if_match="token")

    if operation == "create" and attempt_count > 1:
        call()
        assert bench.local.read("commits/1") == b"one"
    else:
        error_of(call)
    assert bench.calls.count(operation) == attempt_count


@pytest.mark.parametrize("linked", ["cause", "context"])
def test_a_refused_connection_proves_that_nothing_was_done(bench: Bench, linked: str) -> None:
    """Refused by the cause itself: repeated. Refused some time earlier: proves nothing."""

    class Refusing(LocalStore):
        """Refuses the first create."""

        attempt_count = 0

        def create(self, path: str, data: bytes) -> None:
            self.attempt_count += 1
            if self.attempt_count > 1:
                super().create(path, data)
                return
            error = StorageError("No answer.", kind="connection", retryable=True)
            if linked == "cause":
                raise error from ConnectionRefusedError()
            error.__context__ = ConnectionRefusedError()
            raise error

    inner = Refusing(str(bench.folder))
    store = RetryStore(inner, sleep=bench.time.sleep)
    if linked == "cause":
        store.create("commits/1", b"one")
        assert inner.attempt_count == 2
    else:
        error_of(lambda: store.create("commits/1", b"one"))
        assert inner.attempt_count == 1
    store.close()


class Expiring(LocalStore):
    """A store whose token is refused until `cured_by` refreshes; negative: for good."""

    def __init__(self, root: str, *, cured_by: int) -> None:
        super().__init__(root)
        self.cured_by = cured_by
        self.refresh_count = 0
        self.barrier: threading.Barrier | None = None

    def refresh(self) -> None:
        """Fetch another token."""
        self.refresh_count += 1

    def read(self, path: str, *, most_bytes: int | None = None) -> bytes:
        """Read with the token there is."""
        if not 0 <= self.cured_by <= self.refresh_count:
            if self.barrier is not None:
                self.barrier.wait(WAIT_S)
            raise StorageError(
                "The token is no good.", kind="credentials", retryable=self.cured_by > 0
            )
        return super().read(path, most_bytes=most_bytes)


def test_expired_credentials_are_refreshed_once(bench: Bench) -> None:
    """One refresh is tried without waiting; if it does not or cannot help, the error comes back."""
    for cured_by, refresh_count in ((1, 1), (2, 1), (-1, 0)):
        inner = Expiring(str(bench.folder), cured_by=cured_by)
        store = RetryStore(inner, sleep=bench.time.sleep)
        if cured_by == 1:
            assert store.read("x") == b"data"
        else:
            assert error_of(lambda: store.read("x")).kind == "credentials"  # noqa: B023
        assert inner.refresh_count == refresh_count
        store.close()
    assert bench.time.slept == []


def test_threads_that_meet_one_expiry_refresh_once(bench: Bench) -> None:
    """Credentials that another thread has renewed meanwhile are not renewed again."""
    inner = Expiring(str(bench.folder), cured_by=1)
    inner.barrier = threading.Barrier(4)
    store = RetryStore(inner)
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(store.read("x"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == [b"data"] * 4
    assert inner.refresh_count == 1
    store.close()


def test_a_hanging_operation_is_given_up_and_named(bench: Bench) -> None:
    """At the deadline the caller gets an error; the thread is counted until it ends."""
    store = bench.store(
        fault("read", action="hang"), policy=RetryPolicy(attempt_count=1), request_timeout_s=SHORT_S
    )
    error = error_of(lambda: store.read("saves/what"))
    assert isinstance(error, AbandonedError)
    assert error.kind == "timeout"
    assert f"read of {store.url}/saves/what" in str(error)
    assert "0.2 s" in str(error)
    assert type(pickle.loads(pickle.dumps(error))) is AbandonedError
    assert abandoned_thread_count() == 1
    name = f"ckpt-storage abandoned: read of {store.url}/saves/what"
    (left,) = [thread for thread in threading.enumerate() if thread.name == name]
    assert left.daemon
    bench.faults.script.release()
    left.join(WAIT_S)
    wait_until(lambda: abandoned_thread_count() == 0)


def test_a_hanging_read_is_repeated_in_another_thread(bench: Bench) -> None:
    """What returns fresh values may be asked for again while the first still hangs."""
    store = bench.store(fault("read", action="hang"), request_timeout_s=AMPLE_S)
    assert store.read("x") == b"data"
    assert bench.calls == ["read", "read"]
    assert abandoned_thread_count() == 1


def test_the_deadline_of_a_view_gives_up_a_hanging_operation(bench: Bench) -> None:
    """The nearer of request deadline and phase deadline counts."""
    store = bench.store(fault("read", action="hang")).with_deadline(bench.time.now_s + SHORT_S)
    assert isinstance(error_of(lambda: store.read("x")), AbandonedError)


@pytest.mark.parametrize("operation", ["read_into", "replace", "create"])
def test_what_may_take_effect_late_is_not_repeated(bench: Bench, operation: str) -> None:
    """A late read fills memory, a late replace overtakes, a late create wins: none is repeated."""
    store = bench.store(fault(operation, action="hang"), request_timeout_s=SHORT_S)
    error = error_of(
        {
            "read_into": lambda: store.read_into("x", 0, memoryview(bytearray(4))),
            "replace": lambda: store.replace("x", b"new"),
            "create": lambda: store.create("commits/1", b"one"),
        }[operation]
    )
    assert isinstance(error, AbandonedError)
    assert not error.retryable
    assert bench.calls == [operation]


def test_a_hanging_disk_is_not_waited_for_by_what_is_asked_of_a_store(bench: Bench) -> None:
    """What a store can do, and whether it can copy, is told by the deadline like all else."""
    ended = threading.Event()

    class Hanging(LocalStore):
        """Lies on a mount whose server is gone."""

        @property
        def capabilities(self) -> Capabilities:
            ended.wait(60)
            return super().capabilities

        def can_copy_from(self, other: Copied, *, at_any_price: bool = True) -> bool:
            ended.wait(60)
            return super().can_copy_from(other, at_any_price=at_any_price)

    store = RetryStore(
        Hanging(str(bench.folder)), request_timeout_s=0.2, policy=RetryPolicy(attempt_count=1)
    )
    try:
        for call in (lambda: store.capabilities, lambda: store.can_copy_from(store)):
            assert isinstance(error_of(call), AbandonedError)
    finally:
        ended.set()
    store.close()


def test_a_call_that_comes_further_has_its_time_anew(bench: Bench) -> None:
    """Each page of a listing has the time of a request; the phase's deadline bounds them all."""

    class Paged(LocalStore):
        """Takes a request for each page."""

        def list(self, prefix: str, *, recursive: bool = True) -> list[Entry]:
            for _ in range(8):
                time.sleep(0.2)
                moved()
            return super().list(prefix, recursive=recursive)

    once = RetryPolicy(attempt_count=1)
    store = RetryStore(Paged(str(bench.folder)), request_timeout_s=1.0, policy=once)
    assert [entry.path for entry in store.list("")] == ["x"]
    near = store.with_deadline(time.monotonic() + 0.5)
    assert isinstance(error_of(lambda: near.list("")), AbandonedError)
    store.close()


def upload_of(store: RetryStore, *, complete: bool = True) -> None:
    """Upload two parts, and complete or abort."""
    upload = store.start_upload("saves/u", part_bytes=2)
    upload.write_part(0, 0, [memoryview(b"ab")], last=False)
    upload.write_part(1, 2, [memoryview(b"cd")], last=True)
    if complete:
        upload.complete(4)
    else:
        upload.abort()


@pytest.mark.parametrize("action", ["error", "lost_answer"])
@pytest.mark.parametrize("operation", ["write_part", "complete"])
def test_uploads_are_carried_on(bench: Bench, operation: str, action: Action) -> None:
    """Parts and completion are repeated, also when only their answer was lost."""
    upload_of(bench.store(fault(operation, action=action, hit_count=3)))
    assert bench.local.read("saves/u") == b"abcd"


def test_aborts_are_repeated(bench: Bench) -> None:
    """An abort that fails for a moment still leaves nothing."""
    upload_of(bench.store(fault("abort", hit_count=2)), complete=False)
    assert bench.local.abort_uploads("") == 0


def test_parts_that_cannot_be_sent_again_are_not(bench: Bench) -> None:
    """An upload that says its parts are not repeatable gets each once."""
    store = bench.store(fault("write_part"))
    start = bench.faults.start_upload

    def start_appending(path: str, *, part_bytes: int) -> object:
        upload = start(path, part_bytes=part_bytes)
        upload.repeatable = False
        return upload

    bench.faults.start_upload = start_appending  # type: ignore[method-assign, assignment]
    upload = store.start_upload("saves/u", part_bytes=2)
    error_of(lambda: upload.write_part(0, 0, [memoryview(b"ab")], last=True))
    assert bench.calls.count("write_part") == 1
    upload.abort()


def test_an_upload_with_a_part_under_way_cannot_complete(bench: Bench) -> None:
    """A part that was given up may be sent later, from memory that has changed by then."""
    store = bench.store(fault("write_part", action="hang"), request_timeout_s=SHORT_S)
    upload = store.start_upload("saves/u", part_bytes=2)
    buffer = bytearray(b"ab")
    error = error_of(lambda: upload.write_part(0, 0, [memoryview(buffer)], last=True))
    assert not error.retryable
    buffer[:] = b"??"
    bench.faults.script.release()
    wait_until(lambda: abandoned_thread_count() == 0)
    for call in (
        lambda: upload.complete(2),
        lambda: upload.write_part(0, 0, [memoryview(b"ab")], last=True),
    ):
        assert "part 0 did not end in time" in str(error_of(call))
    upload.abort()
    assert bench.local.list("saves") == []
    assert bench.local.abort_uploads("") == 0


def test_an_abort_beside_a_hanging_part_leaves_nothing(bench: Bench) -> None:
    """The file goes at once; its descriptor stays open for the thread that may still write."""
    store = bench.store(fault("write_part", action="hang"), request_timeout_s=SHORT_S)
    upload = store.start_upload("saves/u", part_bytes=2)
    error_of(lambda: upload.write_part(0, 0, [memoryview(b"ab")], last=True))
    upload.abort()
    assert list((bench.folder / "saves").iterdir()) == []
    bench.faults.script.release()
    wait_until(lambda: abandoned_thread_count() == 0)
    assert list((bench.folder / "saves").iterdir()) == []


def test_an_upload_that_starts_after_it_was_given_up_is_aborted(bench: Bench) -> None:
    """Nobody owns it, so nobody else could remove what it leaves."""
    store = bench.store(
        fault("start_upload", action="hang"),
        policy=RetryPolicy(attempt_count=1),
        request_timeout_s=SHORT_S,
    )
    error_of(lambda: store.start_upload("saves/u", part_bytes=2))
    bench.faults.script.release()
    wait_until(lambda: abandoned_thread_count() == 0)
    assert list((bench.folder / "saves").iterdir()) == []


def test_a_hanging_operation_ends_all_in_its_thread(bench: Bench) -> None:
    """The caller gets its error in time; what was to come after it is not done, even late."""
    store = bench.store(fault("read_into", action="hang"), request_timeout_s=SHORT_S)
    done: list[str] = []

    def read_and_go_on(same: Store) -> None:
        same.read_into("x", 0, memoryview(bytearray(4)))
        done.append("went on")

    error = error_of(lambda: store.in_one_thread(read_and_go_on))
    assert isinstance(error, AbandonedError)
    assert not error.retryable
    assert f"read of {store.url}/x did not end within 0.2 s" in str(error)
    assert abandoned_thread_count() == 1
    bench.faults.script.release()
    wait_until(lambda: abandoned_thread_count() == 0)
    assert done == []
    assert bench.calls == ["read_into"]


def _read_in_child(store: RetryStore, out: multiprocessing.Queue[object]) -> None:
    out.put((store.read("x"), abandoned_thread_count()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_store_works_in_a_forked_child(bench: Bench) -> None:
    """A child has none of its parent's threads, not even the abandoned ones, and starts its own."""
    store = bench.store(fault("read", action="hang"), request_timeout_s=AMPLE_S)
    store.read("x")
    assert abandoned_thread_count() == 1
    fork = multiprocessing.get_context("fork")
    out: multiprocessing.Queue[object] = fork.Queue()
    child = fork.Process(target=_read_in_child, args=(store, out), daemon=True)
    child.start()
    assert out.get(timeout=WAIT_S) == (b"data", 0)
    child.join(WAIT_S)
    assert child.exitcode == 0


class Careless(LocalStore):
    """Takes a create for a write, as a server does that ignores the condition."""

    def create(self, path: str, data: bytes) -> None:
        """Overwrite what is there."""
        self.write(path, data)


class Untrue(LocalStore):
    """Overwrites, and then says that something was there."""

    def create(self, path: str, data: bytes) -> None:
        """Overwrite what is there and refuse."""
        there = [entry.path for entry in self.list("")]
        self.write(path, data)
        if path in there:
            raise StorageError("It is there.", kind="exists")


@pytest.mark.parametrize(
    ("kind", "exclusive"), [(LocalStore, True), (Careless, False), (Untrue, False)]
)
def test_the_probe_tells_who_keeps_the_promise(
    bench: Bench, kind: type[LocalStore], *, exclusive: bool
) -> None:
    """Only a storage that refuses and keeps the first content is exclusive; no trace stays."""
    store = kind(str(bench.folder))
    result = probe_exclusive_create(store, key=(bench, kind.__name__))
    assert result.exclusive is exclusive
    assert result.reason
    assert [entry.path for entry in store.list("")] == ["x"]


@pytest.mark.parametrize("skip_count", [0, 1])
@pytest.mark.parametrize("kind", ["connection", "exists"])
def test_lost_answers_do_not_mislead_the_probe(bench: Bench, skip_count: int, kind: str) -> None:
    """What became of a create is read back, be it the first or the second."""
    rules = [fault("create", action="lost_answer", kind=kind, skip_count=skip_count)]
    for store, exclusive in ((bench.local, True), (Careless(str(bench.folder)), False)):
        result = probe_exclusive_create(FaultStore(store, rules), key=(bench, store))
        assert result.exclusive is exclusive


def test_the_probe_has_no_answer_from_a_dead_storage(bench: Bench) -> None:
    """When no create arrives, the error is raised and nothing is kept."""
    for skip_count in (0, 1):
        rules = [fault("create", hit_count=None, skip_count=skip_count)]
        faults = FaultStore(bench.local, rules)
        assert error_of(lambda: probe_exclusive_create(faults, key=bench)).kind == "connection"  # noqa: B023
    assert probe_exclusive_create(bench.local, key=bench).exclusive


def test_the_probe_needs_no_right_to_delete(bench: Bench) -> None:
    """Where deleting is forbidden the answer is the same, and a small object stays."""
    faults = FaultStore(bench.local, [fault("delete", kind="permission", retryable=False)])
    assert probe_exclusive_create(faults, key=bench).exclusive
    assert len(bench.local.list("")) == 2
