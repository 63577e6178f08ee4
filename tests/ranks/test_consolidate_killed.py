"""A rank that dies while ranks consolidate is named by all others in time; a re-run completes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import consolidate_cases as cases
import pytest
from consolidate_cases import check, files_in
from dcp_cases import seeded

import ckpt_storage
from ckpt_storage.errors import CheckpointError
from ckpt_storage.export.consolidate import consolidate
from ckpt_storage.export.folder import ExportFolder
from ckpt_storage.options import Timeouts
from ckpt_storage.store.upload import Upload
from ckpt_storage.testing.ranks import RankPool

SILENCE_S = 2.0
PROMISED_S = SILENCE_S + 5.0


def model() -> dict[str, Any]:
    """Return 8 MiB in four tensors."""
    return {f"w{i}": seeded(i, 512, 1024) for i in range(4)}


def consolidate_and_die(
    rank: int, url: Path, victim: int, holder: type, name: str
) -> tuple[str, float]:
    """Consolidate; the victim is killed at a method. Others return their error and how long."""

    def dying(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        setattr(holder, name, dying)
    start_s, told = time.monotonic(), ""
    try:
        consolidate(url, timeout=Timeouts(consolidate=60, plan=60, silence=SILENCE_S))
    except CheckpointError as error:
        told = str(error)
    return told, time.monotonic() - start_s


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Processes that may be killed; new ones start then."""
    with RankPool(3, timeout_s=40) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("victim", "holder", "name"),
    [
        (1, Upload, "write_part"),
        (0, Upload, "complete"),
        (0, ExportFolder, "publish"),
    ],
)
def test_a_killed_rank_is_named_and_a_rerun_completes(
    tmp_path: Path, pool: RankPool, victim: int, holder: type, name: str
) -> None:
    """The others raise within seconds, nothing is published; the next run leaves nothing over."""
    url = tmp_path / "run"
    ckpt_storage.save(model(), url)
    consolidate(url, tmp_path / "reference")
    outcomes = pool.outcomes(consolidate_and_die, url, victim, holder, name)
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            assert "died" in str(outcome.failure)
            continue
        assert outcome.value is not None, outcome
        text, seconds = outcome.value
        assert f"ank {victim}" in text, text
        assert seconds < PROMISED_S
    unfinished = files_in(url / "hf")
    index = json.loads(unfinished.get(cases.INDEX, b'{"weight_map": {}}'))
    assert not unfinished.keys() & index["weight_map"].values()
    consolidate(url)
    check(files_in(url / "hf"), model())
    names = {path for path in files_in(url / "hf") if not path.startswith(".ckpt-storage/")}
    assert names == {
        path for path in files_in(tmp_path / "reference") if not path.startswith(".ckpt-storage/")
    }
