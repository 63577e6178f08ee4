"""What the Rust client brings is handed on piece by piece, and only if it can be what was saved."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from remote_tools import emptied, plain, served_by

from ckpt_storage.errors import IntegrityError, StorageError
from ckpt_storage.store.base import LendingStore, Store
from ckpt_storage.testing.s3server import FaultRule, S3Server

SIZE = (1 << 20) + 12_345


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server of its own, reached through the Rust client."""
    with S3Server() as running, served_by("obstore"):
        running.create_bucket("bkt")
        emptied(running)
        yield running


def test_pieces_are_told_of_when_they_are_there_and_no_others_are(server: S3Server) -> None:
    """Each report comes before the bytes behind it: they can be checked in the cache."""
    store, data = plain(server), random.Random(1).randbytes(SIZE)
    store.write("x", data)
    target = bytearray(SIZE)
    told: list[int] = []

    def arrived(count: int) -> None:
        told.append(count)
        assert target[:count] == data[:count]
        assert not any(target[count:])

    store.read_into("x", 0, memoryview(target), size_bytes=SIZE, arrived=arrived)
    assert target == data
    assert told[0] == 0
    assert told[-1] == SIZE
    assert len(told) > 3


def test_an_object_of_another_length_is_not_judged(server: S3Server) -> None:
    """Its length is what is wrong with it; its bytes reach neither the target nor the check."""
    store = plain(server)
    store.write("x", b"1" * SIZE)
    target = bytearray(1000)
    told: list[int] = []
    with pytest.raises(IntegrityError, match=f"{SIZE} bytes instead of {SIZE + 1}"):
        store.read_into("x", 0, memoryview(target), size_bytes=SIZE + 1, arrived=told.append)
    assert not any(target)
    assert not any(told)


def test_an_answer_that_breaks_off_is_not_judged(server: S3Server) -> None:
    """It is a failure of the network, which may be tried again, and no damage."""
    store = plain(server)
    store.write("x", b"1" * SIZE)
    server.faults([FaultRule(key="x", action="truncate", limit_bytes=600_000)])
    told: list[int] = []
    with pytest.raises(StorageError) as failure:
        store.read_into("x", 0, memoryview(bytearray(SIZE)), size_bytes=SIZE, arrived=told.append)
    assert failure.value.retryable
    assert not any(told)


def lender(store: Store) -> LendingStore:
    """Return a store as one that lends."""
    assert isinstance(store, LendingStore)
    return store


def test_lent_bytes_are_the_objects(server: S3Server) -> None:
    """The range that was asked for, and nobody can write there."""
    store, data = plain(server), random.Random(1).randbytes(SIZE)
    store.write("x", data)
    assert store.capabilities.lends_reads
    lent = lender(store).read_lent("x", 1000, SIZE - 2000, size_bytes=SIZE)
    assert lent == data[1000:-1000]
    assert lent.readonly


@pytest.mark.parametrize(("start", "size_bytes"), [(0, SIZE + 1), (10, SIZE), (2 * SIZE, SIZE)])
def test_nothing_is_lent_of_an_object_of_another_length(
    server: S3Server, start: int, size_bytes: int
) -> None:
    """Longer, or ending within the range, or before it: damage, which trying again does not end."""
    store = plain(server)
    store.write("x", b"1" * SIZE)
    with pytest.raises(IntegrityError):
        lender(store).read_lent("x", start, SIZE, size_bytes=size_bytes)


def test_nothing_is_lent_of_an_answer_that_breaks_off(server: S3Server) -> None:
    """It is a failure of the network, which may be tried again."""
    store = plain(server)
    store.write("x", b"1" * SIZE)
    server.faults([FaultRule(key="x", action="truncate", limit_bytes=600_000)])
    with pytest.raises(StorageError) as failure:
        lender(store).read_lent("x", 0, SIZE, size_bytes=SIZE)
    assert failure.value.retryable


def test_a_store_without_memory_of_its_own_lends_fresh_one(server: S3Server) -> None:
    """A child of fork, say, which goes on through fsspec in the midst of a load."""
    store, data = plain(server), random.Random(2).randbytes(SIZE)
    store.write("x", data)
    with served_by("fsspec"):
        other = plain(server)
        assert not other.capabilities.lends_reads
        assert lender(other).read_lent("x", 5, 1000, size_bytes=SIZE) == data[5:1005]
