"""Every way in which torch drives our plug-ins; ranks agree before a byte is written."""

# ruff: noqa: SLF001  # torch's caches, their keys and processes have no public handle

from __future__ import annotations

import itertools
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dcp_cases
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_cases import assert_holds, cut, errors_by_rank, planner, refused, same, seeded, zeros_like
from limits import HANG_S
from on_ranks import gathered, on_ranks
from rank_pool import RankPool
from s3_server import S3Server
from torch.distributed.checkpoint import _async_process_executor as process_mode
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import ckpt_storage
from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, errors, list_checkpoints
from ckpt_storage.store import Location
from ckpt_storage.store.backends.local import LocalBackend


def state_of(step: int) -> dict[str, Any]:
    return {"w": seeded(step, 30, 20), "step": step}


@on_ranks(3)
def test_what_is_of_one_save_is_equal_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """All raise where it differs, told who has what; threads, sizes, deadlines, spellings may."""
    a, b = f"file://{tmp_path}/a", f"file://{tmp_path}/b"
    unlike: dict[str, list[Any]] = {
        "the checkpoint's URL": [a, a, b],
        "overwrite": [False, True, False],
        "sync_files": [True, True, False],
        "the version of ckpt_storage": [ckpt_storage.__version__, "9.9", "9.9"],
    }
    for what, values in unlike.items():
        expected: dict[str, list[int]] = {}
        for who, value in enumerate(values):
            expected.setdefault(str(value), []).append(who)
        mine = {what: values[rank]}
        version = mine.pop("the version of ckpt_storage", ckpt_storage.__version__)
        with patch("ckpt_storage.saves.session.__version__", version):
            url = mine.pop("the checkpoint's URL", a)
            raised = errors_by_rank(dcp_cases.save, state_of(0), url, **mine)
        assert sorted(raised) == [0, 1, 2]
        for error in raised.values():
            assert isinstance(error, errors.RankMismatchError)
            assert error.values == expected
            assert f"Ranks disagree on {what}" in str(error)
            assert "Nothing was written." in str(error)
            assert "URL" not in what or f"'{a}': ranks 0-1; '{b}': ranks 2" in str(error)
        gathered()
        assert list(tmp_path.iterdir()) == []
    may: list[dict[str, Any]] = [
        {"thread_count": 2},
        {"part_bytes": 1 << 20},
        {"timeout": 100, "memory_limit_bytes": 64 << 20},
    ]
    spelt = [f"{tmp_path}/run", f"file://{tmp_path}/run/", f"{tmp_path}/x/../run"]
    dcp_cases.save(state_of(0), spelt[rank], **may[rank])
    assert [info.name for info in list_checkpoints(tmp_path)] == ["run"]


@on_ranks()
def test_unlike_values_by_one_name_are_refused(rank: int, tmp_path: Path) -> None:
    """All ranks raise, with the name and who holds what; no rank's tensor is dropped."""
    for other in (torch.ones(4), torch.ones(3, dtype=torch.float16)):
        state = {"same": torch.ones(2), "value": other if rank else torch.ones(3)}
        raised = errors_by_rank(dcp_cases.save, state, tmp_path / "run")
        with pytest.raises(errors.RankMismatchError) as by_ours:
            ckpt_storage.save(state, tmp_path / "run")
        for error in (*raised.values(), by_ours.value):
            assert isinstance(error, errors.RankMismatchError)
            assert "the name value: float32 [3]: ranks 0" in str(error)
            assert sorted(error.values.values()) == [[0], [1]]
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("stock_rank", "who", "text"),
    [(1, 0, "Ranks [1] of 3 sent no announcement"), (0, 1, "got no save id")],
)
@on_ranks(3)
def test_another_writer_on_one_rank_is_refused_by_all(
    rank: int, tmp_path: Path, stock_rank: int, who: int, text: str
) -> None:
    """If a rank has no writer of ours nothing commits, and nothing of ours is created."""
    writer: Any = CheckpointStorageWriter(tmp_path / "ours")
    if rank == stock_rank:
        writer = dcp.FileSystemWriter(tmp_path / "stock")
    error = errors_by_rank(dcp.save, state_of(rank) | {f"own {rank}": rank}, storage_writer=writer)[
        who
    ]
    assert isinstance(error, errors.InvalidInputError)
    assert text in str(error)
    gathered()
    assert not (tmp_path / "ours").exists()
    assert not (tmp_path / "stock" / ".metadata").exists()


@on_ranks(3)
def test_a_planner_that_drops_the_writers_messages_does_no_harm(tmp_path: Path) -> None:
    """What ranks say to one another arrives although the planner makes all plans anew."""

    def bare(plan: SavePlan) -> SavePlan:
        return SavePlan(plan.items, planner_data=plan.planner_data)

    forgetful = planner(
        create_global_plan=lambda create, plans: create(list(map(bare, plans))),
        finish_plan=lambda finish, plan: finish(bare(plan)),
    )
    dcp_cases.save(state_of(1), tmp_path, planner=forgetful)
    assert_holds(tmp_path, state_of(1))


@on_ranks()
def test_ranks_never_load_two_saves_of_one_id(rank: int, tmp_path: Path) -> None:
    """If an id is overwritten between the ranks' looks at it, all raise and say what to do."""
    dcp_cases.save(state_of(0), tmp_path)

    def overwrite(set_up: Callable[..., None], *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp_cases.save_alone(state_of(1), tmp_path, overwrite=True)
        dist.barrier()
        set_up(*args, **options)

    if rank == 1:
        dist.barrier()
    own = None if rank else planner(dcp.DefaultLoadPlanner, set_up_planner=overwrite)
    given = dcp_cases.load, zeros_like(state_of(0)), tmp_path
    text = "Ranks disagree on the save to read"
    for error in refused(errors.RankMismatchError, text, *given, planner=own):
        assert "Load again" in str(error)


@on_ranks()
def test_storage_that_ranks_do_not_share_is_refused() -> None:
    """A save of several ranks into each one's own memory is an error on all, not half a success."""
    given = dcp_cases.save, state_of(0), "memory://run/step"
    assert len(refused(errors.InvalidInputError, "memory://", *given)) == 2


@pytest.mark.parametrize("is_made", [False, True], ids=["no folder", "folder"])
@on_ranks()
def test_a_rank_with_a_disk_of_its_own_is_found_out(
    rank: int, tmp_path: Path, *, is_made: bool
) -> None:
    """Where a path means another disk on one rank, the error says so and nothing commits."""
    path, original = tmp_path / "run", LocalBackend.__init__

    def init(backend: LocalBackend, place: str | Location, settings: Any = None) -> None:
        root = place if isinstance(place, str) else place.target
        original(backend, f"{root}-of-{rank}" if rank else root, settings)

    def make_folders(finish: Callable[[SavePlan], SavePlan], plan: SavePlan) -> SavePlan:
        # Those that the coordinator made on its disk.
        for folder in path.rglob("*/"):
            mine = Path(f"{path}-of-1") / folder.relative_to(path)
            mine.mkdir(parents=True, exist_ok=True)
        return finish(plan)

    own = planner(finish_plan=make_folders) if is_made and rank else None
    state = state_of(0) | {f"own {rank}": seeded(rank, 5)}
    with patch.object(LocalBackend, "__init__", init):
        raised = refused(errors.CheckpointError, "share", dcp_cases.save, state, path, planner=own)
    assert {error.rank for error in raised} == {1}
    assert list_checkpoints(tmp_path) == []


class Within(CheckpointStorageReader):
    """A reader of somebody else's around ours, with the parameters that torch documents."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:  # noqa: FBT001  # torch's
        super().set_up_storage_reader(metadata, is_coordinator)


@on_ranks()
def test_a_reader_that_is_not_told_its_rank_asks_for_it(tmp_path: Path) -> None:
    """Torch tells it only those that take any keyword."""
    dcp_cases.save(state_of(0), tmp_path)
    by = [lambda state, at: dcp.load(state, storage_reader=Within(at))]
    assert_holds(tmp_path, state_of(0), by)


MODES = ("sync", "thread", "process")
STEP_COUNT = 5
"""Of them torch takes the plans of 1, 3 and 4 for unchanged."""


def full_state(step: int) -> dict[str, Any]:
    """Return the state of one step, with one tensor cut over the ranks."""
    dtype = torch.bfloat16 if step >= 3 else torch.float32
    return {
        "sharded": cut(seeded(step, 10, 6, dtype=dtype)),
        "replicated": seeded(100 + step, 7, dtype=dtype),
        "nested": {"step": step, "words": ["a", f"b{step}"]},
    } | ({"more": seeded(200 + step, 3)} if step >= 2 else {})


def save_once(mode: str, state: dict[str, Any], **arguments: Any) -> None:
    if mode == "sync":
        dcp.save(state, **arguments)
        return
    kind = AsyncCheckpointerType(mode)
    response: Any = dcp.async_save(state, async_checkpointer_type=kind, **arguments)
    response.result(timeout=HANG_S)


def end_process_mode() -> None:
    """End the process that torch keeps for process mode, which serves one world only."""
    daemon, process_mode._CHECKPOINT_PROCESS = process_mode._CHECKPOINT_PROCESS, None
    if daemon is not None:
        daemon._send(process_mode._CheckpointSaveProcessControlOpts.TERMINATE)
        daemon._save_process.join(20)


@on_ranks()
def test_every_save_of_one_writer_lands_where_it_belongs(tmp_path: Path) -> None:
    """In each mode, with and without ids and plan caching; torch reads the last one, too."""
    steps = range(STEP_COUNT)
    for mode, with_id, caching in itertools.product(MODES, [True, False], [True, False]):
        root = tmp_path / f"{mode}-{with_id}-{caching}"
        writer = CheckpointStorageWriter(root, overwrite=True, sync_files=False)
        for step in steps:
            # A planner is made for each save, as by a training loop; what it caches is global.
            own = dcp.DefaultSavePlanner(enable_plan_caching=caching)
            own._cached_plans_key = root.name
            name = f"step-{step}" if with_id else None
            given: dict[str, Any] = {"storage_writer": writer, "checkpoint_id": name}
            save_once(mode, full_state(step), planner=own, **given)
            if not with_id:
                assert_holds(root, full_state(step), [dcp_cases.load])
        for step in steps if with_id else []:
            assert_holds(root / f"step-{step}", full_state(step), [dcp_cases.load])
        last = full_state(steps[-1])
        last["sharded"] = last["sharded"].full_tensor()
        assert_holds(root / f"step-{steps[-1]}" if with_id else root, last, [dcp_cases.load_stock])
    end_process_mode()


ROOT = "s3://bucket/run"


def _save_in_all_modes(_rank: int, options: dict[str, Any]) -> tuple[str, str]:
    writer = CheckpointStorageWriter(ROOT, storage_options=options, part_bytes=5 << 20)
    reader = CheckpointStorageReader(ROOT, storage_options=options)
    writer, reader = pickle.loads(pickle.dumps((writer, reader)))
    for mode in MODES:
        state = {"w": cut(seeded(1, 3_000, 1_000)), "mode": mode}
        save_once(mode, state, storage_writer=writer, checkpoint_id=f"by-{mode}")
        dcp.load(target := zeros_like(state), checkpoint_id=f"by-{mode}", storage_reader=reader)
        assert same(target, state)
    end_process_mode()
    return repr(writer), repr(reader)


def test_options_reach_every_process_and_show_nowhere(ranks: RankPool, server: S3Server) -> None:
    """Two ranks save tensors of several parts to object storage in each mode, and load them.

    They do so by a writer and a reader that were pickled.
    """
    options = server.storage_options | {"secret": "very-secret"}
    shown = ranks.run(_save_in_all_modes, options, world_size=2)
    reader = f"CheckpointStorageReader('{ROOT}/by-process')"
    assert shown == [(f"CheckpointStorageWriter('{ROOT}')", reader)] * 2
    assert server.open_upload_count == 0
    infos = list_checkpoints(ROOT, storage_options=options)
    assert {info.name for info in infos} == {f"by-{mode}" for mode in MODES}
    for info in infos:
        assert ckpt_storage.verify(info.url, storage_options=options).ok
    assert not any(b"very-secret" in data for data in server.dump("bucket").values())


@on_ranks()
def test_overlapping_saves_do_not_mix(tmp_path: Path) -> None:
    """Two saves with one writer, both writing at the same time, go to their own folders."""
    writer = CheckpointStorageWriter(tmp_path, sync_files=False)
    begun: list[Future[None]] = [Future(), Future()]

    def waiting(step: int, resolve: Callable[[WriteItem], Any], item: WriteItem) -> Any:
        if not begun[step].done():
            begun[step].set_result(None)
        begun[1 - step].result(timeout=HANG_S)
        return resolve(item)

    saves: list[Any] = [
        dcp.async_save(
            state_of(step),
            checkpoint_id=f"step-{step}",
            storage_writer=writer,
            planner=planner(resolve_data=partial(waiting, step)),
            process_group=dist.new_group(),
        )
        for step in (0, 1)
    ]
    for step, save in enumerate(saves):
        save.result(timeout=HANG_S)
        assert_holds(tmp_path / f"step-{step}", state_of(step))
    assert {info.name for info in list_checkpoints(tmp_path)} == {"step-0", "step-1"}


@on_ranks()
def test_a_rank_saves_for_itself_only_if_it_is_told_so(rank: int, tmp_path: Path) -> None:
    """With `no_dist`, which leaves no place for the next save; not with `use_collectives=False`."""
    writer = CheckpointStorageWriter(tmp_path, sync_files=False)
    name = f"alone-{rank}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state_of(rank), checkpoint_id=name, storage_writer=writer, no_dist=True)
        for reader in (None, CheckpointStorageReader(tmp_path / name)):
            given: Any = {"checkpoint_id": tmp_path / name, "storage_reader": reader}
            dcp.load(target := zeros_like(state_of(rank)), no_dist=True, **given)
            assert same(target, state_of(rank))
    meta = writer.storage_meta()
    assert meta is not None
    assert str(meta.checkpoint_id) == str(tmp_path)
    with pytest.raises(errors.InvalidInputError, match="Leave use_collectives at True"):
        dcp.save(state_of(0), checkpoint_id="run", storage_writer=writer, use_collectives=False)
    assert not (tmp_path / "run").exists()


@on_ranks(3)
def test_a_sub_group_saves_and_loads_without_the_others(rank: int, tmp_path: Path) -> None:
    """Two of three ranks save; a writer that was given another group refuses on both."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    for step, given in enumerate((None, group)):
        path = tmp_path / f"step-{step}"
        writer = CheckpointStorageWriter(path, process_group=given)
        dcp.save(state_of(step), storage_writer=writer, process_group=group)
        assert_holds(path, state_of(step), [dcp_cases.load], process_group=group)
        assert_holds(path, state_of(step), [dcp_cases.load_stock])
    wrong = CheckpointStorageWriter(tmp_path / "wrong", process_group=dist.group.WORLD)
    text = "The save runs on 2 ranks; the writer's process_group has 3."
    where: dict[str, Any] = {"storage_writer": wrong, "process_group": group}
    assert len(refused(errors.CheckpointError, text, dcp.save, state_of(0), **where)) == 2
    assert not (tmp_path / "wrong").exists()


@on_ranks()
def test_regression_a_refused_save_does_not_spoil_later_cached_plans(tmp_path: Path) -> None:
    """After a refusal, saves with plan caching go on, be the refused plan cached or new."""
    writer = CheckpointStorageWriter(tmp_path, sync_files=False)
    for number, name in enumerate("aabbc"):
        own = dcp.DefaultSavePlanner(enable_plan_caching=True)
        # The first refused plan is a new one, the second a cached one.
        own._cached_plans_key = f"refused-{number > 0}"
        given = {"checkpoint_id": name, "storage_writer": writer, "planner": own}
        if number in {1, 3}:
            kind = errors.CheckpointExistsError
            assert len(refused(kind, name, dcp.save, state_of(number), **given)) == 2
        else:
            dcp.save(state_of(number), **given)
    for name, step in (("a", 0), ("b", 2), ("c", 4)):
        assert_holds(tmp_path / name, state_of(step))
