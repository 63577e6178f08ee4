"""Names by which several managers of one process group keep their meetings apart.

Knows torch's groups; knows no storage. Called by `manager`.
"""

from __future__ import annotations

import threading
import weakref

import torch.distributed as dist

__all__ = ["give_back_lane", "lane_of"]

_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def lane_of(process_group: dist.ProcessGroup | None) -> str:
    """Return a lane that no other manager of the group uses; ranks make them in the same order."""
    group = _group_of(process_group)
    if group is None:
        return "manager"
    with _lock:
        number = _counts[group] = _counts.get(group, 0) + 1
    return f"manager-{number}"


def give_back_lane(process_group: dist.ProcessGroup | None) -> None:
    """Count the lane that was given last as never given: no manager came of it."""
    group = _group_of(process_group)
    if group is not None:
        with _lock:
            _counts[group] -= 1


def _group_of(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if process_group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return process_group
