"""Background saves in threads and in worker processes: values, states, order, memory, progress."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_cases import assert_holds, cut, same, seeded
from limits import HANG_S
from on_ranks import gathered, on_ranks
from saver_cases import (
    MODES,
    Hold,
    held,
    hold_here,
    is_alive,
    loaded,
    quick_saver,
    quick_timeouts,
    save_step,
    state_of,
    summary_of,
    until,
)
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import ckpt_storage
from ckpt_storage import (
    AsyncSaver,
    CheckpointManager,
    ProgressEvent,
    SaveState,
    errors,
    list_checkpoints,
    load,
    save_async,
)
from ckpt_storage.background.staging import StagingJob

W, C, D = SaveState.WRITING, SaveState.COMMITTING, SaveState.COMMITTED


@on_ranks(1, 2)
def test_states_walk_in_order(rank: int, tmp_path: Path) -> None:
    """A save is WRITING, COMMITTING, COMMITTED, with one save id on all ranks and its bytes.

    So in a thread of one rank, and in the workers of two.
    """
    count = dist.get_world_size()
    with quick_saver(MODES[count - 1]) as saver:
        hold = Hold(tmp_path, "write", rank)
        handle = save_step(saver, tmp_path, rank, 0, planner=held(hold))
        assert not handle.done()
        hold.reached()
        until(lambda: handle.save_id, "a save id")
        assert gathered(handle.save_id) == [handle.save_id] * count
        with pytest.raises(errors.PhaseTimeoutError):
            handle.result(0.01)
        assert handle.state is W
        first_id = handle.save_id
        hold.go()
        assert handle.result(HANG_S).save_id == handle.save_id == first_id
        assert handle.state is D
        gathered()
        (tmp_path / f"go-{rank}").unlink()
        hold = Hold(tmp_path, "outcome" if rank else "commit", rank)
        handle = save_step(saver, tmp_path, rank, 1, planner=held(hold))
        hold.reached()
        until(lambda: handle.state is C, "the commit")
        progress = handle.progress()
        assert progress.done_bytes == progress.total_bytes >= 4000
        assert (progress.state, progress.done_files) == (C, 1)
        until(lambda: len(handle.progress().ranks) == count or rank, "all ranks")
        hold.go()
        handle.result(HANG_S)
        assert handle.exception() is None
        assert not handle.cancel()
        assert (handle.done(), handle.state) == (True, D)


def begun(rank: int) -> dict[str, Any]:
    words = {"step": 1, "list": [1, "a"], "object": {"deep": [rank]}}
    mine = {f"momentum{rank}": seeded(100 + rank, 100), f"words{rank}": words}
    return {"weight": cut(seeded(1, 64, 32)), **mine}


def train(state: dict[str, Any], rank: int) -> None:
    """Change everything in place, in every way in which a trainer does."""
    state["weight"].to_local().add_(1)
    state[f"momentum{rank}"].neg_()
    words = state[f"words{rank}"]
    words["step"] += 1
    words["list"].append("b")
    words["object"]["deep"][0] -= 1


@pytest.mark.parametrize(("mode", "max_pending"), [("thread", 1), ("process", 3)])
@on_ranks()
def test_saves_commit_in_order_what_was_there_at_the_call(
    rank: int, tmp_path: Path, mode: Any, max_pending: int
) -> None:
    """What changes after `save` returned is not saved; one too many waits for the oldest save."""
    ended: list[str] = []
    names = [f"step-{step}" for step in range(5)]
    state, expected = begun(rank), begun(rank)
    with quick_saver(mode, max_pending=max_pending) as saver:
        hold = Hold(tmp_path, "local plan", rank)
        handles: list[ckpt_storage.SaveHandle] = []
        for step, name in enumerate(names):
            if step == max_pending:
                # The next call waits for the first, which is let go from another thread.
                assert not handles[0].done()
                hold.reached()
                threading.Timer(0.2, hold.go).start()
            planner = None if step else held(hold)
            handles.append(saver.save(state, tmp_path / name, planner=planner, sync_files=False))
            train(state, rank)
            assert step != max_pending or handles[0].done()
            handles[-1].add_done_callback(lambda it: ended.append(it.url[-6:]))
        saver.wait(HANG_S)
        assert all(handle.state is D for handle in handles)
    assert ended == names
    for name in names:
        assert_holds(tmp_path / name, expected, [load])
        train(expected, rank)
    assert [info.name for info in list_checkpoints(tmp_path)] == names


def _held(pid: int) -> tuple[int, int]:
    """Return a process's memory in bytes but for files, whoever shares it, and its descriptors."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    kib = [int(text.partition(f"\n{field}:")[2].split()[0]) for field in ("RssAnon", "RssShmem")]
    return 1024 * sum(kib), len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _thread_count() -> int:
    """Return how many threads stay: those of a store that was just closed are ending."""
    counts = []
    for _ in range(20):
        counts.append(threading.active_count())
        time.sleep(0.05)
    return min(counts)


@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_memory_and_descriptors_are_stable(rank: int, tmp_path: Path, mode: Any) -> None:
    """After a few saves, more take no memory, descriptor or thread; a closed saver keeps none."""
    seen = []
    weight = torch.ones(2_000_000)
    state = {f"w{rank}": weight, "x": {"y": [rank]}}
    with quick_saver(mode) as saver:
        for step in range(21):
            weight.fill_(step)
            saver.save(state, tmp_path, overwrite=True, sync_files=False).result(HANG_S)
            if step in {4, 12, 20}:
                gc.collect()
                pids = [os.getpid(), *([saver.worker_pid] if saver.worker_pid else [])]
                seen.append((*map(sum, zip(*map(_held, pids), strict=True)), _thread_count()))
        before = _held(os.getpid())[0]
    gc.collect()
    assert before - _held(os.getpid())[0] > 4_000_000  # half of what was staged
    memory, descriptors, threads = zip(*seen, strict=True)
    assert memory[2] - memory[0] < 8_000_000  # one state
    assert descriptors[2] <= descriptors[0] + 2
    assert threads[2] <= threads[0] + 1


@pytest.mark.parametrize("mode", MODES)
def test_warm_up_has_the_memory_of_all_saves_before_the_first(tmp_path: Path, mode: Any) -> None:
    """It takes memory for `max_pending` copies; saves after it take no more, and are right.

    Also a save of another structure, which the warm-up knew nothing of.
    """
    state = {"w": torch.ones(10_000_000), "words": [1, {2}]}
    other = {"w": torch.arange(3), "v": torch.ones(2, 2)}
    with quick_saver(mode, max_pending=2) as saver:
        saver.save(other, tmp_path / "first", sync_files=False).result(HANG_S)
        before = _held(os.getpid())[0]
        saver.warm_up(state)
        warm = _held(os.getpid())[0]
        assert warm - before > 2 * 38_000_000
        for name, saved in (("a", state), ("b", state), ("c", other)):
            saver.save(saved, tmp_path / name, sync_files=False)
        saver.wait(HANG_S)
        saver.warm_up(state)
        assert _held(os.getpid())[0] - warm < 20_000_000
    assert_holds(tmp_path / "b", {"w": state["w"]}, [load])
    assert_holds(tmp_path / "c", other)
    with pytest.raises(errors.InvalidInputError, match="closed"):
        saver.warm_up(state)


def test_save_async_keeps_no_copy_of_the_state(tmp_path: Path) -> None:
    """Once no save is in flight, the process holds as much memory as before the first one."""
    state = {"w": torch.ones(10_000_000)}
    save_async({"w": torch.ones(1)}, tmp_path / "first", sync_files=False).result(HANG_S)
    before = _held(os.getpid())[0]
    handles = [save_async(state, tmp_path / f"{n}", sync_files=False) for n in range(2)]
    for handle in handles:
        handle.result(HANG_S)
    until(lambda: _held(os.getpid())[0] - before < 20_000_000, "half of one copy")


@pytest.mark.parametrize(
    ("mode", "where", "canceller"),
    [
        ("thread", "write", 1),
        ("process", "write", 0),
        ("thread", "committed", 0),
        ("process", "commit", 0),
        ("process", "committed", 1),
    ],
)
@on_ranks()
def test_cancel_on_one_rank_ends_the_save_alike_on_all(
    rank: int, tmp_path: Path, mode: Any, where: Any, canceller: int
) -> None:
    """Before the commit it is CANCELLED and not there; later as it is; those behind go on.

    It is held on all ranks, or where rank 0 commits.
    """
    with quick_saver(mode, max_pending=2, on_error="warn") as saver:
        hold = Hold(tmp_path, where, rank if where == "write" else 0)
        planner = held(hold) if rank == hold.rank else None
        handle = save_step(saver, tmp_path, rank, 0, planner=planner)
        queued = save_step(saver, tmp_path, rank, 1)
        hold.reached()
        dist.barrier()
        if rank == canceller:
            assert handle.cancel()
            assert where != "write" or handle.cancel()
            (tmp_path / "told").touch()
        until((tmp_path / "told").exists, "the cancelling")
        if rank == hold.rank:
            threading.Timer(0.0 if where == "write" else 0.5, hold.go).start()
        error = handle.exception(HANG_S)
        queued.result(HANG_S)
        third = save_step(saver, tmp_path, rank, 2)
        assert third.cancel() or third.done()
        third.exception(HANG_S)
    ended = handle.state, third.state, error and (type(error), error.rank)
    assert gathered(ended) == [ended] * 2
    there = {info.name for info in list_checkpoints(tmp_path)}
    assert "step-1" in there
    # Whatever was faster, all ranks say the same, and it is so.
    assert handle.state is (D if "step-0" in there else SaveState.CANCELLED)
    assert third.state is (D if "step-2" in there else SaveState.CANCELLED)
    if where != "commit":
        assert ("step-0" in there) == (where == "committed")
    if where == "write":
        assert ended[2] == (errors.SaveCancelledError, canceller)


class NotingPlanner(DefaultSavePlanner):
    """A planner that appends the names it knows to its list as it plans for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        self.seen.append([*self.state_dict])
        return super().create_global_plan(all_plans)


def test_saves_with_one_planner_object_do_not_share_its_state(tmp_path: Path) -> None:
    """Global planning of a save sees that save's state, though a later save is set up already."""
    planner = NotingPlanner()
    with quick_saver("thread", max_pending=2) as saver:
        hold_here(hold := Hold(tmp_path, "local plan", 0))
        saver.save({"first": torch.ones(3)}, tmp_path / "a", planner=planner, sync_files=False)
        hold.reached()
        saver.save({"second": torch.ones(3)}, tmp_path / "b", planner=planner, sync_files=False)
        hold.go()
    assert planner.seen == [["first"], ["second"]]


class SlowCopies:
    """Copies of states that wait for the word of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.inner = inner = StagingJob._copy  # noqa: SLF001  # what a GPU takes its time for

        def slow(job: StagingJob) -> None:
            self.go.wait(HANG_S)
            inner(job)

        monkeypatch.setattr(StagingJob, "_copy", slow)


def test_step_guard_waits_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting in `save`, the guard waits: what a step changes inside is not saved."""
    slow = SlowCopies(monkeypatch)
    weight, words = torch.ones(1000), [1]
    state = {"w": weight, "words": words}
    with quick_saver("thread") as saver:
        handle = saver.save(state, tmp_path / "a", block_until_staged=False)
        words[0] = 2  # objects are taken in the call
        assert handle.state is SaveState.STAGING
        assert not handle.is_staged()
        with pytest.raises(errors.PhaseTimeoutError, match="staged"):
            handle.wait_staged(0.01)
        threading.Timer(0.2, slow.go.set).start()
        with saver.step_guard():
            assert handle.is_staged()
            weight.zero_()
        handle.wait_staged(0)
        handle.result(HANG_S)
    assert_holds(tmp_path / "a", {"w": torch.ones(1000), "words": [1]})


def test_check_staging_names_what_changed_during_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that a forward pass changes fails the save, which names it, and it alone."""
    slow = SlowCopies(monkeypatch)
    shared = torch.ones(1000)
    state = {
        "empty": torch.ones(0),
        "w": torch.ones(1000),
        "running_mean": shared[:500],
        "again": shared[:500],
        "other": shared[500:],
    }
    with quick_saver("thread", check_staging=True, on_error="warn") as saver:
        handle = saver.save(state, tmp_path / "a", block_until_staged=False)
        state["running_mean"][7] = 2
        slow.go.set()
        with saver.step_guard():
            state["w"].zero_()
        error = handle.exception(HANG_S)
        assert isinstance(error, errors.InvalidInputError)
        assert "while it was copied: again, running_mean." in str(error)
        saver.save(state, tmp_path / "b", sync_files=False).result(HANG_S)
    assert [info.name for info in list_checkpoints(tmp_path)] == ["b"]


@pytest.mark.parametrize("blocks", [True, False])
def test_check_staging_finds_nothing_in_a_state_that_stays(tmp_path: Path, *, blocks: bool) -> None:
    """Tensors of all forms compare equal with their copies."""
    state = {
        "rows": seeded(1, 3000, 700)[:, ::2],
        "complex": seeded(2, 40, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5),
        "nan": torch.full((9,), float("nan")),
        "bytes": torch.arange(7, dtype=torch.uint8),
    }
    with quick_saver("thread", check_staging=True) as saver:
        saver.save(state, tmp_path / "a", block_until_staged=blocks).result(HANG_S)


def test_copy_that_takes_too_long_harms_no_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that outlives its deadline never writes into the memory of the next save."""
    slow = SlowCopies(monkeypatch)
    with quick_saver("thread", timeout=quick_timeouts(stage=0.2), on_error="warn") as saver:
        late = saver.save({"w": torch.full((1000,), 7.0)}, tmp_path / "a", block_until_staged=False)
        assert isinstance(late.exception(HANG_S), errors.PhaseTimeoutError)
        assert late.state is SaveState.TIMED_OUT
        monkeypatch.setattr(StagingJob, "_copy", slow.inner)
        hold = Hold(tmp_path, "write", 0)
        state = {"w": torch.ones(1000)}
        next_one = saver.save(state, tmp_path / "b", planner=held(hold), sync_files=False)
        hold.reached()
        slow.go.set()
        until(
            lambda: not any(t.name == "ckpt-storage stage" for t in threading.enumerate()),
            "the end of the late copy",
        )
        hold.go()
        next_one.result(HANG_S)
    assert_holds(tmp_path / "b", {"w": torch.ones(1000)})


def test_step_guard_raises_no_failure_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that fails stops no step and holds no tensor: the save's own waits tell of it."""

    def broken(*_args: Any) -> None:
        raise RuntimeError("out of memory, says the test")

    monkeypatch.setattr(torch, "_foreach_copy_", broken)
    tensor = torch.ones(100_000)
    source = weakref.ref(tensor)
    saver = quick_saver("thread")
    handle = saver.save({"w": tensor}, tmp_path / "a", block_until_staged=False)
    del tensor
    with saver.step_guard():
        assert handle.is_staged()
    error = handle.exception(HANG_S)
    assert "out of memory" in str(error)
    assert summary_of(error) == ("CheckpointError", 0, "stage")
    assert handle.state is SaveState.FAILED
    gc.collect()
    assert source() is None
    saver.close()


@on_ranks()
def test_savers_do_not_meet(rank: int, tmp_path: Path) -> None:
    """Savers of one group run side by side; ranks never take one's save for the other's.

    A save in the middle holds up none of another saver, nor do its next ones mix.
    """
    one_at, two_at = tmp_path / "one", tmp_path / "two"
    with quick_saver("process") as one, quick_saver("thread", name="two") as two:
        hold = Hold(tmp_path, "write", rank)
        first = save_step(one, one_at, rank, 0, planner=held(hold))
        hold.reached()
        save_step(two, two_at, rank, 5).result(HANG_S)
        options: dict[str, Any] = {"sync_files": False, "timeout": quick_timeouts()}
        late = Hold(two_at, "local plan", rank)
        second = save_async(state_of(rank, 6), two_at / "step-6", planner=held(late), **options)
        third = save_async(state_of(rank, 7), two_at / "step-7", **options)
        assert [second.done(), third.done()] == [False, False]
        late.go()
        assert [second.result(HANG_S).name, third.result(HANG_S).name] == ["step-6", "step-7"]
        assert not first.done()
        hold.go()
        first.result(HANG_S)
    for folder, step in ((one_at, 0), (two_at, 5), (two_at, 6), (two_at, 7)):
        assert same(loaded(folder / f"step-{step}", rank), state_of(rank, step))


@on_ranks(3)
def test_a_group_saves_alone_and_is_not_kept(rank: int, tmp_path: Path) -> None:
    """Others call nothing; a group ends with its last user; who is no member is told so."""
    # In this order: torch names a group by how many its members know, here one each.
    group: Any = None
    if rank != 1:
        group = dist.new_group([0, 2], use_local_synchronization=True)
    alone = dist.new_group([0])
    if rank == 1:
        calls: list[Callable[[], object]] = [
            lambda: AsyncSaver(alone),
            lambda: save_async({}, tmp_path, process_group=alone),
            lambda: CheckpointManager(tmp_path, process_group=alone),
            lambda: ckpt_storage.save({}, tmp_path, process_group=alone),
            lambda: load({}, tmp_path, process_group=alone),
        ]
        for call in calls:
            with pytest.raises(errors.InvalidInputError, match="not a member"):
                call()
        return
    with quick_saver("process", process_group=group) as saver:
        assert save_step(saver, tmp_path, rank, 0).result(HANG_S).name == "step-0"
        save_step(saver, tmp_path, rank, 1)
    assert same(loaded(tmp_path / "step-0", rank), state_of(rank, 0))
    save_async(state_of(rank, 2), tmp_path / "step-2", process_group=group).result(HANG_S)
    dist.destroy_process_group(group)
    there = weakref.ref(group)
    del group, saver
    gc.collect()
    assert there() is None


def test_close_and_wait_may_be_called_again(tmp_path: Path) -> None:
    """`wait` and `close` are idempotent; a closed saver refuses saves, and its worker is gone."""
    saver = quick_saver("process")
    saver.wait()
    pid = saver.worker_pid
    handle = save_step(saver, tmp_path, 0, 0)
    saver.wait()
    assert handle.state is D
    saver.wait(0)
    saver.close()
    saver.close()
    assert saver.worker_pid is None
    assert pid is None or not is_alive(pid)
    with pytest.raises(errors.InvalidInputError, match="closed"):
        save_step(saver, tmp_path, 0, 1)


def test_block_that_fails_saves_what_it_began(tmp_path: Path) -> None:
    """An exception in the block stays what it is; the save in flight ends first."""
    with pytest.raises(ZeroDivisionError), quick_saver("thread") as saver:  # noqa: PT012  # a block
        handle = save_step(saver, tmp_path, 0, 0)
        raise ZeroDivisionError
    assert handle.state is D


def test_relative_places_are_below_the_folder_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the worker started and the trainer goes, each path means what it meant in `save`."""
    made, called, later = (tmp_path / name for name in ("made", "called", "later"))
    for folder in (made, called, later):
        folder.mkdir()
    monkeypatch.chdir(made)
    with quick_saver("process", max_pending=3) as saver:
        hold = Hold(tmp_path, "write", 0)
        save_step(saver, tmp_path, 0, 0, planner=held(hold))
        monkeypatch.chdir(called)
        saver.save(state_of(0, 1), "run", consolidate="weights")
        last = saver.save(state_of(0, 2), "apart", consolidate="made")
        monkeypatch.chdir(later)
        hold.go()
        assert last.result(HANG_S).url == f"file://{called}/apart"
    names = {folder.name for folder in called.iterdir()}
    assert names == {"apart", "made", "run", "weights"}
    assert [*made.iterdir(), *later.iterdir()] == []


@pytest.mark.parametrize("mode", MODES)
def test_forgotten_saver_ends_its_saves(tmp_path: Path, mode: Any) -> None:
    """A saver that is collected while saves are in flight blocks nobody, and they end well."""
    saver = quick_saver(mode, max_pending=2)
    hold = Hold(tmp_path, "write", 0)
    first = save_step(saver, tmp_path, 0, 0, planner=held(hold))
    second = save_step(saver, tmp_path, 0, 1)
    hold.reached()
    pid = saver.worker_pid
    there = weakref.ref(saver)
    del saver
    gc.collect()
    assert there() is None
    assert not first.done()
    hold.go()
    for step, handle in enumerate((first, second)):
        assert handle.result(HANG_S).name == f"step-{step}"
        assert same(loaded(tmp_path / f"step-{step}", 0), state_of(0, step))
    if pid is not None:
        until(lambda: not is_alive(pid), "the end of the worker")
    assert not hasattr(AsyncSaver, "__del__")


@pytest.mark.parametrize("mode", MODES)
@on_ranks()
def test_progress_is_told_to_a_callback_or_shown_on_rank_0(
    rank: int, tmp_path: Path, mode: Any
) -> None:
    """A callback hears of all bytes of its rank, unprinted; `progress=True` is rank 0's bar."""
    events: list[ProgressEvent] = []
    printed, bar = io.StringIO(), io.StringIO()
    with quick_saver(mode) as saver:
        # Once all workers have started: the log tells of those that are late.
        save_step(saver, tmp_path, rank, 99).result(HANG_S)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            info = save_step(saver, tmp_path, rank, 0, progress=events.append).result(HANG_S)
        with contextlib.redirect_stderr(bar):
            save_step(saver, tmp_path, rank, 1, progress=True).result(HANG_S)
    assert printed.getvalue() == ""
    assert {(event.phase, event.rank) for event in events} == {("write", rank)}
    done = [event.done_bytes for event in events]
    assert done == sorted(done)
    assert done[-1] == events[-1].total_bytes >= 4000
    assert events[-1].save_id == info.save_id
    shown = bar.getvalue()
    assert shown == "" if rank else "write" in shown and "100%" in shown


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "fork"}, {"on_error": "ignore"}, {"max_pending": 0}, {"exit_timeout_s": -1.0}],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """What cannot be is refused before anything is started."""
    before = set(threading.enumerate())
    with pytest.raises(errors.InvalidInputError):
        AsyncSaver(**{"mode": "thread", **wrong})
    assert set(threading.enumerate()) <= before
