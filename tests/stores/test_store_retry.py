"""The facade: deadlines, repeats, abandoned threads, lost replies, uploads; and the probe."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from limits import HANG_S
from local_stores import Remote, error_of, until

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location
from ckpt_storage.store.backend import (
    Backend,
    Buffers,
    Content,
    ObjectInfo,
    OpenUpload,
    Part,
    Range,
    ShortReadError,
)
from ckpt_storage.store.backends import memory
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.probe import create_new, find_abilities
from ckpt_storage.store.problems import HttpFailure
from ckpt_storage.store.store import Store
from ckpt_storage.store.threads import AbandonedError, abandoned_thread_count, report_progress
from ckpt_storage.store.upload import Upload
from ckpt_storage.testing.faults import Action, FaultBackend, Rule

SHORT_S = 0.2
AMPLE_S = 1.0
"""Where another operation must end in the time in which one that hangs is given up."""

REPEATED: dict[str, tuple[str, Callable[[Store], object]]] = {
    "make_folders": ("make_folders", lambda store: store.make_folders(["saves"])),
    "get": ("get", lambda store: store.get("x")),
    "read": ("read", lambda store: store.read("x", [(0, memoryview(bytearray(4)))])),
    "stat": ("stat", lambda store: store.stat("x")),
    "put": ("put", lambda store: store.put("x", b"data")),
    "replace": ("put", lambda store: store.replace("x", b"data")),
    "token": ("begin_upload", lambda store: begun(store).token()),
    "list": ("list", lambda store: store.list("")),
    "delete": ("delete", lambda store: store.delete(["x"])),
    "delete_folder": ("delete_folder", lambda store: store.delete_folder("saves")),
    "abort_uploads": ("list_uploads", lambda store: store.abort_uploads("")),
    "server_time": ("server_time", lambda store: store.server_time(".probe")),
}


class Bench:
    """A backend with one object, faults around it, and a clock that only sleeping moves."""

    def __init__(self) -> None:
        self.location = Location.of(f"memory://{uuid.uuid4().hex}/run")
        self.inner = Remote(self.location)
        self.plain = Store(self.inner, url="plain://root")
        self.plain.put("x", b"data")
        self.slept: list[float] = []
        self.opened: list[tuple[Store, FaultBackend]] = []

    def clock(self) -> float:
        return 1000.0 + sum(self.slept)

    def store(
        self,
        *rules: Rule,
        backend: Backend | None = None,
        policy: RetryPolicy | None = None,
        request_timeout_s: float = HANG_S,
        random: Callable[[], float] = lambda: 0.5,
    ) -> Store:
        """Return a store over faults; `faults` and `calls` then speak of it."""
        self.faults = FaultBackend(backend or self.inner, rules)
        store = Store(
            self.faults,
            url="test://root",
            policy=policy or RetryPolicy(attempt_count=4, first_delay_s=1.0, max_delay_s=3.0),
            request_timeout_s=request_timeout_s,
            clock=self.clock,
            sleep=self.slept.append,
            random=random,
        )
        self.opened.append((store, self.faults))
        return store

    @property
    def calls(self) -> list[str]:
        return [call.operation for call in self.faults.script.calls]

    def close(self) -> None:
        """Let what hangs go on, and wait until nothing abandoned is left."""
        for store, faults in self.opened:
            faults.script.release()
            store.close()
        until(lambda: abandoned_thread_count() == 0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    until(lambda: abandoned_thread_count() == 0)  # those of other files' tests
    bench = Bench()
    yield bench
    bench.close()


def fault(operation: str, **how: object) -> Rule:
    """Return a rule that fails an operation with a retryable error, unless told otherwise."""
    return dataclasses.replace(Rule(action="error", operation=operation), **how)  # type: ignore[arg-type]


def begun(store: Store) -> Upload:
    return store.upload("saves/u")


@pytest.mark.parametrize("name", sorted(REPEATED))
def test_what_may_help_is_repeated_and_nothing_else(bench: Bench, name: str) -> None:
    """Three retryable failures are survived, done or not; what cannot succeed comes at once."""
    operation, call = REPEATED[name]
    for action in ("error", "lost_answer"):
        call(bench.store(fault(operation, action=action, hit_count=3)))
        assert bench.calls.count(operation) == 4
    for kind in ("permission", "no-space", "not-found", "exists", "precondition", "unsupported"):
        is_answer = kind not in {"permission", "no-space"}
        store = bench.store(fault(operation, kind=kind, retryable=is_answer))
        assert error_of(lambda: call(store)).kind == kind  # noqa: B023
        assert bench.calls.count(operation) == 1


def test_the_last_failure_is_raised_with_the_count(bench: Bench) -> None:
    """When attempts run out, the storage's own error comes back, noting the attempts."""
    store = bench.store(fault("get", hit_count=None))
    error = error_of(lambda: store.get("x").data)
    assert error.kind == "connection"
    assert bench.calls.count("get") == 4
    assert "4 times" in error.__notes__[0]
    copy: StorageError = pickle.loads(pickle.dumps(error))
    assert copy.__notes__ == error.__notes__


def test_delays_grow_with_full_jitter_and_end_with_the_deadline(bench: Bench) -> None:
    """Each is the random fraction of a ceiling that doubles; none is slept beyond the deadline."""
    fractions = iter([0.5, 0.25, 1.0, 0.1, 0.5, 1.0])
    store = bench.store(
        fault("get", hit_count=None),
        policy=RetryPolicy(attempt_count=100, first_delay_s=1.0, max_delay_s=5.0),
        random=lambda: next(fractions),
    ).bounded(Deadline("load", 9.0, bench.clock))
    assert error_of(lambda: store.get("x")).kind == "connection"
    assert bench.slept == [0.5 * 1, 0.25 * 2, 1.0 * 4, 0.1 * 5, 0.5 * 5]
    assert bench.calls.count("get") == 6


def put_if(store: Store, operation: str, version: str | None) -> None:
    if operation == "put_absent":
        store.create("commits/1", b"one")
    else:
        store.replace("x", b"one", if_match=version)


EACH_CONDITION = pytest.mark.parametrize(
    ("operation", "path"), [("put_absent", "commits/1"), ("put_match", "x")]
)


@pytest.mark.parametrize("kind", ["throttled", "connection", "timeout", "other"])
@pytest.mark.parametrize("action", ["error", "lost_answer"])
@EACH_CONDITION
def test_a_lost_answer_to_a_conditional_put_is_settled(
    bench: Bench, operation: str, path: str, action: Action, kind: str
) -> None:
    """It is read back what became of it; only what is not there is asked for again."""
    store = bench.store(fault(operation, action=action, kind=kind))
    put_if(store, operation, bench.plain.get("x").version)
    assert bench.plain.get(path).data == b"one"
    is_told = action == "lost_answer" and kind != "throttled"
    assert bench.calls.count(operation) == (1 if is_told else 2)


@EACH_CONDITION
def test_what_another_put_or_nobody_can_tell_is_no_success(
    bench: Bench, operation: str, path: str
) -> None:
    """Another's object is a refusal; without an answer and a look, the outcome is unknown."""
    version = bench.plain.get("x").version
    blind = fault("get", path=path, hit_count=None)
    store = bench.store(fault(operation, action="lost_answer", hit_count=None), blind)
    assert error_of(lambda: put_if(store, operation, version)).kind == "unknown"
    assert bench.calls.count(operation) == 4
    bench.plain.replace(path, b"theirs")
    store = bench.store(fault(operation, action="error"))
    kind = error_of(lambda: put_if(store, operation, version)).kind
    assert kind == ("exists" if operation == "put_absent" else "precondition")
    assert bench.plain.get(path).data == b"theirs"


@pytest.mark.parametrize("linked", ["cause", "context"])
def test_a_refused_connection_proves_that_nothing_was_done(bench: Bench, linked: str) -> None:
    """Refused by the cause itself: repeated. Refused some time earlier: it is read back first."""
    error = StorageError("No answer.", kind="connection", retryable=True)
    setattr(error, f"__{linked}__", ConnectionRefusedError())
    failures = [error]

    class Refusing(Remote):
        """Refuses the first create."""

        def put(self, path: str, data: Buffers, **how: Any) -> None:
            if failures:
                raise failures.pop()
            super().put(path, data, **how)

    store = bench.store(backend=Refusing(bench.location))
    store.create("commits/1", b"one")
    asked = ["put_absent"] if linked == "cause" else ["put_absent", "get"]
    assert bench.calls == [*asked, "put_absent"]


def test_a_put_that_was_not_sent_is_not_begun(bench: Bench) -> None:
    """Once the deadline has passed nothing is sent: the outcome is known, it was not created."""
    late = bench.store().bounded(Deadline("commit", 0.0, bench.clock))
    assert error_of(lambda: late.create("commits/1", b"one")).kind == "not-begun"
    assert bench.calls == []


def test_a_put_that_is_refused_as_such_is_sent_once(bench: Bench) -> None:
    """A status of 400 without a code that says more: nothing was created, and nothing is tried."""

    class Refusing(Remote):
        """Takes no request."""

        def put(self, path: str, data: Buffers, **how: Any) -> None:
            del path, data, how
            raise HttpFailure(status=400, code="InvalidRequest", message="Content-MD5 is required")

    store = bench.store(backend=Refusing(bench.location))
    for call in (partial(store.create, "commits/1", b"one"), partial(store.put, "x", b"one")):
        before = bench.calls.count("put") + bench.calls.count("put_absent")
        assert error_of(call).kind == "refused"
        assert bench.calls.count("put") + bench.calls.count("put_absent") == before + 1


@pytest.mark.parametrize(
    ("hit_count", "retryable", "refresh_count"), [(1, True, 1), (2, True, 1), (1, False, 0)]
)
def test_expired_credentials_are_refreshed_once(
    bench: Bench, hit_count: int, refresh_count: int, *, retryable: bool
) -> None:
    """One refresh is tried without waiting; if it does not or cannot help, the error comes back."""
    expired = fault("get", kind="credentials", hit_count=hit_count, retryable=retryable)
    store = bench.store(expired)
    if hit_count == refresh_count:
        assert store.get("x").data == b"data"
    else:
        assert error_of(lambda: store.get("x")).kind == "credentials"
    assert bench.calls.count("refresh") == refresh_count
    assert bench.slept == []


def test_threads_that_meet_expired_credentials_together_refresh_once(bench: Bench) -> None:
    """A thread whose request failed before another thread's refresh asks for no other refresh."""
    together = threading.Barrier(2, timeout=HANG_S)
    failing = iter(range(2))

    class Expired(Remote):
        def get(self, path: str, *, max_bytes: int | None) -> Content:
            for _ in failing:
                together.wait()
                raise StorageError("expired", kind="credentials", retryable=True)
            return super().get(path, max_bytes=max_bytes)

    store = bench.store(backend=Expired(bench.location))
    with ThreadPoolExecutor(2) as threads:
        contents = [*threads.map(store.get, ["x", "x"])]
    assert [content.data for content in contents] == [b"data", b"data"]
    assert bench.calls.count("refresh") == 1


def test_a_response_cut_before_the_end_of_the_object_is_read_again(bench: Bench) -> None:
    """The object reaches to the last byte of the range: it is the response that ended early."""
    cuts = iter([2])

    class Cut(Remote):
        def read(self, path: str, ranges: Iterable[Range]) -> int | None:
            for length in cuts:
                raise ShortReadError(next(iter(ranges))[0] + length)
            return super().read(path, ranges)

    store, memory_of_range = bench.store(backend=Cut(bench.location)), bytearray(4)
    store.read("x", [(0, memoryview(memory_of_range))])
    assert memory_of_range == b"data"
    assert bench.calls.count("read") == 2


def test_the_end_of_an_object_that_got_shorter_meanwhile_is_read_again(bench: Bench) -> None:
    """The default `tail` asks for the length first; another object may be there at the read."""

    class Shorter(Remote):
        tail = Backend.tail

        def stat(self, path: str) -> ObjectInfo:
            info = super().stat(path)
            self.put(path, [memoryview(b"ta")])
            return info

    assert bench.store(backend=Shorter(bench.location)).tail("x", 4).data == b"ta"


def test_an_object_of_ours_that_is_too_short_is_not_complete(bench: Bench) -> None:
    """After a lost response of the completion the length counts, not the write id alone."""

    class Short(Remote):
        def complete_upload(
            self, path: str, token: str, parts: Sequence[Part], *, write_id: str
        ) -> None:
            del token, parts
            self.put(path, [memoryview(b"da")], write_id=write_id)
            raise StorageError("lost", kind="connection", retryable=False)

    upload = begun(bench.store(backend=Short(bench.location)))
    upload.token()
    upload.write_part(0, 0, [memoryview(b"data")], last=True)
    assert error_of(lambda: upload.complete(4)).kind == "connection"
    upload.abort()


def test_a_call_that_was_given_up_sends_no_further_request(bench: Bench) -> None:
    """Its next report of progress raises in its thread, which nobody waits for any more."""
    late, ends = threading.Event(), list[BaseException]()

    class Slow(Remote):
        def delete(self, paths: Collection[str]) -> None:
            late.wait(HANG_S)
            try:
                report_progress()
            except StorageError as error:
                ends.append(error)
                raise
            ends.append(AssertionError(f"{paths} were deleted"))

    once = RetryPolicy(attempt_count=1)
    store = bench.store(backend=Slow(bench.location), policy=once, request_timeout_s=SHORT_S)
    assert isinstance(error_of(lambda: store.delete(["x"])), AbandonedError)
    late.set()
    until(lambda: ends)
    assert [type(end) for end in ends] == [AbandonedError]


def test_a_listing_of_uploads_that_was_given_up_asks_for_no_further_page(bench: Bench) -> None:
    """Each upload is progress, as each entry of `list` is; without it long listings time out."""
    late, pages = threading.Event(), [1]

    class Slow(Remote):
        def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
            late.wait(HANG_S)
            yield OpenUpload(path=f"{prefix}/u", token="u")
            pages.append(2)

    once = RetryPolicy(attempt_count=1)
    store = bench.store(backend=Slow(bench.location), policy=once, request_timeout_s=SHORT_S)
    assert isinstance(error_of(lambda: store.abort_uploads("saves")), AbandonedError)
    late.set()
    until(lambda: abandoned_thread_count() == 0)
    assert pages == [1]


def test_the_timeout_of_a_request_is_not_called_that_of_its_phase() -> None:
    """While the phase has time left, the error of the storage is raised, with the phase."""
    deadline = Deadline("write", HANG_S)
    with pytest.raises(StorageError) as caught, deadline.annotate_errors("the write"):
        raise StorageError("no response", kind="timeout", path="x")
    assert (type(caught.value), caught.value.phase) == (StorageError, "write")


def test_a_hanging_operation_is_given_up_and_named(bench: Bench) -> None:
    """At the deadline the caller gets an error; the thread is counted, and does no more."""
    store = bench.store(fault("read", action="hang"), request_timeout_s=SHORT_S)
    done: list[str] = []

    def ranges() -> Iterator[Range]:
        yield 0, memoryview(bytearray(4))
        done.append("went on")

    error = error_of(lambda: store.read("saves/what", ranges()))
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
    left.join(HANG_S)
    until(lambda: abandoned_thread_count() == 0)
    assert done == []


@pytest.mark.parametrize("name", ["read", "replace"])
def test_what_may_take_effect_late_is_not_repeated(bench: Bench, name: str) -> None:
    """A late read fills memory, a late replace overtakes: neither is repeated."""
    operation, call = REPEATED[name]
    store = bench.store(fault(operation, action="hang"), request_timeout_s=SHORT_S)
    error = error_of(lambda: call(store))
    assert isinstance(error, AbandonedError)
    assert not error.retryable
    assert bench.calls == [operation]


def test_memory_is_not_filled_once_a_read_has_ended(bench: Bench) -> None:
    """What a backend was lent is taken back: a client that lags behind writes nowhere."""
    lent: list[memoryview] = []

    class Keeping(Remote):
        """Remembers the memory it was given."""

        def read(self, path: str, ranges: Iterable[Range]) -> int | None:
            def noted() -> Iterator[Range]:
                for start, view in ranges:
                    lent.append(view)
                    yield start, view

            return super().read(path, noted())

    target = bytearray(4)
    bench.store(backend=Keeping(bench.location)).read("x", [(0, memoryview(target))])
    with pytest.raises(ValueError, match="released"):
        lent[0][:] = b"late"
    assert target == b"data"


def test_what_the_reader_raises_comes_back_as_it_is(bench: Bench) -> None:
    """An error of who takes the bytes is none of the storage's: neither renamed nor repeated."""

    def ranges() -> Iterator[Range]:
        yield 0, memoryview(bytearray(4))
        raise TimeoutError("mine")

    store = bench.store()
    with pytest.raises(TimeoutError, match="mine"):
        store.read("x", ranges())
    assert bench.calls == ["read"]


def test_a_call_that_comes_further_has_its_time_anew(bench: Bench) -> None:
    """Each page of a listing has the time of a request; the phase's deadline bounds them all."""

    class Paged(Remote):
        """Takes a request for each entry."""

        def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
            for number in range(8):
                time.sleep(0.2)
                yield ObjectInfo(path=f"{prefix}{number}", size_bytes=int(recursive))

    once = RetryPolicy(attempt_count=1)
    store = Store(Paged(bench.location), url="paged", request_timeout_s=1.0, policy=once)
    assert len(store.list("")) == 8
    near = store.bounded(Deadline("load", 0.5))
    assert isinstance(error_of(lambda: near.list("")), AbandonedError)
    store.close()


def test_an_upload_with_a_part_under_way_cannot_complete(bench: Bench) -> None:
    """A part that was given up may be sent later, from memory that has changed by then."""
    before = set(memory._OPEN)  # noqa: SLF001  # as below
    store = bench.store(fault("put_part", action="hang"), request_timeout_s=SHORT_S)
    upload = begun(store)
    buffer = bytearray(b"ab")
    error = error_of(lambda: upload.write_part(0, 0, [memoryview(buffer)], last=False))
    assert not error.retryable
    for call in (
        lambda: upload.complete(2),
        lambda: upload.write_part(0, 0, [memoryview(b"ab")], last=True),
        upload.receipts,
    ):
        assert "the part at byte 0 did not end in time" in str(error_of(call))
    upload.abort()
    buffer[:] = b"??"
    bench.faults.script.release()
    until(lambda: abandoned_thread_count() == 0)
    assert bench.plain.list("saves") == []
    assert set(memory._OPEN) <= before  # noqa: SLF001  # what nobody can ask for


def _read_in_child(store: Store, out: multiprocessing.Queue[object]) -> None:
    out.put((store.get("x").data, abandoned_thread_count()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_store_works_in_a_forked_child(bench: Bench) -> None:
    """A child has none of its parent's threads, not even the abandoned ones, and starts its own."""
    store = bench.store(fault("get", action="hang"), request_timeout_s=AMPLE_S)
    store.get("x")
    assert abandoned_thread_count() == 1
    fork = multiprocessing.get_context("fork")
    out: multiprocessing.Queue[object] = fork.Queue()
    child = fork.Process(target=_read_in_child, args=(store, out), daemon=True)
    child.start()
    assert out.get(timeout=HANG_S) == (b"data", 0)
    child.join(HANG_S)
    assert child.exitcode == 0


class Careless(Remote):
    """Takes a create for a write, as a server does that ignores the condition."""

    is_untrue = False
    """It overwrites, and then says that something was there."""

    def put(self, path: str, data: Buffers, **how: Any) -> None:
        there = [info.path for info in self.list("", recursive=True)]
        super().put(path, data, **{**how, "if_absent": False})
        if self.is_untrue and path in there and how.get("if_absent"):
            raise FileExistsError(path)


class Untrue(Careless):
    """As a server does that ignores the condition but for its answer."""

    is_untrue = True


LOST = [
    fault("put_absent", action="lost_answer", kind=kind, skip_count=skip_count)
    for kind in ("connection", "exists")
    for skip_count in (0, 1)
]


@pytest.mark.parametrize(
    ("kind", "exclusive"), [(Remote, True), (Careless, False), (Untrue, False)]
)
def test_the_probe_tells_who_keeps_the_promise(
    bench: Bench, kind: type[Remote], *, exclusive: bool
) -> None:
    """Only a storage that refuses and keeps the first content is exclusive; no trace stays.

    An answer that is lost, to the first create or the second, is read back.
    """
    for rules in ([], *([rule] for rule in LOST)):
        store = bench.store(*rules, backend=kind(bench.location))
        store.scope = object
        assert (find_abilities(store).create_problem == "") is exclusive
        assert [entry.path for entry in store.list("")] == ["x"]


def test_the_probe_has_no_answer_from_a_dead_storage(bench: Bench) -> None:
    """When no create arrives, the error is raised and nothing is kept."""
    for skip_count in (0, 1):
        store = bench.store(fault("put_absent", hit_count=None, skip_count=skip_count))
        store.scope = lambda: bench
        probe = partial(find_abilities, store)
        assert error_of(probe).kind in {"connection", "unknown"}
    bench.plain.scope = lambda: bench
    assert find_abilities(bench.plain).create_problem == ""


def test_an_answer_that_contradicts_the_record_drops_it(bench: Bench) -> None:
    """A storage that refuses a condition it was seen to honour is tried out anew."""

    class Changing(Remote):
        """Takes no condition any more, once its policy has changed."""

        has_conditions = True

        def put(self, path: str, data: Buffers, **how: Any) -> None:
            if how.get("if_absent") and not self.has_conditions:
                raise HttpFailure(status=501, code="NotImplemented")
            super().put(path, data, **how)

    backend = Changing(bench.location)
    store = bench.store(backend=backend)
    store.scope = lambda: backend
    create_new(store, "commits/1", b"one")
    backend.has_conditions = False
    assert error_of(lambda: create_new(store, "commits/2", b"two")).kind == "unsupported"
    create_new(store, "commits/2", b"two")
    assert find_abilities(store).create_problem


def test_why_creation_is_not_exclusive_is_no_advice(bench: Bench) -> None:
    """The reason has the server's response, but not the next step: a save goes on without it."""

    class Refusing(Remote):
        def put(self, path: str, data: Buffers, **how: Any) -> None:
            if how.get("if_absent"):
                # As users of Backblaze B2 report its response to `If-None-Match`.
                raise HttpFailure(status=501, code="NotImplemented", message="A header")
            super().put(path, data, **how)

    store = bench.store(backend=Refusing(bench.location))
    store.scope = object
    problem = find_abilities(store).create_problem or ""
    assert problem.endswith("NotImplemented, status 501: A header.")


def test_what_is_not_read_back_is_no_place_to_save(bench: Bench) -> None:
    """A range with other bytes, twice, is an error before anything else is written."""

    class Distorting(Remote):
        """Answers ranges with zeros."""

        def read(self, path: str, ranges: Iterable[Range]) -> int | None:
            for _, view in ranges:
                view[:] = bytes(len(view))
            return self.stat(path).size_bytes

    store = bench.store(backend=Distorting(bench.location))
    store.scope = object
    error = error_of(lambda: create_new(store, "commits/1", b"one"))
    assert "other bytes were read back" in str(error)
    assert [entry.path for entry in store.list("")] == ["x"]
