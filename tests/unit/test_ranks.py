"""The rank runner: functions run as ranks, failures are told apart, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.testing.ranks import RankPool, RanksFailedError, run_ranks


def gathered(rank: int, word: str) -> list[tuple[int, str, str | None, int]]:
    """Return what every rank of the default group says."""
    found: list[tuple[int, str, str | None, int]] = [(-1, "", None, 0)] * dist.get_world_size()
    threads = os.environ.get("OMP_NUM_THREADS")
    dist.all_gather_object(found, (rank, word, threads, torch.get_num_threads()))
    return found


def rank_one_raises(rank: int) -> int:
    """Raise an error of ours on rank 1 only."""
    if rank == 1:
        raise CheckpointError("Bad luck.", rank=1, next_step="Try again.")
    return rank


class UnpicklableError(Exception):
    """An exception that another process cannot make again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def all_raise_unpicklable(rank: int) -> None:
    """Raise what cannot travel."""
    raise UnpicklableError("does not", f" travel from {rank}")


def rank_one_dies(rank: int) -> None:
    """Kill rank 1 while the other waits for it."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def start_and_hang(_rank: int, folder: Path) -> None:
    """Start a process that would live long, tell its id, and never return."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (folder / str(child.pid)).touch()
    child.wait()


def is_running(pid: int) -> bool:
    """Return whether a process lives, one that only waits to be reaped not counted."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_ranks_form_a_group_of_the_size_asked_for(ranks: RankPool) -> None:
    """Each job has a default group of exactly its ranks, whose operators use one thread each."""
    for size in (3, 1, 4):
        expected = [(rank, "word", "1", 1) for rank in range(size)]
        assert ranks.run(gathered, "word", world_size=size) == [expected] * size


def test_an_exception_comes_back_as_it_was_raised(ranks: RankPool) -> None:
    """The outcome of a rank that raised has its exception and traceback; others have values."""
    first, second = ranks.outcomes(rank_one_raises, world_size=2)
    assert (first.value, first.failure) == (0, None)
    assert isinstance(second.error, CheckpointError)
    assert second.error.rank == 1
    assert "rank_one_raises" in (second.failure or "")
    with pytest.raises(RanksFailedError, match=r"(?s)1 of 2 ranks failed.*Bad luck"):
        ranks.run(rank_one_raises, world_size=2)


def test_an_exception_that_cannot_travel_is_told_as_text(ranks: RankPool) -> None:
    """A failure is reported although its exception does not unpickle, and the pool goes on."""
    outcomes = ranks.outcomes(all_raise_unpicklable, world_size=2)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert "UnpicklableError: does not travel from 1" in (outcomes[1].failure or "")
    assert len(ranks.run(gathered, "again", world_size=2)) == 2


def test_a_rank_that_dies_is_reported_and_replaced() -> None:
    """A killed rank is named with its exit code, and the next job has all ranks again."""
    with RankPool(2) as pool:
        died = pool.outcomes(rank_one_dies)[1]
        assert died.failure == "It died with exit code -9."
        assert len(pool.run(gathered, "again")) == 2


def variable(_rank: int, name: str) -> str | None:
    """Return a variable of the environment."""
    return os.environ.get(name)


def test_a_rank_has_the_environment_of_the_time_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the time when the first of all ranks did, and only ranks in need start."""
    for word in ("first", "second"):
        monkeypatch.setenv("CKPT_STORAGE_TEST_WORD", word)
        monkeypatch.setenv(f"CKPT_STORAGE_TEST_{word}", word)
        with RankPool(3) as pool:
            assert pool.run(variable, "CKPT_STORAGE_TEST_WORD", world_size=2) == [word] * 2
            assert len(pool.pids) == 2
            assert pool.run(variable, f"CKPT_STORAGE_TEST_{word}") == [word] * 3
            assert len(pool.pids) == 3
            monkeypatch.delenv(f"CKPT_STORAGE_TEST_{word}")
    with RankPool(1) as pool:
        assert pool.run(variable, "CKPT_STORAGE_TEST_first") == [None]


def process_id(_rank: int) -> int:
    """Return who runs this."""
    return os.getpid()


def test_run_ranks_starts_and_ends_its_own_processes() -> None:
    """What `run_ranks` returns comes from a process that is gone afterwards."""
    (outcome,) = run_ranks(1, process_id)
    assert outcome.value is not None
    assert outcome.value != os.getpid()
    assert not is_running(outcome.value)


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """At the deadline ranks that hang are killed together with what they started."""
    with RankPool(2) as pool:
        pool.run(gathered, "started")
        outcomes = pool.outcomes(start_and_hang, tmp_path, timeout_s=4)
    assert [outcome.failure for outcome in outcomes] == ["It did not end in time."] * 2
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 2
    assert [pid for pid in started if is_running(pid)] == []


def test_ranks_end_with_the_process_that_uses_them(tmp_path: Path) -> None:
    """Killing the owner of a pool ends its ranks and what they started."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = [{str(Path(__file__).parent)!r}]\n"
        "from pathlib import Path\n"
        "from ckpt_storage.testing.ranks import run_ranks\n"
        "from test_ranks import start_and_hang\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(2, start_and_hang, Path(sys.argv[1]))\n",
        encoding="utf-8",
    )
    told = tmp_path / "told"
    told.mkdir()
    owner = subprocess.Popen([sys.executable, script, told])
    deadline_s = time.monotonic() + 60
    while len(list(told.iterdir())) < 2 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    started = [int(path.name) for path in told.iterdir()]
    while any(map(is_running, started)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert len(started) == 2
    assert [pid for pid in started if is_running(pid)] == []


def test_a_pool_refuses_more_ranks_than_it_has(ranks: RankPool) -> None:
    """A world larger than the pool, or of none, is an error of the caller."""
    for size in (0, 5):
        with pytest.raises(InvalidInputError, match=f"{size} ranks"):
            ranks.run(gathered, "word", world_size=size)
