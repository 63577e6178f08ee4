"""Background saves in threads and in worker processes: values, states, order, memory, progress."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
import time
import weakref
from pathlib import Path
from typing import Any, NoReturn

import pytest
import saver_cases
import torch
import torch.distributed as dist
from dcp_cases import same, seeded
from saver_cases import (
    END_S,
    MODES,
    Hold,
    held,
    is_alive,
    loaded,
    quick_saver,
    quick_timeouts,
    save_step,
    state_of,
    until,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_storage
from ckpt_storage import (
    AsyncSaver,
    CheckpointManager,
    InvalidInputError,
    PhaseTimeoutError,
    ProgressEvent,
    SaveCancelledError,
    SaveHandle,
    SaveState,
    list_checkpoints,
    load,
    save_async,
)
from ckpt_storage.background import saver
from ckpt_storage.background.staging import StagingJob
from ckpt_storage.testing.ranks import RankPool

W, C, D = SaveState.WRITING, SaveState.COMMITTING, SaveState.COMMITTED


def _walk(rank: int, folder: str, mode: Any) -> list[str | None]:
    """Hold a save of all ranks in each step; return its save ids."""
    with quick_saver(mode) as saver:
        hold = Hold(folder, "write", rank)
        handle = save_step(saver, folder, rank, 0, planner=held(hold))
        assert not handle.done()
        hold.reached()
        until(lambda: handle.save_id, "a save id")
        first_id = handle.save_id
        with pytest.raises(PhaseTimeoutError):
            handle.result(0.01)
        assert handle.state is W
        hold.go()
        assert handle.result(END_S).save_id == handle.save_id == first_id
        assert handle.state is D
        dist.barrier()
        (Path(folder) / f"go-{rank}").unlink()
        hold = Hold(folder, "commit" if rank == 0 else "outcome", rank)
        handle = save_step(saver, folder, rank, 1, planner=held(hold))
        hold.reached()
        until(lambda: handle.state is C, "the commit")
        progress = handle.progress()
        assert progress.done_bytes == progress.total_bytes >= 4000
        assert (progress.state, progress.done_files) == (C, 1)
        until(lambda: len(handle.progress().ranks) == dist.get_world_size() or rank, "all ranks")
        hold.go()
        info = handle.result(END_S)
        assert handle.exception() is None
        assert not handle.cancel()
        assert (handle.done(), handle.state) == (True, D)
    return [first_id, info.save_id]


@pytest.mark.parametrize(("mode", "world_size"), [("thread", 1), ("process", 2)])
def test_states_walk_in_order(ranks: RankPool, tmp_path: Path, mode: str, world_size: int) -> None:
    """A save is WRITING, COMMITTING, COMMITTED, with one save id on all ranks and its bytes."""
    outcomes = ranks.run(_walk, str(tmp_path), mode, world_size=world_size)
    assert outcomes == [outcomes[0]] * world_size


class Trainer:
    """A state that changes in place in every way a trainer changes one."""

    def __init__(self, rank: int, steps: int = 0) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.weight = distribute_tensor(seeded(1, 64, 32), mesh, [Shard(0)])
        self.momentum = seeded(100 + rank, 100)
        self.words = {"step": 1, "list": [1, "a"], "object": {"deep": [rank]}}
        self.rank = rank
        for _ in range(steps):
            self.step()

    def state(self) -> dict[str, Any]:
        """Return the state dict, which shares everything."""
        mine = {f"momentum{self.rank}": self.momentum, f"words{self.rank}": self.words}
        return {"weight": self.weight, **mine}

    def step(self) -> None:
        """Change everything in place."""
        self.weight.to_local().add_(1)
        self.momentum.neg_()
        self.words["step"] += 1  # type: ignore[operator]
        self.words["list"].append("b")  # type: ignore[attr-defined]
        self.words["object"]["deep"][0] -= 1  # type: ignore[index]


def _trained(rank: int, folder: str, mode: Any, max_pending: int) -> list[str]:
    """Save five steps with the first save held; return the order in which the saves ended."""
    ended: list[str] = []
    trainer = Trainer(rank)
    with quick_saver(mode, max_pending=max_pending) as saver:
        hold = Hold(folder, "local plan", rank)
        handles: list[SaveHandle] = []
        for step in range(5):
            planner = held(hold) if step == 0 else None
            if step == max_pending:
                # The next call waits for the first, which is let go from another thread.
                assert not handles[0].done()
                hold.reached()
                threading.Timer(0.2, hold.go).start()
            where = f"{folder}/step-{step}"
            handle = saver.save(trainer.state(), where, planner=planner, sync_files=False)
            trainer.step()
            if step == max_pending:
                assert handles[0].done()
            handle.add_done_callback(lambda it: ended.append(it.url[-6:]))
            handles.append(handle)
        saver.wait(END_S)
        assert all(handle.state is D for handle in handles)
    for step in range(5):
        found, expected = trainer.state(), Trainer(rank, step).state()
        load(found, f"{folder}/step-{step}")
        assert same(found, expected), step
    return ended


@pytest.mark.parametrize(("mode", "max_pending"), [("thread", 1), ("process", 3)])
def test_saves_commit_in_order_what_was_there_at_the_call(
    ranks: RankPool, tmp_path: Path, mode: str, max_pending: int
) -> None:
    """What changes after `save` returned is not saved; one too many waits for the oldest save."""
    steps = [f"step-{step}" for step in range(5)]
    outcomes = ranks.run(_trained, str(tmp_path), mode, max_pending, world_size=2)
    assert outcomes == [steps] * 2
    assert [info.name for info in list_checkpoints(tmp_path)] == steps


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


def _stable(rank: int, folder: str, mode: Any) -> list[tuple[int, int, int]]:
    """Save 20 times; return memory, descriptors and threads of trainer and worker on the way."""
    seen = []
    weight = torch.ones(2_000_000)
    state = {f"w{rank}": weight, "x": {"y": [rank]}}
    with quick_saver(mode) as saver:
        for step in range(21):
            weight.fill_(step)
            handle = saver.save(state, f"{folder}/one", overwrite=True, sync_files=False)
            handle.result(END_S)
            if step in {4, 12, 20}:
                gc.collect()
                pids = [os.getpid(), *([saver.worker_pid] if saver.worker_pid else [])]
                memory, descriptors = map(sum, zip(*map(_held, pids), strict=True))
                seen.append((memory, descriptors, _thread_count()))
        before = _held(os.getpid())[0]
    gc.collect()
    assert before - _held(os.getpid())[0] > 4_000_000  # half of what was staged
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_memory_and_descriptors_are_stable(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """After a few saves, more take no memory, descriptor or thread; a closed saver keeps none."""
    for seen in ranks.run(_stable, str(tmp_path), mode, world_size=2):
        memory, descriptors, threads = zip(*seen, strict=True)
        assert memory[2] - memory[0] < 8_000_000  # one state
        assert descriptors[2] <= descriptors[0] + 2
        assert threads[2] <= threads[0] + 1


def _cancelled(rank: int, folder: str, mode: Any, where: Any, canceller: int) -> list[Any]:
    """Cancel a save that is held on all ranks, or where rank 0 commits; go on with others."""
    with quick_saver(mode, max_pending=2, on_error="warn") as saver:
        hold = Hold(folder, where, rank if where == "write" else 0)
        planner = held(hold) if rank == hold.rank else None
        handle = save_step(saver, folder, rank, 0, planner=planner)
        queued = save_step(saver, folder, rank, 1)
        hold.reached()
        dist.barrier()
        if rank == canceller:
            assert handle.cancel()
            assert where != "write" or handle.cancel()
            (Path(folder) / "told").touch()
        until((Path(folder) / "told").exists, "the cancelling")
        if rank == hold.rank:
            threading.Timer(0.0 if where == "write" else 0.5, hold.go).start()
        error = handle.exception(END_S)
        queued.result(END_S)
        third = save_step(saver, folder, rank, 2)
        assert third.cancel() or third.done()
        third.exception(END_S)
        return [handle.state, third.state, error and (type(error), error.rank)]


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
def test_cancel_on_one_rank_ends_the_save_alike_on_all(
    ranks: RankPool, tmp_path: Path, mode: str, where: str, canceller: int
) -> None:
    """Before the commit it is CANCELLED and not there; later as it is; those behind go on."""
    given = str(tmp_path), mode, where, canceller
    one, other = ranks.run(_cancelled, *given, world_size=2)
    assert one == other
    state, third, error = one
    there = {info.name for info in list_checkpoints(tmp_path)}
    assert "step-1" in there
    # Whatever was faster, all ranks say the same, and it is so.
    assert state is (D if "step-0" in there else SaveState.CANCELLED)
    assert third is (D if "step-2" in there else SaveState.CANCELLED)
    if where != "commit":
        assert ("step-0" in there) == (where == "committed")
    if where == "write":
        assert error == (SaveCancelledError, canceller)


class SlowCopies:
    """Copies of states that wait for the word of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.inner = inner = StagingJob._copy  # noqa: SLF001  # what a GPU takes its time for

        def slow(job: StagingJob) -> None:
            self.go.wait(END_S)
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
        with pytest.raises(PhaseTimeoutError, match="staged"):
            handle.wait_staged(0.01)
        threading.Timer(0.2, slow.go.set).start()
        with saver.step_guard():
            assert handle.is_staged()
            weight.zero_()
        handle.wait_staged(0)
        handle.result(END_S)
    target: dict[str, Any] = {"w": torch.zeros(1000), "words": [0]}
    load(target, tmp_path / "a")
    assert same(target, {"w": torch.ones(1000), "words": [1]})


def test_copy_that_takes_too_long_harms_no_later_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that outlives its deadline never writes into the memory of the next save."""
    slow = SlowCopies(monkeypatch)
    timeouts = quick_timeouts(stage=0.2)
    with AsyncSaver(mode="thread", timeout=timeouts, on_error="warn") as saver:
        late = saver.save({"w": torch.full((1000,), 7.0)}, tmp_path / "a", block_until_staged=False)
        error = late.exception(END_S)
        assert isinstance(error, PhaseTimeoutError)
        assert late.state is SaveState.TIMED_OUT
        monkeypatch.setattr(StagingJob, "_copy", slow.inner)
        hold = Hold(tmp_path, "write", 0)
        next_one = saver.save(
            {"w": torch.ones(1000)}, tmp_path / "b", planner=held(hold), sync_files=False
        )
        hold.reached()
        slow.go.set()
        until(
            lambda: not any(t.name == "ckpt_storage-stage" for t in threading.enumerate()),
            "the end of the late copy",
        )
        hold.go()
        next_one.result(END_S)
    target = {"w": torch.zeros(1000)}
    load(target, tmp_path / "b")
    assert torch.equal(target["w"], torch.ones(1000))


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
    error = handle.exception(END_S)
    assert "out of memory" in str(error)
    assert saver_cases.told(error) == ("CheckpointError", 0, "stage")
    assert handle.state is SaveState.FAILED
    gc.collect()
    assert source() is None
    saver.close()


def _side_by_side(rank: int, folder: str) -> None:
    """Hold a save in the middle: another saver's does not wait for it, nor do its next ones mix."""
    with quick_saver("process") as one, quick_saver("thread", name="two") as two:
        hold = Hold(folder, "write", rank)
        first = save_step(one, f"{folder}/one", rank, 0, planner=held(hold))
        hold.reached()
        save_step(two, f"{folder}/two", rank, 5).result(END_S)
        options: dict[str, Any] = {"sync_files": False, "timeout": quick_timeouts()}
        late = Hold(f"{folder}/two", "local plan", rank)
        where = f"{folder}/two/step-6"
        second = save_async(state_of(rank, 6), where, planner=held(late), **options)
        third = save_async(state_of(rank, 7), f"{folder}/two/step-7", **options)
        assert [second.done(), third.done()] == [False, False]
        late.go()
        assert [second.result(END_S).name, third.result(END_S).name] == ["step-6", "step-7"]
        assert not first.done()
        hold.go()
        first.result(END_S)
    for name, step in (("one", 0), ("two", 5), ("two", 6), ("two", 7)):
        assert same(loaded(f"{folder}/{name}/step-{step}", rank), state_of(rank, step))


def test_savers_do_not_meet(ranks: RankPool, tmp_path: Path) -> None:
    """Savers of one group run side by side; ranks never take one's save for the other's."""
    ranks.run(_side_by_side, str(tmp_path), world_size=2)


def _short_group(rank: int, folder: str) -> list[object]:
    """Save in a group from several threads, and with a saver; leave it and forget it."""
    # In this order: torch names a group by how many its members know, here one each.
    group: Any = None
    if rank != 1:
        group = dist.new_group([0, 2], use_local_synchronization=True)
    alone = dist.new_group([0])
    refused = 0
    if rank == 1:
        for call in (
            lambda: AsyncSaver(alone),
            lambda: save_async({}, folder, process_group=alone),
            lambda: CheckpointManager(folder, process_group=alone),
            lambda: ckpt_storage.save({}, folder, process_group=alone),
            lambda: load({}, folder, process_group=alone),
        ):
            with pytest.raises(InvalidInputError, match="not a member"):
                call()
            refused += 1
        return [refused, "does not take part"]
    with quick_saver("process", process_group=group) as saver:
        info = save_step(saver, folder, rank, 0).result(END_S)
        save_step(saver, folder, rank, 1).result(END_S)
    assert same(loaded(f"{folder}/step-0", rank), state_of(rank, 0))
    save_async(state_of(rank, 2), f"{folder}/step-2", process_group=group).result(END_S)
    dist.destroy_process_group(group)
    there = weakref.ref(group)
    del group, saver
    gc.collect()
    return [info.name, there()]


def test_a_group_saves_alone_and_is_not_kept(ranks: RankPool, tmp_path: Path) -> None:
    """Others call nothing; a group ends with its last user; who is no member is told so."""
    outcomes = ranks.run(_short_group, str(tmp_path), world_size=3)
    assert outcomes == [["step-0", None], [5, "does not take part"], ["step-0", None]]


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
    with pytest.raises(InvalidInputError, match="closed"):
        save_step(saver, tmp_path, 0, 1)


def test_block_that_fails_saves_what_it_began(tmp_path: Path) -> None:
    """An exception in the block stays what it is; the save in flight ends first."""
    handles: list[SaveHandle] = []

    def block() -> NoReturn:
        with quick_saver("thread") as saver:
            handles.append(save_step(saver, tmp_path, 0, 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert handles[0].state is D


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
        assert last.result(END_S).url == f"file://{called}/apart"
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
    assert first.result(END_S).name == "step-0"
    assert second.result(END_S).name == "step-1"
    if pid is not None:
        until(lambda: not is_alive(pid), "the end of the worker")
    for step in range(2):
        assert same(loaded(tmp_path / f"step-{step}", 0), state_of(0, step))
    assert not hasattr(AsyncSaver, "__del__")


def _watched(rank: int, folder: str, mode: Any) -> tuple[list[ProgressEvent], str, str, str | None]:
    """Save with a callback, then with a bar; return the events and what each printed."""
    events: list[ProgressEvent] = []
    printed = [io.StringIO(), io.StringIO()]
    with quick_saver(mode) as saver:
        # Once all workers have started: the log tells of those that are late.
        save_step(saver, folder, rank, 99).result(END_S)
        with contextlib.redirect_stdout(printed[0]), contextlib.redirect_stderr(printed[0]):
            info = save_step(saver, folder, rank, 0, progress=events.append).result(END_S)
        with contextlib.redirect_stderr(printed[1]):
            save_step(saver, folder, rank, 1, progress=True).result(END_S)
    return events, printed[0].getvalue(), printed[1].getvalue(), info.save_id


@pytest.mark.parametrize("mode", MODES)
def test_progress_is_told_to_a_callback_or_shown_on_rank_0(
    ranks: RankPool, tmp_path: Path, mode: str
) -> None:
    """A callback hears of all bytes of its rank, unprinted; `progress=True` is rank 0's bar."""
    outcomes = ranks.run(_watched, str(tmp_path), mode, world_size=2)
    for rank, (events, printed, _, save_id) in enumerate(outcomes):
        assert printed == ""
        assert events
        assert {(event.phase, event.rank) for event in events} == {("write", rank)}
        done = [event.done_bytes for event in events]
        assert done == sorted(done)
        assert done[-1] == events[-1].total_bytes >= 4000
        assert events[-1].save_id == save_id
    first, second = (bar for _, _, bar, _ in outcomes)
    assert "write" in first
    assert "100%" in first
    assert second == ""


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "fork"}, {"on_error": "ignore"}, {"max_pending": 0}, {"exit_timeout_s": -1.0}],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    """What cannot be is refused before anything is started."""
    before = set(threading.enumerate())
    with pytest.raises(InvalidInputError):
        saver.AsyncSaver(**{"mode": "thread", **wrong})
    assert set(threading.enumerate()) <= before
