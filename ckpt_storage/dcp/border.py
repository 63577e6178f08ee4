"""The border to DCP: what its calls tell, and what may leave ours: errors and plans."""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ckpt_storage.errors import CheckpointError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def at_dcp_border(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let only exceptions out that pickle both ways: others would hang the ranks they are sent to.

    Ours say what happened, so they come without the frames inside this package.
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
            except Exception:  # noqa: BLE001  # any failure means: cannot travel
                raise CheckpointError(
                    f"{type(error).__name__}: {error}",
                    next_step="The traceback of the failing rank says where.",
                ) from error
            raise

    return wrapped


def rank_of_call(kwargs: Mapping[str, Any]) -> int:
    """Return the rank that DCP set a plug-in up for: torch tells it only those that take it."""
    rank: int | None = kwargs.get("rank")
    if rank is not None:
        return rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@dataclass(frozen=True, slots=True)
class Rider:
    """A message that rides in a plan (decision 3), and takes effect when it is unpickled.

    It enters the inbox of the thread that runs the collective. So it arrives even when the planner
    drops the plan, as `DefaultSavePlanner` does with `enable_plan_caching=True`.
    """

    key: object
    content: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self.key, self.content)


_local = threading.local()


def inbox() -> dict[Any, Any]:
    """Return what riders brought to the calling thread, by their keys; perhaps old copies."""
    found: dict[Any, Any] = vars(_local).setdefault("inbox", {})
    return found


def _receive(key: object, content: Any) -> Rider:  # noqa: ANN401  # of any kind
    inbox()[key] = content
    return Rider(key, content)


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
