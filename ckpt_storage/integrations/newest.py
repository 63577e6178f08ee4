"""The newest committed checkpoint of a manager, the same one on every rank.

Knows managers and how ranks agree. Called by adapters that must know it before they load.
"""

from __future__ import annotations

import pickle

import torch.distributed as dist

from ckpt_storage.coordination_torch import coordinator_of
from ckpt_storage.info import CheckpointInfo
from ckpt_storage.manager import CheckpointManager
from ckpt_storage.options import Timeouts
from ckpt_storage.reports import as_checkpoint_errors

__all__ = ["newest_checkpoint"]


def newest_checkpoint(
    manager: CheckpointManager,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeouts: Timeouts,
) -> CheckpointInfo | None:
    """Return `latest` of the coordinator's manager, None if there is none.

    All ranks of the group call. Another rank may look a moment later and see more, so one looks
    for all. Raises as `CheckpointManager.latest`, on every rank.
    """
    what = f"the look for checkpoints below {manager.url}"
    coordinator = coordinator_of(process_group)
    with (
        coordinator.operation(what, timeouts=timeouts) as operation,
        as_checkpoint_errors(what, operation.rank),
    ):
        operation.meet({"root": manager.url})
        operation.phase("load")
        packed = b""
        if operation.is_coordinator:
            packed = pickle.dumps(manager.latest())
        newest: CheckpointInfo | None = pickle.loads(operation.broadcast(packed))  # noqa: S301  # our own ranks
        return newest
