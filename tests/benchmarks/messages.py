"""What the messages of a save cost with many ranks, measured against a real TCPStore server.

The server, the coordinator and four groups of members are processes of their own. Every rank runs a
real `Operation` over a real `StoreClient`, and does what `save` does without the storage: `meet`
with a proposal, `exchange` of a report with a commit. Saves are timed one by one. The first save
enters the session. In "new" saves each rank gets an answer of its own, in "cached" saves all get
one. Payloads are random bytes.

Up to 512 ranks a rank has all its threads. Beyond, a member has one: it waits for a release when it
needs it, not before, and makes its requests itself; one thread a process sends the heartbeats of
all its ranks. The coordinator always has all its threads. What is sent is the same, which
tests/protocol/test_messages.py shows. Eight ranks in a row count as one host.

torch looks up the name of the peer of each connection, on both sides. On a machine without a fast
name server, that takes longer than all else, so the processes preload a function in place of it,
where there is a C compiler.

Run as `python tests/benchmarks/scale.py --messages --ranks 64 512 2048 --payload-bytes 20000`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import multiprocessing
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import patch

import torch.distributed as dist

from ckpt_storage.coordination import operation as operation_module
from ckpt_storage.coordination import operation_rounds as rounds_module
from ckpt_storage.coordination.failure_detector import FailureDetector
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.identity import Identity
from ckpt_storage.coordination.keyvalue import (
    COORDINATOR,
    KeyListener,
    KeyValues,
    LostStoreError,
    StoreClient,
)
from ckpt_storage.coordination.lane import Lane
from ckpt_storage.coordination.operation_rounds import OperationRounds
from ckpt_storage.coordination.processes import RankProcess
from ckpt_storage.coordination.rounds import ByRank
from ckpt_storage.options import Timeouts

Plan = Literal["new", "cached"]
"""Whether a save answers each rank on its own, or all with one answer."""

Threads = Literal["all", "one"]
"""Whether a member has the threads that it has in a job, or one."""

_PROCESS_COUNT = 4
_MAX_REAL_RANKS = 512
_RANKS_A_HOST = 8
_STACK_BYTES = 512 << 10
_OUTCOME_BYTES = 1_000
_SWITCH_S = 0.1
_NUDGE_S = 0.02
_TIMEOUTS = Timeouts(plan=900.0, write=900.0, commit=900.0, silence=120.0)
_WAIT_S = 1_800.0

_STUB = """
#include <stdio.h>
int getnameinfo(const void *address, unsigned length, char *host, unsigned host_length,
                char *service, unsigned service_length, int flags) {
  if (host && host_length) snprintf(host, host_length, "simulated");
  if (service && service_length) snprintf(service, service_length, "0");
  return 0;
}
"""


@dataclass(slots=True)
class SaveCost:
    """What one save cost some ranks; `requests` by rank and kind, "heartbeat" is a kind.

    `coordinator_wall_s` and `coordinator_cpu_s` are the coordinator's between its first read of a
    payload and its release, one figure a round.
    """

    requests: dict[int, Counter[str]] = field(default_factory=dict)
    coordinator_wall_s: list[float] = field(default_factory=list)
    coordinator_cpu_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class CountingStore:
    """A connection to a TCPStore server that counts the requests of its rank by kind."""

    def __init__(self, store: dist.Store, on_request: Callable[[str, Sequence[str]], None]) -> None:
        self._store = store
        self._on_request = on_request

    def __getattr__(self, name: str) -> Any:  # whatever the store has
        value = getattr(self._store, name)
        if not callable(value):
            return value

        def counted(*args: Any) -> Any:  # of any signature
            keys = args[0] if isinstance(args[0], list) else [args[0]]
            self._on_request(name, keys)
            return value(*args)

        return counted


class SimulatedRank:
    """One rank: its group, and the cost of its present save."""

    def __init__(self, rank: int, world_size: int, port: int, payload_bytes: int) -> None:
        self.rank = rank
        self.cost = SaveCost()
        self.requests: Counter[str] = Counter()
        self._port = port
        self._payload = os.urandom(payload_bytes)
        self._world_size = world_size
        self._began_s: tuple[float, float] | None = None
        client = StoreClient(cast("Callable[[], dist.Store]", self._connect))
        if _is_shared(rank):
            client._pool = cast("Any", _CallersThread())  # noqa: SLF001  # see the module
        keys = KeyValues(client, "ckpt_storage/main")
        self.ranks = RankGroup(Lane(keys, rank=rank, global_ranks=range(world_size)))

    def _connect(self) -> CountingStore:
        store = dist.TCPStore("127.0.0.1", self._port, wait_for_workers=False)
        return CountingStore(store, self._count)

    def _count(self, name: str, keys: Sequence[str]) -> None:
        if "/alive/" in keys[0]:
            self.requests["heartbeat"] += 1
            return
        self.requests[name] += 1
        if self.rank != COORDINATOR:
            return
        now_s = time.perf_counter(), time.process_time()
        if name == "multi_get":
            self._began_s = self._began_s or now_s
        elif keys[0].endswith("/release") and self._began_s is not None:
            # Its request is not in it, and costs what any small one does.
            self.cost.coordinator_wall_s.append(now_s[0] - self._began_s[0])
            self.cost.coordinator_cpu_s.append(now_s[1] - self._began_s[1])
            self._began_s = None

    def save(self, step: int, plan: Plan) -> None:
        """Do what `save` does between ranks."""
        _thread.rank = self.rank
        what = "the save to memory://run/last"

        def decide(proposals: Sequence[bytes]) -> Any:  # as `exchange` takes it
            return ByRank(proposals) if plan == "new" else proposals[COORDINATOR]

        def commit(_: Sequence[bytes]) -> bytes:
            return self._payload[:_OUTCOME_BYTES]

        with self.ranks.operation(what, timeouts=_TIMEOUTS) as operation:
            operation.identify(Identity(kind="the save", url="memory://run/last", step=step))
            operation.meet({"overwrite": "True"}, value=self._payload, decide=decide)
            operation.phase("write", total_bytes=len(self._payload))
            operation.phase("commit")
            operation.exchange(self._payload, commit, is_commit=True, is_last=True)

    def take_requests(self) -> Counter[str]:
        """Return the requests since the last call."""
        requests, self.requests = self.requests, Counter()
        return requests


# Members that have one thread.

_thread = threading.local()


class _CallersThread:
    """In place of a `TimedPool`: makes each call in the caller's thread."""

    def run(self, call: Callable[[], Any], **_: Any) -> Any:
        return call()

    def close(self) -> None:
        pass


class _LateListener:
    """In place of a `KeyListener`: it waits for a key when the rank needs it."""

    def __init__(self, on_key: Callable[[str], None], keys: KeyValues, name: str) -> None:
        del name
        self._on_key = on_key
        self._keys = keys
        self._awaited: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_closed = False

    def listen(self, key: str) -> None:
        self._awaited.put(key)

    def close(self) -> None:
        self._is_closed = True

    def wait(self) -> bool:
        """Wait for the next key, if there is one."""
        with contextlib.suppress(queue.Empty):
            key = self._awaited.get_nowait()
            if self._keys.wait(key, _WAIT_S, lambda: self._is_closed):
                self._on_key(key)
            return True
        return False


class _OneThread(OperationRounds):
    """Rounds that wait in the thread of their rank."""

    def wait_for(self, get_value: Callable[[], Any], end_s: float) -> Any:
        listener = cast("_LateListener", self._listener)
        while not get_value() and listener.wait():
            pass
        return super().wait_for(get_value, end_s)


class _Beats:
    """The thread that sends the heartbeats of all ranks of this process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, _SharedDetector, bool]] = []
        self._counter = itertools.count()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def plan(self, detector: _SharedDetector, delay_s: float, *, is_nudge: bool = False) -> None:
        with self._changed:
            due_s = time.monotonic() + delay_s
            heapq.heappush(self._due, (due_s, next(self._counter), detector, is_nudge))
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or (left_s := self._due[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left_s if self._due else None)
                _, _, detector, is_nudge = heapq.heappop(self._due)
            detector.beat(is_nudge=is_nudge)


class _SharedDetector(FailureDetector):
    """A failure detector whose beats are sent by the thread of `_Beats`."""

    def _run(self) -> None:
        self._is_nudged = False
        _beats().plan(self, 0.0)

    def nudge(self) -> None:
        if not self._is_nudged:
            self._is_nudged = True
            _beats().plan(self, _NUDGE_S, is_nudge=True)

    def stop(self) -> None:
        self._ended.set()
        self._close()

    def beat(self, *, is_nudge: bool) -> None:
        if self._ended.is_set():
            return
        try:
            self._send()
            if is_nudge:
                self._is_nudged = False
                return
            self._check_heartbeats()
            _beats().plan(self, self._beat_s)
        except LostStoreError as error:
            self._on_error(error)


_shared: _Beats | None = None


def _beats() -> _Beats:
    assert _shared is not None
    return _shared


def _is_shared(rank: int) -> bool:
    return _shared is not None and rank != COORDINATOR


def _either(shared: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes what a rank with one thread has, or with threads of its own."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return (shared if _is_shared(_thread.rank) else own)(*args, **kwargs)

    return make


@contextlib.contextmanager
def simulated(threads: Threads) -> Iterator[None]:
    """Spread ranks of this process over hosts; "one": its members have one thread."""
    global _shared  # noqa: PLW0603  # one a process

    def own_of_rank() -> RankProcess:
        return RankProcess(host=f"host{_thread.rank // _RANKS_A_HOST}", pid=os.getpid())

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(RankProcess, "own", staticmethod(own_of_rank)))
        if threads == "one":
            _shared = _Beats()
            for module, name, shared, own in (
                (rounds_module, "KeyListener", _LateListener, KeyListener),
                (operation_module, "OperationRounds", _OneThread, OperationRounds),
                (operation_module, "FailureDetector", _SharedDetector, FailureDetector),
            ):
                stack.enter_context(patch.object(module, name, _either(shared, own)))
        try:
            yield
        finally:
            _shared = None


# One process with some of the ranks.


class Simulation:
    """Some ranks of a world, each in a thread that does one save after another."""

    def __init__(self, ranks: Sequence[int], world_size: int, port: int, payload: int) -> None:
        self.ranks = [SimulatedRank(rank, world_size, port, payload) for rank in ranks]
        self._errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._calls: list[queue.SimpleQueue[tuple[int, Plan] | None]] = []
        for rank in self.ranks:
            calls: queue.SimpleQueue[tuple[int, Plan] | None] = queue.SimpleQueue()
            self._calls.append(calls)
            threading.Thread(target=self._run, args=(rank, calls), daemon=True).start()

    def _run(self, rank: SimulatedRank, calls: queue.SimpleQueue[tuple[int, Plan] | None]) -> None:
        while (call := calls.get()) is not None:
            error = ""
            try:
                rank.save(*call)
            except BaseException:  # noqa: BLE001  # the driver raises it
                error = f"rank {rank.rank}: {traceback.format_exc()}"
            self._errors.put(error)

    def begin(self, step: int, plan: Plan) -> None:
        """Let all ranks save."""
        for calls in self._calls:
            calls.put((step, plan))

    def end(self) -> SaveCost:
        """Wait until all ranks have saved; return what it cost."""
        cost = SaveCost()
        errors = (self._errors.get(timeout=_WAIT_S) for _ in self.ranks)
        cost.errors = [error for error in errors if error]
        for rank in self.ranks:
            cost.requests[rank.rank] = rank.take_requests()
            cost.coordinator_wall_s += rank.cost.coordinator_wall_s
            cost.coordinator_cpu_s += rank.cost.coordinator_cpu_s
            rank.cost = SaveCost()
        return cost

    def close(self) -> None:
        """End the threads."""
        for calls in self._calls:
            calls.put(None)


def serve() -> dist.TCPStore:
    """Return a server in this process, on a free port of the loopback address."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _run_server(driver: Connection) -> None:
    store = serve()
    driver.send(store.port)
    with contextlib.suppress(EOFError):
        driver.recv()


def _run_ranks(
    driver: Connection, ranks: Sequence[int], world_size: int, payload: int, threads: Threads
) -> None:
    threading.stack_size(_STACK_BYTES)
    # Each of hundreds of threads that want the interpreter would wake up so often.
    sys.setswitchinterval(_SWITCH_S)
    with simulated(threads), contextlib.suppress(EOFError):
        simulation = Simulation(ranks, world_size, driver.recv(), payload)
        driver.send("ready")
        while True:
            step, plan = driver.recv()
            simulation.begin(step, plan)
            driver.send(simulation.end())


# The driver.

Figures = dict[str, Any]
"""Figures by name, as `measure` and `summarize` give them."""


def measure(
    world_size: int, payload_bytes: int, plans: Sequence[Plan], threads: Threads
) -> list[Figures]:
    """Return what each of several saves cost; `plans` has one entry for each save."""
    context = multiprocessing.get_context("spawn")
    share = -(-(world_size - 1) // _PROCESS_COUNT)
    members = [range(at, min(at + share, world_size)) for at in range(1, world_size, share)]
    pipes: list[Connection] = []
    processes = []

    def begin(target: Callable[..., None], *args: Any) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
        return ours

    server = begin(_run_server)
    groups = [
        begin(_run_ranks, ranks, world_size, payload_bytes, threads)
        for ranks in ([COORDINATOR], *members)
    ]
    try:
        port = server.recv()
        for pipe in groups:
            pipe.send(port)
        for pipe in groups:
            pipe.recv()
        server_pid = processes[0].pid
        assert server_pid is not None
        saves = []
        for step, plan in enumerate(plans):
            cpu_s, begin_s = _cpu_s(server_pid), time.perf_counter()
            for pipe in groups:
                pipe.send((step, plan))
            costs: list[SaveCost] = [pipe.recv() for pipe in groups]
            wall_s = time.perf_counter() - begin_s
            figures = {"plan": plan if step else "first", "wall_s": wall_s}
            saves.append(figures | _figures(costs) | {"store_cpu_s": _cpu_s(server_pid) - cpu_s})
        return saves
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(30)
            process.kill()


def _cpu_s(pid: int) -> float:
    """Return the processor time of a process: user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _figures(costs: Sequence[SaveCost]) -> Figures:
    errors = [error for cost in costs for error in cost.errors]
    if errors:
        raise RuntimeError(f"{len(errors)} ranks failed; the first: {errors[0]}")
    requests = {rank: counts for cost in costs for rank, counts in cost.requests.items()}
    coordinator = requests.pop(COORDINATOR)
    beats = [counts.pop("heartbeat", 0) for counts in (coordinator, *requests.values())]
    totals = [counts.total() for counts in requests.values()]
    every = sum(requests.values(), Counter[str]())
    return {
        "requests_a_member": statistics.mean(totals),
        "requests_of_one_member": max(totals),
        "kinds_a_member": {kind: count / len(totals) for kind, count in sorted(every.items())},
        "requests_of_coordinator": coordinator.total(),
        "kinds_of_coordinator": dict(sorted(coordinator.items())),
        "heartbeats_a_rank": statistics.mean(beats),
        "heartbeats_of_coordinator": beats[0],
        "coordinator_s": sum(sum(cost.coordinator_wall_s) for cost in costs),
        "coordinator_cpu_s": sum(sum(cost.coordinator_cpu_s) for cost in costs),
    }


_SPREAD = ("wall_s", "store_cpu_s", "coordinator_s", "coordinator_cpu_s")


def summarize(world_size: int, payload_bytes: int, saves: Sequence[Figures]) -> list[Figures]:
    """Return the figures of each kind of save: counts of the last, seconds as median and most."""
    kinds = []
    for plan in dict.fromkeys(save["plan"] for save in saves):
        same = [save for save in saves if save["plan"] == plan]
        summary: Figures = {"rank_count": world_size, "payload_bytes": payload_bytes}
        summary |= same[-1] | {"save_count": len(same)}
        for name in _SPREAD:
            seconds = [save[name] for save in same]
            summary[name] = round(statistics.median(seconds), 3)
            summary[f"most_{name}"] = round(max(seconds), 3)
        kinds.append(summary)
    return kinds


def extrapolate(summary: Figures, world_size: int) -> Figures:
    """Return what a larger world costs: each request and each payload costs what it did here.

    Server: ranks x requests x `store_us_a_request`. Coordinator: ranks x 2 payloads x
    `coordinator_us_a_payload`. The wall time is not extrapolated: it is mostly that of the
    simulated members.
    """
    count = summary["rank_count"]
    requests = count * summary["requests_a_member"]
    store_us = 1e6 * summary["store_cpu_s"] / requests
    payload_us = 1e6 * summary["coordinator_s"] / (2 * count)
    beat_s = max(1.0, world_size / 2_000)
    return {
        "rank_count": world_size,
        "plan": summary["plan"],
        "store_us_a_request": round(store_us, 1),
        "coordinator_us_a_payload": round(payload_us, 1),
        "store_cpu_s": round(world_size * summary["requests_a_member"] * store_us / 1e6, 2),
        "coordinator_s": round(2 * world_size * payload_us / 1e6, 2),
        "heartbeat_requests_a_second": round(_BEAT_REQUESTS * world_size / beat_s),
    }


_BEAT_REQUESTS = 3
"""What a beat of a member is: it sets a key, and looks for and reads that of the coordinator."""


def run(worlds: Sequence[int], payload_bytes: int, save_count: int, largest: int) -> None:
    """Print the figures of each world, one line of JSON a kind of save; then the extrapolation."""
    new: list[Plan] = ["new"]
    cached: list[Plan] = ["cached"]
    with _without_lookups():
        for world_size in worlds:
            plans = new * (1 + save_count) + cached * save_count
            threads: Threads = "all" if world_size <= _MAX_REAL_RANKS else "one"
            saves = measure(world_size, payload_bytes, plans, threads)
            summaries = summarize(world_size, payload_bytes, saves)
            for summary in summaries:
                print(json.dumps(summary), flush=True)
    for summary in summaries[1:]:
        print(json.dumps(extrapolate(summary, largest)), flush=True)


@contextlib.contextmanager
def _without_lookups() -> Iterator[None]:
    """Let processes that begin inside look up no names."""
    compiler = shutil.which("cc")
    if compiler is None:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/names.so"
        command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", library]
        subprocess.run(command, input=_STUB.encode(), check=True)
        with patch.dict(os.environ, {"LD_PRELOAD": library}):
            yield
