"""The driver behind `python examples/train_fsdp2.py`: starts runs, kills a rank, compares losses.

It prints each step and the result of each check.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from ckpt_storage import CheckpointInProgressError, CheckpointStorageReader, list_checkpoints

TRAIN_SCRIPT = Path(__file__).with_name("train_fsdp2.py")

RELATIVE_TOLERANCE = 1e-5
"""How far the losses on another number of ranks may lie from the reference.

They add up the same gradients in another order. Float32 rounds each sum, and every step
builds on the step before, so the curves drift apart by a little.
"""


def say(text: str) -> None:
    """Print at once, so that lines of the driver and of its runs stay in order."""
    print(text, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one finished run left in its log."""

    stderr: str
    """What a doomed run wrote there; that of other runs went to the terminal."""
    losses: dict[int, str]
    """Loss after each step, as `float.hex`, which keeps every bit."""
    digests: dict[int, str]
    """Digest of the full state before each save that began."""
    saved: list[int]
    resumed: tuple[int, str] | None
    """Step and digest of the state right after loading."""
    difference: str | None = None
    """Largest difference of logits after the export, as `float.hex`."""


def read_run(log: Path, stderr: str) -> Run:
    """Return the run whose log is `log`."""
    events = [json.loads(line) for line in log.read_text().splitlines()]
    resumed = [(e["step"], e["digest"]) for e in events if e["event"] == "resumed"]
    exported = [e["difference"] for e in events if e["event"] == "exported"]
    return Run(
        stderr=stderr,
        losses={e["step"]: e["loss"] for e in events if e["event"] == "step"},
        digests={e["step"]: e["digest"] for e in events if e["event"] == "saving"},
        saved=[e["step"] for e in events if e["event"] == "saved"],
        resumed=resumed[0] if resumed else None,
        difference=exported[0] if exported else None,
    )


def stop(process: subprocess.Popen[Any]) -> None:
    """End a child if it still runs: politely, so that torchrun ends its ranks, then by force."""
    if process.poll() is None:
        process.terminate()
        try:
            # Torchrun itself gives its ranks 30 s before it kills them.
            process.wait(timeout=45)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Driver:
    """Starts runs, says in plain sentences what happens, and remembers failed checks."""

    def __init__(
        self, options: argparse.Namespace, url: str, storage_options: dict[str, Any], logs: Path
    ) -> None:
        self.options = options
        self.url = url
        self.storage_options = storage_options
        self.logs = logs
        self.failed_count = 0

    def check(self, *, ok: bool, claim: str) -> bool:
        """Say whether `claim` holds, and return it."""
        say(f"   {'ok' if ok else 'FAILED'}: {claim}")
        self.failed_count += not ok
        return ok

    def launch(self, name: str, rank_count: int, *extra: str, is_doomed: bool = False) -> Run:
        """Run the training script under torchrun with checkpoints below `<url>/<name>`.

        Raises `SystemExit` if the run does not end in time, or fails unless `is_doomed`.
        """
        serial = len(list(self.logs.glob("*.jsonl")))
        log = self.logs / f"{serial}.jsonl"
        log.touch()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(rank_count), str(TRAIN_SCRIPT)]
        command += ["--url", f"{self.url}/{name}", "--run-log", str(log), *extra]
        command += ["--steps", str(self.options.steps)]
        command += ["--save-every", str(self.options.save_every)]
        command += ["--saving", self.options.saving]
        for key, value in self.storage_options.items():
            text = value if isinstance(value, str) else str(value).lower()
            command += ["--storage-option", f"{key}={text}"]
        started_s = time.monotonic()
        errors = self.logs / f"{serial}.err"
        with contextlib.ExitStack() as stack:
            # A doomed run ends in pages of expected tracebacks: shown only if a check fails.
            stderr = stack.enter_context(errors.open("w")) if is_doomed else None
            process = subprocess.Popen(  # noqa: S603  # the command is our own
                command,
                # One thread a rank: more would only compete. Unbuffered: see `say`.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                stderr=stderr,
                start_new_session=True,
            )
            stack.callback(stop, process)
            try:
                exit_code = process.wait(timeout=self.options.deadline_s)
            except subprocess.TimeoutExpired:
                raise SystemExit(f"FAILED: no end after {self.options.deadline_s} s.") from None
        say(f"   (ended with code {exit_code} after {time.monotonic() - started_s:.1f} s)")
        if is_doomed and exit_code == 0:
            raise SystemExit("FAILED: the run should have been killed, and was not.")
        if not is_doomed and exit_code != 0:
            raise SystemExit("FAILED: the run broke off; its error is above.")
        return read_run(log, errors.read_text() if is_doomed else "")

    def committed(self, name: str) -> list[str]:
        """Return the names of the committed checkpoints of a run, oldest first."""
        root = f"{self.url}/{name}"
        return [i.name for i in list_checkpoints(root, storage_options=self.storage_options)]

    def main_job(self) -> None:
        """Do the whole job."""
        options = self.options
        ranks: int = options.ranks
        kill_at: int = options.kill_at
        last_good = (kill_at - 1) // options.save_every * options.save_every
        names = {step: f"step-{step:08d}" for step in range(options.steps + 1)}
        torn, good = names[kill_at], names[last_good]
        say(f"Checkpoints go below {self.url}.")

        say(f"1. Reference: {options.steps} steps on {ranks} ranks, and nothing goes wrong.")
        reference = self.launch("reference", ranks, "--consolidate")
        first, last = (float.fromhex(reference.losses[step]) for step in (1, options.steps))
        self.check(ok=last < first, claim=f"the model learns: loss {first:.4f} to {last:.4f}")
        committed = self.committed("reference")
        self.check(
            ok=committed == [names[step] for step in reference.saved],
            claim=f"committed checkpoints are {', '.join(committed)}",
        )

        self.check(
            ok=reference.difference == float(0).hex(),
            claim="all ranks have consolidated the last checkpoint to safetensors, and the model "
            "that transformers reads from it gives the same logits, bit for bit",
        )

        say(f"2. The same run again, but rank {ranks - 1} is killed while it saves {torn}.")
        killed = self.launch("killed", ranks, "--kill-at", str(kill_at), is_doomed=True)
        inside = kill_at in killed.digests and kill_at not in killed.saved
        if not self.check(ok=inside, claim=f"the run ended inside the save of step {kill_at}"):
            say(killed.stderr)
            return
        self.check_identical(killed, reference, 1, kill_at)
        file_count, size_bytes = self.leftovers(f"{self.url}/killed/{torn}")
        self.check(
            ok=size_bytes > 0,
            claim=f"the torn save left {file_count} files, {size_bytes:,} bytes",
        )

        say("3. What can be resumed from?")
        newest = self.committed("killed")[-1:]
        self.check(ok=newest == [good], claim=f"the newest committed checkpoint is {good}")
        self.check_in_progress(f"{self.url}/killed/{torn}")

        say(f"4. Resume on {ranks} ranks, as if the machine had come back.")
        resumed = self.launch("killed", ranks)
        self.check_loaded(resumed, last_good, killed.digests[last_good])
        self.check_identical(resumed, reference, last_good + 1, options.steps)
        self.check(
            ok=resumed.digests[options.steps] == reference.digests[options.steps],
            claim="so is the full state at the end, parameters and optimizer included",
        )
        self.check(
            ok=torn in self.committed("killed"),
            claim=f"{torn} was saved again over the torn checkpoint and is committed now",
        )

        for number, other in enumerate(options.other_ranks, start=5):
            say(f"{number}. Resume on {other} instead of {ranks} ranks, from the same {good}.")
            start_from = f"{self.url}/killed/{good}"
            run = self.launch(f"on-{other}", other, "--start-from", start_from)
            self.check_loaded(run, last_good, killed.digests[last_good])
            self.check_close(run, reference)

    def leftovers(self, url: str) -> tuple[int, int]:
        """Return how many files lie below `url`, and their size in bytes."""
        fs, path = fsspec.core.url_to_fs(url, **self.storage_options)
        fs.invalidate_cache()
        files = fs.find(path, detail=True)
        return len(files), sum(info["size"] for info in files.values())

    def check_in_progress(self, url: str) -> None:
        """Check that a reader refuses the torn checkpoint for the right reason."""
        try:
            CheckpointStorageReader(url, storage_options=self.storage_options).read_metadata()
        except CheckpointInProgressError as error:
            self.check(ok=True, claim=f"the torn checkpoint is refused: {error}")
        else:
            self.check(ok=False, claim="the torn checkpoint is refused")

    def check_loaded(self, run: Run, step: int, digest: str) -> None:
        """Check that `run` began with exactly the state that was saved at `step`."""
        self.check(
            ok=run.resumed == (step, digest),
            claim="the loaded parameters, optimizer states, RNG and data position are "
            f"bit-identical to those saved (sha256 {digest[:16]})",
        )

    def check_identical(self, run: Run, reference: Run, first: int, last: int) -> None:
        """Check that `run` made the steps `first` to `last` with the losses of the reference."""
        expected = {step: reference.losses[step] for step in range(first, last + 1)}
        self.check(
            ok=run.losses == expected,
            claim=f"the losses of steps {first} to {last} are bit-identical to the reference",
        )

    def check_close(self, run: Run, reference: Run) -> None:
        """Check that the losses of `run` agree with the reference within the tolerance."""
        worst = 0.0
        for step, loss_hex in run.losses.items():
            loss, expected = float.fromhex(loss_hex), float.fromhex(reference.losses[step])
            worst = max(worst, abs(loss - expected) / expected)
        self.check(
            ok=bool(run.losses) and worst <= RELATIVE_TOLERANCE,
            claim=f"the losses of {len(run.losses)} steps agree within {RELATIVE_TOLERANCE:g} "
            f"(largest relative difference {worst:.1e})",
        )


@contextlib.contextmanager
def embedded_s3() -> Iterator[tuple[str, dict[str, Any]]]:
    """Run an in-memory S3 server; yield the URL of its bucket and the storage options."""
    # The server of this repository's tests.
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
    from s3_server import S3Server  # noqa: PLC0415  # found there

    with S3Server() as server:
        server.create_bucket("example")
        # The server takes any key. Never put a real one on a command line: s3fs finds yours
        # in the environment or in ~/.aws.
        options = {"endpoint_url": server.endpoint_url, "key": "example", "secret": "example"}
        yield "s3://example", options


def drive(options: argparse.Namespace) -> int:
    """Do the main job in a place of its own and return the exit code."""
    # Ctrl-C unwinds by itself; a polite kill must unwind too, or torchrun would be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="train-fsdp2-")))
        logs = folder / "logs"
        logs.mkdir()
        storage_options = dict(options.storage_option)
        if options.storage == "s3":
            url, storage_options = stack.enter_context(embedded_s3())
        else:
            url = options.url or str(folder)
        # A name of its own: a run that finds older checkpoints would resume from them.
        driver = Driver(options, f"{url.rstrip('/')}/{uuid.uuid4().hex[:8]}", storage_options, logs)
        driver.main_job()
    took_s = time.monotonic() - started_s
    if driver.failed_count:
        say(f"{driver.failed_count} checks FAILED ({took_s:.0f} s).")
        return 1
    say(f"All checks passed ({took_s:.0f} s).")
    return 0
