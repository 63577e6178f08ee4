"""The example's main job, end to end in processes of its own."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fork_server import run_script
from integration_tools import EXAMPLES, ROOT, finish
from limits import JOB_S


def run_driver(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(EXAMPLES / "train_fsdp2.py"), *arguments]
    return finish(command, folder)


def processes_naming(text: str) -> list[str]:
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                commands.append(command)
    return commands


def test_main_job_on_a_local_folder(tmp_path: Path) -> None:
    """A run killed inside a save resumes bit-identically on 2 ranks, and closely on 1."""
    words = ["--steps", "12", "--save-every", "4", "--other-ranks", "1"]
    code, output = run_driver(tmp_path, *words, "--url", str(tmp_path / "run"))
    assert code == 0, output
    for sentence in (
        "committed checkpoints are step-00000004, step-00000008, step-00000012",
        "the model that transformers reads from it gives the same logits, bit for bit",
        "ok: the run ended inside the save of step 8",
        "ok: the newest committed checkpoint is step-00000004",
        "ok: the torn one is refused",
        "ok: the losses of steps 5 to 12 are bit-identical to the reference",
        "5. Resume on 1 instead of 2 ranks",
        "ok: the losses of 8 steps agree within",
        "All checks passed",
    ):
        assert sentence in output, output
    assert "FAILED" not in output
    assert processes_naming(str(tmp_path)) == []


def test_main_job_on_the_embedded_s3_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same job passes on an S3 server, with every rank saving in a worker process."""
    monkeypatch.syspath_prepend(EXAMPLES)
    main_job = importlib.import_module("main_job")

    class Forks:
        """Stands for torchrun: its ranks are forks of a process that has imported torch."""

        def __init__(
            self, command: list[str], *, env: dict[str, str], stderr: Any, **_: Any
        ) -> None:
            at = command.index(str(main_job.TRAIN_SCRIPT))
            environment = {**env, "PYTHONPATH": f"{EXAMPLES}:{ROOT}"}
            self.code, output = run_script(
                *command[at:], folder=tmp_path, environment=environment, ranks=int(command[at - 1])
            )
            print(output, file=stderr)  # None: to standard output

        def wait(self, timeout: float) -> int:
            del timeout
            return self.code

        def poll(self) -> int:
            return self.code

    stub = SimpleNamespace(Popen=Forks, TimeoutExpired=TimeoutError)
    monkeypatch.setattr(main_job, "subprocess", stub)
    asked = {"steps": 6, "save_every": 2, "kill_at": 4, "saving": "process"}
    options = argparse.Namespace(**asked, ranks=2, other_ranks=[], deadline_s=JOB_S)
    with main_job.embedded_s3() as (url, storage_options):
        driver = main_job.Driver(options, f"{url}/x", storage_options, tmp_path)
        driver.main_job()
    output = capsys.readouterr().out
    assert driver.failed_count == 0, output
    for sentence in (
        "Checkpoints go below s3://example/",
        "ok: the run ended inside the save of step 4",
        "ok: the newest committed checkpoint is step-00000002",
        "ok: the losses of steps 3 to 6 are bit-identical to the reference",
    ):
        assert sentence in output, output
