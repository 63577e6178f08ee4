"""The example's main job, end to end in processes of its own."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from integration_tools import EXAMPLES, finish
from limits import JOB_S


def processes_naming(text: str) -> list[str]:
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                commands.append(command)
    return commands


@pytest.mark.timeout(580)  # five jobs of torchrun, one after another
def test_main_job_on_a_local_folder(tmp_path: Path) -> None:
    """A run killed inside a save resumes bit-identically on 2 ranks, and closely on 1."""
    command = [sys.executable, str(EXAMPLES / "train_fsdp2.py"), "--url", str(tmp_path / "run")]
    command += ["--steps", "12", "--save-every", "4", "--other-ranks", "1"]
    code, output = finish(command, tmp_path, limit_s=1.5 * JOB_S)
    assert code == 0, output
    for sentence in (
        "committed checkpoints are step-00000004, step-00000008, step-00000012",
        "the model that transformers reads from it gives the same logits, bit for bit",
        "ok: the run ended inside the save of step 8",
        "ok: the newest committed checkpoint is step-00000004",
        "ok: the torn checkpoint is refused",
        "ok: the losses of steps 5 to 12 are bit-identical to the reference",
        "5. Resume on 1 instead of 2 ranks",
        "ok: the losses of 8 steps agree within",
        "All checks passed",
    ):
        assert sentence in output, output
    assert "FAILED" not in output
    assert processes_naming(str(tmp_path)) == []


@pytest.mark.timeout(580)
def test_main_job_on_the_embedded_s3_server(tmp_path: Path) -> None:
    """The same job passes on an S3 server, with every rank saving in a worker process."""
    command = [sys.executable, str(EXAMPLES / "train_fsdp2.py"), "--storage", "s3"]
    command += ["--saving", "process", "--steps", "6", "--save-every", "2", "--kill-at", "4"]
    code, output = finish([*command, "--other-ranks"], tmp_path, limit_s=1.5 * JOB_S)
    assert code == 0, output
    for sentence in (
        "Checkpoints go below s3://example/",
        "ok: the run ended inside the save of step 4",
        "ok: the newest committed checkpoint is step-00000002",
        "ok: the losses of steps 3 to 6 are bit-identical to the reference",
        "All checks passed",
    ):
        assert sentence in output, output
