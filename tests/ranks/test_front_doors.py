"""`save` and `load`: as DCP does it, every failure told to every rank; plans are kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import front_door_cases as cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import seeded
from limits import HANG_S
from on_ranks import gathered, on_ranks
from rank_pool import RankPool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ckpt_storage
from ckpt_storage import CheckpointError, ProgressEvent, RankFailedError, Timeouts
from ckpt_storage.loads.layouts import boxes_of
from ckpt_storage.loads.loadplanner import _ShardingCache
from ckpt_storage.saves.planning import PLAN_CACHE, Structure, structure_of

save_state = partial(ckpt_storage.save, sync_files=False)


def _save(_rank: int, path: Path) -> str | None:
    return cases.save(path, 7)


def _load_both_ways(_rank: int, path: Path) -> None:
    cases.assert_loads(path, 7)
    cases.assert_loads(path, 7, lambda state, at: dcp.load(state, checkpoint_id=at))


@pytest.mark.parametrize("world_size", [1, 3])
def test_torchs_reader_loads_what_save_wrote(
    ranks: RankPool, tmp_path: Path, world_size: int
) -> None:
    """Any number of ranks saves; torch loads it on one rank and on two, and so does `load`."""
    assert len(set(ranks.run(_save, tmp_path, world_size=world_size))) == 1
    cases.assert_loads(tmp_path, 7)
    cases.assert_loads(tmp_path, 7, dcp_cases.load_stock)
    ranks.run(_load_both_ways, tmp_path, world_size=2)


def test_one_process_without_a_group_saves_and_loads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a process group one process does both, gets what was committed, prints nothing."""
    path = tmp_path / "run"
    info = save_state(cases.state_of(3), path)
    assert info.url.endswith(str(path))
    assert info.slot == 1
    cases.assert_loads(str(path), 3)
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(cases.state_of(4), path)
    assert save_state(cases.state_of(4), path, overwrite=True).slot == 2
    assert capfd.readouterr() == ("", "")
    cases.assert_loads(path, 4, dcp_cases.load_stock)


@on_ranks(3)
def test_a_planner_that_caches_plans_saves_every_time(tmp_path: Path) -> None:
    """With `enable_plan_caching` the second and third save are as whole as the first."""
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for step in range(3):
        save_state(cases.state_of(step), tmp_path / str(step), planner=planner)
        cases.assert_loads(tmp_path / str(step), step, dcp_cases.load_stock)


def test_a_planner_of_the_old_form_is_obeyed(tmp_path: Path) -> None:
    """A planner whose `set_up_planner` knows no `storage_meta` still decides what is saved."""

    def rename(set_up: Any, state: dict[str, Any], is_coordinator: bool) -> None:  # noqa: FBT001  # torch's
        renamed = {f"renamed.{key}": value for key, value in state.items()}
        set_up(renamed, is_coordinator=is_coordinator)

    save_state({"w": seeded(1, 4)}, tmp_path, planner=dcp_cases.planner(set_up_planner=rename))
    dcp_cases.assert_holds(tmp_path, {"renamed.w": seeded(1, 4)}, [dcp_cases.load_stock])


class Locked(Exception):  # noqa: N818  # a failure of a user's
    """An exception that does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def fail(kind: str, *_: Any, **__: Any) -> Any:
    if kind == "CheckpointException":
        raise CheckpointException("boom", {0: (ValueError("boom"), None)})  # type: ignore[dict-item]
    raise {"ValueError": ValueError, "OSError": OSError, "unpicklable": Locked}[kind]("boom")


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


@on_ranks(3)
def test_a_failure_on_one_rank_reaches_all(rank: int, tmp_path: Path) -> None:
    """Whatever a planner or a state raises, all ranks raise an error of ours that says so.

    It has cause, rank, phase and URL; afterwards all save, or load, together again.
    """
    path = tmp_path / "run"
    for call, kind, failures in (
        (save_state, dcp.DefaultSavePlanner, SAVE_FAILURES),
        (ckpt_storage.load, dcp.DefaultLoadPlanner, LOAD_FAILURES),
    ):
        for who, where, what in failures:
            state, planner = cases.state_of(1), kind()
            if rank == who:
                failing = state["counter"] if where == "state_dict" else planner
                setattr(failing, where, partial(fail, what))
            error = cases.caught(call, state, path, planner=planner, timeout=HANG_S)
            text = str(error)
            assert "boom" in text
            assert error.rank == who, text
            assert f"rank {who}" in text.lower(), text
            assert " phase" in text, text
            assert str(path) in text, text
            assert rank == who or isinstance(error, RankFailedError), text
        if call is save_state:
            cases.caught(ckpt_storage.load, {"step": 0}, path)
            cases.save(path, 1)
        cases.assert_loads(path, 1)


@on_ranks()
def test_progress_tells_bytes_phase_and_rank(rank: int, tmp_path: Path) -> None:
    """Callbacks get each rank's bytes in the write and load phases, growing to the whole."""
    told: dict[str, list[ProgressEvent]] = {"write": [], "load": []}
    save_id = cases.save(tmp_path, 1, progress=told["write"].append)
    ckpt_storage.load(cases.state_of(1), tmp_path, progress=told["load"].append)
    for phase, events in told.items():
        assert {(e.phase, e.rank, e.save_id) for e in events} == {(phase, rank, save_id)}
        done = [event.done_bytes for event in events]
        assert done == sorted(done)
        assert done[-1] == events[-1].total_bytes == max(event.total_bytes for event in events)


def test_the_log_record_of_a_save_has_its_id(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The coordinator logs the outcome of a save with the save's id."""
    with caplog.at_level(logging.INFO, "ckpt_storage"):
        save_id = str(cases.save(tmp_path, 1))
    assert any(save_id in text and "outcome=ok" in text for text in caplog.messages)


@on_ranks(3)
def test_what_cannot_be_on_one_rank_is_told_to_all(rank: int, tmp_path: Path) -> None:
    """A rank with an option, or a place, that cannot be raises it, and the others name the rank."""
    path = tmp_path / "run"
    wrong: list[dict[str, Any]] = [{"timeout": -1}, {"thread_count": 0}, {"url": None}]
    for options in wrong:
        given = {"url": path, "timeout": 20.0} | (options if rank == 1 else {})
        error = cases.caught(save_state, cases.state_of(1), **given)
        kind = type(error).__name__
        if "url" not in options:
            assert kind == ("InvalidInputError" if rank == 1 else "RankFailedError"), error
            assert rank == 1 or error.rank == 1
            assert next(iter(options)) in str(error).lower()
        cases.save(path, 2, overwrite=True)


def test_a_place_that_cannot_be_is_an_error_of_ours() -> None:
    """Whatever is given as a URL, the error is one that users catch as `CheckpointError`."""
    urls: list[Any] = [None, 3, b"bytes", "s3://", "no-such-protocol://x"]
    for url in urls:
        for call in (ckpt_storage.save, ckpt_storage.load):
            cases.caught(call, {"w": torch.zeros(1)}, url)


@on_ranks(1, 2)
def test_two_threads_may_save_at_once(tmp_path: Path) -> None:
    """Saves of one group take turns; ranks that order them otherwise are told, and go on."""
    ended: list[str] = []

    def save(name: str) -> None:
        try:
            save_state({"w": seeded(1, 50)}, tmp_path / name, timeout=HANG_S)
        except CheckpointError as error:
            ended.append(type(error).__name__)
        else:
            ended.append("saved")

    threads = [threading.Thread(target=save, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    save_state({"w": seeded(2, 50)}, tmp_path / "after", timeout=HANG_S)
    possible = {"saved"} if len(gathered()) == 1 else {"saved", "RankMismatchError"}
    assert len(ended) == 2
    assert set(ended) <= possible


@pytest.mark.deadline
@on_ranks()
def test_a_save_and_a_load_do_not_meet(rank: int, tmp_path: Path) -> None:
    """Ranks that call different functions wait in different lanes, and nothing is written."""
    call: Any = ckpt_storage.load if rank else ckpt_storage.save
    timeout = Timeouts(plan=2.0)
    with patch.object(logging.getLogger("ckpt_storage"), "warning") as warning:
        error = cases.caught(call, {"w": torch.zeros(3)}, tmp_path / "run", timeout=timeout)
    assert isinstance(error, ckpt_storage.PhaseTimeoutError), repr(error)
    first = warning.call_args_list[0].args
    for text in (str(error), first[0] % first[1:]):
        assert "all ranks must make the same calls" in text or rank == 0
    gathered()
    assert dcp_cases.files_below(tmp_path) == set()


@pytest.mark.deadline
@on_ranks()
def test_a_rank_that_has_left_another_call_was_last_in_it(rank: int, tmp_path: Path) -> None:
    """After a load that rank 0 made alone, rank 1 does not say that rank 0 still waits in it."""
    state, timeout = {"w": torch.zeros(3)}, Timeouts(plan=1.0)
    if rank == 0:
        cases.caught(ckpt_storage.load, state, tmp_path / "run", timeout=timeout)
    gathered()
    if rank == 1:
        error = cases.caught(ckpt_storage.save, state, tmp_path / "run", timeout=timeout)
        assert "Rank 0" in str(error)
        assert "rank 0 was last in another operation of this group (load)" in str(error)
    gathered()


@on_ranks()
def test_a_rank_that_skipped_a_save_does_not_mix_two_steps(rank: int, tmp_path: Path) -> None:
    """The step is that of the argument or in the state; the URL stays the same."""
    for by_argument in (True, False):
        url = tmp_path / ("argument" if by_argument else "state")

        def save(step: int, *, by_argument: bool = by_argument, url: Path = url) -> None:
            state = {f"mark-{rank}": torch.tensor([step])} | ({} if by_argument else {"step": step})
            own: dict[str, Any] = {"step": step} if by_argument else {}
            ckpt_storage.save(state, url, overwrite=True, timeout=HANG_S, **own)

        if rank == 0:
            error = cases.caught(save, 100)
            assert isinstance(error, ckpt_storage.RankMismatchError)
            assert error.values == {"100": [0], "200": [1]}
        save(200)


def saved(state: dict[str, Any], path: Path | str, **options: Any) -> int:
    """Save, and return how often a local plan was made."""
    inner = dcp.DefaultSavePlanner.create_local_plan
    with patch.object(
        dcp.DefaultSavePlanner, "create_local_plan", autospec=True, side_effect=inner
    ) as planned:
        save_state(state, path, **options)
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


def test_a_state_of_one_structure_is_planned_once(tmp_path: Path) -> None:
    """Each save stores its own values; whatever changes is planned anew; so are given planners."""
    PLAN_CACHE.clear()
    states = {str(step): state_of(step) for step in range(3)}
    assert [saved(state, tmp_path / name) for name, state in states.items()] == [1, 0, 0]
    for name, change in CHANGES.items():
        PLAN_CACHE.clear()
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


@on_ranks(3)
def test_all_ranks_use_what_they_kept_or_none_does(rank: int, tmp_path: Path) -> None:
    """If one rank has kept nothing all plan anew, and the save is whole; a refusal spoils none."""
    planned = []
    for step, forgetful in enumerate([rank, None, 0, 1, 2, None]):
        if rank == forgetful:
            PLAN_CACHE.clear()
        if step == 5:
            with pytest.raises(ckpt_storage.CheckpointExistsError):
                saved(cases.state_of(step), tmp_path / "0")
        planned.append(saved(cases.state_of(step), tmp_path / str(step)) > 0)
        cases.assert_loads(tmp_path / str(step), step, dcp_cases.load_stock)
    assert planned == [True, False, True, True, True, False]


class Planning(torch.Tensor):
    """A tensor that makes its own write items."""


def test_values_that_plan_for_themselves_are_not_kept() -> None:
    """What they would plan cannot be told from outside."""
    state = {"w": torch.zeros(2).as_subclass(Planning)}
    assert structure_of(state, {}, rank=0, world_size=1) is None
    assert structure_of({"w": torch.zeros(2)}, {}, rank=0, world_size=1) is not None


@on_ranks()
def test_placements_are_told_apart_even_where_torch_says_they_are_equal() -> None:
    """A strided shard of another factor, or one that is not strided, holds other rows.

    All are cut as by torch, or as their boxes, whether torch compares placements well or as some
    releases do.
    """
    mesh, cuts = init_device_mesh("cpu", (2,)), _ShardingCache()

    def structure(placement: Any, rows: int = 4) -> Structure | None:
        whole: dict[str, Any] = {"shape": torch.Size((8, 2)), "stride": (2, 1)}
        made = DTensor.from_local(torch.zeros(rows, 2), mesh, [placement], run_check=False, **whole)
        boxes = boxes_of(made)
        chunks = _create_chunk_list(made) if boxes is None else [box.chunk for box in boxes]
        assert cuts.own(made) == chunks
        return structure_of({"w": made}, {}, rank=0, world_size=2)

    def check() -> None:
        first = structure(Shard(0))
        assert structure(Shard(0)) == first
        assert structure(_StridedShard(0, split_factor=2)) != first
        assert structure(_StridedShard(0, split_factor=4)) != first
        assert structure(Replicate(), 8) != first
        assert structure(Shard(0), 3) != first

    check()
    with pytest.MonkeyPatch.context() as patched:
        for kind in (Shard, _StridedShard):
            patched.setattr(kind, "__eq__", lambda a, b: a.dim == getattr(b, "dim", None))
            patched.setattr(kind, "__hash__", lambda a: a.dim)
        check()


@on_ranks()
def test_a_load_that_rank_0_came_too_late_for_takes_no_save_along(
    rank: int, tmp_path: Path
) -> None:
    """It fails on both ranks; each save then has the state of one call, though no step is known."""
    url, alone = tmp_path / "last", dist.new_group([0])
    if rank == 0:
        save_state({"mark-0": torch.zeros(1)}, url, process_group=alone)
    dist.barrier()
    if rank == 0:
        dist.barrier()  # rank 1 has given up
        with pytest.raises(ckpt_storage.PhaseTimeoutError, match="Rank 1"):
            ckpt_storage.load({"mark-0": torch.zeros(1)}, url, timeout=Timeouts(plan=1.0))
    else:
        with pytest.raises(ckpt_storage.PhaseTimeoutError, match="Rank 0"):
            ckpt_storage.load({"mark-0": torch.zeros(1)}, url, timeout=Timeouts(plan=1.0))
        dist.barrier()
    for mark in (1.0, 2.0, 3.0):
        save_state({f"mark-{rank}": torch.tensor([mark])}, url, overwrite=True, timeout=HANG_S)
        if rank == 0:
            loaded = {"mark-0": torch.zeros(1), "mark-1": torch.zeros(1)}
            ckpt_storage.load(loaded, url, process_group=alone)
            assert torch.equal(torch.cat([*loaded.values()]), torch.tensor([mark, mark]))
