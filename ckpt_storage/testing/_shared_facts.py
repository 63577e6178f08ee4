"""The facts of the store suite about uploads that several processes share, and copied parts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

import pytest
from crc32c import crc32c

from ckpt_storage.errors import (
    CheckpointError,
    IntegrityError,
    InvalidInputError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.store.base import CopySource, PartReceipt, SharedUpload, Store

from ._suite_tools import fill, kind_of, paths_of, pattern, together

__all__ = ["SharedUploadFacts"]

_PATH = "saves/a/x"


class SharedUploadFacts:
    """Facts about `start_shared_upload`, `join_upload` and `copy_part`."""

    def test_shared_uploads_are_refused_where_there_are_none(self, store: Store) -> None:
        """A store that does not declare them raises before anything is sent."""
        if store.capabilities.tokens_travel:
            pytest.skip("the store declares shared uploads")
        with pytest.raises(UnsupportedByStoreError):
            store.start_shared_upload(_PATH, part_bytes=fill(store.capabilities))
        with pytest.raises(UnsupportedByStoreError):
            store.join_upload(_PATH, "{}", part_bytes=fill(store.capabilities))
        assert not store.can_copy_from(store)
        assert paths_of(store) == []

    def test_parts_of_two_members_make_one_object(self, store: Store, other: Store) -> None:
        """The object holds what owner and member wrote, and nobody sees it before it is whole."""
        size = _size(store)
        parts = [pattern(size, i) for i in range(4)] + [pattern(17, 4)]
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        member = other.join_upload(_PATH, owner.ticket(), part_bytes=size)
        _send(member, parts, [3, 1])
        _send(owner, parts, [4, 0, 2])
        assert paths_of(other) == []
        handed = _travelled(member.receipts())
        assert handed == _travelled(member.receipts())
        owner.complete(4 * size + 17, receipts=handed)
        assert other.read(_PATH) == b"".join(parts)
        assert paths_of(other) == [_PATH]
        assert other.abort_uploads("") == 0

    def test_an_owner_may_write_nothing_itself(self, store: Store, other: Store) -> None:
        """Receipts of all members are enough, also if the owner's own are among them."""
        size = _size(store)
        parts = [pattern(size, 1), pattern(5, 2)]
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        members = [other.join_upload(_PATH, owner.ticket(), part_bytes=size) for _ in parts]
        for number, member in enumerate(members):
            _send(member, parts, [number])
        receipts = [receipt for one in (owner, *members) for receipt in one.receipts()]
        owner.complete(size + 5, receipts=receipts)
        assert other.read(_PATH) == b"".join(parts)

    def test_own_receipts_may_be_given_back(self, store: Store, other: Store) -> None:
        """An owner that gathers everybody's receipts, its own too, completes with them."""
        size = _size(store)
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        _send(owner, [pattern(size), b"end"], [0, 1])
        owner.complete(size + 3, receipts=_travelled(owner.receipts()))
        assert other.read(_PATH) == pattern(size) + b"end"

    def test_numbers_may_be_left_out(self, store: Store, other: Store) -> None:
        """Part numbers need only ascend with the offsets."""
        size = _size(store)
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        owner.write_part(7, size, [memoryview(b"end")], last=True)
        owner.write_part(2, 0, [memoryview(pattern(size))], last=False)
        owner.complete(size + 3)
        assert other.read(_PATH) == pattern(size) + b"end"

    def test_members_write_in_parallel(self, store: Store, other: Store) -> None:
        """Four members of one upload that write at once do not disturb each other."""
        size = _size(store)
        parts = [pattern(size, i) for i in range(4)] + [pattern(17, 4)]
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        ticket = owner.ticket()

        def write(number: int) -> list[PartReceipt]:
            member = (store, other)[number % 2].join_upload(_PATH, ticket, part_bytes=size)
            _send(member, parts, [number])
            return member.receipts()

        outcomes = together([lambda i=i: write(i) for i in range(5)])  # type: ignore[misc]
        receipts = [receipt for one in outcomes if isinstance(one, list) for receipt in one]
        owner.complete(4 * size + 17, receipts=receipts)
        assert other.read(_PATH) == b"".join(parts)

    def test_nothing_is_completed_without_a_members_receipts(
        self, store: Store, other: Store
    ) -> None:
        """A part whose receipt did not come is a gap, even if its bytes have arrived."""
        size = _size(store)
        parts = [pattern(size, 1), pattern(size, 2), b"end"]
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        member = other.join_upload(_PATH, owner.ticket(), part_bytes=size)
        _send(owner, parts, [0, 2])
        _send(member, parts, [1])
        with pytest.raises(StorageError):
            owner.complete(2 * size + 3)
        owner.abort()
        member.abort()
        assert paths_of(other) == []
        assert other.abort_uploads("") == 0

    def test_a_part_sent_by_two_members_is_a_mistake(self, store: Store, other: Store) -> None:
        """One number from two members is refused where their receipts differ."""
        size = _size(store)
        parts = [pattern(size, 1), b"end"]
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        member = other.join_upload(_PATH, owner.ticket(), part_bytes=size)
        _send(owner, parts, [0, 1])
        _send(member, [pattern(size - 1, 2)], [0])
        with pytest.raises(CheckpointError):
            owner.complete(size + 3, receipts=member.receipts())
        owner.abort()
        assert paths_of(other) == []

    def test_a_member_writes_no_more_once_it_gave_its_receipts(
        self, store: Store, other: Store
    ) -> None:
        """A late part of a member is refused, before and after completion, and changes nothing."""
        size = _size(store)
        parts = [pattern(size, 1), b"end"]
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        member = other.join_upload(_PATH, owner.ticket(), part_bytes=size)
        _send(member, parts, [0, 1])
        receipts = member.receipts()
        with pytest.raises(StorageError):
            _send(member, [pattern(size, 9)], [0])
        owner.complete(size + 3, receipts=receipts)
        with pytest.raises(StorageError):
            _send(member, [pattern(size, 9)], [0])
        assert store.read(_PATH) == b"".join(parts)

    def test_who_joins_late_changes_nothing(self, store: Store, other: Store) -> None:
        """With the ticket of a complete or aborted upload no object can be changed or made."""
        size = _size(store)
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        ticket = owner.ticket()
        _send(owner, [pattern(size), b"end"], [0, 1])
        owner.complete(size + 3)
        _zombie(other, _PATH, ticket, size)
        assert store.read(_PATH) == pattern(size) + b"end"
        aborted = store.start_shared_upload("saves/a/y", part_bytes=size)
        ticket = aborted.ticket()
        aborted.abort()
        _zombie(other, "saves/a/y", ticket, size)
        assert paths_of(store) == [_PATH]

    def test_only_the_owner_completes(self, store: Store, other: Store) -> None:
        """A member's `complete` is refused, and its `abort` leaves the owner's parts alone."""
        size = _size(store)
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        member = other.join_upload(_PATH, owner.ticket(), part_bytes=size)
        _send(owner, [pattern(size), b"end"], [0, 1])
        with pytest.raises(InvalidInputError):
            member.complete(size + 3)
        member.abort()
        member.abort()
        owner.complete(size + 3)
        assert other.read(_PATH) == pattern(size) + b"end"

    def test_what_exists_is_refused_or_replaced_as_asked(self, store: Store, other: Store) -> None:
        """Completing keeps what has the name and says "exists", or replaces it if told to."""
        size = _size(store)
        other.write(_PATH, b"old")
        refused = store.start_shared_upload(_PATH, part_bytes=size)
        _send(refused, [pattern(size), b"end"], [0, 1])
        assert kind_of(lambda: refused.complete(size + 3)) == "exists"
        refused.abort()
        assert other.read(_PATH) == b"old"
        assert other.abort_uploads("") == 0
        replacing = store.start_shared_upload(_PATH, part_bytes=size)
        _send(replacing, [pattern(size), b"end"], [0, 1])
        replacing.complete(size + 3, existing="replace")
        replacing.complete(size + 3, existing="replace")
        assert other.read(_PATH) == pattern(size) + b"end"

    def test_completing_a_shared_upload_is_idempotent(self, store: Store, other: Store) -> None:
        """Completing again does not take our own object for somebody else's."""
        size = _size(store)
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        _send(owner, [pattern(size), b"end"], [0, 1])
        owner.complete(size + 3)
        owner.complete(size + 3)
        owner.abort()
        assert other.read(_PATH) == pattern(size) + b"end"

    def test_a_ticket_opens_its_own_upload_only(self, store: Store) -> None:
        """A ticket of another path, and what is no ticket, are refused."""
        size = _size(store)
        owner = store.start_shared_upload(_PATH, part_bytes=size)
        for path, ticket in [("saves/ab/x", owner.ticket()), (_PATH, "{}"), (_PATH, "no ticket")]:
            with pytest.raises(InvalidInputError):
                store.join_upload(path, ticket, part_bytes=size)
        owner.abort()
        assert store.abort_uploads("") == 0

    @pytest.mark.parametrize(("start", "cut"), [(0, 0), (7, 5), (4096, 4096)])
    def test_a_copied_part_holds_the_range(
        self, store: Store, other: Store, start: int, cut: int
    ) -> None:
        """The storage copies exactly the range, and a checksum that it tells is right."""
        size = _copied_size(store)
        data = pattern(start + size + cut, 1)
        other.write("saves/ab/source", data)
        assert store.can_copy_from(other)
        upload = store.start_shared_upload(_PATH, part_bytes=size)
        member = other.join_upload(_PATH, upload.ticket(), part_bytes=size)
        told = member.copy_part(
            0, 0, _source(other), start, size, source_bytes=len(data), last=False
        )
        assert told in {None, crc32c(data[start : start + size])}
        upload.write_part(1, size, [memoryview(b"end")], last=True)
        upload.complete(size + 3, receipts=_travelled(member.receipts()))
        assert other.read(_PATH) == data[start : start + size] + b"end"
        assert other.read("saves/ab/source") == data

    def test_a_copy_of_what_is_not_there_fails(self, store: Store, other: Store) -> None:
        """A missing source is "not-found"; one of another length or too short is damage."""
        size = _copied_size(store)
        upload = store.start_shared_upload(_PATH, part_bytes=size)
        source = _source(other)
        assert kind_of(lambda: upload.copy_part(0, 0, source, 0, size, last=True)) == "not-found"
        other.write("saves/ab/source", pattern(size))
        for start, source_bytes in [(0, size + 1), (1, size), (1, None), (size, None)]:
            with pytest.raises(IntegrityError):
                upload.copy_part(0, 0, source, start, size, source_bytes=source_bytes, last=True)
        upload.abort()
        assert paths_of(other) == ["saves/ab/source"]
        assert other.abort_uploads("") == 0

    def test_copies_are_refused_where_the_storage_has_none(
        self, store: Store, other: Store
    ) -> None:
        """Without the capability no store can be copied from, and nothing is sent."""
        size = _size(store)
        if store.capabilities.copy_min_bytes is not None:
            pytest.skip("the store declares that it copies parts")
        assert not store.can_copy_from(other)
        upload = store.start_shared_upload(_PATH, part_bytes=size)
        source = CopySource(scope="", address="saves/ab/source", path="saves/ab/source")
        with pytest.raises(UnsupportedByStoreError):
            upload.copy_part(0, 0, source, 0, size, last=True)
        upload.abort()
        assert paths_of(store) == []


def _size(store: Store) -> int:
    """Return the size (bytes) of a part, or skip where nothing can be shared."""
    if not store.capabilities.tokens_travel:
        pytest.skip("the store declares no shared uploads")
    return fill(store.capabilities)


def _copied_size(store: Store) -> int:
    """Return the size (bytes) of a copied part, or skip where nothing can be copied."""
    if store.capabilities.copy_min_bytes is None:
        pytest.skip("the store declares that it copies no parts")
    return max(store.capabilities.copy_min_bytes, fill(store.capabilities))


def _source(store: Store) -> CopySource:
    source = store.copy_source("saves/ab/source")
    assert source is not None
    return source


def _send(upload: SharedUpload, parts: Sequence[bytes], numbers: Sequence[int]) -> None:
    """Write some of the parts of an object, each as two buffers."""
    starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
    for i in numbers:
        view = memoryview(parts[i])
        middle = len(view) // 3
        upload.write_part(i, starts[i], [view[:middle], view[middle:]], last=i == len(parts) - 1)


def _travelled(receipts: Sequence[PartReceipt]) -> list[PartReceipt]:
    """Return receipts as they arrive in another process, by way of JSON."""
    text = json.dumps([receipt.to_json() for receipt in receipts])
    return [PartReceipt.from_json(values) for values in json.loads(text)]


def _zombie(store: Store, path: str, ticket: str, size_bytes: int) -> None:
    """Do what a rank does that does not know that all is over."""
    with contextlib.suppress(CheckpointError):
        late = store.join_upload(path, ticket, part_bytes=size_bytes)
        _send(late, [pattern(size_bytes, 9)], [0])
        late.receipts()
