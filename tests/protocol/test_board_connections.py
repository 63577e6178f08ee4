"""How ranks connect to the store they share: once, and anew where a connection is of no use."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from rank_threads import END_S, LOOK_S, group, run

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import KeyValues, LostStoreError
from ckpt_storage.errors import RankFailedError
from ckpt_storage.options import Timeouts

Connect = Callable[[], dist.Store]


@pytest.fixture
def server() -> dist.TCPStore:
    """A server of keys."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))


@pytest.fixture
def connect(server: dist.TCPStore) -> Connect:
    """Makes one more connection to it."""
    return lambda: client(server.port)


def client(port: int) -> dist.Store:
    """Return a new connection."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))


def operate(ranks: list[RankGroup], for_s: float = 0.0) -> list[BaseException | None]:
    """Run one operation that lasts a while; return what each rank raised."""

    def body(one: RankGroup) -> None:
        with one.operation("the test", timeouts=Timeouts.of(20.0)) as operation:
            operation.meet({})
            end_s = time.monotonic() + for_s
            while operation.failure() is None and time.monotonic() < end_s:
                time.sleep(LOOK_S)
            operation.deadline.check("the test")
            operation.all_gather(b"")

    return [ended.error for ended in run(ranks, body)]


@contextlib.contextmanager
def connected(connect: Connect) -> Iterator[list[RankGroup]]:
    """Give two ranks, each with a connection of its own."""
    ranks = group(lambda: KeyValues(connect, "test"), 2)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def test_operations_keep_their_connection(connect: Connect) -> None:
    """However many there are, each rank connects once."""
    made: list[dist.Store] = []

    def counted() -> dist.Store:
        made.append(connect())
        return made[-1]

    with connected(counted) as ranks:
        for _ in range(4):
            assert operate(ranks) == [None, None]
    assert len(made) == 2


class Cable:
    """What lies between stores and their server, and can be cut."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections; new ones can be made."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Break all connections for good."""
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


def test_connections_that_broke_cost_one_operation(server: dist.TCPStore) -> None:
    """Those between which they broke fail in it, and the next one connects anew."""
    cable = Cable(server.port)
    while_s = 0.3  # torch takes a while to put down how a call failed
    with contextlib.closing(cable), connected(lambda: client(cable.port)) as ranks:
        assert operate(ranks, while_s) == [None, None]
        cable.cut()
        assert all(isinstance(error, RankFailedError) for error in operate(ranks, while_s))
        for _ in range(2):
            assert operate(ranks, while_s) == [None, None]


def test_what_is_removed_while_it_is_read_is_not_waited_for(connect: Connect) -> None:
    """A reader gets it whole or not at all; the store's own `get` would wait, or return nothing."""
    reader, writer = KeyValues(connect, "test"), KeyValues(connect, "test")
    is_over = threading.Event()

    def put_and_remove() -> None:
        while not is_over.is_set():
            writer.set("key", b"value", END_S)
            writer.delete("key", END_S)

    thread = threading.Thread(target=put_and_remove, daemon=True)
    thread.start()
    try:
        found = {reader.get("key", END_S) for _ in range(2000)}
    finally:
        is_over.set()
        thread.join(END_S)
    assert found <= {None, b"value"}
    writer.set("large", bytes(9 << 20), END_S)
    assert writer.has_all(["large"], END_S)
    # As it is while somebody removes it.
    assert connect().delete_key("test/large#1")
    assert reader.get("large", END_S) is None
    for keys in (writer, reader):
        keys.close()


def test_a_child_of_fork_connects_anew(connect: Connect) -> None:
    """Two processes that ask on one connection take each other's answers."""
    keys = KeyValues(connect, "test")
    for name in ("parent", "child"):
        keys.set(name, name.encode(), END_S)
    assert keys.has_all(["parent", "child"], END_S)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def read_often(name: str) -> set[bytes | None]:
        return {keys.get(name, END_S) for _ in range(2000)}

    def child() -> None:
        theirs.send("here")
        theirs.send(read_often("child"))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "here"
        assert read_often("parent") == {b"parent"}
        assert ours.poll(END_S)
        assert ours.recv() == {b"child"}
    finally:
        process.kill()
        process.join(END_S)
    # The child let go of the connection that was the parent's, and the parent still has it.
    assert keys.get("parent", END_S) == b"parent"
    keys.close()


def test_a_connection_that_hangs_is_left_behind() -> None:
    """A call that does not come back keeps no later one, which connects anew."""
    is_over = threading.Event()

    class Hanging:
        def compare_set(self, *_: str) -> bytes:
            is_over.wait(END_S)
            return b""

    stores: list[Any] = [Hanging(), dist.HashStore()]
    keys = KeyValues(lambda: stores.pop(0), "test")
    try:
        with pytest.raises(LostStoreError, match="no answer in"):
            keys.get("key", 0.1)
        keys.set("key", b"value", END_S)
        assert keys.get("key", END_S) == b"value"
    finally:
        is_over.set()
        keys.close()
