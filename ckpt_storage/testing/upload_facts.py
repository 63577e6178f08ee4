"""Facts of the store suite about uploads of one client and of several, and helpers of the suite."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
from crc32c import crc32c

from ckpt_storage.errors import (
    CheckpointError,
    IntegrityError,
    StorageError,
    UnsupportedByStoreError,
)
from ckpt_storage.store.backend import Backend, Capabilities, CopySource, Part, PartCopy
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload

__all__ = ["UploadFacts", "fill", "kind_of", "paths_of", "pattern", "send", "together"]

T = TypeVar("T")

WAIT_S = 60.0
"""Time limit for another thread; reached only when something hangs."""

_PATH = "saves/a/x"
_SOURCE = "saves/ab/source"


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Return bytes without repetitions, so that shifted or swapped parts are detected."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311  # test data


def fill(known: Capabilities) -> int:
    """Return the minimum size of a part, but at least 64 KiB."""
    step = max(known.part_multiple_bytes, known.part_alignment_bytes)
    return -(-max(known.min_part_bytes, 64 * 1024) // step) * step


def send(upload: Upload, parts: Sequence[bytes], order: Iterable[int] | None = None) -> None:
    """Write parts to an upload, in `order` or in sequence, from two buffers that are reused."""
    starts = [sum(map(len, parts[:i])) for i in range(len(parts))]
    for i in range(len(parts)) if order is None else order:
        buffer = bytearray(parts[i])
        view, middle = memoryview(buffer), len(buffer) // 3
        upload.write_part(i, starts[i], [view[:middle], view[middle:]], last=i == len(parts) - 1)
        buffer[:] = bytes(len(buffer))


def kind_of(call: Callable[..., object], *args: object, **more: object) -> str:
    """Return the kind of the `StorageError` that a call raises."""
    with pytest.raises(StorageError) as caught:
        call(*args, **more)
    return caught.value.kind


def paths_of(store: Store, folder: str = "") -> list[str]:
    """Return the sorted paths of all objects below a folder."""
    return sorted(entry.path for entry in store.list(folder))


def together(jobs: Sequence[Callable[[], T]]) -> list[T | CheckpointError]:
    """Run jobs in threads that start at the same time; return the result or error of each."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], T]) -> T | CheckpointError:
        barrier.wait(WAIT_S)
        try:
            return job()
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as threads:
        return list(threads.map(run, jobs))


def _travelled(parts: Sequence[Part]) -> list[Part]:
    """Return receipts as another process receives them, by JSON."""
    payload = json.dumps([part.to_json() for part in parts])
    return [Part.from_json(receipt) for receipt in json.loads(payload)]


class UploadFacts:
    """Facts about `begin_upload` and what follows; the fixtures are `StoreSuite`'s.

    refuses_copies: for a mount without hard links, where `copy_object` is unsupported.
    """

    refuses_copies: bool = False

    @pytest.fixture
    def size(self, backend: Backend) -> int:
        """The size in bytes of the parts."""
        return fill(backend.capabilities)

    @pytest.fixture
    def owner(self, store: Store) -> Upload:
        """An upload that other clients may join."""
        if not store.capabilities.tokens_travel:
            pytest.skip("the backend declares no tokens that travel")
        return store.upload(_PATH)

    @pytest.mark.parametrize("tail_bytes", [0, 1, 1000])
    def test_parts_arrive_whole(
        self, store: Store, second: Store, size: int, tail_bytes: int
    ) -> None:
        """Parts are joined by their numbers, whatever the order; none is visible before that."""
        parts = [pattern(size, 1), pattern(size, 2)]
        parts += [pattern(tail_bytes, 3)] if tail_bytes else []
        upload = store.upload(_PATH)
        order = range(len(parts))
        send(upload, parts, reversed(order) if store.capabilities.parallel_parts else order)
        assert kind_of(second.stat, _PATH) == "not-found"
        assert paths_of(second) == []
        for _ in range(2):
            upload.complete(2 * size + tail_bytes)
        assert second.get(_PATH).data == b"".join(parts)
        assert paths_of(second) == [_PATH]
        # A single part may be smaller than the minimum, even empty.
        alone = store.upload(_PATH)
        send(alone, [pattern(tail_bytes)])
        alone.complete(tail_bytes)
        assert second.get(_PATH).data == pattern(tail_bytes)
        assert second.abort_uploads("") == 0

    def test_a_part_may_be_sent_again(self, store: Store, second: Store, size: int) -> None:
        """A part sent twice counts once, or is refused for good; the old object is replaced."""
        second.put(_PATH, b"old")
        parts = [pattern(size, 1), pattern(10, 2)]
        upload = store.upload(_PATH)
        send(upload, parts, [0])
        (failure,) = together([partial(send, upload, parts, [0])])
        if isinstance(failure, StorageError):
            assert not failure.retryable
            upload.abort()
            upload = store.upload(_PATH)
            send(upload, parts, [0])
        send(upload, parts, [1])
        assert second.get(_PATH).data == b"old"
        upload.complete(size + 10)
        upload.abort()
        assert second.get(_PATH).data == b"".join(parts)
        assert second.abort_uploads("") == 0

    def test_abort_leaves_nothing(self, store: Store, second: Store, size: int) -> None:
        """Whenever it is called, also after a wrong total, no object and no upload remain."""
        for parts in ([], [pattern(size)], [pattern(size), pattern(10)]):
            upload = store.upload(_PATH)
            send(upload, parts)
            if parts:
                for wrong_by in (-1, 1):
                    with pytest.raises(StorageError):
                        upload.complete(sum(map(len, parts)) + wrong_by)
            for _ in range(2):
                upload.abort()
            assert (paths_of(second), second.abort_uploads("")) == ([], 0)

    def test_others_uploads_stay(self, store: Store, second: Store, size: int) -> None:
        """A second client aborts the open uploads below a folder; a filter gets each whole path."""
        names = ["saves/a/mine", "saves/a/theirs", "saves/a/b/mine", "saves/ab/mine"]
        uploads = {name: store.upload(name) for name in names}
        for upload in uploads.values():
            send(upload, [pattern(size, 1), pattern(10, 2)])
        asked: set[str] = set()

        def is_meant(path: str) -> bool:
            asked.add(path)
            return path == names[0]

        # Some storages show temporary files without promising that they show all.
        assert second.abort_uploads("saves/a", only=is_meant) == bool(asked)
        assert asked or not store.capabilities.lists_uploads
        if asked:
            assert asked == set(names[:3])
            with pytest.raises(CheckpointError):
                uploads[names[0]].complete(size + 10)
        uploads[names[3]].complete(size + 10)
        for upload in uploads.values():
            upload.abort()
        assert second.abort_uploads("") == 0
        assert paths_of(second) == [names[3]]

    def test_uploads_run_in_parallel(self, store: Store, second: Store, size: int) -> None:
        """Uploads of four threads are independent, and so are parts if the backend allows that."""

        def upload_one(i: int) -> bytes:
            parts = [pattern(size, 3 * i), pattern(size, 3 * i + 1), pattern(9 + i)]
            upload = (store, second)[i % 2].upload(f"saves/a/{i}")
            jobs = [partial(send, upload, parts, [number]) for number in range(3)]
            is_parallel = store.capabilities.parallel_parts
            assert (together(jobs) if is_parallel else [job() for job in jobs]) == [None] * 3
            upload.complete(2 * size + 9 + i)
            return b"".join(parts)

        for i, whole in enumerate(together([partial(upload_one, i) for i in range(4)])):
            assert store.get(f"saves/a/{i}").data == whole

    def test_what_is_not_declared_fails(self, store: Store, second: Store, size: int) -> None:
        """`join` raises without `tokens_travel`, and copies without `copy_min_bytes`."""
        if not store.capabilities.tokens_travel:
            for call in (store.upload(_PATH).token, partial(store.join, _PATH, "{}")):
                with pytest.raises(UnsupportedByStoreError):
                    call()
        if store.capabilities.copy_min_bytes is None:
            assert not store.can_copy_from(second)
            upload = store.upload(_PATH)
            with pytest.raises(UnsupportedByStoreError):
                _copy(upload, second, 0, size)
            upload.abort()
        assert paths_of(store) == []

    def test_members_write_one_object(
        self, owner: Upload, store: Store, second: Store, size: int
    ) -> None:
        """The object has the parts of the owner and of members."""
        ends = [*(pattern(size, i) for i in range(4)), pattern(17, 4)]
        token = owner.token()

        def write(i: int) -> list[Part]:
            member = (store, second)[i % 2].join(_PATH, token)
            part = partial(member.write_part, i, i * size, [memoryview(ends[i])], last=i == 4)
            part()
            receipts = member.receipts()
            assert _travelled(receipts) == member.receipts()
            with pytest.raises(StorageError):
                part()
            return receipts

        outcomes = together([partial(write, i) for i in range(1, 5)])
        owner.write_part(0, 0, [memoryview(ends[0])], last=False)
        assert paths_of(second) == []
        receipts = [receipt for got in outcomes if isinstance(got, list) for receipt in got]
        owner.complete(4 * size + 17, receipts=_travelled([*receipts, *owner.receipts()]))
        assert second.get(_PATH).data == b"".join(ends)
        assert second.abort_uploads("") == 0

    def test_a_receipt_that_is_missing_is_a_gap(
        self, owner: Upload, second: Store, size: int
    ) -> None:
        """A part without its receipt is a gap; a member aborts nothing."""
        parts = [pattern(size, 1), pattern(size, 2), b"end"]
        member = second.join(_PATH, owner.token())
        send(owner, parts, [0, 2])
        send(member, parts, [1])
        receipts = member.receipts()
        for upload in (member, owner):
            with pytest.raises(StorageError):
                upload.complete(2 * size + 3)
            upload.abort()
        assert (paths_of(second), second.abort_uploads(""), len(receipts)) == ([], 0, 1)

    @pytest.mark.parametrize("is_complete", [True, False])
    def test_who_joins_late_changes_nothing(
        self, owner: Upload, store: Store, second: Store, size: int, *, is_complete: bool
    ) -> None:
        """The token of an upload that ended creates and changes no object."""
        token = owner.token()
        send(owner, [pattern(size), b"end"])
        if is_complete:
            owner.complete(size + 3)
        owner.abort()
        with contextlib.suppress(CheckpointError):
            late = second.join(_PATH, token)
            send(late, [pattern(size, 9)])
            late.receipts()
        assert paths_of(store) == ([_PATH] if is_complete else [])
        assert not is_complete or store.get(_PATH).data == pattern(size) + b"end"

    def test_a_copied_part_holds_the_range(self, store: Store, second: Store, size: int) -> None:
        """The storage copies exactly the range, and a checksum in its response is right.

        A missing source is "not-found"; a source of another length, or too short, is damage.
        """
        least_bytes = store.capabilities.copy_min_bytes
        if least_bytes is None:
            pytest.skip("the backend declares no copies")
        size = max(least_bytes, size)
        for start, cut in ((0, 0), (7, 5)):
            data = pattern(start + size + cut, 1)
            second.put(_SOURCE, data)
            assert store.can_copy_from(second)
            upload = store.upload(_PATH)
            checksum = _copy(upload, second, start, size, source_bytes=len(data))
            assert checksum in {None, crc32c(data[start : start + size])}
            upload.write_part(1, size, [memoryview(b"end")], last=True)
            upload.complete(size + 3)
            assert second.get(_PATH).data == data[start : start + size] + b"end"
            assert second.get(_SOURCE).data == data
        second.delete([_SOURCE, _PATH])
        upload = store.upload(_PATH)
        assert kind_of(_copy, upload, second, 0, size) == "not-found"
        second.put(_SOURCE, pattern(size))
        for start, source_bytes in [(0, size + 1), (1, size), (1, None), (size, None)]:
            with pytest.raises(IntegrityError):
                _copy(upload, second, start, size, source_bytes=source_bytes)
        upload.abort()
        assert (paths_of(second), second.abort_uploads("")) == ([_SOURCE], 0)

    def test_a_copied_object_is_equal(self, store: Store, second: Store, size: int) -> None:
        """A repeated copy is the same; a checksum in the response is right; the source stays.

        A missing source is "not-found".
        """
        if not store.capabilities.copies_objects:
            pytest.skip("the backend copies no objects")
        data = pattern(size)
        second.put(_SOURCE, data)
        assert store.can_copy_objects_of(second)
        source = second.copy_source(_SOURCE)
        assert source is not None
        if self.refuses_copies:
            assert kind_of(store.copy_object, _PATH, source, size_bytes=size) == "unsupported"
            assert kind_of(store.stat, _PATH) == "not-found"
            return
        for _ in range(2):
            checksum = store.copy_object(_PATH, source, size_bytes=size)
            assert checksum in {None, crc32c(data)}
            assert (second.get(_PATH).data, second.get(_SOURCE).data) == (data, data)
        second.delete([_SOURCE])
        assert store.get(_PATH).data == data
        assert kind_of(store.copy_object, _PATH, source, size_bytes=size) == "not-found"


def _copy(upload: Upload, store: Store, start: int, length: int, **more: Any) -> int | None:  # noqa: ANN401  # fields
    """Copy a range of `_SOURCE` to the first part of an upload."""
    source = store.copy_source(_SOURCE) or CopySource(scope="", address="", path="")
    copy = PartCopy(number=0, offset=0, source=source, start=start, length=length, **more)
    return upload.copy_part(copy)
