"""A load planner that needs no targets: what it is not told of, the checkpoint tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

__all__ = ["WholePlanner"]


class WholePlanner(DefaultLoadPlanner):
    """Loads the targets given to it, and all else that the checkpoint has, on the CPU.

    What was loaded is in `loaded`: the nested targets, and the rest under flat names.

    Args:
        wanted: tells whether a name is loaded for which there is no target; default: all are.

    """

    def __init__(self, wanted: Callable[[str], bool] = lambda _: True) -> None:
        super().__init__()
        self.loaded: dict[str, Any] = {}
        self._wanted = wanted

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        """Make targets for what has none."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        known: Mapping[str, Any] = self.state_dict
        found = {} if metadata is None else metadata.state_dict_metadata
        self.loaded = dict(state_dict)
        for fqn, item in found.items():
            if fqn in known or not self._wanted(fqn):
                continue
            self.loaded[fqn] = None
            if isinstance(item, TensorStorageMetadata):
                self.loaded[fqn] = torch.empty(item.size, dtype=item.properties.dtype)
        super().set_up_planner(self.loaded, metadata, is_coordinator)
