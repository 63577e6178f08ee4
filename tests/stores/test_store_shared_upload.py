"""Shared uploads across processes, through faults, and past those that come too late."""

from __future__ import annotations

import base64
import dataclasses
import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from crc32c import crc32c
from limits import HANG_S
from local_stores import error_of, local_store
from posix_faults import FaultPosix
from power_cuts import PowerCutPosix
from remote_tools import plain
from s3_server import FaultRule, S3Server
from servers import ask

from ckpt_storage.errors import CheckpointError, InvalidInputError, StorageError
from ckpt_storage.options import RetryPolicy
from ckpt_storage.store.backend import Part, PartCopy
from ckpt_storage.store.backends.local import LocalBackend
from ckpt_storage.store.backends.posix import Posix
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Rule

PATH = "hf/model.safetensors"
PART_BYTES = 5 * 1024 * 1024
POLICY = RetryPolicy(attempt_count=3, first_delay_s=0.01, max_delay_s=0.02)


def part(number: int) -> bytes:
    return bytes([number + 1]) * PART_BYTES


def view(data: bytes) -> list[memoryview]:
    return [memoryview(data)]


def local(tmp_path: Path, posix: Posix | None = None) -> Store:
    local_store(tmp_path / "run").make_folders(["hf"])
    return local_store(tmp_path / "run", posix=posix)


@pytest.mark.parametrize(
    ("operation", "is_member"), [("fsync", True), ("fsync", False), ("write_out", True)]
)
def test_a_failed_sync_is_final(tmp_path: Path, operation: str, *, is_member: bool) -> None:
    """After it failed once, neither member nor owner goes on: the kernel may have lost pages.

    Without syncs, a network file system says at the closing that it could not store a part.
    """
    posix = FaultPosix([Rule(action="error", operation=operation, errno=errno.EDQUOT)])
    local(tmp_path)
    faulty = local_store(
        tmp_path / "run", posix=posix, policy=POLICY, sync_files=operation == "fsync"
    )
    owner = (local(tmp_path) if is_member else faulty).upload(PATH)
    writer = faulty.join(PATH, owner.token()) if is_member else owner
    writer.write_part(0, 0, view(b"data"), last=True)
    for step in (writer.receipts, writer.receipts, lambda: owner.complete(4)):
        with pytest.raises(StorageError):
            step()
    called = [call.operation for call in posix.script.calls]
    assert called.count("fsync") == (operation == "fsync")
    assert posix.open_count == 0
    owner.abort()
    assert list((tmp_path / "run" / "hf").iterdir()) == []


def test_what_a_member_gave_receipts_for_survives_a_power_cut(tmp_path: Path) -> None:
    """A member syncs its own writes, as the owner's host may not have them in its cache."""
    posix = PowerCutPosix(tmp_path / "graveyard")
    store = local(tmp_path)
    owner = store.upload(PATH)
    member = local(tmp_path, posix).join(PATH, owner.token())
    member.write_part(0, 0, view(b"data"), last=True)
    receipts = member.receipts()
    posix.power_cut("data")
    owner.complete(4, receipts=receipts)
    assert store.get(PATH).data == b"data"


def test_a_token_names_no_file_elsewhere(tmp_path: Path) -> None:
    """A forged one cannot make a member write to any other file, nor remove one."""
    store = local(tmp_path)
    draft = ".x.tmp-0123456789abcdef"
    link = tmp_path / "run" / "hf" / draft
    link.symlink_to(tmp_path / "victim")
    (tmp_path / "victim").write_bytes(b"safe")
    elsewhere = ["../x", PATH, "/etc/passwd", draft, f"hf/{draft}/../../y", f"hf/../{draft}"]
    for token in [*elsewhere, f"hf/{draft}"]:
        member = store.join(PATH, token)
        with pytest.raises(InvalidInputError if token in elsewhere else StorageError):
            member.write_part(0, 0, view(b"data"), last=True)
        member.abort()
    for token in ["../x", f"../{draft}", f"/{draft}"]:
        with pytest.raises(InvalidInputError):
            LocalBackend(str(tmp_path / "run")).abort_upload("", token)
    assert (tmp_path / "victim").read_bytes() == b"safe"


def test_parts_carry_checksums_from_end_to_end(server: S3Server) -> None:
    """The finished object has a CRC-32C of those of its parts, as AWS computes it."""
    store = plain(server)
    upload = store.upload(PATH)
    upload.write_part(0, 0, view(part(0)), last=False)
    upload.write_part(1, PART_BYTES, view(b"end"), last=True)
    upload.complete(PART_BYTES + 3)
    asked = {"x-amz-checksum-mode": "ENABLED"}
    _, headers, data = ask(server.endpoint_url, "GET", f"/bkt/run/{PATH}", headers=asked)
    assert data == part(0) + b"end"
    crcs = b"".join(crc32c(one).to_bytes(4, "big") for one in (part(0), b"end"))
    told = base64.b64encode(crc32c(crcs).to_bytes(4, "big")).decode()
    assert headers["x-amz-checksum-crc32c"] == f"{told}-2"


def test_a_source_that_changes_between_copies_is_noticed(server: S3Server) -> None:
    """All copies of one source come from the version that the first one saw."""
    store = plain(server)
    store.put("source", part(0) + part(1))
    source = store.copy_source("source")
    assert source is not None
    upload = store.upload(PATH)
    first = PartCopy(number=0, offset=0, source=source, start=0, length=PART_BYTES)
    told = upload.copy_part(first)
    assert told == crc32c(part(0))
    store.replace("source", part(2) + part(3))
    later = dataclasses.replace(first, number=1, offset=PART_BYTES, start=PART_BYTES)
    assert error_of(lambda: upload.copy_part(later)).kind == "precondition"
    upload.abort()
    assert store.abort_uploads("") == 0


def test_a_part_that_arrives_while_its_upload_is_aborted_leaves_nothing(server: S3Server) -> None:
    """The owner's late part finds that the upload was aborted, and nothing stays open."""
    store = plain(server)
    upload = store.upload(PATH)
    upload.token()
    server.faults([FaultRule(op="part", action="delay", delay_s=0.5)])
    failures: list[CheckpointError] = []

    def late() -> None:
        try:
            upload.write_part(0, 0, view(part(0)), last=True)
        except CheckpointError as error:
            failures.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    upload.abort()
    thread.join(HANG_S)
    server.faults([])
    assert failures
    assert store.abort_uploads("") == 0
    assert store.list("") == []


def test_an_upload_that_has_ended_begins_no_other(server: S3Server) -> None:
    """An object of one part was put in one request; who asks for a token later gets none."""
    store = plain(server)
    upload = store.upload(PATH)
    upload.write_part(0, 0, view(b"data"), last=True)
    upload.complete(4)
    with pytest.raises(StorageError, match="was ended before"):
        upload.token()
    assert store.abort_uploads("") == 0


def test_a_part_that_ends_after_the_receipts_were_told_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would know of it: it is in no receipt, so its writer must not take it for written."""
    put, upload = LocalBackend.put_part, local(tmp_path).upload(PATH)

    def late(backend: LocalBackend, *given: Any, **more: Any) -> str:
        told = put(backend, *given, **more)
        assert upload.receipts() == []
        return told

    monkeypatch.setattr(LocalBackend, "put_part", late)
    with pytest.raises(StorageError, match="was ended before"):
        upload.write_part(0, 0, view(b"data"), last=True)
    upload.abort()


def test_gaps_and_overlaps_of_receipts_are_found(tmp_path: Path) -> None:
    """Only receipts that are the object exactly, in the order of their numbers, complete it."""
    store = local(tmp_path)

    for places in (
        [(0, 0, 4)],
        [(1, 4, 4)],
        [(0, 0, 4), (1, 3, 5)],
        [(0, 0, 4), (1, 4, 4), (2, 8, 1)],
        [(1, 0, 4), (0, 4, 4)],
        [(0, 0, 4), (1, 4, 3), (1, 4, 4)],
    ):
        upload = store.upload(PATH)
        store.join(PATH, upload.token()).write_part(0, 0, view(b"12345678"), last=True)
        receipts = [Part(number=n, offset=at, size_bytes=size) for n, at, size in places]
        with pytest.raises(CheckpointError):
            upload.complete(8, receipts=receipts)
        upload.abort()
    assert store.list("") == []
