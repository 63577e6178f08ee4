"""The default save planner: torch's, with correct chunks for the layouts of `loads/layouts.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from ckpt_storage.format.manifest import PlannerData, find_int_keys, int_keys_of
from ckpt_storage.loads.layouts import LocalBox, boxes_of, unwrap


class BoxSavePlanner(DefaultSavePlanner):
    """As `DefaultSavePlanner`, but correct for the layouts of `loads/layouts.py`."""

    keeps_plain_values = True
    """Plain values are written as they are; see `plain_names`."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        """Flatten the state; tensors that wrap others are replaced by the wrapped tensors."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        unwrap(self.state_dict, self.mappings)
        self.mappings = PlannerData(self.mappings, int_keys=find_int_keys(state_dict))
        self._boxes: dict[str, list[LocalBox]] = {}
        for fqn, value in self.state_dict.items():
            if type(value) is DTensor and (boxes := boxes_of(value)) is not None:
                self._boxes[fqn] = boxes

    def create_local_plan(self) -> SavePlan:
        """Return the items of this rank, one for each box."""
        plan = super().create_local_plan()
        if self._boxes:
            items = [piece for item in plan.items for piece in _pieces_of(item, self._boxes)]
            self.plan = plan = replace(plan, items=items)
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the plans of all ranks, and the dicts with int keys that they name."""
        plans, metadata = super().create_global_plan(all_plans)
        int_keys = {path for plan in all_plans for path in int_keys_of(plan.planner_data)}
        data = PlannerData(metadata.planner_data or {}, int_keys=int_keys)
        return plans, replace(metadata, planner_data=data)

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401  # as torch's
        """Return the value of an item: of a tensor in several boxes, the elements of that box."""
        boxes = self._boxes.get(index.fqn)
        if boxes is None:
            return super().lookup_object(index)
        box = next(box for box in boxes if box.offsets == tuple(index.offset or ()))
        return box.view_of(self.state_dict[index.fqn].to_local())


def _pieces_of(item: WriteItem, boxes_of_fqn: Mapping[str, list[LocalBox]]) -> list[WriteItem]:
    """Return an item for each box of its tensor; the item itself where the tensor is one box."""
    boxes, data = boxes_of_fqn.get(item.index.fqn), item.tensor_data
    if boxes is None or data is None:
        return [item]
    return [
        replace(
            item,
            index=MetadataIndex(item.index.fqn, box.chunk.offsets),
            tensor_data=TensorWriteData(
                chunk=box.chunk, properties=data.properties, size=data.size
            ),
        )
        for box in boxes
    ]
