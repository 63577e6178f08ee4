"""What is raised when S3 refuses, hangs or is not there: kind, object, next step, no secret."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from remote_tools import KEY, ONCE, PARTS, SECRET, plain, retrying, send
from servers import free_port

from ckpt_storage.errors import StorageError
from ckpt_storage.store import open_store
from ckpt_storage.testing.s3_server import Action, FaultRule, S3Server

EXPIRED = FaultRule(action="status", status=403, code="ExpiredToken")


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


def test_an_unreachable_endpoint_is_named() -> None:
    """A refused connection says where to, proves that nothing was done, and may be retried."""
    port = free_port()
    options = {"key": "k", "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
    store = open_store("s3://bkt/run", storage_options=options, retry=ONCE)
    with pytest.raises(StorageError) as caught:
        store.put("x", b"data")
    assert caught.value.kind == "connection"
    assert caught.value.retryable
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


@pytest.mark.parametrize(
    ("status", "code", "kind", "advice"),
    [
        (403, "AccessDenied", "permission", "the right to read, write"),
        (301, "PermanentRedirect", "other", "region_name"),
        (507, "XMinioStorageFull", "no-space", "quota"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(
    server: S3Server, status: int, code: str, kind: str, advice: str
) -> None:
    """Kind, object, server code and the next step, on one line, and no retry."""
    server.faults([FaultRule(op="get", times=0, action="status", status=status, code=code)])
    with pytest.raises(StorageError) as caught:
        plain(server).get("saves/a/x")
    assert (caught.value.kind, caught.value.retryable) == (kind, False)
    assert "s3://bkt/run/saves/a/x" in str(caught.value)
    assert code in str(caught.value)
    assert advice in (caught.value.next_step or "")
    assert "\n" not in str(caught.value)


def test_a_missing_bucket_is_not_an_absent_object(server: S3Server) -> None:
    """Nothing is made of a bucket that is not there, and a reader is not told "not found"."""
    store = plain(server, "s3://nowhere/run")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: store.get("x").data, "other"),
        (lambda: store.put("x", b"data"), "other"),
        (lambda: store.list(""), "other"),
        # It could not be read back either.
        (lambda: store.create("commits/1", b"data"), "unknown"),
    ]
    for call, kind in calls:
        with pytest.raises(StorageError, match="NoSuchBucket") as caught:
            call()
        assert caught.value.kind == kind
        assert "never creates one" in str(caught.value)


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
        with pytest.raises(StorageError) as caught:
            store.get("saves/a/x")
        errors.append(caught.value)
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
