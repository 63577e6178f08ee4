"""`CheckpointManager` in one process on a disk: names, metrics, retention, restore, its races."""

from __future__ import annotations

import gc
import itertools
import math
import os
import shutil
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast
from unittest import mock

import dcp_cases
import manager_cases as cases
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from commit_tools import body_of
from limits import HANG_S

import ckpt_storage
from ckpt_storage import (
    KeepBest,
    KeepClosest,
    KeepEvery,
    KeepLatest,
    PruneReport,
    RetentionPolicy,
    errors,
)
from ckpt_storage.manager.job import BackgroundJob
from ckpt_storage.manager.names_in_use import NamesInUse
from ckpt_storage.manager.root import Root
from ckpt_storage.saves.options import SaveOptions
from ckpt_storage.store.deadline import Deadline
from ckpt_storage.transfer.ranges import RangeReader


def test_saves_land_under_the_names_of_their_steps(tmp_path: Path) -> None:
    """Folders are named by the template; `all`, `latest` and `url_of` read the names back."""
    with cases.manager_of(tmp_path, names="run.{step:04d}") as manager:
        assert manager.latest() is None
        assert manager.all() == []
        info = manager.save(7, cases.state_of(7), sync_files=False)
        assert (
            manager.save_async(12345, cases.state_of(12345), sync_files=False).result(60).step
            == 12345
        )
        assert (info.name, info.step) == ("run.0007", 7)
        assert manager.url_of(7) == info.url == f"file://{tmp_path}/run.0007"
        assert [one.step for one in manager.all()] == [7, 12345]
        assert cases.latest_step(manager) == 12345
    assert cases.names_in(tmp_path) == ["run.0007", "run.12345"]
    with pytest.raises(errors.InvalidInputError, match="closed"):
        manager.save(8, cases.state_of(8))


def test_step_of_is_the_inverse_of_url_of(tmp_path: Path) -> None:
    """Steps of the root and its mirror have URLs and paths; nothing else below or beside has."""
    with cases.manager_of(tmp_path / "run", mirror=tmp_path / "mirror") as manager:
        urls: list[str | Path] = [manager.url_of(7), manager.target_of(7), f"{manager.url_of(7)}/"]
        urls += [tmp_path / "run/step-00000007", tmp_path / "mirror/step-00000007"]
        assert [manager.step_of(url) for url in urls] == [7] * 5
        others = ["run", "run/step-7", "run/best", "run/step-00000007/hf", "other/step-00000007"]
        assert [manager.step_of(tmp_path / other) for other in others] == [None] * 5
        with pytest.raises(errors.InvalidInputError):
            manager.step_of("s4://b/step-00000007")


def test_a_url_of_another_root_is_restored(tmp_path: Path) -> None:
    """Its step is the recorded one, or that of its name; the root of the manager is not read."""
    with cases.manager_of(tmp_path / "old", names="at-{step}") as old:
        cases.save(old, 5)
    plain = {**cases.state_of(6)}
    ckpt_storage.save(plain, tmp_path / "old/step-00000006", sync_files=False)
    ckpt_storage.save(plain, tmp_path / "old/last", sync_files=False)
    with cases.manager_of(tmp_path / "new") as manager:
        cases.save(manager, 9)
        for url, step in (("old/at-5", 5), ("old/step-00000006", 6), ("new/step-00000009", 9)):
            assert cases.restore(manager, url=tmp_path / url).step == step
        assert cases.restore(manager, url=f"file://{tmp_path}/old/at-5", check="deep").step == 5
        last = manager.restore(cases.blank(), url=tmp_path / "old/last")
        assert last is not None
        assert (last.step, last.info.name, last.info.step) == (0, "last", None)


def test_a_url_that_cannot_be_restored_is_an_error(tmp_path: Path) -> None:
    """No other checkpoint takes the place of one that is missing or damaged."""
    with cases.manager_of(tmp_path / "run") as manager:
        cases.save(manager, 1)
        cases.save(manager, 2)
        cases.damage(tmp_path / "run/step-00000002")
        with pytest.raises(errors.IntegrityError):
            manager.restore(cases.blank(), url=manager.url_of(2))
        with pytest.raises(errors.CheckpointNotFoundError, match="step-00000003"):
            manager.restore(cases.blank(), url=manager.url_of(3))
        with pytest.raises(errors.InvalidInputError, match="both"):
            manager.restore(cases.blank(), url=manager.url_of(1), step=1)
        with pytest.raises(errors.InvalidInputError, match="folder of a root"):
            manager.restore(cases.blank(), url="memory://alone")


def test_metrics_are_kept_with_the_commit(tmp_path: Path) -> None:
    """Numbers of any library, NaN and infinity come back from every list, and from the record."""
    given = {"loss": torch.tensor(0.25), "acc": 1, "nan": math.nan, "inf": -math.inf}
    with cases.manager_of(tmp_path) as manager:
        info = manager.save(3, cases.state_of(3), metrics=given, sync_files=False)
        cases.save(manager, 4)
    assert info.metrics["loss"] == 0.25
    with cases.manager_of(tmp_path) as manager:
        three, four = manager.all()
    assert list(three.metrics) == ["loss", "acc", "nan", "inf"]
    assert str(list(three.metrics.values())) == "[0.25, 1.0, nan, -inf]"
    assert four.metrics == {}
    kept = {"loss": 0.25, "acc": 1.0, "nan": "nan", "inf": "-inf"}
    for step, metrics in ((3, {"metrics": kept}), (4, {})):
        slot = tmp_path / f"step-0000000{step}/commits/00000001.json"
        assert body_of(slot.read_bytes())["user"] == {"step": step, **metrics}
    (listed, _) = ckpt_storage.list_checkpoints(tmp_path)
    assert (listed.step, listed.metrics["loss"]) == (3, 0.25)


def test_after_each_save_what_no_policy_keeps_goes(tmp_path: Path) -> None:
    """In the background, on its own thread, with the reasons in the report; exports go too."""
    threads: set[str] = set()

    class KeepNothing(RetentionPolicy):
        def kept(self, candidates: Sequence[ckpt_storage.Candidate]) -> dict[str, str]:
            del candidates
            threads.add(threading.current_thread().name)
            return {}

    keep = KeepLatest(2) | KeepEvery(4) | KeepBest("loss", "min") | KeepNothing()
    with cases.manager_of(tmp_path, keep=keep) as manager:
        for step in range(1, 9):
            metrics = {"loss": abs(step - 3) + 0.5}
            manager.save(
                step, cases.state_of(step), metrics=metrics, consolidate=step == 2, sync_files=False
            )
        assert manager.wait_pruned(60)
        assert manager.last_prune is not None
        assert [decision.step for decision in manager.last_prune.kept] == [3, 4, 7, 8]
        name = f"ckpt-storage prune {manager.url}"
        assert threads == {name}
    assert not any(thread.name == name for thread in threading.enumerate())
    assert cases.names_in(tmp_path) == [f"step-{step:08d}" for step in (3, 4, 7, 8)]
    assert not (tmp_path / "step-00000002/hf").exists()
    assert cases.seen_in(tmp_path) == {step: step for step in (3, 4, 7, 8)}
    for step in (3, 4, 7, 8):
        dcp_cases.load_stock(state := cases.blank(), tmp_path / f"step-{step:08d}")
        assert cases.step_in(state) == step
    with pytest.raises(errors.CheckpointGoneError):
        ckpt_storage.load(cases.blank(), tmp_path / "step-00000001")


def test_a_run_off_the_grid_keeps_the_closest(tmp_path: Path) -> None:
    """Also when each save is followed by a prune, and two jobs of the run have different steps."""
    for steps in ((3, 7, 9, 12), (18, 21, 26)):
        keep = KeepClosest(every_steps=10) | KeepLatest(1)
        with cases.manager_of(tmp_path, keep=keep) as manager:
            for step in steps:
                cases.save(manager, step)
                assert manager.wait_pruned(60)
    assert cases.names_in(tmp_path) == [f"step-{step:08d}" for step in (3, 9, 21, 26)]


def die_beside(checkpoint: Path, save_id: str) -> Path:
    dead = checkpoint / "saves" / save_id
    dead.mkdir()
    (dead / "__0_0.distcp").write_bytes(b"half")
    os.utime(dead / "__0_0.distcp", (0, 0))
    return dead


def test_pruning_by_hand_plans_first(tmp_path: Path) -> None:
    """Without policies nothing goes; with `pruning="manual"` only `prune` deletes, no dry run."""
    with cases.manager_of(tmp_path) as manager:
        cases.save(manager, 1, 2)
        with pytest.raises(errors.InvalidInputError, match="keep="):
            manager.prune()
    with cases.manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        cases.save(manager, 3)
        assert [one.step for one in cases.pruned(manager, dry_run=True).planned] == [1, 2]
        assert len(cases.names_in(tmp_path)) == 3
        assert manager.last_prune is None
        dead = die_beside(tmp_path / "step-00000003", "20200101T000000Z-0123456789abcdef")
        report = cases.pruned(manager)
        assert report.freed == (dead.name,), "of a save that died beside one that is kept"
        assert report.deleted == ("step-00000001", "step-00000002")
        assert report is manager.last_prune
    assert cases.names_in(tmp_path) == ["step-00000003"]
    dead = die_beside(tmp_path / "step-00000003", "20200101T000000Z-0123456789abcde0")
    with cases.manager_of(tmp_path, keep=KeepLatest(2)) as manager:
        cases.save(manager, 4)
    assert not dead.exists(), "in the background, too"
    assert cases.names_in(tmp_path) == ["step-00000003", "step-00000004"]


def test_folders_of_others_are_listed_and_left_alone(tmp_path: Path) -> None:
    """Stock checkpoints and other names are in the list and in the plan, and stay as they are."""
    dcp.save(cases.state_of(1), storage_writer=dcp.FileSystemWriter(tmp_path / "step-00000001"))
    dcp.save(cases.state_of(1), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    ckpt_storage.save(cases.state_of(2), tmp_path / "mine", sync_files=False)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/events").write_bytes(b"x")
    with cases.manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        cases.save(manager, 5, 6)
        listed = [(one.name, one.step, one.format) for one in manager.all()]
        assert listed == [
            ("mine", None, "ckpt_storage"),
            ("stock", None, "dcp"),
            ("step-00000001", 1, "dcp"),
            ("step-00000005", 5, "ckpt_storage"),
            ("step-00000006", 6, "ckpt_storage"),
        ]
        report = cases.pruned(manager)
        assert report.deleted == ("step-00000005",)
        assert not report.skipped, "nobody meant to delete or to free what others wrote"
        kept = {decision.name: decision.reasons[0] for decision in report.kept}
        assert kept["step-00000001"] == "another tool wrote it (dcp)"
        assert kept["mine"] == kept["stock"] == kept["logs"] == "it does not belong to this run"
    assert cases.names_in(tmp_path) == ["logs", "mine", "step-00000001", "step-00000006", "stock"]


def test_restore_falls_back_past_several_and_names_them_in_order(tmp_path: Path) -> None:
    """Damaged in a shard, in the manifest, in the slot; what was found so is no `latest`."""
    cases.saved(tmp_path, 1, 2, 3, 4, 5)
    cases.damage(tmp_path / "step-00000005")
    (manifest,) = (tmp_path / "step-00000004").glob("saves/*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-3])
    slot = tmp_path / "step-00000003/commits/00000001.json"
    slot.write_bytes(slot.read_bytes().replace(b'"slot":1', b'"slot":7'))
    with cases.manager_of(tmp_path) as manager:
        found = cases.restore(manager)
        assert found.step == cases.latest_step(manager) == 2
    assert [one.name for one in found.skipped] == [f"step-0000000{step}" for step in (5, 4, 3)]
    assert all(one.reason for one in found.skipped)


def test_restore_reads_all_of_it_where_that_is_asked_for(tmp_path: Path) -> None:
    """What no load needs is found by `check="deep"`; where all are damaged it raises."""
    cases.saved(tmp_path, 1, 2)
    cases.damage(tmp_path / "step-00000002")
    for check, step in (("read", 2), ("deep", 1)):
        with cases.manager_of(tmp_path) as manager:
            found = manager.restore({"w": torch.zeros(16)}, check=cast("Any", check))
        assert found is not None
        assert found.step == step
    cases.damage(tmp_path / "step-00000001")
    with (
        cases.manager_of(tmp_path) as manager,
        pytest.raises(errors.IntegrityError, match="None of the 2"),
    ):
        manager.restore(cases.blank())


def test_damaged_ones_do_not_count_for_retention(tmp_path: Path) -> None:
    """The newest whose documents are damaged takes nobody's place, and the one before it stays."""
    cases.saved(tmp_path, 1, 2, 3)
    (manifest,) = (tmp_path / "step-00000003").glob("saves/*/manifest.json")
    manifest.write_bytes(manifest.read_bytes()[:-3])
    with cases.manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        report = cases.pruned(manager)
        assert report.deleted == ("step-00000001",)
        assert report.newest is not None
        assert report.newest.step == 2
    with cases.manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        assert cases.restore(manager).step == 2


def test_a_run_that_begins_anew_keeps_what_it_saved_last(tmp_path: Path) -> None:
    """Steps lower than those of a run that was given up: the last save stays all the same."""
    cases.saved(tmp_path, 1000, 2000, keep=KeepLatest(2))
    with cases.manager_of(tmp_path, keep=KeepLatest(2)) as manager:
        cases.save(manager, 10, 20)
        assert manager.wait_pruned(60)
        assert manager.last_prune is not None
        twenty = manager.last_prune.kept[0]
        assert twenty.step == 20
        assert "it is what this manager saved last" in twenty.reasons
    assert cases.names_in(tmp_path) == [f"step-{step:08d}" for step in (20, 1000, 2000)]


def test_what_is_being_loaded_or_saved_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prune in the middle of a restore leaves what is read; and what is saved now as well."""
    reports: list[PruneReport] = []
    with cases.manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        cases.save(manager, 1, 2)
        cases.damage(tmp_path / "step-00000002")
        load = ckpt_storage.load

        def slow(state: Any, url: Any, **options: Any) -> None:
            if str(url).endswith("step-00000001"):
                cases.save(manager, 3)
                reports.append(cases.pruned(manager))
            load(state, url, **options)

        monkeypatch.setattr("ckpt_storage.manager.manager.load", slow)
        assert cases.restore(manager).step == 1
        kept = {decision.step: decision.reasons for decision in reports[0].kept}
        assert kept[1] == ("it is being loaded",)
        cases.pruned(manager)
    assert cases.names_in(tmp_path) == ["step-00000003"]


def test_a_step_is_not_saved_twice_unless_asked_to(tmp_path: Path) -> None:
    """It is refused, or replaced by `overwrite`; in the background `close` raises."""
    manager = cases.manager_of(tmp_path)
    cases.save(manager, 1, metrics={"loss": 1})
    with pytest.raises(errors.CheckpointExistsError):
        cases.save(manager, 1)
    cases.save(manager, 1, metrics={"loss": 2}, overwrite=True)
    (info,) = manager.all()
    assert (info.metrics, info.slot) == ({"loss": 2.0}, 2)
    manager.save_async(1, cases.state_of(1))
    with pytest.raises(errors.CheckpointExistsError):
        manager.close()
    assert manager._root.in_use.reasons() == {}  # noqa: SLF001  # nothing public tells


@pytest.mark.parametrize("in_background", [False, True])
def test_the_identity_of_a_save_has_its_step_and_the_restores_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_background: bool
) -> None:
    """Restores and `resume_info` count, and a restore that fails does not."""
    known: list[tuple[Any, Any]] = []
    make = SaveOptions.of

    def recorded(arguments: dict[str, Any], **more: Any) -> Any:
        known.append((arguments["step"], arguments["restores"]))
        return make(arguments, **more)

    monkeypatch.setattr("ckpt_storage.manager.step_save.SaveOptions.of", recorded)

    def save(step: Any) -> None:
        if in_background:
            manager.save_async(step, cases.state_of(1), sync_files=False).result(60)
        else:
            manager.save(step, cases.state_of(1), sync_files=False)

    with cases.manager_of(tmp_path) as manager:
        assert manager.restore(cases.blank()) is None
        save(np.int64(1))
        cases.restore(manager)
        with pytest.raises(errors.CheckpointNotFoundError):
            manager.restore(cases.blank(), step=9)
        save(2)
        assert manager.resume_info() is not None
        with pytest.raises(errors.InvalidInputError):
            save(-1)
    assert known == [(1, 1), (2, 2), (None, 3)]
    assert [type(step) for step, _ in known] == [int, int, type(None)]


def test_a_preemption_save_is_begun_though_an_earlier_save_failed(tmp_path: Path) -> None:
    """The earlier failure is raised after it; the checkpoint counts, and its name is free again."""
    manager = cases.manager_of(tmp_path, preemption=lambda: True, keep=KeepLatest(1))
    cases.save(manager, 1)
    manager.save_async(1, cases.state_of(1))
    step = next(step for step in itertools.count(2) if manager.should_save(step))
    with pytest.raises(errors.CheckpointExistsError) as caught:
        manager.save_async(step, cases.state_of(step), sync_files=False)
    assert any(f"{step:08d} has begun all the same" in note for note in caught.value.__notes__)
    manager.close()
    assert cases.names_in(tmp_path) == [f"step-{step:08d}"]
    assert manager._root.in_use.reasons() == {}  # noqa: SLF001  # nothing public tells


def test_a_prune_that_fails_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A storage that will not be listed is logged; the next save prunes again."""
    with cases.manager_of(tmp_path, keep=KeepLatest(1)) as manager:
        cases.save(manager, 1, 2)
        assert manager.wait_pruned(60)
        refuse = mock.Mock(side_effect=errors.StorageError("no listing today", kind="permission"))
        with monkeypatch.context() as patch:
            patch.setattr(Root, "list_folders", refuse)
            cases.save(manager, 3)
            assert manager.wait_pruned(60)
        assert "no listing today" in caplog.text
        cases.save(manager, 4)
    assert cases.names_in(tmp_path) == ["step-00000004"]


def test_steps_and_seconds_say_when_to_save(tmp_path: Path) -> None:
    """Multiples of `every_steps`; `every_s` after the last save began; nonsense is refused."""
    wrong = {"every_steps": 1.5, "every_s": math.nan, "keep": "all", "pruning": "sometimes"}
    for option, value in wrong.items():
        with pytest.raises(errors.InvalidInputError):
            cases.manager_of(tmp_path, **{option: value})
    for every_steps, due in ((3, [3, 6, 9]), (None, [])):
        with cases.manager_of(tmp_path, every_steps=every_steps) as manager:
            assert [step for step in range(10) if manager.should_save(step)] == due
            with pytest.raises(errors.InvalidInputError):
                manager.should_save(-1)
    now_s = 0.0
    with cases.manager_of(tmp_path, every_s=10) as manager:
        manager._schedule._clock = lambda: now_s  # noqa: SLF001  # not public
        manager._schedule.restart_timer()  # noqa: SLF001  # the same
        for step in range(1, 12):
            now_s += 3.0
            if manager.should_save(step):
                cases.save(manager, step)
    assert cases.names_in(tmp_path) == ["step-00000004", "step-00000008"]


def test_a_wish_during_a_run_gets_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is done by one that begins later, once; also after there was no thread to be had."""
    begun, go = threading.Semaphore(0), threading.Semaphore(0)
    runs: list[int] = []

    def work(_: Deadline) -> None:
        begun.release()
        assert go.acquire(timeout=HANG_S)
        runs.append(1)

    job = BackgroundJob(work, name="ckpt-storage test", timeout_s=HANG_S)
    assert job.wait(0), "nothing was asked for"
    with monkeypatch.context() as patch:
        refuse = mock.Mock(side_effect=RuntimeError("can't start new thread"))
        patch.setattr(threading.Thread, "start", refuse)
        job.wake()
        assert job.wait(0)
        assert isinstance(job.error, RuntimeError)
    for _ in range(2):
        job.wake()
        assert begun.acquire(timeout=HANG_S)
        for _ in range(2):
            job.wake()
        assert not job.wait(0.01), "the second run has not ended"
        go.release()
        assert begun.acquire(timeout=HANG_S)
        go.release()
        assert job.wait(HANG_S)
        assert job.error is None
    assert len(runs) == 4
    job.close(HANG_S)
    job.wake()
    assert len(runs) == 4


def test_closing_stops_a_run_that_takes_too_long() -> None:
    """The run's deadline says so; what was asked for and not begun is given up."""
    begun = threading.Event()

    def work(deadline: Deadline) -> None:
        begun.set()
        deadline.sleep(HANG_S)
        deadline.check("The job")

    job = BackgroundJob(work, name="ckpt-storage test", timeout_s=HANG_S)
    job.wake()
    assert begun.wait(HANG_S)
    job.wake()
    for _ in range(2):
        job.close(0.0)
    assert "was stopped" in str(job.error)
    assert not [t for t in threading.enumerate() if t.name == "ckpt-storage test"]


def test_a_user_waits_until_a_deletion_has_ended() -> None:
    """`acquire` returns once the name is no longer being deleted, and no deletion begins."""
    uses = NamesInUse()
    with ThreadPoolExecutor(1) as pool:
        with uses.reserved_for_deletion("x") as may, uses.reserved_for_deletion("x") as other:
            assert (may, other) == (True, False)
            taking = pool.submit(uses.acquire, "x", "it is being saved", timeout_s=HANG_S)
            with pytest.raises(TimeoutError):
                taking.result(0.05)
        first = taking.result(HANG_S / 6)
    assert uses.reasons() == {"x": "it is being saved"}
    end = uses.acquire("x", "it is being loaded", timeout_s=1)
    first()
    first()
    assert uses.reasons() == {"x": "it is being loaded"}
    with uses.reserved_for_deletion("x") as may:
        assert not may
    end()
    assert uses.reasons() == {}


def overwrite(root: Path, marker: int) -> str | None:
    with cases.manager_of(root) as other:
        return other.save(2, cases.state_of(marker), overwrite=True, sync_files=False).save_id


@pytest.mark.parametrize("when", ["before", "after", "while checked", "while checked, and freed"])
def test_what_is_overwritten_while_it_is_loaded_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The save that is told is the one whose bytes are in the state; none is called damaged."""
    cases.saved(tmp_path, 1, 2)
    load, run = ckpt_storage.load, RangeReader.run
    ids: list[str | None] = []

    def once() -> None:
        if not ids:
            before = set((tmp_path / "step-00000002/saves").iterdir())
            ids.append(overwrite(tmp_path, 77))
            for path in before if "freed" in when else ():
                shutil.rmtree(path)

    def slow_load(*given: Any, **options: Any) -> None:
        if when == "after":
            load(*given, **options)
        once()
        if when == "before":
            load(*given, **options)

    def slow_run(reader: RangeReader, *given: Any, **more: Any) -> None:
        once()
        run(reader, *given, **more)

    is_checked = "checked" in when
    if is_checked:
        monkeypatch.setattr(RangeReader, "run", slow_run)
    else:
        monkeypatch.setattr("ckpt_storage.manager.manager.load", slow_load)
    with cases.manager_of(tmp_path) as manager:
        found = manager.restore(state := cases.blank(), check="deep" if is_checked else "read")
    assert found is not None
    assert (found.step, found.info.save_id, found.skipped) == (2, ids[0], ())
    assert cases.step_in(state) == 77


def test_a_forgotten_manager_is_gone_at_once_and_its_saver(tmp_path: Path) -> None:
    """No cycle keeps it: the worker ends, and the name is free, where nobody collects garbage."""
    manager = cases.manager_of(tmp_path, keep=KeepLatest(1), mirror=tmp_path / "mirror")
    manager.save_async(1, cases.state_of(1), sync_files=False).result(60)
    assert manager.wait_mirrored(60)
    assert manager.wait_pruned(60)
    there: list[weakref.ref[Any]] = [weakref.ref(manager), weakref.ref(manager.saver)]
    gc.disable()
    try:
        del manager
        end_s = time.monotonic() + 10
        while any(one() for one in there) and time.monotonic() < end_s:
            time.sleep(0.01)  # a thread may be at its end
    finally:
        gc.enable()
    assert [one() for one in there] == [None, None]


def test_what_is_overwritten_again_and_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for ever for a job that saves over what is loaded; the error says so."""
    cases.saved(tmp_path, 2)
    with cases.manager_of(tmp_path) as manager:
        slow = mock.Mock(side_effect=lambda *_, **__: overwrite(tmp_path, 3))
        monkeypatch.setattr("ckpt_storage.manager.manager.load", slow)
        with pytest.raises(errors.CheckpointInProgressError, match="was replaced 6 times"):
            manager.restore(cases.blank())


def test_damage_between_two_looks_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record that is damaged after the choice is skipped; without an older one it raises."""
    take = NamesInUse.acquire

    def cut(uses: NamesInUse, name: str, *given: Any, **more: Any) -> Any:
        slot = tmp_path / name / "commits/00000001.json"
        slot.write_bytes(slot.read_bytes()[:-5])
        return take(uses, name, *given, **more)

    cases.saved(tmp_path, 2)
    with cases.manager_of(tmp_path) as manager:
        monkeypatch.setattr(NamesInUse, "acquire", cut)
        with pytest.raises(errors.IntegrityError, match="None of the 1 committed"):
            manager.restore(cases.blank())


def test_a_restore_that_fails_leaves_nothing_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be looked at is pruned later by the same manager."""
    cases.saved(tmp_path, 1, 2)
    away = mock.Mock(side_effect=errors.StorageError("The storage is away.", kind="connection"))
    with cases.manager_of(tmp_path, keep=KeepLatest(1), pruning="manual") as manager:
        with monkeypatch.context() as patch:
            patch.setattr(Root, "read_state", away)
            with pytest.raises(errors.StorageError, match="away"):
                manager.restore(cases.blank(), step=1)
        assert cases.pruned(manager).deleted == ("step-00000001",)
