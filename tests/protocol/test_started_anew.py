"""Ranks that come late, are started anew or connect anew: nothing of before enters what follows."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import rank_threads as threads
import torch.distributed as dist

from ckpt_storage import CheckpointError, PhaseTimeoutError, RankFailedError, Timeouts
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import KeyValues, LostStoreError

quick = threads.quick
pytestmark = pytest.mark.usefixtures("quick")


class EndedKeys(threads.MemoryKeys):
    """A store as a process sees it that is ended as soon as it has left a message."""

    def __init__(self, keys: threads.MemoryKeys) -> None:
        self._values = keys._values  # noqa: SLF001  # the same memory
        self._has_ended = False

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        if not self._has_ended:
            super().set(key, value, timeout_s)
        self._has_ended = True

    def get(self, key: str, timeout_s: float) -> bytes | None:
        if self._has_ended:
            raise LostStoreError(f"ended before it read {key} within {timeout_s} s")
        return super().get(key, timeout_s)

    def has_all(self, keys: object, timeout_s: float) -> bool:
        raise LostStoreError(f"ended before it looked for {keys} within {timeout_s} s")

    def delete(self, key: str, timeout_s: float) -> None:
        raise LostStoreError(f"ended before it took {key} back within {timeout_s} s")


def leave_job(keys: threads.MemoryKeys, *, number: int, url: str) -> None:
    """Leave what a job leaves that is ended while its ranks meet: a call, and answers to it."""
    for ranks in threads.group(lambda: EndedKeys(keys), 3):
        ranks.number = number - 1
        with (
            pytest.raises(RankFailedError),
            ranks.operation("the test", timeouts=Timeouts()) as operation,
        ):
            operation.meet({"the checkpoint's URL": url})
    assert keys.keys[0] == "call"
    assert [key.split("/")[::2] for key in keys.keys[1:]] == [["here", "1"], ["here", "2"]]


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("url", [*threads.TERMS.values(), "memory://other"])
@pytest.mark.parametrize("first", ["the coordinator", "the others"])
def test_messages_of_ranks_that_were_ended_are_not_taken_for_their_successors(
    number: int, url: str, first: str
) -> None:
    """All meet, and no operation fails, whatever operation those were in that were ended."""
    keys = threads.MemoryKeys()
    leave_job(keys, number=number, url=url)
    old = set(keys.keys) - {"call"}
    call = keys.get("call", threads.END_S)

    def body(ranks: RankGroup) -> list[list[bytes]]:
        if ranks.is_coordinator and first == "the others":
            time.sleep(20 * threads.LOOK_S)  # the others answer the old call meanwhile
        elif not ranks.is_coordinator and first == "the coordinator":
            threads.wait_until(lambda: keys.get("call", threads.END_S) != call, "no new call")
        return [threads.together(ranks) for _ in range(3)]

    told = threads.values(threads.run(threads.group(keys, 3), body))
    assert told == [[[b"0", b"1", b"2"]] * 3] * 3
    left = threads.MemoryKeys()
    for key in set(keys.keys) - old:
        left.set(key, b"", threads.END_S)
    assert len(threads.operations_on(left)) == 1, keys.keys


def test_a_rank_that_is_not_started_anew_is_named() -> None:
    """What its predecessor left is not taken for its coming; once it has come, all meet."""
    keys = threads.MemoryKeys()
    leave_job(keys, number=1, url=threads.TERMS["the checkpoint's URL"])
    ranks = threads.group(keys, 3)

    def alone(ranks: RankGroup) -> str:
        with pytest.raises(PhaseTimeoutError) as caught:
            threads.together(ranks, Timeouts(plan=0.5))
        return str(caught.value)

    told = threads.values(threads.run([ranks[0], ranks[2]], alone))
    assert all("Rank 1 of 3 has not come" in one for one in told), told

    def all_come(ranks: RankGroup) -> list[bytes]:
        if ranks.rank == 1:
            with pytest.raises(PhaseTimeoutError, match="given up before"):
                threads.together(ranks)
        return threads.together(ranks)

    assert threads.values(threads.run(ranks, all_come)) == [[b"0", b"1", b"2"]] * 3


SHORT = Timeouts(plan=0.3, silence=5)
LONG = Timeouts(plan=8, silence=5)


def tried(ranks: RankGroup, timeouts: Timeouts, url: int, said: bytes) -> Any:
    """Run one operation; return what all said, or the error."""
    try:
        with ranks.operation("the save to x", timeouts=timeouts) as operation:
            operation.meet({"url": f"x{url}"})
            return operation.all_gather(said)
    except CheckpointError as error:
        return error


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
        return [tried(ranks, timeouts, step * (not is_same), b"%d" % step) for step in steps]

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == 0:
            (first,) = saves(ranks, 1, timeouts=SHORT)
            gave_up.set()
            assert isinstance(first, CheckpointError)
            return saves(ranks, 2, 3, 4)
        gave_up.wait(threads.END_S)
        if late == "comes":
            assert isinstance(saves(ranks, 1)[0], CheckpointError)
        if late == "fails":
            with (
                pytest.raises(CheckpointError, match="my own"),
                ranks.operation("the save to x", timeouts=LONG),
            ):
                raise CheckpointError("my own")
        return saves(ranks, 2, 3, 4)

    ended = threads.values(threads.run(threads.group(threads.MemoryKeys(), 2), body))
    assert ended == [[[b"%d" % step] * 2 for step in (2, 3, 4)]] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_after_the_others_gave_up_loses_that_operation_only(late: int) -> None:
    """Of three ranks one whose word comes too late is in step again by the third operation."""
    gave_up = threading.Barrier(3)

    def body(ranks: RankGroup) -> list[Any]:
        if ranks.rank == late:
            gave_up.wait(threads.END_S)
        timeouts = Timeouts(plan=2.0 if ranks.rank == late else 0.3)
        ended = [tried(ranks, timeouts, 0, b"")]
        if ranks.rank != late:
            gave_up.wait(threads.END_S)
        return ended + [tried(ranks, Timeouts(plan=2.0), step, b"") for step in (1, 2, 3)]

    for ended in threads.values(threads.run(threads.group(threads.MemoryKeys(), 3), body)):
        # Where rank 0 is late, the others wait for it in the next operation.
        assert ended[2:] == [[b""] * 3] * 2
        assert late == 0 or ended[1] == [b""] * 3


@pytest.fixture
def server() -> dist.TCPStore:
    """A server of keys."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


def _client(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))


def operate(ranks: list[RankGroup], for_s: float) -> list[BaseException | None]:
    """Run one operation that lasts a while; return what each rank raised."""

    def body(one: RankGroup) -> None:
        with one.operation("the test", timeouts=Timeouts.of(20.0)) as operation:
            operation.meet({})
            end_s = time.monotonic() + for_s
            while operation.failure() is None and time.monotonic() < end_s:
                time.sleep(threads.LOOK_S)
            operation.deadline.check("the test")
            operation.all_gather(b"")

    return [ended.error for ended in threads.run(ranks, body)]


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


def test_operations_keep_their_connection_until_it_breaks(server: dist.TCPStore) -> None:
    """Each rank connects once. One that broke costs an operation; the next connects anew."""
    cable, made = Cable(server.port), list[dist.Store]()
    while_s = 0.3  # torch takes a while to put down how a call failed

    def connect() -> dist.Store:
        made.append(_client(cable.port))
        return made[-1]

    ranks = threads.group(lambda: KeyValues(connect, "test"), 2)
    with contextlib.closing(cable), contextlib.closing(ranks[0]), contextlib.closing(ranks[1]):
        for _ in range(4):
            assert operate(ranks, while_s) == [None, None]
        assert len(made) == 2
        cable.cut()
        assert all(isinstance(error, RankFailedError) for error in operate(ranks, while_s))
        for _ in range(2):
            assert operate(ranks, while_s) == [None, None]


def test_what_is_removed_while_it_is_read_is_not_waited_for(server: dist.TCPStore) -> None:
    """A reader gets it whole or not at all; the store's own `get` would wait, or return nothing."""
    connect = partial(_client, server.port)
    reader, writer = KeyValues(connect, "test"), KeyValues(connect, "test")
    is_over = threading.Event()

    def put_and_remove() -> None:
        while not is_over.is_set():
            writer.set("key", b"value", threads.END_S)
            writer.delete("key", threads.END_S)

    thread = threading.Thread(target=put_and_remove, daemon=True)
    thread.start()
    try:
        found = {reader.get("key", threads.END_S) for _ in range(2000)}
    finally:
        is_over.set()
        thread.join(threads.END_S)
    assert found <= {None, b"value"}
    writer.set("large", bytes(9 << 20), threads.END_S)
    assert writer.has_all(["large"], threads.END_S)
    # As it is while somebody removes it.
    assert connect().delete_key("test/large#1")
    assert reader.get("large", threads.END_S) is None
    for keys in (writer, reader):
        keys.close()


def test_a_child_of_fork_connects_anew(server: dist.TCPStore) -> None:
    """Two processes that ask on one connection take each other's answers."""
    keys = KeyValues(partial(_client, server.port), "test")
    for name in ("parent", "child"):
        keys.set(name, name.encode(), threads.END_S)
    assert keys.has_all(["parent", "child"], threads.END_S)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def read_often(name: str) -> set[bytes | None]:
        return {keys.get(name, threads.END_S) for _ in range(2000)}

    def child() -> None:
        theirs.send("here")
        theirs.send(read_often("child"))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "here"
        assert read_often("parent") == {b"parent"}
        assert ours.poll(threads.END_S)
        assert ours.recv() == {b"child"}
    finally:
        process.kill()
        process.join(threads.END_S)
    # The child let go of the connection that was the parent's, and the parent still has it.
    assert keys.get("parent", threads.END_S) == b"parent"
    keys.close()


def test_a_connection_that_hangs_is_left_behind() -> None:
    """A call that does not come back keeps no later one, which connects anew."""
    is_over = threading.Event()

    class Hanging:
        def compare_set(self, *_: str) -> bytes:
            is_over.wait(threads.END_S)
            return b""

    stores: list[Any] = [Hanging(), dist.HashStore()]
    keys = KeyValues(lambda: stores.pop(0), "test")
    try:
        with pytest.raises(LostStoreError, match="no answer in"):
            keys.get("key", 0.1)
        keys.set("key", b"value", threads.END_S)
        assert keys.get("key", threads.END_S) == b"value"
    finally:
        is_over.set()
        keys.close()
