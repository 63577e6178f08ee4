"""The state machine of the suite finds stores that go wrong now and then."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import Location, Settings
from ckpt_storage.store.backend import ObjectInfo
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.store import Store
from ckpt_storage.testing.store_machine import check_sequences


class Sound(MemoryBackend):
    """Nothing is wrong with it."""


class ForgetsDeletions(MemoryBackend):
    """Deletes the first path only."""

    def delete(self, paths: Sequence[str]) -> None:
        super().delete(paths[:1])


class ListsAlike(MemoryBackend):
    """Shows "saves/ab" below "saves/a"."""

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        for info in super().list("", recursive=recursive or bool(prefix)):
            if info.path.startswith(prefix):
                yield info


class ShowsAborted(MemoryBackend):
    """Keeps what an aborted upload was to make."""

    def abort_upload(self, path: str, token: str) -> None:
        super().put(path, [memoryview(b"half")])
        super().abort_upload(path, token)


class Overwrites(MemoryBackend):
    """Creates a name that is taken."""

    def put(self, path: str, data: Any, **more: Any) -> None:
        super().put(path, data, write_id=more.get("write_id"))


class KeepsOldVersions(MemoryBackend):
    """Puts the second version of a name nowhere, as a cache of a client does."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self._seen: dict[str, Any] = {}

    def get(self, path: str, *, max_bytes: int | None) -> Any:
        self.stat(path)
        return self._seen.setdefault(path, super().get(path, max_bytes=max_bytes))


def check(kind: type[MemoryBackend]) -> None:
    location = Location.of(f"memory://{uuid.uuid4().hex}/run")
    once = RetryPolicy(attempt_count=1)
    clients = [Store(kind(location, Settings()), url=location.url, policy=once) for _ in range(2)]
    try:
        check_sequences(clients[0], clients[1], 10)
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    "kind", [ForgetsDeletions, ListsAlike, ShowsAborted, Overwrites, KeepsOldVersions]
)
def test_a_store_that_is_wrong_is_found(kind: type[MemoryBackend]) -> None:
    """Ten sequences are enough for each of these."""
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        check(kind)


def test_a_store_that_is_right_passes() -> None:
    """What finds faults finds none here."""
    check(Sound)
