"""The lines and statistics of operations of several ranks."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dcp_cases import seeded
from on_ranks import gathered, on_ranks
from saver_cases import quick_saver

import ckpt_storage
from ckpt_storage import RankFailedError, StorageError
from ckpt_storage.saves.session import SaveSession

SLOW_S = 2.0


@contextlib.contextmanager
def lines(operation: str) -> Iterator[list[str]]:
    """Collect the lines of an operation that this rank logs, with their levels."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if f"operation={operation} " in text:
                found.append(f"{record.levelname} {text}")

    log, handler = logging.getLogger("ckpt_storage"), Collector()
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def state_of(rank: int) -> dict[str, Any]:
    return {f"weight.{rank}": seeded(rank, 1000 * (rank + 1))}


def slow(session: SaveSession, *arguments: Any) -> Any:
    """Write as a rank on a slow node does."""
    time.sleep(SLOW_S)
    return WRITE(session, *arguments)


def failing(_session: SaveSession, *_arguments: Any) -> Any:
    raise StorageError("The disk is on fire.", kind="other")


WRITE = SaveSession._write  # noqa: SLF001  # what a slow disk slows


@on_ranks(2)
def test_the_line_names_the_slow_rank(rank: int, tmp_path: Path) -> None:
    """The coordinator alone logs it; all ranks get the same statistics."""
    write = slow if rank == 1 else WRITE
    with mock.patch.object(SaveSession, "_write", write), lines("save") as found:
        info = ckpt_storage.save(state_of(rank), tmp_path / "step-1", step=1)
    assert info.stats is not None
    assert (info.stats.world_size, info.stats.slowest_rank) == (2, 1)
    assert info.stats.slowest_s >= SLOW_S
    assert 0.5 < info.stats.slowest_share < 1
    assert info.stats.phase_s["write"] >= SLOW_S, "the coordinator waits for it"
    assert len(set(gathered(info.stats))) == 1
    assert len(found) == (1 if rank == 0 else 0)
    for line in found:
        assert line.startswith("INFO Saved ")
        assert " step=1 " in line
        assert " ranks=2 " in line
        assert " slowest_rank=1 " in line


@on_ranks(2)
def test_the_line_of_a_worker_names_the_slow_rank(rank: int, tmp_path: Path) -> None:
    """A save in the background logs when it ends; its handle has the statistics."""
    with quick_saver("process") as saver, lines("save") as found:
        stats = saver.save(state_of(rank), tmp_path / "step-1").result().stats
    assert stats is not None
    assert stats.world_size == 2
    assert stats.total_bytes >= 12_000
    assert [line.split()[0] for line in found] == (["INFO"] if rank == 0 else [])


@on_ranks(2)
def test_the_line_names_the_rank_that_failed(rank: int, tmp_path: Path) -> None:
    """With code and phase, once, on the coordinator."""
    write = failing if rank == 1 else WRITE
    with mock.patch.object(SaveSession, "_write", write), lines("save") as found:
        with pytest.raises((StorageError, RankFailedError)):
            ckpt_storage.save(state_of(rank), tmp_path / "step-1")
        dist.barrier()
    assert len(found) == (1 if rank == 0 else 0)
    for line in found:
        assert line.startswith("WARNING The save ended in the write phase: Rank 1 failed")
        assert " outcome=failed " in line
        assert " code=rank-failed phase=write failed_ranks=1 " in line


@on_ranks(2)
def test_a_load_names_the_ranks_and_bytes(rank: int, tmp_path: Path) -> None:
    """All ranks get the statistics of all."""
    ckpt_storage.save(state_of(rank), tmp_path / "step-1")
    target = {f"weight.{rank}": torch.zeros(1000 * (rank + 1))}
    with lines("load") as found:
        stats = ckpt_storage.load(target, tmp_path / "step-1")
    assert len(set(gathered(stats))) == 1
    assert (stats.world_size, stats.total_bytes >= 12_000) == (2, True)
    assert len(found) == (1 if rank == 0 else 0)
