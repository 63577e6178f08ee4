"""What the front doors share: DCP's steps over an `Operation`."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from .operation import Operation

_Plan = TypeVar("_Plan")


# Of most values the type alone tells; asking the protocol takes 10 us.
_NEVER_STATEFUL = frozenset(
    {torch.Tensor, torch.nn.Parameter, DTensor, dict, list, tuple, str, bytes, int, float, bool}
)


def is_stateful(value: object) -> bool:
    """Return whether DCP asks `value` for a state dict of its own."""
    return type(value) not in _NEVER_STATEFUL and isinstance(value, Stateful)


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with the state dict of each `Stateful` in its place, as DCP does."""
    return {
        key: value.state_dict() if is_stateful(value) else value for key, value in state.items()
    }


def takes(function: object, name: str) -> bool:
    """Return whether a planner's method takes the parameter `name`, which DCP added later."""
    return name in inspect.signature(function).parameters  # type: ignore[arg-type]  # a method


def exchange_plans(
    operation: Operation,
    local: Any,  # noqa: ANN401  # plans are torch's
    decide: Callable[[list[Any]], Sequence[_Plan]],
) -> _Plan:
    """Send local plans to the coordinator, let it `decide(plans)`, return what is for this rank."""
    if operation.world_size == 1:
        return decide([local])[0]
    packed = operation.gather(pickle.dumps(local))
    answers: list[bytes] = []
    if operation.is_coordinator:
        answers = [
            pickle.dumps(plan)
            for plan in decide([pickle.loads(plan) for plan in packed])  # noqa: S301  # our ranks
        ]
    plan: _Plan = pickle.loads(operation.scatter(answers))  # noqa: S301  # as above
    return plan
