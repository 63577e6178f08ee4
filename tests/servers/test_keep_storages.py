"""Copies of a part and thinnings on every kind of bucket: the storage moves the bytes."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import part_cases
import pytest
from dcp_cases import same, seeded
from fault_tools import Faulty, each_fault
from servers import Running

import ckpt_storage
import ckpt_storage.saves.session
from ckpt_storage import (
    CheckpointError,
    IntegrityError,
    RetryPolicy,
    copy,
    open_checkpoint,
    thin,
    verify,
)
from ckpt_storage.store import Location, open_store

KEPT: dict[str, Any] = {"model": seeded(1, 300, 500)}
WHOLE: dict[str, Any] = {**KEPT, "optim": seeded(2, 300, 500)}


@pytest.fixture(params=["s3_root", "moto_root", "gcs_root", "azure_root"])
def root(request: pytest.FixtureRequest) -> Running:
    running: Running = request.getfixturevalue(request.param)
    return running


def found_at(url: str, options: dict[str, Any]) -> dict[str, Any]:
    with open_checkpoint(url, storage_options=options) as found:
        return {name: found[name].torch() for name in found}


def test_no_byte_of_a_file_that_stays_whole_is_sent(root: Running) -> None:
    """Neither by a copy of a part nor by a thinning; both are sound, and the rest is freed."""
    options = dict(root.storage_options)
    whole, part = f"{root.url}/whole", f"{root.url}/part"
    part_cases.save(whole, WHOLE, storage_options=options)
    copied = copy(whole, part, exclude="optim*", storage_options=options)
    assert (copied.sent_bytes, copied.copied_bytes) == (0, copied.total_bytes)
    thinned = thin(whole, drop="optim*", storage_options=options)
    assert (thinned.sent_bytes, thinned.copied_bytes) == (0, thinned.kept_bytes)
    for url in (whole, part):
        assert same(found_at(url, options), KEPT)
        assert verify(url, storage_options=options).ok
    store = open_store(Location.of(whole, options))
    assert {one.path.split("/")[1] for one in store.list("saves")} == {thinned.save_id}


def test_a_file_that_is_reused_is_not_sent(root: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage copies it, whatever befalls the requests of the copy; the base may go."""
    pytest.importorskip("xxhash", reason="the extra `reuse`")
    monkeypatch.setattr("ckpt_storage.saves.reuse._MIN_BYTES", 1000)
    options = dict(root.storage_options)
    state = {"base": KEPT["model"], "lora": seeded(3, 20)}
    save = partial(ckpt_storage.save, state, stable="base", storage_options=options)
    save(f"{root.url}/0")
    faulty = Faulty(f"{root.url}/", retry=RetryPolicy(attempt_count=3, first_delay_s=0.001))
    monkeypatch.setattr(ckpt_storage.saves.session, "open_store", faulty)
    save(f"{root.url}/dry", base=f"{root.url}/0")
    calls = list(faulty.script.calls)
    copying = [at for at, call in enumerate(calls) if call.operation.startswith("copy_")]
    assert copying
    for at, rule in each_fault(calls, ["error", "lost_answer", "crash_after"]):
        if rule.skip_count not in copying:
            continue
        url = f"{root.url}/{rule.action}-{rule.skip_count}"
        faulty.play(rule)
        with contextlib.suppress(*[CheckpointError] if rule.action == "crash_after" else []):
            info = save(url, base=f"{root.url}/0")
            assert info.stats is not None
            assert info.stats.reused_bytes > 4 * 300 * 500, at
        faulty.play()
        if rule.action == "crash_after":
            save(url, base=f"{root.url}/0")
        assert same(found_at(url, options), state), at
        assert verify(url, storage_options=options).ok, at
    ckpt_storage.delete(f"{root.url}/0", storage_options=options)
    assert same(found_at(f"{root.url}/dry", options), state)
    faulty.close()


def test_a_copy_within_a_bucket_of_gcs_sends_no_byte(gcs_root: Running) -> None:
    """The service copies each object and reports the checksum of its content."""
    options = dict(gcs_root.storage_options)
    run, target = f"{gcs_root.url}/run", f"{gcs_root.url}/copy"
    ckpt_storage.save(WHOLE, run, storage_options=options)
    report = copy(run, target, storage_options=options)
    assert (report.read_bytes, report.sent_bytes) == (0, 0)
    assert report.copied_bytes == report.total_bytes
    assert same(found_at(target, options), WHOLE)
    sent = copy(run, f"{gcs_root.url}/again", storage_options=options, copies="never")
    assert (sent.copied_bytes, sent.sent_bytes) == (0, sent.total_bytes)


def test_a_damaged_object_of_gcs_is_not_copied(gcs_root: Running) -> None:
    """The reported checksum is compared with that of the checkpoint."""
    options = dict(gcs_root.storage_options)
    run, target = f"{gcs_root.url}/run", f"{gcs_root.url}/copy"
    ckpt_storage.save(WHOLE, run, storage_options=options)
    store = open_store(Location.of(run, options))
    (shard,) = (info.path for info in store.list("saves") if info.path.endswith(".distcp"))
    data = bytearray(store.get(shard).data)
    data[-500] ^= 1
    store.replace(shard, bytes(data))
    with pytest.raises(IntegrityError, match="does not have the checksum of its writer"):
        copy(run, target, storage_options=options)
    with pytest.raises(CheckpointError):
        open_checkpoint(target, storage_options=options)
