"""What an operation reports of itself: one line in the log, and statistics as data."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_tools import call
from dcp_cases import save as save_by_dcp
from dcp_cases import seeded
from s3_server import FaultRule, S3Server
from saver_cases import quick_saver

import ckpt_storage
from ckpt_storage import AsyncSaver, OperationStats
from ckpt_storage.observe.stats import RankTiming

STATE: dict[str, Any] = {"weight": seeded(1, 100_000), "step": 7}


def lines_of(caplog: pytest.LogCaptureFixture, operation: str) -> list[dict[str, str]]:
    """Return the pairs of each line that reports an operation, with its level."""
    lines = []
    for record in caplog.records:
        text = record.getMessage()
        if f"operation={operation} " in text:
            pairs = text[text.index("operation=") :]
            found = (word.partition("=") for word in shlex.split(pairs))
            lines.append({"level": record.levelname, **{key: value for key, _, value in found}})
    return lines


@pytest.fixture(autouse=True)
def at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ckpt_storage")


@pytest.mark.parametrize("mode", ["save", "thread", "process"])
def test_a_save_logs_one_line(mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where, step, bytes, seconds by phase and the slowest rank; nothing else at this level."""
    url = tmp_path / "step 7"
    if mode == "save":
        info = ckpt_storage.save(STATE, url, step=7)
    else:
        with quick_saver(mode) as saver:
            info = saver.save(STATE, url, step=7).result()
    (line,) = lines_of(caplog, "save")
    (shard,) = tmp_path.rglob("*.distcp")
    assert line["url"] == info.url
    assert (line["level"], line["outcome"], line["step"]) == ("INFO", "ok", "7")
    assert (line["save_id"], line["ranks"], line["retries"]) == (info.save_id, "1", "0")
    assert int(line["bytes"]) == shard.stat().st_size
    phases = {"plan_s", "write_s", "commit_s"} | ({"stage_s"} if mode != "save" else set())
    assert {key for key in line if key.endswith("_s") and key != "slowest_s"} == phases
    assert float(line["seconds"]) == pytest.approx(sum(float(line[p]) for p in phases), abs=0.01)
    assert (line["slowest_rank"], line["slowest_share"]) == ("0", "1.00")
    assert len([one for one in caplog.records if one.levelno >= logging.INFO]) == 1


def test_the_statistics_are_in_the_commit_record(tmp_path: Path) -> None:
    """A save and every later reader of its record get the same statistics."""
    info = ckpt_storage.save(STATE, tmp_path / "step-7")
    (listed,) = ckpt_storage.list_checkpoints(tmp_path)
    assert info.stats is not None
    assert listed.stats == info.stats
    assert set(info.stats.phase_s) == {"plan", "write"}
    assert info.stats.seconds == pytest.approx(sum(info.stats.phase_s.values()), abs=1e-4)
    copied = ckpt_storage.copy(tmp_path / "step-7", tmp_path / "copy" / "step-7")
    assert copied.save_id == info.save_id
    (there,) = ckpt_storage.list_checkpoints(tmp_path / "copy")
    assert there.stats == info.stats


def test_ls_and_show_print_the_statistics(tmp_path: Path) -> None:
    """Seconds and ranks in columns; seconds by phase of one checkpoint."""
    ckpt_storage.save(STATE, tmp_path / "step-7")
    head, line = call("ls", "-l", tmp_path).stdout.splitlines()
    assert head.split()[-3:] == ["seconds", "ranks", "slowest"]
    assert line.split()[-1] == "1"
    shown = call("show", tmp_path / "step-7").stdout
    assert "phase seconds   plan " in shown
    assert "slowest rank    0: " in shown


def test_a_save_of_dcp_records_statistics(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`dcp.save` through the storage writer logs the same line."""
    save_by_dcp(STATE, tmp_path / "step-7")
    (listed,) = ckpt_storage.list_checkpoints(tmp_path)
    assert listed.stats is not None
    (line,) = lines_of(caplog, "save")
    assert int(line["bytes"]) == listed.stats.total_bytes > 400_000


def test_a_failed_save_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Code, phase and rank of the error."""
    ckpt_storage.save(STATE, tmp_path / "step-7")
    caplog.clear()
    with pytest.raises(ckpt_storage.CheckpointExistsError):
        ckpt_storage.save(STATE, tmp_path / "step-7")
    (line,) = lines_of(caplog, "save")
    assert (line["level"], line["outcome"], line["code"]) == ("WARNING", "failed", "exists")
    assert (line["phase"], line["failed_ranks"]) == ("plan", "0")


def test_a_failed_background_save_logs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a save in the foreground; the handle has the error."""
    ckpt_storage.save(STATE, tmp_path / "step-7")
    caplog.clear()
    handle = ckpt_storage.save_async(STATE, tmp_path / "step-7")
    assert isinstance(handle.exception(60), ckpt_storage.CheckpointExistsError)
    (line,) = lines_of(caplog, "save")
    assert (line["level"], line["code"]) == ("WARNING", "exists")


def test_a_load_returns_and_logs_statistics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that were read, and seconds by phase."""
    info = ckpt_storage.save(STATE, tmp_path / "step-7")
    target = {"weight": torch.zeros(100_000), "step": 0}
    stats = ckpt_storage.load(target, tmp_path / "step-7")
    (line,) = lines_of(caplog, "load")
    assert stats.total_bytes >= 400_000
    assert (line["outcome"], line["save_id"]) == ("ok", info.save_id)
    assert (line["bytes"], set(stats.phase_s)) == (str(stats.total_bytes), {"plan", "load"})


def test_an_export_reports_what_it_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The report, its statistics and the line agree on the bytes."""
    ckpt_storage.save(STATE, tmp_path / "step-7")
    report = ckpt_storage.consolidate(tmp_path / "step-7")
    (line,) = lines_of(caplog, "export")
    assert report.stats is not None
    assert report.stats.total_bytes == report.total_bytes == int(line["bytes"])


def test_a_copy_logs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the save that was copied."""
    info = ckpt_storage.save(STATE, tmp_path / "step-7")
    ckpt_storage.copy(tmp_path / "step-7", tmp_path / "other")
    (line,) = lines_of(caplog, "copy")
    assert (line["outcome"], line["save_id"]) == ("ok", info.save_id)


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_repeated_requests_are_counted(
    mode: Any, server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Also those of a worker process."""
    server.faults([FaultRule(op="put", key=r"\.distcp", action="status", times=2)])
    with quick_saver(mode) as saver:
        handle = saver.save(STATE, "s3://bucket/retried", storage_options=server.storage_options)
        assert handle.result().slot == 1
    (line,) = lines_of(caplog, "save")
    assert int(line["retries"]) >= 1


def test_the_trainer_logs_what_its_worker_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning of the worker process reaches the handlers of the trainer, once."""
    with AsyncSaver(mode="process") as saver:
        saver.save({"opaque": re.compile("a")}, tmp_path / "step-1").result()
    warnings = [r for r in caplog.records if "only pickle can hold" in r.getMessage()]
    assert [record.levelname for record in warnings] == ["WARNING"]


STATS = OperationStats.of(
    [
        RankTiming(rank=4, phase_s={"plan": 9.0, "write": 1.0}, done_bytes=10),
        RankTiming(rank=5, phase_s={"write": 2.0}, done_bytes=30, retry_count=3),
    ],
    {"plan": 0.5, "write": 2.25},
)


def test_the_slowest_rank_is_the_one_that_moved_its_bytes_longest() -> None:
    """A rank that waited for others is not slow."""
    assert (STATS.slowest_rank, STATS.slowest_s, STATS.slowest_share) == (5, 2.0, 0.75)
    assert (STATS.seconds, STATS.total_bytes, STATS.retry_count) == (2.75, 40, 3)
    assert OperationStats.from_json(STATS.as_json()) == STATS


@pytest.mark.parametrize(
    "change",
    [
        *({key: None} for key in STATS.as_json()),
        {"bytes": -1},
        {"ranks": 1.5},
        {"retries": True},
        {"phase_s": {"write": "long"}},
        {"phase_s": {"write": -1.0}},
        {"slowest": {"rank": 0}},
    ],
)
def test_a_record_with_other_statistics_has_none(change: Mapping[str, object]) -> None:
    """What another release or a fault left there never fails a reader."""
    assert OperationStats.from_json({**STATS.as_json(), **change}) is None
