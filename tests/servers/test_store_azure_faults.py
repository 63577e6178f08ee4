"""Uploads to Azure survive lost answers, and an abort takes back what one showed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from servers import Running

from ckpt_storage.errors import StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, open_store
from ckpt_storage.store.backend import Settings
from ckpt_storage.store.backends.azure import AzureBackend
from ckpt_storage.store.store import Store

POLICY = RetryPolicy(attempt_count=4, first_delay_s=0.01, max_delay_s=0.05)
PART_BYTES = 64 * 1024
PARTS = [b"a" * PART_BYTES, b"b" * PART_BYTES, b"tail"]


class Relay:
    """Passes TCP on to another port; cuts the connection where the answer to `lose` begins."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = [self._listener]
        self.port: int = self._listener.getsockname()[1]
        self.lose: list[bytes] = []
        self.lost = 0
        self._start(self._accept)

    def _start(self, target: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]  # both shapes
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                marked = threading.Event()
                self._start(lambda c, s, m=marked: self._forward(c, s, m), client, server)
                self._start(lambda s, c, m=marked: self._answer(s, c, m), server, client)

    def _forward(
        self, client: socket.socket, server: socket.socket, marked: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self.lose and self.lose[0] in data.partition(b"\r\n")[0]:
                    del self.lose[0]
                    marked.set()
                server.sendall(data)
        _cut(client, server)

    def _answer(
        self, server: socket.socket, client: socket.socket, marked: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if marked.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    self.lost += 1
                    break
                client.sendall(data)
        _cut(client, server)

    def stop(self) -> None:
        """Close everything and wait for the threads."""
        _cut(*self._sockets)
        for thread in self._threads:
            thread.join(10)
        for each in self._sockets:
            each.close()


def _cut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relayed(azure_root: Running, azure_server: Running) -> Iterator[tuple[Relay, Running]]:
    """A relay to Azurite, and a fresh root behind it."""
    port = int(azure_server.url.rpartition(":")[2])
    relay = Relay(port)
    connection = azure_root.storage_options["connection_string"]
    through = connection.replace(f":{port}/", f":{relay.port}/")
    try:
        yield relay, Running(url=azure_root.url, storage_options={"connection_string": through})
    finally:
        relay.stop()


def put(store: Store, parts: list[bytes]) -> None:
    """Upload parts, and abort if that fails."""
    upload = store.upload("saves/a/x")
    offset = 0
    try:
        for number, part in enumerate(parts):
            upload.write_part(number, offset, [memoryview(part)], last=number == len(parts) - 1)
            offset += len(part)
        upload.complete(offset)
    except StorageError:
        upload.abort()
        raise


@pytest.mark.parametrize(
    ("parts", "words"),
    [(PARTS, b"comp=block&"), (PARTS, b"comp=blocklist"), ([b"small"], b"saves/a/x")],
)
def test_a_lost_answer_is_made_good(
    relayed: tuple[Relay, Running], parts: list[bytes], words: bytes
) -> None:
    """Staging a block, listing blocks and putting a blob may all be done twice."""
    relay, root = relayed
    store = open_store(root.url, storage_options=root.storage_options, retry=POLICY)
    store.put("warm", b"up")
    # aiohttp sends a request that cannot be answered once more by itself.
    relay.lose = [words] * 2
    put(store, parts)
    assert relay.lost == 2
    assert store.get("saves/a/x").data == b"".join(parts)


@pytest.mark.parametrize(
    ("parts", "words"), [(PARTS, b"comp=blocklist"), ([b"small"], b"saves/a/x")]
)
def test_an_abort_takes_back_what_a_lost_answer_showed(
    relayed: tuple[Relay, Running], parts: list[bytes], words: bytes
) -> None:
    """Where nobody could tell whether completing had worked, nothing of it stays."""
    relay, root = relayed
    options = root.storage_options
    store = open_store(root.url, storage_options=options, retry=RetryPolicy(attempt_count=1))
    store.put("saves/a/other", b"stays")
    # aiohttp sends a request that cannot be answered once more by itself.
    relay.lose = [words, words, b"HEAD", b"HEAD"]
    with pytest.raises(StorageError) as caught:
        put(store, parts)
    assert caught.value.kind == "connection"
    assert relay.lost == 4
    assert [entry.path for entry in store.list("")] == ["saves/a/other"]


def test_a_version_is_deleted_only_while_it_is_there(azure_root: Running) -> None:
    """What took its place meanwhile stays."""
    location = Location.of(azure_root.url, azure_root.storage_options)
    backend = AzureBackend(location, Settings())
    backend.put("x", [memoryview(b"ours")])
    version = backend.stat("x").version
    backend.put("x", [memoryview(b"another's")])
    with pytest.raises(Exception, match="ConditionNotMet"):
        backend.delete_version("x", version or "")
    assert backend.get("x", max_bytes=None).data == b"another's"
    backend.delete_version("x", backend.stat("x").version or "")
    assert list(backend.list("", recursive=True)) == []
