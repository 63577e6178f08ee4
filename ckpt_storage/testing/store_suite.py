"""The tests that every backend must pass: the contract of `Backend`, tested through `Store`.

    class TestMine(StoreSuite):
        @pytest.fixture
        def backend(self): ...    # a fresh root
        @pytest.fixture
        def other(self, backend): ...    # a second, independent client of the same root

Override `raw`, too, if you have another client of the storage. Of a capability that a backend does
not declare, only the refusal is tested. The suite writes a few tens of MiB if the storage needs
large parts. It needs pytest and Hypothesis. The backends of this package pass the same suite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import pytest

from ckpt_storage.errors import IntegrityError, InvalidInputError, UnsupportedByStoreError
from ckpt_storage.options import DEFAULT_BLOCK_BYTES, RetryPolicy
from ckpt_storage.store.backend import DELETE_COUNT, Backend, Range, ShortReadError
from ckpt_storage.store.store import Store

from .fault_facts import FaultFacts
from .store_machine import check_sequences
from .upload_facts import WAIT_S, UploadFacts, kind_of, paths_of, pattern, send, together

__all__ = ["RawWrite", "StoreSuite"]

RawWrite: TypeAlias = Callable[[str, bytes], None]
"""Writes an object at a path below the root, with another client than those under test."""

_FOLDERS = ("commits", "saves", "saves/a", "saves/a/ranks", "saves/a/b", "saves/ab", "hf")
_ONCE = RetryPolicy(attempt_count=1)


class StoreSuite(UploadFacts, FaultFacts):
    """Facts about a backend; derive, override `backend` and `other`, and pytest checks them.

    odd_names: may be shortened for a storage that forbids a character, with a comment.
    many: names in a folder, more than a page of a listing and than a request to delete; fewer if
        the storage has no pages and is slow.
    sequence_count: random sequences of calls that are compared with a dict.
    """

    odd_names: Sequence[str] = (
        *("a b", "ü 漢字", "100%25", "a+b", "a#b", "a&b=c", "[x]*", "{y}", "~z", "d'e\"f"),
    )
    many: int = DELETE_COUNT + 50
    sequence_count: int = 10

    @pytest.fixture
    def backend(self) -> Backend:
        """Override: a client of a fresh root."""
        raise NotImplementedError

    @pytest.fixture
    def other(self) -> Backend:
        """Override: a second, independent client of the root of `backend`."""
        raise NotImplementedError

    @pytest.fixture
    def raw(self) -> RawWrite | None:
        """Override: writes an object below the root by another client; None: there is none."""
        return None

    @pytest.fixture
    def store(self, backend: Backend) -> Iterator[Store]:
        """The facade over the first client, without retries; its folders exist."""
        opened = Store(backend, url="suite://root", policy=_ONCE)
        opened.make_folders(_FOLDERS)
        yield opened
        opened.close()

    @pytest.fixture
    def second(self, other: Backend) -> Iterator[Store]:
        """The facade over the second client."""
        opened = Store(other, url="suite://root", policy=_ONCE)
        yield opened
        opened.close()

    @pytest.mark.parametrize("size_bytes", [0, 1, DEFAULT_BLOCK_BYTES, DEFAULT_BLOCK_BYTES + 1])
    def test_what_one_writes_another_reads(
        self, store: Store, second: Store, size_bytes: int
    ) -> None:
        """At once, whole, with its size, also when overwritten; never more than `max_bytes`."""
        data = pattern(size_bytes)
        for client in (store, second):
            client.put("saves/a/x", data)
            assert second.get("saves/a/x").data == data
        assert second.stat("saves/a/x").size_bytes == size_bytes
        for max_bytes in (size_bytes, size_bytes + 1, 1 << 40):
            assert second.get("saves/a/x", max_bytes=max_bytes).data == data
        if size_bytes:
            with pytest.raises(IntegrityError, match="saves/a/x"):
                second.get("saves/a/x", max_bytes=size_bytes - 1)
        # Folders are not objects, and `make_folders` is idempotent.
        second.make_folders(_FOLDERS)
        assert paths_of(store) == ["saves/a/x"]
        assert store.capabilities == second.capabilities

    def test_an_object_is_found_as_soon_as_it_is_there(self, store: Store, second: Store) -> None:
        """Reads of a missing name are "not-found", and no client caches that or old content."""
        store.put("saves/a/x", b"x")
        target = memoryview(bytearray(1))
        for path in ("saves/a/y", "saves/nothing/y", "saves/a", "y", "commits/1"):
            assert kind_of(store.get, path) == "not-found"
            assert kind_of(store.stat, path) == "not-found"
            assert kind_of(store.read, path, [(0, target)]) == "not-found"
        assert store.list("commits") == []
        for data in (b"now", b"more", b""):
            second.replace("commits/1", data)
            assert store.get("commits/1").data == data
            assert store.stat("commits/1").size_bytes == len(data)
            listed = [(entry.path, entry.size_bytes) for entry in store.list("commits")]
            assert listed == [("commits/1", len(data))]
        second.delete(["commits/1"])
        assert paths_of(store) == ["saves/a/x"]
        assert kind_of(store.stat, "commits/1") == "not-found"

    def test_a_read_fills_exactly_the_range(self, store: Store, backend: Backend) -> None:
        """No other byte changes; a range outside the object is damage, and so is a wrong length."""
        data = pattern(1000)
        store.put("saves/a/x", data)
        for start, stop in ((0, 1), (0, 1000), (999, 1000), (1, 999), (7, 7)):
            buffer = bytearray(b"?" * (stop - start + 2))
            store.read("saves/a/x", [(start, memoryview(buffer)[1:-1])], size_bytes=1000)
            assert bytes(buffer) == b"?" + data[start:stop] + b"?"
        for start, length in ((0, 1001), (999, 2), (1000, 1), (5000, 10)):
            with pytest.raises(IntegrityError, match="saves/a/x") as caught:
                store.read("saves/a/x", [(start, memoryview(bytearray(length)))])
            assert caught.value.path is not None
            assert caught.value.offset is not None
        target = memoryview(bytearray(10))
        returns_size = backend.read("saves/a/x", [(0, target)])
        with pytest.raises(IntegrityError):
            store.read("saves/a/x", [(0 if returns_size else 995, target)], size_bytes=1001)

    # adlfs passes a small file as bytes, of which aiohttp warns.
    @pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")
    def test_ranges_are_taken_one_by_one(self, store: Store, backend: Backend) -> None:
        """A range is requested once the last is filled; an error of the iterator ends the read."""
        data = pattern(3 << 20)
        store.put("saves/a/x", data)
        spans = [(7, 1 << 20), (2 << 20, 1 << 20), (0, 5), (len(data) - 1, 1)]
        filled: list[bytearray] = []

        def ranges(end: Exception | None) -> Iterator[Range]:
            for start, length in spans:
                filled.append(bytearray(length))
                yield start, memoryview(filled[-1])
                assert filled[-1] == data[start : start + length]
                if end is not None:
                    raise end

        assert backend.read("saves/a/x", ranges(None)) in {None, len(data)}
        assert len(filled) == len(spans)
        with pytest.raises(IntegrityError, match="wrong"):
            backend.read("saves/a/x", ranges(IntegrityError("wrong")))
        assert len(filled) == len(spans) + 1
        with pytest.raises((ShortReadError, IntegrityError)):
            backend.read("saves/a/x", [(len(data) - 3, memoryview(bytearray(9)))])

    def test_of_several_creations_one_wins(self, store: Store, second: Store) -> None:
        """The first content stays, all others raise "exists"; or creation is unsupported."""
        if not store.capabilities.exclusive_create:
            with pytest.raises(UnsupportedByStoreError):
                store.create("commits/1", b"one")
            assert paths_of(store) == []
            return
        contents = [pattern(5000 + i, seed=i) for i in range(8)]
        clients = (store, second) * 4
        outcomes = together(
            [partial(clients[i].create, "commits/1", contents[i]) for i in range(8)]
        )
        kinds = [getattr(outcome, "kind", outcome) for outcome in outcomes]
        assert sorted(kinds, key=str) == [None, *["exists"] * 7]
        assert store.get("commits/1").data == contents[kinds.index(None)]
        assert paths_of(store, "commits") == ["commits/1"]
        store.delete(["commits/1"])
        second.create("commits/1", b"two")
        assert store.get("commits/1").data == b"two"

    def test_a_reader_during_replaces_sees_old_or_new(self, store: Store, second: Store) -> None:
        """Others see a replacement at once, and never half of it if replacing is atomic."""
        contents = [pattern(20_000 + i, seed=i) for i in range(12)]
        store.replace(".metadata", contents[0])
        with ThreadPoolExecutor(1) as thread:
            replaces = [thread.submit(store.replace, ".metadata", content) for content in contents]
            while store.capabilities.atomic_replace and not replaces[-1].done():
                assert second.get(".metadata").data in contents
            assert [future.result(WAIT_S) for future in replaces] == [None] * len(contents)
        assert second.get(".metadata").data == contents[-1]
        assert second.stat(".metadata").size_bytes == len(contents[-1])

    def test_a_replace_may_need_a_version(self, store: Store, second: Store) -> None:
        """With `if_match` only that version is replaced, and the new version differs."""
        store.replace(".metadata", b"one")
        seen = second.get(".metadata").version or "version"
        if not store.capabilities.if_match:
            with pytest.raises(UnsupportedByStoreError):
                store.replace(".metadata", b"two", if_match=seen)
            assert second.get(".metadata").data == b"one"
            return
        store.replace(".metadata", b"two", if_match=seen)
        assert kind_of(second.replace, ".metadata", b"three", if_match=seen) == "precondition"
        assert store.get(".metadata").data == b"two"
        fresh = second.get(".metadata").version
        assert fresh not in {None, seen}
        store.delete([".metadata"])
        gone = kind_of(second.replace, ".metadata", b"four", if_match=fresh)
        assert gone in {"precondition", "not-found"}

    def test_a_listing_stays_within_its_folder(self, store: Store) -> None:
        """Not of a folder with the same prefix; not recursive, it has children and folders."""
        for path in (".metadata", "saves/a/x", "saves/a/ranks/0", "saves/ab/y", "saves/b"):
            store.put(path, path.encode())
        assert paths_of(store, "saves/a") == ["saves/a/ranks/0", "saves/a/x"]
        assert len(paths_of(store)) == 5
        assert store.list("nothing") == []
        assert store.list("saves/a/x") == []
        flat = {entry.path: entry.size_bytes for entry in store.list("saves/a", recursive=False)}
        # A file system also lists empty folders.
        assert flat.pop("saves/a/b/", 0) == 0
        assert flat == {"saves/a/ranks/": 0, "saves/a/x": 9}
        top = {entry.path for entry in store.list("", recursive=False)}
        assert {"saves/", ".metadata"} <= top <= {"saves/", ".metadata", "commits/", "hf/"}

    def test_long_listings_and_deletions_are_whole(self, store: Store, second: Store) -> None:
        """Names on many pages are all listed once, and all deleted by one call."""
        names = [f"hf/{i:05}" for i in range(self.many)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda name: store.put(name, b"x"), names))
        assert [entry.path for entry in sorted(second.list("hf"), key=lambda e: e.path)] == names
        assert len(second.list("hf", recursive=False)) == len(names)
        second.delete([*names, "hf/nothing", "nothing/x"])
        assert paths_of(store) == []

    def test_odd_names_are_kept_to_the_letter(self, store: Store, second: Store) -> None:
        """No operation quotes, unquotes or expands a name."""
        names = [f"hf/{name}" for name in self.odd_names]
        for name in names:
            store.put(name, name.encode())
        assert paths_of(second) == sorted(names)
        for name in names:
            target = bytearray(3)
            second.read(name, [(1, memoryview(target))], size_bytes=len(name.encode()))
            assert second.get(name).data == name.encode()
            assert second.stat(name).size_bytes == len(name.encode())
            assert bytes(target) == name.encode()[1:4]
        upload = store.upload(f"{names[0]} up")
        send(upload, [b"abc"])
        upload.complete(3)
        assert second.get(f"{names[0]} up").data == b"abc"
        second.delete(names)
        assert paths_of(store) == [f"{names[0]} up"]

    def test_deleting_removes_what_is_named(self, store: Store, second: Store) -> None:
        """Missing names are no error; a folder is deleted with its content, but never the root."""
        for path in ("saves/a/x", "saves/a/y", "saves/a/ranks/0", "saves/ab/y"):
            store.put(path, b"data")
        for _ in range(2):
            second.delete(["saves/a/x", "saves/a/nothing", "saves/nothing/x"])
        second.delete([])
        assert paths_of(store, "saves/a") == ["saves/a/ranks/0", "saves/a/y"]
        for path in ("saves/a", "saves/a", "nothing"):
            second.delete_folder(path)
        with pytest.raises(InvalidInputError):
            second.delete_folder("")
        assert paths_of(store) == ["saves/ab/y"]
        assert kind_of(store.get, "saves/a/y") == "not-found"

    def test_the_clock_is_near_ours_and_leaves_nothing(self, store: Store, second: Store) -> None:
        """The storage's clock is within a minute of the local clock; the probe is deleted."""
        now_s = store.server_time(".probe")
        assert abs(now_s - time.time()) < 60
        assert paths_of(second) == []
        store.put("saves/a/x", b"data")
        times = [store.stat("saves/a/x").modified_s, store.list("saves/a")[0].modified_s]
        assert all(time_s is None or abs(time_s - now_s) < 60 for time_s in times)

    def test_what_another_program_writes_is_read(self, store: Store, raw: RawWrite | None) -> None:
        """At once, whole, also after this client wrote or read the same object."""
        if raw is None:
            pytest.skip("`raw` is not overridden: no other client writes here")
        for data in (pattern(3000, 1), b"", pattern(2000, 2)):
            raw("saves/a/x", data)
            assert store.get("saves/a/x").data == data
            assert store.stat("saves/a/x").size_bytes == len(data)
            listed = [(entry.path, entry.size_bytes) for entry in store.list("saves/a")]
            assert listed == [("saves/a/x", len(data))]
            target = bytearray(len(data))
            store.read("saves/a/x", [(0, memoryview(target))], size_bytes=len(data))
            assert target == data
            store.replace("saves/a/x", b"ours")
            assert store.get("saves/a/x").data == b"ours"

    def test_a_version_is_deleted_only_while_it_is_there(self, store: Store) -> None:
        """A newer version stays; a storage without conditional deletion raises "unsupported"."""
        store.put("saves/a/x", b"ours")
        version = store.get("saves/a/x").version or ""
        store.put("saves/a/x", b"another's")
        kind = kind_of(store.delete_version, "saves/a/x", version)
        assert kind in {"precondition", "unsupported"}
        assert store.get("saves/a/x").data == b"another's"
        if kind == "precondition":
            store.delete_version("saves/a/x", store.get("saves/a/x").version or "")
            assert kind_of(store.stat, "saves/a/x") == "not-found"

    def test_any_sequence_of_calls_is_that_of_a_dict(self, store: Store, second: Store) -> None:
        """Puts, creations, uploads, reads, listings and deletions by both clients."""
        check_sequences(store, second, self.sequence_count)

    def test_a_closed_backend_is_used_again(self, store: Store, second: Store) -> None:
        """`close` is idempotent, the backend reconnects, and the other client is not affected."""
        store.put("saves/a/x", b"data")
        for _ in range(2):
            store.close()
            assert second.get("saves/a/x").data == b"data"
        assert store.get("saves/a/x").data == b"data"
