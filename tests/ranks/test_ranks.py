"""The rank runner: functions run as ranks, failures are told apart, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from ckpt_storage.testing.ranks import RankPool


def gathered(rank: int, word: str) -> list[object]:
    """Return what every rank of the default group says."""
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (rank, word))
    return found


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


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """A killed rank is named and replaced; ranks that hang are killed with what they started."""
    with RankPool(2) as pool:
        died = pool.outcomes(rank_one_dies)[1]
        assert died.failure == "It died with exit code -9."
        assert len(pool.run(gathered, "again")) == 2
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
