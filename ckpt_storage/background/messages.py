"""What a trainer and its worker process send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ckpt_storage.coordination.keyvalue import StoreAddress

Step = Literal["propose", "decide", "accept", "write", "commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Begins a save; the descriptor of its arena, with the copied state, follows.

    `staged` is the pickled `StagedPlan`: the place of each item in the arena. `options` are the
    pickled `SaveOptions`.
    """

    url: str
    options: bytes
    staged: bytes
    arena_bytes: int
    global_ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest:
    """Has the worker send heartbeats of its rank until the save ends; it sends no response.

    It sends them while the trainer sends none. `number` is that of the operation.
    """

    store: StoreAddress
    key: str
    number: int
    beat_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """Calls one step of the save, as `RankSave` has it."""

    step: Step
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogMessage:
    """What the worker logs; the trainer logs it, with its own handlers."""

    level: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishCall:
    """Ends the save; the response says whether the worker may be used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a call returned, or its error.

    `is_unexpected`: the error is of a kind that the worker does not expect, so the state of the
    worker after it is unknown.
    """

    value: Any = None
    is_unexpected: bool = False
