"""The rank runner: functions run as ranks, failures are told apart, and nothing outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist
from on_ranks import gathered
from rank_pool import RankPool
from saver_cases import is_alive, until


def rank_one_dies(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def start_and_hang(_rank: int, folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    (folder / str(child.pid)).touch()
    child.wait()


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    """A killed rank is named and replaced; ranks that hang are killed with what they started."""
    with RankPool(2) as pool:
        died = pool.outcomes(rank_one_dies)[1]
        assert died.failure == "It died with exit code -9."
        assert pool.run(gathered) == [[0, 1]] * 2
        outcomes = pool.outcomes(start_and_hang, tmp_path, timeout_s=4)
    assert [outcome.failure for outcome in outcomes] == ["It did not end in time."] * 2
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 2
    assert [pid for pid in started if is_alive(pid)] == []


def test_ranks_end_with_the_process_that_uses_them(tmp_path: Path) -> None:
    """Killing the owner of a pool ends its ranks and what they started."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from pathlib import Path\n"
        "from rank_pool import run_ranks\n"
        "from test_ranks import start_and_hang\n"
        "if __name__ == '__main__':\n"
        "    run_ranks(2, start_and_hang, Path(sys.argv[1]))\n",
        encoding="utf-8",
    )
    told = tmp_path / "told"
    told.mkdir()
    owner = subprocess.Popen([sys.executable, script, told])
    until(lambda: len(list(told.iterdir())) == 2, "both ranks have started something")
    owner.kill()
    owner.wait()
    started = [int(path.name) for path in told.iterdir()]
    until(lambda: not any(map(is_alive, started)), "the end of what they started")
