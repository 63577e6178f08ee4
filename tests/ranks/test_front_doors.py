"""`save` and `load`: as `dcp.save` and `dcp.load` do it, and every failure told to every rank."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import dcp_cases
import front_door_cases as cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import files_below, same, seeded

import ckpt_storage
from ckpt_storage import CheckpointError, ProgressEvent
from ckpt_storage.testing.ranks import RankPool


@pytest.mark.parametrize("world_size", [1, 3])
def test_torchs_reader_loads_what_save_wrote(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    """Any number of ranks saves; torch loads it on one rank and on two, and so does `load`."""
    path = tmp_path / "run"
    ids = ranks.run(cases.save, path, 7, world_size=world_size)
    assert len(set(ids)) == 1
    target = cases.state_of(7, zeros=True)
    dcp_cases.load_stock(target, path)
    cases.assert_state(target, 7)
    ranks.run(cases.load_both_ways, path, 7, world_size=2)
    alone = cases.state_of(7, zeros=True)
    ckpt_storage.load(alone, path)
    cases.assert_state(alone, 7)


def test_one_process_without_a_group_saves_and_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a process group one process does both, gets what was committed, prints nothing."""
    path = tmp_path / "run"
    info = ckpt_storage.save(cases.state_of(3), path, sync_files=False)
    assert info.url == str(path) or info.url.endswith(str(path))
    assert info.slot == 1
    target = cases.state_of(3, zeros=True)
    ckpt_storage.load(target, str(path))
    cases.assert_state(target, 3)
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(cases.state_of(4), path)
    assert ckpt_storage.save(cases.state_of(4), path, overwrite=True, sync_files=False).slot == 2
    assert capfd.readouterr() == ("", "")
    target = cases.state_of(4, zeros=True)
    dcp_cases.load_stock(target, path)
    cases.assert_state(target, 4)


def save_with_caching(_rank: int, folder: str) -> None:
    """Save the same keys three times with plan caching."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in range(3):
        state = cases.state_of(step)
        ckpt_storage.save(state, f"{folder}/step-{step}", planner=planner, sync_files=False)


def test_a_planner_that_caches_plans_saves_every_time(ranks: RankPool, tmp_path: Path) -> None:
    """With `enable_plan_caching` the second and third save are as whole as the first."""
    ranks.run(save_with_caching, str(tmp_path), world_size=3)
    for step in range(3):
        target = cases.state_of(step, zeros=True)
        dcp_cases.load_stock(target, tmp_path / f"step-{step}")
        cases.assert_state(target, step)


class OldPlanner(dcp.DefaultSavePlanner):
    """A planner of the time before `storage_meta`, that renames what it saves."""

    def set_up_planner(  # type: ignore[override]  # as planners were before torch 2.3
        self,
        state_dict: dict[str, Any],
        is_coordinator: bool,  # noqa: FBT001  # torch's
    ) -> None:
        renamed = {f"renamed.{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, is_coordinator=is_coordinator)


def test_a_planner_of_the_old_form_is_obeyed(tmp_path: Path) -> None:
    """A planner whose `set_up_planner` knows no `storage_meta` still decides what is saved."""
    ckpt_storage.save({"w": seeded(1, 4)}, tmp_path / "run", planner=OldPlanner(), sync_files=False)
    target = {"renamed.w": torch.zeros(4)}
    dcp_cases.load_stock(target, tmp_path / "run")
    assert same(target["renamed.w"], seeded(1, 4))


Told = list[cases.Told]


def assert_told(results: list[Told], places: list[tuple[int, str, str]], path: Path) -> None:
    """Assert that each failure was told on every rank, with cause, rank, phase and URL."""
    for rank, told in enumerate(results):
        assert len(told) == len(places)
        for (name, text, named), (who, *_) in zip(told, places, strict=True):
            assert "boom" in text, (rank, text)
            assert named == who, (rank, text)
            assert f"rank {who}" in text.lower(), (rank, text)
            assert " phase" in text, (rank, text)
            assert str(path) in text, (rank, text)
            if rank != who:
                assert name == "RankFailedError", (rank, text)


SAVE_FAILURES = [
    (1, "state_dict", "ValueError"),
    (0, "state_dict", "unpicklable"),
    (0, "create_local_plan", "CheckpointException"),
    (0, "create_global_plan", "OSError"),
    (0, "create_global_plan", "unpicklable"),
    (2, "finish_plan", "unpicklable"),
    (1, "resolve_data", "OSError"),
    (1, "resolve_data", "CheckpointException"),
]
LOAD_FAILURES = [
    (1, "state_dict", "unpicklable"),
    (2, "create_local_plan", "OSError"),
    (0, "create_global_plan", "CheckpointException"),
    (1, "finish_plan", "ValueError"),
    (1, "finish_plan", "unpicklable"),
]


def test_a_failure_on_one_rank_reaches_all(ranks: RankPool, tmp_path: Path) -> None:
    """Whatever a planner or a state raises, all ranks raise an error of ours that says so."""
    path = tmp_path / "run"
    results = ranks.run(cases.fail_often, str(path), SAVE_FAILURES, "save", world_size=3)
    assert_told(results, SAVE_FAILURES, path)
    with pytest.raises(ckpt_storage.CheckpointError):
        ckpt_storage.load({"step": 0}, path)
    path = tmp_path / "run-next"
    results = ranks.run(cases.fail_often, str(path), LOAD_FAILURES, "load", world_size=3)
    assert_told(results, LOAD_FAILURES, path)


def save_told(rank: int, path: str) -> tuple[list[ProgressEvent], list[ProgressEvent], str | None]:
    """Save and load with a progress callback; return the events and the save id."""
    saved: list[ProgressEvent] = []
    loaded: list[ProgressEvent] = []
    save_id = cases.save(rank, path, 1, progress=saved.append)
    ckpt_storage.load(cases.state_of(1, zeros=True), path, progress=loaded.append)
    return saved, loaded, save_id


def test_progress_tells_bytes_phase_and_rank(ranks: RankPool, tmp_path: Path) -> None:
    """Callbacks get each rank's bytes in the write and load phases, growing to the whole."""
    for rank, (saved, loaded, save_id) in enumerate(
        ranks.run(save_told, str(tmp_path / "run"), world_size=2)
    ):
        for events, phase in ((saved, "write"), (loaded, "load")):
            assert events
            assert {event.phase for event in events} == {phase}
            assert {event.rank for event in events} == {rank}
            assert {event.save_id for event in events} == {save_id}
            done = [event.done_bytes for event in events]
            assert done == sorted(done)
            assert done[-1] == events[-1].total_bytes == max(e.total_bytes for e in events)


def test_log_records_name_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The coordinator logs the beginning and the commit of a save, both with its id."""
    with caplog.at_level(logging.INFO, "ckpt_storage"):
        save_id = ckpt_storage.save(cases.state_of(1), tmp_path / "run").save_id
    named = [text for text in caplog.messages if save_id and save_id in text]
    assert any("begins" in text for text in named), caplog.messages
    assert any("committed" in text for text in named), caplog.messages


OPTIONS: list[dict[str, Any]] = [{"timeout": -1}, {"thread_count": 0}]


def save_refused(rank: int, path: str) -> Told:
    """Save with options, or to a place, that cannot be on rank 1, and well after each."""
    told = []
    for options in [*OPTIONS, {}]:
        given = {"sync_files": False, "timeout": 20.0} | (options if rank == 1 else {})
        place = None if rank == 1 and not options else path
        told.append(cases.told_of(ckpt_storage.save, cases.state_of(1), place, **given))
        cases.save(rank, path, 2, overwrite=True)
    return told


def test_what_cannot_be_on_one_rank_is_told_to_all(ranks: RankPool, tmp_path: Path) -> None:
    """A rank with an option that cannot be raises it, and the others name the rank."""
    for rank, told in enumerate(ranks.run(save_refused, str(tmp_path / "run"), world_size=3)):
        for (name, text, named), options in zip(told, OPTIONS, strict=False):
            assert name == ("InvalidInputError" if rank == 1 else "RankFailedError"), text
            assert rank == 1 or named == 1
            assert next(iter(options)) in text.lower()


def test_a_place_that_cannot_be_is_an_error_of_ours() -> None:
    """Whatever is given as a URL, the error is one that users catch as `CheckpointError`."""
    urls: list[Any] = [None, 3, b"bytes", "s3://", "no-such-protocol://x"]
    for url in urls:
        for call in (ckpt_storage.save, ckpt_storage.load):
            with pytest.raises(CheckpointError):
                call({"w": torch.zeros(1)}, url)


def save_in_threads(_rank: int, folder: str) -> list[str]:
    """Save twice at once from two threads, each rank in its own order."""
    ended: list[str] = []

    def one(name: str) -> None:
        try:
            state = {"w": seeded(1, 50)}
            ckpt_storage.save(state, f"{folder}/{name}", timeout=10.0, sync_files=False)
        except CheckpointError as error:
            ended.append(type(error).__name__)
        else:
            ended.append("saved")

    threads = [threading.Thread(target=one, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ckpt_storage.save({"w": seeded(2, 50)}, f"{folder}/after", timeout=10.0, sync_files=False)
    return sorted(ended)


def test_two_threads_may_save_at_once(ranks: RankPool, tmp_path: Path) -> None:
    """Saves of one group take turns; ranks that order them otherwise are told, and go on."""
    (alone,) = ranks.run(save_in_threads, str(tmp_path / "one"), world_size=1)
    assert alone == ["saved", "saved"]
    for ended in ranks.run(save_in_threads, str(tmp_path / "two"), world_size=2):
        assert set(ended) <= {"saved", "RankMismatchError"}
        assert len(ended) == 2


def save_and_load_crosswise(rank: int, path: str) -> str:
    """Let rank 0 save while rank 1 loads."""
    call: Any = ckpt_storage.save if rank == 0 else ckpt_storage.load
    return type(cases.caught(call, {"w": torch.zeros(3)}, path, timeout=20.0)).__name__


def test_a_save_and_a_load_do_not_meet(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks that call different functions are told, and nothing is written."""
    told = ranks.run(save_and_load_crosswise, str(tmp_path / "run"), world_size=2)
    assert told == ["RankMismatchError"] * 2
    assert files_below(tmp_path) == set()
