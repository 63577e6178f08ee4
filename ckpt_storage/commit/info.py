"""`CheckpointInfo`, which `save` and `list_checkpoints` return, and the user record."""

from __future__ import annotations

import contextlib
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from ckpt_storage.errors import InvalidInputError
from ckpt_storage.format.commit_record import SlotRecord
from ckpt_storage.observe.stats import OperationStats

_NOT_FINITE = frozenset({"nan", "inf", "-inf"})

_MAX_USER_BYTES = 16 << 10
"""The limit for a user record, which every list of checkpoints reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUsage:
    """The bytes of the shard files of one checkpoint.

    `group_bytes` are the bytes by group of values; "" stands for values of no group.
    `apparent_bytes` is their sum, what a copy takes. `own_bytes` are those of files that share no
    storage with another checkpoint by hard links: what a deletion frees. On storages without hard
    links both are the same.
    """

    group_bytes: Mapping[str, int] = field(hash=False)
    apparent_bytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """A committed checkpoint as its commit record describes it.

    `name` is the last component of `url`. `save_id`, `slot` and `created_at` (RFC 3339, the saver's
    clock) are None for a checkpoint of stock torch (`format` "dcp"). `export` is the URL of the
    weight files that the same save made. `step` and `metrics` are those that a `CheckpointManager`
    recorded with the save; a metric may be NaN or infinite. `part` is empty for a whole checkpoint;
    a partial checkpoint holds values of the save `of`, chosen by the patterns `include` and
    `exclude`. `usage` has the bytes of its files, None unless the caller asked for them. `stats`
    are measurements of the save until its commit began, None if the record has none.
    `stock_metadata` is whether torch's own readers can load it. `problem` says why a folder with
    the format "unreadable" could not be read.
    """

    url: str
    name: str
    format: str
    save_id: str | None = None
    slot: int | None = None
    created_at: str | None = None
    export: str | None = None
    stock_metadata: bool = True
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)
    part: Mapping[str, Any] = field(default_factory=dict, hash=False)
    usage: StorageUsage | None = None
    stats: OperationStats | None = None
    problem: str | None = None

    @classmethod
    def of(cls, url: str, record: SlotRecord, *, name: str | None = None) -> Self:
        """Return the info of the checkpoint at `url` with this commit record."""
        step = record.user.get("step")
        # After thinning, the time of the whole save.
        created_at = record.part.get("created_at") if record.is_thinned else None
        created_at = created_at if isinstance(created_at, str) else record.created_at
        return cls(
            url=url,
            name=url.rstrip("/").rpartition("/")[2] if name is None else name,
            format="ckpt_storage",
            save_id=record.save_id,
            slot=record.slot,
            created_at=created_at,
            stock_metadata=record.stock is not None and record.stock_entries != 0,
            step=step if type(step) is int and step >= 0 else None,
            metrics=_metrics_of(record.user),
            part=record.part,
            stats=OperationStats.from_json(record.stats),
        )


def user_record(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user record of a step and its metrics, which may be numbers of any library."""
    recorded: dict[str, float | str] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            what = f"The metric {name!r} is {value!r:.80}, which is not a number."
            raise InvalidInputError(what, next_step="Pass a number, or omit the metric.") from error
        # JSON has no NaN and no infinity.
        recorded[str(name)] = number if math.isfinite(number) else str(number)
    user: dict[str, Any] = {"step": operator.index(step)}
    if recorded:
        user["metrics"] = recorded
    size_bytes = len(json.dumps(user).encode())
    if size_bytes > _MAX_USER_BYTES:
        raise InvalidInputError(
            f"Step {step} has {size_bytes} bytes of metrics; at most {_MAX_USER_BYTES} are kept.",
            next_step="Record only metrics that retention uses; log the others elsewhere.",
        )
    return user


def _metrics_of(user: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of a user record, and ignore values of other savers."""
    recorded = user.get("metrics")
    numbers: dict[str, float] = {}
    for name, value in recorded.items() if isinstance(recorded, dict) else ():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number or (isinstance(value, str) and value in _NOT_FINITE):
            with contextlib.suppress(OverflowError):
                numbers[name] = float(value)
    return numbers
