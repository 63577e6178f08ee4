"""What the tests of the commit protocol share: a store in a dict, attempts to commit, an oracle.

The oracle reads slots and `.metadata` with `json` and `pickle` alone; it never calls the package.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import crc32c
import pytest

from ckpt_storage.commit import attempt as commit
from ckpt_storage.commit import cleaning, deletion, publishing, slotlog
from ckpt_storage.commit.attempt import SaveTicket
from ckpt_storage.format.commit_record import SlotRecord, with_footer
from ckpt_storage.format.documents import FileRef
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store import abilities
from ckpt_storage.store.abilities import Abilities
from ckpt_storage.store.backend import Backend, Buffers, Capabilities
from ckpt_storage.store.backends.memory import MemoryBackend
from ckpt_storage.store.calls import Calls
from ckpt_storage.store.problems import changed
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import FaultBackend, Rule
from ckpt_storage.transfer.workers import some_at_once as side_by_side

CAS = Capabilities(
    kind="s3", exclusive_create=True, atomic_replace=True, if_match=True, parallel_parts=True
)
BLIND = replace(CAS, kind="posix", if_match=False)
"""As on a POSIX file system: replacing is atomic, but knows no condition."""

BOTH = pytest.mark.parametrize("capabilities", [CAS, BLIND], ids=["conditions", "blind"])

DAY_S = 24 * 3600.0

QUICK = RetryPolicy(attempt_count=4, first_delay_s=0.0, max_delay_s=0.0)

Gate = Callable[[str, str], None]
T = TypeVar("T")

IN_TURN = ("as listed", "backwards")
"""Orders of concurrent requests; cut off in between, they leave every possible remainder."""


def take_in_turn(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Run concurrent requests one after another, in the orders of `IN_TURN`."""

    def in_turn(calls: Sequence[Callable[[], Any]], *_: object, **_options: object) -> list[Any]:
        numbers = range(len(calls))
        results = {i: calls[i]() for i in (numbers if order == IN_TURN[0] else reversed(numbers))}
        return [results[i] for i in numbers]

    for module in list(sys.modules.values()):
        if getattr(module, "some_at_once", None) is side_by_side:
            monkeypatch.setattr(module, "some_at_once", in_turn)


def ungated(operation: str, path: str) -> None:
    """Let every operation pass."""
    del operation, path


@dataclass(frozen=True, slots=True)
class _File:
    """An object of fsspec's memory, as far as `MemoryBackend` asks."""

    data: bytes
    modified: datetime

    def getvalue(self) -> bytes:
        return self.data


@dataclass(slots=True)
class Disk:
    """What a storage holds, with a slash before each path; `clock_s` is its own clock.

    To `MemoryBackend` it is the file system.
    """

    store: dict[str, _File] = field(default_factory=dict)
    clock_s: float = 1e9
    changes: int = 0

    def put(self, path: str, data: bytes) -> None:
        self.store[f"/{path}"] = _File(data, datetime.fromtimestamp(self.clock_s, UTC))
        self.changes += 1

    def drop(self, path: str) -> None:
        self.changes += self.store.pop(f"/{path}", None) is not None

    @property
    def files(self) -> dict[str, bytes]:
        return {full[1:]: file.data for full, file in self.store.items()}

    def copy(self) -> Disk:
        return Disk(dict(self.store), self.clock_s)


def _gated(name: str) -> Any:
    inner = getattr(MemoryBackend, name)

    def call(backend: DictBackend, path: str, *args: Any, **more: Any) -> Any:
        backend.gate(name, path)
        return inner(backend, path, *args, **more)

    return call


class DictBackend(MemoryBackend):
    """A backend on a `Disk`; every operation first passes `gate`, and then is one atomic step.

    Operations bear the names that `FaultBackend` gives them.
    """

    def __init__(self, disk: Disk, capabilities: Capabilities = CAS, gate: Gate = ungated) -> None:
        self.disk = self._fs = disk
        self._root = ""
        self.capabilities = capabilities
        self.gate = gate

    stat = _gated("stat")
    get = _gated("get")
    read = _gated("read")
    tail = _gated("tail")
    list = _gated("list")

    def put(self, path: str, data: Buffers, **conditions: Any) -> None:
        if_absent, if_match = conditions.get("if_absent"), conditions.get("if_match")
        self.gate("put_absent" if if_absent else "put_match" if if_match else "put", path)
        if if_absent and f"/{path}" in self.disk.store:
            raise FileExistsError(path)
        if if_match:
            self._check(path, if_match)
        self.disk.put(path, b"".join(data))

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.gate("delete", path)
            self.disk.drop(path)

    def delete_version(self, path: str, version: str) -> None:
        self.gate("delete_version", path)
        if f"/{path}" in self.disk.store:
            self._check(path, version)
        self.disk.drop(path)

    def _check(self, path: str, version: str) -> None:
        if MemoryBackend.get(self, path, max_bytes=0).version != version:
            raise changed(path)

    def delete_folder(self, path: str) -> None:
        self.gate("delete_folder", path)
        for known in self.disk.files:
            if known.startswith(f"{path}/"):
                self.disk.drop(known)

    def server_time(self, probe_path: str) -> float:
        del probe_path
        return self.disk.clock_s


class _DirectCalls(Calls):
    """Each call is made once, in the caller's thread: there are many thousands of calls."""

    def run(self, operation: str, path: str, call: Callable[[Backend], T], **_: object) -> T:
        try:
            return call(self._opened[0])
        except Exception as error:  # noqa: BLE001  # backends raise any type
            raise self.explain(error, operation, path) from None


class DictStore(Store):
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
        self._faults = FaultBackend(backend(disk, capabilities, gate), rules)
        self.script = self._faults.script
        super().__init__(self._faults, url="dict://root")
        self.calls = _DirectCalls(self._faults, url=self.url, policy=QUICK)
        # Looked at elsewhere.
        replace_problem = "" if capabilities.if_match else "no conditions"
        seen = Abilities(
            create_problem="" if capabilities.exclusive_create else "no conditions",
            replace_problem=replace_problem,
            delete_problem="",
        )
        abilities.RECORDS[self.url] = seen

    def failing(self, *rules: Rule) -> DictStore:
        return DictStore(self.disk, self.capabilities, rules=rules)

    def asked(self) -> list[tuple[str, str]]:
        return [(call.operation, call.path) for call in self.script.calls]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A save attempt whose files are written and which only has to be committed."""

    ticket: SaveTicket
    manifest: FileRef
    stock: FileRef
    stock_bytes: bytes

    @property
    def save_id(self) -> str:
        return self.ticket.save_id


def files_of(save_id: str) -> list[str]:
    """Return what an attempt of these tests consists of; without one of them it is not whole."""
    names = ("__0_0.distcp", "ranks/rank-00000.json", "stock.metadata", "manifest.json")
    return [f"saves/{save_id}/{name}" for name in names]


def begun(store: Store, *, overwrite: bool = True) -> SaveTicket:
    """Begin an attempt."""
    return commit.begin(store, overwrite=overwrite)


def written(store: Store, ticket: SaveTicket) -> Attempt:
    """Write an attempt's files in the order in which the writer does."""
    shard, rank, stock_path, manifest = files_of(ticket.save_id)
    store.put(shard, b"shard of " + ticket.save_id.encode())
    store.put(rank, b"rank manifest")
    pickled = pickle.dumps({"save": ticket.save_id})
    stock_bytes = with_footer(pickled, slot=ticket.last_slot + 1, save_id=ticket.save_id)
    store.put(stock_path, stock_bytes)
    text = b"manifest of " + ticket.save_id.encode()
    store.put(manifest, text)
    return Attempt(
        ticket=ticket,
        manifest=FileRef.of(manifest, text),
        stock=FileRef.of(stock_path, stock_bytes),
        stock_bytes=stock_bytes,
    )


def attempted(store: Store) -> Attempt:
    """Begin and write an attempt."""
    return written(store, begun(store))


def committed(store: Store, attempt: Attempt) -> SlotRecord:
    """Commit an attempt; publish nothing."""
    return commit.commit(store, attempt.ticket, manifest=attempt.manifest, stock=attempt.stock)


def published(store: Store, attempt: Attempt, record: SlotRecord) -> bool:
    """Publish an attempt as its saver does."""
    return publishing.publish_head(store, own=record, own_stock=attempt.stock_bytes)


def saved(store: Store) -> str:
    """Save completely, freeing nothing; return the save id."""
    attempt = attempted(store)
    published(store, attempt, committed(store, attempt))
    return attempt.save_id


def fenced(store: Store, *save_ids: str) -> slotlog.CommitLog:
    """Fence attempts."""
    return cleaning.fence(store, save_ids)


def cleaned(store: Store, *, min_age_s: float = 0.0, keep_previous: int = 1) -> list[str]:
    """Fence and free attempts that nobody needs."""
    return cleaning.free_leftovers(store, min_age_s=min_age_s, keep_previous=keep_previous)


deleted = deletion.delete


def body_of(data: bytes) -> dict[str, object]:
    """Return the body of a sealed document, unchecked."""
    body: dict[str, object] = json.loads(data)["body"]
    return body


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
        return [str(slot["save_id"]) for slot in self.slots if slot["type"] == "commit"]

    @property
    def deleted(self) -> list[str]:
        """The save ids of the commits that a deletion of the checkpoint came after."""
        kinds = [slot["type"] for slot in self.slots]
        count = len(kinds) - kinds[::-1].index("deleted") if "deleted" in kinds else 0
        return [str(slot["save_id"]) for slot in self.slots[:count] if slot["type"] == "commit"]


def seen(files: Mapping[str, bytes]) -> Seen:
    """Return what the files say; fails for slots that are not dense.

    Those of a deleted checkpoint may be removed from the lowest on.
    """
    names = sorted(path for path in files if path.startswith("commits/"))
    lowest = int(names[0][8:16]) if names else 1
    assert names == [f"commits/{lowest + n:08d}.json" for n in range(len(names))], "slots lie apart"
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


@pytest.fixture
def capabilities() -> Capabilities:
    """What the storage can do, unless a test says otherwise."""
    return CAS


@pytest.fixture
def disk() -> Disk:
    """Nothing yet."""
    return Disk()


@pytest.fixture
def store(disk: Disk, capabilities: Capabilities) -> DictStore:
    """A store on `disk`."""
    return DictStore(disk, capabilities)
