"""The tests that every store and every wrapper must pass: what `Store` promises, as facts.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self): ...    # a fresh root
        @pytest.fixture
        def other(self, store): ...    # a second, independent client of the same root

A capability that a store does not declare is not tested, but its refusal is. The suite
writes a few tens of MiB where the storage wants large parts.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt_storage.errors import (
    CheckpointError,
    IntegrityError,
    InvalidInputError,
    UnsupportedByStoreError,
)
from ckpt_storage.options import DEFAULT_BLOCK_BYTES
from ckpt_storage.store.base import Store

from ._old_upload_facts import UploadFacts
from ._shared_facts import SharedUploadFacts
from ._suite_tools import WAIT_S, fill, kind_of, paths_of, pattern, send, together

__all__ = ["StoreSuite"]

_FOLDERS = ("commits", "saves", "saves/a", "saves/a/ranks", "saves/ab", "hf")


class StoreSuite(UploadFacts, SharedUploadFacts):
    """Facts about a store; derive, override `store` and `other`, and pytest checks them.

    `odd_names` may be shortened for a storage that forbids a character; say so there.
    """

    odd_names: Sequence[str] = (
        "a b",
        "ü 漢字",
        "100%25",
        "a+b",
        "a#b",
        "a&b=c",
        "[x]*",
        "{y}",
        "~z",
        "d'e\"f",
    )

    @pytest.fixture
    def store(self) -> Store:
        """Override: a client of a fresh root."""
        raise NotImplementedError

    @pytest.fixture
    def other(self) -> Store:
        """Override: a second, independent client of the root of `store`."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _prepared(self, store: Store) -> None:
        store.prepare(_FOLDERS)

    def test_prepare_is_idempotent_and_makes_no_object(self, store: Store, other: Store) -> None:
        """Preparing again changes nothing, and folders are no objects."""
        store.write("saves/a/x", b"x")
        other.prepare(_FOLDERS)
        assert paths_of(store) == ["saves/a/x"]

    def test_url_and_capabilities_are_the_same_for_every_client(
        self, store: Store, other: Store
    ) -> None:
        """Two clients of a root agree on what it is called and on what it can do."""
        assert store.url
        assert store.url == other.url
        assert store.capabilities == other.capabilities

    @pytest.mark.parametrize(
        "size_bytes",
        [0, 1, DEFAULT_BLOCK_BYTES - 1, DEFAULT_BLOCK_BYTES, DEFAULT_BLOCK_BYTES + 1],
    )
    def test_write_then_read_gives_the_same_bytes(
        self, store: Store, other: Store, size_bytes: int
    ) -> None:
        """What one client wrote, another reads at once, whole and with its size."""
        data = pattern(size_bytes)
        store.write("saves/a/x", data)
        assert other.read("saves/a/x") == data
        assert other.read_version("saves/a/x").data == data
        assert other.stat("saves/a/x").size_bytes == size_bytes

    def test_write_is_idempotent(self, store: Store, other: Store) -> None:
        """Writing the same bytes to the same name again is no error."""
        store.write("saves/a/x", b"once")
        other.write("saves/a/x", b"once")
        assert store.read("saves/a/x") == b"once"
        assert paths_of(store) == ["saves/a/x"]

    @pytest.mark.parametrize("size_bytes", [0, 1, 5000])
    def test_a_read_takes_no_more_than_it_may(
        self, store: Store, other: Store, size_bytes: int
    ) -> None:
        """An object as long as allowed is read, a longer one is an error that names it."""
        data = pattern(size_bytes)
        store.write("saves/a/x", data)
        for most_bytes in (size_bytes, size_bytes + 1, 1 << 40):
            assert other.read("saves/a/x", most_bytes=most_bytes) == data
            assert other.read_version("saves/a/x", most_bytes=most_bytes).data == data
        if not size_bytes:
            return
        for read in (other.read, other.read_version):
            with pytest.raises(IntegrityError) as caught:
                read("saves/a/x", most_bytes=size_bytes - 1)
            assert "saves/a/x" in str(caught.value)
            assert caught.value.path == "saves/a/x"
            assert caught.value.offset == 0
        assert other.read("saves/a/x") == data
        assert kind_of(lambda: other.read("saves/a/y", most_bytes=1)) == "not-found"

    def test_absent_objects_are_not_found(self, store: Store) -> None:
        """Every read of a name that nothing bears raises kind "not-found"."""
        store.write("saves/a/x", b"x")
        for path in ("saves/a/y", "saves/nothing/y", "saves/a", "y"):
            assert kind_of(lambda path=path: store.read(path)) == "not-found"  # type: ignore[misc]
            assert kind_of(lambda path=path: store.read_version(path)) == "not-found"  # type: ignore[misc]
            assert kind_of(lambda path=path: store.stat(path)) == "not-found"  # type: ignore[misc]
            target = memoryview(bytearray(1))
            assert (
                kind_of(lambda path=path, target=target: store.read_into(path, 0, target))  # type: ignore[misc]
                == "not-found"
            )

    def test_an_object_that_appears_after_a_miss_is_found(self, store: Store, other: Store) -> None:
        """No client remembers that a name was absent."""
        assert kind_of(lambda: store.read("commits/1")) == "not-found"
        assert kind_of(lambda: store.stat("commits/1")) == "not-found"
        assert store.list("commits") == []
        other.write("commits/1", b"now")
        assert store.read("commits/1") == b"now"
        assert store.stat("commits/1").size_bytes == 3
        assert paths_of(store, "commits") == ["commits/1"]

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 1000), (999, 1000), (1, 999), (7, 7)])
    def test_read_into_fills_exactly_the_range(self, store: Store, start: int, stop: int) -> None:
        """The bytes of the range land in the target, and no byte beside it changes."""
        data = pattern(1000)
        store.write("saves/a/x", data)
        buffer = bytearray(b"?" * (stop - start + 2))
        store.read_into("saves/a/x", start, memoryview(buffer)[1:-1], size_bytes=1000)
        assert bytes(buffer) == b"?" + data[start:stop] + b"?"

    @pytest.mark.parametrize(("start", "length"), [(0, 1001), (999, 2), (1000, 1), (5000, 10)])
    def test_read_into_beyond_the_end_is_an_integrity_error(
        self, store: Store, start: int, length: int
    ) -> None:
        """A range that ends after the object does is damage, and the error names the object."""
        store.write("saves/a/x", pattern(1000))
        with pytest.raises(IntegrityError) as caught:
            store.read_into("saves/a/x", start, memoryview(bytearray(length)))
        assert "saves/a/x" in str(caught.value)
        assert caught.value.path is not None
        assert caught.value.offset is not None

    @pytest.mark.parametrize("size_bytes", [999, 1001])
    def test_read_into_notices_another_length(self, store: Store, size_bytes: int) -> None:
        """A store that learns the length while reading compares it with the expected one."""
        store.write("saves/a/x", pattern(1000))
        target = memoryview(bytearray(10))
        if store.capabilities.kind == "generic":
            with pytest.raises(IntegrityError):
                store.read_into("saves/a/x", 995, target, size_bytes=1005)
            return
        with pytest.raises(IntegrityError):
            store.read_into("saves/a/x", 0, target, size_bytes=size_bytes)

    # adlfs hands a small file over in one piece; aiohttp thinks that unwise.
    @pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
    def test_bytes_that_are_reported_have_arrived(self, store: Store) -> None:
        """An attempt to read begins with 0, if it is told of at all, and what is told is there."""
        data = pattern(3 << 20)
        store.write("saves/a/x", data)
        target = bytearray(len(data) - 7)
        told: list[int] = []

        def arrived(count: int) -> None:
            told.append(count)
            assert target[:count] == data[7 : 7 + count]

        store.read_into("saves/a/x", 7, memoryview(target), size_bytes=len(data), arrived=arrived)
        assert target == data[7:]
        assert told[:1] in ([], [0])
        # None of them is about an attempt before the last: this storage had no reason for more.
        assert told == sorted(told)
        assert all(count <= len(target) for count in told)

    # adlfs hands a small file over in one piece; aiohttp thinks that unwise.
    @pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
    def test_what_the_reports_of_a_read_raise_ends_it(self, store: Store) -> None:
        """Bytes that prove wrong while they arrive are not read to the end, nor again."""
        store.write("saves/a/x", pattern(3 << 20))
        told: list[int] = []

        def arrived(count: int) -> None:
            told.append(count)
            if count:
                raise IntegrityError("wrong", path="saves/a/x", offset=0)

        def read() -> None:
            target = memoryview(bytearray(3 << 20))
            store.read_into("saves/a/x", 0, target, arrived=arrived)

        try:
            read()
        except IntegrityError:
            assert sum(count > 0 for count in told) == 1
        else:
            assert not any(told)

    def test_create_is_refused_where_something_is(self, store: Store, other: Store) -> None:
        """The first create stays as it is and the second is told "exists"."""
        if not store.capabilities.exclusive_create:
            with pytest.raises(UnsupportedByStoreError):
                store.create("commits/1", b"one")
            assert paths_of(store) == []
            return
        store.create("commits/1", b"one")
        assert kind_of(lambda: other.create("commits/1", b"two")) == "exists"
        assert kind_of(lambda: store.create("commits/1", b"one")) == "exists"
        assert other.read("commits/1") == b"one"
        store.delete(["commits/1"])
        other.create("commits/1", b"two")
        assert store.read("commits/1") == b"two"

    def test_a_race_of_creates_has_one_winner(self, store: Store, other: Store) -> None:
        """Of eight creates of one name exactly one succeeds, and its content is what stays."""
        if not store.capabilities.exclusive_create:
            with pytest.raises(UnsupportedByStoreError):
                store.create("commits/1", b"one")
            return
        contents = [pattern(5000 + i, seed=i) for i in range(8)]
        outcomes = together(
            [
                lambda i=i: (store, other)[i % 2].create("commits/1", contents[i])  # type: ignore[misc]
                for i in range(8)
            ]
        )
        winners = [i for i, outcome in enumerate(outcomes) if outcome is None]
        losses = [outcome for outcome in outcomes if outcome is not None]
        assert len(winners) == 1
        assert {getattr(loss, "kind", None) for loss in losses} == {"exists"}
        assert store.read("commits/1") == contents[winners[0]]
        assert paths_of(store, "commits") == ["commits/1"]

    def test_replace_puts_new_content_in_place_of_old(self, store: Store, other: Store) -> None:
        """A replace needs nothing to be there, and is seen by others at once."""
        store.replace(".metadata", b"old")
        assert other.read(".metadata") == b"old"
        store.replace(".metadata", b"brand new")
        assert other.read(".metadata") == b"brand new"
        assert other.stat(".metadata").size_bytes == 9

    def test_a_reader_during_replaces_sees_old_or_new(self, store: Store, other: Store) -> None:
        """While an object is replaced many times, every read gives one of its whole contents."""
        if not store.capabilities.atomic_replace:
            pytest.skip("the store declares that its replace is not atomic")
        contents = [pattern(20_000 + i, seed=i) for i in range(12)]
        store.replace(".metadata", contents[0])
        done = threading.Event()

        def replace_all() -> None:
            try:
                for content in contents:
                    store.replace(".metadata", content)
            finally:
                done.set()

        def read_all() -> None:
            while not done.is_set():
                assert other.read(".metadata") in contents

        with ThreadPoolExecutor(2) as threads:
            jobs = [threads.submit(replace_all), threads.submit(read_all)]
            for job in jobs:
                job.result(WAIT_S)
        assert other.read(".metadata") == contents[-1]

    def test_a_conditional_replace_needs_the_version_it_names(
        self, store: Store, other: Store
    ) -> None:
        """With `if_match` only the version that was read is replaced; the token then changes."""
        store.replace(".metadata", b"one")
        seen = other.read_version(".metadata")
        if not store.capabilities.if_match:
            with pytest.raises(UnsupportedByStoreError):
                store.replace(".metadata", b"two", if_match=seen.version or "token")
            assert other.read(".metadata") == b"one"
            return
        assert seen.version
        store.replace(".metadata", b"two", if_match=seen.version)
        assert (
            kind_of(lambda: other.replace(".metadata", b"three", if_match=seen.version))
            == "precondition"
        )
        assert store.read(".metadata") == b"two"
        fresh = other.read_version(".metadata")
        assert fresh.version != seen.version
        store.delete([".metadata"])
        kind = kind_of(lambda: other.replace(".metadata", b"four", if_match=fresh.version))
        assert kind in {"precondition", "not-found"}

    def test_a_listing_is_fresh(self, store: Store, other: Store) -> None:
        """A client that listed before sees at once what others wrote, replaced and deleted."""
        assert paths_of(store) == []
        other.write("saves/a/x", b"12345")
        found = store.list("")
        assert [(entry.path, entry.size_bytes) for entry in found] == [("saves/a/x", 5)]
        other.replace("saves/a/x", b"1234567")
        assert [entry.size_bytes for entry in store.list("saves/a")] == [7]
        assert store.stat("saves/a/x").size_bytes == 7
        other.delete(["saves/a/x"])
        assert paths_of(store) == []
        assert kind_of(lambda: store.stat("saves/a/x")) == "not-found"

    def test_a_listing_stays_within_its_folder(self, store: Store) -> None:
        """A folder whose name begins with another's is not part of it."""
        for path in (".metadata", "saves/a/x", "saves/a/ranks/0", "saves/ab/y", "saves/b"):
            store.write(path, path.encode())
        assert paths_of(store, "saves/a") == ["saves/a/ranks/0", "saves/a/x"]
        assert len(paths_of(store)) == 5
        assert store.list("nothing") == []
        assert store.list("saves/a/x") == []

    def test_a_flat_listing_shows_children_and_folders(self, store: Store) -> None:
        """Not recursive: direct children, and folders with a slash and size 0."""
        for path in ("saves/a/x", "saves/a/ranks/0", "saves/a/ranks/1"):
            store.write(path, path.encode())
        found = {entry.path: entry.size_bytes for entry in store.list("saves/a", recursive=False)}
        assert found == {"saves/a/ranks/": 0, "saves/a/x": 9}
        top = {entry.path for entry in store.list("", recursive=False)}
        # A file system also shows the folders that hold nothing.
        assert {"saves/"} <= top <= {"saves/", "commits/", "hf/"}

    def test_odd_names_are_kept_to_the_letter(self, store: Store, other: Store) -> None:
        """No operation quotes, unquotes or expands a name."""
        names = [f"hf/{name}" for name in self.odd_names]
        for name in names:
            store.write(name, name.encode())
        assert paths_of(other) == sorted(names)
        for name in names:
            data = name.encode()
            assert other.read(name) == data
            assert other.stat(name).size_bytes == len(data)
            target = bytearray(3)
            other.read_into(name, 1, memoryview(target), size_bytes=len(data))
            assert bytes(target) == data[1:4]
        upload = store.start_upload(names[0] + " up", part_bytes=fill(store.capabilities))
        send(upload, [b"abc"])
        upload.complete(3)
        assert other.read(names[0] + " up") == b"abc"
        other.delete(names)
        assert paths_of(store) == [names[0] + " up"]

    def test_delete_is_idempotent(self, store: Store, other: Store) -> None:
        """Deleting what is not there is no error, and nothing else is touched."""
        for name in ("x", "y", "z"):
            store.write(f"saves/a/{name}", b"data")
        other.delete(["saves/a/x", "saves/a/nothing", "saves/nothing/x", "saves/a/z"])
        other.delete(["saves/a/x"])
        other.delete([])
        assert paths_of(store) == ["saves/a/y"]

    def test_delete_folder_removes_all_below_it(self, store: Store, other: Store) -> None:
        """A folder goes with all it holds; one whose name merely begins alike stays."""
        for path in ("saves/a/x", "saves/a/ranks/0", "saves/ab/y"):
            store.write(path, b"data")
        other.delete_folder("saves/a")
        assert paths_of(store) == ["saves/ab/y"]
        assert kind_of(lambda: store.read("saves/a/x")) == "not-found"
        other.delete_folder("saves/a")
        other.delete_folder("nothing")
        assert paths_of(store) == ["saves/ab/y"]

    def test_delete_folder_refuses_the_root(self, store: Store) -> None:
        """An empty path, most likely a mistake, deletes nothing."""
        store.write("saves/a/x", b"data")
        with pytest.raises(InvalidInputError):
            store.delete_folder("")
        assert paths_of(store) == ["saves/a/x"]

    def test_the_clock_is_near_ours_and_leaves_nothing(self, store: Store, other: Store) -> None:
        """The storage's clock agrees within a minute on one machine; the probe is gone."""
        before_s = time.time()
        now_s = store.now_s(".probe")
        assert before_s - 60 < now_s < time.time() + 60
        assert paths_of(other) == []
        store.write("saves/a/x", b"data")
        modified_s = store.stat("saves/a/x").modified_s
        assert modified_s is None or abs(modified_s - now_s) < 60

    def test_errors_survive_pickling(self, store: Store) -> None:
        """DCP sends errors between ranks; kind, message and path arrive."""
        store.write("saves/a/x", b"data")
        errors: list[CheckpointError] = []
        for call in (
            lambda: store.read("saves/a/y"),
            lambda: store.read_into("saves/a/x", 0, memoryview(bytearray(9))),
            lambda: store.delete_folder(""),
        ):
            with pytest.raises(CheckpointError) as caught:
                call()
            errors.append(caught.value)
        for error in errors:
            copy = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
            assert type(copy) is type(error)
            assert str(copy) == str(error)
            assert copy.__dict__ == error.__dict__

    def test_close_is_idempotent(self, store: Store, other: Store) -> None:
        """A store closed twice is no error, and the other client goes on."""
        store.write("saves/a/x", b"data")
        store.close()
        store.close()
        assert other.read("saves/a/x") == b"data"
