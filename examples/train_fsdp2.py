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
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn import functional
from tqdm import tqdm

from ckpt_storage import CheckpointStorageReader, CheckpointStorageWriter, list_checkpoints

TEXT_FILE = Path(__file__).parent / "data" / "alice.txt"

WINDOW_BYTES = 128
BATCH_COUNT = 16
"""Windows per step over all ranks together, so that another number of ranks sees the same data."""
NOISE = 0.02
"""Share of input bytes replaced by random ones: makes every step draw from the RNG."""
LEARNING_RATE = 1e-3


def tell(text: str) -> None:
    """Print one line on rank 0 only, above the progress bar if there is one."""
    if dist.get_rank() == 0:
        tqdm.write(text)


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network."""

    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations of shape (batch, window, width) to the same shape."""
        qkv = self.query_key_value(self.attention_norm(x))
        q, k, v = qkv.unflatten(-1, (3, self.head_count, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return x + cast("torch.Tensor", self.feed_forward(x))


class ByteModel(nn.Module):
    """A decoder-only transformer that predicts the next byte of a text."""

    def __init__(self, width: int = 96, head_count: int = 4, layer_count: int = 3) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(WINDOW_BYTES, width)
        self.blocks = nn.ModuleList(Block(width, head_count) for _ in range(layer_count))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 256, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, window, 256) for bytes of shape (batch, window)."""
        x = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return cast("torch.Tensor", self.out(self.norm(x)))


class Training(Stateful):
    """All that a run must remember, and how one step changes it.

    DCP calls `state_dict` when it saves and when it loads, and `load_state_dict` after
    a load. Every rank draws the same random numbers for the whole batch and then takes
    its own rows. One RNG state thus serves all ranks, on any number of them.
    """

    def __init__(self, text: bytes) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        if BATCH_COUNT % self.world_size:
            message = f"{BATCH_COUNT} windows a step cannot be shared by {self.world_size} ranks."
            raise SystemExit(message)
        torch.manual_seed(0)
        self.model = ByteModel()
        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

        self.step = 0
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        # One byte more than a window: the targets are the inputs, moved by one.
        self.windows = data.unfold(0, WINDOW_BYTES + 1, WINDOW_BYTES)
        self.order = torch.randperm(len(self.windows))
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this moment; DCP saves it, or loads into its tensors."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "step": self.step,
            "rng": torch.get_rng_state(),
            "data": {"order": self.order, "position": self.position},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that DCP has loaded."""
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
        logits = self.model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / self.world_size


class KilledWriter(CheckpointStorageWriter):
    """Dies as on a lost machine: its bytes are written, and nobody can have committed yet.

    DCP commits (`finish`) only after every rank has returned from `write_data`.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has to write, then kill the process."""
        written = super().write_data(plan, planner)
        written.wait()
        os.kill(os.getpid(), signal.SIGKILL)
        return written


def newest_checkpoint(url: str, storage_options: dict[str, Any]) -> str | None:
    """Return the URL of the newest committed checkpoint; all ranks call this and agree."""
    # One rank looks and tells the others: another rank may look a moment later and see more.
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        infos = list_checkpoints(url, storage_options=storage_options)
        found = [infos[-1].url if infos else None]
    dist.broadcast_object_list(found)
    return found[0]


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
    """Train up to `--steps`, from the newest committed checkpoint if there is one."""
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    training = Training(TEXT_FILE.read_bytes())
    storage_options = dict(options.storage_option)
    url = options.url or "./runs/train_fsdp2"
    log = RunLog(options.run_log)

    start = newest_checkpoint(url, storage_options) or options.start_from
    if start is not None:
        reader = CheckpointStorageReader(start, storage_options=storage_options)
        # Torch does not declare `load` and `save` as exported, so mypy --strict complains.
        dcp.load({"training": training}, storage_reader=reader)
        log.write_digest("resumed", training)
        tell(f"   resumed from {start} at step {training.step}")

    is_terminal = sys.stderr.isatty()
    bar = tqdm(
        total=options.steps,
        initial=training.step,
        unit="step",
        disable=not (is_terminal and training.rank == 0),
    )
    with bar:
        while training.step < options.steps:
            loss = training.train_step()
            log.write("step", training.step, loss=loss.hex())
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}")
            if not is_terminal and training.step % 10 == 0:
                tell(f"   step {training.step} of {options.steps}: loss {loss:.4f}")
            if training.step % options.save_every == 0 or training.step == options.steps:
                save(training, url, storage_options, kill_at=options.kill_at, log=log)
    dist.destroy_process_group()


def save(
    training: Training,
    url: str,
    storage_options: dict[str, Any],
    *,
    kill_at: int | None,
    log: RunLog,
) -> None:
    """Save everything as the checkpoint `step-<number>` below `url` (a collective)."""
    is_victim = training.step == kill_at and training.rank == training.world_size - 1
    writer_type = KilledWriter if is_victim else CheckpointStorageWriter
    name = f"step-{training.step:08d}"
    log.write_digest("saving", training)
    dcp.save(
        {"training": training},
        checkpoint_id=name,
        storage_writer=writer_type(url, storage_options=storage_options),
    )
    tell(f"   saved {name}")
    log.write("saved", training.step)


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
    add("--kill-at", type=int, metavar="STEP", help="kill a rank inside the save of this step")
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
