"""`save` and `load`: as DCP does it, every failure told to every rank; plans are kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import front_door_cases as cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_cases import files_below, same, seeded
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_storage
from ckpt_storage import CheckpointError, ProgressEvent
from ckpt_storage.loads.loadplanner import _Cuts
from ckpt_storage.saves.planning import PLANS, Structure, structure_of
from ckpt_storage.testing.ranks import RankPool


@pytest.mark.parametrize("world_size", [1, 3])
def test_torchs_reader_loads_what_save_wrote(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    """Any number of ranks saves; torch loads it on one rank and on two, and so does `load`."""
    path = tmp_path / "run"
    ids = ranks.run(cases.save, path, 7, world_size=world_size)
    assert len(set(ids)) == 1
    cases.assert_loads(path, 7, dcp_cases.load_stock)
    cases.assert_loads(path, 7)
    ranks.run(cases.load_both_ways, path, 7, world_size=2)


def test_one_process_without_a_group_saves_and_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a process group one process does both, gets what was committed, prints nothing."""
    path = tmp_path / "run"
    info = ckpt_storage.save(cases.state_of(3), path, sync_files=False)
    assert info.url == str(path) or info.url.endswith(str(path))
    assert info.slot == 1
    cases.assert_loads(str(path), 3)
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(cases.state_of(4), path)
    assert ckpt_storage.save(cases.state_of(4), path, overwrite=True, sync_files=False).slot == 2
    assert capfd.readouterr() == ("", "")
    cases.assert_loads(path, 4, dcp_cases.load_stock)


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
        cases.assert_loads(tmp_path / f"step-{step}", step, dcp_cases.load_stock)


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


def saved(state: dict[str, Any], path: Path | str, **options: Any) -> int:
    """Save, and return how often a local plan was made."""
    with patch.object(
        dcp.DefaultSavePlanner,
        "create_local_plan",
        autospec=True,
        side_effect=dcp.DefaultSavePlanner.create_local_plan,
    ) as planned:
        ckpt_storage.save(state, path, sync_files=False, **options)
    return planned.call_count


def state_of(step: int) -> dict[str, Any]:
    """Return one structure with other values at each step."""
    return {
        "model": {"w": torch.full((3, 4), float(step)), "b": torch.arange(step, step + 5)},
        "step": step,
    }


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape": lambda state: state["model"].update(b=torch.arange(7)),
    "dtype": lambda state: state["model"].update(b=torch.arange(5.0)),
    "name": lambda state: state["model"].update(c=state["model"].pop("b")),
    "fewer": lambda state: state["model"].pop("w"),
    "tensor-to-value": lambda state: state["model"].update(b=[1, 2]),
    "value-to-tensor": lambda state: state.update(step=torch.tensor(9)),
    "nesting": lambda state: state.update({"model.w": state.pop("model")["w"]}),
    "order": lambda state: state.update(model=dict(reversed(state["model"].items()))),
}


@pytest.fixture(autouse=True)
def _forgetting() -> None:
    """Nothing is kept from other tests."""
    PLANS.clear()


def test_a_state_of_one_structure_is_planned_once(tmp_path: Path) -> None:
    """Each save stores its own values; whatever changes is planned anew; so are given planners."""
    states = {str(step): state_of(step) for step in range(3)}
    assert [saved(state, tmp_path / name) for name, state in states.items()] == [1, 0, 0]
    for name, change in CHANGES.items():
        PLANS.clear()
        saved(state_of(2), tmp_path / f"{name}-before")
        state = states[name] = state_of(3)
        change(state)
        assert saved(state, tmp_path / name) == 1, name
        assert saved(state_of(4), tmp_path / f"{name}-after") == 0, name
    for name, state in states.items():
        dcp_cases.assert_holds(tmp_path / name, state, [dcp_cases.load_stock])
    for step in range(2):
        planner = dcp.DefaultSavePlanner()
        assert saved(state_of(step), tmp_path / f"given-{step}", planner=planner) == 1


def save_steps(rank: int, folder: str) -> list[bool]:
    """Save, some ranks forgetting what they kept, or a save being refused; tell who planned."""
    PLANS.clear()
    planned = []
    for step, forgetful in enumerate([None, None, 0, 1, 2, None]):
        if rank == forgetful:
            PLANS.clear()
        if step == 5:
            with pytest.raises(ckpt_storage.CheckpointExistsError):
                saved(cases.state_of(step), f"{folder}/0")
        planned.append(saved(cases.state_of(step), f"{folder}/{step}") > 0)
    return planned


def test_all_ranks_use_what_they_kept_or_none_does(ranks: RankPool, tmp_path: Path) -> None:
    """If one rank has kept nothing all plan anew, and the save is whole; a refusal spoils none."""
    told = ranks.run(save_steps, str(tmp_path), world_size=3)
    assert told == [[True, False, True, True, True, False]] * 3
    for step in range(6):
        cases.assert_loads(tmp_path / str(step), step, dcp_cases.load_stock)


class Planning(torch.Tensor):
    """A tensor that makes its own write items."""


def test_values_that_plan_for_themselves_are_not_kept() -> None:
    """What they would plan cannot be told from outside."""
    state = {"w": torch.zeros(2).as_subclass(Planning)}
    assert structure_of(state, {}, rank=0, world_size=1) is None
    assert structure_of({"w": torch.zeros(2)}, {}, rank=0, world_size=1) is not None


def placed(_rank: int) -> list[list[bool]]:
    """Return which of some DTensors have the structure of the first, all cut as by torch."""
    mesh = init_device_mesh("cpu", (2,))
    cuts = _Cuts()

    def structure(placement: Any, local: torch.Tensor | None = None) -> Structure | None:
        made = DTensor.from_local(
            torch.zeros(4, 2) if local is None else local,
            mesh,
            [placement],
            run_check=False,
            shape=torch.Size((8, 2)),
            stride=(2, 1),
        )
        assert cuts.own(made) == _create_chunk_list(made)
        return structure_of({"w": made}, {}, rank=0, world_size=2)

    def found() -> list[bool]:
        first = structure(Shard(0))
        others = [
            structure(Shard(0)),
            structure(_StridedShard(0, split_factor=2)),
            structure(_StridedShard(0, split_factor=4)),
            structure(Replicate(), torch.zeros(8, 2)),
            structure(Shard(0), torch.zeros(3, 2)),
        ]
        return [other == first for other in others]

    strict = found()
    with pytest.MonkeyPatch.context() as patched:
        # As some releases of torch that are supported compare them.
        for kind in (Shard, _StridedShard):
            patched.setattr(kind, "__eq__", lambda a, b: a.dim == getattr(b, "dim", None))
            patched.setattr(kind, "__hash__", lambda a: a.dim)
        return [strict, found()]


def test_placements_are_told_apart_even_where_torch_says_they_are_equal(ranks: RankPool) -> None:
    """A strided shard of another factor, or one that is not strided, holds other rows."""
    expected = [True, False, False, False, False]
    assert ranks.run(placed, world_size=2) == [[expected] * 2] * 2
