"""A job that saves with torch_checkpointing: `python checkpointing_job.py '{"url": ..., ...}'`.

Each rank prints one line of JSON: what each save and the load said. Alone, or under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from limits import HANG_S
from rank_threads import wait_until
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

import ckpt_storage
from ckpt_storage.commit import attempt
from ckpt_storage.errors import StorageError
from ckpt_storage.integrations.torch_checkpointing import (
    CheckpointStorageFormat,
    CheckpointStorageResharder,
    manager_config,
)
from ckpt_storage.saves.file_streams import FileStream

ROWS = 4096


def weight(step: int) -> torch.Tensor:
    return torch.arange(ROWS * 16, dtype=torch.float32).reshape(ROWS, 16) + step


def gather_on_cpu(_self: object, data: object, process_group: Any = None) -> dict[int, Any]:
    """Gather as theirs does on CUDA devices, which it insists on."""
    payloads: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(payloads, data, group=process_group)
    return dict(enumerate(payloads))


def async_config() -> AsyncCheckpointSaverConfig:
    """Return the options that their documentation gives for CPUs; only a hang exceeds the limit."""
    staging = CheckpointStagerConfig(
        use_pinned_memory=False,
        use_shared_memory=True,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=int(HANG_S))
    return AsyncCheckpointSaverConfig(staging_config=staging, process_config=process)


def sabotage(where: str, rank: int, step: int) -> None:
    """Kill the process that writes in the save of `step`, or fail a write."""
    module: Any = attempt
    take_slot, close = module.take_slot, FileStream.close
    counts: dict[str, int] = {}

    def comes(point: str, at_rank: int) -> bool:
        counts[point] = counts.get(point, 0) + 1
        return where == point and rank == at_rank

    def closing(stream: FileStream) -> None:
        save_count = counts["saves"] = counts.get("saves", 0) + ("model" in stream.name)
        if save_count == step and comes("write", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if save_count == step and (comes("error", 1) or comes("overtaken", 1)):
            raise StorageError("The disk is on fire.", kind="other")
        if save_count == step and comes("overtaken", 0):
            deadline: Any = stream._save._deadline  # noqa: SLF001  # nothing public waits for it
            wait_until(deadline.has_failed, "the failure of the other rank")
            raise StorageError("The write was not begun.", kind="not-begun")
        close(stream)

    def taking(*arguments: Any, **fields: Any) -> Any:
        slot_count = counts["slots"] = counts.get("slots", 0) + 1
        if slot_count == step and comes("before the commit", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        taken = take_slot(*arguments, **fields)
        if slot_count == step and comes("after the commit", 0):
            os.kill(os.getpid(), signal.SIGKILL)
        return taken

    module.take_slot = taking
    FileStream.close = closing  # type: ignore[method-assign, assignment]  # what a fault does


def outcome_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  # what a user would see
        return f"{type(error).__name__}: {error}"
    return "ok"


def run(options: Mapping[str, Any]) -> dict[str, Any]:  # noqa: C901  # one job, in order
    url, is_async = options["url"], options.get("mode") == "async"
    is_distributed = "RANK" in os.environ
    mesh = None
    if is_distributed:
        dist.init_process_group("gloo")
        manager_class: Any = DefaultMetadataManager
        manager_class._all_gather_pickled_data = gather_on_cpu  # noqa: SLF001  # CUDA only
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank() if is_distributed else 0

    def sharded(tensor: torch.Tensor) -> Any:
        return tensor if mesh is None else distribute_tensor(tensor, mesh, [Shard(0)])

    faults = (options["fault"], rank, 2) if "fault" in options else None
    more: dict[str, Any] = {}
    if faults and is_async:
        more = {"subprocess_init_fn": sabotage, "subprocess_init_args": faults}
    elif faults:
        sabotage(*faults)
    reads_ours = options.get("reads_ours", False)
    resharder = CheckpointStorageResharder() if reads_ours else DefaultResharder()
    items = {"model": ItemSpec(resharder=resharder)}
    config = manager_config(
        url,
        is_async=is_async,
        save=async_config() if is_async else None,
        storage_options=options.get("storage_options"),
        timeout=options.get("timeout_s", 60),
        items=items,
        **more,
    )
    if options.get("native"):
        # Their direct I/O refuses what is not aligned.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        config = CheckpointManager.Config(
            save=SyncCheckpointSaverConfig(), storage_config=storage, items=items
        )
    manager = CheckpointManager(config)
    answers: dict[str, Any] = {"rank": rank, "saves": []}

    def save(step: int, state: dict[str, Any]) -> None:
        future = manager.save(f"{url}/step-{step}", state)
        if future is not None:
            future.result()

    for step in options.get("steps", []):
        state: dict[str, Any] = {
            "model": {"weight": sharded(weight(step)), "bias": torch.full((3,), float(step))}
        }
        if options.get("native"):
            # An item without a resharder, and thus without metadata.
            state["step"] = step if options.get("same", True) else step + rank
        if reads_ours:
            ckpt_storage.save(state, f"{url}/step-{step}")
            continue
        answers["saves"].append(outcome_of(partial(save, step, state)))
        if answers["saves"][-1] != "ok":
            break
    if "load" in options:
        target = {"weight": sharded(torch.zeros(ROWS, 16)), "bias": torch.zeros(3)}
        kind = CheckpointStorageFormat if reads_ours else None
        manager.load(f"{url}/step-{options['load']}", into={"model": target}, metadata_format=kind)
        loaded = target["weight"]
        whole = loaded if mesh is None else loaded.full_tensor()
        answers["is_equal"] = torch.equal(whole, weight(options["load"]))
        answers["bias"] = target["bias"].tolist()
    if not answers["saves"] or answers["saves"][-1] == "ok":
        manager.close()
    return answers


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(run(json.loads(sys.argv[1])))}\n")
    sys.stdout.flush()
    # A manager whose writer is dead does not close, and a rank that is gone is not awaited.
    os._exit(0)
