"""Load plans that travel folded.

Under `dcp.load` the coordinator gets the plans of all ranks and gives each its own back. Torch's
planners pass them on without a look, so that nothing on the coordinator grows with tensors x ranks.
"""

from __future__ import annotations

import pickle
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, ReadItem


class FoldedPlan(LoadPlan):
    """A load plan whose items, once it has travelled, are unpickled when somebody asks for them."""

    def __reduce__(self) -> tuple[Any, ...]:
        own = vars(self)
        if "folded" not in own:
            own["sent"] = pickle.dumps(self.items)
        folded = own.get("folded") or own["sent"]
        return _arrived, (folded, self.storage_data, self.planner_data)

    def __getattr__(self, name: str) -> list[ReadItem]:
        own = vars(self)
        if name != "items" or "folded" not in own:
            raise AttributeError(name)
        # A planner may change the list: from now on it counts.
        items: list[ReadItem] = pickle.loads(own.pop("folded"))  # noqa: S301  # our ranks
        own["items"] = items
        return items

    def unless_changed(self, plan: LoadPlan) -> LoadPlan:
        """Return what came back as `plan`: with the items that were sent, if nobody looked."""
        own = vars(self)
        if "sent" in own and vars(plan).get("folded") == own["sent"]:
            return LoadPlan(self.items, plan.storage_data, plan.planner_data)
        return plan


def _arrived(folded: bytes, *others: Any) -> FoldedPlan:  # noqa: ANN401  # a planner's own
    plan = FoldedPlan([], *others)
    own = vars(plan)
    del own["items"]
    own["folded"] = folded
    return plan
