"""What `diagnose` finds out about a storage; an endpoint that answers with pages is none."""

from __future__ import annotations

import errno
import tracemalloc
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from front_door_cases import faulty_disk
from limits import HANG_S
from s3_server import FaultRule, S3Server
from servers import Running, served

import ckpt_storage
from ckpt_storage import CheckpointError, CheckpointManager, RetryPolicy, StorageError
from ckpt_storage.errors import InvalidInputError
from ckpt_storage.inspect.doctor import Diagnosis, diagnose
from ckpt_storage.options import MIB
from ckpt_storage.store import open_store
from ckpt_storage.testing.faults import Rule

ONCE = RetryPolicy(attempt_count=1)
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


def outcomes(found: Diagnosis) -> dict[str, str]:
    return {probe.name: probe.outcome for probe in found.probes}


def test_a_disk_can_do_all_but_conditions_and_stays_as_it_was(tmp_path: Path) -> None:
    """What was made is gone again; files that were there are untouched."""
    (tmp_path / "mine.txt").write_text("mine")
    found = diagnose(tmp_path, large_bytes=MIB)
    assert found.ok
    assert {name for name, outcome in outcomes(found).items() if outcome != "yes"} == {
        "conditional replace"
    }
    (row,) = [probe for probe in found.probes if probe.name == "conditional replace"]
    assert (row.outcome, row.detail[:15]) == ("skipped", "not needed here")
    assert found.leftovers == ()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine.txt"]

    # 64 MiB are sent and read back by a process that holds a few.
    tracemalloc.start()
    try:
        assert diagnose(tmp_path, large_bytes=64 * MIB).ok
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 24 * MIB


@pytest.mark.parametrize("name", ["small-", "large-"])
def test_on_a_full_disk_what_was_not_written_is_not_read(tmp_path: Path, name: str) -> None:
    """The row of the write has the reason; those after it are skipped, and have no rate."""
    full = Rule(action="error", operation="pwritev", path=name, errno=errno.ENOSPC, hit_count=None)
    with faulty_disk([full]):
        found = diagnose(tmp_path, large_bytes=MIB, retry=ONCE)
    (failed,) = [probe for probe in found.probes if probe.outcome == "no"]
    assert failed.name == {"small-": "write", "large-": "upload"}[name]
    assert "space" in failed.detail
    rows = {probe.name: probe for probe in found.probes}
    assert rows["download"].outcome == "skipped"
    assert (rows["download"].seconds, rows["download"].size_bytes) == (None, 0)
    assert not found.ok
    assert list(tmp_path.iterdir()) == []


def seen(server: S3Server, large_bytes: int = MIB, **options: Any) -> Diagnosis:
    given = {"storage_options": server.storage_options, "retry": ONCE, **options}
    return diagnose("s3://bkt/run", large_bytes=large_bytes, **given)


def test_s3_can_do_everything_and_stays_as_it_was(server: S3Server) -> None:
    """No object and no open upload is left; every probe was timed."""
    found = seen(server, 11 * MIB)
    assert set(outcomes(found).values()) == {"yes"}
    assert server.dump("bkt") == {}
    store = open_store("s3://bkt", storage_options=server.storage_options)
    assert store.abort_uploads("") == 0
    store.close()
    for probe in found.probes:
        assert probe.seconds
        assert probe.size_bytes == (11 * MIB if probe.name in {"upload", "download"} else 0)
    assert abs(found.clock_offset_s or 9) < 5


def test_google_and_azure_can_do_everything(gcs_root: Running, azure_root: Running) -> None:
    """Both honour conditions and take uploads in parts."""
    for root in (gcs_root, azure_root):
        found = diagnose(root.url, storage_options=root.storage_options, large_bytes=MIB)
        lacking = {name for name, outcome in outcomes(found).items() if outcome == "no"}
        assert lacking == set(), found.probes
        assert found.leftovers == ()


def test_a_server_that_ignores_conditions_is_found_out() -> None:
    """It declares exclusive creation; trying it shows that it has none."""
    with S3Server(ignore_preconditions=True) as server:
        server.create_bucket("bkt")
        found = seen(server)
    assert outcomes(found)["exclusive create"] == "no"
    assert outcomes(found)["conditional replace"] == "no"
    assert any("let one job write" in one for one in found.advice)


def _denied(*ops: str) -> list[FaultRule]:
    return [
        FaultRule(op=op, times=0, action="status", status=403, code="AccessDenied") for op in ops
    ]


def test_what_cannot_be_deleted_is_named(server: S3Server) -> None:
    """Without the right to delete, the folder that stays is named, and the right is missed."""
    server.faults(_denied("delete"))
    found = seen(server, storage_options=server.storage_options | {"secret": SECRET})
    assert SECRET not in repr(found)
    assert outcomes(found)["delete"] == "no"
    assert found.ok
    assert any("delete" in one for one in found.advice)
    (folder,) = found.leftovers
    assert all(f"s3://bkt/{key}".startswith(folder) for key in server.dump("bkt"))


def test_a_storage_that_can_only_be_read_is_no_place_to_save(server: S3Server) -> None:
    """What needs writing is skipped, and the answer is no."""
    server.faults(_denied("put", "create_upload"))
    found = seen(server)
    assert not found.ok
    assert (outcomes(found)["list"], outcomes(found)["write"]) == ("yes", "no")
    assert set(outcomes(found).values()) == {"yes", "no", "skipped"}
    assert server.dump("bkt") == {}


def test_a_storage_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    """There is nothing to say about it."""
    options = {
        "key": "k",
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"},
    }
    with pytest.raises(StorageError) as caught:
        diagnose("s3://bkt/run", storage_options=options, retry=ONCE, timeout=HANG_S)
    assert SECRET not in str(caught.value)
    with pytest.raises(InvalidInputError):
        diagnose("no-such-scheme://x")
    assert list(tmp_path.iterdir()) == []


PAGES = {
    "html": b"<!DOCTYPE html><html><body>Welcome<br>to the console</body></html>",
    "json": b'{"status": "ok"}',
    "nothing": b"",
}


def console(page: bytes) -> AbstractContextManager[str]:
    """Answer every request with 200 and a page; give host and port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Print nothing."""

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline(65537)
            if not self.raw_requestline or not self.parse_request():
                self.close_connection = True
                return
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(page)

    return served(Handler)


def options_of(storage: str, place: str) -> tuple[str, dict[str, Any]]:
    address = f"http://{place}"
    if storage == "s3":
        inner = {"endpoint_url": address, "region_name": "us-east-1"}
        return "s3://bucket/run", {"key": "k", "secret": "s", "client_kwargs": inner}
    if storage == "gs":
        return "gs://bucket/run", {"endpoint_url": address, "token": "anon"}
    if storage == "az":
        text = (
            "DefaultEndpointsProtocol=http;AccountName=me;AccountKey=bWU=;"
            f"BlobEndpoint={address}/me;"
        )
        return "az://container/run", {"connection_string": text}
    return "webdav://run", {"base_url": address}


@pytest.mark.parametrize(
    ("storage", "page"),
    [("s3", "html"), ("s3", "nothing"), ("gs", "json"), ("az", "nothing"), ("webdav", "html")],
)
def test_pages_are_not_taken_for_an_empty_root(storage: str, page: str) -> None:
    """No call that reads or writes takes a page for an answer; the error names the endpoint."""
    with console(PAGES[page]) as place:
        root, options = options_of(storage, place)

        def restore() -> object:
            with CheckpointManager(root, storage_options=options, retry=ONCE) as manager:
                return manager.restore({"a": 1})

        for call in (
            restore,
            lambda: ckpt_storage.list_checkpoints(root, storage_options=options, retry=ONCE),
            lambda: ckpt_storage.save({"a": 1}, root, storage_options=options, retry=ONCE),
        ):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.kind not in {"not-found", "exists"}
            assert place in str(caught.value)
        with pytest.raises(CheckpointError) as refused:
            ckpt_storage.open_checkpoint(root, storage_options=options, retry=ONCE)
        assert not isinstance(refused.value, FileNotFoundError)
