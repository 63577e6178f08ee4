"""S3 stores survive faults; what is raised has kind, object, next step, and no secret."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from crc32c import crc32c
from limits import HANG_S
from local_stores import error_of
from remote_tools import KEY, PARTS, POLICY, SECRET, ops, options_of, plain, retrying, send
from s3_server import Action, FaultRule, S3Server

from ckpt_storage.errors import StorageError, UnsupportedByStoreError
from ckpt_storage.format.crc import BlockHasher
from ckpt_storage.options import TransferOptions
from ckpt_storage.store import Location, Settings
from ckpt_storage.store.backends.s3 import S3Backend
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.store.store import Store
from ckpt_storage.transfer.writing import ObjectWriter

EXPIRED = FaultRule(action="status", status=403, code="ExpiredToken")


@pytest.mark.parametrize("action", ["status", "reset", "lost", "torn", "truncate"])
def test_writes_and_reads_survive_passing_faults(server: S3Server, action: Any) -> None:
    """Throttling, cut connections, lost and truncated answers: the same is asked again."""
    op, data = "get" if action == "truncate" else "put|get", random.Random(1).randbytes(2000)
    store = retrying(server)
    server.faults([FaultRule(op=op, times=2, action=action, status=503, code="SlowDown")])
    store.put("saves/a/x", data)
    assert server.dump("bkt") == {"run/saves/a/x": data}
    assert ops(server)["put"] == (1 if action == "truncate" else 3)
    target = bytearray(1000)
    server.faults([FaultRule(op=op, times=2, action=action, status=503, code="SlowDown")])
    store.read("saves/a/x", [(500, memoryview(target))], size_bytes=2000)
    assert bytes(target) == data[500:1500]
    assert ops(server)["get"] == 3
    assert store.get("saves/a/x").data == data


def test_bytes_that_never_came_are_not_made_up(server: S3Server) -> None:
    """A body that always ends early may be tried again; a server that ignores ranges is refused."""
    store, target = plain(server), memoryview(bytearray(700))
    store.put("saves/a/x", bytes(2000))
    server.faults([FaultRule(op="get", times=0, action="truncate")])
    for call in (
        lambda: store.read("saves/a/x", [(0, target)], size_bytes=2000),
        lambda: store.get("saves/a/x"),
    ):
        error = error_of(call)
        assert (error.kind, error.retryable) == ("connection", True)
    server.faults([FaultRule(op="get", times=0, action="ignore_range")])
    with pytest.raises(UnsupportedByStoreError, match="honours the Range header"):
        store.read("saves/a/x", [(500, target)])


@pytest.mark.parametrize("op", ["create_upload", "part", "complete"])
@pytest.mark.parametrize("action", ["lost", "status"])
def test_an_upload_survives_passing_faults(server: S3Server, op: str, action: Any) -> None:
    """Whichever request fails, also inside a success, or loses its answer, the object is whole.

    Where that goes on, the upload is given up, and nothing is left.
    """
    rules = [FaultRule(op=op, times=1, action=action)]
    if (op, action) == ("complete", "status"):
        rules.append(FaultRule(op=op, action=action, status=200, code="InternalError"))
    server.faults(rules)
    upload = retrying(server).upload("saves/a/x")
    upload.complete(send(upload, PARTS))
    assert sum(bool(request.fault) for request in server.requests) == len(rules)
    assert server.dump("bkt") == {"run/saves/a/x": b"".join(PARTS)}
    server.faults([FaultRule(op=f"{op}|head", times=0, action=action)])
    upload = plain(server).upload("saves/a/y")
    with pytest.raises(StorageError):
        upload.complete(send(upload, PARTS))
    server.faults([])
    upload.abort()
    assert len(server.dump("bkt")) == 1
    # Nobody knows the names of uploads whose start got no answer.
    open_count = server.open_upload_count
    assert (open_count > 0) == ((op, action) == ("create_upload", "lost"))
    assert retrying(server).abort_uploads("saves/a") == open_count


def test_an_abort_does_not_delete_what_another_put_meanwhile(server: S3Server) -> None:
    """The deletion holds for the object that was looked at, and for no later one of the name."""
    upload = plain(server).upload("saves/a/x")
    send(upload, [b"small"])
    server.faults([FaultRule(op="put|head", times=0, action="lost")])
    with pytest.raises(StorageError):
        upload.complete(5)
    server.faults([FaultRule(op="delete", action="delay", delay_s=1.0)])
    with ThreadPoolExecutor(1) as pool:
        aborting = pool.submit(upload.abort)
        server.wait_for(
            lambda seen: any(record.op == "delete" for record in seen), timeout_s=HANG_S
        )
        plain(server).put("saves/a/x", b"another's")
        aborting.result()
    assert server.dump("bkt") == {"run/saves/a/x": b"another's"}


def test_saving_takes_few_requests(server: S3Server) -> None:
    """Uploads and writes need the rights to put only, and a condition of any size is one put."""
    store = plain(server)
    store.make_folders(["saves", "commits"])
    store.put("saves/a/manifest.json", b"{}")
    for parts in (PARTS, [b"small"]):
        upload = store.upload("saves/a/x")
        upload.complete(send(upload, parts))
    # Parts lose the condition on some servers.
    store.create("commits/1", bytes(12 * 1024 * 1024))
    assert ops(server) == {"create_upload": 1, "part": 3, "complete": 1, "put": 3}
    store.replace(".metadata", b"a")
    store.replace(".metadata", b"b", if_match=store.get(".metadata").version)
    assert ops(server) == {"create_upload": 1, "part": 3, "complete": 1, "put": 5, "get": 1}


def test_a_refused_deletion_is_told_when_those_beside_it_have_ended(server: S3Server) -> None:
    """None of them may land later; groups end with an error, a denial before what may pass."""
    store = plain(server)
    names = [f"saves/a/{i:02}" for i in range(20)]
    for name in names:
        store.put(name, b"data")
    denied = FaultRule(op="delete", key="03$", action="status", status=403, code="AccessDenied")
    server.faults([denied, FaultRule(op="delete", key="04$", action="delay", delay_s=0.3)])
    assert error_of(lambda: store.delete(names)).kind == "permission"
    assert set(server.dump("bkt")) == {f"run/{name}" for name in (names[3], *names[16:])}
    busy = FaultRule(op="delete", key="02$", times=0, action="status", status=503)
    server.faults([busy, replace(denied, times=0)])
    server.reset_counters()
    assert error_of(lambda: retrying(server).delete(names[:16])).kind == "permission"
    assert ops(server) == {"delete": 16}
    server.faults([])
    store.delete_folder("saves")
    assert server.dump("bkt") == {}


def test_a_long_deletion_survives_more_passing_faults_than_a_request_has_attempts(
    server: S3Server,
) -> None:
    """What is deleted is not asked for again, and each group has its own attempts."""
    names = [f"saves/a/{i:03}" for i in range(160)]
    for name in names:
        server.put("bkt", f"run/{name}", b"data")
    throttled = [
        FaultRule(op="delete", key=f"{i}5$", action="status", status=503) for i in range(8)
    ]
    server.faults(throttled)
    retrying(server).delete(names)
    assert server.dump("bkt") == {}
    assert ops(server)["delete"] <= len(names) + 16 * len(throttled)


@pytest.mark.parametrize("op", ["put", "create_upload", "part"])
def test_a_server_that_refuses_checksums_is_asked_once(server: S3Server, op: str) -> None:
    """What it refuses goes without one, and so does all that follows."""
    store = plain(server)
    server.faults([FaultRule(op=op, action="status", status=501, code="NotImplemented")])
    parts = [b"small"] if op == "put" else PARTS
    once = len(parts) if op == "part" else 1
    for count in (once + 1, 2 * once + 1):
        upload = store.upload("saves/a/x")
        upload.complete(send(upload, parts))
        assert ops(server)[op] == count


@pytest.mark.parametrize("op", ["put", "part"])
def test_a_byte_that_changes_on_its_way_is_sent_again(server: S3Server, op: str) -> None:
    """The server holds each body to the checksum that goes with it, and refuses another."""
    server.faults([FaultRule(op=op, action="flip")])
    store = retrying(server)
    upload = store.upload("saves/a/x")
    parts = [b"small"] if op == "put" else PARTS
    upload.complete(send(upload, parts))
    assert server.dump("bkt") == {"run/saves/a/x": b"".join(parts)}
    assert [request.status for request in server.requests if request.fault] == [400]


class _Changing(S3Backend):
    """Other code writes to the tensor between its checksum and its sending."""

    tensor = bytearray()

    def put_part(self, *args: Any, **more: Any) -> str:
        self.tensor[0] ^= 1
        return super().put_part(*args, **more)


def _object_writer(store: Store) -> ObjectWriter:
    return ObjectWriter(
        store,
        "saves/a/x",
        planned_bytes=len(PARTS[0]) + 1,
        options=TransferOptions(part_bytes=len(PARTS[0]), thread_count=1),
        deadline=Deadline("write", 60),
        on_bytes=lambda _: None,
    )


def test_a_part_that_changes_before_it_is_sent_is_refused(server: S3Server) -> None:
    """What is sent is what was hashed; the error says that the memory changed."""
    location = Location.of("s3://bkt/run", options_of(server))
    backend = _Changing(location, Settings())
    backend.tensor = bytearray(PARTS[0] + b"x")
    writer = _object_writer(Store(backend, url=location.url, policy=POLICY))

    def write() -> None:
        writer.write(memoryview(backend.tensor))
        writer.complete()

    with pytest.raises(StorageError, match="at byte 0 changed in this process's memory"):
        write()
    writer.abort()
    assert server.dump("bkt") == {}
    assert ops(server)["part"] == 1


def test_a_byte_that_is_sent_is_hashed_once(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checksums of blocks make up those of parts and of the file."""
    hashed = list[int]()

    def count(data: Any, *rest: Any) -> int:
        hashed.append(memoryview(data).nbytes)
        return crc32c(data, *rest)

    monkeypatch.setattr("ckpt_storage.format.crc._crc32c", count)
    writer = _object_writer(plain(server))
    data = memoryview(b"".join(PARTS[:2]))
    for start in range(0, len(data), 999_999):
        writer.write(data[start : start + 999_999], BlockHasher(64 << 10))
    writer.complete()
    assert sum(hashed) == len(data)
    assert writer.crc32c == crc32c(data)
    assert server.dump("bkt") == {"run/saves/a/x": bytes(data)}


def test_listings_and_uploads_of_many_pages_are_whole() -> None:
    """Every page is read: of objects, of folders and of open uploads."""
    with S3Server(list_page_count=3) as server:
        server.create_bucket("bkt")
        store = plain(server)
        names = [f"saves/a/{i}/x" for i in range(10)]
        for name in names:
            store.put(name, b"data")
        uploads = [store.upload(f"{name}-up") for name in names]
        for upload in uploads:
            upload.write_part(0, 0, [memoryview(PARTS[0])], last=False)
        assert [entry.path for entry in store.list("saves")] == names
        folders = [entry.path for entry in store.list("saves/a", recursive=False)]
        assert folders == [f"saves/a/{i}/" for i in range(10)]
        assert store.abort_uploads("saves") == 10
        assert server.open_upload_count == 0
        server.reset_counters()
        store.delete_folder("saves/a")
        assert server.dump("bkt") == {}
        # Each page is deleted before the next is asked for.
        steps = [one.op for one in server.requests]
        assert steps[:8] == 2 * ["list", "delete", "delete", "delete"]


def test_expired_credentials_are_looked_up_again(server: S3Server) -> None:
    """A token that expired is renewed once per operation, by a client built anew."""
    store = retrying(server)
    for op in ("put", "head|get", "part"):
        server.faults([replace(EXPIRED, op=op, times=2 if op == "head|get" else 1)])
        store.put("saves/a/x", b"data")
        # The refusal of a HEAD has no body, so a GET is asked why.
        assert store.stat("saves/a/x").size_bytes == 4
        upload = store.upload("saves/b/x")
        upload.complete(send(upload, PARTS))
        assert any(request.fault for request in server.requests)
    assert len(server.dump("bkt")) == 2


def test_a_missing_bucket_is_not_an_empty_folder(server: S3Server) -> None:
    """Nothing is made of it, and who reads or lists it is not told that nothing is there."""
    store = plain(server, "s3://nowhere/run")
    calls: list[Callable[[], object]] = [
        *(lambda: store.list(""), lambda: store.get("x"), lambda: store.put("x", b"data")),
        # It could not be read back either.
        lambda: store.create("commits/1", b"data"),
    ]
    errors = [error_of(call) for call in calls]
    assert [error.kind for error in errors] == [*["other"] * 3, "unknown"]
    assert all("never creates one" in str(error) for error in errors)


def test_no_error_log_or_pickle_shows_a_credential(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what is raised nor what is logged nor what travels between ranks has them."""
    caplog.set_level(logging.INFO)
    store = retrying(server)
    texts = [repr(store)]
    errors: list[StorageError] = []
    others: list[Action] = ["reset", "status", "truncate"]
    for rule in [EXPIRED, *(FaultRule(action=action) for action in others)]:
        server.faults([replace(rule, op="get", times=0)])
        errors.append(error_of(lambda: store.get("saves/a/x")))
    for error in errors:
        texts += [str(error), repr(error), repr(error.__dict__), repr(pickle.dumps(error))]
        assert error.__context__ is None
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.kind) == (type(error), str(error), error.kind)
    text = "\n".join([*texts, caplog.text])
    assert SECRET not in text
    assert KEY not in text


def test_a_store_is_not_pickled_by_accident(server: S3Server) -> None:
    """What travels is the location; a client in a pickle would carry sockets and secrets."""
    with pytest.raises(TypeError, match="open it again"):
        pickle.dumps(plain(server))
