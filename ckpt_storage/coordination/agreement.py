"""How ranks agree under bare `dcp.save`: messages that ride in DCP's plans (decision 3).

A message takes effect when it is unpickled: it enters the inbox of the thread that runs the
collective. So it arrives even when the planner drops the plan that carried it, as
`DefaultSavePlanner` does with `enable_plan_caching=True`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .failures import check_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What one rank tells the coordinator about the save it is in.

    `terms` maps the name of everything ranks must share to its value, as text. `nonce` is new for
    every save on every rank. `items` are those of the plan that it rides in; pickled together, they
    travel once.
    """

    nonce: str
    rank: int
    host: str
    terms: Mapping[str, str]
    items: Sequence[Any] = ()  # WriteItem

    def __reduce__(self) -> tuple[Any, ...]:
        return (_receive_hello, (self.nonce, self.rank, self.host, dict(self.terms), self.items))


@dataclass(slots=True)
class Inbox:
    """Messages that arrived in one thread: hellos by rank, answers by the nonce they answer.

    Copies of old messages may arrive too, when a planner copies its plans; their nonces differ.
    """

    hellos: dict[int, Hello] = field(default_factory=dict)
    answers: dict[str, object] = field(default_factory=dict)


_local = threading.local()


def inbox() -> Inbox:
    """Return the inbox of the calling thread."""
    found = getattr(_local, "inbox", None)
    if found is None:
        found = _local.inbox = Inbox()
    return found


def clear_inbox() -> None:
    """Forget what arrived in the calling thread; called before each save's first collective."""
    _local.inbox = Inbox()


def _receive_hello(
    nonce: str, rank: int, host: str, terms: dict[str, str], items: Sequence[Any]
) -> Hello:
    hello = Hello(nonce=nonce, rank=rank, host=host, terms=terms, items=items)
    inbox().hellos[rank] = hello
    return hello


def check_agreement(hellos: Sequence[Hello], *, phase: str) -> None:
    """Raise `RankMismatchError` listing value -> ranks unless all hellos have equal terms."""
    check_terms({hello.rank: hello.terms for hello in hellos}, phase=phase)
