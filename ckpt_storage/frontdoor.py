"""What the front doors share: DCP's steps over an `Operation`.

Knows DCP's planners, plans and state dicts; knows no storage. Called by `saving`, `loading` and
`saver`.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Mapping
from typing import Any, TypeVar

from torch.distributed.checkpoint.stateful import Stateful

from .operation import Operation

__all__ = ["exchange_plans", "plain_state", "takes"]

_Plan = TypeVar("_Plan")


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with the state dict of each `Stateful` in its place, as DCP does."""
    return {
        key: value.state_dict() if isinstance(value, Stateful) else value
        for key, value in state.items()
    }


def takes(function: object, name: str) -> bool:
    """Return whether a planner's method takes the parameter `name`, which DCP added later."""
    return name in inspect.signature(function).parameters  # type: ignore[arg-type]  # a method


def exchange_plans(
    operation: Operation,
    local: _Plan,
    decide: Any,  # noqa: ANN401  # plans are torch's
) -> _Plan:
    """Send local plans to the coordinator, let it `decide(plans)`, return this rank's plan."""
    if operation.world_size == 1:
        plans: list[_Plan] = decide([local])
        return plans[0]
    packed = operation.gather(pickle.dumps(local))
    answers: list[bytes] = []
    if operation.is_coordinator:
        answers = [
            pickle.dumps(plan)
            for plan in decide([pickle.loads(plan) for plan in packed])  # noqa: S301  # our ranks
        ]
    plan: _Plan = pickle.loads(operation.scatter(answers))  # noqa: S301  # as above
    return plan
