"""How clients of fsspec's file systems are made."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem
from remote_tools import ONCE

from ckpt_storage.errors import StorageError
from ckpt_storage.store import Location, open_store
from ckpt_storage.testing.upload_facts import together


def test_clients_of_one_kind_are_made_one_at_a_time(registered: dict[str, type]) -> None:
    """Two threads that need a client at the same moment do not enter its constructor together."""
    beside, at_once = threading.Barrier(2), []

    class Pooled(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        """As smbclient: its connections are in a pool that a second thread finds half filled."""

        cachable, protocol = False, "pooled"

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            with contextlib.suppress(threading.BrokenBarrierError):
                beside.wait(0.3)
                at_once.append(self)
            beside.reset()

    registered["pooled"] = Pooled
    stores = [open_store(f"pooled://{name}", retry=ONCE) for name in ("a", "b", "c")]
    assert together([lambda one=one: one.list("") for one in stores]) == [[], [], []]  # type: ignore[misc]
    assert at_once == []
    for store in stores:
        store.close()


def test_clients_get_options_that_their_storage_needs(registered: dict[str, type]) -> None:
    """Samba shares files that are open, and `auth` of a command line is a tuple (R13, R16)."""
    options: list[dict[str, Any]] = []

    class Recording(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
        """Keeps what it is made with."""

        cachable = False

        def __init__(
            self, share_access: str | None = None, auth: object = None, **others: Any
        ) -> None:
            super().__init__(**others)
            options.append({"share_access": share_access, "auth": auth})

    registered["smb"] = registered["webdav"] = Recording
    for url in ("smb://host/data/run", "webdav://run"):
        store = open_store(Location.of(url, {"auth": ["me", "password"]}), retry=ONCE)
        with contextlib.suppress(StorageError):
            store.stat("x")
        store.close()
    auth = ("me", "password")
    assert options[0] == {"share_access": "rwd", "auth": auth}
    assert options[-1] == {"share_access": None, "auth": auth}
