"""A save that reuses files of its base, cut and failed at each of its storage operations."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dcp_cases import same, seeded
from fault_tools import each_fault
from local_stores import local_store

import ckpt_storage
import ckpt_storage.saves.session
from ckpt_storage import CheckpointError, CheckpointNotFoundError, RetryPolicy, verify
from ckpt_storage.errors import CheckpointInProgressError
from ckpt_storage.store import Location, abilities
from ckpt_storage.store.store import Store
from ckpt_storage.testing.faults import Action
from ckpt_storage.testing.posix_faults import FaultPosix
from ckpt_storage.testing.s3_server import FaultRule, S3Server, crash_rules

pytest.importorskip("xxhash", reason="the extra `reuse`")

pytestmark = pytest.mark.usefixtures("one_core")

QUICK = RetryPolicy(attempt_count=3, first_delay_s=0.001, max_delay_s=0.002)

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
    abilities.forget_all()  # as in a new process: the same calls, and probes
    return ckpt_storage.save(
        state_of(number), url, base=base, stable="base.*", retry=QUICK, **options
    )


def values_of(url: str, **options: Any) -> dict[str, Any] | None:
    """Return what our reader finds, None if there is no checkpoint; everything is checked."""
    try:
        with ckpt_storage.open_checkpoint(url, **options) as found:
            values = {name: found[name].torch() for name in found}
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
        found = values_of(str(root / "1"))
        assert found is None or same(found, NEW), at
        assert failure is not None or found is not None, at
        info = save(1, str(root / "1"), base=str(root / "0"), overwrite=found is not None)
        assert info.stats.reused_bytes, at
        assert same(values_of(str(root / "1")), NEW), at
        shutil.rmtree(root / "0")
        assert same(values_of(str(root / "1")), NEW), at
        shutil.rmtree(root)


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
    chosen = [at for at, one in requests if one.key.startswith("0/") or "distcp" in one.key]
    for number in chosen:
        url = f"s3://bkt/cut-{number}"
        server.faults(S3_FAULTS[fault](number))
        refused = (CheckpointError,) if fault == "death" else ()
        with contextlib.suppress(*refused):
            save(1, url, base="s3://bkt/0", **options)
        server.faults([])
        found = values_of(url, **options)
        assert same(found, NEW) or (found is None and fault == "death"), number
        again = save(1, url, base="s3://bkt/0", overwrite=found is not None, **options)
        assert again.stats.reused_bytes > 2400, number
        assert same(values_of(url, **options), NEW), number
    assert same(values_of("s3://bkt/0", **options), OLD)
