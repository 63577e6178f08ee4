"""Ranks that are threads of one process, over a `HashStore` whose requests can be made to fail."""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pytest
import torch.distributed as dist
from limits import HANG_S

from ckpt_storage import CheckpointError, Timeouts
from ckpt_storage.coordination import operation as operation_module
from ckpt_storage.coordination import operation_rounds as rounds_module
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import KeyValues, StoreClient
from ckpt_storage.coordination.lane import Lane
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.coordination.rounds import ByRank

PREFIX = "test"

POLL_S = 0.002
LONG = Timeouts()
TERMS = {"the options": "none"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a rank; `key` is the first key, without the prefix."""

    rank: int
    method: str
    key: str
    is_read: bool = False
    """A compare_set that changes nothing: how a key is read that may be missing."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """What becomes of the next `count` requests of a rank that match.

    request lost: it has no effect and fails. reply lost: it takes effect and fails. broken: so do
    all later ones over that connection. swallowed: a `set` that has no effect, and only the next
    request notices that the connection is broken, as with a `TCPStore`. hangs: it waits until
    `released`, and takes effect then.
    `key` is a regular expression; `seen` is set once the fault has happened. `spares_reads`: not
    those that read a key which may be missing.
    """

    effect: Literal["request lost", "reply lost", "broken", "swallowed", "hangs"]
    rank: int
    method: str = ""
    key: str = ""
    count: int = 1
    spares_reads: bool = False
    seen: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def matches(self, request: Request) -> bool:
        return (
            self.count > 0
            and self.rank == request.rank
            and self.method in {"", request.method}
            and re.search(self.key, request.key) is not None
            and not (self.spares_reads and request.is_read)
        )


@dataclass(slots=True, eq=False)
class _Waiter:
    """A wait for keys, and whether all of them were there at one instant."""

    keys: list[str]
    is_met: bool = False

    def look(self, store: dist.Store) -> None:
        self.is_met = self.is_met or store.check(self.keys)


class SharedStore:
    """The store of a job: a `HashStore` to which each rank has connections.

    `unreachable` are the ranks of which every request fails. The heartbeats of `silent` ranks get
    lost. `requests` are all requests so far, without waits; `named` are the keys that they named.
    """

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.changed = threading.Condition()
        self.named: set[str] = set()
        self.requests: list[Request] = []
        self.unreachable: set[int] = set()
        self.silent: set[int] = set()
        self._faults: list[Fault] = []
        self._waiters: list[_Waiter] = []
        self._goes_on: dict[int, threading.Event] = {}

    def connect(self, rank: int) -> Connection:
        if rank in self.unreachable:
            raise ConnectionError("The store cannot be reached.")
        return Connection(self, rank)

    @contextmanager
    def waiting(self, waiter: _Waiter) -> Iterator[None]:
        """Note each change to a waiter, as the server of a `TCPStore` does: keys may be deleted."""
        self._waiters.append(waiter)
        waiter.look(self.store)
        try:
            yield
        finally:
            self._waiters.remove(waiter)

    def note_change(self, keys: Iterable[str]) -> None:
        """Let waiters see a change; called under the lock."""
        self.named.update(keys)
        for waiter in self._waiters:
            waiter.look(self.store)
        self.changed.notify_all()

    def keys_of(self, rank: int, lane: str = "") -> KeyValues:
        return KeyValues(_Client(self, rank), f"{PREFIX}{lane}")

    def goes_on(self, rank: int) -> threading.Event:
        """Return the event that is clear while the process of a rank is stopped."""
        if rank not in self._goes_on:
            self._goes_on[rank] = threading.Event()
            self._goes_on[rank].set()
        return self._goes_on[rank]

    @contextmanager
    def stopped(self, rank: int) -> Iterator[None]:
        """Stop the process of a rank, as far as the store can see it."""
        self.goes_on(rank).clear()
        try:
            yield
        finally:
            self.goes_on(rank).set()

    def add_fault(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def find_fault(self, request: Request) -> Fault | None:
        """Return the fault that applies to a request, and count it."""
        with self.changed:
            self.requests.append(request)
            for fault in self._faults:
                if fault.matches(request):
                    fault.count -= 1
                    return fault
        return None

    def cut(self, *ranks: int) -> None:
        """Make the store unreachable for ranks; their waits end as well."""
        with self.changed:
            self.unreachable.update(ranks)
            self.changed.notify_all()

    def mend(self) -> None:
        with self.changed:
            self.unreachable.clear()

    def copy(self) -> SharedStore:
        """Return a store with the same keys, as restarted processes see it."""
        copy = SharedStore()
        copy.named = self._present()
        for key in copy.named:
            copy.store.set(key, self.store.get(key))  # type: ignore[arg-type]  # bytes will do
        return copy

    def _present(self) -> set[str]:
        # `Store.list_keys` is newer than torch 2.9.
        with self.changed:
            return {key for key in self.named if self.store.check([key])}

    def key_names(self) -> list[str]:
        """Return all keys but heartbeats, without the prefix."""
        names = (name for name in self._present() if "/alive/" not in name)
        return sorted(name.removeprefix(f"{PREFIX}/") for name in names)

    def numbers(self) -> set[int]:
        """Return the numbers of the operations of which keys are left."""
        parts = [name.split("/") for name in self.key_names()]
        return {int(part[1]) for part in parts if len(part) > 2 and part[1].isdigit()}

    def requests_of(self, rank: int) -> list[Request]:
        """Return the requests of a rank, without heartbeats."""
        with self.changed:
            return [
                request
                for request in self.requests
                if request.rank == rank and "/alive/" not in request.key
            ]


class _Client(StoreClient):
    """The client of a process that can be stopped: its calls wait until it goes on."""

    def __init__(self, shared: SharedStore, rank: int) -> None:
        super().__init__(partial(shared.connect, rank))  # type: ignore[arg-type]  # as much of a store as is used
        self._goes_on = shared.goes_on(rank)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        assert self._goes_on.wait(HANG_S)
        return super().call(name, *args, **options)


class Connection:
    """One connection of one rank to a `SharedStore`, as `torch.distributed.Store` has it."""

    def __init__(self, shared: SharedStore, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self._is_broken = False

    def set(self, key: str, value: bytes) -> None:
        is_heartbeat = "/alive/" in key
        if not is_heartbeat or self._rank not in self._shared.silent:
            self._request("set", [key], key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self._request("check", keys, keys))

    def compare_set(self, key: str, expected: str, value: str | bytes) -> bytes:
        return bytes(self._request("compare_set", [key], key, expected, value))

    def add(self, key: str, amount: int) -> int:
        return int(self._request("add", [key], key, amount))

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete_key", [key], key))

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._request("multi_set", keys, keys, values)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._request("multi_get", keys, keys)
        return values

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        shared, end_s = self._shared, time.monotonic() + timeout.total_seconds()
        waiter = _Waiter(keys)
        with shared.changed, shared.waiting(waiter):
            while not waiter.is_met:
                self._check_connection()
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"no {keys} in {timeout}")
                shared.changed.wait(left_s)

    def _check_connection(self) -> None:
        if self._is_broken or self._rank in self._shared.unreachable:
            self._is_broken = True
            raise ConnectionError("The connection is broken.")

    def _request(self, method: str, keys: Sequence[str], *args: Any) -> Any:
        shared = self._shared
        self._check_connection()
        is_read = method == "compare_set" and args[1] == args[2]
        request = Request(self._rank, method, keys[0].removeprefix(f"{PREFIX}/"), is_read)
        fault = shared.find_fault(request)
        if fault is not None and fault.effect == "hangs":
            fault.seen.set()
            assert fault.released.wait(HANG_S)
        elif fault is not None and fault.effect != "reply lost":
            self._is_broken = fault.effect in {"broken", "swallowed"}
            fault.seen.set()
            if fault.effect == "swallowed" and method in {"set", "multi_set"}:
                return None
            raise ConnectionError("The request is lost.")
        if method in {"check", "multi_get"}:
            result = getattr(shared.store, method)(*args)
        else:
            with shared.changed:
                result = getattr(shared.store, method)(*args)
                shared.note_change(keys)
        if fault is not None and fault.effect == "reply lost":
            fault.seen.set()
            raise ConnectionError("The reply is lost.")
        return result


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what ranks wait for each other beyond their deadlines."""
    monkeypatch.setattr(operation_module, "_COORDINATOR_GRACE_S", 0.1)
    monkeypatch.setattr(operation_module, "_MEMBER_GRACE_S", 0.3)
    monkeypatch.setattr(rounds_module, "_FINISH_FAILED_S", 0.1)
    monkeypatch.setattr(rounds_module, "_FINISH_EXTRA_S", 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended: its value or its error, and after how long."""

    value: Any = None
    error: BaseException | None = None
    wall_s: float = 0.0


def group(
    store: SharedStore | Callable[[], dist.Store],
    world_size: int,
    names: Sequence[int] | None = None,
    *,
    lane: str = "",
) -> list[RankGroup]:
    """Return all ranks of a job over one store, or over what `store` connects to.

    `names` are their global ranks.
    """

    def keys_of(rank: int) -> KeyValues:
        if isinstance(store, SharedStore):
            return store.keys_of(rank, lane)
        return KeyValues(StoreClient(store), f"{PREFIX}{lane}")

    global_ranks = range(world_size) if names is None else names
    return [
        RankGroup(Lane(keys_of(rank), rank=rank, global_ranks=global_ranks))
        for rank in range(world_size)
    ]


def run(ranks: Sequence[RankGroup], body: Callable[[RankGroup], object]) -> list[Ended]:
    """Run `body` as every rank, each in a thread; fail unless all end."""
    ended: dict[int, Ended] = {}

    def main(rank: RankGroup) -> None:
        begin_s, value, error = time.monotonic(), None, None
        try:
            value = body(rank)
        except BaseException as caught:  # noqa: BLE001  # what a rank raised is what is tested
            error = caught
        ended[rank.rank] = Ended(value=value, error=error, wall_s=time.monotonic() - begin_s)

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank {rank.rank}", daemon=True)
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + HANG_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    assert len(ended) == len(ranks), f"ranks hang; ended: {ended}"
    return [ended[rank.rank] for rank in ranks]


def values(ended: Sequence[Ended]) -> list[Any]:
    for rank in ended:
        if rank.error is not None:
            raise rank.error
    return [rank.value for rank in ended]


def errors(ended: Sequence[Ended]) -> list[CheckpointError]:
    """Return what the ranks raised; each must have raised an error of ours that pickles."""
    raised = []
    for rank, outcome in enumerate(ended):
        assert isinstance(outcome.error, CheckpointError), (rank, outcome)
        copy = pickle.loads(pickle.dumps(outcome.error))
        assert (type(copy), str(copy)) == (type(outcome.error), str(outcome.error))
        raised.append(outcome.error)
    return raised


def whole(
    operation: Operation,
    at: str = "",
    error: BaseException | None = None,
    phase: Any = "plan",
) -> list[bytes]:
    """Run each kind of round once; return what the last gives. Raise `error` after step `at`."""

    def reach(step: str) -> None:
        if error is not None and step == at:
            raise error

    own = b"%d" % operation.rank

    def decide(gathered: list[bytes]) -> ByRank[bytes]:
        assert gathered == [b"%d" % rank for rank in range(operation.world_size)]
        return ByRank([value * 2 for value in gathered])

    reach("early")
    assert operation.meet(TERMS, value=own, decide=decide) == own * 2
    operation.phase(phase)
    reach("met")
    gathered = operation.gather(own)
    reach("gather")
    assert operation.broadcast(b"all" if operation.is_coordinator else b"") == b"all"
    assert bool(gathered) == operation.is_coordinator
    reach("broadcast")
    assert operation.exchange(own, decide) == own * 2
    reach("exchange")
    gathered = operation.gather(own)
    reach("last")
    return operation.broadcast(gathered)


def together(ranks: RankGroup, timeouts: Timeouts = LONG) -> list[bytes]:
    with ranks.operation("the test", timeouts=timeouts) as operation:
        return whole(operation)


def each(cases: Iterable[Any], check: Callable[..., object]) -> None:
    """Check each case (a tuple: the arguments), several at a time: most wait for deadlines."""

    def run_case(case: Any) -> None:
        try:
            check(*case) if isinstance(case, tuple) else check(case)
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(run_case, cases))


def wait_until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + HANG_S / 2
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(POLL_S)


def listener_count() -> int:
    """Return how many threads wait for keys of operations."""
    return sum(thread.name.startswith("ckpt-storage listen") for thread in threading.enumerate())
