"""What users do with checkpoints, against the rules of single S3 services."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from limits import HANG_S
from profiles import Service, message_of, profile_server, service, state_of
from s3_server import FaultRule
from safetensors.torch import load_file

import ckpt_storage
from ckpt_storage import StorageError

__all__ = ["profile_server", "service"]


def _needs_listing(service: Service) -> None:
    if service.server.profile == "aws-no-list":
        pytest.skip("the credentials may not list")


def test_what_is_saved_is_loaded(service: Service) -> None:
    """Before a save there is no checkpoint; after it, its state is loaded."""
    url = service.url(1)
    if service.server.profile != "aws-no-list":
        assert service.loaded(url) is None
    service.save(1, url)
    assert service.loaded(url) == 1
    assert service.verify(url) == []


def test_an_overwrite_takes_the_place_of_the_save(service: Service) -> None:
    """The newer state is loaded, and the file for stock readers names its save."""
    url = service.url(1)
    for number in range(1, 4):
        info = service.save(number, url, overwrite=number > 1)
        assert service.loaded(url) == number
        stock = service.files["run/step-1/.metadata"]
        assert info.save_id is not None
        assert info.save_id.encode() in stock
    assert service.verify(url) == []


def test_a_second_save_does_not_overwrite(service: Service) -> None:
    """Without `overwrite` a name that is taken is refused, and nothing changes."""
    url = service.url(1)
    service.save(1, url)
    before = service.files
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        service.save(2, url)
    assert service.files == before


def test_checkpoints_are_listed_by_name(service: Service) -> None:
    """Each committed one below the root, in order, however the service orders its pages."""
    _needs_listing(service)
    for step in (10, 2, 1):
        service.save(step, service.url(step))
    found = ckpt_storage.list_checkpoints(service.root, **service.options)
    assert [info.url for info in found] == [service.url(step) for step in (1, 2, 10)]


def test_pruning_keeps_what_the_policy_keeps(service: Service) -> None:
    """What is not kept is freed, and what is kept is sound."""
    _needs_listing(service)
    for step in (1, 2, 3):
        service.save(step, f"{service.root}/step-{step:08}")
    keep = [ckpt_storage.KeepLatest(1)]
    report = ckpt_storage.prune(service.root, keep, dry_run=False, **service.options)
    assert report.deleted == ("step-00000001", "step-00000002")
    assert service.verify(f"{service.root}/step-00000003") == []
    stays = {path for path in service.files if "/saves/" in path}
    assert all("step-00000003" in path for path in stays)


def test_deleting_frees_the_storage(service: Service) -> None:
    """Only the record of the deletion stays."""
    _needs_listing(service)
    url = service.url(1)
    service.save(1, url)
    service.save(2, url, overwrite=True)
    assert ckpt_storage.delete(url, **service.options)
    assert service.loaded(url) is None
    assert {path.split("/")[2] for path in service.files} <= {"commits"}


def test_dead_saves_are_freed_although_an_upload_cannot_be_aborted(service: Service) -> None:
    """Aborting uploads is an extra: its refusal never stops a deletion."""
    _needs_listing(service)
    url = service.url(1)
    service.save(1, url)
    refused = [
        FaultRule(op=op, times=0, action="status", status=403, code="AccessDenied")
        for op in ("list_uploads", "abort")
    ]
    service.server.faults(refused)
    assert ckpt_storage.delete(url, **service.options)
    service.server.faults([])
    assert {path.split("/")[2] for path in service.files} <= {"commits"}


def test_weights_are_exported(service: Service, tmp_path: Path) -> None:
    """Another reader finds each tensor in the exported files, written in several parts."""
    _needs_listing(service)
    url, output = service.url(1), f"s3://{service.bucket}/hf"
    state = {f"t{i}": torch.arange(30_000) + i for i in range(3)}
    ckpt_storage.save(state, url, part_bytes=70_000, **service.options)
    given = service.options | {"output_storage_options": service.server.storage_options}
    ckpt_storage.consolidate(url, output, **given)
    found: dict[str, torch.Tensor] = {}
    for path, data in service.files.items():
        if path.startswith("hf/") and path.endswith(".safetensors"):
            (tmp_path / "x").write_bytes(data)
            found |= load_file(tmp_path / "x")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_checkpoint_is_copied(service: Service) -> None:
    """Its copy in the same bucket is loaded and sound."""
    source, target = service.url(1), f"s3://{service.bucket}/copies/step-1"
    service.save(1, source)
    given = service.options | {"destination_storage_options": service.server.storage_options}
    ckpt_storage.copy(source, target, **given)
    assert service.loaded(target) == 1
    assert service.verify(target) == []


def test_a_manager_resumes(service: Service) -> None:
    """It saves on schedule, prunes, and restores the newest."""
    _needs_listing(service)
    given = {"keep": [ckpt_storage.KeepLatest(2)], "mode": "thread", **service.options}
    with ckpt_storage.CheckpointManager(service.root, **given) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(step))
    with ckpt_storage.CheckpointManager(service.root, **given) as manager:
        state = state_of(-1)
        restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, state["step"]) == (3, 3)


def test_a_publisher_that_was_paused_brings_back_no_older_save(service: Service) -> None:
    """The file for stock readers names the newest save, whatever the service does with If-Match."""
    if service.server.profile not in {"aws", "if-match-ignored", "ceph", "swift"}:
        pytest.skip("as one of the others")
    url = service.url(1)
    service.save(1, url)
    paused = FaultRule(op="put", key=r"/\.metadata$", action="delay", delay_s=4.0)
    service.server.faults([paused])
    with ThreadPoolExecutor(1) as thread:
        older = thread.submit(service.save, 2, url, overwrite=True)
        service.server.wait_for(
            lambda requests: any(record.fault for record in requests), timeout_s=HANG_S
        )
        newer = service.save(3, url, overwrite=True)
        older.result(60.0)
    assert newer.save_id is not None
    assert newer.save_id.encode() in service.files["run/step-1/.metadata"]
    assert service.verify(url) == []


def test_a_conflict_that_passes_is_no_failure(service: Service) -> None:
    """AWS, "PutObject" (If-None-Match): after 409 ConditionalRequestConflict, retry the upload."""
    conflict = FaultRule(
        op="put", key="commits/", action="status", status=409, code="ConditionalRequestConflict"
    )
    service.server.faults([conflict])
    service.save(1, service.url(1))
    assert service.loaded(service.url(1)) == 1


def test_doctor_says_what_a_save_meets(service: Service) -> None:
    """Where a save works, the last line of the doctor says so."""
    if service.server.profile == "flaky-bytes":
        pytest.skip("the doctor tells of each wrong byte")
    found = ckpt_storage.diagnose(service.root, large_bytes=200_000, **service.options)
    assert found.ok, [probe for probe in found.probes if probe.outcome == "no"]


def test_a_request_for_another_region_names_the_region(service: Service) -> None:
    """The error says which option to set."""
    if service.server.profile not in {"aws", "object-lock"}:
        pytest.skip("the profile has no regions")
    options = service.server.storage_options
    client = options["client_kwargs"] | {"region_name": "eu-central-1"}
    with pytest.raises(StorageError) as caught:
        ckpt_storage.save(
            state_of(1), service.url(1), storage_options=options | {"client_kwargs": client}
        )
    assert "region_name" in message_of(caught.value)
