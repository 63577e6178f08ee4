"""`diagnose`: what is found out about a storage, and that nothing of it stays."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from servers import Running

from ckpt_storage.errors import InvalidInputError, StorageError
from ckpt_storage.inspect.doctor import Diagnosis, diagnose
from ckpt_storage.options import MIB, RetryPolicy
from ckpt_storage.store import Range, open_store
from ckpt_storage.store.store import Store
from ckpt_storage.testing.s3_server import FaultRule, S3Server

ONCE = RetryPolicy(attempt_count=1)
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"


def outcomes(found: Diagnosis) -> dict[str, str]:
    """Return what was found out, by probe."""
    return {probe.name: probe.outcome for probe in found.probes}


def test_a_disk_can_do_all_but_conditions_and_stays_as_it_was(tmp_path: Path) -> None:
    """Folders that had to be made are gone again; files that were there are untouched."""
    (tmp_path / "mine.txt").write_text("mine")
    found = diagnose(tmp_path / "no" / "such", large_bytes=MIB)
    assert found.ok
    assert {name for name, outcome in outcomes(found).items() if outcome != "yes"} == {
        "conditional replace"
    }
    assert found.kind == "posix"
    assert found.leftovers == ()
    assert [path.name for path in tmp_path.rglob("*")] == ["mine.txt"]


def test_a_large_file_takes_the_memory_of_its_parts(tmp_path: Path) -> None:
    """64 MiB are sent and read back by a process that holds a few."""
    diagnose(tmp_path, large_bytes=MIB)
    tracemalloc.start()
    try:
        assert diagnose(tmp_path, large_bytes=64 * MIB).ok
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 24 * MIB


def test_other_bytes_than_were_sent_are_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage that returns a wrong byte somewhere in a large file cannot be used."""
    read = Store.read

    def wrong(self: Store, path: str, ranges: Sequence[Range], **options: Any) -> None:
        read(self, path, ranges, **options)
        for start, view in ranges:
            if start:
                view[-1] ^= 1

    monkeypatch.setattr(Store, "read", wrong)
    found = diagnose(tmp_path, large_bytes=3 * MIB)
    assert not found.ok
    (probe,) = [probe for probe in found.probes if probe.name == "upload"]
    assert "other bytes" in probe.detail


def test_s3_can_do_everything_and_stays_as_it_was(server: S3Server) -> None:
    """No object and no open upload is left; every measure was taken."""
    found = diagnose("s3://bkt/run", storage_options=server.storage_options, large_bytes=11 * MIB)
    assert set(outcomes(found).values()) == {"yes"}
    assert server.dump("bkt") == {}
    store = open_store("s3://bkt", storage_options=server.storage_options)
    assert store.abort_uploads("") == 0
    store.close()
    measures = {one.name: one for one in found.measures}
    assert set(measures) == {"small put", "small get", "list", "large put", "large get"}
    for one in measures.values():
        assert 0 < one.least_s <= one.median_s <= one.most_s
    large = measures["large get"]
    assert large.bytes_per_s == pytest.approx(11 * MIB / large.median_s)
    assert found.clock_offset_s is not None
    assert found.clock_doubt_s is not None
    assert abs(found.clock_offset_s) <= found.clock_doubt_s
    assert found.capabilities["if_match"] is True


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
        found = diagnose("s3://bkt/run", storage_options=server.storage_options, large_bytes=MIB)
    assert outcomes(found)["exclusive create"] == "no"
    assert outcomes(found)["conditional replace"] == "no"
    assert found.capabilities["exclusive_create"] is True
    assert "commit_url" in {one.option for one in found.advice}


def _denied(*ops: str) -> list[FaultRule]:
    return [
        FaultRule(op=op, times=0, action="status", status=403, code="AccessDenied") for op in ops
    ]


def test_what_cannot_be_deleted_is_named(server: S3Server) -> None:
    """Without the right to delete, each object that stays is listed, and the right is missed."""
    server.faults(_denied("delete", "bulk_delete"))
    found = diagnose(
        "s3://bkt/run", storage_options=server.storage_options, large_bytes=MIB, retry=ONCE
    )
    assert outcomes(found)["delete"] == "no"
    assert found.ok
    assert any("delete" in one.value for one in found.advice)
    assert {f"s3://bkt/{key}" for key in server.dump("bkt")} <= set(found.leftovers) != set()
    assert all(path.startswith("s3://bkt/run/.ckpt-storage-probe-") for path in found.leftovers)


def test_a_storage_that_can_only_be_read_is_no_place_to_save(server: S3Server) -> None:
    """What needs writing is skipped, and the answer is no."""
    server.faults(_denied("put", "create_upload"))
    found = diagnose("s3://bkt/run", storage_options=server.storage_options, retry=ONCE)
    assert not found.ok
    assert outcomes(found)["list"] == "yes"
    assert outcomes(found)["write"] == "no"
    assert set(outcomes(found).values()) == {"yes", "no", "skipped"}
    assert server.dump("bkt") == {}


def test_without_the_right_to_list_saving_works(server: S3Server) -> None:
    """And the diagnosis says what does not."""
    server.faults(_denied("list"))
    found = diagnose(
        "s3://bkt/run", storage_options=server.storage_options, large_bytes=MIB, retry=ONCE
    )
    assert found.ok
    assert outcomes(found)["list"] == "no"
    assert any("list" in one.value for one in found.advice)


def test_a_storage_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    """There is nothing to say about it."""
    options = {
        "key": "k",
        "secret": SECRET,
        "client_kwargs": {"endpoint_url": "http://127.0.0.1:9"},
    }
    with pytest.raises(StorageError) as caught:
        diagnose("s3://bkt/run", storage_options=options, retry=ONCE, timeout=20)
    assert SECRET not in str(caught.value)
    with pytest.raises(InvalidInputError):
        diagnose("no-such-scheme://x")
    assert list(tmp_path.iterdir()) == []


def test_credentials_show_nowhere(server: S3Server) -> None:
    """Neither in probes nor in advice nor in what is left."""
    server.faults(_denied("bulk_delete", "delete", "list"))
    options = server.storage_options | {"secret": SECRET}
    found = diagnose("s3://bkt/run", storage_options=options, large_bytes=MIB, retry=ONCE)
    assert SECRET not in repr(found)
