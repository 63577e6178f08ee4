"""Ranks that are threads of one process, over a store in its memory."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from ckpt_storage import CheckpointError, Timeouts
from ckpt_storage.coordination import operation as operation_module
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import KeyValues
from ckpt_storage.coordination.operation import Operation


class MemoryKeys(KeyValues):
    """A store for the threads of one process; each call is one operation of a dict."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore, "")
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes, _timeout_s: float) -> None:
        self._values[key] = bytes(value)

    def get(self, key: str, _timeout_s: float) -> bytes | None:
        return self._values.get(key)

    def has_all(self, keys: Sequence[str], _timeout_s: float) -> bool:
        return all(key in self._values for key in keys)

    def set_first(self, key: str, value: bytes, _timeout_s: float) -> None:
        self._values.setdefault(key, bytes(value))

    def delete(self, key: str, _timeout_s: float) -> None:
        self._values.pop(key, None)

    @property
    def keys(self) -> list[str]:
        return sorted(list(self._values))  # noqa: C414  # others add keys meanwhile


LOOK_S = 0.002
END_S = 60.0
"""After this a thread hangs; far longer than any test takes."""

LONG = Timeouts()
SLACK_S = 5.0
"""What is promised beyond a deadline."""

TERMS = {"the checkpoint's URL": "memory://x"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten what ranks wait for each other beyond their deadlines."""
    monkeypatch.setattr(operation_module, "_COORDINATOR_GRACE_S", 0.2)
    monkeypatch.setattr(operation_module, "_MEMBER_GRACE_S", 0.6)
    monkeypatch.setattr(operation_module, "_LEAVE_FAILED_S", 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How one rank ended: its value or its error, and after how long."""

    value: Any = None
    error: BaseException | None = None
    wall_s: float = 0.0


def group(keys: KeyValues | Callable[[], KeyValues], world_size: int) -> list[RankGroup]:
    """Return all ranks over one store, or each over what `keys` makes."""
    stores = [keys if isinstance(keys, KeyValues) else keys() for _ in range(world_size)]
    given = {"world_size": world_size, "look_s": LOOK_S}
    return [RankGroup(store, rank=rank, **given) for rank, store in enumerate(stores)]  # type: ignore[arg-type]


def run(ranks: Sequence[RankGroup], body: Callable[[RankGroup], object]) -> list[Ended]:
    """Run `body` as every rank, each in a thread; fail if one does not end."""
    ended: dict[int, Ended] = {}

    def main(one: RankGroup) -> None:
        begin_s, value, error = time.monotonic(), None, None
        try:
            value = body(one)
        except BaseException as caught:  # noqa: BLE001  # what a rank raised is what is tested
            error = caught
        ended[one.rank] = Ended(value=value, error=error, wall_s=time.monotonic() - begin_s)

    threads = [threading.Thread(target=main, args=(one,), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + END_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    assert len(ended) == len(ranks), f"ranks hang; ended: {ended}"
    return [ended[one.rank] for one in ranks]


def values(ended: Sequence[Ended]) -> list[Any]:
    for one in ended:
        if one.error is not None:
            raise one.error
    return [one.value for one in ended]


def errors(ended: Sequence[Ended]) -> list[CheckpointError]:
    """Return what the ranks raised; each must have raised an error of ours that travels."""
    found = []
    for rank, one in enumerate(ended):
        assert isinstance(one.error, CheckpointError), (rank, one)
        again = pickle.loads(pickle.dumps(one.error))
        assert (type(again), str(again)) == (type(one.error), str(one.error))
        found.append(one.error)
    return found


def operations_on(keys: MemoryKeys) -> set[str]:
    """Return the ids of operations of which word is left; fail on any word of none.

    Heartbeats do not count: a rank's last may come when all is over.
    """
    left = [key.split("/") for key in keys.keys if "/life/" not in key and key != "call"]
    assert {parts[0] for parts in left} <= {"op", "here"}, keys.keys
    return {parts[1] for parts in left}


def whole(operation: Operation, at: str = "", error: BaseException | None = None) -> list[bytes]:
    """Take every kind of step once; return what the last one gave. Raise `error` after `at`."""

    def reach(step: str) -> None:
        if error is not None and step == at:
            raise error

    own = b"%d" % operation.rank
    reach("early")
    operation.meet(TERMS)
    reach("met")
    gathered = operation.gather(own)
    assert gathered == ([b"%d" % i for i in range(operation.world_size)] if gathered else [])
    reach("gather")
    assert operation.scatter([item * 2 for item in gathered]) == own * 2
    reach("scatter")
    assert operation.broadcast(b"word" if operation.is_coordinator else b"") == b"word"
    reach("broadcast")
    if at == "last":
        operation.gather(own)
    reach("last")
    return operation.all_gather(own)


def together(ranks: RankGroup, timeouts: Timeouts = LONG) -> list[bytes]:
    with ranks.operation("the test", timeouts=timeouts) as operation:
        return whole(operation)


def wait_until(found: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + END_S / 2
    while not found():
        assert time.monotonic() < end_s, what
        time.sleep(LOOK_S)
