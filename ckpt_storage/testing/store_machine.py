"""A random walk over a backend's operations, through `Store`, against a dict at every step."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckpt_storage.errors import IntegrityError, StorageError
from ckpt_storage.store.backend import Backend
from ckpt_storage.store.store import Store
from ckpt_storage.store.upload import Upload

from .upload_facts import fill, pattern, send

__all__ = ["StoreMachine"]

_FOLDERS = ("commits", "saves", "saves/a", "saves/ab", "hf")
_PATHS = st.sampled_from(
    [".metadata", "commits/1", "saves/a/x", "saves/a/y z", "saves/ab/x", "hf/100%25"]
)
_CONTENTS = st.builds(pattern, st.integers(0, 300), st.integers(0, 9))


def _refused(call: Callable[[], object]) -> str | None:
    """Return the kind of the `StorageError` a call raised, None if it raised none."""
    try:
        call()
    except StorageError as error:
        return error.kind
    return None


class StoreMachine(RuleBasedStateMachine):
    """Operations at random; the model is a dict of paths to contents."""

    def make_backend(self) -> Backend:
        """Override: return a client of a fresh root."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.store = Store(self.make_backend(), url="machine://root")
        self.store.make_folders(_FOLDERS)
        self.model: dict[str, bytes] = {}
        self.open_uploads: list[tuple[str, bytes, Upload]] = []

    def teardown(self) -> None:
        """End what is open."""
        for _, _, upload in self.open_uploads:
            upload.abort()
        self.store.close()

    @rule(path=_PATHS, data=_CONTENTS)
    def write(self, path: str, data: bytes) -> None:
        """A write to a name that is free, or with the bytes that are there, succeeds."""
        data = self.model.setdefault(path, data)
        self.store.put(path, data)

    @precondition(lambda self: self.store.capabilities.exclusive_create)
    @rule(path=_PATHS, data=_CONTENTS)
    def create(self, path: str, data: bytes) -> None:
        """A create succeeds if and only if nothing else is there."""
        there = self.model.setdefault(path, data)
        kind = _refused(lambda: self.store.create(path, data))
        assert kind == ("exists" if there != data else None)

    @rule(path=_PATHS, data=_CONTENTS)
    def replace(self, path: str, data: bytes) -> None:
        """A replace always succeeds."""
        self.store.replace(path, data)
        self.model[path] = data

    @precondition(lambda self: len(self.open_uploads) < 3)
    @rule(path=_PATHS, data=_CONTENTS, part_count=st.integers(1, 2))
    def start_upload(self, path: str, data: bytes, part_count: int) -> None:
        """An upload that has begun changes nothing."""
        size = fill(self.store.capabilities)
        parts = [*(pattern(size, i) for i in range(part_count - 1)), data]
        upload = self.store.upload(path)
        send(upload, parts)
        self.open_uploads.append((path, b"".join(parts), upload))

    @precondition(lambda self: self.open_uploads)
    @rule()
    def complete_upload(self) -> None:
        """An upload that completes puts its bytes under its name."""
        path, data, upload = self.open_uploads.pop(0)
        if path in self.model:
            # Names of uploads are write-once: what an upload over another object does is
            # left to the storage.
            upload.abort()
            return
        upload.complete(len(data))
        self.model[path] = data

    @precondition(lambda self: self.open_uploads)
    @rule()
    def abort_upload(self) -> None:
        """An upload that aborts changes nothing."""
        self.open_uploads.pop(0)[2].abort()

    @rule(paths=st.lists(_PATHS, max_size=3))
    def delete(self, paths: list[str]) -> None:
        """A delete removes what is there of what it names."""
        self.store.delete(paths)
        for path in paths:
            self.model.pop(path, None)

    @precondition(lambda self: not self.open_uploads)
    @rule(folder=st.sampled_from(["saves/a", "saves/ab", "hf"]))
    def delete_folder(self, folder: str) -> None:
        """A folder goes with what it holds, and can be made again."""
        self.store.delete_folder(folder)
        self.model = {
            path: data for path, data in self.model.items() if not path.startswith(f"{folder}/")
        }
        self.store.make_folders(_FOLDERS)

    @rule(path=_PATHS, start=st.integers(0, 310), length=st.integers(1, 310))
    def read_into(self, path: str, start: int, length: int) -> None:
        """A range is read right, found beyond the end, or of an object that is absent."""
        target = bytearray(length)
        data = self.model.get(path)
        try:
            kind = _refused(lambda: self.store.read(path, [(start, memoryview(target))]))
        except IntegrityError:
            assert data is not None
            assert start + length > len(data)
            return
        assert kind == ("not-found" if data is None else None)
        if data is not None:
            assert bytes(target) == data[start : start + length]

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        """The listing and every object are what the dict says."""
        found = {entry.path: entry.size_bytes for entry in self.store.list("")}
        assert found == {path: len(data) for path, data in self.model.items()}
        for path, data in self.model.items():
            assert self.store.get(path).data == data
