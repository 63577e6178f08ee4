"""Which key of a state cannot be saved, where a planner or a copy only says what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from ckpt_storage.errors import CheckpointError, InvalidInputError
from ckpt_storage.format.dtypes import DTYPES
from ckpt_storage.loads.resolving import dtype_name

from .hostcopy import MAKE_PLAIN, fault_of
from .ties import named_tensors


def check_plan(plan: SavePlan) -> None:
    """Raise `InvalidInputError` for tensors of whose elements nobody knows the bytes."""
    for item in plan.items:
        data = item.tensor_data
        if data is None:
            continue
        dtype = dtype_name(data.properties.dtype)
        if any(isinstance(length, torch.SymInt) for length in data.size):
            reason = "it is a nested tensor"
        elif dtype not in DTYPES:
            is_quantised = dtype.startswith(("qint", "quint"))
            reason = "it is quantised" if is_quantised else f"its dtype {dtype} cannot be stored"
        else:
            continue
        raise InvalidInputError(
            f"{item.index.fqn} cannot be saved: {reason}.", phase="plan", next_step=MAKE_PLAIN
        )


@contextmanager
def naming_refused(state: Mapping[str, Any]) -> Iterator[None]:
    """Turn what a planner raises at into `InvalidInputError` naming the key, if known."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        refusal = _refusal_of_plan(error, state)
        if refusal is None:
            raise
        raise refusal from error


def _refusal_of_plan(error: Exception, state: Mapping[str, Any]) -> InvalidInputError | None:
    """Return what a planner failed on, by its key; None if torch's own plans each tensor alone."""
    if isinstance(error, RecursionError):
        return endless(state, phase="plan", verb="saved")
    for fqn, tensor in named_tensors(state, ""):
        failure = _failure_alone(fqn, tensor)
        if failure is not None:
            reason = fault_of(tensor) or f"{type(failure).__name__}: {str(failure).rstrip('.')}"
            kind = type(tensor).__qualname__
            return InvalidInputError(
                f"{fqn} ({kind}) cannot be saved: {reason}.", phase="plan", next_step=MAKE_PLAIN
            )
    return None


def _failure_alone(fqn: str, tensor: torch.Tensor) -> Exception | None:
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner({fqn: tensor}, is_coordinator=True)
        planner.create_global_plan([planner.create_local_plan()])
    except Exception as failure:  # noqa: BLE001  # what a kind of tensor raises
        return failure
    return None


def endless(state: Mapping[str, Any], *, phase: str, verb: str) -> InvalidInputError:
    """Return the error for a state in which Python's recursion had no end; it names the key."""
    key, holds_itself = _deepest(state)
    reason = "it is a container that holds itself" if holds_itself else "it is nested too deeply"
    return InvalidInputError(
        f"{key} cannot be {verb}: {reason}.", phase=phase, next_step="Break the circle."
    )


def _deepest(state: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the key of the first container that holds itself, else that of the deepest one."""
    keys: list[str] = []
    deepest: list[str] = []
    opened, done = [id(state)], set[int]()
    under = [_children(state)]
    while under:
        child = next(under[-1], None)
        if child is None:
            under.pop()
            done.add(opened.pop())
            del keys[max(0, len(under) - 1) :]
            continue
        key, value = child
        if id(value) in opened:
            return ".".join([*keys, str(key)]), True
        if isinstance(value, Mapping | list | tuple) and id(value) not in done:
            keys.append(str(key))
            opened.append(id(value))
            under.append(_children(value))
            deepest = max(deepest, keys, key=len)[:3]
    return ".".join(deepest), False


def _children(value: Any) -> Iterator[tuple[object, object]]:  # noqa: ANN401  # any container
    return iter(value.items()) if isinstance(value, Mapping) else enumerate(value)
