"""Ranks that come late, are started anew or connect anew: nothing of before enters what follows."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import rank_threads as threads
import torch.distributed as dist
from limits import HANG_S
from rank_threads import Fault, SharedStore

from ckpt_storage import CheckpointError, PhaseTimeoutError, SaveCancelledError, Timeouts
from ckpt_storage.coordination.connections import _socket_names, _sockets
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.identity import Identity
from ckpt_storage.coordination.keyvalue import (
    KeyValues,
    LostStoreError,
    StoreAddress,
    StoreClient,
)
from ckpt_storage.coordination.operation import Operation
from ckpt_storage.store.threads import TimedPool

quick = threads.quick
pytestmark = pytest.mark.usefixtures("quick")


SHORT = Timeouts(plan=0.15, silence=5)
LONG = Timeouts(plan=HANG_S)


def tried(ranks: RankGroup, url: str, value: int, timeouts: Timeouts = LONG) -> Any:
    """Run one operation; return the values of all ranks, or the error."""
    try:
        with ranks.operation("the save to x", timeouts=timeouts) as operation:
            operation.identify(Identity(kind="the save", url=url))
            operation.meet(threads.TERMS)
            return operation.all_gather(value)
    except CheckpointError as error:
        return error


def leave_job(store: SharedStore, how: str, url: str) -> SharedStore:
    """Leave what a job leaves in its store that is killed, and return that store."""
    ranks = threads.group(store, 3)
    count = 6 if how == "waiting after six" else 1
    if how in {"committed", "waiting after six"}:
        for _ in range(count):
            ended = threads.run(ranks, lambda one: tried(one, url, 0))
            assert threads.values(ended) == [[0, 0, 0]] * 3
    elif how != "waiting":
        # Each number is given up as one rank does not come, or two.
        for _ in range(2 if how == "twice failed" else 1):
            came = ranks[:1] if how == "alone" else ranks[:2]
            threads.run(came, lambda one: tried(one, url, 0, SHORT))
    if how.startswith("waiting"):
        for one in ranks[:2]:
            threading.Thread(target=tried, args=(one, url, 0), daemon=True).start()
        at = f"/{count + 1 if how == 'waiting after six' else 1}/1/from/1"
        threads.wait_until(
            lambda: any(name.endswith(at) for name in store.key_names()), "rank 1 did not come"
        )
    left = store.copy()
    store.cut(0, 1, 2)
    return left


@pytest.mark.parametrize("first", ["the coordinator", "the others"])
@pytest.mark.parametrize(
    ("how", "has_count"),
    [
        ("committed", False),
        ("failed", False),
        ("twice failed", False),
        ("alone", False),
        ("waiting", False),
        ("waiting after six", False),
        ("committed", True),
        ("failed", True),
    ],
)
def test_keys_of_ranks_that_were_killed_are_not_taken_for_their_successors(
    how: str, first: str, *, has_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All meet, whatever operations those were in; torchrun's count of restarts is not needed."""
    if has_count:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    store = leave_job(SharedStore(), how, "/old")
    if has_count:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    session = store.store.get("test/session")

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.is_coordinator and first == "the others":
            time.sleep(0.2)  # the others read the old keys meanwhile
        elif not ranks.is_coordinator and first == "the coordinator":
            threads.wait_until(lambda: store.store.get("test/session") != session, "no session")
        return [tried(ranks, "/new", number) for number in range(3)]

    ended = threads.values(threads.run(threads.group(store, 3), body))
    assert ended == [[[number] * 3 for number in range(3)]] * 3


@pytest.mark.parametrize("has_count", [True, False])
def test_a_number_that_was_given_up_before_the_restart_costs_no_more_than_itself(
    *, has_count: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the same operation is tried again; with torchrun's count it costs nothing."""
    if has_count:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    store = leave_job(SharedStore(), "alone", "/last")
    if has_count:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.is_coordinator:
            time.sleep(0.2)  # the others read the old keys meanwhile
        return [tried(ranks, "/last", number) for number in range(3)]

    for first, *others in threads.values(threads.run(threads.group(store, 3), body)):
        assert first == [0, 0, 0] or (not has_count and isinstance(first, CheckpointError))
        assert others == [[1, 1, 1], [2, 2, 2]]


def test_a_cancel_in_an_old_session_fails_the_operation_in_the_new_one() -> None:
    """Its request for the old session hangs while the operation moves to the new session."""
    store, cancelled = SharedStore(), threading.Event()
    old_coordinator, member = threads.group(store, 2)
    hanging = Fault(effect="hangs", rank=1, method="compare_set", key="/1/1/verdict$")
    operations: list[Operation] = []

    def save() -> None:
        with member.operation("the save to x", timeouts=LONG) as operation:
            operations.append(operation)
            operation.identify(Identity(kind="the save", url="/x"))
            operation.meet(threads.TERMS)
            assert cancelled.wait(HANG_S)
            operation.barrier()

    def cancel() -> None:
        operations[0].failed(SaveCancelledError("cancelled by the user"))
        cancelled.set()

    with ThreadPoolExecutor(3) as pool:
        old_coordinator.lane.join(lambda _: None, HANG_S)
        saving = pool.submit(save)
        threads.wait_until(
            lambda: any(name.endswith("/1/1/from/1") for name in store.key_names()), "not arrived"
        )
        store.add_fault(hanging)
        cancelling = pool.submit(cancel)
        assert hanging.seen.wait(HANG_S)
        new_coordinator, _ = threads.group(store, 2)
        following = pool.submit(tried, new_coordinator, "/x", 0)
        threads.wait_until(lambda: operations[0].lane.has_met, "the ranks have not met")
        hanging.released.set()
        cancelling.result(HANG_S)
        error = following.result(HANG_S)
        with pytest.raises(SaveCancelledError):
            saving.result(HANG_S)
    assert isinstance(error, SaveCancelledError)
    assert error.rank == 1


def test_a_rank_that_is_not_started_anew_is_named() -> None:
    """What its predecessor left is not taken for its coming; once it has come, all meet."""
    store = leave_job(SharedStore(), "waiting", "/old")
    ranks = threads.group(store, 3)
    for error in threads.values(
        threads.run([ranks[0], ranks[2]], lambda one: tried(one, "/new", 0, SHORT))
    ):
        assert isinstance(error, PhaseTimeoutError)
        assert error.rank == 1
        assert "Rank 1 of the group's 3 has not arrived" in str(error)

    def body(one: RankGroup) -> Any:
        if one.rank == 1:
            assert isinstance(tried(one, "/new", 0), PhaseTimeoutError)
        return tried(one, "/new", 1)

    assert threads.values(threads.run(ranks, body)) == [[1, 1, 1]] * 3


@pytest.mark.parametrize(
    ("late", "is_same"),
    [("comes", True), ("comes", False), ("fails", True), ("fails", False), ("missed it", False)],
)
def test_a_rank_that_is_late_for_a_save_takes_part_in_the_next(late: str, *, is_same: bool) -> None:
    """Rank 0 gave up save 1: no state of it enters save 2, and no failure harms what follows.

    Also where each save has a URL of its own, and rank 1 never called save 1.
    """
    gave_up = threading.Event()

    def saves(ranks: RankGroup, *steps: int, timeouts: Timeouts = LONG) -> list[Any]:
        urls = ["/last" if is_same else f"/step-{step}" for step in steps]
        return [tried(ranks, url, step, timeouts) for url, step in zip(urls, steps, strict=True)]

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == 0:
            (first,) = saves(ranks, 1, timeouts=SHORT)
            gave_up.set()
            assert isinstance(first, CheckpointError)
            return saves(ranks, 2, 3, 4)
        gave_up.wait(HANG_S)
        if late == "comes":
            assert isinstance(saves(ranks, 1)[0], CheckpointError)
        if late == "fails":
            with (
                pytest.raises(CheckpointError, match="my own"),
                ranks.operation("the save to x", timeouts=LONG),
            ):
                raise CheckpointError("my own")
        return saves(ranks, 2, 3, 4)

    ended = threads.values(threads.run(threads.group(SharedStore(), 2), body))
    assert ended == [[[step] * 2 for step in (2, 3, 4)]] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_others_gave_up_loses_that_operation_only(late: int) -> None:
    """Of three ranks one that comes too late is in step again by the third operation."""
    gave_up = threading.Barrier(3)

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == late:
            gave_up.wait(HANG_S)
        timeouts = Timeouts(plan=2.0 if ranks.rank == late else 0.3)
        ended = [tried(ranks, "/0", 0, timeouts)]
        if ranks.rank != late:
            gave_up.wait(HANG_S)
        return ended + [tried(ranks, f"/{step}", step, Timeouts(plan=2.0)) for step in (1, 2, 3)]

    for ended in threads.values(threads.run(threads.group(SharedStore(), 3), body)):
        # Where rank 0 is late, the others wait for it in the next operation.
        assert ended[2:] == [[2] * 3, [3] * 3]
        assert late == 0 or ended[1] == [1] * 3


@pytest.fixture
def server() -> dist.TCPStore:
    """A server of keys."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def _client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))


class Cable:
    """What lies between stores and their server, and can be cut."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server_port))
                self._ends += [near, far]
                for source, drain in ((near, far), (far, near)):
                    threading.Thread(target=_carry, args=(source, drain), daemon=True).start()


def _carry(source: socket.socket, drain: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            drain.sendall(data)


def test_ranks_keep_two_connections_and_replace_those_that_break(server: dist.TCPStore) -> None:
    """One carries requests, one waits; an operation goes on if all break in the middle of it."""
    cable, made = Cable(server.port), list[dist.Store]()

    def connect() -> dist.Store:
        made.append(_client(cable.port))
        return made[-1]

    def body(ranks: RankGroup, cuts: bool = False) -> list[int]:  # noqa: FBT001, FBT002  # of one test
        with ranks.operation("the test", timeouts=Timeouts.of(20.0)) as operation:
            operation.meet({})
            values = operation.all_gather(ranks.rank)
            if cuts and ranks.rank == 1:
                cable.cut()
            assert operation.all_gather(0) == [0, 0]
            return values

    ranks = threads.group(connect, 2)
    with contextlib.closing(cable):
        for _ in range(4):
            assert threads.values(threads.run(ranks, body)) == [[0, 1]] * 2
        assert len(made) == 4
        assert threads.values(threads.run(ranks, partial(body, cuts=True))) == [[0, 1]] * 2
        for _ in range(2):
            assert threads.values(threads.run(ranks, body)) == [[0, 1]] * 2


def test_connections_block_whatever_the_default_timeout_of_sockets(server: dist.TCPStore) -> None:
    """A call of torch's in a socket that does not block fails if the answer is not there yet."""
    address = StoreAddress(host="127.0.0.1", port=server.port)
    before_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(HANG_S)
    try:
        client = StoreClient(address.connect, address)
        client.call("check", ["key"], timeout_s=HANG_S)
    finally:
        socket.setdefaulttimeout(before_s)
    present = _socket_names()
    ours = [present[name] for name in _sockets if name in present]
    assert ours
    assert all(os.get_blocking(descriptor) for descriptor in ours)


def test_what_is_removed_while_it_is_read_is_not_waited_for(server: dist.TCPStore) -> None:
    """A reader gets it whole or not at all; the store's own `get` would wait, or return nothing."""
    connect = partial(_client, server.port)
    reader, writer = (KeyValues(StoreClient(connect), "test") for _ in range(2))
    is_over = threading.Event()

    def put_and_remove() -> None:
        while not is_over.is_set():
            writer.set("key", b"value", HANG_S)
            writer.delete("key", HANG_S)

    thread = threading.Thread(target=put_and_remove, daemon=True)
    thread.start()
    try:
        found = {reader.get("key", HANG_S) for _ in range(2000)}
    finally:
        is_over.set()
        thread.join(HANG_S)
    assert found <= {None, b"value"}
    writer.set("large", bytes(9 << 20), HANG_S)
    assert writer.has_all(["large"], HANG_S)
    # As it is while somebody removes it.
    assert connect().delete_key("test/large#1")
    assert reader.get("large", HANG_S) is None


def test_a_child_of_fork_connects_anew(server: dist.TCPStore) -> None:
    """Two processes that ask on one connection take each other's answers."""
    keys = KeyValues(StoreClient(partial(_client, server.port)), "test")
    for name in ("parent", "child"):
        keys.set(name, name.encode(), HANG_S)
    assert keys.has_all(["parent", "child"], HANG_S)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def read_often(name: str) -> set[bytes | None]:
        return {keys.get(name, HANG_S) for _ in range(2000)}

    def child() -> None:
        theirs.send("here")
        theirs.send(read_often("child"))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "here"
        assert read_often("parent") == {b"parent"}
        assert ours.poll(HANG_S)
        assert ours.recv() == {b"child"}
    finally:
        process.kill()
        process.join(HANG_S)
    # The child let go of the connection that was the parent's, and the parent still has it.
    assert keys.get("parent", HANG_S) == b"parent"


def test_a_connection_that_hangs_is_left_behind() -> None:
    """A call that does not come back is repeated once over a new one, which later calls use."""
    is_over = threading.Event()

    class Hanging:
        def compare_set(self, *_: str) -> bytes:
            is_over.wait(HANG_S)
            return b""

    stores: list[Any] = [Hanging(), dist.HashStore(), Hanging(), Hanging(), dist.HashStore()]
    keys = KeyValues(StoreClient(lambda: stores.pop(0)), "test")
    try:
        assert keys.get("key", 1.0) is None
        keys.set("key", b"value", HANG_S)
        assert keys.get("key", HANG_S) == b"value"
        keys.client.connection = None
        with pytest.raises(LostStoreError, match="no answer in"):
            keys.get("key", 0.2)
        assert keys.get("key", HANG_S) is None
    finally:
        is_over.set()


def test_a_process_that_was_stopped_in_a_request_has_not_lost_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long that was, the request is repeated before the store counts as lost."""
    store = dist.HashStore()
    client = StoreClient(lambda: store)
    keys = KeyValues(client, "test")
    keys.set("key", b"value", HANG_S)
    run, stopped = TimedPool.run, list[bool]()

    def stop_first(pool: TimedPool, call: Any, **options: Any) -> Any:
        if not stopped:
            stopped.append(True)
            time.sleep(0.5)
            raise TimeoutError
        return run(pool, call, **options)

    monkeypatch.setattr(TimedPool, "run", stop_first)
    assert keys.get("key", 0.3) == b"value"
