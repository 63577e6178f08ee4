"""`follow` and `watch`: each checkpoint once, oldest first, and what a poll asks of a storage."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_tools import call
from dcp_cases import seeded
from limits import HANG_S
from s3_server import FaultRule, S3Server

import ckpt_storage
from ckpt_storage import CheckpointInfo, InvalidInputError, follow

POLL_S = 0.01


def save(url: str | Path, seed: int = 0, **options: Any) -> CheckpointInfo:
    state = {"weight": seeded(seed, 100)}
    return ckpt_storage.save(state, url, sync_files=False, **options)


def names(infos: Iterator[CheckpointInfo], count: int) -> list[str]:
    return [info.name for info in itertools.islice(infos, count)]


def test_each_checkpoint_is_yielded_once_oldest_first(tmp_path: Path) -> None:
    """Those that are there by the numbers in their names, then each that is committed."""
    for step in (1000, 900):
        save(tmp_path / f"step-{step}", step)
    infos = follow(tmp_path, poll_s=POLL_S, idle_s=HANG_S)
    assert names(infos, 2) == ["step-900", "step-1000"]
    save(tmp_path / "step-1100", 1100)
    assert names(infos, 1) == ["step-1100"]


def test_it_follows_a_job_that_runs(tmp_path: Path) -> None:
    """Every step of a saver in another thread comes out once, in order."""

    def train() -> None:
        for step in range(10):
            save(tmp_path / f"step-{step}", step)

    job = threading.Thread(target=train)
    job.start()
    assert names(follow(tmp_path, poll_s=POLL_S, idle_s=HANG_S), 10) == [
        f"step-{n}" for n in range(10)
    ]
    job.join()
    assert list(follow(tmp_path, after=9, poll_s=POLL_S, idle_s=POLL_S)) == []


def test_after_leaves_out_what_an_earlier_follower_had(tmp_path: Path) -> None:
    """Steps up to that number."""
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step:08d}", step)
    infos = follow(tmp_path, after=2, poll_s=POLL_S, idle_s=POLL_S)
    assert [info.name for info in infos] == ["step-00000003"]


def test_a_time_in_microseconds_is_one_number(tmp_path: Path) -> None:
    """A number may have any length: this has 20 digits."""
    times = [20251231235959000005, 20260101000000000004]
    for each in reversed(times):
        save(tmp_path / f"at-{each}")
    for after, expected in ((1000, times), (times[0], times[1:]), (times[1], [])):
        infos = follow(tmp_path, after=after, poll_s=POLL_S, idle_s=POLL_S)
        assert [info.name for info in infos] == [f"at-{each}" for each in expected]


def test_a_name_without_a_number_is_yielded_for_each_save(tmp_path: Path) -> None:
    """A run that overwrites "latest" is followed; the same save is not yielded again."""
    infos = follow(tmp_path, poll_s=POLL_S, idle_s=HANG_S)
    for step in (1, 2):
        saved = save(tmp_path / "latest", step, overwrite=True, step=step)
        assert next(infos).save_id == saved.save_id


def test_a_step_that_was_deleted_and_saved_again_is_yielded_again(tmp_path: Path) -> None:
    """Once a poll has seen that it was gone."""
    save(tmp_path / "step-1")
    infos = follow(tmp_path, poll_s=POLL_S, idle_s=HANG_S)
    assert names(infos, 1) == ["step-1"]
    shutil.rmtree(tmp_path / "step-1")
    save(tmp_path / "step-2")
    assert names(infos, 1) == ["step-2"]
    save(tmp_path / "step-1")
    assert names(infos, 1) == ["step-1"]


def test_what_is_not_committed_is_not_yielded(tmp_path: Path) -> None:
    """Files of a save under way, and folders of other programs."""
    whole = save(tmp_path / "step-1")
    (tmp_path / "logs").mkdir()
    half = tmp_path / "step-2"
    shutil.copytree(tmp_path / "step-1", half)
    shutil.rmtree(half / "commits")
    (half / ".metadata").unlink()
    infos = list(follow(tmp_path, poll_s=POLL_S, idle_s=POLL_S))
    assert infos == [whole]


def test_a_root_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    """It holds none until then."""
    assert list(follow(tmp_path / "run", poll_s=POLL_S, idle_s=POLL_S)) == []


@pytest.mark.parametrize("options", [{"poll_s": 0}, {"poll_s": float("nan")}, {"idle_s": -1}])
def test_seconds_that_cannot_be_are_refused_at_once(options: Any, tmp_path: Path) -> None:
    """By the call, not by the first step of the iteration."""
    with pytest.raises(InvalidInputError):
        follow(tmp_path, **options)


def test_a_poll_takes_one_listing_and_reads_of_new_folders(server: S3Server) -> None:
    """Of a run of many steps a poll asks for what is new, and for dead attempts in turn."""
    options: Any = {"storage_options": server.storage_options}
    for step in range(10):
        save(f"s3://bucket/polls/step-{step}", step, **options)
    infos = follow("s3://bucket/polls", poll_s=POLL_S, idle_s=HANG_S, **options)
    assert len(list(itertools.islice(infos, 10))) == 10
    server.reset_counters()
    save("s3://bucket/polls/step-10", 10, **options)
    server.reset_counters()
    assert names(infos, 1) == ["step-10"]
    requests = [(request.op, request.key) for request in server.requests]
    reads = [key for op, key in requests if "step-" in key]
    assert {key.split("/")[1] for key in reads} == {"step-10"}
    assert len(reads) <= 4, requests


def test_a_poll_without_news_is_one_listing(server: S3Server) -> None:
    """What was yielded is not read again."""
    options: Any = {"storage_options": server.storage_options}
    for step in range(3):
        save(f"s3://bucket/idle/step-{step}", step, **options)
    infos = follow("s3://bucket/idle", poll_s=POLL_S, idle_s=10 * POLL_S, **options)
    assert names(infos, 3) == ["step-0", "step-1", "step-2"]
    server.reset_counters()
    assert list(infos) == []
    assert {request.op for request in server.requests} == {"list"}


def test_a_poll_that_fails_is_made_up_for(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A storage that throttles longer than requests are repeated costs one poll, and a warning."""
    options: Any = {"storage_options": server.storage_options}
    save("s3://bucket/blips/step-1", **options)
    server.faults([FaultRule(op="list", action="status")])
    retry = ckpt_storage.RetryPolicy(attempt_count=1)
    infos = follow("s3://bucket/blips", poll_s=POLL_S, idle_s=HANG_S, retry=retry, **options)
    assert names(infos, 1) == ["step-1"]
    assert "the next poll looks again" in caplog.text


def test_a_poll_that_hangs_is_made_up_for(
    server: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A storage that does not answer within the deadline costs one poll, and a warning."""
    options: Any = {"storage_options": server.storage_options}
    save("s3://bucket/hangs/step-1", **options)
    server.faults([FaultRule(op="list", action="hang", times=0)])

    def is_logged() -> bool:
        return "the next poll looks again" in caplog.text

    def restore_service() -> None:
        end_s = time.monotonic() + HANG_S
        while not is_logged() and time.monotonic() < end_s:
            time.sleep(0.01)
        server.faults([])

    thread = threading.Thread(target=restore_service)
    thread.start()
    timeout = ckpt_storage.Timeouts(load=1.0)
    infos = follow("s3://bucket/hangs", poll_s=POLL_S, idle_s=HANG_S, timeout=timeout, **options)
    assert names(infos, 1) == ["step-1"]
    thread.join()
    assert is_logged()


def test_watch_prints_each_checkpoint_and_runs_a_command(tmp_path: Path) -> None:
    """The command gets the URL and the step in its environment; its failure shows at the end."""
    run, marks = tmp_path / "run", tmp_path / "marks"
    for step in (1, 2):
        save(run / f"step-{step:08d}", step)
    script = f"import os; print(os.environ['CKPT_NAME'], file=open({str(marks)!r}, 'a'))"
    command = f'{sys.executable} -c "{script}"'
    done = call("watch", run, "--poll", "0.01", "--idle", "0.01", "--exec", command)
    assert done.exit_code == 0, done.output
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "step-00000001",
        "step-00000002",
    ]
    assert marks.read_text(encoding="utf-8").split() == ["step-00000001", "step-00000002"]
    done = call("watch", run, "--poll", "0.01", "--idle", "0.01", "--exec", "exit 3")
    assert done.exit_code == 1
    assert "exit code 3" in done.stderr


def test_watch_prints_json_lines(tmp_path: Path) -> None:
    """Each line is one object, as a list of checkpoints has it."""
    info = save(tmp_path / "step-00000001")
    done = call("watch", tmp_path, "--poll", "0.01", "--idle", "0.01", "--json")
    (line,) = done.stdout.splitlines()
    body = json.loads(line)
    assert (body["schema"], body["save_id"]) == ("ckpt_storage.cli.watch/1", info.save_id)
    assert body["stats"]["total_bytes"] == info.stats.total_bytes if info.stats else None
