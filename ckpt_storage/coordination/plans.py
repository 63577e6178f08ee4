"""States as DCP takes them, and messages of ours that ride in its plans.

Under bare `dcp.save` and `dcp.load` a message rides in a plan (decision 3). It takes effect when it
is unpickled: it enters the inbox of the thread that runs the collective. So it arrives even when
the planner drops the plan, as `DefaultSavePlanner` does with `enable_plan_caching=True`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What one rank tells the coordinator about the save or load it is in.

    `terms` are as for `Operation.meet`. `nonce` is new for every save on every rank. `items` are
    those of the plan that it rides in; pickled together, they travel once.
    """

    nonce: str
    rank: int
    terms: Mapping[str, str]
    items: Sequence[Any] = ()  # WriteItem

    def __reduce__(self) -> tuple[Any, ...]:
        return (_receive_hello, (self.nonce, self.rank, dict(self.terms), self.items))


@dataclass(slots=True)
class Inbox:
    """What arrived in one thread: hellos by rank, answers by nonce; perhaps old copies of them."""

    hellos: dict[int, Hello] = field(default_factory=dict)
    answers: dict[str, object] = field(default_factory=dict)


_local = threading.local()


def inbox(*, anew: bool = False) -> Inbox:
    """Return the inbox of the calling thread; an empty one, for a new save or load, if `anew`."""
    if anew or not hasattr(_local, "inbox"):
        _local.inbox = Inbox()
    found: Inbox = _local.inbox
    return found


def _receive_hello(nonce: str, rank: int, terms: dict[str, str], items: Sequence[Any]) -> Hello:
    hello = inbox().hellos[rank] = Hello(nonce=nonce, rank=rank, terms=terms, items=items)
    return hello
