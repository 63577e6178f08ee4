"""How often ranks connect to the store they share: once, not once an operation."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import KeyValues, LostStoreError
from ckpt_storage.errors import RankFailedError
from ckpt_storage.options import Timeouts

LOOK_S = 0.002
END_S = 30.0


def group(board: Callable[[], KeyValues]) -> list[RankGroup]:
    """Return two ranks, each over a board of its own making."""
    return [RankGroup(board(), rank=rank, world_size=2, look_s=LOOK_S) for rank in range(2)]


def operate(
    ranks: list[RankGroup], ready: Callable[[], bool], timeout_s: float = 20.0
) -> list[BaseException | None]:
    """Run one operation, in which each rank waits until `ready`; return what each raised."""
    raised: dict[int, BaseException | None] = {}

    def main(coordinator: RankGroup) -> None:
        error = None
        try:
            with coordinator.operation("the test", timeouts=Timeouts.of(timeout_s)) as operation:
                operation.meet({})
                end_s = time.monotonic() + END_S
                while not ready() and operation.failure() is None and time.monotonic() < end_s:
                    time.sleep(LOOK_S)
                failure = operation.failure()
                if failure is not None:
                    raise failure  # noqa: TRY301  # as any wait would
                operation.all_gather(b"")
        except BaseException as caught:  # noqa: BLE001  # returned
            error = caught
        raised[coordinator.rank] = error

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(END_S)
    assert sorted(raised) == [0, 1], "a rank hangs"
    return [raised[rank] for rank in range(2)]


def test_operations_keep_their_connection() -> None:
    """However many there are, each rank connects once."""
    timeout = timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
    connected: list[int] = []

    def connect() -> dist.Store:
        connected.append(server.port)
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)

    ranks = group(lambda: KeyValues(connect, "test"))
    for _ in range(4):
        assert operate(ranks, lambda: True) == [None, None]
    assert len(connected) == 2
    for rank in ranks:
        rank.close()


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


def test_connections_that_broke_cost_one_operation() -> None:
    """Those between which they broke fail in it, and the next one connects anew."""
    timeout = timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)
    cable = Cable(server.port)

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", cable.port, is_master=False, timeout=timeout)

    def operate_beyond_looks() -> list[BaseException | None]:
        # Torch takes a while to put down how a call failed.
        end_s = time.monotonic() + 0.3
        return operate(ranks, lambda: time.monotonic() > end_s)

    ranks = group(lambda: KeyValues(connect, "test"))
    try:
        assert operate_beyond_looks() == [None, None]
        cable.cut()
        assert all(isinstance(error, RankFailedError) for error in operate_beyond_looks())
        for _ in range(2):
            assert operate_beyond_looks() == [None, None]
    finally:
        for rank in ranks:
            rank.close()
        cable.close()


def test_what_is_removed_while_it_is_read_is_not_waited_for() -> None:
    """A reader gets it whole or not at all; the store's own `get` would wait, or return nothing."""
    timeout = timedelta(seconds=60)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)

    reader = KeyValues(connect, "test")
    writer = KeyValues(connect, "test")
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
    for board in (writer, reader):
        board.close()


def _read_often(board: KeyValues, key: str) -> set[bytes | None]:
    return {board.get(key, END_S) for _ in range(2000)}


def test_a_child_of_fork_connects_anew() -> None:
    """Two processes that ask on one connection take each other's answers."""
    timeout = timedelta(seconds=20)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout)

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timeout)

    board = KeyValues(connect, "test")
    board.set("parent", b"for the parent", END_S)
    board.set("child", b"for the child", END_S)
    assert board.has_all(["parent", "child"], END_S)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        theirs.send("here")
        theirs.send(_read_often(board, "child"))

    process = context.Process(target=child)
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "here"
        assert _read_often(board, "parent") == {b"for the parent"}
        assert ours.poll(END_S)
        assert ours.recv() == {b"for the child"}
    finally:
        process.kill()
        process.join(END_S)
    # The child let go of the connection that was the parent's, and the parent still has it.
    assert board.get("parent", END_S) == b"for the parent"
    board.close()


def test_a_connection_that_hangs_is_left_behind() -> None:
    """A call that does not come back keeps no later one, which connects anew."""
    server = dist.HashStore()
    is_over = threading.Event()

    class Hanging:
        def compare_set(self, *_: str) -> bytes:
            is_over.wait(END_S)
            return b""

    stores: list[Any] = [Hanging(), server]
    keys = KeyValues(lambda: stores.pop(0), "test")
    try:
        with pytest.raises(LostStoreError, match="no answer in"):
            keys.get("key", 0.1)
        keys.set("key", b"value", END_S)
        assert keys.get("key", END_S) == b"value"
    finally:
        is_over.set()
        keys.close()
