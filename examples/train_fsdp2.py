"""Train a small language model with FSDP2 and keep its checkpoints with ckpt_storage.

Under torchrun this is a plain training script. It resumes from the newest committed
checkpoint below `--url`, or starts from nothing:

    torchrun --nproc-per-node 2 examples/train_fsdp2.py --steps 60 --url ./runs/demo

Without torchrun it is a driver that starts such runs itself, kills one of them in the
middle of a save, resumes it on the same and on other numbers of ranks, and checks what
comes back, bit for bit. It exits with 1 if a check fails:

    python examples/train_fsdp2.py
    python examples/train_fsdp2.py --storage s3

This file is the training script. The driver lies in `main_job.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_storage import AsyncSaver, CheckpointManager, SaveHandle, consolidate, load

TEXT_FILE = Path(__file__).parent / "data" / "alice.txt"

WINDOW_BYTES = 128
BATCH_COUNT = 16
"""Windows per step over all ranks together, so that another number of ranks sees the same data."""
NOISE = 0.02
"""Share of input bytes replaced by random bytes: makes every step draw from the RNG."""
LEARNING_RATE = 1e-3


def print_once(text: str) -> None:
    """Print one line on rank 0 only, above a progress bar."""
    if dist.get_rank() == 0:
        tqdm.write(text)


def new_model() -> LlamaForCausalLM:
    """Return a very small Llama, with random weights, that predicts the next byte of a text."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=WINDOW_BYTES,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class Training(Stateful):
    """All that a run must remember, and how one step changes it.

    `ckpt_storage` calls `state_dict` when it saves and when it loads, and `load_state_dict`
    after a load, as DCP does. Every rank draws the same random numbers for the whole batch and
    then takes its own rows. One RNG state thus serves all ranks, on any number of them.
    """

    def __init__(self, text: bytes) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if BATCH_COUNT % self.world_size:
            message = f"{BATCH_COUNT} windows a step cannot be shared by {self.world_size} ranks."
            raise SystemExit(message)
        torch.manual_seed(0)
        self.model = new_model()
        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

        self.step = 0
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        # One byte more than a window: the targets are the inputs, moved by a byte.
        self.windows = data.unfold(0, WINDOW_BYTES + 1, WINDOW_BYTES)
        self.order = torch.randperm(len(self.windows))
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this moment, to be saved, or to be loaded into its tensors."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "rng": torch.get_rng_state(),
            "data": {"order": self.order, "position": self.position},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.step = state_dict["step"]
        self.order = state_dict["data"]["order"]
        self.position = state_dict["data"]["position"]
        torch.set_rng_state(state_dict["rng"])

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of this rank, and move the data position on."""
        if self.position + BATCH_COUNT > len(self.windows):
            self.order = torch.randperm(len(self.windows))
            self.position = 0
        windows = self.windows[self.order[self.position : self.position + BATCH_COUNT]]
        self.position += BATCH_COUNT
        inputs, targets = windows[:, :-1], windows[:, 1:]
        noise = torch.randint(256, inputs.shape)
        inputs = torch.where(torch.rand(inputs.shape) < NOISE, noise, inputs)
        return inputs.chunk(self.world_size)[self.rank], targets.chunk(self.world_size)[self.rank]

    def train_step(self) -> float:
        """Make one optimizer step and return the loss of the whole batch."""
        inputs, targets = self.next_batch()
        logits = self.model(input_ids=inputs).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / self.world_size


class FatalPlanner(DefaultSavePlanner):
    """Kills the training process as on a lost machine, once all ranks know what they write.

    A planner may work in a worker process, which is lost with the machine: `victim_pid` is the
    process that trains.
    """

    def __init__(self, victim_pid: int) -> None:
        super().__init__()
        self.victim_pid = victim_pid

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:  # noqa: ARG002  # nobody comes back
        """End this process and the process that trains, while the other ranks write."""
        os.kill(self.victim_pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def newest_checkpoint(url: str, storage_options: dict[str, Any]) -> str | None:
    """Return the URL of the newest committed checkpoint; all ranks call this and agree."""
    with CheckpointManager(url, storage_options=storage_options) as manager:
        info = manager.resume_info()
    return None if info is None else info.url


def leaves(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for everything in nested dicts, sorted by name."""
    for key, value in sorted(state.items()):
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def full_digest(state: dict[str, Any]) -> str:
    """Return one SHA-256 over all values of `state`, gathered from all ranks (a collective)."""
    digest = hashlib.sha256()
    for name, value in leaves(state):
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(full, torch.Tensor):
            digest.update(f"{name} {full.dtype} {tuple(full.shape)}\n".encode())
            digest.update(full.contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {full!r}\n".encode())
    return digest.hexdigest()


class RunLog:
    """Appends what the driver wants to compare to a file of JSON lines, from rank 0 only."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def write(self, event: str, step: int, **values: str) -> None:
        """Append one line."""
        if self.path is not None and dist.get_rank() == 0:
            with self.path.open("a") as file:
                file.write(json.dumps({"event": event, "step": step, **values}) + "\n")

    def write_digest(self, event: str, training: Training) -> None:
        """Append one line with the digest of the full state (a collective)."""
        if self.path is not None:
            digest = full_digest(training.state_dict())
            self.write(event, training.step, digest=digest)


def train(options: argparse.Namespace) -> None:
    """Train up to `--steps`, from the newest committed checkpoint if any exists."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    training = Training(TEXT_FILE.read_bytes())
    storage_options = dict(options.storage_option)
    url = options.url or "./runs/train_fsdp2"
    log = RunLog(options.run_log)

    start = newest_checkpoint(url, storage_options) or options.start_from
    if start is not None:
        load({"training": training}, start, storage_options=storage_options)
        log.write_digest("resumed", training)
        print_once(f"   resumed from {start} at step {training.step}")

    is_terminal = sys.stderr.isatty()
    bar = tqdm(
        total=options.steps,
        initial=training.step,
        unit="step",
        disable=not (is_terminal and training.rank == 0),
    )
    with bar, AsyncSaver(mode=options.saving, timeout=timedelta(minutes=5)) as saver:
        saves = Saves(saver, url, storage_options, options.kill_at, log)
        while training.step < options.steps:
            loss = training.train_step()
            log.write("step", training.step, loss=loss.hex())
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
            if not is_terminal and training.step % 10 == 0:
                print_once(f"   step {training.step} of {options.steps}: loss {loss:.4f}")
            if training.step % options.save_every == 0 or training.step == options.steps:
                saves.begin(training)
        saves.end()
    if options.consolidate:
        export(training, f"{url}/step-{training.step:08d}", storage_options, log)
    dist.destroy_process_group()


def export(training: Training, url: str, storage_options: dict[str, Any], log: RunLog) -> None:
    """Consolidate the checkpoint at `url`, and check that transformers reads the same model.

    All ranks call this. The weight files and their index lie in the folder `hf` below the
    checkpoint; `from_pretrained` needs them in a local folder, together with the configuration.
    """
    report = consolidate(url, storage_options=storage_options)
    print_once(f"   consolidated into {', '.join(file.name for file in report.files)}")
    prompt = torch.arange(32).unsqueeze(0)
    training.model.eval()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # as above
    with torch.no_grad():
        expected = training.model(input_ids=prompt).logits
        if training.rank == 0:
            with tempfile.TemporaryDirectory() as folder:
                fs, path = fsspec.core.url_to_fs(report.output_url, **storage_options)
                fs.get(f"{path.rstrip('/')}/", folder, recursive=True)
                training.model.config.save_pretrained(folder)
                model = LlamaForCausalLM.from_pretrained(folder)
            difference = (model(input_ids=prompt).logits - expected).abs().max().item()
            log.write("exported", training.step, difference=difference.hex())
    print_once("   transformers has read it back")


class Saves:
    """The checkpoints of one run, saved in the background one after another."""

    def __init__(
        self,
        saver: AsyncSaver,
        url: str,
        storage_options: dict[str, Any],
        kill_at: int | None,
        log: RunLog,
    ) -> None:
        self.saver = saver
        self.url = url
        self.storage_options = storage_options
        self.kill_at = kill_at
        self.log = log
        self.last: tuple[int, SaveHandle] | None = None

    def begin(self, training: Training) -> None:
        """Begin to save everything as `step-<number>` below the URL; all ranks call this."""
        self.end()
        self.log.write_digest("saving", training)
        is_fatal = training.step == self.kill_at
        is_victim = is_fatal and training.rank == training.world_size - 1
        handle = self.saver.save(
            {"training": training},
            f"{self.url}/step-{training.step:08d}",
            storage_options=self.storage_options,
            planner=FatalPlanner(os.getpid()) if is_victim else None,
        )
        self.last = training.step, handle
        if is_fatal:
            self.end()

    def end(self) -> None:
        """Wait until the save under way is committed, or raise why it failed."""
        if self.last is not None:
            step, handle = self.last
            self.last = None
            print_once(f"   saved {handle.result().name}")
            self.log.write("saved", step)


def key_value(text: str) -> tuple[str, Any]:
    """Parse `key=value`; true and false become booleans, all else stays text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        message = f"{text!r} is not of the form key=value"
        raise argparse.ArgumentTypeError(message)
    return key, {"true": True, "false": False}.get(value, value)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line of the script and of the driver."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=60, help="train up to this step (60)")
    add("--save-every", type=int, default=20, metavar="STEPS", help="steps between saves (20)")
    add("--url", help="where checkpoints go (./runs/train_fsdp2; the driver: a temporary folder)")
    add("--storage-option", type=key_value, action="append", default=[], metavar="KEY=VALUE")
    add("--saving", choices=["thread", "process"], default="thread", help="save in a (thread)")
    add("--kill-at", type=int, metavar="STEP", help="kill a rank inside the save of this step")
    add("--consolidate", action="store_true", help="export the last checkpoint as safetensors")
    script = parser.add_argument_group("under torchrun")
    script.add_argument("--start-from", metavar="URL", help="used if --url has no checkpoint yet")
    script.add_argument("--run-log", type=Path, metavar="FILE", help="append losses and digests")
    driver = parser.add_argument_group("without torchrun (the driver)")
    add = driver.add_argument
    add("--storage", choices=["local", "s3"], default="local", help="s3: an embedded server")
    add("--ranks", type=int, default=2, help="ranks of the reference and of the killed run (2)")
    add("--other-ranks", type=int, nargs="*", default=[4, 1], help="resume on these, too (4 1)")
    add("--deadline-s", type=float, default=240.0, help="seconds that one run may take (240)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.save_every < 1:
        parser.error("--steps and --save-every must be 1 or more")
    if "RANK" in os.environ:
        return options
    if any(n < 1 or BATCH_COUNT % n for n in [options.ranks, *options.other_ranks]):
        parser.error(f"every number of ranks must divide {BATCH_COUNT}, the windows of a step")
    if options.storage == "s3" and options.url:
        parser.error("--storage s3 starts a server of its own: leave out --url")
    if options.kill_at is None:
        options.kill_at = 2 * options.save_every
    if options.kill_at % options.save_every or not (
        options.save_every < options.kill_at <= options.steps
    ):
        parser.error("--kill-at must be a save after the first: a multiple of --save-every")
    return options


if __name__ == "__main__":
    parsed = parse()
    if "RANK" in os.environ:
        train(parsed)
    else:
        # Not at the top: a rank needs none of it.
        from main_job import drive

        sys.exit(drive(parsed))
