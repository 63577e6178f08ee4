"""What the tests of the commit protocol share: a store in a dict, attempts to commit, an oracle.

The oracle reads slots and `.metadata` with `json` and `pickle` alone; it never calls the package.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import crc32c
import pytest

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning, publishing, slotlog
from ckpt_storage.commit.attempt import Grant
from ckpt_storage.commit.delete import delete
from ckpt_storage.errors import StorageError
from ckpt_storage.format.commit_record import SlotRecord, with_footer
from ckpt_storage.format.documents import FileRef
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import probe
from ckpt_storage.store.backend import (
    Backend,
    Buffers,
    Capabilities,
    Content,
    ObjectInfo,
    Part,
    Range,
    ShortReadError,
)
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.store.store import Store as Facade
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.transfer import workers

CAS = Capabilities(
    kind="s3",
    exclusive_create=True,
    atomic_replace=True,
    if_match=True,
    parallel_parts=True,
)
BLIND = replace(CAS, kind="posix", if_match=False)
"""As on a POSIX file system: replacing is atomic, but knows no condition."""

BOTH = pytest.mark.parametrize("capabilities", [CAS, BLIND], ids=["conditions", "blind"])

DAY_S = 24 * 3600.0

QUICK = RetryPolicy(attempt_count=4, first_delay_s=0.0, max_delay_s=0.0)

Gate = Callable[[str, str], None]
T = TypeVar("T")


IN_TURN = ("as listed", "backwards")
"""Orders of requests that go side by side; with one cut off in between, all that can be left."""


def take_in_turn(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Let requests that go side by side go one after the other, in one of the orders `IN_TURN`."""

    def in_turn(calls: Sequence[Callable[[], Any]]) -> list[Any]:
        numbers = range(len(calls))
        found = {i: calls[i]() for i in (numbers if order == IN_TURN[0] else reversed(numbers))}
        return [found[i] for i in numbers]

    monkeypatch.setattr(workers, "_at_once", in_turn)


def ungated(operation: str, path: str) -> None:
    """Let every operation pass."""
    del operation, path


@dataclass(slots=True)
class Disk:
    """What a storage holds: content, token and time by path; `clock_s` is its own clock."""

    objects: dict[str, tuple[bytes, str, float]] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    clock_s: float = 1e9
    changes: int = 0

    def put(self, path: str, data: bytes) -> None:
        """Put an object with a token that was never used before."""
        self.objects[path] = (data, f"v{next(self.numbers)}", self.clock_s)
        self.changes += 1

    def drop(self, path: str) -> None:
        """Remove an object that may be absent."""
        self.changes += self.objects.pop(path, None) is not None

    @property
    def files(self) -> dict[str, bytes]:
        """Content by path."""
        return {path: found[0] for path, found in self.objects.items()}

    def copy(self) -> Disk:
        """Return a disk of its own with the same objects and tokens."""
        return Disk(dict(self.objects), itertools.count(10**9), self.clock_s)


class DictBackend(Backend):
    """A backend on a `Disk`; every operation first passes `gate`, and then is one atomic step.

    Operations bear the names that `FaultBackend` gives them.
    """

    def __init__(self, disk: Disk, capabilities: Capabilities = CAS, gate: Gate = ungated) -> None:
        self.disk = disk
        self.capabilities = capabilities
        self.gate = gate
        self._uploads: dict[str, dict[int, bytes]] = {}

    def stat(self, path: str) -> ObjectInfo:
        """Return size and time."""
        self.gate("stat", path)
        return self._info(path)

    def get(self, path: str, *, max_bytes: int | None) -> Content:
        """Return an object and its token."""
        del max_bytes
        self.gate("get", path)
        data, version, _ = self._found(path)
        return Content(data=data, version=version)

    def read(self, path: str, ranges: Iterable[Range]) -> int:
        """Fill memory."""
        self.gate("read", path)
        data = self._found(path)[0]
        for start, target in ranges:
            piece = data[start : start + len(target)]
            target[: len(piece)] = piece
            if len(piece) < len(target):
                raise ShortReadError(start + len(piece))
        return len(data)

    def put(
        self,
        path: str,
        data: Buffers,
        *,
        write_id: str | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Put an object, on a condition if one is given."""
        del write_id
        self.gate("put_absent" if if_absent else "put_match" if if_match else "put", path)
        if if_absent and path in self.disk.objects:
            raise StorageError(f"{path} is there.", kind="exists", path=path)
        if if_match and self._found(path)[1] != if_match:
            raise StorageError(f"{path} has changed.", kind="precondition", path=path)
        self.disk.put(path, b"".join(data))

    def list(self, prefix: str, *, recursive: bool) -> Iterator[ObjectInfo]:
        """Yield the objects below a folder."""
        self.gate("list", prefix)
        folder = f"{prefix}/" if prefix else ""
        found: dict[str, ObjectInfo] = {}
        for path in [path for path in self.disk.objects if path.startswith(folder)]:
            head, slash, _ = path[len(folder) :].partition("/")
            if slash and not recursive:
                found[head] = ObjectInfo(path=f"{folder}{head}/", size_bytes=0)
            else:
                found[path] = self._info(path)
        return iter(found.values())

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects one by one, each a step of its own."""
        for path in paths:
            self.gate("delete", path)
            self.disk.drop(path)

    def delete_version(self, path: str, version: str) -> None:
        """Delete an object of a version."""
        self.gate("delete_version", path)
        if path in self.disk.objects and self.disk.objects[path][1] != version:
            raise StorageError(f"{path} has changed.", kind="precondition", path=path)
        self.disk.drop(path)

    def delete_folder(self, path: str) -> bool:
        """Delete all below a folder in one step."""
        self.gate("delete_folder", path)
        for known in list(self.disk.objects):
            if known.startswith(f"{path}/"):
                self.disk.drop(known)
        return True

    def begin_upload(self, path: str, **_: object) -> str:
        """Begin an upload in memory."""
        del path
        token = str(next(self.disk.numbers))
        self._uploads[token] = {}
        return token

    def put_part(
        self, path: str, token: str, number: int, offset: int, data: Buffers, *, last: bool
    ) -> str:
        """Keep a copy of a part."""
        del path, offset, last
        self._uploads[token][number] = b"".join(data)
        return ""

    def complete_upload(
        self, path: str, token: str, parts: Sequence[Part], *, write_id: str, if_absent: bool
    ) -> None:
        """Put the object."""
        pieces = self._uploads.pop(token)
        whole = [memoryview(pieces[part.number]) for part in parts]
        self.put(path, whole, write_id=write_id, if_absent=if_absent)

    def abort_upload(self, path: str, token: str) -> None:
        """Forget the parts."""
        del path
        self._uploads.pop(token, None)

    def server_time(self, probe_path: str) -> float:
        """Return the disk's clock."""
        del probe_path
        return self.disk.clock_s

    def _found(self, path: str) -> tuple[bytes, str, float]:
        if path not in self.disk.objects:
            raise StorageError(f"{path} is not there.", kind="not-found", path=path)
        return self.disk.objects[path]

    def _info(self, path: str) -> ObjectInfo:
        data, _, modified_s = self._found(path)
        return ObjectInfo(path=path, size_bytes=len(data), modified_s=modified_s)


class DictStore(Facade):
    """A store on a `Disk` whose operations play rules, each once and in the caller's thread."""

    def __init__(
        self,
        disk: Disk,
        capabilities: Capabilities = CAS,
        gate: Gate = ungated,
        *,
        rules: Sequence[Rule] = (),
        backend: type[DictBackend] = DictBackend,
    ) -> None:
        self.disk = disk
        self.inner = backend(disk, capabilities, gate)
        self._faults = FaultBackend(self.inner, rules)
        self.script = self._faults.script
        super().__init__(self._faults, url="dict://root", policy=QUICK)
        for ask in (probe.try_exclusive_create, probe._try_conditional_delete):  # noqa: SLF001
            # Looked at elsewhere.
            probe._RESULTS[os.getpid(), self.url, ask.__name__] = ""  # noqa: SLF001

    def run(self, operation: str, path: str, call: Callable[[Backend], T], **_: object) -> T:
        """Do what is called, without a thread of its own: there are many thousands of calls."""
        try:
            return call(self._faults)
        except Exception as error:  # noqa: BLE001  # backends raise any type
            raise self.explain(error, operation, path) from None

    def failing(self, *rules: Rule) -> DictStore:
        """Return another store on this disk that plays rules."""
        return DictStore(self.disk, self.capabilities, rules=rules)

    @property
    def gate(self) -> Gate:
        """What every operation passes."""
        return self.inner.gate

    @gate.setter
    def gate(self, gate: Gate) -> None:
        self.inner.gate = gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A save attempt whose files are written and which only has to be committed."""

    grant: Grant
    manifest: FileRef
    stock: FileRef
    stock_bytes: bytes

    @property
    def save_id(self) -> str:
        """Its id."""
        return self.grant.save_id


def deadline(timeout_s: float = 600.0) -> Deadline:
    """Return a deadline of the commit phase."""
    return Deadline("commit", timeout_s)


def reference(path: str, data: bytes) -> FileRef:
    """Return what names a document."""
    return FileRef(path=path, size_bytes=len(data), crc32c=crc32c.crc32c(data))


def files_of(save_id: str) -> list[str]:
    """Return what an attempt of these tests consists of; without one of them it is not whole."""
    names = ("__0_0.distcp", "ranks/rank-00000.json", "stock.metadata", "manifest.json")
    return [f"saves/{save_id}/{name}" for name in names]


def begun(store: Store, *, overwrite: bool = True) -> Grant:
    """Begin an attempt."""
    return commit.begin(store, overwrite=overwrite)


def written(store: Store, grant: Grant) -> Attempt:
    """Write an attempt's files in the order in which the writer does."""
    shard, rank, stock_path, manifest = files_of(grant.save_id)
    store.put(shard, b"shard of " + grant.save_id.encode())
    store.put(rank, b"rank manifest")
    pickled = pickle.dumps({"save": grant.save_id})
    stock_bytes = with_footer(pickled, slot=grant.last_slot + 1, save_id=grant.save_id)
    store.put(stock_path, stock_bytes)
    text = b"manifest of " + grant.save_id.encode()
    store.put(manifest, text)
    return Attempt(
        grant=grant,
        manifest=reference(manifest, text),
        stock=reference(stock_path, stock_bytes),
        stock_bytes=stock_bytes,
    )


def attempted(store: Store) -> Attempt:
    """Begin and write an attempt."""
    return written(store, begun(store))


def committed(store: Store, attempt: Attempt) -> SlotRecord:
    """Commit an attempt; publish nothing."""
    return commit.commit(store, attempt.grant, manifest=attempt.manifest, stock=attempt.stock)


def published(store: Store, attempt: Attempt, record: SlotRecord) -> bool:
    """Publish an attempt as its saver does."""
    return publishing.publish(store, own=record, own_stock=attempt.stock_bytes)


def saved(store: Store) -> str:
    """Save completely, freeing nothing; return the save id."""
    attempt = attempted(store)
    published(store, attempt, committed(store, attempt))
    return attempt.save_id


def just_committed(store: Store) -> tuple[Attempt, SlotRecord]:
    """Save up to the commit; the saver has not published."""
    attempt = attempted(store)
    return attempt, committed(store, attempt)


def interrupt(store: DictStore, operation: str, path: str, action: Callable[[], object]) -> None:
    """Run `action` once, just before the next operation of that name on a path ending so."""

    def gate(name: str, at: str) -> None:
        if name == operation and at.endswith(path):
            store.gate = ungated
            action()

    store.gate = gate


def fenced(store: Store, *save_ids: str) -> slotlog.CommitLog:
    """Fence attempts."""
    return cleaning.fence(store, save_ids)


def cleaned(store: Store, *, min_age_s: float = 0.0, keep_previous: int = 1) -> list[str]:
    """Fence and free attempts that nobody needs."""
    return cleaning.free_leftovers(store, min_age_s=min_age_s, keep_previous=keep_previous)


def deleted(store: Store) -> None:
    """Delete the checkpoint."""
    delete(store)


def body_of(data: bytes) -> dict[str, object]:
    """Return the body of a sealed document, unchecked."""
    found: dict[str, object] = json.loads(data)["body"]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A checkpoint as the documents define it: slots, our head, and what stock readers find.

    `stock` is the save that the pickle in `.metadata` is of, `footer` the slot its footer names.
    """

    slots: Sequence[Mapping[str, object]]
    head: str | None
    stock: str | None
    footer: int | None

    @property
    def committed(self) -> list[str]:
        """The save ids of all commit records, in order."""
        return [str(slot["save_id"]) for slot in self.slots if slot["type"] == "commit"]

    @property
    def deleted(self) -> list[str]:
        """The save ids of the commits that a deletion of the checkpoint came after."""
        kinds = [slot["type"] for slot in self.slots]
        count = len(kinds) - kinds[::-1].index("deleted") if "deleted" in kinds else 0
        return [str(slot["save_id"]) for slot in self.slots[:count] if slot["type"] == "commit"]


def seen(files: Mapping[str, bytes]) -> Seen:
    """Return what the files say; fails for slots that are not dense."""
    names = sorted(path for path in files if path.startswith("commits/"))
    assert names == [f"commits/{n:08d}.json" for n in range(1, len(names) + 1)]
    slots = [body_of(files[name]) for name in names]
    head = None
    for slot in slots:
        if slot["type"] == "commit":
            head = str(slot["save_id"])
        elif slot["type"] == "deleted":
            head = None
    stock = footer = None
    if ".metadata" in files:
        data = files[".metadata"]
        stock = pickle.loads(data)["save"]
        length = int(data[-16:-8])
        footer = json.loads(data[-16 - length : -16])["slot"]
    return Seen(slots=slots, head=head, stock=stock, footer=footer)


def is_whole(files: Mapping[str, bytes], save_id: str) -> bool:
    """Return whether every file of an attempt is there."""
    return all(path in files for path in files_of(save_id))


def sealed(body: Mapping[str, object]) -> bytes:
    """Return a sealed document, made without the package."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    return b'{"crc32c":"%08x","body":%s}\n' % (crc32c.crc32c(text), text)
