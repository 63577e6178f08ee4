"""What a trainer and its worker process send each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ckpt_storage.coordination.keyvalue import StoreAddress

Step = Literal["propose", "decide", "accept", "write", "commit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """Begins a save; the descriptor of its arena follows.

    While the save lasts, the worker sends heartbeats of its rank under `heartbeat_key` of the store
    at `store`; None: the store cannot be reached from the worker.
    """

    url: str
    options: bytes
    staged: bytes
    arena_bytes: int
    global_ranks: tuple[int, ...]
    store: StoreAddress | None
    heartbeat_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCall:
    """Calls one step of the save, as `RankSave` has it."""

    step: Step
    argument: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishCall:
    """Ends the save; the response says whether the worker may be used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a call returned, or its error; `is_unexpected` if that is of no kind of ours."""

    value: Any = None
    is_unexpected: bool = False
