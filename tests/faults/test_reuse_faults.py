"""A save that reuses files of its base, cut and failed at each of its storage operations."""

from __future__ import annotations

import contextlib
import logging
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from dcp_cases import same, seeded
from fault_tools import Faulty, Racing, ScriptedBackends, each_fault
from local_stores import local_store
from posix_faults import FaultPosix
from s3_server import FaultRule, S3Server, crash_rules
from servers import Running

import ckpt_storage
import ckpt_storage.saves.session
from ckpt_storage import CheckpointError, CheckpointNotFoundError, RetryPolicy, verify
from ckpt_storage.errors import CheckpointInProgressError, StorageError
from ckpt_storage.store import Location, abilities
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Action, Script, SimulatedCrash

pytest.importorskip("xxhash", reason="the extra `reuse`")

pytestmark = pytest.mark.usefixtures("one_core")

QUICK = RetryPolicy(attempt_count=3, first_delay_s=0.001, max_delay_s=0.002)

WRITES = "put.*|delete.*|.*_upload|copy_.*|make_folders|flush_parts"

STAYING = {"w0": seeded(1, 300), "w1": seeded(2, 300)}


def state_of(number: int) -> dict[str, Any]:
    return {"base": STAYING, "lora": seeded(9 + number, 30)}


OLD, NEW = ({"base.w0": STAYING["w0"], "base.w1": STAYING["w1"], "lora": state_of(n)["lora"]}
            for n in (0, 1))  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are worth a link, and a thousand intended failures are not logged."""
    monkeypatch.setattr("ckpt_storage.saves.reuse._MIN_BYTES", 1000)
    for name in ("ckpt_storage", "c10d-NullHandler-dcp_logger"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def save(number: int, url: str, base: str | None = None, **options: Any) -> Any:
    abilities.RECORDS.clear()  # as in a new process: the same calls, and probes
    return ckpt_storage.save(
        state_of(number), url, base=base, stable="base.*", retry=QUICK, **options
    )


def values_of(url: str, **options: Any) -> dict[str, Any] | None:
    """Return what our reader finds, None if there is no checkpoint; everything is checked."""
    try:
        with ckpt_storage.open_checkpoint(url, **options) as checkpoint:
            values = {name: checkpoint[name].torch() for name in checkpoint}
    except (CheckpointNotFoundError, CheckpointInProgressError):
        return None
    report = verify(url, **options)
    assert report.ok, report.problems
    return values


DISK_ACTIONS: dict[Action, str] = {
    "crash_before": "",
    "crash_after": "",
    "torn": "pwritev",
    "error": "",
    "lost_answer": "",
}


def test_a_reusing_save_on_a_disk_survives_every_fault_at_every_system_call(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base stays whole; the new save is there whole or not; and the next save succeeds."""
    folder = memory_path
    save(0, str(folder / "before" / "0"))
    posix: FaultPosix | None = None
    stores: list[Store] = []

    def opened(location: Location, **options: Any) -> Store:
        sync_files = options["sync_files"]
        stores.append(
            local_store(location.target, posix=posix, policy=QUICK, sync_files=sync_files)
        )
        return stores[-1]

    monkeypatch.setattr(ckpt_storage.saves.session, "open_store", opened)

    def attempt(root: Path, played: FaultPosix) -> None:
        nonlocal posix
        posix = played
        try:
            save(1, str(root / "1"), base=str(root / "0"))
        finally:
            posix = None
            while stores:
                stores.pop().close()

    shutil.copytree(folder / "before", folder / "dry")
    dry = FaultPosix()
    attempt(folder / "dry", dry)
    # What reads the base, links its file and writes the other; the rest is as in any save.
    own = f"{folder}/dry/1/"
    calls = dry.script.calls
    end = next(
        at for at, call in enumerate(calls) if call.path.startswith(own) and "ranks/" in call.path
    )
    chosen = {
        at for at, call in enumerate(calls[:end]) if "distcp" in call.path or own not in call.path
    }
    assert any(calls[at].operation == "link" for at in chosen)
    assert same(values_of(str(folder / "dry" / "1")), NEW)
    for number, (at, rule) in enumerate(each_fault(calls, DISK_ACTIONS)):
        if rule.skip_count not in chosen:
            continue
        root = folder / f"run-{number}"
        shutil.copytree(folder / "before", root)
        played = FaultPosix([rule])
        failure: BaseException | None = None
        try:
            attempt(root, played)
        except BaseException as error:  # noqa: BLE001  # the death of a process, too
            failure = error
        assert failure is None or played.script.crashed or isinstance(failure, CheckpointError), at
        assert same(values_of(str(root / "0")), OLD), at
        values = values_of(str(root / "1"))
        assert values is None or same(values, NEW), at
        assert failure is not None or values is not None, at
        info = save(1, str(root / "1"), base=str(root / "0"), overwrite=values is not None)
        assert info.stats.reused_bytes, at
        assert same(values_of(str(root / "1")), NEW), at
        shutil.rmtree(root / "0")
        assert same(values_of(str(root / "1")), NEW), at
        shutil.rmtree(root)


@pytest.mark.parametrize("kind", ["not-found", "other", "precondition", "refused", "permission"])
def test_a_file_whose_copy_is_refused_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Such an error of a copy says nothing about writes."""
    save(0, str(tmp_path / "0"))
    monkeypatch.setattr(Store, "copy_object", Mock(side_effect=StorageError("no", kind=kind)))
    info = save(1, str(tmp_path / "1"), base=str(tmp_path / "0"))
    assert info.stats.reused_bytes == 0
    assert same(values_of(str(tmp_path / "1")), NEW)


def test_a_copy_for_which_there_is_no_space_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write of the same bytes would fail, too."""
    save(0, str(tmp_path / "0"))
    full = StorageError("the disk is full", kind="no-space")
    monkeypatch.setattr(Store, "copy_object", Mock(side_effect=full))
    with pytest.raises(StorageError, match="the disk is full"):
        save(1, str(tmp_path / "1"), base=str(tmp_path / "0"))
    assert values_of(str(tmp_path / "1")) is None


RIVALS: dict[str, Callable[[str], object]] = {
    "deleter": ckpt_storage.delete,
    "thinner": partial(ckpt_storage.thin, drop="lora"),
    "saver": lambda url: [save(5, url, overwrite=True) for _ in range(2)],
}


@pytest.mark.parametrize("rival", RIVALS)
def test_a_base_that_goes_meanwhile_fails_no_save(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch, rival: str
) -> None:
    """It is deleted, thinned or superseded before any operation; what is gone is written."""
    before, faulty = memory_path / "before", Faulty(memory_path.as_uri())
    save(0, str(before / "0"))
    shutil.copytree(before, memory_path / "dry")
    monkeypatch.setattr(ckpt_storage.saves.session, "open_store", faulty)
    save(1, str(memory_path / "dry" / "1"), base=str(memory_path / "dry" / "0"))
    calls = faulty.script.calls
    end = next(
        at for at, call in enumerate(calls) if "ranks/" in call.path and "put" in call.operation
    )
    reused = set()
    for at in range(1, end + 1):
        root = memory_path / f"run-{at}"
        shutil.copytree(before, root)
        faulty.script = Racing(at, partial(RIVALS[rival], str(root / "0")))
        info = save(1, str(root / "1"), base=str(root / "0"))
        faulty.play()
        reused.add(bool(info.stats.reused_bytes))
        assert same(values_of(str(root / "1")), NEW), at
        shutil.rmtree(root)
    assert True in reused
    faulty.close()


@pytest.fixture(params=["memory", "s3_root", "gcs_root", "azure_root"])
def remote(request: pytest.FixtureRequest) -> Running:
    """A root where files are copied by the storage."""
    if request.param == "memory":
        return Running(url=f"memory://{uuid.uuid4().hex}")
    running: Running = request.getfixturevalue(request.param)
    return running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("action", ["error", "lost_answer", "crash_before", "crash_after"])
def test_a_reusing_save_survives_every_fault_at_every_write(
    remote: Running, scripted: ScriptedBackends, action: Action
) -> None:
    """Copies by the storage included: an error is retried, and a death leaves all or nothing."""
    root = remote.url
    options: dict[str, Any] = {"storage_options": dict(remote.storage_options)}
    save(0, f"{root}/0", **options)
    dry = Script()
    with scripted.playing(dry):
        save(1, f"{root}/dry", base=f"{root}/0", **options)
    assert any(call.operation.startswith("copy_") for call in dry.calls)
    is_death, count = action.startswith("crash"), 0
    for count, (at, rule) in enumerate(each_fault(dry.calls, {action: WRITES}), 1):
        url = f"{root}/cut-{count}"
        with scripted.playing(Script([rule])):
            if is_death:
                with contextlib.suppress(CheckpointError, SimulatedCrash):
                    save(1, url, base=f"{root}/0", **options)
            else:
                save(1, url, base=f"{root}/0", **options)
        with contextlib.suppress(CheckpointNotFoundError):  # it died before its commit
            ckpt_storage.publish(url, **options)
        values = values_of(url, **options)
        assert same(values, NEW) or (values is None and is_death), at
        info = save(1, url, base=f"{root}/0", overwrite=values is not None, **options)
        assert info.stats.reused_bytes, at
        assert same(values_of(url, **options), NEW), at
    assert same(values_of(f"{root}/0", **options), OLD)
    print(f"{count} writes")  # noqa: T201  # for -rP
    assert count > 5


S3_FAULTS: dict[str, Callable[[int], list[FaultRule]]] = {
    "lost answer": lambda number: [FaultRule(after=number, action="lost")],
    "death": lambda number: crash_rules(number + 1, "after"),
}


@pytest.mark.parametrize("fault", S3_FAULTS)
def test_a_reusing_save_on_s3_survives_every_fault_at_every_request(
    server: S3Server, fault: str
) -> None:
    """What passes is not noticed; after a death the new save is there whole or not at all."""
    options: dict[str, Any] = {"storage_options": server.storage_options}
    save(0, "s3://bkt/0", **options)
    server.reset_counters()
    info = save(1, "s3://bkt/dry", base="s3://bkt/0", **options)
    assert info.stats.reused_bytes > 2400
    # Those of the base, and of shard files; the rest is as in any save.
    requests = list(enumerate(server.requests))
    chosen = [at for at, sent in requests if sent.key.startswith("0/") or "distcp" in sent.key]
    for number in chosen:
        url = f"s3://bkt/cut-{number}"
        server.faults(S3_FAULTS[fault](number))
        refused = (CheckpointError,) if fault == "death" else ()
        with contextlib.suppress(*refused):
            save(1, url, base="s3://bkt/0", **options)
        server.faults([])
        values = values_of(url, **options)
        assert same(values, NEW) or (values is None and fault == "death"), number
        again = save(1, url, base="s3://bkt/0", overwrite=values is not None, **options)
        assert again.stats.reused_bytes > 2400, number
        assert same(values_of(url, **options), NEW), number
    assert same(values_of("s3://bkt/0", **options), OLD)
