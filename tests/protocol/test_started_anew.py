"""Ranks that a launcher starts anew, over the store of those before them."""

from __future__ import annotations

import time

import pytest
from memory_keys import MemoryKeys
from rank_threads import (
    END_S,
    LOOK_S,
    TERMS,
    group,
    operations_on,
    quick,
    run,
    together,
    values,
    wait_until,
)

from ckpt_storage import PhaseTimeoutError, RankFailedError
from ckpt_storage.coordination.group import RankGroup
from ckpt_storage.coordination.keyvalue import LostStoreError
from ckpt_storage.options import Timeouts

__all__ = ["quick"]

pytestmark = pytest.mark.usefixtures("quick")


class EndedKeys(MemoryKeys):
    """A store as a process sees it that is ended as soon as it has left a message."""

    def __init__(self, keys: MemoryKeys) -> None:
        self._values, self._lock = keys._values, keys._lock  # noqa: SLF001  # the same memory
        self._has_ended = False

    def set(self, key: str, value: bytes, timeout_s: float) -> None:
        if not self._has_ended:
            super().set(key, value, timeout_s)
        self._has_ended = True

    def get(self, key: str, timeout_s: float) -> bytes | None:
        if self._has_ended:
            raise LostStoreError(f"ended before it read {key} within {timeout_s} s")
        return super().get(key, timeout_s)

    def has_all(self, keys: object, timeout_s: float) -> bool:
        raise LostStoreError(f"ended before it looked for {keys} within {timeout_s} s")

    def delete(self, key: str, timeout_s: float) -> None:
        raise LostStoreError(f"ended before it took {key} back within {timeout_s} s")


def leave_job(keys: MemoryKeys, *, number: int, url: str) -> None:
    """Leave what a job leaves that is ended while its ranks meet: a call, and answers to it."""
    for ranks in group(lambda: EndedKeys(keys), 3):
        ranks.number = number - 1
        with (
            pytest.raises(RankFailedError),
            ranks.operation("the test", timeouts=Timeouts()) as operation,
        ):
            operation.meet({"the checkpoint's URL": url})
    assert keys.keys[0] == "call"
    assert [key.split("/")[::2] for key in keys.keys[1:]] == [["here", "1"], ["here", "2"]]


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("url", [*TERMS.values(), "memory://other"])
@pytest.mark.parametrize("first", ["the coordinator", "the others"])
def test_messages_of_ranks_that_were_ended_are_not_taken_for_their_successors(
    number: int, url: str, first: str
) -> None:
    """All meet, and no operation fails, whatever operation those were in that were ended."""
    keys = MemoryKeys()
    leave_job(keys, number=number, url=url)
    old = set(keys.keys) - {"call"}
    call = keys.get("call", END_S)

    def body(ranks: RankGroup) -> list[list[bytes]]:
        if ranks.is_coordinator and first == "the others":
            time.sleep(20 * LOOK_S)  # the others answer the old call meanwhile
        elif not ranks.is_coordinator and first == "the coordinator":
            wait_until(lambda: keys.get("call", END_S) != call, "no new call")
        return [together(ranks) for _ in range(3)]

    assert values(run(group(keys, 3), body)) == [[[b"0", b"1", b"2"]] * 3] * 3
    left = MemoryKeys()
    for key in set(keys.keys) - old:
        left.set(key, b"", END_S)
    assert len(operations_on(left)) == 1, keys.keys


def test_a_rank_that_is_not_started_anew_is_named() -> None:
    """What its predecessor left is not taken for its coming; once it has come, all meet."""
    keys = MemoryKeys()
    leave_job(keys, number=1, url=TERMS["the checkpoint's URL"])
    ranks = group(keys, 3)

    def alone(ranks: RankGroup) -> str:
        with pytest.raises(PhaseTimeoutError) as caught:
            together(ranks, Timeouts(plan=0.5))
        return str(caught.value)

    told = values(run([ranks[0], ranks[2]], alone))
    assert all("Rank 1 of 3 has not come" in one for one in told), told

    def all_come(ranks: RankGroup) -> list[bytes]:
        if ranks.rank == 1:
            with pytest.raises(PhaseTimeoutError, match="given up before"):
                together(ranks)
        return together(ranks)

    assert values(run(ranks, all_come)) == [[b"0", b"1", b"2"]] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_interrupted_while_others_wait_is_named_at_once(rank: int) -> None:
    """It tells those that are there, and does not wait for those that are not."""

    def body(ranks: RankGroup) -> str:
        if ranks.rank == rank:
            with pytest.raises(SystemExit), ranks.operation("the test", timeouts=Timeouts()):
                raise SystemExit
            return "SystemExit"
        with pytest.raises(RankFailedError) as caught:
            together(ranks)
        assert caught.value.rank == rank
        return str(caught.value)

    begin_s = time.monotonic()
    told = values(run(group(MemoryKeys(), 3), body))
    assert time.monotonic() - begin_s < END_S / 2
    assert all("SystemExit" in one for one in told), told
