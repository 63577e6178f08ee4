"""The facts of the store suite about uploads."""

from __future__ import annotations

import pytest

from ckpt_storage.errors import CheckpointError, StorageError
from ckpt_storage.store.store import Store

from ._suite_tools import fill, kind_of, paths_of, pattern, send, together

__all__ = ["UploadFacts"]


class UploadFacts:
    """Facts about `start_upload` and what follows; the fixtures are `StoreSuite`'s."""

    @pytest.mark.parametrize("tail_bytes", [0, 1, 1000])
    def test_an_upload_of_several_parts_arrives_whole(
        self, store: Store, other: Store, tail_bytes: int
    ) -> None:
        """Parts are put together by their place, whatever the order they were sent in."""
        size = fill(store.capabilities)
        parts = [pattern(size, 1), pattern(size, 2)]
        parts += [pattern(tail_bytes, 3)] if tail_bytes else []
        upload = store.start_upload("saves/a/x", part_bytes=size)
        order = range(len(parts))
        send(upload, parts, order=reversed(order) if store.capabilities.parallel_parts else order)
        upload.complete(2 * size + tail_bytes)
        assert other.read("saves/a/x") == b"".join(parts)
        assert paths_of(other) == ["saves/a/x"]

    @pytest.mark.parametrize("size_bytes", [0, 1, 1000])
    def test_an_upload_of_one_part_arrives_whole(
        self, store: Store, other: Store, size_bytes: int
    ) -> None:
        """A single part may be smaller than any minimum, and even empty."""
        data = pattern(size_bytes)
        upload = store.start_upload("saves/a/x", part_bytes=fill(store.capabilities))
        send(upload, [data])
        upload.complete(size_bytes)
        assert other.read("saves/a/x") == data

    def test_an_upload_is_invisible_until_complete(self, store: Store, other: Store) -> None:
        """Before `complete` no client sees the name, by reading or by listing."""
        size = fill(store.capabilities)
        parts = [pattern(size, 1), pattern(10, 2)]
        upload = store.start_upload("saves/a/x", part_bytes=size)
        send(upload, parts)
        assert kind_of(lambda: other.stat("saves/a/x")) == "not-found"
        assert paths_of(other) == []
        upload.complete(size + 10)
        assert paths_of(other) == ["saves/a/x"]

    def test_complete_is_idempotent(self, store: Store, other: Store) -> None:
        """Completing again, as after a lost answer, is no error."""
        size = fill(store.capabilities)
        parts = [pattern(size, 1), pattern(10, 2)]
        upload = store.start_upload("saves/a/x", part_bytes=size)
        send(upload, parts)
        upload.complete(size + 10)
        upload.complete(size + 10)
        assert other.read("saves/a/x") == b"".join(parts)

    def test_a_part_may_be_sent_again(self, store: Store, other: Store) -> None:
        """The same part sent twice counts once, where the upload can take it twice."""
        size = fill(store.capabilities)
        parts = [pattern(size, 1), pattern(10, 2)]
        upload = store.start_upload("saves/a/x", part_bytes=size)
        if not getattr(upload, "repeatable", True):
            upload.abort()
            pytest.skip("the upload declares that its parts cannot be sent again")
        send(upload, parts, order=[0, 0, 1] if not store.capabilities.parallel_parts else [1, 0, 0])
        upload.complete(size + 10)
        assert other.read("saves/a/x") == b"".join(parts)

    def test_buffers_may_be_used_again_after_write_part(self, store: Store, other: Store) -> None:
        """What is written into a buffer after the return does not reach the object."""
        size = fill(store.capabilities)
        buffer = bytearray(pattern(size, 1))
        upload = store.start_upload("saves/a/x", part_bytes=size)
        upload.write_part(0, 0, [memoryview(buffer)], last=False)
        buffer[:] = pattern(size, 2)
        upload.write_part(1, size, [memoryview(buffer)], last=True)
        buffer[:] = bytes(size)
        upload.complete(2 * size)
        assert other.read("saves/a/x") == pattern(size, 1) + pattern(size, 2)

    @pytest.mark.parametrize("wrong_by", [-1, 1])
    def test_an_upload_of_another_length_does_not_become_visible(
        self, store: Store, other: Store, wrong_by: int
    ) -> None:
        """`complete` with a total that was not sent fails, and nothing bears the name."""
        size = fill(store.capabilities)
        upload = store.start_upload("saves/a/x", part_bytes=size)
        send(upload, [pattern(size, 1), pattern(10, 2)])
        with pytest.raises(StorageError):
            upload.complete(size + 10 + wrong_by)
        upload.abort()
        assert paths_of(other) == []
        assert other.abort_uploads("") == 0

    def test_abort_leaves_nothing(self, store: Store, other: Store) -> None:
        """After `abort`, any number of times, there is no object and no open upload."""
        size = fill(store.capabilities)
        for parts in ([], [pattern(size)], [pattern(size), pattern(10)]):
            upload = store.start_upload("saves/a/x", part_bytes=size)
            send(upload, parts)
            upload.abort()
            upload.abort()
            assert paths_of(other) == []
            assert other.abort_uploads("") == 0

    def test_uploads_of_a_dead_process_can_be_aborted(self, store: Store, other: Store) -> None:
        """A second client finds what is open below a folder, and aborts only that."""
        size = fill(store.capabilities)
        uploads = [store.start_upload(f"saves/{name}/x", part_bytes=size) for name in ("a", "ab")]
        for upload in uploads:
            send(upload, [pattern(size, 1), pattern(10, 2)])
        if not store.capabilities.lists_uploads:
            assert other.abort_uploads("saves/a") == 0
            for upload in uploads:
                upload.abort()
            return
        assert other.abort_uploads("saves/a") == 1
        with pytest.raises(CheckpointError):
            uploads[0].complete(size + 10)
        uploads[0].abort()
        uploads[1].complete(size + 10)
        assert paths_of(other) == ["saves/ab/x"]

    def test_only_the_uploads_that_are_meant_are_aborted(self, store: Store, other: Store) -> None:
        """A filter gets each open upload's whole path, and what it does not mean goes on."""
        size = fill(store.capabilities)
        names = ["saves/a/mine", "saves/a/theirs", "saves/a/b/mine", "mine"]
        store.prepare(["saves/a/b"])
        uploads = {name: store.start_upload(name, part_bytes=size) for name in names}
        for upload in uploads.values():
            send(upload, [pattern(size, 1), pattern(10, 2)])
        asked: list[str] = []

        def is_meant(path: str) -> bool:
            asked.append(path)
            return path == names[0]

        count = other.abort_uploads("saves/a", only=is_meant)
        # Some storages show temporary files without promising that they show all.
        assert asked or not store.capabilities.lists_uploads
        assert count == bool(asked)
        if asked:
            assert sorted(asked) == sorted(names[:3])
            with pytest.raises(CheckpointError):
                uploads.pop(names[0]).complete(size + 10)
        for upload in uploads.values():
            upload.abort()
        assert other.abort_uploads("") == 0

    def test_uploads_run_in_parallel(self, store: Store, other: Store) -> None:
        """Eight threads that upload eight objects at once do not disturb each other."""
        size = fill(store.capabilities)

        def upload_one(i: int) -> None:
            upload = (store, other)[i % 2].start_upload(f"saves/a/{i}", part_bytes=size)
            send(upload, [pattern(size, 2 * i), pattern(1000 + i, 2 * i + 1)])
            upload.complete(size + 1000 + i)

        outcomes = together([lambda i=i: upload_one(i) for i in range(8)])  # type: ignore[misc]
        assert outcomes == [None] * 8
        for i in range(8):
            assert store.read(f"saves/a/{i}") == pattern(size, 2 * i) + pattern(1000 + i, 2 * i + 1)

    def test_parts_of_one_upload_run_in_parallel(self, store: Store, other: Store) -> None:
        """Parts sent by several threads at once arrive each in its place."""
        if not store.capabilities.parallel_parts:
            pytest.skip("the store declares that parts come one after the other")
        size = fill(store.capabilities)
        parts = [pattern(size, i) for i in range(4)] + [pattern(17, 4)]
        upload = store.start_upload("saves/a/x", part_bytes=size)
        outcomes = together(
            [lambda i=i: send(upload, parts, order=[i]) for i in range(len(parts))]  # type: ignore[misc]
        )
        assert outcomes == [None] * 5
        upload.complete(4 * size + 17)
        assert other.read("saves/a/x") == b"".join(parts)
