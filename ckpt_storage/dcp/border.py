"""The border to DCP: the arguments of its calls, the errors it may get, and what plans carry."""

from __future__ import annotations

import functools
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ckpt_storage.errors import CheckpointError
from ckpt_storage.store import Location

_P = ParamSpec("_P")
_R = TypeVar("_R")


def at_dcp_border(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Raise only exceptions that pickle both ways: others would hang the ranks they are sent to.

    A `CheckpointError` is raised without the frames inside this package.
    """

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except CheckpointError as error:
            raise error.with_traceback(None)  # noqa: B904  # the same error, so no other cause
        except Exception as error:
            try:
                pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
            except Exception:  # noqa: BLE001  # any failure means: it does not pickle
                raise CheckpointError(
                    f"{type(error).__name__}: {error}",
                    next_step="See the traceback of the failing rank.",
                ) from error
            raise

    return wrapped


def is_location(
    checkpoint_id: str | os.PathLike[str],
    parse: Callable[[str | os.PathLike[str]], Location] = Location.of,
) -> bool:
    """Return whether `checkpoint_id` is a path or URL of a storage that `parse` takes."""
    try:
        parse(checkpoint_id)
    except CheckpointError:
        return False
    return True


def rank_of_call(kwargs: Mapping[str, Any]) -> int:
    """Return the rank that DCP set a plug-in up for; older torch does not pass it."""
    rank: int | None = kwargs.get("rank")
    if rank is not None:
        return rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class PiggybackMessage:
    """A message in a plan (decision 3), which is received when the plan is unpickled.

    It enters `received_messages` of the thread that runs the collective. So it arrives even when
    the planner drops the plan, as `DefaultSavePlanner` does with `enable_plan_caching=True`.
    """

    key: object
    content: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.key, self.content)


_local = threading.local()


def received_messages() -> dict[Any, Any]:
    """Return the content of messages that the calling thread received, by key; perhaps stale."""
    messages: dict[Any, Any] = vars(_local).setdefault("messages", {})
    return messages


def _receive(key: object, content: Any) -> PiggybackMessage:  # noqa: ANN401  # of any kind
    received_messages()[key] = content
    return PiggybackMessage(key, content)


class PackedLoadPlan(LoadPlan):
    """A load plan that is pickled once, and whose items are unpickled when they are read.

    DCP sends each plan to the coordinator and back. Few planners read the items on the way, so the
    coordinator unpickles none, and a rank goes on with the items that it sent.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        fields = vars(self)
        if "packed" not in fields:
            fields["sent"] = pickle.dumps(self.items)
        packed = fields.get("packed") or fields["sent"]
        return _unpack, (packed, self.storage_data, self.planner_data)

    def __getattr__(self, name: str) -> list[ReadItem]:
        fields = vars(self)
        if name != "items" or "packed" not in fields:
            raise AttributeError(name)
        # A planner may change the list, so from now on the list is what is sent.
        items: list[ReadItem] = pickle.loads(fields.pop("packed"))  # noqa: S301  # our ranks
        fields["items"] = items
        return items

    def unless_changed(self, plan: LoadPlan) -> LoadPlan:
        """Return the received `plan`, with this plan's items if no other rank unpickled them."""
        fields = vars(self)
        if "sent" in fields and vars(plan).get("packed") == fields["sent"]:
            return LoadPlan(self.items, plan.storage_data, plan.planner_data)
        return plan


def _unpack(packed: bytes, *others: Any) -> PackedLoadPlan:  # noqa: ANN401  # a planner's own
    plan = PackedLoadPlan([], *others)
    fields = vars(plan)
    del fields["items"]
    fields["packed"] = packed
    return plan
